//! A bulk job: every row of a file of prompts becomes one line of JSON, in the order of the file.
//!
//! [`RowsJob::run`] reads the rows (`lines.rs`), hands them to what computes them (`work.rs`) in any number at once, and writes each answer
//! when those of all rows before it are written. A row that cannot be read or computed becomes a line with its `error`, and
//! changes no other. An output file is locked, and survives an interruption: `partial.rs` says how a job resumes.

mod lines;
mod partial;
#[cfg(test)]
mod tests;
mod work;

use std::collections::BTreeMap;
use std::error::Error;
use std::path::Path;

use candle_gpt2::printable_json;
use serde::Serialize;
use serde_json::{Value, json};

use self::lines::{Line, Lines};
pub use self::lines::{Row, RowFile, RowSequences};
use self::partial::Partial;
pub use self::work::{PromptTexts, ScoredText, TokenLogprob};
use crate::{EngineError, Progress, Reporter, Unit};

/// A file of rows, and where their answers go.
///
/// ```
/// use candle_gpt2_engine::{ModelOptions, RowsJob, RowsOutput, Silent};
///
/// # let folder = tempfile::tempdir()?;
/// # let folder = folder.path();
/// let model = ModelOptions::default().open(&Silent)?.load(&Silent)?;
/// let output = folder.join("scores.jsonl");
/// let job = RowsJob {
///     input: "lines.txt".as_ref(),
///     content: b"What say you to this?\n\xff\n".to_vec(),
///     output: RowsOutput::File { path: &output, resume: false },
///     settings: &serde_json::json!({"model": "built-in"}),
///     what: "scoring",
///     told: &|error| error.to_string(),
///     reporter: &Silent,
/// };
/// let vocabulary = model.vocabulary();
/// let failed = job.run(|row| row.tokens(vocabulary), |rows| rows.score(&model, None, 0))?;
/// assert_eq!(failed[0].line, 2);
/// assert!(failed[0].error.starts_with("not valid UTF-8"));
/// let lines = std::fs::read_to_string(output)?;
/// assert!(lines.starts_with(r#"{"line":1,"prompt":"What say you to this?","prompt_ids":["#), "{lines}");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct RowsJob<'a> {
    /// Name of the file: JSONL if it ends in `.jsonl`, otherwise a prompt on each line.
    pub input: &'a Path,
    /// What it holds.
    pub content: Vec<u8>,
    /// Where the lines go.
    pub output: RowsOutput<'a>,
    /// What must be the same when an interrupted job resumes: an object of options, of which `config` may hold more.
    pub settings: &'a Value,
    /// What the job does, for a reader: `generating`.
    pub what: &'a str,
    /// The text that is written for a row's error.
    pub told: &'a dyn Fn(EngineError) -> String,
    /// Receives the number of rows written.
    pub reporter: &'a dyn Reporter,
}

/// Where the lines of a [`RowsJob`] go.
pub enum RowsOutput<'a> {
    /// Each, without its line break, to a function.
    Lines(WriteLine<'a>),
    /// To a file, which appears when all of them are there.
    File {
        /// The file.
        path: &'a Path,
        /// Whether to continue after the lines that an interrupted job wrote.
        resume: bool,
    },
}

/// Writes a line.
///
/// Lent to a [`RowsJob`].
pub type WriteLine<'a> = Box<dyn FnMut(&str) -> Result<(), Box<dyn Error + Send + Sync>> + 'a>;

/// A row that has no answer.
///
/// Given by [`RowsJob::run`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FailedRow {
    /// The number of its line, from 1.
    pub line: usize,
    /// Why.
    pub error: String,
}

impl RowsJob<'_> {
    /// Reads every row with `tokens`, computes those that are not written with `work`, and gives back the rows that failed, those
    /// of an interrupted job too. The model is loaded in `work`, so that a job that cannot resume is refused before.
    ///
    /// # Errors
    /// Those of `work`; when the output exists, another process writes it, or it is of an interrupted job and cannot be resumed: then
    /// nothing is changed. A job that fails before its first line leaves no file.
    pub fn run<T: Serialize + Clone, E: From<EngineError>>(
        self,
        tokens: impl Fn(&Row) -> Result<T, EngineError>,
        work: impl FnOnce(&mut Rows<'_, T>) -> Result<(), E>,
    ) -> Result<Vec<FailedRow>, E> {
        let Self { input, content, output, settings, what, told, reporter } = self;
        let lines = Lines::new(RowFile::new(input, content), &tokens, told);
        let (mut failed, mut written) = (Vec::new(), 0);
        let output = match output {
            RowsOutput::Lines(write) => Output::Lines(write),
            RowsOutput::File { path, resume } => {
                let partial = Partial::open(path, resume, settings, &mut |index, found| {
                    let line = (index < lines.len()).then(|| lines.line(index));
                    failed.extend(line.iter().filter_map(|line| failure_of(found, line.number)));
                    written = index + 1;
                    line.is_some_and(|line| is_of(found, &line))
                })?;
                Output::File(partial)
            }
        };
        let bar = reporter.start(what, lines.len() as u64, Unit::Items("prompts"));
        bar.advance(written as u64);
        let mut rows =
            Rows { lines, told, written, next: written, pending: BTreeMap::new(), output, failed, bar };
        // Rows that cannot be read, after the last one that can, are written here alone.
        let done = work(&mut rows).and_then(|()| Ok(rows.write_ready()?));
        let Rows { lines, written, output, failed, bar, .. } = rows;
        drop(bar);
        let is_whole = written == lines.len();
        let done = done.and_then(|()| if is_whole { Ok(()) } else { Err(EngineError::Interrupted.into()) });
        match (done, output) {
            (Ok(()), Output::File(partial)) => partial.finish()?,
            (Err(error), Output::File(partial)) if written == 0 => {
                partial.remove();
                return Err(error);
            }
            (done, _) => done?,
        }
        Ok(failed)
    }
}

/// The rows of a job that are to be computed. Each is handed out once; its line is written when the lines before it are.
///
/// Lent by [`RowsJob::run`].
pub struct Rows<'a, T> {
    lines: Lines<'a, T>,
    told: &'a dyn Fn(EngineError) -> String,
    /// Lines that are written.
    written: usize,
    /// Index of the next line to read.
    next: usize,
    /// Lines that were read and are not written, by their index.
    pending: BTreeMap<usize, Pending<T>>,
    output: Output<'a>,
    failed: Vec<FailedRow>,
    bar: Box<dyn Progress>,
}

enum Output<'a> {
    Lines(WriteLine<'a>),
    File(Partial),
}

/// A line that is not written.
enum Pending<T> {
    Open(Line<T>),
    /// As it is to be written.
    Answered {
        json: String,
        failed: Option<FailedRow>,
    },
}

/// What is written of a row.
#[derive(Serialize)]
struct Report<'a, T, A> {
    /// Number of the line, from 1.
    line: usize,
    #[serde(flatten)]
    row: &'a Row,
    /// Absent if the line holds no row.
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_ids: Option<&'a T>,
    #[serde(flatten)]
    answer: Option<A>,
    /// Why there is no answer.
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<&'a str>,
}

impl<T: Serialize + Clone> Rows<'_, T> {
    /// The next row that can be read, and its index.
    fn next_row(&mut self) -> Result<Option<(usize, T)>, EngineError> {
        while self.next < self.lines.len() {
            if let Some(row) = self.read_line()? {
                return Ok(Some(row));
            }
        }
        Ok(None)
    }

    /// Those of the next `count` lines that can be read.
    fn next_rows(&mut self, count: usize) -> Result<Vec<(usize, T)>, EngineError> {
        let end = self.lines.len().min(self.next.saturating_add(count));
        (self.next..end).filter_map(|_| self.read_line().transpose()).collect()
    }

    /// Reads whole batches from here on: a job that resumes computes the rows together that it would have computed together without
    /// an interruption, so that their numbers are the same to the last bit. Rows that are written are not written again.
    fn begin_at_whole_batch(&mut self, size: usize) {
        self.next -= self.next % size;
    }

    /// The row of the next line; one that cannot be read is answered with its error.
    fn read_line(&mut self) -> Result<Option<(usize, T)>, EngineError> {
        let index = self.next;
        self.next += 1;
        let line = self.lines.line(index);
        let row = line.tokens.clone();
        if index >= self.written {
            let pending = match &line.tokens {
                Ok(_) => Pending::Open(line),
                // It is written with the answers of others: a job that is refused writes nothing.
                Err(_) => answered(&line, None::<()>, None)?,
            };
            self.pending.insert(index, pending);
        }
        Ok(row.ok().map(|row| (index, row)))
    }

    /// Takes what was computed of a row, and writes every line whose turn it is.
    fn answer(
        &mut self,
        index: usize,
        answer: Result<impl Serialize, EngineError>,
    ) -> Result<(), EngineError> {
        if let Some(pending) = self.pending.get_mut(&index)
            && let Pending::Open(line) = pending
        {
            *pending = match answer {
                Ok(answer) => answered(line, Some(answer), None)?,
                Err(error) => answered(line, None::<()>, Some((self.told)(error)))?,
            };
        }
        self.write_ready()
    }

    fn write_ready(&mut self) -> Result<(), EngineError> {
        while let Some(entry) = self.pending.first_entry()
            && let Pending::Answered { json, .. } = entry.get()
        {
            match &mut self.output {
                Output::Lines(write) => write(json).map_err(EngineError::Output)?,
                Output::File(partial) => partial.append(json)?,
            }
            if let Pending::Answered { failed, .. } = entry.remove() {
                self.failed.extend(failed);
            }
            self.written += 1;
            self.bar.advance(1);
        }
        Ok(())
    }
}

/// A line with its answer, or with the error of its computation or its reading.
fn answered<T: Serialize>(
    line: &Line<T>,
    answer: Option<impl Serialize>,
    error: Option<String>,
) -> Result<Pending<T>, EngineError> {
    let prompt_ids = line.tokens.as_ref().ok();
    let error = error.or_else(|| line.tokens.as_ref().err().cloned());
    let report = Report { line: line.number, row: &line.row, prompt_ids, answer, error: error.as_deref() };
    let json = serde_json::to_string(&report).map_err(|error| EngineError::Output(error.into()))?;
    let json = printable_json(&json).into_owned();
    Ok(Pending::Answered { json, failed: error.map(|error| FailedRow { line: line.number, error }) })
}

/// Whether a written line is of this line of the input.
fn is_of<T: Serialize>(written: &Value, line: &Line<T>) -> bool {
    let same_outcome = match &line.tokens {
        Ok(tokens) => written["prompt_ids"] == json!(tokens),
        Err(error) => written["error"] == json!(error),
    };
    // The choices of a line are in its tokens.
    same_outcome && written["line"] == line.number && written["prompt"] == json!(line.row.prompt)
}

/// What a written line says of why it has no answer.
fn failure_of(written: &Value, line: usize) -> Option<FailedRow> {
    Some(FailedRow { line, error: written["error"].as_str()?.to_owned() })
}
