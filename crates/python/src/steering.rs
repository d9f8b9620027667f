//! A direction that is added to the residual stream of every text, as one of the hooks.

use candle_gpt2_look::{Reader, Steer, Towards};
use numpy::PyArrayDyn;
use pyo3::prelude::*;

use crate::errors::{Result, wrong_type};
use crate::look::text;
use crate::model::Model;
use crate::process::{computing, start};
use crate::reporting::Listener;
use crate::values::{Values, number, tensor};

/// A direction that is added to the residual stream: an entry of `hooks` in generate, stream, logits and run_with_cache, and of
/// `fwd_hooks` in a HookedTransformer.
#[pyclass(frozen, module = "candle_gpt2")]
pub(crate) struct Steering {
    steering: candle_gpt2_interpret::Steering,
    layer: usize,
    scale: f64,
    everywhere: bool,
}

impl Steering {
    /// For a run of its own.
    pub(crate) fn fresh(&self) -> candle_gpt2_interpret::Steering {
        self.steering.clone()
    }
}

#[pymethods]
impl Steering {
    /// The block before which it is added.
    #[getter]
    fn layer(&self) -> usize {
        self.layer
    }

    /// Whether it is added at every position.
    #[getter]
    fn everywhere(&self) -> bool {
        self.everywhere
    }

    /// Scaled vectors (n, width), one for each of the first positions; (1, width) if it is added everywhere.
    #[getter]
    fn vectors<'py>(&self, py: Python<'py>) -> Result<Bound<'py, PyArrayDyn<f32>>> {
        Ok(Values::of(self.steering.vectors())?.into_array(py)?)
    }

    fn __repr__(&self) -> String {
        let Self { layer, scale, everywhere, .. } = self;
        let everywhere = if *everywhere { "True" } else { "False" };
        format!("Steering(layer={layer}, scale={scale}, everywhere={everywhere})")
    }

    fn __reduce__(&self) -> Result<()> {
        Err(wrong_type("a steering cannot be pickled; make it where it is used"))
    }
}

/// As the program reads it, a pair of texts, or vectors.
fn towards(value: &Bound<'_, PyAny>) -> Result<Towards> {
    if let Ok(text) = value.extract::<String>() {
        return Ok(Towards::read(&text)?);
    }
    if let Ok((towards, away)) = value.extract::<(Bound<'_, PyAny>, Bound<'_, PyAny>)>()
        && towards.extract::<f64>().is_err()
        && towards.getattr_opt("dtype")?.is_none()
    {
        return Ok(Towards::Texts { towards: text(&towards)?, away: text(&away)? });
    }
    Ok(Towards::Vectors(tensor(value)?))
}

#[pymethods]
impl Model {
    /// A steering vector for `hooks`: the difference of two texts' residual streams before `layer`, times `scale`, is added at the
    /// first positions of every text, or with `everywhere` its mean at all positions, those of new tokens too.
    ///
    /// steer: a pair of texts, to steer towards and away from; or an array (n, width); or a text as the program reads it,
    /// '" Love"-" Hate"', '" Love"' or the name of a safetensors file.
    #[pyo3(signature = (steer, *, layer, scale = 1.0, everywhere = false))]
    fn steering(
        &self,
        py: Python<'_>,
        steer: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = number)] layer: usize,
        scale: f64,
        everywhere: bool,
    ) -> Result<Steering> {
        start()?;
        let steer = Steer { towards: towards(steer)?, layer, scale, everywhere };
        let listener = Listener::new(py);
        let steering = computing(py, &self.loaded, || {
            let checked = steer.check(&Reader::new(self.loaded.vocabulary(), false)?)?;
            checked.steering(&self.loaded, &listener)
        })?;
        listener.warn(py)?;
        Ok(Steering { steering, layer, scale, everywhere })
    }
}
