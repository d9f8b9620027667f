#![doc = include_str!("../README.md")]
//!
//! Start with [`Run`]. A [`Site`](candle_gpt2::Site) names a hook point. [`Processing`] converts activations
//! to the values that TransformerLens shows.

#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

mod circuit;
mod control_vector;
mod dictionary;
mod dictionary_config;
mod encoder;
mod error;
mod feature_examples;
mod feature_logits;
mod file_tensors;
mod frozen;
mod gradients;
mod graph;
mod heads;
mod inspection;
mod lens;
mod names;
mod observers;
mod patching;
mod patterns;
mod processing;
mod recording;
mod replacement;
mod residual;
mod run;
mod splice;
mod steering;
mod transcoders;
mod tuned_lens;
mod widths;

pub use circuit::{
    Circuit, CircuitMetric, CircuitTask, CurvePoint, EDGE_SHARES, Edge, EdgeDestination, EdgeGraph,
    EdgeMethod, EdgeSource, EdgeSpans, FaithfulnessCurve, PromptPair, Selection,
};
pub use control_vector::ControlVector;
pub use dictionary::{Dictionary, ReconstructionQuality};
pub use dictionary_config::{
    ActivationVariant, DictionaryConfig, DictionaryFormat, LatentActivation, TranscoderOutput, openai_site,
};
pub use error::InterpretError;
pub use feature_examples::{FeatureExample, FeatureExamples, FeatureSummary, Histogram};
pub use feature_logits::{FeatureLogits, direction_logits, feature_logits};
pub use file_tensors::FileError;
pub use gradients::{
    ActivationGradient, Gradients, Saliency, TokenWeights, estimated_grid, gradients_under, site_gradients,
    token_weights,
};
pub use graph::{AttributionEdge, AttributionGraph, PrunedGraph};
pub use heads::{
    HeadScores, IgnoredEntries, PatternSimilarity, PerHead, TargetPattern, detect_heads, head_scores,
    random_rows,
};
pub use inspection::{Inspection, Positions};
pub use lens::{
    LensCell, LensLayer, LensOptions, LensValue, lens_cells, lens_label, lens_logits, lens_logits_at,
    lens_logprobs, logit_lens,
};
pub use names::{SiteError, named_site, named_sites};
pub use observers::{Ablate, Add, Chain, Edit, Place, ProjectOut, Record, Replace};
pub use patching::{
    Ablation, Grid, GridAxis, Head, Patching, Receiver, ablated, ablation_grid, replaced_grid,
};
pub use patterns::Patterns;
pub use processing::{Processing, center};
pub use recording::Recording;
pub use replacement::{Edges, FeatureAtPosition, FeatureChange, GraphNode, GraphOptions, ReplacementModel};
pub use residual::{
    Attribution, Direction, Stack, Unit, accumulated_residuals, attribute, decomposed_residual, head_results,
};
pub use run::{Measure, Metric, Run, record_rows, residual_sites, stop_after};
pub use splice::Splice;
pub use steering::Steering;
pub use transcoders::{TranscoderInput, TranscoderLayer, Transcoders, TranscodersConfig};
pub use tuned_lens::TunedLens;
pub use widths::{site_width, token_rows, token_shape};
