//! Prompts whose continuation is known.

use anyhow::Result;
use candle_core::{DType, Tensor};
use candle_gpt2::LogitsFor;
use candle_gpt2_interpret::{Chain, Run};
use serde::Deserialize;
use story_generator::Figure;

use crate::{Subject, figure};

/// A prompt of `probes.json`.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct Probe {
    pub(crate) kind: String,
    pub(crate) prompt: String,
    pub(crate) answers: Vec<String>,
    pub(crate) others: Vec<String>,
}

/// So many probes of a kind.
pub(crate) fn of_kind<'a>(all: &'a [Probe], kind: &str, count: usize) -> Result<Vec<&'a Probe>> {
    let found: Vec<_> = all.iter().filter(|probe| probe.kind == kind).take(count).collect();
    anyhow::ensure!(
        !found.is_empty(),
        "probes.json has no prompts of the kind `{kind}`; make the corpus again"
    );
    Ok(found)
}

/// A kind of prompts: its name in the file, the figure's, and the share that should be right.
const KINDS: [(&str, &str, f64); 10] = [
    ("two people", "who gets it, held-out names and frames", 0.95),
    ("pronoun", "he or she", 0.97),
    ("pronoun, another nearer", "he or she, another nearer", 0.90),
    ("agreement", "is or are", 0.99),
    ("agreement, one other noun", "is or are, one other noun between", 0.95),
    ("agreement, two other nouns", "is or are, two other nouns between", 0.85),
    ("successor", "the next number", 0.98),
    ("who has what", "which of two things", 0.90),
    ("invented name", "an invented name a hundred tokens later", 0.95),
    ("copying", "five invented words again", 0.95),
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
        figures.push(figure(name, f64::from(right) / count, goal, false));
        if kind == "two people" {
            figures.push(figure("who gets it: mean logit difference", difference / count, 2.0, false));
        }
    }
    let greater = of_kind(all, "greater than", of_each)?;
    let shares = greater.iter().map(|probe| share_of_answers(subject, probe)).collect::<Result<Vec<_>>>()?;
    let mean = shares.iter().sum::<f64>() / greater.len() as f64;
    figures.push(figure("greater than: share of the right numbers", mean, 0.8, false));
    Ok(figures)
}

/// The logits that follow a prompt.
fn logits(subject: &Subject, ids: &[u32]) -> Result<Vec<f32>> {
    let run = Run::new(subject.loaded.model(), ids)?;
    let logits: Tensor = run.logits(LogitsFor::LastToken, &mut Chain(Vec::new()))?;
    Ok(logits.flatten_all()?.to_dtype(DType::F32)?.to_vec1()?)
}

/// The first tokens of some continuations.
fn first_tokens(subject: &Subject, continuations: &[String]) -> Result<Vec<usize>> {
    continuations.iter().map(|text| Ok(subject.first_token(text)? as usize)).collect()
}

/// The highest logit of the answers, and that of the others.
fn best_logits(subject: &Subject, probe: &Probe) -> Result<[f32; 2]> {
    let logits = logits(subject, &subject.prompt(&probe.prompt)?)?;
    let best = |continuations: &[String]| -> Result<f32> {
        let tokens = first_tokens(subject, continuations)?;
        Ok(tokens.into_iter().map(|token| logits[token]).fold(f32::NEG_INFINITY, f32::max))
    };
    Ok([best(&probe.answers)?, best(&probe.others)?])
}

/// How much of the probability of all that a probe names its answers have.
fn share_of_answers(subject: &Subject, probe: &Probe) -> Result<f64> {
    let logits = logits(subject, &subject.prompt(&probe.prompt)?)?;
    let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum = |continuations: &[String]| -> Result<f64> {
        let tokens = first_tokens(subject, continuations)?;
        Ok(tokens.into_iter().map(|token| f64::from(logits[token] - most).exp()).sum())
    };
    let (right, wrong) = (sum(&probe.answers)?, sum(&probe.others)?);
    Ok(right / (right + wrong))
}

/// Whether the most probable tokens are those of the answer, one after the other.
fn is_continued(subject: &Subject, probe: &Probe) -> Result<bool> {
    let prompt = subject.prompt(&probe.prompt)?;
    let whole = subject.prompt(&format!("{}{}", probe.prompt, probe.answers[0]))?;
    let run = Run::new(subject.loaded.model(), &whole)?;
    let logits =
        run.logits(LogitsFor::EveryToken, &mut Chain(Vec::new()))?.squeeze(0)?.to_dtype(DType::F32)?;
    let best = logits.argmax(1)?.to_vec1::<u32>()?;
    // The prompt's tokens are the whole's: an answer begins with a space, or after a quotation mark.
    Ok((prompt.len()..whole.len()).all(|place| best[place - 1] == whole[place]))
}
