//! Passes that can be ended while they are computed.

use std::fmt;
use std::sync::Arc;

use candle_core::Result;

use crate::{Gpt2LMHead, ModelError};

/// Asked whether to end what is being computed.
#[derive(Clone)]
pub(crate) struct Interrupt(Arc<dyn Fn() -> bool + Send + Sync>);

impl Interrupt {
    /// An error where the pass is to end.
    pub(crate) fn ask(interrupt: Option<&Self>) -> Result<()> {
        match interrupt {
            Some(Self(is_raised)) if is_raised() => Err(ModelError::Interrupted.into()),
            _ => Ok(()),
        }
    }
}

impl fmt::Debug for Interrupt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Interrupt")
    }
}

impl Gpt2LMHead {
    /// The same model, whose passes end with [`ModelError::Interrupted`] once `is_raised` says so. It is asked on the thread that
    /// computes, twice in each block, so it should cost little; and what it says once it should go on saying until whoever waits
    /// for the result has it. A cache then holds what it held before the pass.
    pub fn interrupted_by(mut self, is_raised: Arc<dyn Fn() -> bool + Send + Sync>) -> Self {
        self.transformer.interrupt = Some(Interrupt(is_raised));
        self
    }

    /// Whether what this model computes is to end, see [`Gpt2LMHead::interrupted_by`].
    pub fn is_interrupted(&self) -> bool {
        self.transformer.interrupt.as_ref().is_some_and(|Interrupt(is_raised)| is_raised())
    }
}
