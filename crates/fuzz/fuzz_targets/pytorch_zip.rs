//! Fuzzes a PyTorch file in the ZIP format that `torch.save` writes.
//!
//! The format is a zip archive with a pickle and one entry per storage.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| candle_gpt2_fuzz::open("model.safetensors", bytes, &[]));
