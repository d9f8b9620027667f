//! Faithfulness of circuits as a function of their size.

use super::graph::{Circuit, Selection};
use super::task::CircuitTask;
use crate::InterpretError;
use crate::error::Result;

/// Fractions of edges at which a [`FaithfulnessCurve`] measures circuits.
///
/// Source: the Mechanistic Interpretability Benchmark (arXiv:2504.13151).
pub const EDGE_SHARES: [f64; 10] = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0];

/// Relative tolerance for sums of the same values in different orders.
const ROUNDING: f32 = 1e-6;

/// One point on a curve: a circuit and its faithfulness.
///
/// Part of a [`FaithfulnessCurve`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CurvePoint {
    /// Fraction of edges selected.
    pub share: f64,
    /// Number of edges selected.
    pub chosen: usize,
    /// Number of selected edges on paths from the input to the logits.
    pub edges: usize,
    /// Metric of the circuit.
    pub value: f32,
    /// Normalized metric: 0 with no edges, 1 with all edges.
    pub faithfulness: f32,
}

/// Faithfulness of circuits at several sizes.
///
/// ```
/// use candle_gpt2_interpret::{CurvePoint, EDGE_SHARES, FaithfulnessCurve};
///
/// let point = |share| CurvePoint { share, chosen: 1, edges: 1, value: 4., faithfulness: 1. };
/// let perfect = FaithfulnessCurve { model: 4., empty: 1., points: EDGE_SHARES.map(point).to_vec() };
/// assert!((perfect.cpr() - 0.999).abs() < 1e-6 && perfect.cmd() == 0.);
/// assert_eq!(perfect.faithfulness(2.5), 0.5);
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct FaithfulnessCurve {
    /// Metric with all edges, equal to the clean prompts' metric.
    pub model: f32,
    /// Metric with no edges, equal to the corrupted prompts' metric.
    pub empty: f32,
    /// Circuits in ascending order of size.
    pub points: Vec<CurvePoint>,
}

impl FaithfulnessCurve {
    /// Normalizes a metric to 0 with no edges and 1 with all edges.
    pub fn faithfulness(&self, value: f32) -> f32 {
        (value - self.empty) / (self.model - self.empty)
    }

    /// Area under the curve over the fraction of edges (circuit performance ratio).
    ///
    /// The area is computed by the trapezoidal rule. It measures how much of the task small circuits perform.
    /// It can exceed 0.999, the area of a perfect curve.
    pub fn cpr(&self) -> f32 {
        self.area(|point| point.faithfulness)
    }

    /// Area between the curve and 1 (circuit-model distance); 0 if every circuit matches the model.
    pub fn cmd(&self) -> f32 {
        self.area(|point| (1.0 - point.faithfulness).abs())
    }

    fn area(&self, height: impl Fn(&CurvePoint) -> f32) -> f32 {
        let trapezoid = |pair: &[CurvePoint]| {
            crate::run::rounded(pair[1].share - pair[0].share) * (height(&pair[0]) + height(&pair[1])) / 2.0
        };
        self.points.windows(2).map(trapezoid).sum()
    }
}

impl CircuitTask<'_> {
    /// Computes the metric with all edges and with no edges.
    ///
    /// # Errors
    /// If [`CircuitTask::values`] fails, or if both metrics are equal.
    pub fn range(&self) -> Result<(f32, f32)> {
        let graph = self.graph();
        let values = self.values(&[Circuit::whole(graph), Circuit::empty(graph)], &|_| ())?;
        let (model, empty) = (values[0], values[1]);
        let (range, largest) = ((model - empty).abs(), model.abs().max(empty.abs()));
        // The comparison is false if the range is NaN, so a NaN range is reported as no difference.
        match range > ROUNDING * largest.max(1.0) {
            true => Ok((model, empty)),
            false => Err(InterpretError::NoDifference { value: model.to_string() }),
        }
    }

    /// Selects circuits by score at each of [`EDGE_SHARES`] and measures their faithfulness.
    ///
    /// The first argument is the result of [`CircuitTask::range`]. Calls `done` with the number of finished
    /// pairs.
    ///
    /// # Errors
    /// See [`Circuit::selected`] and [`CircuitTask::values`].
    pub fn curve(
        &self,
        (model, empty): (f32, f32),
        scores: &[f32],
        selection: Selection,
        done: &dyn Fn(usize),
    ) -> Result<FaithfulnessCurve> {
        let graph = self.graph();
        let mut circuits = Vec::new();
        let chosen = EDGE_SHARES.map(|share| share_of(share, scores.len()));
        for count in chosen {
            circuits.push(Circuit::selected(graph, scores, count, selection)?);
        }
        let values = self.values(&circuits, done)?;
        let mut curve = FaithfulnessCurve { model, empty, points: Vec::new() };
        for (place, share) in EDGE_SHARES.into_iter().enumerate() {
            let (value, edges) = (values[place], circuits[place].edge_count());
            let faithfulness = curve.faithfulness(value);
            curve.points.push(CurvePoint { share, chosen: chosen[place], edges, value, faithfulness });
        }
        Ok(curve)
    }
}

/// Returns the fraction `share` of `count` edges, rounded down.
#[expect(clippy::cast_possible_truncation, reason = "a fraction of a count fits into usize")]
#[expect(clippy::cast_sign_loss, reason = "fractions are positive")]
fn share_of(share: f64, count: usize) -> usize {
    (share * count as f64) as usize
}
