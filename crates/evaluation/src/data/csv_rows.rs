//! Data entries from the rows of a CSV file.

use csv::{Error, ErrorKind, Position, ReaderBuilder, StringRecord};
use serde_json::{Map, Value};

use super::record::Row;

/// Iterates over the rows, each with the number of its first line.
///
/// The first row names the fields, unless it contains none of `columns`. In that case the row is an
/// entry, and `columns` names the fields.
pub(super) fn rows<'a>(
    bytes: &'a [u8],
    columns: &'static [&'static str],
) -> Box<dyn Iterator<Item = Row> + 'a> {
    let mut reader = ReaderBuilder::new().has_headers(false).from_reader(bytes);
    let mut lines = Lines { bytes, counted: 0, line: 1 };
    let mut first = StringRecord::new();
    match reader.read_record(&mut first) {
        Err(error) => return Box::new(std::iter::once(damaged(&mut lines, &error))),
        Ok(false) => return Box::new(std::iter::empty()),
        Ok(true) => (),
    }
    let is_named = columns.is_empty() || first.iter().any(|name| columns.contains(&name));
    let names: Vec<String> = match is_named {
        true => first.iter().map(str::to_owned).collect(),
        false => columns.iter().map(|name| (*name).to_owned()).collect(),
    };
    let first = (!is_named).then_some(Ok(first));
    let rows = first.into_iter().chain(reader.into_records());
    Box::new(rows.map(move |row| match row {
        Ok(row) => (lines.line_at(row.position()), fields(&names, &row)),
        Err(error) => damaged(&mut lines, &error),
    }))
}

/// Line counter for ascending byte positions.
///
/// The CSV reader's own count is one too low if lines end in CRLF.
struct Lines<'a> {
    bytes: &'a [u8],
    counted: usize,
    line: usize,
}

impl Lines<'_> {
    /// Returns the line number at a position, after skipping any line endings there.
    fn line_at(&mut self, position: Option<&Position>) -> usize {
        let place =
            position.and_then(|position| usize::try_from(position.byte()).ok()).unwrap_or(self.counted);
        let new = self.bytes.get(self.counted..).unwrap_or_default();
        let before = place.saturating_sub(self.counted);
        let is_passed = |(index, byte): &(usize, &u8)| *index < before || matches!(**byte, b'\r' | b'\n');
        let passed = new.iter().enumerate().take_while(is_passed);
        let (length, ends) =
            passed.fold((0, 0), |(length, ends), (_, byte)| (length + 1, ends + usize::from(*byte == b'\n')));
        self.counted += length;
        self.line += ends;
        self.line
    }
}

fn fields(names: &[String], row: &StringRecord) -> Result<Map<String, Value>, String> {
    if row.len() != names.len() {
        return Err(format!("expected {} columns ({}), found {}", names.len(), names.join(", "), row.len()));
    }
    Ok(names.iter().cloned().zip(row.iter().map(Value::from)).collect())
}

fn damaged(lines: &mut Lines<'_>, error: &Error) -> Row {
    let what = match error.kind() {
        ErrorKind::UnequalLengths { expected_len, len, .. } => {
            format!("expected {expected_len} columns, found {len}")
        }
        ErrorKind::Utf8 { err, .. } => {
            format!("column {}: expected UTF-8, found an invalid byte", err.field() + 1)
        }
        _ => error.to_string(),
    };
    (lines.line_at(error.position()), Err(what))
}
