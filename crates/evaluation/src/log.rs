//! Log with one JSON line per item, from which an interrupted run can be resumed.
//!
//! A line holds an [`ItemResult`], or the result of a window of `kl`, preceded by its [`LogHead`]. Lines
//! are appended as soon as their results are known, and are kept even if the run is killed. Several
//! protocols may share a log. The results of an interrupted run are reused only if they match the items
//! in the data.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use candle_gpt2_engine::LineFile;
use candle_gpt2_weights::read_to_limit;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::{Choice, ChoiceResult, EvaluationError, Item, ItemResult, Prepared, Work};

/// Maximum size, in bytes, of a log that a run is compared with.
const MAX_BYTES: u64 = 4 << 30;
/// First bytes of every log line.
const BEGINNING: &[u8] = br#"{"protocol":"#;

/// A log to which results are appended.
///
/// ```
/// use candle_gpt2_evaluation::{ItemLog, LogHead};
///
/// # let folder = tempfile::tempdir()?;
/// # let folder = folder.path();
/// let path = folder.join("items.jsonl");
/// let head = LogHead { protocol: "task:one".into(), run: "gpt2, f32".into() };
/// let answer = serde_json::json!({"index": 0, "answer": "yes"});
/// ItemLog::open(&path, false)?.append(&head, &answer)?;
///
/// let mut log = ItemLog::open(&path, true)?; // of an interrupted run
/// let answers: Vec<serde_json::Value> = log.take(&head, |_, _| Ok(()))?;
/// assert_eq!(answers[0]["answer"], "yes");
/// assert!(log.check_all_taken().is_ok());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct ItemLog {
    file: LineFile,
    path: PathBuf,
    /// Lines of an interrupted run that no call to [`ItemLog::take`] has returned yet.
    lines: Vec<Line>,
    /// Whether this run created the file.
    is_new: bool,
}

/// Identifies the run that a line belongs to.
///
/// Written by [`ItemLog::append`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LogHead {
    /// Name of the protocol.
    pub protocol: String,
    /// Readable summary of what affects the results, besides the protocol and the data.
    ///
    /// It names the model, the dtypes of its weights and KV cache, the device, and the settings.
    pub run: String,
}

#[derive(Debug)]
struct Line {
    /// Line number, from 1.
    number: usize,
    head: LogHead,
    text: String,
}

/// A log line, as written to the file.
#[derive(Serialize)]
struct Written<'a, T> {
    #[serde(flatten)]
    head: &'a LogHead,
    #[serde(flatten)]
    result: &'a T,
}

impl ItemLog {
    /// Opens or creates the log; with `resume`, keeps its lines and appends after them.
    ///
    /// An incomplete last line is dropped.
    ///
    /// # Errors
    /// Fails if the file cannot be read or written, or if another process holds it. Also fails if a line
    /// is invalid, or if the log has lines and `resume` is false.
    pub fn open(path: &Path, resume: bool) -> Result<Self, EvaluationError> {
        let is_new = !path.exists();
        let failed = |cause| EvaluationError::File { path: path.to_owned(), cause };
        let file = LineFile::open(path).map_err(failed)?;
        let mut log = Self { file, path: path.to_owned(), lines: Vec::new(), is_new };
        if !resume {
            // A path that is not a regular file, such as a terminal, has length 0.
            let is_empty = log.file.as_file().metadata().map_err(failed)?.len() == 0;
            let what = || {
                "contains the items of another run; resume that run, or choose another log file".to_owned()
            };
            return if is_empty { Ok(log) } else { Err(log.error(what())) };
        }
        let mut whole = Vec::new();
        let keep = |line: &[u8]| {
            whole.push(line.to_vec());
            io::Result::Ok(())
        };
        let half = log.file.for_each_line(keep).map_err(failed)?;
        let line = |(number, bytes)| {
            let other = |error: &dyn std::fmt::Display| {
                log.error(format!("line {number}: not an item log entry ({error}); choose another log file"))
            };
            let text = String::from_utf8(bytes).map_err(|error| other(&error))?;
            let head = serde_json::from_str(&text).map_err(|error| other(&error))?;
            Ok(Line { number, head, text })
        };
        let lines = (1..).zip(whole).map(line).collect::<Result<Vec<_>, EvaluationError>>()?;
        if !half.bytes.is_empty() {
            let shorter = half.bytes.len().min(BEGINNING.len());
            if lines.is_empty() && half.bytes[..shorter] != BEGINNING[..shorter] {
                return Err(log.error("line 1: not an item log entry; choose another log file".into()));
            }
            log.file.drop_half_line(&half).map_err(failed)?;
        }
        log.lines = lines;
        Ok(log)
    }

    /// Takes an interrupted run's results for the first items of `prepared`, in order.
    ///
    /// # Errors
    /// Fails if a line of the protocol belongs to another run, or does not match its item in the data.
    pub fn results(
        &mut self,
        head: &LogHead,
        prepared: &Prepared,
    ) -> Result<Vec<ItemResult>, EvaluationError> {
        let items = &prepared.items;
        self.take(head, |index, result: &ItemResult| match items.get(index) {
            Some(item) => check(item, result),
            None => Err(format!("the data has only {} items", items.len())),
        })
    }

    /// Takes the lines for a protocol and parses their results as any type.
    ///
    /// `check` receives each result with its index among these lines, from 0, and returns a description
    /// of a mismatch.
    ///
    /// # Errors
    /// Fails if a line belongs to another run, cannot be parsed, or is rejected by `check`.
    pub fn take<T: DeserializeOwned>(
        &mut self,
        head: &LogHead,
        check: impl Fn(usize, &T) -> Result<(), String>,
    ) -> Result<Vec<T>, EvaluationError> {
        let of_protocol = |line: &mut Line| line.head.protocol == head.protocol;
        let lines: Vec<Line> = self.lines.extract_if(.., of_protocol).collect();
        let result = |(index, line): (usize, &Line)| {
            let wrong =
                |what: String| self.error(format!("line {}: {what}; choose another log file", line.number));
            if line.head.run != head.run {
                return Err(wrong(format!(
                    "written by the run `{}`, but this run is `{}`",
                    line.head.run, head.run
                )));
            }
            let result = serde_json::from_str(&line.text);
            let result = result.map_err(|error| wrong(format!("not an item log entry ({error})")))?;
            check(index, &result).map_err(wrong)?;
            Ok(result)
        };
        lines.iter().enumerate().map(result).collect()
    }

    /// Checks that every line was taken.
    ///
    /// # Errors
    /// Fails if a line remains because its protocol is not part of this run.
    pub fn check_all_taken(&self) -> Result<(), EvaluationError> {
        match self.lines.first() {
            None => Ok(()),
            Some(Line { number, head, .. }) => Err(self.error(format!(
                "line {number}: written for `{}`, which this run does not evaluate; add this protocol, or choose another log file",
                head.protocol
            ))),
        }
    }

    /// Appends a line.
    ///
    /// # Errors
    /// Fails if the line cannot be written.
    pub fn append<T: Serialize>(&mut self, head: &LogHead, result: &T) -> Result<(), EvaluationError> {
        let written = self.file.append(&Written { head, result });
        written.map_err(|cause| EvaluationError::File { path: self.path.clone(), cause })
    }

    fn error(&self, what: String) -> EvaluationError {
        EvaluationError::Log { path: self.path.clone(), what }
    }
}

impl Drop for ItemLog {
    /// Removes a newly created file if the run fails before writing its first line.
    fn drop(&mut self) {
        if self.is_new
            && self.file.as_file().metadata().is_ok_and(|metadata| metadata.is_file() && metadata.len() == 0)
        {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Reads a protocol's results from another run's log, with the summary of that run.
///
/// The log must have results for all items. It is not modified, and another process may be appending to
/// it. Lines come from [`ItemLog::append`].
///
/// # Errors
/// Fails if the file cannot be read or is not a log, or if it has fewer items or different ones.
pub fn logged_results(
    path: &Path,
    protocol: &str,
    prepared: &Prepared,
) -> Result<(String, Vec<ItemResult>), EvaluationError> {
    let wrong = |what: String| EvaluationError::Log { path: path.to_owned(), what };
    let bytes = File::open(path).and_then(|file| read_to_limit(file, MAX_BYTES));
    let bytes = bytes.map_err(|cause| EvaluationError::File { path: path.to_owned(), cause })?;
    let text = String::from_utf8(bytes).map_err(|_| wrong("expected text in UTF-8".into()))?;
    let whole = text.rfind('\n').map_or("", |end| &text[..end]);
    let (mut run, mut results) = (String::new(), Vec::with_capacity(prepared.items.len()));
    for (number, line) in (1..).zip(whole.lines()) {
        let other = |error| wrong(format!("line {number}: not an item log entry ({error})"));
        let head: LogHead = serde_json::from_str(line).map_err(other)?;
        // A log may have more items than this run needs.
        let Some(item) = prepared.items.get(results.len()).filter(|_| head.protocol == protocol) else {
            continue;
        };
        let result = serde_json::from_str(line).map_err(other)?;
        check(item, &result)
            .map_err(|what| wrong(format!("line {number}: {what}; compare runs on the same data")))?;
        run = head.run;
        results.push(result);
    }
    match (results.len(), prepared.items.len()) {
        (found, expected) if found < expected => Err(wrong(format!(
            "contains {found} items for `{protocol}`, but this run has {expected}; limit this run to {found}"
        ))),
        _ => Ok((run, results)),
    }
}

/// Describes the first mismatch between a result and its item.
fn check(item: &Item, result: &ItemResult) -> Result<(), String> {
    let same = |what: &str, found: String, expected: String| {
        if found == expected {
            Ok(())
        } else {
            Err(format!("{what} is {found} in the log, but {expected} in the data"))
        }
    };
    let shown = |value: &dyn std::fmt::Debug| format!("{value:?}");
    same("index", shown(&result.index), shown(&item.index))?;
    same("id", shown(&result.id), shown(&item.id))?;
    same("group", shown(&result.group), shown(&item.group))?;
    same("context_tokens", shown(&result.context_tokens), shown(&item.context_tokens))?;
    let matched: Result<(), String> = match &item.work {
        Work::Score { choices, gold } => {
            same("gold", shown(&result.gold), shown(gold))?;
            same("number of choices", shown(&result.choices.len()), shown(&choices.len()))?;
            let mut pairs = result.choices.iter().zip(choices).enumerate();
            pairs.try_for_each(|(index, (found, choice))| same_size(index, found, choice))
        }
        Work::Write { word, .. } => {
            let found = result.words.as_ref().map(|[word, _]| word);
            same("word", shown(&found), shown(&Some(word)))
        }
    };
    matched?;
    // Equal counts do not rule out different texts of the same length.
    same("token digest", shown(&result.asked), shown(&item.token_digest()))
}

/// Checks that a choice and its result have the same token, character, byte and word counts.
fn same_size(index: usize, found: &ChoiceResult, choice: &Choice) -> Result<(), String> {
    let tokens =
        choice.sequences.iter().map(|sequence| sequence.ids.len().saturating_sub(sequence.first)).sum();
    let sizes = [
        ("tokens", Some(found.tokens), Some(tokens)),
        ("characters", Some(found.characters), Some(choice.characters)),
        ("bytes", Some(found.bytes), Some(choice.bytes)),
        ("words", found.words, choice.words),
    ];
    let shown = |size: Option<usize>| size.map_or("no".to_owned(), |size| size.to_string());
    match sizes.into_iter().find(|(_, found, expected)| found != expected) {
        None => Ok(()),
        Some((what, found, expected)) => Err(format!(
            "choice {index} has {} {what} in the log, but {} in the data",
            shown(found),
            shown(expected)
        )),
    }
}
