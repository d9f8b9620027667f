//! What heads attend to: scores of attention patterns on texts that repeat themselves, and against patterns that are looked for.
//!
//! On a sequence of random tokens that is read twice, a head that goes back to what followed the same token before (an induction
//! head) attends from a token of the second half to the one after it in the first. Sources: "In-context Learning and Induction
//! Heads" (arXiv:2209.11895); TransformerLens 4.3.0, `head_detector`.

use candle_core::{DType, Tensor};
use candle_gpt2::{Gpt2LMHeadModel, Observer, Pass, Site, SiteKind};

use crate::error::Result;
use crate::patching::BATCH_TOKENS;
use crate::run::rounded;
use crate::{InterpretError, Run};

/// A number for each head, `[layer][head]`. [`head_scores`] and [`detect_heads`] give them.
pub type OfHeads = Vec<Vec<f32>>;

/// What is kept of a pattern: from `(B, H, T, T)` of one layer to a number for each head.
struct Reduce<F> {
    of: F,
    found: OfHeads,
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

/// Runs rows of as many tokens, and makes a number of each head's pattern `(B, H, T, T)`; patterns of one layer at a time are in
/// memory.
fn reduced(
    model: &Gpt2LMHeadModel,
    rows: &[Vec<u32>],
    of: impl Fn(&Tensor) -> candle_core::Result<Vec<f32>>,
) -> Result<OfHeads> {
    let tokens = rows.first().map_or(0, Vec::len);
    let ids = Tensor::from_vec(rows.concat(), (rows.len(), tokens), model.device())?;
    let mut reduce = Reduce { of, found: Vec::new() };
    model.transformer().forward_with(&ids, None, &mut Pass::inference().observed_by(&mut reduce))?;
    Ok(reduce.found)
}

/// How much of a head's attention goes where, on average over the tokens for which there is such a place.
/// [`head_scores`] gives them.
#[derive(Debug, Clone, PartialEq)]
pub struct HeadScores {
    /// To the token before.
    pub previous: OfHeads,
    /// To the same token in the first half.
    pub duplicate: OfHeads,
    /// To the token after the same one in the first half.
    pub induction: OfHeads,
}

/// Scores on rows of random tokens, each of which is read twice, after `bos` if it is given.
///
/// ```
/// use candle_gpt2_interpret::{head_scores, random_rows};
/// # use candle_core::{DType, Device};
/// # use candle_gpt2::{Gpt2Config, Gpt2LMHeadModel};
/// # let sizes = Gpt2Config { vocab_size: 11, n_positions: 8, n_embd: 6, n_layer: 2, n_head: 3, ..Gpt2Config::gpt2() };
/// # let model = Gpt2LMHeadModel::load(&sizes, candle_nn::VarBuilder::zeros(DType::F32, &Device::Cpu))?;
///
/// // Four random tokens, twice: an induction head looks at what came after the same token before.
/// let scores = head_scores(&model, &random_rows(0, 5, 4, 1, 11), None)?;
/// assert_eq!((scores.induction.len(), scores.induction[0].len()), (2, 3), "layers and heads");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// When rows differ in length or have no tokens, both halves do not fit into the context, and those of the model.
pub fn head_scores(model: &Gpt2LMHeadModel, rows: &[Vec<u32>], bos: Option<u32>) -> Result<HeadScores> {
    let length = rows.first().map_or(0, Vec::len);
    if length == 0 || rows.iter().any(|row| row.len() != length) {
        return Err(InterpretError::Mismatch(
            "rows of random tokens must have one length of at least 1".into(),
        ));
    }
    let doubled: Vec<Vec<u32>> =
        rows.iter().map(|row| bos.into_iter().chain(row.iter().chain(row).copied()).collect()).collect();
    doubled.iter().try_for_each(|ids| Run::new(model, ids).map(drop))?;
    let offsets = [1, length, length - 1];
    let mut all: OfHeads = Vec::new();
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

/// Means over rows and queries of the attention that each head pays to the key so many tokens before, of `(B, H, T, T)`.
fn diagonal_means(pattern: &Tensor, offset: usize) -> candle_core::Result<Vec<f32>> {
    let (rows, heads, tokens, _) = pattern.dims4()?;
    let queries = tokens - offset;
    let places: Vec<i64> = (0..queries).map(|query| ((query + offset) * tokens + query) as i64).collect();
    let places = Tensor::from_vec(places, queries, pattern.device())?;
    let flat = pattern.contiguous()?.reshape((rows, heads, tokens * tokens))?;
    flat.index_select(&places, 2)?.mean(2)?.mean(0)?.to_vec1()
}

/// Rows of random tokens as PyTorch's `torch.randint(from, below, (rows, length))` draws them after `torch.manual_seed(seed)`.
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

/// MT19937. Source: Matsumoto and Nishimura, "Mersenne Twister" (1998), with their initialisation of 2002.
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

/// A pattern that is looked for. [`detect_heads`] looks for it.
#[derive(Debug, Clone, PartialEq)]
pub enum Sought {
    /// Every token attends to the one before.
    Previous,
    /// Every token attends to the same tokens before it.
    Duplicate,
    /// Every token attends to what followed the same tokens before it.
    Induction,
    /// What is given, `(T, T)` row by row: ones below the diagonal and on it where attention is sought.
    Given(Vec<f32>),
}

impl Sought {
    /// The pattern for these tokens, `(T, T)` row by row.
    fn matrix(&self, ids: &[u32]) -> Vec<f32> {
        let tokens = ids.len();
        let of = |is_sought: &dyn Fn(usize, usize) -> bool| {
            let places = (0..tokens).flat_map(|query| (0..tokens).map(move |key| (query, key)));
            places.map(|(query, key)| f32::from(u8::from(is_sought(query, key)))).collect()
        };
        match self {
            Self::Previous => of(&|query, key| query == key + 1),
            Self::Duplicate => of(&|query, key| key < query && ids[query] == ids[key]),
            // Key `key` followed token `key - 1`, which is the query's own.
            Self::Induction => {
                of(&|query, key| key > 0 && key <= query && key - 1 != query && ids[query] == ids[key - 1])
            }
            Self::Given(matrix) => matrix.clone(),
        }
    }
}

/// How a pattern is compared with the one that is looked for. [`detect_heads`] compares so.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Likeness {
    /// The share of attention that goes to sought places.
    #[default]
    Share,
    /// One less the mean difference of both, taken as many times as there are tokens.
    Difference,
}

/// The entries of a pattern that are left out before it is compared. [`detect_heads`] takes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Excluded {
    /// Attention to the first token.
    pub bos: bool,
    /// Attention of tokens to themselves.
    pub current: bool,
}

/// How like each head's pattern on a text is to the one that is looked for.
///
/// ```
/// use candle_gpt2_interpret::{Excluded, Likeness, Run, Sought, detect_heads};
/// # use candle_core::{DType, Device};
/// # use candle_gpt2::{Gpt2Config, Gpt2LMHeadModel};
/// # let sizes = Gpt2Config { vocab_size: 11, n_positions: 8, n_embd: 6, n_layer: 2, n_head: 3, ..Gpt2Config::gpt2() };
/// # let model = Gpt2LMHeadModel::load(&sizes, candle_nn::VarBuilder::zeros(DType::F32, &Device::Cpu))?;
///
/// let run = Run::new(&model, &[1, 2, 3, 4])?;
/// let scores = detect_heads(&run, &Sought::Previous, Likeness::Share, Excluded::default())?;
/// assert!(scores[0][0] > 0.2 && scores[0][0] < 0.5, "even attention goes to the token before too");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// When a given pattern has another size, and those of the model.
pub fn detect_heads(run: &Run, sought: &Sought, likeness: Likeness, excluded: Excluded) -> Result<OfHeads> {
    let tokens = run.ids.len();
    let sought = sought.matrix(run.ids);
    if sought.len() != tokens * tokens {
        return Err(InterpretError::Mismatch(format!(
            "a pattern of {} values was given for {tokens} tokens",
            sought.len()
        )));
    }
    let is_left_out = |place: usize| {
        let (query, key) = (place / tokens, place % tokens);
        (excluded.bos && key == 0) || (excluded.current && key == query)
    };
    reduced(run.model, &[run.ids.to_vec()], |pattern| {
        let heads = pattern.squeeze(0)?.flatten_from(1)?.to_vec2::<f32>()?;
        Ok(heads
            .iter()
            .map(|head| {
                let (mut on_sought, mut all, mut difference) = (0.0, 0.0, 0.0);
                for (place, (seen, sought)) in head.iter().zip(&sought).enumerate() {
                    if is_left_out(place) {
                        continue;
                    }
                    let (seen, sought) = (f64::from(*seen), f64::from(*sought));
                    on_sought += seen * sought;
                    all += seen;
                    difference += (seen - sought).abs();
                }
                match likeness {
                    Likeness::Share => rounded(on_sought / all),
                    Likeness::Difference => rounded(1.0 - difference / tokens as f64),
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
    fn patterns_that_are_what_is_looked_for_score_one() -> candle_core::Result<()> {
        const TOKENS: usize = 7;
        // Two rows, two heads: one that attends to the token `offset` before (and to itself where there is none), one evenly.
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
            assert!((means[1] - even).abs() < 1e-6, "{} for {even}", means[1]);
            let other = diagonal_means(&pattern, if offset == 1 { 2 } else { 1 })?;
            assert_eq!(other[0], 0.0);
        }
        Ok(())
    }

    #[test]
    fn sought_places_are_those_of_the_tokens() {
        let ids = [5, 9, 5, 9];
        let ones = |sought: Sought| -> Vec<(usize, usize)> {
            let matrix = sought.matrix(&ids);
            (0..16).filter(|place| matrix[*place] == 1.0).map(|place| (place / 4, place % 4)).collect()
        };
        assert_eq!(ones(Sought::Previous), [(1, 0), (2, 1), (3, 2)]);
        assert_eq!(ones(Sought::Duplicate), [(2, 0), (3, 1)]);
        assert_eq!(ones(Sought::Induction), [(2, 1), (3, 2)]);
    }
}
