//! Process-wide settings, tested in a process of their own.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::thread;

use candle_gpt2_engine::process::{keep_panics, panic_message, set_thread_count, thread_count};
use candle_gpt2_engine::{DeviceChoice, ModelOptions, Silent};
use candle_gpt2_generation::GenerationConfig;
use candle_gpt2_testing::CheckpointFolder;

/// Other threads already exist, because the test itself runs on a separate thread.
#[test]
fn thread_count_is_fixed_by_the_first_computation() {
    assert!(set_thread_count(3));
    let folder = CheckpointFolder::tiny();
    let options =
        ModelOptions { model: folder.path().into(), device: DeviceChoice::Cpu, ..ModelOptions::default() };
    let model = options.open(&Silent).unwrap().load(&Silent).unwrap();
    let config = GenerationConfig { max_new_tokens: 3, ..GenerationConfig::default() };
    model.text_generator(&[1, 2], &config).unwrap().collect::<Result<String, _>>().unwrap();
    assert!(!set_thread_count(2));
    assert_eq!(thread_count(), 3);
}

#[test]
fn panic_message_contains_its_location() {
    keep_panics();
    let payload = thread::spawn(|| panic!("no room for {}", 5)).join().unwrap_err();
    let again = catch_unwind(AssertUnwindSafe(|| resume_unwind(payload))).unwrap_err();
    let message = panic_message(again.as_ref());
    assert!(message.starts_with("no room for 5, at ") && message.contains("process.rs:"), "{message}");
    assert_eq!(message.lines().count(), 1);
    assert_eq!(panic_message(&"of elsewhere"), "of elsewhere");
    assert_eq!(panic_message(&5), "a panic without a message");
}

#[cfg(unix)]
#[test]
fn open_file_limit_is_raised_but_never_lowered() {
    use candle_gpt2_engine::process::{allow_open_files, open_files};

    let before = open_files().unwrap();
    assert_eq!(allow_open_files(1), Some(before));
    let raised = allow_open_files(before + 1).unwrap();
    assert!(raised == before || raised == before + 1, "{raised}");
    assert_eq!(open_files(), Some(raised));
}
