//! Export of a checkpoint as a GGUF file for llama.cpp.
//!
//! The file has a header (metadata, then the name, shape, type and offset of each tensor), followed by the
//! tensors, each aligned to 32 bytes. This is version 3 of the format in ggml's `docs/gguf.md`.
//!
//! Sizes follow from shapes and types. The header is therefore written first, then one tensor at a time, in
//! chunks. candle's own writer holds all tensors in memory; except for the version number 2, its output is
//! identical.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

use candle_core::quantized::QTensor;
use candle_gpt2::{Activation, Gpt2Config, HeadKind, Parameter, expected_parameters};
use candle_gpt2_arithmetic::NumberType;

use crate::ggml::GgmlType;
use crate::gguf_header::{Metadata, Value, write_text};
use crate::gguf_tokenizer::GgufTokenizer;
use crate::naming::gguf_name;
use crate::progress::PIECE;
use crate::readers::ReadParameters;
use crate::replace::{create_file, unwritable};
use crate::rounding::{check_finite, check_range};
use crate::{Checkpoint, Companions, ReadProgress, Tokenizer, WeightsError, WrittenDType};

/// Format version. Little-endian files of versions 2 and 3 have the same layout.
const VERSION: u32 = 3;
/// Alignment of tensors in bytes.
const ALIGNMENT: usize = 32;

/// Writes a checkpoint as a GGUF file, together with the tokenizer.
///
/// Settings of the [`Companions`] are included if GGUF has keys for them. llama.cpp can load the file. The
/// position embedding, norms and biases stay in f32, as in files from llama.cpp's own converter. Returns
/// notes on settings that the file cannot store. `progress` receives the number of checkpoint bytes read
/// since its last call, and can interrupt the export.
///
/// ```
/// use candle_gpt2_weights::{Checkpoint, GivenFiles, OpenOptions, WrittenDType, write_gguf};
///
/// let files = GivenFiles::of_bytes("stories", candle_gpt2_stories::FILES);
/// let checkpoint = Checkpoint::open_given(files, &OpenOptions::default(), &|_| ())?;
/// let folder = tempfile::tempdir()?;
/// let file = folder.path().join("stories.gguf");
/// write_gguf(&checkpoint, &checkpoint.companions(None)?, &file, WrittenDType::Q8_0, &|_| ())?;
/// assert_eq!(Checkpoint::open(&file)?.config().n_head, 4);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// Fails in these cases, and leaves nothing behind:
/// - The checkpoint is structurally invalid.
/// - llama.cpp's GPT-2 does not support the configuration.
/// - GGUF cannot express the tokenizer.
/// - A row does not fill whole blocks.
/// - `file` exists, or writing fails.
/// - `progress` requests an interruption ([`WeightsError::Interrupted`]).
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
    let ggml = GgmlType::of(dtype.number_type());
    let ggml = ggml.ok_or_else(|| refuse(format!("GGUF does not support {dtype}")))?;
    let (metadata, notes) = match companions.tokenizer() {
        Some(tokenizer) => whole_metadata(config, tokenizer, companions, ggml),
        None => whole_metadata(config, &checkpoint.tokenizer(None)?, companions, ggml),
    }
    .map_err(&refuse)?;
    let tensors: Vec<WrittenTensor> = expected_parameters(config)
        .into_iter()
        .map(|parameter| WrittenTensor::new(parameter, ggml))
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
                let piece = QTensor::quantize(piece, tensor.ggml.candle)?;
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

/// Returns all metadata, and notes on settings that GGUF cannot store.
fn whole_metadata(
    config: &Gpt2Config,
    tokenizer: &Tokenizer,
    companions: &Companions,
    ggml: &GgmlType,
) -> Result<(Metadata, Vec<String>), String> {
    let tokenizer = GgufTokenizer::new(tokenizer, config.vocab_size)?;
    let (settings, notes) = companions.gguf_settings(config, (tokenizer.before, tokenizer.after))?;
    let mut metadata = metadata(config, tokenizer, ggml)?;
    for (key, value) in settings {
        match metadata.iter_mut().find(|(known, _)| *known == key) {
            Some((_, known)) => *known = value,
            None => metadata.push((key, value)),
        }
    }
    Ok((metadata, notes))
}

/// Tensor to write.
struct WrittenTensor {
    parameter: Parameter,
    ggml: &'static GgmlType,
}

impl WrittenTensor {
    /// Creates a parameter's tensor, whose type is `mostly` for a matrix and f32 otherwise.
    fn new(parameter: Parameter, mostly: &'static GgmlType) -> Self {
        let ggml = if parameter.kind.is_multiplied() { mostly } else { GgmlType::F32 };
        Self { parameter, ggml }
    }

    /// Checks that the rows fill whole blocks.
    fn check_rows(&self) -> Result<(), String> {
        let Parameter { name, shape, .. } = &self.parameter;
        let width = shape.last().copied().unwrap_or_default() as u64;
        let GgmlType { dtype, .. } = self.ggml;
        let [block, _] = dtype.block();
        if width > 0 && width.is_multiple_of(block) {
            return Ok(());
        }
        // Blocks of 256 do not fit a hidden size of 1600, as in gpt2-xl.
        let advice = if width.is_multiple_of(32) { "q8_0, q5_0, q4_0, " } else { "" };
        Err(format!(
            "`{name}` has rows of {width} values, not a multiple of the block size {block} of {dtype}; use {advice}f32, f16 or bf16"
        ))
    }

    fn check_values(&self, values: &[f32]) -> Result<(), String> {
        match self.ggml.dtype {
            NumberType::F16 => check_range(&self.parameter.name, values),
            dtype if dtype.is_blocks() => check_finite(&self.parameter.name, values),
            _ => Ok(()),
        }
    }

    fn bytes(&self) -> u64 {
        let elements = self.parameter.shape.iter().product::<usize>();
        self.ggml.dtype.bytes(elements as u64).unwrap_or_default()
    }
}

/// Encodes everything before the tensors.
fn header(metadata: &[(String, Value)], tensors: &[WrittenTensor]) -> Vec<u8> {
    let mut header = b"GGUF".to_vec();
    header.extend(VERSION.to_le_bytes());
    header.extend((tensors.len() as u64).to_le_bytes());
    header.extend((metadata.len() as u64).to_le_bytes());
    for (key, value) in metadata {
        write_text(&mut header, key);
        value.write_to(&mut header);
    }
    let mut offset = 0;
    for tensor in tensors {
        write_text(&mut header, &gguf_name(&tensor.parameter.name));
        let shape = &tensor.parameter.shape;
        header.extend(u32::try_from(shape.len()).unwrap_or(u32::MAX).to_le_bytes());
        // The fastest-varying dimension comes first.
        for size in shape.iter().rev() {
            header.extend((*size as u64).to_le_bytes());
        }
        header.extend(tensor.ggml.id.to_le_bytes());
        header.extend(u64::to_le_bytes(offset));
        offset += tensor.bytes().next_multiple_of(ALIGNMENT as u64);
    }
    header
}

/// Pads `written` bytes with zeros up to the next aligned offset.
fn write_padding(writer: &mut impl Write, written: usize) -> std::io::Result<()> {
    writer.write_all(&[0; ALIGNMENT][..written.next_multiple_of(ALIGNMENT) - written])
}

/// Rejects configurations that llama.cpp cannot compute.
///
/// llama.cpp always computes the GPT-2 published by OpenAI, regardless of the header. Any other configuration
/// would silently give wrong results.
fn check_arithmetic(config: &Gpt2Config) -> Result<(), String> {
    if config.head != HeadKind::LanguageModel {
        let class = config.head.class_name();
        return Err(format!(
            "llama.cpp's GPT-2 supports only the language-model head, but this is a {class}; write a folder"
        ));
    }
    if config.add_cross_attention {
        return Err("llama.cpp's GPT-2 has no cross-attention; write a folder".into());
    }
    let refuse = |what: &str| Err(format!("llama.cpp's GPT-2 ignores {what}, so its results would be wrong"));
    if config.activation_function != Activation::GeluTanh {
        return refuse("`activation_function` (it always uses gelu_new)");
    }
    if !config.scale_attn_weights || config.scale_attn_by_inverse_layer_idx {
        return refuse("`scale_attn_weights` and `scale_attn_by_inverse_layer_idx`");
    }
    Ok(())
}

/// Builds the metadata for a model with these tokens.
fn metadata(config: &Gpt2Config, tokenizer: GgufTokenizer, ggml: &GgmlType) -> Result<Metadata, String> {
    let size = |size: usize| u32::try_from(size).map(Value::u32).map_err(|error| error.to_string());
    #[expect(clippy::cast_possible_truncation, reason = "the format holds the epsilon in f32")]
    let epsilon = config.layer_norm_epsilon as f32;
    let metadata = [
        ("general.architecture", Value::text("gpt2")),
        ("general.name", Value::text("gpt2")),
        ("general.file_type", Value::u32(ggml.file_type.ok_or("llama.cpp has no such file type")?)),
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

    /// Compares the output with candle's writer, which holds the whole model in memory.
    ///
    /// Both write the same bytes after the version.
    #[test]
    fn streamed_file_matches_candles_writer() {
        let folder = temporary_folder();
        let checkpoint = Checkpoint::open(fixture_path("formats/tensorflow")).unwrap();
        let tokenizer = crate::load_tokenizer(fixture_path("tiny-checkpoint")).unwrap();
        let companions = Companions::from(tokenizer.clone());
        let width = checkpoint.config().n_embd;
        for dtype in WrittenDType::all() {
            let ggml = GgmlType::of(dtype.number_type()).unwrap();
            if !width.is_multiple_of(ggml.candle.block_size()) {
                continue;
            }
            let path = folder.path().join(dtype.name());
            write_gguf(&checkpoint, &companions, &path, dtype, &|_| ()).unwrap();
            let (metadata, _) = whole_metadata(checkpoint.config(), &tokenizer, &companions, ggml).unwrap();
            let metadata: Vec<(String, gguf_file::Value)> =
                metadata.into_iter().map(|(key, value)| (key, to_candle(value))).collect();
            let metadata: Vec<_> = metadata.iter().map(|(key, value)| (key.as_str(), value)).collect();
            let tensors: Vec<(String, QTensor)> = expected_parameters(checkpoint.config())
                .into_iter()
                .map(|wanted| WrittenTensor::new(wanted, ggml))
                .map(|WrittenTensor { parameter: Parameter { name, .. }, ggml }| {
                    let values = checkpoint
                        .parameter(&name, &Device::Cpu, &|_| ())
                        .unwrap()
                        .unwrap()
                        .contiguous()
                        .unwrap();
                    (gguf_name(&name), QTensor::quantize(&values, ggml.candle).unwrap())
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

    fn to_candle(value: Value) -> gguf_file::Value {
        use gguf_file::Value as CandleValue;
        match &value {
            Value::Text(text) => CandleValue::String(text.clone()),
            Value::Texts(texts) => {
                CandleValue::Array(texts.iter().cloned().map(CandleValue::String).collect())
            }
            Value::Scalars(..) => {
                let integers = value.as_integers().unwrap().into_iter();
                CandleValue::Array(
                    integers.map(|number| CandleValue::I32(i32::try_from(number).unwrap())).collect(),
                )
            }
            Value::Scalar(12, _) => CandleValue::F64(value.as_f64().unwrap()),
            _ => match (value.as_bool(), value.as_f32()) {
                (Some(flag), _) => CandleValue::Bool(flag),
                (_, Some(number)) => CandleValue::F32(number),
                _ => CandleValue::U32(u32::try_from(value.as_u64().unwrap()).unwrap()),
            },
        }
    }
}
