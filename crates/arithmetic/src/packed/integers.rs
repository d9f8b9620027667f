//! Code shared by the integer formats: activation groups, integer sums and scales.
//!
//! In both operands, 32 inputs share a scale: a group of weights is `w ≈ s q`, and a group of activations is
//! `x ≈ a p`. The sum of a group's products `q p` is exact in 32 bits. It is converted to f32 once and
//! multiplied by `s` and `a`. The results are added group by group within slices of 512 inputs. That order is
//! the same for one row and for many, and integer results are the same on every processor.
//!
//! An offset makes the weights unsigned, because the instructions need one unsigned operand. The sum
//! `Σ (q + 128) p` then starts from `-128 Σ p`. Weights of fewer than 8 bits range from -32 to 31, so that
//! sums of four products fit into 16 bits.

use std::slice::Chunks;

use half::f16;

use super::block::{Block, DEPTH, Expanded};
use crate::byte_group::{add_scaled, nearest_group};
use crate::fetch::PrefetchPlan;
use crate::simd::Sums;
#[cfg(all(target_arch = "wasm32", target_feature = "simd128"))]
use crate::simd::WordGroup;
use crate::simd::{BYTE_INPUTS, ByteGroup, ByteLines, GROUP, LANES, Line, Simd, TileJob};

/// Groups per block.
const GROUPS: usize = DEPTH / GROUP;
/// Blocks per slice.
///
/// Stored as bytes, 512 inputs of two panels take 17 KiB, and tiles read each panel in order.
const SLICE_BLOCKS: usize = 8;
/// Byte lines of an all-zero group.
const NO_BYTES: ByteLines = [[0; BYTE_INPUTS * LANES]; GROUP / BYTE_INPUTS];

/// Quantized weights of 32 inputs by 16 outputs.
pub(crate) trait Quants: Copy + Send + Sync + 'static {
    /// Type that the integers are expanded to.
    type Expanded: Quants<Expanded = Self::Expanded> + AsMut<ByteLines>;
    /// All-zero integers.
    const ZERO: Self;
    /// Offset that makes the integers unsigned bytes.
    const OFFSET: u8;
    /// Whether the integers are stored as bytes.
    const ARE_BYTES: bool = false;

    /// Rounds to the nearest integers and returns them with the scales in f16.
    fn encode<S: Simd>(simd: S, weights: &[Line<[f32; LANES]>; GROUP]) -> (Self, [u16; LANES]);

    /// Returns the integer for one input and output.
    fn value(&self, input: usize, output: usize) -> f32;

    /// Expands the integers to bytes, unless they are stored as bytes.
    fn expand<S: Simd>(&self, simd: S, to: &mut ByteLines);

    /// Returns the stored bytes, or the result of [`Quants::expand`].
    #[inline(always)]
    fn bytes<'a>(&'a self, expanded: &'a ByteLines) -> &'a ByteLines {
        expanded
    }
}

/// Integers stored as bytes with an offset: 8-bit weights, or the expansion of any other format.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(crate) struct Bytes<const OFFSET: u8>(ByteLines);

impl<const OFFSET: u8> AsMut<ByteLines> for Bytes<OFFSET> {
    #[inline(always)]
    fn as_mut(&mut self) -> &mut ByteLines {
        &mut self.0
    }
}

impl<const OFFSET: u8> Quants for Bytes<OFFSET> {
    type Expanded = Self;
    const ZERO: Self = Self(NO_BYTES);
    const OFFSET: u8 = OFFSET;
    const ARE_BYTES: bool = true;

    #[inline(always)]
    fn encode<S: Simd>(simd: S, weights: &[Line<[f32; LANES]>; GROUP]) -> (Self, [u16; LANES]) {
        let (lines, scales) = encoded_bytes(simd, weights, OFFSET);
        (Self(lines), scales)
    }

    fn value(&self, input: usize, output: usize) -> f32 {
        let byte = self.0[input / BYTE_INPUTS][output * BYTE_INPUTS + input % BYTE_INPUTS];
        f32::from(byte) - f32::from(OFFSET)
    }

    #[inline(always)]
    fn expand<S: Simd>(&self, _: S, _: &mut ByteLines) {}

    #[inline(always)]
    fn bytes<'a>(&'a self, _: &'a ByteLines) -> &'a ByteLines {
        &self.0
    }
}

/// Block of integers, followed by the scales of its groups.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(crate) struct Quantized<Q> {
    quants: [Q; GROUPS],
    scales: [[u16; LANES]; GROUPS],
}

impl<Q: Quants> Block for Quantized<Q> {
    type Activation = ByteGroup;
    #[cfg(not(all(target_arch = "wasm32", target_feature = "simd128")))]
    type ForManyRows = Quantized<Q::Expanded>;
    #[cfg(all(target_arch = "wasm32", target_feature = "simd128"))]
    type ForManyRows = WordBlock;
    const MULTIPLIES_BYTES: bool = true;
    const ACTIVATIONS: usize = GROUPS;
    const SLICE_BLOCKS: usize = SLICE_BLOCKS;
    const ZERO: Self = Self { quants: [Q::ZERO; GROUPS], scales: [[0; LANES]; GROUPS] };

    #[inline(always)]
    fn encode<S: Simd>(simd: S, weights: &Expanded) -> Self {
        let (groups, _) = weights.as_chunks::<GROUP>();
        let mut block = Self::ZERO;
        for group in 0..GROUPS {
            (block.quants[group], block.scales[group]) = Q::encode(simd, &groups[group]);
        }
        block
    }

    fn value(&self, input: usize, output: usize) -> f32 {
        let group = input / GROUP;
        self.quants[group].value(input % GROUP, output) * f16::from_bits(self.scales[group][output]).to_f32()
    }

    #[cfg(all(target_arch = "wasm32", target_feature = "simd128"))]
    #[inline(always)]
    fn expand<S: Simd>(simd: S, blocks: &[Self], to: &mut [WordBlock]) {
        for (block, to) in blocks.iter().zip(to) {
            for group in 0..GROUPS {
                let mut scratch = NO_BYTES;
                block.quants[group].expand(simd, &mut scratch);
                let bytes = block.quants[group].bytes(&scratch);
                simd.widen(bytes, Q::OFFSET, &mut to[group].lines);
                simd.store(simd.load_f16(&block.scales[group]), &mut to[group].scales);
            }
        }
    }

    #[cfg(not(all(target_arch = "wasm32", target_feature = "simd128")))]
    #[inline(always)]
    fn expand<S: Simd>(simd: S, blocks: &[Self], to: &mut [Quantized<Q::Expanded>]) {
        let to = &mut to[..blocks.len()];
        for index in 0..blocks.len() {
            to[index].scales = blocks[index].scales;
            for group in 0..GROUPS {
                blocks[index].quants[group].expand(simd, to[index].quants[group].as_mut());
            }
        }
    }

    #[inline(always)]
    fn arrange<S: Simd>(simd: S, rows: Chunks<'_, f32>, tile: &mut [ByteGroup], height: usize) {
        arrange_groups(simd, rows, tile, height);
    }

    #[inline(always)]
    fn is_expanded_for_many_rows<S: Simd>() -> bool {
        !Q::ARE_BYTES || cfg!(all(target_arch = "wasm32", target_feature = "simd128"))
    }

    #[inline(always)]
    fn tile_height<S: Simd>(rows: usize) -> usize {
        S::integer_height(rows)
    }

    #[inline(always)]
    fn in_tile<S: Simd, J: TileJob<S>>(simd: S, height: usize, job: J) -> J::Output {
        simd.in_integer_tile(height, job)
    }

    /// Computes sums group by group and multiplies each group's sum by its scales.
    #[inline(always)]
    fn sums<S: Simd, const ROWS: usize, const PANELS: usize>(
        simd: S,
        activations: &[ByteGroup],
        mut panels: [&[Self]; PANELS],
        ahead: PrefetchPlan,
    ) -> Sums<S, ROWS, PANELS> {
        let blocks = panels[0].len();
        for panel in &mut panels {
            *panel = &panel[..blocks];
        }
        let mut sums = [[simd.splat(0.0); PANELS]; ROWS];
        let rows_of_groups = &activations.as_chunks::<ROWS>().0[..blocks * GROUPS];
        for block in 0..blocks {
            for panel in 0..PANELS {
                ahead.fetch(&panels[panel][block..=block], block * size_of::<Self>());
            }
            for group in 0..GROUPS {
                let rows = &rows_of_groups[block * GROUPS + group];
                let mut scratch = [NO_BYTES; PANELS];
                for (panel, scratch) in scratch.iter_mut().enumerate() {
                    panels[panel][block].quants[group].expand(simd, scratch);
                }
                let mut bytes = [&NO_BYTES; PANELS];
                for panel in 0..PANELS {
                    bytes[panel] = panels[panel][block].quants[group].bytes(&scratch[panel]);
                }
                let products = simd.byte_sums(bytes, rows, Q::OFFSET);
                let mut scales = [simd.splat(0.0); PANELS];
                for panel in 0..PANELS {
                    scales[panel] = simd.load_f16(&panels[panel][block].scales[group]);
                }
                sums = add_scaled(simd, sums, products, scales, rows);
            }
        }
        sums
    }
}

/// Rounds rows of inputs to groups of 8-bit integers, interleaved for a tile.
#[inline(always)]
fn arrange_groups<S: Simd>(simd: S, rows: Chunks<'_, f32>, tile: &mut [ByteGroup], height: usize) {
    for (row, inputs) in rows.enumerate() {
        for (inputs, to) in inputs.chunks(GROUP).zip(tile[row..].iter_mut().step_by(height)) {
            *to = nearest_group(simd, inputs);
        }
    }
}

/// Rounds weights to integers below `offset` in magnitude, adds `offset`, and returns the scales.
#[inline(always)]
pub(super) fn encoded_bytes<S: Simd>(
    simd: S,
    weights: &[Line<[f32; LANES]>; GROUP],
    offset: u8,
) -> (ByteLines, [u16; LANES]) {
    let largest_index = f32::from(offset - 1);
    let mut largest = largest(simd, weights);
    for magnitude in &mut largest {
        *magnitude = magnitude.abs();
    }
    let scales = simd.mul(simd.load(&largest), simd.splat(1.0 / largest_index));
    let (scales, _, inverses) = rounded_scales(simd, scales);
    let mut lines = NO_BYTES;
    for (line, weights) in lines.iter_mut().zip(weights.as_chunks::<BYTE_INPUTS>().0) {
        let mut quants = [simd.splat(0.0); BYTE_INPUTS];
        for (quant, weights) in quants.iter_mut().zip(weights) {
            let nearest = simd.round(simd.mul(simd.load(&weights.0), inverses));
            let nearest = simd.min(simd.max(nearest, simd.splat(-largest_index)), simd.splat(largest_index));
            *quant = simd.add(nearest, simd.splat(f32::from(offset)));
        }
        simd.store_bytes(quants, line);
    }
    (lines, scales)
}

/// Format that picks its scale from candidates by the smallest squared error.
pub(super) trait ScaleSearch {
    /// Candidate scales, as multiples of the largest-magnitude weight.
    const SCALES: &'static [f32];

    /// Returns the integer nearest to the quotient of a weight and a scale.
    fn nearest<S: Simd>(simd: S, quotient: S::Vector) -> S::Vector;
}

/// Returns the best candidate scale for each lane, and its reciprocal.
///
/// The first of several equally good candidates is used.
#[inline(always)]
pub(super) fn best_scales<Q: ScaleSearch, S: Simd>(
    simd: S,
    group: &[Line<[f32; LANES]>; GROUP],
) -> ([u16; LANES], S::Vector) {
    let largest = simd.load(&largest(simd, group));
    let mut best = ([f32::INFINITY; LANES], [0; LANES], [0.0; LANES]);
    for (index, share) in Q::SCALES.iter().enumerate() {
        let (bits, scales, inverses) = rounded_scales(simd, simd.mul(largest, simd.splat(*share)));
        let mut sum = simd.splat(0.0);
        for line in group {
            let weights = simd.load(&line.0);
            let value = Q::nearest(simd, simd.mul(weights, inverses));
            let error = simd.sub(weights, simd.mul(value, scales));
            // Each operation is rounded, so that every instruction set chooses the same scales.
            sum = simd.add(sum, simd.mul(error, error));
        }
        let (mut errors, mut inverse_scales) = ([0.0; LANES], [0.0; LANES]);
        simd.store(sum, &mut errors);
        simd.store(inverses, &mut inverse_scales);
        for lane in 0..LANES {
            if index == 0 || errors[lane] < best.0[lane] {
                (best.0[lane], best.1[lane], best.2[lane]) = (errors[lane], bits[lane], inverse_scales[lane]);
            }
        }
    }
    (best.1, simd.load(&best.2))
}

/// Returns the largest-magnitude weight in each lane.
///
/// Lanes with a NaN return NaN, because NaN must propagate to the result.
#[inline(always)]
fn largest<S: Simd>(simd: S, group: &[Line<[f32; LANES]>; GROUP]) -> [f32; LANES] {
    let mut highest = simd.splat(0.0);
    let mut lowest = highest;
    // Non-finite values turn this into NaN. Finite values leave it at zero.
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
    for lane in 0..LANES {
        high[lane] = nan[lane] + if high[lane] >= -low[lane] { high[lane] } else { low[lane] };
    }
    high
}

/// Rounds scales to f16 and computes their reciprocals; the reciprocal of zero becomes zero.
#[inline(always)]
fn rounded_scales<S: Simd>(simd: S, scales: S::Vector) -> ([u16; LANES], S::Vector, S::Vector) {
    let mut bits = [0; LANES];
    simd.store_f16(scales, &mut bits);
    let rounded = simd.load_f16(&bits);
    let mut inverses = [0.0; LANES];
    simd.store(rounded, &mut inverses);
    for scale in &mut inverses {
        *scale = if *scale == 0.0 { 0.0 } else { scale.recip() };
    }
    (bits, rounded, simd.load(&inverses))
}

/// Block of 16-bit integers that all formats expand to for many rows, without byte products.
#[cfg(all(target_arch = "wasm32", target_feature = "simd128"))]
pub(crate) type WordBlock = [WordGroup; GROUPS];

#[cfg(all(target_arch = "wasm32", target_feature = "simd128"))]
impl Block for WordBlock {
    type Activation = ByteGroup;
    type ForManyRows = Self;
    const MULTIPLIES_BYTES: bool = true;
    const ACTIVATIONS: usize = GROUPS;
    const SLICE_BLOCKS: usize = SLICE_BLOCKS;
    const ZERO: Self = [WordGroup { lines: [[0; 2 * LANES]; GROUP / 2], scales: [0.0; LANES] }; GROUPS];

    #[inline(always)]
    fn encode<S: Simd>(simd: S, weights: &Expanded) -> Self {
        let mut block = [Self::ZERO];
        Quantized::<Bytes<128>>::expand(simd, &[Quantized::encode(simd, weights)], &mut block);
        block[0]
    }

    fn value(&self, input: usize, output: usize) -> f32 {
        let group = &self[input / GROUP];
        let (quad, index) = (input % GROUP / BYTE_INPUTS, input % BYTE_INPUTS);
        f32::from(group.lines[2 * quad + index % 2][2 * output + index / 2]) * group.scales[output]
    }

    #[inline(always)]
    fn arrange<S: Simd>(simd: S, rows: Chunks<'_, f32>, tile: &mut [ByteGroup], height: usize) {
        arrange_groups(simd, rows, tile, height);
    }

    #[inline(always)]
    fn tile_height<S: Simd>(rows: usize) -> usize {
        S::integer_height(rows)
    }

    #[inline(always)]
    fn in_tile<S: Simd, J: TileJob<S>>(simd: S, height: usize, job: J) -> J::Output {
        simd.in_integer_tile(height, job)
    }

    #[inline(always)]
    fn sums<S: Simd, const ROWS: usize, const PANELS: usize>(
        simd: S,
        activations: &[ByteGroup],
        panels: [&[Self]; PANELS],
        _: PrefetchPlan,
    ) -> Sums<S, ROWS, PANELS> {
        let mut groups: [&[WordGroup]; PANELS] = [&[]; PANELS];
        for panel in 0..PANELS {
            groups[panel] = panels[panel].as_flattened();
        }
        simd.word_sums(groups, activations.as_chunks().0)
    }
}
