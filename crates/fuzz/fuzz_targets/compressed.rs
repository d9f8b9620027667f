//! Fuzzes compressed files.
//!
//! Inputs are arbitrary bytes, a header with its checksum, or a group with its checksum after a header that
//! fits the model. A fuzzer cannot guess checksums.

#![no_main]

use std::sync::LazyLock;
use std::sync::atomic::{AtomicUsize, Ordering};

use candle_gpt2_compression::{Compressed, Compressor};
use candle_gpt2_engine::{LoadedModel, ModelOptions, Progress, Reporter, Silent, Unit};
use candle_gpt2_weights::{Checkpoint, GivenFiles, OpenOptions};
use libfuzzer_sys::fuzz_target;

/// Number of bytes after the header of an empty file: a zero, the length and a checksum.
const END_BYTES: usize = 6;
/// Maximum number of tokens to decode; a corrupt group may claim to contain a mebibyte.
const MOST_TOKENS: usize = 300;

static MODEL: LazyLock<LoadedModel> = LazyLock::new(|| {
    let files = GivenFiles::new("tiny")
        .with_bytes("config.json", include_bytes!("../../testing/fixtures/tiny-checkpoint/config.json"))
        .with_bytes("tokenizer.json", include_bytes!("../../testing/fixtures/tiny-checkpoint/tokenizer.json"))
        .with_bytes(
            "model.safetensors",
            include_bytes!("../../testing/fixtures/tiny-checkpoint/model.safetensors"),
        );
    let checkpoint = Checkpoint::open_given(files, &OpenOptions::default(), &|_| ()).unwrap();
    ModelOptions::default().open_with(checkpoint, &Silent).unwrap().load(&Silent).unwrap()
});
static HEADER: LazyLock<Vec<u8>> = LazyLock::new(|| {
    let mut file = Vec::new();
    let compressor = Compressor::new(&MODEL, "tiny", Some(9)).unwrap();
    compressor.compress(&mut &b""[..], None, &mut file, &Silent).unwrap();
    file.truncate(file.len() - END_BYTES);
    file
});

/// Reporter that interrupts decoding after [`MOST_TOKENS`] tokens.
#[derive(Default)]
struct Impatient(AtomicUsize);

impl Reporter for Impatient {
    fn start(&self, what: &str, total: u64, unit: Unit) -> Box<dyn Progress> {
        Silent.start(what, total, unit)
    }

    fn note(&self, _: &str) {}

    fn is_interrupted(&self) -> bool {
        self.0.fetch_add(1, Ordering::Relaxed) > MOST_TOKENS
    }
}

fuzz_target!(|bytes: &[u8]| {
    let Some((first, rest)) = bytes.split_first() else { return };
    let checksum = crc32fast::hash(rest).to_le_bytes();
    let file = match first % 3 {
        0 => rest.to_vec(),
        1 => [rest, &checksum].concat(),
        _ => [&HEADER, rest, &checksum, &[0, 0]].concat(),
    };
    if let Ok(compressed) = Compressed::open(&file[..]) {
        let mut restored = Vec::new();
        _ = compressed.decompress(&MODEL, &mut restored, &Impatient::default());
        // The output must not exceed 64 KiB for each byte of the file.
        assert!(restored.len() <= file.len() * (64 << 10), "{}", restored.len());
    }
});
