//! Runs multi-head attention over an entire sequence, then token by token with a cache.
#![expect(clippy::print_stdout, reason = "what the example shows")]

use candle_core::{DType, Device, Result, Tensor};
use candle_gpt2_attention::{AttentionMask, KvCache, KvCacheShape, MultiHeadAttention, Pass, QkvProjection};
use candle_gpt2_kernels::Linear;

fn main() -> Result<()> {
    let (batch, tokens, width, num_heads) = (2, 5, 24, 3);
    let linear = |outputs: usize| {
        let weight = Tensor::randn(0f32, 0.2, (outputs, width), &Device::Cpu)?; // (out, in)
        Linear::new(weight, None)
    };
    // One product computes queries, keys and values. `MultiHeadAttention::load` loads named parameters
    // instead.
    let layer = MultiHeadAttention::new(QkvProjection::Fused(linear(3 * width)?), linear(width)?, num_heads)?;
    println!("{} parameters in {num_heads} heads of width {}", layer.parameter_count(), layer.head_dim());

    let x = Tensor::randn(0f32, 1., (batch, tokens, width), &Device::Cpu)?;
    let (at_once, weights) = layer.forward_with_weights(&x, None, &AttentionMask::Causal)?;
    println!("output {:?}, weights {:?}", at_once.dims(), weights.dims()); // (B, T, C) and (B, H, T, T)

    // With a cache, each step computes one token, which attends to the keys and values of earlier tokens.
    let shape = KvCacheShape { batch, num_heads, capacity: tokens, head_dim: layer.head_dim() };
    let mut cache = KvCache::new(shape, DType::F32, &Device::Cpu)?;
    let mut steps = Vec::new();
    for token in 0..tokens {
        let x = x.narrow(1, token, 1)?;
        let (cache, mut pass) = (Some(&mut cache), Pass::inference());
        steps.push(layer.forward_with(&x, None, &AttentionMask::Causal, cache, &mut pass)?);
    }
    let difference = (Tensor::cat(&steps, 1)? - at_once)?.abs()?.flatten_all()?.max(0)?.to_scalar::<f32>()?;
    println!("token by token: largest difference {difference:.1e}");
    Ok(())
}
