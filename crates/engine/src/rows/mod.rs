//! Bulk jobs: each row of an input file becomes one line of JSON, in input order.
//!
//! [`RowsJob::run`] reads the rows (`lines.rs`) and passes them to the work (`work.rs`), which may compute any
//! number at a time. It writes each result after the results of all earlier rows. A row that cannot be read
//! or computed becomes a line with its `error`, and does not affect other rows. An output file is locked and
//! survives an interruption; `partial.rs` describes how a job resumes.

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
pub use self::work::{PromptCompletions, ScoredText, TokenLogprob};
use crate::{EngineError, Progress, Reporter, Unit};

/// A file of rows and the destination for its results.
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
///     format_error: &|error| error.to_string(),
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
    /// Name of the input file: JSONL if it ends in `.jsonl`, otherwise one prompt per line.
    pub input: &'a Path,
    /// Contents of the input file.
    pub content: Vec<u8>,
    /// Destination for the output lines.
    pub output: RowsOutput<'a>,
    /// Settings that must be the same when an interrupted job resumes.
    ///
    /// This is an object of options, and its key `config` may contain further options.
    pub settings: &'a Value,
    /// Name of the job for the progress display, such as `generating`.
    pub what: &'a str,
    /// Formats a row's error for the output.
    pub format_error: &'a dyn Fn(EngineError) -> String,
    /// Receives the progress, in rows written.
    pub reporter: &'a dyn Reporter,
}

/// Destination for the output lines of a [`RowsJob`].
pub enum RowsOutput<'a> {
    /// Passes each line, without its line break, to a function.
    Lines(WriteLine<'a>),
    /// Writes to a file that appears once all lines are complete.
    File {
        /// Path of the file.
        path: &'a Path,
        /// Whether to resume an interrupted job after its last written line.
        resume: bool,
    },
}

/// Function that writes a line.
///
/// Passed to a [`RowsJob`].
pub type WriteLine<'a> = Box<dyn FnMut(&str) -> Result<(), Box<dyn Error + Send + Sync>> + 'a>;

/// A row that failed.
///
/// Returned by [`RowsJob::run`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FailedRow {
    /// Line number, starting at 1.
    pub line: usize,
    /// Error message.
    pub error: String,
}

impl RowsJob<'_> {
    /// Tokenizes every row with `tokens`, then computes the rows not yet written with `work`.
    ///
    /// Returns the failed rows, including those of an interrupted job. Load the model inside `work`, so that
    /// a job that cannot resume is rejected beforehand.
    ///
    /// # Errors
    /// If `work` fails, the output exists, another process is writing it, or an interrupted job cannot be
    /// resumed. In the last three cases nothing is changed. A job that fails before its first line leaves no
    /// file.
    pub fn run<T: Serialize + Clone, E: From<EngineError>>(
        self,
        tokens: impl Fn(&Row) -> Result<T, EngineError>,
        work: impl FnOnce(&mut Rows<'_, T>) -> Result<(), E>,
    ) -> Result<Vec<FailedRow>, E> {
        let Self { input, content, output, settings, what, format_error, reporter } = self;
        let lines = Lines::new(RowFile::new(input, content), &tokens, format_error);
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
        let mut rows = Rows {
            lines,
            format_error,
            written,
            next: written,
            pending: BTreeMap::new(),
            output,
            failed,
            bar,
        };
        // Writes invalid rows after the last valid one.
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

/// Rows of a job that remain to be computed.
///
/// Each row is returned once, and its line is written after all earlier lines. Passed to `work` by
/// [`RowsJob::run`].
pub struct Rows<'a, T> {
    lines: Lines<'a, T>,
    format_error: &'a dyn Fn(EngineError) -> String,
    /// Number of lines written.
    written: usize,
    /// Index of the next line to read.
    next: usize,
    /// Lines that were read but not yet written, by index.
    pending: BTreeMap<usize, Pending<T>>,
    output: Output<'a>,
    failed: Vec<FailedRow>,
    bar: Box<dyn Progress>,
}

enum Output<'a> {
    Lines(WriteLine<'a>),
    File(Partial),
}

/// A line not yet written.
enum Pending<T> {
    Open(Line<T>),
    /// Finished line, ready to be written.
    Answered {
        json: String,
        failed: Option<FailedRow>,
    },
}

/// Output line for a row.
#[derive(Serialize)]
struct Report<'a, T, A> {
    /// Line number, starting at 1.
    line: usize,
    #[serde(flatten)]
    row: &'a Row,
    /// Absent if the line is not a valid row.
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_ids: Option<&'a T>,
    #[serde(flatten)]
    answer: Option<A>,
    /// Reason why the row has no result.
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<&'a str>,
}

impl<T: Serialize + Clone> Rows<'_, T> {
    /// Reads up to the next valid row and returns it with its index.
    fn next_row(&mut self) -> Result<Option<(usize, T)>, EngineError> {
        while self.next < self.lines.len() {
            if let Some(row) = self.read_line()? {
                return Ok(Some(row));
            }
        }
        Ok(None)
    }

    /// Reads the next `count` lines and returns the valid rows.
    fn next_rows(&mut self, count: usize) -> Result<Vec<(usize, T)>, EngineError> {
        let end = self.lines.len().min(self.next.saturating_add(count));
        (self.next..end).filter_map(|_| self.read_line().transpose()).collect()
    }

    /// Moves back to the beginning of a batch, so that a resumed job computes the same batches.
    ///
    /// The results are then bit-identical to those of an uninterrupted job. Rows that were already written
    /// are not written again.
    fn begin_at_whole_batch(&mut self, size: usize) {
        self.next -= self.next % size;
    }

    /// Reads the row on the next line; for an invalid line, stores the error as its result.
    fn read_line(&mut self) -> Result<Option<(usize, T)>, EngineError> {
        let index = self.next;
        self.next += 1;
        let line = self.lines.line(index);
        let row = line.tokens.clone();
        if index >= self.written {
            let pending = match &line.tokens {
                Ok(_) => Pending::Open(line),
                // Written with the next result, because a rejected job must not write anything.
                Err(_) => answered(&line, None::<()>, None)?,
            };
            self.pending.insert(index, pending);
        }
        Ok(row.ok().map(|row| (index, row)))
    }

    /// Stores a row's result and writes all lines that are ready.
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
                Err(error) => answered(line, None::<()>, Some((self.format_error)(error)))?,
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

/// Serializes a line with its result or its error.
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

/// Whether an output line belongs to the given input line.
fn is_of<T: Serialize>(written: &Value, line: &Line<T>) -> bool {
    let same_outcome = match &line.tokens {
        Ok(tokens) => written["prompt_ids"] == json!(tokens),
        Err(error) => written["error"] == json!(error),
    };
    // `prompt_ids` also covers the choices, so the choices need no separate comparison.
    same_outcome && written["line"] == line.number && written["prompt"] == json!(line.row.prompt)
}

/// Returns the error that an output line records, if any.
fn failure_of(written: &Value, line: usize) -> Option<FailedRow> {
    Some(FailedRow { line, error: written["error"].as_str()?.to_owned() })
}
