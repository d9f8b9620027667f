//! How much of what a model does its circuits do, by their size.

use super::graph::{Circuit, Selection};
use super::task::CircuitTask;
use crate::InterpretError;
use crate::error::Result;

/// The shares of all edges at which a [`FaithfulnessCurve`] compares circuits. Source: the Mechanistic Interpretability Benchmark (arXiv:2504.13151).
pub const EDGE_SHARES: [f64; 10] = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0];

/// What two sums of the same numbers in another order may differ by.
const ROUNDING: f32 = 1e-6;

/// A circuit of a curve.
///
/// Part of a [`FaithfulnessCurve`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CurvePoint {
    /// The share of edges that were chosen.
    pub share: f64,
    /// How many those are.
    pub chosen: usize,
    /// Those of them on the way from the input to the logits.
    pub edges: usize,
    /// The metric of the circuit.
    pub value: f32,
    /// That as a share of the way from no edge to all.
    pub faithfulness: f32,
}

/// The faithfulness of circuits of several sizes.
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
    /// The metric of all edges: that of the clean prompts.
    pub model: f32,
    /// The metric without any: that of the corrupted prompts.
    pub empty: f32,
    /// The circuits, from small to large.
    pub points: Vec<CurvePoint>,
}

impl FaithfulnessCurve {
    /// A metric as a share of the way from no edge (0) to all (1).
    pub fn faithfulness(&self, value: f32) -> f32 {
        (value - self.empty) / (self.model - self.empty)
    }

    /// The area under the curve over the share of edges, by trapezoids (circuit performance ratio): how much of the task small circuits do.
    /// It can pass that of a perfect curve, 0.999.
    pub fn cpr(&self) -> f32 {
        self.area(|point| point.faithfulness)
    }

    /// The area between the curve and 1 (circuit-model distance): 0 if every circuit does what the model does.
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
    /// The metric of all edges and of none.
    ///
    /// # Errors
    /// As [`CircuitTask::values`]; and when both are the same.
    pub fn range(&self) -> Result<(f32, f32)> {
        let graph = self.graph();
        let values = self.values(&[Circuit::whole(graph), Circuit::empty(graph)], &|_| ())?;
        let (model, empty) = (values[0], values[1]);
        let (range, largest) = ((model - empty).abs(), model.abs().max(empty.abs()));
        // Not a number is no difference either.
        match range > ROUNDING * largest.max(1.0) {
            true => Ok((model, empty)),
            false => Err(InterpretError::NoDifference { value: model.to_string() }),
        }
    }

    /// Chooses circuits at each of [`EDGE_SHARES`] by scores, and measures them between the two ends that [`CircuitTask::range`] gives.
    /// `done` is called with the number of pairs done.
    ///
    /// # Errors
    /// As [`Circuit::selected`] and [`CircuitTask::values`].
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

/// So many of `count` edges, rounded down.
#[expect(clippy::cast_possible_truncation, reason = "a share of a count fits into one")]
#[expect(clippy::cast_sign_loss, reason = "shares are positive")]
fn share_of(share: f64, count: usize) -> usize {
    (share * count as f64) as usize
}
