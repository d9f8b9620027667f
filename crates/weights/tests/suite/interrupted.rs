//! Long jobs can be interrupted at any point, and leave nothing half done.

use std::path::Path;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use candle_gpt2_testing::{CheckpointFolder, fixture_path, temporary_folder};
use candle_gpt2_weights::{
    Checkpoint, LoadOptions, OpenOptions, ReadProgress, WeightDType, WeightsError, WrittenDType, differences,
    load_tokenizer, write_gguf, write_hugging_face,
};

/// Progress handler that interrupts the job at check number `last`.
struct InterruptAfter {
    checks: AtomicUsize,
    last: usize,
    bytes: AtomicU64,
}

impl InterruptAfter {
    fn new(last: usize) -> Self {
        Self { checks: AtomicUsize::new(0), last, bytes: AtomicU64::new(0) }
    }
}

impl ReadProgress for InterruptAfter {
    fn advance(&self, bytes: u64) {
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    fn is_interrupted(&self) -> bool {
        self.checks.fetch_add(1, Ordering::Relaxed) + 1 >= self.last
    }
}

/// Runs a job to completion, and then interrupts it at each of its checks.
///
/// `folder` must be empty after every interrupted run.
fn assert_interruptible<T>(
    what: &str,
    folder: &Path,
    bytes: u64,
    job: impl Fn(&InterruptAfter) -> Result<T, WeightsError>,
) {
    let uninterrupted = InterruptAfter::new(usize::MAX);
    job(&uninterrupted).unwrap();
    assert_eq!(uninterrupted.bytes.into_inner(), bytes, "{what}: reported bytes");
    let checks = uninterrupted.checks.into_inner();
    assert!(checks > 20, "{what} checks {checks} times");
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() { std::fs::remove_dir_all(path) } else { std::fs::remove_file(path) }.unwrap();
    }
    for last in 1..=checks {
        let progress = InterruptAfter::new(last);
        let error =
            job(&progress).err().unwrap_or_else(|| panic!("{what} continued after {last} of {checks}"));
        assert!(matches!(error, WeightsError::Interrupted), "{what}, {last}: {error}");
        // After an error passes through candle, the job checks for an interruption once more.
        assert!(progress.checks.into_inner() <= last + 1, "{what} continued after {last}");
        assert_eq!(std::fs::read_dir(folder).unwrap().count(), 0, "{what} left something after {last}");
    }
}

/// Checks interruption while opening, which compares the head with the embedding.
#[test]
fn opening_can_be_interrupted() {
    let folder = CheckpointFolder::tiny().with_tensors(|tensors| {
        let head = tensors["transformer.wte.weight"].affine(1.0, 1.0).unwrap();
        tensors.insert("lm_head.weight".into(), head);
    });
    let open = |progress: &InterruptAfter| {
        Checkpoint::open_watched(folder.path(), &OpenOptions::default(), progress)
    };
    let uninterrupted = InterruptAfter::new(usize::MAX);
    open(&uninterrupted).unwrap();
    let checks = uninterrupted.checks.into_inner();
    assert!(checks >= 2, "comparing the bytes and the values checks for interruption");
    for last in 1..=checks {
        let error = open(&InterruptAfter::new(last)).unwrap_err();
        assert!(matches!(error, WeightsError::Interrupted), "{last}: {error}");
    }
}

#[test]
fn jobs_can_be_interrupted_between_tensors() {
    let folder = temporary_folder();
    let checkpoint = Checkpoint::open(fixture_path("tiny-checkpoint")).unwrap();
    let other = Checkpoint::open(fixture_path("formats/tensorflow")).unwrap();
    let companions = load_tokenizer(fixture_path("tiny-checkpoint")).unwrap().into();
    let bytes = checkpoint.parameter_bytes();
    let assert_job = |what: &str, bytes, job: &dyn Fn(&InterruptAfter) -> Result<(), WeightsError>| {
        assert_interruptible(what, folder.path(), bytes, job);
    };
    for dtype in [None, Some(WeightDType::F16), Some(WeightDType::Q4)] {
        let options = LoadOptions { dtype, ..LoadOptions::default() };
        assert_job("load", bytes, &|progress| checkpoint.load(&options, progress).map(drop));
    }
    assert_job("verify", bytes, &|progress| checkpoint.verify(progress).map(drop));
    let all = checkpoint.tensors().iter().map(|tensor| tensor.stored_bytes()).sum();
    assert_job("statistics", all, &|progress| {
        (0..checkpoint.tensors().len()).try_for_each(|index| checkpoint.statistics(index, progress).map(drop))
    });
    let both = bytes + other.parameter_bytes();
    assert_job("differences", both, &|progress| differences(&checkpoint, &other, progress).map(drop));
    for dtype in [WrittenDType::F32, WrittenDType::F16, WrittenDType::BF16] {
        // WASI does not support the file permissions that written files receive.
        if !cfg!(target_os = "wasi") {
            let target = folder.path().join("written");
            assert_job("write a folder", bytes, &|progress| {
                write_hugging_face(&checkpoint, &companions, &target, dtype, progress).map(drop)
            });
        }
        let target = folder.path().join("written.gguf");
        assert_job("write GGUF", bytes, &|progress| {
            write_gguf(&checkpoint, &companions, &target, dtype, progress).map(drop)
        });
    }
}
