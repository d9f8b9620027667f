//! Verification of checkpoints: structure, values, tokenizer, KV cache and comparisons.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use candle_core::Device;
use candle_gpt2::{Gpt2LMHeadModel, HeadKind};
use candle_gpt2_weights::{Checkpoint, WeightsError};
use serde::Serialize;

use crate::fingerprint::fixed_prompt;
use crate::logits::{largest, logits, logits_with_cache};
use crate::{
    Classifier, Defaults, EngineError, ModelOptions, PublishedCheck, PublishedValues, ReadJob, Reporter,
    Vocabulary, fingerprint,
};

/// Maximum number of tokens in the fixed prompt; a shorter context uses fewer.
const PROMPT_TOKENS: usize = 16;
/// Note on a checkpoint without a tokenizer.
const NO_TOKENIZER: &str = "no tokenizer found";
/// Largest allowed difference between logits with and without a cache.
///
/// It is relative to the largest logit. Both computations use f32, but sum in a different order.
const CACHE_TOLERANCE: f64 = 1e-4;

/// Options for a verification.
///
/// ```
/// use candle_gpt2_engine::{BUILT_IN, ModelOptions, Silent, VerifyOptions};
///
/// assert!(VerifyOptions::allows(1e-4) && !VerifyOptions::allows(-1.0));
/// let options = VerifyOptions { against: Some(BUILT_IN.into()), ..VerifyOptions::default() };
/// let found = ModelOptions::default().verify(&options, &Silent)?;
/// assert!(found.sound && found.problems.is_empty());
/// assert_eq!(found.against_difference, Some(0.0));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct VerifyOptions {
    /// Another checkpoint to compare logits with, for a fixed prompt.
    pub against: Option<PathBuf>,
    /// Largest allowed difference from the logits of `against`.
    pub tolerance: f64,
    /// Whether to compute the [`fingerprint`].
    pub fingerprint: bool,
    /// Published values to compare the model with.
    pub published: Option<PublishedValues>,
}

impl VerifyOptions {
    /// Default tolerance.
    pub const TOLERANCE: f64 = 1e-3;

    /// Whether a tolerance is valid: finite and at least 0.
    pub fn allows(tolerance: f64) -> bool {
        tolerance >= 0.0 && tolerance.is_finite()
    }
}

impl Default for VerifyOptions {
    fn default() -> Self {
        Self { against: None, tolerance: Self::TOLERANCE, fingerprint: false, published: None }
    }
}

/// Result of a verification.
///
/// ```
/// use candle_gpt2_engine::Verification;
///
/// let found = Verification::unopened("model.safetensors: 12 bytes are not a checkpoint".into());
/// assert!(!found.sound);
/// assert_eq!(found.problems.len(), 1);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Verification {
    /// Whether there are no problems and every published value matches.
    pub sound: bool,
    /// Descriptions of the problems.
    pub problems: Vec<String>,
    /// Notes on facts that are not problems.
    pub notes: Vec<String>,
    /// Largest difference between logits with and without a cache.
    ///
    /// Absent if the model cannot be built or has no language-model head.
    pub cache_difference: Option<f64>,
    /// Largest difference between a classifier's logits for a text alone and in a batch.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub batch_difference: Option<f64>,
    /// Largest difference from the logits of the other checkpoint.
    pub against_difference: Option<f64>,
    /// Model [`fingerprint`] in the requested types, if requested and if the checkpoint is sound.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fingerprint: Option<String>,
    /// Results of the comparisons with published values.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub published: Vec<PublishedCheck>,
}

impl Verification {
    /// Creates a report with one problem, for a checkpoint that cannot be opened.
    pub fn unopened(problem: String) -> Self {
        Self {
            sound: false,
            problems: vec![problem],
            notes: Vec::new(),
            cache_difference: None,
            batch_difference: None,
            against_difference: None,
            fingerprint: None,
            published: Vec::new(),
        }
    }

    /// Whether the checkpoint has a tokenizer or one was specified.
    pub fn has_tokenizer(&self) -> bool {
        self.notes.iter().all(|note| note != NO_TOKENIZER)
    }

    /// Converts an error about damaged files to a report, and returns any other error.
    ///
    /// # Errors
    /// The error itself, if a file is missing or unreadable, the options are invalid, or the job was
    /// interrupted.
    pub fn of_damage(error: EngineError) -> Result<Self, EngineError> {
        match &error {
            EngineError::Weights(
                WeightsError::Config { .. }
                | WeightsError::NotWeights { .. }
                | WeightsError::Mismatches { .. }
                | WeightsError::Tokenizer { .. }
                | WeightsError::Candle(_),
            ) => Ok(Self::unopened(error.to_string())),
            _ => Err(error),
        }
    }
}

impl ModelOptions {
    /// Verifies the tensors, the tokenizer, the special tokens and the logits of the checkpoint.
    ///
    /// Every tensor must be present, with its shape and finite values. The tokenizer and the special tokens
    /// must fit the vocabulary. The logits of a fixed prompt must be the same with and without a cache. A
    /// classifier's logits must be the same alone and in a batch.
    ///
    /// Everything is computed on the CPU in the stored types, and `device` is ignored. Only the fingerprint
    /// and the comparison with published values use the types of these options.
    ///
    /// # Errors
    /// If the checkpoint cannot be opened or read, the other checkpoint has a different vocabulary or head,
    /// or `reporter` interrupts the job.
    pub fn verify(
        &self,
        options: &VerifyOptions,
        reporter: &dyn Reporter,
    ) -> Result<Verification, EngineError> {
        let checkpoint = self.open_checkpoint(reporter)?;
        let progress = ReadJob::new(reporter, "reading", checkpoint.parameter_bytes());
        let problems = checkpoint.verify(&progress)?;
        drop(progress);
        let mut problems: Vec<String> = problems.iter().map(ToString::to_string).collect();
        let mut notes = check_tokens(&checkpoint, self.tokenizer.as_deref(), &mut problems);
        let (mut cache_difference, mut batch_difference, mut against_difference) = (None, None, None);
        // Logits are computed only if the tensors are sound.
        if problems.is_empty() {
            let models = Models::load(&checkpoint, reporter)?;
            let prompt = fixed_prompt(checkpoint.config(), PROMPT_TOKENS);
            let mut check = |difference: f64, largest: f64, how: &str| {
                if !difference.is_finite() || difference > CACHE_TOLERANCE * largest.max(1.0) {
                    problems.push(format!(
                        "{how}, the logits differ by {difference:e} (largest logit: {largest:e})"
                    ));
                }
                Some(difference)
            };
            if let Some(model) = &models.language_model {
                let logits = logits(model, &prompt)?;
                let difference = largest_difference(&logits, &logits_with_cache(model, &prompt, reporter)?);
                cache_difference = check(difference, largest_logit(&logits), "with a cache");
            }
            if let Some(classifier) = &models.classifier {
                // Both results begin with the logits of the same text; only those are compared.
                let (alone, beside) = (
                    classifier.logits(&[&prompt])?,
                    classifier.logits(&[&prompt, &prompt[..prompt.len().div_ceil(2)]])?,
                );
                let alone = alone.concat();
                let difference = largest_difference(&alone, &beside.concat());
                batch_difference = check(difference, largest_logit(&alone), "in a batch with another text");
            }
            if let Some(other) = &options.against {
                let other =
                    Self { model: other.clone(), n_head: None, ..self.clone() }.open_checkpoint(reporter)?;
                check_comparable(&checkpoint, &other)?;
                let prompt = &prompt[..prompt.len().min(other.config().n_positions)];
                let theirs = Models::load(&other, reporter)?.logits(prompt)?;
                let difference = largest_difference(&models.logits(prompt)?, &theirs);
                if !difference.is_finite() || difference > options.tolerance {
                    let is_quantized = checkpoint.is_quantized() || other.is_quantized();
                    let normal = if is_quantized {
                        "; a few tenths are normal for q8_0, more for fewer bits"
                    } else {
                        ""
                    };
                    problems.push(format!(
                        "the logits of the two models differ by {difference:e}; `tolerance` is {:e}{normal}",
                        options.tolerance
                    ));
                }
                against_difference = Some(difference);
            }
        }
        let mut published = Vec::new();
        if let Some(values) = options.published.as_ref().filter(|_| problems.is_empty()) {
            let (checks, unpublished) = crate::published::compare(self, &checkpoint, values, reporter)?;
            (published, notes) = (checks, [notes, unpublished].concat());
        }
        let sound = problems.is_empty() && published.iter().all(|check| check.holds);
        let has_tokens = checkpoint.config().head.has_language_model();
        if options.fingerprint && !has_tokens {
            notes.push("no fingerprint: a classifier has no token logits".into());
        }
        let fingerprint = match options.fingerprint && sound && has_tokens {
            true => Some(fingerprint(&self.load(&checkpoint, &Device::Cpu, reporter)?, reporter)?),
            false => None,
        };
        Ok(Verification {
            sound,
            problems,
            notes,
            cache_difference,
            batch_difference,
            against_difference,
            fingerprint,
            published,
        })
    }
}

/// Checks that two models have the same vocabulary size, head and labels.
fn check_comparable(first: &Checkpoint, second: &Checkpoint) -> Result<(), EngineError> {
    let [found, other] = [first, second].map(|checkpoint| checkpoint.config().vocab_size);
    let other_path = second.weights_path().to_owned();
    if found != other {
        return Err(EngineError::OtherVocabulary { found, other, other_path });
    }
    let [found, other] = [first, second].map(|checkpoint| {
        let config = checkpoint.config();
        let labels = if config.head.has_labels() {
            format!(" over {}", config.id2label.join(", "))
        } else {
            String::new()
        };
        format!("{}{labels}", config.head.class_name())
    });
    if found != other {
        return Err(EngineError::OtherHead { found, other, other_path });
    }
    Ok(())
}

/// Models built from a checkpoint, on the CPU in the stored types.
struct Models {
    language_model: Option<Gpt2LMHeadModel>,
    classifier: Option<Classifier>,
}

impl Models {
    fn load(checkpoint: &Checkpoint, reporter: &dyn Reporter) -> Result<Self, EngineError> {
        let (options, head) = (ModelOptions::default(), checkpoint.config().head);
        let classifier = || {
            let vocabulary = Arc::new(Vocabulary::new(checkpoint, None));
            options.load_classifier(checkpoint, &Device::Cpu, vocabulary, "", reporter)
        };
        Ok(Self {
            language_model: match head.has_language_model() {
                true => Some(options.load(checkpoint, &Device::Cpu, reporter)?),
                false => None,
            },
            classifier: if head == HeadKind::LanguageModel { None } else { Some(classifier()?) },
        })
    }

    /// Returns the logits of a text: token logits followed by label logits.
    fn logits(&self, prompt: &[u32]) -> Result<Vec<f32>, EngineError> {
        let mut all = match &self.language_model {
            Some(model) => logits(model, prompt)?,
            None => Vec::new(),
        };
        if let Some(classifier) = &self.classifier {
            all.extend(classifier.logits(&[prompt])?.concat());
        }
        Ok(all)
    }
}

/// Checks the tokenizer and special tokens against the vocabulary and returns any notes.
fn check_tokens(
    checkpoint: &Checkpoint,
    tokenizer: Option<&Path>,
    problems: &mut Vec<String>,
) -> Vec<String> {
    let config = checkpoint.config();
    let vocab_size = config.vocab_size;
    let is_named = tokenizer.is_some();
    let tokenizer = checkpoint.tokenizer(tokenizer);
    let vocabulary = Arc::new(Vocabulary::new(checkpoint, tokenizer.as_ref().ok().cloned()));
    let defaults = Defaults::of(checkpoint, Arc::clone(&vocabulary)).and_then(|defaults| {
        defaults.check()?;
        Ok(defaults)
    });
    let defaults = defaults.map_err(|error| problems.push(error.to_string())).ok();
    let ends = defaults.as_ref().map_or(&[][..], Defaults::end_tokens_in_files);
    let start = config.bos_token_id.iter().map(|id| ("bos_token_id", id));
    let named = start.chain(ends.iter().map(|id| ("eos_token_id", id)));
    let named = named.filter(|(_, id)| !config.has_token(**id));
    let beyond =
        named.map(|(name, id)| format!("{name} {id} is outside the vocabulary of {vocab_size} tokens"));
    let mut beyond: Vec<String> = beyond.collect();
    match tokenizer {
        // Ids outside the vocabulary are harmless without a tokenizer, because no text is generated.
        // transformers writes its default ids even into small configurations.
        Err(WeightsError::NoTokenizer { .. }) if !is_named => {
            beyond.push(NO_TOKENIZER.into());
            beyond
        }
        Err(error) => {
            problems.push(error.to_string());
            beyond
        }
        Ok(tokenizer) => {
            problems.append(&mut beyond);
            problems.extend(vocabulary.foreign_note());
            let padding = vocab_size.saturating_sub(tokenizer.get_vocab_size(true));
            let mut notes = defaults.map_or(Vec::new(), |defaults| vocabulary.notes(defaults.config()));
            if padding > 0 {
                notes.push(format!("{padding} vocabulary rows are padding and have no token"));
            }
            notes
        }
    }
}

fn largest_difference(first: &[f32], second: &[f32]) -> f64 {
    largest(first.iter().zip(second).map(|(a, b)| f64::from(*a) - f64::from(*b)))
}

fn largest_logit(logits: &[f32]) -> f64 {
    largest(logits.iter().copied().map(f64::from))
}
