//! The format of a compressed file, version 1.
//!
//! ```text
//! header   8f 67 32 7a           magic
//!          version               1 byte; a reader refuses those that it does not know
//!          profile               1 byte: the rules by which logits and shares are computed
//!          dtype, kv dtype       names, each after its length in a byte
//!          context, stride       of the windows, each a varint
//!          digest                8 bytes of the model's
//!          canary                u32: of the logits of a fixed prompt
//!          name                  what the model was called, after its length in a byte
//!          original length       varint: 0 if it was not known, otherwise one more
//!          checksum              u32: CRC-32 of all before it
//! group    length                varint: original bytes of the group, at least 1
//!          of each stream        varint: coded bytes, times two, and one more if they are stored as they are
//!          of each stream        u32: CRC-32 of its original bytes
//!          of each stream        its coded bytes
//!          checksum              u32: CRC-32 of the group before it
//! end      0                     1 byte
//!          original length       varint
//!          checksum              u32: CRC-32 of all original bytes
//! ```
//!
//! Integers of fixed size are little-endian; a varint has seven bits a byte, the lowest first, and the highest bit if more
//! follow. A group of `n` bytes is cut into `max(1, n / 32768)` streams as equal as can be, each coded by itself. A reader holds one
//! group at a time, and trusts no length before it is below the format's limits.

use std::io::{ErrorKind, Read, Write};
use std::ops::Range;

use candle_gpt2::KvDType;
use candle_gpt2_engine::WeightDType;
use crc32fast::Hasher;

use crate::CompressionError;
use crate::identity::DIGEST_BYTES;
use crate::windows::Windows;

/// The suffix of a compressed file's name.
///
/// ```
/// assert_eq!(candle_gpt2_compression::SUFFIX, ".gpt2z");
/// ```
pub const SUFFIX: &str = ".gpt2z";

const MAGIC: [u8; 4] = [0x8f, b'g', b'2', b'z'];
const VERSION: u8 = 1;
/// Of the arithmetic: it changes when any bit of a logit or a share does.
const PROFILE: u8 = 1;
/// Original bytes for each stream, at least, if there are as many.
const STREAM_BYTES: usize = 32 << 10;
/// Original bytes of a group.
pub(crate) const GROUP_BYTES: usize = 32 * STREAM_BYTES;
/// Bytes of a model's name that are kept.
const MAX_NAME: usize = 64;

/// The header of a compressed file.
///
/// Read by [`Compressed::open`](crate::Compressed::open).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Header {
    /// The type that the weights must have.
    pub dtype: WeightDType,
    /// The type that keys and values must have.
    pub kv_dtype: KvDType,
    /// The model's name.
    pub name: String,
    /// Bytes of what is compressed, if they were known from the start.
    pub length: Option<u64>,
    pub(crate) windows: Windows,
    pub(crate) digest: [u8; DIGEST_BYTES],
    pub(crate) canary: u32,
}

impl Header {
    /// A name as a header keeps it: its last characters, if it is long.
    pub(crate) fn name_of(name: &str) -> String {
        let first = name.char_indices().map(|(place, _)| place).find(|place| name.len() - place <= MAX_NAME);
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

/// A stream of a group, coded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Coded {
    pub(crate) bytes: Vec<u8>,
    /// Whether these are the original bytes themselves.
    pub(crate) is_stored: bool,
    /// Of the original bytes.
    pub(crate) checksum: u32,
}

/// A group of streams.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Group {
    /// Original bytes.
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

/// Where the streams of a group of `length` bytes are in it.
pub(crate) fn streams(length: usize) -> impl ExactSizeIterator<Item = Range<usize>> {
    let count = (length / STREAM_BYTES).max(1);
    let cut = move |stream: usize| length * stream / count;
    (0..count).map(move |stream| cut(stream)..cut(stream + 1))
}

/// What follows the last group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct End {
    /// Original bytes of all groups.
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

/// A group, or what follows the last one.
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

/// A text of less than 256 bytes.
fn push_text(bytes: &mut Vec<u8>, text: &str) {
    bytes.push(text.len().to_le_bytes()[0]);
    bytes.extend(text.as_bytes());
}

fn push_checksum(bytes: &mut Vec<u8>) {
    bytes.extend(crc32fast::hash(bytes).to_le_bytes());
}

/// Reads the parts of a file, one after the other.
#[derive(Debug)]
pub(crate) struct Reader<R> {
    input: R,
    /// Of what was read since a part began.
    hasher: Hasher,
}

impl<R: Read> Reader<R> {
    pub(crate) fn new(input: R) -> Self {
        Self { input, hasher: Hasher::new() }
    }

    /// The header, which is first.
    pub(crate) fn header(&mut self) -> Result<Header, CompressionError> {
        // A file that is shorter than this is none that was truncated: it may be anything.
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
        let damaged = CompressionError::Damaged { what: "its header is none" };
        let (dtype, kv_dtype) = (self.text()?, self.text()?);
        let windows = (self.varint()?, self.varint()?);
        let (digest, canary) = (self.array()?, self.u32()?);
        let (name, length) = (self.text()?, self.varint()?);
        self.checksum("the checksum of its header differs")?;
        // What is not known here, and yet is what was written, is a later program's.
        if profile != PROFILE {
            return Err(CompressionError::Profile { found: profile, known: PROFILE });
        }
        let (Ok(dtype), Ok(kv_dtype)) = (dtype.parse(), kv_dtype.parse()) else { return Err(damaged) };
        let (Ok(context), Ok(stride)) = (usize::try_from(windows.0), usize::try_from(windows.1)) else {
            return Err(damaged);
        };
        let (windows, length) = (Windows { context, stride }, length.checked_sub(1));
        Ok(Header { dtype, kv_dtype, name, length, windows, digest, canary })
    }

    /// What comes next; after the end nothing may.
    pub(crate) fn part(&mut self) -> Result<Part, CompressionError> {
        self.hasher.reset();
        let damaged = |what| CompressionError::Damaged { what };
        let length = usize::try_from(self.varint()?).ok().filter(|length| *length <= GROUP_BYTES);
        let length = length.ok_or(damaged("a group is longer than any"))?;
        if length == 0 {
            let end = End { length: self.varint()?, checksum: self.u32()? };
            return match self.array::<1>() {
                Err(CompressionError::Truncated) => Ok(Part::End(end)),
                Err(error) => Err(error),
                Ok(_) => Err(damaged("there are bytes after its end")),
            };
        }
        let lengths = streams(length).map(|range| range.len());
        let mut sizes = Vec::with_capacity(lengths.len());
        for length in lengths {
            let size = self.varint()?;
            let is_stored = size & 1 == 1;
            let coded = usize::try_from(size / 2).ok();
            // What is not smaller than the original is stored.
            let coded = coded.filter(|coded| if is_stored { *coded == length } else { *coded < length });
            sizes.push((coded.ok_or(damaged("a stream has an impossible size"))?, is_stored));
        }
        let checksums = sizes.iter().map(|_| self.u32()).collect::<Result<Vec<_>, _>>()?;
        let mut streams = Vec::with_capacity(sizes.len());
        for ((size, is_stored), checksum) in sizes.into_iter().zip(checksums) {
            let mut bytes = vec![0; size];
            self.fill(&mut bytes)?;
            streams.push(Coded { bytes, is_stored, checksum });
        }
        self.checksum("the checksum of a group differs")?;
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
        Err(CompressionError::Damaged { what: "a number is larger than any" })
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

/// Writes bytes of the format.
pub(crate) fn write(output: &mut dyn Write, bytes: &[u8]) -> Result<u64, CompressionError> {
    output.write_all(bytes).map_err(CompressionError::Write)?;
    Ok(bytes.len() as u64)
}
