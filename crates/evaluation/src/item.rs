//! Items: the questions that a model is evaluated on.

use candle_gpt2_generation::Sequence;
use sha2::{Digest, Sha256};

/// A tokenized data entry.
///
/// ```
/// use candle_gpt2_evaluation::{Choice, Item, Work};
/// use candle_gpt2_generation::Sequence;
///
/// let choice = |id, text| Choice::of(Sequence { ids: vec![464, 3290, id], first: 2 }, text);
/// let choices = vec![choice(318, " is"), choice(547, " were")];
/// let work = Work::Score { choices, gold: Some(0) };
/// let item = Item { index: 0, id: None, group: None, context_tokens: 2, work };
/// assert_eq!(item.token_digest().len(), 16, "digits of a checksum");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct Item {
    /// Index in the data, from 0.
    pub index: usize,
    /// Entry id, if the data provides one.
    pub id: Option<String>,
    /// Group that the item counts toward if groups are averaged separately, such as a BLiMP paradigm.
    pub group: Option<String>,
    /// Number of tokens before the first scored or generated token, in the first choice.
    pub context_tokens: usize,
    /// Task that the model performs for this item.
    pub work: Work,
}

impl Item {
    /// Returns the first 16 hexadecimal digits of a SHA-256 over the item's tokens.
    ///
    /// A log uses it to detect results from different data.
    pub fn token_digest(&self) -> String {
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

/// Task that a model performs for an item.
///
/// A field of an [`Item`].
#[derive(Debug, Clone, PartialEq)]
pub enum Work {
    /// Scores choices.
    Score {
        /// Choices: one for plain text, several for a question.
        choices: Vec<Choice>,
        /// Index of the correct choice.
        gold: Option<usize>,
    },
    /// Generates a word greedily.
    ///
    /// The tokens in [`Prepared::suppressed_tokens`](crate::Prepared::suppressed_tokens) are
    /// excluded.
    Write {
        /// Token ids of the prompt.
        prompt: Vec<u32>,
        /// Number of tokens to generate.
        tokens: usize,
        /// Expected word.
        word: String,
    },
}

/// A scored alternative; its score is the sum over its sequences.
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
    /// One sequence, or several if the text is longer than the context.
    ///
    /// Each token is scored in exactly one of them.
    pub sequences: Vec<Sequence>,
    /// Number of Unicode characters that the score is divided by.
    pub characters: usize,
    /// Number of UTF-8 bytes that the score is divided by.
    pub bytes: usize,
    /// Number of words that the score is divided by, if the protocol counts words.
    pub words: Option<usize>,
}

impl Choice {
    /// Creates a choice from one sequence, with the character and byte counts of `text`.
    pub fn of(sequence: Sequence, text: &str) -> Self {
        Self { sequences: vec![sequence], characters: text.chars().count(), bytes: text.len(), words: None }
    }
}
