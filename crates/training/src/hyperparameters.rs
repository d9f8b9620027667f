//! The numbers of a training, and their ranges.

use candle_gpt2::Gpt2Config;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::{ComputeDType, Schedule, Task, TrainingError};

/// The numbers of a training. Two trainings with the same numbers, data and start have the same result.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Hyperparameters {
    /// Steps of the optimizer.
    pub steps: u64,
    /// Windows, or rows, in one batch.
    pub batch_size: usize,
    /// Batches whose gradients are averaged into one step.
    pub accumulate: usize,
    /// Tokens in a window, or of the longest row.
    pub context: usize,
    /// Highest learning rate.
    pub learning_rate: f64,
    /// How it decays.
    pub schedule: Schedule,
    /// Share of the highest learning rate that the last step has.
    pub final_share: f64,
    /// Steps over which the learning rate rises.
    pub warmup_steps: u64,
    /// Weight decay of matrices.
    pub weight_decay: f64,
    /// Largest norm of the gradient; `None` does not clip.
    pub grad_clip: Option<f64>,
    /// Decay rate of the gradient's running mean.
    pub beta_1: f64,
    /// Decay rate of the squared gradient's running mean.
    pub beta_2: f64,
    /// Added to the square root that divides a step.
    pub epsilon: f64,
    /// Seed of everything random.
    pub seed: u64,
    /// What is taught.
    #[serde(default, skip_serializing_if = "is_default")]
    pub task: Task,
    /// The last blocks alone are trained, so many, with the final norm and the head; `None` trains everything.
    #[serde(default, skip_serializing_if = "is_default")]
    pub train_blocks: Option<usize>,
    /// What the rows of each label count in the loss; `None` counts each once.
    #[serde(default, skip_serializing_if = "is_default")]
    pub class_weights: Option<Vec<f64>>,
    /// The type that it is computed in.
    #[serde(default)]
    pub compute_dtype: ComputeDType,
}

impl Default for Hyperparameters {
    fn default() -> Self {
        Self {
            steps: 1000,
            batch_size: 8,
            accumulate: 1,
            context: 256,
            learning_rate: 6e-4,
            schedule: Schedule::Cosine,
            final_share: 0.1,
            warmup_steps: 0,
            weight_decay: 0.1,
            grad_clip: Some(1.0),
            beta_1: 0.9,
            beta_2: 0.95,
            epsilon: 1e-8,
            seed: 0,
            task: Task::Text,
            train_blocks: None,
            class_weights: None,
            compute_dtype: ComputeDType::default(),
        }
    }
}

impl Hyperparameters {
    /// Checks every number.
    ///
    /// # Errors
    /// When one is out of its range.
    pub fn check(&self, config: &Gpt2Config) -> Result<(), TrainingError> {
        let refuse = |option, expected: &str, found: &dyn std::fmt::Display| {
            Err(TrainingError::OptionOutOfRange {
                option,
                expected: expected.into(),
                found: found.to_string(),
            })
        };
        for (option, count) in [("batch_size", self.batch_size), ("accumulate", self.accumulate)] {
            if count == 0 || count > 1 << 20 {
                return refuse(option, "a number from 1 to 1048576", &count);
            }
        }
        if self.steps == 0 {
            return refuse("steps", "at least 1", &self.steps);
        }
        if self.context == 0 || self.context > config.n_positions {
            let expected = format!("from 1 to the model's context of {}", config.n_positions);
            return refuse("context", &expected, &self.context);
        }
        if self.warmup_steps > self.steps {
            return refuse("warmup_steps", "at most the number of steps", &self.warmup_steps);
        }
        let is_positive = |number: f64| number > 0.0 && number.is_finite();
        if !is_positive(self.learning_rate) {
            return refuse("lr", "a number greater than 0", &self.learning_rate);
        }
        if !(self.weight_decay >= 0.0 && self.weight_decay.is_finite()) {
            return refuse("weight_decay", "a number of at least 0", &self.weight_decay);
        }
        if let Some(clip) = self.grad_clip
            && !is_positive(clip)
        {
            return refuse("grad_clip", "a number greater than 0", &clip);
        }
        let shares = [("beta_1", self.beta_1), ("beta_2", self.beta_2)];
        if let Some((option, found)) = shares.into_iter().find(|(_, beta)| !(0.0..1.0).contains(beta)) {
            return refuse(option, "a number from 0 to below 1", &found);
        }
        if !(0.0..=1.0).contains(&self.final_share) {
            return refuse("final_share", "a number from 0 to 1", &self.final_share);
        }
        if let Some(blocks) = self.train_blocks
            && blocks > config.n_layer
        {
            return refuse(
                "train_blocks",
                &format!("at most the model's {} blocks", config.n_layer),
                &blocks,
            );
        }
        Ok(())
    }

    /// The numbers that differ in another training: name, value here, value there.
    pub(crate) fn differing(&self, other: &Self) -> Vec<(String, Value, Value)> {
        // Numbers as JSON are exact, and its keys are the names of the fields.
        let keys = |numbers: &Self| match serde_json::to_value(numbers) {
            Ok(Value::Object(keys)) => keys,
            _ => serde_json::Map::new(),
        };
        let mut there = keys(other);
        let pairs = keys(self).into_iter().map(|(name, here)| {
            let there = there.remove(&name).unwrap_or_default();
            (name, here, there)
        });
        let mut pairs: Vec<_> = pairs.collect();
        pairs.extend(there.into_iter().map(|(name, there)| (name, Value::Null, there)));
        pairs.retain(|(_, here, there)| here != there);
        pairs
    }
}

fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}
