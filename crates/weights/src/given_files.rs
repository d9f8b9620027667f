//! Checkpoint files supplied by the caller instead of found on disk.
//!
//! Examples: data embedded in the program, files picked in a browser, or objects in a store.

use std::borrow::Cow;
use std::fmt::Debug;
use std::path::Path;
use std::sync::Arc;

use crate::WeightsError;

/// Source of bytes that are read in ranges, such as a file in a browser or an object in a store.
///
/// ```
/// use std::io::{Error, Result};
///
/// use candle_gpt2_weights::ReadAt;
///
/// /// Object in a store that is fetched range by range.
/// #[derive(Debug)]
/// struct Stored(Vec<u8>);
///
/// impl ReadAt for Stored {
///     fn len(&self) -> u64 {
///         self.0.len() as u64
///     }
///
///     fn read_at(&self, start: u64, to: &mut [u8]) -> Result<()> {
///         let start = usize::try_from(start).map_err(Error::other)?;
///         let bytes = self.0.get(start..).and_then(|rest| rest.get(..to.len()));
///         to.copy_from_slice(bytes.ok_or_else(|| Error::other("beyond the end"))?);
///         Ok(())
///     }
/// }
///
/// let mut two = [0; 2];
/// Stored(vec![3, 5, 7]).read_at(1, &mut two)?;
/// assert_eq!(two, [5, 7]);
/// # Ok::<(), Error>(())
/// ```
pub trait ReadAt: Debug + Send + Sync {
    /// Returns the size in bytes.
    fn len(&self) -> u64;

    /// Whether the source is empty.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Fills `to` with the bytes that begin at offset `start`.
    ///
    /// # Errors
    /// If the read fails, or fewer bytes remain.
    fn read_at(&self, start: u64, to: &mut [u8]) -> std::io::Result<()>;
}

/// Supplied files of a checkpoint, identified by their names.
///
/// The names follow a checkpoint folder (`model.safetensors`, `config.json`, `tokenizer.json`, …), or
/// name a single GGUF file. If a name contains folders, as from a browser's folder picker, only the last
/// component counts. Among files with the same last component, the one in the fewest folders wins.
///
/// [`Checkpoint::open_given`](crate::Checkpoint::open_given) opens them; see
/// [`Checkpoint`](crate::Checkpoint) for an example.
#[derive(Debug, Clone)]
pub struct GivenFiles {
    pub(crate) name: String,
    files: Vec<(String, Contents)>,
}

/// Content of a supplied file.
#[derive(Debug, Clone)]
pub(crate) enum Contents {
    /// Bytes in memory.
    Bytes(Arc<Cow<'static, [u8]>>),
    /// Bytes that are read in ranges.
    Parts(Arc<dyn ReadAt>),
}

impl GivenFiles {
    /// Creates an empty set of files; messages show `name` as the folder, unless a file has that name.
    pub fn new(name: &str) -> Self {
        Self { name: name.to_owned(), files: Vec::new() }
    }

    /// Creates a set of files whose bytes are in memory; messages show `name` as their folder.
    pub fn of_bytes<'a, B>(name: &str, files: impl IntoIterator<Item = (&'a str, B)>) -> Self
    where
        B: Into<Cow<'static, [u8]>>,
    {
        files.into_iter().fold(Self::new(name), |given, (file, bytes)| given.with_bytes(file, bytes))
    }

    /// Adds a file whose bytes are in memory.
    pub fn with_bytes(mut self, file: &str, bytes: impl Into<Cow<'static, [u8]>>) -> Self {
        self.files.push((file.to_owned(), Contents::Bytes(Arc::new(bytes.into()))));
        self
    }

    /// Adds a file that is read in ranges: its header, then one tensor at a time.
    ///
    /// The file is never in memory as a whole.
    pub fn with_file(mut self, file: &str, contents: Arc<dyn ReadAt>) -> Self {
        self.files.push((file.to_owned(), Contents::Parts(contents)));
        self
    }

    /// Returns the folder for messages; empty if a file has the same name.
    pub(crate) fn folder(&self) -> &Path {
        if self.names().any(|name| name == self.name) { Path::new("") } else { Path::new(&self.name) }
    }

    /// Returns the last component of each file name.
    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        self.files.iter().map(|(given, _)| last_part(given))
    }

    /// Finds the file whose name has the same last component as `path`.
    ///
    /// # Errors
    /// If several files match.
    pub(crate) fn find(&self, path: &Path) -> Result<Option<&Contents>, WeightsError> {
        let wanted = path.file_name().and_then(|name| name.to_str());
        let mut found: Vec<_> =
            self.files.iter().filter(|(given, _)| Some(last_part(given)) == wanted).collect();
        let depth = |(given, _): &&(String, Contents)| given.matches('/').count();
        let least = found.iter().map(depth).min();
        found.retain(|file| Some(depth(file)) == least);
        match found.as_slice() {
            [] => Ok(None),
            [(_, contents)] => Ok(Some(contents)),
            [(first, _), (second, _), ..] => {
                let what = format!(
                    "two files with this name were supplied, `{first}` and `{second}`; supply only the files of one checkpoint"
                );
                Err(WeightsError::NotWeights { path: path.to_owned(), what })
            }
        }
    }
}

fn last_part(name: &str) -> &str {
    name.rsplit_once('/').map_or(name, |(_, last)| last)
}
