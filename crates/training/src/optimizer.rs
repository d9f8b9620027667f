//! Optimizers, whose running means can be saved: AdamW, and Muon for the blocks' matrices.
//!
//! [Muon](https://kellerjordan.github.io/posts/muon/) updates a matrix with its orthogonalized momentum. Five
//! steps of a Newton-Schulz iteration bring all singular values near 1. Updates are scaled to the root mean
//! square of AdamW's, so that both optimizers share one learning rate ("Muon is Scalable for LLM Training",
//! arXiv:2502.16982). This is equivalent to `torch.optim.Muon` with `adjust_lr_fn="match_rms_adamw"`.

use std::str::FromStr;

use candle_core::{Result, Tensor, Var};
use candle_gpt2::decays;
use candle_gpt2_arithmetic::AdamWStep;
use candle_gpt2_kernels::{Linear, adamw_step, gradient_norm};
use candle_gpt2_weights::UnknownName;
use serde::{Deserialize, Serialize};

use crate::{Parameters, TrainingError};

/// Epsilon added to the gradient norm for clipping, as in PyTorch's `clip_grad_norm_`.
const CLIP_EPSILON: f64 = 1e-6;
/// Decay rate of Muon's momentum.
const MOMENTUM: f64 = 0.95;

/// Optimizer for training.
///
/// ```
/// use candle_gpt2_training::OptimizerKind;
///
/// assert_eq!("muon".parse(), Ok(OptimizerKind::Muon));
/// ```
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OptimizerKind {
    /// AdamW for every parameter.
    #[default]
    AdamW,
    /// Muon for the matrices of the blocks, AdamW for embeddings, biases and norms.
    Muon,
}

impl OptimizerKind {
    /// All optimizers with their names.
    pub const NAMES: [(&'static str, Self); 2] = [("adamw", Self::AdamW), ("muon", Self::Muon)];

    /// Whether Muon updates this parameter.
    fn orthogonalizes(self, name: &str, shape: &[usize]) -> bool {
        self == Self::Muon && shape.len() == 2 && name.starts_with("h.")
    }
}

impl FromStr for OptimizerKind {
    type Err = UnknownName;

    fn from_str(name: &str) -> std::result::Result<Self, UnknownName> {
        UnknownName::find(&Self::NAMES, name)
    }
}

/// State of the optimizer: two running means per parameter, in the order of the parameters.
///
/// Muon uses only the first. The [`Trainer`](crate::Trainer) runs its steps.
#[derive(Debug)]
pub struct Optimizer {
    kind: OptimizerKind,
    means: Vec<(Var, Var)>,
    steps_done: u64,
}

impl Optimizer {
    /// Creates a state with zero means.
    ///
    /// # Errors
    /// If allocation fails on the device.
    pub fn new(kind: OptimizerKind, parameters: &Parameters) -> Result<Self> {
        let zeros = |variable: &Var| Var::from_tensor(&variable.zeros_like()?);
        let means = parameters.iter().map(|(_, variable)| Ok((zeros(variable)?, zeros(variable)?)));
        Ok(Self { kind, means: means.collect::<Result<_>>()?, steps_done: 0 })
    }

    /// Sets the number of steps that the running means include.
    pub(crate) fn set_steps_done(&mut self, steps_done: u64) {
        self.steps_done = steps_done;
    }

    /// Number of completed steps.
    pub fn steps_done(&self) -> u64 {
        self.steps_done
    }

    /// Returns the running means of gradient and squared gradient, in the order of the parameters.
    pub fn means(&self) -> impl Iterator<Item = (&Var, &Var)> {
        self.means.iter().map(|(mean, square)| (mean, square))
    }

    /// Clips the gradients to a global norm of `clip` and performs one step.
    ///
    /// `gradients` are in the order of the parameters. This method sets `numbers.step` and
    /// `numbers.gradient_factor`. Returns the norm before clipping.
    ///
    /// # Errors
    /// If the norm is not finite; the parameters are then unchanged.
    pub fn step(
        &mut self,
        parameters: &Parameters,
        gradients: &[Tensor],
        clip: Option<f64>,
        numbers: AdamWStep,
    ) -> std::result::Result<f64, TrainingError> {
        let norm = gradient_norm(gradients)?;
        let step = self.steps_done + 1;
        if !norm.is_finite() {
            return Err(TrainingError::NotFinite { step, what: "gradient", last_checkpoint: None });
        }
        let gradient_factor = clip.map_or(1.0, |clip| (clip / (norm + CLIP_EPSILON)).min(1.0));
        for (((name, parameter), gradient), (mean, square)) in
            parameters.iter().zip(gradients).zip(&self.means)
        {
            let weight_decay = if decays(parameter.dims()) { numbers.weight_decay } else { 0.0 };
            let numbers = AdamWStep { step, gradient_factor, weight_decay, ..numbers };
            if self.kind.orthogonalizes(name, parameter.dims()) {
                muon_step(parameter, gradient, mean, &numbers)?;
            } else {
                adamw_step(parameter, gradient, mean, square, &numbers)?;
            }
        }
        self.steps_done = step;
        Ok(norm)
    }
}

/// Performs one step of Muon with Nesterov momentum for the matrix `parameter`.
fn muon_step(parameter: &Var, gradient: &Tensor, momentum: &Var, numbers: &AdamWStep) -> Result<()> {
    /// Root mean square of AdamW's updates.
    const ADAMW_RMS: f64 = 0.2;
    let between =
        |from: &Tensor, to: &Tensor, share: f64| from.affine(1.0 - share, 0.0)? + to.affine(share, 0.0)?;
    let gradient = gradient.affine(numbers.gradient_factor, 0.0)?;
    momentum.set(&between(momentum, &gradient, 1.0 - MOMENTUM)?)?;
    let update = orthogonalized(&between(&gradient, momentum, MOMENTUM)?)?;
    let (rows, columns) = parameter.dims2()?;
    let size = numbers.learning_rate * ADAMW_RMS * (rows.max(columns) as f64).sqrt();
    let decayed = parameter.affine(1.0 - numbers.learning_rate * numbers.weight_decay, 0.0)?;
    parameter.set(&(decayed - update.affine(size, 0.0)?)?)
}

/// Orthogonalizes a matrix: keeps its singular vectors and brings its singular values close to 1.
///
/// This runs five steps of the Newton-Schulz iteration with Muon's coefficients. Each step multiplies the
/// matrix by a polynomial in its Gram matrix. The Gram matrix has only the smaller dimension of the matrix, so
/// multiplying the polynomials with each other first is cheaper.
fn orthogonalized(matrix: &Tensor) -> Result<Tensor> {
    const STEPS: usize = 5;
    const COEFFICIENTS: [f64; 3] = [3.4445, -4.775, 2.0315];
    const SMALLEST_NORM: f64 = 1e-7;
    let (rows, columns) = matrix.dims2()?;
    let turned = |matrix: &Tensor| if rows > columns { matrix.t()?.contiguous() } else { Ok(matrix.clone()) };
    let norm = gradient_norm(&[matrix.contiguous()?])?.max(SMALLEST_NORM);
    let x = turned(matrix)?.affine(1.0 / norm, 0.0)?;
    // The kernels of linear layers are faster than candle's matmul. Polynomials in a symmetric matrix are
    // symmetric.
    let times_transposed = |left: &Tensor, right: &Tensor| Linear::new(right.clone(), None)?.forward(left);
    let [a, b, c] = COEFFICIENTS;
    let identity = Tensor::eye(rows.min(columns), x.dtype(), x.device())?;
    let scaled_identity = |factor: f64| identity.affine(factor, 0.0);
    let mut gram = times_transposed(&x, &x)?;
    let mut product = identity.clone();
    for _ in 0..STEPS {
        let linear = (scaled_identity(b)? + gram.affine(c, 0.0)?)?;
        let polynomial = (scaled_identity(a)? + times_transposed(&gram, &linear)?)?;
        product = times_transposed(&polynomial, &product)?;
        gram = times_transposed(&times_transposed(&polynomial, &gram)?, &polynomial)?;
    }
    turned(&times_transposed(&product, &x.t()?)?)
}
