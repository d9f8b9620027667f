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
    fn encode<S: Simd>(simd: S, weights: &Expanded) -> Self;

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

/// The weight of the largest magnitude in each lane; NaN in lanes that have one, since it must reach the result.
#[inline(always)]
fn largest<S: Simd>(simd: S, group: &[Line<[f32; LANES]>; GROUP]) -> [f32; LANES] {
    let mut highest = simd.splat(0.0);
    let mut lowest = highest;
    // What is not finite makes this NaN; everything else leaves it zero.
    let mut poison = highest;
    for line in group {
        let weights = simd.load(&line.0);
        highest = simd.max(highest, weights);
        lowest = simd.min(lowest, weights);
        poison = simd.mul_add(weights, simd.splat(0.0), poison);
    }
    let (mut high, mut low, mut nan) = ([0.0; LANES], [0.0; LANES], [0.0; LANES]);
    simd.store(highest, &mut high);
    simd.store(lowest, &mut low);
    simd.store(poison, &mut nan);
    std::array::from_fn(|lane| nan[lane] + if high[lane] >= -low[lane] { high[lane] } else { low[lane] })
}

/// Scales in f16, and their reciprocals; the reciprocal of zero is taken as zero.
#[inline(always)]
fn rounded_scales<S: Simd>(simd: S, scales: S::Floats) -> ([u16; LANES], S::Floats, S::Floats) {
    let mut bits = [0; LANES];
    simd.store_f16(scales, &mut bits);
    let rounded = simd.load_f16(&bits);
    let mut inverses = [0.0; LANES];
    simd.store(rounded, &mut inverses);
    let inverses = inverses.map(|scale| if scale == 0.0 { 0.0 } else { scale.recip() });
    (bits, rounded, simd.load(&inverses))
}

/// Weights as they are.
pub(crate) type F32Block = Expanded;

impl Block for F32Block {
    #[inline(always)]
    fn encode<S: Simd>(_: S, weights: &Expanded) -> Self {
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
    #[inline(always)]
    fn encode<S: Simd>(simd: S, weights: &Expanded) -> Self {
        let mut block = Self([[0; LANES]; DEPTH]);
        for (line, bits) in weights.iter().zip(&mut block.0) {
            simd.store_f16(simd.load(&line.0), bits);
        }
        block
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
    #[inline(always)]
    fn encode<S: Simd>(simd: S, weights: &Expanded) -> Self {
        let mut block =
            Self { quants: [[0; BYTE_INPUTS * LANES]; DEPTH / BYTE_INPUTS], scales: [[0; LANES]; GROUPS] };
        let groups = block.quants.as_chunks_mut::<{ Self::LINES }>().0.iter_mut().zip(&mut block.scales);
        for ((lines, scales), weights) in groups.zip(weights.as_chunks::<GROUP>().0) {
            let largest = largest(simd, weights).map(f32::abs);
            let (bits, _, inverses) =
                rounded_scales(simd, simd.mul(simd.load(&largest), simd.splat(1.0 / 127.0)));
            *scales = bits;
            for (line, weights) in lines.iter_mut().zip(weights.as_chunks::<BYTE_INPUTS>().0) {
                let quants = std::array::from_fn(|index| {
                    let quant = simd.round(simd.mul(simd.load(&weights[index].0), inverses));
                    simd.min(simd.max(quant, simd.splat(-127.0)), simd.splat(127.0))
                });
                simd.store_bytes(quants, line);
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

    #[inline(always)]
    fn quants<S: Simd>(simd: S, weights: &[f32; LANES], inverse_scales: S::Floats) -> S::Floats {
        let quant = simd.round(simd.mul(simd.load(weights), inverse_scales));
        simd.min(simd.max(quant, simd.splat(-8.0)), simd.splat(7.0))
    }

    /// For each lane the scale with the smallest squared error, and its reciprocal.
    #[inline(always)]
    fn scales<S: Simd>(simd: S, group: &[Line<[f32; LANES]>; GROUP]) -> ([u16; LANES], S::Floats) {
        let largest = simd.load(&largest(simd, group));
        let mut best = ([f32::INFINITY; LANES], [0; LANES], [0.0; LANES]);
        for (index, candidate) in Self::CANDIDATES.into_iter().enumerate() {
            let (bits, scales, inverses) =
                rounded_scales(simd, simd.mul(largest, simd.splat(candidate / -8.0)));
            let mut sum = simd.splat(0.0);
            for line in group {
                let quants = Self::quants(simd, &line.0, inverses);
                let error = simd.sub(simd.load(&line.0), simd.mul(quants, scales));
                sum = simd.mul_add(error, error, sum);
            }
            let (mut errors, mut inverse_scales) = ([0.0; LANES], [0.0; LANES]);
            simd.store(sum, &mut errors);
            simd.store(inverses, &mut inverse_scales);
            for lane in 0..LANES {
                if index == 0 || errors[lane] < best.0[lane] {
                    (best.0[lane], best.1[lane], best.2[lane]) =
                        (errors[lane], bits[lane], inverse_scales[lane]);
                }
            }
        }
        (best.1, simd.load(&best.2))
    }
}

impl Block for Q4Block {
    #[inline(always)]
    fn encode<S: Simd>(simd: S, weights: &Expanded) -> Self {
        let mut block =
            Self { quants: [[0; BYTE_INPUTS * LANES]; DEPTH / NIBBLE_INPUTS], scales: [[0; LANES]; GROUPS] };
        let groups = block.quants.as_chunks_mut::<{ Self::LINES }>().0.iter_mut().zip(&mut block.scales);
        for ((lines, scales), weights) in groups.zip(weights.as_chunks::<GROUP>().0) {
            let (bits, inverses) = Self::scales(simd, weights);
            *scales = bits;
            for (line, weights) in lines.iter_mut().zip(weights.as_chunks::<NIBBLE_INPUTS>().0) {
                let quants = std::array::from_fn(|index| Self::quants(simd, &weights[index].0, inverses));
                simd.store_nibbles(quants, line);
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
