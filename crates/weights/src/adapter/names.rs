//! Adapter file names, and messages for an adapter that is passed in place of a model.

use std::path::Path;

use crate::WeightsError;
use crate::files::Files;

/// PEFT adapter settings file.
pub(crate) const ADAPTER_CONFIG: &str = "adapter_config.json";
/// Adapter weights files, in PEFT's lookup order.
pub(crate) const ADAPTER_WEIGHTS: [&str; 2] = ["adapter_model.safetensors", "adapter_model.bin"];
/// Maximum size of the settings file; real ones are about a kilobyte.
pub(super) const MAX_CONFIG_BYTES: u64 = 1 << 20;

/// Returns the error for a path that contains an adapter instead of a model, with a usage hint.
pub(crate) fn instead_of_model(files: &Files, path: &Path) -> WeightsError {
    let folder = if files.is_folder(path) { path } else { files.folder_of(path) };
    let json = files.read_small(&folder.join(ADAPTER_CONFIG), MAX_CONFIG_BYTES).ok();
    let config =
        json.and_then(|json| serde_json::from_slice::<serde_json::Value>(&json).ok()).unwrap_or_default();
    let base = config["base_model_name_or_path"].as_str().filter(|base| !base.trim().is_empty());
    let base = base.map(candle_gpt2::excerpt);
    let (of_base, model) = match &base {
        Some(base) => (format!(" for {base}"), String::new()),
        None => (String::new(), " --model BASE".to_owned()),
    };
    let adapter = folder.display();
    let what = format!(
        "an adapter{of_base}, not a model; use `--adapter {adapter}{model}` in place of `--model {adapter}`, or merge it: \
         `gpt2 convert {} OUT --adapter {adapter}`",
        base.as_deref().unwrap_or("BASE")
    );
    WeightsError::NotWeights { path: path.to_owned(), what }
}

/// Returns a note that the adapter next to the weights is not applied.
pub(crate) fn adjacent_note(weights: &str, folder: &Path) -> String {
    format!(
        "the adapter next to {weights} ({ADAPTER_CONFIG}) is not applied; to apply it, add `--adapter {}`",
        folder.display()
    )
}
