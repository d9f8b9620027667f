//! llama.cpp control vectors as hooks.

use std::collections::BTreeMap;
use std::path::PathBuf;

use candle_gpt2_look::read_control_vector;
use candle_gpt2_weights::write_control_vector;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::errors::{Result, type_error, value_error};
use crate::model::Model;
use crate::process::start;
use crate::values::{Values, is_mapping, tensor};

/// Control vector: directions added to the outputs of blocks at every position.
///
/// Pass it in `hooks` to generate, stream, logits or run_with_cache.
#[pyclass(frozen, module = "candle_gpt2")]
pub(crate) struct ControlVector(pub(crate) candle_gpt2_interpret::ControlVector);

#[pymethods]
impl ControlVector {
    /// Direction added to the output of each block, keyed by layer.
    #[getter]
    fn directions<'py>(&self, py: Python<'py>) -> Result<Bound<'py, PyDict>> {
        let directions = PyDict::new(py);
        for (layer, direction) in self.0.directions() {
            directions.set_item(layer, Values::from_tensor(direction)?.into_array(py)?)?;
        }
        Ok(directions)
    }

    /// Writes a GGUF file for llama.cpp's option --control-vector.
    ///
    /// The file is written atomically, and existing files are never overwritten. The format cannot store a
    /// direction for block 0.
    fn save(&self, path: PathBuf) -> Result<()> {
        Ok(write_control_vector(&path, self.0.directions())?)
    }

    fn __repr__(&self) -> String {
        format!("ControlVector(layers={:?})", Vec::from_iter(self.0.directions().keys()))
    }

    fn __reduce__(&self) -> Result<()> {
        Err(type_error(
            "a control vector cannot be pickled; save it to a file and load it in the other process",
        ))
    }
}

#[pymethods]
impl Model {
    /// Creates a control vector for `hooks`: directions added to block outputs at every position.
    ///
    /// The positions include those of new tokens.
    ///
    /// vector: a llama.cpp GGUF file, or a dict of arrays (n_embd) by layer. scale: factor for all
    /// directions. layers: first and last layer to use, by default all.
    #[pyo3(signature = (vector, *, scale = 1.0, layers = None))]
    fn control_vector(
        &self,
        vector: &Bound<'_, PyAny>,
        scale: f64,
        layers: Option<(usize, usize)>,
    ) -> Result<ControlVector> {
        start()?;
        if !scale.is_finite() {
            return Err(value_error(format!("scale: expected a finite number, found {scale}")));
        }
        let config = self.loaded.config();
        let read = if is_mapping(vector)? {
            let mut directions = BTreeMap::new();
            for item in vector.call_method0("items")?.try_iter()? {
                let (layer, direction): (usize, Bound<'_, PyAny>) = item?.extract()?;
                directions.insert(layer, tensor(&direction)?);
            }
            let checked = candle_gpt2_interpret::ControlVector::new(directions, config);
            checked.map_err(|error| value_error(format!("vector: {error}")))?
        } else {
            read_control_vector(&vector.extract::<PathBuf>()?, config)?
        };
        let (first, last) = layers.unwrap_or((0, usize::MAX));
        if first > last {
            return Err(value_error(format!(
                "layers: expected (first, last) with first <= last, found ({first}, {last})"
            )));
        }
        Ok(ControlVector(read.scaled(scale, first..=last)?))
    }
}
