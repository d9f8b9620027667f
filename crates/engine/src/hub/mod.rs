//! Models named `owner/name[@revision]`, and files of datasets named `owner/name[@revision]/path`: from the Hugging Face hub, in
//! the cache that Python's library shares.

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

use crate::{EngineError, Reporter};

/// The local path of a model: its name if that exists or can only be a path, else the Hub's files in the cache.
pub(crate) fn local_path(
    model: &Path,
    options: &HubOptions,
    reporter: &dyn Reporter,
) -> Result<PathBuf, HubError> {
    let hub_model = model.to_str().and_then(HubName::of_model);
    match hub_model {
        Some(hub_model) if !is_local(model) && !is_file_name(model) => {
            client::fetch(&hub_model, options, reporter)
        }
        _ => Ok(model.to_owned()),
    }
}

/// A file of data.
///
/// Given by [`dataset_file`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DatasetFile {
    /// Where it is.
    pub path: PathBuf,
    /// The commit that it is from; absent for a local path.
    pub revision: Option<String>,
}

/// The local path of data: their name if that exists or can only be a path, else a file of a dataset on the Hub,
/// `owner/name[@revision]/path`, in the cache.
///
/// # Errors
/// When the Hub has no such file, or it is not available.
///
/// ```
/// use candle_gpt2_engine::{HubOptions, Silent, dataset_file};
///
/// let file = dataset_file("book.txt".as_ref(), &HubOptions::default(), &Silent)?;
/// assert_eq!((file.path.to_str(), file.revision), (Some("book.txt"), None));
/// let of_the_hub = "EleutherAI/lambada_openai/data/lambada_test_en.jsonl".as_ref();
/// let told = dataset_file(of_the_hub, &HubOptions::default(), &Silent).err().ok_or("there is no network")?;
/// assert!(told.to_string().contains("the network may not be used"));
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

/// Whether a path leads to something, a TensorFlow checkpoint named by the beginning of its files included.
fn is_local(path: &Path) -> bool {
    let mut index = path.as_os_str().to_owned();
    index.push(".index");
    path.exists() || Path::new(&index).exists()
}

/// Whether a path ends as weights files do, and as no name on the Hub does.
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

    pub(super) fn fetch_file(
        dataset: &HubName,
        file: &FilePath,
        _: &HubOptions,
        _: &dyn Reporter,
    ) -> Result<PathBuf, HubError> {
        Err(HubError::NotBuilt { model: format!("{} of {}", file.as_str(), dataset.id) })
    }
}
