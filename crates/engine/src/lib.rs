//! From a model's name and some options to an owned, loaded model that generates: what every face of the project (the
//! program, a server, a page, another language) stands on.
//!
//! ```
//! use gpt2_engine::{ModelOptions, Silent};
//! use gpt2_generation::GenerationConfig;
//!
//! # #[cfg(feature = "built-in")] {
//! // Without a name it is the small model inside this crate.
//! let model = ModelOptions::default().open(&Silent)?.load(&Silent)?;
//! let defaults = model.defaults()?;
//! let config = GenerationConfig { max_new_tokens: 5, ..defaults.config().clone() };
//! let config = defaults.complete(config)?;
//! let prompt = model.vocabulary().encode("ROMEO:")?;
//! let text = model.text_generator(&prompt, &config)?.collect::<Result<String, _>>()?;
//! assert!(!text.is_empty());
//! # }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! [`ModelOptions::open`] finds the checkpoint and checks it, [`Opened::load`] reads its weights; what can be refused of a
//! request is refused between the two, before the long part. Nothing is printed: progress and notes go to a [`Reporter`], of
//! which the feature `terminal` has one that prints. No clock is read but by
//! [`Speeds::measured`], no environment variable but by [`HubOptions::from_environment`], and what belongs to the whole process is set by the functions of [`process`] alone.

#![cfg_attr(docsrs, feature(doc_cfg))]

mod batch;
mod built_in;
mod choices;
mod classifier;
mod convert;
mod defaults;
mod device;
mod doctor;
mod encoder_states;
mod error;
mod generation_options;
mod grouped;
mod hub;
mod inspect;
mod job;
mod line_file;
mod loaded_model;
mod memory;
mod opened;
mod options;
pub mod process;
mod reporter;
mod spelling;
#[cfg(feature = "terminal")]
pub mod terminal;
mod verify;
mod vocabulary;
mod watched;

pub use batch::{Batch, Step};
pub use built_in::BUILT_IN;
pub use choices::{BestChoice, Choices, ScoredChoice, ScoredChoices};
pub use classifier::{
    CLASSIFIED_AT_ONCE, Classification, Classifier, Label, LabelledToken, Question, RankedChoice,
};
pub use convert::{Conversion, ConvertOptions};
pub use defaults::Defaults;
pub use device::{DeviceChoice, device_name};
pub use doctor::{Estimate, Gpu, GpuSupport, Hub, Machine, Memory, NvidiaDriver, Processor, Speeds};
pub use encoder_states::EncoderStates;
pub use error::{EngineError, UnknownName};
pub use generation_options::GenerationOptions;
pub use gpt2_weights::WeightDType;
pub use grouped::grouped;
pub use hub::{CachedModel, CachedModels, DatasetFile, HubError, HubOptions, Network, dataset_file};
pub use inspect::{
    BytesPerType, Comparison, DifferingParameter, InspectOptions, Inspected, InspectedTensor, Inspection,
    KvBytesPerType, StoredFile, VocabularySizes,
};
pub use job::{Job, Text};
pub use line_file::{HalfLine, LineFile};
pub use loaded_model::LoadedModel;
pub use memory::MemoryNeeded;
pub use opened::Opened;
pub use options::ModelOptions;
pub use reporter::{Progress, Reporter, Silent, Unit};
pub use spelling::Spelling;
#[cfg(feature = "terminal")]
pub use terminal::Terminal;
pub use verify::{Verification, VerifyOptions};
pub use vocabulary::Vocabulary;
pub use watched::Watched;
