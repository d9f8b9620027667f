//! Named choices, with the same names in every interface.

use candle_gpt2_interpret::{CircuitMetric, GridAxis, LensValue, Measure, Selection};
#[cfg(feature = "clap")]
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use serde::de::Error;
use serde::{Deserialize, Deserializer};

use crate::error::{Result, invalid_option};

/// Enumeration with named values.
///
/// ```
/// use candle_gpt2_look::{Method, Named, Numbers, Parts, named};
///
/// assert_eq!(Parts::of_name("head"), Some(Parts::Head));
/// assert_eq!(Numbers::NAMES[1].name, "transformer-lens");
/// assert_eq!(named::<Method>("method", "gradient")?, Method::Gradient);
/// let message = named::<Parts>("unit", "brain").err().ok_or("expected an error")?.to_string();
/// assert_eq!(message, "`unit`: expected component, layer, head or neuron, found \"brain\"");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub trait Named: Copy + PartialEq + Send + Sync + Sized + 'static {
    /// Values with their names and descriptions.
    const NAMES: &'static [Name<Self>];

    /// Returns the value with this name.
    fn of_name(name: &str) -> Option<Self> {
        Self::NAMES.iter().find(|known| known.name == name).map(|known| known.value)
    }
}

/// A value with its name and description.
///
/// Listed in [`Named::NAMES`].
#[derive(Debug, Clone, Copy)]
pub struct Name<T> {
    /// Name as users write it, such as `head-and-position`.
    pub name: &'static str,
    /// Enum value.
    pub value: T,
    /// One-line description.
    pub meaning: &'static str,
}

/// Parses the named value of an option.
///
/// See [`Named`] for an example.
///
/// # Errors
/// If no value has this name; the message lists the valid names.
pub fn named<T: Named>(option: &str, name: &str) -> Result<T> {
    of_name(name).map_err(|error| invalid_option(format!("`{option}`: {error}")))
}

fn of_name<T: Named>(name: &str) -> std::result::Result<T, String> {
    T::of_name(name).ok_or_else(|| {
        let names: Vec<&str> = T::NAMES.iter().map(|known| known.name).collect();
        let (last, rest) = names.split_last().unwrap_or((&"", &[]));
        format!("expected {} or {last}, found {name:?}", rest.join(", "))
    })
}

/// Deserializes a choice by its name.
pub(crate) fn choice<'de, D: Deserializer<'de>, T: Named>(
    deserializer: D,
) -> std::result::Result<T, D::Error> {
    let name = String::deserialize(deserializer)?;
    of_name(&name).map_err(D::Error::custom)
}

/// Deserializes an optional choice by its name.
pub(crate) fn some_choice<'de, D: Deserializer<'de>, T: Named>(
    deserializer: D,
) -> std::result::Result<Option<T>, D::Error> {
    let name = Option::<String>::deserialize(deserializer)?;
    name.map(|name| of_name(&name).map_err(D::Error::custom)).transpose()
}

/// Creates a command-line parser for a choice, with the values listed in the help.
#[cfg(feature = "clap")]
pub(crate) fn choices<T: Named>() -> impl TypedValueParser<Value = T> {
    let names = T::NAMES.iter().map(|known| PossibleValue::new(known.name).help(known.meaning));
    PossibleValuesParser::new(names).try_map(|name| of_name(&name))
}

const fn name<T>(name: &'static str, value: T, meaning: &'static str) -> Name<T> {
    Name { name, value, meaning }
}

/// Convention for activations and heads: the checkpoint's or TransformerLens'.
///
/// See [`Named`] for an example.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Numbers {
    /// Values of the unmodified checkpoint.
    #[default]
    Raw,
    /// Values as in TransformerLens' compatibility mode.
    TransformerLens,
}

impl Named for Numbers {
    const NAMES: &'static [Name<Self>] = &[
        name("raw", Self::Raw, "Unmodified, as in the checkpoint"),
        name("transformer-lens", Self::TransformerLens, "As in TransformerLens' compatibility mode"),
    ];
}

/// Parts that a prediction is divided into.
///
/// See [`Named`] for an example.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Parts {
    /// Both embeddings, and the attention and MLP of each layer.
    #[default]
    Component,
    /// Residual stream at each layer.
    Layer,
    /// Each head, plus a remainder for everything else.
    Head,
    /// Each neuron, plus a remainder for everything else.
    Neuron,
}

impl Named for Parts {
    const NAMES: &'static [Name<Self>] = &[
        name("component", Self::Component, "Both embeddings, and attention and MLP of each layer"),
        name("layer", Self::Layer, "The residual stream at each layer: what it would predict there"),
        name("head", Self::Head, "Each head, and everything else"),
        name("neuron", Self::Neuron, "Each neuron, and everything else"),
    ];
}

/// Method for computing token saliency.
///
/// See [`Named`] for an example.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Method {
    /// Integrated gradients.
    #[default]
    Integrated,
    /// Gradient times the embedding.
    InputTimesGradient,
    /// Plain gradient.
    Gradient,
}

impl Named for Method {
    const NAMES: &'static [Name<Self>] = &[
        name("integrated", Self::Integrated, "Integrated gradients"),
        name("input-x-gradient", Self::InputTimesGradient, "The gradient times the embedding"),
        name("gradient", Self::Gradient, "The gradient"),
    ];
}

/// Method for scoring the edges of a circuit.
///
/// See [`Named`] for an example.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum CircuitMethod {
    /// Gradient of the clean run (EAP).
    Eap,
    /// Mean gradient between the corrupted and the clean input (EAP-IG).
    #[default]
    EapIg,
    /// Mean of the clean and the corrupted run's gradients.
    CleanCorrupted,
    /// Gradient of the clean run, separately for each position or span at an edge's ends.
    PositionAware,
    /// One run per edge, without that edge.
    Acdc,
}

impl Named for CircuitMethod {
    const NAMES: &'static [Name<Self>] = &[
        name("eap", Self::Eap, "Edge attribution patching: the gradient of the clean run"),
        name(
            "eap-ig",
            Self::EapIg,
            "EAP with integrated gradients: the mean gradient between the corrupted and the clean input",
        ),
        name(
            "clean-corrupted",
            Self::CleanCorrupted,
            "The mean of the gradients of the clean and the corrupted run",
        ),
        name(
            "position-aware",
            Self::PositionAware,
            "Like eap, but separately for the positions, or named spans, of both ends of an edge",
        ),
        name("acdc", Self::Acdc, "One run without each edge, from the logits backward; for small models"),
    ];
}

/// A task with a known circuit.
///
/// See [`Named`] for an example.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DataTask {
    /// Indirect object identification.
    Ioi,
    /// Completion with a year or number that is greater than an earlier one.
    GreaterThan,
    /// Choice between "he" and "she".
    Gender,
}

impl Named for DataTask {
    const NAMES: &'static [Name<Self>] = &[
        name(
            "ioi",
            Self::Ioi,
            "Indirect object identification: which of two people receives what the other gives",
        ),
        name(
            "greater-than",
            Self::GreaterThan,
            "Years, or numbers in words, that must be greater than an earlier one",
        ),
        name("gender", Self::Gender, "He or she, after a profession or a name"),
    ];
}

impl Named for CircuitMetric {
    const NAMES: &'static [Name<Self>] = &[
        name(
            "logit-diff",
            Self::LogitDifference,
            "Answer's logit minus the comparison token's logit; mean logits if there are several tokens",
        ),
        name(
            "prob-diff",
            Self::ProbabilityDifference,
            "Total probability of the answers minus total probability of the comparison tokens",
        ),
        name("kl", Self::Divergence, "Kullback-Leibler divergence from the model's prediction, in nats"),
    ];
}

impl Named for Selection {
    const NAMES: &'static [Name<Self>] = &[
        name(
            "greedy",
            Self::Greedy,
            "Backward from the logits: repeatedly the strongest edge into the circuit so far",
        ),
        name("top", Self::Strongest, "The strongest edges anywhere"),
    ];
}

impl Named for LensValue {
    const NAMES: &'static [Name<Self>] = &[
        name("probability", Self::Probability, "Probability of the most probable token"),
        name("entropy", Self::Entropy, "Entropy of the prediction, in nats"),
        name(
            "divergence",
            Self::Divergence,
            "Kullback-Leibler divergence from the last layer's prediction, in nats",
        ),
        name("next", Self::Next, "Log probability of the next token in the text"),
        name("rank", Self::Rank, "Number of tokens more probable than the watched one"),
        name("watched-probability", Self::WatchedProbability, "Probability of the watched token"),
    ];
}

impl Named for Measure {
    const NAMES: &'static [Name<Self>] = &[
        name("logit", Self::Logit, "The logit"),
        name("log-probability", Self::LogProbability, "The natural logarithm of the probability"),
        name("probability", Self::Probability, "The probability"),
    ];
}

impl Named for GridAxis {
    const NAMES: &'static [Name<Self>] = &[
        name("layer", Self::Layer, "The whole layer at once"),
        name("position", Self::Position, "Each position"),
        name("head", Self::Head, "Each head, at all positions"),
        name("head-and-position", Self::HeadAndPosition, "Each head at each position"),
    ];
}
