//! Vectors of f64 as arrays, in plain Rust.

use super::vectors::{LANES, TileJob, Vectors, Work};

/// Sixteen f64.
#[derive(Clone, Copy)]
pub(crate) struct Doubles;

type Vector = [f64; LANES];

#[inline(always)]
fn zip(a: Vector, b: Vector, f: impl Fn(f64, f64) -> f64) -> Vector {
    std::array::from_fn(|lane| f(a[lane], b[lane]))
}

impl Vectors for Doubles {
    type Real = f64;
    type Vector = Vector;
    const TILE_ROWS: usize = 4;
    const TILE_PANELS: usize = 1;

    #[inline(always)]
    fn splat(self, value: f64) -> Vector {
        [value; LANES]
    }

    #[inline(always)]
    fn load(self, values: &[f64; LANES]) -> Vector {
        *values
    }

    #[inline(always)]
    fn store(self, values: Vector, to: &mut [f64; LANES]) {
        *to = values;
    }

    #[inline(always)]
    fn add(self, a: Vector, b: Vector) -> Vector {
        zip(a, b, |a, b| a + b)
    }

    #[inline(always)]
    fn sub(self, a: Vector, b: Vector) -> Vector {
        zip(a, b, |a, b| a - b)
    }

    #[inline(always)]
    fn mul(self, a: Vector, b: Vector) -> Vector {
        zip(a, b, |a, b| a * b)
    }

    #[inline(always)]
    fn div(self, a: Vector, b: Vector) -> Vector {
        zip(a, b, |a, b| a / b)
    }

    #[inline(always)]
    fn mul_add(self, a: Vector, b: Vector, c: Vector) -> Vector {
        self.add(self.mul(a, b), c)
    }

    #[inline(always)]
    fn max(self, a: Vector, b: Vector) -> Vector {
        zip(a, b, |a, b| if a > b { a } else { b })
    }

    #[inline(always)]
    fn root(self, a: Vector) -> Vector {
        a.map(f64::sqrt)
    }

    #[inline(always)]
    fn exp(self, a: Vector) -> Vector {
        a.map(f64::exp)
    }

    #[inline(always)]
    fn sum(self, a: Vector) -> f64 {
        a.into_iter().sum()
    }

    #[inline(always)]
    fn largest(self, a: Vector) -> f64 {
        a.into_iter().fold(f64::NEG_INFINITY, f64::max)
    }

    #[inline(never)]
    fn call<W: Work<f64>>(self, work: W) -> W::Output {
        work.run(self)
    }

    #[inline(always)]
    fn in_tile<J: TileJob<Self>>(self, height: usize, job: J) -> J::Output {
        tiles!(self, height, job: 1 => 1, 2 => 1; else Self::TILE_ROWS => 1)
    }
}
