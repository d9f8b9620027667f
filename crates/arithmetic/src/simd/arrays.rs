//! Vectors as arrays, in plain Rust: what is the same for all numbers.

/// The functions of [`Vectors`](super::Vectors) whose vectors are arrays of this number, but for `sum` and `exp`.
macro_rules! arrays {
    ($real:ident) => {
        const TILE_ROWS: usize = 4;
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
            std::array::from_fn(|lane| a[lane] + b[lane])
        }

        #[inline(always)]
        fn sub(self, a: [$real; LANES], b: [$real; LANES]) -> [$real; LANES] {
            std::array::from_fn(|lane| a[lane] - b[lane])
        }

        #[inline(always)]
        fn mul(self, a: [$real; LANES], b: [$real; LANES]) -> [$real; LANES] {
            std::array::from_fn(|lane| a[lane] * b[lane])
        }

        #[inline(always)]
        fn div(self, a: [$real; LANES], b: [$real; LANES]) -> [$real; LANES] {
            std::array::from_fn(|lane| a[lane] / b[lane])
        }

        #[inline(always)]
        fn mul_add(self, a: [$real; LANES], b: [$real; LANES], c: [$real; LANES]) -> [$real; LANES] {
            // The `mul_add` of numbers is a library call on processors without the instruction.
            std::array::from_fn(|lane| a[lane] * b[lane] + c[lane])
        }

        #[inline(always)]
        fn max(self, a: [$real; LANES], b: [$real; LANES]) -> [$real; LANES] {
            std::array::from_fn(|lane| if a[lane] > b[lane] { a[lane] } else { b[lane] })
        }

        #[inline(always)]
        fn root(self, a: [$real; LANES]) -> [$real; LANES] {
            a.map($real::sqrt)
        }

        #[inline(always)]
        fn largest(self, a: [$real; LANES]) -> $real {
            a.into_iter().fold($real::NEG_INFINITY, $real::max)
        }

        #[inline(never)]
        fn call<W: Work<$real>>(self, work: W) -> W::Output {
            work.run(self)
        }

        #[inline(always)]
        fn in_tile<J: TileJob<Self>>(self, height: usize, job: J) -> J::Output {
            tiles!(self, height, job: 1 => 1, 2 => 1; else Self::TILE_ROWS => 1)
        }
    };
}
pub(super) use arrays;
