//! Reading and checking token files in the formats of nanoGPT and llm.c.
//!
//! A [`TokenFolder`] is a folder that `gpt2 tokenize` wrote with a [`Manifest`], or a folder from another
//! program. In the latter, the `.bin` files with `train` or `val` in their names are read in name order.
//! All numbers are little-endian.

use std::collections::HashMap;
use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use candle_gpt2_engine::{Reporter, Unit};
use candle_gpt2_weights::{MappedFile, Tokenizer, token_bytes};

use crate::token_format::HEADER_NUMBERS;
use crate::token_manifest::{Manifest, WrittenShard};
use crate::{ShardFormat, Split, TokenWidth, Tokens, TrainingError};

/// Number of tokens checked at a time.
const BLOCK_TOKENS: usize = 1 << 20;
/// Number of bytes that reads may bring into memory before all mapped pages are released.
const KEPT_BYTES: usize = 4 << 20;
/// Minimum number of bytes that a read brings into memory.
///
/// Operating systems map pages around the requested one, often more than this.
const FAULT_BYTES: usize = 1 << 16;
/// Minimum number of tokens for detecting 32-bit tokens in a file that looks like 16-bit tokens.
///
/// Read as 16-bit tokens, 32-bit tokens of a small vocabulary have a 0 in every second position. No text has
/// that many zeros.
const MIN_TOKENS_FOR_WIDTH_CHECK: usize = 32;
/// Maximum number of tokens in a shard for llm.c, whose header has a signed 32-bit count.
pub(crate) const MAX_LLM_C_TOKENS: u64 = i32::MAX as u64;

/// A checked token file.
#[derive(Debug)]
struct Shard {
    file: MappedFile,
    header_bytes: usize,
    width: TokenWidth,
    /// Whether the width is a guess, because the file does not specify it.
    is_guessed: bool,
    /// Range of this shard's tokens in the whole sequence.
    place: Range<usize>,
}

/// Memory-mapped tokens from several shards, as one sequence.
///
/// Reads release the memory they used, so little of the files stays in memory regardless of their size. A
/// [`TokenizeJob`](crate::TokenizeJob) writes shards, and a [`TokenFolder`] contains them.
#[derive(Debug, Default)]
pub struct Shards {
    shards: Vec<Shard>,
    touched: AtomicUsize,
}

impl Tokens for Shards {
    fn len(&self) -> usize {
        self.shards.last().map_or(0, |shard| shard.place.end)
    }

    fn read(&self, start: usize, count: usize, tokens: &mut Vec<u32>) {
        let end = start + count;
        let first = self.shards.partition_point(|shard| shard.place.end <= start);
        for shard in self.shards[first..].iter().take_while(|shard| shard.place.start < end) {
            let from = start.max(shard.place.start) - shard.place.start;
            let to = end.min(shard.place.end) - shard.place.start;
            tokens.extend(shard.width.read(&shard.file[shard.bytes(from..to)]));
        }
        let bytes = FAULT_BYTES + 4 * count;
        if self.touched.fetch_add(bytes, Ordering::Relaxed) + bytes > KEPT_BYTES {
            self.touched.store(0, Ordering::Relaxed);
            self.shards.iter().for_each(|shard| shard.file.forget(0..shard.file.len()));
        }
    }
}

impl Shards {
    /// Appends a shard whose size has been checked.
    fn add(&mut self, file: MappedFile, (format, width): (ShardFormat, TokenWidth), is_guessed: bool) {
        let header_bytes = format.header_bytes();
        let start = self.len();
        let place = start..start + (file.len() - header_bytes) / width.bytes();
        self.shards.push(Shard { file, header_bytes, width, is_guessed, place });
    }

    /// Total size of the files in bytes.
    fn bytes(&self) -> usize {
        self.shards.iter().map(|shard| shard.file.len()).sum()
    }

    /// Reads all shards once, checks that every token is in the vocabulary, and describes the shards.
    fn check(
        &self,
        vocab_size: usize,
        progress: &dyn Fn(u64) -> Result<(), TrainingError>,
    ) -> Result<Vec<WrittenShard>, TrainingError> {
        self.shards.iter().map(|shard| shard.check(vocab_size, progress)).collect()
    }
}

impl Shard {
    /// Byte range of tokens in the file.
    fn bytes(&self, tokens: Range<usize>) -> Range<usize> {
        let place = |token| self.header_bytes + token * self.width.bytes();
        place(tokens.start)..place(tokens.end)
    }

    fn check(
        &self,
        vocab_size: usize,
        progress: &dyn Fn(u64) -> Result<(), TrainingError>,
    ) -> Result<WrittenShard, TrainingError> {
        let tokens = self.place.len();
        let mut checksum = crc32fast::Hasher::new();
        let mut is_wider =
            self.is_guessed && self.width == TokenWidth::U16 && tokens >= MIN_TOKENS_FOR_WIDTH_CHECK;
        for first in (0..tokens).step_by(BLOCK_TOKENS) {
            let block = self.bytes(first..tokens.min(first + BLOCK_TOKENS));
            let bytes = &self.file[block.clone()];
            checksum.update(bytes);
            is_wider = is_wider && self.width.read(bytes).skip(1).step_by(2).all(|token| token == 0);
            let is_beyond = |token: u32| usize::try_from(token).is_ok_and(|token| token >= vocab_size);
            if is_beyond(self.width.read(bytes).max().unwrap_or_default())
                && let Some((place, id)) = self.width.read(bytes).enumerate().find(|(_, id)| is_beyond(*id))
            {
                let place = first + place;
                let what = format!(
                    "token {place} (counted from 0) has id {id}, but the vocabulary has {vocab_size} tokens: the file was \
                     written for another vocabulary, or its tokens are not {}-bit",
                    8 * self.width.bytes()
                );
                return Err(refuse(self.file.path(), what));
            }
            self.file.forget(block.clone());
            progress(block.len() as u64)?;
        }
        if is_wider {
            let what = "every second 16-bit number is 0, so the tokens are probably 32-bit, which needs an llm.c header or a tokens.json";
            return Err(refuse(self.file.path(), what));
        }
        let file = self.file.path().file_name().unwrap_or_default().to_string_lossy().into_owned();
        Ok(WrittenShard { file, tokens, crc32: checksum.finalize() })
    }
}

/// A checked folder of token files; a [`TokenizeJob`](crate::TokenizeJob) writes one.
#[derive(Debug)]
pub struct TokenFolder {
    /// Training tokens.
    pub training: Shards,
    /// Held-out tokens.
    pub held_out: Option<Shards>,
    /// Number of characters in the held-out text.
    pub held_out_characters: usize,
    /// Fingerprint of the training tokens.
    pub fingerprint: u64,
}

impl TokenFolder {
    /// Opens a folder of shards for a model with this tokenizer and `vocab_size` tokens.
    ///
    /// All tokens are read once to check them.
    ///
    /// # Errors
    /// Fails if a shard cannot be read, was truncated or modified, or contradicts its own format or
    /// width. Fails if the tokens are from a vocabulary other than the model's. Also fails if the folder
    /// has no shards or is incomplete.
    pub fn open(
        folder: &Path,
        (tokenizer, vocab_size): (&Tokenizer, usize),
        reporter: &dyn Reporter,
    ) -> Result<Self, TrainingError> {
        let manifest = Manifest::read(folder)?;
        if let Some(manifest) = &manifest {
            manifest.check_whole(folder)?;
            manifest.check_vocabulary(folder, tokenizer)?;
        }
        let training = open_part(folder, manifest.as_ref(), Split::Training, vocab_size)?;
        let held_out = open_part(folder, manifest.as_ref(), Split::HeldOut, vocab_size)?;
        if training.is_empty() && manifest.is_none() {
            return Err(refuse(
                folder,
                "contains neither tokens.json nor files such as train.bin; use a folder of token files, or text files",
            ));
        }
        let bytes = training.bytes() + held_out.bytes();
        let bar = reporter.start("checking", bytes as u64, Unit::Bytes);
        let progress = |bytes| {
            bar.advance(bytes);
            match reporter.is_interrupted() {
                true => Err(TrainingError::Interrupted { state: None }),
                false => Ok(()),
            }
        };
        let checked = |split, shards: &Shards| -> Result<Vec<WrittenShard>, TrainingError> {
            let found = shards.check(vocab_size, &progress)?;
            if let Some(manifest) = &manifest {
                manifest.check_contents(folder, split, &found)?;
            }
            Ok(found)
        };
        let fingerprint = fingerprint(&checked(Split::Training, &training)?);
        checked(Split::HeldOut, &held_out)?;
        let held_out_characters = match &manifest {
            Some(manifest) => manifest.held_out.characters,
            None => characters(&held_out, tokenizer),
        };
        Ok(Self {
            training,
            held_out: Some(held_out).filter(|shards| !shards.is_empty()),
            held_out_characters,
            fingerprint,
        })
    }

    /// Opens a folder that was just written, without checking its tokens.
    pub(crate) fn of_manifest(folder: &Path, manifest: &Manifest) -> Result<Self, TrainingError> {
        let part = |split| open_part(folder, Some(manifest), split, usize::MAX);
        Ok(Self {
            training: part(Split::Training)?,
            held_out: Some(part(Split::HeldOut)?).filter(|shards| !shards.is_empty()),
            held_out_characters: manifest.held_out.characters,
            fingerprint: fingerprint(&manifest.training.shards),
        })
    }
}

fn refuse(path: &Path, what: impl Into<String>) -> TrainingError {
    TrainingError::Data { path: path.to_owned(), what: what.into() }
}

/// Opens the shards of a part, and checks their sizes and headers.
fn open_part(
    folder: &Path,
    manifest: Option<&Manifest>,
    split: Split,
    vocab_size: usize,
) -> Result<Shards, TrainingError> {
    let mut shards = Shards::default();
    match manifest {
        Some(manifest) => {
            let layout = (manifest.format, manifest.dtype);
            for written in &manifest.part(split).shards {
                let file = map(&folder.join(&written.file))?;
                check_size(&file, layout, written.tokens)?;
                shards.add(file, layout, false);
            }
        }
        None => {
            for path in foreign_files(folder, split)? {
                let file = map(&path)?;
                let layout = foreign_layout(&file, vocab_size)?;
                shards.add(file, layout, layout.0 == ShardFormat::NanoGpt);
            }
        }
    }
    Ok(shards)
}

/// Maps a file that must exist and not be empty.
fn map(path: &Path) -> Result<MappedFile, TrainingError> {
    let metadata =
        fs::metadata(path).map_err(|error| TrainingError::File { path: path.to_owned(), error })?;
    if metadata.len() == 0 {
        return Err(refuse(path, "the file is empty"));
    }
    Ok(MappedFile::open(path)?)
}

/// Checks that a file's size and header match `tokens` tokens.
fn check_size(
    file: &MappedFile,
    (format, width): (ShardFormat, TokenWidth),
    tokens: usize,
) -> Result<(), TrainingError> {
    let bytes = |width: TokenWidth| {
        tokens.checked_mul(width.bytes()).and_then(|bytes| bytes.checked_add(format.header_bytes()))
    };
    let other = if width == TokenWidth::U16 { TokenWidth::U32 } else { TokenWidth::U16 };
    let (expected, found) = (bytes(width), file.len());
    if expected != Some(found) {
        let what = match expected {
            _ if bytes(other) == Some(found) => format!("the tokens are {}-bit", 8 * other.bytes()),
            Some(expected) if found < expected => "truncated".to_owned(),
            _ => "too long".to_owned(),
        };
        let expected = expected.unwrap_or(usize::MAX);
        return Err(refuse(
            file.path(),
            format!(
                "{what}: expected {expected} bytes for {tokens} {}-bit tokens, found {found}; create the file again",
                8 * width.bytes()
            ),
        ));
    }
    let header = format.header(width, tokens as u64);
    match file.starts_with(&header) {
        true => Ok(()),
        false => Err(refuse(file.path(), "the header was modified; create the file again")),
    }
}

/// Detects the layout of a file without a manifest.
fn foreign_layout(file: &MappedFile, vocab_size: usize) -> Result<(ShardFormat, TokenWidth), TrainingError> {
    let refuse = |what: String| Err(refuse(file.path(), what));
    let number = |index: usize| file.as_chunks::<4>().0.get(index).map(|bytes| i32::from_le_bytes(*bytes));
    let of_magic =
        [TokenWidth::U16, TokenWidth::U32].into_iter().find(|width| number(0) == Some(width.mark().0));
    let Some(width) = of_magic else {
        // nanoGPT itself writes 16-bit tokens. Some of its forks support larger vocabularies.
        let width = TokenWidth::of_vocabulary(vocab_size);
        return match file.len().is_multiple_of(width.bytes()) {
            true => Ok((ShardFormat::NanoGpt, width)),
            false => refuse(format!(
                "{} bytes are not a whole number of {}-bit tokens: the file is truncated, or its tokens have a different width",
                file.len(),
                8 * width.bytes()
            )),
        };
    };
    let (magic, version) = width.mark();
    if number(1) != Some(version) {
        let found = number(1).unwrap_or_default();
        return refuse(format!(
            "llm.c's header has version {found}; expected {version} for the magic number {magic}"
        ));
    }
    let counted = number(2).and_then(|tokens| usize::try_from(tokens).ok()).filter(|tokens| *tokens > 0);
    let Some(tokens) = counted else {
        let found = number(2).unwrap_or_default();
        return refuse(format!("llm.c's header declares {found} tokens; expected at least one"));
    };
    let layout = (ShardFormat::LlmC, width);
    let expected = 4 * HEADER_NUMBERS + tokens.saturating_mul(width.bytes());
    match file.len() == expected {
        true => Ok(layout),
        false => refuse(format!(
            "llm.c's header declares {tokens} {}-bit tokens; expected {expected} bytes including the header, found {}: {}",
            8 * width.bytes(),
            file.len(),
            if file.len() < expected { "truncated" } else { "too long" }
        )),
    }
}

/// Returns the files of a part in a folder without a manifest, in name order.
fn foreign_files(folder: &Path, split: Split) -> Result<Vec<PathBuf>, TrainingError> {
    let failed = |error| TrainingError::File { path: folder.to_owned(), error };
    let part = match split {
        Split::Training => "train",
        Split::HeldOut => "val",
    };
    let mut files = Vec::new();
    for entry in fs::read_dir(folder).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().to_lowercase();
        if name.ends_with(".bin") && name.contains(part) {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}

/// Number of characters that the tokens decode to, counting the bytes that begin a character.
///
/// Special tokens, such as the end-of-text token, have no characters.
fn characters(tokens: &Shards, tokenizer: &Tokenizer) -> usize {
    let is_special = tokenizer.get_added_tokens_decoder();
    let mut of_token = HashMap::new();
    let mut total = 0;
    let mut block = Vec::new();
    for start in (0..tokens.len()).step_by(BLOCK_TOKENS) {
        block.clear();
        tokens.read(start, BLOCK_TOKENS.min(tokens.len() - start), &mut block);
        for token in &block {
            total += *of_token.entry(*token).or_insert_with(|| match is_special.contains_key(token) {
                true => 0,
                false => {
                    let bytes = token_bytes(tokenizer, *token).unwrap_or_default();
                    bytes.iter().filter(|byte| **byte & 0xc0 != 0x80).count()
                }
            });
        }
    }
    total
}

/// Fingerprint of the tokens in all shards.
fn fingerprint(shards: &[WrittenShard]) -> u64 {
    // FNV-1a over numbers instead of bytes.
    let mix = |hash: u64, number: u64| (hash ^ number).wrapping_mul(0x0100_0000_01b3);
    shards.iter().fold(0xcbf2_9ce4_8422_2325, |hash, shard| {
        mix(mix(hash, shard.tokens as u64), u64::from(shard.crc32))
    })
}
