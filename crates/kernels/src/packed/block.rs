//! The blocks that packed matrices are made of: 64 inputs of 16 outputs, in each precision.

use half::f16;

use super::{DEPTH, GROUP};
use crate::simd::{LANES, Line, Simd};

/// Weights in f32: for each input the 16 outputs.
pub(crate) type Expanded = [Line<[f32; LANES]>; DEPTH];

/// Groups of a block.
const GROUPS: usize = DEPTH / GROUP;
/// Inputs in a line of bytes.
const BYTE_INPUTS: usize = 4;
/// Inputs in a line of nibbles.
const NIBBLE_INPUTS: usize = 8;

/// A block of one precision.
pub(crate) trait Block: Sized + Send + Sync {
    /// The nearest block of this precision.
    fn encode(weights: &Expanded) -> Self;

    /// The weight of one input and output, both counted within the block.
    fn value(&self, input: usize, output: usize) -> f32;

    /// All weights.
    fn expand<S: Simd>(&self, simd: S, to: &mut Expanded);

    /// The weights of neighbouring blocks, in `scratch` where they have to be expanded.
    #[inline(always)]
    fn lines<'a, S: Simd>(
        simd: S,
        blocks: &'a [Self],
        scratch: &'a mut [Expanded],
    ) -> &'a [Line<[f32; LANES]>] {
        for (block, to) in blocks.iter().zip(scratch.iter_mut()) {
            block.expand(simd, to);
        }
        scratch[..blocks.len()].as_flattened()
    }

    /// Adds the products of 64 inputs with their weights to four partial sums.
    fn accumulate<S: Simd>(&self, simd: S, inputs: &[f32; DEPTH], sums: &mut [S::Floats; 4]);
}

/// The weight of the largest magnitude; NaN where there is one, since it must reach the result.
fn largest(weights: impl Iterator<Item = f32>) -> f32 {
    weights.fold(
        0.0,
        |largest: f32, weight| {
            if largest.is_nan() || weight.abs() <= largest.abs() { largest } else { weight }
        },
    )
}

/// Weights as they are.
pub(crate) type F32Block = Expanded;

impl Block for F32Block {
    fn encode(weights: &Expanded) -> Self {
        *weights
    }

    fn value(&self, input: usize, output: usize) -> f32 {
        self[input].0[output]
    }

    #[inline(always)]
    fn expand<S: Simd>(&self, _: S, to: &mut Expanded) {
        *to = *self;
    }

    #[inline(always)]
    fn lines<'a, S: Simd>(_: S, blocks: &'a [Self], _: &'a mut [Expanded]) -> &'a [Line<[f32; LANES]>] {
        blocks.as_flattened()
    }

    #[inline(always)]
    fn accumulate<S: Simd>(&self, simd: S, inputs: &[f32; DEPTH], sums: &mut [S::Floats; 4]) {
        for (lines, inputs) in self.as_chunks::<4>().0.iter().zip(inputs.as_chunks::<4>().0) {
            for index in 0..4 {
                let weights = simd.load(&lines[index].0);
                sums[index] = simd.mul_add(simd.splat(inputs[index]), weights, sums[index]);
            }
        }
    }
}

/// Weights in f16, two inputs a cache line.
#[repr(C, align(64))]
pub(crate) struct F16Block([[u16; LANES]; DEPTH]);

impl Block for F16Block {
    fn encode(weights: &Expanded) -> Self {
        Self(std::array::from_fn(|input| weights[input].0.map(|weight| f16::from_f32(weight).to_bits())))
    }

    fn value(&self, input: usize, output: usize) -> f32 {
        f16::from_bits(self.0[input][output]).to_f32()
    }

    #[inline(always)]
    fn expand<S: Simd>(&self, simd: S, to: &mut Expanded) {
        for (bits, line) in self.0.iter().zip(to) {
            simd.store(simd.load_f16(bits), &mut line.0);
        }
    }

    #[inline(always)]
    fn accumulate<S: Simd>(&self, simd: S, inputs: &[f32; DEPTH], sums: &mut [S::Floats; 4]) {
        for (bits, inputs) in self.0.as_chunks::<4>().0.iter().zip(inputs.as_chunks::<4>().0) {
            for index in 0..4 {
                let weights = simd.load_f16(&bits[index]);
                sums[index] = simd.mul_add(simd.splat(inputs[index]), weights, sums[index]);
            }
        }
    }
}

/// 8-bit weights: lines of four inputs, output by output, and behind them the scales of both groups.
#[repr(C, align(64))]
pub(crate) struct Q8Block {
    quants: [[i8; BYTE_INPUTS * LANES]; DEPTH / BYTE_INPUTS],
    scales: [[u16; LANES]; GROUPS],
}

impl Q8Block {
    const LINES: usize = GROUP / BYTE_INPUTS;
}

impl Block for Q8Block {
    fn encode(weights: &Expanded) -> Self {
        let mut block =
            Self { quants: [[0; BYTE_INPUTS * LANES]; DEPTH / BYTE_INPUTS], scales: [[0; LANES]; GROUPS] };
        for group in 0..GROUPS {
            for output in 0..LANES {
                let weight = |input: usize| weights[group * GROUP + input].0[output];
                let scale = f16::from_f32(largest((0..GROUP).map(weight)).abs() / 127.0);
                let inverse = if scale.to_f32() == 0.0 { 0.0 } else { scale.to_f32().recip() };
                block.scales[group][output] = scale.to_bits();
                for input in 0..GROUP {
                    let line = &mut block.quants[group * Self::LINES + input / BYTE_INPUTS];
                    let quant = (weight(input) * inverse).round_ties_even().clamp(-127.0, 127.0);
                    #[expect(clippy::cast_possible_truncation, reason = "clamped to the range of i8")]
                    let quant = quant as i8;
                    line[output * BYTE_INPUTS + input % BYTE_INPUTS] = quant;
                }
            }
        }
        block
    }

    fn value(&self, input: usize, output: usize) -> f32 {
        let quant = self.quants[input / BYTE_INPUTS][output * BYTE_INPUTS + input % BYTE_INPUTS];
        f32::from(quant) * f16::from_bits(self.scales[input / GROUP][output]).to_f32()
    }

    #[inline(always)]
    fn expand<S: Simd>(&self, simd: S, to: &mut Expanded) {
        let groups = self.quants.as_chunks::<{ Self::LINES }>().0.iter().zip(&self.scales);
        for ((lines, scales), to) in groups.zip(to.as_chunks_mut::<GROUP>().0) {
            let scales = simd.load_f16(scales);
            for (line, to) in lines.iter().zip(to.as_chunks_mut::<BYTE_INPUTS>().0) {
                for (quants, to) in simd.load_bytes(line).into_iter().zip(to) {
                    simd.store(simd.mul(quants, scales), &mut to.0);
                }
            }
        }
    }

    #[inline(always)]
    fn accumulate<S: Simd>(&self, simd: S, inputs: &[f32; DEPTH], sums: &mut [S::Floats; 4]) {
        let groups = self.quants.as_chunks::<{ Self::LINES }>().0.iter().zip(&self.scales);
        for ((lines, scales), inputs) in groups.zip(inputs.as_chunks::<GROUP>().0) {
            let mut unscaled = [simd.splat(0.0); 4];
            for (line, inputs) in lines.iter().zip(inputs.as_chunks::<BYTE_INPUTS>().0) {
                let quants = simd.load_bytes(line);
                for index in 0..BYTE_INPUTS {
                    unscaled[index] = simd.mul_add(simd.splat(inputs[index]), quants[index], unscaled[index]);
                }
            }
            let scales = simd.load_f16(scales);
            for index in 0..4 {
                sums[index] = simd.mul_add(unscaled[index], scales, sums[index]);
            }
        }
    }
}

/// 4-bit weights: lines of eight inputs, output by output four bytes, the low halves holding the first four inputs, the
/// high halves the others, each as `q + 8`; and behind them the scales of both groups.
#[repr(C, align(64))]
pub(crate) struct Q4Block {
    quants: [[u8; BYTE_INPUTS * LANES]; DEPTH / NIBBLE_INPUTS],
    scales: [[u16; LANES]; GROUPS],
}

impl Q4Block {
    const LINES: usize = GROUP / NIBBLE_INPUTS;
    /// Candidate scales: the magnitude that becomes -8, in shares of the largest.
    const CANDIDATES: [f32; 9] = [1.0, 1.05, 1.1, 1.14, 0.95, 0.9, 0.85, 0.8, 0.75];

    /// The scale with the smallest squared error.
    fn scale(weights: &[f32; GROUP]) -> f16 {
        let largest = largest(weights.iter().copied());
        let mut best = (f32::INFINITY, f16::from_f32(largest / -8.0));
        for candidate in Self::CANDIDATES {
            let scale = f16::from_f32(largest * candidate / -8.0);
            let error = weights.iter().map(|weight| {
                let difference = weight - f32::from(Self::quant(*weight, scale)) * scale.to_f32();
                difference * difference
            });
            let error = error.sum();
            if error < best.0 {
                best = (error, scale);
            }
        }
        best.1
    }

    fn quant(weight: f32, scale: f16) -> i8 {
        let inverse = if scale.to_f32() == 0.0 { 0.0 } else { scale.to_f32().recip() };
        #[expect(clippy::cast_possible_truncation, reason = "clamped to the range of the format")]
        let quant = (weight * inverse).round_ties_even().clamp(-8.0, 7.0) as i8;
        quant
    }
}

impl Block for Q4Block {
    fn encode(weights: &Expanded) -> Self {
        let mut block =
            Self { quants: [[0; BYTE_INPUTS * LANES]; DEPTH / NIBBLE_INPUTS], scales: [[0; LANES]; GROUPS] };
        for group in 0..GROUPS {
            for output in 0..LANES {
                let weights = std::array::from_fn(|input| weights[group * GROUP + input].0[output]);
                let scale = Self::scale(&weights);
                block.scales[group][output] = scale.to_bits();
                for (input, weight) in weights.into_iter().enumerate() {
                    let line = &mut block.quants[group * Self::LINES + input / NIBBLE_INPUTS];
                    let nibble = (Self::quant(weight, scale) + 8).cast_unsigned();
                    let shift = if input % NIBBLE_INPUTS < BYTE_INPUTS { 0 } else { 4 };
                    line[output * BYTE_INPUTS + input % BYTE_INPUTS] |= nibble << shift;
                }
            }
        }
        block
    }

    fn value(&self, input: usize, output: usize) -> f32 {
        let byte = self.quants[input / NIBBLE_INPUTS][output * BYTE_INPUTS + input % BYTE_INPUTS];
        let nibble = if input % NIBBLE_INPUTS < BYTE_INPUTS { byte & 15 } else { byte >> 4 };
        (f32::from(nibble) - 8.0) * f16::from_bits(self.scales[input / GROUP][output]).to_f32()
    }

    #[inline(always)]
    fn expand<S: Simd>(&self, simd: S, to: &mut Expanded) {
        let groups = self.quants.as_chunks::<{ Self::LINES }>().0.iter().zip(&self.scales);
        for ((lines, scales), to) in groups.zip(to.as_chunks_mut::<GROUP>().0) {
            let scales = simd.load_f16(scales);
            for (line, to) in lines.iter().zip(to.as_chunks_mut::<NIBBLE_INPUTS>().0) {
                for (quants, to) in simd.load_nibbles(line).into_iter().zip(to) {
                    simd.store(simd.mul(quants, scales), &mut to.0);
                }
            }
        }
    }

    #[inline(always)]
    fn accumulate<S: Simd>(&self, simd: S, inputs: &[f32; DEPTH], sums: &mut [S::Floats; 4]) {
        let groups = self.quants.as_chunks::<{ Self::LINES }>().0.iter().zip(&self.scales);
        for ((lines, scales), inputs) in groups.zip(inputs.as_chunks::<GROUP>().0) {
            let mut unscaled = [simd.splat(0.0); 4];
            for (line, inputs) in lines.iter().zip(inputs.as_chunks::<NIBBLE_INPUTS>().0) {
                let quants = simd.load_nibbles(line);
                for index in 0..NIBBLE_INPUTS {
                    let sum = &mut unscaled[index % 4];
                    *sum = simd.mul_add(simd.splat(inputs[index]), quants[index], *sum);
                }
            }
            let scales = simd.load_f16(scales);
            for index in 0..4 {
                sums[index] = simd.mul_add(unscaled[index], scales, sums[index]);
            }
        }
    }
}
