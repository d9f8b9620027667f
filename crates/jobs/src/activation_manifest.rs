//! Manifest of a folder of activations: the model, prompts and hook points, and the job's progress.

use std::fs;
use std::path::{Path, PathBuf};

use candle_gpt2_training::StateDifference;
use candle_gpt2_weights::{MappedFile, read_bounded, replace_file};
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::TrainingError;

/// File name of the manifest.
pub(crate) const FILE_NAME: &str = "activations.json";
/// Name and version of the folder's layout.
pub(crate) const SCHEMA: &str = "gpt2.activations/1";
/// Maximum size of a manifest, enough for a million shards.
const MAX_BYTES: u64 = 256 << 20;

/// Contents of a folder of activations, stored as `activations.json`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ActivationManifest {
    pub(crate) schema: String,
    /// Whether all prompts have been written.
    pub(crate) complete: bool,
    /// Name of the model.
    pub(crate) model: String,
    /// Fingerprint of the model's logits, see [`fingerprint`](candle_gpt2_engine::fingerprint).
    pub(crate) fingerprint: String,
    /// Dtype of the model's weights.
    pub(crate) weights: String,
    pub(crate) prompts: Prompts,
    pub(crate) sites: Vec<SiteWidth>,
    /// Dtype of the activations, in safetensors' notation.
    pub(crate) dtype: String,
    /// Token prepended to every sequence.
    pub(crate) bos: Option<u32>,
    /// Maximum length of a sequence in tokens.
    pub(crate) context: usize,
    /// Maximum number of tokens in a shard, unless a single sequence is longer.
    pub(crate) shard_size: usize,
    /// Number of tokens in all shards.
    pub(crate) tokens: usize,
    /// Number of sequences in all shards.
    pub(crate) sequences: usize,
    pub(crate) shards: Vec<ActivationShard>,
}

/// Prompts file that the activations come from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Prompts {
    pub(crate) file: PathBuf,
    pub(crate) bytes: u64,
    pub(crate) crc32: u32,
    /// CRC-32 of the lengths and ids of all sequences.
    ///
    /// A different file format or tokenizer produces different ids from the same bytes.
    pub(crate) ids_crc32: u32,
}

/// Hook point whose activations are stored.
///
/// The report of an [`ActivationsJob`](crate::ActivationsJob) lists them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SiteWidth {
    /// Name in TransformerLens, which is also the name of the tensor.
    pub name: String,
    /// Number of values per token.
    pub width: usize,
}

/// A complete shard.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ActivationShard {
    pub(crate) file: String,
    pub(crate) tokens: usize,
    pub(crate) sequences: usize,
    /// Size of the file.
    pub(crate) bytes: u64,
    /// CRC-32 of the file; absent from folders that older versions wrote.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) crc32: Option<u32>,
}

impl ActivationManifest {
    /// Returns the path of a folder's manifest.
    pub(crate) fn path(folder: &Path) -> PathBuf {
        folder.join(FILE_NAME)
    }

    /// Reads the manifest of a folder; `None` if it has none.
    pub(crate) fn read(folder: &Path) -> Result<Option<Self>, TrainingError> {
        let path = Self::path(folder);
        let damaged = |what: String| TrainingError::Data {
            path: path.clone(),
            what: format!("not a valid activation manifest: {what}; remove the folder and create it again"),
        };
        let text = match read_bounded(&path, MAX_BYTES) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            read => read.map_err(|error| TrainingError::File { path: path.clone(), error })?,
        };
        let manifest: Self = serde_json::from_slice(&text).map_err(|error| damaged(error.to_string()))?;
        if manifest.schema != SCHEMA {
            return Err(damaged(format!("`schema`: expected {SCHEMA}, found {}", manifest.schema)));
        }
        // The names are joined to the folder's path and must not escape it.
        let is_named = |(index, shard): (usize, &ActivationShard)| shard.file == shard_name(index);
        match manifest.shards.iter().enumerate().all(is_named) {
            true => Ok(Some(manifest)),
            false => Err(damaged(format!("expected shards named {}, …", shard_name(0)))),
        }
    }

    /// Writes the manifest to a folder, replacing any existing one.
    pub(crate) fn write(&self, folder: &Path) -> Result<(), TrainingError> {
        let write = |partial: &Path| Ok(fs::write(partial, serde_json::to_string_pretty(self)? + "\n")?);
        Ok(replace_file(&Self::path(folder), write)?)
    }

    /// Rejects a job whose model, prompts or options differ from the folder's.
    pub(crate) fn check_same(&self, folder: &Path, wanted: &Self) -> Result<(), TrainingError> {
        let names = |manifest: &Self| json!(manifest.sites.iter().map(|site| &site.name).collect::<Vec<_>>());
        let model = |manifest: &Self| {
            let short: String = manifest.fingerprint.chars().take(12).collect();
            json!(format!("{} with weights in {} (fingerprint {short})", manifest.model, manifest.weights))
        };
        let mut numbers = vec![
            ("sites", names(self), names(wanted)),
            ("bos", json!(self.bos), json!(wanted.bos)),
            ("shard_size", json!(self.shard_size), json!(wanted.shard_size)),
        ];
        if self.fingerprint != wanted.fingerprint {
            numbers.insert(0, ("model", model(self), model(wanted)));
        }
        let content = |manifest: &Self| (manifest.prompts.bytes, manifest.prompts.crc32);
        if content(self) != content(wanted) {
            numbers.insert(0, ("prompts_file", json!(self.prompts), json!(wanted.prompts)));
        }
        let ids = |manifest: &Self| json!(format!("{:08x}", manifest.prompts.ids_crc32));
        if numbers.iter().all(|(_, there, here)| there == here)
            && self.prompts.ids_crc32 != wanted.prompts.ids_crc32
        {
            // The bytes are the same, but were read with another tokenizer or as another format.
            numbers.push(("checksum of the prompts' token ids", ids(self), ids(wanted)));
        }
        numbers.retain(|(_, there, here)| there != here);
        if numbers.is_empty() {
            return Ok(());
        }
        let differing = numbers.into_iter().map(|(name, there, here)| (name.to_owned(), there, here));
        let difference = StateDifference::Hyperparameters(differing.collect());
        Err(TrainingError::OtherState { path: Self::path(folder), difference })
    }

    /// Rejects shards whose length or checksum has changed since they were written.
    pub(crate) fn check_shards(&self, folder: &Path) -> Result<(), TrainingError> {
        for shard in &self.shards {
            let path = folder.join(&shard.file);
            let file = MappedFile::open(&path)?;
            let (expected, found) = (shard.bytes, file.len() as u64);
            let what = if found != expected {
                format!("expected {expected} bytes, found {found}")
            } else if shard.crc32.is_some_and(|crc32| crc32 != file_crc32(&file)) {
                "the checksum does not match".to_owned()
            } else {
                continue;
            };
            let what = format!("{what}; the shard is damaged: remove the folder and create it again");
            return Err(TrainingError::Data { path, what });
        }
        Ok(())
    }
}

/// CRC-32 of a shard.
///
/// Releases memory while reading, because folders can be larger than the machine's memory.
pub(crate) fn file_crc32(file: &MappedFile) -> u32 {
    const BLOCK_BYTES: usize = 64 << 20;
    let mut hasher = crc32fast::Hasher::new();
    for (index, block) in file.chunks(BLOCK_BYTES).enumerate() {
        hasher.update(block);
        let start = index * BLOCK_BYTES;
        file.forget(start..start + block.len());
    }
    hasher.finalize()
}

/// File name of a shard.
pub(crate) fn shard_name(index: usize) -> String {
    format!("activations_{index:06}.safetensors")
}
