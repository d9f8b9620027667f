//! Writing a checkpoint in another format.

use std::fs;
use std::path::{Path, PathBuf};

use candle_gpt2_weights::{WeightsError, WrittenDType, write_gguf, write_hugging_face};
use serde::Serialize;

use crate::{EngineError, ModelOptions, Reporter, Watched};

/// Options of a conversion.
///
/// ```
/// use candle_gpt2_engine::{ConvertOptions, ModelOptions, Silent};
/// use candle_gpt2_weights::WrittenDType;
///
/// # let folder = tempfile::tempdir()?;
/// # let folder = folder.path();
/// let output = folder.join("stories.gguf");
/// let options = ConvertOptions { output, dtype: WrittenDType::Q8_0 };
/// let written = ModelOptions::default().convert(&options, &Silent)?;
/// assert_eq!((written.format, written.dtype), ("gguf", "q8_0"));
/// assert!(written.bytes > 3_000_000);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConvertOptions {
    /// A GGUF file if the name ends in `.gguf`, otherwise a Hugging Face folder. There is nothing there yet.
    pub output: PathBuf,
    /// The type of the written weights.
    pub dtype: WrittenDType,
}

/// The result of a conversion.
///
/// Given by [`ModelOptions::convert`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Conversion {
    /// The file or the folder.
    pub output: PathBuf,
    /// `gguf` or `safetensors`.
    pub format: &'static str,
    /// The type of the weights.
    pub dtype: &'static str,
    /// Bytes of the file that holds them.
    pub bytes: u64,
}

impl ModelOptions {
    /// Writes the checkpoint in another format, with `tokenizer`, or the checkpoint's own. The result appears whole or not at all,
    /// and nothing that exists is overwritten. `device` and the types are not looked at.
    ///
    /// # Errors
    /// When the checkpoint cannot be opened or is not sound in its structure, the format has not the type or the model's arithmetic,
    /// there is no tokenizer for a GGUF file, the output exists or cannot be written, or `reporter` interrupts it.
    pub fn convert(
        &self,
        options: &ConvertOptions,
        reporter: &dyn Reporter,
    ) -> Result<Conversion, EngineError> {
        let ConvertOptions { output, dtype } = options;
        let name = dtype.name();
        if !is_gguf(output) && dtype.is_blocks() {
            let what = format!(
                "`dtype` {name}: a Hugging Face folder holds f32, f16 or bf16; name a .gguf file for {name}"
            );
            return Err(EngineError::Options { what });
        }
        let checkpoint = self.open_checkpoint(reporter)?;
        checkpoint.check()?;
        let tokenizer = match checkpoint.tokenizer(self.tokenizer.as_deref()) {
            Err(error @ WeightsError::NoTokenizer { .. }) if is_gguf(output) => return Err(error.into()),
            // A folder without a tokenizer is still a checkpoint.
            Err(WeightsError::NoTokenizer { .. }) => None,
            loaded => Some(loaded?),
        };
        let progress = Watched::new(reporter, "converting", checkpoint.parameter_bytes());
        let format = match &tokenizer {
            Some(tokenizer) if is_gguf(output) => {
                write_gguf(&checkpoint, tokenizer, output, *dtype, &progress)?;
                "gguf"
            }
            tokenizer => {
                write_hugging_face(&checkpoint, tokenizer.as_ref(), output, *dtype, &progress)?;
                "safetensors"
            }
        };
        drop(progress);
        let weights = if is_gguf(output) { output.clone() } else { output.join("model.safetensors") };
        let written = fs::metadata(&weights).map_err(|error| WeightsError::Read { path: weights, error })?;
        Ok(Conversion { output: output.clone(), format, dtype: name, bytes: written.len() })
    }
}

fn is_gguf(output: &Path) -> bool {
    output.extension().is_some_and(|ending| ending.eq_ignore_ascii_case("gguf"))
}
