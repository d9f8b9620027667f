//! Checked access to a file's tensors, and errors for dictionary, lens and control vector files.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt::{Display, Formatter};

use candle_core::{DType, Tensor};
use candle_gpt2::{Site, bounded_message, excerpt};

use crate::SiteError;

/// Returns a tensor in f32; rejects a wrong shape and values that are not finite.
pub(crate) fn tensor(
    tensors: &BTreeMap<String, Tensor>,
    name: &str,
    shape: &[usize],
) -> Result<Tensor, FileError> {
    let found =
        tensors.get(name).ok_or_else(|| FileError::missing(tensors, name, &Shape(shape).to_string()))?;
    if found.dims() != shape {
        let [expected, found] = [shape, found.dims()].map(|shape| Shape(shape).to_string());
        return Err(FileError::Shape { name: name.into(), expected, found });
    }
    let found = found.to_dtype(DType::F32)?;
    let values = found.flatten_all()?.to_vec1::<f32>()?;
    match values.iter().position(|value| !value.is_finite()) {
        None => Ok(found),
        Some(place) => {
            Err(FileError::NotFinite { name: name.into(), place, value: values[place].to_string() })
        }
    }
}

/// Returns the size of a tensor's last axis.
pub(crate) fn last_axis(tensors: &BTreeMap<String, Tensor>, name: &str) -> Result<usize, FileError> {
    let found = tensors.get(name).ok_or_else(|| FileError::missing(tensors, name, "(latents, width)"))?;
    Ok(found.dims().last().copied().unwrap_or(0))
}

/// Formats a shape as `(24, 72)`.
pub(crate) struct Shape<'a>(pub(crate) &'a [usize]);

impl Display for Shape<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        let sizes: Vec<String> = self.0.iter().map(usize::to_string).collect();
        write!(f, "({})", sizes.join(", "))
    }
}

/// Error in a dictionary, transcoder, tuned lens or control vector file.
///
/// [`Dictionary::from_tensors`](crate::Dictionary::from_tensors) and
/// [`DictionaryConfig::from_json`](crate::DictionaryConfig::from_json) return it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FileError {
    /// The configuration is not valid JSON.
    #[error("invalid JSON configuration: {error}; use the file that came with the tensors", error = bounded_message(.error))]
    NotJson {
        /// Description of the parse error.
        error: String,
    },
    /// A configuration value is unsupported or missing.
    #[error("`{key}`: expected {expected}; found {found}", key = excerpt(.key), expected = bounded_message(.expected), found = bounded_message(.found))]
    Key {
        /// The key.
        key: String,
        /// Supported values.
        expected: String,
        /// Value in the file.
        found: String,
    },
    /// The hook point is invalid.
    #[error("`{key}`: {error}", key = excerpt(.key))]
    Hook {
        /// The key.
        key: String,
        /// Reason why the name is invalid.
        error: SiteError,
    },
    /// A tensor is missing.
    #[error("tensor `{name}` is missing: expected shape {expected}; the file has {present}", name = excerpt(.name), expected = bounded_message(.expected), present = bounded_message(.present))]
    Missing {
        /// Name of the tensor.
        name: String,
        /// Expected shape.
        expected: String,
        /// Names of the tensors in the file.
        present: String,
    },
    /// A tensor has the wrong shape.
    #[error("tensor `{name}`: expected shape {expected}, found {found}; check that the file is for this model", name = excerpt(.name), expected = bounded_message(.expected), found = bounded_message(.found))]
    Shape {
        /// Name of the tensor.
        name: String,
        /// Shape that the other tensors and the configuration require.
        expected: String,
        /// Shape in the file.
        found: String,
    },
    /// A tensor contains NaN or infinity.
    #[error("tensor `{name}`: element {place} is {value}; the file is damaged and must be downloaded again", name = excerpt(.name), value = bounded_message(.value))]
    NotFinite {
        /// Name of the tensor.
        name: String,
        /// Index of the element in row-major order, counted from 0.
        place: usize,
        /// Value of the element.
        value: String,
    },
    /// The layers of a set of transcoders do not match.
    #[error("layer {layer}: expected {expected}, found {found}; all layers must come from one training run", expected = bounded_message(.expected), found = bounded_message(.found))]
    Layer {
        /// The layer index.
        layer: usize,
        /// Value that the other layers require.
        expected: String,
        /// Value in this layer.
        found: String,
    },
    /// The transcoders are for a model with a different number of layers.
    #[error(
        "found transcoders for {found} layers, but the model has {expected} layers; use the model that the \
         transcoders were trained on"
    )]
    OtherDepth {
        /// Number of layers in the model.
        expected: usize,
        /// Number of layers with transcoders.
        found: usize,
    },
    /// The dictionary is for a model with a different width.
    #[error(
        "the dictionary has width {found}, but the model has width {expected} at {site}; use the model that the \
         dictionary was trained on"
    )]
    OtherModel {
        /// The hook point.
        site: Site,
        /// Width of the model's activations.
        expected: usize,
        /// Width of the dictionary's activations.
        found: usize,
    },
    /// The hook point has no per-token vector that a dictionary could explain.
    #[error(
        "{site} has no per-token vector that an SAE can explain; \
         use a hook point such as resid_post, mlp_out or z"
    )]
    NotExplained {
        /// The hook point.
        site: Site,
    },
    /// A tensor operation failed.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
}

impl FileError {
    pub(crate) fn missing(tensors: &BTreeMap<String, Tensor>, name: &str, expected: &str) -> Self {
        /// Maximum number of names in one message.
        const MOST_NAMES: usize = 8;
        let mut names: Vec<Cow<'_, str>> =
            tensors.keys().take(MOST_NAMES).map(|name| excerpt(name)).collect();
        names.extend((tensors.len() > MOST_NAMES).then_some("…".into()));
        let present = if names.is_empty() { "no tensors".to_owned() } else { names.join(", ") };
        Self::Missing { name: name.into(), expected: expected.into(), present }
    }
}
