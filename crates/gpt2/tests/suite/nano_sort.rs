//! gpt-nano-sort, a minGPT that sorts six letters, published with its intermediate activations.
//!
//! This reference is independent of transformers. Its linear weights are stored `(out, in)`, and its head is
//! untied.

use std::collections::HashMap;
use std::path::Path;

use base64::Engine;
use candle_core::{DType, Device, Result, Tensor};
use candle_gpt2::{
    ByOutput, Gpt2Cache, Gpt2Config, Gpt2LMHeadModel, LogitsFor, Observer, Pass, Site, SiteKind,
};
use candle_gpt2_testing::{assert_close, checkpoints};
use candle_nn::VarBuilder;
use serde_json::Value;

/// Tolerance between two f32 implementations, through three blocks.
const PARITY: f64 = 1e-5;
const LETTERS: usize = 6;

/// Reads `{"name": {"shape": […], "data": base64 of f32}}`.
fn read(path: &Path) -> HashMap<String, Tensor> {
    let text = std::fs::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let Value::Object(entries) = serde_json::from_slice(&text).unwrap() else { panic!("not an object") };
    let tensor = |value: &Value| {
        let shape: Vec<usize> = serde_json::from_value(value["shape"].clone()).unwrap();
        let bytes =
            base64::engine::general_purpose::STANDARD.decode(value["data"].as_str().unwrap()).unwrap();
        Tensor::from_raw_buffer(&bytes, DType::F32, &shape, &Device::Cpu).unwrap()
    };
    entries
        .iter()
        .filter(|(name, _)| *name != "config")
        .map(|(name, value)| (name.clone(), tensor(value)))
        .collect()
}

fn model(folder: &Path) -> Result<Gpt2LMHeadModel> {
    let config = Gpt2Config {
        vocab_size: 3,
        n_positions: 11,
        n_embd: 48,
        n_layer: 3,
        n_head: 3,
        tie_word_embeddings: false,
        ..Gpt2Config::gpt2()
    };
    let tensors = read(&folder.join("gpt-nano-sort-model.json"));
    let own_name = |(name, tensor): (String, Tensor)| {
        (name.strip_prefix("transformer.").map_or(name.clone(), str::to_owned), tensor)
    };
    let tensors = tensors.into_iter().map(own_name).collect();
    Gpt2LMHeadModel::load(&config, ByOutput(VarBuilder::from_tensors(tensors, DType::F32, &Device::Cpu)))
}

/// Observer that compares every published intermediate.
struct Compare {
    published: HashMap<String, Tensor>,
    compared: usize,
}

fn published_name(site: Site) -> Option<&'static str> {
    Some(match (site.layer, site.kind) {
        (Some(0), SiteKind::ResidPre) => "x",
        (Some(0), SiteKind::Pattern) => "attSm",
        (Some(0), SiteKind::AttnOut) => "yProj",
        (Some(0), SiteKind::MlpPost) => "gelu",
        (Some(0), SiteKind::MlpOut) => "mlp",
        (Some(0), SiteKind::ResidPost) => "block0",
        (Some(1), SiteKind::ResidPost) => "block1",
        (Some(2), SiteKind::ResidPost) => "block2",
        (None, SiteKind::FinalNorm) => "ln_f",
        _ => return None,
    })
}

impl Observer for Compare {
    fn wants(&self, site: Site) -> bool {
        published_name(site).is_some()
    }

    fn observe(&mut self, site: Site, value: Tensor) -> Result<Tensor> {
        let published = published_name(site).expect("a published intermediate");
        assert_close(&value, &self.published[published], PARITY, published);
        self.compared += 1;
        Ok(value)
    }
}

#[test]
fn every_published_activation_is_reproduced() -> Result<()> {
    let Some(folder) = checkpoints() else {
        return Ok(());
    };
    let folder = folder.join("gpt-nano-sort");
    let model = model(&folder)?;
    let published = read(&folder.join("gpt-nano-sort-t0-partials.json"));
    let ids = published["idx"].to_dtype(DType::U32)?;
    let (expected_logits, expected_probabilities) =
        (published["lm_head"].clone(), published["probs"].clone());
    let mut compare = Compare { published, compared: 0 };
    let mut pass = Pass::inference().observed_by(&mut compare);
    let logits = model.forward_with(&ids, LogitsFor::EveryToken, None, &mut pass)?;
    assert_close(&logits, &expected_logits, PARITY, "lm_head");
    let probabilities = candle_nn::ops::softmax(&logits, 2)?;
    assert_close(&probabilities, &expected_probabilities, PARITY, "probs");
    assert_eq!(compare.compared, 9);
    Ok(())
}

#[test]
fn model_sorts_nearly_all_inputs() -> Result<()> {
    let Some(folder) = checkpoints() else {
        return Ok(());
    };
    let model = model(&folder.join("gpt-nano-sort"))?;
    let mut sorted_correctly = 0;
    let inputs: Vec<Vec<u32>> =
        (0..3u32.pow(6)).map(|code| (0..6).map(|digit| code / 3u32.pow(digit) % 3).collect()).collect();
    for letters in &inputs {
        let mut cache = Gpt2Cache::new(model.config(), 1, 11, DType::F32, &Device::Cpu)?;
        let (mut next, mut output) = (letters.clone(), Vec::new());
        while output.len() < LETTERS {
            let ids = Tensor::from_slice(&next, (1, next.len()), &Device::Cpu)?;
            let logits =
                model.forward_with(&ids, LogitsFor::LastToken, Some(&mut cache), &mut Pass::inference())?;
            next = vec![logits.flatten_all()?.argmax(0)?.to_scalar::<u32>()?];
            output.push(next[0]);
        }
        let mut expected = letters.clone();
        expected.sort_unstable();
        sorted_correctly += usize::from(output == expected);
    }
    // The model is a trained network, not an algorithm, so it need not sort all of the 729 inputs.
    assert!(sorted_correctly * 100 >= inputs.len() * 98, "{sorted_correctly} of {} sorted", inputs.len());
    Ok(())
}
