//! Export of tensors that are not part of a checkpoint.

use std::borrow::Cow;
use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap};
use std::fs::{self, File};
use std::io::{self, BufWriter, Read, Seek, SeekFrom, Write};
use std::path::Path;

use candle_core::{DType, Tensor, WithDType};
use safetensors::tensor::{Dtype, TensorView, View};
use zip::write::SimpleFileOptions;
use zip::{CompressionMethod, ZipWriter};

use crate::replace::unwritable;
use crate::rounding::{append, check_range, safetensors_dtype};
use crate::{WeightsError, WrittenDType};

/// Magic bytes and version of NumPy's file format.
const NPY_MAGIC: &[u8] = b"\x93NUMPY\x01\x00";
/// Alignment of a NumPy header, in bytes.
const NPY_ALIGNMENT: usize = 16;

/// Writes tensors to a safetensors file, one at a time, with string metadata.
///
/// Floating-point tensors become f32; integer tensors keep their dtype. Equal tensors and metadata yield
/// identical files.
///
/// ```
/// use std::collections::{BTreeMap, HashMap};
///
/// use candle_core::{Device, Tensor};
/// use candle_gpt2_weights::{TensorFile, write_tensors};
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
/// If a tensor cannot be read, or the file cannot be written; no file remains then. Use
/// [`replace_file`](crate::replace_file) to keep a previous file in that case.
pub fn write_tensors(
    path: &Path,
    tensors: &BTreeMap<String, Tensor>,
    metadata: HashMap<String, String>,
) -> Result<(), WeightsError> {
    let lazy = tensors.iter().map(|(name, tensor)| {
        let shape = tensor.dims().to_vec();
        let dtype = match tensor.dtype() {
            DType::U8 => Dtype::U8,
            DType::I16 => Dtype::I16,
            DType::I32 => Dtype::I32,
            DType::U32 => Dtype::U32,
            DType::I64 => Dtype::I64,
            _ => Dtype::F32,
        };
        (name.clone(), LazyTensor { dtype, shape, read: || bytes_of(path, name, tensor) })
    });
    serialize(path, lazy, metadata)
}

/// Writes tensors like [`write_tensors`], but rounds all values to a floating-point dtype.
///
/// ```
/// use std::collections::BTreeMap;
///
/// use candle_core::{Device, Tensor};
/// use candle_gpt2_weights::{TensorFile, WrittenDType, write_rounded_tensors};
///
/// let folder = tempfile::tempdir()?;
/// let file = folder.path().join("steering.safetensors");
/// let tensors = BTreeMap::from([("direction".to_owned(), Tensor::new(&[1f32, 0.1], &Device::Cpu)?)]);
/// write_rounded_tensors(&file, &tensors, WrittenDType::F16)?;
/// let read = TensorFile::read(&file)?;
/// assert_eq!(read.tensors["direction"].to_vec1::<f32>()?, [1., 0.099975586]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// Fails like [`write_tensors`]. Also fails for block dtypes, and if a finite value is outside the range of
/// f16.
pub fn write_rounded_tensors(
    path: &Path,
    tensors: &BTreeMap<String, Tensor>,
    dtype: WrittenDType,
) -> Result<(), WeightsError> {
    let dtype = safetensors_dtype(dtype, path)?;
    let read = |name: &str, tensor: &Tensor| {
        let values = f32_values(path, name, tensor)?;
        if dtype == Dtype::F16 {
            let refuse = |what| WeightsError::Unwritable { path: path.to_owned(), what };
            check_range(name, &values).map_err(refuse)?;
        }
        let mut bytes = Vec::with_capacity(values.len() * dtype.bitsize() / 8);
        append(&mut bytes, &values, dtype);
        Ok(bytes)
    };
    let lazy = tensors.iter().map(|(name, tensor)| {
        let shape = tensor.dims().to_vec();
        (name.clone(), LazyTensor { dtype, shape, read: move || read(name, tensor) })
    });
    serialize(path, lazy, HashMap::new())
}

/// Encodes tensors in f32 as the bytes of a safetensors file with string metadata.
///
/// Equal tensors and metadata yield identical bytes.
///
/// ```
/// use std::collections::{BTreeMap, HashMap};
///
/// use candle_core::{Device, Tensor};
/// use candle_gpt2_weights::tensor_bytes;
///
/// let tensors = BTreeMap::from([("direction".to_owned(), Tensor::new(&[1f32, 2., 3.], &Device::Cpu)?)]);
/// let read = candle_core::safetensors::load_buffer(&tensor_bytes(&tensors, HashMap::new())?, &Device::Cpu)?;
/// assert_eq!(read["direction"].to_vec1::<f32>()?, [1., 2., 3.]);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
/// If a tensor cannot be read.
pub fn tensor_bytes(
    tensors: &BTreeMap<String, Tensor>,
    metadata: HashMap<String, String>,
) -> candle_core::Result<Vec<u8>> {
    let mut read = Vec::new();
    for (name, tensor) in tensors {
        let values = tensor.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?;
        let bytes: Vec<u8> = values.into_iter().flat_map(f32::to_le_bytes).collect();
        read.push((name, tensor.dims().to_vec(), bytes));
    }
    let mut views = Vec::new();
    for (name, shape, bytes) in &read {
        let view = TensorView::new(Dtype::F32, shape.clone(), bytes).map_err(candle_core::Error::wrap)?;
        views.push((name, view));
    }
    let mut bytes = safetensors::serialize(views, Some(metadata)).map_err(candle_core::Error::wrap)?;
    if let Some((length, rest)) = bytes.split_first_chunk_mut::<LENGTH_BYTES>() {
        let length = usize::try_from(u64::from_le_bytes(*length)).unwrap_or(usize::MAX);
        if let Some(header) = rest.get_mut(..length) {
            sort_header(header);
        }
    }
    Ok(bytes)
}

/// Size of the header-length field at the start of a file, in bytes.
const LENGTH_BYTES: usize = 8;

/// Sorts the entries of a header.
///
/// The library writes the metadata in an order that differs from run to run.
fn sort_header(header: &mut [u8]) {
    let Ok(entries) = serde_json::from_slice::<BTreeMap<String, BTreeMap<String, serde_json::Value>>>(header)
    else {
        return;
    };
    let Ok(mut sorted) = serde_json::to_vec(&entries) else { return };
    if sorted.len() <= header.len() {
        // The rest is padded with spaces, like the original.
        sorted.resize(header.len(), b' ');
        header.copy_from_slice(&sorted);
    }
}

/// Sorts the header of a file; see [`sort_header`].
fn sort_header_of(path: &Path) -> io::Result<()> {
    let mut file = File::options().read(true).write(true).open(path)?;
    let mut length = [0; LENGTH_BYTES];
    file.read_exact(&mut length)?;
    let mut header = vec![0; usize::try_from(u64::from_le_bytes(length)).map_err(io::Error::other)?];
    file.read_exact(&mut header)?;
    sort_header(&mut header);
    file.seek(SeekFrom::Start(LENGTH_BYTES as u64))?;
    file.write_all(&header)
}

/// Writes tensors in f32 as a NumPy archive for `numpy.load`, one at a time.
///
/// ```
/// use std::collections::BTreeMap;
///
/// use candle_core::{Device, Tensor};
/// use candle_gpt2_weights::write_npz;
///
/// let folder = tempfile::tempdir()?;
/// let file = folder.path().join("cache.npz");
/// let tensors = BTreeMap::from([("direction".to_owned(), Tensor::new(&[1f32, 2., 3.], &Device::Cpu)?)]);
/// write_npz(&file, &tensors)?;
/// assert_eq!(Tensor::read_npz(&file)?[0].1.to_vec1::<f32>()?, [1., 2., 3.]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// If a tensor cannot be read, or the file cannot be written.
pub fn write_npz(path: &Path, tensors: &BTreeMap<String, Tensor>) -> Result<(), WeightsError> {
    let failed = |error: io::Error| unwritable(path, &error);
    let mut file = BufWriter::new(File::create(path).map_err(failed)?);
    write_archive(&mut file, path, tensors)?;
    file.flush().map_err(failed)
}

/// Writes the archive to `to`; error messages name the file `path`.
fn write_archive(
    to: impl Write + Seek,
    path: &Path,
    tensors: &BTreeMap<String, Tensor>,
) -> Result<(), WeightsError> {
    let failure = RefCell::new(None);
    let mut zip = ZipWriter::new(UntilFailure { to, position: 0, failure: &failure });
    let mut fill = || {
        for (name, tensor) in tensors {
            if failure.borrow().is_some() {
                break;
            }
            let bytes = f32_bytes(path, name, tensor)?;
            // Entries whose size needs more than 32 bits must be declared in advance.
            let is_large = bytes.len() > u32::MAX as usize / 2;
            let options = SimpleFileOptions::default()
                .compression_method(CompressionMethod::Stored)
                .large_file(is_large);
            zip.start_file(format!("{name}.npy"), options).map_err(|error| unwritable(path, &error))?;
            zip.write_all(&npy_header(tensor.dims())).map_err(|error| unwritable(path, &error))?;
            zip.write_all(&bytes).map_err(|error| unwritable(path, &error))?;
        }
        Ok(())
    };
    let filled = fill();
    let finished = zip.finish().map(drop).map_err(|error| unwritable(path, &error));
    match failure.into_inner() {
        Some(error) => Err(unwritable(path, &error)),
        None => filled.and(finished),
    }
}

/// Builds the header of a NumPy file with f32 values in row-major order.
fn npy_header(shape: &[usize]) -> Vec<u8> {
    let sizes: String = shape.iter().map(|size| format!("{size},")).collect();
    let mut text = format!("{{'descr': '<f4', 'fortran_order': False, 'shape': ({sizes}), }}");
    // The header length takes two bytes, and a newline ends the header.
    let length = (NPY_MAGIC.len() + 2 + text.len() + 1).next_multiple_of(NPY_ALIGNMENT);
    let padded = length - NPY_MAGIC.len() - 2 - 1;
    text = format!("{text:padded$}\n");
    // Tensors have few dimensions, so the header is short.
    let text_length = u16::try_from(text.len()).unwrap_or(u16::MAX);
    [NPY_MAGIC, &text_length.to_le_bytes(), text.as_bytes()].concat()
}

/// Writer that records its first error and discards all later output.
///
/// Otherwise the zip library would print the errors of an unfinished archive when it is dropped.
struct UntilFailure<'a, W> {
    to: W,
    /// Position of the next byte.
    position: u64,
    failure: &'a RefCell<Option<io::Error>>,
}

impl<W> UntilFailure<'_, W> {
    /// Runs an operation unless an earlier one failed, and records its error.
    fn attempt<T>(&mut self, operation: impl FnOnce(&mut W) -> io::Result<T>) -> io::Result<Option<T>> {
        if self.failure.borrow().is_some() {
            return Ok(None);
        }
        match operation(&mut self.to) {
            Ok(done) => Ok(Some(done)),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => Err(error),
            Err(error) => {
                *self.failure.borrow_mut() = Some(error);
                Ok(None)
            }
        }
    }
}

impl<W: Write> Write for UntilFailure<'_, W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.attempt(|to| to.write(bytes))?.unwrap_or(bytes.len());
        self.position += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.attempt(Write::flush).map(|_| ())
    }
}

impl<W: Seek> Seek for UntilFailure<'_, W> {
    fn seek(&mut self, target: SeekFrom) -> io::Result<u64> {
        let sought = self.attempt(|to| to.seek(target))?;
        self.position = sought.unwrap_or(match target {
            SeekFrom::Start(position) => position,
            SeekFrom::Current(distance) => self.position.saturating_add_signed(distance),
            SeekFrom::End(_) => self.position,
        });
        Ok(self.position)
    }
}

/// Returns the values of a tensor in f32, as bytes.
fn f32_bytes(path: &Path, name: &str, tensor: &Tensor) -> Result<Vec<u8>, WeightsError> {
    Ok(f32_values(path, name, tensor)?.into_iter().flat_map(f32::to_le_bytes).collect())
}

fn f32_values(path: &Path, name: &str, tensor: &Tensor) -> Result<Vec<f32>, WeightsError> {
    let values = tensor.to_dtype(DType::F32).and_then(|values| values.flatten_all()?.to_vec1::<f32>());
    values.map_err(|error| unreadable(path, name, &error))
}

/// Returns the values of a tensor as bytes: integers unchanged, everything else in f32.
fn bytes_of(path: &Path, name: &str, tensor: &Tensor) -> Result<Vec<u8>, WeightsError> {
    fn bytes<T: WithDType, const N: usize>(
        tensor: &Tensor,
        of: fn(T) -> [u8; N],
    ) -> candle_core::Result<Vec<u8>> {
        Ok(tensor.flatten_all()?.to_vec1::<T>()?.into_iter().flat_map(of).collect())
    }
    let integers = match tensor.dtype() {
        DType::U8 => bytes(tensor, u8::to_le_bytes),
        DType::I16 => bytes(tensor, i16::to_le_bytes),
        DType::I32 => bytes(tensor, i32::to_le_bytes),
        DType::U32 => bytes(tensor, u32::to_le_bytes),
        DType::I64 => bytes(tensor, i64::to_le_bytes),
        _ => return f32_bytes(path, name, tensor),
    };
    integers.map_err(|error| unreadable(path, name, &error))
}

fn unreadable(path: &Path, name: &str, error: &candle_core::Error) -> WeightsError {
    let what = format!("tensor `{name}` cannot be read: {error}");
    WeightsError::Unwritable { path: path.to_owned(), what }
}

/// Tensor whose bytes are read just before they are written.
pub(crate) struct LazyTensor<R> {
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<usize>,
    pub(crate) read: R,
}

/// Writes a safetensors file. After the first tensor that cannot be read, no further tensors are read.
pub(crate) fn serialize<R: Fn() -> Result<Vec<u8>, WeightsError>>(
    path: &Path,
    tensors: impl IntoIterator<Item = (String, LazyTensor<R>)>,
    metadata: HashMap<String, String>,
) -> Result<(), WeightsError> {
    let failed = |error: io::Error| unwritable(path, &error);
    let failure = RefCell::new(None);
    // The library creates files that only their owner can read, so the permissions of an ordinary file are
    // restored afterward.
    let permissions = File::create(path).and_then(|file| file.metadata()).map_err(failed)?.permissions();
    let views = tensors.into_iter().map(|(name, tensor)| (name, LazyView { tensor, failure: &failure }));
    let is_unsorted = metadata.len() > 1;
    let written = safetensors::serialize_to_file(views, Some(metadata), path);
    let written = match failure.into_inner() {
        Some(error) => Err(error),
        None => written.map_err(|error| unwritable(path, &error)),
    };
    let written = written.and_then(|()| match is_unsorted {
        true => sort_header_of(path).map_err(failed),
        false => Ok(()),
    });
    if written.is_err() {
        let _ = fs::remove_file(path);
        return written;
    }
    fs::set_permissions(path, permissions).map_err(failed)
}

/// Tensor in the form that the library reads.
struct LazyView<'a, R> {
    tensor: LazyTensor<R>,
    /// First error, because [`View`] cannot return one.
    failure: &'a RefCell<Option<WeightsError>>,
}

impl<R: Fn() -> Result<Vec<u8>, WeightsError>> View for LazyView<'_, R> {
    fn dtype(&self) -> Dtype {
        self.tensor.dtype
    }

    fn shape(&self) -> &[usize] {
        &self.tensor.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        // The file is discarded after an error, so no more data is read.
        if self.failure.borrow().is_some() {
            return Cow::Borrowed(&[]);
        }
        let failed = |error| {
            self.failure.borrow_mut().get_or_insert(error);
            Vec::new()
        };
        (self.tensor.read)().unwrap_or_else(failed).into()
    }

    fn data_len(&self) -> usize {
        self.tensor.shape.iter().product::<usize>() * self.tensor.dtype.bitsize() / 8
    }
}

#[cfg(test)]
mod tests {
    use std::io::Cursor;

    use candle_core::Device;
    use candle_gpt2_testing::{pattern, temporary_folder};

    use super::*;
    use crate::replace_file;

    /// Writes maps with different iteration orders.
    ///
    /// The library would write the metadata in the order of each hash map.
    #[test]
    fn output_is_deterministic() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tensors.safetensors");
        let texts =
            || (0..9).map(|index| (format!("key {index}"), format!("é {index}"))).collect::<HashMap<_, _>>();
        let tensor = Tensor::new(&[1f32, 2.], &Device::Cpu).unwrap();
        let tensors = BTreeMap::from([("a".to_owned(), tensor.clone()), ("b".to_owned(), tensor)]);
        let expected = tensor_bytes(&tensors, texts()).unwrap();
        for _ in 0..4 {
            assert_eq!(tensor_bytes(&tensors, texts()).unwrap(), expected);
            write_tensors(&path, &tensors, texts()).unwrap();
            assert_eq!(fs::read(&path).unwrap(), expected);
        }
        let (_, read) = safetensors::SafeTensors::read_metadata(&expected).unwrap();
        assert_eq!(read.metadata().as_ref(), Some(&texts()));
        assert_eq!(
            candle_core::safetensors::load(&path, &Device::Cpu).unwrap()["b"].to_vec1::<f32>().unwrap(),
            [1., 2.]
        );
    }

    #[test]
    fn integer_dtypes_are_preserved() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tensors.safetensors");
        let device = &Device::Cpu;
        let tensors = [
            ("u8", Tensor::new(&[1u8, u8::MAX], device)),
            ("i16", Tensor::new(&[i16::MIN, i16::MAX], device)),
            ("i32", Tensor::new(&[i32::MIN, 16_777_217], device)),
            ("u32", Tensor::new(&[1u32, u32::MAX], device)),
            ("i64", Tensor::new(&[i64::MIN, i64::MAX], device)),
        ];
        let tensors: BTreeMap<String, Tensor> =
            tensors.into_iter().map(|(name, tensor)| (name.to_owned(), tensor.unwrap())).collect();
        write_tensors(&path, &tensors, HashMap::new()).unwrap();
        let read = candle_core::safetensors::load(&path, device).unwrap();
        for (name, tensor) in &tensors {
            assert_eq!(read[name].dtype(), tensor.dtype(), "{name}");
        }
        assert_eq!(read["u8"].to_vec1::<u8>().unwrap(), [1, u8::MAX]);
        assert_eq!(read["i16"].to_vec1::<i16>().unwrap(), [i16::MIN, i16::MAX]);
        assert_eq!(read["i32"].to_vec1::<i32>().unwrap(), [i32::MIN, 16_777_217]);
        assert_eq!(read["u32"].to_vec1::<u32>().unwrap(), [1, u32::MAX]);
        assert_eq!(read["i64"].to_vec1::<i64>().unwrap(), [i64::MIN, i64::MAX]);
    }

    /// Returns a valid tensor and one whose dtype cannot be converted.
    fn unreadable() -> BTreeMap<String, Tensor> {
        let file = TensorView::new(Dtype::F4, vec![2, 4], &[7; 4]).unwrap();
        let bytes = safetensors::serialize([("scores", file)], None).unwrap();
        let mut tensors = candle_core::safetensors::load_buffer(&bytes, &Device::Cpu).unwrap();
        tensors.insert("direction".into(), pattern(&[3], 1.0, 0));
        tensors.into_iter().collect()
    }

    #[test]
    fn unreadable_tensor_is_an_error_and_leaves_no_file() {
        let folder = temporary_folder();
        let path = folder.path().join("cache");
        for write in [
            &|path: &Path| write_tensors(path, &unreadable(), HashMap::new()) as Result<_, _>,
            &|path: &Path| write_npz(path, &unreadable()),
        ] as [&dyn Fn(&Path) -> Result<(), WeightsError>; 2]
        {
            let message = replace_file(&path, |partial| Ok(write(partial)?)).unwrap_err().to_string();
            let expected = format!("{}: tensor `scores` cannot be read: ", path.display());
            assert!(message.starts_with(&expected), "{message}");
            assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0, "nothing is left");
        }
        write_tensors(&path, &unreadable(), HashMap::new()).unwrap_err();
        assert!(!path.exists());
    }

    fn tensors() -> BTreeMap<String, Tensor> {
        let shapes: [(&str, &[usize]); 3] =
            [("a", &[2, 3]), ("blocks.0.hook_z", &[1, 5, 2, 7]), ("scalar", &[])];
        shapes.into_iter().map(|(name, shape)| (name.to_owned(), pattern(shape, 1.0, 9))).collect()
    }

    /// Compares the output with candle's writer.
    ///
    /// Both write the same bytes, but candle loses errors at the end of the archive.
    #[test]
    fn npz_matches_candles_writer() {
        let folder = temporary_folder();
        let [own, theirs] = ["own.npz", "theirs.npz"].map(|name| folder.path().join(name));
        write_npz(&own, &tensors()).unwrap();
        let named: Vec<(String, Tensor)> = tensors().into_iter().collect();
        Tensor::write_npz(&named, &theirs).unwrap();
        assert!(fs::read(own).unwrap() == fs::read(theirs).unwrap());
    }

    /// Disk with a limited capacity in bytes.
    struct Disk(Cursor<Vec<u8>>, u64);

    impl Write for Disk {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            match self.0.position() + bytes.len() as u64 > self.1 {
                true => Err(io::Error::other("the disk is full")),
                false => self.0.write(bytes),
            }
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    impl Seek for Disk {
        fn seek(&mut self, position: SeekFrom) -> io::Result<u64> {
            self.0.seek(position)
        }
    }

    #[test]
    fn full_disk_is_reported_at_every_offset() {
        let mut whole = Disk(Cursor::new(Vec::new()), u64::MAX);
        write_archive(&mut whole, Path::new("cache.npz"), &tensors()).unwrap();
        let bytes = whole.0.into_inner().len() as u64;
        for capacity in 0..bytes {
            let mut disk = Disk(Cursor::new(Vec::new()), capacity);
            let error = write_archive(&mut disk, Path::new("cache.npz"), &tensors()).unwrap_err();
            assert_eq!(
                error.to_string(),
                "cache.npz: cannot be written: the disk is full",
                "{capacity} of {bytes}"
            );
        }
    }
}
