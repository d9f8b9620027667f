//! Data made ready for a model: everything that is known before it is asked.

use candle_gpt2_engine::{Reporter, Vocabulary};

use crate::{Data, DataError, Item};

/// The items that a protocol makes of its data.
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
    /// What the model is asked, in the order of the data.
    pub items: Vec<Item>,
    /// What of the data as a whole is counted.
    pub totals: Totals,
    /// Tokens that are not written, if words are.
    pub left_out: Vec<u32>,
    /// Items that were longer than the context and lost their beginning.
    pub cut: usize,
    /// Other notes.
    pub notes: Vec<String>,
    /// What is wrong with the entry after the last item.
    pub damaged: Option<DataError>,
}

/// Counts of the data as a whole, for protocols that divide by them.
///
/// Part of what is [`Prepared`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Totals {
    /// Tokens.
    pub tokens: usize,
    /// Words before any change of the text.
    pub words: usize,
}

/// The setting that a protocol is prepared for.
///
/// See [`Prepared`] for an example.
#[derive(Clone, Copy)]
pub struct Setting<'a> {
    /// The model's tokens and configuration.
    pub vocabulary: &'a Vocabulary,
    /// The number in the protocol's name, or its default.
    pub parameter: usize,
    /// Length of the windows, if it is the caller's to choose.
    pub context: Option<usize>,
    /// Take the first so many items only.
    pub limit: Option<usize>,
    /// The examples before each question, if there are any.
    pub shots: Option<Shots<'a>>,
    /// Asked between entries whether to end early.
    pub reporter: &'a dyn Reporter,
}

impl<'a> Setting<'a> {
    /// For all items, without examples; in windows as the protocol has them.
    pub fn new(vocabulary: &'a Vocabulary, reporter: &'a dyn Reporter) -> Self {
        Self { vocabulary, parameter: 0, context: None, limit: None, shots: None, reporter }
    }
}

/// How many examples precede each question, and where they come from.
///
/// A field of a [`Setting`].
#[derive(Debug, Clone, Copy)]
pub struct Shots<'a> {
    /// Examples before a question, at least one.
    pub count: usize,
    /// Seed of the draw, as of Python's `random.seed`.
    pub seed: u64,
    /// What they are drawn from; `None` for the data themselves.
    pub data: Option<&'a Data>,
    /// What the protocol says of them.
    pub source: ExampleSource,
}

/// Where a protocol's examples come from, and whether a question may be an example of itself.
///
/// A field of a [`Protocol`](crate::Protocol).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExampleSource {
    /// A training split beside a test split: no question is in it.
    Training,
    /// A training split of a task without a test split: lm-evaluation-harness leaves the question itself out.
    TrainingWithoutQuestion,
    /// The items themselves, the question among them: the task has no other split.
    Items,
}
