//! `--model owner/name[@revision]`: checkpoints from the Hugging Face hub, in the cache that Python's library shares.
//!
//! hf-hub 0.5 (64 crates, under a minute to build) and not 1.0 (301 crates, five minutes): both read and write the same
//! cache, and what the older one lacks (`HF_HUB_CACHE`, `HF_HUB_OFFLINE`, a check of sizes) stands here.

use std::path::{Path, PathBuf};

use anyhow::Result;

/// Names that stand for a repository of the hub.
const SHORT_NAMES: [(&str, &str); 5] = [
    ("gpt2", "openai-community/gpt2"),
    ("gpt2-medium", "openai-community/gpt2-medium"),
    ("gpt2-large", "openai-community/gpt2-large"),
    ("gpt2-xl", "openai-community/gpt2-xl"),
    ("distilgpt2", "distilbert/distilgpt2"),
];

/// Whether the network may be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Network {
    /// Files that are not in the cache are downloaded.
    Allowed,
    /// Only the cache is used.
    Offline,
}

impl Network {
    /// What `--offline` and `HF_HUB_OFFLINE` say.
    pub(crate) fn new(is_offline: bool) -> Self {
        let variable = std::env::var("HF_HUB_OFFLINE").unwrap_or_default();
        let is_set = ["1", "true", "yes", "on"].contains(&variable.to_lowercase().as_str());
        if is_offline || is_set { Self::Offline } else { Self::Allowed }
    }
}

/// A repository of the hub at a revision.
#[derive(Debug, Clone, PartialEq, Eq)]
struct HubModel {
    id: String,
    revision: String,
}

impl HubModel {
    /// Reads `owner/name`, a short name, or either with `@revision`; `None` for what can only be a path.
    fn parse(text: &str) -> Option<Self> {
        let (name, revision) = text.split_once('@').unwrap_or((text, "main"));
        let id = match SHORT_NAMES.iter().find(|(short, _)| *short == name) {
            Some((_, id)) => (*id).to_owned(),
            None => name.to_owned(),
        };
        let (owner, repository) = id.split_once('/')?;
        let is_name = |part: &str| {
            let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
            !part.is_empty() && !part.starts_with('.') && part.chars().all(is_plain)
        };
        let is_revision = revision.split('/').all(is_name);
        (is_name(owner) && is_name(repository) && is_revision)
            .then(|| Self { id: id.clone(), revision: revision.to_owned() })
    }
}

/// The local path of `--model`: itself where it exists or can only be a path, else the hub's files in the cache.
pub(crate) fn local_path(model: &Path, network: Network) -> Result<PathBuf> {
    let hub_model = model.to_str().and_then(HubModel::parse);
    match hub_model {
        Some(hub_model) if !is_local(model) && !is_file_name(model) => client::fetch(&hub_model, network),
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

#[cfg(not(feature = "hub"))]
mod client {
    use std::path::PathBuf;

    use anyhow::{Result, bail};

    use super::{HubModel, Network};

    pub(super) fn fetch(model: &HubModel, _: Network) -> Result<PathBuf> {
        bail!("{}: no such file or folder, and this program was built without the feature `hub`", model.id)
    }
}

#[cfg(feature = "hub")]
mod client {
    use std::fs;
    use std::path::PathBuf;

    use anyhow::{Context, Result, anyhow, bail};
    use hf_hub::api::Progress;
    use hf_hub::api::sync::{ApiBuilder, ApiError, ApiRepo};
    use hf_hub::{Cache, Repo, RepoType};
    use indicatif::ProgressBar;

    use super::{HubModel, Network};
    use crate::{output, progress};

    /// Small files that are taken along where the repository has them.
    const SMALL_FILES: [&str; 8] = [
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "vocab.json",
        "merges.txt",
        "added_tokens.json",
        "special_tokens_map.json",
    ];
    /// The weights to take, best first: a single file, or an index with the beginning and ending of its shards' names.
    const WEIGHTS: [(&str, Option<(&str, &str)>); 4] = [
        ("model.safetensors", None),
        ("model.safetensors.index.json", Some(("model-", ".safetensors"))),
        ("pytorch_model.bin", None),
        ("pytorch_model.bin.index.json", Some(("pytorch_model-", ".bin"))),
    ];
    /// Attempts to go on with an interrupted download.
    const RETRIES: usize = 2;
    const DEFAULT_ENDPOINT: &str = "https://huggingface.co";

    /// Downloads what is missing and returns the folder of the snapshot.
    pub(super) fn fetch(model: &HubModel, network: Network) -> Result<PathBuf> {
        let cache = cache();
        let repository = Repo::with_revision(model.id.clone(), RepoType::Model, model.revision.clone());
        if network == Network::Offline {
            return cached(&cache, &repository).ok_or_else(|| {
                anyhow!(
                    "{} is not in the cache, and the network may not be used; {}",
                    name(model),
                    cache_contents(&cache)
                )
            });
        }
        let endpoint = variable("HF_ENDPOINT").unwrap_or_else(|| DEFAULT_ENDPOINT.to_owned());
        let endpoint = endpoint.trim_end_matches('/').to_owned();
        let api = ApiBuilder::from_cache(cache.clone())
            .with_endpoint(endpoint.clone())
            .with_token(token(&cache))
            .with_retries(RETRIES)
            .with_progress(false)
            .build()?
            .repo(repository.clone());
        let info = match api.info() {
            Ok(info) => info,
            Err(error) if is_unreachable(&error) => {
                let Some(folder) = cached(&cache, &repository) else {
                    bail!(
                        "{endpoint} cannot be reached ({}), and {} is not in the cache; {}",
                        brief(&error),
                        name(model),
                        cache_contents(&cache)
                    );
                };
                output::print_note(&format!(
                    "{endpoint} cannot be reached; the cached copy of {} is used",
                    model.id
                ));
                return Ok(folder);
            }
            Err(error) => return Err(explain(&error, model, "")),
        };
        let names: Vec<&str> = info.siblings.iter().map(|sibling| sibling.rfilename.as_str()).collect();
        if !names.contains(&"config.json") {
            bail!("{} has no config.json: it is no checkpoint of transformers", name(model));
        }
        let Some((weights, shards)) = WEIGHTS.iter().find(|(weights, _)| names.contains(weights)) else {
            bail!(
                "{} holds no weights that can be read (looked for {})",
                name(model),
                WEIGHTS.map(|(name, _)| name).join(", ")
            );
        };
        let is_shard = |name: &str| {
            shards.is_some_and(|(start, end)| {
                name.starts_with(start) && name.ends_with(end) && !name.contains('/')
            })
        };
        let wanted =
            names.iter().filter(|name| SMALL_FILES.contains(name) || *name == weights || is_shard(name));
        let folder = cache.path().join(repository.folder_name()).join("snapshots").join(&info.sha);
        for file in wanted {
            // A snapshot's files never change; a finished download is moved here as a whole.
            if !folder.join(file).exists() {
                download(&api, file).map_err(|error| match error.downcast::<ApiError>() {
                    Ok(error) => explain(&error, model, file),
                    Err(other) => other.context(format!("{file} of {}", name(model))),
                })?;
            }
        }
        if !folder.join("config.json").exists() {
            bail!("{} changed while it was downloaded; run the command again", name(model));
        }
        Ok(folder)
    }

    fn download(api: &ApiRepo, file: &str) -> Result<()> {
        let mut expected = 0;
        let bar = progress::bytes("downloading", 0);
        let path = api.download_with_progress(file, Download { bar: &bar, expected: &mut expected })?;
        bar.finish_and_clear();
        let found = fs::metadata(&path)?.len();
        if found != expected {
            // The file behind the link is what is wrong.
            let blob = fs::canonicalize(&path)?;
            fs::remove_file(&path)
                .and_then(|()| fs::remove_file(blob))
                .context("cannot remove a damaged download")?;
            bail!("expected {expected} bytes, downloaded {found}; run the command again");
        }
        Ok(())
    }

    /// Shows a download as a bar and keeps the size that the hub announced.
    struct Download<'a> {
        bar: &'a ProgressBar,
        expected: &'a mut u64,
    }

    impl Progress for Download<'_> {
        fn init(&mut self, size: usize, filename: &str) {
            *self.expected = size as u64;
            self.bar.set_length(size as u64);
            self.bar.set_position(0);
            self.bar.set_message(filename.to_owned());
        }

        fn update(&mut self, size: usize) {
            self.bar.inc(size as u64);
        }

        fn finish(&mut self) {}
    }

    /// The cache of Python's library: `HF_HUB_CACHE`, or `hub` in `HF_HOME`, or the usual place in the home folder.
    fn cache() -> Cache {
        let folder = variable("HF_HUB_CACHE").or_else(|| variable("HUGGINGFACE_HUB_CACHE"));
        folder.map_or_else(Cache::from_env, |folder| Cache::new(folder.into()))
    }

    /// `HF_TOKEN`, or the token that `huggingface-cli login` left.
    fn token(cache: &Cache) -> Option<String> {
        let from_file = || {
            let text = fs::read_to_string(variable("HF_TOKEN_PATH")?).ok()?;
            Some(text.trim().to_owned()).filter(|token| !token.is_empty())
        };
        variable("HF_TOKEN").or_else(from_file).or_else(|| cache.token())
    }

    fn variable(name: &str) -> Option<String> {
        std::env::var(name).ok().filter(|value| !value.is_empty())
    }

    /// The folder of a cached snapshot that holds a configuration and weights.
    fn cached(cache: &Cache, repository: &Repo) -> Option<PathBuf> {
        let snapshots = cache.path().join(repository.folder_name()).join("snapshots");
        let by_commit = snapshots.join(repository.revision());
        let by_reference = || Some(cache.repo(repository.clone()).get("config.json")?.parent()?.to_owned());
        let folder = if by_commit.is_dir() { by_commit } else { by_reference()? };
        let has_weights = WEIGHTS.iter().any(|(weights, _)| folder.join(weights).exists());
        (folder.join("config.json").exists() && has_weights).then_some(folder)
    }

    /// What the cache holds, in words.
    fn cache_contents(cache: &Cache) -> String {
        let entries = fs::read_dir(cache.path()).into_iter().flatten().flatten();
        let mut models: Vec<String> = entries
            .filter_map(|entry| {
                Some(entry.file_name().to_str()?.strip_prefix("models--")?.replace("--", "/"))
            })
            .collect();
        models.sort();
        match models.as_slice() {
            [] => format!("the cache {} is empty", cache.path().display()),
            models => format!("the cache {} holds {}", cache.path().display(), models.join(", ")),
        }
    }

    fn name(model: &HubModel) -> String {
        if model.revision == "main" { model.id.clone() } else { format!("{}@{}", model.id, model.revision) }
    }

    /// The error of the last attempt.
    fn cause(error: &ApiError) -> &ApiError {
        match error {
            ApiError::TooManyRetries(inner) => cause(inner),
            error => error,
        }
    }

    fn is_unreachable(error: &ApiError) -> bool {
        let ApiError::RequestError(error) = cause(error) else { return false };
        matches!(
            **error,
            ureq::Error::Io(_)
                | ureq::Error::HostNotFound
                | ureq::Error::ConnectionFailed
                | ureq::Error::Timeout(_)
        )
    }

    fn brief(error: &ApiError) -> String {
        cause(error).to_string().trim_start_matches("request error: ").to_owned()
    }

    /// What the hub's answer means and what to do.
    fn explain(error: &ApiError, model: &HubModel, file: &str) -> anyhow::Error {
        let whole = name(model);
        let status = match cause(error) {
            ApiError::RequestError(error) => match **error {
                ureq::Error::StatusCode(status) => Some(status),
                _ => None,
            },
            _ => None,
        };
        let is_disk_full = matches!(cause(error), ApiError::IoError(error) if error.kind() == std::io::ErrorKind::StorageFull);
        let of_file = if file.is_empty() { String::new() } else { format!("{file} of ") };
        match status {
            Some(401 | 403) => anyhow!(
                "{of_file}{whole}: access is refused; the model is gated, private, or does not exist. Ask for access on its \
                 page, and give a token with HF_TOKEN"
            ),
            Some(404) if model.revision == "main" => {
                anyhow!(
                    "{of_file}{whole}: there is no such model on the hub, and no such local path; check the name"
                )
            }
            Some(404) => {
                anyhow!("{of_file}{whole}: there is no such model or revision on the hub; check both names")
            }
            Some(status) => {
                anyhow!("{of_file}{whole}: the hub answers with status {status}; try again later")
            }
            None if is_disk_full => {
                anyhow!("{of_file}{whole}: the disk is full; free some space and run the command again")
            }
            None if is_unreachable(error) => anyhow!(
                "{of_file}{whole}: the download was interrupted ({}); run the command again, it goes on where it stopped",
                brief(error)
            ),
            None => anyhow!("{of_file}{whole}: {}", brief(error)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_the_hub_are_told_from_paths() {
        let parsed =
            |text: &str| HubModel::parse(text).map(|model| format!("{} {}", model.id, model.revision));
        assert_eq!(parsed("gpt2").as_deref(), Some("openai-community/gpt2 main"));
        assert_eq!(parsed("distilgpt2@v1").as_deref(), Some("distilbert/distilgpt2 v1"));
        assert_eq!(parsed("owner/na.me-2").as_deref(), Some("owner/na.me-2 main"));
        assert_eq!(parsed("owner/name@refs/pr/1").as_deref(), Some("owner/name refs/pr/1"));
        for path in
            ["folder", "/abs/path", "./a", "../a", "a/b/c", "a/", "/a", "a b/c", "~/x", "a/b@", "a/b@../c"]
        {
            assert_eq!(parsed(path), None, "{path}");
        }
    }
}
