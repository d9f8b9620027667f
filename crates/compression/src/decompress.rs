//! Decompression of a file to bytes, one group of streams at a time.

use std::io::{Read, Write};

use candle_gpt2_engine::{LoadedModel, Progress, Reporter, Unit};
use candle_gpt2_generation::GenerationError;

use crate::CompressionError;
use crate::bytes::ByteTokens;
use crate::checks::{check_interrupted, weights_on_cpu};
use crate::coder::{Decoder, Interval};
use crate::container::{Coded, End, Header, Part, Reader, dtypes, streams, write};
use crate::frequencies::Frequencies;
use crate::identity::{canary, digest};
use crate::windows::{Stream, find_all};

/// Compressed file after its header has been read.
///
/// The header determines how the model must be loaded.
///
/// ```
/// use candle_gpt2_compression::{Compressed, Compressor};
/// use candle_gpt2_engine::{ModelOptions, Silent, WeightDType};
///
/// let q8 = ModelOptions { dtype: Some(WeightDType::Q8), ..ModelOptions::default() };
/// let model = q8.open(&Silent)?.load(&Silent)?;
/// let mut file = Vec::new();
/// Compressor::new(&model, "built-in", Some(64))?.compress(&mut &b"Good night"[..], None, &mut file, &Silent)?;
///
/// let compressed = Compressed::open(&file[..])?;
/// let header = compressed.header();
/// assert_eq!((header.dtype, header.name.as_str()), (WeightDType::Q8, "built-in"));
/// let mut restored = Vec::new();
/// compressed.decompress(&model, &mut restored, &Silent)?;
/// assert_eq!(restored, b"Good night");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Compressed<R> {
    reader: Reader<R>,
    header: Header,
}

impl<R: Read> Compressed<R> {
    /// Reads the header.
    ///
    /// # Errors
    /// If the header is invalid or has a later version, or if the input cannot be read.
    pub fn open(input: R) -> Result<Self, CompressionError> {
        let mut reader = Reader::new(input);
        let header = reader.header()?;
        Ok(Self { reader, header })
    }

    /// Returns the file's header.
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// Writes the original bytes to `output` and returns the number of bytes written.
    ///
    /// Each group is written after its checksums have been verified. After an error, the output contains only
    /// the beginning of the data. Callers that need all or nothing should write to a temporary location.
    ///
    /// # Errors
    /// If the model is a different one or computes different logits, the file is damaged or cannot be read,
    /// the output cannot be written, or `reporter` interrupts the job.
    pub fn decompress(
        mut self,
        loaded: &LoadedModel,
        output: &mut dyn Write,
        reporter: &dyn Reporter,
    ) -> Result<u64, CompressionError> {
        let tokens = self.check_model(loaded)?;
        let damaged = |what| CompressionError::Damaged { what };
        let (mut length, mut checksum) = (0, crc32fast::Hasher::new());
        let mut bar = None;
        loop {
            match self.reader.part()? {
                Part::Group(group) => {
                    if self.header.length.is_none() || bar.is_none() {
                        let total = self.header.length.unwrap_or(group.length as u64);
                        bar = Some(reporter.start("decompressing", total, Unit::Bytes));
                    }
                    let mut restored = Vec::with_capacity(group.length);
                    let work = Work { tokens: &tokens, bar: bar.as_deref(), reporter };
                    for bytes in self.restore(&group.streams, group.length, loaded, &work)? {
                        restored.extend(bytes);
                    }
                    checksum.update(&restored);
                    length += write(output, &restored)?;
                }
                Part::End(end) => {
                    if end != (End { length, checksum: checksum.finalize() }) {
                        return Err(damaged(
                            "the restored bytes do not match the recorded length or checksum",
                        ));
                    }
                    if self.header.length.is_some_and(|stated| stated != length) {
                        return Err(damaged("the length in its header does not match its contents"));
                    }
                    output.flush().map_err(CompressionError::Write)?;
                    return Ok(length);
                }
            }
        }
    }

    /// Checks the model and its arithmetic against the header and returns the model's byte tokens.
    fn check_model(&self, loaded: &LoadedModel) -> Result<ByteTokens, CompressionError> {
        let Header { dtype: expected, kv_dtype, windows, name, .. } = &self.header;
        let (found, found_kv) = (weights_on_cpu(loaded)?, loaded.model().kv_dtype());
        if (found, found_kv) != (*expected, *kv_dtype) {
            return Err(CompressionError::DTypeMismatch {
                expected: dtypes(expected.name(), kv_dtype.name()),
                found: dtypes(found.name(), found_kv.name()),
            });
        }
        let other_model = || CompressionError::ModelMismatch { name: name.clone() };
        if !windows.fit(loaded.config()) {
            return Err(other_model());
        }
        let tokens = ByteTokens::new(loaded.vocabulary())?;
        if digest(loaded.model(), &tokens)? != self.header.digest {
            return Err(other_model());
        }
        if canary(loaded.model(), *windows)? != self.header.canary {
            return Err(CompressionError::ArithmeticMismatch);
        }
        Ok(tokens)
    }

    /// Decodes the bytes of each stream in a group.
    fn restore(
        &self,
        coded: &[Coded],
        length: usize,
        loaded: &LoadedModel,
        work: &Work<'_>,
    ) -> Result<Vec<Vec<u8>>, CompressionError> {
        let mut restored = vec![Vec::new(); coded.len()];
        let mut open = Vec::new();
        for ((coded, range), restored) in coded.iter().zip(streams(length)).zip(&mut restored) {
            if coded.is_stored {
                restored.extend(&coded.bytes);
                work.advance(range.len());
            } else {
                let decoder = Decoder::new(&coded.bytes);
                open.push(OpenStream { decoder, length: range.len(), restored, work });
            }
        }
        find_all(loaded, self.header.windows, &mut open)?;
        let is_right = |(coded, restored): (&Coded, &Vec<u8>)| crc32fast::hash(restored) == coded.checksum;
        // The group's own checksum matched, so a mismatch here means that the wrong tokens were decoded.
        if coded.iter().zip(&restored).all(is_right) {
            Ok(restored)
        } else {
            Err(CompressionError::ArithmeticMismatch)
        }
    }
}

/// Context shared by all streams in a group.
struct Work<'a> {
    tokens: &'a ByteTokens,
    bar: Option<&'a dyn Progress>,
    reporter: &'a dyn Reporter,
}

impl Work<'_> {
    fn advance(&self, bytes: usize) {
        self.bar.into_iter().for_each(|bar| bar.advance(bytes as u64));
    }
}

/// Stream that has not been fully decoded yet.
struct OpenStream<'a> {
    decoder: Decoder<'a>,
    /// Number of original bytes.
    length: usize,
    restored: &'a mut Vec<u8>,
    work: &'a Work<'a>,
}

impl Stream for OpenStream<'_> {
    type Found = Interval;

    fn find(&self, logits: &[f32]) -> Result<(u32, Interval), GenerationError> {
        Ok(Frequencies::of(logits)?.at(self.decoder.position()))
    }

    fn take(&mut self, id: u32, found: Interval) -> Result<bool, CompressionError> {
        check_interrupted(self.work.reporter)?;
        self.decoder.take(found);
        let bytes = self.work.tokens.bytes_of(id);
        // Vocabulary rows without a token have no bytes. They can be decoded only if the logits differ from
        // the compressor's.
        if bytes.is_empty() || self.restored.len() + bytes.len() > self.length {
            return Err(CompressionError::ArithmeticMismatch);
        }
        self.restored.extend(bytes);
        self.work.advance(bytes.len());
        Ok(self.restored.len() < self.length)
    }
}
