//! What several test files of this crate need.

use std::collections::HashMap;

use candle_core::{Result, Tensor};
use candle_gpt2::{Gpt2Config, Gpt2LMHeadModel};
use candle_gpt2_testing::{Fixture, device, dtype};
use candle_nn::VarBuilder;

/// Loads the model of a fixture, which holds its tensors as transformers saves them, on the device of the tests.
pub(crate) fn model(fixture: &Fixture) -> Result<Gpt2LMHeadModel> {
    let config =
        Gpt2Config::from_json(&fixture.recorded()["config"].to_string()).expect("a config that is supported");
    let mut tensors = fixture.tensors_below("transformer.");
    tensors.extend(
        fixture.tensors_below("lm_head.").into_iter().map(|(name, t)| (format!("lm_head.{name}"), t)),
    );
    from_conv1d(&config, tensors)
}

/// Builds a model from tensors whose linear layers are stored `(in, out)`.
pub(crate) fn from_conv1d(config: &Gpt2Config, tensors: HashMap<String, Tensor>) -> Result<Gpt2LMHeadModel> {
    let turned = tensors.into_iter().map(|(name, tensor)| {
        let is_conv1d = name.starts_with("h.") && tensor.rank() == 2;
        // On the device first: a conversion would turn the matrix itself.
        let tensor = tensor.to_device(&device())?.to_dtype(dtype())?;
        let tensor = if is_conv1d { tensor.t()? } else { tensor };
        Ok((name, tensor))
    });
    let tensors = turned.collect::<Result<HashMap<_, _>>>()?;
    Gpt2LMHeadModel::load(config, &VarBuilder::from_tensors(tensors, dtype(), &device()))
}
