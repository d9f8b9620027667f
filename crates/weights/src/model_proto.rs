//! Parser of SentencePiece model files.
//!
//! Reads the few fields of `sentencepiece_model.proto` that encoding and decoding require. The file is
//! untrusted. The number of pieces is limited before they are stored, and each error names its field.

/// Maximum number of vocabulary pieces.
const MAX_PIECES: usize = 1_000_000;

/// Parsed model file.
#[derive(Debug)]
pub(crate) struct ModelProto<'a> {
    pub(crate) pieces: Vec<Piece<'a>>,
    pub(crate) trainer: TrainerSpec<'a>,
    pub(crate) normalizer: NormalizerSpec<'a>,
    /// Whether decoding applies a separate charsmap.
    pub(crate) has_denormalizer: bool,
}

/// Vocabulary entry.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Piece<'a> {
    pub(crate) text: &'a str,
    pub(crate) score: f32,
    pub(crate) kind: u64,
}

/// Piece types.
pub(crate) mod kind {
    pub(crate) const NORMAL: u64 = 1;
    pub(crate) const UNKNOWN: u64 = 2;
    pub(crate) const CONTROL: u64 = 3;
    pub(crate) const USER_DEFINED: u64 = 4;
    pub(crate) const BYTE: u64 = 6;
}

/// Training settings that affect the model.
#[derive(Debug)]
pub(crate) struct TrainerSpec<'a> {
    /// [`UNIGRAM`], [`BPE`] or an unsupported type.
    pub(crate) model_type: u64,
    pub(crate) treat_whitespace_as_suffix: bool,
    pub(crate) byte_fallback: bool,
    /// Text to which the unknown piece decodes.
    pub(crate) unk_surface: &'a str,
}

pub(crate) const UNIGRAM: u64 = 1;
pub(crate) const BPE: u64 = 2;

/// Normalization applied before tokenization.
#[derive(Debug)]
pub(crate) struct NormalizerSpec<'a> {
    pub(crate) precompiled_charsmap: &'a [u8],
    pub(crate) add_dummy_prefix: bool,
    pub(crate) remove_extra_whitespaces: bool,
    pub(crate) escape_whitespaces: bool,
}

impl<'a> ModelProto<'a> {
    /// Parses a model file.
    ///
    /// # Errors
    /// If a required field is corrupt.
    pub(crate) fn new(bytes: &'a [u8]) -> Result<Self, String> {
        let mut model = Self {
            pieces: Vec::new(),
            trainer: TrainerSpec {
                model_type: UNIGRAM,
                treat_whitespace_as_suffix: false,
                byte_fallback: false,
                unk_surface: " \u{2047} ",
            },
            normalizer: NormalizerSpec {
                precompiled_charsmap: &[],
                add_dummy_prefix: true,
                remove_extra_whitespaces: true,
                escape_whitespaces: true,
            },
            has_denormalizer: false,
        };
        for field in Fields::new(bytes) {
            let (tag, value) = field?;
            match tag {
                1 if model.pieces.len() == MAX_PIECES => {
                    return Err(format!(
                        "pieces: found more than the limit of {MAX_PIECES}; use a smaller vocabulary"
                    ));
                }
                1 => {
                    let name = format!("pieces[{}]", model.pieces.len());
                    model.pieces.push(Piece::new(&name, value.bytes(&name)?)?);
                }
                2 => model.trainer.add(value.bytes("trainer_spec")?)?,
                3 => model.normalizer.add(value.bytes("normalizer_spec")?)?,
                5 => {
                    let name = "denormalizer_spec";
                    for field in Fields::new(value.bytes(name)?) {
                        let (tag, value) = field.map_err(|error| format!("{name}: {error}"))?;
                        model.has_denormalizer |= tag == 2 && !value.bytes(name)?.is_empty();
                    }
                }
                _ => (),
            }
        }
        Ok(model)
    }
}

impl<'a> Piece<'a> {
    fn new(name: &str, bytes: &'a [u8]) -> Result<Self, String> {
        let mut piece = Piece { text: "", score: 0.0, kind: kind::NORMAL };
        for field in Fields::new(bytes) {
            let (tag, value) = field.map_err(|error| format!("{name}: {error}"))?;
            match tag {
                1 => piece.text = value.text(&format!("{name}.piece"))?,
                2 => piece.score = value.float(&format!("{name}.score"))?,
                3 => piece.kind = value.number(&format!("{name}.type"))?,
                _ => (),
            }
        }
        Ok(piece)
    }
}

impl<'a> TrainerSpec<'a> {
    fn add(&mut self, bytes: &'a [u8]) -> Result<(), String> {
        for field in Fields::new(bytes) {
            let (tag, value) = field.map_err(|error| format!("trainer_spec: {error}"))?;
            match tag {
                3 => self.model_type = value.number("trainer_spec.model_type")?,
                24 => {
                    self.treat_whitespace_as_suffix =
                        value.number("trainer_spec.treat_whitespace_as_suffix")? != 0;
                }
                35 => self.byte_fallback = value.number("trainer_spec.byte_fallback")? != 0,
                44 => self.unk_surface = value.text("trainer_spec.unk_surface")?,
                _ => (),
            }
        }
        Ok(())
    }
}

impl<'a> NormalizerSpec<'a> {
    fn add(&mut self, bytes: &'a [u8]) -> Result<(), String> {
        for field in Fields::new(bytes) {
            let (tag, value) = field.map_err(|error| format!("normalizer_spec: {error}"))?;
            let flag = |name: &str| Ok::<_, String>(value.number(&format!("normalizer_spec.{name}"))? != 0);
            match tag {
                2 => self.precompiled_charsmap = value.bytes("normalizer_spec.precompiled_charsmap")?,
                3 => self.add_dummy_prefix = flag("add_dummy_prefix")?,
                4 => self.remove_extra_whitespaces = flag("remove_extra_whitespaces")?,
                5 => self.escape_whitespaces = flag("escape_whitespaces")?,
                _ => (),
            }
        }
        Ok(())
    }
}

/// Field value in one of the wire types of Protocol Buffers.
#[derive(Debug, Clone, Copy)]
enum Value<'a> {
    Number(u64),
    Fixed32([u8; 4]),
    Fixed64,
    Bytes(&'a [u8]),
}

impl<'a> Value<'a> {
    fn bytes(self, name: &str) -> Result<&'a [u8], String> {
        match self {
            Self::Bytes(bytes) => Ok(bytes),
            other => Err(other.mismatch(name, "length-delimited bytes")),
        }
    }

    fn text(self, name: &str) -> Result<&'a str, String> {
        str::from_utf8(self.bytes(name)?).map_err(|error| format!("{name}: {error}"))
    }

    fn number(self, name: &str) -> Result<u64, String> {
        match self {
            Self::Number(number) => Ok(number),
            other => Err(other.mismatch(name, "a number")),
        }
    }

    fn float(self, name: &str) -> Result<f32, String> {
        match self {
            Self::Fixed32(bytes) => Ok(f32::from_le_bytes(bytes)),
            other => Err(other.mismatch(name, "a 32-bit float")),
        }
    }

    fn mismatch(self, name: &str, expected: &str) -> String {
        let found = match self {
            Self::Number(_) => "a number",
            Self::Fixed32(_) => "32 bits",
            Self::Fixed64 => "64 bits",
            Self::Bytes(_) => "length-delimited bytes",
        };
        format!("{name}: expected {expected}, found {found}")
    }
}

/// Iterator over the fields of a message, with their numbers.
struct Fields<'a> {
    rest: &'a [u8],
    start: usize,
}

impl<'a> Fields<'a> {
    fn new(bytes: &'a [u8]) -> Self {
        Self { rest: bytes, start: bytes.len() }
    }

    /// Returns the offset of the next byte in the message.
    fn offset(&self) -> usize {
        self.start - self.rest.len()
    }

    fn varint(&mut self) -> Option<u64> {
        let mut number = 0;
        for shift in (0..u64::BITS).step_by(7) {
            let (byte, rest) = self.rest.split_first()?;
            self.rest = rest;
            number |= u64::from(byte & 0x7f) << shift;
            if byte & 0x80 == 0 {
                return Some(number);
            }
        }
        None
    }

    fn take(&mut self, length: u64) -> Option<&'a [u8]> {
        let (taken, rest) = self.rest.split_at_checked(usize::try_from(length).ok()?)?;
        self.rest = rest;
        Some(taken)
    }

    fn field(&mut self) -> Result<(u64, Value<'a>), String> {
        let offset = self.offset();
        let truncated = || format!("the field at byte {offset} is truncated or damaged");
        let key = self.varint().ok_or_else(truncated)?;
        let value = match key & 7 {
            0 => self.varint().map(Value::Number),
            1 => self.take(8).map(|_| Value::Fixed64),
            2 => self.varint().and_then(|length| self.take(length)).map(Value::Bytes),
            5 => self.take(4).and_then(|bytes| Some(Value::Fixed32(bytes.try_into().ok()?))),
            other => {
                return Err(format!("the field at byte {offset} has the unsupported wire type {other}"));
            }
        };
        match key >> 3 {
            0 => Err(format!("the field at byte {offset} has the invalid number 0")),
            number => Ok((number, value.ok_or_else(truncated)?)),
        }
    }
}

impl<'a> Iterator for Fields<'a> {
    type Item = Result<(u64, Value<'a>), String>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.rest.is_empty() {
            return None;
        }
        let field = self.field();
        if field.is_err() {
            self.rest = &[];
        }
        Some(field)
    }
}
