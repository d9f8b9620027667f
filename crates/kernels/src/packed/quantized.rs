//! Blocks of small integers, and the groups of activations that are multiplied with them in integer arithmetic.
//!
//! 32 inputs share a scale, on either side: a group of weights is `w ≈ s q`, a group of activations `x ≈ a p`. The sum of
//! the products `q p` of a group is exact in 32 bits; it is converted to f32 once and multiplied by `s` and `a`, and these are
//! added group by group, those of a slice of 512 inputs first. That order is the same for one row and for many, and
//! integers are the same on every processor. Weights have 128 added, which makes them unsigned as the instructions want one
//! operand; `Σ (q + 128) p` then starts from `-128 Σ p`.

use std::slice::Chunks;

use half::f16;

use super::block::{Block, Expanded};
use super::product::Tile;
use super::{DEPTH, GROUP};
use crate::fetch::{AHEAD, fetch};
use crate::simd::{ByteLines, LANES, Line, Simd};

/// Groups of a block.
const GROUPS: usize = DEPTH / GROUP;
/// Inputs in a line of bytes.
const BYTE_INPUTS: usize = 4;
/// Inputs in a line of nibbles.
const NIBBLE_INPUTS: usize = 8;
/// Inputs in a line of quarters of bytes.
const QUARTER_INPUTS: usize = 16;
/// What is added to the integers of weights.
const OFFSET: f32 = 128.0;
/// The largest magnitude of an 8-bit weight or activation.
const LARGEST_BYTE: f32 = 127.0;
/// Distance of neighbouring 6-bit weights, in those of 8 bits.
const SIX_STEP: f32 = 4.0;
/// Activations that are all smaller than this count as zero, since the reciprocal of their scale would be infinite.
const SMALLEST_ACTIVATION: f32 = 1e-36;

/// 32 activations `x ≈ a p`.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
pub(crate) struct QuantizedGroup {
    /// The integers `p`, from -127 to 127: four in each element, the first in the lowest byte.
    pub(crate) quants: [i32; GROUP / BYTE_INPUTS],
    /// What a sum of products with unsigned weights starts from, `-128 Σ p`.
    pub(crate) start: i32,
    /// The scale `a`; NaN where an activation is not finite.
    scale: f32,
}

impl QuantizedGroup {
    /// The nearest group; `x` has up to 32 values.
    #[inline(always)]
    fn of<S: Simd>(simd: S, x: &[f32]) -> Self {
        let mut padded = [0.0; GROUP];
        let x = x.first_chunk::<GROUP>().unwrap_or_else(|| {
            padded[..x.len()].copy_from_slice(x);
            &padded
        });
        let [low, high] = [0, 1].map(|half| simd.load(&x.as_chunks::<LANES>().0[half]));
        let largest = simd.largest_magnitude(low, high);
        let inverse = if largest < SMALLEST_ACTIVATION { 0.0 } else { LARGEST_BYTE / largest };
        // What is not finite must not become a number: infinity times zero is NaN, as is NaN itself.
        let scale = largest * (1.0 / LARGEST_BYTE) + largest * 0.0;
        let [low, high] = [low, high].map(|half| simd.round(simd.mul(half, simd.splat(inverse))));
        let mut bytes = [0; GROUP];
        let (halves, _) = bytes.as_chunks_mut::<LANES>();
        simd.store_signed_bytes(low, &mut halves[0]);
        simd.store_signed_bytes(high, &mut halves[1]);
        let (quants, _) = bytes.as_chunks::<BYTE_INPUTS>();
        let sum: i32 = bytes.iter().map(|quant| i32::from(*quant)).sum();
        Self {
            quants: std::array::from_fn(|index| i32::from_le_bytes(quants[index].map(i8::cast_unsigned))),
            start: -128 * sum,
            scale,
        }
    }

    /// The nearest group with these instructions.
    #[cfg(test)]
    pub(super) fn nearest(x: &[f32], instructions: crate::simd::InstructionSet) -> Self {
        struct Nearest<'a>(&'a [f32]);
        impl crate::simd::Job for Nearest<'_> {
            type Output = QuantizedGroup;

            #[inline(always)]
            fn run<S: Simd>(self, simd: S) -> QuantizedGroup {
                QuantizedGroup::of(simd, self.0)
            }
        }
        instructions.run(Nearest(x))
    }

    /// The activations that it stands for.
    #[cfg(test)]
    pub(super) fn values(&self) -> impl Iterator<Item = f32> {
        let bytes = self.quants.iter().flat_map(|quants| quants.to_le_bytes());
        bytes.map(|quant| f32::from(quant.cast_signed()) * self.scale)
    }
}

const NO_BYTES: ByteLines = [[0; BYTE_INPUTS * LANES]; GROUP / BYTE_INPUTS];

/// The integers of 32 inputs of 16 outputs.
pub(crate) trait Quants: Sized + Send + Sync {
    /// The nearest integers, and the scales in f16.
    fn encode<S: Simd>(simd: S, weights: &[Line<[f32; LANES]>; GROUP]) -> (Self, [u16; LANES]);

    /// The integer of one input and output.
    fn value(&self, input: usize, output: usize) -> f32;

    /// Expands the integers to bytes, where they are not.
    fn expand<S: Simd>(&self, simd: S, to: &mut ByteLines);

    /// The bytes: its own, or what [`Quants::expand`] made.
    #[inline(always)]
    fn bytes<'a>(&'a self, expanded: &'a ByteLines) -> &'a ByteLines {
        expanded
    }

    /// Room for as many blocks, where they have to be expanded.
    fn scratch(blocks: usize) -> Vec<Quantized<Bytes>> {
        let quants = [Bytes(NO_BYTES); GROUPS];
        vec![Quantized { quants, scales: [[0; LANES]; GROUPS] }; blocks]
    }

    /// The blocks with all integers as bytes, in `scratch` where they have to be expanded.
    #[inline(always)]
    fn blocks<'a, S: Simd>(
        simd: S,
        blocks: &'a [Quantized<Self>],
        scratch: &'a mut [Quantized<Bytes>],
    ) -> &'a [Quantized<Bytes>] {
        for (block, to) in blocks.iter().zip(scratch.iter_mut()) {
            to.scales = block.scales;
            for (quants, to) in block.quants.iter().zip(&mut to.quants) {
                quants.expand(simd, &mut to.0);
            }
        }
        &scratch[..blocks.len()]
    }
}

/// 8-bit integers with 128 added.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(crate) struct Bytes(ByteLines);

/// 6-bit integers, a quarter of those of [`Bytes`]: the low four bits in halves of bytes, in lines of eight inputs as
/// [`Nibbles`] has its indices, the high two in quarters of bytes, in lines of sixteen inputs.
#[repr(C, align(64))]
pub(crate) struct Sixes {
    low: [[u8; BYTE_INPUTS * LANES]; GROUP / NIBBLE_INPUTS],
    high: [[u8; BYTE_INPUTS * LANES]; GROUP / QUARTER_INPUTS],
}

/// Indices into a table of 16 integers: lines of eight inputs, output by output four bytes, the low halves holding the first
/// four inputs, the high halves the others.
#[repr(C, align(64))]
pub(crate) struct Nibbles([[u8; BYTE_INPUTS * LANES]; GROUP / NIBBLE_INPUTS]);

/// A block of integers, and after them the scales of its groups.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(crate) struct Quantized<Q> {
    quants: [Q; GROUPS],
    scales: [[u16; LANES]; GROUPS],
}

impl<Q: Quants> Block for Quantized<Q> {
    type Activation = QuantizedGroup;
    type Weights = Quantized<Bytes>;
    const ACTIVATIONS: usize = GROUPS;
    /// In bytes, 512 inputs of two panels take 17 KiB, and tiles read each of them in order.
    const SLICE_BLOCKS: usize = 8;

    #[inline(always)]
    fn encode<S: Simd>(simd: S, weights: &Expanded) -> Self {
        let (groups, _) = weights.as_chunks::<GROUP>();
        // No closure for both: what is not inlined is not compiled for its instruction set.
        let (first, first_scales) = Q::encode(simd, &groups[0]);
        let (second, second_scales) = Q::encode(simd, &groups[1]);
        Self { quants: [first, second], scales: [first_scales, second_scales] }
    }

    fn value(&self, input: usize, output: usize) -> f32 {
        let group = input / GROUP;
        self.quants[group].value(input % GROUP, output) * f16::from_bits(self.scales[group][output]).to_f32()
    }

    #[inline(always)]
    fn arrange<S: Simd>(simd: S, rows: Chunks<'_, f32>, tile: &mut [QuantizedGroup], tile_rows: usize) {
        for (row, inputs) in rows.enumerate() {
            for (inputs, to) in inputs.chunks(GROUP).zip(tile[row..].iter_mut().step_by(tile_rows)) {
                *to = QuantizedGroup::of(simd, inputs);
            }
        }
    }

    #[inline(always)]
    fn row_sums<S: Simd>(simd: S, panel: &[Self], row: &[QuantizedGroup]) -> S::Floats {
        let slices = panel.chunks(Self::SLICE_BLOCKS).zip(row.chunks(Self::SLICE_BLOCKS * GROUPS));
        let mut sum = simd.splat(0.0);
        for (index, (panel, row)) in slices.enumerate() {
            let [[slice_sum]] = sums::<S, Q, 1, 1>(simd, [panel], row.as_chunks().0);
            sum = if index == 0 { slice_sum } else { simd.add(sum, slice_sum) };
        }
        sum
    }

    fn scratch(blocks: usize) -> Vec<Quantized<Bytes>> {
        Q::scratch(blocks)
    }

    #[inline(always)]
    fn weights<'a, S: Simd>(
        simd: S,
        blocks: &'a [Self],
        scratch: &'a mut [Quantized<Bytes>],
    ) -> &'a [Quantized<Bytes>] {
        Q::blocks(simd, blocks, scratch)
    }

    #[inline(always)]
    fn tile_rows<S: Simd>() -> usize {
        S::INTEGER_TILE_ROWS
    }

    #[inline(always)]
    fn tile<S: Simd>(simd: S, tile: IntegerTile<'_, '_>) {
        simd.integer_tile(tile);
    }
}

/// A tile in integers.
pub(crate) type IntegerTile<'a, 'b> = Tile<'a, 'b, QuantizedGroup, Quantized<Bytes>>;

/// Computes a tile of `ROWS` rows and up to `PANELS` panels in registers.
#[inline(always)]
pub(crate) fn compute_integer_tile<S: Simd, const ROWS: usize, const PANELS: usize>(
    simd: S,
    tile: IntegerTile<'_, '_>,
) {
    let Tile { activations, panels, output } = tile;
    let (rows, _) = activations.as_chunks::<ROWS>();
    match panels {
        [panel] => output.write(simd, sums::<S, Bytes, ROWS, 1>(simd, [panel], rows)),
        _ => {
            let panels = std::array::from_fn(|index| panels[index]);
            output.write(simd, sums::<S, Bytes, ROWS, PANELS>(simd, panels, rows));
        }
    }
}

/// For each row and panel the products, scaled and added group by group.
#[inline(always)]
fn sums<S: Simd, Q: Quants, const ROWS: usize, const PANELS: usize>(
    simd: S,
    panels: [&[Quantized<Q>]; PANELS],
    rows: &[[QuantizedGroup; ROWS]],
) -> [[S::Floats; PANELS]; ROWS] {
    let blocks = rows.len() / GROUPS;
    let panels: [_; PANELS] = std::array::from_fn(|panel| &panels[panel][..blocks]);
    let mut sums = [[simd.splat(0.0); PANELS]; ROWS];
    for (block, rows) in rows.as_chunks::<GROUPS>().0.iter().enumerate() {
        // One row is a walk through memory, the panels of many rows stay in the caches.
        if ROWS == 1 {
            fetch(std::slice::from_ref(&panels[0][block]), AHEAD);
        }
        for (group, rows) in rows.iter().enumerate() {
            let mut scratch = [NO_BYTES; PANELS];
            for (scratch, panel) in scratch.iter_mut().zip(panels) {
                panel[block].quants[group].expand(simd, scratch);
            }
            let bytes: [_; PANELS] =
                std::array::from_fn(|panel| panels[panel][block].quants[group].bytes(&scratch[panel]));
            let products = simd.byte_sums(bytes, rows);
            let scales: [_; PANELS] =
                std::array::from_fn(|panel| simd.load_f16(&panels[panel][block].scales[group]));
            for row in 0..ROWS {
                let scale = simd.splat(rows[row].scale);
                for panel in 0..PANELS {
                    // The product of both scales alone could be infinite where the sum of the products is zero.
                    let product = simd.mul(simd.to_floats(products[row][panel]), scales[panel]);
                    sums[row][panel] = simd.mul_add(product, scale, sums[row][panel]);
                }
            }
        }
    }
    sums
}

impl Quants for Bytes {
    #[inline(always)]
    fn encode<S: Simd>(simd: S, weights: &[Line<[f32; LANES]>; GROUP]) -> (Self, [u16; LANES]) {
        let (lines, scales) = encoded_bytes(simd, weights, 1.0);
        (Self(lines), scales)
    }

    fn value(&self, input: usize, output: usize) -> f32 {
        let byte = self.0[input / BYTE_INPUTS][output * BYTE_INPUTS + input % BYTE_INPUTS];
        f32::from(byte) - OFFSET
    }

    #[inline(always)]
    fn expand<S: Simd>(&self, _: S, _: &mut ByteLines) {}

    #[inline(always)]
    fn bytes<'a>(&'a self, _: &'a ByteLines) -> &'a ByteLines {
        &self.0
    }

    fn scratch(_: usize) -> Vec<Quantized<Bytes>> {
        Vec::new()
    }

    #[inline(always)]
    fn blocks<'a, S: Simd>(
        _: S,
        blocks: &'a [Quantized<Self>],
        _: &'a mut [Quantized<Self>],
    ) -> &'a [Quantized<Self>] {
        blocks
    }
}

impl Quants for Sixes {
    #[inline(always)]
    fn encode<S: Simd>(simd: S, weights: &[Line<[f32; LANES]>; GROUP]) -> (Self, [u16; LANES]) {
        let (lines, scales) = encoded_bytes(simd, weights, SIX_STEP);
        let mut low = [[0; BYTE_INPUTS * LANES]; GROUP / NIBBLE_INPUTS];
        for (low, lines) in low.iter_mut().zip(lines.as_chunks::<2>().0) {
            for (low, (first, second)) in low.iter_mut().zip(lines[0].iter().zip(&lines[1])) {
                *low = (first >> 2 & 0x0f) | (second << 2 & 0xf0);
            }
        }
        let mut high = [[0; BYTE_INPUTS * LANES]; GROUP / QUARTER_INPUTS];
        for (high, lines) in high.iter_mut().zip(lines.as_chunks::<4>().0) {
            for (index, high) in high.iter_mut().enumerate() {
                *high = (0..4).fold(0, |high, line| high | (lines[line][index] >> 6) << (2 * line));
            }
        }
        (Self { low, high }, scales)
    }

    fn value(&self, input: usize, output: usize) -> f32 {
        let column = output * BYTE_INPUTS + input % BYTE_INPUTS;
        let line = input / BYTE_INPUTS;
        let low = self.low[line / 2][column] >> (4 * (line % 2)) & 0x0f;
        let high = self.high[line / 4][column] >> (2 * (line % 4)) & 0x03;
        f32::from(low << 2 | high << 6) - OFFSET
    }

    #[inline(always)]
    fn expand<S: Simd>(&self, _: S, to: &mut ByteLines) {
        for (line, to) in to.iter_mut().enumerate() {
            let (low, high) = (&self.low[line / 2], &self.high[line / 4]);
            for (index, to) in to.iter_mut().enumerate() {
                // A line is in one place of its bytes, so the shifts are the same for all of them.
                let low = if line % 2 == 0 { low[index] << 2 & 0x3c } else { low[index] >> 2 & 0x3c };
                *to = low | (high[index] << (6 - 2 * (line % 4)) & 0xc0);
            }
        }
    }
}

/// The integers of 4-bit weights, in ascending order; the first has the largest magnitude. They have the smallest squared
/// error for normally distributed weights in groups of 32, each with the best of the candidate scales (Lloyd's iteration).
pub(super) const TABLE: [i8; 16] = [-127, -99, -78, -61, -46, -33, -21, -9, 3, 15, 26, 39, 53, 68, 87, 110];

impl Quants for Nibbles {
    #[inline(always)]
    fn encode<S: Simd>(simd: S, weights: &[Line<[f32; LANES]>; GROUP]) -> (Self, [u16; LANES]) {
        let (scales, inverses) = Self::scales(simd, weights);
        let mut lines = [[0; BYTE_INPUTS * LANES]; GROUP / NIBBLE_INPUTS];
        for (line, weights) in lines.iter_mut().zip(weights.as_chunks::<NIBBLE_INPUTS>().0) {
            let mut indices = [simd.splat(0.0); NIBBLE_INPUTS];
            for (index, weights) in indices.iter_mut().zip(weights) {
                let quotient = simd.mul(simd.load(&weights.0), inverses);
                *index = Self::add_below(simd, quotient, simd.splat(0.0), &[1.0; 15]);
            }
            simd.store_nibbles(indices, line);
        }
        (Self(lines), scales)
    }

    fn value(&self, input: usize, output: usize) -> f32 {
        let byte = self.0[input / NIBBLE_INPUTS][output * BYTE_INPUTS + input % BYTE_INPUTS];
        let index = if input % NIBBLE_INPUTS < BYTE_INPUTS { byte & 15 } else { byte >> 4 };
        f32::from(TABLE[usize::from(index)])
    }

    #[inline(always)]
    fn expand<S: Simd>(&self, simd: S, to: &mut ByteLines) {
        for (line, to) in self.0.iter().zip(to.as_chunks_mut::<2>().0) {
            simd.look_up_nibbles(line, &Self::UNSIGNED, to);
        }
    }
}

impl Nibbles {
    /// Candidate scales: the magnitude that the first entry of the table stands for, in shares of the largest.
    const CANDIDATES: [f32; 9] = [1.0, 1.05, 1.1, 1.14, 0.95, 0.9, 0.85, 0.8, 0.75];

    /// The table with 128 added.
    const UNSIGNED: [u8; 16] = {
        let mut unsigned = [0; 16];
        let mut index = 0;
        while index < unsigned.len() {
            unsigned[index] = TABLE[index].cast_unsigned() ^ 0x80;
            index += 1;
        }
        unsigned
    };
    /// Half way between neighbouring entries: above it a quotient is nearer to the second.
    const MIDDLES: [f32; 15] = Self::of_neighbours(0.5, 0.5);
    /// From each entry to the next.
    const STEPS: [f32; 15] = Self::of_neighbours(-1.0, 1.0);

    /// The sums of neighbouring entries, each times its factor.
    const fn of_neighbours(first: f32, second: f32) -> [f32; 15] {
        let mut sums = [0.0; 15];
        let mut index = 0;
        while index < sums.len() {
            sums[index] = first * TABLE[index] as f32 + second * TABLE[index + 1] as f32;
            index += 1;
        }
        sums
    }

    /// Adds the steps up to the entry that is nearest to the quotient.
    #[inline(always)]
    fn add_below<S: Simd>(
        simd: S,
        quotient: S::Floats,
        mut start: S::Floats,
        steps: &[f32; 15],
    ) -> S::Floats {
        for (middle, step) in Self::MIDDLES.iter().zip(steps) {
            start = simd.add_where_greater(start, quotient, simd.splat(*middle), simd.splat(*step));
        }
        start
    }

    /// For each lane the scale with the smallest squared error, and its reciprocal.
    #[inline(always)]
    fn scales<S: Simd>(simd: S, group: &[Line<[f32; LANES]>; GROUP]) -> ([u16; LANES], S::Floats) {
        let largest = simd.load(&largest(simd, group));
        let mut best = ([f32::INFINITY; LANES], [0; LANES], [0.0; LANES]);
        for (index, candidate) in Self::CANDIDATES.into_iter().enumerate() {
            let (bits, scales, inverses) =
                rounded_scales(simd, simd.mul(largest, simd.splat(candidate / f32::from(TABLE[0]))));
            let mut sum = simd.splat(0.0);
            for line in group {
                let quotient = simd.mul(simd.load(&line.0), inverses);
                let value = Self::add_below(simd, quotient, simd.splat(f32::from(TABLE[0])), &Self::STEPS);
                let error = simd.sub(simd.load(&line.0), simd.mul(value, scales));
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

/// The nearest multiples of `step` from -127 to 127, with 128 added, and the scales.
#[inline(always)]
fn encoded_bytes<S: Simd>(
    simd: S,
    weights: &[Line<[f32; LANES]>; GROUP],
    step: f32,
) -> (ByteLines, [u16; LANES]) {
    let largest_index = (LARGEST_BYTE / step).trunc();
    let largest = largest(simd, weights).map(f32::abs);
    let scales = simd.mul(simd.load(&largest), simd.splat(1.0 / (step * largest_index)));
    let (scales, _, inverses) = rounded_scales(simd, scales);
    let inverses = simd.mul(inverses, simd.splat(1.0 / step));
    let mut lines = NO_BYTES;
    for (line, weights) in lines.iter_mut().zip(weights.as_chunks::<BYTE_INPUTS>().0) {
        let quants = std::array::from_fn(|index| {
            let quant = simd.round(simd.mul(simd.load(&weights[index].0), inverses));
            let quant = simd.min(simd.max(quant, simd.splat(-largest_index)), simd.splat(largest_index));
            simd.mul_add(quant, simd.splat(step), simd.splat(OFFSET))
        });
        simd.store_bytes(quants, line);
    }
    (lines, scales)
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
