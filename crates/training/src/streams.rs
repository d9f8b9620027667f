//! Which random stream serves what: every purpose draws from its own, so none disturbs another.

use gpt2_kernels::RandomStream;

/// A purpose of random numbers.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Stream {
    /// The weights of a fresh model.
    Initialization,
    /// The order of the windows in an epoch.
    Epoch(u64),
    /// The dropout of one pass, counted over all steps.
    Dropout(u64),
}

impl Stream {
    /// The random numbers for this purpose under `seed`.
    pub(crate) fn generator(self, seed: u64) -> RandomStream {
        /// Far more passes and epochs than a training has.
        const PER_PURPOSE: u64 = 1 << 60;
        let stream = match self {
            Self::Initialization => 0,
            Self::Epoch(epoch) => PER_PURPOSE + epoch % PER_PURPOSE,
            Self::Dropout(pass) => 2 * PER_PURPOSE + pass % PER_PURPOSE,
        };
        RandomStream::with_stream(seed, stream)
    }
}
