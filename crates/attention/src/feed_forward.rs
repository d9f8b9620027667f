//! Position-wise feed-forward network of a block: `activation(x W₁ + b₁) W₂ + b₂`.

use candle_core::{Result, Tensor};
use candle_gpt2_kernels::{Activation, Linear, ParameterSize, ParameterSource};

use crate::{AttentionError, Pass, SiteKind};

/// Two linear layers with an activation in between, applied to each token separately.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_gpt2_attention::{FeedForward, Pass};
/// use candle_gpt2_kernels::{Activation, Linear};
///
/// let expand = Linear::new(Tensor::ones((3, 2), DType::F32, &Device::Cpu)?, None)?; // width 2 to width 3
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
    /// Creates the network from its layers: `expand` maps `width` to `inner`, and `contract` maps back.
    ///
    /// # Errors
    /// If the widths of the layers do not match.
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

    /// Loads GPT-2's parameters `c_fc` and `c_proj` under the path of `vb`.
    ///
    /// In a [`VarBuilder`](candle_nn::VarBuilder), their weights are `(in, out)`, see
    /// [`Linear::load_conv1d`].
    ///
    /// # Errors
    /// If a parameter is missing or has the wrong shape.
    pub fn load(
        width: usize,
        inner: usize,
        activation: Activation,
        vb: impl ParameterSource,
    ) -> Result<Self> {
        let layer = |input, output, name| Linear::load_conv1d(input, output, true, vb.below(name));
        Self::new(layer(width, inner, "c_fc")?, layer(inner, width, "c_proj")?, activation)
    }

    /// Sets the dropout rate that is applied after the activation in training.
    pub fn with_inner_dropout(mut self, rate: f64) -> Self {
        self.inner_dropout = rate;
        self
    }

    /// Runs both layers.
    ///
    /// The pass's observer can see [`SiteKind::MlpPre`] and [`SiteKind::MlpPost`].
    ///
    /// # Shapes
    /// `x` `(B, T, width)`; returns the same shape.
    ///
    /// # Errors
    /// If the width of `x` does not match.
    pub fn forward_with(&self, x: &Tensor, pass: &mut Pass) -> Result<Tensor> {
        self.contract.forward(&self.hidden(x, pass)?)
    }

    /// Computes `residual + dropout(forward_with(x))`, with dropout rate `rate`.
    ///
    /// The pass's observer can see [`SiteKind::MlpPre`], [`SiteKind::MlpPost`] and [`SiteKind::MlpOut`].
    ///
    /// # Shapes
    /// `x` and `residual` `(B, T, width)`; returns the same shape.
    ///
    /// # Errors
    /// If the shapes do not match, or `rate` is outside `[0, 1]`.
    pub fn add_to(&self, residual: &Tensor, x: &Tensor, rate: f64, pass: &mut Pass) -> Result<Tensor> {
        let hidden = self.hidden(x, pass)?;
        pass.add_to(residual, &self.contract, &hidden, SiteKind::MlpOut, rate)
    }

    /// Computes the input of the second layer, `(B, T, inner)`.
    fn hidden(&self, x: &Tensor, pass: &mut Pass) -> Result<Tensor> {
        let hidden = if pass.wants(SiteKind::MlpPre) {
            self.activation.forward(&pass.show(SiteKind::MlpPre, self.expand.forward(x)?)?)?
        } else {
            self.expand.forward_activated(x, self.activation)?
        };
        let hidden = pass.show(SiteKind::MlpPost, hidden)?;
        pass.dropout(hidden, self.inner_dropout)
    }

    /// First layer, which maps `width` to `inner`.
    pub fn expand(&self) -> &Linear {
        &self.expand
    }

    /// Second layer, which maps `inner` to `width`.
    pub fn contract(&self) -> &Linear {
        &self.contract
    }

    /// Total size of the parameters in both layers.
    pub fn size(&self) -> ParameterSize {
        self.expand.size() + self.contract.size()
    }
}
