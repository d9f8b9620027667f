//! Token files in the formats of nanoGPT and of llm.c: how they are laid out, how they are checked, and how they are read.
//!
//! A folder of [`TokenFolder`] is one that `gpt2 tokenize` made, with its [`Manifest`], or one that another program made: then its
//! `.bin` files are those with `train` and those with `val` in their names, in the order of their names. All numbers are little-endian.

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

/// Tokens that are checked at once.
const BLOCK_TOKENS: usize = 1 << 20;
/// Bytes of mapped files that reading may leave in the process's memory; then it lets go of them all.
const KEPT_BYTES: usize = 4 << 20;
/// What a read brings into memory at least: systems map pages around the one that is asked for, often more than these.
const FAULT_BYTES: usize = 1 << 16;
/// 32-bit tokens of a small vocabulary look like 16-bit ones of which every second is 0, which no text has so many of.
const MOST_ZEROS: usize = 32;
/// Most tokens in a shard of llm.c: its header counts in a signed 32-bit number.
pub(crate) const MOST_LLM_C_TOKENS: u64 = i32::MAX as u64;

/// A token file that was checked.
#[derive(Debug)]
struct Shard {
    file: MappedFile,
    header_bytes: usize,
    width: TokenWidth,
    /// Whether nothing tells the width.
    is_guessed: bool,
    /// The tokens before those of this shard, and with them.
    place: Range<usize>,
}

/// The tokens of some shards, one after the other, mapped into memory. Reading lets go of what it has read, so that little of
/// them is in the process's memory, however many there are. A [`TokenFolder`] has them, which a [`TokenizeJob`](crate::TokenizeJob) writes.
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
    /// Adds a shard behind the others. Its size was checked.
    fn add(&mut self, file: MappedFile, (format, width): (ShardFormat, TokenWidth), is_guessed: bool) {
        let header_bytes = format.header_bytes();
        let start = self.len();
        let place = start..start + (file.len() - header_bytes) / width.bytes();
        self.shards.push(Shard { file, header_bytes, width, is_guessed, place });
    }

    /// Bytes of the files.
    fn bytes(&self) -> usize {
        self.shards.iter().map(|shard| shard.file.len()).sum()
    }

    /// Reads all of them once: checks that every token is in a vocabulary, and says what was found.
    fn check(
        &self,
        vocab_size: usize,
        progress: &dyn Fn(u64) -> Result<(), TrainingError>,
    ) -> Result<Vec<WrittenShard>, TrainingError> {
        self.shards.iter().map(|shard| shard.check(vocab_size, progress)).collect()
    }
}

impl Shard {
    /// Where tokens are in the file.
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
        let mut is_wider = self.is_guessed && self.width == TokenWidth::U16 && tokens >= MOST_ZEROS;
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
                    "token {place} (counted from 0) has the id {id}, and the vocabulary has {vocab_size} tokens: it is of another vocabulary, or of another width than {} bits",
                    8 * self.width.bytes()
                );
                return Err(refuse(self.file.path(), what));
            }
            self.file.forget(block.clone());
            progress(block.len() as u64)?;
        }
        if is_wider {
            let what = "every second of its 16-bit numbers is 0, as if its tokens were of 32 bits; those need llm.c's header, or a tokens.json";
            return Err(refuse(self.file.path(), what));
        }
        let file = self.file.path().file_name().unwrap_or_default().to_string_lossy().into_owned();
        Ok(WrittenShard { file, tokens, crc32: checksum.finalize() })
    }
}

/// A folder of token files, opened and checked. A [`TokenizeJob`](crate::TokenizeJob) writes one.
#[derive(Debug)]
pub struct TokenFolder {
    /// What is trained on.
    pub training: Shards,
    /// What is not.
    pub held_out: Option<Shards>,
    /// Characters of the text that is held out.
    pub held_out_characters: usize,
    /// Identifies the tokens to train on.
    pub fingerprint: u64,
}

impl TokenFolder {
    /// Opens a folder of shards for a model of `vocab_size` tokens with this tokenizer. All tokens are read once.
    ///
    /// # Errors
    /// When a shard cannot be read, was cut short or changed, is of another format, width or vocabulary than it says, or of
    /// another vocabulary than the model; when the folder has no shards, or not all yet.
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
                "it has neither a tokens.json nor files such as train.bin; give a folder of token files, or text files",
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

    /// Opens what was just written, and need not be checked.
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

/// The shards of a part, each with as many tokens as its size and its header say.
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

/// Maps a file that is there and not empty.
fn map(path: &Path) -> Result<MappedFile, TrainingError> {
    let metadata =
        fs::metadata(path).map_err(|error| TrainingError::File { path: path.to_owned(), error })?;
    if metadata.len() == 0 {
        return Err(refuse(path, "the file is empty"));
    }
    Ok(MappedFile::open(path)?)
}

/// Checks that a file is as long as so many tokens are, and has their header.
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
            _ if bytes(other) == Some(found) => format!("its tokens are of {} bits", 8 * other.bytes()),
            Some(expected) if found < expected => "it was cut short".to_owned(),
            _ => "it is too long".to_owned(),
        };
        let expected = expected.unwrap_or(usize::MAX);
        return Err(refuse(
            file.path(),
            format!(
                "{what}: expected {expected} bytes for {tokens} tokens of {} bits, found {found}; make it again",
                8 * width.bytes()
            ),
        ));
    }
    let header = format.header(width, tokens as u64);
    match file.starts_with(&header) {
        true => Ok(()),
        false => Err(refuse(file.path(), "its header is not the one that was written; make it again")),
    }
}

/// How a file is laid out of which only itself tells.
fn foreign_layout(file: &MappedFile, vocab_size: usize) -> Result<(ShardFormat, TokenWidth), TrainingError> {
    let refuse = |what: String| Err(refuse(file.path(), what));
    let number = |index: usize| file.as_chunks::<4>().0.get(index).map(|bytes| i32::from_le_bytes(*bytes));
    let of_magic =
        [TokenWidth::U16, TokenWidth::U32].into_iter().find(|width| number(0) == Some(width.mark().0));
    let Some(width) = of_magic else {
        // nanoGPT's own are of 16 bits; there are forks of it for larger vocabularies.
        let width = TokenWidth::of_vocabulary(vocab_size);
        return match file.len().is_multiple_of(width.bytes()) {
            true => Ok((ShardFormat::NanoGpt, width)),
            false => refuse(format!(
                "{} bytes are not a whole number of {}-bit tokens: it was cut short, or its tokens are of another width",
                file.len(),
                8 * width.bytes()
            )),
        };
    };
    let (magic, version) = width.mark();
    if number(1) != Some(version) {
        let found = number(1).unwrap_or_default();
        return refuse(format!(
            "llm.c's header has the version {found}; expected {version} with the magic number {magic}"
        ));
    }
    let counted = number(2).and_then(|tokens| usize::try_from(tokens).ok()).filter(|tokens| *tokens > 0);
    let Some(tokens) = counted else {
        let found = number(2).unwrap_or_default();
        return refuse(format!("llm.c's header counts {found} tokens; expected one at least"));
    };
    let layout = (ShardFormat::LlmC, width);
    let expected = 4 * HEADER_NUMBERS + tokens.saturating_mul(width.bytes());
    match file.len() == expected {
        true => Ok(layout),
        false => refuse(format!(
            "llm.c's header counts {tokens} tokens of {} bits, which take {expected} bytes with it, and the file has {}: {}",
            8 * width.bytes(),
            file.len(),
            if file.len() < expected { "it was cut short" } else { "it is too long" }
        )),
    }
}

/// The files of a part in a folder without a manifest, in the order of their names.
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

/// Characters of the text of tokens: the bytes of them all that begin one. Tokens that stand for no text, such as the end of one,
/// have none.
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

/// A number that tells the tokens of shards from others.
fn fingerprint(shards: &[WrittenShard]) -> u64 {
    // FNV-1a over numbers in place of bytes.
    let mix = |hash: u64, number: u64| (hash ^ number).wrapping_mul(0x0100_0000_01b3);
    shards.iter().fold(0xcbf2_9ce4_8422_2325, |hash, shard| {
        mix(mix(hash, shard.tokens as u64), u64::from(shard.crc32))
    })
}
