//! Writer of token files; an interruption loses only the data written since the last save.
//!
//! A file gets its final name when it is complete. The manifest records how much of an incomplete file
//! is valid.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use candle_gpt2_weights::expect_own_file;

use crate::shards::MAX_LLM_C_TOKENS;
use crate::token_manifest::{Manifest, WrittenShard};
use crate::{ShardFormat, Split, TrainingError};

/// Writer of a folder of token files.
pub(crate) struct ShardWriter<'a> {
    folder: &'a Path,
    /// Manifest without the incomplete shard.
    pub(crate) manifest: Manifest,
    open: Option<OpenShard>,
}

/// The incomplete shard.
struct OpenShard {
    split: Split,
    file: File,
    path: PathBuf,
    written: WrittenShard,
}

/// Encoded piece of a text.
#[derive(Debug, Default)]
pub(crate) struct Encoded {
    /// Tokens in their written form.
    pub(crate) bytes: Vec<u8>,
    pub(crate) documents: usize,
    pub(crate) characters: usize,
}

impl<'a> ShardWriter<'a> {
    /// Resumes at the manifest's position, which is the beginning for a new manifest.
    pub(crate) fn open(folder: &'a Path, manifest: Manifest) -> Result<Self, TrainingError> {
        let mut writer = Self { folder, manifest, open: None };
        let shard_tokens = writer.shard_tokens();
        if let Some((split, ..)) = writer.manifest.next_place() {
            let shards = &mut writer.manifest.part_mut(split).shards;
            if let Some(written) = shards.pop_if(|shard| shard.tokens < shard_tokens) {
                writer.open = Some(writer.reopen(split, written)?);
            }
        }
        Ok(writer)
    }

    /// Maximum number of tokens in a shard.
    fn shard_tokens(&self) -> usize {
        let most = match self.manifest.format {
            ShardFormat::NanoGpt => usize::MAX,
            ShardFormat::LlmC => usize::try_from(MAX_LLM_C_TOKENS).unwrap_or(usize::MAX),
        };
        self.manifest.shard_tokens.unwrap_or(most)
    }

    /// Adds the next encoded piece.
    ///
    /// `source` is the index of its file, `read` its size in bytes, and `crc32` the checksum of the file
    /// up to the end of the piece.
    pub(crate) fn add(
        &mut self,
        split: Split,
        (source, read, crc32): (usize, u64, u32),
        encoded: &Encoded,
    ) -> Result<(), TrainingError> {
        let (width, shard_tokens) = (self.manifest.dtype.bytes(), self.shard_tokens());
        let mut rest = &encoded.bytes[..];
        while !rest.is_empty() {
            let mut open = match self.open.take() {
                Some(open) => open,
                None => self.create(split)?,
            };
            let room = (shard_tokens - open.written.tokens).saturating_mul(width);
            let (now, later) = rest.split_at(rest.len().min(room));
            rest = later;
            open.file.write_all(now).map_err(|error| failed(&open.path, error))?;
            let mut checksum = crc32fast::Hasher::new_with_initial(open.written.crc32);
            checksum.update(now);
            open.written.crc32 = checksum.finalize();
            open.written.tokens += now.len() / width;
            let is_full = open.written.tokens == shard_tokens;
            self.open = Some(open);
            if is_full {
                self.finish_shard()?;
            }
        }
        let part = self.manifest.part_mut(split);
        part.tokens += encoded.bytes.len() / width;
        part.documents += encoded.documents;
        part.characters += encoded.characters;
        if let Some(source) = self.manifest.sources.get_mut(source) {
            source.read += read;
            source.crc32 = crc32;
        }
        // A part is never saved as fully read while its last shard is incomplete.
        if self.manifest.next_place().is_none_or(|(next, ..)| next != split) {
            self.finish_shard()?;
        }
        Ok(())
    }

    /// Flushes everything written so far to disk, and updates the manifest.
    pub(crate) fn save(&self) -> Result<(), TrainingError> {
        let Some(open) = &self.open else { return self.manifest.write(self.folder) };
        open.file.sync_data().map_err(|error| failed(&open.path, error))?;
        let mut manifest = self.manifest.clone();
        manifest.part_mut(open.split).shards.push(open.written.clone());
        manifest.write(self.folder)
    }

    /// Removes all files that a manifest's shards may be written to.
    pub(crate) fn remove_all(folder: &Path, manifest: &Manifest) {
        for split in [Split::Training, Split::HeldOut] {
            for index in 0.. {
                let path = folder.join(manifest.shard_name(split, index));
                let removed = [fs::remove_file(partial(&path)), fs::remove_file(&path)];
                if manifest.shard_tokens.is_none() || removed.iter().all(Result::is_err) {
                    break;
                }
            }
        }
    }

    fn create(&self, split: Split) -> Result<OpenShard, TrainingError> {
        let file = self.manifest.shard_name(split, self.manifest.part(split).shards.len());
        let path = self.folder.join(&file);
        let header = vec![0; self.manifest.format.header_bytes()];
        let create = || -> io::Result<File> {
            let mut file = open(&partial(&path))?;
            file.set_len(0)?;
            file.write_all(&header)?;
            Ok(file)
        };
        let opened = create().map_err(|error| failed(&path, error))?;
        Ok(OpenShard { split, file: opened, path, written: WrittenShard { file, tokens: 0, crc32: 0 } })
    }

    /// Reopens the incomplete shard and drops the data written after the last save.
    fn reopen(&self, split: Split, written: WrittenShard) -> Result<OpenShard, TrainingError> {
        let path = self.folder.join(&written.file);
        let bytes = written.tokens.checked_mul(self.manifest.dtype.bytes());
        let length = bytes.and_then(|bytes| bytes.checked_add(self.manifest.format.header_bytes()));
        let reopen = || -> io::Result<File> {
            let length = length.unwrap_or(usize::MAX);
            let partial = partial(&path);
            if !partial.exists() && path.exists() {
                // The shard was completed after the last save.
                fs::rename(&path, &partial)?;
            }
            let mut file = open(&partial)?;
            if file.metadata()?.len() < length as u64 {
                let what = "the file was truncated; remove the folder and start over";
                return Err(io::Error::new(io::ErrorKind::UnexpectedEof, what));
            }
            file.set_len(length as u64)?;
            file.seek(SeekFrom::End(0))?;
            Ok(file)
        };
        let file = reopen().map_err(|error| failed(&path, error))?;
        Ok(OpenShard { split, file, path, written })
    }

    /// Completes the open shard, if any: writes its header and gives it its final name.
    fn finish_shard(&mut self) -> Result<(), TrainingError> {
        let Some(mut open) = self.open.take() else { return Ok(()) };
        let header = self.manifest.format.header(self.manifest.dtype, open.written.tokens as u64);
        let mut finish = || {
            open.file.seek(SeekFrom::Start(0))?;
            open.file.write_all(&header)?;
            open.file.sync_all()?;
            fs::rename(partial(&open.path), &open.path)
        };
        finish().map_err(|error| failed(&open.path, error))?;
        self.manifest.part_mut(open.split).shards.push(open.written);
        Ok(())
    }
}

fn failed(path: &Path, error: io::Error) -> TrainingError {
    TrainingError::File { path: path.to_owned(), error }
}

/// Name of an incomplete shard.
fn partial(path: &Path) -> PathBuf {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(".partial");
    path.with_file_name(name)
}

/// Opens or creates an incomplete shard.
fn open(path: &Path) -> io::Result<File> {
    expect_own_file(path)?;
    OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path)
}
