//! llama.cpp control vectors.

use std::path::Path;

use candle_gpt2::Gpt2Config;
use candle_gpt2_interpret::{ControlVector, FileError};
use candle_gpt2_weights::TensorFile;

use crate::LookError;
use crate::error::Result;

/// Reads a llama.cpp control vector from a GGUF file and checks that it fits the model.
///
/// ```
/// use candle_gpt2::Gpt2Config;
/// use candle_gpt2_look::read_control_vector;
///
/// let error = read_control_vector("no/such.gguf".as_ref(), &Gpt2Config::gpt2()).err().ok_or("expected an error")?;
/// assert!(error.to_string().contains("no/such.gguf"));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// If the file cannot be read, is not a control vector, or does not fit the model.
pub fn read_control_vector(path: &Path, model: &Gpt2Config) -> Result<ControlVector> {
    let file = TensorFile::read(path)?;
    let of_file = |error: FileError| LookError::File { path: path.to_owned(), error };
    ControlVector::from_tensors(&file.tensors, &file.entries, model).map_err(of_file)
}
