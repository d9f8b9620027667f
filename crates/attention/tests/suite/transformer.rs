//! Compares encoder and decoder blocks with PyTorch.
//!
//! The counterparts are `nn.TransformerEncoderLayer` and `nn.TransformerDecoderLayer`.

use std::collections::HashMap;

use candle_core::{D, DType, Device, Result, Tensor};
use candle_gpt2_attention::transformer::{
    BlockConfig, DecoderLayer, EncoderDecoder, EncoderLayer, OutputHead,
};
use candle_gpt2_attention::{AttentionMask, Pass, SinusoidalPositions};
use candle_gpt2_kernels::{Activation, Linear};
use candle_gpt2_testing::{Fixture, assert_close, pattern, values};
use candle_nn::VarBuilder;

/// Tolerance for two f32 blocks with normalized outputs.
const PARITY: f64 = 1e-5;

#[test]
fn blocks_equal_pytorch() -> Result<()> {
    for (name, activation) in [("relu", Activation::Relu), ("gelu", Activation::Gelu)] {
        let fixture = Fixture::open(&format!("transformer_{name}"));
        let config = BlockConfig { d_model: 24, num_heads: 3, d_feed_forward: 40, activation, dropout: 0.0 };
        let encoder = EncoderLayer::load(&config, fixture.parameters("encoder."))?;
        let decoder = DecoderLayer::load(&config, fixture.parameters("decoder."))?;
        let mut pass = Pass::inference();
        let memory = encoder.forward(&fixture.tensor("source"), &AttentionMask::Bidirectional, &mut pass)?;
        assert_close(&memory, &fixture.tensor("memory"), PARITY, &format!("encoder with {name}"));
        let output = decoder.forward(&fixture.tensor("target"), &memory, &mut pass)?;
        assert_close(&output, &fixture.tensor("output"), PARITY, &format!("decoder with {name}"));
    }
    Ok(())
}

/// Fills parameters by the same rule as the exporting script (`fill_pattern`).
///
/// In order of their names, each parameter has its own offset. Norm weights are around 1.
fn patterned(prefix: &str, shapes: &[(&str, &[usize])], layers: usize) -> HashMap<String, Tensor> {
    let mut names: Vec<(String, &[usize])> = (0..layers)
        .flat_map(|layer| shapes.iter().map(move |(name, shape)| (format!("layers.{layer}.{name}"), *shape)))
        .collect();
    names.sort();
    let fill = |(index, (name, shape)): (usize, (String, &[usize]))| {
        let values = pattern(shape, 0.1, index as u64 * 1000);
        let is_scale = name.contains("norm") && name.ends_with("weight");
        let values = if is_scale { (values + 1.0).unwrap() } else { values };
        (format!("{prefix}.{name}"), values)
    };
    names.into_iter().enumerate().map(fill).collect()
}

/// Compares a base-size model from "Attention Is All You Need" with PyTorch.
///
/// Each stack has three blocks, and the source has three tokens. The model has d_model 512, 8 heads and an
/// inner width of 2048.
#[test]
fn base_model_sizes_equal_pytorch() -> Result<()> {
    let attention: [(&str, &[usize]); 4] = [
        ("in_proj_bias", &[1536]),
        ("in_proj_weight", &[1536, 512]),
        ("out_proj.bias", &[512]),
        ("out_proj.weight", &[512, 512]),
    ];
    let named = |part: &str| attention.map(|(name, shape)| (format!("{part}.{name}"), shape));
    let (own, cross) = (named("self_attn"), named("multihead_attn"));
    let mut encoder: Vec<(&str, &[usize])> =
        own.iter().map(|(name, shape)| (name.as_str(), *shape)).collect();
    encoder.extend([
        ("linear1.weight", &[2048, 512][..]),
        ("linear1.bias", &[2048]),
        ("linear2.weight", &[512, 2048]),
        ("linear2.bias", &[512]),
        ("norm1.weight", &[512]),
        ("norm1.bias", &[512]),
        ("norm2.weight", &[512]),
        ("norm2.bias", &[512]),
    ]);
    let mut decoder = encoder.clone();
    decoder.extend(cross.iter().map(|(name, shape)| (name.as_str(), *shape)));
    decoder.extend([("norm3.weight", &[512][..]), ("norm3.bias", &[512])]);
    let mut tensors = patterned("encoder", &encoder, 3);
    tensors.extend(patterned("decoder", &decoder, 3));

    let vb = VarBuilder::from_tensors(tensors, DType::F32, &Device::Cpu);
    let config = BlockConfig {
        d_model: 512,
        num_heads: 8,
        d_feed_forward: 2048,
        activation: Activation::Relu,
        dropout: 0.0,
    };
    let model = EncoderDecoder::load(&config, 3, 3, vb.clone())?;
    let fixture = Fixture::open("transformer_003");
    let mut pass = Pass::inference();
    let memory = model.encode(&pattern(&[1, 3, 512], 2.0, 0), &mut pass)?;
    assert_close(&memory, &fixture.tensor("memory"), PARITY, "encoder stack");
    let output = model.decode(&pattern(&[1, 4, 512], 2.0, 77), &memory, &mut pass)?;
    assert_close(&output, &fixture.tensor("output"), 2.0 * PARITY, "decoder stack");
    Ok(())
}

/// Runs every step from embeddings to probabilities, as in "Attention Is All You Need", section 3.
#[test]
fn output_head_returns_probabilities() -> Result<()> {
    let fixture = Fixture::open("transformer_relu");
    let config = BlockConfig {
        d_model: 24,
        num_heads: 3,
        d_feed_forward: 40,
        activation: Activation::Relu,
        dropout: 0.0,
    };
    let encoder = EncoderLayer::load(&config, fixture.parameters("encoder."))?;
    let embedded =
        SinusoidalPositions::new(9, 24, &Device::Cpu)?.forward(&pattern(&[2, 5, 24], 1.0, 0), 0)?;
    let hidden = encoder.forward(&embedded, &AttentionMask::Bidirectional, &mut Pass::inference())?;
    let linear = Linear::new(pattern(&[31, 24], 1.0, 9), Some(pattern(&[31], 1.0, 99)))?;
    let probabilities = OutputHead::new(linear.clone()).forward(&hidden)?;
    assert_eq!(probabilities.dims(), [2, 5, 31]);
    assert!(values(&probabilities.sum(D::Minus1)?).iter().all(|sum| (sum - 1.0).abs() < 1e-6));
    let logits = values(&linear.forward(&hidden)?);
    let exponentials: Vec<f64> = logits[..31].iter().map(|logit| logit.exp()).collect();
    let expected = exponentials[4] / exponentials.iter().sum::<f64>();
    assert!((values(&probabilities)[4] - expected).abs() < 1e-6);
    Ok(())
}

/// With all dropout rates at 1, each sublayer adds zero.
///
/// A block then only normalizes its input, once for each sublayer.
#[test]
fn dropout_applies_to_every_sublayer() -> Result<()> {
    let fixture = Fixture::open("transformer_relu");
    let config = BlockConfig {
        d_model: 24,
        num_heads: 3,
        d_feed_forward: 40,
        activation: Activation::Relu,
        dropout: 1.0,
    };
    let (encoder_vb, decoder_vb) = (fixture.parameters("encoder."), fixture.parameters("decoder."));
    let (encoder, decoder) =
        (EncoderLayer::load(&config, encoder_vb.clone())?, DecoderLayer::load(&config, decoder_vb.clone())?);
    let norms = |vb: &VarBuilder, count: usize, x: &Tensor| {
        (1..=count).try_fold(x.clone(), |x, index| {
            candle_gpt2_kernels::LayerNorm::load(24, 1e-5, vb.pp(format!("norm{index}")))?.forward(&x)
        })
    };
    let (source, target) = (fixture.tensor("source"), fixture.tensor("target"));
    let mut generator = candle_gpt2_arithmetic::RandomStream::new(0);
    let mut pass = Pass::training(&mut generator);
    let encoded = encoder.forward(&source, &AttentionMask::Bidirectional, &mut pass)?;
    assert_close(&encoded, &norms(&encoder_vb, 2, &source)?, PARITY, "encoder");
    let decoded = decoder.forward(&target, &source, &mut pass)?;
    assert_close(&decoded, &norms(&decoder_vb, 3, &target)?, PARITY, "decoder");
    Ok(())
}
