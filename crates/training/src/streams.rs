//! Independent random streams, one per purpose.

use candle_gpt2_arithmetic::{RandomStream, mix_bits};

/// Purpose of a random stream.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Stream {
    /// Weights of a fresh model.
    Initialization,
    /// Order of the windows in an epoch.
    Epoch(u64),
    /// Dropout of one pass; passes are numbered over all steps.
    Dropout(u64),
    /// Weights of a fresh head on a checkpoint.
    Head,
    /// Start and first position of a window; windows are numbered over all epochs.
    Window(u64),
}

impl Stream {
    /// Returns the generator for this purpose and seed.
    pub(crate) fn generator(self, seed: u64) -> RandomStream {
        /// Number of streams per purpose, far larger than any run's number of passes and epochs.
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

/// Shuffles items with the generator (Fisher-Yates).
pub(crate) fn shuffle<T>(items: &mut [T], generator: &mut RandomStream) {
    for last in (1..items.len()).rev() {
        // The result is below `last + 1`, so it is a valid index.
        let other = usize::try_from(generator.below(last as u64 + 1)).unwrap_or_default();
        items.swap(last, other);
    }
}

/// Random permutation of `items` items that is computed on demand instead of stored.
///
/// It is a Feistel network over the next power of four with cycle walking (Black and Rogaway, 2002).
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Permutation {
    items: u64,
    half_bits: u32,
    keys: [u64; 6],
}

impl Permutation {
    /// Creates a random permutation of `items` items, at least two.
    pub(crate) fn new(items: u64, generator: &mut RandomStream) -> Self {
        let bits = u64::BITS - items.saturating_sub(1).leading_zeros();
        let keys = [(); 6].map(|()| generator.below(u64::MAX));
        Self { items, half_bits: bits.div_ceil(2).clamp(1, 32), keys }
    }

    /// Returns the item at an index below the number of items.
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
    fn permutation_contains_every_item_once_and_follows_its_seed() {
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
        // Neighbors are mapped far apart: the mean of a thousand differences is near a third of the range.
        let permutation = Permutation::new(1 << 40, &mut Stream::Epoch(3).generator(9));
        let far: f64 =
            (0..1000).map(|place| permutation.at(place).abs_diff(permutation.at(place + 1)) as f64).sum();
        let share = far / 1000.0 / (1u64 << 40) as f64;
        assert!((share - 1.0 / 3.0).abs() < 0.03, "{share}");
    }
}
