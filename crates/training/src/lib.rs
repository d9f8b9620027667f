//! Training GPT-2 from scratch or from a checkpoint: data, loss, gradients, AdamW, schedule, and checkpoints to resume from.
//!
//! [`TrainJob`] is all of it, from files to a folder, as the faces of the project run it; below is one step. A [`Task`] teaches
//! texts, labels or answers with one and the same [`Trainer`]: they differ in what it learns from ([`Data`], [`Examples`]).
//!
//! The model is the one of `gpt2`, run with a training [`Pass`](gpt2::Pass); the parameters are [`Parameters`] in place of a
//! file. Everything random (initialisation, order of the windows, dropout) is drawn from one seed and from the number of
//! the step, so a run that is resumed goes on with the very numbers of one that was not interrupted: for any number of
//! threads, on a processor with the same vector instructions; others round the last bits of sums in another way.
//!
//! ```
//! use candle_core::Device;
//! use gpt2::Gpt2Config;
//! use gpt2_training::{Hyperparameters, Parameters, Schedule, Trainer, Windows};
//!
//! let config = Gpt2Config::from_json(
//!     r#"{"vocab_size": 11, "n_positions": 8, "n_embd": 6, "n_layer": 2, "n_head": 3}"#,
//! )?;
//! let parameters = Parameters::initialize(&config, 1, &Device::Cpu)?;
//! let tokens: Vec<u32> = (0..200).map(|index| index % 11).collect();
//! let numbers = Hyperparameters { steps: 3, batch_size: 2, context: 8, seed: 1, ..Hyperparameters::default() };
//! let mut trainer = Trainer::new(&config, parameters, numbers)?;
//! let windows = Windows::new(&tokens, 8, 1)?;
//! let first = trainer.step(&windows)?;
//! assert!((first.loss - 11f64.ln()).abs() < 0.1, "an untrained model guesses");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod compute_dtype;
mod confusion;
mod corpus;
mod curve;
mod error;
mod examples;
mod held_out;
mod job;
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
pub use shards::{ShardFormat, Shards, TokenFolder, TokenWidth};
pub use share::Share;
pub use task::{ClassWeights, Task};
pub use tokenize::{TokenizeJob, TokenizeOptions, TokenizeReport};
pub use trainer::{Hyperparameters, StepReport, Trainer};
pub use training_data::{DataSize, TrainingData};
pub use windows::{Batch, Tokens, Windows};
