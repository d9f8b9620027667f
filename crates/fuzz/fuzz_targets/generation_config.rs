//! Fuzzes the text of a `generation_config.json` and the validation of its values.
#![no_main]

use candle_gpt2::Gpt2Config;
use candle_gpt2_generation::{GenerationConfig, LogitsProcessor};

libfuzzer_sys::fuzz_target!(|text: &str| {
    let Ok(config) = GenerationConfig::default().with_json(text) else { return };
    let model = Gpt2Config::preset("gpt2").expect("a published model");
    if config.check().is_ok() && config.check_model(&model).is_ok() {
        let _ = (config.fit_prompt(&[1, 2, 3], &model), LogitsProcessor::of_config(&config));
    }
});
