//! Selection of vectors by number type.
//!
//! Work on f32 uses this processor's best instructions. Work on f64 runs in plain Rust and is used to
//! check gradients against finite differences. Both run the same generic code, so the check covers the
//! training code.

use super::InstructionSet;
use super::doubles::Doubles;
use super::job::F32Job;
use super::vectors::{Number, Work};

/// Number type that work is compiled for.
pub(crate) trait Real: Number {
    /// Runs `work` with the best vectors for this number type.
    fn vectorized<W: Work<Self>>(work: W) -> W::Output;
}

impl Real for f32 {
    fn vectorized<W: Work<Self>>(work: W) -> W::Output {
        InstructionSet::detected().run(F32Job(work))
    }
}

impl Real for f64 {
    fn vectorized<W: Work<Self>>(work: W) -> W::Output {
        work.run(Doubles)
    }
}
