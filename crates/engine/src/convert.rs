//! Conversion of checkpoints to other formats.

use std::fs;
use std::path::{Path, PathBuf};

use candle_gpt2::Gpt2Config;
use candle_gpt2_weights::{
    Checkpoint, Companions, WeightsError, WrittenDType, read_bounded_text, write_gguf, write_hugging_face,
    write_safetensors_file,
};
use serde::Serialize;

use crate::{EngineError, ModelOptions, ReadJob, Reporter};

/// Options for a conversion.
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
    /// Output path; it must not exist, and its extension selects the format.
    ///
    /// `.gguf` selects a GGUF file, `.safetensors` the weights alone, and anything else a Hugging Face
    /// folder. The name of a folder with the extension of a file needs a trailing slash.
    pub output: PathBuf,
    /// Type in which to store the weights.
    pub dtype: WrittenDType,
}

/// Result of a conversion.
///
/// Returned by [`ModelOptions::convert`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Conversion {
    /// Path of the file or folder.
    pub output: PathBuf,
    /// File format, `gguf` or `safetensors`.
    pub format: &'static str,
    /// Type of the stored weights.
    pub dtype: &'static str,
    /// Size of the weights file in bytes.
    pub bytes: u64,
    /// Notes on checkpoint settings that the output does not contain.
    pub notes: Vec<String>,
}

impl ModelOptions {
    /// Writes the checkpoint in another format, together with its tokenizer and settings.
    ///
    /// [`Companions`](candle_gpt2_weights::Companions) lists these files; `tokenizer` replaces the
    /// checkpoint's own tokenizer. The output appears only when it is complete, and nothing is overwritten.
    /// The device and the types of `self` are ignored. `reporter` receives notes on settings that the output
    /// does not contain.
    ///
    /// # Errors
    /// If the checkpoint cannot be opened, its structure is invalid, or `reporter` interrupts the job. If
    /// the format cannot represent the type or the model's configuration, or a GGUF file would lack or change
    /// the tokenizer. If the output has the wrong extension, exists or cannot be written.
    pub fn convert(
        &self,
        options: &ConvertOptions,
        reporter: &dyn Reporter,
    ) -> Result<Conversion, EngineError> {
        let ConvertOptions { output, dtype } = options;
        let name = dtype.name();
        let kind = OutputKind::of(output)?;
        if kind != OutputKind::Gguf && dtype.number_type().is_blocks() {
            let holder =
                if kind == OutputKind::Folder { "a Hugging Face folder" } else { "a safetensors file" };
            let what = format!(
                "`dtype` {name}: {holder} can only store f32, f16 or bf16; use a .gguf output for {name}"
            );
            return Err(EngineError::Options { what });
        }
        let checkpoint = self.open_checkpoint(reporter)?;
        checkpoint.check()?;
        let companions = checkpoint.companions(self.tokenizer.as_deref())?;
        let progress = ReadJob::new(reporter, "converting", checkpoint.parameter_bytes());
        let (format, notes) = match kind {
            OutputKind::Gguf => ("gguf", write_gguf(&checkpoint, &companions, output, *dtype, &progress)?),
            OutputKind::Safetensors => {
                write_safetensors_file(&checkpoint, output, *dtype, &progress)?;
                ("safetensors", needed_note(output, &checkpoint, &companions).into_iter().collect())
            }
            OutputKind::Folder => {
                ("safetensors", write_hugging_face(&checkpoint, &companions, output, *dtype, &progress)?)
            }
        };
        drop(progress);
        let weights =
            if kind == OutputKind::Folder { output.join("model.safetensors") } else { output.clone() };
        let written = fs::metadata(&weights).map_err(|error| WeightsError::Read { path: weights, error })?;
        notes.iter().for_each(|note| reporter.note(note));
        Ok(Conversion { output: output.clone(), format, dtype: name, bytes: written.len(), notes })
    }
}

/// Kind of output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum OutputKind {
    Gguf,
    Safetensors,
    Folder,
}

impl OutputKind {
    /// Determines the kind of output; rejects file names with unsupported extensions.
    fn of(output: &Path) -> Result<Self, EngineError> {
        /// Known file extensions that contain digits.
        const ENDINGS: [&str; 4] = ["h5", "7z", "mp3", "mp4"];
        let ending = output.extension().and_then(|ending| ending.to_str()).unwrap_or_default();
        let is_ending = ending.bytes().all(|byte| byte.is_ascii_alphabetic()) || ENDINGS.contains(&ending);
        let is_folder = output.as_os_str().to_string_lossy().ends_with(std::path::is_separator);
        if ending.is_empty() || is_folder || !is_ending {
            return Ok(Self::Folder);
        }
        if ending.eq_ignore_ascii_case("gguf") {
            return Ok(Self::Gguf);
        }
        if ending.eq_ignore_ascii_case("safetensors") {
            return Ok(Self::Safetensors);
        }
        let name = output.display();
        let what = format!(
            "`{name}`: unsupported extension `.{ending}`; use .gguf or .safetensors for a file, or `{name}/` for a \
             folder"
        );
        Err(EngineError::Options { what })
    }
}

/// Note on the missing files that a safetensors file needs in its folder.
fn needed_note(file: &Path, checkpoint: &Checkpoint, companions: &Companions) -> Option<String> {
    /// Maximum size of a configuration file to compare, in bytes.
    const MAX_CONFIG_BYTES: u64 = 1 << 20;
    let folder = file.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let own = |text: &str| Gpt2Config::from_json(text).is_ok_and(|config| config == *checkpoint.config());
    let config = folder.join("config.json");
    let has_config = read_bounded_text(&config, MAX_CONFIG_BYTES).is_ok_and(|text| own(&text));
    let mut needed: Vec<&str> = companions.names().filter(|name| !folder.join(name).exists()).collect();
    if companions.tokenizer().is_some()
        && !needed.contains(&"tokenizer.json")
        && !folder.join("tokenizer.json").exists()
        && !folder.join("vocab.json").exists()
    {
        needed.insert(0, "tokenizer.json");
    }
    if !has_config {
        needed.insert(0, "config.json");
    }
    if needed.is_empty() {
        return None;
    }
    let name = file.file_name().unwrap_or(file.as_os_str()).to_string_lossy();
    let (needed, folder) = (needed.join(", "), folder.display());
    Some(format!(
        "{name} contains only the weights; to load it, add these files to {folder}: {needed} (copy them from the \
         model's folder, or run `gpt2 convert` with a folder as the output)"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn output_kind_follows_the_extension() {
        for name in ["x.bin", "foo.xyz", "a/b.pt", "x.h5"] {
            let error = OutputKind::of(Path::new(name)).unwrap_err().to_string();
            assert!(error.contains(name) && error.contains(".gguf"), "{error}");
        }
        for name in ["x", "gpt2-v1.5", "a.b/c", "x.bin/", "x.safetensors/", "gpt2.q8"] {
            assert_eq!(OutputKind::of(Path::new(name)).unwrap(), OutputKind::Folder, "{name}");
        }
        for (name, kind) in [
            ("x.gguf", OutputKind::Gguf),
            ("X.GGUF", OutputKind::Gguf),
            ("a.b/x.safetensors", OutputKind::Safetensors),
        ] {
            assert_eq!(OutputKind::of(Path::new(name)).unwrap(), kind, "{name}");
        }
    }
}
