//! Inspection, verification and conversion of checkpoints without loading a model.
//!
//! Result dicts have the keys of the program's `--json`.

use std::path::PathBuf;

use candle_core::Device;
use candle_gpt2::{Parameter, expected_parameters};
use candle_gpt2_engine::{
    ADAPTER_BASE, BUILT_IN, ConvertOptions, InspectOptions, ModelOptions, ReadJob, Reporter, Verification,
    VerifyOptions,
};
use candle_gpt2_weights::WrittenDType;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::errors::{Failure, Result, value_error};
use crate::model::{Adapters, Model, hub, short_name};
use crate::process::start;
use crate::reporting::reporting;
use crate::values::{Values, number, report_to_dict};

// The Python signatures repeat this value as a literal.
const _: () = assert!(VerifyOptions::TOLERANCE == 0.001);

/// Describes a checkpoint and returns a dict with the keys of `gpt2 inspect --json`.
///
/// The dict contains the format and the evidence for it, the configuration, parameter counts, memory, every
/// tensor, and every mismatch.
///
/// model: a checkpoint folder, a weights file of any supported format, or a model on the Hugging Face Hub; by
/// default the built-in model. preset: describe a published model such as "gpt2-xl" instead, without its files.
/// tensors: also compute the minimum, maximum, mean and standard deviation of every tensor. diff: another
/// checkpoint in any format; the dict then describes the differences. n_head: the number of attention heads,
/// if the checkpoint does not record it. offline: use only the Hub's cache.
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
    report_to_dict(py, &reporting(py, |listener| options.inspect(listener))?)
}

/// Checks the integrity of a checkpoint, as `gpt2 verify` does.
///
/// Every tensor must be present, with its shape and finite values. The tokenizer must fit the vocabulary, and
/// logits must be the same with and without a KV cache. Returns a dict: sound, problems, notes,
/// cache_difference, against_difference. For damaged files `sound` is False; a missing file raises an
/// exception.
///
/// model: see inspect. against: another checkpoint, whose logits for a fixed prompt may differ by at most
/// tolerance.
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
    run_verify(py, &checkpoint_options(model, n_head, offline), against, tolerance)
}

/// Converts a checkpoint to another format, as `gpt2 convert` does.
///
/// The name of the output selects the format: a GGUF file for llama.cpp if it ends in .gguf, the weights
/// alone if it ends in .safetensors, and otherwise a folder that transformers loads. The output is written
/// atomically, and existing files are never overwritten. Returns a dict: output, format, dtype, bytes, notes
/// (settings of the checkpoint that the output cannot store).
///
/// input: see `model` of inspect; None selects the base model that the adapter names. adapter: LoRA adapters
/// to merge, see Model.from_pretrained. dtype: f32, f16 or bf16, for GGUF also q8_0, q6_k, q5_k, q5_0, q4_k
/// or q4_0. tokenizer: a tokenizer.json, spiece.model or vocab.txt, or a folder that contains one; by default
/// the input's.
#[pyfunction]
#[pyo3(signature = (input, output, *, dtype = "f32", tokenizer = None, n_head = None, offline = false, adapter = None))]
#[expect(clippy::too_many_arguments, reason = "Python keyword arguments")]
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
    let model = ModelOptions { tokenizer, adapter, ..checkpoint_options(input, n_head, offline) };
    run_convert(py, &model, output, dtype)
}

#[pymethods]
impl Model {
    /// Describes the checkpoint that this model was opened from.
    ///
    /// See candle_gpt2.inspect.
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
        report_to_dict(py, &reporting(py, |listener| options.inspect(listener))?)
    }

    /// Checks the integrity of the checkpoint that this model was opened from.
    ///
    /// See candle_gpt2.verify.
    #[pyo3(signature = (*, against = None, tolerance = 0.001))]
    fn verify<'py>(
        &self,
        py: Python<'py>,
        against: Option<PathBuf>,
        tolerance: f64,
    ) -> Result<Bound<'py, PyAny>> {
        run_verify(py, &self.opened.options()?, against, tolerance)
    }

    /// Converts the checkpoint that this model was opened from, with its stored values.
    ///
    /// See candle_gpt2.convert.
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
        run_convert(py, &ModelOptions { tokenizer, ..model }, output, dtype)
    }

    /// Returns the stored parameters of the model's checkpoint as a dict of float32 arrays.
    ///
    /// The names are those in a Hugging Face checkpoint, without `transformer.`. Matrices have the shape
    /// (out, in). A tied head is `wte.weight` and has no entry of its own.
    fn parameters<'py>(&self, py: Python<'py>) -> Result<Bound<'py, PyDict>> {
        start()?;
        let options = self.opened.options()?;
        let read = reporting(py, |listener| {
            let checkpoint = options.open_checkpoint(listener)?;
            checkpoint.check()?;
            let progress = ReadJob::new(listener, "reading", checkpoint.parameter_bytes());
            let of = |name: &str| checkpoint.parameter(name, &Device::Cpu, &progress);
            let mut read = Vec::new();
            for Parameter { name, .. } in expected_parameters(checkpoint.config()) {
                let missing =
                    || candle_core::Error::Msg(format!("the dtype of `{name}` cannot hold weights"));
                let values = Values::from_tensor(&of(&name)?.ok_or_else(missing)?)?;
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

fn checkpoint_options(model: PathBuf, n_head: Option<usize>, offline: bool) -> ModelOptions {
    ModelOptions { model, n_head, hub: hub(offline), ..ModelOptions::default() }
}

fn run_verify<'py>(
    py: Python<'py>,
    model: &ModelOptions,
    against: Option<PathBuf>,
    tolerance: f64,
) -> Result<Bound<'py, PyAny>> {
    start()?;
    if !VerifyOptions::allows(tolerance) {
        return Err(value_error(format!("tolerance: expected a non-negative number, found {tolerance}")));
    }
    let options = VerifyOptions { against, tolerance, ..VerifyOptions::default() };
    let verify = |listener: &dyn Reporter| model.verify(&options, listener).or_else(Verification::of_damage);
    report_to_dict(py, &reporting(py, |listener| verify(listener))?)
}

fn run_convert<'py>(
    py: Python<'py>,
    model: &ModelOptions,
    output: PathBuf,
    dtype: &str,
) -> Result<Bound<'py, PyAny>> {
    start()?;
    let dtype = short_name(dtype).parse::<WrittenDType>();
    let dtype = dtype.map_err(|error| value_error(format!("dtype: {error}")))?;
    let options = ConvertOptions { output, dtype };
    report_to_dict(py, &reporting(py, |listener| model.convert(&options, listener))?)
}
