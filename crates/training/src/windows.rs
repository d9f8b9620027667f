//! Windows of tokens in an order that the seed decides: what a training step is made of.

use std::sync::{Arc, Mutex, PoisonError};

use candle_gpt2_arithmetic::RandomStream;

use crate::streams::{Permutation, Stream, shuffle};
use crate::{Hyperparameters, TrainingError};

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
    seed: u64,
    /// Windows of one length after those of another; at least one.
    stages: Vec<Stage>,
    /// Positions of the model, if windows begin at a random one.
    n_positions: Option<usize>,
    /// Share of the windows that begin with a document, and the token that ends one.
    document_starts: Option<(f64, u32)>,
    /// The order of the epoch that was asked for last: every batch of an epoch reads it.
    order: Mutex<Order>,
}

/// Windows of one length.
struct Stage {
    /// The first of them, counted over all stages.
    first: u64,
    context: usize,
    per_epoch: usize,
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
    /// Position of each row's first token.
    pub first_position: usize,
}

impl<'a> Windows<'a> {
    /// The windows of `tokens` under `seed`.
    ///
    /// # Errors
    /// When there are too few tokens for one window.
    pub fn new(tokens: impl Tokens + 'a, context: usize, seed: u64) -> Result<Self, TrainingError> {
        let mut windows = Self {
            tokens: Box::new(tokens),
            seed,
            stages: Vec::new(),
            n_positions: None,
            document_starts: None,
            order: Mutex::default(),
        };
        windows.begin_stage(0, context)?;
        Ok(windows)
    }

    /// The windows of a training: their lengths, and where they begin, as its numbers say. `end` is the token that ends a document, and
    /// `n_positions` the model's.
    ///
    /// ```
    /// use candle_gpt2_training::{Hyperparameters, Windows};
    ///
    /// // Two steps of batches of 3 windows, then windows of 8 tokens.
    /// let numbers = Hyperparameters { context: 8, batch_size: 3, context_ramp: "0:4,2:8".parse().ok(), ..Hyperparameters::default() };
    /// let windows = Windows::of_training((0..200).collect::<Vec<u32>>(), &numbers, 16, None)?;
    /// assert_eq!([windows.batch(3, 3).inputs.len(), windows.batch(6, 3).inputs.len()], [12, 24]);
    /// # Ok::<(), candle_gpt2_training::TrainingError>(())
    /// ```
    ///
    /// # Errors
    /// When there are too few tokens for one window.
    pub fn of_training(
        tokens: impl Tokens + 'a,
        numbers: &Hyperparameters,
        n_positions: usize,
        end: Option<u32>,
    ) -> Result<Self, TrainingError> {
        let mut windows = Self::new(tokens, numbers.context_at(0), numbers.seed)?;
        let changes = numbers.context_ramp.as_ref().map_or(&[][..], |ramp| ramp.stages());
        for (steps, context) in changes.iter().skip(1) {
            windows.begin_stage(numbers.examples_before(*steps), *context)?;
        }
        windows.n_positions = numbers.random_positions.then_some(n_positions);
        windows.document_starts =
            end.map(|end| (numbers.document_starts, end)).filter(|(share, _)| *share > 0.0);
        Ok(windows)
    }

    fn begin_stage(&mut self, first: u64, context: usize) -> Result<(), TrainingError> {
        let (found, needed) = (self.tokens.len(), context + 1);
        if found < needed || context == 0 {
            return Err(TrainingError::TooFewTokens { part: "training", found, needed });
        }
        // Room for every start in the first window, where there is more than one.
        let per_epoch = ((found - 1 - (context - 1)) / context).max(1);
        self.stages.push(Stage { first, context, per_epoch });
        Ok(())
    }

    /// Windows in an epoch.
    pub fn per_epoch(&self) -> usize {
        self.stages[0].per_epoch
    }

    /// Tokens of a window, counted from the first of the first epoch.
    pub fn context_at(&self, window: u64) -> usize {
        self.stages[self.stage_of(window)].context
    }

    /// The stage that a window is of.
    fn stage_of(&self, window: u64) -> usize {
        // The first stage begins at 0.
        self.stages.partition_point(|stage| stage.first <= window) - 1
    }

    /// The windows `first..first + rows` of all epochs, counted from the first of the first epoch. They are of one length: that of the
    /// first.
    pub fn batch(&self, first: u64, rows: usize) -> Batch {
        let number = self.stage_of(first);
        let stage = &self.stages[number];
        let per_epoch = stage.per_epoch as u64;
        let first_position = self.n_positions.map_or(0, |n_positions| {
            let spare = n_positions.saturating_sub(stage.context);
            below(&mut Stream::Window(first).generator(self.seed), spare + 1)
        });
        let mut batch = Batch { inputs: Vec::new(), targets: Vec::new(), rows, first_position };
        let mut order = self.order.lock().unwrap_or_else(PoisonError::into_inner);
        for index in first..first + rows as u64 {
            let of_stage = index - stage.first;
            let (epoch, place) = (of_stage / per_epoch, of_stage % per_epoch);
            if order.of != Some((number, epoch)) {
                *order = self.order_of(number, epoch);
            }
            let start = order.window(place) * stage.context + order.offset;
            let start = self.document_start(index, start, stage.context);
            self.tokens.read(start, stage.context, &mut batch.inputs);
            self.tokens.read(start + 1, stage.context, &mut batch.targets);
        }
        batch
    }

    /// Where a window that would begin at `start` does: some begin with the first document that begins inside them.
    fn document_start(&self, window: u64, start: usize, context: usize) -> usize {
        let Some((share, end)) = self.document_starts else { return start };
        let mut generator = Stream::Window(window).generator(self.seed);
        // The first number is that of the position.
        generator.below(1);
        /// As fine as shares are drawn.
        const FINENESS: u64 = 1 << 32;
        if generator.below(FINENESS) as f64 >= share * FINENESS as f64 {
            return start;
        }
        let mut inside = Vec::with_capacity(context);
        self.tokens.read(start, context, &mut inside);
        let begin = inside.iter().position(|token| *token == end).map(|place| start + place + 1);
        begin.filter(|begin| begin + context < self.tokens.len()).unwrap_or(start)
    }

    fn order_of(&self, number: usize, epoch: u64) -> Order {
        let Stage { context, per_epoch, .. } = self.stages[number];
        let mut generator = Stream::Epoch(epoch).generator(self.seed);
        let slack = self.tokens.len() - 1 - per_epoch * context;
        let offset = below(&mut generator, slack.min(context - 1) + 1);
        let windows = match per_epoch {
            kept @ ..=MOST_KEPT => {
                let mut windows: Vec<usize> = (0..kept).collect();
                shuffle(&mut windows, &mut generator);
                WindowOrder::Kept(windows)
            }
            many => WindowOrder::Computed(Permutation::new(many as u64, &mut generator)),
        };
        Order { of: Some((number, epoch)), offset, windows }
    }
}

fn below(generator: &mut RandomStream, bound: usize) -> usize {
    usize::try_from(generator.below(bound as u64)).unwrap_or_default()
}

/// Which windows an epoch takes.
struct Order {
    /// Its stage and epoch.
    of: Option<(usize, u64)>,
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
        Self { of: None, offset: 0, windows: WindowOrder::Kept(Vec::new()) }
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
            let order = windows.order_of(0, index / per_epoch);
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

    #[test]
    fn windows_get_longer_where_the_ramp_says_so() {
        let numbers = Hyperparameters {
            context: 8,
            batch_size: 4,
            accumulate: 2,
            context_ramp: "0:3,5:8".parse().ok(),
            batch_ramp: "0:2,5:4".parse().ok(),
            ..Hyperparameters::default()
        };
        let tokens: Vec<u32> = (0..300).collect();
        let windows = Windows::of_training(&tokens, &numbers, 16, None).unwrap();
        // Five steps of two batches of two windows each.
        assert_eq!([19, 20, 500].map(|window| windows.context_at(window)), [3, 8, 8]);
        let batch = windows.batch(20, 4);
        assert_eq!((batch.inputs.len(), batch.first_position), (32, 0));
        // The stage begins an epoch of its own, which takes every window once.
        let per_epoch = u32::try_from(windows.stages[1].per_epoch).unwrap();
        let mut starts: Vec<u32> =
            (0..u64::from(per_epoch)).map(|window| windows.batch(20 + window, 1).inputs[0]).collect();
        starts.sort_unstable();
        assert!(starts.windows(2).all(|pair| pair[1] - pair[0] == 8), "{starts:?}");
        // A run that is resumed asks for a later window first.
        assert_eq!(
            Windows::of_training(&tokens, &numbers, 16, None).unwrap().batch(24, 4),
            windows.batch(24, 4)
        );
    }

    #[test]
    fn windows_begin_at_every_position_and_end_within_the_context() {
        let numbers =
            Hyperparameters { context: 5, random_positions: true, seed: 3, ..Hyperparameters::default() };
        let tokens: Vec<u32> = (0..300).collect();
        let windows = Windows::of_training(&tokens, &numbers, 8, None).unwrap();
        let mut seen = [0; 4];
        (0..400).for_each(|window| seen[windows.batch(8 * window, 8).first_position] += 1);
        assert!(seen.iter().all(|count| (60..140).contains(count)), "{seen:?}");
        let plain = Windows::new(&tokens, 5, 3).unwrap();
        assert_eq!(windows.batch(8, 8).inputs, plain.batch(8, 8).inputs, "the same windows");
    }

    #[test]
    fn a_share_of_the_windows_begins_with_a_document() {
        // Documents of 7 tokens and their end, which is token 99; 9 is coprime to 8, so that windows begin anywhere in them.
        let tokens: Vec<u32> = (0..4000).map(|place| if place % 8 == 7 { 99 } else { place % 8 }).collect();
        let begins = |share| {
            let numbers =
                Hyperparameters { context: 9, document_starts: share, ..Hyperparameters::default() };
            let windows = Windows::of_training(&tokens, &numbers, 16, Some(99)).unwrap();
            let batch = windows.batch(0, 400);
            assert!(batch.inputs.iter().zip(&batch.targets).all(|(input, target)| {
                *target == if *input == 6 { 99 } else { (*input + 1) % 100 % 99 }
            } || *input == 99));
            batch.inputs.chunks(9).filter(|window| window[0] == 0).count()
        };
        // One window in eight begins so by chance.
        assert!((30..75).contains(&begins(0.0)), "{}", begins(0.0));
        assert!((200..250).contains(&begins(0.5)), "{}", begins(0.5));
        assert!(begins(1.0) >= 398, "all but those at the very end");
    }

    /// The order of a seed, written down: another one would give resumed runs other numbers.
    #[test]
    fn the_order_of_a_seed_stays() {
        let tokens: Vec<u32> = (0..100).collect();
        let windows = Windows::new(&tokens, 7, 5).unwrap();
        let starts = |epoch: u64| -> Vec<usize> {
            let order = windows.order_of(0, epoch);
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
        let order = windows.order_of(0, 1);
        assert!(matches!(order.windows, WindowOrder::Computed(_)));
        let mut taken = vec![false; per_epoch];
        (0..per_epoch as u64).for_each(|place| taken[order.window(place)] = true);
        assert!(taken.iter().all(|taken| *taken));
        let batch = windows.batch(per_epoch as u64 - 2, 4);
        let expected = [windows.order_of(0, 0), order];
        let start = |order: &Order, place| u32::try_from(order.offset + 2 * order.window(place)).unwrap();
        let last = per_epoch as u64 - 1;
        assert_eq!([batch.inputs[2], batch.inputs[4]], [start(&expected[0], last), start(&expected[1], 0)]);
        assert_eq!(batch.targets[5], batch.inputs[5] + 1);
    }

    /// The order of a seed where it is computed, written down for the same reason.
    #[test]
    fn the_computed_order_of_a_seed_stays() {
        let windows = Windows::new(Places(3 * MOST_KEPT), 2, 5).unwrap();
        let order = windows.order_of(0, 0);
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
