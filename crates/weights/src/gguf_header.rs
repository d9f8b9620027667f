//! GGUF file header: metadata, then the name, shape, type and offset of each tensor.
//!
//! Source: `docs/gguf.md` of ggml, and `ggml.h` for the tensor type ids. candle's reader fails on types that
//! it cannot compute with; this one also describes files with newer types.

use candle_gpt2_arithmetic::NumberType;

use crate::ggml::GgmlType;
use crate::stored::StoredDType;

/// Maximum nesting depth of arrays; llama.cpp does not write nested arrays.
const MAX_DEPTH: usize = 8;
/// Maximum number of dimensions, `GGML_MAX_DIMS`.
const MAX_AXES: u32 = 4;
/// Tensor alignment if the file has no [`ALIGNMENT_KEY`].
const DEFAULT_ALIGNMENT: u64 = 32;
/// Metadata key for the tensor alignment.
const ALIGNMENT_KEY: &str = "general.alignment";
/// GGUF type id of a string.
const TEXT: u32 = 8;
/// GGUF type id of an array.
const LIST: u32 = 9;
/// ggml type id of f64.
const F64_TYPE: u32 = 28;

/// Metadata keys and values in file order.
pub(crate) type Metadata = Vec<(String, Value)>;

/// Metadata value.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Value {
    /// Number or boolean: GGUF type id and bytes.
    Scalar(u32, [u8; 8]),
    /// String.
    Text(String),
    /// Array of numbers or booleans: GGUF type id of the elements, and their bytes.
    Scalars(u32, Vec<u8>),
    /// Array of strings.
    Texts(Vec<String>),
    /// Array of arrays.
    Lists(Vec<Self>),
}

/// Returns the size of a number or boolean in bytes, by its GGUF type id.
fn scalar_bytes(kind: u32) -> Option<usize> {
    match kind {
        0 | 1 | 7 => Some(1),
        2 | 3 => Some(2),
        4..=6 => Some(4),
        10..=12 => Some(8),
        _ => None,
    }
}

/// Pads the bytes of a scalar with zeros.
fn filled(bytes: &[u8]) -> [u8; 8] {
    let mut filled = [0; 8];
    filled.iter_mut().zip(bytes).for_each(|(to, from)| *to = *from);
    filled
}

impl Value {
    pub(crate) fn u32(number: u32) -> Self {
        Self::Scalar(4, filled(&number.to_le_bytes()))
    }

    pub(crate) fn f32(number: f32) -> Self {
        Self::Scalar(6, filled(&number.to_le_bytes()))
    }

    pub(crate) fn f64(number: f64) -> Self {
        Self::Scalar(12, number.to_le_bytes())
    }

    pub(crate) fn bool(flag: bool) -> Self {
        Self::Scalar(7, filled(&[u8::from(flag)]))
    }

    pub(crate) fn text(text: &str) -> Self {
        Self::Text(text.to_owned())
    }

    pub(crate) fn i32s(numbers: &[i32]) -> Self {
        Self::Scalars(5, numbers.iter().flat_map(|number| number.to_le_bytes()).collect())
    }

    /// Returns the value if it is a nonnegative integer of any type.
    pub(crate) fn as_u64(&self) -> Option<u64> {
        let Self::Scalar(kind, bytes) = self else { return None };
        u64::try_from(integer(*kind, bytes)?).ok()
    }

    /// Returns the value if it is a float.
    pub(crate) fn as_f64(&self) -> Option<f64> {
        match self {
            Self::Scalar(6, bytes) => Some(f32::from_le_bytes(*bytes.first_chunk()?).into()),
            Self::Scalar(12, bytes) => Some(f64::from_le_bytes(*bytes)),
            _ => None,
        }
    }

    /// Returns the value if it is a 32-bit float.
    pub(crate) fn as_f32(&self) -> Option<f32> {
        match self {
            Self::Scalar(6, bytes) => Some(f32::from_le_bytes(*bytes.first_chunk()?)),
            _ => None,
        }
    }

    pub(crate) fn as_bool(&self) -> Option<bool> {
        match self {
            Self::Scalar(7, [flag, ..]) => Some(*flag != 0),
            _ => None,
        }
    }

    pub(crate) fn as_text(&self) -> Option<&str> {
        match self {
            Self::Text(text) => Some(text),
            _ => None,
        }
    }

    /// Returns the strings of an array. An empty array may have elements of any type.
    pub(crate) fn as_texts(&self) -> Option<&[String]> {
        match self {
            Self::Texts(texts) => Some(texts),
            Self::Scalars(_, bytes) if bytes.is_empty() => Some(&[]),
            _ => None,
        }
    }

    /// Returns the integers of an array.
    pub(crate) fn as_integers(&self) -> Option<Vec<i128>> {
        let Self::Scalars(kind, bytes) = self else { return None };
        bytes.chunks_exact(scalar_bytes(*kind)?).map(|bytes| integer(*kind, &filled(bytes))).collect()
    }

    /// Returns the GGUF type id.
    fn type_number(&self) -> u32 {
        match self {
            Self::Scalar(kind, _) => *kind,
            Self::Text(_) => TEXT,
            Self::Scalars(..) | Self::Texts(_) | Self::Lists(_) => LIST,
        }
    }

    /// Appends the type and the value in the encoding of format version 2 and later.
    pub(crate) fn write_to(&self, bytes: &mut Vec<u8>) {
        bytes.extend(self.type_number().to_le_bytes());
        self.write_content(bytes);
    }

    fn write_content(&self, bytes: &mut Vec<u8>) {
        let begin_list = |bytes: &mut Vec<u8>, kind: u32, count: usize| {
            bytes.extend(kind.to_le_bytes());
            bytes.extend((count as u64).to_le_bytes());
        };
        match self {
            Self::Scalar(kind, value) => bytes.extend(&value[..scalar_bytes(*kind).unwrap_or(8)]),
            Self::Text(text) => write_text(bytes, text),
            Self::Scalars(kind, values) => {
                begin_list(bytes, *kind, values.len() / scalar_bytes(*kind).unwrap_or(1));
                bytes.extend(values);
            }
            Self::Texts(texts) => {
                begin_list(bytes, TEXT, texts.len());
                texts.iter().for_each(|text| write_text(bytes, text));
            }
            Self::Lists(lists) => {
                begin_list(bytes, LIST, lists.len());
                lists.iter().for_each(|list| list.write_content(bytes));
            }
        }
    }
}

/// Appends a string, prefixed with its length.
pub(crate) fn write_text(bytes: &mut Vec<u8>, text: &str) {
    bytes.extend((text.len() as u64).to_le_bytes());
    bytes.extend(text.as_bytes());
}

/// Decodes an integer by its GGUF type id; `None` for other types.
fn integer(kind: u32, bytes: &[u8; 8]) -> Option<i128> {
    let [first, second, ..] = *bytes;
    let four = *bytes.first_chunk::<4>()?;
    Some(match kind {
        0 => first.into(),
        1 => i8::from_le_bytes([first]).into(),
        2 => u16::from_le_bytes([first, second]).into(),
        3 => i16::from_le_bytes([first, second]).into(),
        4 => u32::from_le_bytes(four).into(),
        5 => i32::from_le_bytes(four).into(),
        10 => u64::from_le_bytes(*bytes).into(),
        11 => i64::from_le_bytes(*bytes).into(),
        _ => return None,
    })
}

/// Tensor description in the header.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct HeaderTensor {
    pub(crate) name: String,
    /// Shape, with the fastest-varying dimension last.
    pub(crate) shape: Vec<usize>,
    pub(crate) dtype: StoredDType,
    /// Elements and bytes per block; `None` for an unknown type.
    pub(crate) block: Option<[u64; 2]>,
    /// Offset from the start of the data section.
    pub(crate) offset: u64,
}

/// Parsed header.
#[derive(Debug, PartialEq)]
pub(crate) struct Header {
    /// Keys in file order.
    pub(crate) metadata: Metadata,
    pub(crate) tensors: Vec<HeaderTensor>,
    /// File offset of the data section.
    pub(crate) data_start: u64,
}

impl Header {
    /// Reads the header at the start of `bytes`; data after it is ignored and may be cut off.
    pub(crate) fn read(bytes: &[u8]) -> Result<Self, String> {
        let mut bytes = Bytes { bytes, position: 4, is_version_1: false };
        match bytes.u32()? {
            1 => bytes.is_version_1 = true,
            2 | 3 => {}
            version => return Err(format!("unknown format version {version}")),
        }
        let (tensor_count, key_count) = (bytes.length()?, bytes.length()?);
        let mut metadata = Vec::new();
        for _ in 0..key_count {
            let key = bytes.text()?;
            let kind = bytes.u32()?;
            metadata.push((key, bytes.value(kind, 0)?));
        }
        let mut tensors = Vec::new();
        for _ in 0..tensor_count {
            tensors.push(bytes.tensor()?);
        }
        let alignment = metadata.iter().rfind(|(key, _)| key == ALIGNMENT_KEY);
        let alignment = alignment.and_then(|(_, value)| value.as_u64()).unwrap_or(DEFAULT_ALIGNMENT);
        let data_start = (bytes.position as u64).checked_next_multiple_of(alignment);
        if alignment == 0 {
            return Err(format!("`{ALIGNMENT_KEY}` is 0"));
        }
        let data_start =
            data_start.ok_or_else(|| format!("`{ALIGNMENT_KEY}` is {alignment}, which is too large"))?;
        Ok(Self { metadata, tensors, data_start })
    }

    /// Returns the value of a key, the last one if the key repeats.
    pub(crate) fn get(&self, key: &str) -> Option<&Value> {
        self.metadata.iter().rfind(|(known, _)| known == key).map(|(_, value)| value)
    }
}

/// Cursor over the bytes of a header.
struct Bytes<'a> {
    bytes: &'a [u8],
    position: usize,
    /// Whether lengths have 32 bits, as in version 1.
    is_version_1: bool,
}

impl<'a> Bytes<'a> {
    fn take(&mut self, count: u64) -> Result<&'a [u8], String> {
        let end = usize::try_from(count).ok().and_then(|count| self.position.checked_add(count));
        let taken = end.and_then(|end| self.bytes.get(self.position..end));
        let taken = taken.ok_or("its header ends early")?;
        self.position += taken.len();
        Ok(taken)
    }

    fn u32(&mut self) -> Result<u32, String> {
        let four = self.take(4)?.first_chunk().ok_or("its header ends early")?;
        Ok(u32::from_le_bytes(*four))
    }

    fn u64(&mut self) -> Result<u64, String> {
        let eight = self.take(8)?.first_chunk().ok_or("its header ends early")?;
        Ok(u64::from_le_bytes(*eight))
    }

    fn length(&mut self) -> Result<u64, String> {
        if self.is_version_1 { Ok(self.u32()?.into()) } else { self.u64() }
    }

    fn text(&mut self) -> Result<String, String> {
        let length = self.length()?;
        Ok(String::from_utf8_lossy(self.take(length)?).into_owned())
    }

    fn value(&mut self, kind: u32, depth: usize) -> Result<Value, String> {
        let unknown = || format!("a value has the unknown type {kind}");
        match kind {
            TEXT => Ok(Value::Text(self.text()?)),
            LIST if depth > MAX_DEPTH => Err(format!("its arrays are nested more than {MAX_DEPTH} deep")),
            LIST => {
                let (kind, count) = (self.u32()?, self.length()?);
                match kind {
                    TEXT => Ok(Value::Texts((0..count).map(|_| self.text()).collect::<Result<_, _>>()?)),
                    LIST => {
                        let lists = (0..count).map(|_| self.value(LIST, depth + 1));
                        Ok(Value::Lists(lists.collect::<Result<_, _>>()?))
                    }
                    kind => {
                        let size = scalar_bytes(kind).ok_or_else(unknown)? as u64;
                        let bytes = count.checked_mul(size).ok_or("its header ends early")?;
                        Ok(Value::Scalars(kind, self.take(bytes)?.to_vec()))
                    }
                }
            }
            kind => {
                let size = scalar_bytes(kind).ok_or_else(unknown)?;
                Ok(Value::Scalar(kind, filled(self.take(size as u64)?)))
            }
        }
    }

    fn tensor(&mut self) -> Result<HeaderTensor, String> {
        let name = self.text()?;
        let axes = self.u32()?;
        if axes > MAX_AXES {
            return Err(format!("tensor `{name}` has {axes} dimensions, more than {MAX_AXES}"));
        }
        let mut shape = Vec::new();
        for _ in 0..axes {
            let size = self.length()?;
            shape.push(
                usize::try_from(size)
                    .map_err(|_| format!("tensor `{name}`: the dimension {size} is too large"))?,
            );
        }
        // The file stores the fastest-varying dimension first.
        shape.reverse();
        let kind = self.u32()?;
        let offset = self.u64()?;
        let (dtype, block) = tensor_type(kind);
        Ok(HeaderTensor { name, shape, dtype, block, offset })
    }
}

/// Tensor types that this project cannot read as weights: type id, name, elements and bytes per block.
const OTHER_TYPES: [(u32, &str, [u64; 2]); 19] = [
    (16, "IQ2_XXS", [256, 66]),
    (17, "IQ2_XS", [256, 74]),
    (18, "IQ3_XXS", [256, 98]),
    (19, "IQ1_S", [256, 50]),
    (20, "IQ4_NL", [32, 18]),
    (21, "IQ3_S", [256, 110]),
    (22, "IQ2_S", [256, 82]),
    (23, "IQ4_XS", [256, 136]),
    (24, "I8", [1, 1]),
    (25, "I16", [1, 2]),
    (26, "I32", [1, 4]),
    (27, "I64", [1, 8]),
    (29, "IQ1_M", [256, 56]),
    (34, "TQ1_0", [256, 54]),
    (35, "TQ2_0", [256, 66]),
    (39, "MXFP4", [32, 17]),
    (31, "Q4_0_4_4", [32, 18]),
    (32, "Q4_0_4_8", [32, 18]),
    (33, "Q4_0_8_8", [32, 18]),
];

/// Returns the dtype with this ggml type id, and its elements and bytes per block.
fn tensor_type(number: u32) -> (StoredDType, Option<[u64; 2]>) {
    let dtype = match number {
        F64_TYPE => Some(NumberType::F64),
        _ => GgmlType::from_id(number).map(|ggml| ggml.dtype),
    };
    if let Some(dtype) = dtype {
        return (StoredDType::Weights(dtype), Some(dtype.block()));
    }
    match OTHER_TYPES.iter().find(|(known, ..)| *known == number) {
        Some((_, name, block)) => (StoredDType::Other(name), Some(*block)),
        None => (StoredDType::Other("an unknown ggml type"), None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metadata_values_round_trip() {
        let values = [
            Value::u32(7),
            Value::f32(0.5),
            Value::bool(true),
            Value::text("é"),
            Value::i32s(&[-1, 2]),
            Value::Texts(vec!["a".into(), String::new()]),
            Value::Lists(vec![Value::Scalars(0, vec![1, 2, 3]), Value::Texts(Vec::new())]),
            Value::Scalar(11, (-5i64).to_le_bytes()),
        ];
        let mut bytes = b"GGUF\x03\0\0\0".to_vec();
        bytes.extend(0u64.to_le_bytes());
        bytes.extend((values.len() as u64).to_le_bytes());
        for value in &values {
            write_text(&mut bytes, "key");
            value.write_to(&mut bytes);
        }
        let header = Header::read(&bytes).unwrap();
        assert_eq!(header.metadata.iter().map(|(_, value)| value.clone()).collect::<Vec<_>>(), values);
        assert_eq!(header.data_start % DEFAULT_ALIGNMENT, 0);
        assert_eq!(values[0].as_u64(), Some(7));
        assert_eq!(values[7].as_u64(), None, "negative");
        assert_eq!(values[4].as_integers(), Some(vec![-1, 2]));
        for length in 0..bytes.len() {
            assert!(Header::read(&bytes[..length]).is_err(), "{length} bytes");
        }
    }

    #[test]
    fn array_nesting_is_limited() {
        let mut bytes = b"GGUF\x03\0\0\0".to_vec();
        bytes.extend(0u64.to_le_bytes());
        bytes.extend(1u64.to_le_bytes());
        write_text(&mut bytes, "deep");
        bytes.extend(LIST.to_le_bytes());
        for _ in 0..1000 {
            bytes.extend(LIST.to_le_bytes());
            bytes.extend(1u64.to_le_bytes());
        }
        assert!(Header::read(&bytes).unwrap_err().contains("arrays are nested more than 8 deep"));
    }
}
