//! The Hub's client.
//!
//! hf-hub 0.5 (64 crates, under a minute to build) and not 1.0 (301 crates, five minutes): both read and write the same
//! cache, and what the older one lacks (`HF_HUB_CACHE`, `HF_HUB_OFFLINE`, a check of sizes) is here.

use std::fs;
use std::io;
use std::panic::resume_unwind;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::Duration;

use hf_hub::api::sync::{ApiBuilder, ApiError, ApiRepo};
use hf_hub::api::{Progress as HubProgress, RepoInfo};
use hf_hub::{Cache, Repo, RepoType};
use secrecy::ExposeSecret;

use super::cached::{MODELS, WEIGHTS, holds_a_model};
use super::error::HubError;
use super::name::{HubName, Kind};
use super::options::{HubOptions, Network};
use crate::{Reporter, Unit};

/// Small files that are taken along if the repository has them.
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
/// How long an interruption takes at most.
const INTERVAL: Duration = Duration::from_millis(20);
/// Attempts to resume an interrupted download.
const RETRIES: usize = 2;

/// Downloads what is missing of a model and returns the folder of the snapshot.
pub(super) fn fetch(
    model: &HubName,
    options: &HubOptions,
    reporter: &dyn Reporter,
) -> Result<PathBuf, HubError> {
    let (folder, answer) = ask(model, options, reporter, &holds_a_model)?;
    let Some((api, info)) = answer else { return Ok(folder) };
    let names: Vec<&str> = info.siblings.iter().map(|sibling| sibling.rfilename.as_str()).collect();
    for file in wanted(&names, model)? {
        // A snapshot's files never change; a finished download is moved here as a whole.
        if !folder.join(file).exists() {
            download(&api, file, model, reporter)?;
        }
    }
    if !folder.join("config.json").exists() {
        return Err(HubError::Changed { model: model.to_string() });
    }
    Ok(folder)
}

/// Downloads a file of a dataset if it is missing and returns the folder of the snapshot.
pub(super) fn fetch_file(
    dataset: &HubName,
    file: &str,
    options: &HubOptions,
    reporter: &dyn Reporter,
) -> Result<PathBuf, HubError> {
    let holds_it = |folder: &Path| folder.join(file).is_file();
    let (folder, answer) = ask(dataset, options, reporter, &holds_it)?;
    let Some((api, info)) = answer else { return Ok(folder) };
    if !info.siblings.iter().any(|sibling| sibling.rfilename == file) {
        let (dataset, file) = (dataset.to_string(), file.to_owned());
        return Err(HubError::NoSuchFile { dataset, file, files: some_files(&info) });
    }
    if !folder.join(file).exists() {
        download(&api, file, dataset, reporter)?;
    }
    if !folder.join(file).exists() {
        return Err(HubError::Changed { model: dataset.to_string() });
    }
    Ok(folder)
}

/// The first names of a repository's files.
fn some_files(info: &RepoInfo) -> String {
    const SHOWN: usize = 10;
    let names: Vec<&str> = info.siblings.iter().map(|sibling| sibling.rfilename.as_str()).collect();
    match names.len().saturating_sub(SHOWN) {
        _ if names.is_empty() => "none".to_owned(),
        0 => names.join(", "),
        more => format!("{} and {more} more", names[..SHOWN].join(", ")),
    }
}

/// What the Hub says of a repository, and who asked.
type Answer = (Arc<ApiRepo>, RepoInfo);

/// Asks the Hub what a repository has, or looks for it in the cache; `is_whole` says whether the folder of a snapshot has what is
/// needed. Answers with the folder of the snapshot, and with what the Hub says unless the cached files are the answer.
fn ask(
    name: &HubName,
    options: &HubOptions,
    reporter: &dyn Reporter,
    is_whole: &dyn Fn(&Path) -> bool,
) -> Result<(PathBuf, Option<Answer>), HubError> {
    let cache = Cache::new(options.cache.clone());
    let kind = match name.kind {
        Kind::Model => RepoType::Model,
        Kind::Dataset => RepoType::Dataset,
    };
    let repository = Repo::with_revision(name.id.clone(), kind, name.revision.clone());
    let cached = || cached(&cache, &repository).filter(|folder| is_whole(folder));
    if options.network == Network::Offline {
        let missing = || HubError::NotCached { model: name.to_string(), cache: contents(&cache, name.kind) };
        return cached().map(|folder| (folder, None)).ok_or_else(missing);
    }
    let endpoint = &options.endpoint;
    let api = ApiBuilder::from_cache(cache.clone())
        .with_endpoint(endpoint.clone())
        .with_token(options.token.as_ref().map(|token| token.expose_secret().to_owned()))
        .with_retries(RETRIES)
        .with_progress(false)
        .build()
        .map_err(|error| explain(&error, name, ""))?
        .repo(repository.clone());
    let (api, asked) = (Arc::new(api), name.to_string());
    let answer = {
        let api = Arc::clone(&api);
        apart(&asked, reporter, &mut |_| (), move |_| api.info())?
    };
    match answer {
        Ok(info) => {
            let folder = cache.path().join(repository.folder_name()).join("snapshots").join(&info.sha);
            Ok((folder, Some((api, info))))
        }
        Err(error) if is_unreachable(&error) => {
            let folder = cached().ok_or_else(|| HubError::Unreachable {
                endpoint: endpoint.clone(),
                cause: brief(&error),
                model: name.to_string(),
                cache: contents(&cache, name.kind),
            })?;
            reporter.note(&format!("{endpoint} cannot be reached; the cached copy of {} is used", name.id));
            Ok((folder, None))
        }
        Err(error) => Err(explain(&error, name, "")),
    }
}

/// The files to take of those that a repository has.
fn wanted<'a>(names: &[&'a str], model: &HubName) -> Result<Vec<&'a str>, HubError> {
    if !names.contains(&"config.json") {
        return Err(HubError::NoConfig { model: model.to_string() });
    }
    let Some((weights, shards)) = WEIGHTS.iter().find(|(weights, _)| names.contains(weights)) else {
        let looked_for = WEIGHTS.map(|(name, _)| name).join(", ");
        return Err(HubError::NoWeights { model: model.to_string(), looked_for });
    };
    let is_shard = |name: &str| {
        shards
            .is_some_and(|(start, end)| name.starts_with(start) && name.ends_with(end) && !name.contains('/'))
    };
    let is_wanted = |name: &&str| SMALL_FILES.contains(name) || name == weights || is_shard(name);
    Ok(names.iter().copied().filter(is_wanted).collect())
}

/// Downloads a file. A download that ends early stays in the cache, and the next one resumes it.
fn download(
    api: &Arc<ApiRepo>,
    file: &str,
    model: &HubName,
    reporter: &dyn Reporter,
) -> Result<(), HubError> {
    let (mut expected, mut bar) = (0, None);
    let mut hear = |step| match step {
        Step::Size(bytes) => {
            expected = bytes;
            bar = Some(reporter.start(file, bytes, Unit::Bytes));
        }
        Step::Bytes(bytes) => {
            if let Some(bar) = &bar {
                bar.advance(bytes);
            }
        }
    };
    let (api, name) = (Arc::clone(api), file.to_owned());
    let work = move |download| api.download_with_progress(&name, download);
    let path = apart(&of_model(file, model), reporter, &mut hear, work)?;
    let path = path.map_err(|error| explain(&error, model, file))?;
    check_size(&path, expected, &of_model(file, model))
}

/// Waits for the network on a thread of its own, so that a silent connection does not delay an interruption. That thread ends
/// with the next bytes that come.
fn apart<T: Send + 'static>(
    model: &str,
    reporter: &dyn Reporter,
    hear: &mut dyn FnMut(Step),
    work: impl FnOnce(Download<T>) -> T + Send + 'static,
) -> Result<T, HubError> {
    let (tell, heard) = channel();
    let other = |cause: String| HubError::Other { model: model.to_owned(), cause };
    let run = move || {
        let done = work(Download(tell.clone()));
        // The receiver may be gone.
        let _ = tell.send(Event::Done(done));
    };
    thread::Builder::new().name("hub".into()).spawn(run).map_err(|error| other(error.to_string()))?;
    loop {
        match heard.recv_timeout(INTERVAL) {
            Ok(Event::Done(done)) => return Ok(done),
            Ok(Event::Step(step)) => hear(step),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => {
                return Err(other("the Hub's client did not finish".to_owned()));
            }
        }
        if reporter.is_interrupted() {
            return Err(HubError::Stopped { model: model.to_owned() });
        }
    }
}

/// What the thread that waits for the network tells.
enum Event<T> {
    Step(Step),
    Done(T),
}

/// What a download tells.
enum Step {
    /// It begins, or begins again, with a file of so many bytes.
    Size(u64),
    /// As many bytes more came.
    Bytes(u64),
}

/// Checks that a file has the size that the Hub announced, and removes it if not.
fn check_size(path: &Path, expected: u64, model: &str) -> Result<(), HubError> {
    let failed = |error: io::Error| HubError::Other { model: model.to_owned(), cause: error.to_string() };
    let found = fs::metadata(path).map_err(failed)?.len();
    if found == expected {
        return Ok(());
    }
    // The file that the link leads to is what is wrong. Where links are refused, as to most users of Windows, the path is the file.
    let remove = || -> io::Result<()> {
        let blob = fs::canonicalize(path)?;
        fs::remove_file(path)?;
        if blob.exists() { fs::remove_file(blob) } else { Ok(()) }
    };
    remove().map_err(|error| HubError::Other {
        model: model.to_owned(),
        cause: format!("cannot remove a damaged download: {error}"),
    })?;
    Err(HubError::WrongSize { model: model.to_owned(), expected, found })
}

/// Reports the steps of a download to the waiting thread, and ends it if none waits.
struct Download<T>(Sender<Event<T>>);

impl<T: Send + 'static> Download<T> {
    fn tell(&self, step: Step) {
        if self.0.send(Event::Step(step)).is_err() {
            // The client has no other way out; no panic is reported.
            resume_unwind(Box::new("no thread waits for this download"));
        }
    }
}

impl<T: Send + 'static> HubProgress for Download<T> {
    fn init(&mut self, size: usize, _: &str) {
        self.tell(Step::Size(size as u64));
    }

    fn update(&mut self, size: usize) {
        self.tell(Step::Bytes(size as u64));
    }

    fn finish(&mut self) {}
}

/// The folder of a cached snapshot.
fn cached(cache: &Cache, repository: &Repo) -> Option<PathBuf> {
    let folder = cache.path().join(repository.folder_name());
    let by_commit = folder.join("snapshots").join(repository.revision());
    if by_commit.is_dir() {
        return Some(by_commit);
    }
    let commit = fs::read_to_string(folder.join("refs").join(repository.revision())).ok()?;
    Some(folder.join("snapshots").join(commit.trim())).filter(|folder| folder.is_dir())
}

/// What the cache holds, in words.
fn contents(cache: &Cache, kind: Kind) -> String {
    let beginning = match kind {
        Kind::Model => MODELS,
        Kind::Dataset => "datasets--",
    };
    let entries = fs::read_dir(cache.path()).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries
        .filter_map(|entry| Some(entry.file_name().to_str()?.strip_prefix(beginning)?.replace("--", "/")))
        .collect();
    names.sort();
    match (names.as_slice(), kind) {
        ([], Kind::Model) => format!("the cache {} holds no model", cache.path().display()),
        ([], Kind::Dataset) => format!("the cache {} holds no dataset", cache.path().display()),
        (names, _) => format!("the cache {} holds {}", cache.path().display(), names.join(", ")),
    }
}

fn of_model(file: &str, model: &HubName) -> String {
    if file.is_empty() { model.to_string() } else { format!("{file} of {model}") }
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

/// What the Hub's answer means.
fn explain(error: &ApiError, name: &HubName, file: &str) -> HubError {
    let model = of_model(file, name);
    let status = match cause(error) {
        ApiError::RequestError(error) => match **error {
            ureq::Error::StatusCode(status) => Some(status),
            _ => None,
        },
        _ => None,
    };
    let is_disk_full =
        matches!(cause(error), ApiError::IoError(error) if error.kind() == io::ErrorKind::StorageFull);
    match status {
        Some(401 | 403) => HubError::Refused { model },
        Some(404) if name.kind == Kind::Dataset => HubError::NoSuchDataset { dataset: model },
        Some(404) if name.revision == "main" => HubError::NoSuchModel { model },
        Some(404) => HubError::NoSuchRevision { model },
        Some(status) => HubError::Status { model, status },
        None if is_disk_full => HubError::DiskFull { model },
        None if is_unreachable(error) => HubError::Interrupted { model, cause: brief(error) },
        None => HubError::Other { model, cause: brief(error) },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A cache without links has the file itself in the place of the link.
    #[test]
    fn a_file_of_another_size_is_removed_with_and_without_a_link_to_it() {
        let folder = tempfile::tempdir().unwrap();
        let [named, blob] = ["named", "blob"].map(|name| folder.path().join(name));
        let links: &[bool] = if cfg!(unix) { &[false, true] } else { &[false] };
        for is_link in links {
            fs::write(if *is_link { &blob } else { &named }, "half").unwrap();
            #[cfg(unix)]
            if *is_link {
                std::os::unix::fs::symlink(&blob, &named).unwrap();
            }
            assert!(check_size(&named, 4, "model").is_ok(), "the announced size");
            let refused = check_size(&named, 8, "model").unwrap_err();
            assert!(
                matches!(&refused, HubError::WrongSize { expected: 8, found: 4, .. }),
                "link {is_link}: {refused}"
            );
            assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0, "link {is_link}");
        }
    }
}
