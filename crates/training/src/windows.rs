//! Training data from text: windows of tokens, shuffled with a seed.

use std::sync::{Arc, Mutex, PoisonError};

use candle_gpt2_arithmetic::RandomStream;

use crate::streams::{Permutation, Stream, shuffle};
use crate::{Hyperparameters, TrainingError};

/// Random access to tokens in a slice or in files, used by [`Windows::new`].
///
/// Several threads may read at the same time.
pub trait Tokens: Send + Sync {
    /// Number of tokens.
    fn len(&self) -> usize;

    /// Whether there are no tokens.
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

/// Maximum number of windows per epoch for which the order is stored, in up to 8 MiB.
const MAX_STORED_WINDOWS: usize = 1 << 20;

/// Windows of `context` tokens, each with its next tokens as targets.
///
/// An epoch starts at an offset within the first window. The tokens after it are split into adjacent windows.
/// The seed determines the offset and the order of the windows.
///
/// ```
/// use candle_gpt2_training::Windows;
///
/// let tokens: Vec<u32> = (0..200).collect();
/// let windows = Windows::new(&tokens, 8, 1)?;
/// let batch = windows.batch(0, 3);
/// assert_eq!(batch.inputs.len(), 3 * 8);
/// assert_eq!(batch.targets[0], batch.inputs[0] + 1, "the next token");
/// # Ok::<(), candle_gpt2_training::TrainingError>(())
/// ```
pub struct Windows<'a> {
    tokens: Box<dyn Tokens + 'a>,
    seed: u64,
    /// Stages with different window lengths, in order; at least one.
    stages: Vec<Stage>,
    /// Context length of the model, if windows start at a random position.
    n_positions: Option<usize>,
    /// Fraction of windows that start at a document boundary, and the token that ends a document.
    document_starts: Option<(f64, u32)>,
    /// Order of the most recently used epoch; all its batches share it.
    order: Mutex<Order>,
}

/// Consecutive windows of one length.
struct Stage {
    /// Index of the first window, over all stages.
    first: u64,
    context: usize,
    per_epoch: usize,
}

/// Inputs of a step and their next tokens, row by row, returned by [`Windows::batch`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Batch {
    /// `rows · context` tokens.
    pub inputs: Vec<u32>,
    /// `rows · context` next tokens.
    pub targets: Vec<u32>,
    /// Number of rows.
    pub rows: usize,
    /// Position of the first token in each row.
    pub first_position: usize,
}

impl<'a> Windows<'a> {
    /// Creates the windows of `tokens`, in an order determined by `seed`.
    ///
    /// # Errors
    /// If there are too few tokens for one window.
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

    /// Creates the windows of a training run, with lengths and starts set by its hyperparameters.
    ///
    /// `end` is the token that ends a document, and `n_positions` is the model's context length.
    ///
    /// ```
    /// use candle_gpt2_training::{Hyperparameters, Windows};
    ///
    /// // Windows of 4 tokens for two steps of 3 windows, then windows of 8 tokens.
    /// let numbers = Hyperparameters { context: 8, batch_size: 3, context_ramp: "0:4,2:8".parse().ok(), ..Hyperparameters::default() };
    /// let windows = Windows::of_training((0..200).collect::<Vec<u32>>(), &numbers, 16, None)?;
    /// assert_eq!([windows.batch(3, 3).inputs.len(), windows.batch(6, 3).inputs.len()], [12, 24]);
    /// # Ok::<(), candle_gpt2_training::TrainingError>(())
    /// ```
    ///
    /// # Errors
    /// If there are too few tokens for one window.
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
        // Leaves enough tokens for every possible offset, unless only one window fits.
        let per_epoch = ((found - 1 - (context - 1)) / context).max(1);
        self.stages.push(Stage { first, context, per_epoch });
        Ok(())
    }

    /// Number of windows per epoch in the first stage.
    pub fn per_epoch(&self) -> usize {
        self.stages[0].per_epoch
    }

    /// Returns the number of tokens in a window, numbered over all epochs.
    pub fn context_at(&self, window: u64) -> usize {
        self.stages[self.stage_of(window)].context
    }

    /// Returns the stage of a window.
    fn stage_of(&self, window: u64) -> usize {
        // The first stage starts at 0.
        self.stages.partition_point(|stage| stage.first <= window) - 1
    }

    /// Returns the windows `first..first + rows`, numbered over all epochs.
    ///
    /// All of them have the length of the first window.
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

    /// Moves the start of some windows to the first document boundary inside them.
    fn document_start(&self, window: u64, start: usize, context: usize) -> usize {
        let Some((share, end)) = self.document_starts else { return start };
        let mut generator = Stream::Window(window).generator(self.seed);
        // Skips the first number of this stream, which determines the position.
        generator.below(1);
        /// Resolution of the random fraction.
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
            kept @ ..=MAX_STORED_WINDOWS => {
                let mut windows: Vec<usize> = (0..kept).collect();
                shuffle(&mut windows, &mut generator);
                WindowOrder::Stored(windows)
            }
            many => WindowOrder::Computed(Permutation::new(many as u64, &mut generator)),
        };
        Order { of: Some((number, epoch)), offset, windows }
    }
}

fn below(generator: &mut RandomStream, bound: usize) -> usize {
    usize::try_from(generator.below(bound as u64)).unwrap_or_default()
}

/// Order of the windows in an epoch.
struct Order {
    /// Stage and epoch of this order.
    of: Option<(usize, u64)>,
    /// Start of the first window.
    offset: usize,
    windows: WindowOrder,
}

/// Permutation of an epoch's windows.
enum WindowOrder {
    Stored(Vec<usize>),
    /// Computed on demand, for data sets whose order would need too much memory.
    Computed(Permutation),
}

impl Default for Order {
    fn default() -> Self {
        Self { of: None, offset: 0, windows: WindowOrder::Stored(Vec::new()) }
    }
}

impl Order {
    /// Returns the window at an index in the epoch.
    fn window(&self, place: u64) -> usize {
        let window = match &self.windows {
            WindowOrder::Stored(windows) => {
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
    fn epoch_contains_every_window_once_in_a_new_order() {
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
    fn batch_targets_are_shifted_and_batches_are_reproducible() {
        let tokens: Vec<u32> = (0..50).collect();
        let windows = Windows::new(&tokens, 6, 1).unwrap();
        let batch = windows.batch(6, 3);
        assert_eq!(batch.inputs.len(), 18);
        assert!(batch.inputs.iter().zip(&batch.targets).all(|(input, target)| input + 1 == *target));
        assert_eq!(batch, windows.batch(6, 3));
        assert_eq!(windows.batch(7, 1).inputs, batch.inputs[6..12], "single windows are the same");
        assert_ne!(batch, Windows::new(&tokens, 6, 2).unwrap().batch(6, 3), "another seed");
    }

    /// A resumed run knows only the index of a window, so every batch must match a newly created order.
    #[test]
    fn cached_order_equals_a_recomputed_order() {
        let tokens: Vec<u32> = (0..500).collect();
        let windows = Windows::new(&tokens, 7, 5).unwrap();
        let recomputed = |index: u64| {
            let per_epoch = windows.per_epoch() as u64;
            let order = windows.order_of(0, index / per_epoch);
            tokens[order.offset + 7 * order.window(index % per_epoch)]
        };
        // Batches have 3 windows, and epochs have 70. Most batches are within an epoch, some cross its end,
        // and the last ones return to earlier epochs.
        let firsts = (0..300).step_by(3).chain([4, 69, 0, 139]);
        for first in firsts {
            let batch = windows.batch(first, 3);
            let starts: Vec<u32> = batch.inputs.chunks(7).map(|window| window[0]).collect();
            assert_eq!(
                starts,
                [recomputed(first), recomputed(first + 1), recomputed(first + 2)],
                "from window {first}"
            );
        }
    }

    #[test]
    fn windows_grow_with_the_context_ramp() {
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
        // The first stage has five steps, each with two batches of two windows.
        assert_eq!([19, 20, 500].map(|window| windows.context_at(window)), [3, 8, 8]);
        let batch = windows.batch(20, 4);
        assert_eq!((batch.inputs.len(), batch.first_position), (32, 0));
        // The stage starts its own epoch, which contains every window once.
        let per_epoch = u32::try_from(windows.stages[1].per_epoch).unwrap();
        let mut starts: Vec<u32> =
            (0..u64::from(per_epoch)).map(|window| windows.batch(20 + window, 1).inputs[0]).collect();
        starts.sort_unstable();
        assert!(starts.windows(2).all(|pair| pair[1] - pair[0] == 8), "{starts:?}");
        // A resumed run starts with a later window.
        assert_eq!(
            Windows::of_training(&tokens, &numbers, 16, None).unwrap().batch(24, 4),
            windows.batch(24, 4)
        );
    }

    #[test]
    fn windows_start_at_every_position_within_the_context() {
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
    fn document_starts_sets_the_fraction_of_aligned_windows() {
        // Documents of 7 tokens that end with token 99. The context 9 is coprime to 8, so windows start
        // anywhere in them.
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
        // One window in eight starts at a document boundary by chance.
        assert!((30..75).contains(&begins(0.0)), "{}", begins(0.0));
        assert!((200..250).contains(&begins(0.5)), "{}", begins(0.5));
        assert!(begins(1.0) >= 398, "all but the windows at the very end");
    }

    /// Pins the order for a seed; a different order would change the results of resumed runs.
    #[test]
    fn order_of_a_seed_is_stable() {
        let tokens: Vec<u32> = (0..100).collect();
        let windows = Windows::new(&tokens, 7, 5).unwrap();
        let starts = |epoch: u64| -> Vec<usize> {
            let order = windows.order_of(0, epoch);
            (0..13).map(|place| order.offset + 7 * order.window(place)).collect()
        };
        assert_eq!(starts(0), [65, 9, 86, 16, 23, 37, 58, 2, 72, 79, 30, 44, 51]);
        assert_eq!(starts(1), [55, 27, 69, 13, 34, 48, 90, 20, 62, 76, 41, 6, 83]);
    }

    /// Tokens that equal their own index.
    struct IndexTokens(usize);

    impl Tokens for IndexTokens {
        fn len(&self) -> usize {
            self.0
        }

        fn read(&self, start: usize, count: usize, tokens: &mut Vec<u32>) {
            tokens.extend((start..start + count).map(|place| u32::try_from(place).unwrap()));
        }
    }

    #[test]
    fn large_epoch_computes_its_order_without_a_list() {
        let windows = Windows::new(IndexTokens(3 * MAX_STORED_WINDOWS + 5), 2, 5).unwrap();
        let per_epoch = windows.per_epoch();
        assert!(per_epoch > MAX_STORED_WINDOWS);
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

    /// Pins the on-demand order for a seed; a different order would change resumed runs.
    #[test]
    fn computed_order_of_a_seed_is_stable() {
        let windows = Windows::new(IndexTokens(3 * MAX_STORED_WINDOWS), 2, 5).unwrap();
        let order = windows.order_of(0, 0);
        assert_eq!([0, 1, 2].map(|place| order.window(place)), [519_172, 1_025_484, 580_118]);
    }

    #[test]
    fn batches_of_an_epoch_share_its_order() {
        let tokens: Vec<u32> = (0..100).collect();
        let windows = Windows::new(&tokens, 7, 5).unwrap();
        let address = || match &windows.order.lock().unwrap().windows {
            WindowOrder::Stored(windows) => windows.as_ptr(),
            WindowOrder::Computed(_) => panic!("the order of few windows is stored"),
        };
        windows.batch(0, 2);
        let first = address();
        windows.batch(2, 11);
        assert_eq!(address(), first, "within the epoch");
        windows.batch(13, 1);
        assert_ne!(address(), first, "the next epoch has its own");
    }

    /// Checks the trait bounds at compile time.
    #[test]
    fn windows_are_send_and_sync() {
        fn assert_shared<T: Send + Sync>() {}
        assert_shared::<Windows<'_>>();
    }

    #[test]
    fn text_of_one_window_is_sufficient() {
        let tokens: Vec<u32> = (0..7).collect();
        assert_eq!(Windows::new(&tokens, 6, 1).unwrap().batch(4, 1).targets, [1, 2, 3, 4, 5, 6]);
        assert!(Windows::new(&tokens, 7, 1).is_err());
    }
}
