//! Export of control vectors for llama.cpp.
//!
//! Source: llama.cpp, `common/common.cpp` (`common_control_vector_load_one`) and `tools/cvector-generator`.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

use candle_core::quantized::gguf_file::{self, Value};
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{DType, Tensor};

use crate::{WeightsError, create_file};

/// Writes directions as a GGUF file for llama.cpp's `--control-vector`.
///
/// llama.cpp adds direction `l` to the output of block `l` at every position.
///
/// ```
/// use std::collections::BTreeMap;
///
/// use candle_core::{Device, Tensor};
/// use candle_gpt2_weights::{TensorFile, write_control_vector};
///
/// let folder = tempfile::tempdir()?;
/// let file = folder.path().join("love.gguf");
/// write_control_vector(&file, &BTreeMap::from([(2, Tensor::new(&[1f32, 2., 3.], &Device::Cpu)?)]))?;
/// let read = TensorFile::read(&file)?;
/// assert_eq!(read.tensors["direction.2"].to_vec1::<f32>()?, [1., 2., 3.]);
/// assert_eq!(read.entries["general.architecture"], "controlvector");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Shapes
/// Directions `(C)`.
///
/// # Errors
/// If `directions` is empty or contains block 0, which the format cannot store, or if `path` exists or is
/// not writable. A failed write leaves no file behind.
pub fn write_control_vector(path: &Path, directions: &BTreeMap<usize, Tensor>) -> Result<(), WeightsError> {
    let refuse = |what: &str| WeightsError::Unwritable { path: path.to_owned(), what: what.to_owned() };
    if directions.is_empty() {
        return Err(refuse("a control vector needs at least one direction"));
    }
    if directions.contains_key(&0) {
        return Err(refuse("control vectors begin at block 1; leave out the direction for block 0"));
    }
    let count = i32::try_from(directions.len()).map_err(|_| refuse("too many directions"))?;
    let metadata = [
        ("general.architecture", Value::String("controlvector".into())),
        ("controlvector.model_hint", Value::String("gpt2".into())),
        ("controlvector.layer_count", Value::I32(count)),
    ];
    let metadata: Vec<_> = metadata.iter().map(|(key, value)| (*key, value)).collect();
    create_file(path, |partial| {
        let mut tensors = Vec::new();
        for (layer, direction) in directions {
            let direction = direction.to_dtype(DType::F32)?.flatten_all()?;
            tensors.push((format!("direction.{layer}"), QTensor::quantize(&direction, GgmlDType::F32)?));
        }
        let tensors: Vec<_> = tensors.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
        let mut writer = BufWriter::new(File::create(partial)?);
        gguf_file::write(&mut writer, &metadata, &tensors)?;
        Ok(writer.flush()?)
    })
}

#[cfg(test)]
mod tests {
    use candle_core::Device;
    use candle_gpt2_testing::temporary_folder;

    use super::*;
    use crate::TensorFile;

    #[test]
    fn names_and_metadata_follow_llama_cpp() {
        let folder = temporary_folder();
        let file = folder.path().join("vector.gguf");
        let direction = |number: f32| Tensor::new(&[number, -1.5], &Device::Cpu).unwrap();
        let directions = BTreeMap::from([(1, direction(0.25)), (11, direction(3.0))]);
        write_control_vector(&file, &directions).unwrap();
        let mut opened = File::open(&file).unwrap();
        let content = gguf_file::Content::read(&mut opened).unwrap();
        assert_eq!(content.metadata["controlvector.model_hint"].to_string().unwrap(), "gpt2");
        assert_eq!(content.metadata["controlvector.layer_count"].to_i32().unwrap(), 2);
        for (layer, direction) in &directions {
            let name = format!("direction.{layer}");
            let stored = &content.tensor_infos[&name];
            assert_eq!((stored.ggml_dtype, stored.shape.dims()), (GgmlDType::F32, &[2][..]));
            let read = content.tensor(&mut opened, &name, &Device::Cpu).unwrap();
            let read: Vec<f32> = read.dequantize(&Device::Cpu).unwrap().to_vec1().unwrap();
            assert_eq!(read, direction.to_vec1::<f32>().unwrap());
        }
        let read = TensorFile::read(&file).unwrap();
        assert_eq!(read.tensors.keys().collect::<Vec<_>>(), ["direction.1", "direction.11"]);
        assert_eq!(read.entries["controlvector.layer_count"], "2");
    }

    #[test]
    fn invalid_directions_and_existing_files_are_rejected() {
        let folder = temporary_folder();
        let file = folder.path().join("vector.gguf");
        let at_layer = |layer: usize| BTreeMap::from([(layer, Tensor::new(&[1f32], &Device::Cpu).unwrap())]);
        for (directions, expected) in
            [(at_layer(0), "begin at block 1"), (BTreeMap::new(), "at least one direction")]
        {
            let error = write_control_vector(&file, &directions).unwrap_err().to_string();
            assert!(error.contains(expected) && error.contains("vector.gguf"), "{error}");
            assert!(!file.exists());
        }
        write_control_vector(&file, &at_layer(1)).unwrap();
        let again = write_control_vector(&file, &at_layer(1)).unwrap_err().to_string();
        assert!(again.contains("already exists"), "{again}");
    }

    /// Checks that truncated and corrupted files are read safely.
    ///
    /// A truncated file must be an error. A corrupted byte may be an error or change the contents, but must
    /// not cause a panic or excessive memory use.
    #[test]
    fn damaged_files_cause_no_panic_or_large_allocation() {
        let folder = temporary_folder();
        let file = folder.path().join("vector.gguf");
        let direction = Tensor::new(&[1f32, 2., 3., 4.], &Device::Cpu).unwrap();
        write_control_vector(&file, &BTreeMap::from([(1, direction.clone()), (2, direction)])).unwrap();
        let whole = std::fs::read(&file).unwrap();
        for length in 0..whole.len() {
            std::fs::write(&file, &whole[..length]).unwrap();
            // The missing bytes may be only the padding after the last tensor.
            let is_whole = TensorFile::read(&file).is_ok();
            assert!(!is_whole || length + 32 > whole.len(), "{length} of {} bytes", whole.len());
        }
        for offset in 0..whole.len() {
            let mut damaged = whole.clone();
            damaged[offset] ^= [0x01, 0x80, 0xff][offset % 3];
            std::fs::write(&file, &damaged).unwrap();
            if let Ok(file) = TensorFile::read(&file) {
                let elements: usize = file.tensors.values().map(Tensor::elem_count).sum();
                assert!(elements <= whole.len(), "byte {offset}: {elements} elements");
            }
        }
    }
}
