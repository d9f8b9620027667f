//! Windows of tokens in an order that the seed decides: what a training step is made of.

use std::sync::{Arc, Mutex, PoisonError};

use crate::TrainingError;
use crate::streams::{Permutation, Stream, shuffle};

/// Tokens that can be read at any place, by several threads at once: a slice, or files of them. [`Windows::new`] takes them.
pub trait Tokens: Send + Sync {
    /// How many there are.
    fn len(&self) -> usize;

    /// Whether there are none.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Appends the tokens `start..start + count` to `tokens`.
    fn read(&self, start: usize, count: usize, tokens: &mut Vec<u32>);
}

impl<T: Tokens + ?Sized> Tokens for &T {
    fn len(&self) -> usize {
        (**self).len()
    }

    fn read(&self, start: usize, count: usize, tokens: &mut Vec<u32>) {
        (**self).read(start, count, tokens);
    }
}

impl<T: Tokens + ?Sized> Tokens for Arc<T> {
    fn len(&self) -> usize {
        (**self).len()
    }

    fn read(&self, start: usize, count: usize, tokens: &mut Vec<u32>) {
        (**self).read(start, count, tokens);
    }
}

impl Tokens for Vec<u32> {
    fn len(&self) -> usize {
        self.as_slice().len()
    }

    fn read(&self, start: usize, count: usize, tokens: &mut Vec<u32>) {
        tokens.extend_from_slice(&self[start..start + count]);
    }
}

/// Most windows of an epoch whose order is kept in memory, of which it takes 8 MiB.
const MOST_KEPT: usize = 1 << 20;

/// Windows of `context` tokens, each with the tokens that follow. An epoch starts somewhere in the first window, which the
/// seed decides, cuts what follows into windows side by side, and takes them in an order that the seed decides too.
///
/// ```
/// use candle_gpt2_training::Windows;
///
/// let tokens: Vec<u32> = (0..200).collect();
/// let windows = Windows::new(&tokens, 8, 1)?;
/// let batch = windows.batch(0, 3);
/// assert_eq!(batch.inputs.len(), 3 * 8);
/// assert_eq!(batch.targets[0], batch.inputs[0] + 1, "the token that follows");
/// # Ok::<(), candle_gpt2_training::TrainingError>(())
/// ```
pub struct Windows<'a> {
    tokens: Box<dyn Tokens + 'a>,
    context: usize,
    seed: u64,
    per_epoch: usize,
    /// The order of the epoch that was asked for last: every batch of an epoch reads it.
    order: Mutex<Order>,
}

/// Inputs of a step and the token that follows each, row by row. [`Windows::batch`] gives one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Batch {
    /// `rows · context` tokens.
    pub inputs: Vec<u32>,
    /// As many.
    pub targets: Vec<u32>,
    /// Number of rows.
    pub rows: usize,
}

impl<'a> Windows<'a> {
    /// The windows of `tokens` under `seed`.
    ///
    /// # Errors
    /// When there are too few tokens for one window.
    pub fn new(tokens: impl Tokens + 'a, context: usize, seed: u64) -> Result<Self, TrainingError> {
        let needed = context + 1;
        if tokens.len() < needed || context == 0 {
            return Err(TrainingError::TooFewTokens { part: "training", found: tokens.len(), needed });
        }
        // Room for every start in the first window, where there is more than one.
        let per_epoch = ((tokens.len() - 1 - (context - 1)) / context).max(1);
        Ok(Self { tokens: Box::new(tokens), context, seed, per_epoch, order: Mutex::default() })
    }

    /// Windows in an epoch.
    pub fn per_epoch(&self) -> usize {
        self.per_epoch
    }

    /// Tokens of a window.
    pub fn context(&self) -> usize {
        self.context
    }

    /// The windows `first..first + rows` of all epochs, counted from the first of the first epoch.
    pub fn batch(&self, first: u64, rows: usize) -> Batch {
        let per_epoch = self.per_epoch as u64;
        let mut batch = Batch { inputs: Vec::new(), targets: Vec::new(), rows };
        let mut order = self.order.lock().unwrap_or_else(PoisonError::into_inner);
        for index in first..first + rows as u64 {
            let (epoch, place) = (index / per_epoch, index % per_epoch);
            if order.epoch != Some(epoch) {
                *order = self.order_of(epoch);
            }
            let start = order.window(place) * self.context + order.offset;
            self.tokens.read(start, self.context, &mut batch.inputs);
            self.tokens.read(start + 1, self.context, &mut batch.targets);
        }
        batch
    }

    fn order_of(&self, epoch: u64) -> Order {
        let mut generator = Stream::Epoch(epoch).generator(self.seed);
        let slack = self.tokens.len() - 1 - self.per_epoch * self.context;
        let mut below = |bound: usize| usize::try_from(generator.below(bound as u64)).unwrap_or_default();
        let offset = below(slack.min(self.context - 1) + 1);
        let windows = match self.per_epoch {
            kept @ ..=MOST_KEPT => {
                let mut windows: Vec<usize> = (0..kept).collect();
                shuffle(&mut windows, &mut generator);
                WindowOrder::Kept(windows)
            }
            many => WindowOrder::Computed(Permutation::new(many as u64, &mut generator)),
        };
        Order { epoch: Some(epoch), offset, windows }
    }
}

/// Which windows an epoch takes.
struct Order {
    epoch: Option<u64>,
    /// Where its first window starts.
    offset: usize,
    windows: WindowOrder,
}

/// The order in which the windows of an epoch are taken.
enum WindowOrder {
    Kept(Vec<usize>),
    /// Of data so large that it would not be kept lightly.
    Computed(Permutation),
}

impl Default for Order {
    fn default() -> Self {
        Self { epoch: None, offset: 0, windows: WindowOrder::Kept(Vec::new()) }
    }
}

impl Order {
    /// The window at a place of the epoch.
    fn window(&self, place: u64) -> usize {
        let window = match &self.windows {
            WindowOrder::Kept(windows) => {
                usize::try_from(place).ok().and_then(|place| windows.get(place)).copied()
            }
            WindowOrder::Computed(permutation) => usize::try_from(permutation.at(place)).ok(),
        };
        window.unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_epoch_takes_every_window_once_and_the_next_in_another_order() {
        let tokens: Vec<u32> = (0..100).collect();
        let windows = Windows::new(&tokens, 7, 5).unwrap();
        assert_eq!(windows.per_epoch(), 13);
        let starts = |epoch: u64| -> Vec<u32> {
            (0..13).map(|place| windows.batch(epoch * 13 + place, 1).inputs[0]).collect()
        };
        let (first, second) = (starts(0), starts(1));
        assert_ne!(first, second);
        for starts in [first, second] {
            let mut sorted = starts.clone();
            sorted.sort_unstable();
            assert!(sorted[0] < 7 && sorted[12] + 7 < 100, "{sorted:?}");
            assert!(sorted.windows(2).all(|pair| pair[1] - pair[0] == 7), "{sorted:?}");
            assert_ne!(starts, sorted, "shuffled");
        }
    }

    #[test]
    fn a_batch_holds_windows_and_what_follows_and_repeats() {
        let tokens: Vec<u32> = (0..50).collect();
        let windows = Windows::new(&tokens, 6, 1).unwrap();
        let batch = windows.batch(6, 3);
        assert_eq!(batch.inputs.len(), 18);
        assert!(batch.inputs.iter().zip(&batch.targets).all(|(input, target)| input + 1 == *target));
        assert_eq!(batch, windows.batch(6, 3));
        assert_eq!(windows.batch(7, 1).inputs, batch.inputs[6..12], "one by one is the same");
        assert_ne!(batch, Windows::new(&tokens, 6, 2).unwrap().batch(6, 3), "another seed");
    }

    /// Runs are resumed by the number of the window alone, so every batch must be what the order of its epoch gives when that
    /// is made for it anew.
    #[test]
    fn the_order_that_is_kept_is_the_order_made_anew() {
        let tokens: Vec<u32> = (0..500).collect();
        let windows = Windows::new(&tokens, 7, 5).unwrap();
        let anew = |index: u64| {
            let per_epoch = windows.per_epoch() as u64;
            let order = windows.order_of(index / per_epoch);
            tokens[order.offset + 7 * order.window(index % per_epoch)]
        };
        // Batches of 3 in epochs of 70: most stay in an epoch, some pass its end; then one of an epoch before.
        let firsts = (0..300).step_by(3).chain([4, 69, 0, 139]);
        for first in firsts {
            let batch = windows.batch(first, 3);
            let starts: Vec<u32> = batch.inputs.chunks(7).map(|window| window[0]).collect();
            assert_eq!(starts, [anew(first), anew(first + 1), anew(first + 2)], "from window {first}");
        }
    }

    /// The order of a seed, written down: another one would give resumed runs other numbers.
    #[test]
    fn the_order_of_a_seed_stays() {
        let tokens: Vec<u32> = (0..100).collect();
        let windows = Windows::new(&tokens, 7, 5).unwrap();
        let starts = |epoch: u64| -> Vec<usize> {
            let order = windows.order_of(epoch);
            (0..13).map(|place| order.offset + 7 * order.window(place)).collect()
        };
        assert_eq!(starts(0), [65, 9, 86, 16, 23, 37, 58, 2, 72, 79, 30, 44, 51]);
        assert_eq!(starts(1), [55, 27, 69, 13, 34, 48, 90, 20, 62, 76, 41, 6, 83]);
    }

    /// Tokens that are their own places.
    struct Places(usize);

    impl Tokens for Places {
        fn len(&self) -> usize {
            self.0
        }

        fn read(&self, start: usize, count: usize, tokens: &mut Vec<u32>) {
            tokens.extend((start..start + count).map(|place| u32::try_from(place).unwrap()));
        }
    }

    #[test]
    fn an_epoch_of_very_many_windows_takes_each_once_and_keeps_no_list_of_them() {
        let windows = Windows::new(Places(3 * MOST_KEPT + 5), 2, 5).unwrap();
        let per_epoch = windows.per_epoch();
        assert!(per_epoch > MOST_KEPT);
        let order = windows.order_of(1);
        assert!(matches!(order.windows, WindowOrder::Computed(_)));
        let mut taken = vec![false; per_epoch];
        (0..per_epoch as u64).for_each(|place| taken[order.window(place)] = true);
        assert!(taken.iter().all(|taken| *taken));
        let batch = windows.batch(per_epoch as u64 - 2, 4);
        let expected = [windows.order_of(0), order];
        let start = |order: &Order, place| u32::try_from(order.offset + 2 * order.window(place)).unwrap();
        let last = per_epoch as u64 - 1;
        assert_eq!([batch.inputs[2], batch.inputs[4]], [start(&expected[0], last), start(&expected[1], 0)]);
        assert_eq!(batch.targets[5], batch.inputs[5] + 1);
    }

    /// The order of a seed where it is computed, written down for the same reason.
    #[test]
    fn the_computed_order_of_a_seed_stays() {
        let windows = Windows::new(Places(3 * MOST_KEPT), 2, 5).unwrap();
        let order = windows.order_of(0);
        assert_eq!([0, 1, 2].map(|place| order.window(place)), [519_172, 1_025_484, 580_118]);
    }

    #[test]
    fn the_batches_of_an_epoch_share_its_order() {
        let tokens: Vec<u32> = (0..100).collect();
        let windows = Windows::new(&tokens, 7, 5).unwrap();
        let place = || match &windows.order.lock().unwrap().windows {
            WindowOrder::Kept(windows) => windows.as_ptr(),
            WindowOrder::Computed(_) => panic!("few windows are kept"),
        };
        windows.batch(0, 2);
        let first = place();
        windows.batch(2, 11);
        assert_eq!(place(), first, "within the epoch");
        windows.batch(13, 1);
        assert_ne!(place(), first, "the next epoch has its own");
    }

    /// Checked by the compiler.
    #[test]
    fn threads_may_share_windows() {
        fn assert_shared<T: Send + Sync>() {}
        assert_shared::<Windows<'_>>();
    }

    #[test]
    fn a_text_of_one_window_is_enough() {
        let tokens: Vec<u32> = (0..7).collect();
        assert_eq!(Windows::new(&tokens, 6, 1).unwrap().batch(4, 1).targets, [1, 2, 3, 4, 5, 6]);
        assert!(Windows::new(&tokens, 7, 1).is_err());
    }
}
