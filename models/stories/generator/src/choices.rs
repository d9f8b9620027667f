//! Choices by seed: which numbers are drawn, and how improbable each choice was.
//!
//! The generator is SplitMix64 (Steele, Lea and Flood, 2014) over a counter, and everything is integer arithmetic, so that a seed gives
//! the same bytes on every machine. The information of every choice is added up; the sum is an upper bound of −log p of the text,
//! since another sequence of choices may give the same text.

use std::collections::HashMap;

/// Parts of a bit in which information is counted.
const MICROBITS: u64 = 1_000_000;
/// Prior weight of every alternative of a habit, in fifths of a use: a Dirichlet distribution of 0.4.
const PRIOR_FIFTHS: u64 = 2;
/// What a use adds, in fifths.
const USE_FIFTHS: u64 = 5;

/// A source of choices.
///
/// ```
/// use story_generator::Choices;
///
/// let mut choices = Choices::new(7);
/// let drawn: Vec<&str> = (0..3).map(|_| *choices.pick(&["red", "blue"])).collect();
/// let mut again = Choices::new(7);
/// assert_eq!(drawn, (0..3).map(|_| *again.pick(&["red", "blue"])).collect::<Vec<_>>());
/// assert_eq!(choices.microbits(), 3_000_000);
/// ```
#[derive(Debug, Clone)]
pub struct Choices {
    state: u64,
    microbits: u64,
    habits: HashMap<usize, Vec<u64>>,
}

/// Mixes the bits of a number. `mix_bits` of the crate `arithmetic` is the same; the generator needs nothing of the model that its stories
/// are for.
pub(crate) fn mixed(number: u64) -> u64 {
    let number = (number ^ number >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let number = (number ^ number >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    number ^ number >> 31
}

impl Choices {
    /// The choices of a seed.
    pub fn new(seed: u64) -> Self {
        Self { state: mixed(seed ^ 0x5bf0_3635_dead_1e37), microbits: 0, habits: HashMap::new() }
    }

    /// The information of all choices so far, in millionths of a bit.
    pub fn microbits(&self) -> u64 {
        self.microbits
    }

    fn next(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mixed(self.state)
    }

    /// A number below `bound`, all equally likely, whose information does not count: the choice has been counted already, or its
    /// weights are known.
    fn draw(&mut self, bound: u64) -> u64 {
        // The high half of the product is below the bound; its bias is below bound / 2^64.
        u64::try_from((u128::from(self.next()) * u128::from(bound.max(1))) >> 64).unwrap_or_default()
    }

    /// A number below `bound`, all equally likely.
    pub fn below(&mut self, bound: usize) -> usize {
        self.microbits += log2_microbits(bound.max(1) as u64);
        usize::try_from(self.draw(bound as u64)).unwrap_or_default()
    }

    /// A number of a range that includes both ends.
    pub fn between(&mut self, low: usize, high: usize) -> usize {
        low + self.below(high - low + 1)
    }

    /// One of some items.
    ///
    /// # Panics
    /// When there are none: lists of the generator have items.
    pub fn pick<'a, T>(&mut self, items: &'a [T]) -> &'a T {
        &items[self.below(items.len())]
    }

    /// Whether something of a chance of so many in a hundred happens.
    pub fn chance(&mut self, percent: u64) -> bool {
        self.weighted(&[percent, 100 - percent.min(100)]) == 0
    }

    /// A place in a list of weights.
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
        self.microbits += log2_microbits(total).saturating_sub(log2_microbits(weights[chosen].max(1)));
        chosen
    }

    /// One of so many alternatives of a habit: what was chosen before is likelier (a Pólya urn, so that a story's preferences follow a
    /// Dirichlet distribution).
    pub fn habit(&mut self, habit: usize, alternatives: usize) -> usize {
        let mut weights = self.habits.remove(&habit).unwrap_or_else(|| vec![PRIOR_FIFTHS; alternatives]);
        let chosen = self.weighted(&weights);
        weights[chosen] += USE_FIFTHS;
        self.habits.insert(habit, weights);
        chosen
    }

    /// So many different numbers below `bound`, in the order in which they were drawn.
    pub fn distinct(&mut self, count: usize, bound: usize) -> Vec<usize> {
        let mut left: Vec<usize> = (0..bound).collect();
        (0..count.min(bound))
            .map(|_| {
                let place = self.below(left.len());
                left.swap_remove(place)
            })
            .collect()
    }

    /// Puts items into an order.
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            let other = self.below(last + 1);
            items.swap(last, other);
        }
    }
}

/// log₂ of a number of at least 1 in millionths, rounded down, by squaring: floating point may differ between machines.
fn log2_microbits(number: u64) -> u64 {
    let whole = u64::from(number.max(1).ilog2());
    // The mantissa as a fixed-point number from 1 to below 2, with 32 bits behind the point.
    let mut mantissa = if whole <= 32 { number << (32 - whole) } else { number >> (whole - 32) };
    let mut fraction = 0;
    const BITS: u32 = 24;
    for bit in (0..BITS).rev() {
        let square = (u128::from(mantissa) * u128::from(mantissa)) >> 32;
        let is_two = square >> 33 != 0;
        fraction |= u64::from(is_two) << bit;
        mantissa = u64::try_from(square >> u32::from(is_two)).unwrap_or(1 << 32);
    }
    whole * MICROBITS + ((fraction * MICROBITS) >> BITS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logarithms_are_those_of_the_library_to_a_millionth() {
        for number in [1, 2, 3, 5, 7, 100, 1023, 1024, 12_345_678, u64::MAX / 3] {
            let expected = (number as f64).log2() * 1e6;
            let found = log2_microbits(number) as f64;
            // 24 bits are a sixteen-millionth, and the last of them is rounded down.
            assert!((found - expected).abs() < 1.5, "{number}: {found} for {expected}");
        }
    }

    #[test]
    fn numbers_are_even_and_counted() {
        let mut choices = Choices::new(1);
        let mut counts = [0; 8];
        (0..8000).for_each(|_| counts[choices.below(8)] += 1);
        assert!(counts.iter().all(|count| (850..1150).contains(count)), "{counts:?}");
        assert_eq!(choices.microbits(), 3 * 8000 * MICROBITS);
    }

    #[test]
    fn a_habit_repeats_itself_and_costs_less_the_more_it_does() {
        // Five alternatives of 2 fifths each: the chance that the second use is as the first is 7 / 15, not 1 / 5.
        let mut same = 0;
        for seed in 0..3000 {
            let mut choices = Choices::new(seed);
            let first = choices.habit(0, 5);
            let before = choices.microbits();
            if choices.habit(0, 5) == first {
                same += 1;
                assert!((choices.microbits() - before).abs_diff(log2_microbits(15) - log2_microbits(7)) < 3);
            }
        }
        assert!((1300..1500).contains(&same), "{same} of 3000");
    }

    #[test]
    fn weights_are_shares_and_nothing_of_weight_zero_is_chosen() {
        let mut choices = Choices::new(5);
        let mut counts = [0; 3];
        (0..4000).for_each(|_| counts[choices.weighted(&[1, 0, 3])] += 1);
        assert!(counts[1] == 0 && (900..1100).contains(&counts[0]), "{counts:?}");
        let mut distinct = choices.distinct(5, 5);
        distinct.sort_unstable();
        assert_eq!(distinct, [0, 1, 2, 3, 4]);
    }
}
