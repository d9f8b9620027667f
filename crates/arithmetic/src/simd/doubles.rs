//! Vectors of f64 as arrays, in plain Rust.

use super::arrays::arrays;
use super::vectors::{LANES, TileJob, Vectors, Work};

/// Vectors of sixteen f64.
#[derive(Clone, Copy)]
pub(crate) struct Doubles;

impl Vectors for Doubles {
    type Real = f64;
    type Vector = [f64; LANES];
    arrays!(f64);

    #[inline(always)]
    fn mul_add(self, a: [f64; LANES], b: [f64; LANES], c: [f64; LANES]) -> [f64; LANES] {
        std::array::from_fn(|lane| a[lane] * b[lane] + c[lane])
    }

    #[inline(always)]
    fn exp(self, a: [f64; LANES]) -> [f64; LANES] {
        a.map(libm::exp)
    }

    #[inline(always)]
    fn sum(self, a: [f64; LANES]) -> f64 {
        a.into_iter().sum()
    }
}
