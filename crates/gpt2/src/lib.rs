//! GPT-2: its configuration, its blocks, and the list of every parameter and its shape.
//!
//! Start with `model.rs`, which is the whole model; `heads.rs` has the heads over labels. This crate opens no file and draws no random number at inference:
//! checkpoints are the business of `candle-gpt2-weights`, tokens that of `candle-gpt2-generation`.
//!
//! ```
//! use candle_core::{DType, Device, Tensor};
//! use candle_nn::VarBuilder;
//! use gpt2::{Gpt2Config, Gpt2LMHead, LogitsFor, ParameterCounts, Pass};
//!
//! let config = Gpt2Config::from_json(
//!     r#"{"model_type": "gpt2", "vocab_size": 11, "n_positions": 8, "n_embd": 6, "n_layer": 2, "n_head": 3}"#,
//! )?;
//! assert_eq!(ParameterCounts::new(&config).unique, 1146);
//!
//! let vb = VarBuilder::zeros(DType::F32, &Device::Cpu);
//! let model = Gpt2LMHead::load(&config, &vb)?;
//! let ids = Tensor::new(&[[1u32, 2, 3]], &Device::Cpu)?;
//! let logits = model.forward(&ids, LogitsFor::LastToken, None, &mut Pass::inference())?;
//! assert_eq!(logits.dims(), [1, 1, 11]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

#![cfg_attr(docsrs, feature(doc_cfg))]

mod cache;
mod config;
mod cross_attention;
mod error;
mod head_kind;
mod heads;
mod model;
mod parameters;
mod recorder;

pub use cache::{Gpt2Cache, KvPool};
pub use config::{Gpt2Config, PRESETS};
pub use cross_attention::{CrossAttention, check_encoder_states};
pub use error::{ConfigError, ModelError};
pub use gpt2_attention::{
    Before, KvDType, KvSlot, Observer, Pass, QkvProjection, Site, SiteError, SiteKind, gradients,
};
pub use gpt2_kernels::Activation;
pub use head_kind::{HeadKind, ProblemType, Summary, SummaryType};
pub use heads::{Gpt2DoubleHeads, Gpt2ForSequenceClassification, Gpt2ForTokenClassification};
pub use model::{Block, Gpt2LMHead, Gpt2Model, LogitsFor};
pub use parameters::{
    LedgerRow, Parameter, ParameterCounts, expected_parameters, paper_size, parameter_ledger,
};
