//! Steering hooks that add a direction to the residual stream of every text.

use candle_gpt2_look::{Reader, Steer, SteeringSource};
use numpy::PyArrayDyn;
use pyo3::prelude::*;

use crate::errors::{Result, type_error};
use crate::look::text;
use crate::model::Model;
use crate::process::{computing, start};
use crate::reporting::Listener;
use crate::values::{Values, number, tensor};

/// Steering vector: a direction added to the residual stream.
///
/// Pass it in `hooks` to generate, stream, logits or run_with_cache, or in `fwd_hooks` to a
/// HookedTransformer.
#[pyclass(frozen, module = "candle_gpt2")]
pub(crate) struct Steering {
    steering: candle_gpt2_interpret::Steering,
    layer: usize,
    scale: f64,
    everywhere: bool,
}

impl Steering {
    /// Returns a copy for a single run.
    pub(crate) fn fresh(&self) -> candle_gpt2_interpret::Steering {
        self.steering.clone()
    }
}

#[pymethods]
impl Steering {
    /// Index of the block before which the direction is added.
    #[getter]
    fn layer(&self) -> usize {
        self.layer
    }

    /// Whether the direction is added at every position.
    #[getter]
    fn everywhere(&self) -> bool {
        self.everywhere
    }

    /// Scaled vectors (n, width), one for each of the first n positions.
    ///
    /// The shape is (1, width) if the direction is added everywhere.
    #[getter]
    fn vectors<'py>(&self, py: Python<'py>) -> Result<Bound<'py, PyArrayDyn<f32>>> {
        Ok(Values::from_tensor(self.steering.vectors())?.into_array(py)?)
    }

    fn __repr__(&self) -> String {
        let Self { layer, scale, everywhere, .. } = self;
        let everywhere = if *everywhere { "True" } else { "False" };
        format!("Steering(layer={layer}, scale={scale}, everywhere={everywhere})")
    }

    fn __reduce__(&self) -> Result<()> {
        Err(type_error("a Steering cannot be pickled; create it in the process that uses it"))
    }
}

/// Reads a text in the program's syntax, a pair of texts, or an array of vectors.
fn steering_source(value: &Bound<'_, PyAny>) -> Result<SteeringSource> {
    if let Ok(text) = value.extract::<String>() {
        return Ok(SteeringSource::read(&text)?);
    }
    if let Ok((towards, away)) = value.extract::<(Bound<'_, PyAny>, Bound<'_, PyAny>)>()
        && towards.extract::<f64>().is_err()
        && towards.getattr_opt("dtype")?.is_none()
    {
        return Ok(SteeringSource::Texts { towards: text(&towards)?, away: text(&away)? });
    }
    Ok(SteeringSource::Vectors(tensor(value)?))
}

#[pymethods]
impl Model {
    /// Creates a steering vector for `hooks`: the difference between two texts' residual streams.
    ///
    /// The difference before `layer`, times `scale`, is added at the first positions of every text. With
    /// `everywhere` its mean is added at all positions, including those of new tokens.
    ///
    /// steer: a pair of texts, to steer toward and away from; an array (n, width); or a text in the program's
    /// syntax: '" Love"-" Hate"', '" Love"' or the name of a safetensors file.
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
        let steer = Steer { towards: steering_source(steer)?, layer, scale, everywhere };
        let listener = Listener::new(py);
        let steering = computing(py, &self.loaded, || {
            let checked = steer.check(&Reader::new(self.loaded.vocabulary(), false)?)?;
            checked.steering(&self.loaded, &listener)
        })?;
        listener.warn(py)?;
        Ok(Steering { steering, layer, scale, everywhere })
    }
}
