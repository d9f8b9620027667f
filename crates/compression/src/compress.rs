//! Bytes to a compressed file, a group of streams at a time.

use std::io::{Read, Write};

use candle_gpt2_engine::{LoadedModel, Progress, Reporter, Unit};
use serde::Serialize;

use crate::CompressionError;
use crate::bytes::ByteTokens;
use crate::checks::{check_wanted, weights_on_cpu};
use crate::coder::{Encoder, Interval};
use crate::container::{Coded, End, GROUP_BYTES, Group, Header, streams, write};
use crate::frequencies::Frequencies;
use crate::identity::{canary, digest};
use crate::windows::{Windows, for_each_next, start};

/// A model that compresses.
///
/// ```
/// use candle_gpt2_compression::{Compressed, Compressor};
/// use candle_gpt2_engine::{ModelOptions, Silent};
///
/// let model = ModelOptions::default().open(&Silent)?.load(&Silent)?;
/// let compressor = Compressor::new(&model, "built-in", None)?;
/// let mut text = b"But soft, what light through yonder window breaks?\n".repeat(20);
/// text.extend(b"\xff\0 any bytes");
/// let mut file = Vec::new();
/// let summary = compressor.compress(&mut &text[..], None, &mut file, &Silent)?;
/// assert_eq!((summary.bytes, summary.compressed_bytes), (text.len() as u64, file.len() as u64));
/// assert!(file.len() < text.len() / 2);
///
/// let mut restored = Vec::new();
/// Compressed::open(&file[..])?.decompress(&model, &mut restored, &Silent)?;
/// assert_eq!(restored, text);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Compressor {
    loaded: LoadedModel,
    tokens: ByteTokens,
    header: Header,
}

/// The result of a compression.
///
/// Returned by [`Compressor::compress`].
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Summary {
    /// Bytes that were compressed.
    pub bytes: u64,
    /// Bytes of the compressed file.
    pub compressed_bytes: u64,
    /// Bits of the compressed file for each byte; absent of nothing.
    pub bits_per_byte: Option<f64>,
    /// Tokens of the bytes.
    pub tokens: u64,
    /// Bits that the tokens cost by the model: what the coder and the format add to is not in it.
    pub model_bits: f64,
}

/// The cost of a token in bits. [`Compressor::token_sizes`] lists them.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TokenSize {
    /// The token.
    pub id: u32,
    /// The bytes that it stands for, perhaps a part of a character.
    pub bytes: Vec<u8>,
    /// Bits that it costs: `-log2` of its probability.
    pub bits: f64,
}

impl Compressor {
    /// Compresses with this model, in windows of `context` tokens, by default of the model's whole context. Error messages call the
    /// model `name`.
    ///
    /// # Errors
    /// When the model is not on the CPU or has no tokens for bytes, or `context` is not from 2 to its positions.
    pub fn new(loaded: &LoadedModel, name: &str, context: Option<usize>) -> Result<Self, CompressionError> {
        let dtype = weights_on_cpu(loaded)?;
        let windows = Windows::new(context, loaded.config())?;
        let tokens = ByteTokens::new(loaded.vocabulary())?;
        let header = Header {
            dtype,
            kv_dtype: loaded.model().kv_dtype(),
            name: Header::name_of(name),
            length: None,
            windows,
            digest: digest(loaded.model(), &tokens)?,
            canary: canary(loaded.model(), windows)?,
        };
        Ok(Self { loaded: loaded.clone(), tokens, header })
    }

    /// Compresses everything that `input` has; `length` is how many bytes that is, if it is known. A group of a mebibyte is held
    /// at a time.
    ///
    /// # Errors
    /// When the input cannot be read or the output cannot be written, the model's logits are not numbers, or `reporter` interrupts it.
    pub fn compress(
        &self,
        input: &mut dyn Read,
        length: Option<u64>,
        output: &mut dyn Write,
        reporter: &dyn Reporter,
    ) -> Result<Summary, CompressionError> {
        let mut summary = Summary::default();
        let mut checksum = crc32fast::Hasher::new();
        summary.compressed_bytes += write(output, &Header { length, ..self.header.clone() }.to_bytes())?;
        let mut group = Vec::with_capacity(GROUP_BYTES);
        let mut bar = None;
        loop {
            group.clear();
            input.take(GROUP_BYTES as u64).read_to_end(&mut group).map_err(CompressionError::Read)?;
            if group.is_empty() {
                break;
            }
            checksum.update(&group);
            summary.bytes += group.len() as u64;
            let total = length.unwrap_or(group.len() as u64);
            if length.is_none() || bar.is_none() {
                bar = Some(reporter.start("compressing", total, Unit::Bytes));
            }
            let coded = streams(group.len())
                .map(|range| self.code(&group[range], &mut summary, bar.as_deref(), reporter));
            let streams = coded.collect::<Result<_, _>>()?;
            let coded = Group { length: group.len(), streams };
            summary.compressed_bytes += write(output, &coded.to_bytes())?;
        }
        let end = End { length: summary.bytes, checksum: checksum.finalize() };
        summary.compressed_bytes += write(output, &end.to_bytes())?;
        output.flush().map_err(CompressionError::Write)?;
        let bits = || 8.0 * summary.compressed_bytes as f64 / summary.bytes as f64;
        summary.bits_per_byte = (summary.bytes > 0).then(bits);
        Ok(summary)
    }

    /// The tokens of some bytes as one stream, with what each costs.
    ///
    /// # Errors
    /// As [`Compressor::compress`].
    ///
    /// ```
    /// use candle_gpt2_compression::Compressor;
    /// use candle_gpt2_engine::{ModelOptions, Silent};
    ///
    /// let model = ModelOptions::default().open(&Silent)?.load(&Silent)?;
    /// let sizes = Compressor::new(&model, "built-in", None)?.token_sizes(b"One day, Mia", &Silent)?;
    /// assert_eq!(sizes.iter().flat_map(|size| size.bytes.clone()).collect::<Vec<u8>>(), b"One day, Mia");
    /// assert!(sizes.iter().all(|size| size.bits > 0.0));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn token_sizes(
        &self,
        bytes: &[u8],
        reporter: &dyn Reporter,
    ) -> Result<Vec<TokenSize>, CompressionError> {
        let bar = reporter.start("measuring", bytes.len() as u64, Unit::Bytes);
        let ids = self.tokens.encode(bytes);
        let intervals = self.intervals(&ids, Some(&*bar), reporter)?;
        let size = |(id, interval): (u32, Interval)| TokenSize {
            id,
            bytes: self.tokens.bytes_of(id).to_vec(),
            bits: interval.bits(),
        };
        Ok(ids.into_iter().zip(intervals).map(size).collect())
    }

    /// One stream.
    fn code(
        &self,
        bytes: &[u8],
        summary: &mut Summary,
        bar: Option<&dyn Progress>,
        reporter: &dyn Reporter,
    ) -> Result<Coded, CompressionError> {
        let ids = self.tokens.encode(bytes);
        summary.tokens += ids.len() as u64;
        let mut encoder = Encoder::new();
        for interval in self.intervals(&ids, bar, reporter)? {
            summary.model_bits += interval.bits();
            encoder.push(interval);
        }
        let (coded, checksum) = (encoder.finish(), crc32fast::hash(bytes));
        Ok(match coded.len() < bytes.len() {
            true => Coded { bytes: coded, is_stored: false, checksum },
            false => Coded { bytes: bytes.to_vec(), is_stored: true, checksum },
        })
    }

    /// The shares of tokens.
    fn intervals(
        &self,
        ids: &[u32],
        bar: Option<&dyn Progress>,
        reporter: &dyn Reporter,
    ) -> Result<Vec<Interval>, CompressionError> {
        let model = self.loaded.model();
        let with_start: Vec<u32> =
            std::iter::once(start(model.config())).chain(ids.iter().copied()).collect();
        let mut told = 0;
        let progress = |tokens: usize| {
            let bytes =
                ids[told..told + tokens].iter().map(|id| self.tokens.bytes_of(*id).len() as u64).sum();
            bar.into_iter().for_each(|bar| bar.advance(bytes));
            told += tokens;
            check_wanted(reporter)
        };
        for_each_next(model, self.header.windows, &with_start, progress, |place, logits| {
            Ok(Frequencies::of(logits)?.of_token(with_start[place]))
        })
    }
}
