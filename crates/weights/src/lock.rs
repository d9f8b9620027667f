//! Files locked by one process at a time.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io;
use std::path::Path;

use crate::check_regular;

/// Maximum number of attempts to open a file that other processes keep removing or replacing.
///
/// Reaching the limit means that the file system does not provide stable file identities.
const ATTEMPTS: usize = 10;

/// Opens an existing file and locks it against other processes until it is closed.
///
/// The operating system closes the files of a killed process, so no lock outlives its owner.
///
/// ```
/// use std::fs::OpenOptions;
/// use std::io::ErrorKind;
///
/// use candle_gpt2_weights::{create_locked, open_locked};
///
/// let folder = tempfile::tempdir()?;
/// let path = folder.path().join(".lock");
/// let mut options = OpenOptions::new();
/// options.write(true);
/// assert_eq!(open_locked(&path, &options).unwrap_err().kind(), ErrorKind::NotFound);
/// let locked = create_locked(&path, &options)?;
/// assert_eq!(open_locked(&path, &options).unwrap_err().kind(), ErrorKind::WouldBlock);
/// drop(locked);
/// open_locked(&path, &options)?;
/// # Ok::<(), std::io::Error>(())
/// ```
///
/// # Errors
/// If the file cannot be opened; [`WouldBlock`](io::ErrorKind::WouldBlock) if another process holds the
/// lock.
pub fn open_locked(path: &Path, options: &OpenOptions) -> io::Result<File> {
    locked(path, &|| options.open(path))
}

/// Opens or creates a file and locks it like [`open_locked`].
///
/// Never creates the target of a dangling symbolic link.
///
/// # Errors
/// Fails like [`open_locked`]; [`AlreadyExists`](io::ErrorKind::AlreadyExists) for a dangling link.
pub fn create_locked(path: &Path, options: &OpenOptions) -> io::Result<File> {
    locked(path, &|| match options.open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            options.clone().create_new(true).open(path).map_err(|error| match error.kind() {
                io::ErrorKind::AlreadyExists if path.is_symlink() => {
                    io::Error::new(error.kind(), "a symbolic link without a target; remove it")
                }
                _ => error,
            })
        }
        opened => opened,
    })
}

/// Rejects symbolic links and anything else but a regular file. A missing file is allowed.
///
/// Use it for files that the program names itself, such as `.lock` or `FILE.partial`. Writing through a
/// link in a downloaded folder would change a file elsewhere, and opening a FIFO blocks.
///
/// ```
/// use candle_gpt2_weights::expect_own_file;
///
/// assert!(expect_own_file("missing.lock".as_ref()).is_ok());
/// assert!(expect_own_file(".".as_ref()).is_err());
/// ```
///
/// # Errors
/// [`InvalidInput`](io::ErrorKind::InvalidInput) if the path is rejected.
pub fn expect_own_file(path: &Path) -> io::Result<()> {
    match fs::symlink_metadata(path) {
        Ok(metadata) if metadata.is_symlink() => {
            Err(io::Error::new(io::ErrorKind::InvalidInput, "a symbolic link; remove it"))
        }
        Ok(metadata) => check_regular(&metadata),
        // Other errors are reported when the file is opened.
        Err(_) => Ok(()),
    }
}

fn locked(path: &Path, open: &dyn Fn() -> io::Result<File>) -> io::Result<File> {
    let mut attempts = 1;
    loop {
        let file = match open() {
            // Another process has created the file in the meantime.
            Err(error)
                if error.kind() == io::ErrorKind::AlreadyExists
                    && attempts < ATTEMPTS
                    && !path.is_symlink() =>
            {
                attempts += 1;
                continue;
            }
            opened => opened?,
        };
        match file.try_lock() {
            Err(TryLockError::WouldBlock) => {
                let what = "another process is writing to this file";
                return Err(io::Error::new(io::ErrorKind::WouldBlock, what));
            }
            // On a file system without locks, no other process can hold one.
            Ok(()) | Err(TryLockError::Error(_)) => {}
        }
        if attempts == ATTEMPTS || is_at(&file, path)? {
            return Ok(file);
        }
        attempts += 1;
    }
}

/// Whether `path` still refers to this file.
///
/// Another process may have removed or replaced the path before the file was locked.
#[cfg(unix)]
fn is_at(file: &File, path: &Path) -> io::Result<bool> {
    use std::os::unix::fs::MetadataExt;
    let opened = file.metadata()?;
    match fs::metadata(path) {
        Ok(named) => Ok((named.dev(), named.ino()) == (opened.dev(), opened.ino())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

/// Returns true, because the standard library cannot compare file identities on other systems.
#[cfg(not(unix))]
fn is_at(_file: &File, _path: &Path) -> io::Result<bool> {
    Ok(true)
}

#[cfg(all(test, unix))]
mod tests {
    use std::os::unix::fs::symlink;

    use candle_gpt2_testing::temporary_folder;

    use super::*;

    #[test]
    fn dangling_link_target_is_not_created() {
        let folder = temporary_folder();
        let [link, target] = ["link", "target"].map(|name| folder.path().join(name));
        symlink(&target, &link).unwrap();
        let mut options = OpenOptions::new();
        options.read(true).append(true);
        let error = create_locked(&link, &options).unwrap_err();
        assert_eq!(error.to_string(), "a symbolic link without a target; remove it");
        assert!(!target.exists());
        fs::write(&target, "text").unwrap();
        create_locked(&link, &options).unwrap();
        assert_eq!(expect_own_file(&link).unwrap_err().to_string(), "a symbolic link; remove it");
        expect_own_file(&target).unwrap();
        expect_own_file(&folder.path().join("nothing")).unwrap();
    }
}
