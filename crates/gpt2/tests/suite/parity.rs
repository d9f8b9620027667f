//! Small seeded GPT-2s compared with transformers, at every layer and at the logits.
//!
//! `export_gpt2` of the export script writes the fixtures. The sizes of all cases differ. The cases cover
//! every activation, both scaling flags, the upcast, an odd head width, an inner width below and above the
//! default, an untied head, one layer and one head.
//!
//! `GPT2_TEST_DEVICE` and `GPT2_TEST_DTYPE` select the device and dtype, here and in `laws.rs`.

use candle_core::{DType, Result, Tensor};
use candle_gpt2::{Gpt2LMHeadModel, LogitsFor, Observer, Pass, Site, SiteKind};
use candle_gpt2_testing::{Fixture, assert_parity, device};

use crate::common;

/// Absolute tolerance for logits; the requirement is 1e-4.
const LOGITS: f64 = 1e-4;
/// Absolute tolerance for attention weights, which are between 0 and 1.
const WEIGHTS: f64 = 1e-5;

const CASES: &str = "gelu_new gelu gelu_pytorch_tanh relu silu tanh quick_gelu inverse_layer_scale unscaled upcast odd_head untied \
                     one_layer one_head relu2";

/// Observer that collects the attention weights of every block.
#[derive(Default)]
struct Attentions(Vec<Tensor>);

impl Observer for Attentions {
    fn wants(&self, site: Site) -> bool {
        site.kind == SiteKind::Pattern
    }

    fn observe(&mut self, site: Site, value: Tensor) -> Result<Tensor> {
        assert_eq!(site.layer, Some(self.0.len()));
        self.0.push(value.clone());
        Ok(value)
    }
}

fn ids(fixture: &Fixture) -> Result<Tensor> {
    fixture.tensor("input_ids").to_dtype(DType::U32)?.to_device(&device())
}

fn logits(model: &Gpt2LMHeadModel, ids: &Tensor, logits_for: LogitsFor) -> Result<Tensor> {
    model.forward_with(ids, logits_for, None, &mut Pass::inference())
}

#[test]
fn logits_equal_transformers() -> Result<()> {
    for case in CASES.split(' ') {
        let fixture = Fixture::open(&format!("gpt2/{case}"));
        let model = common::model(&fixture)?;
        let expected = fixture.tensor("expected.logits");
        let every = logits(&model, &ids(&fixture)?, LogitsFor::EveryToken)?;
        assert_parity(&every, &expected, LOGITS, case);
        let last = logits(&model, &ids(&fixture)?, LogitsFor::LastToken)?;
        let tokens = expected.dim(1)?;
        assert_parity(&last, &expected.narrow(1, tokens - 1, 1)?, LOGITS, &format!("{case}, last token"));
    }
    Ok(())
}

#[test]
fn hidden_states_of_every_layer_equal_transformers() -> Result<()> {
    for case in CASES.split(' ') {
        let fixture = Fixture::open(&format!("gpt2/{case}"));
        let model = common::model(&fixture)?;
        let states = model.transformer().hidden_states(&ids(&fixture)?)?;
        assert_eq!(states.len(), model.config().n_layer + 1);
        for (layer, state) in states.iter().enumerate() {
            let expected = fixture.tensor(&format!("expected.hidden_states.{layer}"));
            assert_parity(state, &expected, LOGITS, &format!("{case}, hidden state {layer}"));
        }
    }
    Ok(())
}

#[test]
fn attention_weights_of_every_layer_equal_transformers() -> Result<()> {
    for case in CASES.split(' ') {
        let fixture = Fixture::open(&format!("gpt2/{case}"));
        let model = common::model(&fixture)?;
        let mut attentions = Attentions::default();
        let mut pass = Pass::inference().observed_by(&mut attentions);
        model.forward_with(&ids(&fixture)?, LogitsFor::LastToken, None, &mut pass)?;
        assert_eq!(attentions.0.len(), model.config().n_layer);
        for (layer, weights) in attentions.0.iter().enumerate() {
            let expected = fixture.tensor(&format!("expected.attentions.{layer}"));
            assert_parity(weights, &expected, WEIGHTS, &format!("{case}, attention of layer {layer}"));
        }
    }
    Ok(())
}
