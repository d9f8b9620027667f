//! Prepared data: the items and counts computed before a model runs.

use candle_gpt2_engine::{Reporter, Vocabulary};

use crate::{Data, DataError, Item};

/// Items that a protocol builds from its data.
///
/// ```
/// use candle_gpt2_engine::{ModelOptions, Silent};
/// use candle_gpt2_evaluation::{Data, Setting, named};
///
/// let opened = ModelOptions::default().open(&Silent)?;
/// let data = Data::from_bytes("text.txt".as_ref(), b"What is the city but the people?".to_vec())?;
/// let vocabulary = opened.vocabulary();
/// let setting = Setting::new(vocabulary, &Silent);
/// let prepared = (named("text:bits")?.0.prepare)(&data, &setting)?;
/// assert_eq!((prepared.items.len(), prepared.totals.words), (1, 7));
/// assert_eq!(prepared.tokens_to_read(0), prepared.totals.tokens as u64);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Default)]
pub struct Prepared {
    /// Items, in the order of the data.
    pub items: Vec<Item>,
    /// Counts over the whole data.
    pub totals: Totals,
    /// Tokens that are suppressed when the model generates a word.
    pub suppressed_tokens: Vec<u32>,
    /// Number of items that were longer than the context and were truncated at the beginning.
    pub truncated_count: usize,
    /// Further notes on the data.
    pub notes: Vec<String>,
    /// Error in the entry after the last item.
    pub damaged: Option<DataError>,
}

/// Counts over the whole data, for protocols that divide by them.
///
/// Part of [`Prepared`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Totals {
    /// Number of tokens.
    pub tokens: usize,
    /// Number of words in the original text.
    pub words: usize,
}

/// Settings for preparing a protocol's items.
///
/// See [`Prepared`] for an example.
#[derive(Clone, Copy)]
pub struct Setting<'a> {
    /// Tokenizer and configuration of the model.
    pub vocabulary: &'a Vocabulary,
    /// Number in the protocol's name, or its default.
    pub parameter: usize,
    /// Window length, if the protocol lets the caller choose it.
    pub context: Option<usize>,
    /// Maximum number of items.
    pub limit: Option<usize>,
    /// Few-shot examples, if the run has them.
    pub shots: Option<Shots<'a>>,
    /// Reporter that is checked for an interruption between entries.
    pub reporter: &'a dyn Reporter,
}

impl<'a> Setting<'a> {
    /// Creates default settings: all items, no few-shot examples, and the protocol's own windows.
    pub fn new(vocabulary: &'a Vocabulary, reporter: &'a dyn Reporter) -> Self {
        Self { vocabulary, parameter: 0, context: None, limit: None, shots: None, reporter }
    }
}

/// Number and source of the few-shot examples before each question.
///
/// A field of [`Setting`].
#[derive(Debug, Clone, Copy)]
pub struct Shots<'a> {
    /// Number of examples before each question, at least 1.
    pub count: usize,
    /// Sampling seed, interpreted like the argument of Python's `random.seed`.
    pub seed: u64,
    /// Data that the examples are sampled from; `None` for the evaluated data.
    pub data: Option<&'a Data>,
    /// Source of the examples, as the protocol defines it.
    pub source: ExampleSource,
}

/// Source of few-shot examples, and whether a question may be its own example.
///
/// A field of [`Protocol`](crate::Protocol).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExampleSource {
    /// Training split of a task with a test split; it contains none of the questions.
    Training,
    /// Training split of a task without a test split.
    ///
    /// lm-evaluation-harness excludes the question itself.
    TrainingWithoutQuestion,
    /// The evaluated items, including the question itself, because the task has no other split.
    Items,
}
