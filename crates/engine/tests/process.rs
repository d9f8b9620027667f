//! Settings of the process: the one test here has a process to itself.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use gpt2_engine::process::{set_thread_count, thread_count};
use gpt2_engine::{DeviceChoice, ModelOptions, Silent};
use gpt2_generation::GenerationConfig;
use gpt2_testing::CheckpointFolder;

/// Where there are threads already: a test is run by one of them.
#[test]
fn the_number_of_threads_is_set_before_the_first_computation() {
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
