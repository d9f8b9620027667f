//! Errors when fetching models and dataset files from the Hub.

use thiserror::Error;

/// Error while obtaining a model or dataset file from the Hub.
///
/// Each message states the problem and how to fix it.
///
/// ```
/// use candle_gpt2_engine::{EngineError, HubError, ModelOptions, Silent};
///
/// // By default there is neither a network nor a cache.
/// let options = ModelOptions { model: "owner/name".into(), ..ModelOptions::default() };
/// let error = options.open(&Silent).err().ok_or("expected an error")?;
/// assert!(matches!(error, EngineError::Hub(HubError::NotCached { model, .. }) if model == "owner/name"));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum HubError {
    /// The program was built without the feature `hub`.
    #[error("{model}: no such file or folder, and this program was built without the feature `hub`")]
    NotBuilt {
        /// Name of the model.
        model: String,
    },
    /// The model is not in the cache, and the network is disabled.
    #[error("{model} is not in the cache, and network access is disabled; {cache}")]
    NotCached {
        /// Name of the model.
        model: String,
        /// Description of the cache's contents.
        cache: String,
    },
    /// Part of the model is missing from the cache, and the network is disabled.
    #[error("{model}: network access is disabled, and {what}")]
    Incomplete {
        /// Name of the model.
        model: String,
        /// The missing part, and how to fix it.
        what: String,
    },
    /// The Hub is unreachable, and the model is not in the cache.
    #[error("{endpoint} cannot be reached ({cause}), and {model} is not in the cache; {cache}")]
    Unreachable {
        /// Address of the Hub.
        endpoint: String,
        /// Cause of the connection failure.
        cause: String,
        /// Name of the model.
        model: String,
        /// Description of the cache's contents.
        cache: String,
    },
    /// The repository does not contain a checkpoint.
    #[error("{model} has no config.json, so it is not a transformers checkpoint; choose another model")]
    NoConfig {
        /// Name of the model.
        model: String,
    },
    /// The repository contains an adapter instead of a model.
    #[error(
        "{model} is an adapter, not a model; use `--adapter {model}` in place of `--model {model}`, or merge it: \
         `gpt2 convert BASE OUT --adapter {model}`"
    )]
    IsAdapter {
        /// Name of the repository.
        model: String,
    },
    /// The repository does not contain an adapter.
    #[error("{model} contains no LoRA adapter (looked for {looked_for}); choose another repository")]
    NoAdapter {
        /// Name of the repository.
        model: String,
        /// Names of the files that were searched for.
        looked_for: String,
    },
    /// The repository has no weights in a supported format.
    #[error("{model} contains no supported weights (looked for {looked_for})")]
    NoWeights {
        /// Name of the model.
        model: String,
        /// Names of the files that were searched for.
        looked_for: String,
    },
    /// The repository changed during the download.
    #[error("{model} changed during the download; run the command again")]
    Changed {
        /// Name of the model.
        model: String,
    },
    /// The token does not grant access to the repository.
    #[error(
        "{model}: access denied: the repository is gated, private or missing; request access on its page, and set \
         HF_TOKEN to an access token"
    )]
    Refused {
        /// Name of the model, including the file name if the error concerns a file.
        model: String,
    },
    /// The model does not exist.
    #[error("{model}: found neither on the Hub nor as a local path; check the name")]
    NoSuchModel {
        /// Name of the model, including the file name if the error concerns a file.
        model: String,
    },
    /// The model or the revision does not exist.
    #[error("{model}: the model or the revision does not exist on the Hub; check both names")]
    NoSuchRevision {
        /// Name and revision of the model, and the file name if the error concerns a file.
        model: String,
    },
    /// The dataset or the revision does not exist.
    #[error(
        "{dataset}: the dataset or the revision does not exist on the Hub, and no local file has this name; check the name"
    )]
    NoSuchDataset {
        /// Name and revision of the dataset, and the file name if the error concerns a file.
        dataset: String,
    },
    /// The dataset does not contain the file.
    #[error("{dataset} does not contain {file}; available files: {files}")]
    NoSuchFile {
        /// Name and revision of the dataset.
        dataset: String,
        /// Path of the requested file.
        file: String,
        /// Names of files in the dataset.
        files: String,
    },
    /// The Hub responded with an error status.
    #[error("{model}: the Hub responded with status {status}; try again later")]
    Status {
        /// Name of the model, including the file name if the error concerns a file.
        model: String,
        /// HTTP status code.
        status: u16,
    },
    /// The disk is full.
    #[error("{model}: the disk is full; free some space and run the command again")]
    DiskFull {
        /// Name of the model, including the file name if the error concerns a file.
        model: String,
    },
    /// The connection was lost.
    #[error("{model}: the download was interrupted ({cause}); run the command again to resume it")]
    Interrupted {
        /// Name of the model, including the file name if the error concerns a file.
        model: String,
        /// Cause of the interruption.
        cause: String,
    },
    /// The download was interrupted; the part received so far remains in the cache.
    ///
    /// See [`Reporter::is_interrupted`](crate::Reporter::is_interrupted).
    #[error("{model}: the download was stopped; run the command again to resume it")]
    Stopped {
        /// Name of the model, including the file name if the error concerns a file.
        model: String,
    },
    /// The size of a file differs from the announced size.
    #[error("{model}: expected {expected} bytes, downloaded {found}; run the command again")]
    WrongSize {
        /// Name of the model, including the file name.
        model: String,
        /// Announced size in bytes.
        expected: u64,
        /// Received size in bytes.
        found: u64,
    },
    /// The Hub sent no data for [`HubOptions::timeout`](crate::HubOptions::timeout).
    #[error(
        "{model}: received no data from the Hub for {seconds} s; run the command again to resume the download"
    )]
    Silent {
        /// Name of the model, including the file name if the error concerns a file.
        model: String,
        /// Timeout in seconds.
        seconds: f64,
    },
    /// The Hub's response is invalid or unsafe; no part of it was written.
    #[error("{model}: invalid response from the Hub: {cause}; check the Hub's address (HF_ENDPOINT)")]
    InvalidResponse {
        /// Name of the model, including the file name if the error concerns a file.
        model: String,
        /// The header or field, its value, and the expected value.
        cause: String,
    },
    /// Any other error.
    #[error("{model}: {cause}")]
    Other {
        /// Name of the model, including the file name if the error concerns a file.
        model: String,
        /// Cause of the error.
        cause: String,
    },
}
