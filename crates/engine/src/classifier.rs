//! Which label a text has, or each of its tokens, or which of several texts is right: models with transformers' heads for these.

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

use crate::{EngineError, Vocabulary, Watched};

/// Rows that are computed at once by default: enough to share the reading of the weights.
///
/// See [`Classifier`] for an example.
pub const CLASSIFIED_AT_ONCE: usize = 8;

/// A model in memory that tells labels or choices, with its tokenizer. A clone shares both.
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
///         assert!(labels[0].logit >= labels[1].logit, "the best first");
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

/// A text, or choices, in tokens: what a classifier is asked about.
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

/// One text in tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Row {
    ids: Vec<u32>,
    /// The characters of the text that each token stands for; none if the text is not known.
    places: Vec<Range<usize>>,
    /// The choice, if the row is one.
    choice: Option<String>,
}

/// A classifier's result for a question.
///
/// Given by [`Classifier::classify`].
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(untagged)]
pub enum Classification {
    /// The labels of a text.
    Labels {
        /// Every label, the best first.
        labels: Vec<Label>,
    },
    /// The labels of each token of a text.
    Tokens {
        /// The tokens in their order.
        tokens: Vec<LabelledToken>,
    },
    /// Which of several texts is right.
    Choices {
        /// Every choice, the best first.
        choices: Vec<RankedChoice>,
    },
}

/// A label and its score, in the words of transformers' pipelines.
///
/// Part of a [`Classification`], which [`Classifier::classify`] gives.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Label {
    /// Its number.
    #[serde(skip)]
    pub id: usize,
    /// Its name.
    pub label: String,
    /// The probability that transformers' pipelines report: the softmax over all labels; for a text that can have several labels
    /// ([`ProblemType::MultiLabelClassification`]), or a model with a single one, the sigmoid of the logit. For a
    /// [`ProblemType::Regression`] the logit itself.
    pub score: f64,
    /// What the model computes.
    pub logit: f32,
}

/// A token and its labels.
///
/// Part of a [`Classification`], which [`Classifier::classify`] gives.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct LabelledToken {
    /// Its id.
    pub id: u32,
    /// What it writes, a part of a character as U+FFFD.
    pub text: String,
    /// Where it begins in the text, in characters from 0, without a space in front of a word; absent if ids were given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub start: Option<usize>,
    /// Where it ends: the place of the first character after it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub end: Option<usize>,
    /// Every label, the best first.
    pub labels: Vec<Label>,
}

/// A choice, and how well it fits.
///
/// Part of a [`Classification`], which [`Classifier::classify`] gives.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RankedChoice {
    /// Its place among the choices, from 0.
    pub index: usize,
    /// The text after the prompt; absent if ids were given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub text: Option<String>,
    /// Its probability among all choices, by softmax.
    pub score: f64,
    /// What the model computes.
    pub logit: f32,
}

impl Question {
    /// A text. Of one longer than the context the last `keep_last` tokens are taken.
    ///
    /// # Errors
    /// When the model chooses among texts, there is no tokenizer, it cannot encode the text, or the text is longer than the context
    /// and nothing is kept.
    pub fn of_text(
        vocabulary: &Vocabulary,
        text: &str,
        keep_last: Option<usize>,
    ) -> Result<Self, EngineError> {
        expect_labels(vocabulary)?;
        let (ids, places) = vocabulary.encode_with_places(text)?;
        let row = Row::new(vocabulary, ids, places, keep_last)?;
        Ok(Self { rows: vec![row], has_choices: false })
    }

    /// A text in tokens.
    ///
    /// # Errors
    /// As [`Question::of_text`], and when an id is outside the vocabulary.
    pub fn of_ids(
        vocabulary: &Vocabulary,
        ids: Vec<u32>,
        keep_last: Option<usize>,
    ) -> Result<Self, EngineError> {
        expect_labels(vocabulary)?;
        let row = Row::new(vocabulary, ids, Vec::new(), keep_last)?;
        Ok(Self { rows: vec![row], has_choices: false })
    }

    /// Which of these texts follows a prompt.
    ///
    /// # Errors
    /// As [`Question::of_text`] of each, when there are none, and when the model has labels.
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

    /// Which of these texts is right, in tokens.
    ///
    /// # Errors
    /// As [`Question::of_choices`], and when an id is outside the vocabulary.
    pub fn of_choice_ids(
        vocabulary: &Vocabulary,
        choices: Vec<Vec<u32>>,
        keep_last: Option<usize>,
    ) -> Result<Self, EngineError> {
        expect_choices(vocabulary, choices.len())?;
        let row = |ids| Row::new(vocabulary, ids, Vec::new(), keep_last);
        Ok(Self { rows: choices.into_iter().map(row).collect::<Result<_, _>>()?, has_choices: true })
    }

    /// The same with at most the last `tokens` of each text, and at least one.
    pub fn keep_last(mut self, tokens: usize) -> Self {
        for Row { ids, places, .. } in &mut self.rows {
            ids.drain(..ids.len().saturating_sub(tokens.max(1)));
            places.drain(..places.len().saturating_sub(ids.len()));
        }
        self
    }

    /// The same as the end of a longer text, of which so many characters come before: tokens are placed in the whole.
    pub fn behind(mut self, chars: usize) -> Self {
        for place in self.rows.iter_mut().flat_map(|row| &mut row.places) {
            *place = place.start + chars..place.end + chars;
        }
        self
    }

    /// The tokens of each text, as the model gets them.
    pub fn rows(&self) -> impl ExactSizeIterator<Item = &[u32]> {
        self.rows.iter().map(|row| row.ids.as_slice())
    }
}

/// Its token ids: a list of them, or one for each choice.
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
        mut places: Vec<Range<usize>>,
        keep_last: Option<usize>,
    ) -> Result<Self, EngineError> {
        let long_prompt = keep_last.map_or(LongPrompt::Refuse, |last| LongPrompt::Keep { head: 0, last });
        let ids = vocabulary.prompt(ids, &GenerationConfig { long_prompt, ..GenerationConfig::default() })?;
        places.drain(..places.len().saturating_sub(ids.len()));
        Ok(Self { ids, places, choice: None })
    }
}

fn expect_labels(vocabulary: &Vocabulary) -> Result<(), EngineError> {
    match vocabulary.config().head {
        HeadKind::DoubleHeads => {
            let what = "this model chooses among several texts, and has no labels; give it choices";
            Err(EngineError::Options { what: what.into() })
        }
        _ => Ok(()),
    }
}

fn expect_choices(vocabulary: &Vocabulary, count: usize) -> Result<(), EngineError> {
    let what = match vocabulary.config().head {
        HeadKind::DoubleHeads if count > 0 => return Ok(()),
        HeadKind::DoubleHeads => "there are no choices; give at least one text",
        _ => "this model labels texts, and does not choose among several; give it one text at a time",
    };
    Err(EngineError::Options { what: what.into() })
}

impl Classifier {
    pub(crate) fn load(
        checkpoint: &Checkpoint,
        vocabulary: Arc<Vocabulary>,
        weights: &'static str,
        options: &LoadOptions,
        progress: &Watched<'_>,
    ) -> Result<Self, EngineError> {
        checkpoint.check_classifier()?;
        let head = match checkpoint.config().head {
            HeadKind::TokenClassification => Head::Tokens(checkpoint.load_head(options, progress)?),
            HeadKind::DoubleHeads => Head::Choices(checkpoint.load_head(options, progress)?),
            // What has no head for classifying is refused above.
            HeadKind::SequenceClassification | HeadKind::LanguageModel => {
                Head::Texts(checkpoint.load_head(options, progress)?)
            }
        };
        Ok(Self { head, vocabulary, weights })
    }

    /// Its configuration: the labels are in it.
    pub fn config(&self) -> &Gpt2Config {
        self.vocabulary.config()
    }

    /// Its tokens.
    pub fn vocabulary(&self) -> &Arc<Vocabulary> {
        &self.vocabulary
    }

    /// The device that it runs on.
    pub fn device(&self) -> &Device {
        self.transformer().device()
    }

    /// The type of the weights in a word, as `q8`: the one that was asked for, otherwise the stored one.
    pub fn weight_type(&self) -> &'static str {
        self.weights
    }

    /// Number of distinct parameters.
    pub fn parameter_count(&self) -> usize {
        self.size().count
    }

    /// Bytes of the weights as they are held.
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

    /// The results for questions, which are computed together: each has the same numbers as alone, up to rounding. For more than some
    /// [`CLASSIFIED_AT_ONCE`] ask again and again.
    ///
    /// # Errors
    /// When the device fails, or the logits are not numbers; when what computes is [ended](candle_gpt2_kernels::interruptible).
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

    /// The logits of rows that are computed together: over the labels of each row, or of each token of all rows; or the one of each
    /// row.
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

    /// The labels with these logits, the best first.
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

    /// The tokens of a row with the logits of each.
    fn tokens(&self, row: &Row, logits: &[Vec<f32>]) -> Vec<LabelledToken> {
        let token = |(index, (id, logits)): (usize, (&u32, &Vec<f32>))| {
            let place = row.places.get(index);
            LabelledToken {
                id: *id,
                text: String::from_utf8_lossy(&self.vocabulary.token_bytes(*id)).into_owned(),
                start: place.map(|place| place.start),
                end: place.map(|place| place.end),
                labels: self.labels(logits),
            }
        };
        row.ids.iter().zip(logits).enumerate().map(token).collect()
    }
}

/// The choices with these logits, the best first.
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

/// What transformers' pipelines make of the logits over labels.
///
/// Source: `TextClassificationPipeline.postprocess` and `TokenClassificationPipeline.postprocess`, which has softmax alone.
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
