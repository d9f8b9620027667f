//! Data files with two texts per row: JSONL files, or TSV files.
//!
//! A `.tsv` file may begin with a header line; columns other than the two required ones are ignored.
//! Without a header there are two columns, and the second one extends to the end of the line. TSV has no
//! quoting, so a text with tabs or line breaks needs JSON.

use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

use candle_gpt2_weights::open_regular;
use serde_json::Value;

use crate::TrainingError;

/// Maximum length of a line in bytes.
const MAX_LINE_BYTES: u64 = 1 << 26;

/// Names and positions of the two columns.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Columns {
    /// Names of the columns.
    pub(crate) names: [&'static str; 2],
    /// Positions in a TSV file without a header: 0 and 1, or 1 and 0.
    pub(crate) places: [usize; 2],
}

/// A row of a data file.
#[derive(Debug)]
pub(crate) struct Record {
    /// Texts, in the order of [`Columns::names`].
    pub(crate) texts: [String; 2],
    file: usize,
    line: usize,
}

/// Rows from several files, in order.
#[derive(Debug)]
pub(crate) struct Records {
    paths: Vec<PathBuf>,
    rows: Vec<Record>,
}

impl Records {
    /// Reads the files.
    ///
    /// # Errors
    /// Fails if a file cannot be read, has an unknown extension, contains an invalid line or has no rows.
    pub(crate) fn read(paths: &[PathBuf], columns: Columns) -> Result<Self, TrainingError> {
        let mut records = Self { paths: paths.to_vec(), rows: Vec::new() };
        for (file, path) in paths.iter().enumerate() {
            let before = records.rows.len();
            let mut reader = LineReader::new(path, columns)?;
            let mut is_first = true;
            each_line(path, |line, text| {
                let texts = reader.texts(text, std::mem::take(&mut is_first))?;
                records.rows.extend(texts.map(|texts| Record { texts, file, line }));
                Ok(())
            })?;
            if records.rows.len() == before {
                let what = "the file has no rows".to_owned();
                return Err(TrainingError::Data { path: path.clone(), what });
            }
        }
        Ok(records)
    }

    /// Returns the rows.
    pub(crate) fn rows(&self) -> &[Record] {
        &self.rows
    }

    /// Returns the index of a row within its own file, and the number of rows in that file.
    pub(crate) fn place_in_file(&self, index: usize) -> (usize, usize) {
        let file = self.rows.get(index).map_or(0, |row| row.file);
        let first = self.rows.partition_point(|row| row.file < file);
        (index - first, self.rows.partition_point(|row| row.file <= file) - first)
    }

    /// Creates an error about a row.
    pub(crate) fn refuse(&self, row: &Record, what: &str) -> TrainingError {
        let path = self.paths.get(row.file).cloned().unwrap_or_default();
        TrainingError::Data { path, what: format!("line {}: {what}", row.line) }
    }
}

/// Parser for the lines of a file.
enum LineReader {
    JsonLines {
        names: [&'static str; 2],
    },
    Tabs(Columns),
    /// TSV after a header line, with the positions of both columns.
    NamedTabs([usize; 2]),
}

impl LineReader {
    fn new(path: &Path, columns: Columns) -> Result<Self, TrainingError> {
        match path.extension().and_then(|ending| ending.to_str()) {
            Some("jsonl" | "ndjson") => Ok(Self::JsonLines { names: columns.names }),
            Some("tsv") => Ok(Self::Tabs(columns)),
            _ => {
                let [first, second] = columns.names;
                let what = format!(
                    "expected a .jsonl or .ndjson file with `{first}` and `{second}` in each line, or a .tsv file"
                );
                Err(TrainingError::Data { path: path.to_owned(), what })
            }
        }
    }

    /// Parses the texts of a line; `None` for a header line.
    fn texts(&mut self, line: &str, is_first: bool) -> Result<Option<[String; 2]>, String> {
        match self {
            Self::JsonLines { names } => texts_of_object(line, *names).map(Some),
            Self::Tabs(columns) => {
                let place = |name: &str| line.split('\t').position(|cell| cell.trim() == name);
                if is_first && let [Some(first), Some(second)] = columns.names.map(place) {
                    *self = Self::NamedTabs([first, second]);
                    return Ok(None);
                }
                let [first, second] = columns.places;
                let names = if first < second { columns.names } else { [columns.names[1], columns.names[0]] };
                let missing = || format!("no tab: expected `{}`, a tab and `{}`", names[0], names[1]);
                let (before, after) = line.split_once('\t').ok_or_else(missing)?;
                Ok(Some(columns.places.map(|place| [before, after][place].to_owned())))
            }
            Self::NamedTabs(places) => {
                let cells: Vec<&str> = line.split('\t').collect();
                let [first, second] = places.map(|place| cells.get(place).map(|cell| (*cell).to_owned()));
                let both = first.zip(second).map(|(first, second)| [first, second]);
                let missing = || format!("{} columns, fewer than in the first line", cells.len());
                both.map(Some).ok_or_else(missing)
            }
        }
    }
}

/// Parses the texts of a JSON object: strings, `true`, `false`, and integers as written.
fn texts_of_object(line: &str, names: [&'static str; 2]) -> Result<[String; 2], String> {
    let mut keys = match serde_json::from_str(line) {
        Ok(Value::Object(keys)) => keys,
        Ok(_) => return Err(format!("expected an object with `{}` and `{}`", names[0], names[1])),
        Err(error) => return Err(format!("not valid JSON: {error}")),
    };
    let mut text = |name: &str| match keys.remove(name) {
        None | Some(Value::Null) => Err(format!("the object has no `{name}`")),
        Some(Value::String(text)) => Ok(text),
        Some(Value::Number(number)) if !number.is_f64() => Ok(number.to_string()),
        Some(Value::Bool(is_so)) => Ok(is_so.to_string()),
        Some(_) => Err(format!("`{name}` is not a string")),
    };
    Ok([text(names[0])?, text(names[1])?])
}

/// Calls `each` with every non-blank line and its number, counted from 1.
///
/// Errors of `each` are reported with the line number.
fn each_line(
    path: &Path,
    mut each: impl FnMut(usize, &str) -> Result<(), String>,
) -> Result<(), TrainingError> {
    let failed = |error| TrainingError::File { path: path.to_owned(), error };
    let refuse = |what: String| TrainingError::Data { path: path.to_owned(), what };
    let mut reader = BufReader::new(open_regular(path).map_err(failed)?);
    let mut bytes = Vec::new();
    for number in 1.. {
        bytes.clear();
        let count = reader.by_ref().take(MAX_LINE_BYTES).read_until(b'\n', &mut bytes).map_err(failed)?;
        if count == 0 {
            break;
        }
        let of_line = |what: &str| refuse(format!("line {number}: {what}"));
        if count as u64 == MAX_LINE_BYTES {
            return Err(of_line(&format!("longer than {} MiB; split it", MAX_LINE_BYTES >> 20)));
        }
        if bytes.contains(&0) {
            return Err(of_line("a binary file (it contains zero bytes); use JSONL or TSV files"));
        }
        let line =
            str::from_utf8(&bytes).map_err(|_| of_line("not valid UTF-8; convert the file to UTF-8"))?;
        // Some editors write a byte order mark at the start of a file.
        let line = if number == 1 { line.trim_start_matches('\u{feff}') } else { line };
        let line = line.trim_end_matches(['\r', '\n']);
        if !line.trim().is_empty() {
            each(number, line).map_err(|what| of_line(&what))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    const COLUMNS: Columns = Columns { names: ["text", "label"], places: [1, 0] };

    fn read(name: &str, content: &str) -> Result<Vec<[String; 2]>, String> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(name);
        fs::write(&path, content).unwrap();
        let records = Records::read(&[path], COLUMNS).map_err(|error| {
            let message = error.to_string();
            message.rsplit_once(&format!("{name}: ")).map_or(message.clone(), |(_, what)| what.to_owned())
        })?;
        Ok(records.rows.into_iter().map(|row| row.texts).collect())
    }

    fn rows(rows: &[[&str; 2]]) -> Result<Vec<[String; 2]>, String> {
        Ok(rows.iter().map(|row| row.map(str::to_owned)).collect())
    }

    #[test]
    fn json_lines_and_tsv_rows_are_read() {
        let lines = "\u{feff}{\"text\": \"a\\tb\", \"label\": \"x\"}\r\n\n{\"label\": 7, \"text\": \"c\", \"more\": []}\n{\"text\": \"\", \"label\": true}";
        assert_eq!(read("rows.jsonl", lines), rows(&[["a\tb", "x"], ["c", "7"], ["", "true"]]));
        assert_eq!(
            read("rows.tsv", "ham\tGo until\tjurong\r\nspam\tFree"),
            rows(&[["Go until\tjurong", "ham"], ["Free", "spam"]])
        );
        let with_header = "id\tlabel\ttext\n1\tham\tGo until\n2\tspam\tFree\tand more\n";
        assert_eq!(read("rows.tsv", with_header), rows(&[["Go until", "ham"], ["Free", "spam"]]));
    }

    #[test]
    fn invalid_row_is_reported_with_its_line() {
        for (name, content, expected) in [
            (
                "rows.jsonl",
                "{\"text\": \"a\", \"label\": 1}\n\n{\"text\": \"b\"}",
                "line 3: the object has no `label`",
            ),
            ("rows.jsonl", "{\"text\": \"a\", \"label\": null}", "line 1: the object has no `label`"),
            ("rows.jsonl", "{\"text\": \"a\", \"label\": 0.5}", "line 1: `label` is not a string"),
            ("rows.jsonl", "{\"text\": [\"a\"], \"label\": 1}", "line 1: `text` is not a string"),
            ("rows.jsonl", "\"a\"", "line 1: expected an object with `text` and `label`"),
            ("rows.ndjson", "{", "line 1: not valid JSON"),
            ("rows.tsv", "ham\ta\nspam", "line 2: no tab: expected `label`, a tab and `text`"),
            ("rows.tsv", "text\tid\tlabel\na\t1\n", "line 2: 2 columns, fewer than in the first line"),
            ("rows.tsv", "text\tlabel\n", "the file has no rows"),
            ("rows.jsonl", "", "the file has no rows"),
            (
                "rows.csv",
                "ham,a",
                "expected a .jsonl or .ndjson file with `text` and `label` in each line, or a .tsv file",
            ),
        ] {
            let error = read(name, content).unwrap_err();
            assert!(error.starts_with(expected), "{content}: {error}");
        }
    }

    #[test]
    fn non_text_files_are_rejected() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("rows.tsv");
        fs::write(&path, b"ham\ta\nspam\t\xe9").unwrap();
        let error = Records::read(&[path], COLUMNS).unwrap_err().to_string();
        assert!(error.ends_with("line 2: not valid UTF-8; convert the file to UTF-8"), "{error}");
        let path = folder.path().join("zeros.tsv");
        fs::write(&path, b"ham\ta\0").unwrap();
        let error = Records::read(&[path], COLUMNS).unwrap_err().to_string();
        assert!(
            error.ends_with("line 1: a binary file (it contains zero bytes); use JSONL or TSV files"),
            "{error}"
        );
        let error = Records::read(&[folder.path().join("rows.tsv").join("x.tsv")], COLUMNS).unwrap_err();
        assert!(matches!(error, TrainingError::File { .. }), "{error}");
    }
}
