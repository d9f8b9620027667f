//! Writing a checkpoint as a GGUF file for llama.cpp.
//!
//! The file is a header (metadata, then name, shape, type and place of every tensor) and the tensors, each at a multiple of 32
//! bytes: version 3 of the format in ggml's `docs/gguf.md`. Sizes follow from shapes and types, so the header is written first
//! and then one tensor after the other, in pieces. candle's writer, which gives the same bytes with version 2, holds all tensors in memory at
//! once; that is why there is one here.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

use candle_core::quantized::QTensor;
use candle_gpt2::{Activation, Gpt2Config, HeadKind, Parameter, expected_parameters};

use crate::gguf_header::{Metadata, Value, write_text};
use crate::gguf_tokenizer::GgufTokenizer;
use crate::naming::gguf_name;
use crate::progress::PIECE;
use crate::readers::ReadParameters;
use crate::replace::{create_file, unwritable};
use crate::rounding::{check_finite, check_range};
use crate::{Checkpoint, Companions, ReadProgress, Tokenizer, WeightsError, WrittenDType};

/// Version of the format. Little-endian files of versions 2 and 3 have the same layout.
const VERSION: u32 = 3;
/// Tensors start at multiples of this many bytes.
const ALIGNMENT: usize = 32;

/// Writes a GGUF file with the tokenizer inside, and the settings of the [`Companions`] that the format has keys for. llama.cpp
/// loads it. The position embedding, norms and biases stay in f32, as its own converter leaves them. Returns notes on settings
/// that the file does not hold. `progress` receives the number of bytes of the checkpoint read since the last
/// call, and may end it.
///
/// ```
/// use candle_gpt2_weights::{Checkpoint, GivenFiles, OpenOptions, WrittenDType, write_gguf};
///
/// let files = GivenFiles::new("stories")
///     .with_bytes("config.json", candle_gpt2_stories::CONFIG)
///     .with_bytes("tokenizer.json", candle_gpt2_stories::TOKENIZER)
///     .with_bytes("model.safetensors", candle_gpt2_stories::WEIGHTS);
/// let checkpoint = Checkpoint::open_given(files, &OpenOptions::default(), &|_| ())?;
/// let folder = tempfile::tempdir()?;
/// let file = folder.path().join("stories.gguf");
/// write_gguf(&checkpoint, &checkpoint.companions(None)?, &file, WrittenDType::Q8_0, &|_| ())?;
/// assert_eq!(Checkpoint::open(&file)?.config().n_head, 3);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// When the checkpoint is not sound in its structure, llama.cpp's GPT-2 has not the arithmetic of its configuration, GGUF cannot
/// express the tokenizer, a width does not fill whole blocks, `file` exists, or it cannot be written; [`WeightsError::Interrupted`] if `progress` says
/// so. Nothing is then left of it.
pub fn write_gguf(
    checkpoint: &Checkpoint,
    companions: &Companions,
    file: &Path,
    dtype: WrittenDType,
    progress: &dyn ReadProgress,
) -> Result<Vec<String>, WeightsError> {
    checkpoint.check()?;
    let config = checkpoint.config();
    let refuse = |what: String| WeightsError::Unwritable { path: file.to_owned(), what };
    check_arithmetic(config).map_err(&refuse)?;
    let (metadata, notes) = match companions.tokenizer() {
        Some(tokenizer) => whole_metadata(config, tokenizer, companions, dtype),
        None => whole_metadata(config, &checkpoint.tokenizer(None)?, companions, dtype),
    }
    .map_err(&refuse)?;
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
    })?;
    Ok(notes)
}

/// All metadata, and notes on settings that it does not hold.
fn whole_metadata(
    config: &Gpt2Config,
    tokenizer: &Tokenizer,
    companions: &Companions,
    dtype: WrittenDType,
) -> Result<(Metadata, Vec<String>), String> {
    let tokenizer = GgufTokenizer::new(tokenizer, config.vocab_size)?;
    let (settings, notes) = companions.gguf_settings(config, (tokenizer.before, tokenizer.after))?;
    let mut metadata = metadata(config, tokenizer, dtype)?;
    for (key, value) in settings {
        match metadata.iter_mut().find(|(known, _)| *known == key) {
            Some((_, known)) => *known = value,
            None => metadata.push((key, value)),
        }
    }
    Ok((metadata, notes))
}

/// A tensor of the file.
struct WrittenTensor {
    parameter: Parameter,
    dtype: WrittenDType,
}

impl WrittenTensor {
    /// A parameter in a file of mostly `dtype`.
    fn new(parameter: Parameter, dtype: WrittenDType) -> Self {
        let dtype = if parameter.kind.is_multiplied() { dtype } else { WrittenDType::F32 };
        Self { parameter, dtype }
    }

    /// The rows must fill whole blocks.
    fn check_rows(&self) -> Result<(), String> {
        let Parameter { name, shape, .. } = &self.parameter;
        let width = shape.last().copied().unwrap_or_default();
        let block = self.dtype.ggml().block_size();
        if width > 0 && width.is_multiple_of(block) {
            return Ok(());
        }
        // Blocks of 256 fit no model of 1600, such as gpt2-xl.
        let advice = if width.is_multiple_of(32) { "q8_0, q5_0, q4_0, " } else { "" };
        Err(format!(
            "`{name}` has rows of {width} values, which do not fill the blocks of {block} of {}; use {advice}f32, f16 or bf16",
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
fn header(metadata: &[(String, Value)], tensors: &[WrittenTensor]) -> Vec<u8> {
    let mut header = b"GGUF".to_vec();
    header.extend(VERSION.to_le_bytes());
    header.extend((tensors.len() as u64).to_le_bytes());
    header.extend((metadata.len() as u64).to_le_bytes());
    for (key, value) in metadata {
        write_text(&mut header, key);
        value.write_to(&mut header);
    }
    let mut place = 0;
    for tensor in tensors {
        write_text(&mut header, &gguf_name(&tensor.parameter.name));
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

/// Writes zeros after `written` bytes up to the next aligned place.
fn write_padding(writer: &mut impl Write, written: usize) -> std::io::Result<()> {
    writer.write_all(&[0; ALIGNMENT][..written.next_multiple_of(ALIGNMENT) - written])
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

/// The metadata of a model with these tokens.
fn metadata(config: &Gpt2Config, tokenizer: GgufTokenizer, dtype: WrittenDType) -> Result<Metadata, String> {
    let size = |size: usize| u32::try_from(size).map(Value::u32).map_err(|error| error.to_string());
    #[expect(clippy::cast_possible_truncation, reason = "the format holds the epsilon in f32")]
    let epsilon = config.layer_norm_epsilon as f32;
    let metadata = [
        ("general.architecture", Value::text("gpt2")),
        ("general.name", Value::text("gpt2")),
        ("general.file_type", Value::u32(dtype.file_type())),
        ("general.quantization_version", Value::u32(2)),
        ("gpt2.block_count", size(config.n_layer)?),
        ("gpt2.context_length", size(config.n_positions)?),
        ("gpt2.embedding_length", size(config.n_embd)?),
        ("gpt2.feed_forward_length", size(config.inner_width())?),
        ("gpt2.attention.head_count", size(config.n_head)?),
        ("gpt2.attention.layer_norm_epsilon", Value::f32(epsilon)),
        ("tokenizer.ggml.model", Value::text("gpt2")),
        ("tokenizer.ggml.pre", Value::text("gpt-2")),
        ("tokenizer.ggml.tokens", Value::Texts(tokenizer.tokens)),
        ("tokenizer.ggml.token_type", Value::i32s(&tokenizer.types)),
        ("tokenizer.ggml.merges", Value::Texts(tokenizer.merges)),
    ];
    Ok(metadata.into_iter().map(|(key, value)| (key.to_owned(), value)).collect())
}

#[cfg(test)]
mod tests {
    use candle_core::Device;
    use candle_core::quantized::gguf_file;
    use candle_gpt2_testing::{fixture_path, temporary_folder};

    use super::*;

    /// candle's writer, which holds the whole model, gives the same bytes after the version.
    #[test]
    fn a_file_written_tensor_by_tensor_is_that_of_candle() {
        let folder = temporary_folder();
        let checkpoint = Checkpoint::open(&fixture_path("formats/tensorflow")).unwrap();
        let tokenizer = crate::load_tokenizer(&fixture_path("tiny-checkpoint")).unwrap();
        let companions = Companions::from(tokenizer.clone());
        let width = checkpoint.config().n_embd;
        let written =
            WrittenDType::ALL.into_iter().filter(|dtype| width.is_multiple_of(dtype.ggml().block_size()));
        for dtype in written {
            let path = folder.path().join(dtype.name());
            write_gguf(&checkpoint, &companions, &path, dtype, &|_| ()).unwrap();
            let (metadata, _) = whole_metadata(checkpoint.config(), &tokenizer, &companions, dtype).unwrap();
            let metadata: Vec<(String, gguf_file::Value)> =
                metadata.into_iter().map(|(key, value)| (key, of_candle(value))).collect();
            let metadata: Vec<_> = metadata.iter().map(|(key, value)| (key.as_str(), value)).collect();
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
            let mut expected = expected.into_inner();
            expected[4..8].copy_from_slice(&3u32.to_le_bytes());
            assert!(std::fs::read(&path).unwrap() == expected, "{dtype}");
        }
    }

    fn of_candle(value: Value) -> gguf_file::Value {
        use gguf_file::Value as Theirs;
        match &value {
            Value::Text(text) => Theirs::String(text.clone()),
            Value::Texts(texts) => Theirs::Array(texts.iter().cloned().map(Theirs::String).collect()),
            Value::Scalars(..) => {
                let integers = value.as_integers().unwrap().into_iter();
                Theirs::Array(integers.map(|number| Theirs::I32(i32::try_from(number).unwrap())).collect())
            }
            Value::Scalar(12, _) => Theirs::F64(value.as_f64().unwrap()),
            _ => match (value.as_bool(), value.as_f32()) {
                (Some(flag), _) => Theirs::Bool(flag),
                (_, Some(number)) => Theirs::F32(number),
                _ => Theirs::U32(u32::try_from(value.as_u64().unwrap()).unwrap()),
            },
        }
    }
}
