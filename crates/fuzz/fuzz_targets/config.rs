//! Fuzzes the text of a `config.json`, and everything that is derived from that text alone.
#![no_main]

use candle_gpt2::{Gpt2Config, ParameterCounts, parameter_ledger};

libfuzzer_sys::fuzz_target!(|text: &str| {
    if let Ok(config) = Gpt2Config::from_json(text) {
        // Counting lists every parameter, so thousands of layers would only slow the fuzzer down.
        if config.n_layer < 100 {
            let _ = (ParameterCounts::new(&config), parameter_ledger(&config));
        }
        let again = Gpt2Config::from_json(&config.to_json().to_string());
        assert_eq!(again, Ok(config), "a configuration round-trips");
    }
});
