//! Head detection: scores of attention patterns on repeated sequences and against target patterns.
//!
//! An induction head attends to the token that followed the previous occurrence of the current token. On a
//! random sequence that is repeated, it attends from the second half to the successor of the same token in
//! the first half. Sources: "In-context Learning and Induction Heads" (arXiv:2209.11895); TransformerLens
//! 4.3.0, `head_detector`.

use candle_core::{DType, Tensor};
use candle_gpt2::{Gpt2LMHeadModel, Observer, Pass, Site, SiteKind};

use crate::error::Result;
use crate::patching::BATCH_TOKENS;
use crate::run::rounded;
use crate::{InterpretError, Run};

/// One value for each head, `[layer][head]`, from [`head_scores`] or [`detect_heads`].
pub type PerHead = Vec<Vec<f32>>;

/// Observer that reduces each layer's patterns `(B, H, T, T)` to a list of values.
struct Reduce<F> {
    of: F,
    found: PerHead,
}

impl<F: Fn(&Tensor) -> candle_core::Result<Vec<f32>>> Observer for Reduce<F> {
    fn wants(&self, site: Site) -> bool {
        site.kind == SiteKind::Pattern
    }

    fn observe(&mut self, _: Site, value: Tensor) -> candle_core::Result<Tensor> {
        self.found.push((self.of)(&value.to_dtype(DType::F32)?)?);
        Ok(value)
    }
}

/// Runs the model on rows of equal length and reduces each layer's patterns `(B, H, T, T)`.
///
/// Only one layer's patterns are in memory at a time.
fn reduced(
    model: &Gpt2LMHeadModel,
    rows: &[Vec<u32>],
    of: impl Fn(&Tensor) -> candle_core::Result<Vec<f32>>,
) -> Result<PerHead> {
    let tokens = rows.first().map_or(0, Vec::len);
    let ids = Tensor::from_vec(rows.concat(), (rows.len(), tokens), model.device())?;
    let mut reduce = Reduce { of, found: Vec::new() };
    model.transformer().forward_with(&ids, None, &mut Pass::inference().observed_by(&mut reduce))?;
    Ok(reduce.found)
}

/// Mean attention to specific earlier tokens, over the queries for which they exist.
///
/// [`head_scores`] returns it.
#[derive(Debug, Clone, PartialEq)]
pub struct HeadScores {
    /// Attention to the previous token.
    pub previous: PerHead,
    /// Attention to the same token in the first half.
    pub duplicate: PerHead,
    /// Attention to the successor of the same token in the first half.
    pub induction: PerHead,
}

/// Scores heads on rows of random tokens, each repeated once, after `bos` if it is `Some`.
///
/// ```
/// use candle_gpt2_interpret::{head_scores, random_rows};
/// # use candle_core::{DType, Device};
/// # use candle_gpt2::{Gpt2Config, Gpt2LMHeadModel};
/// # let sizes = Gpt2Config { vocab_size: 11, n_positions: 8, n_embd: 6, n_layer: 2, n_head: 3, ..Gpt2Config::gpt2() };
/// # let model = Gpt2LMHeadModel::load(&sizes, candle_nn::VarBuilder::zeros(DType::F32, &Device::Cpu))?;
///
/// // Four random tokens, twice: an induction head attends to the successor of an earlier occurrence.
/// let scores = head_scores(&model, &random_rows(0, 5, 4, 1, 11), None)?;
/// assert_eq!((scores.induction.len(), scores.induction[0].len()), (2, 3), "two layers of three heads");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// If the rows are empty or differ in length, if both halves exceed the context, or if the model fails.
pub fn head_scores(model: &Gpt2LMHeadModel, rows: &[Vec<u32>], bos: Option<u32>) -> Result<HeadScores> {
    let length = rows.first().map_or(0, Vec::len);
    if length == 0 || rows.iter().any(|row| row.len() != length) {
        return Err(InterpretError::Mismatch(
            "rows of random tokens must be non-empty and of equal length".into(),
        ));
    }
    let doubled: Vec<Vec<u32>> =
        rows.iter().map(|row| bos.into_iter().chain(row.iter().chain(row).copied()).collect()).collect();
    doubled.iter().try_for_each(|ids| Run::new(model, ids).map(drop))?;
    let offsets = [1, length, length - 1];
    let mut all: PerHead = Vec::new();
    let together = (BATCH_TOKENS / doubled[0].len()).max(1);
    for rows in doubled.chunks(together) {
        let share = rows.len() as f32 / doubled.len() as f32;
        let found = reduced(model, rows, |pattern| {
            let mean = offsets
                .iter()
                .map(|offset| diagonal_means(pattern, *offset))
                .collect::<candle_core::Result<Vec<_>>>()?;
            Ok(mean.concat())
        })?;
        all.resize(found.len(), vec![0.0; found[0].len()]);
        for (sums, found) in all.iter_mut().flatten().zip(found.iter().flatten()) {
            *sums += share * found;
        }
    }
    let heads = model.config().n_head;
    let of = |part: usize| all.iter().map(|layer| layer[part * heads..][..heads].to_vec()).collect();
    Ok(HeadScores { previous: of(0), duplicate: of(1), induction: of(2) })
}

/// Mean attention of each head to the key `offset` tokens back.
///
/// `pattern` is `(B, H, T, T)`. The mean is over rows and queries.
fn diagonal_means(pattern: &Tensor, offset: usize) -> candle_core::Result<Vec<f32>> {
    let (rows, heads, tokens, _) = pattern.dims4()?;
    let queries = tokens - offset;
    let places: Vec<i64> = (0..queries).map(|query| ((query + offset) * tokens + query) as i64).collect();
    let places = Tensor::from_vec(places, queries, pattern.device())?;
    let flat = pattern.contiguous()?.reshape((rows, heads, tokens * tokens))?;
    flat.index_select(&places, 2)?.mean(2)?.mean(0)?.to_vec1()
}

/// Generates rows of random tokens in `from..below`, as PyTorch does for the same seed.
///
/// The tokens equal `torch.randint(from, below, (rows, length))` after `torch.manual_seed(seed)`.
///
/// ```
/// let rows = candle_gpt2_interpret::random_rows(0, 2, 5, 1, 11);
/// assert!(rows.len() == 2 && rows.iter().flatten().all(|id| (1..11).contains(id)));
/// ```
pub fn random_rows(seed: u32, rows: usize, length: usize, from: u32, below: u32) -> Vec<Vec<u32>> {
    let mut generator = MersenneTwister::new(seed);
    let range = below.saturating_sub(from).max(1);
    (0..rows).map(|_| (0..length).map(|_| from + generator.next() % range).collect()).collect()
}

/// MT19937. Source: Matsumoto and Nishimura, "Mersenne Twister" (1998), with their 2002 initialization.
struct MersenneTwister {
    state: [u32; 624],
    place: usize,
}

impl MersenneTwister {
    fn new(seed: u32) -> Self {
        let mut state = [seed; 624];
        for (index, number) in (1..state.len()).zip(1u32..) {
            let before = state[index - 1];
            state[index] = 1_812_433_253u32.wrapping_mul(before ^ (before >> 30)).wrapping_add(number);
        }
        Self { state, place: 624 }
    }

    fn next(&mut self) -> u32 {
        if self.place == self.state.len() {
            for index in 0..self.state.len() {
                let mixed = (self.state[index] & 0x8000_0000) | (self.state[(index + 1) % 624] & 0x7fff_ffff);
                let twisted = (mixed >> 1) ^ if mixed & 1 == 1 { 0x9908_b0df } else { 0 };
                self.state[index] = self.state[(index + 397) % 624] ^ twisted;
            }
            self.place = 0;
        }
        let mut drawn = self.state[self.place];
        self.place += 1;
        drawn ^= drawn >> 11;
        drawn ^= (drawn << 7) & 0x9d2c_5680;
        drawn ^= (drawn << 15) & 0xefc6_0000;
        drawn ^ (drawn >> 18)
    }
}

/// Target pattern for [`detect_heads`].
#[derive(Debug, Clone, PartialEq)]
pub enum TargetPattern {
    /// Every token attends to the previous one.
    Previous,
    /// Every token attends to earlier occurrences of the same token.
    Duplicate,
    /// Every token attends to the successors of earlier occurrences of the same token.
    Induction,
    /// Custom pattern, `(T, T)` in row-major order.
    ///
    /// Entries on or below the diagonal are one where the head should attend.
    Custom(Vec<f32>),
}

impl TargetPattern {
    /// Returns the pattern for these tokens, `(T, T)` in row-major order.
    fn matrix(&self, ids: &[u32]) -> Vec<f32> {
        let tokens = ids.len();
        let of = |is_target: &dyn Fn(usize, usize) -> bool| {
            let places = (0..tokens).flat_map(|query| (0..tokens).map(move |key| (query, key)));
            places.map(|(query, key)| f32::from(u8::from(is_target(query, key)))).collect()
        };
        match self {
            Self::Previous => of(&|query, key| query == key + 1),
            Self::Duplicate => of(&|query, key| key < query && ids[query] == ids[key]),
            // Token `key - 1`, which precedes the key, equals the query token.
            Self::Induction => {
                of(&|query, key| key > 0 && key <= query && key - 1 != query && ids[query] == ids[key - 1])
            }
            Self::Custom(matrix) => matrix.clone(),
        }
    }
}

/// Measure of similarity between a pattern and its target in [`detect_heads`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum PatternSimilarity {
    /// Fraction of the attention on target entries.
    #[default]
    Share,
    /// `1 − sum(|pattern − target|) / T` for `T` tokens.
    Difference,
}

/// Entries that [`detect_heads`] ignores in the comparison.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct IgnoredEntries {
    /// Attention to the first token.
    pub bos: bool,
    /// Attention of each token to itself.
    pub current: bool,
}

/// Scores each head by the similarity of its pattern to the target.
///
/// ```
/// use candle_gpt2_interpret::{IgnoredEntries, PatternSimilarity, Run, TargetPattern, detect_heads};
/// # use candle_core::{DType, Device};
/// # use candle_gpt2::{Gpt2Config, Gpt2LMHeadModel};
/// # let sizes = Gpt2Config { vocab_size: 11, n_positions: 8, n_embd: 6, n_layer: 2, n_head: 3, ..Gpt2Config::gpt2() };
/// # let model = Gpt2LMHeadModel::load(&sizes, candle_nn::VarBuilder::zeros(DType::F32, &Device::Cpu))?;
///
/// let run = Run::new(&model, &[1, 2, 3, 4])?;
/// let scores = detect_heads(&run, &TargetPattern::Previous, PatternSimilarity::Share, IgnoredEntries::default())?;
/// assert!(scores[0][0] > 0.2 && scores[0][0] < 0.5, "uniform attention includes the previous token");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// If a custom pattern has the wrong size, or if the model fails.
pub fn detect_heads(
    run: &Run,
    target: &TargetPattern,
    similarity: PatternSimilarity,
    ignored: IgnoredEntries,
) -> Result<PerHead> {
    let tokens = run.ids.len();
    let target = target.matrix(run.ids);
    if target.len() != tokens * tokens {
        return Err(InterpretError::Mismatch(format!(
            "custom target pattern: expected {} values for {tokens} tokens, found {}",
            tokens * tokens,
            target.len()
        )));
    }
    let is_ignored = |place: usize| {
        let (query, key) = (place / tokens, place % tokens);
        (ignored.bos && key == 0) || (ignored.current && key == query)
    };
    reduced(run.model, &[run.ids.to_vec()], |pattern| {
        let heads = pattern.squeeze(0)?.flatten_from(1)?.to_vec2::<f32>()?;
        Ok(heads
            .iter()
            .map(|head| {
                let (mut on_target, mut all, mut difference) = (0.0, 0.0, 0.0);
                for (place, (seen, target)) in head.iter().zip(&target).enumerate() {
                    if is_ignored(place) {
                        continue;
                    }
                    let (seen, target) = (f64::from(*seen), f64::from(*target));
                    on_target += seen * target;
                    all += seen;
                    difference += (seen - target).abs();
                }
                match similarity {
                    PatternSimilarity::Share => rounded(on_target / all),
                    PatternSimilarity::Difference => rounded(1.0 - difference / tokens as f64),
                }
            })
            .collect())
    })
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    #[test]
    fn head_at_the_offset_has_a_diagonal_mean_of_one() -> candle_core::Result<()> {
        const TOKENS: usize = 7;
        // One head attends to the token `offset` positions back, or to itself near the start. The other head
        // attends evenly to all visible tokens.
        for offset in [1, 3, 6] {
            let mut values = vec![0f32; 2 * 2 * TOKENS * TOKENS];
            for row in 0..2 {
                for query in 0..TOKENS {
                    let start = (row * 2 * TOKENS + query) * TOKENS;
                    values[start + query.checked_sub(offset).unwrap_or(query)] = 1.0;
                    let start = ((row * 2 + 1) * TOKENS + query) * TOKENS;
                    values[start..=start + query].fill(1.0 / (query + 1) as f32);
                }
            }
            let pattern = Tensor::from_vec(values, (2, 2, TOKENS, TOKENS), &Device::Cpu)?;
            let means = diagonal_means(&pattern, offset)?;
            assert_eq!(means[0], 1.0, "offset {offset}");
            let even = (offset..TOKENS).map(|query| 1.0 / (query + 1) as f32).sum::<f32>()
                / (TOKENS - offset) as f32;
            assert!((means[1] - even).abs() < 1e-6, "{} vs. {even}", means[1]);
            let other = diagonal_means(&pattern, if offset == 1 { 2 } else { 1 })?;
            assert_eq!(other[0], 0.0);
        }
        Ok(())
    }

    #[test]
    fn target_patterns_mark_the_expected_token_pairs() {
        let ids = [5, 9, 5, 9];
        let ones = |target: TargetPattern| -> Vec<(usize, usize)> {
            let matrix = target.matrix(&ids);
            (0..16).filter(|index| matrix[*index] == 1.0).map(|index| (index / 4, index % 4)).collect()
        };
        assert_eq!(ones(TargetPattern::Previous), [(1, 0), (2, 1), (3, 2)]);
        assert_eq!(ones(TargetPattern::Duplicate), [(2, 0), (3, 1)]);
        assert_eq!(ones(TargetPattern::Induction), [(2, 1), (3, 2)]);
    }
}
