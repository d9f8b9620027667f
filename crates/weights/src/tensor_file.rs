//! All tensors of one file, whatever they belong to: dictionaries of features, lenses, recorded values.
//!
//! A file is not trusted: nothing in it is run, and its tensors may claim no more memory than its size explains. What a
//! [`Checkpoint`](crate::Checkpoint) asks beyond that, a model with a configuration, is not asked here.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::Path;

use candle_core::{Device, Tensor};

use crate::files::Files;
use crate::stored::StoredTensor;
use crate::{GivenFiles, WeightsError, formats};

/// Most bytes that the tensors may take in f32 for each byte of the file: twice those of a file in half precision, of whose
/// tensors every one is there under two names.
const MAX_GROWTH: u64 = 4;

/// The contents of one file: safetensors, GGUF, or what `torch.save` wrote (`.pt`, `.pth`, `.bin`; zip archive or older).
/// [`write_tensors`](crate::write_tensors) has an example of both.
#[derive(Debug, Clone)]
pub struct TensorFile {
    /// Tensors in f32 on the CPU, by name. Those in dictionaries inside others have all keys in their name, `outer.inner`.
    pub tensors: BTreeMap<String, Tensor>,
    /// The other texts, numbers and booleans of the file, written as text and named in the same way.
    pub entries: BTreeMap<String, String>,
    /// Tensors that were not read, because their type holds no weights: whole numbers and booleans.
    pub left_out: Vec<StoredTensor>,
}

impl TensorFile {
    /// Reads the file at `path`, whose format its content tells.
    ///
    /// # Errors
    /// When it is missing, something else than a file of tensors, or damaged: the message names the file, and the tensor.
    pub fn read(path: &Path) -> Result<Self, WeightsError> {
        Self::read_from(&Files::Disk, path)
    }

    /// Reads a file whose bytes are in memory; messages call it by the name `file`.
    ///
    /// ```
    /// use candle_gpt2_weights::TensorFile;
    ///
    /// let read = TensorFile::of_bytes("model.safetensors", candle_gpt2_stories::WEIGHTS)?;
    /// assert_eq!(read.tensors["transformer.wte.weight"].dims(), [2048, 192]);
    /// # Ok::<(), candle_gpt2_weights::WeightsError>(())
    /// ```
    ///
    /// # Errors
    /// As [`TensorFile::read`].
    pub fn of_bytes(file: &str, bytes: impl Into<Cow<'static, [u8]>>) -> Result<Self, WeightsError> {
        let files = GivenFiles::new(file).with_bytes(file, bytes);
        Self::read_from(&Files::Given(files), Path::new(file))
    }

    fn read_from(files: &Files, path: &Path) -> Result<Self, WeightsError> {
        let (source, entries) = formats::open_tensors(files, path)?;
        let refuse = |what: String| WeightsError::NotWeights { path: path.to_owned(), what };
        let file_bytes: u64 = source.files.iter().map(|file| file.len()).sum();
        let (read, left_out): (Vec<_>, Vec<_>) =
            source.tensors.into_iter().partition(|tensor| tensor.dtype.holds_weights());
        let mut bytes_left = file_bytes.saturating_mul(MAX_GROWTH);
        let mut tensors = BTreeMap::new();
        for stored in read {
            // The readers have checked that the product of the sizes has no overflow.
            let wanted = (stored.element_count() as u64).saturating_mul(size_of::<f32>() as u64);
            bytes_left = bytes_left.checked_sub(wanted).ok_or_else(|| {
                refuse(format!(
                    "tensor `{}`: with it the tensors take more than {MAX_GROWTH} times the {file_bytes} bytes of the file; \
                     save copies of those that are views of the same data",
                    stored.name
                ))
            })?;
            let tensor = stored.read(&source.files, &Device::Cpu)?;
            tensors.insert(stored.name, tensor);
        }
        Ok(Self { tensors, entries, left_out })
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use candle_core::DType;
    use candle_gpt2_testing::{fixture_path, temporary_folder, values};
    use tempfile::TempDir;

    use super::*;

    fn fixture(name: &str) -> PathBuf {
        fixture_path("dictionaries").join(name)
    }

    fn refusal(path: &Path) -> String {
        let message = TensorFile::read(path).expect_err("a refusal").to_string();
        assert!(message.starts_with(&format!("{}: ", path.display())), "the file is not named: {message}");
        message
    }

    /// A file in a folder of its own.
    fn written(contents: impl AsRef<[u8]>) -> (TempDir, PathBuf) {
        let folder = temporary_folder();
        let path = folder.path().join("file.pt");
        std::fs::write(&path, contents).unwrap();
        (folder, path)
    }

    #[test]
    fn tensors_of_every_format_are_read() {
        let zip = TensorFile::read(&fixture("openai-topk.pt")).unwrap();
        let names: Vec<&str> = zip.tensors.keys().map(String::as_str).collect();
        let expected = [
            "decoder.weight",
            "encoder.weight",
            "latent_bias",
            "latents_activation_frequency",
            "latents_mean_square",
            "pre_bias",
        ];
        assert_eq!(names, expected);
        assert_eq!(values(&zip.tensors["latents_activation_frequency"]), [1.0; 10]);
        let entries = [
            ("activation", "TopK"),
            ("activation_state_dict.k", "3"),
            ("activation_state_dict.postact_fn", "ReLU"),
        ];
        assert_eq!(zip.entries, entries.map(|(key, value)| (key.to_owned(), value.to_owned())).into());
        let [left_out] = zip.left_out.as_slice() else { panic!("{:?}", zip.left_out) };
        assert_eq!(
            (left_out.name.as_str(), left_out.dtype.to_string()),
            ("stats_last_nonzero", "int64".into())
        );

        let legacy = TensorFile::read(&fixture("openai-relu.pt")).unwrap();
        assert_eq!(legacy.tensors.keys().collect::<Vec<_>>(), expected);
        assert_eq!(legacy.tensors["encoder.weight"].dims(), [10, 6]);
        assert!(legacy.entries.is_empty());

        let safetensors = TensorFile::read(&fixture("expected.safetensors")).unwrap();
        assert!(safetensors.entries["torch"].starts_with("2."));
        let direct = candle_core::safetensors::load(fixture("expected.safetensors"), &Device::Cpu).unwrap();
        assert_eq!(safetensors.tensors.len(), direct.len());
        for (name, tensor) in &safetensors.tensors {
            assert_eq!(
                (tensor.dims(), values(tensor)),
                (direct[name].dims(), values(&direct[name])),
                "{name}"
            );
        }
    }

    #[test]
    fn half_precision_becomes_f32() {
        let folder = temporary_folder();
        let path = folder.path().join("half.safetensors");
        let tensor = Tensor::new(&[1.5f32, -2.0], &Device::Cpu).unwrap();
        for dtype in [DType::F16, DType::BF16, DType::F64] {
            tensor.to_dtype(dtype).unwrap().save_safetensors("x", &path).unwrap();
            let read = &TensorFile::read(&path).unwrap().tensors["x"];
            assert_eq!((read.dtype(), values(read)), (DType::F32, vec![1.5, -2.0]));
        }
    }

    #[test]
    fn names_of_nested_dictionaries_have_dots() {
        let file = TensorFile::read(&fixture("nested.pt")).unwrap();
        assert_eq!(file.tensors.keys().collect::<Vec<_>>(), ["inner.tensor", "tensor"]);
        assert_eq!(values(&file.tensors["inner.tensor"]), [0.0, 1.0]);
        assert_eq!(values(&file.tensors["tensor"]), [0.0, 1.0, 2.0]);
        assert_eq!(
            (file.entries["inner.flag"].as_str(), file.entries["inner.rate"].as_str()),
            ("true", "0.5")
        );
    }

    #[test]
    fn what_would_take_more_than_the_file_explains_is_refused() {
        let message = refusal(&fixture("cycle.pt"));
        assert!(message.contains("dictionaries more than 8 deep"), "{message}");
        let message = refusal(&fixture("repeated.pt"));
        assert!(message.contains("more than 4 times the 5872 bytes"), "{message}");
    }

    #[test]
    fn other_files_are_refused() {
        for (contents, expected) in [
            (&b""[..], "the file is empty"),
            (b"<!DOCTYPE html>", "an HTML or XML page"),
            (b"version https://git-lfs.github.com/spec/v1\nsize 5\n", "git lfs pull"),
            (b"{\"d_in\": 768}", "JSON text in place of the weights"),
            (b"PK\x03\x04 and nothing else", "a damaged PyTorch file"),
            (b"GGUF\x03\x00\x00\x00", "a damaged GGUF file"),
            (b"some words that are nothing", "not a safetensors file"),
        ] {
            let (_folder, path) = written(contents);
            let message = refusal(&path);
            assert!(message.contains(expected), "`{expected}` is not in: {message}");
        }
        assert!(refusal("/no/such/file.pt".as_ref()).contains("cannot be read"));
        assert!(refusal(&fixture_path("dictionaries")).contains("not a regular file"));
        let (_folder, path) = written([&8u64.to_le_bytes()[..], b"{}      "].concat());
        assert!(TensorFile::read(&path).unwrap().tensors.is_empty());
    }

    /// A file that is cut off is an error; one with a wrong byte is an error or another file, and no more than that.
    #[test]
    fn damaged_files_do_no_harm() {
        for name in ["openai-topk.pt", "openai-relu.pt", "saelens-plain/sae_weights.safetensors"] {
            let whole = std::fs::read(fixture(name)).unwrap();
            let (_folder, path) = written(&whole);
            for length in (0..whole.len()).step_by(7) {
                std::fs::write(&path, &whole[..length]).unwrap();
                refusal(&path);
            }
            for place in 0..whole.len() {
                let mut damaged = whole.clone();
                damaged[place] ^= [0x01, 0x80, 0xff][place % 3];
                std::fs::write(&path, &damaged).unwrap();
                if let Ok(file) = TensorFile::read(&path) {
                    let elements: usize = file.tensors.values().map(Tensor::elem_count).sum();
                    assert!(elements <= whole.len(), "{name}, byte {place}: {elements} elements");
                }
            }
        }
    }
}
