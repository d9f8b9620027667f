//! A checkpoint: its tensors, the configuration they are compared with, and the tokenizer.

use std::path::{Path, PathBuf};

use candle_gpt2::{Gpt2Config, HeadKind};
use tokenizers::Tokenizer;

use crate::adapter::Changes;
use crate::config_file::FoundConfig;
use crate::files::Files;
use crate::naming::{Naming, Orientation, Origin};
use crate::source::{Format, Source};
use crate::stored::{StoredDType, StoredTensor};
use crate::{
    GivenFiles, Mismatch, ReadProgress, WeightsError, config_file, formats, load_tokenizer, tied_head,
    tokenizer,
};

/// A fault that [`Checkpoint::verify`] lists.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum Problem {
    /// The tensors are not those of the model.
    Mismatch(Mismatch),
    /// A parameter holds values that are not numbers.
    NotFinite {
        /// The tensor's name in the file.
        name: String,
        /// How many values are NaN.
        nan: usize,
        /// How many values are infinite.
        infinite: usize,
        /// How many values the tensor has.
        elements: usize,
    },
}

impl std::fmt::Display for Problem {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Mismatch(mismatch) => mismatch.fmt(f),
            Self::NotFinite { name, nan, infinite, elements } => {
                write!(f, "tensor `{name}`: of {elements} values {nan} are NaN and {infinite} infinite")
            }
        }
    }
}

/// An opened checkpoint: its configuration is read, its tensors are listed and compared; no value is read yet, but those
/// of an output head that a tied configuration leaves no place for.
///
/// ```
/// use candle_gpt2_weights::{Checkpoint, Format, GivenFiles, OpenOptions};
///
/// // The model that the program carries; `Checkpoint::open` takes the path of a folder or of a weights file.
/// let files = GivenFiles::new("stories")
///     .with_bytes("config.json", candle_gpt2_stories::CONFIG)
///     .with_bytes("model.safetensors", candle_gpt2_stories::WEIGHTS);
/// let checkpoint = Checkpoint::open_given(files, &OpenOptions::default(), &|_| ())?;
/// assert_eq!(checkpoint.format(), Format::Safetensors);
/// assert_eq!(checkpoint.config().n_layer, 6);
/// assert_eq!(checkpoint.tensors().len(), 76);
/// # Ok::<(), candle_gpt2_weights::WeightsError>(())
/// ```
#[derive(Debug)]
#[doc(alias("from_pretrained", "VarBuilder", "from_mmaped_safetensors"))]
pub struct Checkpoint {
    pub(crate) config: Gpt2Config,
    pub(crate) source: Source,
    /// Who has the files beside the weights.
    pub(crate) beside: Files,
    pub(crate) naming: Naming,
    /// The name of the configuration's file, or of its place in the weights.
    configuration: &'static str,
    /// The `config.json`.
    pub(crate) config_text: Option<String>,
    rules: Vec<String>,
    /// The changes that adapters make to parameters.
    pub(crate) changes: Changes,
    has_guessed_heads: bool,
}

/// Options of opening a checkpoint. [`Checkpoint::open_with`] takes them.
#[derive(Debug, Clone, Default)]
pub struct OpenOptions {
    /// The number of attention heads, for files that do not tell it: weights of the book's models without a configuration. For
    /// others it must be the number that they tell.
    pub n_head: Option<usize>,
}

impl Checkpoint {
    /// Opens a checkpoint folder, or a weights file; a configuration that the file does not hold itself is read from the file
    /// next to it. Tensors that do not fit the configuration are no error yet: see [`Checkpoint::check`] and
    /// [`Checkpoint::verify`].
    ///
    /// # Errors
    /// When a file is missing, cannot be read, or is not what its place says.
    pub fn open(path: &Path) -> Result<Self, WeightsError> {
        Self::open_with(path, &OpenOptions::default())
    }

    /// As [`Checkpoint::open`], with what the files do not tell.
    ///
    /// # Errors
    /// As [`Checkpoint::open`], and when the files tell another number of heads, or it does not divide the width.
    pub fn open_with(path: &Path, options: &OpenOptions) -> Result<Self, WeightsError> {
        Self::open_watched(path, options, &|_| ())
    }

    /// As [`Checkpoint::open_with`]; `progress` may end it while a head that may contradict the configuration is compared with the
    /// embedding, which alone can take long; it receives no numbers of bytes.
    ///
    /// # Errors
    /// As [`Checkpoint::open_with`]; [`WeightsError::Interrupted`] if `progress` says so.
    pub fn open_watched(
        path: &Path,
        options: &OpenOptions,
        progress: &dyn ReadProgress,
    ) -> Result<Self, WeightsError> {
        Self::open_in(Files::Disk, path, options, progress)
    }

    /// As [`Checkpoint::open_watched`], of files that are given: a folder's, or one weights file of any name with or without
    /// others beside it. In messages their paths begin with the name of `files`.
    ///
    /// # Errors
    /// As [`Checkpoint::open_watched`]; when several files have one name.
    pub fn open_given(
        files: GivenFiles,
        options: &OpenOptions,
        progress: &dyn ReadProgress,
    ) -> Result<Self, WeightsError> {
        let folder = files.folder().to_owned();
        Self::open_in(Files::Given(files), &folder, options, progress)
    }

    fn open_in(
        files: Files,
        path: &Path,
        options: &OpenOptions,
        progress: &dyn ReadProgress,
    ) -> Result<Self, WeightsError> {
        let mut source = formats::open(&files, path)?;
        let found = match source.config.take() {
            Some(config) => FoundConfig {
                config,
                name: match source.format {
                    Format::PyTorchZip | Format::PyTorchLegacy => "its model_args",
                    _ => "its header",
                },
                rule: "the configuration is the one inside the file".to_owned(),
                has_guessed_heads: false,
                text: None,
            },
            None => {
                let shown = (source.format, source.tensors.as_slice());
                config_file::read(&files, files.folder_of(&source.path), shown, options.n_head)?
            }
        };
        if let Some(named) = options.n_head.filter(|named| *named != found.config.n_head) {
            let (path, told) = (source.path, found.config.n_head);
            return Err(WeightsError::OtherHeads { path, told, named });
        }
        Self::new(source, files, found, progress)
    }

    fn new(
        mut source: Source,
        beside: Files,
        found: FoundConfig,
        progress: &dyn ReadProgress,
    ) -> Result<Self, WeightsError> {
        let FoundConfig { config, name, rule, has_guessed_heads, text } = found;
        let mut naming = Naming::new(&config, &source);
        naming.mismatches.extend(tied_head::contradiction(&source, &naming, progress)?);
        let mut rules = std::mem::take(&mut source.rules);
        rules.push(rule);
        rules.extend(rules_of(&config, &source, &naming));
        Ok(Self {
            config,
            source,
            beside,
            naming,
            configuration: name,
            config_text: text,
            rules,
            changes: Changes::new(),
            has_guessed_heads,
        })
    }

    /// The configuration.
    pub fn config(&self) -> &Gpt2Config {
        &self.config
    }

    /// The weights file, or the index of its shards.
    pub fn weights_path(&self) -> &Path {
        &self.source.path
    }

    /// Every file that holds tensors, with its size in bytes.
    pub fn files(&self) -> impl Iterator<Item = (&Path, u64)> {
        self.source.files.iter().map(|file| (file.path(), file.len()))
    }

    /// The folder of the weights.
    pub fn folder(&self) -> &Path {
        self.beside.folder_of(&self.source.path)
    }

    /// The tokenizer: from `path` if one is given, else from inside the file, else from the folder.
    ///
    /// # Errors
    /// When there is none, or it cannot be used.
    pub fn tokenizer(&self, path: Option<&Path>) -> Result<Tokenizer, WeightsError> {
        match (path, &self.source.tokenizer) {
            (Some(path), _) => load_tokenizer(path),
            (None, Some(tokenizer)) => Ok(tokenizer.clone()),
            (None, None) => tokenizer::load(&self.beside, self.folder()),
        }
    }

    /// The `generation_config.json` beside the weights, or that was given with them, if there is one: its path and its text.
    ///
    /// # Errors
    /// When it is there and cannot be read.
    pub fn generation_config(&self) -> Result<Option<(PathBuf, String)>, WeightsError> {
        config_file::generation_config(&self.beside, self.folder())
    }

    /// The rows of the vocabulary that are no tokens: those `tokenizer` has no token for. Without a tokenizer, those
    /// after GPT-2's own tokens if the vocabulary has the size that nanoGPT pads to.
    pub fn padding_token_ids(&self, tokenizer: Option<&Tokenizer>) -> Vec<u32> {
        /// GPT-2's 50,257 tokens, padded to a multiple of 64.
        const PADDED_VOCABULARY: usize = 50_304;
        const GPT2_TOKENS: u32 = 50_257;
        let rows = 0..u32::try_from(self.config.vocab_size).unwrap_or(u32::MAX);
        match tokenizer {
            Some(tokenizer) => rows.filter(|id| tokenizer.id_to_token(*id).is_none()).collect(),
            None if self.config.vocab_size == PADDED_VOCABULARY => (GPT2_TOKENS..rows.end).collect(),
            None => Vec::new(),
        }
    }

    /// The format of the weights.
    pub fn format(&self) -> Format {
        self.source.format
    }

    /// What in the file's content shows its format.
    pub fn evidence(&self) -> &str {
        &self.source.evidence
    }

    /// Whether weights are stored as blocks of small integers, as GGUF files have them.
    pub fn is_quantized(&self) -> bool {
        self.tensors().iter().any(|stored| matches!(stored.dtype, StoredDType::Quantized(_)))
    }

    /// Every tensor of the files, parameter or not.
    pub fn tensors(&self) -> &[StoredTensor] {
        &self.source.tensors
    }

    /// Whose names the file uses, such as `Hugging Face`.
    pub fn naming_scheme(&self) -> &'static str {
        self.naming.scheme
    }

    /// The prefix of the names in the file, such as `transformer.`.
    pub fn prefix(&self) -> &str {
        &self.naming.prefix
    }

    /// How the file stores the weights of linear layers.
    pub fn orientation(&self) -> Orientation {
        self.naming.orientation
    }

    /// How the orientation was decided, in words.
    pub fn orientation_evidence(&self) -> &str {
        &self.naming.orientation_evidence
    }

    /// Every further decision that opening took, in words.
    pub fn rules(&self) -> &[String] {
        &self.rules
    }

    /// Adds a decision to [`Checkpoint::rules`].
    pub(crate) fn add_rule(&mut self, rule: String) {
        self.rules.push(rule);
    }

    /// The note for users if the number of heads is not recorded and was guessed: another number is another model,
    /// which no check can see. [`OpenOptions::n_head`] says it.
    pub fn guessed_heads_note(&self) -> Option<String> {
        let Gpt2Config { n_head, .. } = self.config;
        let note = || {
            format!(
                "the number of attention heads is not recorded; {n_head} of {} values each are assumed, as in published GPT-2 models: \
                 results are wrong if the model was trained with another number",
                self.config.head_dim()
            )
        };
        self.has_guessed_heads.then(note)
    }

    /// Tensors of the file that are no parameters: causal masks of old checkpoints.
    pub fn buffers(&self) -> impl Iterator<Item = &StoredTensor> {
        self.naming.buffers.iter().map(|index| &self.source.tensors[*index])
    }

    /// Tensors of integers, booleans and other types that hold no weights, which the model does not need.
    pub fn skipped(&self) -> impl Iterator<Item = &StoredTensor> {
        self.naming.skipped.iter().map(|index| &self.source.tensors[*index])
    }

    /// A copy of the token embedding under the head's name, in a file whose configuration ties the two.
    pub fn tied_head(&self) -> Option<&StoredTensor> {
        self.naming.tied_head.map(|index| &self.source.tensors[index])
    }

    /// Number of distinct parameters that the files hold: biases that are not stored do not count.
    pub fn stored_parameter_count(&self) -> usize {
        let sources = self.naming.parameters.values().filter(|(from, _)| *from != Origin::Zeros);
        sources.map(|(_, parameter)| parameter.shape.iter().product::<usize>()).sum()
    }

    /// Rows of the token embedding in the file.
    pub fn embedding_rows(&self) -> Option<usize> {
        self.stored_matrix("wte.weight")?.shape.first().copied()
    }

    /// The tensor of a parameter that is stored in one piece.
    pub(crate) fn stored_matrix(&self, name: &str) -> Option<&StoredTensor> {
        match self.naming.parameters.get(name) {
            Some((Origin::Whole(index), _)) => self.source.tensors.get(*index),
            _ => None,
        }
    }

    /// The tensor of a parameter whose rows lie one after the other in the file, without padding after them, and whether it is
    /// stored the other way round, `(in, out)`; `None` for others.
    pub(crate) fn stored_rows(&self, name: &str) -> Option<(StoredTensor, bool)> {
        let (_, parameter) = self.naming.parameters.get(name)?;
        let stored = self.stored_matrix(name).filter(|stored| stored.dtype.holds_weights())?;
        let is_turned = self.naming.is_transposed(name);
        let mut expected = parameter.shape.clone();
        if is_turned {
            expected.reverse();
        }
        let rows = *expected.first()?;
        if name == "wte.weight" && stored.shape.first().is_some_and(|stored| *stored > rows) {
            // Padding after the vocabulary.
            expected[0] = stored.shape[0];
        }
        if expected != stored.shape {
            return None;
        }
        Some((stored.rows(0..rows)?, is_turned))
    }

    /// Whether the tensors are exactly those of the configured model.
    ///
    /// # Errors
    /// When not, with every difference.
    pub fn check(&self) -> Result<(), WeightsError> {
        if self.naming.mismatches.is_empty() {
            return Ok(());
        }
        let (path, mismatches) = (self.source.path.clone(), self.naming.mismatches.clone());
        let (configuration, hint) = (self.configuration.to_owned(), self.hint());
        Err(WeightsError::Mismatches { path, configuration, hint, mismatches })
    }

    /// Sizes that the configuration and the tensors disagree on, and what to do.
    fn hint(&self) -> String {
        let name = self.source.path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        if formats::is_shard(name) {
            return "; it is one of several shards: name their index or their folder".into();
        }
        let sizes = self.naming.other_sizes(&self.config, &self.source.tensors);
        if sizes.is_empty() {
            return String::new();
        }
        let told = |(key, configured, shown): &(&str, usize, usize)| {
            format!("`{key}` is {configured} there, and the tensors show {shown}")
        };
        let told: Vec<String> = sizes.iter().map(told).collect();
        let what_to_do = match self.configuration {
            "config.json" | "hparams.json" => "correct it, or take both files from one source",
            _ => "save the model again",
        };
        format!(" ({}; {what_to_do})", told.join(", "))
    }

    /// Notes for users: files beside the weights that are not read.
    pub fn notes(&self) -> &[String] {
        &self.source.notes
    }

    /// Bytes of the parameters in the files.
    pub fn parameter_bytes(&self) -> u64 {
        self.parameter_tensors().map(|(_, stored)| stored.stored_bytes()).sum()
    }

    /// The stored tensors that parameters are made of, in the order of the files.
    pub(crate) fn parameter_tensors(&self) -> impl Iterator<Item = (usize, &StoredTensor)> {
        let mut indices: Vec<usize> = Vec::new();
        for (from, _) in self.naming.parameters.values() {
            match from {
                Origin::Whole(index) => indices.push(*index),
                Origin::Thirds(thirds) => indices.extend(thirds),
                Origin::Zeros => {}
            }
        }
        indices.sort_unstable();
        indices.into_iter().map(|index| (index, &self.source.tensors[index]))
    }
}

/// The head besides or in place of one over the vocabulary, in words.
fn head_rule(config: &Gpt2Config) -> Option<String> {
    let (class, labels) = (config.head.class_name(), config.num_labels());
    match config.head {
        HeadKind::LanguageModel => None,
        HeadKind::SequenceClassification => {
            Some(format!("`score` says which of {labels} labels a text has: a {class}"))
        }
        HeadKind::TokenClassification => {
            Some(format!("`classifier` says which of {labels} labels each token has: a {class}"))
        }
        HeadKind::DoubleHeads => {
            Some(format!("`multiple_choice_head` says which of several texts is right: a {class}"))
        }
    }
}

fn is_contradiction(mismatch: &Mismatch) -> bool {
    matches!(mismatch, Mismatch::TieContradiction { .. })
}

/// What was decided about the tensors, in words.
fn rules_of(config: &Gpt2Config, source: &Source, naming: &Naming) -> Vec<String> {
    let mut rules = Vec::new();
    if config.head.has_language_model() {
        rules.push(match (config.tie_word_embeddings, naming.tied_head) {
            (true, None) if naming.is_embedding_head => {
                "the output head is tied: the file has no token embedding, so lm_head.weight serves as both"
                    .to_owned()
            }
            (true, None) => {
                "the output head is tied: the file has no lm_head.weight, so the embedding is used".to_owned()
            }
            (true, Some(index)) if naming.mismatches.iter().any(is_contradiction) => {
                format!(
                    "the output head is tied by the configuration, and `{}` differs from the embedding",
                    source.tensors[index].name
                )
            }
            (true, Some(index)) => {
                format!(
                    "the output head is tied: `{}` repeats the embedding and is not read",
                    source.tensors[index].name
                )
            }
            (false, _) => "the output head is its own tensor".to_owned(),
        });
    }
    rules.extend(head_rule(config));
    if !naming.buffers.is_empty() {
        rules.push(format!(
            "{} causal masks of an old checkpoint are not parameters and are ignored",
            naming.buffers.len()
        ));
    }
    if !naming.skipped.is_empty() {
        /// Most names in one rule.
        const SHOWN: usize = 3;
        let names = naming.skipped.iter().take(SHOWN).map(|index| source.tensors[*index].name.as_str());
        let names: Vec<&str> = names.collect();
        let more = if naming.skipped.len() > SHOWN { ", …" } else { "" };
        rules.push(format!(
            "{} tensors of types that hold no weights are not parameters and are ignored: {}{more}",
            naming.skipped.len(),
            names.join(", ")
        ));
    }
    if naming.zero_count() > 0 {
        rules.push(format!("{} biases are not stored and taken as zero", naming.zero_count()));
    }
    if let Some((Origin::Whole(index), embedding)) = naming.parameters.get("wte.weight")
        && let Some(padding) =
            source.tensors[*index].shape.first().and_then(|rows| rows.checked_sub(embedding.shape[0]))
        && padding > 0
    {
        rules.push(format!("the last {padding} rows of the token embedding are padding and not read"));
    }
    rules
}
