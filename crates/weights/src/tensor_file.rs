//! Files with arbitrary tensors, such as sparse autoencoders, lenses and recorded activations.
//!
//! Files are untrusted. No code in them is executed, and their tensors cannot require more memory than the
//! file size justifies. Unlike a [`Checkpoint`](crate::Checkpoint), they need no model or configuration.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::Path;

use candle_core::{Device, Tensor};

use crate::files::Files;
use crate::stored::StoredTensor;
use crate::{GivenFiles, WeightsError, formats};

/// Maximum total size of the tensors in f32, in bytes per byte of the file.
///
/// The limit allows a half-precision file in which every tensor is stored under two names.
const MAX_GROWTH: u64 = 4;

/// Contents of a tensor file: safetensors, GGUF, or the output of `torch.save`.
///
/// `torch.save` files may be `.pt`, `.pth` or `.bin`, either zip archives or the older format. See
/// [`write_tensors`](crate::write_tensors) for an example of writing and reading.
#[derive(Debug, Clone)]
pub struct TensorFile {
    /// f32 tensors on the CPU, by name. Nested dictionaries yield dotted names, `outer.inner`.
    pub tensors: BTreeMap<String, Tensor>,
    /// Strings, numbers and booleans, converted to text, by name. Names may be dotted here too.
    pub entries: BTreeMap<String, String>,
    /// Skipped tensors whose dtype cannot hold weights: integers and booleans.
    pub left_out: Vec<StoredTensor>,
}

impl TensorFile {
    /// Reads the file at `path`, and detects its format by content.
    ///
    /// # Errors
    /// If the file is missing, corrupt or not a tensor file. The message names the file and the tensor.
    pub fn read(path: &Path) -> Result<Self, WeightsError> {
        Self::read_from(&Files::Disk, path)
    }

    /// Reads a file from bytes in memory; messages use the name `file`.
    ///
    /// ```
    /// use candle_gpt2_weights::TensorFile;
    ///
    /// let (_, weights) = candle_gpt2_stories::TRANSCODERS[0];
    /// let read = TensorFile::of_bytes("sae_weights.safetensors", weights)?;
    /// assert_eq!(read.tensors["W_enc"].dims(), [256, 256]);
    /// # Ok::<(), candle_gpt2_weights::WeightsError>(())
    /// ```
    ///
    /// # Errors
    /// Fails like [`TensorFile::read`].
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
            // The readers have verified that the product of the sizes does not overflow.
            let wanted = (stored.element_count() as u64).saturating_mul(size_of::<f32>() as u64);
            bytes_left = bytes_left.checked_sub(wanted).ok_or_else(|| {
                refuse(format!(
                    "tensor `{}`: this tensor and the tensors before it need more than {MAX_GROWTH} times the {file_bytes} \
                     bytes of the file; save copies of tensors that are views of the same data",
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

    fn rejection(path: &Path) -> String {
        let message = TensorFile::read(path).expect_err("the file should be rejected").to_string();
        assert!(message.starts_with(&format!("{}: ", path.display())), "the file is not named: {message}");
        message
    }

    /// Writes a file into a new temporary folder.
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
    fn float_dtypes_become_f32() {
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
    fn nested_dictionary_keys_are_joined_with_dots() {
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
    fn cyclic_and_repeated_values_are_rejected() {
        let message = rejection(&fixture("cycle.pt"));
        assert!(message.contains("dictionaries nested more than 8 deep"), "{message}");
        let message = rejection(&fixture("repeated.pt"));
        assert!(message.contains("more than 4 times the 5872 bytes"), "{message}");
    }

    #[test]
    fn non_tensor_files_are_rejected() {
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
            let message = rejection(&path);
            assert!(message.contains(expected), "`{expected}` is not in: {message}");
        }
        assert!(rejection("/no/such/file.pt".as_ref()).contains("cannot be read"));
        assert!(rejection(&fixture_path("dictionaries")).contains("not a regular file"));
        let (_folder, path) = written([&8u64.to_le_bytes()[..], b"{}      "].concat());
        assert!(TensorFile::read(&path).unwrap().tensors.is_empty());
    }

    /// Checks that truncated and corrupted files are read safely.
    ///
    /// A truncated file must be an error. A corrupted byte may be an error or change the contents, but must
    /// not cause a panic or excessive memory use.
    #[test]
    fn damaged_files_cause_no_panic_or_large_allocation() {
        for name in ["openai-topk.pt", "openai-relu.pt", "saelens-plain/sae_weights.safetensors"] {
            let whole = std::fs::read(fixture(name)).unwrap();
            let (_folder, path) = written(&whole);
            for length in (0..whole.len()).step_by(7) {
                std::fs::write(&path, &whole[..length]).unwrap();
                rejection(&path);
            }
            for offset in 0..whole.len() {
                let mut damaged = whole.clone();
                damaged[offset] ^= [0x01, 0x80, 0xff][offset % 3];
                std::fs::write(&path, &damaged).unwrap();
                if let Ok(file) = TensorFile::read(&path) {
                    let elements: usize = file.tensors.values().map(Tensor::elem_count).sum();
                    assert!(elements <= whole.len(), "{name}, byte {offset}: {elements} elements");
                }
            }
        }
    }
}
