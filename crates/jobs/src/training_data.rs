//! Training and evaluation data for a run, whatever its task.

use crate::{Data, HeldOut};

/// Data for a run; a [`TrainJob`](crate::TrainJob) reads it from its files.
pub struct TrainingData {
    /// Training examples.
    pub examples: Box<dyn Data>,
    /// Held-out data.
    pub held_out: Option<HeldOut>,
    /// Fingerprint of the data and its tokenizer.
    pub fingerprint: u64,
    /// Sizes of both parts.
    pub size: DataSize,
}

/// Amount of data; part of the [`TrainingData`] of a [`TrainJob`](crate::TrainJob).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DataSize {
    /// Number of training tokens.
    pub training_tokens: usize,
    /// Number of held-out tokens.
    pub held_out_tokens: usize,
    /// Numbers of training rows and held-out rows; `None` if the data has no rows.
    pub rows: Option<(usize, usize)>,
}
