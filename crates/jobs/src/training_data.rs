//! The data that a run learns from and is measured on, for every task.

use crate::{Data, HeldOut};

/// The data of a run. A [`TrainJob`](crate::TrainJob) reads it from its files.
pub struct TrainingData {
    /// What is trained on.
    pub examples: Box<dyn Data>,
    /// What is not.
    pub held_out: Option<HeldOut>,
    /// Number that tells the data and its tokenizer from others.
    pub fingerprint: u64,
    /// How much there is of both.
    pub size: DataSize,
}

/// How much data there is. Part of the [`TrainingData`] of a [`TrainJob`](crate::TrainJob).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DataSize {
    /// Tokens that are trained on.
    pub training_tokens: usize,
    /// Tokens that are held out.
    pub held_out_tokens: usize,
    /// Rows that are trained on and those that are held out; texts have none.
    pub rows: Option<(usize, usize)>,
}
