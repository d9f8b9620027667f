//! The table of formats.

/// Gives the macro `$with` a row for each format: variant, name, blocks, the format in which a model holds the tables beside such
/// matrices, its embedding and its head, and the type of GGUF's small integers that it holds without another rounding.
#[doc(hidden)]
#[macro_export]
macro_rules! weight_formats {
    ($with:ident) => {
        $with! {
            /// 32-bit floating point: the weights of the checkpoint.
            F32 "f32" super::f32::F32Block, tables F32;
            /// 16-bit floating point: each weight to the nearest of 11 significant bits.
            F16 "f16" super::f16::F16Block, tables F16;
            /// 8-bit integers with an f16 scale for every 32 inputs of an output, 8.5 bits a weight: `w ≈ s q` with
            /// `s = max|w| / 127` and `q = round(w / s)`, so that `|w - s q| ≤ max|w| (1/254 + 2^-11)` for scales that are
            /// normal f16 numbers.
            Q8 "q8" Quantized<super::integers::Bytes<128>>, tables Q8;
            /// 6-bit integers with an f16 scale for every 32 inputs of an output, 6.5 bits a weight: `w ≈ 4 s q` with
            /// `s = max|w| / 124` and `q = round(w / 4 s)`, so that `|w - 4 s q| ≤ max|w| (1/62 + 2^-11)` for scales that are normal
            /// f16 numbers.
            Q6 "q6" Quantized<super::q6::Sixes>, tables Q6;
            /// 5-bit integers with an f16 scale for every 32 inputs of an output, 5.5 bits a weight: `w ≈ s q` with the nearest `q`
            /// from -16 to 15, and of the scales that take the weight of the largest magnitude to one of them the one with the
            /// smallest squared error. The first candidate takes it to -16, so the squared error is at most that of
            /// `|w - s q| ≤ max|w| (1/16 + 2^-10)` for scales that are normal f16 numbers. A group of multiples `s q`, such as a
            /// block of GGUF's Q5_0, is held as it is. A model has its embedding and head in q6, if they are not stored in Q5_0.
            Q5 "q5" Quantized<super::q5::Fives>, tables Q6;
            /// 4-bit indices into a table of 16 integers, with an f16 scale for every 32 inputs of an output, 4.5 bits a weight:
            /// `w ≈ s t[q]` with the nearest entry, and of a row of candidate scales the one with the smallest squared error. The
            /// entries lie closer together around zero, as weights do. The first candidate takes the weight of the largest magnitude
            /// to the first entry, -32; no two neighbours are more than 7 apart and the last is 28, so the squared error is at most
            /// that of `|w - s t[q]| ≤ max|w| (4/32 + 2^-10)` for scales that are normal f16 numbers. A model has its embedding and head in q6.
            Q4 "q4" Quantized<super::q4::Nibbles>, tables Q6;
        }
    };
}
