//! Sparse autoencoders and transcoders for a model's hook points.

use std::collections::BTreeMap;
use std::path::PathBuf;

use candle_core::Tensor;
use candle_gpt2_interpret::{ActivationVariant, named_site};
use candle_gpt2_look::StoredDictionary;
use numpy::PyArrayDyn;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::errors::{Result, value_error};
use crate::model::Model;
use crate::process::start;
use crate::values::{Values, tensor, to_python};

/// Sparse autoencoder or transcoder: decomposes activations at a hook point into directions.
///
/// Each activation becomes a sum of a few directions out of many.
#[pyclass(frozen, module = "candle_gpt2")]
pub(crate) struct Dictionary {
    stored: StoredDictionary,
    /// Whether the configuration leaves open how the model's weights were processed in training.
    is_processing_unknown: bool,
}

impl Dictionary {
    pub(crate) fn inner(&self) -> &candle_gpt2_interpret::Dictionary {
        self.stored.dictionary()
    }

    /// Runs `function` on arrays with the GIL released.
    fn compute<'py, const N: usize>(
        &self,
        py: Python<'py>,
        arrays: [&Bound<'py, PyAny>; N],
        function: impl FnOnce(&candle_gpt2_interpret::Dictionary, [Tensor; N]) -> candle_core::Result<Tensor>
        + Send,
    ) -> Result<Bound<'py, PyArrayDyn<f32>>> {
        start()?;
        let tensors = arrays.map(tensor).into_iter().collect::<Result<Vec<_>>>()?;
        let tensors: [Tensor; N] = tensors.try_into().unwrap_or_else(|_| unreachable!("one for each array"));
        let values = py.detach(|| Values::from_tensor(&function(self.inner(), tensors)?))?;
        Ok(values.into_array(py)?)
    }
}

#[pymethods]
impl Dictionary {
    /// Hook point that the dictionary reads.
    #[getter]
    fn hook_name(&self) -> String {
        self.inner().config().site.to_string()
    }

    /// Hook point that a transcoder predicts; None for an autoencoder.
    #[getter]
    fn hook_name_out(&self) -> Option<String> {
        self.inner().config().output.map(|output| output.site.to_string())
    }

    /// Contents of cfg.json as a dict, in the layout of SAELens 6.
    #[getter]
    fn cfg<'py>(&self, py: Python<'py>) -> Result<Bound<'py, PyAny>> {
        Ok(to_python(py, self.stored.config())?)
    }

    /// Computation settings as a dict with the keys of cfg.json, including defaults.
    #[getter]
    fn settings<'py>(&self, py: Python<'py>) -> Result<Bound<'py, PyAny>> {
        Ok(to_python(py, &self.inner().config().to_json())?)
    }

    /// SAELens' name for the architecture.
    ///
    /// An autoencoder is standard, topk, jumprelu or gated; a transcoder is for example a
    /// jumprelu_skip_transcoder.
    #[getter]
    fn architecture(&self) -> String {
        self.inner().config().architecture()
    }

    /// Reads a SAELens folder or an OpenAI .pt file without a model.
    ///
    /// site: see Model.dictionary.
    #[staticmethod]
    #[pyo3(signature = (path, site = None))]
    fn read(path: PathBuf, site: Option<&str>) -> Result<Self> {
        start()?;
        let named = |name| named_site(name).map_err(|error| value_error(format!("site: {error}")));
        Ok(Self {
            stored: StoredDictionary::read(&path, site.map(named).transpose()?)?,
            is_processing_unknown: false,
        })
    }

    /// Creates a dictionary from the JSON text of a cfg.json and arrays with SAELens' names.
    #[staticmethod]
    fn of_arrays(cfg: &str, weights: BTreeMap<String, Bound<'_, PyAny>>) -> Result<Self> {
        start()?;
        let tensors = weights.into_iter().map(|(name, value)| Ok((name, tensor(&value)?.contiguous()?)));
        let stored = StoredDictionary::of_tensors(cfg, tensors.collect::<Result<_>>()?);
        let stored = stored.map_err(|error| value_error(error.to_string()))?;
        Ok(Self { stored, is_processing_unknown: !cfg.contains("model_from_pretrained_kwargs") })
    }

    /// Returns a copy of the dictionary with the given arrays in place of the stored ones.
    fn with_arrays(&self, weights: BTreeMap<String, Bound<'_, PyAny>>) -> Result<Self> {
        start()?;
        let mut tensors = self.stored.tensors().clone();
        for (name, value) in weights {
            if name == "threshold" {
                tensors.remove("log_threshold");
            }
            tensors.insert(name, tensor(&value)?);
        }
        let stored = StoredDictionary::of_tensors(&self.stored.config().to_string(), tensors);
        let stored = stored.map_err(|error| value_error(error.to_string()))?;
        Ok(Self { stored, is_processing_unknown: self.is_processing_unknown })
    }

    /// Returns the stored weights as a dict of arrays with SAELens' names.
    ///
    /// Unlike the result of `weight`, the arrays have nothing folded into them.
    fn arrays<'py>(&self, py: Python<'py>) -> Result<Bound<'py, PyDict>> {
        start()?;
        let arrays = PyDict::new(py);
        for (name, tensor) in self.stored.tensors() {
            let values = py.detach(|| Values::from_tensor(tensor))?;
            arrays.set_item(name, values.into_array(py)?)?;
        }
        Ok(arrays)
    }

    /// Writes cfg.json and sae_weights.safetensors into a folder, in SAELens' layout.
    ///
    /// The folder is created if it is missing.
    fn save(&self, py: Python<'_>, folder: PathBuf) -> Result<()> {
        Ok(py.detach(|| self.stored.save(&folder))?)
    }

    /// Raises a ValueError if a model lacks the hook point or its width differs.
    fn check(&self, model: &Model) -> Result<()> {
        self.inner().check_model(model.loaded.config()).map_err(|error| value_error(error.to_string()))
    }

    /// Returns the weight `name` as an array, or None if the dictionary lacks it.
    ///
    /// name: W_enc (d_in, d_sae), b_enc, W_dec (d_sae, d_in), b_dec or threshold. The values are those used
    /// for computation: norms of directions and gates are folded into the encoder.
    fn weight<'py>(&self, py: Python<'py>, name: &str) -> Result<Option<Bound<'py, PyArrayDyn<f32>>>> {
        start()?;
        let Some(tensor) = self.inner().tensor(name) else { return Ok(None) };
        let values = py.detach(|| Values::from_tensor(tensor))?;
        Ok(Some(values.into_array(py)?))
    }

    /// Input width.
    #[getter]
    fn d_in(&self) -> usize {
        self.inner().width()
    }

    /// Number of latents.
    #[getter]
    fn d_sae(&self) -> usize {
        self.inner().latents()
    }

    /// Whether it was trained with TransformerLens' processed weights; None if unknown.
    #[getter]
    fn trained_on_processed(&self) -> Option<bool> {
        (!self.is_processing_unknown)
            .then(|| self.inner().config().trained_on == ActivationVariant::TransformerLens)
    }

    /// Encodes values (…, d_in) into latents (…, d_sae).
    fn encode<'py>(&self, py: Python<'py>, x: &Bound<'py, PyAny>) -> Result<Bound<'py, PyArrayDyn<f32>>> {
        self.compute(py, [x], |dictionary, [x]| dictionary.encode(&x))
    }

    /// Reconstructs values (…, d_in) from latents (…, d_sae).
    ///
    /// x: the encoded input; a dictionary that normalizes its input needs the input's mean and standard
    /// deviation.
    fn decode<'py>(
        &self,
        py: Python<'py>,
        latents: &Bound<'py, PyAny>,
        x: &Bound<'py, PyAny>,
    ) -> Result<Bound<'py, PyArrayDyn<f32>>> {
        self.compute(py, [latents, x], |dictionary, [latents, x]| dictionary.decode(&latents, &x))
    }

    /// Decoder direction (d_in) that a latent adds per unit of activation.
    fn direction<'py>(&self, py: Python<'py>, latent: usize) -> Result<Bound<'py, PyArrayDyn<f32>>> {
        self.compute(py, [], |dictionary, []| dictionary.direction(latent))
    }

    fn __repr__(&self) -> String {
        let out = self.hook_name_out().map_or(String::new(), |out| format!(" -> {out}"));
        let (name, architecture) = (self.hook_name(), self.architecture());
        format!("Dictionary({name}{out}, {architecture}, d_in={}, d_sae={})", self.d_in(), self.d_sae())
    }
}

#[pymethods]
impl Model {
    /// Reads a sparse autoencoder or transcoder for this model.
    ///
    /// path: a SAELens folder, an OpenAI .pt file, or "built-in" for a transcoder of the built-in model.
    /// site: the hook point that it was trained on, if its files do not record it.
    #[pyo3(signature = (path, site = None))]
    fn dictionary(&self, path: PathBuf, site: Option<&str>) -> Result<Dictionary> {
        let read = Dictionary::read(path.clone(), site)?;
        let checked = read.inner().check_model(self.loaded.config());
        checked.map_err(|error| value_error(format!("{}: {error}", path.display())))?;
        Ok(read)
    }
}
