//! Evaluation of a model on held-out data.
//!
//! The tokens of a text are split into adjacent windows. Every token but the first is predicted once, from
//! the earlier tokens in its window. The last window may be shorter.

use candle_gpt2_arithmetic::log_sum_exp;
use serde::{Deserialize, Serialize};

use crate::dictionary::{MAX_EVALUATED_TOKENS, MIN_SEQUENCE_LEN};
use crate::windows::{Batch, Tokens};
use crate::{Confusion, DictionaryMetrics, Examples, RowSet, Trainer, TrainingError};

/// Held-out data.
///
/// ```
/// use candle_core::Device;
/// use candle_gpt2::Gpt2Config;
/// use candle_gpt2_training::{HeldOut, Hyperparameters, Parameters, Trainer};
///
/// let sizes = Gpt2Config { vocab_size: 11, n_positions: 8, n_embd: 6, n_layer: 2, n_head: 3, ..Gpt2Config::gpt2() };
/// let numbers = Hyperparameters { context: 8, ..Hyperparameters::default() };
/// let trainer = Trainer::new(&sizes, Parameters::initialize(&sizes, 1, &Device::Cpu)?, numbers)?;
/// let tokens: Vec<u32> = (0..50).map(|index| index % 11).collect();
/// let evaluation = HeldOut::text(tokens, 100)?.evaluate(&trainer)?;
/// assert!((evaluation.loss - 11f64.ln()).abs() < 0.1, "an untrained model guesses among 11 tokens");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub enum HeldOut {
    /// Text.
    Text {
        /// Tokens of the text, at least two.
        tokens: Box<dyn Tokens>,
        /// Number of characters, for losses that do not depend on the tokenizer.
        characters: usize,
    },
    /// Rows with answers or labels.
    Rows {
        /// Rows, at least one.
        rows: RowSet,
        /// Number of labels; 0 for answers.
        labels: usize,
    },
    /// Separate sequences, for evaluating a dictionary.
    Texts(Vec<Vec<u32>>),
}

/// Quality of a model on held-out data, returned by [`HeldOut::evaluate`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Evaluation {
    /// Mean loss of the token or label predictions, in nats.
    ///
    /// For a dictionary, it is the fraction of variance that the dictionary does not explain.
    #[serde(rename = "per_token")]
    pub loss: f64,
    /// Total loss per character, for text.
    #[serde(rename = "per_character", default, skip_serializing_if = "Option::is_none")]
    pub loss_per_character: Option<f64>,
    /// Confusion matrix, for rows with labels.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub confusion: Option<Confusion>,
    /// Metrics of a dictionary.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dictionary: Option<DictionaryMetrics>,
}

impl HeldOut {
    /// Creates held-out data from the tokens of a text with `characters` characters.
    ///
    /// # Errors
    /// If there are fewer than two tokens, so that none can be predicted.
    pub fn text(tokens: impl Tokens + 'static, characters: usize) -> Result<Self, TrainingError> {
        if tokens.len() < 2 {
            return Err(TrainingError::TooFewTokens { part: "held-out", found: tokens.len(), needed: 2 });
        }
        Ok(Self::Text { tokens: Box::new(tokens), characters })
    }

    /// Creates held-out data from one or more rows, with answers or with `labels` labels.
    pub fn rows(rows: RowSet, labels: usize) -> Self {
        Self::Rows { rows, labels }
    }

    /// Evaluates the model in its current state.
    ///
    /// # Errors
    /// If allocation fails on the device, training is interrupted, or the data does not fit the task.
    pub fn evaluate(&self, trainer: &Trainer) -> Result<Evaluation, TrainingError> {
        if trainer.learner().is_some() {
            return of_dictionary(&self.texts(trainer.numbers().context), trainer);
        }
        match self {
            Self::Texts(_) => Err(TrainingError::Call {
                what: "separate sequences are supported only for evaluating a dictionary".into(),
            }),
            Self::Text { tokens, characters } => of_text(&**tokens, *characters, trainer),
            Self::Rows { rows, labels: 0 } => of_answers(rows, trainer),
            Self::Rows { rows, labels } => of_labels(rows, *labels, trainer),
        }
    }
}

impl HeldOut {
    /// Returns sequences for evaluating a dictionary: adjacent windows of the text, or separate sequences.
    fn texts(&self, context: usize) -> Vec<Vec<u32>> {
        let mut texts = Vec::new();
        match self {
            Self::Text { tokens, .. } => {
                for start in (0..tokens.len().min(MAX_EVALUATED_TOKENS)).step_by(context) {
                    let mut text = Vec::new();
                    tokens.read(start, context.min(tokens.len() - start), &mut text);
                    texts.push(text);
                }
            }
            Self::Texts(given) => texts.extend(given.iter().cloned()),
            Self::Rows { .. } => {}
        }
        texts.retain(|text| text.len() >= MIN_SEQUENCE_LEN);
        let mut tokens = 0;
        let few = texts.iter().take_while(|text| {
            tokens += text.len();
            tokens <= MAX_EVALUATED_TOKENS
        });
        let count = few.count().max(1);
        texts.truncate(count);
        texts
    }
}

fn of_dictionary(texts: &[Vec<u32>], trainer: &Trainer) -> Result<Evaluation, TrainingError> {
    if texts.is_empty() {
        let needed = MIN_SEQUENCE_LEN;
        return Err(TrainingError::TooFewTokens { part: "held-out", found: 0, needed });
    }
    let dictionary = trainer.measure(texts)?;
    let loss = dictionary.as_ref().map_or(f64::NAN, |metrics| 1.0 - metrics.explained_variance);
    Ok(Evaluation { loss, loss_per_character: None, confusion: None, dictionary })
}

fn of_text(tokens: &dyn Tokens, characters: usize, trainer: &Trainer) -> Result<Evaluation, TrainingError> {
    let (context, batch_size) = (trainer.numbers().context, trainer.numbers().batch_size);
    // Total loss of adjacent windows.
    let total_of = |start: usize, rows: usize, context: usize| -> Result<f64, TrainingError> {
        let mut batch = Batch { inputs: Vec::new(), targets: Vec::new(), rows, first_position: 0 };
        tokens.read(start, rows * context, &mut batch.inputs);
        tokens.read(start + 1, rows * context, &mut batch.targets);
        Ok(trainer.evaluate(&batch)? * (rows * context) as f64)
    };
    let predicted = tokens.len().saturating_sub(1);
    if predicted == 0 {
        return Err(TrainingError::TooFewTokens {
            part: "held-out",
            found: tokens.len(),
            needed: MIN_SEQUENCE_LEN,
        });
    }
    let whole = predicted / context;
    let mut total = 0.0;
    for first in (0..whole).step_by(batch_size) {
        total += total_of(first * context, batch_size.min(whole - first), context)?;
    }
    let rest = predicted - whole * context;
    if rest > 0 {
        total += total_of(whole * context, 1, rest)?;
    }
    Ok(Evaluation {
        loss: total / predicted as f64,
        loss_per_character: Some(total / characters.max(1) as f64),
        confusion: None,
        dictionary: None,
    })
}

fn of_answers(rows: &RowSet, trainer: &Trainer) -> Result<Evaluation, TrainingError> {
    let (mut total, mut weight) = (0.0, 0.0);
    for batch in rows.batches(trainer.numbers().batch_size) {
        total += trainer.evaluate(&batch)? * batch.weight();
        weight += batch.weight();
    }
    Ok(Evaluation { loss: total / weight, loss_per_character: None, confusion: None, dictionary: None })
}

fn of_labels(rows: &RowSet, labels: usize, trainer: &Trainer) -> Result<Evaluation, TrainingError> {
    let mut confusion = Confusion::new(labels);
    let (mut total, mut weight) = (0.0, 0.0);
    for batch in rows.batches(trainer.numbers().batch_size) {
        let logits = trainer.logits(&batch)?.to_vec2::<f32>()?;
        for (index, (logits, target)) in logits.iter().zip(batch.targets()).enumerate() {
            let label = usize::try_from(*target).unwrap_or(labels);
            let counts =
                batch.weights().and_then(|weights| weights.get(index)).copied().map_or(1.0, f64::from);
            let of_label = logits.get(label).copied().map_or(f64::NEG_INFINITY, f64::from);
            let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            total += counts * (log_sum_exp(logits, largest) - of_label);
            weight += counts;
            let predicted = logits.iter().position(|logit| *logit == largest);
            confusion.add(label, predicted.unwrap_or(labels));
        }
    }
    Ok(Evaluation {
        loss: total / weight,
        loss_per_character: None,
        confusion: Some(confusion),
        dictionary: None,
    })
}
