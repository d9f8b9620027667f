//! Training data for a language model: texts, or a folder of token files.
//!
//! Texts are stored in temporary token files while training runs.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use candle_gpt2::Gpt2Config;
use candle_gpt2_arithmetic::thread_count;
use candle_gpt2_engine::Reporter;
use candle_gpt2_weights::{Tokenizer, load_tokenizer, partial_folder, train_tokenizer};
use tempfile::TempDir;

use crate::tokenize::{TOKENIZER_FILE, Vocabulary, empty_manifest, write};
use crate::{
    Corpus, DataSize, HeldOut, Hyperparameters, ShardFormat, Shards, Split, TokenFolder, TokenWidth, Tokens,
    TrainingData, TrainingError, Windows,
};

/// Name of the temporary folder for encoded texts, deleted when training ends.
pub(crate) const TOKENS: &str = "tokens";

/// Source of tokens.
pub(crate) enum TextSource {
    /// Text files to encode.
    Texts(Corpus),
    /// Folder of token files.
    Tokens(PathBuf),
}

impl TextSource {
    /// Opens text files and holds out a fraction of each, or opens a single folder of token files.
    ///
    /// # Errors
    /// Fails for the same reasons as [`Corpus::open`], and if a folder is combined with other data.
    pub(crate) fn open(data: &[PathBuf], held_out: f64) -> Result<Self, TrainingError> {
        match data {
            [folder] if folder.is_dir() => Ok(Self::Tokens(folder.clone())),
            _ => match data.iter().find(|path| path.is_dir()) {
                Some(folder) => {
                    let folder = folder.display();
                    let what = format!(
                        "`data` {folder}: a folder of tokens cannot be combined with other data; use it alone, or use text files"
                    );
                    Err(TrainingError::Call { what })
                }
                None => Corpus::open(data, held_out).map(Self::Texts),
            },
        }
    }

    /// Returns the tokenizer for a new model.
    ///
    /// It is trained on the texts, or read from the folder of tokens. `name` is the configuration's name
    /// in messages.
    ///
    /// # Errors
    /// Fails if a text or the tokenizer cannot be read, if there are too few words, or if the reporter
    /// interrupts it.
    pub(crate) fn tokenizer(
        &self,
        (config, name): (&Gpt2Config, String),
        reporter: &dyn Reporter,
    ) -> Result<Tokenizer, TrainingError> {
        let corpus = match self {
            Self::Texts(corpus) => corpus,
            Self::Tokens(folder) => {
                let path = folder.join(TOKENIZER_FILE);
                if path.exists() {
                    return Ok(load_tokenizer(&path)?);
                }
                let what = format!(
                    "{}: no {TOKENIZER_FILE} next to the tokens; specify the tokenizer that produced them with `tokenizer`",
                    folder.display()
                );
                return Err(TrainingError::Call { what });
            }
        };
        trained_tokenizer(corpus.documents(Split::Training), (config, name), reporter)
    }

    /// Returns the training data.
    ///
    /// Texts are encoded into token files in `folder`, which are removed when training ends.
    ///
    /// # Errors
    /// Fails if a text cannot be encoded, or if the token files do not match the model, are damaged or
    /// contain too few tokens.
    pub(crate) fn training_data(
        &self,
        (tokenizer, config): (&Tokenizer, &Gpt2Config),
        hyperparameters: &Hyperparameters,
        folder: &Path,
        reporter: &dyn Reporter,
    ) -> Result<TrainingData, TrainingError> {
        let (opened, removed) = match self {
            Self::Tokens(folder) => {
                (TokenFolder::open(folder, (tokenizer, config.vocab_size), reporter)?, None)
            }
            Self::Texts(corpus) => {
                let failed = |error| TrainingError::File { path: folder.to_owned(), error };
                let removed = partial_folder(&folder.join(TOKENS)).map_err(failed)?;
                let path = removed.path();
                let end = config.end_tokens().first().copied();
                let vocabulary = Vocabulary::new(tokenizer, config.vocab_size, end);
                let layout = (ShardFormat::NanoGpt, TokenWidth::of_vocabulary(config.vocab_size), None);
                let manifest = empty_manifest(corpus, &vocabulary, layout);
                // No state is saved along the way, because the next run encodes the texts again.
                let manifest =
                    write(corpus, &vocabulary, path, manifest, (u64::MAX, thread_count()), reporter)?;
                (TokenFolder::of_manifest(path, &manifest)?, Some(Arc::new(removed)))
            }
        };
        let kept = |shards| TemporaryTokens { shards, _removed: removed.clone() };
        let size = DataSize {
            training_tokens: opened.training.len(),
            held_out_tokens: opened.held_out.as_ref().map_or(0, Tokens::len),
            rows: None,
        };
        let held_out = opened.held_out.map(|tokens| HeldOut::text(kept(tokens), opened.held_out_characters));
        Ok(TrainingData {
            examples: Box::new(Windows::of_training(
                kept(opened.training),
                hyperparameters,
                config.n_positions,
                config.end_tokens().first().copied(),
            )?),
            held_out: held_out.transpose()?,
            fingerprint: opened.fingerprint,
            size,
        })
    }
}

/// Trains a tokenizer on documents for a new model; `name` is the configuration's name in messages.
///
/// # Errors
/// Fails if a document cannot be read, if there are too few words, or if the reporter interrupts the job.
pub(crate) fn trained_tokenizer(
    documents: impl Iterator<Item = Result<String, TrainingError>> + Send,
    (config, name): (&Gpt2Config, String),
    reporter: &dyn Reporter,
) -> Result<Tokenizer, TrainingError> {
    let mut failed = None;
    // Counting the words in long texts takes a while, so check for interruptions.
    let documents = documents.take_while(|_| !reporter.is_interrupted());
    let documents = documents.map_while(|document| document.map_err(|error| failed = Some(error)).ok());
    let tokenizer = train_tokenizer(documents.map(Into::into), config.vocab_size);
    if let Some(error) = failed {
        return Err(error);
    }
    if reporter.is_interrupted() {
        return Err(TrainingError::Interrupted { state: None });
    }
    let tokenizer = tokenizer?;
    let (found, vocab_size) = (tokenizer.get_vocab_size(true), config.vocab_size);
    match found < vocab_size {
        true => Err(TrainingError::SmallTokenizer { config: name, vocab_size, found }),
        false => Ok(tokenizer),
    }
}

/// Tokens in a temporary folder that is removed along with its last reader.
struct TemporaryTokens {
    // Declared first, so that the files are unmapped before the folder is removed.
    shards: Shards,
    _removed: Option<Arc<TempDir>>,
}

impl Tokens for TemporaryTokens {
    fn len(&self) -> usize {
        self.shards.len()
    }

    fn read(&self, start: usize, count: usize, tokens: &mut Vec<u32>) {
        self.shards.read(start, count, tokens);
    }
}
