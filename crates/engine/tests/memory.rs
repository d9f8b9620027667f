//! Tests that a model's stated memory requirements match its allocations.
//!
//! These tests run in their own process, because they count every allocation.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use candle_core::{DType, Device, Tensor};
use candle_gpt2::{Gpt2Config, KvDType, LogitsFor, Pass, expected_parameters};
use candle_gpt2_engine::{DeviceChoice, MemoryNeeded, ModelOptions, Silent, WeightDType, process};
use candle_gpt2_testing::fixture_path;
use candle_gpt2_weights::{
    Checkpoint, GivenFiles, LoadOptions, OpenOptions, ReadAt, WrittenDType, load_tokenizer, write_gguf,
};

static ALLOCATED: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

/// Allocator that counts the allocated bytes.
struct Counting;

#[expect(unsafe_code, reason = "a counting allocator must implement `GlobalAlloc`")]
// SAFETY: every call is forwarded unchanged to the system allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let allocated = ALLOCATED.fetch_add(layout.size(), Ordering::Relaxed) + layout.size();
        PEAK.fetch_max(allocated, Ordering::Relaxed);
        // SAFETY: the arguments are forwarded unchanged.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        ALLOCATED.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the arguments are forwarded unchanged.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

/// Lock that runs one test at a time, because another test's allocations would be counted too.
static SERIAL: Mutex<()> = Mutex::new(());

/// Runs `work`; returns its result, the bytes that it keeps allocated, and its peak allocation.
///
/// Bytes allocated earlier are not included.
fn counted<T>(work: impl FnOnce() -> T) -> (T, u64, u64) {
    // Large pages come from the system and are invisible to the allocator.
    process::use_large_pages("off").unwrap();
    let before = ALLOCATED.load(Ordering::Relaxed);
    PEAK.store(before, Ordering::Relaxed);
    let result = work();
    let [allocated, peak] =
        [&ALLOCATED, &PEAK].map(|bytes| bytes.load(Ordering::Relaxed).saturating_sub(before) as u64);
    (result, allocated, peak)
}

/// A file that is read in parts.
#[derive(Debug)]
struct Parts(Mutex<File>, u64);

impl Parts {
    fn open(path: &Path) -> Arc<Self> {
        let file = File::open(path).unwrap();
        let len = file.metadata().unwrap().len();
        Arc::new(Self(Mutex::new(file), len))
    }
}

impl ReadAt for Parts {
    fn len(&self) -> u64 {
        self.1
    }

    fn read_at(&self, start: u64, to: &mut [u8]) -> io::Result<()> {
        let mut file = self.0.lock().unwrap();
        file.seek(SeekFrom::Start(start))?;
        file.read_exact(to)
    }
}

/// Configuration with widths that are not multiples of the packing sizes and a large embedding.
fn config() -> Gpt2Config {
    let json = r#"{"vocab_size": 5003, "n_positions": 500, "n_embd": 264, "n_layer": 3, "n_head": 11, "n_inner": 1000}"#;
    Gpt2Config::from_json(json).unwrap()
}

/// Writes a checkpoint in `dtype` and opens it from a file that is read in parts.
fn written(folder: &Path, config: &Gpt2Config, dtype: DType) -> Checkpoint {
    let tensor = |shape: Vec<usize>| Tensor::ones(shape, dtype, &Device::Cpu).unwrap();
    let tensors: HashMap<String, Tensor> = expected_parameters(config)
        .into_iter()
        .map(|parameter| (parameter.name, tensor(parameter.shape)))
        .collect();
    let path = folder.join("model.safetensors");
    candle_core::safetensors::save(&tensors, &path).unwrap();
    let files = GivenFiles::new("made-up")
        .with_bytes("config.json", config.to_json().to_string().into_bytes())
        .with_file("model.safetensors", Parts::open(&path));
    Checkpoint::open_given(files, &OpenOptions::default(), &|_| ()).unwrap()
}

/// Allowance for memory not included in the figures: names, tensor lists and thread-local data.
const SMALL: u64 = 256 << 10;

#[test]
fn allocations_match_the_stated_memory() {
    let _serial = SERIAL.lock();
    let folder = tempfile::tempdir().unwrap();
    let largest = 5003 * 264;
    // Loads once beforehand, because some data is allocated once per process.
    written(folder.path(), &config(), DType::F32).load(&LoadOptions::default(), &|_| ()).unwrap();
    for stored in [DType::F32, DType::F16, DType::BF16, DType::F64] {
        let checkpoint = written(folder.path(), &config(), stored);
        for dtype in [
            None,
            Some(WeightDType::F32),
            Some(WeightDType::F16),
            Some(WeightDType::Q8),
            Some(WeightDType::Q6),
            Some(WeightDType::Q5),
            Some(WeightDType::Q4),
        ] {
            let what = format!("{stored:?} as {dtype:?}");
            for kv_dtype in [None, Some(KvDType::Q8)] {
                let needed = MemoryNeeded::of(&checkpoint, dtype, kv_dtype).unwrap();
                let options = LoadOptions { dtype, kv_dtype, ..LoadOptions::default() };
                let (model, allocated, peak) = counted(|| checkpoint.load(&options, &|_| ()).unwrap());
                assert_eq!(needed.weights, model.weight_bytes() as u64, "{what}");
                assert!(
                    allocated.abs_diff(needed.weights) < SMALL,
                    "{what}: {allocated} allocated, {needed:?}"
                );
                // Loading needs the largest stored tensor; F64 is converted to f32 before packing.
                let of_piece = 8 * ((1 << 20) / 264 * 264);
                let reading = match stored {
                    DType::F64 => 4 * largest + of_piece,
                    _ => largest * stored.size_in_bytes(),
                };
                assert_eq!(needed.loading, reading as u64, "{what}");
                assert!(peak <= needed.weights + needed.loading + SMALL, "{what}: peak {peak}, {needed:?}");

                let tokens = config().n_positions;
                let ids = Tensor::zeros((1, tokens), DType::U32, &Device::Cpu).unwrap();
                let (_, _, peak) = counted(|| {
                    let mut cache = model.new_cache(1, tokens).unwrap();
                    model
                        .forward_with(&ids, LogitsFor::LastToken, Some(&mut cache), &mut Pass::inference())
                        .unwrap()
                });
                let computing = needed.kv + needed.activations;
                assert!(peak <= computing + SMALL, "{what}, {kv_dtype:?}: peak {peak}, {needed:?}");
                assert!(2 * peak > computing, "{what}, {kv_dtype:?}: peak {peak}, {needed:?}");
            }
        }
    }
}

/// Quantized blocks are converted to f32 before they are packed.
#[test]
fn gguf_allocations_stay_within_the_stated_memory() {
    let _serial = SERIAL.lock();
    let folder = tempfile::tempdir().unwrap();
    let json = r#"{"vocab_size": 5003, "n_positions": 64, "n_embd": 256, "n_layer": 2, "n_head": 4}"#;
    let checkpoint = written(folder.path(), &Gpt2Config::from_json(json).unwrap(), DType::F32);
    let companions = load_tokenizer(fixture_path("tiny-checkpoint")).unwrap().into();
    let path = folder.path().join("model.gguf");
    write_gguf(&checkpoint, &companions, &path, WrittenDType::Q8_0, &|_| ()).unwrap();
    let files = GivenFiles::new("made-up").with_file("model.gguf", Parts::open(&path));
    let checkpoint = Checkpoint::open_given(files, &OpenOptions::default(), &|_| ()).unwrap();
    for dtype in [None, Some(WeightDType::Q8), Some(WeightDType::Q4)] {
        let needed = MemoryNeeded::of(&checkpoint, dtype, None).unwrap();
        let options = LoadOptions { dtype, ..LoadOptions::default() };
        let (model, allocated, peak) = counted(|| checkpoint.load(&options, &|_| ()).unwrap());
        assert_eq!(needed.weights, model.weight_bytes() as u64, "{dtype:?}");
        assert!(allocated.abs_diff(needed.weights) < SMALL, "{dtype:?}: {allocated} allocated, {needed:?}");
        assert!(needed.loading > 4 * 5003 * 256, "{dtype:?}: {needed:?}");
        assert!(peak <= needed.weights + needed.loading + SMALL, "{dtype:?}: peak {peak}, {needed:?}");
        // The embedding is read first, when nothing else is loaded.
        assert!(peak + SMALL > needed.loading, "{dtype:?}: peak {peak}, {needed:?}");
    }
}

#[test]
fn opened_model_states_the_same_memory() {
    let _serial = SERIAL.lock();
    let options = ModelOptions {
        model: fixture_path("tiny-checkpoint"),
        device: DeviceChoice::Cpu,
        dtype: Some(WeightDType::Q8),
        ..ModelOptions::default()
    };
    let checkpoint = options.open_checkpoint(&Silent).unwrap();
    let needed = options.memory_of(&checkpoint).unwrap();
    let opened = options.open(&Silent).unwrap();
    assert_eq!(opened.memory_needed().unwrap(), needed);
    assert_eq!(needed.loading, 0, "the file is mapped");
    let both = ModelOptions { assistant_model: Some(options.model.clone()), ..options };
    let of_both = both.open(&Silent).unwrap().memory_needed().unwrap();
    assert_eq!((of_both.weights, of_both.kv), (2 * needed.weights, 2 * needed.kv));
    assert_eq!(of_both.activations, needed.activations);
}
