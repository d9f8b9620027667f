//! Cache layout, shared with Python's `huggingface_hub`.
//!
//! A repository's folder contains `blobs/ETAG` with the contents of files, `snapshots/COMMIT/FILE` with
//! relative links to blobs, and `refs/REVISION` with commits. Writes stay in this folder and never follow a
//! link below the cache folder.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Seek, SeekFrom, Write};
use std::iter;
use std::path::{Path, PathBuf};

use candle_gpt2_weights::{open_locked, replace_file};

use super::cached::{DATASETS, MODELS};
use super::checked::{CacheKey, FilePath};
use super::name::{HubName, Kind};

/// Folder of a repository in the cache.
pub(super) struct Repository {
    cache: PathBuf,
    folder: String,
}

impl Repository {
    pub(super) fn new(cache: &Path, name: &HubName) -> Self {
        let kind = match name.kind {
            Kind::Model => MODELS,
            Kind::Dataset => DATASETS,
        };
        Self { cache: cache.to_owned(), folder: format!("{kind}{}", name.id.replace('/', "--")) }
    }

    pub(super) fn path(&self) -> PathBuf {
        self.cache.join(&self.folder)
    }

    pub(super) fn snapshot(&self, commit: &CacheKey) -> PathBuf {
        self.path().join("snapshots").join(commit.as_str())
    }

    /// Finds the cached snapshot of a commit, branch or tag.
    pub(super) fn cached(&self, revision: &str) -> Option<PathBuf> {
        let of_commit =
            |commit: &str| Some(self.snapshot(&CacheKey::new(commit)?)).filter(|path| path.is_dir());
        of_commit(revision).or_else(|| of_commit(self.commit(revision)?.trim()))
    }

    /// Explains why a cached repository cannot be used at a revision, and how to fix it.
    ///
    /// Returns `None` if the repository is not in the cache.
    pub(super) fn unusable(&self, revision: &str) -> Option<String> {
        if !self.path().is_dir() {
            return None;
        }
        if let Some(snapshot) = self.cached(revision) {
            let is_broken =
                fs::read_dir(&snapshot).into_iter().flatten().flatten().any(|entry| !entry.path().exists());
            let what = if is_broken { "dangling links" } else { "missing files" };
            return Some(format!("revision {revision} is incomplete ({what}); download it again"));
        }
        // The message names the recorded commit only if its text is safe.
        let commit = self.commit(revision).map(|commit| CacheKey::new(commit.trim()));
        if let Some(commit) = commit {
            let commit = commit.map_or(String::new(), |commit| format!(" {}", commit.as_str()));
            return Some(format!(
                "the snapshot{commit} for revision {revision} is missing; download it again"
            ));
        }
        let snapshots = fs::read_dir(self.path().join("snapshots")).into_iter().flatten().flatten();
        let snapshots: Vec<String> =
            snapshots.filter_map(|entry| entry.file_name().into_string().ok()).collect();
        match snapshots.iter().min() {
            Some(commit) => Some(format!(
                "refs/{revision} is missing; append the commit of a snapshot to the name, as in @{commit}, or download it again"
            )),
            None => Some("it has no snapshots; download it again".to_owned()),
        }
    }

    fn commit(&self, revision: &str) -> Option<String> {
        fs::read_to_string(self.path().join("refs").join(revision)).ok()
    }

    /// Records the commit of a branch or tag.
    pub(super) fn set_commit(&self, revision: &str, commit: &CacheKey) -> io::Result<()> {
        if revision == commit.as_str()
            || self.commit(revision).is_some_and(|known| known.trim() == commit.as_str())
        {
            return Ok(());
        }
        let (folders, name) = split(revision);
        let path = self.folder(iter::once("refs").chain(folders))?.join(name);
        replace_file(&path, |partial| Ok(fs::write(partial, commit.as_str())?)).map_err(io::Error::other)
    }

    fn blob(&self, etag: &CacheKey) -> PathBuf {
        self.path().join("blobs").join(etag.as_str())
    }

    pub(super) fn has_blob(&self, etag: &CacheKey) -> bool {
        self.blob(etag).is_file()
    }

    /// Opens and locks the partial download of a blob.
    ///
    /// Fails with [`io::ErrorKind::WouldBlock`] while another process holds the lock.
    pub(super) fn partial(&self, etag: &CacheKey) -> io::Result<Partial> {
        let path = self.folder(["blobs"])?.join(format!("{}.part", etag.as_str()));
        match fs::symlink_metadata(&path) {
            Ok(found) if !found.is_file() => return Err(misplaced(&path, "a regular file")),
            _ => {}
        }
        // Windows can neither lock nor truncate a file opened only for appending.
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false);
        let mut file = open_locked(&path, &options)?;
        let length = file.seek(SeekFrom::End(0))?;
        Ok(Partial { file, path, blob: self.blob(etag), length })
    }

    /// Adds a blob to a snapshot.
    pub(super) fn link(&self, etag: &CacheKey, commit: &CacheKey, file: &FilePath) -> io::Result<()> {
        let (folders, name) = split(file.as_str());
        let depth = 2 + folders.clone().count();
        let folder = self.folder(["snapshots", commit.as_str()].into_iter().chain(folders))?;
        let relative: PathBuf = iter::repeat_n("..", depth).chain(["blobs", etag.as_str()]).collect();
        place(&self.blob(etag), &folder.join(name), |at| symlink(&relative, at))
    }

    /// Creates folders below the repository's folder; rejects folders that are links.
    fn folder<'a>(&'a self, below: impl IntoIterator<Item = &'a str>) -> io::Result<PathBuf> {
        fs::create_dir_all(&self.cache)?;
        let mut path = self.cache.clone();
        for component in iter::once(self.folder.as_str()).chain(below) {
            path.push(component);
            match fs::create_dir(&path) {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                    if !fs::symlink_metadata(&path)?.is_dir() {
                        return Err(misplaced(&path, "a folder"));
                    }
                }
                created => created?,
            }
        }
        Ok(path)
    }
}

/// A partial download, locked against other processes.
pub(super) struct Partial {
    file: File,
    path: PathBuf,
    blob: PathBuf,
    /// Number of bytes downloaded so far.
    pub(super) length: u64,
}

impl Partial {
    pub(super) fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.file.write_all(bytes)?;
        self.length += bytes.len() as u64;
        Ok(())
    }

    pub(super) fn clear(&mut self) -> io::Result<()> {
        self.file.set_len(0)?;
        self.file.rewind()?;
        self.length = 0;
        Ok(())
    }

    /// Turns the complete download into a blob.
    pub(super) fn finish(self) -> io::Result<()> {
        fs::rename(&self.path, &self.blob)
    }

    pub(super) fn discard(self) -> io::Result<()> {
        match fs::remove_file(&self.path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            removed => removed,
        }
    }
}

/// Makes a blob available at a path in a snapshot, replacing a dangling link.
///
/// Most Windows users cannot create symbolic links. In that case a hard link is created, or the blob is
/// moved.
fn place(blob: &Path, at: &Path, link: impl FnOnce(&Path) -> io::Result<()>) -> io::Result<()> {
    if at.is_file() {
        return Ok(());
    }
    if at.is_symlink() {
        fs::remove_file(at)?;
    }
    // Wine can report success for a link that it did not create.
    let linked = link(at).is_ok() && at.is_file() || fs::hard_link(blob, at).is_ok();
    if linked || at.is_file() { Ok(()) } else { fs::rename(blob, at) }
}

#[cfg(unix)]
fn symlink(target: &Path, at: &Path) -> io::Result<()> {
    std::os::unix::fs::symlink(target, at)
}

#[cfg(windows)]
fn symlink(target: &Path, at: &Path) -> io::Result<()> {
    std::os::windows::fs::symlink_file(target, at)
}

#[cfg(not(any(unix, windows)))]
fn symlink(_: &Path, _: &Path) -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}

/// Splits a path at its slashes into its folders and its last component.
fn split(path: &str) -> (impl Iterator<Item = &str> + Clone, &str) {
    let (folders, name) = path.rsplit_once('/').unwrap_or(("", path));
    (folders.split('/').filter(|folder| !folder.is_empty()), name)
}

fn misplaced(path: &Path, expected: &str) -> io::Error {
    io::Error::other(format!("{} is not {expected}; remove it from the cache", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blobs_are_copied_if_links_fail() {
        let folder = tempfile::tempdir().unwrap();
        let [blob, at, again] = ["blob", "at", "again"].map(|name| folder.path().join(name));
        fs::write(&blob, "contents").unwrap();
        place(&blob, &at, |_| Err(io::ErrorKind::PermissionDenied.into())).unwrap();
        // The link is reported as created, but does not exist.
        place(&blob, &again, |_| Ok(())).unwrap();
        for path in [&at, &again] {
            assert_eq!(fs::read_to_string(path).unwrap(), "contents");
        }
        fs::write(&again, "other").unwrap();
        place(&blob, &again, |_| unreachable!("the path already exists")).unwrap();
    }

    #[cfg(unix)]
    #[test]
    fn dangling_links_are_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let [blob, at] = ["blob", "at"].map(|name| folder.path().join(name));
        fs::write(&blob, "contents").unwrap();
        symlink("nowhere".as_ref(), &at).unwrap();
        place(&blob, &at, |at| symlink("blob".as_ref(), at)).unwrap();
        assert_eq!(fs::read_to_string(&at).unwrap(), "contents");
        assert!(!folder.path().join("nowhere").exists());
    }
}
