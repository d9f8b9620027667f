//! Fuzzes a `vocab.json` and a `merges.txt`, separated by a zero byte.
//!
//! A second zero byte may introduce an `added_tokens.json`.
#![no_main]

libfuzzer_sys::fuzz_target!(init: candle_gpt2_fuzz::allow_caught_panics(), |bytes: &[u8]| {
    let names = ["vocab.json", "merges.txt", "added_tokens.json"];
    let files: Vec<(&str, &[u8])> = names.into_iter().zip(bytes.splitn(3, |byte| *byte == 0)).collect();
    candle_gpt2_fuzz::load_tokenizer(&files);
});
