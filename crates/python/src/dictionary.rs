//! Sparse autoencoders and transcoders of a model's hook points.

use std::collections::BTreeMap;
use std::path::PathBuf;

use candle_core::Tensor;
use candle_gpt2_interpret::{DictionaryFunction, TrainedOn, named_site};
use candle_gpt2_look::StoredDictionary;
use numpy::PyArrayDyn;
use pyo3::prelude::*;

use crate::errors::{Result, wrong_value};
use crate::model::Model;
use crate::process::start;
use crate::values::{Values, python_of, tensor};

/// A sparse autoencoder or transcoder: writes values at a hook point as sums of few directions out of many.
#[pyclass(frozen, module = "candle_gpt2")]
pub(crate) struct Dictionary {
    stored: StoredDictionary,
    /// Made of arrays whose configuration does not say which weights the model had.
    is_own: bool,
}

impl Dictionary {
    pub(crate) fn inner(&self) -> &candle_gpt2_interpret::Dictionary {
        self.stored.dictionary()
    }

    /// Computes values from arrays without the interpreter's lock.
    fn computed<'py, const N: usize>(
        &self,
        py: Python<'py>,
        arrays: [&Bound<'py, PyAny>; N],
        compute: impl FnOnce(&candle_gpt2_interpret::Dictionary, [Tensor; N]) -> candle_core::Result<Tensor>
        + Send,
    ) -> Result<Bound<'py, PyArrayDyn<f32>>> {
        start()?;
        let tensors = arrays.map(tensor).into_iter().collect::<Result<Vec<_>>>()?;
        let tensors: [Tensor; N] = tensors.try_into().unwrap_or_else(|_| unreachable!("one for each array"));
        let values = py.detach(|| Values::of(&compute(self.inner(), tensors)?))?;
        Ok(values.into_array(py)?)
    }
}

#[pymethods]
impl Dictionary {
    /// The hook point that it reads.
    #[getter]
    fn hook_name(&self) -> String {
        self.inner().config().site.to_string()
    }

    /// The hook point that a transcoder writes; None for an autoencoder.
    #[getter]
    fn hook_name_out(&self) -> Option<String> {
        self.inner().config().output.map(|output| output.site.to_string())
    }

    /// Every key of its cfg.json, in the layout of SAELens 6.
    #[getter]
    fn cfg<'py>(&self, py: Python<'py>) -> Result<Bound<'py, PyAny>> {
        Ok(python_of(py, self.stored.config())?)
    }

    /// SAELens' name of its kind: standard, topk, jumprelu, gated; of transcoders such as jumprelu_skip_transcoder.
    #[getter]
    fn architecture(&self) -> String {
        self.inner().config().architecture()
    }

    /// Reads one without a model: a folder of SAELens, or a .pt file of OpenAI's. site: as in Model.dictionary.
    #[staticmethod]
    #[pyo3(signature = (path, site = None))]
    fn read(path: PathBuf, site: Option<&str>) -> Result<Self> {
        start()?;
        let named = |name| named_site(name).map_err(|error| wrong_value(format!("site: {error}")));
        Ok(Self { stored: StoredDictionary::read(&path, site.map(named).transpose()?)?, is_own: false })
    }

    /// Makes one of arrays by SAELens' names, and the JSON of a cfg.json.
    #[staticmethod]
    fn of_arrays(cfg: &str, weights: BTreeMap<String, Bound<'_, PyAny>>) -> Result<Self> {
        start()?;
        let tensors = weights.into_iter().map(|(name, value)| Ok((name, tensor(&value)?.contiguous()?)));
        let stored = StoredDictionary::of_tensors(cfg, tensors.collect::<Result<_>>()?);
        let stored = stored.map_err(|error| wrong_value(error.to_string()))?;
        Ok(Self { stored, is_own: !cfg.contains("model_from_pretrained_kwargs") })
    }

    /// Writes cfg.json and sae_weights.safetensors, SAELens' layout, into a folder, which is created if missing.
    fn save(&self, py: Python<'_>, folder: PathBuf) -> Result<()> {
        Ok(py.detach(|| self.stored.save(&folder))?)
    }

    /// A ValueError if a model does not have the hook point, or has it in another width.
    fn check(&self, model: &Model) -> Result<()> {
        self.inner().check_model(model.loaded.config()).map_err(|error| wrong_value(error.to_string()))
    }

    /// One of its tensors: W_enc (d_in, d_sae), b_enc, W_dec (d_sae, d_in), b_dec or threshold, as they are computed with: lengths of
    /// directions and gates are folded into the encoder. None if it has no such tensor.
    fn weight<'py>(&self, py: Python<'py>, name: &str) -> Result<Option<Bound<'py, PyArrayDyn<f32>>>> {
        start()?;
        let Some(tensor) = self.inner().tensor(name) else { return Ok(None) };
        let values = py.detach(|| Values::of(tensor))?;
        Ok(Some(values.into_array(py)?))
    }

    /// Width of a value.
    #[getter]
    fn d_in(&self) -> usize {
        self.inner().width()
    }

    /// Number of latents.
    #[getter]
    fn d_sae(&self) -> usize {
        self.inner().latents()
    }

    /// Whether it was trained on the values of TransformerLens' processed weights; None if unknown.
    #[getter]
    fn trained_on_processed(&self) -> Option<bool> {
        (!self.is_own).then(|| self.inner().config().trained_on == TrainedOn::TransformerLens)
    }

    /// The latents of values (…, d_in) before their activation, (…, d_sae).
    fn pre_activations<'py>(
        &self,
        py: Python<'py>,
        x: &Bound<'py, PyAny>,
    ) -> Result<Bound<'py, PyArrayDyn<f32>>> {
        self.computed(py, [x], |dictionary, [x]| dictionary.pre_activations(&x))
    }

    /// The latents (…, d_sae) of the result of pre_activations.
    fn activate<'py>(
        &self,
        py: Python<'py>,
        before: &Bound<'py, PyAny>,
    ) -> Result<Bound<'py, PyArrayDyn<f32>>> {
        self.computed(py, [before], |dictionary, [before]| dictionary.activate(&before))
    }

    /// The latents of values (…, d_in): (…, d_sae).
    fn encode<'py>(&self, py: Python<'py>, x: &Bound<'py, PyAny>) -> Result<Bound<'py, PyArrayDyn<f32>>> {
        self.computed(py, [x], |dictionary, [x]| dictionary.encode(&x))
    }

    /// The values that latents (…, d_sae) stand for, (…, d_in). x: what was encoded; a dictionary that normalizes its input needs its
    /// mean and deviation.
    fn decode<'py>(
        &self,
        py: Python<'py>,
        latents: &Bound<'py, PyAny>,
        x: &Bound<'py, PyAny>,
    ) -> Result<Bound<'py, PyArrayDyn<f32>>> {
        self.computed(py, [latents, x], |dictionary, [latents, x]| dictionary.decode(&latents, &x))
    }

    /// Vector-Jacobian product of "pre_activations", "activate" or "decode": the gradients at its inputs, from the gradient at its result.
    fn vjp<'py>(
        &self,
        py: Python<'py>,
        function: &str,
        inputs: Vec<Bound<'py, PyAny>>,
        gradient: &Bound<'py, PyAny>,
    ) -> Result<Vec<Bound<'py, PyArrayDyn<f32>>>> {
        start()?;
        let function = match function {
            "pre_activations" => DictionaryFunction::PreActivations,
            "activate" => DictionaryFunction::Activate,
            "decode" => DictionaryFunction::Decode,
            other => {
                return Err(wrong_value(format!(
                    "function: expected pre_activations, activate or decode, found {other:?}"
                )));
            }
        };
        let inputs = inputs.iter().map(tensor).collect::<Result<Vec<_>>>()?;
        let gradient = tensor(gradient)?;
        let found = py.detach(|| {
            let found = self.inner().vjp(function, &inputs, &gradient)?;
            found.iter().map(Values::of).collect::<candle_core::Result<Vec<_>>>()
        })?;
        Ok(found.into_iter().map(|values| values.into_array(py)).collect::<PyResult<_>>()?)
    }

    /// What one unit of a latent adds to a value, (d_in).
    fn direction<'py>(&self, py: Python<'py>, latent: usize) -> Result<Bound<'py, PyArrayDyn<f32>>> {
        self.computed(py, [], |dictionary, []| dictionary.direction(latent))
    }

    fn __repr__(&self) -> String {
        let out = self.hook_name_out().map_or(String::new(), |out| format!(" -> {out}"));
        let (name, architecture) = (self.hook_name(), self.architecture());
        format!("Dictionary({name}{out}, {architecture}, d_in={}, d_sae={})", self.d_in(), self.d_sae())
    }
}

#[pymethods]
impl Model {
    /// Reads a sparse autoencoder or transcoder for this model: a SAELens folder, an OpenAI .pt file, or "built-in", a transcoder of the
    /// built-in model. site: the hook point that it was trained on, if its files do not say.
    #[pyo3(signature = (path, site = None))]
    fn dictionary(&self, path: PathBuf, site: Option<&str>) -> Result<Dictionary> {
        let read = Dictionary::read(path.clone(), site)?;
        let checked = read.inner().check_model(self.loaded.config());
        checked.map_err(|error| wrong_value(format!("{}: {error}", path.display())))?;
        Ok(read)
    }
}
