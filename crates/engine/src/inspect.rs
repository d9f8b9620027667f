//! Description of a checkpoint, with supporting evidence, and comparison of two checkpoints.

use std::collections::{BTreeMap, HashSet};
use std::path::{Path, PathBuf};

use candle_core::DType;
use candle_gpt2::{
    Gpt2Config, KvDType, LedgerRow, Parameter, ParameterCounts, expected_parameters, paper_size,
    parameter_ledger,
};
use candle_gpt2_weights::{
    Checkpoint, Difference, DifferenceKind, Mismatch, Orientation, Statistics, WeightsError,
    checkpoint_shape, differences,
};
use serde::Serialize;
use serde_json::Value;

use crate::{EngineError, HubOptions, ModelOptions, ReadJob, Reporter, Silent};

/// Options for an inspection.
///
/// The subject is a checkpoint, or a published model, which needs no files.
///
/// ```
/// use candle_gpt2_engine::{HubOptions, InspectOptions, Inspected, Silent};
///
/// let options = InspectOptions {
///     model: None,
///     preset: Some("gpt2-xl".into()),
///     tensors: false,
///     diff: None,
///     n_head: None,
///     hub: HubOptions::default(),
/// };
/// let Inspected::One(found) = options.inspect(&Silent)? else { panic!("there is one model only") };
/// assert_eq!(found.parameters.unique, 1_557_611_200);
/// assert_eq!(found.kv_bytes_per_token.f32, 2 * 48 * 1600 * 4);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
pub struct InspectOptions {
    /// Checkpoint: a folder, a weights file, a model on the Hub, or [`BUILT_IN`](crate::BUILT_IN).
    pub model: Option<PathBuf>,
    /// Name of a published model, such as `gpt2-xl`, to inspect instead of a checkpoint.
    pub preset: Option<String>,
    /// Whether to compute [`Statistics`] for every tensor.
    pub tensors: bool,
    /// Another checkpoint to compare with; the report then contains only the comparison.
    pub diff: Option<PathBuf>,
    /// Number of attention heads, for a checkpoint that does not record the number.
    pub n_head: Option<usize>,
    /// Access to the Hub.
    pub hub: HubOptions,
}

/// Result of an inspection.
///
/// Returned by [`InspectOptions::inspect`].
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(untagged)]
pub enum Inspected {
    /// Description of a checkpoint or a published model.
    One(Box<Inspection>),
    /// Differences between two checkpoints.
    Two(Comparison),
}

impl InspectOptions {
    /// Inspects the model, or compares it with `diff`.
    ///
    /// # Errors
    /// If options conflict, the checkpoint or published model does not exist, a file cannot be read, or
    /// `reporter` interrupts the job.
    pub fn inspect(&self, reporter: &dyn Reporter) -> Result<Inspected, EngineError> {
        let refuse = |what: String| Err(EngineError::Options { what });
        let checkpoint = |model: &Path, n_head| {
            let (model, hub) = (model.to_owned(), self.hub.clone());
            ModelOptions { model, n_head, hub, ..ModelOptions::default() }.open_checkpoint(reporter)
        };
        match (&self.model, &self.preset) {
            (Some(_), Some(_)) => refuse("`model` and `preset` are mutually exclusive".into()),
            (Some(model), None) => match &self.diff {
                Some(_) if self.tensors => refuse("`diff` and `tensors` are mutually exclusive".into()),
                Some(other) => {
                    let (first, second) = (checkpoint(model, self.n_head)?, checkpoint(other, None)?);
                    Comparison::of(&first, &second, reporter).map(Inspected::Two)
                }
                None => {
                    let checkpoint = checkpoint(model, self.n_head)?;
                    let found = Inspection::of_checkpoint(&checkpoint, self.tensors, reporter)?;
                    Ok(Inspected::One(found.into()))
                }
            },
            (None, Some(_)) if self.diff.is_some() || self.tensors => {
                refuse("`diff` and `tensors` need `model`: a preset has no weights".into())
            }
            (None, Some(_)) if self.n_head.is_some() => {
                refuse("`n_head` applies only to checkpoints; the preset defines the number of heads".into())
            }
            (None, Some(name)) => match Gpt2Config::preset(name) {
                Ok(config) => Ok(Inspected::One(Inspection::of_preset(&config).into())),
                Err(error) => refuse(error.to_string()),
            },
            (None, None) => refuse("specify `model` or `preset`".into()),
        }
    }
}

/// Description of a checkpoint, or of a published model without files.
///
/// ```
/// use candle_gpt2_engine::{Inspection, ModelOptions, Silent};
///
/// let checkpoint = ModelOptions::default().open_checkpoint(&Silent)?;
/// let found = Inspection::of_checkpoint(&checkpoint, false, &Silent)?;
/// assert_eq!((found.class, found.parameters.unique), ("GPT2LMHeadModel", 6_708_480));
/// assert_eq!(found.vocabulary.tokenizer, Some(4096));
/// assert_eq!(found.tensors[0].role, "parameter");
/// assert!(found.mismatches.is_empty());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Inspection {
    /// Name of the format, or `preset`.
    pub format: &'static str,
    /// Evidence for the format in the file's content.
    pub evidence: String,
    /// Weights file, or the index of its shards; absent for a preset.
    pub path: Option<String>,
    /// All files with tensors.
    pub files: Vec<StoredFile>,
    /// Naming scheme of the tensors, such as `Hugging Face`.
    pub naming: &'static str,
    /// Prefix of the tensor names, such as `transformer.`.
    pub prefix: String,
    /// Dimension order of stored linear weights.
    pub orientation: &'static str,
    /// Evidence for the dimension order, as text.
    pub orientation_evidence: String,
    /// Name of the class in transformers, which determines the head.
    pub class: &'static str,
    /// Whether there is an output head that shares the token embedding's weights.
    pub tied_head: bool,
    /// Vocabulary sizes from all sources.
    pub vocabulary: VocabularySizes,
    /// Other decisions made while opening the checkpoint, as text.
    pub rules: Vec<String>,
    /// Configuration, with the keys of `config.json`.
    pub config: Value,
    /// Number of parameters according to the configuration.
    pub parameters: ParameterCounts,
    /// Parameter counts that different sources publish for this model.
    pub ledger: Vec<LedgerRow>,
    /// Number of distinct parameters stored in the files; absent for a preset.
    pub stored_parameters: Option<usize>,
    /// Size of the weights in bytes, by type.
    pub memory_bytes: BytesPerType,
    /// Size of one token in the KV cache in bytes, by type.
    pub kv_bytes_per_token: KvBytesPerType,
    /// Number of tensors stored in each type.
    pub dtypes: BTreeMap<String, usize>,
    /// All tensors.
    pub tensors: Vec<InspectedTensor>,
    /// Mismatches between the tensors and the configuration.
    pub mismatches: Vec<String>,
}

/// A file with tensors.
///
/// Part of an [`Inspection`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct StoredFile {
    /// Path of the file.
    pub path: String,
    /// Size of the file in bytes.
    pub bytes: u64,
}

/// Vocabulary sizes from all sources.
///
/// Part of an [`Inspection`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct VocabularySizes {
    /// Size in the configuration.
    pub config: usize,
    /// Number of rows in the token embedding, if it is stored as a single tensor.
    pub embedding_rows: Option<usize>,
    /// Number of tokens in the tokenizer, if there is one.
    pub tokenizer: Option<usize>,
}

/// Size in bytes, by floating-point type.
///
/// Part of an [`Inspection`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct BytesPerType {
    /// 32-bit floating point.
    pub f32: u64,
    /// 16-bit floating point.
    pub f16: u64,
    /// 16-bit floating point with the exponent range of `f32`.
    pub bf16: u64,
}

impl BytesPerType {
    fn new(parameters: usize) -> Self {
        let bytes = |of_each: u64| (parameters as u64).saturating_mul(of_each);
        Self { f32: bytes(4), f16: bytes(2), bf16: bytes(2) }
    }
}

/// Size of one token's keys and values in bytes, by type.
///
/// Part of an [`Inspection`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct KvBytesPerType {
    /// 32-bit floating point.
    pub f32: usize,
    /// 16-bit floating point.
    pub f16: usize,
    /// 16-bit floating point with the exponent range of `f32`.
    pub bf16: usize,
    /// 8-bit integers.
    pub q8: usize,
}

impl KvBytesPerType {
    fn new(config: &Gpt2Config) -> Self {
        let [f32, f16, bf16, q8] = [KvDType::F32, KvDType::F16, DType::BF16.into(), KvDType::Q8]
            .map(|dtype| config.kv_bytes_per_token(dtype));
        Self { f32, f16, bf16, q8 }
    }
}

/// A tensor in a checkpoint or a published model.
///
/// Part of an [`Inspection`].
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct InspectedTensor {
    /// Name in the file.
    pub name: String,
    /// Shape in the file.
    pub shape: Vec<usize>,
    /// Type in the file.
    pub dtype: String,
    /// Role: `parameter`, `buffer`, `skipped`, `tied head` or `surplus`.
    ///
    /// A buffer is a causal mask from an old checkpoint. Skipped tensors have types that hold no weights.
    pub role: &'static str,
    /// Statistics of the values, if requested and if the type can hold weights.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub statistics: Option<Statistics>,
}

impl Inspection {
    /// Describes a checkpoint, even one with unexpected tensors.
    ///
    /// `with_statistics` adds statistics of the values, which requires reading all tensors.
    ///
    /// # Errors
    /// If a tensor cannot be read, or `reporter` interrupts the job.
    pub fn of_checkpoint(
        checkpoint: &Checkpoint,
        with_statistics: bool,
        reporter: &dyn Reporter,
    ) -> Result<Self, EngineError> {
        let mismatches = match checkpoint.check() {
            Err(WeightsError::Mismatches { mismatches, .. }) => mismatches,
            _ => Vec::new(),
        };
        let buffers: HashSet<&str> = checkpoint.buffers().map(|buffer| buffer.name.as_str()).collect();
        let surplus: HashSet<&str> = mismatches
            .iter()
            .filter(|mismatch| matches!(mismatch, Mismatch::Surplus { .. }))
            .map(Mismatch::name)
            .collect();
        let skipped: HashSet<&str> = checkpoint.skipped().map(|tensor| tensor.name.as_str()).collect();
        let tied_head = checkpoint.tied_head().map(|head| head.name.as_str());
        let role = |name: &str| match name {
            name if buffers.contains(name) => "buffer",
            name if skipped.contains(name) => "skipped",
            name if tied_head == Some(name) => "tied head",
            name if surplus.contains(name) => "surplus",
            _ => "parameter",
        };
        let all_bytes = checkpoint.files().map(|(_, bytes)| bytes).sum();
        let reporter = if with_statistics { reporter } else { &Silent };
        let progress = ReadJob::new(reporter, "reading", all_bytes);
        let (mut tensors, mut dtypes) = (Vec::new(), BTreeMap::new());
        for (index, tensor) in checkpoint.tensors().iter().enumerate() {
            let statistics = if with_statistics { checkpoint.statistics(index, &progress)? } else { None };
            *dtypes.entry(tensor.dtype.to_string()).or_default() += 1;
            tensors.push(InspectedTensor {
                name: tensor.name.clone(),
                shape: tensor.shape.clone(),
                dtype: tensor.dtype.to_string(),
                role: role(&tensor.name),
                statistics,
            });
        }
        drop(progress);
        let config = checkpoint.config();
        let vocabulary = VocabularySizes {
            config: config.vocab_size,
            embedding_rows: checkpoint.embedding_rows(),
            tokenizer: checkpoint.tokenizer(None).ok().map(|tokenizer| tokenizer.get_vocab_size(true)),
        };
        let mut rules = checkpoint.rules().to_vec();
        rules.extend(vocabulary_rule(&vocabulary));
        Ok(Self {
            format: checkpoint.format().name(),
            evidence: checkpoint.evidence().to_owned(),
            path: Some(display(checkpoint.weights_path())),
            files: checkpoint
                .files()
                .map(|(path, bytes)| StoredFile { path: display(path), bytes })
                .collect(),
            naming: checkpoint.naming_scheme(),
            prefix: checkpoint.prefix().to_owned(),
            orientation: orientation_name(checkpoint.orientation()),
            orientation_evidence: checkpoint.orientation_evidence().to_owned(),
            vocabulary,
            rules,
            dtypes,
            tensors,
            stored_parameters: Some(checkpoint.stored_parameter_count()),
            mismatches: mismatches.iter().map(ToString::to_string).collect(),
            ..Self::of_config(config)
        })
    }

    /// Describes a published model, without its files.
    pub fn of_preset(config: &Gpt2Config) -> Self {
        let orientation = Orientation::Conv1D;
        let row = |parameter: &Parameter| InspectedTensor {
            name: parameter.name.clone(),
            shape: checkpoint_shape(parameter, orientation),
            dtype: "F32".into(),
            role: "parameter",
            statistics: None,
        };
        Self {
            orientation: orientation_name(orientation),
            orientation_evidence: "as published".into(),
            tensors: expected_parameters(config).iter().map(row).collect(),
            ..Self::of_config(config)
        }
    }

    /// Describes everything that follows from the configuration alone.
    fn of_config(config: &Gpt2Config) -> Self {
        let parameters = ParameterCounts::new(config);
        Self {
            format: "preset",
            evidence: "no file: the published configuration".into(),
            path: None,
            files: Vec::new(),
            naming: "Hugging Face",
            prefix: String::new(),
            orientation: "",
            orientation_evidence: String::new(),
            class: config.head.class_name(),
            tied_head: config.head.has_language_model() && config.tie_word_embeddings,
            vocabulary: VocabularySizes { config: config.vocab_size, embedding_rows: None, tokenizer: None },
            rules: paper_size(config)
                .map(|size| format!("the GPT-2 paper lists the model with these dimensions as {size}"))
                .into_iter()
                .collect(),
            config: config.to_json(),
            parameters,
            ledger: parameter_ledger(config),
            stored_parameters: None,
            memory_bytes: BytesPerType::new(parameters.unique),
            kv_bytes_per_token: KvBytesPerType::new(config),
            dtypes: BTreeMap::new(),
            tensors: Vec::new(),
            mismatches: Vec::new(),
        }
    }
}

fn display(path: &Path) -> String {
    path.display().to_string()
}

/// Describes the difference between the vocabulary and tokenizer sizes, if there is one.
fn vocabulary_rule(vocabulary: &VocabularySizes) -> Option<String> {
    let (rows, tokens) = (vocabulary.config, vocabulary.tokenizer?);
    match rows.checked_sub(tokens) {
        Some(0) => None,
        Some(padding) => {
            Some(format!("{padding} vocabulary rows are padding: the tokenizer has no tokens for them"))
        }
        None => Some(format!("the tokenizer has {} more tokens than the vocabulary", tokens - rows)),
    }
}

fn orientation_name(orientation: Orientation) -> &'static str {
    match orientation {
        Orientation::Conv1D => "Conv1D (in, out)",
        Orientation::Linear => "Linear (out, in)",
    }
}

/// Differences between two checkpoints by parameter, independent of their formats.
///
/// ```
/// use candle_gpt2_engine::{Comparison, ModelOptions, Silent};
///
/// let open = || ModelOptions::default().open_checkpoint(&Silent);
/// let found = Comparison::of(&open()?, &open()?, &Silent)?;
/// assert!(found.equal);
/// assert_eq!(found.first_differing, None);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Comparison {
    /// Whether every parameter has the same values in both checkpoints.
    pub equal: bool,
    /// First parameter that differs.
    pub first_differing: Option<String>,
    /// Largest absolute difference between two values.
    pub largest: Option<f64>,
    /// Differing parameters, in model order.
    pub differences: Vec<DifferingParameter>,
}

/// A parameter that differs between two checkpoints.
///
/// Part of a [`Comparison`].
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct DifferingParameter {
    /// Name in the model.
    pub name: String,
    /// Description of the difference.
    pub difference: String,
    /// Largest absolute difference between two values, if the shapes are equal.
    pub largest: Option<f64>,
}

impl Comparison {
    /// Compares two checkpoints.
    ///
    /// # Errors
    /// If a tensor cannot be read, or `reporter` interrupts the job.
    pub fn of(first: &Checkpoint, second: &Checkpoint, reporter: &dyn Reporter) -> Result<Self, EngineError> {
        let bytes = first.parameter_bytes() + second.parameter_bytes();
        let found = differences(first, second, &ReadJob::new(reporter, "comparing", bytes))?;
        let differences: Vec<_> = found.into_iter().map(DifferingParameter::new).collect();
        Ok(Self {
            equal: differences.is_empty(),
            first_differing: differences.first().map(|first| first.name.clone()),
            largest: differences.iter().filter_map(|differing| differing.largest).reduce(f64::max),
            differences,
        })
    }
}

impl DifferingParameter {
    fn new(Difference { name, kind }: Difference) -> Self {
        let (difference, largest) = match kind {
            DifferenceKind::OnlyInFirst => ("only in the first".to_owned(), None),
            DifferenceKind::OnlyInSecond => ("only in the second".to_owned(), None),
            DifferenceKind::Shape(a, b) => (format!("shapes {a:?} and {b:?}, as (out, in)"), None),
            DifferenceKind::Values(largest) => (format!("largest difference {largest:e}"), Some(largest)),
        };
        Self { name, difference, largest }
    }
}
