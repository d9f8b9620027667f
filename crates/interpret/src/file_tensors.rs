//! Tensors of a file by their names and shapes, and why the file of a dictionary, a lens or a vector cannot be used.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt::{Display, Formatter};

use candle_core::{DType, Tensor};
use candle_gpt2::{Site, bounded_message, excerpt};

use crate::SiteError;

/// A tensor of this shape and of finite numbers, in f32.
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

/// The size of the last axis of a tensor.
pub(crate) fn last_axis(tensors: &BTreeMap<String, Tensor>, name: &str) -> Result<usize, FileError> {
    let found = tensors.get(name).ok_or_else(|| FileError::missing(tensors, name, "(latents, width)"))?;
    Ok(found.dims().last().copied().unwrap_or(0))
}

/// Prints a shape as `(24, 72)`.
pub(crate) struct Shape<'a>(pub(crate) &'a [usize]);

impl Display for Shape<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        let sizes: Vec<String> = self.0.iter().map(usize::to_string).collect();
        write!(f, "({})", sizes.join(", "))
    }
}

/// Why the file of a dictionary, of a tuned lens or of a control vector cannot be used.
/// [`Dictionary::from_tensors`](crate::Dictionary::from_tensors) and
/// [`DictionaryConfig::from_json`](crate::DictionaryConfig::from_json) return it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FileError {
    /// The configuration is something else.
    #[error("the configuration is not usable JSON: {error}; give the file that came with the tensors", error = bounded_message(.error))]
    NotJson {
        /// What is wrong with it.
        error: String,
    },
    /// The configuration asks for what is not supported, or lacks something.
    #[error("`{key}`: expected {expected}; found {found}", key = excerpt(.key), expected = bounded_message(.expected), found = bounded_message(.found))]
    Key {
        /// The key.
        key: String,
        /// What it can be.
        expected: String,
        /// What it is.
        found: String,
    },
    /// The place is not there.
    #[error("`{key}`: {error}", key = excerpt(.key))]
    Hook {
        /// The key.
        key: String,
        /// What is wrong with its value.
        error: SiteError,
    },
    /// A tensor is not there.
    #[error("tensor `{name}` is missing: expected {expected}; the file has {present}", name = excerpt(.name), expected = bounded_message(.expected), present = bounded_message(.present))]
    Missing {
        /// Its name.
        name: String,
        /// Its shape.
        expected: String,
        /// The names that are there.
        present: String,
    },
    /// A tensor has another shape.
    #[error("tensor `{name}`: expected {expected}, found {found}; the file is of other sizes", name = excerpt(.name), expected = bounded_message(.expected), found = bounded_message(.found))]
    Shape {
        /// Its name.
        name: String,
        /// The shape that the others and the configuration ask for.
        expected: String,
        /// The shape that it has.
        found: String,
    },
    /// A tensor has numbers that nothing can be computed with.
    #[error("tensor `{name}`: element {place} is {value}; the file is damaged, get it again", name = excerpt(.name), value = bounded_message(.value))]
    NotFinite {
        /// Its name.
        name: String,
        /// Which of its elements, in row-major order from 0.
        place: usize,
        /// The value there.
        value: String,
    },
    /// Layers of a set of transcoders do not fit together.
    #[error("layer {layer}: expected {expected}, found {found}; all layers must be of one training", expected = bounded_message(.expected), found = bounded_message(.found))]
    Layer {
        /// The layer.
        layer: usize,
        /// What the others ask for.
        expected: String,
        /// What it has.
        found: String,
    },
    /// The transcoders are of a model with another number of layers.
    #[error(
        "there are transcoders for {found} layers, and the model has {expected}; use the model that they were made for"
    )]
    OtherDepth {
        /// Layers of the model.
        expected: usize,
        /// Layers with transcoders.
        found: usize,
    },
    /// The dictionary is of a model of another width.
    #[error(
        "the dictionary is for values of width {found}, and the model has {expected} at {site}; use the model that it was made for"
    )]
    OtherModel {
        /// The place.
        site: Site,
        /// Width of the model's values.
        expected: usize,
        /// Width of the dictionary's.
        found: usize,
    },
    /// The place has no values of one width.
    #[error(
        "{site} is not a hook point that an SAE can be trained on; \
         residual streams, outputs, MLPs and heads are"
    )]
    NotExplained {
        /// The place.
        site: Site,
    },
    /// A tensor could not be computed with.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
}

impl FileError {
    pub(crate) fn missing(tensors: &BTreeMap<String, Tensor>, name: &str, expected: &str) -> Self {
        /// Names in one message.
        const MOST_NAMES: usize = 8;
        let mut names: Vec<Cow<'_, str>> =
            tensors.keys().take(MOST_NAMES).map(|name| excerpt(name)).collect();
        names.extend((tensors.len() > MOST_NAMES).then_some("…".into()));
        let present = if names.is_empty() { "no tensors".to_owned() } else { names.join(", ") };
        Self::Missing { name: name.into(), expected: expected.into(), present }
    }
}
