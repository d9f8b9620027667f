//! What the fuzz targets share: a checkpoint folder with one file from the fuzzer. Opened and verified, it may be refused
//! and must do nothing else: no panic, no hang, no large allocation.

use std::path::PathBuf;
use std::sync::OnceLock;

use gpt2_weights::Checkpoint;

/// A configuration of the smallest model, so that what a file claims is compared with something.
const CONFIG: &str = r#"{"vocab_size": 3, "n_positions": 2, "n_embd": 2, "n_layer": 1, "n_head": 1}"#;

/// Opens a folder with the configuration, the fuzzed file and further ones; verifies what opens.
pub fn open(name: &str, bytes: &[u8], further: &[(&str, &[u8])]) {
    static FOLDER: OnceLock<tempfile::TempDir> = OnceLock::new();
    let folder: PathBuf = FOLDER.get_or_init(|| tempfile::tempdir().expect("a temporary folder")).path().into();
    for (name, bytes) in [("config.json", CONFIG.as_bytes()), (name, bytes)].iter().chain(further) {
        std::fs::write(folder.join(name), bytes).expect("a file to write");
    }
    if let Ok(checkpoint) = Checkpoint::open(&folder.join(name)) {
        let _ = checkpoint.verify(&|_| ());
    }
}
