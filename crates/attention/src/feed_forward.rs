//! The position-wise feed-forward part of a block: `activation(x W₁ + b₁) W₂ + b₂`.

use candle_core::{Result, Tensor};
use candle_gpt2_kernels::{Activation, DEVIATION, Linear, ParameterSize, ParameterSource};

use crate::{AttentionError, Pass, SiteKind};

/// Two linear layers with an activation between them, applied to each token by itself.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_gpt2_attention::{FeedForward, Pass};
/// use candle_gpt2_kernels::{Activation, DEVIATION, Linear, ParameterSource};
///
/// let expand = Linear::new(Tensor::ones((3, 2), DType::F32, &Device::Cpu)?, None)?; // 2 wide to 3 wide
/// let contract = Linear::new(Tensor::ones((2, 3), DType::F32, &Device::Cpu)?, None)?;
/// let layer = FeedForward::new(expand, contract, Activation::Relu)?;
/// let x = Tensor::new(&[[[1f32, 2.], [-1., -2.]]], &Device::Cpu)?;
/// assert_eq!(layer.forward_with(&x, &mut Pass::inference())?.to_vec3::<f32>()?, [[[9., 9.], [0., 0.]]]);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct FeedForward {
    expand: Linear,
    contract: Linear,
    activation: Activation,
    inner_dropout: f64,
}

impl FeedForward {
    /// The part from its layers: `expand` `(width, inner)`, `contract` `(inner, width)`.
    ///
    /// # Errors
    /// When the layers do not fit to each other.
    pub fn new(expand: Linear, contract: Linear, activation: Activation) -> Result<Self> {
        if contract.in_features() != expand.out_features() {
            return Err(AttentionError::WidthMismatch {
                what: "the second feed-forward layer's input",
                expected: expand.out_features(),
                found: contract.in_features(),
            }
            .into());
        }
        Ok(Self { expand, contract, activation, inner_dropout: 0.0 })
    }

    /// The part from GPT-2's parameters `c_fc` and `c_proj` below the path of `vb`. In a [`VarBuilder`](candle_nn::VarBuilder) their
    /// weights lie `(in, out)`, as [`Linear::load_conv1d`] has them.
    ///
    /// # Errors
    /// When a parameter is missing or has another shape.
    pub fn load(
        width: usize,
        inner: usize,
        activation: Activation,
        vb: impl ParameterSource,
    ) -> Result<Self> {
        let layer = |input, output, name| Linear::load_conv1d(input, output, DEVIATION, vb.below(name));
        Self::new(layer(width, inner, "c_fc")?, layer(inner, width, "c_proj")?, activation)
    }

    /// The same part with dropout after the activation, in training.
    pub fn with_inner_dropout(mut self, rate: f64) -> Self {
        self.inner_dropout = rate;
        self
    }

    /// Runs both layers.
    ///
    /// Shows [`SiteKind::MlpPre`] and [`SiteKind::MlpPost`] to the observer of the pass.
    ///
    /// # Shapes
    /// `x` `(B, T, width)`; returns the same.
    ///
    /// # Errors
    /// When the width of `x` differs.
    pub fn forward_with(&self, x: &Tensor, pass: &mut Pass) -> Result<Tensor> {
        self.contract.forward(&self.hidden(x, pass)?)
    }

    /// `residual + dropout(forward_with(x))`; `rate` is that of the output.
    ///
    /// Shows [`SiteKind::MlpPre`], [`SiteKind::MlpPost`] and [`SiteKind::MlpOut`] to the observer of the pass.
    ///
    /// # Shapes
    /// `x` and `residual` `(B, T, width)`; returns the same.
    ///
    /// # Errors
    /// When the shapes do not fit, or `rate` is outside `[0, 1]`.
    pub fn add_to(&self, residual: &Tensor, x: &Tensor, rate: f64, pass: &mut Pass) -> Result<Tensor> {
        let hidden = self.hidden(x, pass)?;
        pass.add_to(residual, &self.contract, &hidden, SiteKind::MlpOut, rate)
    }

    /// The input of the second layer, `(B, T, inner)`.
    fn hidden(&self, x: &Tensor, pass: &mut Pass) -> Result<Tensor> {
        let hidden = if pass.wants(SiteKind::MlpPre) {
            self.activation.forward(&pass.show(SiteKind::MlpPre, self.expand.forward(x)?)?)?
        } else {
            self.expand.forward_activated(x, self.activation)?
        };
        let hidden = pass.show(SiteKind::MlpPost, hidden)?;
        pass.dropout(hidden, self.inner_dropout)
    }

    /// The first layer, `width` to `inner`.
    pub fn expand(&self) -> &Linear {
        &self.expand
    }

    /// The second layer, `inner` to `width`.
    pub fn contract(&self) -> &Linear {
        &self.contract
    }

    /// The size of the two layers' parameters.
    pub fn size(&self) -> ParameterSize {
        self.expand.size() + self.contract.size()
    }
}
