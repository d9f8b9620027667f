//! Kinds of model heads, and their options.
//!
//! Source: the classes in transformers' `modeling_gpt2.py`, which `config.json` names under `architectures`,
//! and the keys that they read. Keys that only other heads read are ignored.

use candle_gpt2_kernels::Activation;

/// Kinds of heads, one per transformers class.
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
    /// Next-token prediction: `GPT2LMHeadModel`, and `GPT2Model`, whose head is the token embedding.
    #[default]
    LanguageModel,
    /// One label per sequence, from its last token: `GPT2ForSequenceClassification`.
    SequenceClassification,
    /// One label per token: `GPT2ForTokenClassification`.
    TokenClassification,
    /// Next-token prediction and multiple choice: `GPT2DoubleHeadsModel`.
    DoubleHeads,
}

impl HeadKind {
    /// Supported transformers classes; saved configurations use the first name of each kind.
    pub const CLASSES: [(&'static str, Self); 5] = [
        ("GPT2LMHeadModel", Self::LanguageModel),
        ("GPT2Model", Self::LanguageModel),
        ("GPT2ForSequenceClassification", Self::SequenceClassification),
        ("GPT2ForTokenClassification", Self::TokenClassification),
        ("GPT2DoubleHeadsModel", Self::DoubleHeads),
    ];

    /// Returns the kind for a transformers class, if it is one of [`HeadKind::CLASSES`].
    pub fn from_class_name(name: &str) -> Option<Self> {
        Self::CLASSES.iter().find(|(known, _)| *known == name).map(|(_, kind)| *kind)
    }

    /// Name of the transformers class.
    pub fn class_name(self) -> &'static str {
        Self::CLASSES.iter().find(|(_, kind)| *kind == self).map_or("", |(name, _)| name)
    }

    /// Returns the only kind with this parameter, or `None`.
    ///
    /// Names come from [`expected_parameters`](crate::expected_parameters). This identifies the head of a
    /// checkpoint whose configuration names no class.
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

    /// Whether the model outputs logits over the vocabulary.
    pub fn has_language_model(self) -> bool {
        matches!(self, Self::LanguageModel | Self::DoubleHeads)
    }

    /// Whether the model outputs logits over labels.
    pub fn has_labels(self) -> bool {
        matches!(self, Self::SequenceClassification | Self::TokenClassification)
    }
}

/// Interpretation of logits over labels: `problem_type`.
///
/// [`Gpt2Config::problem`](crate::Gpt2Config::problem) returns the interpretation for a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProblemType {
    /// The logits are numbers, not probabilities.
    Regression,
    /// Exactly one label is correct; softmax gives the probabilities.
    SingleLabelClassification,
    /// Any number of labels are correct; sigmoid gives a probability for each.
    MultiLabelClassification,
}

impl ProblemType {
    /// All types with their names in `config.json`.
    pub const NAMES: [(&'static str, Self); 3] = [
        ("regression", Self::Regression),
        ("single_label_classification", Self::SingleLabelClassification),
        ("multi_label_classification", Self::MultiLabelClassification),
    ];

    /// Name in `config.json`.
    pub fn name(self) -> &'static str {
        Self::NAMES.iter().find(|(_, kind)| *kind == self).map_or("", |(name, _)| name)
    }
}

/// Options for the choice head of [`HeadKind::DoubleHeads`]: the keys `summary_…`.
///
/// Part of a [`Gpt2Config`](crate::Gpt2Config).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Summary {
    /// Token that the head reads: `summary_type`.
    pub token: SummaryType,
    /// Activation function applied to the logit: `summary_activation`.
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

/// Token in a row that the choice head reads.
///
/// Part of a configuration's [`Summary`], used by [`Gpt2DoubleHeads`](crate::Gpt2DoubleHeads).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SummaryType {
    /// Token with the index passed by the caller, or the last token: `cls_index`.
    ClsIndex,
    /// Last token.
    Last,
    /// First token.
    First,
    /// Mean of all tokens.
    Mean,
}

impl SummaryType {
    /// All types with their names in `config.json`.
    pub const NAMES: [(&'static str, Self); 4] =
        [("cls_index", Self::ClsIndex), ("last", Self::Last), ("first", Self::First), ("mean", Self::Mean)];

    /// Name in `config.json`.
    pub fn name(self) -> &'static str {
        Self::NAMES.iter().find(|(_, kind)| *kind == self).map_or("", |(name, _)| name)
    }
}
