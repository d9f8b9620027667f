//! Circuits of tasks: the edges of a model that carry its behavior on pairs of prompts.
//!
//! ```text
//! graph    sources, destinations, edges; circuits and their selection by score
//! inputs   separate inputs for each destination, forward and backward
//! task     pairs of prompts: scores of edges by gradients, values of circuits by runs, ACDC
//! curve    faithfulness by size
//! ```

mod curve;
mod graph;
mod inputs;
mod task;

pub use curve::{CurvePoint, EDGE_SHARES, FaithfulnessCurve};
pub use graph::{Circuit, Edge, EdgeDestination, EdgeGraph, EdgeSource, EdgeSpans, Selection};
pub use task::{CircuitMetric, CircuitTask, EdgeMethod, PromptPair};
