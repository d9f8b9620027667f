//! Steering: a direction added to the residual stream of every text.

use std::path::PathBuf;

use candle_core::Tensor;
use candle_gpt2_engine::{LoadedModel, Reporter};
use candle_gpt2_interpret::{InterpretError, Steering};
use candle_gpt2_weights::TensorFile;

use crate::error::{Result, invalid_option};
use crate::{LookError, Reader, Text};

/// A steering vector with its layer, scale and positions.
///
/// ```
/// use candle_gpt2_engine::{ModelOptions, Silent};
/// use candle_gpt2_look::{Reader, Steer, SteeringSource};
///
/// let model = ModelOptions::default().open(&Silent)?.load(&Silent)?;
/// let reader = Reader::without_bos(model.vocabulary());
/// let towards = SteeringSource::read("\" happy\"-\" sad\"")?;
/// let steer = Steer { towards, layer: 2, scale: 4.0, everywhere: true };
/// let steering = steer.check(&reader)?.steering(&model, &Silent)?;
/// let steered = model.observed_by(std::sync::Arc::new(std::sync::Mutex::new(steering)));
/// assert_eq!(steered.config().n_layer, 7);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
pub struct Steer {
    /// Vector to add (`steer`).
    pub towards: SteeringSource,
    /// Layer before which the vector is added (`layer`).
    pub layer: usize,
    /// Scale factor of the vector (`scale`).
    pub scale: f64,
    /// Whether the vector's mean is added at every position, including new tokens (`everywhere`).
    pub everywhere: bool,
}

/// Source of a steering vector.
///
/// A field of [`Steer`].
#[derive(Debug, Clone)]
pub enum SteeringSource {
    /// Difference between two texts' residual streams at the first positions.
    ///
    /// The shorter text is padded with spaces.
    Texts {
        /// Text to steer towards.
        towards: Text,
        /// Text to steer away from.
        away: Text,
    },
    /// A safetensors file with one tensor, `(n, width)` or `(width)`.
    File(PathBuf),
    /// Vectors, `(n, width)` or `(width)`.
    Vectors(Tensor),
}

impl SteeringSource {
    /// Parses two texts in quotation marks with a minus between them, one such text, or a file name.
    ///
    /// An example with two texts is `" Love"-" Hate"`.
    ///
    /// # Errors
    /// If the quotation marks do not match this form.
    pub fn read(text: &str) -> Result<Self> {
        let Some(rest) = text.strip_prefix('"') else { return Ok(Self::File(text.into())) };
        let other = || {
            invalid_option(format!("`steer` {text}: expected '\"TEXT\"-\"TEXT\"', '\"TEXT\"' or a file name"))
        };
        let rest = rest.strip_suffix('"').ok_or_else(other)?;
        let (towards, away) = match rest.split_once("\"-\"") {
            Some((_, away)) if away.contains("\"-\"") => return Err(other()),
            Some(both) => both,
            None if rest.contains('"') => return Err(other()),
            None => (rest, ""),
        };
        Ok(Self::Texts { towards: Text::Words(towards.to_owned()), away: Text::Words(away.to_owned()) })
    }
}

/// Validated options of steering.
///
/// Returned by [`Steer::check`].
#[derive(Debug)]
pub struct CheckedSteer {
    vectors: Vectors,
    layer: usize,
    scale: f64,
    everywhere: bool,
}

#[derive(Debug)]
enum Vectors {
    Between([Vec<u32>; 2]),
    Given { vectors: Tensor, origin: String },
}

impl Steer {
    /// Validates the texts and the options without the model's weights.
    ///
    /// # Errors
    /// If an option or a text does not fit the model, or the file cannot be used.
    pub fn check(&self, reader: &Reader) -> Result<CheckedSteer> {
        let Self { layer, scale, everywhere, .. } = *self;
        if !scale.is_finite() {
            return Err(invalid_option(format!("`scale` {scale}: expected a finite number")));
        }
        let n_layer = reader.config().n_layer;
        if layer >= n_layer {
            return Err(InterpretError::Layer { layer, n_layer }.into());
        }
        let vectors = match &self.towards {
            SteeringSource::Texts { towards, away } => {
                Vectors::Between(encode_padded(reader, [towards, away])?)
            }
            SteeringSource::File(path) => {
                let file = TensorFile::read(path)?;
                let origin = format!("`steer` {}", path.display());
                let (Some(vectors), 1) = (file.tensors.values().next(), file.tensors.len()) else {
                    let found = file.tensors.len();
                    return Err(invalid_option(format!(
                        "{origin}: expected one tensor of shape (n, width), found {found} tensors"
                    )));
                };
                Vectors::Given { vectors: rows(vectors, &origin)?, origin }
            }
            SteeringSource::Vectors(vectors) => {
                Vectors::Given { vectors: rows(vectors, "`steer`")?, origin: "`steer`".into() }
            }
        };
        Ok(CheckedSteer { vectors, layer, scale, everywhere })
    }
}

impl CheckedSteer {
    /// Creates the observer that adds the direction during forward passes.
    ///
    /// # Errors
    /// If the direction does not fit the model, or the model fails.
    pub fn steering(self, loaded: &LoadedModel, reporter: &dyn Reporter) -> Result<Steering> {
        let Self { vectors, layer, scale, everywhere } = self;
        let steering = match vectors {
            Vectors::Between([towards, away]) => {
                Steering::between(loaded.model(), layer, [&towards, &away], scale)?
            }
            Vectors::Given { vectors, origin } => Steering::new(loaded.model(), layer, (vectors * scale)?)
                .map_err(|error| LookError::In { origin, error: Box::new(error.into()) })?,
        };
        if steering.is_zero()? {
            reporter.note("the steering vector is zero and has no effect");
        }
        Ok(if everywhere { steering.everywhere()? } else { steering })
    }
}

/// Returns floating-point vectors as rows, `(n, width)`; rejects other types.
fn rows(vectors: &Tensor, origin: &str) -> Result<Tensor> {
    if !vectors.dtype().is_float() {
        let found = vectors.dtype().as_str();
        return Err(invalid_option(format!("{origin}: expected a floating-point tensor, found {found}")));
    }
    Ok(if vectors.dims().len() == 1 { vectors.unsqueeze(0)? } else { vectors.clone() })
}

/// Encodes both texts, and pads the shorter one with spaces.
fn encode_padded(reader: &Reader, texts: [&Text; 2]) -> Result<[Vec<u32>; 2]> {
    let mut both = [reader.tokens(texts[0])?, reader.tokens(texts[1])?];
    let longest = both[0].len().max(both[1].len());
    if both.iter().any(|ids| ids.len() < longest) {
        let [space] = reader.vocabulary().encode(" ")?[..] else {
            return Err(invalid_option(
                "`steer`: the texts differ in length, and this vocabulary has no space token to pad the \
                 shorter one",
            ));
        };
        both.iter_mut().for_each(|ids| ids.resize(longest, space));
    }
    Ok(both)
}
