//! Writing a checkpoint as a GGUF file for llama.cpp.
//!
//! The file is a header (metadata, then name, shape, type and place of every tensor) and the tensors, each at a multiple of 32
//! bytes: version 2 of the format in ggml's `docs/gguf.md`. Sizes follow from shapes and types, so the header is written first
//! and then one tensor after the other, in pieces. candle's writer, which gives the same bytes, holds all tensors in memory at
//! once; that is why there is one here.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

use candle_core::quantized::QTensor;
use candle_gpt2::{Activation, Gpt2Config, HeadKind, Parameter, expected_parameters};

use crate::naming::gguf_name;
use crate::progress::PIECE;
use crate::readers::ReadParameters;
use crate::replace::{create_file, unwritable};
use crate::rounding::{check_finite, check_range};
use crate::{Checkpoint, ReadProgress, Tokenizer, WeightsError, WrittenDType};

/// Tensors start at multiples of this many bytes.
const ALIGNMENT: usize = 32;

/// Writes a GGUF file with the tokenizer inside. llama.cpp loads it. The position embedding, norms and biases stay in
/// f32, as its own converter leaves them. `progress` receives the number of bytes of the checkpoint read since the last
/// call, and may end it.
///
/// ```
/// use candle_gpt2_weights::{Checkpoint, GivenFiles, OpenOptions, Tokenizer, WrittenDType, write_gguf};
///
/// let files = GivenFiles::new("stories")
///     .with_bytes("config.json", candle_gpt2_stories::CONFIG)
///     .with_bytes("tokenizer.json", candle_gpt2_stories::TOKENIZER)
///     .with_bytes("model.safetensors", candle_gpt2_stories::WEIGHTS);
/// let checkpoint = Checkpoint::open_given(files, &OpenOptions::default(), &|_| ())?;
/// let folder = tempfile::tempdir()?;
/// let file = folder.path().join("stories.gguf");
/// write_gguf(&checkpoint, &checkpoint.tokenizer(None)?, &file, WrittenDType::Q8_0, &|_| ())?;
/// assert_eq!(Checkpoint::open(&file)?.config().n_head, 3);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// When the checkpoint is not sound in its structure, llama.cpp's GPT-2 has not the arithmetic of its configuration, a
/// width does not fill whole blocks, `file` exists, or it cannot be written; [`WeightsError::Interrupted`] if `progress` says
/// so. Nothing is then left of it.
pub fn write_gguf(
    checkpoint: &Checkpoint,
    tokenizer: &Tokenizer,
    file: &Path,
    dtype: WrittenDType,
    progress: &dyn ReadProgress,
) -> Result<(), WeightsError> {
    checkpoint.check()?;
    let config = checkpoint.config();
    let refuse = |what: String| WeightsError::Unwritable { path: file.to_owned(), what };
    check_arithmetic(config).map_err(&refuse)?;
    let metadata = metadata(config, tokenizer, dtype).map_err(&refuse)?;
    let tensors: Vec<WrittenTensor> = expected_parameters(config)
        .into_iter()
        .map(|parameter| WrittenTensor::new(parameter, dtype))
        .collect();
    tensors.iter().try_for_each(WrittenTensor::check_rows).map_err(&refuse)?;
    let header = header(&metadata, &tensors);
    let reader = ReadParameters { checkpoint, progress };
    create_file(file, |partial| {
        let mut writer = BufWriter::new(File::create(partial)?);
        writer.write_all(&header)?;
        write_padding(&mut writer, header.len())?;
        for tensor in &tensors {
            let mut written = 0;
            reader.for_each_piece(&tensor.parameter.name, PIECE, &mut |piece| {
                tensor.check_values(&piece.flatten_all()?.to_vec1()?).map_err(&refuse)?;
                let piece = QTensor::quantize(piece, tensor.dtype.ggml())?;
                let bytes = piece.data()?;
                written += bytes.len();
                writer.write_all(&bytes).map_err(|error| unwritable(file, &error))
            })?;
            write_padding(&mut writer, written)?;
        }
        Ok(writer.flush()?)
    })
}

/// A tensor of the file.
struct WrittenTensor {
    parameter: Parameter,
    dtype: WrittenDType,
}

impl WrittenTensor {
    /// A parameter in a file of mostly `dtype`.
    fn new(parameter: Parameter, dtype: WrittenDType) -> Self {
        let is_matrix = parameter.shape.len() == 2 && parameter.name != "wpe.weight";
        let dtype = if is_matrix { dtype } else { WrittenDType::F32 };
        Self { parameter, dtype }
    }

    /// The rows must fill whole blocks.
    fn check_rows(&self) -> Result<(), String> {
        let Parameter { name, shape } = &self.parameter;
        let width = shape.last().copied().unwrap_or_default();
        if width > 0 && width.is_multiple_of(self.dtype.ggml().block_size()) {
            return Ok(());
        }
        Err(format!(
            "`{name}` has rows of {width} values, which do not fill the blocks of 32 of {}; use f32, f16 or bf16",
            self.dtype
        ))
    }

    fn check_values(&self, values: &[f32]) -> Result<(), String> {
        match self.dtype {
            WrittenDType::F16 => check_range(&self.parameter.name, values),
            dtype if dtype.is_blocks() => check_finite(&self.parameter.name, values),
            _ => Ok(()),
        }
    }

    fn bytes(&self) -> usize {
        let elements = self.parameter.shape.iter().product::<usize>();
        elements / self.dtype.ggml().block_size() * self.dtype.ggml().type_size()
    }
}

/// Everything in front of the tensors.
fn header(metadata: &[(&str, Value)], tensors: &[WrittenTensor]) -> Vec<u8> {
    let mut header = b"GGUF".to_vec();
    header.extend(2u32.to_le_bytes());
    header.extend((tensors.len() as u64).to_le_bytes());
    header.extend((metadata.len() as u64).to_le_bytes());
    for (key, value) in metadata {
        push_text(&mut header, key);
        header.extend(value.type_number().to_le_bytes());
        value.push_to(&mut header);
    }
    let mut place = 0;
    for tensor in tensors {
        push_text(&mut header, &gguf_name(&tensor.parameter.name));
        let shape = &tensor.parameter.shape;
        header.extend(u32::try_from(shape.len()).unwrap_or(u32::MAX).to_le_bytes());
        // The axis that lies densest comes first.
        for size in shape.iter().rev() {
            header.extend((*size as u64).to_le_bytes());
        }
        header.extend(tensor.dtype.ggml_number().to_le_bytes());
        header.extend((place as u64).to_le_bytes());
        place += tensor.bytes().next_multiple_of(ALIGNMENT);
    }
    header
}

fn push_text(bytes: &mut Vec<u8>, text: &str) {
    bytes.extend((text.len() as u64).to_le_bytes());
    bytes.extend(text.as_bytes());
}

/// Writes zeros after `written` bytes up to the next aligned place.
fn write_padding(writer: &mut impl Write, written: usize) -> std::io::Result<()> {
    writer.write_all(&[0; ALIGNMENT][..written.next_multiple_of(ALIGNMENT) - written])
}

/// A value of the metadata.
enum Value {
    U32(u32),
    F32(f32),
    Bool(bool),
    Text(String),
    Texts(Vec<String>),
    Integers(Vec<i32>),
}

impl Value {
    const I32_NUMBER: u32 = 5;
    const TEXT_NUMBER: u32 = 8;

    /// The format's number of the type.
    fn type_number(&self) -> u32 {
        match self {
            Self::U32(_) => 4,
            Self::F32(_) => 6,
            Self::Bool(_) => 7,
            Self::Text(_) => Self::TEXT_NUMBER,
            Self::Texts(_) | Self::Integers(_) => 9,
        }
    }

    fn push_to(&self, bytes: &mut Vec<u8>) {
        let push_list = |bytes: &mut Vec<u8>, type_number: u32, length: usize| {
            bytes.extend(type_number.to_le_bytes());
            bytes.extend((length as u64).to_le_bytes());
        };
        match self {
            Self::U32(number) => bytes.extend(number.to_le_bytes()),
            Self::F32(number) => bytes.extend(number.to_le_bytes()),
            Self::Bool(flag) => bytes.push(u8::from(*flag)),
            Self::Text(text) => push_text(bytes, text),
            Self::Texts(texts) => {
                push_list(bytes, Self::TEXT_NUMBER, texts.len());
                texts.iter().for_each(|text| push_text(bytes, text));
            }
            Self::Integers(integers) => {
                push_list(bytes, Self::I32_NUMBER, integers.len());
                integers.iter().for_each(|integer| bytes.extend(integer.to_le_bytes()));
            }
        }
    }
}

/// llama.cpp computes the GPT-2 that OpenAI published, whatever a header says: anything else would come out wrong there
/// without an error.
fn check_arithmetic(config: &Gpt2Config) -> Result<(), String> {
    if config.head != HeadKind::LanguageModel {
        let class = config.head.class_name();
        return Err(format!(
            "llama.cpp's GPT-2 has the head of a language model only, and this is a {class}; write a folder"
        ));
    }
    if config.add_cross_attention {
        return Err("llama.cpp's GPT-2 has no cross-attention; write a folder".into());
    }
    let refuse =
        |what: &str| Err(format!("llama.cpp's GPT-2 ignores {what}, and its numbers would be wrong"));
    if config.activation_function != Activation::GeluTanh {
        return refuse("`activation_function` (it always takes gelu_new)");
    }
    if !config.scale_attn_weights || config.scale_attn_by_inverse_layer_idx {
        return refuse("`scale_attn_weights` and `scale_attn_by_inverse_layer_idx`");
    }
    Ok(())
}

fn metadata(
    config: &Gpt2Config,
    tokenizer: &Tokenizer,
    dtype: WrittenDType,
) -> Result<Vec<(&'static str, Value)>, String> {
    let size = |size: usize| u32::try_from(size).map(Value::U32).map_err(|error| error.to_string());
    let text = |text: &str| Value::Text(text.to_owned());
    let lists = TokenLists::new(tokenizer, config.vocab_size)?;
    #[expect(clippy::cast_possible_truncation, reason = "the format holds the epsilon in f32")]
    let epsilon = config.layer_norm_epsilon as f32;
    let mut metadata = vec![
        ("general.architecture", text("gpt2")),
        ("general.name", text("gpt2")),
        ("general.file_type", Value::U32(dtype.file_type())),
        ("general.quantization_version", Value::U32(2)),
        ("gpt2.block_count", size(config.n_layer)?),
        ("gpt2.context_length", size(config.n_positions)?),
        ("gpt2.embedding_length", size(config.n_embd)?),
        ("gpt2.feed_forward_length", size(config.inner_width())?),
        ("gpt2.attention.head_count", size(config.n_head)?),
        ("gpt2.attention.layer_norm_epsilon", Value::F32(epsilon)),
        ("tokenizer.ggml.model", text("gpt2")),
        ("tokenizer.ggml.pre", text("gpt-2")),
        ("tokenizer.ggml.tokens", Value::Texts(lists.tokens)),
        ("tokenizer.ggml.token_type", Value::Integers(lists.types)),
        ("tokenizer.ggml.merges", Value::Texts(lists.merges)),
        ("tokenizer.ggml.add_bos_token", Value::Bool(false)),
    ];
    metadata.extend(config.start_token().map(|id| ("tokenizer.ggml.bos_token_id", Value::U32(id))));
    metadata.extend(config.end_tokens().first().map(|id| ("tokenizer.ggml.eos_token_id", Value::U32(*id))));
    Ok(metadata)
}

/// A tokenizer as GGUF holds it.
struct TokenLists {
    tokens: Vec<String>,
    types: Vec<i32>,
    merges: Vec<String>,
}

impl TokenLists {
    /// The lists of a byte-level BPE, filled up to `rows` tokens.
    fn new(tokenizer: &Tokenizer, rows: usize) -> Result<Self, String> {
        /// llama.cpp's types of tokens.
        const NORMAL: i32 = 1;
        const CONTROL: i32 = 3;
        const USER_DEFINED: i32 = 4;
        const UNUSED: i32 = 5;
        let json = tokenizer.to_string(false).map_err(|error| error.to_string())?;
        let json: serde_json::Value = serde_json::from_str(&json).map_err(|error| error.to_string())?;
        let model = &json["model"];
        let merges = model["merges"].as_array().filter(|_| model["type"] == "BPE");
        let merges =
            merges.ok_or("its tokenizer is not a byte-level BPE, and llama.cpp's GPT-2 has no other")?;
        let merge = |merge: &serde_json::Value| match merge.as_array().map(Vec::as_slice) {
            Some([first, second]) => Some(format!("{} {}", first.as_str()?, second.as_str()?)),
            _ => merge.as_str().map(str::to_owned),
        };
        let merges = merges
            .iter()
            .map(merge)
            .collect::<Option<Vec<_>>>()
            .ok_or("its tokenizer has a damaged merge")?;
        let mut tokens: Vec<String> = (0..rows).map(|id| format!("[PAD{id}]")).collect();
        let mut types = vec![UNUSED; rows];
        let mut place = |token: &str, id: Option<u64>, kind: i32| {
            let place = id.and_then(|id| usize::try_from(id).ok()).filter(|id| *id < rows);
            let place =
                place.ok_or_else(|| format!("the token `{token}` is beyond the vocabulary of {rows}"))?;
            (tokens[place], types[place]) = (token.to_owned(), kind);
            Ok::<_, String>(())
        };
        for (token, id) in model["vocab"].as_object().into_iter().flatten() {
            place(token, id.as_u64(), NORMAL)?;
        }
        for added in json["added_tokens"].as_array().into_iter().flatten() {
            let kind = if added["special"] == true { CONTROL } else { USER_DEFINED };
            place(added["content"].as_str().unwrap_or_default(), added["id"].as_u64(), kind)?;
        }
        Ok(Self { tokens, types, merges })
    }
}

#[cfg(test)]
mod tests {
    use candle_core::Device;
    use candle_core::quantized::gguf_file;
    use candle_gpt2_testing::{fixture_path, temporary_folder};

    use super::*;

    /// candle's writer, which holds the whole model, gives the same bytes.
    #[test]
    fn a_file_written_tensor_by_tensor_is_that_of_candle() {
        let folder = temporary_folder();
        let checkpoint = Checkpoint::open(&fixture_path("formats/tensorflow")).unwrap();
        let tokenizer = crate::load_tokenizer(&fixture_path("tiny-checkpoint")).unwrap();
        for dtype in WrittenDType::ALL {
            let path = folder.path().join(dtype.name());
            write_gguf(&checkpoint, &tokenizer, &path, dtype, &|_| ()).unwrap();
            let metadata = metadata(checkpoint.config(), &tokenizer, dtype).unwrap();
            let metadata: Vec<(&str, gguf_file::Value)> =
                metadata.into_iter().map(|(key, value)| (key, of_candle(value))).collect();
            let metadata: Vec<_> = metadata.iter().map(|(key, value)| (*key, value)).collect();
            let tensors: Vec<(String, QTensor)> = expected_parameters(checkpoint.config())
                .into_iter()
                .map(|wanted| WrittenTensor::new(wanted, dtype))
                .map(|WrittenTensor { parameter: Parameter { name, .. }, dtype }| {
                    let values = checkpoint
                        .parameter(&name, &Device::Cpu, &|_| ())
                        .unwrap()
                        .unwrap()
                        .contiguous()
                        .unwrap();
                    (gguf_name(&name), QTensor::quantize(&values, dtype.ggml()).unwrap())
                })
                .collect();
            let tensors: Vec<_> = tensors.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
            let mut expected = std::io::Cursor::new(Vec::new());
            gguf_file::write(&mut expected, &metadata, &tensors).unwrap();
            assert!(std::fs::read(&path).unwrap() == expected.into_inner(), "{dtype}");
        }
    }

    fn of_candle(value: Value) -> gguf_file::Value {
        use gguf_file::Value as Theirs;
        match value {
            Value::U32(number) => Theirs::U32(number),
            Value::F32(number) => Theirs::F32(number),
            Value::Bool(flag) => Theirs::Bool(flag),
            Value::Text(text) => Theirs::String(text),
            Value::Texts(texts) => Theirs::Array(texts.into_iter().map(Theirs::String).collect()),
            Value::Integers(integers) => Theirs::Array(integers.into_iter().map(Theirs::I32).collect()),
        }
    }
}
