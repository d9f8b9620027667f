//! Loss on repeated rows of random tokens, the heads that reduce it, and the loss without them.

use anyhow::Result;
use candle_core::{D, DType};
use candle_gpt2::{LogitsFor, Observer};
use candle_gpt2_interpret::{
    Ablate, Chain, Edit, PerHead, Place, Run, head_scores, named_site, random_rows as rows_of,
};
use candle_nn::ops::log_softmax;
use serde_json::{Value, json};

use crate::figures::Figure;
use crate::subject::Subject;

/// Tokens per row.
const ROW: usize = 64;
/// Number of rows on which each ablation's loss is measured.
const ABLATED_ROWS: usize = 10;

/// Loss of every token but the first, in nats, with edits applied.
pub(crate) fn losses(subject: &Subject, ids: &[u32], edits: &mut [Edit]) -> Result<Vec<f32>> {
    let run = Run::new(subject.loaded.model(), ids)?;
    let mut chain = Chain(edits.iter_mut().map(|edit| edit as &mut dyn Observer).collect());
    let logits = run.logits(LogitsFor::EveryToken, &mut chain)?.squeeze(0)?.to_dtype(DType::F32)?;
    let logprobs = log_softmax(&logits, D::Minus1)?.to_vec2::<f32>()?;
    Ok(ids[1..].iter().zip(&logprobs).map(|(next, of)| -of[*next as usize]).collect())
}

/// Head with the highest score in the given layers, excluding the heads in `without`.
fn best(
    scores: &PerHead,
    layers: std::ops::Range<usize>,
    without: &[(usize, usize)],
) -> Option<((usize, usize), f32)> {
    let all = layers
        .flat_map(|layer| scores[layer].iter().enumerate().map(move |(head, score)| ((layer, head), *score)));
    all.filter(|(place, _)| !without.contains(place)).max_by(|one, other| one.1.total_cmp(&other.1))
}

fn without(heads: &[(usize, usize)]) -> Result<Vec<Edit>> {
    heads
        .iter()
        .map(|(layer, head)| Ok(Ablate::zero(named_site(&format!("z{layer}"))?)?.at(Place::head(*head))))
        .collect()
}

/// Measures rows of random tokens, and returns the measurements and the heads found.
pub(crate) fn random_rows(subject: &Subject, count: usize) -> Result<(Vec<Figure>, Value)> {
    let model = subject.loaded.model();
    let config = model.config();
    let vocab_size = u32::try_from(config.vocab_size)?;
    let length = ROW.min((config.n_positions - 1) / 2);
    let rows = rows_of(0, count, length, 1, vocab_size);
    let scores = head_scores(model, &rows, Some(subject.end))?;
    let layers = config.n_layer;
    let Some((induction, induction_score)) = best(&scores.induction, 0..layers, &[]) else {
        anyhow::bail!("the model has no attention heads");
    };
    let second = best(&scores.induction, 0..layers, &[induction]).map(|(place, _)| place);
    let previous = best(&scores.previous, 0..induction.0.max(1), &[induction]);
    let top: Vec<(usize, usize)> = [Some(induction), second].into_iter().flatten().collect();
    let mut weakest: Vec<((usize, usize), f32)> = scores
        .induction
        .iter()
        .enumerate()
        .flat_map(|(layer, scores)| {
            scores.iter().enumerate().map(move |(head, score)| ((layer, head), *score))
        })
        .collect();
    weakest.sort_by(|one, other| one.1.total_cmp(&other.1));
    let others: Vec<(usize, usize)> =
        weakest.iter().map(|(place, _)| *place).filter(|(layer, _)| *layer > 0).take(2).collect();
    let loss = |heads: &[(usize, usize)]| -> Result<f64> {
        let mut sum = 0.0;
        let rows = &rows[..rows.len().min(ABLATED_ROWS)];
        for row in rows {
            let ids = [&[subject.end], &row[..], &row[..]].concat();
            let losses = losses(subject, &ids, &mut without(heads)?)?;
            // The first token of the repetition is as random as any other.
            sum +=
                losses[length + 1..].iter().map(|loss| f64::from(*loss)).sum::<f64>() / (length - 1) as f64;
        }
        Ok(sum / rows.len() as f64)
    };
    let whole = loss(&[])?;
    let previous_score = previous.map_or(0.0, |(_, score)| f64::from(score));
    let figures = vec![
        Figure::new("random tokens read again: nats per token", whole).at_most(1.2),
        Figure::new("best induction head", f64::from(induction_score)).at_least(0.5),
        Figure::new("best previous-token head below it", previous_score).at_least(0.6),
        Figure::new("nats lost without the two best induction heads", loss(&top)? - whole).at_least(2.0),
        Figure::new("nats lost without two other heads", loss(&others)? - whole),
    ];
    let heads = json!({
        "induction": [induction.0, induction.1], "previous": previous.map(|(place, _)| [place.0, place.1]),
        "induction_scores": scores.induction, "previous_scores": scores.previous,
    });
    Ok((figures, heads))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn built_in_model_has_and_uses_induction_heads() {
        let subject = Subject::open(Path::new("built-in")).unwrap();
        let (figures, heads) = random_rows(&subject, 4).unwrap();
        // Two of the four heads of block 1 suffice for copying, so the model loses little without the two best.
        let is_checked = |name: &str| name.contains("head") && !name.contains("the two best");
        for figure in figures.iter().filter(|figure| is_checked(figure.name)) {
            assert_ne!(figure.is_met(), Some(false), "{figure}");
        }
        let without_two = figures.iter().find(|figure| figure.name.contains("the two best")).unwrap();
        assert!(without_two.value > 0.3, "{without_two}");
        assert!(heads["previous"][0].as_u64() < heads["induction"][0].as_u64(), "{heads}");
    }
}
