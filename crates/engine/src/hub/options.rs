//! Configuration for access to the Hub.

#[cfg(feature = "hub")]
use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use secrecy::SecretString;

const DEFAULT_ENDPOINT: &str = "https://huggingface.co";
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(60);

/// Permission to use the network.
///
/// A field of [`HubOptions`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Network {
    /// Downloads files that are not in the cache.
    Allowed,
    /// Uses only the cache.
    Offline,
}

/// Options for access to the Hub.
///
/// By default there is neither a network nor a cache, so no model is found. Front ends set both, usually with
/// [`HubOptions::from_environment`].
///
/// ```
/// use candle_gpt2_engine::{HubOptions, Network};
///
/// let cached = HubOptions { cache: "models/hub".into(), ..HubOptions::default() };
/// assert_eq!((cached.network, cached.endpoint.as_str()), (Network::Offline, "https://huggingface.co"));
/// ```
#[derive(Debug, Clone)]
pub struct HubOptions {
    /// Permission to use the network.
    pub network: Network,
    /// Address of the Hub.
    pub endpoint: String,
    /// Folder of the cache, in the layout of Python's `huggingface_hub`.
    pub cache: PathBuf,
    /// Token for gated and private models; `{:?}` does not reveal it.
    pub token: Option<SecretString>,
    /// Maximum time without data before a request or download fails; 60 seconds by default.
    pub timeout: Duration,
}

impl Default for HubOptions {
    fn default() -> Self {
        Self {
            network: Network::Offline,
            endpoint: DEFAULT_ENDPOINT.to_owned(),
            cache: PathBuf::new(),
            token: None,
            timeout: DEFAULT_TIMEOUT,
        }
    }
}

impl HubOptions {
    /// Reads the environment variables of Python's `huggingface_hub`.
    ///
    /// No other function of this crate reads the environment.
    ///
    /// | variable | meaning |
    /// |---|---|
    /// | `HF_HUB_OFFLINE` | `1`, `true`, `yes` or `on` disable the network |
    /// | `HF_ENDPOINT` | the Hub's address |
    /// | `HF_HUB_CACHE`, `HUGGINGFACE_HUB_CACHE` | the cache; by default `hub` in `HF_HOME` |
    /// | `HF_HOME` | by default `huggingface` in `XDG_CACHE_HOME`, which defaults to `~/.cache` |
    /// | `HF_TOKEN` | the token |
    /// | `HF_TOKEN_PATH` | token file; by default `token` in `HF_HOME`, which `hf auth login` writes |
    /// | `HF_HUB_DOWNLOAD_TIMEOUT` | [`timeout`](Self::timeout) in seconds |
    ///
    /// Paths can start with `~` and contain `$NAME` and `${NAME}`.
    #[cfg(feature = "hub")]
    pub fn from_environment() -> Self {
        Self::from_variables(&|name| std::env::var_os(name), std::env::home_dir())
    }

    /// Returns the default, because there is no Hub to configure without the feature `hub`.
    #[cfg(not(feature = "hub"))]
    pub fn from_environment() -> Self {
        Self::default()
    }

    #[cfg(feature = "hub")]
    fn from_variables(variable: &dyn Fn(&str) -> Option<OsString>, home: Option<PathBuf>) -> Self {
        let text = |name: &str| variable(name)?.into_string().ok().filter(|value| !value.is_empty());
        let expanded = |path: PathBuf| match path.into_os_string().into_string() {
            Ok(path) => expanded(&path, &text, home.as_deref()),
            Err(path) => path.into(),
        };
        let path = |name: &str| variable(name).filter(|path| !path.is_empty()).map(PathBuf::from);
        let offline = text("HF_HUB_OFFLINE").unwrap_or_default().to_lowercase();
        let endpoint = text("HF_ENDPOINT").unwrap_or_else(|| DEFAULT_ENDPOINT.to_owned());
        let of_user = || path("XDG_CACHE_HOME").unwrap_or_else(|| "~/.cache".into()).join("huggingface");
        let hf_home = expanded(path("HF_HOME").unwrap_or_else(of_user));
        let cache = path("HF_HUB_CACHE").or_else(|| path("HUGGINGFACE_HUB_CACHE"));
        let token_file = path("HF_TOKEN_PATH").map_or_else(|| hf_home.join("token"), &expanded);
        let stored_token = || Some(std::fs::read_to_string(token_file).ok()?.trim().to_owned());
        let token = text("HF_TOKEN").or_else(stored_token).filter(|token| !token.is_empty());
        let seconds = text("HF_HUB_DOWNLOAD_TIMEOUT").and_then(|seconds| seconds.parse().ok());
        Self {
            network: if ["1", "true", "yes", "on"].contains(&offline.as_str()) {
                Network::Offline
            } else {
                Network::Allowed
            },
            endpoint: endpoint.trim_end_matches('/').to_owned(),
            cache: cache.map_or_else(|| hf_home.join("hub"), expanded),
            token: token.map(SecretString::from),
            timeout: seconds.filter(|seconds| *seconds > 0).map_or(DEFAULT_TIMEOUT, Duration::from_secs),
        }
    }
}

/// Expands `~`, `$NAME` and `${NAME}` like Python's `expanduser` and `expandvars`.
///
/// Unknown names remain unchanged.
#[cfg(feature = "hub")]
fn expanded(
    path: &str,
    variable: &dyn Fn(&str) -> Option<String>,
    home: Option<&std::path::Path>,
) -> PathBuf {
    let is_separator = |end: &str| end.is_empty() || end.starts_with(std::path::is_separator);
    let at_home =
        path.strip_prefix('~').filter(|end| is_separator(end)).zip(home.and_then(|home| home.to_str()));
    let path = at_home.map_or_else(|| path.to_owned(), |(end, home)| format!("{home}{end}"));
    let mut parts = path.split('$');
    let mut expanded = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let braced = part.strip_prefix('{').and_then(|part| part.split_once('}'));
        let (name, rest) = braced.unwrap_or_else(|| {
            let end = part.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(part.len());
            part.split_at(end)
        });
        match variable(name) {
            Some(value) => expanded.extend([&value, rest]),
            None => expanded.extend(["$", part]),
        }
    }
    expanded.into()
}

#[cfg(all(test, feature = "hub", unix))]
mod tests {
    use super::*;

    /// Expected paths are the values of `constants.HF_HUB_CACHE` in huggingface_hub 2.4.
    #[test]
    fn cache_location_matches_huggingface_hub() {
        let cases: [(&[(&str, &str)], &str); 11] = [
            (&[], "/home/u/.cache/huggingface/hub"),
            (&[("XDG_CACHE_HOME", "/x")], "/x/huggingface/hub"),
            (&[("XDG_CACHE_HOME", "~/x")], "/home/u/x/huggingface/hub"),
            (&[("XDG_CACHE_HOME", "/x"), ("HF_HOME", "/h")], "/h/hub"),
            (&[("HF_HOME", "~"), ("XDG_CACHE_HOME", "/x")], "/home/u/hub"),
            (&[("HF_HOME", "/h"), ("HF_HUB_CACHE", "~/c")], "/home/u/c"),
            (
                &[("HF_HUB_CACHE", "$A/${B}x/$NONE/${NONE}$"), ("A", "/a"), ("B", "$A")],
                "/a/$Ax/$NONE/${NONE}$",
            ),
            (&[("HUGGINGFACE_HUB_CACHE", "/old"), ("HF_HOME", "/h")], "/old"),
            (&[("HUGGINGFACE_HUB_CACHE", "/old"), ("HF_HUB_CACHE", "/c")], "/c"),
            (&[("HF_HUB_CACHE", "~other/c")], "~other/c"),
            (&[("HF_HUB_CACHE", ""), ("XDG_CACHE_HOME", "")], "/home/u/.cache/huggingface/hub"),
        ];
        for (variables, expected) in cases {
            let variable = |name: &str| {
                let found = variables.iter().find(|(known, _)| *known == name);
                found.map(|(_, value)| OsString::from(value))
            };
            let options = HubOptions::from_variables(&variable, Some("/home/u".into()));
            assert_eq!(options.cache.to_str(), Some(expected), "{variables:?}");
        }
    }

    #[test]
    fn token_and_timeout_come_from_the_environment() {
        let home = tempfile::tempdir().unwrap();
        let folder = home.path().join(".cache/huggingface");
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::write(folder.join("token"), "hf_stored\n").unwrap();
        std::fs::write(home.path().join("own"), "hf_own").unwrap();
        let token = |variables: &[(&str, &str)]| {
            use secrecy::ExposeSecret;
            let variable = |name: &str| {
                let found = variables.iter().find(|(known, _)| *known == name);
                found.map(|(_, value)| OsString::from(value))
            };
            let options = HubOptions::from_variables(&variable, Some(home.path().into()));
            (options.token.map(|token| token.expose_secret().to_owned()), options.timeout.as_secs())
        };
        let some = |token: &str| Some(token.to_owned());
        assert_eq!(token(&[]), (some("hf_stored"), 60));
        assert_eq!(token(&[("HF_HUB_CACHE", "/elsewhere")]), (some("hf_stored"), 60));
        assert_eq!(token(&[("HF_TOKEN_PATH", "~/own")]), (some("hf_own"), 60));
        assert_eq!(token(&[("HF_TOKEN", "hf_1"), ("HF_HUB_DOWNLOAD_TIMEOUT", "7")]), (some("hf_1"), 7));
        assert_eq!(token(&[("HF_HOME", "/h"), ("HF_HUB_DOWNLOAD_TIMEOUT", "0")]), (None, 60));
    }
}
