//! Manifest of token files: their tokenizer, texts and token counts, and the job's progress.

use std::fs;
use std::path::{Path, PathBuf};

use candle_gpt2_training::StateDifference;
use candle_gpt2_weights::{Tokenizer, read_bounded, replace_file};
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::corpus::TextFile;
use crate::{ShardFormat, Split, TokenWidth, TrainingError};

/// File name of the manifest.
pub(crate) const FILE_NAME: &str = "tokens.json";
/// Maximum size of a manifest, enough for a million shards.
const MAX_BYTES: u64 = 128 << 20;

/// Contents of a folder of token files.
///
/// The manifest is written before the files, and replaced as a whole as they grow.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Manifest {
    /// Whether all texts have been written.
    pub(crate) complete: bool,
    pub(crate) format: ShardFormat,
    pub(crate) dtype: TokenWidth,
    /// Number of tokens in every shard except the last one of each part.
    pub(crate) shard_tokens: Option<usize>,
    pub(crate) vocab_size: usize,
    /// CRC-32 of the vocabulary, see [`vocabulary_checksum`].
    pub(crate) vocabulary_crc32: u32,
    /// Token that ends each document.
    pub(crate) end_of_text: Option<u32>,
    pub(crate) training: Part,
    pub(crate) held_out: Part,
    pub(crate) sources: Vec<SourceFile>,
}

/// Training or held-out part of the tokens.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Part {
    pub(crate) tokens: usize,
    pub(crate) documents: usize,
    pub(crate) characters: usize,
    /// Shards; the last one may still be incomplete.
    pub(crate) shards: Vec<WrittenShard>,
}

/// A token file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct WrittenShard {
    pub(crate) file: String,
    pub(crate) tokens: usize,
    /// CRC-32 of the tokens' bytes.
    pub(crate) crc32: u32,
}

/// A file with texts.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SourceFile {
    pub(crate) file: PathBuf,
    pub(crate) bytes: u64,
    pub(crate) held_out_from: u64,
    /// Number of bytes whose tokens have been written.
    pub(crate) read: u64,
    /// CRC-32 of these bytes.
    pub(crate) crc32: u32,
}

impl SourceFile {
    pub(crate) fn of(file: &TextFile) -> Self {
        let (bytes, held_out_from) = (file.bytes, file.held_out_from);
        Self { file: file.path.clone(), bytes, held_out_from, read: 0, crc32: 0 }
    }
}

impl Manifest {
    /// Returns the path of a folder's manifest.
    pub(crate) fn path(folder: &Path) -> PathBuf {
        folder.join(FILE_NAME)
    }

    /// Reads the manifest of a folder; `None` if it has none.
    pub(crate) fn read(folder: &Path) -> Result<Option<Self>, TrainingError> {
        let path = Self::path(folder);
        let failed = |error| TrainingError::File { path: path.clone(), error };
        let damaged = |what: String| TrainingError::Data {
            path: path.clone(),
            what: format!("not a valid token manifest: {what}; remove the folder and create it again"),
        };
        let text = match read_bounded(&path, MAX_BYTES) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            read => read.map_err(failed)?,
        };
        let manifest: Self = serde_json::from_slice(&text).map_err(|error| damaged(error.to_string()))?;
        if let Some(source) = manifest.sources.iter().find(|source| source.read > source.bytes) {
            return Err(damaged(format!("`read` exceeds `bytes` for {}", source.file.display())));
        }
        // The names are joined to the folder's path and must not escape it.
        let mut shards = manifest.training.shards.iter().chain(&manifest.held_out.shards);
        match shards.find(|shard| Path::new(&shard.file).file_name() != Some(shard.file.as_ref())) {
            Some(shard) => Err(damaged(format!("`{}` is not a plain file name", shard.file))),
            None => Ok(Some(manifest)),
        }
    }

    /// Writes the manifest to a folder, replacing any existing one.
    pub(crate) fn write(&self, folder: &Path) -> Result<(), TrainingError> {
        let write = |partial: &Path| Ok(fs::write(partial, serde_json::to_string_pretty(self)? + "\n")?);
        Ok(replace_file(&Self::path(folder), write)?)
    }

    pub(crate) fn part(&self, split: Split) -> &Part {
        match split {
            Split::Training => &self.training,
            Split::HeldOut => &self.held_out,
        }
    }

    pub(crate) fn part_mut(&mut self, split: Split) -> &mut Part {
        match split {
            Split::Training => &mut self.training,
            Split::HeldOut => &mut self.held_out,
        }
    }

    /// Returns the part, file index and offset to resume at, or `None` if everything has been read.
    pub(crate) fn next_place(&self) -> Option<(Split, usize, u64)> {
        let next = |split: Split, end: fn(&SourceFile) -> u64| {
            let unread = self.sources.iter().position(|source| source.read < end(source));
            unread.and_then(|index| Some((split, index, self.sources.get(index)?.read)))
        };
        next(Split::Training, |source| source.held_out_from)
            .or_else(|| next(Split::HeldOut, |source| source.bytes))
    }

    /// Returns the file name of a shard.
    pub(crate) fn shard_name(&self, split: Split, index: usize) -> String {
        let part = match split {
            Split::Training => "train",
            Split::HeldOut => "val",
        };
        match self.shard_tokens {
            None => format!("{part}.bin"),
            Some(_) => format!("{part}_{index:06}.bin"),
        }
    }

    /// Rejects an incomplete folder.
    pub(crate) fn check_whole(&self, folder: &Path) -> Result<(), TrainingError> {
        match self.complete {
            true => Ok(()),
            false => Err(refuse(
                folder,
                "incomplete, because its job was interrupted; resume the job, or remove the folder and start over".to_owned(),
            )),
        }
    }

    /// Rejects a folder with tokens from a different tokenizer.
    pub(crate) fn check_vocabulary(&self, folder: &Path, tokenizer: &Tokenizer) -> Result<(), TrainingError> {
        let found = vocabulary_checksum(tokenizer);
        match self.vocabulary_crc32 == found {
            true => Ok(()),
            false => Err(refuse(
                folder,
                format!(
                    "the tokens come from a different vocabulary ({} tokens, checksum {:08x}) than this model's (checksum {found:08x}); \
                     tokenize the texts with this model's tokenizer",
                    self.vocab_size, self.vocabulary_crc32
                ),
            )),
        }
    }

    /// Rejects shards that have changed since they were written.
    pub(crate) fn check_contents(
        &self,
        folder: &Path,
        split: Split,
        found: &[WrittenShard],
    ) -> Result<(), TrainingError> {
        let different = self.part(split).shards.iter().zip(found).find(|(written, found)| written != found);
        match different {
            None => Ok(()),
            Some((written, _)) => Err(refuse(
                &folder.join(&written.file),
                "the checksum of the tokens does not match: the file is damaged; create it again".to_owned(),
            )),
        }
    }

    /// Rejects a job with different texts or options.
    pub(crate) fn check_same(&self, folder: &Path, wanted: &Self) -> Result<(), TrainingError> {
        let data = |manifest: &Self| -> Vec<_> {
            manifest.sources.iter().map(|source| (source.file.clone(), source.bytes)).collect()
        };
        let vocabulary =
            |manifest: &Self| (manifest.vocab_size, manifest.vocabulary_crc32, manifest.end_of_text);
        let is_same = (data(self), vocabulary(self)) == (data(wanted), vocabulary(wanted));
        let held_out = |manifest: &Self| -> Vec<_> {
            manifest.sources.iter().map(|source| source.held_out_from).collect()
        };
        let numbers = [
            ("format", json!(self.format), json!(wanted.format)),
            ("dtype", json!(self.dtype), json!(wanted.dtype)),
            ("shard_tokens", json!(self.shard_tokens), json!(wanted.shard_tokens)),
            ("held_out_from", json!(held_out(self)), json!(held_out(wanted))),
        ];
        let differing = numbers.into_iter().filter(|(_, there, here)| there != here);
        let differing: Vec<_> = differing.map(|(name, there, here)| (name.to_owned(), there, here)).collect();
        let difference = match (is_same, differing.is_empty()) {
            (true, true) => return Ok(()),
            (true, false) => StateDifference::Hyperparameters(differing),
            (false, _) => StateDifference::Data,
        };
        Err(TrainingError::OtherState { path: Self::path(folder), difference })
    }
}

fn refuse(path: &Path, what: String) -> TrainingError {
    TrainingError::Data { path: path.to_owned(), what }
}

/// CRC-32 of a vocabulary: all tokens in id order, each with its id.
pub(crate) fn vocabulary_checksum(tokenizer: &Tokenizer) -> u32 {
    let mut tokens: Vec<(u32, String)> =
        tokenizer.get_vocab(true).into_iter().map(|(token, id)| (id, token)).collect();
    tokens.sort_unstable();
    let mut checksum = crc32fast::Hasher::new();
    for (id, token) in tokens {
        checksum.update(&id.to_le_bytes());
        checksum.update(token.as_bytes());
        // This byte never occurs in UTF-8, so it separates a token from the next id.
        checksum.update(&[0xff]);
    }
    checksum.finalize()
}
