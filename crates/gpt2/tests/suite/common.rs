//! Helpers shared by this crate's test files.

use std::collections::HashMap;

use candle_core::{Result, Tensor};
use candle_gpt2::{Gpt2Config, Gpt2LMHeadModel};
use candle_gpt2_testing::{Fixture, device, dtype};
use candle_nn::VarBuilder;

/// Loads a fixture's model, with tensors as saved by transformers, on the test device.
pub(crate) fn model(fixture: &Fixture) -> Result<Gpt2LMHeadModel> {
    let config =
        Gpt2Config::from_json(&fixture.recorded()["config"].to_string()).expect("a supported config");
    from_conv1d(&config, fixture.tensors_below(""))
}

/// Builds a model from tensors with linear layers stored `(in, out)`.
pub(crate) fn from_conv1d(config: &Gpt2Config, tensors: HashMap<String, Tensor>) -> Result<Gpt2LMHeadModel> {
    Gpt2LMHeadModel::load(config, VarBuilder::from_tensors(tensors, dtype(), &device()))
}
