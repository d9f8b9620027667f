//! Fuzzes a `tokenizer.json`.
#![no_main]

libfuzzer_sys::fuzz_target!(init: candle_gpt2_fuzz::allow_caught_panics(), |bytes: &[u8]| {
    candle_gpt2_fuzz::load_tokenizer(&[("tokenizer.json", bytes)]);
});
