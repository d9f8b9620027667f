//! The time that a text may take. Clocks are the caller's: this crate reads none.

use std::sync::Arc;
use std::time::Duration;

use crate::{GenerationConfig, GenerationError};

/// Tells the time since some moment; only [`GenerationConfig::max_time`] asks for it.
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

/// When the time of a text is over, by its clock; `None` if it may take any.
pub(crate) struct Deadline(Option<(Clock, Duration)>);

impl Deadline {
    /// That of a text that begins now.
    pub(crate) fn new(config: &GenerationConfig, clock: Option<&Clock>) -> Result<Self, GenerationError> {
        let Some(seconds) = config.max_time else { return Ok(Self(None)) };
        let clock = clock.ok_or(GenerationError::NoClock)?;
        // A time that no clock shows never comes.
        let most = Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX);
        Ok(Self(Some((Arc::clone(clock), clock().saturating_add(most)))))
    }

    pub(crate) fn is_over(&self) -> bool {
        self.0.as_ref().is_some_and(|(clock, end)| clock() >= *end)
    }
}
