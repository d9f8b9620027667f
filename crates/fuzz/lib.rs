//! What the fuzz targets share: a folder with files from the fuzzer. Opened and verified as a checkpoint, or loaded as a
//! tokenizer, they may be refused and must do nothing else: no panic, no hang, no large allocation.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use gpt2_weights::Checkpoint;

/// A configuration of the smallest model, so that what a file claims is compared with something.
const CONFIG: &str = r#"{"vocab_size": 3, "n_positions": 2, "n_embd": 2, "n_layer": 1, "n_head": 1}"#;

/// Opens a folder with the configuration, the fuzzed file and further ones; verifies what opens.
pub fn open(name: &str, bytes: &[u8], further: &[(&str, &[u8])]) {
    let folder = folder();
    for (name, bytes) in [("config.json", CONFIG.as_bytes()), (name, bytes)].iter().chain(further) {
        std::fs::write(folder.join(name), bytes).expect("a file to write");
    }
    if let Ok(checkpoint) = Checkpoint::open(&folder.join(name)) {
        let _ = checkpoint.verify(&|_| ());
    }
}

/// Loads a tokenizer from a folder with these files, and takes a text there and back.
pub fn load_tokenizer(files: &[(&str, &[u8])]) {
    let folder = folder();
    for (name, bytes) in files {
        std::fs::write(folder.join(name), bytes).expect("a file to write");
    }
    if let Ok(tokenizer) = gpt2_weights::load_tokenizer(folder)
        && let Ok(ids) = gpt2_weights::encode(&tokenizer, "A text, naïve 🤗.")
    {
        let _ = tokenizer.decode(&ids, true);
    }
    for (name, _) in files {
        std::fs::remove_file(folder.join(name)).expect("a file to remove");
    }
}

/// Writes a file of this name, and says where.
pub fn file(name: &str, bytes: &[u8]) -> PathBuf {
    let path = folder().join(name);
    std::fs::write(&path, bytes).expect("a file to write");
    path
}

/// Lets panics go on that the loader catches: the tokenizers library panics on some files that it should refuse. The fuzzer
/// would end with the first; one that nobody catches still ends it.
pub fn allow_caught_panics() {
    std::panic::set_hook(Box::new(|_| ()));
}

fn folder() -> &'static Path {
    static FOLDER: OnceLock<tempfile::TempDir> = OnceLock::new();
    FOLDER.get_or_init(|| tempfile::tempdir().expect("a temporary folder")).path()
}
