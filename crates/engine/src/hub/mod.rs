//! Models and dataset files from the Hugging Face Hub, in a cache shared with Python's library.
//!
//! Models are named `owner/name[@revision]`, and dataset files `owner/name[@revision]/path`.

#[cfg(feature = "hub")]
mod cache;
mod cached;
#[cfg(feature = "hub")]
mod canned;
mod checked;
mod error;
#[cfg(feature = "hub")]
mod headers;
#[cfg(feature = "hub")]
mod http;
mod name;
mod options;

use std::path::{Path, PathBuf};

pub use cached::{CachedModel, CachedModels};
#[cfg(feature = "hub")]
pub use canned::{CannedAnswer, fetch_from_answers};
pub use error::HubError;
use name::HubName;
pub use options::{HubOptions, Network};

use candle_gpt2_weights::is_checkpoint;

use crate::{EngineError, Reporter};

/// Resolves a model to a local path.
///
/// A name that is a checkpoint or can only be a path is returned unchanged. Otherwise the files come from the
/// Hub or its cache.
pub(crate) fn local_path(
    model: &Path,
    options: &HubOptions,
    reporter: &dyn Reporter,
) -> Result<PathBuf, HubError> {
    let Some(hub_model) = hub_name(model).filter(|_| !is_checkpoint(model)) else {
        return Ok(model.to_owned());
    };
    if model.exists() {
        // The user may have meant the local path.
        let kind = if model.is_dir() { "folder" } else { "file" };
        reporter.note(&format!(
            "using {hub_model} from the Hub: the {kind} {name} is not a checkpoint; write ./{name} to use the {kind}",
            name = model.display()
        ));
    }
    client::fetch(&hub_model, options, reporter)
}

/// Parses a path as a name on the Hub, unless it can only be a file.
fn hub_name(path: &Path) -> Option<HubName> {
    path.to_str().and_then(HubName::of_model).filter(|_| !is_file_name(path))
}

/// Resolves an adapter to a local path.
///
/// A name that exists or can only be a path is returned unchanged. Otherwise the files come from the Hub or
/// its cache.
pub(crate) fn adapter_path(
    adapter: &Path,
    options: &HubOptions,
    reporter: &dyn Reporter,
) -> Result<PathBuf, HubError> {
    match hub_name(adapter).filter(|_| !adapter.exists()) {
        Some(named) => client::fetch_adapter(&named, options, reporter),
        None => Ok(adapter.to_owned()),
    }
}

/// A local data file.
///
/// Returned by [`dataset_file`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DatasetFile {
    /// Path of the file.
    pub path: PathBuf,
    /// Commit of the file; absent for a local path.
    pub revision: Option<String>,
}

/// Resolves the name of a data file to a local path.
///
/// A name that exists or can only be a path is returned unchanged. Otherwise `owner/name[@revision]/path`
/// names a file in a dataset on the Hub, which is downloaded into the cache.
///
/// # Errors
/// If the Hub has no such file, or the file is not available.
///
/// ```
/// use candle_gpt2_engine::{HubOptions, Silent, dataset_file};
///
/// let file = dataset_file("book.txt".as_ref(), &HubOptions::default(), &Silent)?;
/// assert_eq!((file.path.to_str(), file.revision), (Some("book.txt"), None));
/// let of_the_hub = "EleutherAI/lambada_openai/data/lambada_test_en.jsonl".as_ref();
/// let error = dataset_file(of_the_hub, &HubOptions::default(), &Silent).err().ok_or("expected an error")?;
/// assert!(error.to_string().contains("network access is disabled"));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn dataset_file(
    name: &Path,
    options: &HubOptions,
    reporter: &dyn Reporter,
) -> Result<DatasetFile, EngineError> {
    match name.to_str().and_then(HubName::of_dataset_file) {
        Some((dataset, file)) if !name.exists() => {
            let folder = client::fetch_file(&dataset, &file, options, reporter)?;
            let revision = folder.file_name().map(|commit| commit.to_string_lossy().into_owned());
            Ok(DatasetFile { path: folder.join(file.as_str()), revision })
        }
        _ => Ok(DatasetFile { path: name.to_owned(), revision: None }),
    }
}

/// Whether a path has a weight-file extension, which names on the Hub never have.
fn is_file_name(path: &Path) -> bool {
    const EXTENSIONS: [&str; 8] = ["safetensors", "gguf", "bin", "pt", "pth", "ckpt", "json", "index"];
    path.extension().and_then(|extension| extension.to_str()).is_some_and(|end| EXTENSIONS.contains(&end))
}

#[cfg(feature = "hub")]
mod client;

#[cfg(not(feature = "hub"))]
mod client {
    use std::path::PathBuf;

    use super::checked::FilePath;
    use super::error::HubError;
    use super::name::HubName;
    use super::options::HubOptions;
    use crate::Reporter;

    pub(super) fn fetch(model: &HubName, _: &HubOptions, _: &dyn Reporter) -> Result<PathBuf, HubError> {
        Err(HubError::NotBuilt { model: model.id.clone() })
    }

    pub(super) fn fetch_adapter(
        adapter: &HubName,
        options: &HubOptions,
        reporter: &dyn Reporter,
    ) -> Result<PathBuf, HubError> {
        fetch(adapter, options, reporter)
    }

    pub(super) fn fetch_file(
        dataset: &HubName,
        file: &FilePath,
        _: &HubOptions,
        _: &dyn Reporter,
    ) -> Result<PathBuf, HubError> {
        Err(HubError::NotBuilt { model: format!("{} from {}", file.as_str(), dataset.id) })
    }
}

#[cfg(test)]
#[cfg(feature = "hub")]
mod tests {
    use std::sync::Mutex;

    use super::*;
    use crate::{Progress, Silent, Unit};

    #[derive(Default)]
    struct Notes(Mutex<Vec<String>>);

    impl Reporter for Notes {
        fn start(&self, _: &str, _: u64, _: Unit) -> Box<dyn Progress> {
            Box::new(Silent)
        }

        fn note(&self, note: &str) {
            self.0.lock().unwrap().push(note.to_owned());
        }
    }

    /// Cargo runs tests in the crate's folder, where some paths look like names on the Hub.
    #[test]
    fn hub_name_wins_over_path_that_is_not_a_checkpoint() {
        for (name, kind) in [("src/hub", "folder"), ("src/lib.rs", "file")] {
            assert!(Path::new(name).exists(), "{name}");
            let notes = Notes::default();
            let error = local_path(name.as_ref(), &HubOptions::default(), &notes).unwrap_err();
            assert!(matches!(error, HubError::NotCached { .. }), "{error}");
            let notes = notes.0.into_inner().unwrap().join("\n");
            let expected = format!("the {kind} {name} is not a checkpoint; write ./{name} to use the {kind}");
            assert!(notes.contains(&expected), "{notes}");
            // A path that begins with `./` is never treated as a name on the Hub.
            let path = format!("./{name}");
            let found = local_path(path.as_ref(), &HubOptions::default(), &Notes::default()).unwrap();
            assert_eq!(found, Path::new(&path));
        }
    }
}
