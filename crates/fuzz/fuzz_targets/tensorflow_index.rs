//! Fuzzes the index of a TensorFlow checkpoint, with a data file next to it.
//!
//! The magic number at its end is always correct.
#![no_main]

const MAGIC: &[u8] = &0xdb47_7524_8b80_fb57u64.to_le_bytes();

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let index = [bytes, MAGIC].concat();
    candle_gpt2_fuzz::open("model.ckpt.index", &index, &[("model.ckpt.data-00000-of-00001", &[0; 256])]);
});
