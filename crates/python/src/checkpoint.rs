//! Checkpoints without a model of them in memory: what one is, whether it is sound, and the same in another format. Dicts have the
//! names of the program's `--json`.

use std::path::PathBuf;

use candle_core::Device;
use candle_gpt2::{Parameter, expected_parameters};
use candle_gpt2_engine::{
    ADAPTER_BASE, BUILT_IN, ConvertOptions, InspectOptions, ModelOptions, Reporter, Verification,
    VerifyOptions, Watched,
};
use candle_gpt2_weights::UnknownWrittenDType;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::errors::{Failure, Result, wrong_value};
use crate::model::{Adapters, Model, hub, short_name};
use crate::process::start;
use crate::reporting::reporting;
use crate::values::{Values, dict_of, number};

// Signatures write it out for their readers.
const _: () = assert!(VerifyOptions::TOLERANCE == 0.001);

/// Describes a checkpoint, as `gpt2 inspect` does: its format and the evidence for it, configuration, parameter counts, memory,
/// every tensor, and what does not fit. A dict with the keys of its --json.
///
/// model: a checkpoint folder, a weights file of any supported format, or a model on the Hugging Face Hub; by default the one
/// inside the package. preset: a published model in its place, which needs no files, such as "gpt2-xl". tensors: also the minimum,
/// maximum, mean and deviation of every tensor. diff: another checkpoint; the dict then says how the two differ, whatever their
/// formats. n_head: the number of attention heads, if the checkpoint does not record it. offline: use only the Hub's cache.
#[pyfunction]
#[pyo3(signature = (model = None, *, preset = None, tensors = false, diff = None, n_head = None, offline = false))]
pub(crate) fn inspect(
    py: Python<'_>,
    model: Option<PathBuf>,
    preset: Option<String>,
    tensors: bool,
    diff: Option<PathBuf>,
    #[pyo3(from_py_with = number)] n_head: Option<usize>,
    offline: bool,
) -> Result<Bound<'_, PyAny>> {
    start()?;
    let model = model.or_else(|| preset.is_none().then(|| BUILT_IN.into()));
    let hub = hub(offline);
    let options = InspectOptions { model, preset, tensors, diff, n_head, hub };
    dict_of(py, &reporting(py, |listener| options.inspect(listener))?)
}

/// Checks that a checkpoint is sound, as `gpt2 verify` does: every tensor is there with its shape and finite values, the tokenizer
/// fits the vocabulary, and logits are the same with a cache and without. A dict: sound, problems, notes, cache_difference,
/// against_difference. Damaged files are not sound; a missing one is an error.
///
/// model: as for inspect. against: another checkpoint, whose logits for a fixed prompt may differ by at most tolerance.
#[pyfunction]
#[pyo3(signature = (model = None, *, against = None, tolerance = 0.001, n_head = None, offline = false))]
pub(crate) fn verify(
    py: Python<'_>,
    model: Option<PathBuf>,
    against: Option<PathBuf>,
    tolerance: f64,
    #[pyo3(from_py_with = number)] n_head: Option<usize>,
    offline: bool,
) -> Result<Bound<'_, PyAny>> {
    let model = model.unwrap_or_else(|| BUILT_IN.into());
    verified(py, &checkpoint(model, n_head, offline), against, tolerance)
}

/// Writes a checkpoint in another format, as `gpt2 convert` does: a GGUF file for llama.cpp if the name of the output ends in
/// .gguf, the weights alone if it ends in .safetensors, otherwise a folder that transformers loads. The result appears whole or not at all, and nothing that exists is overwritten.
/// A dict: output, format, dtype, bytes, notes (settings of the checkpoint that the output does not hold).
///
/// input: as model for inspect; None for the base model that the adapter names. adapter: LoRA adapters to merge, as for
/// Model.from_pretrained. dtype: f32, f16 or bf16, for GGUF also q8_0, q6_k, q5_k, q5_0, q4_k and q4_0. tokenizer: a tokenizer.json, spiece.model or vocab.txt, or a folder with
/// one; by default the input's.
#[pyfunction]
#[pyo3(signature = (input, output, *, dtype = "f32", tokenizer = None, n_head = None, offline = false, adapter = None))]
#[expect(clippy::too_many_arguments, reason = "keywords of Python")]
pub(crate) fn convert<'py>(
    py: Python<'py>,
    input: Option<PathBuf>,
    output: PathBuf,
    dtype: &str,
    tokenizer: Option<PathBuf>,
    #[pyo3(from_py_with = number)] n_head: Option<usize>,
    offline: bool,
    adapter: Option<Adapters>,
) -> Result<Bound<'py, PyAny>> {
    let input = input.unwrap_or_else(|| ADAPTER_BASE.into());
    let adapter = Adapters::into_list(adapter)?;
    let model = ModelOptions { tokenizer, adapter, ..checkpoint(input, n_head, offline) };
    converted(py, &model, output, dtype)
}

#[pymethods]
impl Model {
    /// Describes the checkpoint that this model was opened from; see candle_gpt2.inspect.
    #[pyo3(signature = (*, tensors = false, diff = None))]
    fn inspect<'py>(
        &self,
        py: Python<'py>,
        tensors: bool,
        diff: Option<PathBuf>,
    ) -> Result<Bound<'py, PyAny>> {
        start()?;
        let ModelOptions { model, n_head, hub, .. } = self.opened.options()?;
        let model = Some(model);
        let options = InspectOptions { model, preset: None, tensors, diff, n_head, hub };
        dict_of(py, &reporting(py, |listener| options.inspect(listener))?)
    }

    /// Checks that the checkpoint that this model was opened from is sound; see candle_gpt2.verify.
    #[pyo3(signature = (*, against = None, tolerance = 0.001))]
    fn verify<'py>(
        &self,
        py: Python<'py>,
        against: Option<PathBuf>,
        tolerance: f64,
    ) -> Result<Bound<'py, PyAny>> {
        verified(py, &self.opened.options()?, against, tolerance)
    }

    /// Writes the checkpoint that this model was opened from in another format, with the values it stores; see candle_gpt2.convert.
    #[pyo3(signature = (output, *, dtype = "f32", tokenizer = None))]
    fn convert<'py>(
        &self,
        py: Python<'py>,
        output: PathBuf,
        dtype: &str,
        tokenizer: Option<PathBuf>,
    ) -> Result<Bound<'py, PyAny>> {
        let model = self.opened.options()?;
        let tokenizer = tokenizer.or_else(|| model.tokenizer.clone());
        converted(py, &ModelOptions { tokenizer, ..model }, output, dtype)
    }

    /// Every parameter of the checkpoint that this model was opened from, as stored, in f32: a dict of arrays by the names of a Hugging
    /// Face checkpoint without `transformer.`. Matrices are (out, in). A tied head is `wte.weight` and not listed.
    fn parameters<'py>(&self, py: Python<'py>) -> Result<Bound<'py, PyDict>> {
        start()?;
        let options = self.opened.options()?;
        let read = reporting(py, |listener| {
            let checkpoint = options.open_checkpoint(listener)?;
            checkpoint.check()?;
            let progress = Watched::new(listener, "reading", checkpoint.parameter_bytes());
            let of = |name: &str| checkpoint.parameter(name, &Device::Cpu, &progress);
            let mut read = Vec::new();
            for Parameter { name, .. } in expected_parameters(checkpoint.config()) {
                let missing = || candle_core::Error::Msg(format!("`{name}` holds no weights"));
                let values = Values::of(&of(&name)?.ok_or_else(missing)?)?;
                read.push((name, values));
            }
            Ok::<_, Failure>(read)
        })?;
        let parameters = PyDict::new(py);
        for (name, values) in read {
            parameters.set_item(name, values.into_array(py)?)?;
        }
        Ok(parameters)
    }
}

fn checkpoint(model: PathBuf, n_head: Option<usize>, offline: bool) -> ModelOptions {
    ModelOptions { model, n_head, hub: hub(offline), ..ModelOptions::default() }
}

fn verified<'py>(
    py: Python<'py>,
    model: &ModelOptions,
    against: Option<PathBuf>,
    tolerance: f64,
) -> Result<Bound<'py, PyAny>> {
    start()?;
    if !VerifyOptions::allows(tolerance) {
        return Err(wrong_value(format!("tolerance: expected a number of at least 0, found {tolerance}")));
    }
    let options = VerifyOptions { against, tolerance, ..VerifyOptions::default() };
    let verify = |listener: &dyn Reporter| model.verify(&options, listener).or_else(Verification::of_damage);
    dict_of(py, &reporting(py, |listener| verify(listener))?)
}

fn converted<'py>(
    py: Python<'py>,
    model: &ModelOptions,
    output: PathBuf,
    dtype: &str,
) -> Result<Bound<'py, PyAny>> {
    start()?;
    let dtype = short_name(dtype).parse();
    let dtype = dtype.map_err(|error: UnknownWrittenDType| wrong_value(format!("dtype: {error}")))?;
    let options = ConvertOptions { output, dtype };
    dict_of(py, &reporting(py, |listener| model.convert(&options, listener))?)
}
