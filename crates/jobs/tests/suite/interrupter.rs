//! What the tests of all jobs share: an interruption at a chosen question, and a text.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use candle_gpt2_engine::{Progress, Reporter, Silent, Unit};

/// Interrupts a job at a question: the first of those that count is 1. All count that are asked in one phase of the job, or after
/// [`begin`](Self::begin).
pub(crate) struct Interrupter {
    at: u64,
    phase: Option<&'static str>,
    asked: AtomicU64,
    has_begun: AtomicBool,
}

impl Interrupter {
    /// Interrupts at a question after [`begin`](Self::begin).
    pub(crate) fn new(at: u64) -> Self {
        Self { at, phase: None, asked: AtomicU64::new(0), has_begun: false.into() }
    }

    /// Interrupts at a question of the phase that a job reports by this name.
    pub(crate) fn in_phase(phase: &'static str, at: u64) -> Self {
        Self { phase: Some(phase), ..Self::new(at) }
    }

    /// From now on questions count.
    pub(crate) fn begin(&self) {
        self.has_begun.store(true, Ordering::Relaxed);
    }
}

impl Reporter for Interrupter {
    fn start(&self, what: &str, total: u64, unit: Unit) -> Box<dyn Progress> {
        if let Some(phase) = self.phase {
            self.has_begun.store(what == phase, Ordering::Relaxed);
        }
        Silent.start(what, total, unit)
    }

    fn note(&self, _: &str) {}

    fn is_interrupted(&self) -> bool {
        self.has_begun.load(Ordering::Relaxed) && self.asked.fetch_add(1, Ordering::Relaxed) + 1 >= self.at
    }
}

/// A text of so many short scenes, always the same.
pub(crate) fn scenes(count: u32) -> String {
    (0..count).map(|line| format!("CITIZEN {}:\nWhat say you, {}?\n\n", line % 7, line * 37 % 101)).collect()
}
