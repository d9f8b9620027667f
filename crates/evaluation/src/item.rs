//! The questions to a model.

use candle_gpt2_generation::Sequence;
use sha2::{Digest, Sha256};

/// An entry of the data, in tokens.
///
/// ```
/// use candle_gpt2_evaluation::{Choice, Item, Work};
/// use candle_gpt2_generation::Sequence;
///
/// let choice = |id, text| Choice::of(Sequence { ids: vec![464, 3290, id], first: 2 }, text);
/// let choices = vec![choice(318, " is"), choice(547, " were")];
/// let work = Work::Score { choices, gold: Some(0) };
/// let item = Item { index: 0, id: None, group: None, context_tokens: 2, work };
/// assert_eq!(item.asked().len(), 16, "digits of a checksum");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct Item {
    /// Its place in the data, from 0.
    pub index: usize,
    /// Its name, if the data has one.
    pub id: Option<String>,
    /// The part of the data that it counts in if parts are averaged one by one, such as a paradigm of BLiMP.
    pub group: Option<String>,
    /// Tokens before the first that is scored or written, of the first choice.
    pub context_tokens: usize,
    /// What the model does with it.
    pub work: Work,
}

impl Item {
    /// Which tokens the model is asked about, as the first 16 digits of a SHA-256: results of other data are known by it.
    pub fn asked(&self) -> String {
        let mut digest = Sha256::new();
        let mut add = |first: usize, ids: &[u32]| {
            digest.update((first as u64).to_le_bytes());
            digest.update((ids.len() as u64).to_le_bytes());
            ids.iter().for_each(|id| digest.update(id.to_le_bytes()));
        };
        match &self.work {
            Work::Score { choices, .. } => {
                choices.iter().flat_map(|choice| &choice.sequences).for_each(|sequence| {
                    add(sequence.first, &sequence.ids);
                })
            }
            Work::Write { prompt, tokens, .. } => add(*tokens, prompt),
        }
        digest.finalize().iter().take(8).map(|byte| format!("{byte:02x}")).collect()
    }
}

/// A model's work on an item.
///
/// A field of an [`Item`].
#[derive(Debug, Clone, PartialEq)]
pub enum Work {
    /// Scores choices.
    Score {
        /// One for texts, several for questions.
        choices: Vec<Choice>,
        /// Index of the right one.
        gold: Option<usize>,
    },
    /// Writes a word greedily, without the words of [`Prepared::left_out`](crate::Prepared::left_out).
    Write {
        /// The ids that it continues.
        prompt: Vec<u32>,
        /// How many tokens.
        tokens: usize,
        /// The word that is right.
        word: String,
    },
}

/// Something that a model scores: its sequences' scores are added up.
///
/// ```
/// use candle_gpt2_evaluation::Choice;
/// use candle_gpt2_generation::Sequence;
///
/// let choice = Choice::of(Sequence { ids: vec![464, 26_487], first: 1 }, " né");
/// assert_eq!((choice.characters, choice.bytes), (3, 4));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct Choice {
    /// One, or several if a text is longer than the context; each token is scored in one of them.
    pub sequences: Vec<Sequence>,
    /// Unicode characters that the score is divided by.
    pub characters: usize,
    /// Bytes of UTF-8 that the score is divided by.
    pub bytes: usize,
    /// Words that the score is divided by, if the protocol has them.
    pub words: Option<usize>,
}

impl Choice {
    /// A choice of one sequence; characters and bytes are those of `text`.
    pub fn of(sequence: Sequence, text: &str) -> Self {
        Self { sequences: vec![sequence], characters: text.chars().count(), bytes: text.len(), words: None }
    }
}
