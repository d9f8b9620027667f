//! Job that encodes texts into token files on all threads.
//!
//! The files do not depend on the number of threads, or on interruptions.

use std::collections::VecDeque;
use std::fs;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, SyncSender};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Instant;

use candle_gpt2_arithmetic::thread_count;
use candle_gpt2_engine::{HubOptions, ModelOptions, Reporter, Unit};
use candle_gpt2_weights::{
    CharacterCheck, END_OF_TEXT, EncoderSession, LostCharacter, TextEncoder, Tokenizer, WeightsError,
    load_tokenizer, open_regular, replace_file,
};
use serde::{Deserialize, Serialize};

use crate::corpus::{Content, Piece, SplitRule, TextFile};
use crate::job_folder::{JobFolder, Resume};
use crate::shard_writer::{Encoded, ShardWriter};
use crate::shards::MAX_LLM_C_TOKENS;
use crate::token_manifest::{FILE_NAME, Manifest, Part, SourceFile, vocabulary_checksum};
use crate::{Corpus, JobError, ShardFormat, Split, TokenWidth, TrainingError};

/// Number of bytes of text between two saves.
const SAVE_BYTES: u64 = 16 << 20;
/// Number of pieces that each thread may process ahead.
const PIECES_AHEAD: usize = 2;
/// Number of bytes to check for changes at a time.
const CHECKED_BYTES: usize = 1 << 16;
/// Default number of tokens per shard in llm.c's format, the same as in llm.c's own scripts.
const LLM_C_SHARD_TOKENS: usize = 100_000_000;
/// File name of the tokenizer next to the tokens.
pub(crate) const TOKENIZER_FILE: &str = "tokenizer.json";
/// Files that are replaced as a whole.
const RESULTS: [&str; 2] = [FILE_NAME, TOKENIZER_FILE];

/// Job that encodes texts into a folder of token files.
///
/// The folder contains the token files, `train.bin` and `val.bin` or numbered ones, and the tokenizer. It
/// also contains `tokens.json`, which describes the files and lets readers detect damage. The same job
/// writes the same files, for any number of threads, interrupted or not.
///
/// ```
/// use candle_gpt2_engine::{HubOptions, Silent};
/// use candle_gpt2_jobs::{TokenizeJob, TokenizeOptions};
///
/// let folder = tempfile::tempdir()?;
/// let [text, tokenizer] = ["text.txt", "tokenizer.json"].map(|name| folder.path().join(name));
/// std::fs::write(&text, "to be, or not to be, that is the question: ".repeat(50))?;
/// std::fs::write(&tokenizer, candle_gpt2_stories::TOKENIZER)?;
/// let job = TokenizeJob {
///     data: vec![text],
///     model: None,
///     tokenizer: Some(tokenizer),
///     out: folder.path().join("tokens"),
///     options: TokenizeOptions::default(),
///     n_head: None,
///     hub: HubOptions::default(),
/// };
/// let report = job.run(&Silent)?;
/// assert!(report.training_tokens > 500);
/// assert!(report.out.join("train.bin").is_file());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
pub struct TokenizeJob {
    /// Texts: plain UTF-8 files, or JSONL files with a `text` or the `ids` of tokens in each line.
    pub data: Vec<PathBuf>,
    /// Checkpoint that supplies the tokenizer and the end-of-text token.
    pub model: Option<PathBuf>,
    /// Tokenizer: a `tokenizer.json`, or a folder that contains one or a vocabulary with merges.
    ///
    /// Defaults to the model's tokenizer.
    pub tokenizer: Option<PathBuf>,
    /// Output folder; it must be new or empty, unless the job resumes.
    pub out: PathBuf,
    /// Other options.
    pub options: TokenizeOptions,
    /// Number of attention heads, for checkpoints that do not specify it.
    pub n_head: Option<usize>,
    /// Options for checkpoints on the Hub.
    pub hub: HubOptions,
}

/// Options for encoding texts into token files.
///
/// In JSON, the options form an object keyed by field name; every field is optional. A [`TokenizeJob`]
/// contains them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[cfg_attr(feature = "clap", derive(clap::Args))]
pub struct TokenizeOptions {
    /// Layout of the files: nanogpt (tokens and nothing else) or llm.c (with its header)
    #[cfg_attr(
        feature = "clap",
        arg(long, value_name = "NAME", default_value = "nanogpt", requires = "out")
    )]
    pub format: ShardFormat,
    /// Width of the tokens: u16 or u32 [default: u16 if the vocabulary has at most 65536 tokens]
    #[cfg_attr(feature = "clap", arg(long, value_name = "TYPE", requires = "out"))]
    pub dtype: Option<TokenWidth>,
    /// Tokens per file [default: all of them; 100000000 with --format llm.c]
    #[cfg_attr(
        feature = "clap",
        arg(long, value_name = "N", allow_negative_numbers = true, requires = "out")
    )]
    pub shard_tokens: Option<usize>,
    /// Fraction of the data, at the end of each file, that is held out; 0 for none
    #[cfg_attr(feature = "clap", arg(long, value_name = "P", default_value_t = TokenizeOptions::default().held_out, allow_negative_numbers = true, requires = "out"))]
    pub held_out: f64,
    /// Resume an interrupted run in --out; the other options must be the same
    #[cfg_attr(feature = "clap", arg(long, requires = "out"))]
    pub resume: bool,
}

impl Default for TokenizeOptions {
    fn default() -> Self {
        Self { format: ShardFormat::NanoGpt, dtype: None, shard_tokens: None, held_out: 0.01, resume: false }
    }
}

/// Result of a job; [`TokenizeJob::run`] returns it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TokenizeReport {
    /// Output folder.
    pub out: PathBuf,
    /// Layout of the files.
    pub format: ShardFormat,
    /// Width of the tokens.
    pub dtype: TokenWidth,
    /// Number of training tokens.
    pub training_tokens: usize,
    /// Number of held-out tokens.
    pub held_out_tokens: usize,
    /// Number of documents in both parts.
    pub documents: usize,
    /// File names of the token files.
    pub shards: Vec<String>,
    /// Number of bytes of text encoded by all runs.
    pub bytes: u64,
    /// Number of bytes of text that this run encoded.
    pub encoded_bytes: u64,
    /// Duration of this run in seconds.
    pub elapsed_s: f64,
}

/// Vocabulary for encoding texts.
pub(crate) struct Vocabulary<'a> {
    pub(crate) tokenizer: &'a Tokenizer,
    /// Number of tokens, an exclusive upper bound on ids.
    pub(crate) size: usize,
    /// Token that ends each document.
    pub(crate) end: Option<u32>,
    /// Check for characters that the tokenizer drops.
    check: Option<CharacterCheck>,
}

impl<'a> Vocabulary<'a> {
    pub(crate) fn new(tokenizer: &'a Tokenizer, size: usize, end: Option<u32>) -> Self {
        Self { tokenizer, size, end, check: CharacterCheck::new(tokenizer) }
    }
}

impl TokenizeJob {
    /// Encodes the texts.
    ///
    /// # Errors
    /// Fails if options are out of range or conflict, or if the folder is in use or belongs to other
    /// texts or options. Fails if a text or the tokenizer cannot be read, a token is outside the
    /// vocabulary, or a file cannot be written.
    ///
    /// Returns [`TrainingError::Interrupted`] if the reporter interrupts the job. Completed work is
    /// saved.
    pub fn run(&self, reporter: &dyn Reporter) -> Result<TokenizeReport, JobError> {
        self.tokenize(reporter).map_err(|error| match error.is_interrupted() {
            true => {
                let manifest = Manifest::path(&self.out);
                TrainingError::Interrupted { state: manifest.exists().then_some(manifest) }.into()
            }
            false => error,
        })
    }

    fn tokenize(&self, reporter: &dyn Reporter) -> Result<TokenizeReport, JobError> {
        let clock = Instant::now();
        self.check_options()?;
        JobFolder::expect_unused(&self.out)?;
        let corpus = Corpus::open(&self.data, self.options.held_out)?;
        let (tokenizer, size, end) = self.vocabulary(reporter)?;
        let vocabulary = Vocabulary::new(&tokenizer, size, end);
        let manifest = self.manifest(&corpus, &vocabulary)?;
        self.existing_manifest()?;
        let folder = JobFolder::take(&self.out, &RESULTS)?;
        // Another process may have used the folder since the first check.
        let found = self.existing_manifest()?;
        let is_begun = found.is_some();
        let manifest = match found {
            Some(found) => {
                found.check_same(&self.out, &manifest)?;
                found.sources.iter().try_for_each(check_unchanged)?;
                found
            }
            None => manifest,
        };
        folder.remove_leftovers();
        let done = |manifest: &Manifest| manifest.sources.iter().map(|source| source.read).sum::<u64>();
        let before = done(&manifest);
        let manifest = match manifest.complete {
            true => manifest,
            false => {
                let written = self.write((&corpus, &vocabulary), manifest.clone(), reporter);
                if let Err(error) = &written
                    && !is_begun
                    && !self.can_resume(error)
                {
                    self.remove_all(&manifest);
                }
                written?
            }
        };
        let shards = manifest.training.shards.iter().chain(&manifest.held_out.shards);
        Ok(TokenizeReport {
            out: self.out.clone(),
            format: manifest.format,
            dtype: manifest.dtype,
            training_tokens: manifest.training.tokens,
            held_out_tokens: manifest.held_out.tokens,
            documents: manifest.training.documents + manifest.held_out.documents,
            shards: shards.map(|shard| shard.file.clone()).collect(),
            bytes: done(&manifest),
            encoded_bytes: done(&manifest) - before,
            elapsed_s: clock.elapsed().as_secs_f64(),
        })
    }

    fn write(
        &self,
        (corpus, vocabulary): (&Corpus, &Vocabulary),
        manifest: Manifest,
        reporter: &dyn Reporter,
    ) -> Result<Manifest, TrainingError> {
        manifest.write(&self.out)?;
        replace_file(&self.out.join(TOKENIZER_FILE), |partial| vocabulary.tokenizer.save(partial, true))?;
        write(corpus, vocabulary, &self.out, manifest, (SAVE_BYTES, thread_count()), reporter)
    }

    /// Whether the same call with `resume` can continue after an error.
    ///
    /// This is the case after an interruption, or after a file error, such as a full disk, once tokens are
    /// saved. If a text must be corrected, all texts are encoded again from the start.
    fn can_resume(&self, error: &TrainingError) -> bool {
        let is_of_disk = matches!(
            error,
            TrainingError::File { .. } | TrainingError::Weights(WeightsError::Unwritable { .. })
        );
        let has_tokens = || match Manifest::read(&self.out) {
            Ok(Some(saved)) => saved.sources.iter().any(|source| source.read > 0),
            _ => false,
        };
        error.is_interrupted() || (is_of_disk && has_tokens())
    }

    /// Removes everything that was written, so that the call can be repeated after fixing the error.
    fn remove_all(&self, manifest: &Manifest) {
        ShardWriter::remove_all(&self.out, manifest);
        for file in RESULTS {
            let _ = fs::remove_file(self.out.join(file));
        }
    }

    /// Returns the manifest from an earlier run.
    ///
    /// Rejects a folder with other contents, or with a manifest if `resume` is not set.
    fn existing_manifest(&self) -> Result<Option<Manifest>, TrainingError> {
        let found = if self.out.is_dir() { Manifest::read(&self.out)? } else { None };
        let can_resume = found.is_some();
        let resume = Resume { resumes: can_resume && self.options.resume, can_resume };
        JobFolder::check(&self.out, &RESULTS, None, resume)?;
        Ok(found)
    }

    fn check_options(&self) -> Result<(), TrainingError> {
        let TokenizeOptions { format, shard_tokens, .. } = self.options;
        let most = match format {
            ShardFormat::NanoGpt => u64::MAX,
            ShardFormat::LlmC => MAX_LLM_C_TOKENS,
        };
        if let Some(found) = shard_tokens.filter(|tokens| *tokens == 0 || *tokens as u64 > most) {
            let expected = match format {
                ShardFormat::NanoGpt => "at least 1".to_owned(),
                ShardFormat::LlmC => format!("1 to {most}, the largest count that llm.c's header can store"),
            };
            let found = found.to_string();
            return Err(TrainingError::OptionOutOfRange { option: "shard_tokens", expected, found });
        }
        if self.model.is_none() && self.tokenizer.is_none() {
            let what = "specify `model` or `tokenizer`".into();
            return Err(TrainingError::Call { what });
        }
        Ok(())
    }

    /// Returns the tokenizer, the number of tokens, and the end-of-text token.
    fn vocabulary(&self, reporter: &dyn Reporter) -> Result<(Tokenizer, usize, Option<u32>), JobError> {
        if let Some(model) = &self.model {
            let options = ModelOptions {
                model: model.clone(),
                n_head: self.n_head,
                hub: self.hub.clone(),
                ..ModelOptions::default()
            };
            let checkpoint = options.open_checkpoint(reporter)?;
            let tokenizer = checkpoint.tokenizer(self.tokenizer.as_deref())?;
            let config = checkpoint.config();
            if let Some(note) = config.end_token_note() {
                reporter.note(&note);
            }
            return Ok((tokenizer, config.vocab_size, config.end_tokens().first().copied()));
        }
        let tokenizer = load_tokenizer(self.tokenizer.as_deref().unwrap_or(Path::new("")))?;
        let largest = tokenizer.get_vocab(true).into_values().max().map_or(0, |id| id as usize + 1);
        let end = tokenizer.token_to_id(END_OF_TEXT);
        if end.is_none() {
            reporter.note(&format!("the tokenizer has no {END_OF_TEXT}, so the documents are not separated"));
        }
        Ok((tokenizer, largest, end))
    }

    /// Creates the manifest of the folder before anything is encoded.
    fn manifest(&self, corpus: &Corpus, vocabulary: &Vocabulary) -> Result<Manifest, TrainingError> {
        let narrowest = TokenWidth::of_vocabulary(vocabulary.size);
        let dtype = self.options.dtype.unwrap_or(narrowest);
        if dtype.bytes() < narrowest.bytes() {
            let expected = format!("u32 for a vocabulary of {} tokens", vocabulary.size);
            return Err(TrainingError::OptionOutOfRange { option: "dtype", expected, found: "u16".into() });
        }
        let usual = match self.options.format {
            ShardFormat::NanoGpt => None,
            ShardFormat::LlmC => Some(LLM_C_SHARD_TOKENS),
        };
        let shard_tokens = self.options.shard_tokens.or(usual);
        let layout = (self.options.format, dtype, shard_tokens);
        Ok(empty_manifest(corpus, vocabulary, layout))
    }
}

/// Rejects a text file if the part that is already encoded has changed.
fn check_unchanged(source: &SourceFile) -> Result<(), TrainingError> {
    let checksum = || -> io::Result<u32> {
        let (mut file, mut checksum) =
            (open_regular(&source.file)?.take(source.read), crc32fast::Hasher::new());
        let mut block = vec![0; CHECKED_BYTES];
        loop {
            match file.read(&mut block)? {
                0 => return Ok(checksum.finalize()),
                count => checksum.update(&block[..count]),
            }
        }
    };
    if checksum().map_err(|error| failed(&source.file, error))? == source.crc32 {
        return Ok(());
    }
    let what = "modified after its first part was tokenized; restore the file, or choose another folder";
    Err(TrainingError::Data { path: source.file.clone(), what: what.into() })
}

/// Creates the manifest of a folder without any tokens.
pub(crate) fn empty_manifest(
    corpus: &Corpus,
    vocabulary: &Vocabulary,
    (format, dtype, shard_tokens): (ShardFormat, TokenWidth, Option<usize>),
) -> Manifest {
    Manifest {
        complete: false,
        format,
        dtype,
        shard_tokens,
        vocab_size: vocabulary.size,
        vocabulary_crc32: vocabulary_checksum(vocabulary.tokenizer),
        end_of_text: vocabulary.end,
        training: Part::default(),
        held_out: Part::default(),
        sources: corpus.files().iter().map(SourceFile::of).collect(),
    }
}

/// A piece of a text and its origin.
struct Work<'a> {
    split: Split,
    source: usize,
    file: &'a TextFile,
    piece: Piece,
    /// CRC-32 of the file up to the end of the piece.
    crc32: u32,
}

/// Completes a folder and returns its manifest; saves after every `save_bytes` bytes of text.
///
/// # Errors
/// Fails if a text cannot be read or encoded, a token is outside the vocabulary, or a file cannot be
/// written. Also fails if the reporter interrupts it, which is checked after every piece; completed work
/// is saved.
pub(crate) fn write(
    corpus: &Corpus,
    vocabulary: &Vocabulary,
    folder: &Path,
    manifest: Manifest,
    (save_bytes, threads): (u64, usize),
    reporter: &dyn Reporter,
) -> Result<Manifest, TrainingError> {
    corpus.notes().for_each(|note| reporter.note(&note));
    let encoder = TextEncoder::new(vocabulary.tokenizer);
    let cut = |bytes: &[u8], from| encoder.cut(bytes, from);
    let total = corpus.bytes(Split::Training) + corpus.bytes(Split::HeldOut);
    let bar = reporter.start("encoding", total, Unit::Bytes);
    bar.advance(manifest.sources.iter().map(|source| source.read).sum());

    let mut rest = Vec::new();
    for split in [Split::Training, Split::HeldOut] {
        for (index, (file, source)) in corpus.files().iter().zip(&manifest.sources).enumerate() {
            let part = file.range(split);
            rest.push((split, index, file, part.start.max(source.read)..part.end));
        }
    }
    let mut checksums: Vec<_> =
        manifest.sources.iter().map(|source| crc32fast::Hasher::new_with_initial(source.crc32)).collect();
    let tasks = rest.into_iter().flat_map(|(split, source, file, range)| {
        let rule = SplitRule { piece_bytes: encoder.piece_bytes(), first: &cut };
        file.pieces(range, rule).map(move |piece| Ok((split, source, file, piece?)))
    });
    let tasks = tasks.map(|task: Result<_, TrainingError>| {
        let (split, source, file, piece) = task?;
        let mut crc32 = 0;
        if let Some(checksum) = checksums.get_mut(source) {
            checksum.update(piece.bytes());
            crc32 = checksum.clone().finalize();
        }
        Ok(Work { split, source, file, piece, crc32 })
    });

    let dtype = manifest.dtype;
    let mut writer = ShardWriter::open(folder, manifest)?;
    let mut unsaved = 0;
    let mut is_noted = false;
    let write = |((encoded, lost), task): ((Encoded, Option<LostCharacter>), Work)| {
        if let Some(lost) = lost.filter(|_| !is_noted) {
            let (path, start) = (task.file.path.display(), task.piece.start());
            reporter.note(&format!("{path}: in the text that starts at byte {start}: {lost}"));
            is_noted = true;
        }
        let read = task.piece.bytes().len() as u64;
        writer.add(task.split, (task.source, read, task.crc32), &encoded)?;
        bar.advance(read);
        unsaved += read;
        let is_interrupted = reporter.is_interrupted();
        if is_interrupted || unsaved >= save_bytes {
            writer.save()?;
            unsaved = 0;
        }
        if is_interrupted { Err(TrainingError::Interrupted { state: None }) } else { Ok(()) }
    };
    let session = || encoder.session();
    in_order(
        threads,
        tasks,
        session,
        |session, task| Ok((encode(&task, vocabulary, dtype, session)?, task)),
        write,
    )?;
    writer.manifest.complete = true;
    writer.save()?;
    Ok(writer.manifest)
}

/// Encodes the texts of a piece.
fn encode(
    task: &Work,
    vocabulary: &Vocabulary,
    dtype: TokenWidth,
    session: &mut EncoderSession,
) -> Result<(Encoded, Option<LostCharacter>), TrainingError> {
    let mut lost = None;
    let mut encoded = Encoded::default();
    let mut tokens = Vec::new();
    for text in task.file.texts(&task.piece)? {
        match text.content {
            Content::Text(text) => {
                session.encode(&text, &mut tokens)?;
                let check = vocabulary.check.as_ref().filter(|_| lost.is_none());
                lost = lost.or_else(|| check?.first_lost(vocabulary.tokenizer, &text));
                encoded.characters += text.chars().count();
            }
            Content::Ids(ids) => tokens.extend(ids),
        }
        if text.is_end {
            tokens.extend(vocabulary.end);
            encoded.documents += 1;
        }
    }
    let is_beyond = |id: u32| usize::try_from(id).is_ok_and(|id| id >= vocabulary.size);
    if let Some(id) = tokens.iter().copied().max().filter(|id| is_beyond(*id)) {
        return Err(TrainingError::Vocabulary { id, vocab_size: vocabulary.size });
    }
    dtype.write(&tokens, &mut encoded.bytes);
    Ok((encoded, lost))
}

/// Processes items on several threads and passes the results to `take` in item order.
///
/// Each thread has its own state. `take` runs on the calling thread. Threads process only a few items
/// ahead of the next result.
fn in_order<T: Send, R: Send, S>(
    threads: usize,
    items: impl Iterator<Item = Result<T, TrainingError>>,
    state: impl Fn() -> S + Sync,
    work: impl Fn(&mut S, T) -> Result<R, TrainingError> + Sync,
    mut take: impl FnMut(R) -> Result<(), TrainingError>,
) -> Result<(), TrainingError> {
    if threads <= 1 {
        let mut state = state();
        return items.into_iter().try_for_each(|item| take(work(&mut state, item?)?));
    }
    type Answer<R> = SyncSender<Result<R, TrainingError>>;
    let (sender, receiver) = mpsc::sync_channel::<(T, Answer<R>)>(PIECES_AHEAD * threads);
    let receiver = Mutex::new(receiver);
    thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                let mut state = state();
                let next = || receiver.lock().unwrap_or_else(PoisonError::into_inner).recv();
                while let Ok((item, answer)) = next() {
                    // The receiver is gone if another item failed.
                    let _ = answer.send(work(&mut state, item));
                }
            });
        }
        // The threads exit when the sender is dropped.
        let sender = sender;
        let mut waiting = VecDeque::new();
        // If a thread panics, its answer never arrives, and the scope propagates the panic.
        let mut take = |answer: mpsc::Receiver<Result<R, TrainingError>>| {
            answer.recv().map_or(Ok(()), |done| take(done?))
        };
        for item in items {
            let (answer, result) = mpsc::sync_channel(1);
            let _ = sender.send((item?, answer));
            waiting.push_back(result);
            if waiting.len() > PIECES_AHEAD * threads
                && let Some(first) = waiting.pop_front()
            {
                take(first)?;
            }
        }
        waiting.into_iter().try_for_each(take)
    })
}

fn failed(path: &Path, error: io::Error) -> TrainingError {
    TrainingError::File { path: path.to_owned(), error }
}
