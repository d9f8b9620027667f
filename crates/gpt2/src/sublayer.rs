//! Layers in place of a block's own.

use std::fmt::Debug;
use std::sync::Arc;

use candle_core::{Result, Tensor};
use candle_gpt2_attention::{KvCache, Pass};
use candle_gpt2_kernels::ParameterSize;

/// Layer of your own in place of a block's attention or MLP.
///
/// The block adds the output to its residual stream, after dropout in training. Observers see the output, but
/// no value inside the layer.
///
/// ```
/// use std::sync::Arc;
///
/// use candle_core::{DType, Device, Result, Tensor};
/// use candle_gpt2::{Block, Gpt2Config, Gpt2LMHeadModel, Gpt2Model, KvCache, LayerNorm, Linear, Pass, Sublayer};
/// use candle_nn::{VarBuilder, VarMap};
///
/// /// MLP with a gate, as in newer models.
/// #[derive(Debug)]
/// struct GatedMlp {
///     gate: Linear,
///     expand: Linear,
///     contract: Linear,
/// }
///
/// impl Sublayer for GatedMlp {
///     fn forward(&self, x: &Tensor, _: Option<&mut KvCache>, _: &mut Pass) -> Result<Tensor> {
///         self.contract.forward(&(self.gate.forward(x)?.silu()? * self.expand.forward(x)?)?)
///     }
/// }
///
/// let config = Gpt2Config { vocab_size: 11, n_positions: 8, n_embd: 6, n_layer: 2, n_head: 3, ..Gpt2Config::gpt2() };
/// let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &Device::Cpu);
/// let blocks = (0..2).map(|layer| {
///     let vb = vb.pp("h").pp(layer);
///     let linear = |input, output, name| Linear::load(input, output, false, vb.pp(name));
///     let (gate, expand, contract) = (linear(6, 16, "gate")?, linear(6, 16, "up")?, linear(16, 6, "down")?);
///     Ok(Block::load(&config, layer, vb.clone())?.with_mlp(Arc::new(GatedMlp { gate, expand, contract })))
/// });
/// let wte = Linear::load(6, 11, false, vb.pp("wte"))?;
/// let wpe = vb.pp("wpe").get((8, 6), "weight")?;
/// let norm = LayerNorm::load(6, 1e-5, vb.pp("ln_f"))?;
/// let transformer = Gpt2Model::new(&config, wte.clone(), wpe, blocks.collect::<Result<_>>()?, norm)?;
/// let model = Gpt2LMHeadModel::new(transformer, wte)?;
/// assert_eq!(model.forward(&Tensor::new(&[[1u32, 2, 3]], &Device::Cpu)?)?.dims(), [1, 3, 11]);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub trait Sublayer: Debug + Send + Sync {
    /// Computes the output, which is added to the residual stream.
    ///
    /// The layer in place of attention receives the cache of its block, if the pass has one, and must append
    /// the keys and values of every token to it. [`Pass::causal_mask`] is the mask of the pass. An MLP
    /// receives no cache.
    ///
    /// # Shapes
    /// `x` `(B, T, C)` after the layer norm; returns the same shape.
    ///
    /// # Errors
    /// Any error of the layer, which ends the pass.
    fn forward(&self, x: &Tensor, cache: Option<&mut KvCache>, pass: &mut Pass) -> Result<Tensor>;

    /// Size of the layer's parameters, by default none.
    fn size(&self) -> ParameterSize {
        ParameterSize::default()
    }
}

/// Layers that replace a block's own.
#[derive(Debug, Clone, Default)]
pub(crate) struct OwnLayers {
    pub(crate) attention: Option<Arc<dyn Sublayer>>,
    pub(crate) mlp: Option<Arc<dyn Sublayer>>,
}
