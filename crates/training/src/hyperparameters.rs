//! Training hyperparameters and their valid ranges.

use candle_gpt2::Gpt2Config;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::{ComputeDType, DictionaryNumbers, OptimizerKind, Ramp, Schedule, Task, TrainingError};

/// Training hyperparameters.
///
/// Training runs with the same hyperparameters, data and initial weights produce the same result.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Hyperparameters {
    /// Number of optimizer steps.
    pub steps: u64,
    /// Number of windows or rows per batch.
    pub batch_size: usize,
    /// Number of batches whose gradients are averaged in one step.
    pub accumulate: usize,
    /// Number of tokens per window, or maximum number of tokens per row.
    pub context: usize,
    /// Optimizer.
    #[serde(default, skip_serializing_if = "is_default")]
    pub optimizer: OptimizerKind,
    /// Peak learning rate.
    pub learning_rate: f64,
    /// Decay schedule for the learning rate.
    pub schedule: Schedule,
    /// Learning rate of the last step, as a fraction of the peak.
    pub final_share: f64,
    /// Number of learning rate warm-up steps.
    pub warmup_steps: u64,
    /// Weight decay of matrices.
    pub weight_decay: f64,
    /// Maximum norm of the gradient; `None` disables clipping.
    pub grad_clip: Option<f64>,
    /// Decay rate of the gradient's running mean.
    pub beta_1: f64,
    /// Decay rate of the squared gradient's running mean.
    pub beta_2: f64,
    /// Epsilon added to the square root in the denominator of an update.
    pub epsilon: f64,
    /// Seed for all random streams.
    pub seed: u64,
    /// Training task.
    #[serde(default, skip_serializing_if = "is_default")]
    pub task: Task,
    /// Trains only the last N blocks, the final norm and the head; `None` trains everything.
    #[serde(default, skip_serializing_if = "is_default")]
    pub train_blocks: Option<usize>,
    /// Loss weight for each label's rows; `None` weights all labels equally.
    #[serde(default, skip_serializing_if = "is_default")]
    pub class_weights: Option<Vec<f64>>,
    /// Dtype of the computation.
    #[serde(default)]
    pub compute_dtype: ComputeDType,
    /// Schedule for the tokens per window, up to `context`; `None` always uses `context`.
    #[serde(default, skip_serializing_if = "is_default")]
    pub context_ramp: Option<Ramp>,
    /// Schedule for the windows per batch, up to `batch_size`; `None` always uses `batch_size`.
    #[serde(default, skip_serializing_if = "is_default")]
    pub batch_ramp: Option<Ramp>,
    /// Whether windows shorter than the model's context start at a random position, sampled per batch.
    #[serde(default, skip_serializing_if = "is_default")]
    pub random_positions: bool,
    /// Fraction of windows that start at a document boundary, if there is one inside them.
    #[serde(default, skip_serializing_if = "is_default")]
    pub document_starts: f64,
    /// Half-life of the squared gradient's running mean, in tokens; replaces `beta_2`.
    #[serde(default, skip_serializing_if = "is_default")]
    pub beta_2_half_life: Option<f64>,
    /// Hyperparameters of the dictionary, for [`Task::Dictionary`].
    #[serde(default, skip_serializing_if = "is_default")]
    pub dictionary: Option<DictionaryNumbers>,
}

impl Default for Hyperparameters {
    fn default() -> Self {
        Self {
            steps: 1000,
            batch_size: 8,
            accumulate: 1,
            context: 256,
            optimizer: OptimizerKind::AdamW,
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
            context_ramp: None,
            batch_ramp: None,
            random_positions: false,
            document_starts: 0.0,
            beta_2_half_life: None,
            dictionary: None,
        }
    }
}

impl Hyperparameters {
    /// Validates every hyperparameter.
    ///
    /// # Errors
    /// If one is out of range, or does not fit the task.
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
        if !is_positive(self.epsilon) {
            return refuse("epsilon", "a number greater than 0", &self.epsilon);
        }
        let weights = self.class_weights.iter().flatten();
        if let Some(weight) = weights.into_iter().find(|weight| !is_positive(**weight)) {
            return refuse("class_weights", "numbers greater than 0", weight);
        }
        let shares = [("beta_1", self.beta_1), ("beta_2", self.beta_2)];
        if let Some((option, found)) = shares.into_iter().find(|(_, beta)| !(0.0..1.0).contains(beta)) {
            return refuse(option, "at least 0 and less than 1", &found);
        }
        let ramps = [
            ("context_ramp", &self.context_ramp, self.context),
            ("batch_ramp", &self.batch_ramp, self.batch_size),
        ];
        for (option, ramp, most) in ramps {
            if let Some(ramp) = ramp
                && ramp.stages().iter().any(|(_, value)| *value == 0 || *value > most)
            {
                return refuse(option, &format!("values from 1 to {most}"), ramp);
            }
        }
        if !(0.0..=1.0).contains(&self.document_starts) {
            return refuse("document_starts", "a fraction from 0 to 1", &self.document_starts);
        }
        if let Some(half_life) = self.beta_2_half_life
            && !is_positive(half_life)
        {
            return refuse("beta_2_half_life", "a number greater than 0", &half_life);
        }
        let of_windows = [
            ("context_ramp", self.context_ramp.is_some()),
            ("random_positions", self.random_positions),
            ("document_starts", self.document_starts != 0.0),
            ("beta_2_half_life", self.beta_2_half_life.is_some()),
        ];
        if !matches!(self.task, Task::Text | Task::Dictionary)
            && let Some((option, _)) = of_windows.into_iter().find(|(_, is_given)| *is_given)
        {
            let what = format!("`{option}` needs `task` text or dictionary, because rows vary in length");
            return Err(TrainingError::Call { what });
        }
        if !(0.0..=1.0).contains(&self.final_share) {
            return refuse("final_share", "a number from 0 to 1", &self.final_share);
        }
        if let Some(dictionary) = &self.dictionary {
            dictionary.check(config)?;
            // The first token of a sequence is left out.
            if self.context < 2 {
                return refuse("context", "at least 2 for a dictionary", &self.context);
            }
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

    /// Returns the number of tokens per window for the step after `steps_done` steps.
    pub fn context_at(&self, steps_done: u64) -> usize {
        self.context_ramp.as_ref().map_or(self.context, |ramp| ramp.at(steps_done))
    }

    /// Returns the number of windows or rows per batch for the step after `steps_done` steps.
    pub fn batch_size_at(&self, steps_done: u64) -> usize {
        self.batch_ramp.as_ref().map_or(self.batch_size, |ramp| ramp.at(steps_done))
    }

    /// Returns the number of examples in the first `steps` steps.
    pub fn examples_before(&self, steps: u64) -> u64 {
        let batches = match &self.batch_ramp {
            Some(ramp) => ramp.sum(steps),
            None => steps * self.batch_size as u64,
        };
        batches * self.accumulate as u64
    }

    /// Returns the decay rate of the squared gradient's running mean for the step after `steps_done` steps.
    pub fn beta_2_at(&self, steps_done: u64) -> f64 {
        let Some(half_life) = self.beta_2_half_life else { return self.beta_2 };
        let tokens = self.batch_size_at(steps_done) * self.accumulate * self.context_at(steps_done);
        libm::exp(-std::f64::consts::LN_2 * tokens as f64 / half_life)
    }

    /// Returns the number of windows, and of tokens per window, in the batch with the most tokens.
    pub fn largest_batch(&self) -> (usize, usize) {
        let changes = [&self.context_ramp, &self.batch_ramp].into_iter().flatten().flat_map(Ramp::stages);
        let steps = changes.map(|(step, _)| *step).chain([0]);
        let batches = steps.map(|step| (self.batch_size_at(step), self.context_at(step)));
        batches.max_by_key(|(windows, tokens)| windows * tokens).unwrap_or((self.batch_size, self.context))
    }

    /// Returns the hyperparameters that differ in another training run: name, own value, other value.
    pub(crate) fn differing(&self, other: &Self) -> Vec<(String, Value, Value)> {
        // Numbers are exact in JSON, and the keys are the field names.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ramps_set_the_hyperparameters_of_each_step() {
        let numbers = Hyperparameters {
            context: 256,
            batch_size: 16,
            accumulate: 3,
            context_ramp: "0:64,10:128,20:256".parse().ok(),
            batch_ramp: "0:16,10:8".parse().ok(),
            beta_2_half_life: Some(24_576.0),
            ..Hyperparameters::default()
        };
        assert_eq!([0, 9, 10, 20].map(|step| numbers.context_at(step)), [64, 64, 128, 256]);
        assert_eq!([0, 9, 10, 20].map(|step| numbers.batch_size_at(step)), [16, 16, 8, 8]);
        assert_eq!([0, 10, 12].map(|steps| numbers.examples_before(steps)), [0, 480, 528]);
        assert_eq!(numbers.largest_batch(), (8, 256));
        // A step has 3072 tokens, so the half-life is eight steps; from step 20 on it is 6144 tokens and four
        // steps.
        assert!((numbers.beta_2_at(0).powi(8) - 0.5).abs() < 1e-12);
        assert!((numbers.beta_2_at(20).powi(4) - 0.5).abs() < 1e-12);
        let plain = Hyperparameters::default();
        assert_eq!((plain.beta_2_at(5), plain.examples_before(5)), (0.95, 40));
    }

    #[test]
    fn out_of_range_hyperparameters_are_reported_by_name() {
        let error_message =
            |numbers: Hyperparameters| numbers.check(&Gpt2Config::gpt2()).unwrap_err().to_string();
        let default = Hyperparameters::default;
        for wrong in [f64::NAN, f64::INFINITY, -1.0, 0.0] {
            assert!(
                error_message(Hyperparameters { epsilon: wrong, ..default() }).starts_with("`epsilon`: ")
            );
            assert!(
                error_message(Hyperparameters { learning_rate: wrong, ..default() }).starts_with("`lr`: ")
            );
            let class_weights = Some(vec![1.0, wrong]);
            assert!(
                error_message(Hyperparameters { class_weights, ..default() })
                    .starts_with("`class_weights`: ")
            );
        }
        assert!(
            error_message(Hyperparameters { weight_decay: f64::NAN, ..default() })
                .starts_with("`weight_decay`")
        );
        for beta in [f64::NAN, 1.0, -0.1] {
            assert!(error_message(Hyperparameters { beta_1: beta, ..default() }).starts_with("`beta_1`: "));
            assert!(error_message(Hyperparameters { beta_2: beta, ..default() }).starts_with("`beta_2`: "));
        }
    }

    #[test]
    fn invalid_ramps_and_window_options_are_rejected() {
        let config = Gpt2Config { n_positions: 256, ..Gpt2Config::gpt2() };
        let error_message = |numbers: Hyperparameters| numbers.check(&config).unwrap_err().to_string();
        let ramp = |text: &str| text.parse::<Ramp>().ok();
        let default = Hyperparameters::default;
        let message = error_message(Hyperparameters { context_ramp: ramp("0:64,5:512"), ..default() });
        assert_eq!(message, "`context_ramp`: expected values from 1 to 256, found 0:64,5:512");
        let message = error_message(Hyperparameters { batch_ramp: ramp("0:0"), ..default() });
        assert_eq!(message, "`batch_ramp`: expected values from 1 to 8, found 0:0");
        let message =
            error_message(Hyperparameters { task: Task::Answer, random_positions: true, ..default() });
        assert_eq!(
            message,
            "`random_positions` needs `task` text or dictionary, because rows vary in length"
        );
        assert!(
            error_message(Hyperparameters { document_starts: 1.5, ..default() })
                .starts_with("`document_starts`")
        );
        assert!(
            error_message(Hyperparameters { beta_2_half_life: Some(0.0), ..default() })
                .contains("greater than 0")
        );
    }
}
