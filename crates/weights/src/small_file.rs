//! Reading whole files that ought to be small: configurations, tokenizers, indices.

use std::fs::{self, File};
use std::io::Read;
use std::path::Path;

use crate::WeightsError;

/// Reads a regular file of at most `limit` bytes. A pipe would block, and a device file has no end.
pub(crate) fn read(path: &Path, limit: u64) -> Result<Vec<u8>, WeightsError> {
    let failed = |error| WeightsError::Read { path: path.to_owned(), error };
    let refuse = |what: String| Err(WeightsError::NotWeights { path: path.to_owned(), what });
    if !fs::metadata(path).map_err(failed)?.is_file() {
        return refuse("not a regular file".into());
    }
    let mut bytes = Vec::new();
    File::open(path).map_err(failed)?.take(limit + 1).read_to_end(&mut bytes).map_err(failed)?;
    if bytes.len() as u64 > limit {
        return refuse(format!("larger than {limit} bytes, which no such file needs"));
    }
    Ok(bytes)
}
