//! `MultiHeadAttention` against PyTorch, and its laws: causality, caching, batching, fused against separate.

use std::sync::Arc;

use candle_core::{D, DType, Device, IndexOp, Result, Tensor, Var};
use candle_gpt2_attention::{
    AttentionError, AttentionMask, HeadWidth, KvCache, KvCacheShape, MultiHeadAttention,
    MultiHeadAttentionConfig, Observer, Pass, ProjectionLayout, QkvProjection, ScaledDotProduct, Site,
};
use candle_gpt2_kernels::{LayerNorm, Linear, carried};
use candle_gpt2_testing::{Fixture, assert_close, checkpoints, pattern, values, worst};

/// f32 products of two libraries over at most 40 terms.
const PARITY: f64 = 1e-5;
/// The same f32 arithmetic in another order of summation.
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

/// Projections of their own for queries, keys, values and output, with biases, and no mask.
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

/// A layer with separate projections and the same layer fused.
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
fn fused_equals_separate_under_the_same_weights() -> Result<()> {
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

fn cache(batch: usize, capacity: usize) -> Result<KvCache> {
    KvCache::new(KvCacheShape { batch, num_heads: 4, capacity, head_dim: 6 }, DType::F32, &Device::Cpu)
}

fn step(layer: &MultiHeadAttention, x: &Tensor, mask: &AttentionMask, cache: &mut KvCache) -> Result<Tensor> {
    layer.forward_with(x, None, mask, Some(cache), &mut Pass::inference())
}

#[test]
fn any_split_into_cached_chunks_equals_the_whole() -> Result<()> {
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
fn rows_of_different_lengths_equal_the_rows_alone() -> Result<()> {
    for mask in [AttentionMask::Causal, AttentionMask::Window { before: 2, after: 0 }] {
        rows_equal_the_rows_alone(&mask)?;
    }
    Ok(())
}

fn rows_equal_the_rows_alone(mask: &AttentionMask) -> Result<()> {
    let (_, layer) = separate_and_fused()?;
    let x = pattern(&[2, 6, 15], 2.0, 0);
    // Row 0 is cut back to two tokens, row 1 keeps four; then both get the same step.
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

/// Sees every intermediate and changes none: the pass takes the dense products.
struct Onlooker;

impl Observer for Onlooker {
    fn wants(&self, _: Site) -> bool {
        true
    }

    fn observe(&mut self, _: Site, value: Tensor) -> Result<Tensor> {
        Ok(value)
    }
}

/// A row that overflowed in f16 leaves NaN in its slot; the next row there has fewer tokens than its neighbour.
#[test]
fn what_a_slot_held_before_reaches_no_row() -> Result<()> {
    let (_, layer) = separate_and_fused()?;
    let (mask, lengths) = (AttentionMask::Causal, [2, 4]);
    let observed = |x: &Tensor, cache: &mut KvCache| {
        layer.forward_with(x, None, &mask, Some(cache), &mut Pass::inference().observed_by(&mut Onlooker))
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
fn a_fork_goes_its_own_way() -> Result<()> {
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
fn a_full_cache_refuses_and_stays_as_it_was() -> Result<()> {
    let (_, layer) = separate_and_fused()?;
    let mut cache = cache(1, 4)?;
    step(&layer, &pattern(&[1, 3, 15], 2.0, 0), &AttentionMask::Causal, &mut cache)?;
    let error = step(&layer, &pattern(&[1, 2, 15], 2.0, 0), &AttentionMask::Causal, &mut cache).unwrap_err();
    assert!(
        error.to_string().contains("3 tokens held and 2 more do not fit into a capacity of 4"),
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
fn batch_rows_equal_the_rows_alone() -> Result<()> {
    let (layer, _) = separate_and_fused()?;
    let x = pattern(&[3, 5, 15], 2.0, 0);
    let together = layer.forward_masked(&x, &AttentionMask::Causal)?;
    for row in 0..3 {
        let alone = layer.forward_masked(&x.narrow(0, row, 1)?, &AttentionMask::Causal)?;
        assert_close(&together.narrow(0, row, 1)?, &alone, SAME, &format!("row {row}"));
    }
    Ok(())
}

/// A narrow head in the strict sense of "Transformers from scratch" (Bloem, 2019) sees only its slice of the input:
/// block-diagonal projections. A wide head has the whole width to itself.
#[test]
fn narrow_heads_with_block_diagonal_weights_see_only_their_slice() -> Result<()> {
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
    let vb = candle_nn::VarBuilder::from_varmap(&parameters, DType::F32, &Device::Cpu);
    let config =
        MultiHeadAttentionConfig { head_width: HeadWidth::Wide, ..MultiHeadAttentionConfig::new(6, 6, 2) };
    let wide = MultiHeadAttention::load(&config, vb.clone())?;
    assert_eq!(wide.head_dim(), 6);
    assert_eq!(wide.parameter_count(), 3 * 12 * 6 + 6 * 12 + 6);
    assert_eq!(wide.forward_masked(&x, &mask)?.dims(), [1, 4, 6]);
    Ok(())
}

/// A wide head of the full width equals a layer of one head; two of them add their halves of the output projection.
#[test]
fn wide_heads_are_layers_of_one_head_side_by_side() -> Result<()> {
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

/// Dropout falls on the attention weights: with rate 1 no value is left, and the output is the bias of `out_proj`.
#[test]
fn dropout_acts_on_the_attention_weights() -> Result<()> {
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

/// huggingface/transformers#382: the mask of f16 is no number beyond its range; what is hidden has no weight, and nothing is NaN.
#[test]
fn a_mask_in_half_precision_hides_without_overflow() -> Result<()> {
    let heads = |offset| pattern(&[2, 3, 7, 4], 2.0, offset).to_dtype(DType::F16);
    let (q, k, v) = (heads(0)?, heads(500)?, heads(900)?);
    let attend = |k: &Tensor, v: &Tensor| {
        ScaledDotProduct::new(4).forward(&q, k, v, &AttentionMask::Causal, &[], &mut Pass::inference())
    };
    let output = attend(&k, &v)?;
    assert!(values(&output).iter().all(|value| value.is_finite()));
    // Other keys and values after the third change nothing up to it.
    let other = |x: &Tensor| Tensor::cat(&[&x.narrow(2, 0, 3)?, &(x.narrow(2, 3, 4)? * 50.0)?], 2);
    let changed = attend(&other(&k)?, &other(&v)?)?;
    assert_eq!(values(&output.narrow(2, 0, 3)?), values(&changed.narrow(2, 0, 3)?));
    assert_ne!(values(&output), values(&changed));
    Ok(())
}

/// huggingface/transformers#13573: scores beyond 65,504 leave the range of f16; in f32 they are what they are.
#[test]
fn scores_survive_half_precision() -> Result<()> {
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
    // One rounding of the weights and one of the result to 11 bits.
    assert_close(&half, &attend(DType::F64)?, 2e-3, "scores in f32");
    Ok(())
}

/// candle's fused softmax would cut these gradients without an error.
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
                gradients.get(weight).unwrap_or_else(|| panic!("{mask:?}: weight {index} has none"));
            assert!(values(gradient).iter().any(|value| value.abs() > 1e-4), "{mask:?}: weight {index}");
        }
    }
    Ok(())
}

#[test]
fn sizes_that_do_not_fit_are_refused_by_name() {
    let linear = |output: usize, input: usize| Linear::new(pattern(&[output, input], 1.0, 0), None).unwrap();
    let refuse = |projection, out_proj, num_heads, expected: AttentionError| {
        let error = MultiHeadAttention::new(projection, out_proj, num_heads).unwrap_err();
        // With RUST_BACKTRACE set, candle appends a backtrace to the message.
        assert!(error.to_string().starts_with(&expected.to_string()), "expected {expected}, found {error}");
    };
    let fused = || QkvProjection::Fused(linear(18, 5));
    refuse(fused(), linear(5, 6), 4, AttentionError::HeadsDoNotDivideWidth { num_heads: 4, width: 6 });
    refuse(fused(), linear(5, 6), 0, AttentionError::ZeroSize { name: "number of heads" });
    let what = "the output projection's input";
    refuse(fused(), linear(5, 7), 2, AttentionError::WidthMismatch { what, expected: 6, found: 7 });
    let uneven = QkvProjection::Separate { query: linear(6, 5), key: linear(4, 5), value: linear(6, 5) };
    let what = "the key projection";
    refuse(uneven, linear(5, 6), 2, AttentionError::WidthMismatch { what, expected: 6, found: 4 });
    let what = "the fused projection";
    let uneven = QkvProjection::Fused(linear(19, 5));
    refuse(uneven, linear(5, 6), 2, AttentionError::WidthMismatch { what, expected: 18, found: 19 });
}

/// A pass at positions in memory is a step of inference, and says so; the cache counts the tokens when it is told to.
#[test]
fn a_step_at_positions_in_memory() -> Result<()> {
    let (separate, layer) = separate_and_fused()?;
    let x = pattern(&[1, 5, 15], 2.0, 0);
    let positions = Tensor::new(&[[4u32]], &Device::Cpu)?;
    let (mut numbers, mut memory) = (cache(1, 5)?, cache(1, 5)?);
    for cache in [&mut numbers, &mut memory] {
        step(&layer, &x.narrow(1, 0, 4)?, &AttentionMask::Causal, cache)?;
    }
    let token = x.narrow(1, 4, 1)?;
    let expected = step(&layer, &token, &AttentionMask::Causal, &mut numbers)?;
    let mut pass = Pass::inference().at(positions.clone());
    let found = layer.forward_with(&token, None, &AttentionMask::Causal, Some(&mut memory), &mut pass)?;
    assert_eq!(values(&found), values(&expected));
    assert_eq!(memory.lengths(), [4]);
    memory.advance(1)?;
    assert_eq!(memory.lengths(), [5]);
    assert!(memory.advance(1).unwrap_err().to_string().contains('5'), "it is full");
    assert_eq!(memory.lengths(), [5]);

    let refused =
        |layer: &MultiHeadAttention, mask: AttentionMask, cache: Option<&mut KvCache>, pass: Pass| {
            let error = layer.forward_with(&token, None, &mask, cache, &mut pass.at(positions.clone()));
            error.unwrap_err().to_string().contains(&AttentionError::NotAStep.to_string())
        };
    let mut fresh = cache(1, 5)?;
    assert!(refused(&layer, AttentionMask::Causal, None, Pass::inference()));
    assert!(refused(&layer, AttentionMask::Bidirectional, Some(&mut fresh), Pass::inference()));
    assert!(refused(&separate, AttentionMask::Causal, Some(&mut fresh), Pass::inference()));
    let mut generator = candle_gpt2_arithmetic::RandomStream::new(1);
    assert!(refused(&layer, AttentionMask::Causal, Some(&mut fresh), Pass::training(&mut generator)));
    Ok(())
}

#[test]
fn a_cache_is_refused_in_training() -> Result<()> {
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

#[test]
fn a_cache_and_a_memory_exclude_each_other() -> Result<()> {
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

/// The attention of OpenAI's GPT-2 124M, blocks 0 and 11, at 768 dims and 12 heads, equals transformers.
#[test]
fn real_gpt2_attention_equals_transformers() -> Result<()> {
    /// Required: relative to the size of the expected value.
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
            // Each channel against its own largest value: an element near zero is a sum of terms of that size.
            let channels = expected.dim(D::Minus1)?;
            let (actual, expected) =
                (actual.reshape(((), channels))?.t()?, expected.reshape(((), channels))?.t()?);
            let largest = expected.abs()?.max_keepdim(1)?;
            // A channel that is zero throughout must be so here too, and NaN is never within the bound.
            let excess = (actual - &expected)?.abs()?.broadcast_sub(&(largest * RELATIVE)?)?;
            let worst = worst(values(&excess));
            assert!(worst <= 0.0, "h.{block} {name}: {worst:e} beyond {RELATIVE:e} of the channel's largest");
        }
    }
    Ok(())
}

/// A failed call leaves the cache as it was: another try does not attend to its own keys twice.
#[test]
fn an_error_leaves_the_cache_unchanged() -> Result<()> {
    let (_, layer) = separate_and_fused()?;
    let mut cache = cache(2, 16)?;
    let x = pattern(&[2, 3, 15], 2.0, 0);
    step(&layer, &x, &AttentionMask::Causal, &mut cache)?;
    let before = cache.tensors()?.map(|tensor| values(&tensor));
    let rows = || -> Arc<[usize]> { [1, 2].into() };
    let five_tokens = pattern(&[1, 5, 15], 2.0, 9);
    let additive = AttentionMask::Additive(Tensor::zeros((7, 7), DType::F32, &Device::Cpu)?);
    let mut refused = |x: &Tensor, mask: &AttentionMask, pass: &mut Pass| {
        let error = layer.forward_with(x, None, mask, Some(&mut cache), pass).unwrap_err().to_string();
        assert_eq!(cache.lengths(), [3, 3], "{error}");
        error
    };
    let of_rows = refused(&five_tokens, &AttentionMask::Causal, &mut Pass::inference().of_rows(rows()));
    assert_eq!(of_rows, "attention: expected texts of 3 tokens in all, found 5 queries and 5 keys");
    let three_tokens = five_tokens.narrow(1, 0, 3)?;
    for mask in [&AttentionMask::Bidirectional, &additive] {
        let error = refused(&three_tokens, mask, &mut Pass::inference().of_rows(rows()));
        assert!(error.contains("give `AttentionMask::Causal`"), "{error}");
    }
    let error = refused(&x, &AttentionMask::CausalRows(rows()), &mut Pass::inference());
    assert!(error.contains("works without a cache"), "{error}");
    refused(&x, &additive, &mut Pass::inference());
    // The same of the layer below, whose queries have another width than the keys.
    let attention = ScaledDotProduct::new(6);
    let (q, k) = (pattern(&[2, 4, 3, 8], 1.0, 0), pattern(&[2, 4, 3, 6], 1.0, 1));
    attention
        .forward_cached(&q, [&k, &k], &AttentionMask::Causal, &mut cache, &mut Pass::inference())
        .unwrap_err();
    assert_eq!(cache.lengths(), [3, 3]);
    assert_eq!(cache.tensors()?.map(|tensor| values(&tensor)), before);
    Ok(())
}
