#![doc = include_str!("../README.md")]

mod browser;
mod made_up;

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use candle_core::{DType, Device, Tensor};
use candle_nn::VarBuilder;

pub use browser::page_in_browser;
pub use made_up::MadeUpWeights;

/// Environment variable that names the folder of third-party checkpoints.
pub const CHECKPOINTS_VARIABLE: &str = "GPT2_CHECKPOINTS";
/// Environment variable that names the folder of the JSON Schema test suite.
pub const JSON_SCHEMA_VARIABLE: &str = "GPT2_JSON_SCHEMA_TESTS";

/// Environment variable that names the device for the device tests.
///
/// The value is `cpu`, `cuda`, `cuda:N` or `metal`. The default is the CPU.
pub const DEVICE_VARIABLE: &str = "GPT2_TEST_DEVICE";
/// Environment variable that names the weight type for the device tests.
///
/// The value is `f32`, `f16` or `bf16`. The default is f32.
pub const DTYPE_VARIABLE: &str = "GPT2_TEST_DTYPE";

/// Sampling and search options for comparing machines, as in `generation_config.json`.
pub const SAMPLERS: [&str; 12] = [
    r#"{"top_k": 0}"#,
    r#"{"temperature": 1.7, "top_k": 40}"#,
    r#"{"top_k": 0, "top_p": 0.9}"#,
    r#"{"top_k": 0, "min_p": 0.02}"#,
    r#"{"top_k": 0, "typical_p": 0.8}"#,
    r#"{"top_k": 0, "epsilon_cutoff": 0.001}"#,
    r#"{"top_k": 0, "eta_cutoff": 0.002}"#,
    r#"{"repetition_penalty": 1.3, "presence_penalty": 0.2, "frequency_penalty": 0.1}"#,
    r#"{"renormalize_logits": true, "no_repeat_ngram_size": 3}"#,
    r#"{"do_sample": false, "num_beams": 4, "length_penalty": 0.7}"#,
    r#"{"do_sample": false, "num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5}"#,
    r#"{"do_sample": false, "num_beams": 3, "length_penalty": -1.3, "early_stopping": "never"}"#,
];

/// Tolerance for f32 on GPUs, which sum in a different order and use a different exponential.
const GPU_TOLERANCE: f64 = 1e-3;
/// Tolerance for half precision after all blocks.
const HALF_TOLERANCE: f64 = 2e-2;
/// Tolerance for single elements in bf16, which rounds each value by up to 2^-9 of its size.
///
/// In PyTorch's own bf16, single elements of these models differ by up to 3e-2, and the norm of all
/// differences is 1e-2 to 1.5e-2.
const BF16_ELEMENT_TOLERANCE: f64 = 4e-2;

/// Returns the device that `GPT2_TEST_DEVICE` names, shared by all tests of a program.
///
/// # Panics
/// If the variable does not name a device, or the device cannot be opened. A run that requests a device must
/// not pass without it.
pub fn device() -> Device {
    static DEVICE: OnceLock<Device> = OnceLock::new();
    DEVICE.get_or_init(open_device).clone()
}

fn open_device() -> Device {
    let name = std::env::var(DEVICE_VARIABLE).unwrap_or_else(|_| "cpu".to_owned());
    let opened = match name.split_once(':').unwrap_or((&name, "0")) {
        ("cpu", _) => return Device::Cpu,
        // Opens the device as the program does, with its settings.
        ("cuda", index) => candle_gpt2_kernels::open_cuda(index.parse().expect("a GPU's number")),
        ("metal", index) => candle_gpt2_kernels::open_metal(index.parse().expect("a GPU's number")),
        _ => panic!("{DEVICE_VARIABLE}={name}: expected cpu, cuda, cuda:N or metal"),
    };
    opened.unwrap_or_else(|error| panic!("{DEVICE_VARIABLE}={name}: {error}"))
}

/// Returns the weight type that `GPT2_TEST_DTYPE` names.
///
/// # Panics
/// If the variable does not name a supported type.
pub fn dtype() -> DType {
    match std::env::var(DTYPE_VARIABLE).as_deref() {
        Err(_) | Ok("f32") => DType::F32,
        Ok("f16") => DType::F16,
        Ok("bf16") => DType::BF16,
        Ok(name) => panic!("{DTYPE_VARIABLE}={name}: expected f32, f16 or bf16"),
    }
}

/// Reports why a test is skipped.
#[expect(clippy::print_stderr, reason = "a skipped test reports it")]
pub fn skipped(reason: &str) {
    eprintln!("skipped: {reason}");
}

/// Checks a result of [`device`] in [`dtype`] against the expected result on the CPU in f32.
///
/// On the CPU in f32, every element must be within `tolerance`. Otherwise the tolerance of the device and the
/// type applies if it is larger. It is scaled by the largest expected value if that is above 1, because
/// rounding errors are proportional to the summands. In bf16 the norm of all differences, relative to the
/// norm of the expected values, is checked too.
///
/// # Panics
/// If the shapes differ, or an element or the norm is out of tolerance.
#[track_caller]
pub fn assert_parity(actual: &Tensor, expected: &Tensor, tolerance: f64, what: &str) {
    let wider = match (dtype(), actual.device()) {
        (DType::F32, Device::Cpu) => return assert_close_absolute(actual, expected, tolerance, what),
        (DType::F32, _) => GPU_TOLERANCE,
        (DType::BF16, _) => {
            let norm = relative_norm(actual, expected);
            assert!(
                norm <= HALF_TOLERANCE,
                "{what}: expected a relative error norm of at most {HALF_TOLERANCE:.0e}, found {norm:.1e}"
            );
            BF16_ELEMENT_TOLERANCE
        }
        _ => HALF_TOLERANCE,
    };
    // Infinities, as in masks, must not widen the tolerance for the other elements.
    let finite = values(expected).into_iter().map(f64::abs).filter(|value| value.is_finite());
    let largest = finite.fold(1.0, f64::max);
    assert_close_absolute(actual, expected, wider.max(tolerance) * largest, what);
}

/// Norm of the differences, relative to the norm of the expected values.
fn relative_norm(actual: &Tensor, expected: &Tensor) -> f64 {
    let (actual, expected) = (values(actual), values(expected));
    let squares: f64 = actual.iter().zip(&expected).map(|(a, e)| (a - e).powi(2)).sum();
    (squares / expected.iter().map(|e| e.powi(2)).sum::<f64>()).sqrt()
}

/// Reference tensors with the metadata that the exporting script recorded.
pub struct Fixture {
    tensors: HashMap<String, Tensor>,
    recorded: serde_json::Value,
}

impl Fixture {
    /// Opens the fixture `crates/testing/fixtures/{name}.safetensors`.
    ///
    /// # Panics
    /// If the file cannot be read.
    pub fn open(name: &str) -> Self {
        Self::open_path(&fixture_path(&format!("{name}.safetensors")))
    }

    /// Opens the fixture at `path`.
    ///
    /// # Panics
    /// If the file cannot be read.
    pub fn open_path(path: &Path) -> Self {
        let bytes = read(path);
        let (_, header) = safetensors::SafeTensors::read_metadata(&bytes).expect("a safetensors file");
        let tensors =
            candle_core::safetensors::load_buffer(&bytes, &Device::Cpu).expect("a safetensors file");
        let recorded = header.metadata().as_ref().and_then(|metadata| metadata.get("reference"));
        let recorded =
            recorded.map_or(serde_json::Value::Null, |text| serde_json::from_str(text).expect("JSON"));
        Self { tensors, recorded }
    }

    /// Returns the tensor `name`.
    ///
    /// # Panics
    /// If the tensor does not exist.
    pub fn tensor(&self, name: &str) -> Tensor {
        self.tensors.get(name).unwrap_or_else(|| panic!("the fixture has no tensor {name}")).clone()
    }

    /// Returns the tensors whose names start with `prefix`, with the prefix removed.
    pub fn tensors_below(&self, prefix: &str) -> HashMap<String, Tensor> {
        let below = |(name, tensor): (&String, &Tensor)| {
            Some((name.strip_prefix(prefix)?.to_owned(), tensor.clone()))
        };
        self.tensors.iter().filter_map(below).collect()
    }

    /// Returns these tensors as a `VarBuilder`, from which layers load their parameters.
    pub fn parameters(&self, prefix: &str) -> VarBuilder<'static> {
        VarBuilder::from_tensors(self.tensors_below(prefix), DType::F32, &Device::Cpu)
    }

    /// Metadata from the exporting script: library versions, and a model's `config`.
    pub fn recorded(&self) -> &serde_json::Value {
        &self.recorded
    }
}

/// Returns the path of `name` in the fixtures folder.
pub fn fixture_path(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures").join(name)
}

/// Reads the JSON fixture `crates/testing/fixtures/{name}.json`.
///
/// # Panics
/// If the file cannot be read.
pub fn json_fixture(name: &str) -> serde_json::Value {
    serde_json::from_slice(&read(&fixture_path(&format!("{name}.json")))).expect("a JSON file")
}

/// Returns the folder of third-party checkpoints that `GPT2_CHECKPOINTS` names.
///
/// Without the variable, reports that the test is skipped.
///
/// # Panics
/// If the variable does not name a folder. A run that requests these tests must not skip them.
pub fn checkpoints() -> Option<PathBuf> {
    folder_from_variable(CHECKPOINTS_VARIABLE, "third-party checkpoints")
}

/// Returns the folder of the JSON Schema test suite that `GPT2_JSON_SCHEMA_TESTS` names.
///
/// Without the variable, reports that the test is skipped.
///
/// # Panics
/// Same as [`checkpoints`].
pub fn json_schema_tests() -> Option<PathBuf> {
    folder_from_variable(JSON_SCHEMA_VARIABLE, "the JSON Schema test suite")
}

fn folder_from_variable(variable: &str, content: &str) -> Option<PathBuf> {
    let Some(folder) = std::env::var_os(variable) else {
        skipped(&format!("{variable} does not name a folder with {content}"));
        return None;
    };
    let folder = PathBuf::from(folder);
    assert!(folder.is_dir(), "{variable}={} is not a folder", folder.display());
    Some(folder)
}

/// Creates a temporary folder that is removed with its contents when dropped.
///
/// It is in the folder that `TMPDIR` names, because WASI has no other way to find one.
///
/// # Panics
/// If the folder cannot be created.
pub fn temporary_folder() -> tempfile::TempDir {
    let parent = std::env::var_os("TMPDIR").map_or_else(std::env::temp_dir, PathBuf::from);
    tempfile::tempdir_in(parent).expect("a temporary folder")
}

/// Returns the names and contents of a folder's files, sorted by name.
///
/// # Panics
/// If a file cannot be read.
pub fn files(folder: &Path) -> Vec<(String, Vec<u8>)> {
    let mut files: Vec<_> = std::fs::read_dir(folder)
        .expect("a folder")
        .map(|entry| entry.expect("a folder entry"))
        .map(|entry| {
            let name = entry.file_name().into_string().expect("a name in UTF-8");
            (name, std::fs::read(entry.path()).expect("a file to read"))
        })
        .collect();
    files.sort();
    files
}

/// Parses the rows of a table with ` | ` between columns, one row per line.
///
/// Empty lines are skipped.
///
/// # Panics
/// If a row has a different number of columns.
pub fn table<const N: usize>(text: &str) -> impl Iterator<Item = [&str; N]> {
    text.lines().filter(|line| !line.is_empty()).map(|line| {
        let columns: Vec<&str> = line.split(" | ").collect();
        columns.try_into().unwrap_or_else(|columns| panic!("expected {N} columns, found {columns:?}"))
    })
}

/// Returns the sorted names in a folder.
///
/// # Panics
/// If the folder cannot be read.
pub fn entries(folder: &Path) -> Vec<String> {
    let name = |entry: std::io::Result<std::fs::DirEntry>| entry.expect("an entry").file_name().into_string();
    let names =
        std::fs::read_dir(folder).expect("a folder").map(|entry| name(entry).expect("a name in UTF-8"));
    let mut names: Vec<String> = names.collect();
    names.sort();
    names
}

/// Copy of a checkpoint in a temporary folder, for tests that change or damage it.
pub struct CheckpointFolder {
    folder: tempfile::TempDir,
}

impl CheckpointFolder {
    /// Copies the tiny checkpoint, as transformers wrote it.
    ///
    /// # Panics
    /// If the checkpoint cannot be copied.
    pub fn tiny() -> Self {
        Self::of("tiny-checkpoint")
    }

    /// Copies a fixture folder.
    ///
    /// # Panics
    /// If the folder cannot be copied.
    pub fn of(fixture: &str) -> Self {
        let folder = temporary_folder();
        for entry in std::fs::read_dir(fixture_path(fixture)).expect("the fixtures") {
            let entry = entry.expect("a folder entry");
            std::fs::copy(entry.path(), folder.path().join(entry.file_name())).expect("a copy");
        }
        Self { folder }
    }

    /// Path of the folder.
    pub fn path(&self) -> &Path {
        self.folder.path()
    }

    /// Path of a file in the folder.
    pub fn file(&self, name: &str) -> PathBuf {
        self.path().join(name)
    }

    /// Removes a file.
    ///
    /// # Panics
    /// If the file does not exist.
    pub fn without(self, name: &str) -> Self {
        std::fs::remove_file(self.file(name)).expect("a file to remove");
        self
    }

    /// Writes a file.
    ///
    /// # Panics
    /// If the file cannot be written.
    pub fn with(self, name: &str, contents: impl AsRef<[u8]>) -> Self {
        std::fs::write(self.file(name), contents).expect("a file to write");
        self
    }

    /// Replaces the last token of the tiny checkpoint with `token`, as a non-special added token.
    ///
    /// # Panics
    /// If the tokenizer cannot be read.
    pub fn with_added_token(self, token: &str) -> Self {
        let json = std::fs::read(self.file("tokenizer.json")).expect("the tokenizer to read");
        let mut json: serde_json::Value = serde_json::from_slice(&json).expect("JSON");
        let id = json["model"]["vocab"]
            .as_object_mut()
            .and_then(|vocab| vocab.remove("fi"))
            .expect("the last token");
        json["model"]["merges"].as_array_mut().expect("merges").pop();
        let added = serde_json::json!({ "id": id, "content": token, "special": false, "single_word": false, "lstrip": false,
            "rstrip": false, "normalized": false });
        json["added_tokens"].as_array_mut().expect("added tokens").push(added);
        self.with("tokenizer.json", json.to_string())
    }

    /// Sets keys of `config.json`; null removes a key.
    ///
    /// # Panics
    /// If the file cannot be written.
    pub fn with_config(self, changes: serde_json::Value) -> Self {
        let mut config: serde_json::Value =
            serde_json::from_slice(&read(&self.file("config.json"))).expect("a config.json");
        for (key, value) in changes.as_object().expect("an object") {
            if value.is_null() {
                config.as_object_mut().expect("an object").remove(key);
            } else {
                config[key] = value.clone();
            }
        }
        self.with("config.json", config.to_string())
    }

    /// Rewrites the weights with `change`.
    ///
    /// `change` receives every tensor by name, and may rename, replace, remove and add tensors.
    ///
    /// # Panics
    /// If the weights cannot be written.
    pub fn with_tensors(self, change: impl FnOnce(&mut HashMap<String, Tensor>)) -> Self {
        let path = self.file("model.safetensors");
        let mut tensors = candle_core::safetensors::load(&path, &Device::Cpu).expect("the weights");
        change(&mut tensors);
        candle_core::safetensors::save(&tensors, &path).expect("weights to write");
        self
    }
}

/// Creates a `tokenizer.json` with these tokens and this decoder.
///
/// The first token is special, and the tokens in `added` are not.
///
/// ```
/// use serde_json::json;
///
/// let json = candle_gpt2_testing::tokenizer_json(&json!({ "type": "Fuse" }), &["</s>", "a"], &["ab"]);
/// assert!(json.contains("\"id\":2"));
/// ```
pub fn tokenizer_json(decoder: &serde_json::Value, tokens: &[impl AsRef<str>], added: &[&str]) -> String {
    let vocab: serde_json::Map<String, serde_json::Value> =
        tokens.iter().zip(0..).map(|(token, id)| (token.as_ref().to_owned(), id.into())).collect();
    let added = added.iter().enumerate().map(|(index, content)| (tokens.len() + index, *content, false));
    let special = tokens.iter().take(1).map(|token| (0, token.as_ref(), true));
    let token = |(id, content, special)| {
        serde_json::json!({ "id": id, "content": content, "special": special, "single_word": false, "lstrip": false,
            "rstrip": false, "normalized": false })
    };
    let added_tokens: Vec<serde_json::Value> = special.chain(added).map(token).collect();
    serde_json::json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added_tokens, "normalizer": null,
        "pre_tokenizer": null, "post_processor": null, "decoder": decoder,
        "model": { "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": vocab, "merges": [] },
    })
    .to_string()
}

/// Creates a tensor in `[-scale/2, scale/2)` from a multiplicative hash of the index.
///
/// The exporting script's `pattern` creates the same tensor, so large inputs need no file.
///
/// # Panics
/// If candle cannot create the tensor.
pub fn pattern(shape: &[usize], scale: f64, offset: u64) -> Tensor {
    let count = shape.iter().product::<usize>() as u64;
    let values: Vec<f64> = (0..count)
        .map(|index| {
            let hashed = (((index + 1 + offset).wrapping_mul(2_654_435_761)) & 0xffff_ffff) >> 8;
            (hashed as f64 / f64::from(1 << 24) - 0.5) * scale
        })
        .collect();
    let tensor = Tensor::from_vec(values, shape, &Device::Cpu).expect("a tensor");
    tensor.to_dtype(DType::F32).expect("a conversion")
}

/// Checks that every element of `actual` is within `tolerance` of `expected`.
///
/// The tolerance is relative to the magnitude of the expected element if that is above 1, and absolute
/// otherwise.
///
/// # Panics
/// If the shapes differ or an element is out of tolerance. The message names the largest difference and its
/// position.
#[track_caller]
pub fn assert_close(actual: &Tensor, expected: &Tensor, tolerance: f64, what: &str) {
    assert_within(actual, expected, what, tolerance, |expected| tolerance * expected.abs().max(1.0));
}

/// Checks that every element of `actual` is within the absolute `tolerance` of `expected`.
///
/// # Panics
/// Same as [`assert_close`].
#[track_caller]
pub fn assert_close_absolute(actual: &Tensor, expected: &Tensor, tolerance: f64, what: &str) {
    assert_within(actual, expected, what, tolerance, |_| tolerance);
}

#[track_caller]
fn assert_within(
    actual: &Tensor,
    expected: &Tensor,
    what: &str,
    tolerance: f64,
    allowed: impl Fn(f64) -> f64,
) {
    assert_eq!(actual.dims(), expected.dims(), "{what}: shapes differ");
    let (actual_values, expected_values) = (values(actual), values(expected));
    // NaN counts as infinitely far away.
    let excess = |(a, e): (&f64, &f64)| {
        let difference = if a == e { 0.0 } else { (a - e).abs() };
        if difference.is_nan() { f64::INFINITY } else { difference / allowed(*e) }
    };
    let worst = actual_values
        .iter()
        .zip(&expected_values)
        .map(excess)
        .enumerate()
        .max_by(|(_, a), (_, b)| a.total_cmp(b));
    let Some((index, excess)) = worst else { return };
    assert!(
        excess <= 1.0,
        "{what}: largest difference at flat index {index} of shape {:?}: expected {}, found {} (tolerance {tolerance})",
        expected.dims(),
        expected_values[index],
        actual_values[index],
    );
}

/// Returns the largest difference: 0 if the list is empty, NaN if any difference is NaN.
///
/// A bound check always fails for NaN.
pub fn worst(differences: impl IntoIterator<Item = f64>) -> f64 {
    // Comparisons with NaN are false, so NaN replaces the maximum and is kept.
    differences
        .into_iter()
        .reduce(|worst, next| if worst >= next || worst.is_nan() { worst } else { next })
        .unwrap_or(0.0)
}

/// Returns the elements of a tensor as f64, in row-major order.
///
/// # Panics
/// If candle cannot convert the tensor.
pub fn values(tensor: &Tensor) -> Vec<f64> {
    let flat = tensor.to_device(&Device::Cpu).and_then(|tensor| tensor.flatten_all());
    let flat = flat.and_then(|flat| flat.to_dtype(DType::F64)).expect("a conversion to f64");
    flat.to_vec1().expect("a flat tensor")
}

fn read(path: &Path) -> Vec<u8> {
    std::fs::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Two stories similar to the built-in model's training data, but not part of it.
///
/// They have about 250 tokens.
pub const STORY: &str = "I had saved thirty-three coins. Side by side, we left the meadow and hurried to the hospital. \"What \
    do you want for the bowl?\" I asked after the third yawn. \"Twenty coins,\" said the man behind the \
    table. What if no one came? I gave the seller twenty coins and kept thirteen. When the bell struck \
    six, I walked home. It was better than a birthday. I still had the blue bowl.\n\n\
    In the yard, where the rain does not stop, sits Jonas. The puddles are deep. Jonas's sister Beth has \
    a clock, and loves it. The clock stands near the edge of the table. Jonas climbs on a chair to reach \
    it. For fun, he bumps into the table, and the clock breaks. He feels tired. It is hard to say it, \
    but he says it: \"It was me.\" Beth frowns, and then smiles. \"Do not do it again,\" she says. \"Let \
    us mend it together,\" Beth says, and Jonas and Beth do. It takes Jonas some tears to see it, but he \
    never forgets it.\n";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn worst_difference_propagates_nan() {
        assert_eq!(worst([1.0, 3.0, 2.0]), 3.0);
        assert_eq!((worst([]), worst([-2.0, -1.0])), (0.0, -1.0));
        for differences in [[f64::NAN, 1.0], [1.0, f64::NAN], [-f64::NAN, f64::INFINITY]] {
            assert!(worst(differences).is_nan(), "{differences:?}");
        }
    }

    #[test]
    #[should_panic(expected = "largest difference")]
    fn nan_is_never_close() {
        let tensor = |value: f32| Tensor::new(&[1.0, value], &Device::Cpu).expect("a tensor");
        assert_close(&tensor(f32::NAN), &tensor(f32::NAN), f64::INFINITY, "NaN");
    }
}
