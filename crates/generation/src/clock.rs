//! Time limit for completions; callers supply the clock, because this crate never reads one.

use std::sync::Arc;
use std::time::Duration;

use crate::{GenerationConfig, GenerationError};

/// Function that returns the time since a fixed point, for [`GenerationConfig::max_time`].
///
/// ```
/// use std::sync::Arc;
/// use std::time::Instant;
///
/// use candle_gpt2_generation::Clock;
///
/// let start = Instant::now();
/// let clock: Clock = Arc::new(move || start.elapsed());
/// assert!(clock().as_secs() < 60);
/// ```
pub type Clock = Arc<dyn Fn() -> Duration + Send + Sync>;

/// Time limit for a completion, with its clock; `None` if there is no limit.
pub(crate) struct Deadline(Option<(Clock, Duration)>);

impl Deadline {
    /// Creates the deadline for a completion that begins now.
    pub(crate) fn new(config: &GenerationConfig, clock: Option<&Clock>) -> Result<Self, GenerationError> {
        let Some(seconds) = config.max_time else { return Ok(Self(None)) };
        let clock = clock.ok_or(GenerationError::NoClock)?;
        // A limit beyond the range of the clock is never reached.
        let most = Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX);
        Ok(Self(Some((Arc::clone(clock), clock().saturating_add(most)))))
    }

    pub(crate) fn is_over(&self) -> bool {
        self.0.as_ref().is_some_and(|(clock, end)| clock() >= *end)
    }
}
