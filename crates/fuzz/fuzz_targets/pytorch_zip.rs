//! A PyTorch file as `torch.save` writes it: a zip archive with a pickle and one entry for each storage.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| candle_gpt2_fuzz::open("model.safetensors", bytes, &[]));
