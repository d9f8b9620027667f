#![doc = include_str!("../README.md")]
//!
//! Start with [`Trainer`]. It handles every [`Task`]: text, classification, answers and dictionaries. The
//! tasks differ only in their [`Data`] and [`Examples`]. The model runs with a training
//! [`Pass`](candle_gpt2::Pass), and [`Parameters`] replace a checkpoint file.

#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

mod activation_rows;
mod compute_dtype;
mod confusion;
mod dictionary;
mod error;
mod examples;
mod held_out;
mod hyperparameters;
mod lora;
mod memory;
mod optimizer;
mod parameters;
mod ramp;
mod rows;
mod schedule;
#[doc(hidden)]
pub mod share;
#[doc(hidden)]
pub mod state;
mod streams;
mod task;
mod trainer;
mod windows;

pub use activation_rows::{ActivationRows, RowValues};
pub use compute_dtype::ComputeDType;
pub use confusion::{ClassificationReport, Confusion, LabelReport};
pub use dictionary::{
    CONFIG_FILE, CrossEntropies, DictionaryKind, DictionaryMetrics, DictionaryNumbers, LAYERS_CONFIG_FILE,
    WEIGHTS_FILE, layer_files,
};
pub use error::{StateDifference, TrainingError};
pub use examples::{Data, Examples};
pub use held_out::{Evaluation, HeldOut};
pub use hyperparameters::Hyperparameters;
pub use lora::{LORA_TARGETS, Lora, LoraConfig};
pub use memory::estimated_bytes;
pub use optimizer::{Optimizer, OptimizerKind};
pub use parameters::{Initialization, Parameters};
pub use ramp::Ramp;
pub use rows::{Row, RowSet, Rows};
pub use schedule::Schedule;
pub use share::Share;
pub use task::{ClassWeights, Task};
pub use trainer::{StepReport, Trainer};
pub use windows::{Batch, Tokens, Windows};
