//! `gpt2 generate --steer`: a direction that is added to the residual stream of every text.

use std::path::Path;
use std::sync::{Arc, Mutex};

use anyhow::{Context, Result};
use clap::Args;
use gpt2_engine::{LoadedModel, Opened, Vocabulary};
use gpt2_interpret::{InterpretError, Steering};
use gpt2_weights::TensorFile;

use crate::exit::UsageError;
use crate::output;
use crate::progress::Terminal;

/// What is added, and where.
#[derive(Debug, Args)]
pub(crate) struct SteeringArguments {
    /// Add the difference of two texts' residual streams at the first positions: '" Love"-" Hate"', or '" Love"' for its difference from spaces; or a safetensors file with one tensor (n, width)
    #[arg(long, value_name = "TEXTS|FILE", requires = "layer", help_heading = "Steering")]
    pub(crate) steer: Option<String>,
    /// The layer before which it is added
    #[arg(long, value_name = "N", requires = "steer", help_heading = "Steering")]
    pub(crate) layer: Option<usize>,
    /// The factor it is added with
    #[arg(
        long,
        value_name = "X",
        requires = "steer",
        allow_negative_numbers = true,
        default_value_t = 1.0,
        help_heading = "Steering"
    )]
    pub(crate) scale: f64,
    /// Add its mean at every position, those of new tokens too
    #[arg(long, requires = "steer", help_heading = "Steering")]
    pub(crate) everywhere: bool,
}

/// Loads the model, steered if that is asked for.
pub(super) fn load(opened: Opened, arguments: &SteeringArguments) -> Result<LoadedModel> {
    let (Some(steer), Some(layer)) = (&arguments.steer, arguments.layer) else {
        return Ok(opened.load(&Terminal)?);
    };
    if !arguments.scale.is_finite() {
        return Err(UsageError(format!("--scale {}: expected a finite number", arguments.scale)).into());
    }
    let vocabulary = Arc::clone(opened.vocabulary());
    let n_layer = opened.config().n_layer;
    if layer >= n_layer {
        return Err(UsageError(InterpretError::Layer { layer, n_layer }.to_string()).into());
    }
    let texts = texts(steer)?.map(|texts| ids(&vocabulary, texts)).transpose()?;
    let loaded = opened.load(&Terminal)?;
    let steering = match texts {
        Some([towards, away]) => {
            Steering::between(loaded.model(), layer, [&towards, &away], arguments.scale)?
        }
        None => {
            let file = TensorFile::read(Path::new(steer))?;
            let (Some(vectors), 1) = (file.tensors.values().next(), file.tensors.len()) else {
                let found = file.tensors.len();
                return Err(UsageError(format!(
                    "--steer {steer}: expected one tensor (n, width), found {found} tensors"
                ))
                .into());
            };
            let vectors = if vectors.dims().len() == 1 { vectors.unsqueeze(0)? } else { vectors.clone() };
            if !vectors.dtype().is_float() {
                let found = vectors.dtype().as_str();
                return Err(UsageError(format!(
                    "--steer {steer}: expected numbers in floating point, found {found}"
                ))
                .into());
            }
            Steering::new(loaded.model(), layer, (vectors * arguments.scale)?)
                .with_context(|| format!("--steer {steer}"))?
        }
    };
    if steering.is_nothing()? {
        output::print_note("--steer: what is added is zero everywhere; the text is as without it");
    }
    let steering = if arguments.everywhere { steering.everywhere()? } else { steering };
    Ok(loaded.observed_by(Arc::new(Mutex::new(steering))))
}

/// Two texts in quotation marks with a minus between them, or one; `None` where it is a file's name.
fn texts(steer: &str) -> Result<Option<[&str; 2]>> {
    let Some(rest) = steer.strip_prefix('"') else { return Ok(None) };
    let wrong = || {
        UsageError(format!("--steer {steer}: expected '\"TEXT\"-\"TEXT\"', '\"TEXT\"' or the name of a file"))
    };
    let rest = rest.strip_suffix('"').ok_or_else(wrong)?;
    match rest.split_once("\"-\"") {
        Some((_, away)) if away.contains("\"-\"") => Err(wrong().into()),
        Some((towards, away)) => Ok(Some([towards, away])),
        None if rest.contains('"') => Err(wrong().into()),
        None => Ok(Some([rest, ""])),
    }
}

/// The tokens of both, the shorter one with spaces after it.
fn ids(vocabulary: &Vocabulary, texts: [&str; 2]) -> Result<[Vec<u32>; 2]> {
    let mut both = [vocabulary.encode(texts[0])?, vocabulary.encode(texts[1])?];
    let longest = both[0].len().max(both[1].len());
    if both.iter().any(|ids| ids.len() < longest) {
        let [space] = vocabulary.encode(" ")?[..] else {
            let message = "--steer: the texts differ in length, and this vocabulary has no token for a space to fill the shorter one";
            return Err(UsageError(message.into()).into());
        };
        both.iter_mut().for_each(|ids| ids.resize(longest, space));
    }
    Ok(both)
}
