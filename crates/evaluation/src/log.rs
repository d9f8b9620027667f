//! The log of items: a line of JSON for each, from which an interrupted run is resumed.
//!
//! A line is what a model said to an item, see [`ItemResult`], or to a window of `kl`, with its [`LogHead`] in front. Lines are added
//! as they are known and stay, whatever becomes of the run; several protocols may share a log. What was left of an interrupted run
//! counts only if it says the same of the items as the data do.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use candle_gpt2_engine::LineFile;
use candle_gpt2_weights::read_to_limit;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::{Choice, ChoiceResult, EvaluationError, Item, ItemResult, Prepared, Work};

/// Largest log that another run is compared with.
const MAX_BYTES: u64 = 4 << 30;
/// What every line begins with.
const BEGINNING: &[u8] = br#"{"protocol":"#;

/// A log that results are added to.
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
    /// The lines of an interrupted run that were not asked for yet.
    lines: Vec<Line>,
    /// Whether the file was not there before.
    is_new: bool,
}

/// The run that a line belongs to.
///
/// Written by [`ItemLog::append`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LogHead {
    /// Name of the protocol.
    pub protocol: String,
    /// What the numbers depend on besides the protocol and the data: the model, the types of its weights, keys and values, the
    /// device, and the settings, in a form for readers.
    pub run: String,
}

#[derive(Debug)]
struct Line {
    /// From 1.
    number: usize,
    head: LogHead,
    text: String,
}

/// A line as it is written.
#[derive(Serialize)]
struct Written<'a, T> {
    #[serde(flatten)]
    head: &'a LogHead,
    #[serde(flatten)]
    result: &'a T,
}

impl ItemLog {
    /// Opens the log, or makes it; with `resume` after the lines that it holds. Half a line at its end is dropped.
    ///
    /// # Errors
    /// When it cannot be read and written, another process holds it, a line is not of a log, or it holds lines and is not to be
    /// resumed.
    pub fn open(path: &Path, resume: bool) -> Result<Self, EvaluationError> {
        let is_new = !path.exists();
        let failed = |cause| EvaluationError::File { path: path.to_owned(), cause };
        let file = LineFile::open(path).map_err(failed)?;
        let mut log = Self { file, path: path.to_owned(), lines: Vec::new(), is_new };
        if !resume {
            // What is not a file, such as a terminal, has no length.
            let is_empty = log.file.as_file().metadata().map_err(failed)?.len() == 0;
            let what =
                || "it holds the items of another run; resume that run, or choose another name".to_owned();
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
                log.error(format!("line {number}: none of a log of items ({error}); choose another name"))
            };
            let text = String::from_utf8(bytes).map_err(|error| other(&error))?;
            let head = serde_json::from_str(&text).map_err(|error| other(&error))?;
            Ok(Line { number, head, text })
        };
        let lines = (1..).zip(whole).map(line).collect::<Result<Vec<_>, EvaluationError>>()?;
        if !half.bytes.is_empty() {
            let shorter = half.bytes.len().min(BEGINNING.len());
            if lines.is_empty() && half.bytes[..shorter] != BEGINNING[..shorter] {
                return Err(log.error("line 1: none of a log of items; choose another name".into()));
            }
            log.file.drop_half_line(&half).map_err(failed)?;
        }
        log.lines = lines;
        Ok(log)
    }

    /// The results of the items of an interrupted run: the first ones of `prepared`, in their order.
    ///
    /// # Errors
    /// When a line of the protocol is of another run, or says something else of its item than the data do.
    pub fn results(
        &mut self,
        head: &LogHead,
        prepared: &Prepared,
    ) -> Result<Vec<ItemResult>, EvaluationError> {
        let items = &prepared.items;
        self.take(head, |index, result: &ItemResult| match items.get(index) {
            Some(item) => check(item, result),
            None => Err(format!("the data have {} items, and this would be one more", items.len())),
        })
    }

    /// The lines of a protocol, whatever they hold; `check` says what differs between a line, by its number among them from 0, and
    /// what it ought to be.
    ///
    /// # Errors
    /// When a line is of another run, cannot be read, or `check` says so.
    pub fn take<T: DeserializeOwned>(
        &mut self,
        head: &LogHead,
        check: impl Fn(usize, &T) -> Result<(), String>,
    ) -> Result<Vec<T>, EvaluationError> {
        let of_protocol = |line: &mut Line| line.head.protocol == head.protocol;
        let lines: Vec<Line> = self.lines.extract_if(.., of_protocol).collect();
        let result = |(index, line): (usize, &Line)| {
            let wrong =
                |what: String| self.error(format!("line {}: {what}; choose another name", line.number));
            if line.head.run != head.run {
                return Err(wrong(format!(
                    "it is of the run `{}`, and this one is `{}`",
                    line.head.run, head.run
                )));
            }
            let result = serde_json::from_str(&line.text);
            let result = result.map_err(|error| wrong(format!("none of a log of items ({error})")))?;
            check(index, &result).map_err(wrong)?;
            Ok(result)
        };
        lines.iter().enumerate().map(result).collect()
    }

    /// Checks that every line was asked for.
    ///
    /// # Errors
    /// When one was not: it is of a protocol that this run does not measure.
    pub fn check_all_taken(&self) -> Result<(), EvaluationError> {
        match self.lines.first() {
            None => Ok(()),
            Some(Line { number, head, .. }) => Err(self.error(format!(
                "line {number}: it is of `{}`, which this run does not measure; add it, or choose another name",
                head.protocol
            ))),
        }
    }

    /// Adds a line.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn append<T: Serialize>(&mut self, head: &LogHead, result: &T) -> Result<(), EvaluationError> {
        let written = self.file.append(&Written { head, result });
        written.map_err(|cause| EvaluationError::File { path: self.path.clone(), cause })
    }

    fn error(&self, what: String) -> EvaluationError {
        EvaluationError::Log { path: self.path.clone(), what }
    }
}

impl Drop for ItemLog {
    /// A run that fails before its first line leaves no file.
    fn drop(&mut self) {
        if self.is_new
            && self.file.as_file().metadata().is_ok_and(|metadata| metadata.is_file() && metadata.len() == 0)
        {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// The results of a protocol in the log of another run, which must be those of all items, and what that run depends on. The log is
/// left as it is, and may be one that is written just now.
///
/// # Errors
/// When the file cannot be read, is no log, has fewer items or other ones.
///
/// Reads what [`ItemLog::append`] wrote.
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
        let other = |error| wrong(format!("line {number}: none of a log of items ({error})"));
        let head: LogHead = serde_json::from_str(line).map_err(other)?;
        // A log may have more items than are asked for.
        let Some(item) = prepared.items.get(results.len()).filter(|_| head.protocol == protocol) else {
            continue;
        };
        let result = serde_json::from_str(line).map_err(other)?;
        check(item, &result)
            .map_err(|what| wrong(format!("line {number}: {what}; compare runs of the same data")))?;
        run = head.run;
        results.push(result);
    }
    match (results.len(), prepared.items.len()) {
        (found, expected) if found < expected => Err(wrong(format!(
            "it has {found} items of `{protocol}`, and this run {expected}; limit this run to as many"
        ))),
        _ => Ok((run, results)),
    }
}

/// Names the first thing that a result says of its item and that is not so.
fn check(item: &Item, result: &ItemResult) -> Result<(), String> {
    let same = |what: &str, found: String, expected: String| {
        if found == expected {
            Ok(())
        } else {
            Err(format!("its {what} is {found}, and the item's is {expected}"))
        }
    };
    let shown = |value: &dyn std::fmt::Debug| format!("{value:?}");
    same("index", shown(&result.index), shown(&item.index))?;
    same("id", shown(&result.id), shown(&item.id))?;
    same("group", shown(&result.group), shown(&item.group))?;
    same("context_tokens", shown(&result.context_tokens), shown(&item.context_tokens))?;
    let told: Result<(), String> = match &item.work {
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
    told?;
    // What no count shows: other texts of the same length.
    same("digest of tokens", shown(&result.asked), shown(&item.asked()))
}

/// Checks that a choice has as many tokens, characters, bytes and words as its result says.
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
            "its choice {index} has {} {what}, and the item's has {}",
            shown(found),
            shown(expected)
        )),
    }
}
