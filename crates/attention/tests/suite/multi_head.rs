//! Compares `MultiHeadAttention` with PyTorch and tests its properties.
//!
//! The properties are causality, caching, batching, and the equality of fused and separate projections.

use std::sync::Arc;

use candle_core::{D, DType, Device, IndexOp, Result, Tensor, Var};
use candle_gpt2_attention::{
    AttentionError, AttentionMask, HeadWidth, KvCache, KvCacheShape, MultiHeadAttention,
    MultiHeadAttentionConfig, Observer, Pass, ProjectionLayout, QkvProjection, ScaledDotProduct, Site,
};
use candle_gpt2_kernels::{LayerNorm, Linear, carried, without_gradients};
use candle_gpt2_testing::{Fixture, assert_close, checkpoints, pattern, values, worst};
use candle_nn::VarBuilder;

/// Tolerance between two libraries for f32 dot products of at most 40 terms.
const PARITY: f64 = 1e-5;
/// Tolerance for the same f32 arithmetic, summed in a different order.
const SAME: f64 = 2e-6;

fn pytorch_layer(fixture: &Fixture) -> Result<MultiHeadAttention> {
    let config = MultiHeadAttentionConfig {
        qkv_bias: true,
        projection: ProjectionLayout::Fused,
        ..MultiHeadAttentionConfig::new(24, 24, 3)
    };
    MultiHeadAttention::load(&config, fixture.parameters(""))
}

#[test]
fn every_mask_equals_pytorch_in_output_and_weights() -> Result<()> {
    let fixture = Fixture::open("multi_head_attention");
    let layer = pytorch_layer(&fixture)?;
    let (x, memory) = (fixture.tensor("x"), fixture.tensor("memory"));
    let window = AttentionMask::Window { before: 1, after: 1 };
    let additive = AttentionMask::Additive(fixture.tensor("additive"));
    for (name, memory, mask) in [
        ("bidirectional", None, AttentionMask::Bidirectional),
        ("causal", None, AttentionMask::Causal),
        ("window", None, window),
        ("cross", Some(&memory), AttentionMask::Bidirectional),
        ("additive", Some(&memory), additive),
    ] {
        let (output, weights) = layer.forward_with_weights(&x, memory, &mask)?;
        assert_close(&output, &fixture.tensor(&format!("{name}.output")), PARITY, name);
        assert_close(
            &weights,
            &fixture.tensor(&format!("{name}.weights")),
            PARITY,
            &format!("weights of {name}"),
        );
        let unobserved = layer.forward_with(&x, memory, &mask, None, &mut Pass::inference())?;
        assert_close(&unobserved, &output, SAME, &format!("{name} without an observer"));
    }
    Ok(())
}

/// Checks separate query, key, value and output projections, with biases and without a mask.
#[test]
fn separate_projections_with_biases_equal_pytorch() -> Result<()> {
    let fixture = Fixture::open("multi_head_attention_004");
    let config = MultiHeadAttentionConfig { qkv_bias: true, ..MultiHeadAttentionConfig::new(20, 20, 4) };
    let layer = MultiHeadAttention::load(&config, fixture.parameters(""))?;
    let (output, weights) =
        layer.forward_with_weights(&fixture.tensor("x"), None, &AttentionMask::Bidirectional)?;
    assert_close(&output, &fixture.tensor("output"), PARITY, "output");
    assert_close(&weights, &fixture.tensor("weights"), PARITY, "weights");
    Ok(())
}

/// Returns the same layer twice: with separate projections and with a fused projection.
fn separate_and_fused() -> Result<(MultiHeadAttention, MultiHeadAttention)> {
    let weights = [0, 1, 2].map(|index| pattern(&[24, 15], 1.0, 1000 * index));
    let biases = [0, 1, 2].map(|index| pattern(&[24], 1.0, 77 + 1000 * index));
    let layer = |index: usize| Linear::new(weights[index].clone(), Some(biases[index].clone()));
    let out_proj = || Linear::new(pattern(&[10, 24], 1.0, 5000), Some(pattern(&[10], 1.0, 6000)));
    let separate = QkvProjection::Separate { query: layer(0)?, key: layer(1)?, value: layer(2)? };
    let fused = Linear::new(Tensor::cat(&weights, 0)?, Some(Tensor::cat(&biases, 0)?))?;
    Ok((
        MultiHeadAttention::new(separate, out_proj()?, 4)?,
        MultiHeadAttention::new(QkvProjection::Fused(fused), out_proj()?, 4)?,
    ))
}

#[test]
fn fused_projection_equals_separate_projections() -> Result<()> {
    let (separate, fused) = separate_and_fused()?;
    assert_eq!(separate.parameter_count(), fused.parameter_count());
    let (x, memory) = (pattern(&[2, 5, 15], 2.0, 0), pattern(&[2, 7, 15], 2.0, 300));
    for memory in [None, Some(&memory)] {
        let mask = AttentionMask::Bidirectional;
        let (expected, expected_weights) = separate.forward_with_weights(&x, memory, &mask)?;
        let (output, weights) = fused.forward_with_weights(&x, memory, &mask)?;
        assert_close(&output, &expected, SAME, "fused output");
        assert_close(&weights, &expected_weights, SAME, "fused weights");
    }
    Ok(())
}

#[test]
fn future_tokens_do_not_change_past_outputs() -> Result<()> {
    let (layer, _) = separate_and_fused()?;
    let x = pattern(&[1, 6, 15], 2.0, 0);
    let other_future = Tensor::cat(&[x.narrow(1, 0, 4)?, pattern(&[1, 2, 15], 9.0, 50)], 1)?;
    let past = |x: &Tensor| -> Result<Vec<f64>> {
        Ok(values(&layer.forward_masked(x, &AttentionMask::Causal)?.narrow(1, 0, 4)?))
    };
    assert_eq!(past(&x)?, past(&other_future)?);
    assert_ne!(
        values(&layer.forward_masked(&x, &AttentionMask::Bidirectional)?.narrow(1, 0, 4)?),
        values(&layer.forward_masked(&other_future, &AttentionMask::Bidirectional)?.narrow(1, 0, 4)?),
        "without the mask they do"
    );
    Ok(())
}

/// Loads the same weights under the names and shapes of each layout, with and without biases.
#[test]
fn every_layout_loads_the_same_layer() -> Result<()> {
    let named = ProjectionLayout::Named { query: "q_proj", key: "k_proj", value: "v_proj", output: "o_proj" };
    let weights = [0, 1, 2, 3].map(|index| pattern(&[6, 6], 1.0, 100 * index));
    let biases = [0, 1, 2, 3].map(|index| pattern(&[6], 1.0, 1000 + 100 * index));
    let tensors = |[query, key, value, output]: [&str; 4], kind: &str, parts: &[Tensor; 4]| {
        let names = [query, key, value, output].map(|name| format!("{name}.{kind}"));
        names.into_iter().zip(parts.iter().cloned()).collect::<Vec<_>>()
    };
    let fused = |parts: &[Tensor; 4]| Tensor::cat(&parts[..3], 0).unwrap();
    let of_layout = |layout: ProjectionLayout, kind: &str, parts: &[Tensor; 4]| match layout {
        ProjectionLayout::Separate => tensors(["W_query", "W_key", "W_value", "out_proj"], kind, parts),
        ProjectionLayout::Named { .. } => tensors(["q_proj", "k_proj", "v_proj", "o_proj"], kind, parts),
        ProjectionLayout::Fused => {
            vec![(format!("in_proj_{kind}"), fused(parts)), (format!("out_proj.{kind}"), parts[3].clone())]
        }
        ProjectionLayout::Gpt2 => {
            let stored = |x: &Tensor| if x.rank() == 2 { x.t().unwrap() } else { x.clone() };
            vec![
                (format!("c_attn.{kind}"), stored(&fused(parts))),
                (format!("c_proj.{kind}"), stored(&parts[3])),
            ]
        }
    };
    let x = pattern(&[2, 5, 6], 2.0, 40);
    for has_bias in [true, false] {
        let output = |layout: ProjectionLayout| -> Result<Vec<f64>> {
            let mut named = of_layout(layout, "weight", &weights);
            if has_bias {
                named.extend(of_layout(layout, "bias", &biases));
            }
            let vb = VarBuilder::from_tensors(named.into_iter().collect(), DType::F32, &Device::Cpu);
            let config = MultiHeadAttentionConfig {
                qkv_bias: has_bias,
                out_proj_bias: has_bias,
                projection: layout,
                ..MultiHeadAttentionConfig::new(6, 6, 2)
            };
            let layer = MultiHeadAttention::load(&config, vb)?;
            assert_eq!(layer.parameter_count(), if has_bias { 4 * 42 } else { 4 * 36 });
            Ok(values(&layer.forward_masked(&x, &AttentionMask::Causal)?))
        };
        let expected = output(ProjectionLayout::Separate)?;
        for layout in [named, ProjectionLayout::Fused, ProjectionLayout::Gpt2] {
            assert_eq!(output(layout)?, expected, "{layout:?}, biases: {has_bias}");
        }
    }
    Ok(())
}

#[test]
fn wrong_input_is_reported_in_the_caller_shape() -> Result<()> {
    let (separate, fused) = separate_and_fused()?;
    for layer in [separate, fused] {
        let mask = AttentionMask::Causal;
        for shape in [&[5, 15][..], &[2, 5, 14], &[1, 2, 5, 15]] {
            let x = Tensor::zeros(shape, DType::F32, &Device::Cpu)?;
            let error = layer.forward_masked(&x, &mask).unwrap_err().to_string();
            assert_eq!(error, format!("attention: expected an input of shape (B, T, 15), found {shape:?}"));
            let error = layer.memory(&x).unwrap_err().to_string();
            assert_eq!(error, format!("attention: expected a memory of shape (B, S, 15), found {shape:?}"));
        }
    }
    Ok(())
}

fn cache(batch: usize, capacity: usize) -> Result<KvCache> {
    KvCache::new(KvCacheShape { batch, num_heads: 4, capacity, head_dim: 6 }, DType::F32, &Device::Cpu)
}

fn step(layer: &MultiHeadAttention, x: &Tensor, mask: &AttentionMask, cache: &mut KvCache) -> Result<Tensor> {
    layer.forward_with(x, None, mask, Some(cache), &mut Pass::inference())
}

#[test]
fn cached_chunks_equal_the_whole_sequence() -> Result<()> {
    let (_, layer) = separate_and_fused()?;
    let x = pattern(&[2, 7, 15], 2.0, 0);
    for mask in [AttentionMask::Causal, AttentionMask::Window { before: 2, after: 0 }] {
        let whole = layer.forward_masked(&x, &mask)?;
        for chunks in [vec![7], vec![1; 7], vec![3, 4], vec![5, 1, 1], vec![2, 3, 2]] {
            let (mut cache, mut outputs, mut start) = (cache(2, 7)?, Vec::new(), 0);
            for len in &chunks {
                outputs.push(step(&layer, &x.narrow(1, start, *len)?, &mask, &mut cache)?);
                start += len;
            }
            assert_eq!(cache.lengths(), [7, 7]);
            assert_close(&Tensor::cat(&outputs, 1)?, &whole, SAME, &format!("{mask:?} in chunks {chunks:?}"));
        }
    }
    Ok(())
}

#[test]
fn ragged_rows_equal_single_rows() -> Result<()> {
    for mask in [AttentionMask::Causal, AttentionMask::Window { before: 2, after: 0 }] {
        check_ragged_rows(&mask)?;
    }
    Ok(())
}

fn check_ragged_rows(mask: &AttentionMask) -> Result<()> {
    let (_, layer) = separate_and_fused()?;
    let x = pattern(&[2, 6, 15], 2.0, 0);
    // Row 0 is truncated to two tokens, while row 1 keeps four. Then both rows run the same step.
    let mut ragged = cache(2, 8)?;
    step(&layer, &x.narrow(1, 0, 4)?, mask, &mut ragged)?;
    ragged.truncate(0, 2)?;
    let next = pattern(&[2, 2, 15], 2.0, 900);
    let together = step(&layer, &next, mask, &mut ragged)?;
    assert_eq!(ragged.lengths(), [4, 6]);
    for (row, past) in [(0, 2), (1, 4)] {
        let mut alone = cache(1, 8)?;
        step(&layer, &x.narrow(0, row, 1)?.narrow(1, 0, past)?, mask, &mut alone)?;
        let expected = step(&layer, &next.narrow(0, row, 1)?, mask, &mut alone)?;
        assert_close(&together.narrow(0, row, 1)?, &expected, SAME, &format!("row {row}"));
    }
    Ok(())
}

/// Observer of every intermediate, which changes no values but forces dense products.
struct PassiveObserver;

impl Observer for PassiveObserver {
    fn wants(&self, _: Site) -> bool {
        true
    }

    fn observe(&mut self, _: Site, value: Tensor) -> Result<Tensor> {
        Ok(value)
    }
}

/// Reuses a slot for a shorter row, after a longer row overflowed f16 and left NaN in the slot.
#[test]
fn stale_slot_contents_do_not_affect_rows() -> Result<()> {
    let (_, layer) = separate_and_fused()?;
    let (mask, lengths) = (AttentionMask::Causal, [2, 4]);
    let observed = |x: &Tensor, cache: &mut KvCache| {
        layer.forward_with(
            x,
            None,
            &mask,
            Some(cache),
            &mut Pass::inference().observed_by(&mut PassiveObserver),
        )
    };
    let x = pattern(&[2, 4, 15], 2.0, 0);
    for added in [1, 3] {
        let mut used = cache(2, 8)?;
        step(&layer, &x, &mask, &mut used)?;
        let poison = Tensor::full(f32::NAN, (2, 4, 4, 6), &Device::Cpu)?;
        used.append(&poison, &poison)?;
        for (row, length) in lengths.into_iter().enumerate() {
            used.truncate(row, length)?;
        }
        let next = pattern(&[2, added, 15], 2.0, 900);
        let together = observed(&next, &mut used)?;
        assert!(values(&together).iter().all(|value| value.is_finite()), "{added} new tokens");
        for (row, past) in lengths.into_iter().enumerate() {
            let mut alone = cache(1, 8)?;
            step(&layer, &x.narrow(0, row, 1)?.narrow(1, 0, past)?, &mask, &mut alone)?;
            let expected = observed(&next.narrow(0, row, 1)?, &mut alone)?;
            assert_close(&together.narrow(0, row, 1)?, &expected, SAME, &format!("row {row}, {added} new"));
        }
        let [keys, _] = used.tensors()?;
        let rest = keys.i((0, .., lengths[0] + added.., ..))?;
        assert_eq!(values(&rest), vec![0.0; 4 * 2 * 6], "zeros after the shorter row");
    }
    Ok(())
}

#[test]
fn forked_cache_is_independent() -> Result<()> {
    let (_, layer) = separate_and_fused()?;
    let mask = AttentionMask::Causal;
    let prefix = pattern(&[1, 3, 15], 2.0, 0);
    let (left, right) = (pattern(&[1, 2, 15], 2.0, 500), pattern(&[1, 2, 15], 2.0, 700));
    let mut first = cache(1, 5)?;
    step(&layer, &prefix, &mask, &mut first)?;
    let mut second = first.fork(&[0])?;
    step(&layer, &left, &mask, &mut first)?;
    let output = step(&layer, &right, &mask, &mut second)?;
    let whole = layer.forward_masked(&Tensor::cat(&[&prefix, &right], 1)?, &mask)?;
    assert_close(&output, &whole.narrow(1, 3, 2)?, SAME, "the forked continuation");
    assert!(second.fork(&[1]).is_err(), "a row that does not exist");
    Ok(())
}

#[test]
fn full_cache_rejects_tokens_and_is_unchanged() -> Result<()> {
    let (_, layer) = separate_and_fused()?;
    let mut cache = cache(1, 4)?;
    step(&layer, &pattern(&[1, 3, 15], 2.0, 0), &AttentionMask::Causal, &mut cache)?;
    let error = step(&layer, &pattern(&[1, 2, 15], 2.0, 0), &AttentionMask::Causal, &mut cache).unwrap_err();
    assert!(
        error.to_string().contains("3 cached and 2 new tokens exceed the capacity of 4 tokens"),
        "{error}"
    );
    assert_eq!(cache.lengths(), [3]);
    let wrong_batch = step(&layer, &pattern(&[2, 1, 15], 2.0, 0), &AttentionMask::Causal, &mut cache);
    assert!(
        wrong_batch.unwrap_err().to_string().contains("(batch, heads, head_dim) (1, 4, 6), found (2, 4, 6)")
    );
    assert!(cache.truncate(0, 4).is_err());
    Ok(())
}

#[test]
fn batch_rows_equal_single_rows() -> Result<()> {
    let (layer, _) = separate_and_fused()?;
    let x = pattern(&[3, 5, 15], 2.0, 0);
    let together = layer.forward_masked(&x, &AttentionMask::Causal)?;
    for row in 0..3 {
        let alone = layer.forward_masked(&x.narrow(0, row, 1)?, &AttentionMask::Causal)?;
        assert_close(&together.narrow(0, row, 1)?, &alone, SAME, &format!("row {row}"));
    }
    Ok(())
}

/// Narrow heads with block-diagonal projections see only their slice of the input.
///
/// This is the strict sense of "Transformers from scratch" (Bloem, 2019). A wide head has the full width.
#[test]
fn block_diagonal_heads_see_only_their_slice() -> Result<()> {
    let blocks = [0, 1, 2].map(|index| pattern(&[2, 3, 3], 2.0, 100 * index));
    let block_diagonal = |blocks: &Tensor| -> Result<Linear> {
        let zero = Tensor::zeros((3, 3), DType::F32, &Device::Cpu)?;
        let top = Tensor::cat(&[&blocks.i(0)?, &zero], 1)?;
        let bottom = Tensor::cat(&[&zero, &blocks.i(1)?], 1)?;
        Linear::new(Tensor::cat(&[top, bottom], 0)?, None)
    };
    let identity = |width| Linear::new(Tensor::eye(width, DType::F32, &Device::Cpu)?, None);
    let projection = QkvProjection::Separate {
        query: block_diagonal(&blocks[0])?,
        key: block_diagonal(&blocks[1])?,
        value: block_diagonal(&blocks[2])?,
    };
    let narrow = MultiHeadAttention::new(projection, identity(6)?, 2)?;
    let x = pattern(&[1, 4, 6], 2.0, 40);
    let mask = AttentionMask::Bidirectional;
    let output = narrow.forward_masked(&x, &mask)?;
    for head in 0..2 {
        let layer = |index: usize| Linear::new(blocks[index].i(head)?, None);
        let projection = QkvProjection::Separate { query: layer(0)?, key: layer(1)?, value: layer(2)? };
        let alone = MultiHeadAttention::new(projection, identity(3)?, 1)?;
        let expected = alone.forward_masked(&x.narrow(2, 3 * head, 3)?.contiguous()?, &mask)?;
        assert_close(&output.narrow(2, 3 * head, 3)?, &expected, SAME, &format!("head {head}"));
    }

    let parameters = candle_nn::VarMap::new();
    let vb = VarBuilder::from_varmap(&parameters, DType::F32, &Device::Cpu);
    let config =
        MultiHeadAttentionConfig { head_width: HeadWidth::Wide, ..MultiHeadAttentionConfig::new(6, 6, 2) };
    let wide = MultiHeadAttention::load(&config, vb.clone())?;
    assert_eq!(wide.head_dim(), 6);
    assert_eq!(wide.parameter_count(), 3 * 12 * 6 + 6 * 12 + 6);
    assert_eq!(wide.forward_masked(&x, &mask)?.dims(), [1, 4, 6]);
    Ok(())
}

/// A wide head equals a layer with one head.
///
/// Two wide heads equal the sum of two such layers, each with half of the output projection.
#[test]
fn wide_heads_equal_single_head_layers() -> Result<()> {
    let weights = [0, 1, 2].map(|index| pattern(&[12, 6], 1.0, 500 * index));
    let out_proj = pattern(&[6, 12], 1.0, 7000);
    let linear = |weight: Tensor| Linear::new(weight, None);
    let projection = |rows: std::ops::Range<usize>| -> Result<QkvProjection> {
        let part = |index: usize| linear(weights[index].narrow(0, rows.start, rows.len())?);
        Ok(QkvProjection::Separate { query: part(0)?, key: part(1)?, value: part(2)? })
    };
    let x = pattern(&[2, 5, 6], 2.0, 40);
    let wide = MultiHeadAttention::new(projection(0..12)?, linear(out_proj.clone())?, 2)?;
    assert_eq!(wide.head_dim(), 6);
    let head = |index: usize| -> Result<Tensor> {
        let out_proj = linear(out_proj.narrow(1, 6 * index, 6)?.contiguous()?)?;
        let layer = MultiHeadAttention::new(projection(6 * index..6 * index + 6)?, out_proj, 1)?;
        layer.forward_masked(&x, &AttentionMask::Causal)
    };
    let output = wide.forward_masked(&x, &AttentionMask::Causal)?;
    assert_close(&output, &(head(0)? + head(1)?)?, SAME, "two wide heads");
    Ok(())
}

/// Dropout acts on the attention weights: at a rate of 1, only the bias of `out_proj` remains.
#[test]
fn dropout_applies_to_the_attention_weights() -> Result<()> {
    let (layer, _) = separate_and_fused()?;
    let layer = layer.with_dropout(1.0);
    let x = pattern(&[1, 3, 15], 2.0, 0);
    for mask in [AttentionMask::Causal, AttentionMask::Window { before: 1, after: 0 }] {
        let mut generator = candle_gpt2_arithmetic::RandomStream::new(0);
        let output = layer.forward_with(&x, None, &mask, None, &mut Pass::training(&mut generator))?;
        let bias = pattern(&[10], 1.0, 6000).broadcast_as((1, 3, 10))?;
        assert_close(&output, &bias, SAME, &format!("{mask:?}"));
    }
    Ok(())
}

/// huggingface/transformers#382: an f16 mask must not exceed the range of f16.
///
/// Hidden keys have weight zero, and no value is NaN.
#[test]
fn half_precision_mask_does_not_overflow() -> Result<()> {
    let heads = |offset| pattern(&[2, 3, 7, 4], 2.0, offset).to_dtype(DType::F16);
    let (q, k, v) = (heads(0)?, heads(500)?, heads(900)?);
    let attend = |k: &Tensor, v: &Tensor| {
        ScaledDotProduct::new(4).forward(&q, k, v, &AttentionMask::Causal, &[], &mut Pass::inference())
    };
    let output = attend(&k, &v)?;
    assert!(values(&output).iter().all(|value| value.is_finite()));
    // Changing keys and values after the third position must not change the first three outputs.
    let other = |x: &Tensor| Tensor::cat(&[&x.narrow(2, 0, 3)?, &(x.narrow(2, 3, 4)? * 50.0)?], 2);
    let changed = attend(&other(&k)?, &other(&v)?)?;
    assert_eq!(values(&output.narrow(2, 0, 3)?), values(&changed.narrow(2, 0, 3)?));
    assert_ne!(values(&output), values(&changed));
    Ok(())
}

/// huggingface/transformers#13573: scores beyond 65,504 overflow in f16 but not in f32.
#[test]
fn scores_do_not_overflow_in_half_precision() -> Result<()> {
    let heads = |offset| pattern(&[1, 1, 3, 4], 1000.0, offset).to_dtype(DType::F16);
    let (q, k, v) = (heads(0)?, heads(50)?, pattern(&[1, 1, 3, 4], 1.0, 90).to_dtype(DType::F16)?);
    let attend = |dtype: DType| {
        let [q, k, v] = [&q, &k, &v].map(|x| x.to_dtype(dtype));
        let attention = ScaledDotProduct::new(4);
        attention.forward(&q?, &k?, &v?, &AttentionMask::Causal, &[], &mut Pass::inference())
    };
    let scores = values(&q.to_dtype(DType::F64)?.matmul(&k.to_dtype(DType::F64)?.t()?)?);
    assert!(scores.iter().any(|score| score.abs() > 65_504.0), "{scores:?}");
    let half = attend(DType::F16)?;
    assert_eq!(half.dtype(), DType::F16);
    // The weights and the result are each rounded once to 11 bits.
    assert_close(&half, &attend(DType::F64)?, 2e-3, "scores in f32");
    Ok(())
}

/// With candle's fused softmax, some gradients would be missing without an error.
#[test]
fn every_parameter_receives_a_gradient() -> Result<()> {
    let weights = [0, 1, 2, 3].map(|index| Var::from_tensor(&pattern(&[8, 8], 1.0, 100 * index)).unwrap());
    let layer = |index: usize| Linear::new(weights[index].as_tensor().clone(), None);
    let projection = QkvProjection::Separate { query: layer(0)?, key: layer(1)?, value: layer(2)? };
    let attention = MultiHeadAttention::new(projection, layer(3)?, 2)?;
    for mask in [AttentionMask::Causal, AttentionMask::Window { before: 1, after: 1 }] {
        let output = attention.forward_masked(&pattern(&[1, 5, 8], 2.0, 9), &mask)?;
        let gradients = output.sqr()?.sum_all()?.backward()?;
        for (index, weight) in weights.iter().enumerate() {
            let gradient =
                gradients.get(weight).unwrap_or_else(|| panic!("{mask:?}: weight {index} has no gradient"));
            assert!(values(gradient).iter().any(|value| value.abs() > 1e-4), "{mask:?}: weight {index}");
        }
    }
    Ok(())
}

#[test]
fn size_mismatches_are_rejected_by_name() {
    let linear = |output: usize, input: usize| Linear::new(pattern(&[output, input], 1.0, 0), None).unwrap();
    let assert_rejected = |projection, out_proj, num_heads, expected: AttentionError| {
        let error = MultiHeadAttention::new(projection, out_proj, num_heads).unwrap_err();
        // With RUST_BACKTRACE set, candle appends a backtrace to the message.
        assert!(error.to_string().starts_with(&expected.to_string()), "expected {expected}, found {error}");
    };
    let fused = || QkvProjection::Fused(linear(18, 5));
    assert_rejected(
        fused(),
        linear(5, 6),
        4,
        AttentionError::HeadsDoNotDivideWidth { num_heads: 4, width: 6 },
    );
    assert_rejected(fused(), linear(5, 6), 0, AttentionError::ZeroSize { name: "number of heads" });
    let what = "the output projection's input";
    assert_rejected(fused(), linear(5, 7), 2, AttentionError::WidthMismatch { what, expected: 6, found: 7 });
    let uneven = QkvProjection::Separate { query: linear(6, 5), key: linear(4, 5), value: linear(6, 5) };
    let what = "the key projection";
    assert_rejected(uneven, linear(5, 6), 2, AttentionError::WidthMismatch { what, expected: 6, found: 4 });
    let what = "the fused projection";
    let uneven = QkvProjection::Fused(linear(19, 5));
    assert_rejected(uneven, linear(5, 6), 2, AttentionError::WidthMismatch { what, expected: 18, found: 19 });
}

/// A step with positions in device memory supports only inference; `advance` updates the lengths.
#[test]
fn step_reads_positions_from_device_memory() -> Result<()> {
    let (separate, layer) = separate_and_fused()?;
    let x = pattern(&[1, 5, 15], 2.0, 0);
    let positions = Tensor::new(&[[4u32]], &Device::Cpu)?;
    let (mut reference_cache, mut memory) = (cache(1, 5)?, cache(1, 5)?);
    for cache in [&mut reference_cache, &mut memory] {
        step(&layer, &x.narrow(1, 0, 4)?, &AttentionMask::Causal, cache)?;
    }
    let token = x.narrow(1, 4, 1)?;
    let expected = step(&layer, &token, &AttentionMask::Causal, &mut reference_cache)?;
    let mut pass = Pass::inference().at(positions.clone());
    let found = layer.forward_with(&token, None, &AttentionMask::Causal, Some(&mut memory), &mut pass)?;
    assert_eq!(values(&found), values(&expected));
    assert_eq!(memory.lengths(), [4]);
    memory.advance(1)?;
    assert_eq!(memory.lengths(), [5]);
    assert!(memory.advance(1).unwrap_err().to_string().contains('5'), "it is full");
    assert_eq!(memory.lengths(), [5]);

    let is_rejected =
        |layer: &MultiHeadAttention, mask: AttentionMask, cache: Option<&mut KvCache>, pass: Pass| {
            let error = layer.forward_with(&token, None, &mask, cache, &mut pass.at(positions.clone()));
            error.unwrap_err().to_string().contains(&AttentionError::NotAStep.to_string())
        };
    let mut fresh = cache(1, 5)?;
    assert!(is_rejected(&layer, AttentionMask::Causal, None, Pass::inference()));
    assert!(is_rejected(&layer, AttentionMask::Bidirectional, Some(&mut fresh), Pass::inference()));
    assert!(is_rejected(&separate, AttentionMask::Causal, Some(&mut fresh), Pass::inference()));
    let mut generator = candle_gpt2_arithmetic::RandomStream::new(1);
    assert!(is_rejected(&layer, AttentionMask::Causal, Some(&mut fresh), Pass::training(&mut generator)));
    Ok(())
}

#[test]
fn cache_is_rejected_in_training() -> Result<()> {
    let (layer, _) = separate_and_fused()?;
    let x = pattern(&[1, 2, 15], 1.0, 0);
    let mut cache = cache(1, 4)?;
    let mut generator = candle_gpt2_arithmetic::RandomStream::new(1);
    let pass = &mut Pass::training(&mut generator);
    let error = layer.forward_with(&x, None, &AttentionMask::Causal, Some(&mut cache), pass).unwrap_err();
    assert_eq!(carried::<AttentionError>(&error), Some(&AttentionError::CacheInTraining));
    assert_eq!(cache.lengths(), [0]);
    Ok(())
}

/// Cached keys and values are constants, so the gradients of their projections would be wrong.
#[test]
fn cache_is_rejected_while_gradients_are_tracked() -> Result<()> {
    let variables = candle_nn::VarMap::new();
    let vb = VarBuilder::from_varmap(&variables, DType::F32, &Device::Cpu);
    let config = MultiHeadAttentionConfig {
        projection: ProjectionLayout::Fused,
        ..MultiHeadAttentionConfig::new(24, 24, 4)
    };
    let trainable = MultiHeadAttention::load(&config, vb)?;
    let tensors = variables.data().lock().unwrap().clone().into_iter();
    let tensors = tensors.map(|(name, variable)| (name, variable.as_detached_tensor())).collect();
    let frozen =
        MultiHeadAttention::load(&config, VarBuilder::from_tensors(tensors, DType::F32, &Device::Cpu))?;
    let x = pattern(&[1, 3, 24], 2.0, 0);
    let tracked = Var::from_tensor(&x)?.into_inner();
    let mut cache = trainable.new_cache(1, 4, DType::F32)?;
    let positions = Tensor::new(&[[0u32, 1, 2]], &Device::Cpu)?;
    for (layer, x) in [(&trainable, &x), (&frozen, &tracked)] {
        for mut pass in [Pass::inference(), Pass::inference().at(positions.clone())] {
            let mask = AttentionMask::Causal;
            let error = layer.forward_with(x, None, &mask, Some(&mut cache), &mut pass).unwrap_err();
            assert_eq!(carried::<AttentionError>(&error), Some(&AttentionError::CacheWithGradients));
            let error = layer.add_to(x, x, &mask, Some(&mut cache), 0.0, &mut pass).unwrap_err();
            assert_eq!(carried::<AttentionError>(&error), Some(&AttentionError::CacheWithGradients));
            assert_eq!(cache.lengths(), [0]);
        }
        let y = without_gradients(|| step(layer, x, &AttentionMask::Causal, &mut cache))?;
        assert!(!y.track_op());
        assert_close(&y, &frozen.forward_masked(x, &AttentionMask::Causal)?, SAME, "without gradients");
        cache.truncate(0, 0)?;
    }
    Ok(())
}

#[test]
fn cache_and_separate_memory_are_mutually_exclusive() -> Result<()> {
    let (layer, _) = separate_and_fused()?;
    let x = pattern(&[1, 2, 15], 1.0, 0);
    let mut cache = cache(1, 4)?;
    let mut pass = Pass::inference();
    let error = layer
        .forward_with(&x, Some(&x), &AttentionMask::Bidirectional, Some(&mut cache), &mut pass)
        .unwrap_err();
    assert!(error.to_string().contains("cannot be used with a separate memory"), "{error}");
    Ok(())
}

/// Compares the attention of OpenAI's GPT-2 124M, blocks 0 and 11, with transformers.
///
/// The blocks have width 768 and 12 heads.
#[test]
fn real_gpt2_attention_equals_transformers() -> Result<()> {
    /// Required tolerance, relative to the magnitude of the expected value.
    const RELATIVE: f64 = 1e-5;
    let Some(folder) = checkpoints() else {
        return Ok(());
    };
    let weights = Fixture::open_path(&folder.join("gpt2-124m-attention/model.safetensors"));
    let expected = Fixture::open("gpt2_124m_attention_expected");
    let x = pattern(&[2, 9, 768], 4.0, 0);
    for block in [0, 11] {
        let tensor = |name: &str| weights.tensor(&format!("h.{block}.{name}"));
        let conv1d = |name: &str| {
            let weight = tensor(&format!("attn.{name}.weight")).t()?;
            Linear::new(weight, Some(tensor(&format!("attn.{name}.bias"))))
        };
        let norm = LayerNorm::new(tensor("ln_1.weight"), Some(tensor("ln_1.bias")), 1e-5);
        let layer = MultiHeadAttention::new(QkvProjection::Fused(conv1d("c_attn")?), conv1d("c_proj")?, 12)?;
        assert_eq!(layer.parameter_count(), 2_362_368);
        let (output, attention) =
            layer.forward_with_weights(&norm.forward(&x)?, None, &AttentionMask::Causal)?;
        for (name, actual) in [("output", output), ("weights", attention)] {
            let expected = expected.tensor(&format!("h.{block}.{name}"));
            // Each channel is compared relative to its own maximum, because an element near zero can be a
            // sum of terms of that size.
            let channels = expected.dim(D::Minus1)?;
            let (actual, expected) =
                (actual.reshape(((), channels))?.t()?, expected.reshape(((), channels))?.t()?);
            let largest = expected.abs()?.max_keepdim(1)?;
            // A channel of zeros must match exactly, and NaN always fails.
            let excess = (actual - &expected)?.abs()?.broadcast_sub(&(largest * RELATIVE)?)?;
            let worst = worst(values(&excess));
            assert!(worst <= 0.0, "h.{block} {name}: {worst:e} beyond {RELATIVE:e} of the channel's largest");
        }
    }
    Ok(())
}

/// A failed call leaves the cache unchanged, so a retry does not attend to its own keys twice.
#[test]
fn error_leaves_the_cache_unchanged() -> Result<()> {
    let (_, layer) = separate_and_fused()?;
    let mut cache = cache(2, 16)?;
    let x = pattern(&[2, 3, 15], 2.0, 0);
    step(&layer, &x, &AttentionMask::Causal, &mut cache)?;
    let before = cache.tensors()?.map(|tensor| values(&tensor));
    let rows = || -> Arc<[usize]> { [1, 2].into() };
    let five_tokens = pattern(&[1, 5, 15], 2.0, 9);
    let additive = AttentionMask::Additive(Tensor::zeros((7, 7), DType::F32, &Device::Cpu)?);
    let mut rejection = |x: &Tensor, mask: &AttentionMask, pass: &mut Pass| {
        let error = layer.forward_with(x, None, mask, Some(&mut cache), pass).unwrap_err().to_string();
        assert_eq!(cache.lengths(), [3, 3], "{error}");
        error
    };
    let of_rows = rejection(&five_tokens, &AttentionMask::Causal, &mut Pass::inference().of_rows(rows()));
    let expected = "attention: the packed rows have 3 tokens in total, but there are 5 queries and 5 keys";
    assert_eq!(of_rows, expected);
    let three_tokens = five_tokens.narrow(1, 0, 3)?;
    for mask in [&AttentionMask::Bidirectional, &additive] {
        let error = rejection(&three_tokens, mask, &mut Pass::inference().of_rows(rows()));
        assert!(error.contains("use `AttentionMask::Causal`"), "{error}");
    }
    let error = rejection(&x, &AttentionMask::CausalRows(rows()), &mut Pass::inference());
    assert!(error.contains("cannot be combined with a cache"), "{error}");
    rejection(&x, &additive, &mut Pass::inference());
    // `ScaledDotProduct` fails in the same way if queries and keys differ in width.
    let attention = ScaledDotProduct::new(6);
    let (q, k) = (pattern(&[2, 4, 3, 8], 1.0, 0), pattern(&[2, 4, 3, 6], 1.0, 1));
    attention
        .forward_cached(&q, [&k, &k], &AttentionMask::Causal, &mut cache, &mut Pass::inference())
        .unwrap_err();
    assert_eq!(cache.lengths(), [3, 3]);
    assert_eq!(cache.tensors()?.map(|tensor| values(&tensor)), before);
    Ok(())
}
