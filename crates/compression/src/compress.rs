//! Compression of bytes to a file, one group of streams at a time.

use std::io::{Read, Write};

use candle_gpt2_engine::{LoadedModel, Progress, Reporter, Unit};
use serde::Serialize;

use crate::CompressionError;
use crate::bytes::ByteTokens;
use crate::checks::{check_interrupted, weights_on_cpu};
use crate::coder::{Encoder, Interval};
use crate::container::{Coded, End, GROUP_BYTES, Group, Header, streams, write};
use crate::frequencies::Frequencies;
use crate::identity::{canary, digest};
use crate::windows::{Windows, for_each_next, start};

/// Compressor that uses a language model.
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

/// Compression statistics, returned by [`Compressor::compress`].
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Summary {
    /// Number of input bytes.
    pub bytes: u64,
    /// Size of the compressed file in bytes.
    pub compressed_bytes: u64,
    /// Compressed size in bits per input byte; `None` if the input is empty.
    pub bits_per_byte: Option<f64>,
    /// Number of input tokens.
    pub tokens: u64,
    /// Information content of the tokens in bits, excluding the overhead of the coder and the format.
    pub model_bits: f64,
}

/// Cost of a token in bits, as listed by [`Compressor::token_sizes`].
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TokenSize {
    /// Token id.
    pub id: u32,
    /// Bytes of the token, possibly only part of a character.
    pub bytes: Vec<u8>,
    /// Cost in bits: `-log2` of the token's probability.
    pub bits: f64,
}

impl Compressor {
    /// Creates a compressor with windows of `context` tokens, by default the model's whole context.
    ///
    /// The file's header stores `name`, and error messages show it.
    ///
    /// # Errors
    /// If the model is not on the CPU, a byte has no token, or `context` is not between 2 and the model's
    /// number of positions.
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

    /// Compresses all of `input` and writes the result to `output`.
    ///
    /// `length` is the number of input bytes, if known. At most one group of 1 MiB is in memory at a time.
    ///
    /// # Errors
    /// If the input cannot be read, the output cannot be written, the logits are NaN or infinite, or
    /// `reporter` interrupts the job.
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

    /// Encodes bytes as one stream and returns the cost of each token.
    ///
    /// # Errors
    /// See [`Compressor::compress`].
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

    /// Encodes one stream, or stores its bytes verbatim if coding would not shrink them.
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

    /// Computes the interval of each token.
    fn intervals(
        &self,
        ids: &[u32],
        bar: Option<&dyn Progress>,
        reporter: &dyn Reporter,
    ) -> Result<Vec<Interval>, CompressionError> {
        let model = self.loaded.model();
        let with_start: Vec<u32> =
            std::iter::once(start(model.config())).chain(ids.iter().copied()).collect();
        let mut reported = 0;
        let progress = |tokens: usize| {
            let bytes = ids[reported..reported + tokens]
                .iter()
                .map(|id| self.tokens.bytes_of(*id).len() as u64)
                .sum();
            bar.into_iter().for_each(|bar| bar.advance(bytes));
            reported += tokens;
            check_interrupted(reporter)
        };
        for_each_next(model, self.header.windows, &with_start, progress, |index, logits| {
            Ok(Frequencies::of(logits)?.of_token(with_start[index]))
        })
    }
}
