//! Helpers for all job tests: interruption at a chosen check, and a sample text.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use candle_gpt2_engine::{Progress, Reporter, Silent, Unit};

/// Reporter that interrupts a job at its `at`-th check, counted from 1.
///
/// Checks count during one phase of the job, or after [`begin`](Self::begin).
pub(crate) struct Interrupter {
    at: u64,
    phase: Option<&'static str>,
    checks: AtomicU64,
    has_begun: AtomicBool,
}

impl Interrupter {
    /// Interrupts at a check after [`begin`](Self::begin).
    pub(crate) fn new(at: u64) -> Self {
        Self { at, phase: None, checks: AtomicU64::new(0), has_begun: false.into() }
    }

    /// Interrupts at a check in the phase that the job reports under this name.
    pub(crate) fn in_phase(phase: &'static str, at: u64) -> Self {
        Self { phase: Some(phase), ..Self::new(at) }
    }

    /// Starts counting checks.
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
        self.has_begun.load(Ordering::Relaxed) && self.checks.fetch_add(1, Ordering::Relaxed) + 1 >= self.at
    }
}

/// Returns a deterministic text with `count` short scenes.
pub(crate) fn scenes(count: u32) -> String {
    (0..count).map(|line| format!("CITIZEN {}:\nWhat say you, {}?\n\n", line % 7, line * 37 % 101)).collect()
}
