//! Models for the benchmarks.

use candle_gpt2::{Gpt2Config, Gpt2LMHeadModel};
use candle_gpt2_arithmetic::NumberType;
use candle_gpt2_testing::MadeUpWeights;

/// Loads the 124M GPT-2 in q8 with made-up weights; speed does not depend on their values.
pub(crate) fn gpt2_124m() -> Gpt2LMHeadModel {
    let config = Gpt2Config::preset("gpt2").expect("a published model");
    Gpt2LMHeadModel::load(&config, MadeUpWeights::new(NumberType::Q8)).expect("a model")
}
