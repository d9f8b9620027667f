//! LoRA adapter folder: the settings and the weights file.

use std::path::{Path, PathBuf};

use super::config::AdapterConfig;
use super::names::{ADAPTER_CONFIG, ADAPTER_WEIGHTS, MAX_CONFIG_BYTES};
use crate::files::Files;
use crate::{WeightsError, mistaken_file};

/// LoRA adapter on disk.
///
/// [`Checkpoint::with_adapters`](crate::Checkpoint::with_adapters) reads its tensors and applies it to its
/// base model.
///
/// ```no_run
/// use candle_gpt2_weights::{Adapter, Checkpoint, LoadOptions};
///
/// let adapter = Adapter::open("adapted/adapter")?;
/// println!("trained on {}", adapter.base_model().unwrap_or("an unknown model"));
/// let checkpoint = Checkpoint::open("gpt2")?.with_adapters(&[(adapter, 1.0)])?;
/// let model = checkpoint.load(&LoadOptions::default(), &|_| ())?;
/// # Ok::<(), candle_gpt2_weights::WeightsError>(())
/// ```
#[derive(Debug, Clone)]
#[doc(alias("PeftModel", "LoRA"))]
pub struct Adapter {
    folder: PathBuf,
    pub(super) file: PathBuf,
    pub(super) config: AdapterConfig,
}

impl Adapter {
    /// Reads an adapter's settings, from its folder or from one of the two files in it.
    ///
    /// # Errors
    /// If a file is missing, or the settings are corrupt or unsupported. The message names the file and the
    /// setting.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, WeightsError> {
        let (files, path) = (Files::Disk, path.as_ref());
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let is_part = name == ADAPTER_CONFIG || ADAPTER_WEIGHTS.contains(&name);
        let folder = if is_part { files.folder_of(path) } else { path };
        let refuse = |path: PathBuf, what: String| WeightsError::Adapter { path, what };
        let settings = folder.join(ADAPTER_CONFIG);
        if !files.exists(&settings) {
            return Err(refuse(path.to_owned(), no_settings(&files, path)));
        }
        let json = files.read_small(&settings, MAX_CONFIG_BYTES)?;
        if let Some(what) = mistaken_file::misidentified(&json, "adapter settings") {
            return Err(refuse(settings, what));
        }
        let config = AdapterConfig::new(&json).map_err(|what| refuse(settings, what))?;
        let Some(file) =
            ADAPTER_WEIGHTS.map(|name| folder.join(name)).into_iter().find(|file| files.exists(file))
        else {
            let what =
                format!("{} is missing; copy it from the adapter's source", ADAPTER_WEIGHTS.join(" or "));
            return Err(refuse(folder.to_owned(), what));
        };
        Ok(Self { folder: folder.to_owned(), file, config })
    }

    /// Returns the adapter's folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Returns the model that the adapter was trained on, as a path or a name on the Hub.
    pub fn base_model(&self) -> Option<&str> {
        self.config.base_model.as_deref()
    }

    /// Returns the revision of the base model on the Hub.
    pub fn base_revision(&self) -> Option<&str> {
        self.config.base_revision.as_deref()
    }
}

/// Explains why a path without settings is not an adapter, and suggests a fix.
fn no_settings(files: &Files, path: &Path) -> String {
    let inner = path.join("adapter");
    if !files.exists(path) {
        return "no such file or folder; expected the folder of a LoRA adapter (adapter_config.json and adapter_model.safetensors)"
            .into();
    }
    if files.exists(&inner.join(ADAPTER_CONFIG)) {
        return format!("{ADAPTER_CONFIG} is missing; the adapter is in {}", inner.display());
    }
    match files.is_folder(path) {
        true => format!("{ADAPTER_CONFIG} is missing; pass the folder in which PEFT saved the adapter"),
        false => format!(
            "a file without {ADAPTER_CONFIG} next to it; pass the folder in which PEFT saved the adapter (GGUF adapters are not \
             supported)"
        ),
    }
}
