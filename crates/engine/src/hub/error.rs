//! Why a model or a data file on the Hub is not available.

use thiserror::Error;

/// A model or a data file on the Hub that is not available: each message says what was found and what to do.
///
/// ```
/// use candle_gpt2_engine::{EngineError, HubError, ModelOptions, Silent};
///
/// // By default there is no network, and no cache either.
/// let options = ModelOptions { model: "owner/name".into(), ..ModelOptions::default() };
/// let error = options.open(&Silent).err().ok_or("it is there")?;
/// assert!(matches!(error, EngineError::Hub(HubError::NotCached { model, .. }) if model == "owner/name"));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum HubError {
    /// The feature is off.
    #[error("{model}: no such file or folder, and this program was built without the feature `hub`")]
    NotBuilt {
        /// The model.
        model: String,
    },
    /// It is not in the cache, which is all that may be used.
    #[error("{model} is not in the cache, and the network may not be used; {cache}")]
    NotCached {
        /// The model.
        model: String,
        /// What the cache holds, in words.
        cache: String,
    },
    /// A part of it is missing in the cache, and the network may not be used.
    #[error("{model}: the network may not be used, and {what}")]
    Incomplete {
        /// The model.
        model: String,
        /// The part, and what to do.
        what: String,
    },
    /// The Hub cannot be reached, and the model is not in the cache.
    #[error("{endpoint} cannot be reached ({cause}), and {model} is not in the cache; {cache}")]
    Unreachable {
        /// The Hub's address.
        endpoint: String,
        /// Why.
        cause: String,
        /// The model.
        model: String,
        /// What the cache holds, in words.
        cache: String,
    },
    /// The repository is not a checkpoint.
    #[error("{model} has no config.json, so it is not a transformers checkpoint; choose another model")]
    NoConfig {
        /// The model.
        model: String,
    },
    /// The repository holds an adapter and no model.
    #[error(
        "{model} is an adapter, not a model; use `--adapter {model}` in place of `--model {model}`, or merge it: \
         `gpt2 convert BASE OUT --adapter {model}`"
    )]
    IsAdapter {
        /// The repository.
        model: String,
    },
    /// The repository holds no adapter.
    #[error("{model} holds no LoRA adapter (looked for {looked_for}); choose another one")]
    NoAdapter {
        /// The repository.
        model: String,
        /// The files that were looked for.
        looked_for: String,
    },
    /// The repository has weights in other formats only, or none.
    #[error("{model} holds no weights that can be read (looked for {looked_for})")]
    NoWeights {
        /// The model.
        model: String,
        /// The files that were looked for.
        looked_for: String,
    },
    /// The repository changed meanwhile.
    #[error("{model} changed while it was downloaded; run the command again")]
    Changed {
        /// The model.
        model: String,
    },
    /// The token does not open the repository.
    #[error(
        "{model}: access is refused; it is gated, private, or does not exist. Ask for access on its page, and give a \
         token with HF_TOKEN"
    )]
    Refused {
        /// The model, with the file if it was one.
        model: String,
    },
    /// There is no such model.
    #[error("{model}: there is no such model on the Hub, and no such local path; check the name")]
    NoSuchModel {
        /// The model, with the file if it was one.
        model: String,
    },
    /// There is no such model, or it has no such revision.
    #[error("{model}: there is no such model or revision on the Hub; check both names")]
    NoSuchRevision {
        /// The model with its revision, and the file if it was one.
        model: String,
    },
    /// There is no such dataset, or it has no such revision.
    #[error(
        "{dataset}: there is no such dataset or revision on the Hub, and the name is no local path; check the names"
    )]
    NoSuchDataset {
        /// The dataset with its revision, and the file if it was one.
        dataset: String,
    },
    /// A dataset has no such file.
    #[error("{dataset} has no file {file}; it has {files}")]
    NoSuchFile {
        /// The dataset with its revision.
        dataset: String,
        /// The file.
        file: String,
        /// Its files, in words.
        files: String,
    },
    /// The Hub answers with an error of its own.
    #[error("{model}: the Hub answers with status {status}; try again later")]
    Status {
        /// The model, with the file if it was one.
        model: String,
        /// HTTP's number of the error.
        status: u16,
    },
    /// There is no room on the disk.
    #[error("{model}: the disk is full; free some space and run the command again")]
    DiskFull {
        /// The model, with the file if it was one.
        model: String,
    },
    /// The connection broke off.
    #[error("{model}: the download was interrupted ({cause}); run the command again to resume it")]
    Interrupted {
        /// The model, with the file if it was one.
        model: String,
        /// Why.
        cause: String,
    },
    /// The download was ended before its end, see [`Reporter::is_interrupted`](crate::Reporter::is_interrupted). What came stays in
    /// the cache.
    #[error("{model}: the download was stopped; run the command again to resume it")]
    Stopped {
        /// The model, with the file if it was one.
        model: String,
    },
    /// A file has another size than the Hub announced.
    #[error("{model}: expected {expected} bytes, downloaded {found}; run the command again")]
    WrongSize {
        /// The model, with the file.
        model: String,
        /// The size that was announced.
        expected: u64,
        /// The size of what came.
        found: u64,
    },
    /// The Hub sent nothing for [`HubOptions::timeout`](crate::HubOptions::timeout).
    #[error("{model}: the Hub sent nothing for {seconds} s; run the command again to resume the download")]
    Silent {
        /// The model, with the file if it was one.
        model: String,
        /// The timeout.
        seconds: f64,
    },
    /// The Hub's answer is invalid or unsafe; nothing of it was written.
    #[error("{model}: the Hub's answer is invalid: {cause}; check the Hub's address (HF_ENDPOINT)")]
    InvalidResponse {
        /// The model, with the file if it was one.
        model: String,
        /// The header or field, its value, and the expected one.
        cause: String,
    },
    /// Any other error.
    #[error("{model}: {cause}")]
    Other {
        /// The model, with the file if it was one.
        model: String,
        /// The error.
        cause: String,
    },
}
