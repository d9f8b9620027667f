//! Layout of token files and width of their tokens.

use candle_gpt2_engine::UnknownName;
use serde::{Deserialize, Serialize};

/// Length of llm.c's header in 32-bit numbers: magic number, version, token count, and zeros.
pub(crate) const HEADER_NUMBERS: usize = 256;

/// Layout of token files; an option of a [`TokenizeJob`](crate::TokenizeJob).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum ShardFormat {
    /// nanoGPT's layout: tokens without a header.
    #[serde(rename = "nanogpt")]
    NanoGpt,
    /// llm.c's layout: a header of 1024 bytes, followed by the tokens.
    #[serde(rename = "llm.c")]
    LlmC,
}

/// Width of written tokens.
///
/// ```
/// use candle_gpt2_jobs::TokenWidth;
///
/// assert_eq!(TokenWidth::of_vocabulary(50_257).bytes(), 2);
/// assert_eq!(TokenWidth::of_vocabulary(100_000).bytes(), 4);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TokenWidth {
    /// 16 bits.
    U16,
    /// 32 bits.
    U32,
}

impl std::str::FromStr for ShardFormat {
    type Err = UnknownName;

    fn from_str(name: &str) -> Result<Self, UnknownName> {
        match name {
            "nanogpt" => Ok(Self::NanoGpt),
            "llm.c" => Ok(Self::LlmC),
            _ => Err(UnknownName { expected: "nanogpt or llm.c".into() }),
        }
    }
}

impl std::str::FromStr for TokenWidth {
    type Err = UnknownName;

    fn from_str(name: &str) -> Result<Self, UnknownName> {
        match name {
            "u16" => Ok(Self::U16),
            "u32" => Ok(Self::U32),
            _ => Err(UnknownName { expected: "u16 or u32".into() }),
        }
    }
}

impl TokenWidth {
    /// Returns the narrowest width that fits all tokens of a vocabulary.
    pub fn of_vocabulary(vocab_size: usize) -> Self {
        if vocab_size <= 1 << u16::BITS { Self::U16 } else { Self::U32 }
    }

    /// Returns the number of bytes per token.
    pub fn bytes(self) -> usize {
        match self {
            Self::U16 => 2,
            Self::U32 => 4,
        }
    }

    /// Appends tokens that are known to fit.
    pub(crate) fn write(self, tokens: &[u32], bytes: &mut Vec<u8>) {
        match self {
            #[expect(clippy::cast_possible_truncation, reason = "ids of a vocabulary of this width fit")]
            Self::U16 => bytes.extend(tokens.iter().flat_map(|token| (*token as u16).to_le_bytes())),
            Self::U32 => bytes.extend(tokens.iter().flat_map(|token| token.to_le_bytes())),
        }
    }

    /// Reads tokens; an incomplete token at the end is ignored.
    pub(crate) fn read(self, bytes: &[u8]) -> impl Iterator<Item = u32> + '_ {
        bytes.chunks_exact(self.bytes()).map(|token| match *token {
            [a, b] => u32::from(u16::from_le_bytes([a, b])),
            [a, b, c, d] => u32::from_le_bytes([a, b, c, d]),
            _ => 0,
        })
    }

    /// Returns llm.c's magic number and version.
    pub(crate) fn mark(self) -> (i32, i32) {
        match self {
            // Values for GPT-2 and Llama 3 in llm.c's `dev/data/data_common.py`.
            Self::U16 => (20_240_520, 1),
            Self::U32 => (20_240_801, 7),
        }
    }
}

impl ShardFormat {
    /// Returns the number of bytes before the tokens.
    pub(crate) fn header_bytes(self) -> usize {
        match self {
            Self::NanoGpt => 0,
            Self::LlmC => 4 * HEADER_NUMBERS,
        }
    }

    /// Returns the header of a file with `tokens` tokens.
    pub(crate) fn header(self, width: TokenWidth, tokens: u64) -> Vec<u8> {
        let (magic, version) = width.mark();
        let tokens = i32::try_from(tokens).unwrap_or(i32::MAX);
        let mut bytes: Vec<u8> = [magic, version, tokens].into_iter().flat_map(i32::to_le_bytes).collect();
        bytes.resize(4 * HEADER_NUMBERS, 0);
        bytes.truncate(self.header_bytes());
        bytes
    }
}
