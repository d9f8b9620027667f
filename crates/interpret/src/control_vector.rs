//! Control vectors in llama.cpp's format: directions that are added to the outputs of blocks.
//!
//! Source: llama.cpp, `common/common.cpp` (`common_control_vector_load_one`) and `src/models/gpt2.cpp`.
//! Callers read the files and pass their tensors and metadata.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;

use candle_core::{DType, Device, Tensor};
use candle_gpt2::{Gpt2Config, Observer, Site, SiteKind};

use crate::FileError;
use crate::file_tensors::Shape;

/// Directions, each added to the output of one block at every position, including generated tokens.
///
/// ```
/// use std::collections::BTreeMap;
///
/// use candle_core::{DType, Device, Tensor};
/// use candle_gpt2::LogitsFor;
/// use candle_gpt2_interpret::{ControlVector, Run};
/// # use candle_gpt2::{Gpt2Config, Gpt2LMHeadModel};
/// # let sizes = Gpt2Config { vocab_size: 11, n_positions: 8, n_embd: 6, n_layer: 2, n_head: 3, ..Gpt2Config::gpt2() };
/// # let model = Gpt2LMHeadModel::load(&sizes, candle_nn::VarBuilder::zeros(DType::F32, &Device::Cpu))?;
///
/// let directions = BTreeMap::from([(1, Tensor::ones(6, DType::F32, &Device::Cpu)?)]);
/// let mut vector = ControlVector::new(directions, model.config())?.scaled(0.5, 0..=1)?;
/// let logits = Run::new(&model, &[1, 2, 3])?.logits(LogitsFor::LastToken, &mut vector)?;
/// assert_eq!(logits.dims(), [1, 1, 11]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
pub struct ControlVector {
    /// Directions `(C)` in f32, by block.
    directions: BTreeMap<usize, Tensor>,
}

impl ControlVector {
    /// Creates a control vector from directions by block.
    ///
    /// # Shapes
    /// `(C)` each.
    ///
    /// # Errors
    /// If a block is out of range, or if a direction does not match the hidden size.
    pub fn new(directions: BTreeMap<usize, Tensor>, model: &Gpt2Config) -> Result<Self, FileError> {
        let mut checked = BTreeMap::new();
        for (layer, direction) in directions {
            let name = format!("direction.{layer}");
            if layer >= model.n_layer {
                return Err(FileError::Key {
                    key: name,
                    expected: format!("a block below {}", model.n_layer),
                    found: layer.to_string(),
                });
            }
            if direction.dims() != [model.n_embd] {
                let (expected, found) = (Shape(&[model.n_embd]), Shape(direction.dims()));
                let (expected, found) = (expected.to_string(), found.to_string());
                return Err(FileError::Shape { name, expected, found });
            }
            checked.insert(layer, direction.to_device(&Device::Cpu)?.to_dtype(DType::F32)?);
        }
        Ok(Self { directions: checked })
    }

    /// Creates a control vector from the tensors (`direction.1` and up) and metadata of a llama.cpp file.
    ///
    /// # Errors
    /// If [`ControlVector::new`] fails, or if the file is not a control vector.
    pub fn from_tensors(
        tensors: &BTreeMap<String, Tensor>,
        entries: &BTreeMap<String, String>,
        model: &Gpt2Config,
    ) -> Result<Self, FileError> {
        let key = "general.architecture";
        let architecture = entries.get(key).map_or("nothing", String::as_str);
        if architecture != "controlvector" {
            let (expected, found) = ("controlvector".into(), architecture.into());
            return Err(FileError::Key { key: key.into(), expected, found });
        }
        let mut directions = BTreeMap::new();
        for (name, tensor) in tensors {
            let layer = name.strip_prefix("direction.").and_then(|layer| layer.parse().ok());
            match layer.filter(|layer| *layer > 0) {
                Some(layer) => directions.insert(layer, tensor.clone()),
                None => {
                    let expected = "tensors named `direction.1`, `direction.2`, …".into();
                    return Err(FileError::Key { key: "tensors".into(), expected, found: name.clone() });
                }
            };
        }
        if directions.is_empty() {
            return Err(FileError::missing(tensors, "direction.1", "(width)"));
        }
        Self::new(directions, model)
    }

    /// Returns the directions by block, `(C)` in f32.
    pub fn directions(&self) -> &BTreeMap<usize, Tensor> {
        &self.directions
    }

    /// Keeps the directions of the blocks in `layers` and multiplies them by `scale`.
    ///
    /// # Errors
    /// If allocation on the device fails.
    pub fn scaled(self, scale: f64, layers: RangeInclusive<usize>) -> candle_core::Result<Self> {
        let kept = self.directions.into_iter().filter(|(layer, _)| layers.contains(layer));
        let scaled = kept.map(|(layer, direction)| Ok((layer, (direction * scale)?)));
        Ok(Self { directions: scaled.collect::<candle_core::Result<_>>()? })
    }

    /// Adds another control vector; directions of the same block are summed.
    ///
    /// # Errors
    /// If the widths differ.
    pub fn with(mut self, other: &Self) -> candle_core::Result<Self> {
        for (layer, direction) in &other.directions {
            let sum = match self.directions.get(layer) {
                Some(known) => (known + direction)?,
                None => direction.clone(),
            };
            self.directions.insert(*layer, sum);
        }
        Ok(self)
    }

    fn at(&self, site: Site) -> Option<&Tensor> {
        site.layer.filter(|_| site.kind == SiteKind::ResidPost).and_then(|layer| self.directions.get(&layer))
    }
}

impl Observer for ControlVector {
    fn wants(&self, site: Site) -> bool {
        self.at(site).is_some()
    }

    fn observe(&mut self, site: Site, value: Tensor) -> candle_core::Result<Tensor> {
        match self.at(site) {
            Some(direction) => {
                value.broadcast_add(&direction.to_dtype(value.dtype())?.to_device(value.device())?)
            }
            None => Ok(value),
        }
    }
}
