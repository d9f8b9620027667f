//! Training texts from plain text and JSONL files; the last part is held out.
//!
//! Each line of a JSONL file has a `text` or token `ids`. A plain file is one document and is split at a
//! line break. Every line of a JSONL file is a document that belongs to one part as a whole.
//!
//! Ids are used unchanged. They allow rows of tokens that no text encodes to, such as random ones. A
//! document ends with the end-of-text token if the model's vocabulary has one. Files are read in pieces
//! and JSON lines have a maximum length, so memory use does not grow with the files.

use std::borrow::Cow;
use std::fs::File;
use std::io::{self, BufReader, Read, Seek, SeekFrom};
use std::ops::Range;
use std::path::{Path, PathBuf};

use candle_gpt2_weights::open_regular;
use serde_json::Value;

use crate::TrainingError;

/// Minimum size of the pieces for training a tokenizer, in bytes.
const PIECE_BYTES: usize = 1 << 16;
/// Maximum length of a JSON line in bytes.
const MAX_LINE_BYTES: usize = 64 << 20;
/// Number of bytes read at a time in the search for a split point.
const READ_BYTES: usize = 1 << 16;
/// Number of bytes in the longest UTF-8 character; split rules may need this much context.
const CHARACTER_BYTES: usize = 4;

/// Training or held-out part of a [`Corpus`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Split {
    /// Part to train on.
    Training,
    /// Part for measuring the loss.
    HeldOut,
}

/// Data files with texts.
///
/// ```
/// use candle_gpt2_jobs::{Corpus, Split};
///
/// let file = tempfile::NamedTempFile::new()?;
/// std::fs::write(file.path(), "one line\nanother line\nthe last line of this text\n")?;
/// let corpus = Corpus::open(&[file.path().to_owned()], 0.5)?;
/// let all = corpus.bytes(Split::Training) + corpus.bytes(Split::HeldOut);
/// assert_eq!(all, 49);
/// assert!(corpus.bytes(Split::HeldOut) > 0);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Corpus {
    files: Vec<TextFile>,
}

/// A file with texts.
#[derive(Debug)]
pub(crate) struct TextFile {
    pub(crate) path: PathBuf,
    pub(crate) bytes: u64,
    /// Byte offset at which the held-out part begins.
    pub(crate) held_out_from: u64,
    /// Requested fraction to hold out.
    share: f64,
    is_json_lines: bool,
}

/// Rules for splitting a text: the minimum piece size, and a function that finds the first split point.
pub(crate) struct SplitRule<'a> {
    pub(crate) piece_bytes: usize,
    pub(crate) first: &'a (dyn Fn(&[u8], usize) -> Option<usize> + Sync),
}

/// A piece of a file: whole JSON lines, or a part of a text.
pub(crate) struct Piece {
    bytes: Vec<u8>,
    /// Byte offset in the file.
    start: u64,
    /// Whether this is the last piece of its part of the file.
    is_last: bool,
}

/// A document, or a piece of one.
pub(crate) struct Text<'a> {
    pub(crate) content: Content<'a>,
    /// Whether the document ends with this piece.
    pub(crate) is_end: bool,
}

/// Contents of a document.
pub(crate) enum Content<'a> {
    Text(Cow<'a, str>),
    /// Token ids.
    Ids(Vec<u32>),
}

impl Corpus {
    /// Opens the files and holds out the last fraction `held_out` of each.
    ///
    /// Files whose names end in `.jsonl` or `.ndjson` are JSONL. Contents are validated when they are
    /// read.
    ///
    /// # Errors
    /// Fails if a file is empty or not a regular file, or if `held_out` is not in the range from 0 to
    /// below 1.
    pub fn open(paths: &[PathBuf], held_out: f64) -> Result<Self, TrainingError> {
        if !(0.0..1.0).contains(&held_out) {
            let expected = "a fraction of at least 0 and below 1".to_owned();
            let found = held_out.to_string();
            return Err(TrainingError::OptionOutOfRange { option: "held_out", expected, found });
        }
        let files = paths.iter().map(|path| TextFile::open(path, held_out)).collect::<Result<_, _>>()?;
        Ok(Self { files })
    }

    /// Iterates over the texts of a part in file order.
    ///
    /// Long texts are split, and documents of ids are skipped.
    pub fn documents(&self, split: Split) -> impl Iterator<Item = Result<String, TrainingError>> + Send {
        const RULE: SplitRule<'static> = SplitRule { piece_bytes: PIECE_BYTES, first: &before_line_or_word };
        self.files.iter().flat_map(move |file| {
            file.pieces(file.range(split), RULE).flat_map(move |piece| {
                let texts_of = |text: Text| match text.content {
                    Content::Text(text) => short_pieces(&text).map(|piece| Ok(piece.to_owned())).collect(),
                    Content::Ids(_) => Vec::new(),
                };
                let texts = |piece: Piece| Ok(file.texts(&piece)?.flat_map(texts_of).collect());
                piece.and_then(texts).unwrap_or_else(|error| vec![Err(error)])
            })
        })
    }

    /// Returns the size of a part in bytes.
    pub fn bytes(&self, split: Split) -> u64 {
        self.files.iter().map(|file| file.range(split)).map(|range| range.end - range.start).sum()
    }

    /// Returns notes on files that have no held-out part although a fraction was requested.
    pub(crate) fn notes(&self) -> impl Iterator<Item = String> {
        let is_whole = |file: &&TextFile| file.share > 0.0 && file.held_out_from == file.bytes;
        self.files.iter().filter(is_whole).map(|file| {
            format!(
                "{}: nothing is held out, because no line begins near the end of the file",
                file.path.display()
            )
        })
    }

    pub(crate) fn files(&self) -> &[TextFile] {
        &self.files
    }
}

impl TextFile {
    fn open(path: &Path, held_out: f64) -> Result<Self, TrainingError> {
        let failed = |error| TrainingError::File { path: path.to_owned(), error };
        let refuse = |what: &str| TrainingError::Data { path: path.to_owned(), what: what.to_owned() };
        let mut file = open_regular(path).map_err(failed)?;
        let bytes = file.metadata().map_err(failed)?.len();
        if bytes == 0 {
            return Err(refuse("the file is empty"));
        }
        let ending = path.extension().and_then(|ending| ending.to_str()).unwrap_or_default();
        let is_json_lines = matches!(ending, "jsonl" | "ndjson");
        let fallback = if is_json_lines { near_line_start } else { character_start };
        let held_out_from = cut(&mut file, bytes, held_out, fallback).map_err(failed)?;
        Ok(Self { path: path.to_owned(), bytes, held_out_from, share: held_out, is_json_lines })
    }

    /// Returns the byte range of a part.
    pub(crate) fn range(&self, split: Split) -> Range<u64> {
        match split {
            Split::Training => 0..self.held_out_from,
            Split::HeldOut => self.held_out_from..self.bytes,
        }
    }

    /// Iterates over the pieces of a part or of its remainder.
    pub(crate) fn pieces<'a>(
        &'a self,
        range: Range<u64>,
        rule: SplitRule<'a>,
    ) -> impl Iterator<Item = Result<Piece, TrainingError>> + Send + 'a {
        let mut reader = PieceReader { file: None, rest: Vec::new(), range };
        std::iter::from_fn(move || {
            let piece = reader.next(self, &rule).transpose()?;
            if piece.is_err() {
                reader.range.start = reader.range.end;
            }
            Some(piece.map_err(|error| match error.kind() {
                io::ErrorKind::FileTooLarge => self.line_too_long(reader.range.start),
                _ => TrainingError::File { path: self.path.clone(), error },
            }))
        })
    }

    /// Iterates over the texts of a piece.
    ///
    /// # Errors
    /// Fails if the piece is binary or not UTF-8, or if a line is not valid JSON.
    pub(crate) fn texts<'a>(
        &'a self,
        piece: &'a Piece,
    ) -> Result<impl Iterator<Item = Text<'a>> + 'a, TrainingError> {
        let refuse = |what: String| TrainingError::Data { path: self.path.clone(), what };
        if piece.bytes.contains(&0) {
            return Err(refuse("a binary file (it contains zero bytes); use text or JSONL files".into()));
        }
        let text = str::from_utf8(&piece.bytes).map_err(|error| {
            let valid = piece.start + error.valid_up_to() as u64;
            refuse(format!("not valid UTF-8 at byte {valid}; convert the text to UTF-8"))
        })?;
        // Some editors write a byte order mark at the start of a file.
        let text = if piece.start == 0 { text.trim_start_matches('\u{feff}') } else { text };
        if !self.is_json_lines {
            let text = Text { content: Content::Text(Cow::Borrowed(text)), is_end: piece.is_last };
            return Ok(vec![text].into_iter());
        }
        let mut texts = Vec::new();
        for (index, line) in text.split('\n').enumerate() {
            let line = line.trim_ascii();
            if !line.is_empty() {
                let content = content_of_line(line).map_err(|what| match self.lines_before(piece.start) {
                    Ok(before) => refuse(format!("line {}: {what}", before + index + 1)),
                    Err(error) => TrainingError::File { path: self.path.clone(), error },
                })?;
                texts.push(Text { content, is_end: true });
            }
        }
        Ok(texts.into_iter())
    }

    /// Creates the error for an overlong JSON line at or after this offset.
    fn line_too_long(&self, start: u64) -> TrainingError {
        match self.lines_before(start) {
            Ok(before) => TrainingError::Data {
                path: self.path.clone(),
                what: format!(
                    "line {} or a later line has more than {MAX_LINE_BYTES} bytes of JSON; split that line",
                    before + 1
                ),
            },
            Err(error) => TrainingError::File { path: self.path.clone(), error },
        }
    }

    /// Number of line breaks before an offset.
    fn lines_before(&self, place: u64) -> io::Result<usize> {
        let mut reader = BufReader::new(open_regular(&self.path)?).take(place);
        let (mut block, mut lines) = (vec![0; READ_BYTES], 0);
        loop {
            let count = reader.read(&mut block)?;
            if count == 0 {
                return Ok(lines);
            }
            lines += block[..count].iter().filter(|byte| **byte == b'\n').count();
        }
    }
}

impl Piece {
    /// Returns the raw bytes from the file.
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Returns the byte offset in the file.
    pub(crate) fn start(&self) -> u64 {
        self.start
    }
}

/// Reader that splits a part of a file into pieces.
struct PieceReader {
    file: Option<File>,
    /// Bytes that were read past the end of the last piece.
    rest: Vec<u8>,
    /// Remaining byte range, including `rest`.
    range: Range<u64>,
}

impl PieceReader {
    fn next(&mut self, text: &TextFile, rule: &SplitRule) -> io::Result<Option<Piece>> {
        if self.range.is_empty() {
            return Ok(None);
        }
        let file = match &mut self.file {
            Some(file) => file,
            none => {
                let mut file = open_regular(&text.path)?;
                file.seek(SeekFrom::Start(self.range.start))?;
                none.insert(file)
            }
        };
        let mut bytes = std::mem::take(&mut self.rest);
        let left = self.range.end - self.range.start;
        let mut searched = rule.piece_bytes;
        let end = loop {
            let found = if bytes.len() <= searched {
                None
            } else if text.is_json_lines {
                // The search starts one byte early, because that byte may end a line.
                let from = searched - 1;
                bytes[from..].iter().position(|byte| *byte == b'\n').map(|place| from + place + 1)
            } else {
                (rule.first)(&bytes, searched)
            };
            if let Some(end) = found {
                break end;
            }
            searched = searched.max(bytes.len().saturating_sub(CHARACTER_BYTES));
            let missing = left - bytes.len() as u64;
            if missing == 0 {
                break bytes.len();
            }
            if text.is_json_lines && bytes.len() > MAX_LINE_BYTES {
                return Err(io::ErrorKind::FileTooLarge.into());
            }
            let wanted = (searched + READ_BYTES - bytes.len()) as u64;
            if file.take(wanted.min(missing)).read_to_end(&mut bytes)? == 0 {
                return Err(io::Error::new(
                    io::ErrorKind::UnexpectedEof,
                    "the file was truncated while it was being read",
                ));
            }
        };
        self.rest = bytes.split_off(end);
        let start = self.range.start;
        self.range.start += end as u64;
        Ok(Some(Piece { bytes, start, is_last: self.range.is_empty() }))
    }
}

/// Index of the first line break at or after `from` that precedes a visible character.
///
/// GPT-2's tokenizer always ends a word there, regardless of the text before it.
fn before_line(bytes: &[u8], from: usize) -> Option<usize> {
    let is_cut =
        |place: &usize| bytes[*place] == b'\n' && bytes.get(place + 1).is_some_and(u8::is_ascii_graphic);
    (from.max(1)..bytes.len()).find(is_cut)
}

/// Same as [`before_line`], with fallbacks that keep pieces short.
///
/// Splits before a space in a text with few lines, or between characters in a text with few spaces.
fn before_line_or_word(bytes: &[u8], from: usize) -> Option<usize> {
    let is_word =
        |place: &usize| bytes[*place] == b' ' && bytes.get(place + 1).is_some_and(u8::is_ascii_graphic);
    let is_character = |place: &usize| bytes[*place] & 0xc0 != 0x80;
    let found_after = |least: usize, is_cut: &dyn Fn(&usize) -> bool| {
        (bytes.len() > least).then(|| (PIECE_BYTES..bytes.len()).find(|place| is_cut(place))).flatten()
    };
    before_line(bytes, from)
        .or_else(|| found_after(2 * PIECE_BYTES, &is_word))
        .or_else(|| found_after(4 * PIECE_BYTES, &is_character))
}

/// Splits a text into pieces short enough for training a tokenizer.
fn short_pieces(text: &str) -> impl Iterator<Item = &str> {
    let mut rest = text;
    std::iter::from_fn(move || {
        let searched = rest.as_bytes().get(..rest.len().min(4 * PIECE_BYTES + CHARACTER_BYTES))?;
        let end = match rest.len() > PIECE_BYTES {
            true => before_line_or_word(searched, PIECE_BYTES).unwrap_or(rest.len()),
            false => rest.len(),
        };
        let (piece, after) = rest.split_at_checked(end)?;
        rest = after;
        (!piece.is_empty()).then_some(piece)
    })
}

/// Offset at which the last fraction `share` of `length` bytes begins.
fn start_of_share(length: u64, share: f64) -> u64 {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a fraction of the length fits into u64"
    )]
    let start = ((length as f64) * (1.0 - share)) as u64;
    start
}

/// Offset of the first line in the last fraction `share` of a file with `length` bytes.
///
/// If no line begins there, `fallback` determines the offset.
fn cut(
    file: &mut File,
    length: u64,
    share: f64,
    fallback: impl FnOnce(&mut File, u64, u64) -> io::Result<u64>,
) -> io::Result<u64> {
    if share == 0.0 {
        return Ok(length);
    }
    let wanted = start_of_share(length, share);
    match line_start(file, wanted..length)? {
        Some(start) => Ok(start),
        None => fallback(file, length, wanted),
    }
}

/// Offset of the first character at or after `wanted`.
fn character_start(text: &mut File, length: u64, wanted: u64) -> io::Result<u64> {
    text.seek(SeekFrom::Start(wanted))?;
    let mut bytes = Vec::new();
    text.take(CHARACTER_BYTES as u64).read_to_end(&mut bytes)?;
    let boundary = bytes.iter().position(|byte| byte & 0xc0 != 0x80);
    Ok(boundary.map_or(length, |boundary| wanted + boundary as u64))
}

/// Offset of the last line start before `wanted`, or `length` if that start is too far back.
///
/// Too far back means farther from `wanted` than the end of the file is.
fn near_line_start(text: &mut File, length: u64, wanted: u64) -> io::Result<u64> {
    let Some(visible) = last_byte(text, length, &|byte| !byte.is_ascii_whitespace())? else {
        return Ok(length);
    };
    let start =
        last_byte(text, wanted.min(visible), &|byte| *byte == b'\n')?.map(|line_break| line_break + 1);
    Ok(start.filter(|start| wanted.saturating_sub(*start) <= length - wanted).unwrap_or(length))
}

/// Offset of the last matching byte before `end`.
fn last_byte(text: &mut File, mut end: u64, is_wanted: &dyn Fn(&u8) -> bool) -> io::Result<Option<u64>> {
    while end > 0 {
        let start = end.saturating_sub(READ_BYTES as u64);
        text.seek(SeekFrom::Start(start))?;
        let mut block = Vec::new();
        text.take(end - start).read_to_end(&mut block)?;
        if let Some(place) = block.iter().rposition(is_wanted) {
            return Ok(Some(start + place as u64));
        }
        end = start;
    }
    Ok(None)
}

/// First offset in a part that follows a line break and precedes a visible character.
fn line_start(text: &mut File, part: Range<u64>) -> io::Result<Option<u64>> {
    text.seek(SeekFrom::Start(part.start))?;
    let mut reader = BufReader::new(text).take(part.end - part.start);
    let (mut place, mut start) = (part.start, None);
    let mut block = vec![0; READ_BYTES];
    loop {
        let count = reader.read(&mut block)?;
        if count == 0 {
            return Ok(None);
        }
        for byte in &block[..count] {
            if start.is_some() && !byte.is_ascii_whitespace() {
                return Ok(start);
            }
            place += 1;
            if *byte == b'\n' {
                start = start.or(Some(place));
            }
        }
    }
}

fn content_of_line(line: &str) -> Result<Content<'static>, String> {
    let text = |text| Content::Text(Cow::Owned(text));
    match serde_json::from_str(line) {
        Ok(Value::String(string)) => Ok(text(string)),
        Ok(Value::Object(mut keys)) => match (keys.remove("text"), keys.remove("ids")) {
            (Some(Value::String(string)), None) => Ok(text(string)),
            (Some(Value::String(_)), Some(_)) => Err("the object has both `text` and `ids`; keep one".into()),
            (Some(_), _) => Err("`text` is not a string".into()),
            (None, Some(ids)) => match serde_json::from_value(ids) {
                Ok(ids) => Ok(Content::Ids(ids)),
                Err(_) => Err("`ids` is not a list of token ids".into()),
            },
            (None, None) => Err("the object has no `text`".into()),
        },
        Ok(_) => Err("expected a string or an object with a `text` field".into()),
        Err(error) => Err(format!("not valid JSON: {error}")),
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use serde_json::json;

    use super::*;

    fn file(folder: &Path, name: &str, text: &str) -> TextFile {
        let path = folder.join(name);
        std::fs::write(&path, text).unwrap();
        TextFile::open(&path, 0.0).unwrap()
    }

    fn string(content: Content) -> String {
        match content {
            Content::Text(text) => text.into_owned(),
            Content::Ids(ids) => format!("{ids:?}"),
        }
    }

    #[test]
    fn line_contains_text_or_token_ids() {
        let content = |line: &str| content_of_line(line).map(string);
        assert_eq!(content("{\"text\": \"a b\", \"labels\": []}"), Ok("a b".into()));
        assert_eq!(content("{\"ids\": [3, 0, 2047]}"), Ok("[3, 0, 2047]".into()));
        assert_eq!(content("{\"ids\": [3, -1]}"), Err("`ids` is not a list of token ids".into()));
        assert_eq!(
            content("{\"ids\": [3], \"text\": \"a\"}"),
            Err("the object has both `text` and `ids`; keep one".into())
        );
        // A tokenizer is trained only on texts.
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("rows.jsonl");
        std::fs::write(&path, "{\"text\": \"one\"}\n{\"ids\": [1, 2]}\n{\"text\": \"two\"}\n").unwrap();
        let corpus = Corpus::open(&[path], 0.0).unwrap();
        let texts: Vec<String> = corpus.documents(Split::Training).map(Result::unwrap).collect();
        assert_eq!(texts, ["one", "two"]);
    }

    fn pieces(file: &TextFile, range: Range<u64>, piece_bytes: usize) -> Vec<Piece> {
        let rule = SplitRule { piece_bytes, first: &before_line };
        file.pieces(range, rule).collect::<Result<_, _>>().unwrap()
    }

    #[test]
    fn pieces_split_before_line_breaks_without_loss() {
        let folder = tempfile::tempdir().unwrap();
        let text = "word \n\n line\nend. ".repeat(20_000);
        let file = file(folder.path(), "text.txt", &text);
        let found = pieces(&file, 0..file.bytes, PIECE_BYTES);
        assert!(found.len() > 3);
        let bytes =
            |pieces: &[Piece]| pieces.iter().flat_map(|piece| piece.bytes.clone()).collect::<Vec<_>>();
        assert_eq!(bytes(&found), text.as_bytes());
        assert!(found[1..].iter().all(|piece| piece.bytes.starts_with(b"\nend")));
        let ends: Vec<bool> = found.iter().map(|piece| piece.is_last).collect();
        assert_eq!((ends.iter().filter(|end| **end).count(), ends.last()), (1, Some(&true)));
        // Starting at the beginning of a piece yields the same pieces.
        let again = pieces(&file, found[2].start..file.bytes, PIECE_BYTES);
        assert_eq!(again.len(), found.len() - 2);
        assert_eq!(bytes(&again), bytes(&found[2..]));
        let one = self::file(folder.path(), "one.txt", &"x".repeat(200_000));
        assert_eq!(pieces(&one, 0..one.bytes, PIECE_BYTES).len(), 1, "no split point");
    }

    #[test]
    fn json_pieces_contain_whole_lines() {
        let folder = tempfile::tempdir().unwrap();
        let lines: Vec<String> =
            (0..50).map(|line| format!("{{\"text\": \"{}\"}}", "a".repeat(line))).collect();
        let file = file(folder.path(), "rows.jsonl", &lines.join("\n"));
        for piece_bytes in [1, 30, 64, 100_000] {
            let found = pieces(&file, 0..file.bytes, piece_bytes);
            let texts = found.iter().flat_map(|piece| file.texts(piece).unwrap());
            let texts: Vec<String> = texts.map(|text| string(text.content)).collect();
            assert_eq!(texts.len(), 50, "{piece_bytes}");
            assert!(texts.iter().enumerate().all(|(line, text)| *text == "a".repeat(line)));
        }
        assert_eq!(pieces(&file, 0..file.bytes, 1).len(), 50);
    }

    #[test]
    fn invalid_text_is_reported_with_its_position() {
        let folder = tempfile::tempdir().unwrap();
        let refused = |name: &str, bytes: &[u8]| {
            let path = folder.path().join(name);
            std::fs::write(&path, bytes).unwrap();
            let corpus = Corpus::open(std::slice::from_ref(&path), 0.0).unwrap();
            let error = corpus.documents(Split::Training).find_map(Result::err).unwrap();
            error.to_string().strip_prefix(&format!("{}: ", path.display())).unwrap().to_owned()
        };
        let far = [&b"good line\n".repeat(30_000)[..], b"\xff"].concat();
        assert_eq!(refused("a.txt", &far), "not valid UTF-8 at byte 300000; convert the text to UTF-8");
        assert!(refused("b.txt", b"text\0").starts_with("a binary file"));
        let lines = ["\"good\"\n\n".repeat(20_000), "{\"text\": 5}\n".to_owned()].concat();
        assert_eq!(refused("c.jsonl", lines.as_bytes()), "line 40001: `text` is not a string");
    }

    #[test]
    fn text_is_cut_after_a_line_or_between_characters() {
        let cut = |text: &str, held_out| {
            cut(&mut file_of(text), text.len() as u64, held_out, character_start).unwrap()
        };
        assert_eq!(cut("aaaa\nbbbb\ncccc", 0.5), 10);
        assert_eq!(cut("aaaa\nbbbb\ncccc", 0.0), 14);
        assert_eq!(cut("ää", 0.6), 2);
        let far = format!("{}\nb", "a".repeat(200_000));
        assert_eq!(cut(&far, 0.9), 200_001);
    }

    fn file_of(text: &str) -> File {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(text.as_bytes()).unwrap();
        file
    }

    #[test]
    fn held_out_split_keeps_lines_whole() {
        let cut = |text: &str, held_out| {
            cut(&mut file_of(text), text.len() as u64, held_out, near_line_start).unwrap()
        };
        let lines = "aaaa\nbbbb\ncccc\n";
        assert_eq!(
            [0.0, 0.01, 0.1, 0.3, 0.5, 0.7, 0.99].map(|held_out| cut(lines, held_out)),
            [15, 15, 15, 10, 10, 5, 5]
        );
        assert_eq!(
            [0.2, 0.05].map(|held_out| cut("aaaa\nbbbb\ncccc\n\n \n", held_out)),
            [10, 18],
            "blank lines do not count"
        );
        assert_eq!(cut("aaaa", 0.5), 4);
        let long = format!("a\nb\n{}", "c".repeat(200_000));
        assert_eq!((cut(&long, 0.4), cut(&long, 0.6)), (200_004, 4));
        // For any fraction, every line belongs to one part as a whole.
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("rows.jsonl");
        for lines in 1..30 {
            let texts: Vec<String> = (0..lines).map(|line| "the cat ".repeat(1 + line * 7 % 11)).collect();
            let rows: Vec<String> = texts.iter().map(|text| json!({ "text": text }).to_string()).collect();
            std::fs::write(&path, rows.join("\n")).unwrap();
            for held_out in [0.01, 0.1, 0.5, 0.95] {
                let corpus = Corpus::open(std::slice::from_ref(&path), held_out).unwrap();
                let parts = [Split::Training, Split::HeldOut].map(|split| corpus.documents(split));
                let found: Vec<String> = parts.into_iter().flatten().map(Result::unwrap).collect();
                assert_eq!(found, texts, "{lines} lines, {held_out}");
                let is_noted = corpus.notes().next().is_some();
                assert_eq!(is_noted, corpus.bytes(Split::HeldOut) == 0, "{lines} lines, {held_out}");
            }
        }
    }

    /// Checks that pieces of a single line are short, even in JSON, and add up to the text.
    #[test]
    fn long_line_is_read_in_short_pieces() {
        let folder = tempfile::tempdir().unwrap();
        for text in ["the cat sat ".repeat(100_000), "ä語🤗".repeat(120_000), "x".repeat(600_000)] {
            for (name, contents) in
                [("one.txt", text.clone()), ("one.jsonl", json!({ "text": text }).to_string())]
            {
                let path = folder.path().join(name);
                std::fs::write(&path, contents).unwrap();
                let corpus = Corpus::open(&[path], 0.0).unwrap();
                let pieces: Vec<String> = corpus.documents(Split::Training).map(Result::unwrap).collect();
                assert!(pieces.iter().all(|piece| piece.len() <= 5 * PIECE_BYTES), "{name}");
                assert_eq!(pieces.concat(), text, "{name}");
            }
        }
    }

    #[test]
    fn json_line_beyond_the_limit_is_rejected() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("rows.jsonl");
        let long =
            format!("{{\"text\": \"a\"}}\n{{\"text\": \"{}\"}}\n", "b".repeat(MAX_LINE_BYTES + READ_BYTES));
        std::fs::write(&path, long).unwrap();
        let corpus = Corpus::open(&[path], 0.0).unwrap();
        let error = corpus.documents(Split::Training).find_map(Result::err).unwrap().to_string();
        assert!(error.ends_with("more than 67108864 bytes of JSON; split that line"), "{error}");
    }

    #[test]
    fn byte_order_mark_is_skipped() {
        let folder = tempfile::tempdir().unwrap();
        for (name, contents) in [("a.txt", "\u{feff}one two"), ("a.jsonl", "\u{feff}\"one two\"\n")] {
            let path = folder.path().join(name);
            std::fs::write(&path, contents).unwrap();
            let corpus = Corpus::open(&[path], 0.0).unwrap();
            let texts: Vec<String> = corpus.documents(Split::Training).map(Result::unwrap).collect();
            assert_eq!(texts, ["one two"]);
        }
    }
}
