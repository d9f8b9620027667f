//! Fuzzes a SentencePiece model, or a `vocab.txt` if the first byte is zero.
#![no_main]

libfuzzer_sys::fuzz_target!(init: candle_gpt2_fuzz::allow_caught_panics(), |bytes: &[u8]| {
    match bytes.strip_prefix(&[0]) {
        Some(lines) => candle_gpt2_fuzz::load_tokenizer(&[("vocab.txt", lines)]),
        None => candle_gpt2_fuzz::load_tokenizer(&[("spiece.model", bytes)]),
    }
});
