//! Models in the Hub's cache.

use std::fs;
use std::path::{Path, PathBuf};

use candle_gpt2_weights::read_bounded;
use serde::Serialize;
use serde_json::Value;

use super::HubOptions;

/// Model weight files, best first; an index comes with the prefix and suffix of its shard names.
pub(super) const WEIGHTS: [(&str, Option<(&str, &str)>); 4] = [
    ("model.safetensors", None),
    ("model.safetensors.index.json", Some(("model-", ".safetensors"))),
    ("pytorch_model.bin", None),
    ("pytorch_model.bin.index.json", Some(("pytorch_model-", ".bin"))),
];

/// Configuration file of an adapter.
#[cfg(feature = "hub")]
pub(super) const ADAPTER_CONFIG: &str = "adapter_config.json";
/// Weight files of an adapter, best first.
#[cfg(feature = "hub")]
pub(super) const ADAPTER_WEIGHTS: [&str; 2] = ["adapter_model.safetensors", "adapter_model.bin"];

/// Prefix of model folders in the cache.
pub(super) const MODELS: &str = "models--";
#[cfg(feature = "hub")]
pub(super) const DATASETS: &str = "datasets--";
/// Maximum size of a configuration file read to recognize a model, in bytes.
const MAX_CONFIG_BYTES: u64 = 1_000_000;

/// A model in the cache.
///
/// Part of [`CachedModels`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct CachedModel {
    /// Name on the Hub, `owner/name`.
    pub name: String,
    /// Disk usage of all revisions, in bytes.
    pub bytes: u64,
    /// Whether a revision has both configuration and weights, unlike an interrupted download.
    pub is_whole: bool,
}

/// Models in a cache.
///
/// ```
/// use candle_gpt2_engine::{CachedModels, HubOptions};
///
/// let nowhere = HubOptions { cache: "no/such/folder".into(), ..HubOptions::default() };
/// assert!(CachedModels::of(&nowhere).gpt2.is_empty());
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct CachedModels {
    /// Models whose configuration identifies them as GPT-2, sorted by name.
    pub gpt2: Vec<CachedModel>,
    /// Number of other models, including those without a configuration.
    pub others: usize,
}

impl CachedModels {
    /// Lists the models in the configured cache, or none if the cache folder does not exist.
    pub fn of(options: &HubOptions) -> Self {
        let mut models = Self::default();
        for folder in folders_in(&options.cache) {
            let name = folder.file_name().and_then(|name| name.to_str()?.strip_prefix(MODELS));
            let Some(name) = name.map(|name| name.replace("--", "/")) else { continue };
            let snapshots = folders_in(&folder.join("snapshots"));
            if !snapshots.iter().any(|snapshot| is_gpt2(snapshot)) {
                models.others += 1;
                continue;
            }
            let blobs = folder.join("blobs");
            let held = if blobs.is_dir() { blobs } else { folder.join("snapshots") };
            let is_whole = snapshots.iter().any(|snapshot| holds_a_model(snapshot));
            models.gpt2.push(CachedModel { name, bytes: bytes_in(&held), is_whole });
        }
        models.gpt2.sort_by(|a, b| a.name.cmp(&b.name));
        models
    }
}

/// Whether a snapshot contains a configuration and weights.
pub(super) fn holds_a_model(snapshot: &Path) -> bool {
    let has_weights = WEIGHTS.iter().any(|(weights, _)| snapshot.join(weights).exists());
    snapshot.join("config.json").exists() && has_weights
}

/// Whether a snapshot contains an adapter.
#[cfg(feature = "hub")]
pub(super) fn holds_an_adapter(snapshot: &Path) -> bool {
    let has_weights = ADAPTER_WEIGHTS.iter().any(|weights| snapshot.join(weights).exists());
    snapshot.join(ADAPTER_CONFIG).exists() && has_weights
}

/// Returns the sorted names of cached repositories whose folders have this prefix.
#[cfg(feature = "hub")]
pub(super) fn names(cache: &Path, prefix: &str) -> Vec<String> {
    let name = |folder: PathBuf| Some(folder.file_name()?.to_str()?.strip_prefix(prefix)?.replace("--", "/"));
    let mut names: Vec<String> = folders_in(cache).into_iter().filter_map(name).collect();
    names.sort();
    names
}

fn is_gpt2(snapshot: &Path) -> bool {
    let config = read_bounded(&snapshot.join("config.json"), MAX_CONFIG_BYTES).ok();
    let config = config.and_then(|bytes| serde_json::from_slice::<Value>(&bytes).ok());
    config.is_some_and(|config| config["model_type"] == "gpt2")
}

fn folders_in(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries.map(|entry| entry.path()).filter(|path| path.is_dir()).collect()
}

fn bytes_in(folder: &Path) -> u64 {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let bytes = entries.map(|entry| match entry.metadata() {
        Ok(found) if found.is_dir() => bytes_in(&entry.path()),
        Ok(found) => found.len(),
        Err(_) => 0,
    });
    bytes.sum()
}
