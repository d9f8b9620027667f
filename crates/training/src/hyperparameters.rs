//! The numbers of a training, and their ranges.

use candle_gpt2::Gpt2Config;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::{ComputeDType, DictionaryNumbers, OptimizerKind, Ramp, Schedule, Task, TrainingError};

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
    /// The optimizer.
    #[serde(default, skip_serializing_if = "is_default")]
    pub optimizer: OptimizerKind,
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
    /// Tokens in a window, step by step, the most of which is `context`; `None` has that for all steps.
    #[serde(default, skip_serializing_if = "is_default")]
    pub context_ramp: Option<Ramp>,
    /// Windows in one batch, step by step, the most of which is `batch_size`; `None` has that for all steps.
    #[serde(default, skip_serializing_if = "is_default")]
    pub batch_ramp: Option<Ramp>,
    /// Whether windows that are shorter than the model's context begin at a position that is drawn for each batch.
    #[serde(default, skip_serializing_if = "is_default")]
    pub random_positions: bool,
    /// Share of the windows that begin with a document, if one begins inside them.
    #[serde(default, skip_serializing_if = "is_default")]
    pub document_starts: f64,
    /// After how many tokens a squared gradient counts half in its running mean, in place of `beta_2`.
    #[serde(default, skip_serializing_if = "is_default")]
    pub beta_2_half_life: Option<f64>,
    /// The dictionary, of [`Task::Dictionary`].
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
        if !is_positive(self.epsilon) {
            return refuse("epsilon", "a number greater than 0", &self.epsilon);
        }
        let weights = self.class_weights.iter().flatten();
        if let Some(weight) = weights.into_iter().find(|weight| !is_positive(**weight)) {
            return refuse("class_weights", "numbers greater than 0", weight);
        }
        let shares = [("beta_1", self.beta_1), ("beta_2", self.beta_2)];
        if let Some((option, found)) = shares.into_iter().find(|(_, beta)| !(0.0..1.0).contains(beta)) {
            return refuse(option, "a number from 0 to below 1", &found);
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
            return refuse("document_starts", "a share from 0 to 1", &self.document_starts);
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
            let what = format!("`{option}` needs `task` text or dictionary: rows have their own lengths");
            return Err(TrainingError::Call { what });
        }
        if !(0.0..=1.0).contains(&self.final_share) {
            return refuse("final_share", "a number from 0 to 1", &self.final_share);
        }
        if let Some(dictionary) = &self.dictionary {
            dictionary.check(config)?;
            // The first token of a text is left out.
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

    /// Tokens in a window of the step after so many.
    pub fn context_at(&self, steps_done: u64) -> usize {
        self.context_ramp.as_ref().map_or(self.context, |ramp| ramp.at(steps_done))
    }

    /// Windows, or rows, in a batch of the step after so many.
    pub fn batch_size_at(&self, steps_done: u64) -> usize {
        self.batch_ramp.as_ref().map_or(self.batch_size, |ramp| ramp.at(steps_done))
    }

    /// How many examples the first so many steps have.
    pub fn examples_before(&self, steps: u64) -> u64 {
        let batches = match &self.batch_ramp {
            Some(ramp) => ramp.sum(steps),
            None => steps * self.batch_size as u64,
        };
        batches * self.accumulate as u64
    }

    /// The decay rate of the squared gradient's running mean at the step after so many.
    pub fn beta_2_at(&self, steps_done: u64) -> f64 {
        let Some(half_life) = self.beta_2_half_life else { return self.beta_2 };
        let tokens = self.batch_size_at(steps_done) * self.accumulate * self.context_at(steps_done);
        libm::exp(-std::f64::consts::LN_2 * tokens as f64 / half_life)
    }

    /// The most tokens that a batch has: how many windows, and of how many tokens.
    pub fn largest_batch(&self) -> (usize, usize) {
        let changes = [&self.context_ramp, &self.batch_ramp].into_iter().flatten().flat_map(Ramp::stages);
        let steps = changes.map(|(step, _)| *step).chain([0]);
        let batches = steps.map(|step| (self.batch_size_at(step), self.context_at(step)));
        batches.max_by_key(|(windows, tokens)| windows * tokens).unwrap_or((self.batch_size, self.context))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ramps_give_each_step_its_numbers() {
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
        // 3072 tokens a step: eight steps are the half-life; from step 20 on it is 6144, and four are.
        assert!((numbers.beta_2_at(0).powi(8) - 0.5).abs() < 1e-12);
        assert!((numbers.beta_2_at(20).powi(4) - 0.5).abs() < 1e-12);
        let plain = Hyperparameters::default();
        assert_eq!((plain.beta_2_at(5), plain.examples_before(5)), (0.95, 40));
    }

    #[test]
    fn numbers_out_of_range_are_named() {
        let refused = |numbers: Hyperparameters| numbers.check(&Gpt2Config::gpt2()).unwrap_err().to_string();
        let default = Hyperparameters::default;
        for wrong in [f64::NAN, f64::INFINITY, -1.0, 0.0] {
            assert!(refused(Hyperparameters { epsilon: wrong, ..default() }).starts_with("`epsilon`: "));
            assert!(refused(Hyperparameters { learning_rate: wrong, ..default() }).starts_with("`lr`: "));
            let class_weights = Some(vec![1.0, wrong]);
            assert!(refused(Hyperparameters { class_weights, ..default() }).starts_with("`class_weights`: "));
        }
        assert!(
            refused(Hyperparameters { weight_decay: f64::NAN, ..default() }).starts_with("`weight_decay`")
        );
        for beta in [f64::NAN, 1.0, -0.1] {
            assert!(refused(Hyperparameters { beta_1: beta, ..default() }).starts_with("`beta_1`: "));
            assert!(refused(Hyperparameters { beta_2: beta, ..default() }).starts_with("`beta_2`: "));
        }
    }

    #[test]
    fn what_ramps_cannot_be_is_named() {
        let config = Gpt2Config { n_positions: 256, ..Gpt2Config::gpt2() };
        let refused = |numbers: Hyperparameters| numbers.check(&config).unwrap_err().to_string();
        let ramp = |text: &str| text.parse::<Ramp>().ok();
        let default = Hyperparameters::default;
        let told = refused(Hyperparameters { context_ramp: ramp("0:64,5:512"), ..default() });
        assert_eq!(told, "`context_ramp`: expected values from 1 to 256, found 0:64,5:512");
        let told = refused(Hyperparameters { batch_ramp: ramp("0:0"), ..default() });
        assert_eq!(told, "`batch_ramp`: expected values from 1 to 8, found 0:0");
        let told = refused(Hyperparameters { task: Task::Answer, random_positions: true, ..default() });
        assert_eq!(told, "`random_positions` needs `task` text or dictionary: rows have their own lengths");
        assert!(
            refused(Hyperparameters { document_starts: 1.5, ..default() }).starts_with("`document_starts`")
        );
        assert!(
            refused(Hyperparameters { beta_2_half_life: Some(0.0), ..default() }).contains("greater than 0")
        );
    }
}
