//! Random choices from a seed.
//!
//! The generator is SplitMix64 (Steele, Lea and Flood, 2014) over a counter. All arithmetic uses integers, so
//! a seed yields the same bytes on every machine.

use std::collections::HashMap;

/// Prior weight of each of a habit's alternatives, in fifths of a use.
///
/// This is a Dirichlet prior of 0.4.
const PRIOR_FIFTHS: u64 = 2;
/// Weight that each use adds, in fifths.
const USE_FIFTHS: u64 = 5;

/// Source of random choices.
///
/// ```
/// use story_generator::Choices;
///
/// let mut choices = Choices::new(7);
/// let drawn: Vec<&str> = (0..3).map(|_| *choices.pick(&["red", "blue"])).collect();
/// let mut again = Choices::new(7);
/// assert_eq!(drawn, (0..3).map(|_| *again.pick(&["red", "blue"])).collect::<Vec<_>>());
/// ```
#[derive(Debug, Clone)]
pub struct Choices {
    state: u64,
    habits: HashMap<usize, Vec<u64>>,
}

/// Mixes the bits of a number.
///
/// `mix_bits` in the crate `arithmetic` is the same function. The copy keeps the generator independent of the
/// model's crates.
pub(crate) fn mixed(number: u64) -> u64 {
    let number = (number ^ number >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let number = (number ^ number >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    number ^ number >> 31
}

impl Choices {
    /// Creates a source of choices from a seed.
    pub fn new(seed: u64) -> Self {
        Self { state: mixed(seed ^ 0x5bf0_3635_dead_1e37), habits: HashMap::new() }
    }

    fn next(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mixed(self.state)
    }

    fn draw(&mut self, bound: u64) -> u64 {
        // The high half of the product is below the bound. Its bias is below bound / 2^64.
        u64::try_from((u128::from(self.next()) * u128::from(bound.max(1))) >> 64).unwrap_or_default()
    }

    /// Returns a uniform random number below `bound`.
    pub fn below(&mut self, bound: usize) -> usize {
        usize::try_from(self.draw(bound as u64)).unwrap_or_default()
    }

    /// Returns a uniform random number from `low` to `high`, inclusive.
    pub fn between(&mut self, low: usize, high: usize) -> usize {
        low + self.below(high - low + 1)
    }

    /// Picks one of the items uniformly.
    ///
    /// # Panics
    /// If `items` is empty.
    pub fn pick<'a, T>(&mut self, items: &'a [T]) -> &'a T {
        &items[self.below(items.len())]
    }

    /// Returns true with a probability of `percent` percent.
    pub fn chance(&mut self, percent: u64) -> bool {
        self.weighted(&[percent, 100 - percent.min(100)]) == 0
    }

    /// Picks an index with a probability proportional to its weight.
    pub fn weighted(&mut self, weights: &[u64]) -> usize {
        let total: u64 = weights.iter().sum();
        let mut left = self.draw(total);
        let mut chosen = 0;
        for (place, weight) in weights.iter().enumerate() {
            chosen = place;
            if left < *weight {
                break;
            }
            left -= weight;
        }
        chosen
    }

    /// Picks an alternative of a habit; earlier choices become more likely.
    ///
    /// This is a Pólya urn, so a story's preferences follow a Dirichlet distribution.
    pub fn habit(&mut self, habit: usize, alternatives: usize) -> usize {
        let mut weights = self.habits.remove(&habit).unwrap_or_else(|| vec![PRIOR_FIFTHS; alternatives]);
        let chosen = self.weighted(&weights);
        weights[chosen] += USE_FIFTHS;
        self.habits.insert(habit, weights);
        chosen
    }

    /// Samples `count` distinct numbers below `bound`, in the order sampled.
    pub fn distinct(&mut self, count: usize, bound: usize) -> Vec<usize> {
        let mut left: Vec<usize> = (0..bound).collect();
        (0..count.min(bound))
            .map(|_| {
                let place = self.below(left.len());
                left.swap_remove(place)
            })
            .collect()
    }

    /// Shuffles items.
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            let other = self.below(last + 1);
            items.swap(last, other);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_uniform() {
        let mut choices = Choices::new(1);
        let mut counts = [0; 8];
        (0..8000).for_each(|_| counts[choices.below(8)] += 1);
        assert!(counts.iter().all(|count| (850..1150).contains(count)), "{counts:?}");
    }

    #[test]
    fn habit_repeats_its_earlier_choice() {
        // With five alternatives of 2 fifths each, the second use equals the first with probability 7/15.
        let is_same = |seed| {
            let mut choices = Choices::new(seed);
            choices.habit(0, 5) == choices.habit(0, 5)
        };
        let equal_pairs = (0..3000).filter(|seed| is_same(*seed)).count();
        assert!((1300..1500).contains(&equal_pairs), "{equal_pairs} of 3000");
    }

    #[test]
    fn weighted_choice_follows_weights_and_skips_zero() {
        let mut choices = Choices::new(5);
        let mut counts = [0; 3];
        (0..4000).for_each(|_| counts[choices.weighted(&[1, 0, 3])] += 1);
        assert!(counts[1] == 0 && (900..1100).contains(&counts[0]), "{counts:?}");
        let mut distinct = choices.distinct(5, 5);
        distinct.sort_unstable();
        assert_eq!(distinct, [0, 1, 2, 3, 4]);
    }
}
