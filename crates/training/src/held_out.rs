//! How good a model is on what is not trained on.
//!
//! The tokens of a text are cut into windows side by side; every token but the first is predicted once, from those before it in
//! its window. The last window may be shorter.

use candle_gpt2_arithmetic::log_sum_exp;
use serde::{Deserialize, Serialize};

use crate::dictionary::{MOST_TOKENS, SHORTEST};
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
/// assert!((evaluation.loss - 11f64.ln()).abs() < 0.1, "an untrained model guesses");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub enum HeldOut {
    /// A text.
    Text {
        /// Its tokens, at least two.
        tokens: Box<dyn Tokens>,
        /// Characters of the text, for losses that do not depend on the tokenizer.
        characters: usize,
    },
    /// Rows with answers, or with one of so many labels.
    Rows {
        /// The rows, at least one.
        rows: RowSet,
        /// How many labels there are; 0 for answers.
        labels: usize,
    },
    /// Texts of their own, which a dictionary is measured on.
    Texts(Vec<Vec<u32>>),
}

/// How good a model is on what is held out. [`HeldOut::evaluate`] gives it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Evaluation {
    /// Mean loss of the predictions, in nats: of tokens, or of labels.
    #[serde(rename = "per_token")]
    pub loss: f64,
    /// Of a text, the summed loss for each character.
    #[serde(rename = "per_character", default, skip_serializing_if = "Option::is_none")]
    pub loss_per_character: Option<f64>,
    /// Of rows with labels, how often they were taken for which.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub confusion: Option<Confusion>,
    /// Of a dictionary, how good it is; the loss is then the share of variance that it does not explain.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dictionary: Option<DictionaryMetrics>,
}

impl HeldOut {
    /// The tokens of a text of `characters` characters.
    ///
    /// # Errors
    /// When there are fewer than two tokens: nothing could be predicted.
    pub fn text(tokens: impl Tokens + 'static, characters: usize) -> Result<Self, TrainingError> {
        if tokens.len() < 2 {
            return Err(TrainingError::TooFewTokens { part: "held-out", found: tokens.len(), needed: 2 });
        }
        Ok(Self::Text { tokens: Box::new(tokens), characters })
    }

    /// Rows, at least one, with answers, or with one of so many labels.
    pub fn rows(rows: RowSet, labels: usize) -> Self {
        Self::Rows { rows, labels }
    }

    /// How good the model is as it is now.
    ///
    /// # Errors
    /// When the device has no room, or the training is interrupted.
    pub fn evaluate(&self, trainer: &Trainer) -> Result<Evaluation, TrainingError> {
        if trainer.learner().is_some() {
            return of_dictionary(&self.texts(trainer.numbers().context), trainer);
        }
        match self {
            Self::Texts(_) => Err(TrainingError::Call {
                what: "only a dictionary is measured on texts of their own".into(),
            }),
            Self::Text { tokens, characters } => of_text(&**tokens, *characters, trainer),
            Self::Rows { rows, labels: 0 } => of_answers(rows, trainer),
            Self::Rows { rows, labels } => of_labels(rows, *labels, trainer),
        }
    }
}

impl HeldOut {
    /// Enough texts to measure a dictionary on: adjacent windows of one text, otherwise the texts that there are.
    fn texts(&self, context: usize) -> Vec<Vec<u32>> {
        let mut texts = Vec::new();
        match self {
            Self::Text { tokens, .. } => {
                for start in (0..tokens.len().min(MOST_TOKENS)).step_by(context) {
                    let mut text = Vec::new();
                    tokens.read(start, context.min(tokens.len() - start), &mut text);
                    texts.push(text);
                }
            }
            Self::Texts(given) => texts.extend(given.iter().cloned()),
            Self::Rows { .. } => {}
        }
        texts.retain(|text| text.len() >= SHORTEST);
        let mut tokens = 0;
        let few = texts.iter().take_while(|text| {
            tokens += text.len();
            tokens <= MOST_TOKENS
        });
        let count = few.count().max(1);
        texts.truncate(count);
        texts
    }
}

fn of_dictionary(texts: &[Vec<u32>], trainer: &Trainer) -> Result<Evaluation, TrainingError> {
    if texts.is_empty() {
        let needed = SHORTEST;
        return Err(TrainingError::TooFewTokens { part: "held-out", found: 0, needed });
    }
    let dictionary = trainer.measure(texts)?;
    let loss = dictionary.as_ref().map_or(f64::NAN, |metrics| 1.0 - metrics.explained_variance);
    Ok(Evaluation { loss, loss_per_character: None, confusion: None, dictionary })
}

fn of_text(tokens: &dyn Tokens, characters: usize, trainer: &Trainer) -> Result<Evaluation, TrainingError> {
    let (context, batch_size) = (trainer.numbers().context, trainer.numbers().batch_size);
    // The summed loss of windows side by side.
    let total_of = |start: usize, rows: usize, context: usize| -> Result<f64, TrainingError> {
        let mut batch = Batch { inputs: Vec::new(), targets: Vec::new(), rows, first_position: 0 };
        tokens.read(start, rows * context, &mut batch.inputs);
        tokens.read(start + 1, rows * context, &mut batch.targets);
        Ok(trainer.evaluate(&batch)? * (rows * context) as f64)
    };
    let predicted = tokens.len().saturating_sub(1);
    if predicted == 0 {
        return Err(TrainingError::TooFewTokens { part: "held-out", found: tokens.len(), needed: SHORTEST });
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
            let said = logits.iter().position(|logit| *logit == largest);
            confusion.add(label, said.unwrap_or(labels));
        }
    }
    Ok(Evaluation {
        loss: total / weight,
        loss_per_character: None,
        confusion: Some(confusion),
        dictionary: None,
    })
}
