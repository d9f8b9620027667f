//! Choices by their names, the same wherever they are written.

use candle_gpt2_interpret::{By, CircuitMetric, LensValue, Measure, Selection};
#[cfg(feature = "clap")]
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use serde::de::Error;
use serde::{Deserialize, Deserializer};

use crate::error::{Result, wrong};

/// One of few values that have names.
///
/// ```
/// use candle_gpt2_look::{Method, Named, Numbers, Parts, named};
///
/// assert_eq!(Parts::of_name("head"), Some(Parts::Head));
/// assert_eq!(Numbers::NAMES[1].name, "transformer-lens");
/// assert_eq!(named::<Method>("method", "gradient")?, Method::Gradient);
/// let told = named::<Parts>("unit", "brain").err().ok_or("it is known")?.to_string();
/// assert_eq!(told, "`unit`: expected component, layer, head or neuron, found \"brain\"");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub trait Named: Copy + PartialEq + Send + Sync + Sized + 'static {
    /// Each value with its name and what it is.
    const NAMES: &'static [Name<Self>];

    /// The value of this name.
    fn of_name(name: &str) -> Option<Self> {
        Self::NAMES.iter().find(|known| known.name == name).map(|known| known.value)
    }
}

/// A value with its name.
///
/// Listed in [`Named::NAMES`].
#[derive(Debug, Clone, Copy)]
pub struct Name<T> {
    /// How it is written: `head-and-position`.
    pub name: &'static str,
    /// The value.
    pub value: T,
    /// What it is, in a line.
    pub meaning: &'static str,
}

/// The value that an option names.
///
/// # Errors
/// When there is none of this name; the message lists those that there are.
///
/// See [`Named`] for an example.
pub fn named<T: Named>(option: &str, name: &str) -> Result<T> {
    of_name(name).map_err(|error| wrong(format!("`{option}`: {error}")))
}

fn of_name<T: Named>(name: &str) -> std::result::Result<T, String> {
    T::of_name(name).ok_or_else(|| {
        let names: Vec<&str> = T::NAMES.iter().map(|known| known.name).collect();
        let (last, rest) = names.split_last().unwrap_or((&"", &[]));
        format!("expected {} or {last}, found {name:?}", rest.join(", "))
    })
}

/// Reads a choice by its name.
pub(crate) fn choice<'de, D: Deserializer<'de>, T: Named>(
    deserializer: D,
) -> std::result::Result<T, D::Error> {
    let name = String::deserialize(deserializer)?;
    of_name(&name).map_err(D::Error::custom)
}

/// Reads a choice that need not be made.
pub(crate) fn some_choice<'de, D: Deserializer<'de>, T: Named>(
    deserializer: D,
) -> std::result::Result<Option<T>, D::Error> {
    let name = Option::<String>::deserialize(deserializer)?;
    name.map(|name| of_name(&name).map_err(D::Error::custom)).transpose()
}

/// Reads a choice at a command line, whose help lists them all.
#[cfg(feature = "clap")]
pub(crate) fn choices<T: Named>() -> impl TypedValueParser<Value = T> {
    let names = T::NAMES.iter().map(|known| PossibleValue::new(known.name).help(known.meaning));
    PossibleValuesParser::new(names).try_map(|name| of_name(&name))
}

const fn name<T>(name: &'static str, value: T, meaning: &'static str) -> Name<T> {
    Name { name, value, meaning }
}

/// Whose numbers are wanted.
///
/// See [`Named`] for an example.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Numbers {
    /// Those of the checkpoint as it is.
    #[default]
    Raw,
    /// Those that TransformerLens' compatibility mode shows of it.
    TransformerLens,
}

impl Named for Numbers {
    const NAMES: &'static [Name<Self>] = &[
        name("raw", Self::Raw, "As the checkpoint has them"),
        name("transformer-lens", Self::TransformerLens, "As TransformerLens' compatibility mode shows them"),
    ];
}

/// The parts that a prediction is divided into.
///
/// See [`Named`] for an example.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Parts {
    /// Both embeddings, and attention and MLP of each layer.
    #[default]
    Component,
    /// The residual stream on its way.
    Layer,
    /// Each head, and all else.
    Head,
    /// Each neuron, and all else.
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

/// How the weight of a token is found.
///
/// See [`Named`] for an example.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Method {
    /// Integrated gradients.
    #[default]
    Integrated,
    /// The gradient times the embedding.
    InputTimesGradient,
    /// The gradient.
    Gradient,
}

impl Named for Method {
    const NAMES: &'static [Name<Self>] = &[
        name("integrated", Self::Integrated, "Integrated gradients"),
        name("input-x-gradient", Self::InputTimesGradient, "The gradient times the embedding"),
        name("gradient", Self::Gradient, "The gradient"),
    ];
}

/// How the edges of a circuit are found.
///
/// See [`Named`] for an example.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum CircuitMethod {
    /// The gradient of the clean run.
    Eap,
    /// The mean gradient on the way from the corrupted input to the clean one.
    #[default]
    EapIg,
    /// The mean of the gradients of both runs.
    CleanCorrupted,
    /// The gradient of the clean run, with the positions or spans of both ends of an edge.
    PositionAware,
    /// A run without each edge.
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
            "As eap, with the positions of both ends of an edge, or the spans that the data names",
        ),
        name("acdc", Self::Acdc, "One run without each edge, from the logits back; for small models"),
    ];
}

/// A task whose circuit is known.
///
/// See [`Named`] for an example.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DataTask {
    /// Who gets it.
    Ioi,
    /// Which number may follow.
    GreaterThan,
    /// He or she.
    Gender,
}

impl Named for DataTask {
    const NAMES: &'static [Name<Self>] = &[
        name(
            "ioi",
            Self::Ioi,
            "Indirect object identification: which of two people gets what the other gives",
        ),
        name("greater-than", Self::GreaterThan, "Which years, or numbers in words, may follow another"),
        name("gender", Self::Gender, "He or she, after a profession or a name"),
    ];
}

impl Named for CircuitMetric {
    const NAMES: &'static [Name<Self>] = &[
        name(
            "logit-diff",
            Self::LogitDifference,
            "Logit of the answer minus that of the token it is compared with; means if there are several",
        ),
        name(
            "prob-diff",
            Self::ProbabilityDifference,
            "Probability of all answers minus that of all tokens they are compared with",
        ),
        name("kl", Self::Divergence, "Kullback-Leibler divergence from the model's prediction, in nats"),
    ];
}

impl Named for Selection {
    const NAMES: &'static [Name<Self>] = &[
        name(
            "greedy",
            Self::Greedy,
            "From the logits back: the strongest edge into a part of the circuit so far",
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
        name("next", Self::Next, "Log-probability of the token that follows in the text"),
        name("rank", Self::Rank, "How many tokens are more probable than the watched one"),
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

impl Named for By {
    const NAMES: &'static [Name<Self>] = &[
        name("layer", Self::Layer, "The whole layer at once"),
        name("position", Self::Position, "Each position"),
        name("head", Self::Head, "Each head, at all positions"),
        name("head-and-position", Self::HeadAndPosition, "Each head at each position"),
    ];
}
