//! Learning rate schedule: a linear warm-up, then a decay.
//!
//! The cosine follows "SGDR" (arXiv:1608.03983, equation 5) without restarts, as in GPT training scripts.

use std::str::FromStr;

use candle_gpt2_weights::UnknownName;
use serde::{Deserialize, Serialize};

/// Learning rate decay after the warm-up.
///
/// ```
/// use candle_gpt2_training::Schedule;
///
/// let share = |step| Schedule::Linear.share(step, 10, 110, 0.0);
/// assert_eq!([share(5), share(10), share(60), share(110)], [0.5, 1.0, 0.5, 0.0]);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Schedule {
    /// No decay.
    Constant,
    /// Linear decay.
    Linear,
    /// Decay along half a cosine.
    Cosine,
}

impl Schedule {
    /// All schedules with their names.
    pub const NAMES: [(&'static str, Self); 3] =
        [("constant", Self::Constant), ("linear", Self::Linear), ("cosine", Self::Cosine)];

    /// Returns the learning rate at `step`, counted from 1, as a fraction of the peak.
    ///
    /// During the warm-up it is `step / warmup_steps`. Then it decays from 1 to `final_share` at step
    /// `steps`.
    pub fn share(self, step: u64, warmup_steps: u64, steps: u64, final_share: f64) -> f64 {
        if step < warmup_steps {
            return step as f64 / warmup_steps as f64;
        }
        let decay_steps = steps.saturating_sub(warmup_steps).max(1);
        let progress = (step.saturating_sub(warmup_steps) as f64 / decay_steps as f64).min(1.0);
        let left = match self {
            Self::Constant => return 1.0,
            Self::Linear => 1.0 - progress,
            Self::Cosine => 0.5 * (1.0 + libm::cos(std::f64::consts::PI * progress)),
        };
        final_share + (1.0 - final_share) * left
    }
}

impl FromStr for Schedule {
    type Err = UnknownName;

    fn from_str(name: &str) -> Result<Self, UnknownName> {
        UnknownName::find(&Self::NAMES, name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn warmup_rises_and_decay_falls_to_the_final_rate() {
        let shares = |schedule: Schedule| [1, 2, 4, 6, 8, 9].map(|step| schedule.share(step, 4, 8, 0.1));
        assert_eq!(shares(Schedule::Constant), [0.25, 0.5, 1.0, 1.0, 1.0, 1.0]);
        let linear = shares(Schedule::Linear);
        let cosine = shares(Schedule::Cosine);
        for (found, expected) in
            linear.iter().chain(&cosine).zip([0.25, 0.5, 1.0, 0.55, 0.1, 0.1].iter().cycle())
        {
            assert!((found - expected).abs() < 1e-12, "{linear:?} {cosine:?}");
        }
        assert!(Schedule::Cosine.share(5, 4, 8, 0.0) > Schedule::Linear.share(5, 4, 8, 0.0));
        assert_eq!(Schedule::Cosine.share(1, 0, 1, 0.1), 0.1, "one step without a warm-up");
    }
}
