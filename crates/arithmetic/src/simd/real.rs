//! Work on f32 takes the best instructions of this processor; on f64, in which gradients are checked against finite
//! differences, plain Rust: what is checked there is the very code that trains.

use super::InstructionSet;
use super::doubles::Doubles;
use super::job::OfFloats;
use super::vectors::{Number, Work};

/// A number for which work is compiled.
pub(crate) trait Real: Number {
    /// Does the work with the best instructions of this processor.
    fn vectorized<W: Work<Self>>(work: W) -> W::Output;
}

impl Real for f32 {
    fn vectorized<W: Work<Self>>(work: W) -> W::Output {
        InstructionSet::detected().run(OfFloats(work))
    }
}

impl Real for f64 {
    fn vectorized<W: Work<Self>>(work: W) -> W::Output {
        work.run(Doubles)
    }
}
