//! Processors that change tokens' logits or remove tokens, based on the tokens so far.

use std::collections::BTreeMap;

use crate::logits::to_f32;

/// Returns the last token of each sequence if the tokens before it match the end of `ids`.
pub(super) fn completing_tokens(sequences: &[Vec<u32>], ids: &[u32]) -> impl Iterator<Item = u32> {
    let last = |sequence: &Vec<u32>| {
        let (last, before) = sequence.split_last()?;
        ids.ends_with(before).then_some(*last)
    };
    sequences.iter().filter_map(last)
}

pub(super) fn add_biases(biases: &[(Vec<u32>, f64)], ids: &[u32], logits: &mut [f32]) {
    for (sequence, bias) in biases {
        if let Some((last, before)) = sequence.split_last()
            && ids.ends_with(before)
        {
            change(logits, *last, |logit| logit + to_f32(*bias));
        }
    }
}

pub(super) fn penalize_repetition(
    penalty: f64,
    counts: impl IntoIterator<Item = (u32, usize)>,
    logits: &mut [f32],
) {
    let penalty = to_f32(penalty);
    for (id, _) in counts {
        change(logits, id, |logit| if logit < 0.0 { logit * penalty } else { logit / penalty });
    }
}

pub(super) fn penalize_presence(
    penalty: f64,
    counts: impl IntoIterator<Item = (u32, usize)>,
    logits: &mut [f32],
) {
    for (id, _) in counts {
        change(logits, id, |logit| logit - to_f32(penalty));
    }
}

pub(super) fn penalize_frequency(
    penalty: f64,
    counts: impl IntoIterator<Item = (u32, usize)>,
    logits: &mut [f32],
) {
    for (id, count) in counts {
        change(logits, id, |logit| logit - to_f32(penalty * count as f64));
    }
}

/// Returns the tokens that followed the last `size - 1` tokens of `ids` in `earlier`.
pub(super) fn repeating_tokens<'ids>(
    earlier: &'ids [u32],
    ids: &'ids [u32],
    size: usize,
) -> impl Iterator<Item = u32> + 'ids {
    let before = size.checked_sub(1).and_then(|before| ids.len().checked_sub(before));
    let before = before.map_or(&[][..], |start| &ids[start..]);
    // A history that is too short has no windows. For size 0, use none: an empty n-gram cannot repeat.
    let windows = if size == 0 { [].windows(1) } else { earlier.windows(size) };
    windows
        .filter_map(move |window| window.split_last().filter(|(_, begin)| *begin == before))
        .map(|(last, _)| *last)
}

/// Counts the occurrences of each token, ordered by id.
pub(super) fn counts(ids: &[u32]) -> BTreeMap<u32, usize> {
    let mut counts = BTreeMap::new();
    ids.iter().for_each(|id| *counts.entry(*id).or_default() += 1);
    counts
}

pub(super) fn remove(ids: impl Iterator<Item = u32>, logits: &mut [f32]) {
    ids.for_each(|id| change(logits, id, |_| f32::NEG_INFINITY));
}

pub(super) fn change(logits: &mut [f32], id: u32, changed: impl Fn(f32) -> f32) {
    if let Some(logit) = usize::try_from(id).ok().and_then(|index| logits.get_mut(index)) {
        *logit = changed(*logit);
    }
}
