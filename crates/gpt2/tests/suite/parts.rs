//! Models from parts, and layers in place of their own.

use std::sync::Arc;

use candle_core::{DType, Device, Result, Tensor};
use candle_gpt2::{
    AttentionMask, Block, FeedForward, Gpt2Config, Gpt2LMHeadModel, Gpt2Model, KvCache, Linear, LogitsFor,
    ModelError, MultiHeadAttention, NumberType, Packed, ParameterSize, Pass, Sublayer, carried,
};
use candle_gpt2_testing::{assert_close, pattern};
use candle_nn::{VarBuilder, VarMap};

fn sizes() -> Gpt2Config {
    Gpt2Config { vocab_size: 61, n_positions: 32, n_embd: 24, n_layer: 3, n_head: 3, ..Gpt2Config::gpt2() }
}

fn loaded() -> Result<(VarMap, Gpt2LMHeadModel)> {
    let variables = VarMap::new();
    let vb = VarBuilder::from_varmap(&variables, DType::F32, &Device::Cpu);
    let model = Gpt2LMHeadModel::load(&sizes(), vb)?;
    Ok((variables, model))
}

fn ids() -> Result<Tensor> {
    Tensor::new(&[[5u32, 1, 60, 7], [2, 2, 0, 9]], &Device::Cpu)
}

/// Rebuilds a model from its parts, with `change` applied to each block.
fn rebuilt(model: &Gpt2LMHeadModel, change: impl Fn(Block) -> Block) -> Result<Gpt2LMHeadModel> {
    let body = model.transformer();
    let block = |block: &Block| {
        let parts = (block.ln_1().clone(), block.attn().clone(), block.ln_2().clone(), block.mlp().clone());
        change(Block::new(parts.0, parts.1, parts.2, parts.3))
    };
    let blocks = body.blocks().iter().map(block).collect();
    let body =
        Gpt2Model::new(body.config(), body.wte().clone(), body.wpe().clone(), blocks, body.ln_f().clone())?;
    Gpt2LMHeadModel::new(body, model.lm_head().clone())
}

#[derive(Debug)]
struct SameAttention(MultiHeadAttention);

impl Sublayer for SameAttention {
    fn forward(&self, x: &Tensor, cache: Option<&mut KvCache>, pass: &mut Pass) -> Result<Tensor> {
        let mask = pass.causal_mask();
        self.0.forward_with(x, None, &mask, cache, pass)
    }

    fn size(&self) -> ParameterSize {
        self.0.size()
    }
}

#[derive(Debug)]
struct SameMlp(FeedForward);

impl Sublayer for SameMlp {
    fn forward(&self, x: &Tensor, cache: Option<&mut KvCache>, pass: &mut Pass) -> Result<Tensor> {
        assert!(cache.is_none());
        self.0.forward_with(x, pass)
    }

    fn size(&self) -> ParameterSize {
        self.0.size()
    }
}

#[test]
fn models_of_parts_equal_the_loaded_model_with_and_without_a_cache() -> Result<()> {
    let (variables, model) = loaded()?;
    let own = |block: Block| {
        let (attention, mlp) = (SameAttention(block.attn().clone()), SameMlp(block.mlp().clone()));
        block.with_attention(Arc::new(attention)).with_mlp(Arc::new(mlp))
    };
    let expected = model.forward(&ids()?)?;
    for rebuilt in [rebuilt(&model, |block| block)?, rebuilt(&model, own)?] {
        assert_eq!(rebuilt.parameter_count(), model.parameter_count());
        // The residual is added in another order if the layers are not the model's own.
        assert_close(&rebuilt.forward(&ids()?)?, &expected, 1e-5, "without a cache");
        let mut cache = rebuilt.new_cache(2, 8)?;
        let mut pass = Pass::inference();
        rebuilt.forward_with(&ids()?.narrow(1, 0, 3)?, LogitsFor::LastToken, Some(&mut cache), &mut pass)?;
        let last = rebuilt.forward_with(
            &ids()?.narrow(1, 3, 1)?,
            LogitsFor::LastToken,
            Some(&mut cache),
            &mut pass,
        )?;
        assert_close(&last, &expected.narrow(1, 3, 1)?, 1e-5, "with a cache");
        let gradients = rebuilt.forward(&ids()?)?.sqr()?.sum_all()?.backward()?;
        assert!(variables.all_vars().iter().all(|variable| gradients.get(variable).is_some()));
    }
    Ok(())
}

/// Activation that GPT-2 does not have, in place of an MLP.
#[derive(Debug)]
struct Mish(FeedForward);

impl Sublayer for Mish {
    fn forward(&self, x: &Tensor, _: Option<&mut KvCache>, _: &mut Pass) -> Result<Tensor> {
        let inner = self.0.expand().forward(x)?;
        let softplus = (inner.exp()? + 1.0)?.log()?;
        self.0.contract().forward(&(inner * softplus.tanh()?)?)
    }
}

#[test]
fn mlp_of_ones_own_changes_the_model() -> Result<()> {
    let (_, model) = loaded()?;
    let own = rebuilt(&model, |block| {
        let mlp = Mish(block.mlp().clone());
        block.with_mlp(Arc::new(mlp))
    })?;
    let difference =
        (own.forward(&ids()?)? - model.forward(&ids()?)?)?.abs()?.max_all()?.to_scalar::<f32>()?;
    assert!(difference > 1e-4, "{difference}");
    Ok(())
}

#[derive(Debug)]
struct TooNarrow;

impl Sublayer for TooNarrow {
    fn forward(&self, x: &Tensor, _: Option<&mut KvCache>, _: &mut Pass) -> Result<Tensor> {
        x.narrow(2, 0, 1)
    }
}

#[test]
fn parts_of_the_wrong_shape_are_named() -> Result<()> {
    let (_, model) = loaded()?;
    let body = model.transformer();
    let (wte, wpe, ln_f) = (body.wte().clone(), body.wpe().clone(), body.ln_f().clone());
    let error = Gpt2Model::new(&sizes(), wte.clone(), wpe, body.blocks()[..2].to_vec(), ln_f).unwrap_err();
    assert_eq!(error.to_string(), "blocks: expected [3], found [2]");
    let head = Linear::new(pattern(&[9, 24], 0.1, 1), None)?;
    let error = Gpt2LMHeadModel::new(body.clone(), head).unwrap_err();
    assert_eq!(error.to_string(), "lm_head: expected [61, 24], found [9, 24]");
    let own = rebuilt(&model, |block| block.with_attention(Arc::new(TooNarrow)))?;
    let error = own.forward(&ids()?).unwrap_err();
    assert!(matches!(carried(&error), Some(ModelError::OwnLayer { .. })), "{error}");
    Ok(())
}

#[test]
fn heads_of_ones_own_may_have_a_bias() -> Result<()> {
    let (_, model) = loaded()?;
    let bias = pattern(&[61], 0.1, 2);
    let head = Linear::new(model.lm_head().weight().to_tensor()?, Some(bias.clone()))?;
    let own = Gpt2LMHeadModel::new(model.transformer().clone(), head)?;
    let expected = model.forward(&ids()?)?.broadcast_add(&bias)?;
    assert_close(&own.forward(&ids()?)?, &expected, 1e-6, "logits with a bias");
    Ok(())
}

#[test]
fn more_blocks_than_configured_are_an_error() -> Result<()> {
    let (variables, _) = loaded()?;
    let vb = || VarBuilder::from_varmap(&variables, DType::F32, &Device::Cpu);
    let fewer = Gpt2Config { n_layer: 2, ..sizes() };
    for error in [
        Gpt2LMHeadModel::load(&fewer, vb()).unwrap_err(),
        Gpt2Model::load(&fewer, Packed::new(vb(), NumberType::Q8)).unwrap_err(),
    ] {
        assert_eq!(carried(&error), Some(&ModelError::MoreBlocks { n_layer: 2 }));
    }
    Ok(())
}

#[test]
fn half_precision_parameters_are_packed() -> Result<()> {
    let (variables, model) = loaded()?;
    let variables = variables.data().lock().unwrap();
    let tensors = variables.iter().map(|(name, one)| (name.clone(), one.as_tensor().clone()));
    let vb = VarBuilder::from_tensors(tensors.collect(), DType::F16, &Device::Cpu);
    let packed = Gpt2LMHeadModel::load(&sizes(), Packed::new(vb, NumberType::F16))?;
    // Weights and embeddings rounded to f16, through three blocks.
    assert_close(&packed.forward(&ids()?)?, &model.forward(&ids()?)?, 2e-3, "f16");
    Ok(())
}

#[test]
fn logits_past_the_last_token_are_an_error() -> Result<()> {
    let (_, model) = loaded()?;
    let wanted = LogitsFor::Tokens { first: 2, count: 3 };
    let error = model.forward_with(&ids()?, wanted, None, &mut Pass::inference()).unwrap_err();
    assert_eq!(carried(&error), Some(&ModelError::NoSuchLogits { first: 2, count: 3, tokens: 4 }));
    Ok(())
}

/// Padding on the left sees only padding, and must not reach the tokens after it.
#[test]
fn left_padded_rows_equal_rows_alone() -> Result<()> {
    let (_, model) = loaded()?;
    let attention = model.transformer().blocks()[0].attn();
    let x = pattern(&[1, 5, 24], 0.5, 3);
    let future = Tensor::new(&[[[[f32::NEG_INFINITY; 5]; 5]]], &Device::Cpu)?;
    let future = Tensor::triu2(5, DType::U8, &Device::Cpu)?
        .sub(&Tensor::eye(5, DType::U8, &Device::Cpu)?)?
        .reshape((1, 1, 5, 5))?
        .where_cond(&future, &future.zeros_like()?)?;
    let padding = AttentionMask::hiding(&Tensor::new(&[[[[1u8, 1, 0, 0, 0]]]], &Device::Cpu)?)?;
    let AttentionMask::Additive(padding) = padding else { unreachable!() };
    let mask = AttentionMask::Additive(padding.broadcast_add(&future)?);
    let padded = attention.forward_masked(&x, &mask)?;
    let alone = attention.forward_masked(&x.narrow(1, 2, 3)?, &AttentionMask::Causal)?;
    assert_close(&padded.narrow(1, 2, 3)?, &alone, 1e-6, "tokens");
    assert!(padded.flatten_all()?.to_vec1::<f32>()?.iter().all(|value| value.is_finite()));
    let narrow = AttentionMask::Additive(Tensor::zeros((5, 4), DType::F32, &Device::Cpu)?);
    let error = attention.forward_masked(&x, &narrow).unwrap_err().to_string();
    assert!(error.contains("expected a mask that broadcasts to (B, H, 5, 5), found shape [5, 4]"), "{error}");
    Ok(())
}
