//! Opened checkpoints: tensors, configuration and tokenizer.

use std::path::{Path, PathBuf};

use candle_gpt2::{Gpt2Config, HeadKind};
use tokenizers::Tokenizer;

use crate::adapter::Changes;
use crate::config_file::FoundConfig;
use crate::files::Files;
use crate::naming::{Naming, Orientation, Origin};
use crate::source::{Format, Source};
use crate::stored::StoredTensor;
use crate::{
    GivenFiles, Mismatch, ReadProgress, WeightsError, config_file, formats, load_tokenizer, tied_head,
    tokenizer,
};

/// Problem reported by [`Checkpoint::verify`].
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum Problem {
    /// The tensors do not match the model.
    Mismatch(Mismatch),
    /// A parameter contains NaN or infinite values.
    NotFinite {
        /// Name of the tensor in the file.
        name: String,
        /// Number of NaN values.
        nan: usize,
        /// Number of infinite values.
        infinite: usize,
        /// Number of values in the tensor.
        elements: usize,
    },
}

impl std::fmt::Display for Problem {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Mismatch(mismatch) => mismatch.fmt(f),
            Self::NotFinite { name, nan, infinite, elements } => {
                write!(f, "tensor `{name}`: {nan} of {elements} values are NaN and {infinite} are infinite")
            }
        }
    }
}

/// Opened checkpoint: its configuration is read, and its tensors are listed and checked.
///
/// Opening reads no values, with one exception: if the configuration ties the output head but the
/// file has a separate one, it is compared with the embedding.
/// ```
/// use candle_gpt2_weights::{Checkpoint, Format, GivenFiles, OpenOptions};
///
/// // The built-in model; `Checkpoint::open` takes the path of a folder or of a weights file.
/// let files = GivenFiles::of_bytes("stories", candle_gpt2_stories::FILES);
/// let checkpoint = Checkpoint::open_given(files, &OpenOptions::default(), &|_| ())?;
/// assert_eq!(checkpoint.format(), Format::Gguf);
/// assert_eq!(checkpoint.config().n_layer, 7);
/// assert_eq!(checkpoint.tensors().len(), 88);
/// # Ok::<(), candle_gpt2_weights::WeightsError>(())
/// ```
#[derive(Debug)]
#[doc(alias("from_pretrained", "VarBuilder", "from_mmaped_safetensors"))]
pub struct Checkpoint {
    pub(crate) config: Gpt2Config,
    pub(crate) source: Source,
    /// Source of the files next to the weights.
    pub(crate) siblings: Files,
    pub(crate) naming: Naming,
    /// Configuration file name, or a description of where the weights file stores the configuration.
    configuration: &'static str,
    /// Text of `config.json`.
    pub(crate) config_text: Option<String>,
    rules: Vec<String>,
    /// Parameter changes made by adapters.
    pub(crate) changes: Changes,
    has_guessed_heads: bool,
}

/// Options of [`Checkpoint::open_with`].
#[derive(Debug, Clone, Default)]
pub struct OpenOptions {
    /// Number of attention heads, for weights that do not record it.
    ///
    /// Models from "Build a Large Language Model (From Scratch)" need it if they have no configuration. If
    /// the files record the number, it must match.
    pub n_head: Option<usize>,
}

impl Checkpoint {
    /// Opens a checkpoint folder or a weights file.
    ///
    /// A configuration that the weights file does not contain is read from the file next to it. Tensors
    /// that do not match the configuration are not an error yet; see [`Checkpoint::check`] and
    /// [`Checkpoint::verify`].
    ///
    /// # Errors
    /// If a file is missing, unreadable or not of the expected type.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, WeightsError> {
        Self::open_with(path, &OpenOptions::default())
    }

    /// Opens a checkpoint like [`Checkpoint::open`], with options for information that the files lack.
    ///
    /// # Errors
    /// Fails like [`Checkpoint::open`]. Also fails if the files record a different number of heads, or the
    /// number does not divide the hidden size.
    pub fn open_with(path: impl AsRef<Path>, options: &OpenOptions) -> Result<Self, WeightsError> {
        Self::open_watched(path.as_ref(), options, &|_| ())
    }

    /// Opens a checkpoint like [`Checkpoint::open_with`]; `progress` can interrupt it.
    ///
    /// Only one step of opening can take long: comparing the embedding with an output head that may
    /// contradict the configuration. `progress` is called during that step, without byte counts.
    ///
    /// # Errors
    /// Fails like [`Checkpoint::open_with`]; [`WeightsError::Interrupted`] if `progress` requests it.
    pub fn open_watched(
        path: &Path,
        options: &OpenOptions,
        progress: &dyn ReadProgress,
    ) -> Result<Self, WeightsError> {
        Self::open_in(Files::Disk, path, options, progress)
    }

    /// Opens a checkpoint from supplied files, like [`Checkpoint::open_watched`].
    ///
    /// `files` holds the files of a folder, or one weights file of any name with or without companion
    /// files. Paths in messages start with the name of `files`.
    ///
    /// # Errors
    /// Fails like [`Checkpoint::open_watched`]. Also fails if several files have the same name.
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
                    Format::PyTorchZip | Format::PyTorchLegacy => "the file's model_args",
                    _ => "the file's header",
                },
                rule: "the configuration comes from the weights file".to_owned(),
                has_guessed_heads: false,
                text: None,
            },
            None => {
                let shown = (source.format, source.tensors.as_slice());
                config_file::read(&files, files.folder_of(&source.path), shown, options.n_head)?
            }
        };
        if let Some(requested) = options.n_head.filter(|n_head| *n_head != found.config.n_head) {
            let (path, configured) = (source.path, found.config.n_head);
            return Err(WeightsError::OtherHeads { path, configured, requested });
        }
        Self::new(source, files, found, progress)
    }

    fn new(
        mut source: Source,
        siblings: Files,
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
            siblings,
            naming,
            configuration: name,
            config_text: text,
            rules,
            changes: Changes::new(),
            has_guessed_heads,
        })
    }

    /// Returns the configuration.
    pub fn config(&self) -> &Gpt2Config {
        &self.config
    }

    /// Returns the path of the weights file, or of the index of its shards.
    pub fn weights_path(&self) -> &Path {
        &self.source.path
    }

    /// Returns all files that contain tensors, with their sizes in bytes.
    pub fn files(&self) -> impl Iterator<Item = (&Path, u64)> {
        self.source.files.iter().map(|file| (file.path(), file.len()))
    }

    /// Returns the folder of the weights.
    pub fn folder(&self) -> &Path {
        self.siblings.folder_of(&self.source.path)
    }

    /// Loads the tokenizer: from `path` if set, else from the weights file, else from the folder.
    ///
    /// # Errors
    /// If the tokenizer is missing or unusable.
    pub fn tokenizer(&self, path: Option<&Path>) -> Result<Tokenizer, WeightsError> {
        match (path, &self.source.tokenizer) {
            (Some(path), _) => load_tokenizer(path),
            (None, Some(tokenizer)) => Ok(tokenizer.clone()),
            (None, None) => tokenizer::load(&self.siblings, self.folder()),
        }
    }

    /// Returns the path and text of `generation_config.json`, if the checkpoint has one.
    ///
    /// # Errors
    /// If the file exists but cannot be read.
    pub fn generation_config(&self) -> Result<Option<(PathBuf, String)>, WeightsError> {
        config_file::generation_config(&self.siblings, self.folder())
    }

    /// Returns the vocabulary rows that are not tokens, according to `tokenizer`.
    ///
    /// Without a tokenizer, returns the rows after GPT-2's own tokens if the vocabulary has nanoGPT's
    /// padded size.
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

    /// Returns the format of the weights.
    pub fn format(&self) -> Format {
        self.source.format
    }

    /// Describes the file content that identifies the format.
    pub fn evidence(&self) -> &str {
        &self.source.evidence
    }

    /// Whether weights are stored as blocks of small integers, as in GGUF files.
    pub fn is_quantized(&self) -> bool {
        self.tensors().iter().any(|stored| stored.dtype.is_blocks())
    }

    /// Returns all tensors of the files, whether parameters or not.
    pub fn tensors(&self) -> &[StoredTensor] {
        &self.source.tensors
    }

    /// Returns the naming scheme of the tensors, such as `Hugging Face`.
    pub fn naming_scheme(&self) -> &'static str {
        self.naming.scheme
    }

    /// Returns the prefix of the tensor names in the file, such as `transformer.`.
    pub fn prefix(&self) -> &str {
        &self.naming.prefix
    }

    /// Returns the orientation in which the file stores linear weights.
    pub fn orientation(&self) -> Orientation {
        self.naming.orientation
    }

    /// Describes how the orientation was determined.
    pub fn orientation_evidence(&self) -> &str {
        &self.naming.orientation_evidence
    }

    /// Describes all other decisions made while opening the checkpoint.
    pub fn rules(&self) -> &[String] {
        &self.rules
    }

    /// Adds a decision to [`Checkpoint::rules`].
    pub(crate) fn add_rule(&mut self, rule: String) {
        self.rules.push(rule);
    }

    /// Returns a user-facing note if the number of heads is not recorded and was guessed.
    ///
    /// A wrong number yields a different model, which no check can detect. [`OpenOptions::n_head`] sets the
    /// number.
    pub fn guessed_heads_note(&self) -> Option<String> {
        let Gpt2Config { n_head, .. } = self.config;
        let note = || {
            format!(
                "the number of attention heads is not recorded; assuming {n_head} with head dimension {}, as in published GPT-2 \
                 models: results are wrong if the model was trained with another number",
                self.config.head_dim()
            )
        };
        self.has_guessed_heads.then(note)
    }

    /// Returns the tensors that are not parameters: causal masks in old checkpoints.
    pub fn buffers(&self) -> impl Iterator<Item = &StoredTensor> {
        self.naming.buffers.iter().map(|index| &self.source.tensors[*index])
    }

    /// Returns the tensors that the model ignores because of their dtype, such as integers.
    pub fn skipped(&self) -> impl Iterator<Item = &StoredTensor> {
        self.naming.skipped.iter().map(|index| &self.source.tensors[*index])
    }

    /// Returns the copy of the token embedding stored as the head, if the configuration ties the two.
    pub fn tied_head(&self) -> Option<&StoredTensor> {
        self.naming.tied_head.map(|index| &self.source.tensors[index])
    }

    /// Returns the number of distinct parameters in the files. Missing biases do not count.
    pub fn stored_parameter_count(&self) -> usize {
        let sources = self.naming.parameters.values().filter(|(from, _)| *from != Origin::Zeros);
        sources.map(|(_, parameter)| parameter.shape.iter().product::<usize>()).sum()
    }

    /// Returns the number of token-embedding rows in the file.
    pub fn embedding_rows(&self) -> Option<usize> {
        self.stored_matrix("wte.weight")?.shape.first().copied()
    }

    /// Returns the tensor of a parameter that is stored as a single tensor.
    pub(crate) fn stored_matrix(&self, name: &str) -> Option<&StoredTensor> {
        match self.naming.parameters.get(name) {
            Some((Origin::Whole(index), _)) => self.source.tensors.get(*index),
            _ => None,
        }
    }

    /// Returns the tensor of a parameter stored as consecutive rows, and whether it is transposed.
    ///
    /// Transposed tensors have shape `(in, out)`. Padding rows after the vocabulary are cut off. Returns
    /// `None` for other parameters.
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
            // The extra rows are padding after the vocabulary.
            expected[0] = stored.shape[0];
        }
        if expected != stored.shape {
            return None;
        }
        Some((stored.rows(0..rows)?, is_turned))
    }

    /// Checks that the tensors exactly match the configured model.
    ///
    /// # Errors
    /// If they differ; the error lists all differences.
    pub fn check(&self) -> Result<(), WeightsError> {
        if self.naming.mismatches.is_empty() {
            return Ok(());
        }
        let (path, mismatches) = (self.source.path.clone(), self.naming.mismatches.clone());
        let (configuration, hint) = (self.configuration.to_owned(), self.hint());
        Err(WeightsError::Mismatches { path, configuration, hint, mismatches })
    }

    /// Lists sizes on which configuration and tensors disagree, and suggests a fix.
    fn hint(&self) -> String {
        let name = self.source.path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        if formats::is_shard(name) {
            return "; the file is one of several shards: pass their index or their folder".into();
        }
        let sizes = self.naming.other_sizes(&self.config, &self.source.tensors);
        if sizes.is_empty() {
            return String::new();
        }
        let difference = |(key, configured, actual): &(&str, usize, usize)| {
            format!("the configured `{key}` is {configured}, but the tensors have {actual}")
        };
        let differences: Vec<String> = sizes.iter().map(difference).collect();
        let what_to_do = match self.configuration {
            "config.json" | "hparams.json" => "correct it, or use both files from the same source",
            _ => "save the model again",
        };
        format!(" ({}; {what_to_do})", differences.join(", "))
    }

    /// Returns user-facing notes about files next to the weights that are not read.
    pub fn notes(&self) -> &[String] {
        &self.source.notes
    }

    /// Returns the total size of the parameters in the files, in bytes.
    pub fn parameter_bytes(&self) -> u64 {
        self.parameter_tensors().map(|(_, stored)| stored.stored_bytes()).sum()
    }

    /// Returns the stored tensors that make up the parameters, in file order.
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

/// Describes the head, unless it is the plain language-model head.
fn head_rule(config: &Gpt2Config) -> Option<String> {
    let (class, labels) = (config.head.class_name(), config.num_labels());
    match config.head {
        HeadKind::LanguageModel => None,
        HeadKind::SequenceClassification => {
            Some(format!("`score` labels each text ({labels} labels): a {class}"))
        }
        HeadKind::TokenClassification => {
            Some(format!("`classifier` labels each token ({labels} labels): a {class}"))
        }
        HeadKind::DoubleHeads => {
            Some(format!("`multiple_choice_head` scores each of several texts: a {class}"))
        }
    }
}

fn is_contradiction(mismatch: &Mismatch) -> bool {
    matches!(mismatch, Mismatch::TieContradiction { .. })
}

/// Describes the decisions made about the tensors.
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
                    "the output head is tied by the configuration, but `{}` differs from the embedding",
                    source.tensors[index].name
                )
            }
            (true, Some(index)) => {
                format!(
                    "the output head is tied: `{}` repeats the embedding and is ignored",
                    source.tensors[index].name
                )
            }
            (false, _) => "the output head is a separate tensor".to_owned(),
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
        /// Maximum number of names listed in one rule.
        const SHOWN: usize = 3;
        let names = naming.skipped.iter().take(SHOWN).map(|index| source.tensors[*index].name.as_str());
        let names: Vec<&str> = names.collect();
        let more = if naming.skipped.len() > SHOWN { ", …" } else { "" };
        rules.push(format!(
            "{} tensors with dtypes that cannot hold weights are not parameters and are ignored: {}{more}",
            naming.skipped.len(),
            names.join(", ")
        ));
    }
    if naming.zero_count() > 0 {
        rules.push(format!("{} biases are not stored and are set to zero", naming.zero_count()));
    }
    if let Some((Origin::Whole(index), embedding)) = naming.parameters.get("wte.weight")
        && let Some(padding) =
            source.tensors[*index].shape.first().and_then(|rows| rows.checked_sub(embedding.shape[0]))
        && padding > 0
    {
        rules.push(format!("the last {padding} rows of the token embedding are padding and are ignored"));
    }
    rules
}
