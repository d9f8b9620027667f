#![doc = include_str!("../README.md")]
//!
//! 1. [`ModelOptions::open`] finds the checkpoint and validates it, before the slow part.
//! 2. [`Opened::load`] reads the weights into a [`LoadedModel`], whose clones share them.
//! 3. [`LoadedModel::text_generator`] streams one completion, and [`LoadedModel::generate`] runs a job of
//!    prompts. [`CompletionDriver`] runs concurrent calls step by step, and [`RowsJob`] a file of prompts, resumable.
//!
//! [`Choices`] compares continuations and [`Classifier`] predicts labels. The crate prints nothing: progress
//! and notes go to a [`Reporter`]. It reads a clock only for `max_time` ([`system_clock`]); in tests, pass
//! your own clock. Only [`HubOptions::from_environment`] reads environment variables. Settings of the whole
//! process, such as the number of threads, are functions of the module [`process`].
#![cfg_attr(docsrs, feature(doc_cfg))]
#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

mod adapters;
mod bad_words;
mod base_model;
mod built_in;
mod choices;
mod classifier;
mod clock;
mod convert;
mod defaults;
mod device;
mod doctor;
mod encoder_states;
mod error;
mod fingerprint;
mod hub;
mod inspect;
mod job;
mod large_pages;
mod line_file;
mod loaded_model;
mod logits;
mod memory;
mod opened;
mod options;
mod panics;
pub mod process;
mod published;
mod reporter;
mod rows;
mod system_memory;
#[cfg(feature = "terminal")]
pub mod terminal;
mod texts;
mod verify;
mod vocabulary;
mod watched;
mod yaml;

pub use adapters::{ADAPTER_BASE, AdapterChoice};
pub use bad_words::banned_tokens;
pub use built_in::{BUILT_IN, built_in_transcoders, is_nearly_built_in};
pub use candle_gpt2_weights::WeightDType;
pub use candle_gpt2_weights::{UnknownName, grouped};
pub use choices::{BestChoice, Choices, ScoredChoice, ScoredChoices};
pub use classifier::{
    CLASSIFIED_AT_ONCE, Classification, Classifier, Label, LabeledToken, Question, RankedChoice,
};
pub use clock::system_clock;
pub use convert::{Conversion, ConvertOptions};
pub use defaults::Defaults;
pub use device::{DeviceChoice, device_name};
pub use doctor::{
    Estimate, Gpu, GpuSupport, Hub, LargePageUse, Machine, Memory, NvidiaDriver, Processor, Speeds,
};
pub use encoder_states::EncoderStates;
pub use error::EngineError;
pub use fingerprint::fingerprint;
pub use hub::{CachedModel, CachedModels, DatasetFile, HubError, HubOptions, Network, dataset_file};
// For the fuzz target `hub_response`.
#[cfg(feature = "hub")]
#[doc(hidden)]
pub use hub::{CannedAnswer, fetch_from_answers};
pub use inspect::{
    BytesPerType, Comparison, DifferingParameter, InspectOptions, Inspected, InspectedTensor, Inspection,
    KvBytesPerType, StoredFile, VocabularySizes,
};
pub use job::{Completion, Job};
pub use large_pages::LargePages;
pub use line_file::{HalfLine, LineFile};
pub use loaded_model::LoadedModel;
pub use memory::MemoryNeeded;
pub use opened::Opened;
pub use options::ModelOptions;
pub use published::{PublishedCheck, PublishedValues};
pub use reporter::{Progress, Reporter, Silent, Unit};
pub use rows::{
    FailedRow, PromptCompletions, Row, RowFile, RowSequences, Rows, RowsJob, RowsOutput, ScoredText,
    TokenLogprob, WriteLine,
};
pub use secrecy::SecretString;
pub use system_memory::{ProcessMemory, free_memory};
#[cfg(feature = "terminal")]
pub use terminal::Terminal;
pub use texts::{CallEvent, CallId, CompletionDriver};
pub use verify::{Verification, VerifyOptions};
pub use vocabulary::Vocabulary;
pub use watched::ReadJob;
pub use yaml::{YamlError, check_yaml};
