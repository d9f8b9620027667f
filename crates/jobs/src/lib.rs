#![doc = include_str!("../README.md")]
//!
//! Start with [`TrainJob`], [`TokenizeJob`] or [`ActivationsJob`]. A [`Run`] is a training run in progress,
//! together with its folder.

#![cfg_attr(docsrs, feature(doc_cfg))]
#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

mod activation_data;
mod activation_manifest;
mod activations;
mod confusion_picture;
mod corpus;
mod curve;
mod error;
mod job;
mod job_folder;
mod journal;
mod options;
mod records;
mod row_data;
mod run;
mod shard_writer;
mod shards;
mod source;
mod text_data;
mod token_format;
mod token_manifest;
mod tokenize;
mod training_data;

pub use activation_manifest::SiteWidth;
pub use activations::{ActivationsJob, ActivationsOptions, ActivationsReport};
pub use confusion_picture::confusion_picture;
pub use corpus::{Corpus, Split};
pub use curve::loss_curve;
pub use error::JobError;
pub use job::{TrainEvent, TrainJob, TrainReport};
pub use journal::{Entry, Journal};
pub use options::{Start, TrainOptions, written_dtype};
pub use run::{Outcome, Run};
pub use shards::{Shards, TokenFolder};
pub use token_format::{ShardFormat, TokenWidth};
pub use tokenize::{TokenizeJob, TokenizeOptions, TokenizeReport};
pub use training_data::{DataSize, TrainingData};

use candle_gpt2_training::{
    ClassWeights, ClassificationReport, ComputeDType, Confusion, Data, DictionaryKind, DictionaryMetrics,
    DictionaryNumbers, Evaluation, HeldOut, Hyperparameters, Initialization, Lora, LoraConfig, OptimizerKind,
    Parameters, Ramp, Row, RowSet, Schedule, Share, StepReport, Task, Tokens, Trainer, TrainingError,
    Windows, estimated_bytes,
};
