//! Fuzzes an llm.c file: header and tensors.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| candle_gpt2_fuzz::open("model.safetensors", bytes, &[]));
