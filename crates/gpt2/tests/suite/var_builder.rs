//! The model from a candle user's perspective: published files, `VarMap`, `AdamW` and `Sequential`.

use std::collections::HashMap;

use candle_core::{DType, Device, Result, Tensor};
use candle_gpt2::{
    Activation, AttentionError, AttentionMask, ConfigError, FeedForward, Gpt2Config, Gpt2DoubleHeads,
    Gpt2ForSequenceClassification, Gpt2ForTokenClassification, Gpt2LMHeadModel, Gpt2Model, HeadKind,
    KernelError, LayerNorm, Linear, LogitsFor, ModelError, MultiHeadAttention, MultiHeadAttentionConfig,
    Pass, carried,
};
use candle_gpt2_testing::{Fixture, assert_close, assert_parity, fixture_path, pattern};
use candle_nn::{AdamW, Module, Optimizer, ParamsAdamW, VarBuilder, VarMap};

/// Tolerance between two f32 implementations, through all layers.
const LOGITS: f64 = 1e-4;

fn sizes() -> Gpt2Config {
    Gpt2Config { vocab_size: 61, n_positions: 32, n_embd: 24, n_layer: 3, n_head: 3, ..Gpt2Config::gpt2() }
}

fn config(fixture: &Fixture) -> Gpt2Config {
    Gpt2Config::from_json(&fixture.recorded()["config"].to_string()).unwrap()
}

fn ids(fixture: &Fixture) -> Result<Tensor> {
    fixture.tensor("input_ids").to_dtype(DType::U32)
}

/// A mapped transformers file: prefix `transformer.`, matrices `(in, out)`, and unrelated tensors.
#[test]
#[expect(unsafe_code, reason = "nothing changes the fixture while it is mapped")]
fn memory_mapped_file_matches_transformers() -> Result<()> {
    for case in ["gelu_new", "untied", "odd_head", "inverse_layer_scale"] {
        let fixture = Fixture::open(&format!("gpt2/{case}"));
        let file = fixture_path(&format!("gpt2/{case}.safetensors"));
        // SAFETY: Nothing changes the file while it is mapped.
        let vb = unsafe { VarBuilder::from_mmaped_safetensors(&[file], DType::F32, &Device::Cpu)? };
        let model = Gpt2LMHeadModel::load(&config(&fixture), vb.clone())?;
        let expected = fixture.tensor("expected.logits");
        assert_parity(&model.forward(&ids(&fixture)?)?, &expected, LOGITS, case);
        let hidden_states = Gpt2Model::load(&config(&fixture), vb)?.forward(&ids(&fixture)?)?;
        assert_parity(&model.lm_head().forward(&hidden_states)?, &expected, LOGITS, case);
    }
    Ok(())
}

/// Uses OpenAI's original format: no prefix, attention masks as buffers, and a repeated head.
#[test]
fn unprefixed_file_with_buffers_loads_the_same_model() -> Result<()> {
    let fixture = Fixture::open("gpt2/gelu_new");
    let config = config(&fixture);
    let mut tensors = fixture.tensors_below("transformer.");
    for layer in 0..config.n_layer {
        let mask = Tensor::tril2(config.n_positions, DType::F32, &Device::Cpu)?.unsqueeze(0)?.unsqueeze(0)?;
        tensors.insert(format!("h.{layer}.attn.bias"), mask);
        tensors.insert(format!("h.{layer}.attn.masked_bias"), Tensor::new(-1e4f32, &Device::Cpu)?);
    }
    tensors.insert("lm_head.weight".into(), tensors["wte.weight"].clone());
    let file = std::env::temp_dir().join(format!("candle-gpt2-{}.safetensors", std::process::id()));
    candle_core::safetensors::save(&tensors, &file)?;
    let bytes = std::fs::read(&file)?;
    std::fs::remove_file(&file)?;
    let vb = VarBuilder::from_buffered_safetensors(bytes, DType::F32, &Device::Cpu)?;
    let model = Gpt2LMHeadModel::load(&config, vb)?;
    let prefixed = Gpt2LMHeadModel::load(&config, fixture.parameters(""))?;
    let [plain, prefixed] = [model, prefixed].map(|model| model.forward(&ids(&fixture)?)?.to_vec3::<f32>());
    assert_eq!(plain?, prefixed?);
    Ok(())
}

/// `attn.c_proj` is square, so its shape does not reveal its orientation; the other shapes do.
#[test]
fn transposed_matrices_are_rejected_by_name() -> Result<()> {
    let fixture = Fixture::open("gpt2/gelu_new");
    let transposed = fixture.tensors_below("transformer.").into_iter().map(|(name, tensor)| {
        let is_conv1d = name.starts_with("h.") && tensor.rank() == 2;
        (name, if is_conv1d { tensor.t().unwrap() } else { tensor })
    });
    let vb = VarBuilder::from_tensors(transposed.collect(), DType::F32, &Device::Cpu);
    let error = Gpt2LMHeadModel::load(&config(&fixture), vb).unwrap_err().to_string();
    assert!(error.contains("h.0.attn.c_attn.weight"), "{error}");
    Ok(())
}

/// Compares values bit for bit.
fn assert_same(found: &Tensor, expected: &Tensor, what: &str) {
    let values = |tensor: &Tensor| tensor.to_vec3::<f32>().unwrap();
    assert_eq!(values(found), values(expected), "{what}");
}

/// Returns a tensor's mean and standard deviation.
fn spread(tensor: &Tensor) -> (f64, f64) {
    let values = tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap();
    let count = values.len() as f64;
    let mean = values.iter().map(|value| f64::from(*value)).sum::<f64>() / count;
    let variance = values.iter().map(|value| (f64::from(*value) - mean).powi(2)).sum::<f64>() / count;
    (mean, variance.sqrt())
}

#[test]
fn empty_var_map_is_initialized_like_gpt2() -> Result<()> {
    let config = Gpt2Config { n_embd: 96, n_layer: 2, ..sizes() };
    let variables = VarMap::new();
    Gpt2LMHeadModel::load(&config, VarBuilder::from_varmap(&variables, DType::F32, &Device::Cpu))?;
    let variables = variables.data().lock().unwrap();
    assert_eq!(variables.len(), candle_gpt2::expected_parameters(&config).len());
    assert_eq!(variables["transformer.h.0.mlp.c_fc.weight"].dims(), [96, 384], "(in, out), as published");
    for (name, variable) in variables.iter() {
        let (mean, deviation) = spread(variable);
        let expected = match name {
            name if name.ends_with("bias") => (0.0, 0.0),
            name if name.contains("ln_") => (1.0, 0.0),
            name if name.ends_with("c_proj.weight") => (0.0, 0.02 / 4f64.sqrt()),
            _ => (0.0, 0.02),
        };
        // Each tensor has thousands of samples. The tolerances are 4 standard errors for the smallest tensor.
        assert!((mean - expected.0).abs() < 0.0015, "{name}: mean {mean}");
        assert!((deviation - expected.1).abs() < 0.001, "{name}: deviation {deviation}");
    }
    Ok(())
}

/// For every head, an empty `VarMap` gets transformers' names, even if the caller adds the prefix.
#[test]
fn empty_var_map_has_the_names_of_published_files() -> Result<()> {
    for (file, head) in [
        ("gpt2/gelu_new", HeadKind::LanguageModel),
        ("gpt2/untied", HeadKind::LanguageModel),
        ("heads/sequence/model", HeadKind::SequenceClassification),
        ("heads/token/model", HeadKind::TokenClassification),
        ("heads/double/model", HeadKind::DoubleHeads),
    ] {
        let tensors =
            candle_core::safetensors::load(fixture_path(&format!("{file}.safetensors")), &Device::Cpu)?;
        let is_parameter = |name: &&String| !name.starts_with("expected.") && *name != "input_ids";
        let mut published: Vec<_> = tensors.keys().filter(is_parameter).cloned().collect();
        published.sort();
        let n_layer = published.iter().filter(|name| name.ends_with("ln_1.weight")).count();
        let id2label = (0..5).map(|label: u32| label.to_string()).collect();
        let config =
            Gpt2Config { n_layer, head, id2label, tie_word_embeddings: !file.ends_with("untied"), ..sizes() };
        for prefix in ["", "transformer", "model", "model.transformer"] {
            let variables = VarMap::new();
            let vb = VarBuilder::from_varmap(&variables, DType::F32, &Device::Cpu);
            let vb = prefix.split('.').filter(|part| !part.is_empty()).fold(vb, |vb, part| vb.pp(part));
            // The second model shares the variables of the first.
            for _ in 0..2 {
                match head {
                    HeadKind::LanguageModel => drop(Gpt2LMHeadModel::load(&config, vb.clone())?),
                    HeadKind::SequenceClassification => {
                        drop(Gpt2ForSequenceClassification::load(&config, vb.clone())?);
                    }
                    HeadKind::TokenClassification => {
                        drop(Gpt2ForTokenClassification::load(&config, vb.clone())?);
                    }
                    HeadKind::DoubleHeads => drop(Gpt2DoubleHeads::load(&config, vb.clone())?),
                }
            }
            let mut saved: Vec<_> = variables.data().lock().unwrap().keys().cloned().collect();
            saved.sort();
            let outer = prefix.trim_end_matches("transformer");
            let outer = if outer == "model" { "model." } else { outer };
            let expected: Vec<_> = published.iter().map(|name| format!("{outer}{name}")).collect();
            assert_eq!(saved, expected, "{file} below `{prefix}`");
        }
    }
    Ok(())
}

/// A published file also loads from a `VarBuilder` that is already below its prefix.
#[test]
fn untied_file_loads_below_its_prefix() -> Result<()> {
    let fixture = Fixture::open("gpt2/untied");
    let vb = fixture.parameters("");
    let at_root = Gpt2LMHeadModel::load(&config(&fixture), vb.clone())?.forward(&ids(&fixture)?)?;
    let below = Gpt2LMHeadModel::load(&config(&fixture), vb.pp("transformer"))?.forward(&ids(&fixture)?)?;
    assert_same(&below, &at_root, "the same parameters");
    Ok(())
}

#[test]
fn attention_loads_from_a_block_of_a_file() -> Result<()> {
    let fixture = Fixture::open("gpt2/gelu_new");
    let (config, vb) = (config(&fixture), fixture.parameters(""));
    let model = Gpt2LMHeadModel::load(&config, vb.clone())?;
    let layer = MultiHeadAttentionConfig::gpt2(config.n_embd, config.n_head);
    let layer = MultiHeadAttention::load(&layer, vb.pp("transformer.h.1.attn"))?;
    let x = pattern(&[2, 5, config.n_embd], 1.0, 0);
    let expected = model.transformer().blocks()[1].attn().forward_masked(&x, &AttentionMask::Causal)?;
    assert_same(&layer.forward_masked(&x, &AttentionMask::Causal)?, &expected, "attention of block 1");
    Ok(())
}

/// Gradients would not reach the cached keys and values, so the result must be a constant.
#[test]
fn cached_pass_of_a_trainable_model_is_a_constant() -> Result<()> {
    let variables = VarMap::new();
    let vb = VarBuilder::from_varmap(&variables, DType::F32, &Device::Cpu);
    for tie_word_embeddings in [true, false] {
        let config = Gpt2Config { tie_word_embeddings, ..sizes() };
        let model = Gpt2LMHeadModel::load(&config, vb.pp(tie_word_embeddings))?;
        let ids = Tensor::new(&[[3u32, 5, 8, 13, 21]], &Device::Cpu)?;
        let whole = model.forward(&ids)?;
        assert!(whole.track_op());
        let mut cache = model.new_cache(1, 8)?;
        for (first, count) in [(0, 3), (3, 1), (4, 1)] {
            let part = ids.narrow(1, first, count)?;
            let mut pass = Pass::inference();
            let logits = model.forward_with(&part, LogitsFor::EveryToken, Some(&mut cache), &mut pass)?;
            assert_close(&logits, &whole.narrow(1, first, count)?, LOGITS, "cached");
            assert!(!logits.track_op());
            let gradients = logits.sqr()?.sum_all()?.backward()?;
            assert!(variables.all_vars().iter().all(|variable| gradients.get(variable).is_none()));
        }
        let mut cache = model.new_cache(1, 8)?;
        let hidden = model.transformer().forward_with(&ids, Some(&mut cache), &mut Pass::inference())?;
        assert!(!hidden.track_op());
    }
    Ok(())
}

/// `Gpt2LMHeadModel` loads an output head even if the configuration belongs to a classifier.
#[test]
fn untied_output_head_loads_with_any_configured_head() -> Result<()> {
    let id2label = ["ham", "spam"].map(str::to_owned).to_vec();
    let head = HeadKind::SequenceClassification;
    let config = Gpt2Config { head, id2label, tie_word_embeddings: false, ..sizes() };
    let model = Gpt2LMHeadModel::load(&config, VarBuilder::zeros(DType::F32, &Device::Cpu))?;
    assert_eq!((model.lm_head().out_features(), model.lm_head().in_features()), (61, 24));
    Ok(())
}

#[test]
fn candle_adamw_steps_lower_the_loss() -> Result<()> {
    let variables = VarMap::new();
    let vb = VarBuilder::from_varmap(&variables, DType::F32, &Device::Cpu);
    let model = Gpt2LMHeadModel::load(&sizes(), vb)?;
    let mut optimizer = AdamW::new(variables.all_vars(), ParamsAdamW { lr: 1e-2, ..ParamsAdamW::default() })?;
    let ids = Tensor::new(&[[3u32, 5, 8, 13, 21], [2, 4, 8, 16, 32]], &Device::Cpu)?;
    let (inputs, targets) = (ids.narrow(1, 0, 4)?, ids.narrow(1, 1, 4)?.flatten_all()?);
    let loss = || candle_nn::loss::cross_entropy(&model.forward(&inputs)?.flatten_to(1)?, &targets);
    let first = loss()?;
    let gradients = first.backward()?;
    for (name, variable) in variables.data().lock().unwrap().iter() {
        assert!(gradients.get(variable).is_some(), "{name} has no gradient");
    }
    optimizer.step(&gradients)?;
    for _ in 0..4 {
        optimizer.backward_step(&loss()?)?;
    }
    let (first, last) = (first.to_scalar::<f32>()?, loss()?.to_scalar::<f32>()?);
    assert!(last < first - 0.5, "{first} to {last}");
    Ok(())
}

#[test]
fn layers_compose_in_a_sequential() -> Result<()> {
    let variables = VarMap::new();
    let vb = VarBuilder::from_varmap(&variables, DType::F32, &Device::Cpu);
    let attention =
        || MultiHeadAttention::load(&MultiHeadAttentionConfig::new(24, 24, 3), vb.pp("attention")).unwrap();
    let causal = attention();
    let layers = candle_nn::seq()
        .add(LayerNorm::load(24, 1e-5, vb.pp("norm"))?)
        .add(attention())
        .add(FeedForward::load(24, 40, Activation::Relu, vb.pp("mlp"))?)
        .add(Linear::load(24, 7, true, vb.pp("head"))?);
    let x = pattern(&[2, 5, 24], 1.0, 0);
    let y = layers.forward(&x)?;
    assert_eq!(y.dims(), [2, 5, 7]);
    let gradients = y.sqr()?.sum_all()?.backward()?;
    for (name, variable) in variables.data().lock().unwrap().iter() {
        assert!(gradients.get(variable).is_some(), "{name} has no gradient");
    }
    // `Module::forward` applies no attention mask; `forward_masked` applies the given mask.
    let all = causal.forward_masked(&x, &AttentionMask::Bidirectional)?;
    assert_same(&x.apply(&attention())?, &all, "no mask");
    let masked = candle_nn::seq().add_fn(move |x| causal.forward_masked(x, &AttentionMask::Causal));
    let prefix = masked.forward(&x.narrow(1, 0, 3)?)?;
    assert_close(&masked.forward(&x)?.narrow(1, 0, 3)?, &prefix, 1e-6, "causal");
    Ok(())
}

/// The `Module` implementations return the same results as the model's methods.
#[test]
fn model_implements_module() -> Result<()> {
    let fixture = Fixture::open("gpt2/gelu_new");
    let tensors: HashMap<String, Tensor> = fixture.tensors_below("");
    let model = Gpt2LMHeadModel::load(
        &config(&fixture),
        VarBuilder::from_tensors(tensors, DType::F32, &Device::Cpu),
    )?;
    let mut x = model.transformer().forward(&ids(&fixture)?)?;
    assert_same(&ids(&fixture)?.apply(model.transformer())?, &x, "hidden states");
    x = x.apply(model.lm_head())?;
    assert_same(&ids(&fixture)?.apply(&model)?, &x, "logits");
    assert_same(
        &model.head(&model.transformer().forward(&ids(&fixture)?)?, LogitsFor::EveryToken)?,
        &x,
        "head",
    );
    Ok(())
}

/// The error types of every layer can be recovered from candle's error.
#[test]
fn errors_are_recovered_from_candle_errors() -> Result<()> {
    let model = Gpt2LMHeadModel::load(&sizes(), VarBuilder::zeros(DType::F32, &Device::Cpu))?;
    let error = model.forward(&Tensor::zeros((1, 33), DType::U32, &Device::Cpu)?).unwrap_err();
    let expected = ModelError::ContextExceeded { past: 0, added: 33, n_positions: 32 };
    assert_eq!(carried(&error), Some(&expected));
    assert_eq!(error.to_string(), expected.to_string());
    let source = std::error::Error::source(&error).and_then(|source| source.downcast_ref());
    assert_eq!(source, Some(&expected), "in the chain of an `anyhow::Error`");
    let far = &mut Pass::inference().from_position(usize::MAX);
    let error = model.forward_with(&Tensor::new(&[[1u32]], &Device::Cpu)?, LogitsFor::EveryToken, None, far);
    let expected = ModelError::ContextExceeded { past: usize::MAX, added: 1, n_positions: 32 };
    assert_eq!(carried(&error.unwrap_err()), Some(&expected));
    for (ids, id) in
        [(Tensor::new(&[[61u32]], &Device::Cpu)?, 61), (Tensor::new(&[[1i64, -1]], &Device::Cpu)?, -1)]
    {
        let error = model.forward(&ids).unwrap_err();
        assert_eq!(carried(&error), Some(&ModelError::NoSuchToken { id, vocab_size: 61 }));
    }
    let error = model.lm_head().forward(&Tensor::zeros((1, 23), DType::F32, &Device::Cpu)?).unwrap_err();
    assert_eq!(carried(&error), Some(&KernelError::InputWidth { expected: 24, found: vec![1, 23] }));

    let vb = VarBuilder::zeros(DType::F32, &Device::Cpu);
    let error = MultiHeadAttention::load(&MultiHeadAttentionConfig::new(24, 24, 5), vb.clone()).unwrap_err();
    assert_eq!(carried(&error), Some(&AttentionError::HeadsDoNotDivideWidth { num_heads: 5, width: 24 }));
    let error = Gpt2LMHeadModel::load(&Gpt2Config { n_head: 5, ..sizes() }, vb).unwrap_err();
    assert_eq!(carried(&error), Some(&ConfigError::HeadsDoNotDivideWidth { n_head: 5, n_embd: 24 }));
    Ok(())
}
