#![doc = include_str!("../README.md")]
//!
//! Start with [`Trainer`] or [`TrainJob`]. A [`Task`] teaches texts, labels or answers with one and the same [`Trainer`]: they
//! differ in what it learns from ([`Data`], [`Examples`]). The model is run with a training [`Pass`](candle_gpt2::Pass); the parameters
//! are [`Parameters`] in place of a file.

mod compute_dtype;
mod confusion;
mod corpus;
mod curve;
mod error;
mod examples;
mod held_out;
mod job;
mod job_folder;
mod journal;
mod lora;
mod memory;
mod optimizer;
mod options;
mod parameters;
mod records;
mod row_data;
mod rows;
mod run;
mod schedule;
mod shard_writer;
mod shards;
mod share;
mod source;
mod state;
mod streams;
mod task;
mod text_data;
mod token_format;
mod token_manifest;
mod tokenize;
mod trainer;
mod training_data;
mod windows;

pub use compute_dtype::ComputeDType;
pub use confusion::{ClassificationReport, Confusion, LabelReport};
pub use corpus::{Corpus, Split};
pub use curve::loss_curve;
pub use error::{StateDifference, TrainingError};
pub use examples::{Data, Examples};
pub use held_out::{Evaluation, HeldOut};
pub use job::{TrainEvent, TrainJob, TrainReport};
pub use journal::{Entry, Journal};
pub use lora::{LORA_TARGETS, Lora, LoraConfig};
pub use memory::estimated_bytes;
pub use optimizer::{AdamW, decays};
pub use options::{Start, TrainOptions, written_dtype};
pub use parameters::Parameters;
pub use rows::{Row, RowSet, Rows};
pub use run::{Outcome, Run, RunOptions, has_state};
pub use schedule::Schedule;
pub use shards::{Shards, TokenFolder};
pub use share::Share;
pub use task::{ClassWeights, Task};
pub use token_format::{ShardFormat, TokenWidth};
pub use tokenize::{TokenizeJob, TokenizeOptions, TokenizeReport};
pub use trainer::{Hyperparameters, StepReport, Trainer};
pub use training_data::{DataSize, TrainingData};
pub use windows::{Batch, Tokens, Windows};
