//! Data-parallel training: the sums over the shares of several runs equal the result of a single run.

use std::fs;
use std::sync::Arc;

use candle_gpt2_engine::{Reporter, Silent};
use candle_gpt2_jobs::{Entry, JobError, Run, TrainJob, TrainOptions};
use candle_gpt2_training::{Share, TrainingError};

use crate::job::job;

const STEPS: u64 = 8;

fn options() -> TrainOptions {
    TrainOptions {
        steps: STEPS,
        batch_size: 5,
        accumulate: 2,
        eval_every: 3,
        save_every: 4,
        dropout: Some(0.0),
        lr: Some(0.01),
        held_out: 0.05,
        ..TrainOptions::default()
    }
}

fn open(job: &TrainJob, index: usize, count: usize) -> Result<Run, JobError> {
    let reporter: Arc<dyn Reporter> = Arc::new(Silent);
    job.open_share(&reporter, Share { index, count })
}

/// Takes a step with all shares' runs and returns the first run's log entries.
fn step(runs: &mut [Run]) -> Vec<Entry> {
    let (mut loss, mut sums) = (0.0, Vec::new());
    for run in &mut *runs {
        let (part, gradients) = run.share_of_step(&mut |_, _| {}).unwrap();
        loss += part;
        sums.resize(gradients.len(), 0.0);
        sums.iter_mut().zip(gradients).for_each(|(sum, gradient): (&mut f32, f32)| *sum += gradient);
    }
    let mut entries = Vec::new();
    for (index, run) in runs.iter_mut().enumerate() {
        let mut report = |entry: &Entry, _: &_| entries.extend((index == 0).then(|| entry.clone()));
        run.apply(&sums, loss, &mut report).unwrap();
    }
    entries
}

fn losses(entries: &[Entry]) -> Vec<(u64, f64)> {
    entries.iter().map(|entry| (entry.step, entry.loss.or(entry.held_out_loss).unwrap())).collect()
}

/// Includes five-row batches divided into six shares, one of them empty.
#[test]
fn summed_shares_train_like_a_single_run() {
    let folder = tempfile::tempdir().unwrap();
    let whole = job(folder.path(), "whole", options());
    let mut expected = Vec::new();
    let mut run = open(&whole, 0, 1).unwrap();
    run.train(&mut |entry, _| expected.push(entry.clone())).unwrap();
    let expected = losses(&expected);
    assert_eq!(expected.len() as u64, STEPS + 3, "and three evaluations: {expected:?}");

    for count in [1, 2, 6] {
        let shared = job(folder.path(), &format!("shared-{count}"), options());
        let mut runs: Vec<Run> = (0..count).map(|index| open(&shared, index, count).unwrap()).collect();
        let mut found = Vec::new();
        while !runs[0].is_done() {
            found.extend(step(&mut runs));
        }
        assert!(runs.iter().all(Run::is_done));
        for ((step, found), (expected_step, expected)) in losses(&found).into_iter().zip(&expected) {
            assert_eq!(step, *expected_step);
            assert!((found - expected).abs() < 1e-5, "{count}: step {step}: {found}, expected {expected}");
        }
        assert_eq!(found.len(), expected.len());
        let mut names: Vec<_> =
            fs::read_dir(&shared.out).unwrap().map(|file| file.unwrap().file_name()).collect();
        drop(runs);
        names.retain(|name| shared.out.join(name).exists());
        names.sort();
        let all = "config.json generation_config.json log.jsonl loss.svg model.safetensors tokenizer.json \
                   tokenizer_config.json training-state.safetensors";
        for name in ["log.jsonl", "loss.svg", "model.safetensors", "training-state.safetensors"] {
            assert!(names.iter().any(|found| found == name), "{name} is missing in {names:?}");
        }
        assert!(names.iter().all(|name| all.split(' ').any(|known| name == known)), "{names:?}");
        if count == 1 {
            for name in ["model.safetensors", "training-state.safetensors"] {
                let (ours, theirs) = (fs::read(shared.out.join(name)), fs::read(whole.out.join(name)));
                assert_eq!(ours.unwrap(), theirs.unwrap(), "{name}");
            }
        }
    }
}

#[test]
fn another_share_resumes_from_the_first_shares_state() {
    let folder = tempfile::tempdir().unwrap();
    let options = TrainOptions { save_every: 1, ..options() };
    let first = job(folder.path(), "first", options.clone());
    let mut runs = vec![open(&first, 0, 1).unwrap()];
    for _ in 0..3 {
        step(&mut runs);
    }
    let state = runs[0].state().unwrap();
    assert_eq!(state, fs::read(first.out.join("training-state.safetensors")).unwrap());

    // One run reads the folder, and the other receives the state.
    let resumed = TrainJob { options: TrainOptions { resume: true, ..options.clone() }, ..first.clone() };
    assert_eq!(open(&resumed, 1, 2).unwrap().trainer().steps_done(), 3);
    let elsewhere = job(folder.path(), "elsewhere", options.clone());
    let mut second = open(&elsewhere, 1, 2).unwrap();
    assert_eq!(second.trainer().steps_done(), 0);
    second.set_state(&state).unwrap();
    assert_eq!((second.trainer().steps_done(), second.state().unwrap()), (3, state.clone()));
    assert!(!elsewhere.out.exists(), "it writes nothing");

    let others = TrainOptions { lr: Some(0.02), ..options };
    let mut other = open(&job(folder.path(), "other", others), 1, 2).unwrap();
    let error = other.set_state(&state).unwrap_err();
    assert!(matches!(error, TrainingError::OtherState { .. }), "{error}");
    let error = other.set_state(&state[..state.len() / 2]).unwrap_err();
    assert!(matches!(error, TrainingError::DamagedState { .. }), "{error}");
}

#[test]
fn invalid_shares_and_gradients_are_rejected() {
    let folder = tempfile::tempdir().unwrap();
    let job = job(folder.path(), "run", TrainOptions { steps: 1, ..options() });
    let error = open(&job, 2, 2).err().expect("the share is out of range");
    assert!(error.to_string().contains("`rank`: expected below the world_size of 2, found 2"), "{error}");
    let mut run = open(&job, 0, 1).unwrap();
    let (loss, gradients) = run.share_of_step(&mut |_, _| {}).unwrap();
    let mut apply = |gradients: &[f32], loss: f64| run.apply(gradients, loss, &mut |_, _| {});
    let error = apply(&gradients[1..], loss).unwrap_err();
    let expected = format!("`gradients`: expected {} values", gradients.len());
    assert!(error.is_usage() && error.to_string().contains(&expected), "{error}");
    let mut wrong = gradients.clone();
    wrong[7] = f32::NAN;
    for error in [apply(&wrong, loss).unwrap_err(), apply(&gradients, f64::INFINITY).unwrap_err()] {
        assert!(matches!(error, JobError::Training(TrainingError::NotFinite { step: 1, .. })), "{error}");
    }
    apply(&gradients, loss).unwrap();
    let error = apply(&gradients, loss).unwrap_err();
    assert!(error.to_string().contains("no steps are left"), "{error}");
    assert!(run.share_of_step(&mut |_, _| {}).is_err());
}
