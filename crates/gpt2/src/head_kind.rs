//! The model's head: its kind and its labels.
//!
//! Source: the classes of transformers' `modeling_gpt2.py`, which a `config.json` names under `architectures`, and the keys that
//! they read. What only another head reads is not looked at.

use candle_gpt2_kernels::Activation;

/// The kinds of heads, by the classes of transformers.
///
/// ```
/// use candle_gpt2::HeadKind;
///
/// let kind = HeadKind::from_class_name("GPT2ForSequenceClassification").expect("one of HeadKind::CLASSES");
/// assert_eq!(kind, HeadKind::SequenceClassification);
/// assert!(kind.has_labels() && !kind.has_language_model());
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum HeadKind {
    /// The next token: `GPT2LMHeadModel`, and `GPT2Model`, whose head is the token embedding.
    #[default]
    LanguageModel,
    /// One label for each text, from its last token: `GPT2ForSequenceClassification`.
    SequenceClassification,
    /// One label for each token: `GPT2ForTokenClassification`.
    TokenClassification,
    /// The next token, and one of several texts: `GPT2DoubleHeadsModel`.
    DoubleHeads,
}

impl HeadKind {
    /// The classes that are known, with what they are; the first one of a kind is the one that is written.
    pub const CLASSES: [(&'static str, Self); 5] = [
        ("GPT2LMHeadModel", Self::LanguageModel),
        ("GPT2Model", Self::LanguageModel),
        ("GPT2ForSequenceClassification", Self::SequenceClassification),
        ("GPT2ForTokenClassification", Self::TokenClassification),
        ("GPT2DoubleHeadsModel", Self::DoubleHeads),
    ];

    /// The kind of a class of transformers, if it is one of [`HeadKind::CLASSES`].
    pub fn from_class_name(name: &str) -> Option<Self> {
        Self::CLASSES.iter().find(|(known, _)| *known == name).map(|(_, kind)| *kind)
    }

    /// The class of transformers.
    pub fn class_name(self) -> &'static str {
        Self::CLASSES.iter().find(|(_, kind)| *kind == self).map_or("", |(name, _)| name)
    }

    /// The kind that alone has this parameter (named as in [`expected_parameters`](crate::expected_parameters)): how a checkpoint
    /// whose configuration names no class is recognised by its tensors.
    pub fn of_parameter(name: &str) -> Option<Self> {
        match name {
            "score.weight" => Some(Self::SequenceClassification),
            "classifier.weight" | "classifier.bias" => Some(Self::TokenClassification),
            "multiple_choice_head.summary.weight" | "multiple_choice_head.summary.bias" => {
                Some(Self::DoubleHeads)
            }
            _ => None,
        }
    }

    /// Whether it gives logits over the vocabulary.
    pub fn has_language_model(self) -> bool {
        matches!(self, Self::LanguageModel | Self::DoubleHeads)
    }

    /// Whether it gives logits over labels.
    pub fn has_labels(self) -> bool {
        matches!(self, Self::SequenceClassification | Self::TokenClassification)
    }
}

/// The meaning of the logits over labels: `problem_type`.
/// [`Gpt2Config::problem`](crate::Gpt2Config::problem) says which a model has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProblemType {
    /// Numbers, not probabilities.
    Regression,
    /// One label is right: probabilities by softmax.
    SingleLabelClassification,
    /// Any number of labels are right: a probability for each by the sigmoid.
    MultiLabelClassification,
}

impl ProblemType {
    /// Every type with its name in a `config.json`.
    pub const NAMES: [(&'static str, Self); 3] = [
        ("regression", Self::Regression),
        ("single_label_classification", Self::SingleLabelClassification),
        ("multi_label_classification", Self::MultiLabelClassification),
    ];

    /// The name in a `config.json`.
    pub fn name(self) -> &'static str {
        Self::NAMES.iter().find(|(_, kind)| *kind == self).map_or("", |(name, _)| name)
    }
}

/// How the multiple choice head of [`HeadKind::DoubleHeads`] makes a logit of a text: the keys `summary_…`.
/// Part of a [`Gpt2Config`](crate::Gpt2Config).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Summary {
    /// What of the text it reads: `summary_type`.
    pub token: SummaryType,
    /// Applied to the logit: `summary_activation`.
    pub activation: Option<Activation>,
    /// Dropout rate before the projection, in training: `summary_first_dropout`.
    pub first_dropout: f64,
    /// Dropout rate after the activation, in training: `summary_last_dropout`.
    pub last_dropout: f64,
}

impl Default for Summary {
    fn default() -> Self {
        Self { token: SummaryType::ClsIndex, activation: None, first_dropout: 0.1, last_dropout: 0.0 }
    }
}

/// The token of a text that the multiple choice head reads.
/// Part of a configuration's [`Summary`]; [`Gpt2DoubleHeads`](crate::Gpt2DoubleHeads) reads it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SummaryType {
    /// The token that the caller names, or the last one: `cls_index`.
    ClsIndex,
    /// The last token.
    Last,
    /// The first token.
    First,
    /// The mean of all tokens.
    Mean,
}

impl SummaryType {
    /// Every type with its name in a `config.json`.
    pub const NAMES: [(&'static str, Self); 4] =
        [("cls_index", Self::ClsIndex), ("last", Self::Last), ("first", Self::First), ("mean", Self::Mean)];

    /// The name in a `config.json`.
    pub fn name(self) -> &'static str {
        Self::NAMES.iter().find(|(_, kind)| *kind == self).map_or("", |(name, _)| name)
    }
}
