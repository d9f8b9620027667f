//! A LoRA adapter's folder: its settings and its weights file.

use std::path::{Path, PathBuf};

use super::config::AdapterConfig;
use super::names::{ADAPTER_CONFIG, ADAPTER_WEIGHTS, MAX_CONFIG_BYTES};
use crate::files::Files;
use crate::{WeightsError, mistaken_file};

/// A LoRA adapter. [`Checkpoint::with_adapters`](crate::Checkpoint::with_adapters) reads its tensors and applies it to its base model.
///
/// ```no_run
/// use candle_gpt2_weights::{Adapter, Checkpoint, LoadOptions};
///
/// let adapter = Adapter::open("adapted/adapter".as_ref())?;
/// println!("trained on {}", adapter.base_model().unwrap_or("an unknown model"));
/// let checkpoint = Checkpoint::open("gpt2".as_ref())?.with_adapters(&[(adapter, 1.0)])?;
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
    /// Reads an adapter's settings, from its folder or one of the two files in it.
    ///
    /// # Errors
    /// If a file is missing, or the settings are damaged or unsupported. The message names the file and the setting.
    pub fn open(path: &Path) -> Result<Self, WeightsError> {
        let files = Files::Disk;
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let is_part = name == ADAPTER_CONFIG || ADAPTER_WEIGHTS.contains(&name);
        let folder = if is_part { files.folder_of(path) } else { path };
        let refuse = |path: PathBuf, what: String| WeightsError::Adapter { path, what };
        let settings = folder.join(ADAPTER_CONFIG);
        if !files.exists(&settings) {
            return Err(refuse(path.to_owned(), no_settings(&files, path)));
        }
        let json = files.read_small(&settings, MAX_CONFIG_BYTES)?;
        if let Some(what) = mistaken_file::something_else(&json, "settings of the adapter") {
            return Err(refuse(settings, what));
        }
        let config = AdapterConfig::new(&json).map_err(|what| refuse(settings, what))?;
        let Some(file) =
            ADAPTER_WEIGHTS.map(|name| folder.join(name)).into_iter().find(|file| files.exists(file))
        else {
            let what =
                format!("there is no {}; copy it from the adapter's source", ADAPTER_WEIGHTS.join(" or "));
            return Err(refuse(folder.to_owned(), what));
        };
        Ok(Self { folder: folder.to_owned(), file, config })
    }

    /// The folder that holds the adapter.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The model that the adapter was trained on: a path, or a name on the Hub.
    pub fn base_model(&self) -> Option<&str> {
        self.config.base_model.as_deref()
    }

    /// The revision of the base model on the Hub.
    pub fn base_revision(&self) -> Option<&str> {
        self.config.base_revision.as_deref()
    }
}

/// The reason why a path without settings is no adapter, and what to do.
fn no_settings(files: &Files, path: &Path) -> String {
    let within = path.join("adapter");
    if !files.exists(path) {
        return "no such file or folder; give the folder of a LoRA adapter (adapter_config.json and adapter_model.safetensors)"
            .into();
    }
    if files.exists(&within.join(ADAPTER_CONFIG)) {
        return format!("there is no {ADAPTER_CONFIG}; the adapter is in {}", within.display());
    }
    match files.is_folder(path) {
        true => format!("there is no {ADAPTER_CONFIG}; give the folder that PEFT saved the adapter in"),
        false => format!(
            "a file without {ADAPTER_CONFIG} next to it; give the folder that PEFT saved the adapter in (GGUF adapters are not \
             supported)"
        ),
    }
}
