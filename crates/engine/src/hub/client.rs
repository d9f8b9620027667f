//! Hub client that lists a repository's files and downloads them into the cache.
//!
//! Text from the Hub becomes part of a path only after validation as a [`CacheKey`] or [`FilePath`].

use std::io;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use secrecy::SecretString;
use serde::Deserialize;
use ureq::http::Uri;
use ureq::http::header::{
    CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_RANGE, HeaderMap, LOCATION, TRANSFER_ENCODING,
};

use super::cache::{Partial, Repository};
use super::cached::{
    ADAPTER_CONFIG, ADAPTER_WEIGHTS, DATASETS, MODELS, WEIGHTS, holds_a_model, holds_an_adapter, names,
};
use super::checked::{CacheKey, FilePath, quoted};
use super::error::HubError;
use super::headers::{ContentRange, encoded, header, is_http, number, origin, redirected};
use super::http::{Failure, INTERVAL, Network, Response, Web};
use super::name::{HubName, Kind};
use super::options::{self, HubOptions};
use crate::{Progress, Reporter, Unit};

/// Small files that are downloaded if the repository contains them.
const SMALL_FILES: [&str; 14] = [
    // Needed to report that this adapter is not applied.
    ADAPTER_CONFIG,
    "chat_template.jinja",
    "chat_template.json",
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "vocab.txt",
    "spiece.model",
    "tokenizer.model",
];
/// Maximum number of shards; checkpoints with more cannot be read either.
const MAX_SHARDS: usize = 10_000;
/// Maximum size of the JSON list of files, in bytes.
const MAX_LISTING_BYTES: usize = 10_000_000;
const MAX_REDIRECTS: usize = 10;
/// Number of attempts to resume an interrupted download.
const RETRIES: u32 = 2;
const RETRY_PAUSE: Duration = Duration::from_millis(300);

const REPO_COMMIT: &str = "x-repo-commit";
const LINKED_ETAG: &str = "x-linked-etag";
const LINKED_SIZE: &str = "x-linked-size";
const ETAG: &str = "etag";

/// Downloads the missing files of a model and returns the folder of its snapshot.
pub(super) fn fetch(
    model: &HubName,
    options: &HubOptions,
    reporter: &dyn Reporter,
) -> Result<PathBuf, HubError> {
    let network = Network::new(options.timeout, reporter);
    Client::new(model, options, reporter, &network)?.model()
}

/// Downloads the missing files of an adapter and returns the folder of its snapshot.
pub(super) fn fetch_adapter(
    adapter: &HubName,
    options: &HubOptions,
    reporter: &dyn Reporter,
) -> Result<PathBuf, HubError> {
    let network = Network::new(options.timeout, reporter);
    Client::new(adapter, options, reporter, &network)?.adapter()
}

/// Downloads a dataset file if it is missing and returns the folder of its snapshot.
pub(super) fn fetch_file(
    dataset: &HubName,
    file: &FilePath,
    options: &HubOptions,
    reporter: &dyn Reporter,
) -> Result<PathBuf, HubError> {
    let network = Network::new(options.timeout, reporter);
    Client::new(dataset, options, reporter, &network)?.file(file)
}

/// A repository on the Hub and in the cache.
pub(super) struct Client<'a> {
    name: &'a HubName,
    endpoint: Uri,
    options: &'a HubOptions,
    repository: Repository,
    reporter: &'a dyn Reporter,
    web: &'a dyn Web,
}

/// List of the files in a repository.
#[derive(Deserialize)]
struct Listing {
    sha: String,
    siblings: Vec<Sibling>,
}

#[derive(Deserialize)]
struct Sibling {
    rfilename: String,
}

/// Final response after redirects.
struct Answer<'a> {
    response: Response<'a>,
    /// Headers that describe a file.
    ///
    /// Another server may hold the file, but only headers from the endpoint are trusted.
    described: HeaderMap,
}

/// Identity and size of a file to download.
struct Description {
    etag: CacheKey,
    size: u64,
}

impl<'a> Client<'a> {
    pub(super) fn new(
        name: &'a HubName,
        options: &'a HubOptions,
        reporter: &'a dyn Reporter,
        web: &'a dyn Web,
    ) -> Result<Self, HubError> {
        let endpoint = options.endpoint.parse::<Uri>().ok().filter(is_http);
        let endpoint = endpoint.ok_or_else(|| HubError::Other {
            model: name.to_string(),
            cause: format!(
                "invalid Hub address: {}; expected an http or https URL",
                quoted(&options.endpoint)
            ),
        })?;
        let repository = Repository::new(&options.cache, name);
        Ok(Self { name, endpoint, options, repository, reporter, web })
    }

    pub(super) fn model(&self) -> Result<PathBuf, HubError> {
        let listing = match self.listing_or_cached(&holds_a_model)? {
            Ok(listing) => listing,
            Err(folder) => return Ok(folder),
        };
        let commit = self.commit("sha", &listing.sha)?;
        let names: Vec<&str> = listing.siblings.iter().map(|sibling| sibling.rfilename.as_str()).collect();
        self.download_all(&commit, &self.wanted(&names)?)
    }

    pub(super) fn adapter(&self) -> Result<PathBuf, HubError> {
        let listing = match self.listing_or_cached(&holds_an_adapter)? {
            Ok(listing) => listing,
            Err(folder) => return Ok(folder),
        };
        let commit = self.commit("sha", &listing.sha)?;
        let has = |name: &&str| listing.siblings.iter().any(|sibling| sibling.rfilename == **name);
        let weights = ADAPTER_WEIGHTS.iter().find(|name| has(name)).filter(|_| has(&ADAPTER_CONFIG));
        let Some(weights) = weights else {
            let looked_for = format!("{ADAPTER_CONFIG}, {}", ADAPTER_WEIGHTS.join(", "));
            return Err(HubError::NoAdapter { model: self.name.to_string(), looked_for });
        };
        let files = [ADAPTER_CONFIG, weights].map(FilePath::new).into_iter().flatten();
        self.download_all(&commit, &files.collect::<Vec<_>>())
    }

    pub(super) fn file(&self, file: &FilePath) -> Result<PathBuf, HubError> {
        let listing = match self.listing_or_cached(&|folder| folder.join(file.as_str()).is_file())? {
            Ok(listing) => listing,
            Err(folder) => return Ok(folder),
        };
        let commit = self.commit("sha", &listing.sha)?;
        if !listing.siblings.iter().any(|sibling| sibling.rfilename == file.as_str()) {
            let (dataset, file) = (self.name.to_string(), file.as_str().to_owned());
            return Err(HubError::NoSuchFile { dataset, file, files: some_files(&listing) });
        }
        self.download_all(&commit, std::slice::from_ref(file))
    }

    /// Fetches the list of files; without a connection, returns a complete cached snapshot as `Err`.
    fn listing_or_cached(
        &self,
        is_complete: &dyn Fn(&Path) -> bool,
    ) -> Result<Result<Listing, PathBuf>, HubError> {
        let cached = || self.repository.cached(&self.name.revision).filter(|folder| is_complete(folder));
        let model = self.name.to_string();
        if self.options.network == options::Network::Offline {
            return cached().map(Err).ok_or_else(|| match self.unusable() {
                Some(what) => HubError::Incomplete { model, what },
                None => HubError::NotCached { model, cache: self.contents() },
            });
        }
        let cause = match self.listing() {
            Err(HubError::Interrupted { cause, .. }) => cause,
            Err(HubError::Silent { seconds, .. }) => format!("no response for {seconds} s"),
            answer => return answer.map(Ok),
        };
        let endpoint = &self.options.endpoint;
        let unreachable =
            || HubError::Unreachable { endpoint: endpoint.clone(), cause, model, cache: self.contents() };
        let folder = cached().ok_or_else(unreachable)?;
        self.reporter
            .note(&format!("{endpoint} cannot be reached; using the cached copy of {}", self.name.id));
        Ok(Err(folder))
    }

    fn listing(&self) -> Result<Listing, HubError> {
        let kind = match self.name.kind {
            Kind::Model => "models",
            Kind::Dataset => "datasets",
        };
        let path = format!("/api/{kind}/{}/revision/{}", self.name.id, self.url_revision());
        let model = self.name.to_string();
        let answer = self.get(&path, 0, &model)?;
        let mut json = Vec::new();
        for piece in answer.response.body {
            json.extend(piece.map_err(|failure| explain(failure, &model))?);
            if json.len() > MAX_LISTING_BYTES {
                let cause = format!("the list of files is larger than {MAX_LISTING_BYTES} bytes");
                return Err(HubError::InvalidResponse { model, cause });
            }
        }
        serde_json::from_slice(&json).map_err(|error| {
            let cause = format!("the list of files is invalid: {}", quoted(&error.to_string()));
            HubError::InvalidResponse { model, cause }
        })
    }

    /// Selects the files to download from a repository's file names.
    fn wanted(&self, names: &[&str]) -> Result<Vec<FilePath>, HubError> {
        let model = || self.name.to_string();
        // Git repositories cannot contain such names; other unusual names are ignored unless they are needed.
        let escapes = |name: &&&str| name.split('/').any(|part| ["", ".", ".."].contains(&part));
        if let Some(name) = names.iter().find(escapes) {
            return Err(unsafe_name(model(), name));
        }
        let has_weights = WEIGHTS.iter().any(|(weights, _)| names.contains(weights));
        if names.contains(&ADAPTER_CONFIG) && !has_weights {
            return Err(HubError::IsAdapter { model: model() });
        }
        if !names.contains(&"config.json") {
            return Err(HubError::NoConfig { model: model() });
        }
        let Some((weights, shards)) = WEIGHTS.iter().find(|(weights, _)| names.contains(weights)) else {
            let looked_for = WEIGHTS.map(|(name, _)| name).join(", ");
            return Err(HubError::NoWeights { model: model(), looked_for });
        };
        let is_shard = |name: &str| {
            shards.is_some_and(|(start, end)| {
                name.starts_with(start) && name.ends_with(end) && !name.contains('/')
            })
        };
        let is_wanted = |name: &&&str| SMALL_FILES.contains(name) || *name == weights || is_shard(name);
        let wanted = names.iter().filter(is_wanted);
        let wanted = wanted.map(|name| FilePath::new(name).ok_or_else(|| unsafe_name(model(), name)));
        let wanted: Vec<FilePath> = wanted.collect::<Result<_, _>>()?;
        match wanted.len() {
            0..=MAX_SHARDS => Ok(wanted),
            many => Err(HubError::InvalidResponse {
                model: model(),
                cause: format!(
                    "the list of files contains {many} files to download; expected at most {MAX_SHARDS}"
                ),
            }),
        }
    }

    /// Downloads a snapshot's missing files and returns its folder.
    fn download_all(&self, commit: &CacheKey, files: &[FilePath]) -> Result<PathBuf, HubError> {
        let folder = self.repository.snapshot(commit);
        // Files in a snapshot never change and appear only when complete.
        let missing: Vec<_> = files.iter().filter(|file| !folder.join(file.as_str()).exists()).collect();
        for file in &missing {
            self.download(file, commit)?;
        }
        match self.repository.set_commit(&self.name.revision, commit) {
            // The cache may be read-only.
            Err(error) if !missing.is_empty() => Err(self.unwritable(&error, self.name.to_string())),
            _ => Ok(folder),
        }
    }

    /// Downloads a file into the cache, resuming an interrupted download.
    fn download(&self, file: &FilePath, commit: &CacheKey) -> Result<(), HubError> {
        let model = format!("{} from {}", file.as_str(), self.name);
        let unwritable = |error: io::Error| self.unwritable(&error, model.clone());
        let first = self.get_file(file, 0, &model)?;
        let about = self.described(&first, commit, &model)?;
        let (mut partial, waited) = self.partial(&about.etag, &model)?;
        if self.repository.has_blob(&about.etag) {
            partial.discard().map_err(unwritable)?;
        } else {
            if partial.length > about.size {
                partial.clear().map_err(unwritable)?;
            }
            let mut first = Some(first.response).filter(|_| partial.length == 0 && !waited);
            let bar = self.reporter.start(file.as_str(), about.size, Unit::Bytes);
            bar.advance(partial.length);
            let mut pauses = (0..RETRIES).map(|attempt| RETRY_PAUSE * 2_u32.pow(attempt));
            while partial.length < about.size {
                let response = match first.take() {
                    Some(response) => Ok(response),
                    None => self.resumed(file, &mut partial, &about, commit, &model),
                };
                let received =
                    response.and_then(|rest| self.receive(rest, &mut partial, &about, &*bar, &model));
                match received {
                    Err(HubError::Interrupted { model, cause }) => match pauses.next() {
                        Some(pause) => self.pause(pause, &model)?,
                        None => return Err(HubError::Interrupted { model, cause }),
                    },
                    Err(HubError::WrongSize { model, expected, found }) => {
                        partial.discard().map_err(unwritable)?;
                        return Err(HubError::WrongSize { model, expected, found });
                    }
                    done => done?,
                }
            }
            partial.finish().map_err(unwritable)?;
        }
        self.repository.link(&about.etag, commit, file).map_err(unwritable)
    }

    /// Opens the partial download and returns whether it had to wait for another process.
    fn partial(&self, etag: &CacheKey, model: &str) -> Result<(Partial, bool), HubError> {
        let mut waited = false;
        loop {
            match self.repository.partial(etag) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    if !waited {
                        self.reporter.note(&format!("{model}: waiting for another process to download it"));
                    }
                    waited = true;
                    self.pause(INTERVAL, model)?;
                }
                partial => {
                    let partial = partial.map_err(|error| self.unwritable(&error, model.to_owned()))?;
                    return Ok((partial, waited));
                }
            }
        }
    }

    /// Requests the rest of a partial download; starts over if the server does not support ranges.
    fn resumed(
        &self,
        file: &FilePath,
        partial: &mut Partial,
        about: &Description,
        commit: &CacheKey,
        model: &str,
    ) -> Result<Response<'_>, HubError> {
        let answer = self.get_file(file, partial.length, model)?;
        if self.described(&answer, commit, model)?.etag != about.etag {
            return Err(HubError::Changed { model: model.to_owned() });
        }
        if answer.response.status == 200 {
            partial.clear().map_err(|error| self.unwritable(&error, model.to_owned()))?;
        }
        Ok(answer.response)
    }

    /// Appends a response body to a partial download.
    fn receive(
        &self,
        response: Response<'_>,
        partial: &mut Partial,
        about: &Description,
        bar: &dyn Progress,
        model: &str,
    ) -> Result<(), HubError> {
        // Without a content length, a truncated body looks complete.
        let has_length =
            [CONTENT_LENGTH, TRANSFER_ENCODING].iter().any(|name| response.headers.contains_key(name));
        for piece in response.body {
            let piece = piece.map_err(|failure| explain(failure, model))?;
            let found = partial.length + piece.len() as u64;
            if found > about.size {
                return Err(HubError::WrongSize { model: model.to_owned(), expected: about.size, found });
            }
            partial.append(&piece).map_err(|error| self.unwritable(&error, model.to_owned()))?;
            bar.advance(piece.len() as u64);
        }
        let (expected, found, model) = (about.size, partial.length, model.to_owned());
        match found {
            _ if found == expected => Ok(()),
            _ if has_length => Err(HubError::WrongSize { model, expected, found }),
            _ => Err(HubError::Interrupted {
                model,
                cause: format!("the connection closed after {found} of {expected} bytes"),
            }),
        }
    }

    fn get_file(&self, file: &FilePath, start: u64, model: &str) -> Result<Answer<'_>, HubError> {
        let kind = match self.name.kind {
            Kind::Model => "",
            Kind::Dataset => "/datasets",
        };
        let file = encoded(file.as_str());
        self.get(&format!("{kind}/{}/resolve/{}/{file}", self.name.id, self.url_revision()), start, model)
    }

    /// Sends a GET request to the Hub and follows redirects.
    ///
    /// Only the endpoint itself receives the token.
    fn get(&self, path: &str, start: u64, model: &str) -> Result<Answer<'_>, HubError> {
        let invalid = |cause: String| HubError::InvalidResponse { model: model.to_owned(), cause };
        let address = format!("{}{path}", self.options.endpoint);
        let mut uri: Uri =
            address.parse().map_err(|_| invalid(format!("{} is not a valid URL", quoted(&address))))?;
        let mut described = HeaderMap::new();
        for _ in 0..=MAX_REDIRECTS {
            let is_endpoint = origin(&uri) == origin(&self.endpoint);
            let token: Option<&SecretString> = self.options.token.as_ref().filter(|_| is_endpoint);
            let response = self.web.get(&uri, start, token).map_err(|failure| explain(failure, model))?;
            if is_endpoint && response.headers.contains_key(REPO_COMMIT) {
                described = response.headers.clone();
            }
            match response.status {
                200 | 206 => {
                    let encoding = header(&response.headers, CONTENT_ENCODING.as_str()).unwrap_or_default();
                    if !["", "identity"].contains(&encoding.to_ascii_lowercase().as_str()) {
                        return Err(invalid(format!(
                            "header content-encoding is {}; expected an uncompressed response",
                            quoted(&encoding)
                        )));
                    }
                    let range = ContentRange::of(&response.headers).map_err(invalid)?;
                    if response.status == 206 && range.is_none_or(|range| range.start != start) {
                        let found = header(&response.headers, CONTENT_RANGE.as_str()).unwrap_or_default();
                        let cause = format!(
                            "header content-range is {}; expected a range from byte {start}",
                            quoted(&found)
                        );
                        return Err(invalid(cause));
                    }
                    return Ok(Answer { response, described });
                }
                301 | 302 | 303 | 307 | 308 => {
                    let location = header(&response.headers, LOCATION.as_str()).unwrap_or_default();
                    uri = redirected(&uri, &location).ok_or_else(|| {
                        invalid(format!(
                            "header location is {}; expected an http or https URL",
                            quoted(&location)
                        ))
                    })?;
                }
                status => return Err(self.refused(status, model.to_owned())),
            }
        }
        Err(invalid(format!("more than {MAX_REDIRECTS} redirects")))
    }

    /// Reads and validates the headers that describe a file.
    fn described(
        &self,
        answer: &Answer<'_>,
        commit: &CacheKey,
        model: &str,
    ) -> Result<Description, HubError> {
        let invalid = |cause: String| HubError::InvalidResponse { model: model.to_owned(), cause };
        let missing = |name: &str| invalid(format!("header {name} is missing"));
        let (described, headers) = (&answer.described, &answer.response.headers);
        let found = header(described, REPO_COMMIT).ok_or_else(|| missing(REPO_COMMIT))?;
        if self.commit(&format!("header {REPO_COMMIT}"), &found)? != *commit {
            return Err(HubError::Changed { model: self.name.to_string() });
        }
        let name = if described.contains_key(LINKED_ETAG) { LINKED_ETAG } else { ETAG };
        let etag = header(described, name).ok_or_else(|| missing(ETAG))?;
        let etag = CacheKey::new(etag.trim_start_matches("W/").trim_matches('"')).ok_or_else(|| {
            invalid(format!("header {name} is {}; expected {}", quoted(&etag), CacheKey::EXPECTED))
        })?;
        let size = match ContentRange::of(headers).map_err(invalid)? {
            _ if described.contains_key(LINKED_SIZE) => number(described, LINKED_SIZE),
            Some(range) => Ok(Some(range.total)),
            None => number(headers, CONTENT_LENGTH.as_str()),
        };
        let size = size.map_err(invalid)?.ok_or_else(|| missing(CONTENT_LENGTH.as_str()))?;
        Ok(Description { etag, size })
    }

    fn commit(&self, field: &str, text: &str) -> Result<CacheKey, HubError> {
        CacheKey::new(text).ok_or_else(|| HubError::InvalidResponse {
            model: self.name.to_string(),
            cause: format!("{field} is {}; expected {}", quoted(text), CacheKey::EXPECTED),
        })
    }

    /// Sleeps, and returns an error if the job is interrupted.
    fn pause(&self, duration: Duration, model: &str) -> Result<(), HubError> {
        let begin = Instant::now();
        while begin.elapsed() < duration {
            if self.reporter.is_interrupted() {
                return Err(HubError::Stopped { model: model.to_owned() });
            }
            thread::sleep(INTERVAL);
        }
        Ok(())
    }

    fn url_revision(&self) -> String {
        self.name.revision.replace('/', "%2F")
    }

    /// Describes the cache's contents for an error message.
    fn contents(&self) -> String {
        let (kind, beginning) = match self.name.kind {
            Kind::Model => ("model", MODELS),
            Kind::Dataset => ("dataset", DATASETS),
        };
        let (cache, names) = (self.options.cache.display(), names(&self.options.cache, beginning));
        if let Some(what) = self.unusable() {
            return what;
        }
        match names.as_slice() {
            [] if self.options.cache.as_os_str().is_empty() => {
                "no cache is set; use `HubOptions::from_environment`".to_owned()
            }
            [] => format!("the cache {cache} contains no {kind}"),
            names => format!("the cache {cache} contains {}", names.join(", ")),
        }
    }

    /// Explains why a cached repository cannot be used.
    fn unusable(&self) -> Option<String> {
        let what = self.repository.unusable(&self.name.revision)?;
        Some(format!("the cache {} contains {}, but {what}", self.options.cache.display(), self.name.id))
    }

    fn refused(&self, status: u16, model: String) -> HubError {
        match status {
            401 | 403 => HubError::Refused { model },
            404 if self.name.kind == Kind::Dataset => HubError::NoSuchDataset { dataset: model },
            404 if self.name.revision == "main" => HubError::NoSuchModel { model },
            404 => HubError::NoSuchRevision { model },
            status => HubError::Status { model, status },
        }
    }

    fn unwritable(&self, error: &io::Error, model: String) -> HubError {
        match error.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => HubError::DiskFull { model },
            _ => {
                let folder = self.repository.path();
                HubError::Other { model, cause: format!("cannot write to {}: {error}", folder.display()) }
            }
        }
    }
}

/// Lists the first few file names in a repository.
fn some_files(listing: &Listing) -> String {
    const SHOWN: usize = 10;
    let names: Vec<String> =
        listing.siblings.iter().take(SHOWN).map(|sibling| shown(&sibling.rfilename)).collect();
    match listing.siblings.len().saturating_sub(SHOWN) {
        _ if names.is_empty() => "none".to_owned(),
        0 => names.join(", "),
        more => format!("{} and {more} more", names.join(", ")),
    }
}

/// Formats a file name for a message, quoting it if it is unusual.
fn shown(name: &str) -> String {
    if FilePath::new(name).is_some() { name.to_owned() } else { quoted(name) }
}

fn unsafe_name(model: String, name: &str) -> HubError {
    let cause = format!(
        "the list of files (siblings) contains the unsafe name {}; expected a plain relative path",
        quoted(name)
    );
    HubError::InvalidResponse { model, cause }
}

fn explain(failure: Failure, model: &str) -> HubError {
    let model = model.to_owned();
    match failure {
        Failure::Stopped => HubError::Stopped { model },
        Failure::Silent(silence) => HubError::Silent { model, seconds: silence.as_secs_f64() },
        Failure::Broken(cause) => HubError::Interrupted { model, cause },
        Failure::Invalid(cause) => HubError::InvalidResponse { model, cause: quoted(&cause) },
    }
}
