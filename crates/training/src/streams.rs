//! Which random stream serves what: every purpose draws from its own, so none disturbs another.

use candle_gpt2_arithmetic::{RandomStream, mix_bits};

/// A purpose of random numbers.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Stream {
    /// The weights of a fresh model.
    Initialization,
    /// The order of the windows in an epoch.
    Epoch(u64),
    /// The dropout of one pass, counted over all steps.
    Dropout(u64),
    /// The weights of a fresh head on a checkpoint.
    Head,
    /// Where a window of all epochs begins: in its text, and among the positions.
    Window(u64),
}

impl Stream {
    /// The random numbers for this purpose under `seed`.
    pub(crate) fn generator(self, seed: u64) -> RandomStream {
        /// Far more passes and epochs than a training has.
        const PER_PURPOSE: u64 = 1 << 60;
        let stream = match self {
            Self::Initialization => 0,
            Self::Epoch(epoch) => PER_PURPOSE + epoch % PER_PURPOSE,
            Self::Dropout(pass) => 2 * PER_PURPOSE + pass % PER_PURPOSE,
            Self::Head => 3 * PER_PURPOSE,
            Self::Window(window) => 4 * PER_PURPOSE + window % PER_PURPOSE,
        };
        RandomStream::with_stream(seed, stream)
    }
}

/// Puts items into an order that the generator decides (Fisher and Yates).
pub(crate) fn shuffle<T>(items: &mut [T], generator: &mut RandomStream) {
    for last in (1..items.len()).rev() {
        // Below `last + 1`, so it is an index.
        let other = usize::try_from(generator.below(last as u64 + 1)).unwrap_or_default();
        items.swap(last, other);
    }
}

/// An order of so many items that the generator decides, and that is computed when it is asked for instead of being kept: a
/// Feistel network over the next power of four, which is walked until it comes back among the items (Black and Rogaway, 2002).
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Permutation {
    items: u64,
    half_bits: u32,
    keys: [u64; 6],
}

impl Permutation {
    /// An order of `items`, of which there are two at least.
    pub(crate) fn new(items: u64, generator: &mut RandomStream) -> Self {
        let bits = u64::BITS - items.saturating_sub(1).leading_zeros();
        let keys = [(); 6].map(|()| generator.below(u64::MAX));
        Self { items, half_bits: bits.div_ceil(2).clamp(1, 32), keys }
    }

    /// The item at a place below the number of items.
    pub(crate) fn at(&self, place: u64) -> u64 {
        let mut item = self.network(place);
        while item >= self.items {
            item = self.network(item);
        }
        item
    }

    fn network(&self, number: u64) -> u64 {
        let mask = (1 << self.half_bits) - 1;
        let (left, right) = (number >> self.half_bits, number & mask);
        let round = |(left, right): (u64, u64), key: &u64| (right, left ^ (mix_bits(right ^ key) & mask));
        let (left, right) = self.keys.iter().fold((left, right), round);
        left << self.half_bits | right
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_permutation_has_every_item_once_in_an_order_of_its_seed() {
        for items in [2, 3, 16, 17, 1000, 4097] {
            let order = |seed| -> Vec<u64> {
                let permutation = Permutation::new(items, &mut Stream::Epoch(0).generator(seed));
                (0..items).map(|place| permutation.at(place)).collect()
            };
            let mut sorted = order(1);
            sorted.sort_unstable();
            assert_eq!(sorted, (0..items).collect::<Vec<_>>());
            assert!(items < 16 || order(1) != order(2), "{items}");
        }
        // Neighbours come to lie anywhere: a thousand differences between them have the mean of a third of all.
        let permutation = Permutation::new(1 << 40, &mut Stream::Epoch(3).generator(9));
        let far: f64 =
            (0..1000).map(|place| permutation.at(place).abs_diff(permutation.at(place + 1)) as f64).sum();
        let share = far / 1000.0 / (1u64 << 40) as f64;
        assert!((share - 1.0 / 3.0).abs() < 0.03, "{share}");
    }
}
