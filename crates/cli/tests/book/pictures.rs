//! Comparison of the book's pictures with the files that its commands write.

use std::ffi::OsStr;
use std::fs;
use std::path::Path;

use crate::overwrites;

/// Compares a picture that a page's commands wrote with the book's picture of that name, if any.
pub(crate) fn check(root: &Path, name: &OsStr, bytes: &[u8]) -> Result<(), String> {
    let path = root.join("docs/src/pictures").join(name);
    if !path.exists() || fs::read(&path).is_ok_and(|shown| shown == bytes) {
        return Ok(());
    }
    if overwrites() {
        return fs::write(&path, bytes).map_err(|error| format!("{}: {error}", path.display()));
    }
    Err(format!("{} differs from its command's output; BOOK=overwrite replaces it", path.display()))
}
