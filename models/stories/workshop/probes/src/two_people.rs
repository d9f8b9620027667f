//! Circuits for the indirect object task: the giver's second mention, and heads that copy names.

use anyhow::{Context, Result};
use candle_core::{D, DType, Tensor};
use candle_gpt2::{Site, SiteKind};
use candle_gpt2_interpret::{Chain, Edit, Metric, Place, Replace, Run, lens_logits_at};
use story_generator::lexicon;

use crate::figures::Figure;
use crate::probes::Probe;
use crate::subject::Subject;

/// Number of highest logits that must include a copied name.
const HIGHEST: usize = 5;

/// Measures how often a patch of the giver's second mention reverses the answer.
///
/// After the first block, the patch replaces the state at the second mention with the state from another
/// text, in which the other person gives. Also measures the fraction of names that the best head copies.
pub(crate) fn run(subject: &Subject, probes: &[&Probe]) -> Result<Vec<Figure>> {
    let model = subject.loaded.model();
    let place = Site::in_block(0, SiteKind::ResidPost);
    let (mut right, mut reversed) = (0, 0);
    for probe in probes {
        let ids = subject.prompt(&probe.prompt)?;
        let [answer, giver] = [&probe.answers[0], &probe.others[0]].map(|name| subject.first_token(name));
        let (answer, giver) = (answer?, giver?);
        let second = ids.iter().rposition(|id| *id == giver);
        let second = second.with_context(|| {
            format!("the prompt `{}` contains no token of the name `{}`", probe.prompt, probe.others[0])
        })?;
        let mut other = ids.clone();
        other[second] = answer;
        let metric = Metric::logit_difference(answer, giver, ids.len() - 1);
        let run = Run::new(model, &ids)?;
        if metric.of_run(&run, &mut Chain(Vec::new()))? <= 0.0 {
            continue;
        }
        right += 1;
        let carried = Run::new(model, &other)?.record([place])?.get(place)?.get(0)?.get(second)?;
        let mut patch: Edit = Replace::new(place, carried).at(Place::position(second));
        reversed += u32::from(metric.of_run(&run, &mut patch)? < 0.0);
    }
    let names = lexicon().held_out_names.iter().map(|name| subject.first_token(&format!(" {name}")));
    let copied = copying(subject, &names.collect::<Result<Vec<_>>>()?)?;
    let reversed = f64::from(reversed) / f64::from(right.max(1));
    Ok(vec![
        Figure::new("who gets it: reversed by the second mention's state", reversed),
        Figure::new("names that the best head copies", copied.into_iter().fold(0.0, f64::max)),
    ])
}

/// Fraction of the tokens that each head copies.
///
/// A head copies a token if the token is among the highest logits of its output when it attends to that token
/// alone.
fn copying(subject: &Subject, tokens: &[u32]) -> Result<Vec<f64>> {
    let model = subject.loaded.model();
    let config = model.config();
    let mut copied = vec![0.0; config.n_layer * config.n_head];
    for token in tokens {
        let ids = [subject.end, *token];
        let sites = (0..config.n_layer).map(|layer| Site::in_block(layer, SiteKind::V));
        let record = Run::new(model, &ids)?.record(sites.clone())?;
        for (layer, (site, block)) in sites.zip(model.transformer().blocks()).enumerate() {
            let values = record.get(site)?.flatten_from(2)?; // (1, T, H · D)
            let added = block.attn().results(&values)?.narrow(1, 1, 1)?.squeeze(1)?; // (1, H, C)
            let logits = lens_logits_at(model, layer, added, &|_, residual| Ok(residual))?;
            for head in 0..config.n_head {
                let is_high = is_among_highest(&logits.get(0)?.get(head)?, *token)?;
                copied[layer * config.n_head + head] += f64::from(u8::from(is_high)) / tokens.len() as f64;
            }
        }
    }
    Ok(copied)
}

fn is_among_highest(logits: &Tensor, token: u32) -> Result<bool> {
    let logits = logits.to_dtype(DType::F32)?;
    let own = logits.narrow(D::Minus1, token as usize, 1)?;
    let higher = logits.broadcast_gt(&own)?.to_dtype(DType::F32)?.sum_all()?.to_scalar::<f32>()?;
    Ok(higher < HIGHEST as f32)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use candle_core::Device;
    use serde_json::json;

    use super::*;
    use crate::probes::of_kind;

    /// Uses few prompts, as in the model card.
    #[test]
    fn built_in_model_copies_names_and_follows_the_second_mention() {
        let subject = Subject::open(Path::new("built-in")).unwrap();
        let all: Vec<Probe> = serde_json::from_value(json!(story_generator::probes(1, 60))).unwrap();
        let figures = run(&subject, &of_kind(&all, "two people", 60).unwrap()).unwrap();
        let [reversed, copied] = [figures[0].value, figures[1].value];
        assert!(reversed > 0.5 && copied > 0.9, "{reversed} {copied}");
    }

    #[test]
    fn five_logits_are_among_the_highest() {
        let logits = Tensor::from_slice(&[0.5f32, 3.0, -1.0, 2.0, 2.5, 1.0, 0.0], 7, &Device::Cpu).unwrap();
        let found: Vec<bool> = (0..7).map(|token| is_among_highest(&logits, token).unwrap()).collect();
        assert_eq!(found, [true, true, false, true, true, true, false]);
    }
}
