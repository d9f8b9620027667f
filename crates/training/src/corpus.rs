//! Texts to train on: plain text files, and JSONL files with a `text` in each line; the last part is held out.
//!
//! A plain file is one document, cut at a line break. Every line of a JSONL file is one, and belongs to one part whole. A
//! document ends with the end-of-text token, where the model's vocabulary has one.

use std::borrow::Cow;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};

use gpt2::Gpt2Config;
use gpt2_weights::{MappedFile, Tokenizer, encode};
use serde_json::Value;

use crate::TrainingError;

/// Bytes that the tokenizer is given at once, at least.
const PIECE_BYTES: usize = 1 << 16;

/// A part of the data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Split {
    /// To train on.
    Training,
    /// To measure the loss on.
    HeldOut,
}

/// The texts of the data files, mapped into memory and checked.
#[derive(Debug)]
pub struct Corpus {
    files: Vec<TextFile>,
}

#[derive(Debug)]
struct TextFile {
    file: MappedFile,
    is_json_lines: bool,
    /// Where the held-out part begins.
    held_out_from: usize,
}

impl Corpus {
    /// Opens the files; the last `held_out` share of each is held out. Files are JSONL where their names end in `.jsonl`
    /// or `.ndjson`.
    ///
    /// # Errors
    /// When a file is empty, binary, not UTF-8, or JSONL without texts, or when the share is not from 0 to below 1.
    pub fn open(paths: &[PathBuf], held_out: f64) -> Result<Self, TrainingError> {
        if !(0.0..1.0).contains(&held_out) {
            let expected = "a share from 0 to below 1".to_owned();
            let found = held_out.to_string();
            return Err(TrainingError::OptionOutOfRange { option: "held_out", expected, found });
        }
        let files = paths.iter().map(|path| TextFile::open(path, held_out)).collect::<Result<_, _>>()?;
        Ok(Self { files })
    }

    /// The documents of a part, in the order of the files.
    pub fn documents(&self, split: Split) -> impl Iterator<Item = Cow<'_, str>> + Send {
        self.files.iter().flat_map(move |file| file.documents(split))
    }

    /// Characters of a part.
    pub fn characters(&self, split: Split) -> usize {
        self.documents(split).map(|document| document.chars().count()).sum()
    }

    /// Bytes of a part, as the files hold it.
    pub fn bytes(&self, split: Split) -> usize {
        self.files.iter().map(|file| file.range(split).len()).sum()
    }

    /// Writes the tokens of a part to a file, see [`TokenFile`](crate::TokenFile). Where the vocabulary has no end token
    /// ([`Gpt2Config::end_tokens`]) documents follow each other without one; [`Gpt2Config::end_token_note`] says so. `progress`
    /// is told how many bytes of text were encoded since the last call, and may end it.
    ///
    /// # Errors
    /// That of `progress`, or when a text cannot be encoded, a token is outside the vocabulary, or the file cannot be written.
    pub fn encode(
        &self,
        split: Split,
        tokenizer: &Tokenizer,
        config: &Gpt2Config,
        path: &Path,
        progress: &dyn Fn(u64) -> Result<(), TrainingError>,
    ) -> Result<(), TrainingError> {
        let failed = |error| TrainingError::File { path: path.to_owned(), error };
        let mut writer = BufWriter::new(File::create(path).map_err(failed)?);
        let end = config.end_tokens().first().copied();
        for document in self.documents(split) {
            for piece in pieces(&document) {
                for id in encode(tokenizer, piece)? {
                    if !config.has_token(id) {
                        return Err(TrainingError::Vocabulary { id, vocab_size: config.vocab_size });
                    }
                    writer.write_all(&id.to_le_bytes()).map_err(failed)?;
                }
                progress(piece.len() as u64)?;
            }
            if let Some(end) = end {
                writer.write_all(&end.to_le_bytes()).map_err(failed)?;
            }
        }
        writer.flush().map_err(failed)
    }
}

impl TextFile {
    fn open(path: &Path, held_out: f64) -> Result<Self, TrainingError> {
        let refuse = |what: String| TrainingError::Data { path: path.to_owned(), what };
        let file = match std::fs::metadata(path) {
            Err(error) => return Err(TrainingError::File { path: path.to_owned(), error }),
            Ok(metadata) if !metadata.is_file() => {
                return Err(refuse("not a regular file; give text or JSONL files".into()));
            }
            // An empty file cannot be mapped everywhere.
            Ok(metadata) if metadata.len() == 0 => return Err(refuse("the file is empty".into())),
            Ok(_) => MappedFile::open(path)?,
        };
        if file.contains(&0) {
            return Err(refuse("a binary file (it holds zero bytes); give text or JSONL files".into()));
        }
        if let Err(error) = std::str::from_utf8(&file) {
            let valid = error.valid_up_to();
            return Err(refuse(format!("not valid UTF-8 at byte {valid}; convert the text to UTF-8")));
        }
        let ending = path.extension().and_then(|ending| ending.to_str()).unwrap_or_default();
        let is_json_lines = matches!(ending, "jsonl" | "ndjson");
        if is_json_lines {
            for (index, line) in lines(&file).enumerate() {
                text_of_line(line).map_err(|what| refuse(format!("line {}: {what}", index + 1)))?;
            }
        }
        let held_out_from = cut(&file, held_out);
        Ok(Self { file, is_json_lines, held_out_from })
    }

    fn range(&self, split: Split) -> Range<usize> {
        match split {
            Split::Training => 0..self.held_out_from,
            Split::HeldOut => self.held_out_from..self.file.len(),
        }
    }

    fn documents(&self, split: Split) -> Box<dyn Iterator<Item = Cow<'_, str>> + Send + '_> {
        let bytes = &self.file[self.range(split)];
        if self.is_json_lines {
            // Every line was checked when the file was opened.
            return Box::new(lines(bytes).filter_map(|line| text_of_line(line).ok()).map(Cow::Owned));
        }
        let text = std::str::from_utf8(bytes).unwrap_or_default();
        Box::new((!text.is_empty()).then_some(Cow::Borrowed(text)).into_iter())
    }
}

/// Where the last `share` of a text begins: after a line break, or at a character where no line ends before.
fn cut(text: &[u8], share: f64) -> usize {
    if share == 0.0 {
        return text.len();
    }
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a share of the length lies within it"
    )]
    let wanted = ((text.len() as f64) * (1.0 - share)) as usize;
    let line_break = text[wanted..].iter().position(|byte| *byte == b'\n');
    match line_break {
        Some(place) if wanted + place + 1 < text.len() => wanted + place + 1,
        _ => {
            let is_boundary = |place: &usize| text.get(*place).is_none_or(|byte| byte & 0xc0 != 0x80);
            (wanted..=text.len()).find(is_boundary).unwrap_or(text.len())
        }
    }
}

fn lines(bytes: &[u8]) -> impl Iterator<Item = &[u8]> + Send {
    bytes.split(|byte| *byte == b'\n').map(<[u8]>::trim_ascii).filter(|line| !line.is_empty())
}

fn text_of_line(line: &[u8]) -> Result<String, String> {
    match serde_json::from_slice(line) {
        Ok(Value::String(text)) => Ok(text),
        Ok(Value::Object(mut keys)) => match keys.remove("text") {
            Some(Value::String(text)) => Ok(text),
            Some(_) => Err("`text` is no string".into()),
            None => Err("the object has no `text`".into()),
        },
        Ok(_) => Err("expected an object with a `text`, or a string".into()),
        Err(error) => Err(format!("not valid JSON: {error}")),
    }
}

/// Cuts a text into pieces whose tokens are, one piece after the other, those of the whole: before a line break with no
/// white space after it, where GPT-2's tokenizer ends a word whatever stands before.
fn pieces(text: &str) -> impl Iterator<Item = &str> {
    let mut rest = text;
    std::iter::from_fn(move || {
        if rest.is_empty() {
            return None;
        }
        let bytes = rest.as_bytes();
        let is_cut = |place: usize| {
            bytes[place] == b'\n' && bytes.get(place + 1).is_some_and(|next| next.is_ascii_graphic())
        };
        let end = (PIECE_BYTES.min(bytes.len())..bytes.len()).find(|place| is_cut(*place));
        let (piece, after) = rest.split_at(end.unwrap_or(bytes.len()));
        rest = after;
        Some(piece)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_cut_before_line_breaks_and_lose_nothing() {
        let text = "word \n\n line\nend. ".repeat(20_000);
        let found: Vec<&str> = pieces(&text).collect();
        assert!(found.len() > 3);
        assert_eq!(found.concat(), text);
        assert!(found[1..].iter().all(|piece| piece.starts_with("\nend")));
        assert_eq!(pieces(&"x".repeat(200_000)).count(), 1, "no place to cut");
    }

    #[test]
    fn a_cut_stands_after_a_line_or_between_characters() {
        assert_eq!(cut(b"aaaa\nbbbb\ncccc", 0.5), 10);
        assert_eq!(cut(b"aaaa\nbbbb\ncccc", 0.0), 14);
        let text = "ää".as_bytes();
        assert_eq!(cut(text, 0.6), 2);
    }
}
