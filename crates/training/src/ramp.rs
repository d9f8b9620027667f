//! Hyperparameters that grow during training: tokens per window, windows per batch.
//!
//! Short windows and small batches at the beginning save much of the computation. Sources: sequence length
//! warmup (arXiv:2108.06084); a smaller product of the two makes induction heads form earlier
//! (arXiv:2511.16893).

use std::fmt;
use std::str::FromStr;

use candle_gpt2_weights::UnknownName;
use serde::{Deserialize, Serialize};

/// Piecewise constant schedule for an integer over the training steps.
///
/// ```
/// use candle_gpt2_training::Ramp;
///
/// let ramp: Ramp = "0:64,1000:128,3000:512".parse()?;
/// assert_eq!([0, 999, 1000, 5000].map(|step| ramp.at(step)), [64, 64, 128, 512]);
/// # Ok::<(), candle_gpt2_weights::UnknownName>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Ramp {
    /// Stages: the number of completed steps at which each begins (0 for the first), and its value.
    stages: Vec<(u64, usize)>,
}

impl Ramp {
    /// Creates a ramp with the same value for all steps.
    pub fn constant(value: usize) -> Self {
        Self { stages: vec![(0, value)] }
    }

    /// Returns the stages: completed steps at which each begins (0 for the first), and its value.
    pub fn stages(&self) -> &[(u64, usize)] {
        &self.stages
    }

    /// Returns the value for the step after `steps_done` completed steps.
    pub fn at(&self, steps_done: u64) -> usize {
        let next = self.stages.partition_point(|(from, _)| *from <= steps_done);
        // The first stage starts at 0.
        self.stages[next - 1].1
    }

    /// Returns the sum of the values of the first `steps` steps.
    ///
    /// ```
    /// let ramp: candle_gpt2_training::Ramp = "0:4,10:8".parse()?;
    /// assert_eq!([ramp.sum(3), ramp.sum(10), ramp.sum(12)], [12, 40, 56]);
    /// # Ok::<(), candle_gpt2_weights::UnknownName>(())
    /// ```
    pub fn sum(&self, steps: u64) -> u64 {
        let ends = self.stages[1..].iter().map(|(from, _)| *from).chain([u64::MAX]);
        self.stages
            .iter()
            .zip(ends)
            .map(|((from, value), end)| (*value as u64).saturating_mul(steps.min(end).saturating_sub(*from)))
            .fold(0, u64::saturating_add)
    }

    /// Largest value.
    pub fn largest(&self) -> usize {
        self.stages.iter().map(|(_, value)| *value).max().unwrap_or_default()
    }
}

/// Parses `STEP:VALUE,STEP:VALUE`, where the first step is 0.
impl FromStr for Ramp {
    type Err = UnknownName;

    fn from_str(text: &str) -> Result<Self, UnknownName> {
        let pair = |pair: &str| {
            let (step, value) = pair.split_once(':')?;
            Some((step.trim().parse().ok()?, value.trim().parse().ok()?))
        };
        let stages: Option<Vec<(u64, usize)>> = text.split(',').map(pair).collect();
        let is_ramp = |stages: &Vec<(u64, usize)>| {
            stages[0].0 == 0 && stages.windows(2).all(|pair| pair[0].0 < pair[1].0)
        };
        let expected = "STEP:VALUE pairs that start at step 0, such as 0:64,1000:128".to_owned();
        stages.filter(is_ramp).map(|stages| Self { stages }).ok_or(UnknownName { expected })
    }
}

impl fmt::Display for Ramp {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let pairs: Vec<String> = self.stages.iter().map(|(step, value)| format!("{step}:{value}")).collect();
        formatter.write_str(&pairs.join(","))
    }
}

impl TryFrom<String> for Ramp {
    type Error = UnknownName;

    fn try_from(text: String) -> Result<Self, UnknownName> {
        text.parse()
    }
}

impl From<Ramp> for String {
    fn from(ramp: Ramp) -> Self {
        ramp.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ramp_round_trips_and_rejects_invalid_text() {
        let ramp: Ramp = "0:64, 1000:128".parse().unwrap();
        assert_eq!(ramp.to_string(), "0:64,1000:128");
        assert_eq!(serde_json::to_string(&ramp).unwrap(), "\"0:64,1000:128\"");
        assert_eq!(serde_json::from_str::<Ramp>("\"0:64,1000:128\"").unwrap(), ramp);
        for wrong in ["", "64", "1:64", "0:64,0:128", "0:64,5:128,4:256", "0:-1", "0:64,"] {
            assert!(wrong.parse::<Ramp>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn sum_equals_the_sum_of_single_steps() {
        let ramp: Ramp = "0:3,4:5,9:2".parse().unwrap();
        for steps in 0..14 {
            assert_eq!(ramp.sum(steps), (0..steps).map(|step| ramp.at(step) as u64).sum::<u64>(), "{steps}");
        }
        assert_eq!((ramp.largest(), Ramp::constant(7).sum(6)), (5, 42));
    }
}
