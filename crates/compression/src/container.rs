//! Format of a compressed file, version 1.
//!
//! ```text
//! header   8f 67 32 7a           magic
//!          version               1 byte; a reader rejects unknown versions
//!          profile               1 byte: version of the arithmetic for logits and frequencies
//!          dtype, kv dtype       names, each after its length in 1 byte
//!          context, stride       window sizes, each a varint
//!          digest                8 bytes of the model's digest
//!          canary                u32: checksum of the logits for a fixed prompt
//!          name                  model name, after its length in 1 byte
//!          original length       varint: 0 if unknown, otherwise the length plus 1
//!          checksum              u32: CRC-32 of all bytes before it
//! group    length                varint: original bytes of the group, at least 1
//!          for each stream       varint: 2 × number of coded bytes, plus 1 if they are stored verbatim
//!          for each stream       u32: CRC-32 of its original bytes
//!          for each stream       its coded bytes
//!          checksum              u32: CRC-32 of the group's bytes before it
//! end      0                     1 byte
//!          original length       varint
//!          checksum              u32: CRC-32 of all original bytes
//! ```
//!
//! Integers of fixed size are little-endian. A varint has seven bits per byte, lowest first. The highest bit
//! is set if more bytes follow.
//!
//! A group of `n` bytes is split into `max(1, n / 32768)` streams of nearly equal length, which are coded
//! independently. A reader holds one group at a time, and checks every length against the format's limits.

use std::io::{ErrorKind, Read, Write};
use std::ops::Range;

use candle_gpt2::KvDType;
use candle_gpt2_engine::WeightDType;
use crc32fast::Hasher;

use crate::CompressionError;
use crate::identity::DIGEST_BYTES;
use crate::windows::Windows;

/// File name suffix of compressed files.
///
/// ```
/// assert_eq!(candle_gpt2_compression::SUFFIX, ".gpt2z");
/// ```
pub const SUFFIX: &str = ".gpt2z";

const MAGIC: [u8; 4] = [0x8f, b'g', b'2', b'z'];
const VERSION: u8 = 1;
/// Version of the arithmetic; must change whenever any bit of a logit or frequency changes.
const PROFILE: u8 = 1;
/// Minimum number of original bytes per stream, unless the group is smaller.
const STREAM_BYTES: usize = 32 << 10;
/// Maximum number of original bytes in a group.
pub(crate) const GROUP_BYTES: usize = 32 * STREAM_BYTES;
/// Maximum number of bytes in a stored model name.
const MAX_NAME: usize = 64;

/// Header of a compressed file, read by [`Compressed::open`](crate::Compressed::open).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Header {
    /// Required dtype of the weights.
    pub dtype: WeightDType,
    /// Required dtype of keys and values.
    pub kv_dtype: KvDType,
    /// Name of the model.
    pub name: String,
    /// Number of original bytes, if it was known when compression began.
    pub length: Option<u64>,
    pub(crate) windows: Windows,
    pub(crate) digest: [u8; DIGEST_BYTES],
    pub(crate) canary: u32,
}

impl Header {
    /// Shortens a long name to its last characters, for use in the header.
    pub(crate) fn name_of(name: &str) -> String {
        let first =
            name.char_indices().map(|(offset, _)| offset).find(|offset| name.len() - offset <= MAX_NAME);
        name[first.unwrap_or(name.len())..].to_owned()
    }

    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = [&MAGIC[..], &[VERSION, PROFILE]].concat();
        push_text(&mut bytes, self.dtype.name());
        push_text(&mut bytes, self.kv_dtype.name());
        push_varint(&mut bytes, self.windows.context as u64);
        push_varint(&mut bytes, self.windows.stride as u64);
        bytes.extend(self.digest);
        bytes.extend(self.canary.to_le_bytes());
        push_text(&mut bytes, &self.name);
        push_varint(&mut bytes, self.length.map_or(0, |length| length.saturating_add(1)));
        push_checksum(&mut bytes);
        bytes
    }
}

/// Formats a model's dtypes for error messages.
pub(crate) fn dtypes(weights: &str, kv: &str) -> String {
    format!("weights in {weights} and a KV cache in {kv}")
}

/// Coded stream in a group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Coded {
    pub(crate) bytes: Vec<u8>,
    /// Whether `bytes` are the original bytes, uncoded.
    pub(crate) is_stored: bool,
    /// CRC-32 of the original bytes.
    pub(crate) checksum: u32,
}

/// Group of streams.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Group {
    /// Number of original bytes.
    pub(crate) length: usize,
    pub(crate) streams: Vec<Coded>,
}

impl Group {
    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        push_varint(&mut bytes, self.length as u64);
        for stream in &self.streams {
            push_varint(&mut bytes, stream.bytes.len() as u64 * 2 + u64::from(stream.is_stored));
        }
        self.streams.iter().for_each(|stream| bytes.extend(stream.checksum.to_le_bytes()));
        self.streams.iter().for_each(|stream| bytes.extend(&stream.bytes));
        push_checksum(&mut bytes);
        bytes
    }
}

/// Returns the byte ranges of the streams in a group of `length` bytes.
pub(crate) fn streams(length: usize) -> impl ExactSizeIterator<Item = Range<usize>> {
    let count = (length / STREAM_BYTES).max(1);
    let cut = move |stream: usize| length * stream / count;
    (0..count).map(move |stream| cut(stream)..cut(stream + 1))
}

/// End marker of the file, which follows the last group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct End {
    /// Total number of original bytes in all groups.
    pub(crate) length: u64,
    pub(crate) checksum: u32,
}

impl End {
    pub(crate) fn to_bytes(self) -> Vec<u8> {
        let mut bytes = vec![0];
        push_varint(&mut bytes, self.length);
        bytes.extend(self.checksum.to_le_bytes());
        bytes
    }
}

/// Part of a file: a group, or the end marker.
pub(crate) enum Part {
    Group(Group),
    End(End),
}

fn push_varint(bytes: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        bytes.push(number.to_le_bytes()[0] | 0x80);
        number >>= 7;
    }
    bytes.push(number.to_le_bytes()[0]);
}

/// Appends a string of at most 255 bytes, preceded by its length.
fn push_text(bytes: &mut Vec<u8>, text: &str) {
    bytes.push(text.len().to_le_bytes()[0]);
    bytes.extend(text.as_bytes());
}

fn push_checksum(bytes: &mut Vec<u8>) {
    bytes.extend(crc32fast::hash(bytes).to_le_bytes());
}

/// Reader for the parts of a compressed file, in order.
#[derive(Debug)]
pub(crate) struct Reader<R> {
    input: R,
    /// Checksum of the bytes read since the current part began.
    hasher: Hasher,
}

impl<R: Read> Reader<R> {
    pub(crate) fn new(input: R) -> Self {
        Self { input, hasher: Hasher::new() }
    }

    /// Reads the header at the start of the file.
    pub(crate) fn header(&mut self) -> Result<Header, CompressionError> {
        // A file shorter than the magic number may be anything, so it is not reported as truncated.
        let magic = self.array().map_err(|error| match error {
            CompressionError::Truncated => CompressionError::NotCompressed,
            error => error,
        })?;
        if magic != MAGIC {
            return Err(CompressionError::NotCompressed);
        }
        let [version] = self.array()?;
        if version != VERSION {
            return Err(CompressionError::Version { found: version, known: VERSION });
        }
        let [profile] = self.array()?;
        let (dtype, kv_dtype) = (self.text()?, self.text()?);
        let windows = (self.varint()?, self.varint()?);
        let (digest, canary) = (self.array()?, self.u32()?);
        let (name, length) = (self.text()?, self.varint()?);
        self.checksum("the checksum of its header does not match")?;
        // The checksum is right, so unknown values come from a later version of the program.
        if profile != PROFILE {
            return Err(CompressionError::Profile { found: profile, known: PROFILE });
        }
        let (Ok(dtype), Ok(kv_dtype)) = (dtype.parse(), kv_dtype.parse()) else {
            return Err(CompressionError::UnknownDType { found: dtypes(&dtype, &kv_dtype) });
        };
        let (Ok(context), Ok(stride)) = (usize::try_from(windows.0), usize::try_from(windows.1)) else {
            return Err(CompressionError::Damaged { what: "its header is invalid" });
        };
        let (windows, length) = (Windows { context, stride }, length.checked_sub(1));
        Ok(Header { dtype, kv_dtype, name, length, windows, digest, canary })
    }

    /// Reads the next part; rejects bytes after the end marker.
    pub(crate) fn part(&mut self) -> Result<Part, CompressionError> {
        self.hasher.reset();
        let damaged = |what| CompressionError::Damaged { what };
        let length = usize::try_from(self.varint()?).ok().filter(|length| *length <= GROUP_BYTES);
        let length = length.ok_or(damaged("a group is longer than the limit"))?;
        if length == 0 {
            let end = End { length: self.varint()?, checksum: self.u32()? };
            return match self.array::<1>() {
                Err(CompressionError::Truncated) => Ok(Part::End(end)),
                Err(error) => Err(error),
                Ok(_) => Err(damaged("extra bytes after its end")),
            };
        }
        let lengths = streams(length).map(|range| range.len());
        let mut sizes = Vec::with_capacity(lengths.len());
        for length in lengths {
            let size = self.varint()?;
            let is_stored = size & 1 == 1;
            let coded = usize::try_from(size / 2).ok();
            // Streams that coding would not shrink are stored verbatim, so a coded stream must be smaller.
            let coded = coded.filter(|coded| if is_stored { *coded == length } else { *coded < length });
            sizes.push((coded.ok_or(damaged("a stream has an invalid size"))?, is_stored));
        }
        let checksums = sizes.iter().map(|_| self.u32()).collect::<Result<Vec<_>, _>>()?;
        let mut streams = Vec::with_capacity(sizes.len());
        for ((size, is_stored), checksum) in sizes.into_iter().zip(checksums) {
            let mut bytes = vec![0; size];
            self.fill(&mut bytes)?;
            streams.push(Coded { bytes, is_stored, checksum });
        }
        self.checksum("the checksum of a group does not match")?;
        Ok(Part::Group(Group { length, streams }))
    }

    fn fill(&mut self, bytes: &mut [u8]) -> Result<(), CompressionError> {
        self.input.read_exact(bytes).map_err(|error| match error.kind() {
            ErrorKind::UnexpectedEof => CompressionError::Truncated,
            _ => CompressionError::Read(error),
        })?;
        self.hasher.update(bytes);
        Ok(())
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], CompressionError> {
        let mut bytes = [0; N];
        self.fill(&mut bytes)?;
        Ok(bytes)
    }

    fn u32(&mut self) -> Result<u32, CompressionError> {
        self.array().map(u32::from_le_bytes)
    }

    fn varint(&mut self) -> Result<u64, CompressionError> {
        let mut number = 0;
        for shift in (0..u64::BITS).step_by(7) {
            let [byte] = self.array()?;
            let bits = u64::from(byte & 0x7f);
            if bits << shift >> shift != bits {
                break;
            }
            number |= bits << shift;
            if byte < 0x80 {
                return Ok(number);
            }
        }
        Err(CompressionError::Damaged { what: "a number is too large" })
    }

    fn text(&mut self) -> Result<String, CompressionError> {
        let [length] = self.array()?;
        let mut text = vec![0; length.into()];
        self.fill(&mut text)?;
        String::from_utf8(text).map_err(|_| CompressionError::Damaged { what: "a name is not UTF-8" })
    }

    fn checksum(&mut self, what: &'static str) -> Result<(), CompressionError> {
        let expected = self.hasher.clone().finalize();
        if self.u32()? == expected { Ok(()) } else { Err(CompressionError::Damaged { what }) }
    }
}

/// Writes the bytes and returns their count.
pub(crate) fn write(output: &mut dyn Write, bytes: &[u8]) -> Result<u64, CompressionError> {
    output.write_all(bytes).map_err(CompressionError::Write)?;
    Ok(bytes.len() as u64)
}
