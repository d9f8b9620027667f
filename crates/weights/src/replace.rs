//! Writing a file so that its place holds the whole new content or the whole old one, whatever happens meanwhile.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use crate::WeightsError;

/// Writes a file beside its place, makes sure that it is on the disk, and renames it into its place, where it replaces
/// what was there. `write` is given the path to write to.
///
/// ```
/// use gpt2_weights::{WeightsError, replace_file};
///
/// let folder = tempfile::tempdir()?;
/// let file = folder.path().join("config.json");
/// for text in ["{}", "[]"] {
///     replace_file::<WeightsError>(&file, |beside| {
///         std::fs::write(beside, text).map_err(|error| WeightsError::Read { path: beside.into(), error })
///     })?;
/// }
/// assert_eq!(std::fs::read_to_string(file)?, "[]");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// Those of `write`, and when the file cannot be flushed or renamed; the place then holds what it held before.
pub fn replace_file<E: From<WeightsError>>(
    path: &Path,
    write: impl FnOnce(&Path) -> Result<(), E>,
) -> Result<(), E> {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(".partial");
    let partial = Partial(path.with_file_name(name));
    let failed = |error: std::io::Error| {
        let what = format!("cannot be written: {error}");
        E::from(WeightsError::Unwritable { path: path.to_owned(), what })
    };
    // The safetensors library makes files that nobody else may read; this one gets the rights of an ordinary file.
    let rights = File::create(&partial.0).and_then(|file| file.metadata()).map_err(failed)?.permissions();
    write(&partial.0)?;
    let finish = || {
        fs::set_permissions(&partial.0, rights)?;
        File::open(&partial.0)?.sync_all()?;
        fs::rename(&partial.0, path)
    };
    finish().map_err(failed)
}

/// A file in the making, removed again unless it was renamed.
struct Partial(PathBuf);

impl Drop for Partial {
    fn drop(&mut self) {
        // Gone already where it was renamed; otherwise nothing more can be done than try.
        let _ = fs::remove_file(&self.0);
    }
}

// WASI does not know the permissions of files.
#[cfg(all(test, not(target_os = "wasi")))]
mod tests {
    use gpt2_testing::temporary_folder;

    use super::*;

    #[test]
    fn a_failed_write_leaves_what_was_there() {
        let folder = temporary_folder();
        let path = folder.path().join("weights");
        let write =
            |text: &'static str| move |to: &Path| fs::write(to, text).map_err(|error| unwritable(to, &error));
        replace_file(&path, write("first")).unwrap();
        let failed = replace_file(&path, |to| {
            fs::write(to, "half").unwrap();
            Err(unwritable(to, &std::io::Error::other("disk full")))
        });
        assert!(failed.is_err());
        assert_eq!(fs::read_to_string(&path).unwrap(), "first");
        replace_file(&path, write("second")).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "second");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "nothing is left behind");
    }

    fn unwritable(path: &Path, error: &std::io::Error) -> WeightsError {
        WeightsError::Unwritable { path: path.to_owned(), what: error.to_string() }
    }
}
