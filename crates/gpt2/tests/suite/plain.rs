//! The plain GPT-2 of the example, compared with transformers and with the fast model.

use candle_core::{DType, Device, Result, Tensor};
use candle_gpt2::{Gpt2Config, Gpt2LMHeadModel, LogitsFor, Pass};
use candle_gpt2_testing::{Fixture, assert_parity};
use candle_nn::VarBuilder;

#[path = "../../examples/plain.rs"]
#[allow(dead_code, reason = "its `main` is the example's")]
mod example;

/// Absolute tolerance for logits; the requirement is 1e-4.
const LOGITS: f64 = 1e-4;

#[test]
fn logits_equal_transformers() -> Result<()> {
    for case in ["gelu_new", "odd_head", "one_layer", "one_head"] {
        let fixture = Fixture::open(&format!("gpt2/{case}"));
        let config = Gpt2Config::from_json(&fixture.recorded()["config"].to_string()).unwrap();
        let vb = VarBuilder::from_tensors(fixture.tensors_below(""), DType::F32, &Device::Cpu);
        let model = example::PlainGpt2::load(&config, vb.pp("transformer"))?;
        let logits = model.forward(&fixture.tensor("input_ids").to_dtype(DType::U32)?)?;
        assert_parity(&logits, &fixture.tensor("expected.logits"), LOGITS, case);
    }
    Ok(())
}

#[test]
fn logits_of_the_built_in_model_equal_the_fast_model() -> Result<()> {
    let config = Gpt2Config::from_json(std::str::from_utf8(candle_gpt2_stories::CONFIG).unwrap()).unwrap();
    let tensors = example::tensors(candle_gpt2_stories::WEIGHTS)?;
    let vb = VarBuilder::from_tensors(tensors, DType::F32, &Device::Cpu);
    let plain = example::PlainGpt2::load(&config, vb.pp("transformer"))?;
    let fast = Gpt2LMHeadModel::load(&config, vb)?;
    let ids: Vec<u32> = (0..60).map(|index| index * index * 7 % 2000 + 20).collect();
    let ids = Tensor::from_vec(ids, (2, 30), &Device::Cpu)?;
    let expected = fast.forward_with(&ids, LogitsFor::EveryToken, None, &mut Pass::inference())?;
    assert_parity(&plain.forward(&ids)?, &expected, LOGITS, "the built-in model");
    Ok(())
}
