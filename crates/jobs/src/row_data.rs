//! Training data from labeled rows, or from rows with answers.
//!
//! A label is predicted at the last token of its text. For answers, each token of the completion and the
//! final end token are predicted from the tokens before them, starting with the prompt.
//!
//! Prompt and completion are encoded separately, so the prompt has the same tokens as during generation.
//! Rows longer than the context lose their first tokens.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::PathBuf;

use candle_gpt2::{Gpt2Config, HeadKind, ProblemType};
use candle_gpt2_engine::{Reporter, Unit};
use candle_gpt2_weights::{CharacterCheck, TextEncoder, Tokenizer};

use crate::records::{Columns, Record, Records};
use crate::{
    ClassWeights, DataSize, HeldOut, Hyperparameters, Row, RowSet, Task, TrainingData, TrainingError,
};

const LABELED: Columns = Columns { names: ["text", "label"], places: [1, 0] };
const ANSWERS: Columns = Columns { names: ["prompt", "completion"], places: [0, 1] };
/// Maximum number of labels; the confusion matrix has an entry for each pair of labels.
const MAX_LABELS: usize = 1000;

/// Rows for a task, read from one or more files.
#[derive(Debug)]
pub(crate) struct RowFiles {
    records: Records,
    task: Task,
    held_out: f64,
}

/// Label and held-out flag for each row.
#[derive(Debug)]
pub(crate) struct Assignment {
    /// Labels by row; empty for answers.
    labels: Vec<u32>,
    is_held_out: Vec<bool>,
}

impl RowFiles {
    /// Reads the rows for a task and holds out a fraction `held_out` of them.
    ///
    /// The last rows of each label are held out or, for answers, the last rows of each file.
    ///
    /// # Errors
    /// Fails if a file cannot be read, a line is invalid, or a row lacks its label or completion.
    pub(crate) fn read(paths: &[PathBuf], task: Task, held_out: f64) -> Result<Self, TrainingError> {
        let columns = if task == Task::Answer { ANSWERS } else { LABELED };
        let records = Records::read(paths, columns)?;
        let is_empty = |row: &&Record| row.texts[1].is_empty();
        match records.rows().iter().find(is_empty) {
            Some(row) => Err(records.refuse(row, &format!("`{}` is empty", columns.names[1]))),
            None => Ok(Self { records, task, held_out }),
        }
    }

    /// Returns the task of the rows.
    pub(crate) fn task(&self) -> Task {
        self.task
    }

    /// Iterates over the texts of all rows.
    pub(crate) fn texts(&self) -> impl Iterator<Item = &str> + Send {
        let texts = if self.task == Task::Answer { 2 } else { 1 };
        self.records.rows().iter().flat_map(move |row| row.texts.iter().take(texts).map(String::as_str))
    }

    /// Upper bound on the number of tokens in a row.
    ///
    /// A token has at least one byte, except for the tokens added at the start and the end.
    pub(crate) fn longest(&self) -> usize {
        let bytes = |row: &Record| row.texts[0].len() + row.texts[1].len() + 2;
        self.records.rows().iter().map(bytes).max().unwrap_or(0)
    }

    /// Adds a head for the rows' labels, unless the model has one or the rows have answers.
    ///
    /// # Errors
    /// Fails if there are fewer than two labels, or too many.
    pub(crate) fn with_head(&self, config: Gpt2Config) -> Result<Gpt2Config, TrainingError> {
        if self.task == Task::Answer {
            return Ok(config);
        }
        let rows = self.records.rows();
        let names: BTreeSet<&str> = rows.iter().map(|row| row.texts[1].as_str()).collect();
        if let Some(last) = rows.last()
            && !(2..=MAX_LABELS).contains(&names.len())
        {
            let what = format!(
                "expected 2 to {MAX_LABELS} labels, found {} in the rows up to this one ({})",
                names.len(),
                shortened(&names.into_iter().collect::<Vec<_>>().join(", "))
            );
            return Err(self.records.refuse(last, &what));
        }
        if config.head == HeadKind::SequenceClassification {
            return Ok(config);
        }
        let mut names: Vec<String> = names.into_iter().map(str::to_owned).collect();
        // Integer labels are sorted by value, so the labels 0, 1, …, 10 keep their numbers.
        names.sort_by_key(|name| name.parse::<u64>().map_or((true, 0), |number| (false, number)));
        Ok(Gpt2Config {
            head: HeadKind::SequenceClassification,
            id2label: names,
            problem_type: Some(ProblemType::SingleLabelClassification),
            // transformers requires a padding token for batches of several texts.
            pad_token_id: config.pad_token_id.or_else(|| config.end_tokens().first().copied()),
            ..config
        })
    }

    /// Determines the label of each row, and which rows are held out.
    ///
    /// # Errors
    /// Fails if a row has an unknown label.
    pub(crate) fn assign(&self, labels: &[String]) -> Result<Assignment, TrainingError> {
        let rows = self.records.rows();
        if self.task == Task::Answer {
            let is_held_out = (0..rows.len()).map(|index| {
                let (before, count) = self.records.place_in_file(index);
                before >= count - self.held_out_of(count)
            });
            return Ok(Assignment { labels: Vec::new(), is_held_out: is_held_out.collect() });
        }
        let numbers: HashMap<&str, u32> = (0..).zip(labels).map(|(id, name)| (name.as_str(), id)).collect();
        let number = |row: &Record| {
            let name = row.texts[1].as_str();
            // Data sets for transformers contain label numbers.
            let by_number = || name.parse().ok().filter(|id| numbers.len() as u64 > u64::from(*id));
            numbers.get(name).copied().or_else(by_number).ok_or_else(|| {
                let known = shortened(&labels.join(", "));
                let what = format!(
                    "unknown label `{}`; expected one of the model's labels: {known}",
                    shortened(name)
                );
                self.records.refuse(row, &what)
            })
        };
        let labels = rows.iter().map(number).collect::<Result<Vec<_>, _>>()?;
        let mut left = counts_of(&labels);
        let held_out: BTreeMap<u32, usize> =
            left.iter().map(|(label, count)| (*label, self.held_out_of(*count))).collect();
        let is_held_out = labels.iter().map(|label| {
            let left = left.entry(*label).or_default();
            let is_held_out = *left <= held_out.get(label).copied().unwrap_or(0);
            *left -= 1;
            is_held_out
        });
        Ok(Assignment { is_held_out: is_held_out.collect(), labels })
    }

    /// Number of rows to hold out of `rows`, never all of them.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a fraction of the count fits into usize"
    )]
    fn held_out_of(&self, rows: usize) -> usize {
        ((rows as f64 * self.held_out).round() as usize).min(rows.saturating_sub(1))
    }

    /// Encodes the rows as tokens; `reporter` receives a note with the number of truncated rows.
    ///
    /// # Errors
    /// Fails if a text cannot be encoded or has no tokens, if a completion exceeds the context, or if a
    /// token is outside the vocabulary. Also fails if the reporter interrupts it.
    pub(crate) fn encode(
        &self,
        assignment: &Assignment,
        (tokenizer, config): (&Tokenizer, &Gpt2Config),
        hyperparameters: &Hyperparameters,
        reporter: &dyn Reporter,
    ) -> Result<TrainingData, TrainingError> {
        let encoder = Encoder { text: TextEncoder::new(tokenizer), config, context: hyperparameters.context };
        let bar = reporter.start("encoding", self.records.rows().len() as u64, Unit::Items("rows"));
        let (mut training, mut held_out, mut cut) = (Vec::new(), Vec::new(), 0);
        let mut check = CharacterCheck::new(tokenizer);
        for (index, record) in self.records.rows().iter().enumerate() {
            if reporter.is_interrupted() {
                return Err(TrainingError::Interrupted { state: None });
            }
            let lost = check
                .as_ref()
                .and_then(|check| record.texts.iter().find_map(|text| check.first_lost(tokenizer, text)));
            if let Some(lost) = lost {
                reporter.note(&self.records.refuse(record, &lost.to_string()).to_string());
                // Report only the first lost character.
                check = None;
            }
            let encoded = match assignment.labels.get(index) {
                Some(label) => encoder.labeled(record, *label)?,
                None => encoder.answer(record)?,
            };
            let Encoded { row, is_cut } = encoded.map_err(|what| self.records.refuse(record, &what))?;
            cut += usize::from(is_cut);
            let is_held_out = assignment.is_held_out.get(index).copied().unwrap_or(false);
            if is_held_out { &mut held_out } else { &mut training }.push(row);
            bar.advance(1);
        }
        if cut > 0 {
            let (rows, context) = (self.records.rows().len(), hyperparameters.context);
            reporter.note(&format!(
                "{cut} of {rows} rows are longer than the context of {context} tokens; their first tokens are dropped"
            ));
        }
        let weights = hyperparameters.class_weights.as_ref();
        #[expect(clippy::cast_possible_truncation, reason = "losses are f32")]
        let weights = weights.map(|weights| weights.iter().map(|weight| *weight as f32).collect::<Vec<_>>());
        let size = (training.len(), held_out.len());
        let fingerprint = fingerprint(training.iter().chain(&held_out));
        let set = |rows| RowSet::new(rows, weights.clone(), hyperparameters.seed);
        let (training, held_out) = (set(training), set(held_out));
        let size = DataSize {
            training_tokens: training.token_count(),
            held_out_tokens: held_out.token_count(),
            rows: Some(size),
        };
        Ok(TrainingData {
            examples: Box::new(training),
            held_out: (!held_out.rows().is_empty()).then(|| HeldOut::rows(held_out, config.num_labels())),
            fingerprint,
            size,
        })
    }
}

impl Assignment {
    /// Returns the loss weight for each label.
    ///
    /// # Errors
    /// Fails if a weight is set for an unknown label.
    pub(crate) fn weights(
        &self,
        weights: &ClassWeights,
        labels: &[String],
    ) -> Result<Vec<f64>, TrainingError> {
        match weights {
            ClassWeights::Balanced => {
                let training =
                    self.labels.iter().zip(&self.is_held_out).filter(|(_, is_held_out)| !**is_held_out);
                let labels_of_rows: Vec<u32> = training.map(|(label, _)| *label).collect();
                let counts = counts_of(&labels_of_rows);
                let share = labels_of_rows.len() as f64 / counts.len() as f64;
                let weight = |label: u32| counts.get(&label).map_or(1.0, |count| share / *count as f64);
                Ok((0..).take(labels.len()).map(weight).collect())
            }
            ClassWeights::PerLabel(weights) => {
                if let Some(unknown) = weights.keys().find(|name| !labels.contains(name)) {
                    return Err(TrainingError::OptionOutOfRange {
                        option: "class_weights",
                        expected: format!("labels from {}", shortened(&labels.join(", "))),
                        found: shortened(unknown),
                    });
                }
                Ok(labels.iter().map(|name| weights.get(name).copied().unwrap_or(1.0)).collect())
            }
        }
    }
}

/// Number of rows for each label.
fn counts_of(labels: &[u32]) -> BTreeMap<u32, usize> {
    let mut counts = BTreeMap::new();
    labels.iter().for_each(|label| *counts.entry(*label).or_default() += 1);
    counts
}

/// Encoder that turns records into rows of tokens.
struct Encoder<'a> {
    text: TextEncoder<'a>,
    config: &'a Gpt2Config,
    context: usize,
}

/// An encoded row, and whether its first tokens were dropped.
struct Encoded {
    row: Row,
    is_cut: bool,
}

impl Encoder<'_> {
    /// Encodes a labeled row; the inner error is about the row itself.
    fn labeled(&self, record: &Record, label: u32) -> Result<Result<Encoded, String>, TrainingError> {
        let mut ids = self.ids(&record.texts[0])?;
        if ids.is_empty() {
            return Ok(Err("`text` has no tokens".into()));
        }
        // Tokens after the classified one have no effect.
        ids.truncate(self.config.classified_token(&ids) + 1);
        let cut = ids.len().saturating_sub(self.context);
        let row = Row { inputs: ids[cut..].into(), targets: [label].into() };
        Ok(Ok(Encoded { row, is_cut: cut > 0 }))
    }

    fn answer(&self, record: &Record) -> Result<Result<Encoded, String>, TrainingError> {
        let mut ids = self.ids(&record.texts[0])?;
        if ids.is_empty() {
            ids.extend(self.config.start_token());
        }
        let prompt = ids.len();
        if prompt == 0 {
            return Ok(Err("`prompt` has no tokens, and the vocabulary has no start token".into()));
        }
        ids.extend(self.ids(&record.texts[1])?);
        ids.extend(self.config.end_tokens().first());
        let (answer, context) = (ids.len() - prompt, self.context);
        if answer > context {
            return Ok(Err(format!(
                "`completion` has {answer} tokens including the end token, but the context holds {context}; shorten it, or remove the row"
            )));
        }
        // The last token is predicted but is not an input.
        let cut = (ids.len() - 1).saturating_sub(context);
        let row = Row { inputs: ids[cut..ids.len() - 1].into(), targets: ids[prompt..].into() };
        Ok(Ok(Encoded { row, is_cut: cut > 0 }))
    }

    fn ids(&self, text: &str) -> Result<Vec<u32>, TrainingError> {
        let ids = self.text.encode(text, true)?;
        match ids.iter().find(|id| !self.config.has_token(**id)) {
            Some(id) => Err(TrainingError::Vocabulary { id: *id, vocab_size: self.config.vocab_size }),
            None => Ok(ids),
        }
    }
}

/// Fingerprint of the rows (64-bit FNV-1a).
fn fingerprint<'a>(rows: impl IntoIterator<Item = &'a Row>) -> u64 {
    let mix = |hash: u64, value: u32| (hash ^ u64::from(value)).wrapping_mul(0x0100_0000_01b3);
    rows.into_iter().fold(0xcbf2_9ce4_8422_2325, |hash, row| {
        let tokens = row.inputs.iter().chain(row.targets.iter()).copied().fold(hash, mix);
        // Row boundaries are part of the fingerprint.
        mix(mix(tokens, u32::MAX), u32::try_from(row.targets.len()).unwrap_or(u32::MAX))
    })
}

/// Shortens a text so that an error message can quote it.
fn shortened(text: &str) -> String {
    /// Maximum length of a quotation in characters.
    const QUOTED: usize = 200;
    match text.char_indices().nth(QUOTED) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}
