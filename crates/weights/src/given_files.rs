//! The files of a checkpoint that are given rather than found on a disk: parts of the program, what a page was handed, objects
//! of a store.

use std::borrow::Cow;
use std::fmt::Debug;
use std::path::Path;
use std::sync::Arc;

use crate::WeightsError;

/// Bytes that are read in parts: a file of a browser, an object of a store.
///
/// ```
/// use std::io::{Error, Result};
///
/// use candle_gpt2_weights::ReadAt;
///
/// /// Bytes that a store would be asked for, range by range.
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
    /// Number of bytes.
    fn len(&self) -> u64;

    /// Whether there are none.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Fills `to` with the bytes from `start` on.
    ///
    /// # Errors
    /// When they cannot be read, or are not all there.
    fn read_at(&self, start: u64, to: &mut [u8]) -> std::io::Result<()>;
}

/// The files of a checkpoint that are given, by their names: those that a folder of a disk would have (`model.safetensors`,
/// `config.json`, `tokenizer.json`, …), or one GGUF file alone. Where a name has folders in front, as a browser's picker of
/// folders gives it, its last part counts; of several files with one last part, the one in the fewest folders.
/// [`Checkpoint::open_given`](crate::Checkpoint::open_given) opens them; an example is at [`Checkpoint`](crate::Checkpoint).
#[derive(Debug, Clone)]
pub struct GivenFiles {
    pub(crate) name: String,
    files: Vec<(String, Contents)>,
}

/// What one of the files holds.
#[derive(Debug, Clone)]
pub(crate) enum Contents {
    /// Bytes in memory.
    Bytes(Arc<Cow<'static, [u8]>>),
    /// Bytes that are read in parts.
    Parts(Arc<dyn ReadAt>),
}

impl GivenFiles {
    /// No files yet. Messages show `name` as their folder, unless it is the name of one of them.
    pub fn new(name: &str) -> Self {
        Self { name: name.to_owned(), files: Vec::new() }
    }

    /// With a file whose bytes are in memory.
    pub fn with_bytes(mut self, file: &str, bytes: impl Into<Cow<'static, [u8]>>) -> Self {
        self.files.push((file.to_owned(), Contents::Bytes(Arc::new(bytes.into()))));
        self
    }

    /// With a file that is read in parts and never held as a whole: its header, then one tensor after the other.
    pub fn with_file(mut self, file: &str, contents: Arc<dyn ReadAt>) -> Self {
        self.files.push((file.to_owned(), Contents::Parts(contents)));
        self
    }

    /// The folder that messages show; empty if its name is that of a file.
    pub(crate) fn folder(&self) -> &Path {
        if self.names().any(|name| name == self.name) { Path::new("") } else { Path::new(&self.name) }
    }

    /// The last parts of all names.
    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        self.files.iter().map(|(given, _)| last_part(given))
    }

    /// The file whose name has the last part of `path`, if there is one.
    ///
    /// # Errors
    /// When several have it.
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
                    "two files with this name were given, `{first}` and `{second}`; give those of one checkpoint alone"
                );
                Err(WeightsError::NotWeights { path: path.to_owned(), what })
            }
        }
    }
}

fn last_part(name: &str) -> &str {
    name.rsplit_once('/').map_or(name, |(_, last)| last)
}
