//! Classifiers that label a text, label each of its tokens, or rank several texts.

use std::ops::Range;
use std::sync::Arc;

use candle_core::{DType, Device};
use candle_gpt2::{
    Gpt2Config, Gpt2DoubleHeads, Gpt2ForSequenceClassification, Gpt2ForTokenClassification, HeadKind, Pass,
    ProblemType,
};
use candle_gpt2_generation::{GenerationConfig, GenerationError, LongPrompt};
use candle_gpt2_weights::{Checkpoint, LoadOptions};
use serde::{Serialize, Serializer};

use crate::{EngineError, ReadJob, Vocabulary};

/// Default batch size, large enough to amortize the cost of reading the weights.
///
/// See [`Classifier`] for an example.
pub const CLASSIFIED_AT_ONCE: usize = 8;

/// A classification model in memory with its tokenizer.
///
/// A clone shares both.
///
/// ```
/// use candle_gpt2_engine::{CLASSIFIED_AT_ONCE, Classification, ModelOptions, Question, Silent};
///
/// # let folder = candle_gpt2_testing::fixture_path("heads/sequence");
/// let options = ModelOptions { model: folder, ..ModelOptions::default() };
/// let classifier = options.open_classifier(&Silent)?.load_classifier(&Silent)?;
/// let question = |text| Question::of_text(classifier.vocabulary(), text, None);
/// let questions = [question("the sea")?, question("a wood")?];
/// for questions in questions.chunks(CLASSIFIED_AT_ONCE) {
///     for classification in classifier.classify(questions)? {
///         let Classification::Labels { labels } = classification else { panic!("this one labels texts") };
///         let sum: f64 = labels.iter().map(|label| label.score).sum();
///         assert!((sum - 1.0).abs() < 1e-6);
///         assert!(labels[0].logit >= labels[1].logit, "labels are sorted by logit");
///     }
/// }
/// # Ok::<(), candle_gpt2_engine::EngineError>(())
/// ```
#[derive(Debug, Clone)]
#[doc(alias = "AutoModelForSequenceClassification")]
pub struct Classifier {
    head: Head,
    vocabulary: Arc<Vocabulary>,
    weights: &'static str,
}

#[derive(Debug, Clone)]
enum Head {
    Texts(Gpt2ForSequenceClassification),
    Tokens(Gpt2ForTokenClassification),
    Choices(Gpt2DoubleHeads),
}

/// Input of a classifier, as token ids: one text, or several choices.
///
/// ```
/// use candle_gpt2_engine::{ModelOptions, Question, Silent};
///
/// # let folder = candle_gpt2_testing::fixture_path("heads/sequence");
/// let options = ModelOptions { model: folder, ..ModelOptions::default() };
/// let opened = options.open_classifier(&Silent)?;
/// let question = Question::of_ids(opened.vocabulary(), vec![5, 6, 7], None)?;
/// assert_eq!(question.keep_last(2).rows().collect::<Vec<_>>(), [[6, 7]]);
/// assert!(Question::of_choices(opened.vocabulary(), "a", &["b".into()], None).is_err(), "this model has labels");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Question {
    rows: Vec<Row>,
    has_choices: bool,
}

/// Token ids of one text.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Row {
    ids: Vec<u32>,
    /// Character range of each token in the text; empty if only token ids were supplied.
    char_ranges: Vec<Range<usize>>,
    /// Text of the choice, if the row is a choice.
    choice: Option<String>,
}

/// Classification result for one question.
///
/// Returned by [`Classifier::classify`].
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(untagged)]
pub enum Classification {
    /// Labels for a text.
    Labels {
        /// All labels, best first.
        labels: Vec<Label>,
    },
    /// Labels for each token in a text.
    Tokens {
        /// Tokens in text order.
        tokens: Vec<LabeledToken>,
    },
    /// Ranking of several texts.
    Choices {
        /// All choices, best first.
        choices: Vec<RankedChoice>,
    },
}

/// A label and its score, as reported by transformers' pipelines.
///
/// Part of a [`Classification`], which [`Classifier::classify`] returns.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Label {
    /// Index of the label.
    #[serde(skip)]
    pub id: usize,
    /// Name of the label.
    pub label: String,
    /// Score as in transformers' pipelines, usually the softmax over all labels.
    ///
    /// It is the sigmoid of the logit for [`ProblemType::MultiLabelClassification`] and for a model with a
    /// single label, and the logit itself for [`ProblemType::Regression`].
    pub score: f64,
    /// Output of the model before the softmax or sigmoid.
    pub logit: f32,
}

/// A token and its labels.
///
/// Part of a [`Classification`], which [`Classifier::classify`] returns.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct LabeledToken {
    /// Token id.
    pub id: u32,
    /// Text of the token; incomplete characters become U+FFFD.
    pub text: String,
    /// Index in the text of the token's first character after any leading space.
    ///
    /// Absent if token ids were supplied.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub start: Option<usize>,
    /// Index of the first character after the token.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub end: Option<usize>,
    /// All labels, best first.
    pub labels: Vec<Label>,
}

/// A choice and its score.
///
/// Part of a [`Classification`], which [`Classifier::classify`] returns.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RankedChoice {
    /// Zero-based index of the choice in the input.
    pub index: usize,
    /// Text after the prompt; absent if token ids were supplied.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub text: Option<String>,
    /// Softmax probability among all choices.
    pub score: f64,
    /// Output of the model before the softmax.
    pub logit: f32,
}

impl Question {
    /// Encodes a text, keeping only its last `keep_last` tokens if it exceeds the context.
    ///
    /// # Errors
    /// If the model ranks choices, there is no tokenizer, it cannot encode the text, or the text exceeds the
    /// context and `keep_last` is `None`.
    pub fn of_text(
        vocabulary: &Vocabulary,
        text: &str,
        keep_last: Option<usize>,
    ) -> Result<Self, EngineError> {
        expect_labels(vocabulary)?;
        let (ids, char_ranges) = vocabulary.encode_with_places(text)?;
        let row = Row::new(vocabulary, ids, char_ranges, keep_last)?;
        Ok(Self { rows: vec![row], has_choices: false })
    }

    /// Creates a question from the token ids of a text.
    ///
    /// # Errors
    /// Same as [`Question::of_text`], and if an id is outside the vocabulary.
    pub fn of_ids(
        vocabulary: &Vocabulary,
        ids: Vec<u32>,
        keep_last: Option<usize>,
    ) -> Result<Self, EngineError> {
        expect_labels(vocabulary)?;
        let row = Row::new(vocabulary, ids, Vec::new(), keep_last)?;
        Ok(Self { rows: vec![row], has_choices: false })
    }

    /// Encodes choices that may follow a prompt.
    ///
    /// # Errors
    /// Same as [`Question::of_text`] for each choice, and if `choices` is empty or the model assigns labels.
    pub fn of_choices(
        vocabulary: &Vocabulary,
        prompt: &str,
        choices: &[String],
        keep_last: Option<usize>,
    ) -> Result<Self, EngineError> {
        expect_choices(vocabulary, choices.len())?;
        let row = |choice: &String| -> Result<Row, EngineError> {
            let ids = vocabulary.encode(&format!("{prompt}{choice}"))?;
            let row = Row::new(vocabulary, ids, Vec::new(), keep_last)?;
            Ok(Row { choice: Some(choice.clone()), ..row })
        };
        Ok(Self { rows: choices.iter().map(row).collect::<Result<_, _>>()?, has_choices: true })
    }

    /// Creates a question from the token ids of each choice.
    ///
    /// # Errors
    /// Same as [`Question::of_choices`], and if an id is outside the vocabulary.
    pub fn of_choice_ids(
        vocabulary: &Vocabulary,
        choices: Vec<Vec<u32>>,
        keep_last: Option<usize>,
    ) -> Result<Self, EngineError> {
        expect_choices(vocabulary, choices.len())?;
        let row = |ids| Row::new(vocabulary, ids, Vec::new(), keep_last);
        Ok(Self { rows: choices.into_iter().map(row).collect::<Result<_, _>>()?, has_choices: true })
    }

    /// Truncates each text to its last `tokens` tokens, but to no fewer than one.
    pub fn keep_last(mut self, tokens: usize) -> Self {
        for Row { ids, char_ranges, .. } in &mut self.rows {
            ids.drain(..ids.len().saturating_sub(tokens.max(1)));
            char_ranges.drain(..char_ranges.len().saturating_sub(ids.len()));
        }
        self
    }

    /// Adds `chars` to the tokens' positions, for a text that is the tail of a longer one.
    pub fn shifted_by(mut self, chars: usize) -> Self {
        for range in self.rows.iter_mut().flat_map(|row| &mut row.char_ranges) {
            *range = range.start + chars..range.end + chars;
        }
        self
    }

    /// Returns the token ids of each text, as the model receives them.
    pub fn rows(&self) -> impl ExactSizeIterator<Item = &[u32]> {
        self.rows.iter().map(|row| row.ids.as_slice())
    }
}

/// Serializes to a list of token ids, or to one list for each choice.
impl Serialize for Question {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self.rows.first() {
            Some(row) if !self.has_choices => row.ids.serialize(serializer),
            _ => serializer.collect_seq(self.rows()),
        }
    }
}

impl Row {
    fn new(
        vocabulary: &Vocabulary,
        ids: Vec<u32>,
        mut char_ranges: Vec<Range<usize>>,
        keep_last: Option<usize>,
    ) -> Result<Self, EngineError> {
        let long_prompt = keep_last.map_or(LongPrompt::Refuse, |last| LongPrompt::Keep { head: 0, last });
        let ids = vocabulary.prompt(ids, &GenerationConfig { long_prompt, ..GenerationConfig::default() })?;
        char_ranges.drain(..char_ranges.len().saturating_sub(ids.len()));
        Ok(Self { ids, char_ranges, choice: None })
    }
}

fn expect_labels(vocabulary: &Vocabulary) -> Result<(), EngineError> {
    match vocabulary.config().head {
        HeadKind::DoubleHeads => {
            let what = "this model ranks choices and has no labels; pass choices";
            Err(EngineError::Options { what: what.into() })
        }
        _ => Ok(()),
    }
}

fn expect_choices(vocabulary: &Vocabulary, count: usize) -> Result<(), EngineError> {
    let what = match vocabulary.config().head {
        HeadKind::DoubleHeads if count > 0 => return Ok(()),
        HeadKind::DoubleHeads => "expected at least one choice, found none",
        _ => "this model labels texts and cannot rank choices; pass a text without choices",
    };
    Err(EngineError::Options { what: what.into() })
}

impl Classifier {
    pub(crate) fn load(
        checkpoint: &Checkpoint,
        vocabulary: Arc<Vocabulary>,
        weights: &'static str,
        options: &LoadOptions,
        progress: &ReadJob<'_>,
    ) -> Result<Self, EngineError> {
        checkpoint.check_classifier()?;
        let head = match checkpoint.config().head {
            HeadKind::TokenClassification => Head::Tokens(checkpoint.load_head(options, progress)?),
            HeadKind::DoubleHeads => Head::Choices(checkpoint.load_head(options, progress)?),
            // Models without a classification head are rejected above.
            HeadKind::SequenceClassification | HeadKind::LanguageModel => {
                Head::Texts(checkpoint.load_head(options, progress)?)
            }
        };
        Ok(Self { head, vocabulary, weights })
    }

    /// Configuration of the model, including the labels.
    pub fn config(&self) -> &Gpt2Config {
        self.vocabulary.config()
    }

    /// Vocabulary of the model.
    pub fn vocabulary(&self) -> &Arc<Vocabulary> {
        &self.vocabulary
    }

    /// Device that the model runs on.
    pub fn device(&self) -> &Device {
        self.transformer().device()
    }

    /// Weight type, such as `q8`: the requested type, otherwise the stored one.
    pub fn weight_type(&self) -> &'static str {
        self.weights
    }

    /// Number of distinct parameters.
    pub fn parameter_count(&self) -> usize {
        self.size().count
    }

    /// Size of the weights in memory, in bytes.
    pub fn weight_bytes(&self) -> usize {
        self.size().bytes
    }

    fn size(&self) -> candle_gpt2::ParameterSize {
        match &self.head {
            Head::Texts(model) => model.size(),
            Head::Tokens(model) => model.size(),
            Head::Choices(model) => model.size(),
        }
    }

    fn transformer(&self) -> &candle_gpt2::Gpt2Model {
        match &self.head {
            Head::Texts(model) => model.transformer(),
            Head::Tokens(model) => model.transformer(),
            Head::Choices(model) => model.transformer(),
        }
    }

    /// Classifies questions as one batch.
    ///
    /// The batch does not change the results, except for rounding. Split long lists into batches of about
    /// [`CLASSIFIED_AT_ONCE`] questions.
    ///
    /// # Errors
    /// If the device fails, a logit is not finite, or the computation is
    /// [interrupted](candle_gpt2_kernels::interruptible).
    pub fn classify(&self, questions: &[Question]) -> Result<Vec<Classification>, EngineError> {
        let rows: Vec<&[u32]> = questions.iter().flat_map(Question::rows).collect();
        if rows.is_empty() {
            return Ok(Vec::new());
        }
        let mut logits = self.logits(&rows)?.into_iter();
        let mut next = |count| logits.by_ref().take(count).collect::<Vec<_>>();
        let mut classified = Vec::with_capacity(questions.len());
        for Question { rows, .. } in questions {
            classified.push(match &self.head {
                Head::Texts(_) => Classification::Labels { labels: self.labels(&next(1).concat()) },
                Head::Tokens(_) => {
                    let tokens = rows.iter().flat_map(|row| self.tokens(row, &next(row.ids.len())));
                    Classification::Tokens { tokens: tokens.collect() }
                }
                Head::Choices(_) => {
                    Classification::Choices { choices: ranked(rows, &next(rows.len()).concat()) }
                }
            });
        }
        Ok(classified)
    }

    /// Returns the logits of a batch of rows.
    ///
    /// There is one list of label logits for each row, or for each token of all rows. With a choice head,
    /// each row has a single logit.
    pub(crate) fn logits(&self, rows: &[&[u32]]) -> Result<Vec<Vec<f32>>, EngineError> {
        let pass = &mut Pass::inference();
        let logits = match &self.head {
            Head::Texts(model) => model.forward(rows, pass), // (R, L)
            Head::Tokens(model) => model.forward(rows, pass).and_then(|logits| logits.squeeze(0)), // (ΣT, L)
            Head::Choices(model) => {
                model.forward_choices(rows, None, pass).and_then(|logits| logits.unsqueeze(1)) // (R, 1)
            }
        };
        let logits = logits.and_then(|logits| logits.to_dtype(DType::F32)?.to_vec2::<f32>());
        let logits = logits.map_err(GenerationError::from)?;
        match logits.iter().flatten().all(|logit| logit.is_finite()) {
            true => Ok(logits),
            false => Err(GenerationError::NotFinite.into()),
        }
    }

    /// Converts logits to labels, best first.
    fn labels(&self, logits: &[f32]) -> Vec<Label> {
        let config = self.config();
        let scores = scores(config, logits);
        let names = config.id2label.iter().zip(scores).zip(logits).enumerate();
        let mut labels: Vec<Label> = names
            .map(|(id, ((label, score), logit))| Label { id, label: label.clone(), score, logit: *logit })
            .collect();
        labels.sort_by(|a, b| b.logit.total_cmp(&a.logit));
        labels
    }

    /// Creates the labeled tokens of a row from the logits of each token.
    fn tokens(&self, row: &Row, logits: &[Vec<f32>]) -> Vec<LabeledToken> {
        let token = |(index, (id, logits)): (usize, (&u32, &Vec<f32>))| {
            let range = row.char_ranges.get(index);
            LabeledToken {
                id: *id,
                text: String::from_utf8_lossy(&self.vocabulary.token_bytes(*id)).into_owned(),
                start: range.map(|range| range.start),
                end: range.map(|range| range.end),
                labels: self.labels(logits),
            }
        };
        row.ids.iter().zip(logits).enumerate().map(token).collect()
    }
}

/// Ranks the choices by their logits, best first.
fn ranked(rows: &[Row], logits: &[f32]) -> Vec<RankedChoice> {
    let choices = rows.iter().zip(logits).zip(softmax(logits)).enumerate();
    let mut choices: Vec<RankedChoice> = choices
        .map(|(index, ((row, logit), score))| RankedChoice {
            index,
            text: row.choice.clone(),
            score,
            logit: *logit,
        })
        .collect();
    choices.sort_by(|a, b| b.logit.total_cmp(&a.logit));
    choices
}

/// Computes label scores from logits in the same way as transformers' pipelines.
///
/// Source: `TextClassificationPipeline.postprocess`, and `TokenClassificationPipeline.postprocess`, which
/// supports only the softmax.
fn scores(config: &Gpt2Config, logits: &[f32]) -> Vec<f64> {
    let sigmoid = |logit: &f32| 1.0 / (1.0 + libm::exp(-f64::from(*logit)));
    match config.problem_type {
        _ if config.head == HeadKind::TokenClassification => softmax(logits),
        Some(ProblemType::Regression) => logits.iter().map(|logit| f64::from(*logit)).collect(),
        Some(ProblemType::MultiLabelClassification) => logits.iter().map(sigmoid).collect(),
        _ if logits.len() == 1 => logits.iter().map(sigmoid).collect(),
        _ => softmax(logits),
    }
}

fn softmax(logits: &[f32]) -> Vec<f64> {
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let powers: Vec<f64> =
        logits.iter().map(|logit| libm::exp(f64::from(*logit) - f64::from(largest))).collect();
    let sum: f64 = powers.iter().sum();
    powers.into_iter().map(|power| power / sum).collect()
}
