//! A direction that is added to the residual stream of every text.

use std::path::PathBuf;

use candle_core::Tensor;
use candle_gpt2_engine::{LoadedModel, Reporter};
use candle_gpt2_interpret::{InterpretError, Steering};
use candle_gpt2_weights::TensorFile;

use crate::error::{Result, wrong};
use crate::{LookError, Reader, Text};

/// A steering vector, and where it is added.
///
/// ```
/// use candle_gpt2_engine::{ModelOptions, Silent};
/// use candle_gpt2_look::{Reader, Steer, Towards};
///
/// let model = ModelOptions::default().open(&Silent)?.load(&Silent)?;
/// let reader = Reader::without_bos(model.vocabulary());
/// let towards = Towards::read("\" happy\"-\" sad\"")?;
/// let steer = Steer { towards, layer: 2, scale: 4.0, everywhere: true };
/// let steering = steer.check(&reader)?.steering(&model, &Silent)?;
/// let steered = model.observed_by(std::sync::Arc::new(std::sync::Mutex::new(steering)));
/// assert_eq!(steered.config().n_layer, 6);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
pub struct Steer {
    /// What is added (`steer`).
    pub towards: Towards,
    /// The layer before which it is added (`layer`).
    pub layer: usize,
    /// The factor it is added with (`scale`).
    pub scale: f64,
    /// Whether its mean is added at every position, those of new tokens too (`everywhere`).
    pub everywhere: bool,
}

/// The vector that is added.
///
/// A field of [`Steer`].
#[derive(Debug, Clone)]
pub enum Towards {
    /// The difference of two texts' residual streams at the first positions; the shorter one has spaces after it.
    Texts {
        /// The text that it leads to.
        towards: Text,
        /// The text that it leads away from.
        away: Text,
    },
    /// A safetensors file with one tensor, `(n, width)` or `(width)`.
    File(PathBuf),
    /// Vectors, `(n, width)` or `(width)`.
    Vectors(Tensor),
}

impl Towards {
    /// Reads two texts in quotation marks with a minus between them, `" Love"-" Hate"`, or one, or the name of a file.
    ///
    /// # Errors
    /// When it is something else.
    pub fn read(text: &str) -> Result<Self> {
        let Some(rest) = text.strip_prefix('"') else { return Ok(Self::File(text.into())) };
        let other = || {
            wrong(format!("`steer` {text}: expected '\"TEXT\"-\"TEXT\"', '\"TEXT\"' or the name of a file"))
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

/// What steering needs besides the weights.
///
/// Given by [`Steer::check`].
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
    /// Reads and checks what can be without the weights of the model.
    ///
    /// # Errors
    /// When an option or a text does not fit the model, or the file cannot be used.
    pub fn check(&self, reader: &Reader) -> Result<CheckedSteer> {
        let Self { layer, scale, everywhere, .. } = *self;
        if !scale.is_finite() {
            return Err(wrong(format!("`scale` {scale}: expected a finite number")));
        }
        let n_layer = reader.config().n_layer;
        if layer >= n_layer {
            return Err(InterpretError::Layer { layer, n_layer }.into());
        }
        let vectors = match &self.towards {
            Towards::Texts { towards, away } => Vectors::Between(both(reader, [towards, away])?),
            Towards::File(path) => {
                let file = TensorFile::read(path)?;
                let origin = format!("`steer` {}", path.display());
                let (Some(vectors), 1) = (file.tensors.values().next(), file.tensors.len()) else {
                    let found = file.tensors.len();
                    return Err(wrong(format!(
                        "{origin}: expected one tensor (n, width), found {found} tensors"
                    )));
                };
                Vectors::Given { vectors: rows(vectors, &origin)?, origin }
            }
            Towards::Vectors(vectors) => {
                Vectors::Given { vectors: rows(vectors, "`steer`")?, origin: "`steer`".into() }
            }
        };
        Ok(CheckedSteer { vectors, layer, scale, everywhere })
    }
}

impl CheckedSteer {
    /// What adds the direction to the passes of a model.
    ///
    /// # Errors
    /// When the direction does not fit the model, and those of the model.
    pub fn steering(self, loaded: &LoadedModel, reporter: &dyn Reporter) -> Result<Steering> {
        let Self { vectors, layer, scale, everywhere } = self;
        let steering = match vectors {
            Vectors::Between([towards, away]) => {
                Steering::between(loaded.model(), layer, [&towards, &away], scale)?
            }
            Vectors::Given { vectors, origin } => Steering::new(loaded.model(), layer, (vectors * scale)?)
                .map_err(|error| LookError::In { origin, error: Box::new(error.into()) })?,
        };
        if steering.is_nothing()? {
            reporter.note("the steering vector is zero everywhere; the text is as without it");
        }
        Ok(if everywhere { steering.everywhere()? } else { steering })
    }
}

/// Vectors in floating point as rows.
fn rows(vectors: &Tensor, origin: &str) -> Result<Tensor> {
    if !vectors.dtype().is_float() {
        let found = vectors.dtype().as_str();
        return Err(wrong(format!("{origin}: expected numbers in floating point, found {found}")));
    }
    Ok(if vectors.dims().len() == 1 { vectors.unsqueeze(0)? } else { vectors.clone() })
}

/// The tokens of both, the shorter one with spaces after it.
fn both(reader: &Reader, texts: [&Text; 2]) -> Result<[Vec<u32>; 2]> {
    let mut both = [reader.tokens(texts[0])?, reader.tokens(texts[1])?];
    let longest = both[0].len().max(both[1].len());
    if both.iter().any(|ids| ids.len() < longest) {
        let [space] = reader.vocabulary().encode(" ")?[..] else {
            return Err(wrong(
                "`steer`: the texts differ in length, and this vocabulary has no token for a space to fill the shorter one",
            ));
        };
        both.iter_mut().for_each(|ids| ids.resize(longest, space));
    }
    Ok(both)
}
