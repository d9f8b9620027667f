//! The types in which checkpoints are written.

use candle_core::quantized::GgmlDType;

use crate::named::named;

macro_rules! written {
    ($($(#[$doc:meta])* $variant:ident $name:literal, ggml $ggml:ident $number:literal, file $file_type:literal;)+) => {
        named! {
            /// The element type that a checkpoint is written in.
            ///
            /// ```
            /// use candle_gpt2_weights::WrittenDType;
            ///
            /// assert_eq!("q8_0".parse(), Ok(WrittenDType::Q8_0));
            /// assert_eq!(WrittenDType::F16.name(), "f16");
            /// ```
            WrittenDType, UnknownWrittenDType { $($(#[$doc])* $variant $name,)+ }
        }

        impl WrittenDType {
            /// ggml's type.
            pub(crate) fn ggml(self) -> GgmlDType {
                match self {
                    $(Self::$variant => GgmlDType::$ggml,)+
                }
            }

            /// ggml's number of the type.
            pub(crate) fn ggml_number(self) -> u32 {
                match self {
                    $(Self::$variant => $number,)+
                }
            }

            /// llama.cpp's number for files of mostly this type.
            pub(crate) fn file_type(self) -> u32 {
                match self {
                    $(Self::$variant => $file_type,)+
                }
            }
        }
    };
}

written! {
    /// 32-bit floating point.
    F32 "f32", ggml F32 0, file 0;
    /// 16-bit floating point.
    F16 "f16", ggml F16 1, file 1;
    /// 16-bit floating point with the exponent of F32.
    BF16 "bf16", ggml BF16 30, file 32;
    /// Blocks of 32 8-bit integers with a scale: GGUF only.
    Q8_0 "q8_0", ggml Q8_0 8, file 7;
    /// Blocks of 32 4-bit integers with a scale: GGUF only.
    Q4_0 "q4_0", ggml Q4_0 2, file 2;
    /// Blocks of 32 5-bit integers with a scale: GGUF only.
    Q5_0 "q5_0", ggml Q5_0 6, file 8;
    /// Blocks of 256 4-bit integers with scales and offsets for every 32: GGUF only.
    Q4K "q4_k", ggml Q4K 12, file 14;
    /// Blocks of 256 5-bit integers with scales and offsets for every 32: GGUF only.
    Q5K "q5_k", ggml Q5K 13, file 16;
    /// Blocks of 256 6-bit integers with scales for every 16: GGUF only.
    Q6K "q6_k", ggml Q6K 14, file 18;
}

impl WrittenDType {
    /// Whether it is blocks of small integers, which only GGUF files hold.
    pub fn is_blocks(self) -> bool {
        self.ggml().block_size() > 1
    }
}
