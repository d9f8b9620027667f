//! Long jobs end where somebody wants no more of them, wherever they are, and leave nothing half done.

use std::path::Path;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use candle_gpt2_testing::{CheckpointFolder, fixture_path, temporary_folder};
use candle_gpt2_weights::{
    Checkpoint, LoadOptions, OpenOptions, ReadProgress, WeightDType, WeightsError, WrittenDType, differences,
    load_tokenizer, write_gguf, write_hugging_face,
};

/// Wants no more when it is asked for the `last` time.
struct Patience {
    asked: AtomicUsize,
    last: usize,
    bytes: AtomicU64,
}

impl Patience {
    fn new(last: usize) -> Self {
        Self { asked: AtomicUsize::new(0), last, bytes: AtomicU64::new(0) }
    }
}

impl ReadProgress for Patience {
    fn advance(&self, bytes: u64) {
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    fn is_interrupted(&self) -> bool {
        self.asked.fetch_add(1, Ordering::Relaxed) + 1 >= self.last
    }
}

/// Runs a job until its end, and then with every smaller patience; `folder` is empty after each that ended early.
fn assert_ends_everywhere<T>(
    what: &str,
    folder: &Path,
    bytes: u64,
    job: impl Fn(&Patience) -> Result<T, WeightsError>,
) {
    let endless = Patience::new(usize::MAX);
    job(&endless).unwrap();
    assert_eq!(endless.bytes.into_inner(), bytes, "{what}: bytes that were told of");
    let asked = endless.asked.into_inner();
    assert!(asked > 20, "{what} asks {asked} times");
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() { std::fs::remove_dir_all(path) } else { std::fs::remove_file(path) }.unwrap();
    }
    for last in 1..=asked {
        let patience = Patience::new(last);
        let ended = job(&patience).err().unwrap_or_else(|| panic!("{what} went on after {last} of {asked}"));
        assert!(matches!(ended, WeightsError::Interrupted), "{what}, {last}: {ended}");
        // What it means is asked once more where the error came through candle.
        assert!(patience.asked.into_inner() <= last + 1, "{what} went on after {last}");
        assert_eq!(std::fs::read_dir(folder).unwrap().count(), 0, "{what} left something after {last}");
    }
}

/// The head is compared when the checkpoint is opened.
#[test]
fn opening_ends_too() {
    let folder = CheckpointFolder::tiny().with_tensors(|tensors| {
        let head = tensors["transformer.wte.weight"].affine(1.0, 1.0).unwrap();
        tensors.insert("lm_head.weight".into(), head);
    });
    let open =
        |patience: &Patience| Checkpoint::open_watched(folder.path(), &OpenOptions::default(), patience);
    let endless = Patience::new(usize::MAX);
    open(&endless).unwrap();
    let asked = endless.asked.into_inner();
    assert!(asked >= 2, "the bytes are compared, and the values");
    for last in 1..=asked {
        let ended = open(&Patience::new(last)).unwrap_err();
        assert!(matches!(ended, WeightsError::Interrupted), "{last}: {ended}");
    }
}

#[test]
fn jobs_end_between_any_two_tensors() {
    let folder = temporary_folder();
    let checkpoint = Checkpoint::open(&fixture_path("tiny-checkpoint")).unwrap();
    let other = Checkpoint::open(&fixture_path("formats/tensorflow")).unwrap();
    let companions = load_tokenizer(&fixture_path("tiny-checkpoint")).unwrap().into();
    let bytes = checkpoint.parameter_bytes();
    let assert_ends = |what: &str, bytes, job: &dyn Fn(&Patience) -> Result<(), WeightsError>| {
        assert_ends_everywhere(what, folder.path(), bytes, job);
    };
    for dtype in [None, Some(WeightDType::F16), Some(WeightDType::Q4)] {
        let options = LoadOptions { dtype, ..LoadOptions::default() };
        assert_ends("load", bytes, &|patience| checkpoint.load(&options, patience).map(drop));
    }
    assert_ends("verify", bytes, &|patience| checkpoint.verify(patience).map(drop));
    let all = checkpoint.tensors().iter().map(|tensor| tensor.stored_bytes()).sum();
    assert_ends("statistics", all, &|patience| {
        (0..checkpoint.tensors().len()).try_for_each(|index| checkpoint.statistics(index, patience).map(drop))
    });
    let both = bytes + other.parameter_bytes();
    assert_ends("differences", both, &|patience| differences(&checkpoint, &other, patience).map(drop));
    for dtype in [WrittenDType::F32, WrittenDType::F16, WrittenDType::BF16] {
        // WASI does not know the permissions of files, which written ones are given.
        if !cfg!(target_os = "wasi") {
            let target = folder.path().join("written");
            assert_ends("write a folder", bytes, &|patience| {
                write_hugging_face(&checkpoint, &companions, &target, dtype, patience).map(drop)
            });
        }
        let target = folder.path().join("written.gguf");
        assert_ends("write GGUF", bytes, &|patience| {
            write_gguf(&checkpoint, &companions, &target, dtype, patience).map(drop)
        });
    }
}
