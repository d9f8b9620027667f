//! Array-based vectors in plain Rust: the operations that are the same for all number types.

/// Number of rows in the tallest tile.
pub(super) const TILE_ROWS: usize = 4;

/// Implements [`Vectors`](super::Vectors) with arrays, except for `mul_add`, `sum` and `exp`.
macro_rules! arrays {
    ($real:ident) => {
        const TILE_ROWS: usize = $crate::simd::arrays::TILE_ROWS;
        const TILE_PANELS: usize = 1;

        #[inline(always)]
        fn splat(self, value: $real) -> [$real; LANES] {
            [value; LANES]
        }

        #[inline(always)]
        fn load(self, values: &[$real; LANES]) -> [$real; LANES] {
            *values
        }

        #[inline(always)]
        fn store(self, values: [$real; LANES], to: &mut [$real; LANES]) {
            *to = values;
        }

        #[inline(always)]
        fn add(self, a: [$real; LANES], b: [$real; LANES]) -> [$real; LANES] {
            let mut results = a;
            for lane in 0..LANES {
                results[lane] = a[lane] + b[lane];
            }
            results
        }

        #[inline(always)]
        fn sub(self, a: [$real; LANES], b: [$real; LANES]) -> [$real; LANES] {
            let mut results = a;
            for lane in 0..LANES {
                results[lane] = a[lane] - b[lane];
            }
            results
        }

        #[inline(always)]
        fn mul(self, a: [$real; LANES], b: [$real; LANES]) -> [$real; LANES] {
            let mut results = a;
            for lane in 0..LANES {
                results[lane] = a[lane] * b[lane];
            }
            results
        }

        #[inline(always)]
        fn div(self, a: [$real; LANES], b: [$real; LANES]) -> [$real; LANES] {
            let mut results = a;
            for lane in 0..LANES {
                results[lane] = a[lane] / b[lane];
            }
            results
        }

        #[inline(always)]
        fn max(self, a: [$real; LANES], b: [$real; LANES]) -> [$real; LANES] {
            let mut results = b;
            for lane in 0..LANES {
                results[lane] = if a[lane] > b[lane] { a[lane] } else { b[lane] };
            }
            results
        }

        #[inline(always)]
        fn root(self, a: [$real; LANES]) -> [$real; LANES] {
            let mut results = a;
            for lane in 0..LANES {
                results[lane] = a[lane].sqrt();
            }
            results
        }

        #[inline(always)]
        fn largest(self, a: [$real; LANES]) -> $real {
            let mut largest = $real::NEG_INFINITY;
            for lane in 0..LANES {
                largest = largest.max(a[lane]);
            }
            largest
        }

        #[inline(never)]
        fn call<W: Work<$real>>(self, work: W) -> W::Output {
            work.run(self)
        }

        #[inline(always)]
        fn in_tile<J: TileJob<Self>>(self, height: usize, job: J) -> J::Output {
            tiles!(self, height, job: 1 => 1, 2 => 1; else $crate::simd::arrays::TILE_ROWS => 1)
        }
    };
}
pub(super) use arrays;
