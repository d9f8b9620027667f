//! Tests that every attention implementation rejects sizes of zero and names them in the error.

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_gpt2_arithmetic::RandomStream;
use candle_gpt2_attention::{
    AttentionError, AttentionMask, KvCache, KvCacheShape, MultiHeadAttention, MultiHeadAttentionConfig,
    Observer, Pass, ScaledDotProduct, Site, SiteKind,
};

/// Observer that wants the attention weights, which the fused kernels do not return.
struct PatternObserver;

impl Observer for PatternObserver {
    fn wants(&self, site: Site) -> bool {
        site.kind == SiteKind::Pattern
    }

    fn observe(&mut self, _: Site, value: Tensor) -> Result<Tensor> {
        Ok(value)
    }
}

fn masks() -> Vec<AttentionMask> {
    let added = Tensor::zeros((1, 1), DType::F32, &Device::Cpu).unwrap();
    let windows = [(0, 0), (3, 0), (0, 2), (usize::MAX, usize::MAX)];
    let mut masks: Vec<_> =
        windows.into_iter().map(|(before, after)| AttentionMask::Window { before, after }).collect();
    masks.extend([
        AttentionMask::Bidirectional,
        AttentionMask::Causal,
        AttentionMask::CausalRows([].into()),
        AttentionMask::Additive(added),
    ]);
    masks
}

fn assert_rejected<T: std::fmt::Debug>(result: Result<T>, expected: &'static str) {
    let error = result.unwrap_err();
    let found = error.to_string();
    let expected = AttentionError::ZeroSize { name: expected }.to_string();
    assert_eq!(found.lines().next(), Some(expected.as_str()));
}

#[test]
fn zero_sizes_are_rejected_by_name() {
    let sizes = [
        ([0, 3, 4, 5, 2, 2], "number of rows"),
        ([1, 0, 4, 5, 2, 2], "number of heads"),
        ([1, 3, 0, 5, 2, 2], "number of queries"),
        ([1, 3, 4, 0, 2, 2], "number of keys"),
        ([1, 3, 4, 5, 0, 2], "width of a head"),
        ([1, 3, 4, 5, 2, 0], "width of a value"),
    ];
    for ([batch, heads, queries, keys, key_dim, value_dim], name) in sizes {
        for dtype in [DType::F32, DType::BF16] {
            let zeros =
                |tokens, dim| Tensor::zeros((batch, heads, tokens, dim), dtype, &Device::Cpu).unwrap();
            let (q, k, v) = (zeros(queries, key_dim), zeros(keys, key_dim), zeros(keys, value_dim));
            let tracked = Var::from_tensor(&q).unwrap().into_inner();
            for mask in masks() {
                let attention = ScaledDotProduct { scale: 0.5, dropout: 0.1 };
                for q in [&q, &tracked] {
                    assert_rejected(attention.forward(q, &k, &v, &mask, &[], &mut Pass::inference()), name);
                    let mut observer = PatternObserver;
                    let observed = &mut Pass::inference().observed_by(&mut observer);
                    assert_rejected(attention.forward(q, &k, &v, &mask, &[], observed), name);
                    let generator = &mut RandomStream::new(3);
                    assert_rejected(
                        attention.forward(q, &k, &v, &mask, &[], &mut Pass::training(generator)),
                        name,
                    );
                }
            }
        }
    }
}

#[test]
fn layer_rejects_empty_input_without_changing_the_cache() -> Result<()> {
    let config = MultiHeadAttentionConfig::new(6, 6, 3);
    let vb = candle_nn::VarBuilder::zeros(DType::F32, &Device::Cpu);
    let layer = MultiHeadAttention::load(&config, vb.clone())?;
    let x = |batch, tokens| Tensor::zeros((batch, tokens, 6), DType::F32, &Device::Cpu).unwrap();
    for mask in masks() {
        assert_rejected(layer.forward_masked(&x(2, 0), &mask), "number of queries");
        assert_rejected(layer.forward_masked(&x(0, 2), &mask), "number of rows");
        assert_rejected(
            layer.forward_with(&x(1, 2), Some(&x(1, 0)), &mask, None, &mut Pass::inference()),
            "number of keys",
        );
        let shape = KvCacheShape { batch: 2, num_heads: 3, capacity: 16, head_dim: 2 };
        let mut cache = KvCache::new(shape, DType::F32, &Device::Cpu)?;
        let result = layer.forward_with(&x(2, 0), None, &mask, Some(&mut cache), &mut Pass::inference());
        assert_rejected(result, "number of queries");
        assert_eq!(cache.lengths(), [0, 0]);
    }
    Ok(())
}
