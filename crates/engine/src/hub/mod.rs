//! Models named `owner/name[@revision]`: checkpoints from the Hugging Face hub, in the cache that Python's library shares.

mod error;
mod name;
mod options;

use std::path::{Path, PathBuf};

pub use error::HubError;
use name::HubModel;
pub use options::{HubOptions, Network};

use crate::Reporter;

/// The local path of a model: its name where that exists or can only be a path, else the hub's files in the cache.
pub(crate) fn local_path(
    model: &Path,
    options: &HubOptions,
    reporter: &dyn Reporter,
) -> Result<PathBuf, HubError> {
    let hub_model = model.to_str().and_then(HubModel::parse);
    match hub_model {
        Some(hub_model) if !is_local(model) && !is_file_name(model) => {
            client::fetch(&hub_model, options, reporter)
        }
        _ => Ok(model.to_owned()),
    }
}

/// Whether a path leads to something, a TensorFlow checkpoint named by the beginning of its files included.
fn is_local(path: &Path) -> bool {
    let mut index = path.as_os_str().to_owned();
    index.push(".index");
    path.exists() || Path::new(&index).exists()
}

/// Whether a path ends as files of weights do, and no model of the hub.
fn is_file_name(path: &Path) -> bool {
    const EXTENSIONS: [&str; 8] = ["safetensors", "gguf", "bin", "pt", "pth", "ckpt", "json", "index"];
    path.extension().and_then(|extension| extension.to_str()).is_some_and(|end| EXTENSIONS.contains(&end))
}

#[cfg(feature = "hub")]
mod client;

#[cfg(not(feature = "hub"))]
mod client {
    use std::path::PathBuf;

    use super::error::HubError;
    use super::name::HubModel;
    use super::options::HubOptions;
    use crate::Reporter;

    pub(super) fn fetch(model: &HubModel, _: &HubOptions, _: &dyn Reporter) -> Result<PathBuf, HubError> {
        Err(HubError::NotBuilt { model: model.id.clone() })
    }
}
