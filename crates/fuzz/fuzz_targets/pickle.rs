//! Fuzzes the pickle in a legacy PyTorch file, which follows the magic number and the version.
//!
//! The fuzzed bytes also include the storages, which follow the pickle.
#![no_main]

const BEFORE: &[u8] =
    b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19.\x80\x02M\xe9\x03.\x80\x02}.";

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    candle_gpt2_fuzz::open("model.safetensors", &[BEFORE, bytes].concat(), &[]);
});
