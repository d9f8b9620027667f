//! Sparse autoencoders of the residual stream and of what is added to it.

use std::path::PathBuf;

use candle_core::Tensor;
use candle_gpt2_interpret::{TrainedOn, named_site};
use candle_gpt2_look::{read_any_dictionary, read_dictionary};
use numpy::PyArrayDyn;
use pyo3::prelude::*;

use crate::errors::{Result, wrong_value};
use crate::model::Model;
use crate::process::start;
use crate::values::{Values, tensor};

/// A sparse autoencoder: writes values at one hook point as sums of few directions out of many.
#[pyclass(frozen, module = "candle_gpt2")]
pub(crate) struct Dictionary(candle_gpt2_interpret::Dictionary);

impl Dictionary {
    /// What is computed from arrays, without the interpreter's lock.
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
        let values = py.detach(|| Values::of(&compute(&self.0, tensors)?))?;
        Ok(values.into_array(py)?)
    }
}

#[pymethods]
impl Dictionary {
    /// The hook point that it explains.
    #[getter]
    fn hook_name(&self) -> String {
        self.0.config().site.to_string()
    }

    /// SAELens' name of its kind: standard, topk, jumprelu, gated; of transcoders such as jumprelu_skip_transcoder.
    #[getter]
    fn architecture(&self) -> String {
        self.0.config().architecture()
    }

    /// Reads one without a model: a folder of SAELens, or a .pt file of OpenAI's. site: as in Model.dictionary.
    #[staticmethod]
    #[pyo3(signature = (path, site = None))]
    fn read(path: PathBuf, site: Option<&str>) -> Result<Self> {
        start()?;
        let named = |name| named_site(name).map_err(|error| wrong_value(format!("site: {error}")));
        Ok(Self(read_any_dictionary(&path, site.map(named).transpose()?)?))
    }

    /// A ValueError if a model does not have the hook point, or has it in another width.
    fn check(&self, model: &Model) -> Result<()> {
        self.0.check_model(model.loaded.config()).map_err(|error| wrong_value(error.to_string()))
    }

    /// One of its tensors: W_enc (d_in, d_sae), b_enc, W_dec (d_sae, d_in), b_dec or threshold, as they are computed with: lengths of
    /// directions and gates are folded into the encoder. None if it has no such tensor.
    fn weight<'py>(&self, py: Python<'py>, name: &str) -> Result<Option<Bound<'py, PyArrayDyn<f32>>>> {
        start()?;
        let Some(tensor) = self.0.tensor(name) else { return Ok(None) };
        let values = py.detach(|| Values::of(tensor))?;
        Ok(Some(values.into_array(py)?))
    }

    /// Width of a value.
    #[getter]
    fn d_in(&self) -> usize {
        self.0.width()
    }

    /// Number of latents.
    #[getter]
    fn d_sae(&self) -> usize {
        self.0.latents()
    }

    /// Whether it was trained on the values of TransformerLens' processed weights.
    #[getter]
    fn trained_on_processed(&self) -> bool {
        self.0.config().trained_on == TrainedOn::TransformerLens
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

    /// What one unit of a latent adds to a value, (d_in).
    fn direction<'py>(&self, py: Python<'py>, latent: usize) -> Result<Bound<'py, PyArrayDyn<f32>>> {
        self.computed(py, [], |dictionary, []| dictionary.direction(latent))
    }

    fn __repr__(&self) -> String {
        format!("Dictionary({:?}, d_in={}, d_sae={})", self.hook_name(), self.d_in(), self.d_sae())
    }
}

#[pymethods]
impl Model {
    /// Reads a sparse autoencoder for this model: a folder of SAELens, or a .pt file of OpenAI's. site: the hook point that it was
    /// trained on, if its files do not say.
    #[pyo3(signature = (path, site = None))]
    fn dictionary(&self, path: PathBuf, site: Option<&str>) -> Result<Dictionary> {
        start()?;
        Ok(Dictionary(read_dictionary(&path, site, self.loaded.config())?))
    }
}
