//! Where models on the Hub come from.

use std::path::PathBuf;

use secrecy::SecretString;

const DEFAULT_ENDPOINT: &str = "https://huggingface.co";

/// Whether the network may be used.
///
/// A field of [`HubOptions`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Network {
    /// Files that are not in the cache are downloaded.
    Allowed,
    /// Only the cache is used.
    Offline,
}

/// Where models on the Hub come from. By default there is no network and no cache, so none is found: front ends set both, most
/// simply by [`HubOptions::from_environment`].
///
/// ```
/// use candle_gpt2_engine::{HubOptions, Network};
///
/// let cached = HubOptions { cache: "models/hub".into(), ..HubOptions::default() };
/// assert_eq!((cached.network, cached.endpoint.as_str()), (Network::Offline, "https://huggingface.co"));
/// ```
#[derive(Debug, Clone)]
pub struct HubOptions {
    /// Whether the network may be used.
    pub network: Network,
    /// The Hub's address.
    pub endpoint: String,
    /// Folder of the cache, as Python's library lays it out.
    pub cache: PathBuf,
    /// Token for models that are not open to everyone. `{:?}` does not show it.
    pub token: Option<SecretString>,
}

impl Default for HubOptions {
    fn default() -> Self {
        Self {
            network: Network::Offline,
            endpoint: DEFAULT_ENDPOINT.to_owned(),
            cache: PathBuf::new(),
            token: None,
        }
    }
}

impl HubOptions {
    /// The settings of the environment, in the variables that Python's library reads, and the one place of this crate that reads
    /// it: `HF_HUB_OFFLINE`; `HF_ENDPOINT`; for the cache `HF_HUB_CACHE`, `HUGGINGFACE_HUB_CACHE`, or `hub` in `HF_HOME`, or
    /// the usual place in the home folder; for the token `HF_TOKEN`, the file `HF_TOKEN_PATH`, or what
    /// `huggingface-cli login` left.
    #[cfg(feature = "hub")]
    pub fn from_environment() -> Self {
        let variable = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
        let offline = variable("HF_HUB_OFFLINE").unwrap_or_default().to_lowercase();
        let is_offline = ["1", "true", "yes", "on"].contains(&offline.as_str());
        let endpoint = variable("HF_ENDPOINT").unwrap_or_else(|| DEFAULT_ENDPOINT.to_owned());
        let folder = variable("HF_HUB_CACHE").or_else(|| variable("HUGGINGFACE_HUB_CACHE"));
        let cache = folder.map_or_else(hf_hub::Cache::from_env, |folder| hf_hub::Cache::new(folder.into()));
        let from_file = || {
            let text = std::fs::read_to_string(variable("HF_TOKEN_PATH")?).ok()?;
            Some(text.trim().to_owned()).filter(|token| !token.is_empty())
        };
        Self {
            network: if is_offline { Network::Offline } else { Network::Allowed },
            endpoint: endpoint.trim_end_matches('/').to_owned(),
            token: variable("HF_TOKEN").or_else(from_file).or_else(|| cache.token()).map(SecretString::from),
            cache: cache.path().clone(),
        }
    }

    /// The default: without the feature `hub` there is no hub to be told of.
    #[cfg(not(feature = "hub"))]
    pub fn from_environment() -> Self {
        Self::default()
    }
}
