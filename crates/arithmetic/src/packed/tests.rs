//! Checks every format, instruction set and row count against a product in f64.
//!
//! The f64 product uses the weights as stored in the format.

use std::cell::RefCell;

use super::*;
use crate::byte_group::nearest_group;
use crate::epilogue::{Epilogue, Finish, PanelBias};
use crate::simd::{ByteGroup, GROUP, InstructionSet, Job, Simd, unpack_quad};
use crate::{NumberType, uses};

/// Pairs of output and input widths.
///
/// They cover whole and incomplete panels and blocks, GPT-2's widths, more than two slices, GPT-2's
/// vocabulary, and a single value.
const SHAPES: [(usize, usize); 10] =
    [(16, 64), (32, 128), (1, 1), (17, 65), (7, 5), (50, 24), (48, 768), (33, 1601), (129, 300), (50_257, 8)];
/// Row counts: one, less than a tile, each instruction set's tile, more, and more than a part.
const ROWS: [usize; 8] = [1, 2, 4, 6, 8, 12, 13, 150];

/// All weight formats supported on the CPU.
fn formats() -> impl Iterator<Item = NumberType> + Clone {
    NumberType::all(uses::CPU_WEIGHTS)
}

/// Formats whose products are computed in integers.
fn integer_formats() -> impl Iterator<Item = NumberType> {
    formats().filter(|format| !matches!(format, NumberType::F32 | NumberType::F16))
}

/// Returns pseudorandom values of magnitude about 1.
fn noise(count: usize, seed: u64) -> Vec<f32> {
    crate::random::noise(count, seed, 0.0, 2.0)
}

fn packed(out_features: usize, in_features: usize, format: NumberType) -> (Vec<f32>, PackedMatrix) {
    let weights = noise(out_features * in_features, 1);
    let matrix = pack(&weights, (out_features, in_features), format);
    (weights, matrix)
}

fn pack(weights: &[f32], shape: (usize, usize), format: NumberType) -> PackedMatrix {
    PackedMatrix::from_values(Strided { values: weights, strides: (shape.1, 1), shape }, format).unwrap()
}

/// Rounds activations to a group of 8-bit integers, using the given instruction set.
fn nearest(x: &[f32], instructions: InstructionSet) -> ByteGroup {
    struct Nearest<'a>(&'a [f32]);
    impl Job for Nearest<'_> {
        type Output = ByteGroup;

        #[inline(always)]
        fn run<S: Simd>(self, simd: S) -> ByteGroup {
            nearest_group(simd, self.0)
        }
    }
    instructions.run(Nearest(x))
}

/// Returns the weights as stored in the format.
fn stored_weights(matrix: &PackedMatrix) -> Vec<f32> {
    matrix.rows(&(0..matrix.out_features()).collect::<Vec<_>>())
}

/// Returns the activations that a group represents.
fn values(group: &ByteGroup) -> impl Iterator<Item = f32> {
    let scale = group.scale;
    group.quants.into_iter().flat_map(unpack_quad).map(move |quant| quant as f32 * scale)
}

/// Returns the activations that products with this format use.
fn rounded_activations(x: &[f32], in_features: usize, format: NumberType) -> Vec<f32> {
    if matches!(format, NumberType::F32 | NumberType::F16) {
        return x.to_vec();
    }
    let group = |x| nearest(x, InstructionSet::detected());
    x.chunks(in_features)
        .flat_map(|row| row.chunks(GROUP))
        .flat_map(|x| values(&group(x)).take(x.len()).collect::<Vec<_>>())
        .collect()
}

fn reference(weights: &[f32], x: &[f32], in_features: usize, bias: Option<&[f32]>) -> Vec<f64> {
    let mut y = Vec::new();
    for inputs in x.chunks(in_features) {
        for (output, weights) in weights.chunks(in_features).enumerate() {
            let products = inputs.iter().zip(weights).map(|(a, b)| f64::from(*a) * f64::from(*b));
            y.push(products.sum::<f64>() + bias.map_or(0.0, |bias| f64::from(bias[output])));
        }
    }
    y
}

#[test]
fn products_equal_the_reference() {
    for (out_features, in_features) in SHAPES {
        for format in formats() {
            let (_, matrix) = packed(out_features, in_features, format);
            let weights = stored_weights(&matrix);
            let bias = noise(out_features, 3);
            let panel_bias = PanelBias::new(&bias);
            for rows in ROWS {
                if rows > 13 && out_features > 1000 {
                    continue;
                }
                let x = noise(rows * in_features, 2);
                let expected = reference(
                    &weights,
                    &rounded_activations(&x, in_features, format),
                    in_features,
                    Some(&bias),
                );
                for instructions in InstructionSet::available() {
                    let epilogue = Epilogue { bias: Some(&panel_bias), finish: Finish::Nothing };
                    let y = matrix.product_with(&x, rows, epilogue, instructions);
                    assert_eq!(y.len(), rows * out_features);
                    // A sum is rounded once per addend, and its magnitude is about sqrt(in).
                    let tolerance = 1e-6 * (in_features as f64).sqrt() + 1e-6;
                    for (index, (y, expected)) in y.iter().zip(&expected).enumerate() {
                        let difference = (f64::from(*y) - expected).abs();
                        assert!(
                            difference <= tolerance,
                            "{format:?} ({out_features}, {in_features}), {rows} rows, {instructions:?}, value {index}: \
                             {y} vs. {expected}"
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn gelu_is_applied_after_the_bias() {
    let (_, matrix) = packed(20, 30, NumberType::F32);
    let bias = PanelBias::new(&noise(20, 3));
    for rows in [1, 5] {
        let x = noise(rows * 30, 2);
        for instructions in InstructionSet::available() {
            let epilogue = |finish| Epilogue { bias: Some(&bias), finish };
            let plain = matrix.product_with(&x, rows, epilogue(Finish::Nothing), instructions);
            let activated = matrix.product_with(&x, rows, epilogue(Finish::Gelu), instructions);
            for (activated, plain) in activated.iter().zip(plain) {
                let x = f64::from(plain);
                let u = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3));
                let expected = 0.5 * x * (1.0 + u.tanh());
                assert!((f64::from(*activated) - expected).abs() < 1e-6, "{activated} vs. {expected}");
            }
        }
    }
}

/// Checks that integer products are exact.
///
/// Scales are 1 and sums are below 2^24, so the results are exact on every processor and for all signs. The
/// first output uses the largest magnitudes.
#[test]
fn integer_products_are_exact() {
    let (out_features, in_features, rows) = (50, 1000, 14);
    let integers = |count: usize, seed: u64, first: usize| -> Vec<f32> {
        let mut values: Vec<f32> =
            noise(count, seed).iter().map(|value| (value * 50.0).round().clamp(-127.0, 127.0)).collect();
        for (index, value) in values.iter_mut().enumerate() {
            // Each group contains a value whose magnitude makes the scale 1.
            if index < first || index % in_features % GROUP == 7 {
                *value = if index % 3 == 0 { -127.0 } else { 127.0 };
            }
        }
        values
    };
    let weights = integers(out_features * in_features, 1, in_features);
    let x = integers(rows * in_features, 2, 2 * in_features);
    let matrix = pack(&weights, (out_features, in_features), NumberType::Q8);
    let expected = reference(&weights, &x, in_features, None);
    for instructions in InstructionSet::available() {
        let y = matrix.product_with(&x, rows, Epilogue::default(), instructions);
        for (index, (y, expected)) in y.iter().zip(&expected).enumerate() {
            assert_eq!(f64::from(*y), *expected, "{instructions:?}: value {index}");
        }
    }
}

/// Checks batch invariance: a row gives the same bits alone and in a batch.
///
/// The test covers every format, width and instruction set, including several slices and widths that do not
/// fill whole blocks and panels.
#[test]
fn row_bits_do_not_depend_on_the_batch() {
    const MAX_ROWS: usize = 40;
    for (out_features, in_features) in [(1, 1), (17, 65), (70, 1100), (33, 768), (40, 257)] {
        let x = noise(MAX_ROWS * in_features, 2);
        let residual = noise(MAX_ROWS * out_features, 4);
        let bias = PanelBias::new(&noise(out_features, 3));
        for format in formats() {
            let (_, matrix) = packed(out_features, in_features, format);
            for instructions in InstructionSet::available() {
                let bits = |first: usize, rows: usize| -> Vec<u32> {
                    let x = &x[first * in_features..(first + rows) * in_features];
                    let residual = &residual[first * out_features..(first + rows) * out_features];
                    let epilogue = Epilogue { bias: Some(&bias), finish: Finish::Add(residual) };
                    let y = matrix.product_with(x, rows, epilogue, instructions);
                    y.iter().map(|y| y.to_bits()).collect()
                };
                let alone: Vec<u32> = (0..MAX_ROWS).flat_map(|row| bits(row, 1)).collect();
                for rows in 2..=MAX_ROWS {
                    // Starting at a different row moves each row to a different position in the tiles.
                    for first in [0, MAX_ROWS - rows] {
                        let expected = &alone[first * out_features..(first + rows) * out_features];
                        assert_eq!(
                            bits(first, rows),
                            expected,
                            "{format:?} ({out_features}, {in_features}) {instructions:?}: {rows} rows starting at {first}"
                        );
                    }
                }
            }
        }
    }
}

/// Checks that concurrent products give the same bits as a single one.
#[test]
#[cfg_attr(target_family = "wasm", ignore = "starts threads")]
fn concurrent_products_are_bit_identical() {
    let x = noise(20 * 768, 2);
    for format in [NumberType::F16, NumberType::Q4] {
        let (_, matrix) = packed(300, 768, format);
        let product = |rows: usize| matrix.product(&x[..rows * 768], rows, Epilogue::default());
        let alone = [1, 20].map(product);
        std::thread::scope(|scope| {
            for caller in 0..4 {
                let (product, alone) = (&product, &alone);
                scope.spawn(move || {
                    for round in 0..30 {
                        let many = (caller + round) % 2;
                        assert!(product([1, 20][many]) == alone[many], "caller {caller}, round {round}");
                    }
                });
            }
        });
    }
}

/// Checks the rounding error of activations against the bound in [`PackedMatrix`].
///
/// The groups differ widely in magnitude, and some are too small to have a scale.
#[test]
fn activation_error_is_bounded() {
    for instructions in InstructionSet::available() {
        for magnitude in [1.0, 3e38, 1e-30, 1e-36, 1e-40, 0.0] {
            for length in [GROUP, 5] {
                let x: Vec<f32> =
                    noise(length, 7).iter().map(|value| (value / 2.0).clamp(-1.0, 1.0) * magnitude).collect();
                let largest = x.iter().fold(0.0f32, |a, b| a.max(b.abs()));
                let group = nearest(&x, instructions);
                for (value, rounded) in x.iter().zip(values(&group)) {
                    let bound =
                        if largest < 1e-36 { largest } else { largest * (1.0 / 254.0 + 0.5f32.powi(22)) };
                    assert!(
                        (value - rounded).abs() <= bound,
                        "{instructions:?}: {rounded} vs. {value} of {largest}"
                    );
                }
                assert!(values(&group).skip(length).all(|value| value == 0.0));
            }
        }
    }
}

/// Checks that the residual is added once per row, across several slices and incomplete panels.
#[test]
fn residual_is_added_after_the_bias() {
    let shapes = [(20, 30), (48, 840), (1, 1)];
    let cases = shapes.iter().flat_map(|shape| formats().map(|format| (*shape, format)));
    for ((out_features, in_features), format) in cases {
        let (_, matrix) = packed(out_features, in_features, format);
        let bias = PanelBias::new(&noise(out_features, 3));
        for rows in [1, 5, 150] {
            let x = noise(rows * in_features, 2);
            let residual = noise(rows * out_features, 4);
            for instructions in InstructionSet::available() {
                let epilogue = |finish| Epilogue { bias: Some(&bias), finish };
                let plain = matrix.product_with(&x, rows, epilogue(Finish::Nothing), instructions);
                let added = matrix.product_with(&x, rows, epilogue(Finish::Add(&residual)), instructions);
                for ((added, plain), residual) in added.iter().zip(plain).zip(&residual) {
                    assert_eq!(
                        *added,
                        plain + residual,
                        "{format:?} ({out_features}, {in_features}), {rows} rows"
                    );
                }
            }
        }
    }
}

/// Checks the error bounds in [`NumberType`] on groups that differ widely in magnitude.
#[test]
fn format_error_is_bounded() {
    let (out_features, in_features) = (40, 96);
    let mut weights = noise(out_features * in_features, 5);
    for (index, weight) in weights.iter_mut().enumerate() {
        *weight *= [1.0, 1e-3, 100.0][index / GROUP % 3];
    }
    for format in formats() {
        let matrix = pack(&weights, (out_features, in_features), format);
        for (group, stored) in weights.chunks(GROUP).zip(stored_weights(&matrix).chunks(GROUP)) {
            let largest = group.iter().fold(0.0f32, |a, b| a.max(b.abs()));
            let errors = group.iter().zip(stored).map(|(weight, stored)| (weight - stored).abs());
            let within = |bound: f32| errors.clone().all(|error| error <= bound * largest);
            let squares: f32 = errors.clone().map(|error| error * error).sum();
            match format {
                NumberType::F32 => assert!(within(0.0)),
                NumberType::F16 => assert!(within(0.5f32.powi(11))),
                NumberType::Q8 => assert!(within(1.0 / 254.0 + 0.5f32.powi(11))),
                NumberType::Q6 => assert!(within(1.0 / 62.0 + 0.5f32.powi(11))),
                NumberType::Q5 => {
                    let bound = largest * (1.0 / 16.0 + 0.5f32.powi(10));
                    assert!(squares <= GROUP as f32 * bound * bound);
                }
                NumberType::Q4 => {
                    let bound = largest * (17.0 / 127.0 + 0.5f32.powi(10));
                    assert!(squares <= GROUP as f32 * bound * bound);
                }
                _ => panic!("{format} has no bound"),
            }
        }
    }
}

/// Checks that weights representable in the 4-bit format are stored exactly.
#[test]
fn table_values_are_stored_exactly() {
    let (out_features, in_features) = (20, 96);
    let weights: Vec<f32> = (0..out_features * in_features)
        .map(|index| {
            f32::from(q4::TABLE[index % in_features % GROUP % 16]) * (index / GROUP % 7) as f32 / 16.0
        })
        .collect();
    assert_eq!(stored_weights(&pack(&weights, (out_features, in_features), NumberType::Q4)), weights);
}

/// Checks that every 6-bit integer is stored exactly.
///
/// Covers every position in a group except the one that holds the largest magnitude.
#[test]
fn six_bit_integers_are_stored_exactly() {
    let (out_features, in_features) = (63, 96);
    for largest in [0, GROUP - 1] {
        let quant = |index: usize| match index % in_features % GROUP {
            place if place == largest => 31.0,
            place => ((index / in_features + place * 5) % 63) as f32 - 31.0,
        };
        let weights: Vec<f32> = (0..out_features * in_features).map(|index| quant(index) / 8.0).collect();
        assert_eq!(stored_weights(&pack(&weights, (out_features, in_features), NumberType::Q6)), weights);
    }
}

/// Checks that an f16 number's multiples from -16 to 15 are stored exactly.
///
/// The numbers vary in sign and magnitude, down to the smallest denormal f16, and the
/// largest multiple in a group varies.
#[test]
fn five_bit_multiples_are_stored_exactly() {
    let (out_features, in_features) = (32, 96);
    let scales = [0x2e66_u16, 0xb1a3, 0x0001, 0x83ff, 0x0400, 0x0000, 0x3c01].map(half::f16::from_bits);
    for (lowest, highest) in
        [(-16, 15), (-16, 3), (-2, 15), (0, 0), (-15, 14), (-1, 1), (-5, 7), (0, 1), (-11, 0)]
    {
        let quant = |index: usize| match index % GROUP {
            5 => lowest,
            17 => highest,
            place => (lowest..=highest).cycle().nth((index / GROUP * 7 + place * 5) % 32).unwrap_or(0),
        };
        let weight = |index: usize| scales[index / GROUP % scales.len()].to_f32() * quant(index) as f32;
        let weights: Vec<f32> = (0..out_features * in_features).map(weight).collect();
        let found = stored_weights(&pack(&weights, (out_features, in_features), NumberType::Q5));
        assert_eq!(found, weights, "from {lowest} to {highest}");
    }
}

#[test]
fn packing_reads_both_orders_and_every_dtype() {
    let (out_features, in_features) = (21, 70);
    let weights = noise(out_features * in_features, 1);
    let transposed: Vec<f32> =
        (0..in_features).flat_map(|input| weights.iter().skip(input).step_by(in_features).copied()).collect();
    let view =
        Strided { values: &transposed, strides: (1, out_features), shape: (out_features, in_features) };
    assert_eq!(stored_weights(&PackedMatrix::from_values(view, NumberType::F32).unwrap()), weights);
    let short = Strided { values: &transposed[1..], ..view };
    assert!(PackedMatrix::from_values(short, NumberType::F32).is_err());
    // Matrices that repeat one row or one column.
    let repeated = Strided { strides: (0, 1), ..view };
    let rows = stored_weights(&PackedMatrix::from_values(repeated, NumberType::F32).unwrap());
    assert!(rows.chunks(in_features).all(|row| row == &transposed[..in_features]));
    let repeated = Strided { strides: (1, 0), ..view };
    let rows = stored_weights(&PackedMatrix::from_values(repeated, NumberType::F32).unwrap());
    assert!(rows.chunks(in_features).zip(&transposed).all(|(row, value)| row == vec![*value; in_features]));
    for (order, values) in [(StoredOrder::OutputMajor, &weights), (StoredOrder::InputMajor, &transposed)] {
        let f32_bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        let f16_bytes: Vec<u8> =
            values.iter().flat_map(|value| half::f16::from_f32(*value).to_le_bytes()).collect();
        let bf16_bytes: Vec<u8> =
            values.iter().flat_map(|value| half::bf16::from_f32(*value).to_le_bytes()).collect();
        for (dtype, bytes, tolerance) in [
            (NumberType::F32, f32_bytes, 0.0),
            (NumberType::F16, f16_bytes, 0.5f32.powi(11)),
            (NumberType::BF16, bf16_bytes, 0.5f32.powi(8)),
        ] {
            // Shifts the values by one byte, so that none of them is aligned.
            let shifted = [&[0], bytes.as_slice()].concat();
            let view = MatrixBytes { bytes: &shifted[1..], dtype, order, out_features, in_features };
            let matrix = PackedMatrix::from_bytes(view, NumberType::F32, &|_| ()).unwrap();
            for (stored, weight) in stored_weights(&matrix).iter().zip(&weights) {
                assert!((stored - weight).abs() <= tolerance, "{dtype:?} {order:?}: {stored} vs. {weight}");
            }
            let short = MatrixBytes { bytes: &bytes[1..], ..view };
            assert!(PackedMatrix::from_bytes(short, NumberType::F32, &|_| ()).is_err());
        }
    }
}

#[test]
fn unsupported_types_are_rejected() {
    let weights = Strided { values: &[1.0; 4], strides: (2, 1), shape: (2, 2) };
    let order = StoredOrder::OutputMajor;
    for dtype in [NumberType::BF16, NumberType::Q8_0, NumberType::F64] {
        let error = PackedMatrix::from_values(weights, dtype).unwrap_err();
        assert_eq!(error, PackError::Unsupported { dtype });
    }
    for dtype in [NumberType::Q8, NumberType::F64] {
        let stored = MatrixBytes { bytes: &[0; 64], dtype, order, out_features: 2, in_features: 2 };
        let error = PackedMatrix::from_bytes(stored, NumberType::F32, &|_| ()).unwrap_err();
        assert_eq!(error.to_string(), format!("weights of type {dtype} cannot be packed"));
    }
}

/// Checks that non-finite weights and activations affect the same outputs as in the reference.
#[test]
fn non_finite_values_reach_only_their_outputs() {
    for special in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let (mut weights, _) = packed(20, 70, NumberType::F32);
        weights[3 * 70 + 66] = special;
        for format in formats() {
            let matrix = pack(&weights, (20, 70), format);
            for (rows, instructions) in [1, 3].into_iter().flat_map(|rows| {
                InstructionSet::available().into_iter().map(move |instructions| (rows, instructions))
            }) {
                let y = matrix.product_with(&noise(rows * 70, 2), rows, Epilogue::default(), instructions);
                for (index, y) in y.iter().enumerate() {
                    assert_eq!(
                        y.is_finite(),
                        index % 20 != 3,
                        "{format:?} {special} {instructions:?}: value {index} is {y}"
                    );
                }
            }
        }
        let mut x = noise(3 * 70, 2);
        x[70 + 5] = special;
        for format in formats() {
            let (_, matrix) = packed(20, 70, format);
            for instructions in InstructionSet::available() {
                let y = matrix.product_with(&x, 3, Epilogue::default(), instructions);
                let alone = matrix.product_with(&x[70..140], 1, Epilogue::default(), instructions);
                assert!(alone.iter().all(|y| !y.is_finite()), "{format:?} {special} {instructions:?}");
                for (index, y) in y.iter().enumerate() {
                    assert_eq!(
                        y.is_finite(),
                        index / 20 != 1,
                        "{format:?} {special} {instructions:?}: value {index} is {y}"
                    );
                }
            }
        }
    }
}

#[test]
fn bits_per_weight() {
    for (format, bits) in [
        (NumberType::F32, 32.0),
        (NumberType::F16, 16.0),
        (NumberType::Q8, 8.5),
        (NumberType::Q6, 6.5),
        (NumberType::Q5, 5.5),
        (NumberType::Q4, 4.5),
    ] {
        let (_, matrix) = packed(48, 768, format);
        assert_eq!(matrix.bytes() as f64 * 8.0 / (48.0 * 768.0), bits);
        assert_eq!(format.packed_bytes(48, 768), matrix.bytes() as u64);
    }
}

/// Checks that a matrix's bytes are released step by step, in order and without gaps.
///
/// A mapped file therefore never needs to be in memory as a whole.
#[test]
fn large_matrix_is_packed_in_steps() {
    let (out_features, in_features) = (2003, 768);
    let weights = noise(out_features * in_features, 5);
    let bytes: Vec<u8> = weights.iter().flat_map(|value| value.to_le_bytes()).collect();
    for (order, least_steps) in [(StoredOrder::OutputMajor, 2), (StoredOrder::InputMajor, 1)] {
        let (dtype, steps) = (NumberType::F32, RefCell::new(Vec::new()));
        let view = MatrixBytes { bytes: &bytes, dtype, order, out_features, in_features };
        let read = |bytes| steps.borrow_mut().push(bytes);
        let matrix = PackedMatrix::from_bytes(view, NumberType::F32, &read).unwrap();
        let steps = steps.into_inner();
        assert!(steps.len() >= least_steps, "{steps:?}");
        assert_eq!((steps[0].start, steps[steps.len() - 1].end), (0, bytes.len()));
        assert!(steps.windows(2).all(|pair| pair[0].end == pair[1].start), "{steps:?}");
        if order == StoredOrder::OutputMajor {
            assert_eq!(stored_weights(&matrix), weights);
        }
    }
}

/// Checks the products of rows, alone and together, against the reference.
///
/// The reference uses the stored weights and the rounded activations. `is_right` receives the product, the
/// expected value and the sum of the magnitudes behind it.
fn check_products(
    (out_features, in_features): (usize, usize),
    weights: &[f32],
    x: &[f32],
    format: NumberType,
    is_right: impl Fn(f32, f64, f64) -> bool,
) {
    let matrix = pack(weights, (out_features, in_features), format);
    let (stored, rounded) = (stored_weights(&matrix), rounded_activations(x, in_features, format));
    let magnitudes = |values: &[f32]| values.iter().map(|value| value.abs()).collect::<Vec<_>>();
    let expected = reference(&stored, &rounded, in_features, None);
    let magnitudes = reference(&magnitudes(&stored), &magnitudes(&rounded), in_features, None);
    for instructions in InstructionSet::available() {
        let alone = x.chunks(in_features);
        let alone = alone.flat_map(|x| matrix.product_with(x, 1, Epilogue::default(), instructions));
        let together = matrix.product_with(x, x.len() / in_features, Epilogue::default(), instructions);
        let all_expected = expected.iter().zip(&magnitudes).cycle();
        for (index, (y, (expected, magnitude))) in
            together.into_iter().chain(alone).zip(all_expected).enumerate()
        {
            assert!(
                is_right(y, *expected, *magnitude),
                "{format:?} {instructions:?}: value {index} is {y:e} vs. {expected:e} of {magnitude:e}"
            );
        }
    }
}

/// Whether `y` is within the rounding errors of `count` products and sums.
///
/// Each operation is rounded relative to the summed magnitudes or the smallest f32.
fn is_close(y: f32, expected: f64, magnitude: f64, count: usize) -> bool {
    let unit = f64::from(f32::EPSILON) * magnitude + f64::from(f32::from_bits(1));
    (f64::from(y) - expected).abs() <= count as f64 * unit
}

/// Checks products with special values against a plain sum over the stored weights.
///
/// Weights and activations include denormal, huge and infinite values, NaN and minus zero.
#[test]
fn special_values_equal_the_reference() {
    const SPECIAL: [f32; 10] = [
        f32::NAN,
        f32::INFINITY,
        f32::NEG_INFINITY,
        f32::MAX,
        -3e38,
        1e-40,
        -1e-44,
        -0.0,
        6e-8, // the smallest f16
        7e4,  // beyond the largest f16
    ];
    let (out_features, in_features, rows) = (21, 70, 13);
    let (mut weights, mut x) = (noise(out_features * in_features, 1), noise(rows * in_features, 2));
    for (index, special) in SPECIAL.into_iter().enumerate() {
        // Some of these positions are past the last whole vector or block.
        weights[index * in_features + (index * 13 + 63) % in_features] = special;
        x[index * in_features + (index * 7 + 10) % in_features] = special;
    }
    // Makes whole rows denormal in f32 or, for weights, smaller than the smallest normal f16.
    weights[15 * in_features..16 * in_features].iter_mut().for_each(|weight| *weight *= 1e-40);
    weights[20 * in_features..].iter_mut().for_each(|weight| *weight *= 1e-6);
    x[12 * in_features..].iter_mut().for_each(|x| *x *= 1e-40);
    for format in [NumberType::F32, NumberType::F16] {
        check_products((out_features, in_features), &weights, &x, format, |y, expected, magnitude| {
            #[expect(clippy::cast_possible_truncation, reason = "beyond f32 the result is infinite")]
            let rounded = expected as f32;
            y == rounded
                || (y.is_nan() && rounded.is_nan())
                || (rounded.is_finite() && is_close(y, expected, magnitude, in_features))
        });
    }
    // In integer formats, a non-finite value turns its whole group into NaN. Another test covers that.
    for value in weights.iter_mut().chain(&mut x).filter(|value| !value.is_finite()) {
        *value = 2e-36;
    }
    // Activations whose scale overflows f32 when multiplied by the scale of the huge weights.
    x[11 * in_features..12 * in_features].iter_mut().for_each(|x| *x *= 1e37);
    for format in integer_formats() {
        check_products((out_features, in_features), &weights, &x, format, |y, expected, magnitude| {
            let is_beyond = !magnitude.is_finite() || magnitude > f64::from(f32::MAX);
            is_close(y, expected, magnitude, in_features) || (is_beyond && !y.is_finite())
        });
    }
}
