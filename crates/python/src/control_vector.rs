//! Control vectors of llama.cpp, as one of the hooks.

use std::collections::BTreeMap;
use std::path::PathBuf;

use candle_gpt2_look::read_control_vector;
use candle_gpt2_weights::write_control_vector;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::errors::{Result, wrong_type, wrong_value};
use crate::model::Model;
use crate::process::start;
use crate::values::{Values, is_mapping, tensor};

/// Directions that are added to the outputs of blocks at every position: an entry of the `hooks` of generate, stream, logits and
/// run_with_cache.
#[pyclass(frozen, module = "candle_gpt2")]
pub(crate) struct ControlVector(pub(crate) candle_gpt2_interpret::ControlVector);

#[pymethods]
impl ControlVector {
    /// The direction that is added to the output of each block, by its number.
    #[getter]
    fn directions<'py>(&self, py: Python<'py>) -> Result<Bound<'py, PyDict>> {
        let directions = PyDict::new(py);
        for (layer, direction) in self.0.directions() {
            directions.set_item(layer, Values::of(direction)?.into_array(py)?)?;
        }
        Ok(directions)
    }

    /// Writes a GGUF file that llama.cpp's --control-vector takes. The file appears whole or not at all, and nothing that exists is
    /// overwritten. The format has no direction for block 0.
    fn save(&self, path: PathBuf) -> Result<()> {
        Ok(write_control_vector(&path, self.0.directions())?)
    }

    fn __repr__(&self) -> String {
        format!("ControlVector(layers={:?})", Vec::from_iter(self.0.directions().keys()))
    }

    fn __reduce__(&self) -> Result<()> {
        Err(wrong_type("a control vector cannot be pickled; save it, and open it where it is used"))
    }
}

#[pymethods]
impl Model {
    /// A control vector for `hooks`: directions that are added to the outputs of blocks at every position, those of new tokens too.
    ///
    /// vector: a GGUF file of llama.cpp's, or a dict of arrays (n_embd) by the number of the block, after which they are added. scale:
    /// a factor. layers: the first and the last block, all of them if None.
    #[pyo3(signature = (vector, *, scale = 1.0, layers = None))]
    fn control_vector(
        &self,
        vector: &Bound<'_, PyAny>,
        scale: f64,
        layers: Option<(usize, usize)>,
    ) -> Result<ControlVector> {
        start()?;
        if !scale.is_finite() {
            return Err(wrong_value(format!("scale: expected a finite number, found {scale}")));
        }
        let config = self.loaded.config();
        let read = if is_mapping(vector)? {
            let mut directions = BTreeMap::new();
            for item in vector.call_method0("items")?.try_iter()? {
                let (layer, direction): (usize, Bound<'_, PyAny>) = item?.extract()?;
                directions.insert(layer, tensor(&direction)?);
            }
            let checked = candle_gpt2_interpret::ControlVector::new(directions, config);
            checked.map_err(|error| wrong_value(format!("vector: {error}")))?
        } else {
            read_control_vector(&vector.extract::<PathBuf>()?, config)?
        };
        let (first, last) = layers.unwrap_or((0, usize::MAX));
        if first > last {
            return Err(wrong_value(format!(
                "layers: expected the first block first, found ({first}, {last})"
            )));
        }
        Ok(ControlVector(read.scaled(scale, first..=last)?))
    }
}
