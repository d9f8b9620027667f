#![doc = include_str!("../README.md")]
//!
//! # Analyses
//!
//! | type | result |
//! |---|---|
//! | [`Attention`], [`HeadKinds`] | attention patterns; heads that attend to the previous token or complete repetitions |
//! | [`Lens`] | prediction of each layer, also with a tuned lens |
//! | [`Attribute`] | contribution of each layer, head or neuron to a logit |
//! | [`Ablate`] | effect of removing heads on a prediction |
//! | [`Patch`], [`Estimate`], [`PathPatching`] | parts or paths that make two prompts differ |
//! | [`CircuitSearch`] | edges between heads and MLPs that carry a task; [`TaskData`] generates the prompt pairs |
//! | [`Saliency`], [`Neurons`], [`Features`] | influence of each token; where a neuron or a feature is active |
//! | [`Graph`] | features of the MLPs that carry a prediction, and their effects on each other |
//!
//! Each implements [`Look`]: its fields are the options, `check` validates them, `look` returns [`Analysis`],
//! and `at` does both. Options parse from JSON, and with the feature `clap` from flags. [`Activations`]
//! records hook points to a file, [`OneHead`] computes an attention weight step by step, [`NextTokens`] lists
//! candidates for the next token, and [`Steer`] changes generation.
#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

mod ablate;
mod analysis;
mod attending;
mod attention;
mod attribute;
mod cache;
mod circuit;
mod compared;
mod control_vector;
mod dictionaries;
mod error;
mod features;
mod files;
mod frontend;
mod gradients;
mod graph;
mod graph_features;
mod head;
mod lens;
mod look;
mod metric;
mod named;
mod neurons;
mod next;
mod pairs;
mod patch;
mod path;
mod reader;
mod saliency;
mod steer;
mod strongest;
mod task_data;
mod transcoders;

pub use ablate::{Ablate, CheckedAblate, Replacement};
pub use analysis::{Analysis, Details, LensDetails};
pub use attending::{CheckedHeadKinds, HeadKinds};
pub use attention::Attention;
pub use attribute::Attribute;
pub use cache::{Activations, CacheFormat, Cached, CheckedActivations};
pub use circuit::{CheckedCircuit, CircuitSearch, EdgeAmount};
pub use compared::ComparedTexts;
pub use control_vector::read_control_vector;
pub use dictionaries::{StoredDictionary, built_in_dictionaries, dictionary_from_bytes, read_dictionary};
pub use error::LookError;
pub use features::{CheckedFeatures, Features};
pub use gradients::PredictionGradients;
pub use graph::{CheckedGraph, FeatureSetting, Graph};
pub use head::{CheckedHead, HeadSteps, OneHead};
pub use lens::{CheckedLens, Lens};
pub use look::{Look, LookSubject};
pub use metric::{CheckedMetric, MetricOptions};
pub use named::{CircuitMethod, DataTask, Method, Name, Named, Numbers, Parts, named};
pub use neurons::Neurons;
pub use next::{NextToken, NextTokens, PrefixCache};
pub use pairs::{PairData, TextPair};
pub use patch::{CheckedPatch, Estimate, Patch, Patched};
pub use path::{CheckedPath, PathPatching};
pub use reader::{Heads, Neuron, Ranges, Reader, Text, TokenChoice};
pub use saliency::Saliency;
pub use steer::{CheckedSteer, Steer, SteeringSource};
pub use strongest::{feature_in_text, strongest_features};
pub use task_data::TaskData;
pub use transcoders::read_transcoders;
