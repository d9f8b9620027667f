//! Prompts with known continuations.

use anyhow::Result;
use candle_core::{DType, Tensor};
use candle_gpt2::LogitsFor;
use candle_gpt2_interpret::{Chain, Run};
use serde::Deserialize;

use crate::figures::Figure;
use crate::subject::Subject;

/// A prompt from `probes.json`.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct Probe {
    pub(crate) kind: String,
    pub(crate) prompt: String,
    pub(crate) answers: Vec<String>,
    pub(crate) others: Vec<String>,
}

/// Returns the first `count` probes of a kind.
pub(crate) fn of_kind<'a>(all: &'a [Probe], kind: &str, count: usize) -> Result<Vec<&'a Probe>> {
    let found: Vec<_> = all.iter().filter(|probe| probe.kind == kind).take(count).collect();
    anyhow::ensure!(
        !found.is_empty(),
        "probes.json has no prompts of kind `{kind}`; generate the corpus again"
    );
    Ok(found)
}

/// Kinds of prompts: name in the file, name of the figure, and target fraction of correct answers.
const KINDS: [(&str, &str, Option<f64>); 8] = [
    ("two people", "who gets it, held-out names and frames", Some(0.93)),
    ("pronoun", "he or she", Some(0.95)),
    ("possessive behind another", "his or her, behind another name", Some(0.75)),
    ("agreement", "singular or plural", None),
    ("agreement, one other noun", "singular or plural, one other noun between", Some(0.9)),
    ("successor", "the next number", None),
    ("invented name", "an invented name a hundred tokens later", None),
    ("copying", "five invented words again", None),
];

pub(crate) fn run(subject: &Subject, all: &[Probe], of_each: usize) -> Result<Vec<Figure>> {
    let mut figures = Vec::new();
    for (kind, name, goal) in KINDS {
        let probes = of_kind(all, kind, of_each)?;
        let count = probes.len() as f64;
        let (mut right, mut difference) = (0, 0.0);
        for probe in probes {
            if probe.others.is_empty() {
                right += u32::from(is_continued(subject, probe)?);
            } else {
                let [answer, other] = best_logits(subject, probe)?;
                right += u32::from(answer > other);
                difference += f64::from(answer - other);
            }
        }
        let figure = Figure::new(name, f64::from(right) / count);
        figures.push(goal.into_iter().fold(figure, Figure::at_least));
        if kind == "two people" {
            figures.push(Figure::new("who gets it: mean logit difference", difference / count));
        }
    }
    Ok(figures)
}

/// Logits after a prompt.
fn logits(subject: &Subject, ids: &[u32]) -> Result<Vec<f32>> {
    let run = Run::new(subject.loaded.model(), ids)?;
    let logits: Tensor = run.logits(LogitsFor::LastToken, &mut Chain(Vec::new()))?;
    Ok(logits.flatten_all()?.to_dtype(DType::F32)?.to_vec1()?)
}

/// First token of each continuation.
fn first_tokens(subject: &Subject, continuations: &[String]) -> Result<Vec<usize>> {
    continuations.iter().map(|text| Ok(subject.first_token(text)? as usize)).collect()
}

/// Highest logit among the answers, and highest logit among the incorrect continuations.
fn best_logits(subject: &Subject, probe: &Probe) -> Result<[f32; 2]> {
    let logits = logits(subject, &subject.prompt(&probe.prompt)?)?;
    let best = |continuations: &[String]| -> Result<f32> {
        let tokens = first_tokens(subject, continuations)?;
        Ok(tokens.into_iter().map(|token| logits[token]).fold(f32::NEG_INFINITY, f32::max))
    };
    Ok([best(&probe.answers)?, best(&probe.others)?])
}

/// Whether greedy decoding continues the prompt with the answer.
fn is_continued(subject: &Subject, probe: &Probe) -> Result<bool> {
    let prompt = subject.prompt(&probe.prompt)?;
    let whole = subject.prompt(&format!("{}{}", probe.prompt, probe.answers[0]))?;
    let run = Run::new(subject.loaded.model(), &whole)?;
    let logits =
        run.logits(LogitsFor::EveryToken, &mut Chain(Vec::new()))?.squeeze(0)?.to_dtype(DType::F32)?;
    let best = logits.argmax(1)?.to_vec1::<u32>()?;
    // The prompt's tokens are a prefix of the whole text's tokens, because an answer begins with a space or
    // follows a quotation mark.
    Ok((prompt.len()..whole.len()).all(|place| best[place - 1] == whole[place]))
}
