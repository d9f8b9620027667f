//! The manifest of a folder of activations: their model, prompts and hook points, and how far the job is.

use std::fs;
use std::path::{Path, PathBuf};

use candle_gpt2_training::StateDifference;
use candle_gpt2_weights::{MappedFile, read_bounded, replace_file};
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::TrainingError;

/// Name of the file.
pub(crate) const FILE_NAME: &str = "activations.json";
/// Names the layout of the folder and its version.
pub(crate) const SCHEMA: &str = "gpt2.activations/1";
/// Largest one that is read: a million shards.
const MAX_BYTES: u64 = 256 << 20;

/// The contents of a folder of activations, as its `activations.json` has them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ActivationManifest {
    pub(crate) schema: String,
    /// Whether all prompts are written.
    pub(crate) complete: bool,
    /// What the model was called.
    pub(crate) model: String,
    /// What its logits are, see [`fingerprint`](candle_gpt2_engine::fingerprint).
    pub(crate) fingerprint: String,
    /// Type of the model's weights.
    pub(crate) weights: String,
    pub(crate) prompts: Prompts,
    pub(crate) sites: Vec<SiteWidth>,
    /// Type of the activations, in safetensors' words.
    pub(crate) dtype: String,
    /// The token that every sequence begins with besides its own.
    pub(crate) bos: Option<u32>,
    /// Tokens of the longest sequence that there may be.
    pub(crate) context: usize,
    /// Tokens that a shard has at most, unless a single sequence has more.
    pub(crate) shard_size: usize,
    /// Of all shards.
    pub(crate) tokens: usize,
    /// Of all shards.
    pub(crate) sequences: usize,
    pub(crate) shards: Vec<ActivationShard>,
}

/// The file of prompts.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Prompts {
    pub(crate) file: PathBuf,
    pub(crate) bytes: u64,
    pub(crate) crc32: u32,
    /// What the sequences are made of: the CRC-32 of the lengths and ids of all. Another format or tokenizer gives other ids.
    pub(crate) ids_crc32: u32,
}

/// A hook point that activations are of. Part of the report of an [`ActivationsJob`](crate::ActivationsJob).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SiteWidth {
    /// TransformerLens' name, which is that of the tensor.
    pub name: String,
    /// Numbers for each token.
    pub width: usize,
}

/// A shard that is whole.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ActivationShard {
    pub(crate) file: String,
    pub(crate) tokens: usize,
    pub(crate) sequences: usize,
    /// Of the file.
    pub(crate) bytes: u64,
    /// CRC-32 of the file; absent from folders of older versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) crc32: Option<u32>,
}

impl ActivationManifest {
    /// Where the manifest of a folder is.
    pub(crate) fn path(folder: &Path) -> PathBuf {
        folder.join(FILE_NAME)
    }

    /// The manifest of a folder that has one.
    pub(crate) fn read(folder: &Path) -> Result<Option<Self>, TrainingError> {
        let path = Self::path(folder);
        let damaged = |what: String| TrainingError::Data {
            path: path.clone(),
            what: format!(
                "not the list of a folder of activations: {what}; remove the folder and make it again"
            ),
        };
        let text = match read_bounded(&path, MAX_BYTES) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            read => read.map_err(|error| TrainingError::File { path: path.clone(), error })?,
        };
        let manifest: Self = serde_json::from_slice(&text).map_err(|error| damaged(error.to_string()))?;
        if manifest.schema != SCHEMA {
            return Err(damaged(format!("`schema`: expected {SCHEMA}, found {}", manifest.schema)));
        }
        // The names are joined to the folder's, and must not lead out of it.
        let is_named = |(index, shard): (usize, &ActivationShard)| shard.file == shard_name(index);
        match manifest.shards.iter().enumerate().all(is_named) {
            true => Ok(Some(manifest)),
            false => Err(damaged(format!("its shards are not {}, …", shard_name(0)))),
        }
    }

    /// Writes it to a folder, in place of the one that is there.
    pub(crate) fn write(&self, folder: &Path) -> Result<(), TrainingError> {
        let write = |partial: &Path| Ok(fs::write(partial, serde_json::to_string_pretty(self)? + "\n")?);
        Ok(replace_file(&Self::path(folder), write)?)
    }

    /// Refuses to continue with another model, other prompts or other options than those of the folder.
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
        let ids = |manifest: &Self| json!(format!("with the checksum {:08x}", manifest.prompts.ids_crc32));
        if numbers.iter().all(|(_, there, here)| there == here)
            && self.prompts.ids_crc32 != wanted.prompts.ids_crc32
        {
            // The same bytes, read by another tokenizer or as another format.
            numbers.push(("token ids of the prompts", ids(self), ids(wanted)));
        }
        numbers.retain(|(_, there, here)| there != here);
        if numbers.is_empty() {
            return Ok(());
        }
        let differing = numbers.into_iter().map(|(name, there, here)| (name.to_owned(), there, here));
        let difference = StateDifference::Numbers(differing.collect());
        Err(TrainingError::OtherState { path: Self::path(folder), difference })
    }

    /// Rejects shards with another length or checksum than when they were written.
    pub(crate) fn check_shards(&self, folder: &Path) -> Result<(), TrainingError> {
        for shard in &self.shards {
            let path = folder.join(&shard.file);
            let file = MappedFile::open(&path)?;
            let (expected, found) = (shard.bytes, file.len() as u64);
            let what = if found != expected {
                format!("expected {expected} bytes, found {found}")
            } else if shard.crc32.is_some_and(|crc32| crc32 != file_crc32(&file)) {
                "its checksum does not match".to_owned()
            } else {
                continue;
            };
            let what = format!("{what}: it is damaged; remove the folder and make it again");
            return Err(TrainingError::Data { path, what });
        }
        Ok(())
    }
}

/// CRC-32 of a shard. Releases memory as it reads, because folders can be larger than the machine's memory.
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

/// The file name of a shard.
pub(crate) fn shard_name(index: usize) -> String {
    format!("activations_{index:06}.safetensors")
}
