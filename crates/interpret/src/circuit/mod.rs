//! Task circuits: the edges that carry a model's behavior on pairs of prompts.
//!
//! ```text
//! graph    sources, destinations, edges; circuits and their selection by score
//! inputs   separate inputs for each destination, forward and backward
//! task     pairs of prompts: edge scores from gradients, circuit metrics from runs, ACDC
//! curve    faithfulness by size
//! ```

mod curve;
mod graph;
mod inputs;
mod task;

pub use curve::{CurvePoint, EDGE_SHARES, FaithfulnessCurve};
pub use graph::{Circuit, Edge, EdgeDestination, EdgeGraph, EdgeSource, EdgeSpans, Selection};
pub use task::{CircuitMetric, CircuitTask, EdgeMethod, PromptPair};
