//! Tuned lens: a linear map per layer from the residual stream to the final one.
//!
//! The map is `h' = h + A_l · h + b_l` for the input `h` of block `l`. The final norm and output head follow,
//! as in the logit lens. Source: arXiv:2303.08112 and AlignmentResearch/tuned-lens, `tuned_lens/nn/lenses.py`
//! at 00dc043. There, `params.pt` holds `{l}.weight` `(C, C)` and `{l}.bias` `(C)` of layers `0..L`, and
//! `config.json` the sizes. Callers read the files and pass their tensors and JSON text.

use std::collections::BTreeMap;

use candle_core::{DType, Device, Tensor, bail};
use serde_json::Value;

use crate::FileError;
use crate::file_tensors::tensor;

/// The only supported lens type.
const LENS_TYPE: &str = "linear_tuned_lens";

/// A linear map for each layer's residual stream.
///
/// ```
/// use std::collections::BTreeMap;
///
/// use candle_core::{DType, Device, Tensor};
/// use candle_gpt2_interpret::TunedLens;
///
/// let zeros = |shape: &[usize]| Tensor::zeros(shape, DType::F32, &Device::Cpu);
/// let tensors = BTreeMap::from([
///     ("0.weight".to_owned(), zeros(&[3, 3])?),
///     ("0.bias".to_owned(), Tensor::new(&[1f32, 2., 4.], &Device::Cpu)?),
/// ]);
/// let lens = TunedLens::from_tensors(&tensors, 1, 3)?;
/// assert_eq!(lens.translate(0, &zeros(&[3])?)?.to_vec1::<f32>()?, [1., 2., 4.]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
pub struct TunedLens {
    /// `A_l` transposed, `(C, C)`, and `b_l`, `(C)`, for each layer.
    layers: Vec<(Tensor, Tensor)>,
}

impl TunedLens {
    /// Creates the lens for a model with `n_layer` blocks and this width, from tensors on one device.
    ///
    /// A common prefix of the names (`layer_translators.0.weight`) is detected, and tensors without it are
    /// ignored.
    ///
    /// # Errors
    /// If a tensor is missing or has the wrong shape, or if the lens has too many layers.
    pub fn from_tensors(
        tensors: &BTreeMap<String, Tensor>,
        n_layer: usize,
        width: usize,
    ) -> Result<Self, FileError> {
        let is_prefix = |prefix: &&str| prefix.is_empty() || prefix.ends_with('.');
        let prefixes = tensors.keys().filter_map(|name| name.strip_suffix("0.weight")).filter(is_prefix);
        let prefix = prefixes.min_by_key(|prefix| prefix.len()).unwrap_or_default();
        let layer = |layer: usize| {
            let weight = tensor(tensors, &format!("{prefix}{layer}.weight"), &[width, width])?;
            let bias = tensor(tensors, &format!("{prefix}{layer}.bias"), &[width])?;
            Ok((weight.t()?, bias))
        };
        let layers = (0..n_layer).map(layer).collect::<Result<Vec<_>, FileError>>()?;
        let surplus = format!("{prefix}{n_layer}.weight");
        if tensors.contains_key(&surplus) {
            return Err(FileError::Key {
                key: surplus,
                expected: format!("at most {n_layer} layers (use a lens trained on this model)"),
                found: "an additional layer".into(),
            });
        }
        Ok(Self { layers })
    }

    /// Checks that the text of a lens `config.json` matches a model of this size.
    ///
    /// # Errors
    /// If the sizes or the lens type differ, or if the text is not JSON.
    pub fn check_config(text: &str, n_layer: usize, width: usize) -> Result<(), FileError> {
        let config: Value = serde_json::from_str(text.trim_start_matches('\u{feff}'))
            .map_err(|error| FileError::NotJson { error: error.to_string() })?;
        for (key, expected) in [
            ("d_model", width.into()),
            ("num_hidden_layers", n_layer.into()),
            ("lens_type", LENS_TYPE.into()),
        ] {
            let found = config.get(key).unwrap_or(&expected);
            if *found != expected {
                let (expected, found) = (format!("{expected}, for this model"), found.to_string());
                return Err(FileError::Key { key: key.into(), expected, found });
            }
        }
        Ok(())
    }

    /// Copies the lens to a device.
    ///
    /// # Errors
    /// If allocation on the device fails.
    pub fn to_device(&self, device: &Device) -> candle_core::Result<Self> {
        let moved =
            |(weight, bias): &(Tensor, Tensor)| Ok((weight.to_device(device)?, bias.to_device(device)?));
        Ok(Self { layers: self.layers.iter().map(moved).collect::<candle_core::Result<_>>()? })
    }

    /// Maps the input of block `layer` to `h + A_l · h + b_l`, in the dtype of `h`.
    ///
    /// # Shapes
    /// `h` is `(…, C)`, and so is the result.
    ///
    /// # Errors
    /// If `layer` is out of range, or if the last axis is not `C`.
    pub fn translate(&self, layer: usize, h: &Tensor) -> candle_core::Result<Tensor> {
        let Some((weight, bias)) = self.layers.get(layer) else {
            bail!(
                "layer {layer} is out of range; the tuned lens has {} layers, counted from 0",
                self.layers.len()
            );
        };
        let width = bias.elem_count();
        if h.dims().last() != Some(&width) {
            bail!("the tuned lens expects width {width}, found shape {:?}", h.dims());
        }
        let rows = h.reshape(((), width))?.to_dtype(DType::F32)?; // (N, C)
        let change = rows.matmul(weight)?.broadcast_add(bias)?; // (N, C)
        (rows + change)?.reshape(h.shape())?.to_dtype(h.dtype())
    }
}
