//! Atomic replacement of files and folders: readers see either the old content or all of the new.
//!
//! Content is first written to a private sibling folder `NAME.partial-XXXXXX`, and flushed to disk. It is
//! then renamed to its final path, and the directory entry is flushed as well.

use std::error::Error;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use tempfile::{TempDir, TempPath};

use crate::WeightsError;

/// Separator between a result's name and the random suffix of its partial folder.
const PARTIAL: &str = ".partial-";
/// Length of the random suffix.
const RANDOM_LETTERS: usize = 6;

/// Maximum number of retries while other programs hold a file open; they take two seconds in total.
const MAX_RETRIES: usize = 200;
const RETRY_DELAY: Duration = Duration::from_millis(10);

/// Error type of write callbacks.
type Failure = Box<dyn Error + Send + Sync>;

/// Atomically creates or replaces a file. `write` receives the path to write to.
///
/// ```
/// use candle_gpt2_weights::replace_file;
///
/// let folder = tempfile::tempdir()?;
/// let file = folder.path().join("config.json");
/// for text in ["{}", "[]"] {
///     replace_file(&file, |partial| Ok(std::fs::write(partial, text)?))?;
/// }
/// assert_eq!(std::fs::read_to_string(file)?, "[]");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// If `write` fails, or the file cannot be flushed or renamed; the old content is then unchanged.
pub fn replace_file(
    path: &Path,
    write: impl FnOnce(&Path) -> Result<(), Failure>,
) -> Result<(), WeightsError> {
    let partial = Partial::new(path)?;
    partial.fill_file(write)?;
    partial.finish(|made| rename_over(made, path))
}

/// Atomically creates a file that must not exist. `write` receives the path to write to.
///
/// ```
/// use candle_gpt2_weights::create_file;
///
/// let folder = tempfile::tempdir()?;
/// let file = folder.path().join("result.json");
/// create_file(&file, |partial| Ok(std::fs::write(partial, "{}")?))?;
/// let again = create_file(&file, |partial| Ok(std::fs::write(partial, "[]")?)).unwrap_err();
/// assert!(again.to_string().ends_with("already exists; remove it, or choose another name"));
/// assert_eq!(std::fs::read_to_string(file)?, "{}");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// Fails like [`replace_file`]. Also fails if the path exists, or comes into existence in the meantime.
pub fn create_file(
    path: &Path,
    write: impl FnOnce(&Path) -> Result<(), Failure>,
) -> Result<(), WeightsError> {
    expect_free(path)?;
    let partial = Partial::new(path)?;
    partial.fill_file(write)?;
    partial.finish(|made| {
        TempPath::try_from_path(made)?.persist_noclobber(path).map_err(|refused| refused.error)
    })
}

/// Atomically creates a folder that must not exist. `write` receives an existing, empty folder to fill.
///
/// ```
/// use candle_gpt2_weights::create_folder;
///
/// let folder = tempfile::tempdir()?;
/// let results = folder.path().join("results");
/// create_folder(&results, |partial| Ok(std::fs::write(partial.join("one.json"), "{}")?))?;
/// assert_eq!(std::fs::read_to_string(results.join("one.json"))?, "{}");
/// let error = create_folder(&results, |_| Ok(())).unwrap_err();
/// assert!(error.to_string().ends_with("already exists; remove it, or choose another name"));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// If `write` fails, the path exists, or the folder cannot be flushed or renamed. Nothing is left behind.
pub fn create_folder(
    path: &Path,
    write: impl FnOnce(&Path) -> Result<(), Failure>,
) -> Result<(), WeightsError> {
    expect_free(path)?;
    let partial = Partial::new(path)?;
    let made = partial.made();
    fs::create_dir(&made).map_err(|error| unwritable(path, &error))?;
    write(&made).map_err(|error| partial.at_target(error))?;
    let sync = || -> io::Result<()> {
        for entry in fs::read_dir(&made)? {
            sync_file(&entry?.path())?;
        }
        sync_folder(&made)
    };
    sync().map_err(|error| unwritable(path, &error))?;
    partial.finish(|made| fs::rename(made, path))
}

/// Fails if the path exists, so that results never overwrite existing files.
///
/// [`create_file`] checks this itself; call it before long-running work.
///
/// # Errors
/// If the path exists.
pub fn expect_free(path: &Path) -> Result<(), WeightsError> {
    // A dangling symbolic link also counts as existing.
    match fs::symlink_metadata(path) {
        Ok(_) => Err(exists_already(path)),
        Err(_) => Ok(()),
    }
}

/// Creates a private folder next to `target`, in which `target` can be prepared.
///
/// The folder is deleted with its contents when dropped. [`partials`] finds the folders of killed processes.
///
/// # Errors
/// If the folder cannot be created.
pub fn partial_folder(target: &Path) -> io::Result<TempDir> {
    let mut prefix = target.file_name().unwrap_or_default().to_owned();
    prefix.push(PARTIAL);
    let made = tempfile::Builder::new().prefix(&prefix).rand_bytes(RANDOM_LETTERS).tempdir_in(parent(target));
    // The library adds its own random path to the system's message.
    made.map_err(|error| {
        let cause = error.get_ref().and_then(|named| named.source()?.downcast_ref::<io::Error>());
        cause.and_then(io::Error::raw_os_error).map_or(error, io::Error::from_raw_os_error)
    })
}

/// Lists the sibling folders in which `target` is or was being prepared.
///
/// They belong to killed processes, or to processes that are still writing.
///
/// ```
/// use candle_gpt2_weights::{partial_folder, partials};
///
/// let folder = tempfile::tempdir()?;
/// let target = folder.path().join("tokens");
/// let made = partial_folder(&target)?;
/// assert_eq!(partials(&target)?, [made.path()]);
/// made.close()?;
/// assert_eq!(partials(&target)?.len(), 0);
/// # Ok::<(), std::io::Error>(())
/// ```
///
/// # Errors
/// If the parent folder cannot be listed.
pub fn partials(target: &Path) -> io::Result<Vec<PathBuf>> {
    let is_random =
        |end: &str| end.len() == RANDOM_LETTERS && end.bytes().all(|byte| byte.is_ascii_alphanumeric());
    let folder = parent(target);
    let name = target.file_name().and_then(|name| name.to_str());
    let Some(name) = name.filter(|_| folder.is_dir()) else { return Ok(Vec::new()) };
    let mut found = Vec::new();
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let made = entry.file_name();
        let end = made.to_str().and_then(|made| made.strip_prefix(name)?.strip_prefix(PARTIAL));
        if end.is_some_and(is_random) && entry.file_type()?.is_dir() {
            found.push(entry.path());
        }
    }
    Ok(found)
}

/// File or folder under construction, deleted unless it is finished.
struct Partial<'a> {
    folder: TempDir,
    target: &'a Path,
}

impl<'a> Partial<'a> {
    fn new(target: &'a Path) -> Result<Self, WeightsError> {
        if target.file_name().is_none() {
            let what = "the path has no file name".to_owned();
            return Err(WeightsError::Unwritable { path: target.to_owned(), what });
        }
        let folder = partial_folder(target);
        Ok(Self { folder: folder.map_err(|error| unwritable(target, &error))?, target })
    }

    /// Returns the path to write to.
    fn made(&self) -> PathBuf {
        self.folder.path().join(self.target.file_name().unwrap_or_default())
    }

    fn fill_file(&self, write: impl FnOnce(&Path) -> Result<(), Failure>) -> Result<(), WeightsError> {
        let made = self.made();
        write(&made).map_err(|error| self.at_target(error))?;
        sync_file(&made).map_err(|error| unwritable(self.target, &error))
    }

    /// Renames the flushed result to its final path.
    fn finish(self, rename: impl FnOnce(&Path) -> io::Result<()>) -> Result<(), WeightsError> {
        let target = self.target;
        match rename(&self.made()) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => return Err(exists_already(target)),
            done => done.map_err(|error| unreplaceable(target, &error))?,
        }
        sync_folder(parent(target)).map_err(|error| unwritable(target, &error))
    }

    /// Converts a write error so that it names the final path.
    fn at_target(&self, error: Failure) -> WeightsError {
        match error.downcast::<WeightsError>().map(|error| *error) {
            Ok(WeightsError::Unwritable { path, what }) => {
                let within =
                    path.strip_prefix(self.folder.path()).map(|path| self.target.with_file_name(path));
                WeightsError::Unwritable { path: within.unwrap_or(path), what }
            }
            Ok(error) => error,
            Err(error) => unwritable(self.target, &error),
        }
    }
}

/// Renames a file over an existing one.
///
/// On Windows, this fails while another program has the file open. Readers and virus scanners usually close
/// it within moments.
fn rename_over(made: &Path, path: &Path) -> io::Result<()> {
    for _ in 0..MAX_RETRIES {
        match fs::rename(made, path) {
            Err(error) if is_held_open(&error) => thread::sleep(RETRY_DELAY),
            done => return done,
        }
    }
    fs::rename(made, path)
}

fn is_held_open(error: &io::Error) -> bool {
    cfg!(windows) && error.kind() == io::ErrorKind::PermissionDenied
}

fn parent(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Flushes a file to disk.
///
/// Windows requires write permission for this, so read-only files are left to the system's own schedule.
fn sync_file(path: &Path) -> io::Result<()> {
    if !cfg!(windows) {
        return File::open(path)?.sync_all();
    }
    match OpenOptions::new().write(true).open(path) {
        Err(_) if fs::metadata(path)?.permissions().readonly() => Ok(()),
        opened => opened?.sync_all(),
    }
}

/// Flushes the entries of a folder to disk, if the system supports it.
///
/// Windows opens folders only with a backup flag, cannot flush them, and journals file names by itself.
/// Network file systems may also refuse the flush.
fn sync_folder(folder: &Path) -> io::Result<()> {
    if !cfg!(unix) {
        return Ok(());
    }
    match File::open(folder).and_then(|folder| folder.sync_all()) {
        Err(error) => match error.kind() {
            io::ErrorKind::InvalidInput | io::ErrorKind::Unsupported | io::ErrorKind::PermissionDenied => {
                Ok(())
            }
            _ => Err(error),
        },
        done => done,
    }
}

pub(crate) fn unwritable(path: &Path, error: &dyn std::fmt::Display) -> WeightsError {
    WeightsError::Unwritable { path: path.to_owned(), what: format!("cannot be written: {error}") }
}

/// Converts a rename error.
///
/// Windows does not replace a file that a program has mapped or opened exclusively, and does not say which
/// program it is.
fn unreplaceable(path: &Path, error: &io::Error) -> WeightsError {
    if cfg!(windows) && path.is_file() {
        unwritable(
            path,
            &format_args!("{error}; close the programs that use the file, such as gpt2 with this model"),
        )
    } else {
        unwritable(path, error)
    }
}

fn exists_already(path: &Path) -> WeightsError {
    let what = "already exists; remove it, or choose another name".to_owned();
    WeightsError::Unwritable { path: path.to_owned(), what }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;
    use std::thread;

    use candle_gpt2_testing::{files, temporary_folder};

    use super::*;

    #[test]
    fn failed_write_keeps_the_old_file() {
        let folder = temporary_folder();
        let path = folder.path().join("weights");
        let write = |text: &'static str| move |to: &Path| Ok(fs::write(to, text)?);
        replace_file(&path, write("first")).unwrap();
        let failed = replace_file(&path, |to| {
            fs::write(to, "half").unwrap();
            Err(unwritable(to, &"disk full").into())
        });
        let expected = format!("{}: cannot be written: disk full", path.display());
        assert_eq!(
            failed.unwrap_err().to_string(),
            expected,
            "the error names the final path, not the partial file"
        );
        let failed = replace_file(&path, |_| Err("disk full".into()));
        assert_eq!(failed.unwrap_err().to_string(), expected);
        assert_eq!(files(folder.path()), [("weights".to_owned(), b"first".to_vec())]);
        replace_file(&path, write("second")).unwrap();
        assert_eq!(files(folder.path()), [("weights".to_owned(), b"second".to_vec())]);
    }

    /// Checks that concurrent writers never share a partial file.
    ///
    /// Otherwise the second writer would overwrite the first one's file, which would be renamed half-written.
    #[test]
    fn concurrent_writers_do_not_share_a_partial_file() {
        let folder = temporary_folder();
        let path = folder.path().join("weights");
        let both_write = Barrier::new(2);
        let write = |letter: u8| {
            replace_file(&path, |to| {
                fs::write(to, [letter; 1000])?;
                both_write.wait();
                assert_eq!(fs::read(to)?, [letter; 1000], "the file is the writer's own");
                both_write.wait();
                Ok(())
            })
        };
        thread::scope(|scope| {
            let writers = [b'a', b'b'].map(|letter| scope.spawn(move || write(letter)));
            writers.into_iter().for_each(|writer| writer.join().unwrap().unwrap());
        });
        let [(name, content)] = &files(folder.path())[..] else { panic!("one file is left") };
        assert_eq!((name.as_str(), content.len()), ("weights", 1000));
    }

    #[test]
    fn create_file_never_overwrites() {
        let folder = temporary_folder();
        let path = folder.path().join("result");
        // The path may come into existence while the file is written.
        let late = create_file(&path, |to| {
            fs::write(&path, "precious")?;
            Ok(fs::write(to, "new")?)
        });
        let expected = "already exists; remove it, or choose another name";
        assert_eq!(late.unwrap_err().to_string(), format!("{}: {expected}", path.display()));
        let early = create_file(&path, |_| panic!("nothing is written")).unwrap_err();
        assert_eq!(early.to_string(), format!("{}: {expected}", path.display()));
        assert_eq!(files(folder.path()), [("result".to_owned(), b"precious".to_vec())]);
    }

    #[test]
    fn only_partial_folders_are_listed() {
        let folder = temporary_folder();
        let log = folder.path().join("log.jsonl");
        let own = partial_folder(&log).unwrap();
        for file in [".tmpfile", "log.jsonl", "log.jsonl.partial-Ab12Cd", "x"] {
            fs::write(folder.path().join(file), "x").unwrap();
        }
        for other in ["log.jsonl.partial-short", "log.jsonl.partial-Ab12C-", "notes.partial-Ab12Cd"] {
            fs::create_dir(folder.path().join(other)).unwrap();
        }
        assert_eq!(partials(&log).unwrap(), [own.path()]);
    }
}
