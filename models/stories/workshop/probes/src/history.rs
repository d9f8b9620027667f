//! Learning history: measurements of every checkpoint kept during training, with few prompts.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use indicatif::ProgressBar;
use serde_json::{Value, json};

use crate::held_out::bits_per_byte;
use crate::probes::Probe;
use crate::subject::Subject;
use crate::{circuits, probes, samples};

/// Number of rows of random tokens.
const ROWS: usize = 10;
/// Length of a sample, in tokens.
const SAMPLE_TOKENS: usize = 60;

/// Measures each kept checkpoint of each training run, in order, as one JSON object.
pub(crate) fn history(
    trainings: &[PathBuf],
    held_out: &[String],
    all: &[Probe],
    prompts: usize,
    bar: &ProgressBar,
) -> Result<Vec<Value>> {
    let mut kept = Vec::new();
    for training in trainings {
        let steps = kept_steps(training)?;
        ensure!(
            !steps.is_empty(),
            "{}: found no checkpoints for individual steps; train with --keep-steps",
            training.display()
        );
        let name = training.file_name().unwrap_or_default().to_string_lossy().into_owned();
        kept.extend(steps.into_iter().map(|(step, folder)| (name.clone(), step, folder)));
    }
    bar.set_length(kept.len() as u64);
    let mut measured = Vec::new();
    for (name, step, folder) in kept {
        bar.set_message(folder.display().to_string());
        let subject = Subject::open(&folder)?;
        let (of_rows, heads) = circuits::random_rows(&subject, ROWS)?;
        let of_prompts = probes::run(&subject, all, prompts)?;
        let figures = of_rows.iter().chain(&of_prompts);
        let figures = figures.map(|figure| (figure.name.to_owned(), json!(rounded(figure.value))));
        let per_byte = bits_per_byte(&subject, held_out)? * std::f64::consts::LN_2;
        measured.push(json!({
            "training": name, "step": step, "loss_per_byte": rounded(per_byte),
            "figures": figures.collect::<serde_json::Map<_, _>>(),
            "induction": of_heads(&heads["induction_scores"]), "previous": of_heads(&heads["previous_scores"]),
            "sample": samples::one(&subject, SAMPLE_TOKENS)?,
        }));
        bar.inc(1);
    }
    Ok(measured)
}

/// Checkpoints that a training run kept, sorted by step.
fn kept_steps(training: &Path) -> Result<Vec<(u64, PathBuf)>> {
    let entries = fs::read_dir(training).with_context(|| training.display().to_string())?;
    let mut steps = Vec::new();
    for entry in entries {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if let Some(step) = name.strip_prefix("step-").and_then(|step| step.parse().ok()) {
            steps.push((step, path));
        }
    }
    steps.sort_unstable();
    Ok(steps)
}

/// Rounds to the number of digits that the page shows.
fn rounded(value: f64) -> f64 {
    (value * 1000.0).round() / 1000.0
}

fn of_heads(scores: &Value) -> Value {
    match scores {
        Value::Array(layers) => layers.iter().map(of_heads).collect(),
        number => json!(rounded(number.as_f64().unwrap_or_default())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn saved_models_are_sorted_by_step() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["step-16", "step-0", "step-2", "adapter", "step-x"] {
            fs::create_dir(folder.path().join(name)).unwrap();
        }
        let steps = kept_steps(folder.path()).unwrap();
        assert_eq!(steps.iter().map(|(step, _)| *step).collect::<Vec<_>>(), [0, 2, 16]);
        assert!(steps[2].1.ends_with("step-16"));
    }

    #[test]
    fn head_scores_are_rounded_to_three_digits() {
        assert_eq!(of_heads(&json!([[0.123456, 1.0], [0.9996, 0.0]])), json!([[0.123, 1.0], [1.0, 0.0]]));
    }
}
