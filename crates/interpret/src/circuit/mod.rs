//! Circuits of tasks: which of a model's edges carry what it does on pairs of prompts.
//!
//! ```text
//! graph    sources, destinations, edges; circuits, and how they are chosen by scores
//! inputs   what each destination reads by itself, forwards and on the way back
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
