//! Writing files and folders so that their place holds the whole new content or what was there before, whatever happens
//! meanwhile.
//!
//! What is written is made in a folder of its own beside its place, `NAME.partial-XXXXXX`, which no other writer has. It is
//! flushed to the disk, renamed, and the list of names that it is in is flushed too.

use std::error::Error;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use tempfile::{TempDir, TempPath};

use crate::WeightsError;

/// Between the name of a result and the random part of the folder that it is made in.
const PARTIAL: &str = ".partial-";
/// Letters and digits of the random part.
const RANDOM_LETTERS: usize = 6;

/// How often a file that other programs hold open is tried again, and after how long: for two seconds.
const MOST_TRIES: usize = 200;
const TRY_AGAIN: Duration = Duration::from_millis(10);

/// What writing fails with: any error.
type Failure = Box<dyn Error + Send + Sync>;

/// Writes a file as a whole, in place of the one that is there. `write` gets the path to write to.
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
/// Those of `write`, and when the file cannot be flushed or renamed: its place then holds what it held before.
pub fn replace_file(
    path: &Path,
    write: impl FnOnce(&Path) -> Result<(), Failure>,
) -> Result<(), WeightsError> {
    let partial = Partial::new(path)?;
    partial.fill_file(write)?;
    partial.finish(|made| rename_over(made, path))
}

/// Writes a file as a whole if there is none. `write` gets the path to write to.
///
/// ```
/// use candle_gpt2_weights::create_file;
///
/// let folder = tempfile::tempdir()?;
/// let file = folder.path().join("result.json");
/// create_file(&file, |partial| Ok(std::fs::write(partial, "{}")?))?;
/// let again = create_file(&file, |partial| Ok(std::fs::write(partial, "[]")?)).unwrap_err();
/// assert!(again.to_string().ends_with("it exists already; remove it, or choose another name"));
/// assert_eq!(std::fs::read_to_string(file)?, "{}");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// As [`replace_file`], and when something is there already, or comes there meanwhile.
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

/// Writes a folder of files as a whole if there is nothing. `write` gets the folder to fill, which exists.
///
/// ```
/// use candle_gpt2_weights::create_folder;
///
/// let folder = tempfile::tempdir()?;
/// let results = folder.path().join("results");
/// create_folder(&results, |partial| Ok(std::fs::write(partial.join("one.json"), "{}")?))?;
/// assert_eq!(std::fs::read_to_string(results.join("one.json"))?, "{}");
/// let error = create_folder(&results, |_| Ok(())).unwrap_err();
/// assert!(error.to_string().ends_with("it exists already; remove it, or choose another name"));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// Those of `write`, when something is there already, or the folder cannot be flushed or renamed; then nothing is left of it.
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

/// Refuses a place that something is at: for results that overwrite nothing.
///
/// [`create_file`] does so itself; before long work it is asked first.
///
/// # Errors
/// When there is something.
pub fn expect_free(path: &Path) -> Result<(), WeightsError> {
    // A link that leads nowhere is something too.
    match fs::symlink_metadata(path) {
        Ok(_) => Err(exists_already(path)),
        Err(_) => Ok(()),
    }
}

/// A folder of its own beside `target` in which to make it. It is removed with its contents when it is dropped, and
/// [`partials`] finds those of processes that were killed.
///
/// # Errors
/// When it cannot be made.
pub fn partial_folder(target: &Path) -> io::Result<TempDir> {
    let mut prefix = target.file_name().unwrap_or_default().to_owned();
    prefix.push(PARTIAL);
    let made = tempfile::Builder::new().prefix(&prefix).rand_bytes(RANDOM_LETTERS).tempdir_in(parent(target));
    // The library adds its own random path to what the system says.
    made.map_err(|error| {
        let cause = error.get_ref().and_then(|named| named.source()?.downcast_ref::<io::Error>());
        cause.and_then(io::Error::raw_os_error).map_or(error, io::Error::from_raw_os_error)
    })
}

/// The folders beside `target` in which it was or is made: what a process that was killed leaves behind, and what another one
/// is writing.
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
/// When the folder around it cannot be listed.
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

/// A file or folder in the making, which is removed unless it is finished.
struct Partial<'a> {
    folder: TempDir,
    target: &'a Path,
}

impl<'a> Partial<'a> {
    fn new(target: &'a Path) -> Result<Self, WeightsError> {
        if target.file_name().is_none() {
            let what = "it has no name".to_owned();
            return Err(WeightsError::Unwritable { path: target.to_owned(), what });
        }
        let folder = partial_folder(target);
        Ok(Self { folder: folder.map_err(|error| unwritable(target, &error))?, target })
    }

    /// Where it is made.
    fn made(&self) -> PathBuf {
        self.folder.path().join(self.target.file_name().unwrap_or_default())
    }

    fn fill_file(&self, write: impl FnOnce(&Path) -> Result<(), Failure>) -> Result<(), WeightsError> {
        let made = self.made();
        write(&made).map_err(|error| self.at_target(error))?;
        sync_file(&made).map_err(|error| unwritable(self.target, &error))
    }

    /// Renames what was made and is flushed.
    fn finish(self, rename: impl FnOnce(&Path) -> io::Result<()>) -> Result<(), WeightsError> {
        let target = self.target;
        match rename(&self.made()) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => return Err(exists_already(target)),
            done => done.map_err(|error| unreplaceable(target, &error))?,
        }
        sync_folder(parent(target)).map_err(|error| unwritable(target, &error))
    }

    /// An error of writing, which names the place where the result would have been.
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

/// Renames a file over the one that is there. Windows refuses that while another program has it open, be it a reader or a scanner
/// for viruses, which most have done in a moment.
fn rename_over(made: &Path, path: &Path) -> io::Result<()> {
    for _ in 0..MOST_TRIES {
        match fs::rename(made, path) {
            Err(error) if is_held_open(&error) => thread::sleep(TRY_AGAIN),
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

/// Makes sure that a file is on the disk. Windows does it only for those who may write the file, so one that was made read-only
/// gets there in its own time.
fn sync_file(path: &Path) -> io::Result<()> {
    if !cfg!(windows) {
        return File::open(path)?.sync_all();
    }
    match OpenOptions::new().write(true).open(path) {
        Err(_) if fs::metadata(path)?.permissions().readonly() => Ok(()),
        opened => opened?.sync_all(),
    }
}

/// Makes sure that the names in a folder are on the disk, if the system can. Windows opens folders only with a flag for
/// backups, has no flush for them, and writes names to its journal by itself; network file systems may refuse it too.
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

/// An error of the renaming. Windows replaces no file that a program has mapped or keeps for itself, and says so of none.
fn unreplaceable(path: &Path, error: &io::Error) -> WeightsError {
    if cfg!(windows) && path.is_file() {
        unwritable(
            path,
            &format_args!("{error}; end the programs that use the file, such as gpt2 with this model"),
        )
    } else {
        unwritable(path, error)
    }
}

fn exists_already(path: &Path) -> WeightsError {
    let what = "it exists already; remove it, or choose another name".to_owned();
    WeightsError::Unwritable { path: path.to_owned(), what }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;
    use std::thread;

    use candle_gpt2_testing::{files, temporary_folder};

    use super::*;

    #[test]
    fn a_failed_write_leaves_what_was_there() {
        let folder = temporary_folder();
        let path = folder.path().join("weights");
        let write = |text: &'static str| move |to: &Path| Ok(fs::write(to, text)?);
        replace_file(&path, write("first")).unwrap();
        let failed = replace_file(&path, |to| {
            fs::write(to, "half").unwrap();
            Err(unwritable(to, &"disk full").into())
        });
        let expected = format!("{}: cannot be written: disk full", path.display());
        assert_eq!(failed.unwrap_err().to_string(), expected, "the place is named, not the partial file");
        let failed = replace_file(&path, |_| Err("disk full".into()));
        assert_eq!(failed.unwrap_err().to_string(), expected);
        assert_eq!(files(folder.path()), [("weights".to_owned(), b"first".to_vec())]);
        replace_file(&path, write("second")).unwrap();
        assert_eq!(files(folder.path()), [("weights".to_owned(), b"second".to_vec())]);
    }

    /// With one name for both, the second would write into the first one's file, which gets its name half rewritten.
    #[test]
    fn two_writers_to_one_place_do_not_meet() {
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
    fn nothing_that_exists_is_overwritten_where_a_file_is_created() {
        let folder = temporary_folder();
        let path = folder.path().join("result");
        // Something may come there while the file is written.
        let late = create_file(&path, |to| {
            fs::write(&path, "precious")?;
            Ok(fs::write(to, "new")?)
        });
        let told = "it exists already; remove it, or choose another name";
        assert_eq!(late.unwrap_err().to_string(), format!("{}: {told}", path.display()));
        let untouched = create_file(&path, |_| panic!("nothing is written")).unwrap_err();
        assert_eq!(untouched.to_string(), format!("{}: {told}", path.display()));
        assert_eq!(files(folder.path()), [("result".to_owned(), b"precious".to_vec())]);
    }

    #[test]
    fn only_folders_of_partial_results_are_found() {
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
