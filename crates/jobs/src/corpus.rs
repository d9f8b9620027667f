//! Texts to train on: plain text files, and JSONL files with a `text`, or the `ids` of tokens, in each line; the last part is held out.
//!
//! A plain file is one document, cut at a line break. Every line of a JSONL file is one, and belongs to one part whole. Ids are taken
//! as they are: rows of tokens that no text is encoded to, such as random ones. A
//! document ends with the end-of-text token, if the model's vocabulary has one. Files are read piece by piece, so that no
//! memory grows with them.

use std::borrow::Cow;
use std::fs::File;
use std::io::{self, BufReader, Read, Seek, SeekFrom};
use std::ops::Range;
use std::path::{Path, PathBuf};

use candle_gpt2_weights::open_regular;
use serde_json::Value;

use crate::TrainingError;

/// Bytes that a tokenizer in training is shown at once, at least.
const PIECE_BYTES: usize = 1 << 16;
/// Bytes that are read at once while a place to cut is looked for.
const READ_BYTES: usize = 1 << 16;
/// What a place to cut may need to know of the bytes before a piece's end: a character.
const CHARACTER_BYTES: usize = 4;

/// A part of the data. A [`Corpus`] has both.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Split {
    /// To train on.
    Training,
    /// To measure the loss on.
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
    /// Where the held-out part begins.
    pub(crate) held_out_from: u64,
    is_json_lines: bool,
}

/// How a text is cut: bytes of a piece, at least, and the first place from there on where it may end.
pub(crate) struct Cuts<'a> {
    pub(crate) piece_bytes: usize,
    pub(crate) first: &'a (dyn Fn(&[u8], usize) -> Option<usize> + Sync),
}

/// A piece of a file: whole lines of JSON, or a part of a text.
pub(crate) struct Piece {
    bytes: Vec<u8>,
    /// Where it begins in the file.
    start: u64,
    /// Whether it is the last one of its part of a file.
    is_last: bool,
}

/// A document, or the piece of one.
pub(crate) struct Text<'a> {
    pub(crate) content: Content<'a>,
    /// Whether its document ends with it.
    pub(crate) is_end: bool,
}

/// What a document holds.
pub(crate) enum Content<'a> {
    Text(Cow<'a, str>),
    /// Tokens, as their ids.
    Ids(Vec<u32>),
}

impl Corpus {
    /// Opens the files; the last `held_out` share of each is held out. Files are JSONL if their names end in `.jsonl`
    /// or `.ndjson`. What they hold is checked when it is read.
    ///
    /// # Errors
    /// When a file is empty or none, or when the share is not from 0 to below 1.
    pub fn open(paths: &[PathBuf], held_out: f64) -> Result<Self, TrainingError> {
        if !(0.0..1.0).contains(&held_out) {
            let expected = "a share from 0 to below 1".to_owned();
            let found = held_out.to_string();
            return Err(TrainingError::OptionOutOfRange { option: "held_out", expected, found });
        }
        let files = paths.iter().map(|path| TextFile::open(path, held_out)).collect::<Result<_, _>>()?;
        Ok(Self { files })
    }

    /// The texts of a part, in the order of the files; long ones in pieces, cut before line breaks. Documents that are ids have none.
    pub fn documents(&self, split: Split) -> impl Iterator<Item = Result<String, TrainingError>> + Send {
        const CUTS: Cuts<'static> = Cuts { piece_bytes: PIECE_BYTES, first: &before_line };
        self.files.iter().flat_map(move |file| {
            file.pieces(file.range(split), CUTS).flat_map(move |piece| {
                let text = |text: Text| match text.content {
                    Content::Text(text) => Some(Ok(text.into_owned())),
                    Content::Ids(_) => None,
                };
                let texts = |piece: Piece| Ok(file.texts(&piece)?.filter_map(text).collect());
                piece.and_then(texts).unwrap_or_else(|error| vec![Err(error)])
            })
        })
    }

    /// Bytes of a part, as the files hold it.
    pub fn bytes(&self, split: Split) -> u64 {
        self.files.iter().map(|file| file.range(split)).map(|range| range.end - range.start).sum()
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
        let held_out_from = cut(&mut file, bytes, held_out).map_err(failed)?;
        let ending = path.extension().and_then(|ending| ending.to_str()).unwrap_or_default();
        let is_json_lines = matches!(ending, "jsonl" | "ndjson");
        Ok(Self { path: path.to_owned(), bytes, held_out_from, is_json_lines })
    }

    /// Where a part is.
    pub(crate) fn range(&self, split: Split) -> Range<u64> {
        match split {
            Split::Training => 0..self.held_out_from,
            Split::HeldOut => self.held_out_from..self.bytes,
        }
    }

    /// The pieces of a part, or of the rest of one.
    pub(crate) fn pieces<'a>(
        &'a self,
        range: Range<u64>,
        cuts: Cuts<'a>,
    ) -> impl Iterator<Item = Result<Piece, TrainingError>> + Send + 'a {
        let mut reader = PieceReader { file: None, rest: Vec::new(), range };
        std::iter::from_fn(move || {
            let piece = reader.next(self, &cuts).transpose()?;
            if piece.is_err() {
                reader.range.start = reader.range.end;
            }
            Some(piece.map_err(|error| TrainingError::File { path: self.path.clone(), error }))
        })
    }

    /// The texts of a piece.
    ///
    /// # Errors
    /// When it is binary, not UTF-8, or a line that should be JSON is not.
    pub(crate) fn texts<'a>(
        &'a self,
        piece: &'a Piece,
    ) -> Result<impl Iterator<Item = Text<'a>> + 'a, TrainingError> {
        let refuse = |what: String| TrainingError::Data { path: self.path.clone(), what };
        if piece.bytes.contains(&0) {
            return Err(refuse("a binary file (it holds zero bytes); give text or JSONL files".into()));
        }
        let text = str::from_utf8(&piece.bytes).map_err(|error| {
            let valid = piece.start + error.valid_up_to() as u64;
            refuse(format!("not valid UTF-8 at byte {valid}; convert the text to UTF-8"))
        })?;
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

    /// Line breaks before a place.
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
    /// Its bytes, as the file holds them.
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.bytes
    }
}

/// Reads a part of a file piece by piece.
struct PieceReader {
    file: Option<File>,
    /// What was read behind the last piece.
    rest: Vec<u8>,
    /// What is left, the rest included.
    range: Range<u64>,
}

impl PieceReader {
    fn next(&mut self, text: &TextFile, cuts: &Cuts) -> io::Result<Option<Piece>> {
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
        let mut searched = cuts.piece_bytes;
        let end = loop {
            let found = if bytes.len() <= searched {
                None
            } else if text.is_json_lines {
                // The byte before is looked at, too: a line may end with it.
                let from = searched - 1;
                bytes[from..].iter().position(|byte| *byte == b'\n').map(|place| from + place + 1)
            } else {
                (cuts.first)(&bytes, searched)
            };
            if let Some(end) = found {
                break end;
            }
            searched = searched.max(bytes.len().saturating_sub(CHARACTER_BYTES));
            let missing = left - bytes.len() as u64;
            if missing == 0 {
                break bytes.len();
            }
            let wanted = (searched + READ_BYTES - bytes.len()) as u64;
            if file.take(wanted.min(missing)).read_to_end(&mut bytes)? == 0 {
                return Err(io::Error::new(
                    io::ErrorKind::UnexpectedEof,
                    "it became shorter while it was read",
                ));
            }
        };
        self.rest = bytes.split_off(end);
        let start = self.range.start;
        self.range.start += end as u64;
        Ok(Some(Piece { bytes, start, is_last: self.range.is_empty() }))
    }
}

/// The first place from `from` on before a line break with something visible after it. GPT-2's tokenizer ends a word there
/// whatever precedes it.
fn before_line(bytes: &[u8], from: usize) -> Option<usize> {
    let is_cut =
        |place: &usize| bytes[*place] == b'\n' && bytes.get(place + 1).is_some_and(u8::is_ascii_graphic);
    (from.max(1)..bytes.len()).find(is_cut)
}

/// Where the last `share` of a text of `length` bytes begins: after a line break, or at a character if no line ends before.
fn cut(text: &mut (impl Read + Seek), length: u64, share: f64) -> io::Result<u64> {
    if share == 0.0 {
        return Ok(length);
    }
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a share of the length lies within it"
    )]
    let wanted = ((length as f64) * (1.0 - share)) as u64;
    text.seek(SeekFrom::Start(wanted))?;
    let mut reader = BufReader::new(text).take(length - wanted);
    let mut place = wanted;
    let mut first_boundary = None;
    let mut block = vec![0; READ_BYTES];
    loop {
        let count = reader.read(&mut block)?;
        if count == 0 {
            return Ok(first_boundary.unwrap_or(length));
        }
        let block = &block[..count];
        let boundary = || block.iter().position(|byte| byte & 0xc0 != 0x80);
        first_boundary = first_boundary.or_else(|| boundary().map(|boundary| place + boundary as u64));
        if let Some(line_break) = block.iter().position(|byte| *byte == b'\n') {
            let after = place + line_break as u64 + 1;
            return Ok(if after < length { after } else { first_boundary.unwrap_or(length) });
        }
        place += count as u64;
    }
}

fn content_of_line(line: &str) -> Result<Content<'static>, String> {
    let text = |text| Content::Text(Cow::Owned(text));
    // Some editors put a byte order mark in front of a file.
    match serde_json::from_str(line.trim_start_matches('\u{feff}')) {
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
        Ok(_) => Err("expected an object with a `text`, or a string".into()),
        Err(error) => Err(format!("not valid JSON: {error}")),
    }
}

#[cfg(test)]
mod tests {
    use std::io::Cursor;

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
    fn a_line_holds_a_text_or_the_ids_of_tokens() {
        let of = |line: &str| content_of_line(line).map(string);
        assert_eq!(of("{\"text\": \"a b\", \"labels\": []}"), Ok("a b".into()));
        assert_eq!(of("{\"ids\": [3, 0, 2047]}"), Ok("[3, 0, 2047]".into()));
        assert_eq!(of("{\"ids\": [3, -1]}"), Err("`ids` is not a list of token ids".into()));
        assert_eq!(
            of("{\"ids\": [3], \"text\": \"a\"}"),
            Err("the object has both `text` and `ids`; keep one".into())
        );
        // A tokenizer is trained on the texts alone.
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("rows.jsonl");
        std::fs::write(&path, "{\"text\": \"one\"}\n{\"ids\": [1, 2]}\n{\"text\": \"two\"}\n").unwrap();
        let corpus = Corpus::open(&[path], 0.0).unwrap();
        let texts: Vec<String> = corpus.documents(Split::Training).map(Result::unwrap).collect();
        assert_eq!(texts, ["one", "two"]);
    }

    fn pieces(file: &TextFile, range: Range<u64>, piece_bytes: usize) -> Vec<Piece> {
        let cuts = Cuts { piece_bytes, first: &before_line };
        file.pieces(range, cuts).collect::<Result<_, _>>().unwrap()
    }

    #[test]
    fn pieces_are_cut_before_line_breaks_and_lose_nothing() {
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
        // From a piece's begin on they are the same ones.
        let again = pieces(&file, found[2].start..file.bytes, PIECE_BYTES);
        assert_eq!(again.len(), found.len() - 2);
        assert_eq!(bytes(&again), bytes(&found[2..]));
        let one = self::file(folder.path(), "one.txt", &"x".repeat(200_000));
        assert_eq!(pieces(&one, 0..one.bytes, PIECE_BYTES).len(), 1, "no place to cut");
    }

    #[test]
    fn pieces_of_lines_are_whole_lines() {
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
    fn what_is_no_text_is_named_with_its_place() {
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
    fn a_cut_stands_after_a_line_or_between_characters() {
        let cut_of = |text: &str, share| cut(&mut Cursor::new(text), text.len() as u64, share).unwrap();
        assert_eq!(cut_of("aaaa\nbbbb\ncccc", 0.5), 10);
        assert_eq!(cut_of("aaaa\nbbbb\ncccc", 0.0), 14);
        assert_eq!(cut_of("ää", 0.6), 2);
        let far = format!("{}\nb", "a".repeat(200_000));
        assert_eq!(cut_of(&far, 0.9), 200_001);
    }
}
