//! Helpers that turn fuzzed bytes into files for the fuzz targets.
//!
//! The files are opened and verified as a checkpoint, or loaded as a tokenizer. They may be rejected, but
//! must not cause a panic, a hang or a large allocation.

use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use candle_gpt2_weights::{Checkpoint, GivenFiles, OpenOptions, ReadAt, TextEncoder};

/// Configuration of the smallest possible model; fuzzed files are checked against its shapes.
const CONFIG: &str = r#"{"vocab_size": 3, "n_positions": 2, "n_embd": 2, "n_layer": 1, "n_head": 1}"#;

/// In-memory file that is read in parts.
#[derive(Debug)]
struct Parts(Vec<u8>);

impl ReadAt for Parts {
    fn len(&self) -> u64 {
        self.0.len() as u64
    }

    fn read_at(&self, start: u64, to: &mut [u8]) -> std::io::Result<()> {
        let start = usize::try_from(start).expect("a place in memory");
        to.copy_from_slice(&self.0[start..start + to.len()]);
        Ok(())
    }
}

/// Opens the configuration, the fuzzed file and further files as a checkpoint and verifies it.
///
/// The files are opened twice: once fully in memory, and once read in parts. Both must give the same result.
pub fn open(name: &str, bytes: &[u8], further: &[(&str, &[u8])]) {
    let all = [("config.json", CONFIG.as_bytes()), (name, bytes)];
    let all = || all.iter().chain(further);
    let held =
        all().fold(GivenFiles::new("fuzzed"), |files, (name, bytes)| files.with_bytes(name, bytes.to_vec()));
    let parts = all().fold(GivenFiles::new("fuzzed"), |files, (name, bytes)| {
        files.with_file(name, Arc::new(Parts(bytes.to_vec())))
    });
    assert_eq!(problems(held), problems(parts));
}

/// Returns a checkpoint's problems in alphabetical order, or `None` if it cannot be opened.
///
/// The header reader may report any of several errors on opening, so errors are not compared. The order of
/// overlapping tensors varies as well, so the problems are sorted.
fn problems(files: GivenFiles) -> Option<Vec<String>> {
    let checkpoint = Checkpoint::open_given(files, &OpenOptions::default(), &|_| ()).ok()?;
    let problems = checkpoint.verify(&|_| ()).ok()?;
    let mut problems: Vec<String> = problems.iter().map(ToString::to_string).collect();
    problems.sort_unstable();
    Some(problems)
}

/// Loads a tokenizer from a folder with these files, then encodes and decodes a text.
///
/// The number of tokens and the decoded length must stay within the documented limits. [`TextEncoder`] must
/// return the same tokens.
pub fn load_tokenizer(files: &[(&str, &[u8])]) {
    let folder = folder();
    for (name, bytes) in files {
        std::fs::write(folder.join(name), bytes).expect("a file to write");
    }
    if let Ok(tokenizer) = candle_gpt2_weights::load_tokenizer(folder) {
        let text = "A text, naïve 🤗 \u{fdfa} aaaa bb. ".repeat(8);
        let ids = candle_gpt2_weights::encode(&tokenizer, &text);
        if let Ok(ids) = &ids {
            assert!(ids.len() <= 32 * 32 * text.len() + 16, "{} ids from {} bytes", ids.len(), text.len());
            let written: usize =
                ids.iter().filter_map(|id| tokenizer.id_to_token(*id)).map(|token| token.len() + 1).sum();
            let decoded =
                candle_gpt2_generation::decode(&tokenizer, ids, true).map_or(0, |decoded| decoded.len());
            assert!(decoded <= 32 * written, "{decoded} bytes decoded from {written}");
        }
        if let (Ok(ids), Ok(encoded)) = (ids, TextEncoder::new(&tokenizer).encode(&text, true)) {
            assert_eq!(encoded, ids);
        }
    }
    for (name, _) in files {
        std::fs::remove_file(folder.join(name)).expect("a file to remove");
    }
}

/// Writes a file with this name and returns its path.
pub fn file(name: &str, bytes: &[u8]) -> PathBuf {
    let path = folder().join(name);
    std::fs::write(&path, bytes).expect("a file to write");
    path
}

/// Silences the panic hook, so that panics that the loader catches do not stop the fuzzer.
///
/// The tokenizers library panics on some files that it should reject, and the fuzzer would stop at the first
/// one. An uncaught panic still stops the fuzzer.
pub fn allow_caught_panics() {
    std::panic::set_hook(Box::new(|_| ()));
}

fn folder() -> &'static Path {
    static FOLDER: OnceLock<tempfile::TempDir> = OnceLock::new();
    FOLDER.get_or_init(|| tempfile::tempdir().expect("a temporary folder")).path()
}
