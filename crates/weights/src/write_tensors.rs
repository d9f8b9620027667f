//! Writing tensors that are no checkpoint.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use candle_core::{DType, Tensor};
use safetensors::tensor::{Dtype, View};

use crate::WeightsError;
use crate::convert::serialize;

/// A tensor as it is written, in f32.
struct AsF32<'a>(&'a Tensor);

impl View for AsF32<'_> {
    fn dtype(&self) -> Dtype {
        Dtype::F32
    }

    fn shape(&self) -> &[usize] {
        self.0.dims()
    }

    fn data(&self) -> Cow<'_, [u8]> {
        let values = self.0.to_dtype(DType::F32).and_then(|values| values.flatten_all()?.to_vec1::<f32>());
        // Reading the values of a tensor in memory does not fail; if a device's did, they would be not-a-number here.
        let values = values.unwrap_or_else(|_| vec![f32::NAN; self.0.elem_count()]);
        Cow::Owned(values.into_iter().flat_map(f32::to_le_bytes).collect())
    }

    fn data_len(&self) -> usize {
        self.0.elem_count() * size_of::<f32>()
    }
}

/// Writes tensors as a safetensors file in f32, one after another, with texts in its metadata.
///
/// ```
/// use std::collections::{BTreeMap, HashMap};
///
/// use candle_core::{Device, Tensor};
/// use gpt2_weights::{TensorFile, write_tensors};
///
/// let folder = tempfile::tempdir()?;
/// let file = folder.path().join("steering.safetensors");
/// let tensors = BTreeMap::from([("direction".to_owned(), Tensor::new(&[1f32, 2., 3.], &Device::Cpu)?)]);
/// write_tensors(&file, &tensors, HashMap::new())?;
/// let read = TensorFile::read(&file)?;
/// assert_eq!(read.tensors["direction"].to_vec1::<f32>()?, [1., 2., 3.]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// When the file cannot be written.
pub fn write_tensors(
    path: &Path,
    tensors: &BTreeMap<String, Tensor>,
    metadata: HashMap<String, String>,
) -> Result<(), WeightsError> {
    let tensors = tensors.iter().map(|(name, tensor)| (name, AsF32(tensor)));
    serialize(path, tensors, metadata)
}
