//! Fuzzes the index of a sharded checkpoint, with one shard next to it.
#![no_main]

/// Safetensors file with one tensor.
const SHARD: &[u8] =
    b"\x38\0\0\0\0\0\0\0{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}   \0\0\0\0";

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    candle_gpt2_fuzz::open("model.safetensors.index.json", bytes, &[("shard", SHARD)]);
});
