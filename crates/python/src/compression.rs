//! Compresses and decompresses bytes with a model, like `gpt2 compress` and `gpt2 decompress`.

use std::path::PathBuf;
use std::sync::Arc;

use candle_gpt2_compression::{Compressed, Compressor};
use candle_gpt2_engine::{BUILT_IN, DeviceChoice, LoadedModel, ModelOptions, WeightDType};
use candle_gpt2_kernels::KvDType;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::errors::{Result, value_error};
use crate::model::{Model, hub, short_name};
use crate::process::{computing, start};
use crate::reporting::{Listener, reporting};
use crate::values::number;

/// A loaded model, or the name or path of one.
#[derive(FromPyObject)]
pub(crate) enum ModelArgument {
    #[pyo3(annotation = "Model")]
    Loaded(Py<Model>),
    #[pyo3(annotation = "str")]
    Named(PathBuf),
}

impl ModelArgument {
    /// Loads the model if necessary, and returns it with its name.
    fn load(
        which: Option<Self>,
        py: Python<'_>,
        options: ModelOptions,
    ) -> Result<(Arc<LoadedModel>, String)> {
        let name = match which {
            Some(Self::Loaded(model)) => {
                let model = model.get();
                return Ok((Arc::clone(&model.loaded), model.opened.name()));
            }
            Some(Self::Named(name)) => name,
            None => BUILT_IN.into(),
        };
        let file_name = name.file_name().unwrap_or(name.as_os_str()).to_string_lossy().into_owned();
        let options = ModelOptions { model: name, device: DeviceChoice::Cpu, ..options };
        let loaded = reporting(py, |listener| options.open(listener)?.load(listener))?;
        Ok((Arc::new(loaded), file_name))
    }
}

/// Compresses bytes with a model, as `gpt2 compress` does.
///
/// candle_gpt2.decompress restores them with the same model.
///
/// model: a Model on the CPU, or the name or path of a model; by default the built-in model. dtype, kv_dtype:
/// precision of a model that this call opens, see Model.from_pretrained. context: tokens per window, by
/// default the model's context. tokenizer: a tokenizer.json, spiece.model or vocab.txt, or a folder that
/// contains one. offline: use only the Hub's cache.
#[pyfunction]
#[pyo3(signature = (
    data, model = None, *, dtype = "q8", kv_dtype = None, context = None, tokenizer = None, n_head = None, offline = false
))]
#[expect(clippy::too_many_arguments, reason = "Python keyword arguments")]
pub(crate) fn compress<'py>(
    py: Python<'py>,
    data: &[u8],
    model: Option<ModelArgument>,
    dtype: &str,
    kv_dtype: Option<&str>,
    #[pyo3(from_py_with = number)] context: Option<usize>,
    tokenizer: Option<PathBuf>,
    #[pyo3(from_py_with = number)] n_head: Option<usize>,
    offline: bool,
) -> Result<Bound<'py, PyBytes>> {
    start()?;
    let dtype = short_name(dtype).parse::<WeightDType>();
    let dtype = dtype.map_err(|error| value_error(format!("dtype: {error}")))?;
    let kv_dtype = kv_dtype.map(|name| short_name(name).parse::<KvDType>()).transpose();
    let kv_dtype = kv_dtype.map_err(|error| value_error(format!("kv_dtype: {error}")))?;
    let hub = hub(offline);
    let options =
        ModelOptions { dtype: Some(dtype), kv_dtype, tokenizer, n_head, hub, ..ModelOptions::default() };
    let (loaded, name) = ModelArgument::load(model, py, options)?;
    let listener = Listener::new(py);
    let mut compressed = Vec::new();
    computing(py, &loaded, || {
        let compressor = Compressor::new(&loaded, &name, context)?;
        compressor.compress(&mut &*data, Some(data.len() as u64), &mut compressed, &listener)
    })?;
    Ok(PyBytes::new(py, &compressed))
}

/// Decompresses the output of candle_gpt2.compress or `gpt2 compress`.
///
/// The data records the model's precision.
///
/// model, tokenizer, n_head, offline: see compress; the model must be the one that compressed the data.
#[pyfunction]
#[pyo3(signature = (data, model = None, *, tokenizer = None, n_head = None, offline = false))]
pub(crate) fn decompress<'py>(
    py: Python<'py>,
    data: &[u8],
    model: Option<ModelArgument>,
    tokenizer: Option<PathBuf>,
    #[pyo3(from_py_with = number)] n_head: Option<usize>,
    offline: bool,
) -> Result<Bound<'py, PyBytes>> {
    start()?;
    let opened = Compressed::open(data)?;
    let header = opened.header();
    let (dtype, kv_dtype, hub) = (Some(header.dtype), Some(header.kv_dtype), hub(offline));
    let options = ModelOptions { dtype, kv_dtype, tokenizer, n_head, hub, ..ModelOptions::default() };
    let (loaded, _) = ModelArgument::load(model, py, options)?;
    let listener = Listener::new(py);
    let mut restored = Vec::new();
    computing(py, &loaded, || opened.decompress(&loaded, &mut restored, &listener))?;
    Ok(PyBytes::new(py, &restored))
}
