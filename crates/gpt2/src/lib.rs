#![doc = include_str!("../README.md")]
//!
//! # Recipes
//!
//! Load a published file and take the most probable next token:
//!
//! ```
//! # use candle_core::{D, DType, Device, Tensor};
//! # use candle_gpt2::{Gpt2Config, Gpt2LMHeadModel, NumberType, Packed};
//! # use candle_nn::VarBuilder;
//! # let folder = std::path::Path::new("../testing/fixtures/tiny-checkpoint");
//! let config = Gpt2Config::from_json(&std::fs::read_to_string(folder.join("config.json"))?)?;
//! let bytes = std::fs::read(folder.join("model.safetensors"))?;
//! let vb = VarBuilder::from_buffered_safetensors(bytes, DType::F32, &Device::Cpu)?;
//! let model = Gpt2LMHeadModel::load(&config, Packed::new(vb, NumberType::Q8))?; // or `vb` to train
//! let logits = model.forward(&Tensor::new(&[[1u32, 2, 3]], &Device::Cpu)?)?; // (1, 3, vocab_size)
//! assert!(logits.argmax(D::Minus1)?.to_vec2::<u32>()?[0][2] < config.vocab_size as u32);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Count parameters and list their shapes:
//!
//! ```
//! # use candle_gpt2::{Gpt2Config, ParameterCounts, expected_parameters};
//! let config = Gpt2Config::gpt2();
//! assert_eq!(ParameterCounts::new(&config).unique, 124_439_808);
//! let parameters = expected_parameters(&config);
//! assert_eq!((parameters[0].name.as_str(), &parameters[0].shape[..]), ("wte.weight", &[50257, 768][..]));
//! ```
//!
//! Run the attention layer of a block, with `out_proj`, at 768 dimensions and 12 heads:
//!
//! ```
//! # use candle_core::{DType, Device, Tensor};
//! # use candle_gpt2::{AttentionMask, MultiHeadAttention, MultiHeadAttentionConfig};
//! # use candle_nn::VarBuilder;
//! # let device = Device::Cpu;
//! # let vb = VarBuilder::zeros(DType::F32, &device);
//! // `device` is `Device::Cpu`, or `candle_gpt2::open_cuda(0)?` with the feature `cuda`.
//! let layer = MultiHeadAttention::load(&MultiHeadAttentionConfig::gpt2(768, 12), vb.pp("h.0.attn"))?;
//! let x = Tensor::ones((1, 5, 768), DType::F32, &device)?;
//! assert_eq!(layer.forward_masked(&x, &AttentionMask::Causal)?.dims(), [1, 5, 768]);
//! # Ok::<(), candle_core::Error>(())
//! ```
//!
//! Train a head of your own on frozen blocks, with candle's AdamW:
//!
//! ```
//! # use candle_core::{D, DType, Device, Tensor};
//! # use candle_gpt2::{Gpt2Config, Gpt2Model, without_gradients};
//! # use candle_nn::{AdamW, Module, Optimizer, VarBuilder, VarMap, linear, loss::cross_entropy};
//! # let config = Gpt2Config { vocab_size: 11, n_positions: 8, n_embd: 6, n_layer: 2, n_head: 3, ..Gpt2Config::gpt2() };
//! # let model = Gpt2Model::load(&config, VarBuilder::from_varmap(&VarMap::new(), DType::F32, &Device::Cpu))?;
//! let variables = VarMap::new();
//! let head = linear(6, 2, VarBuilder::from_varmap(&variables, DType::F32, &Device::Cpu).pp("head"))?;
//! let mut optimizer = AdamW::new_lr(variables.all_vars(), 1e-2)?;
//! let (ids, label) = (Tensor::new(&[[1u32, 2, 3]], &Device::Cpu)?, Tensor::new(&[1u32], &Device::Cpu)?);
//! let hidden = without_gradients(|| model.forward(&ids))?; // (1, 3, 6)
//! let loss = cross_entropy(&head.forward(&hidden.mean(1)?)?, &label)?;
//! optimizer.backward_step(&loss)?;
//! # Ok::<(), candle_core::Error>(())
//! ```
//!
//! Run rows of different lengths in one pass, without padding:
//!
//! ```
//! # use candle_core::{DType, Device, Tensor};
//! # use candle_gpt2::{Gpt2Config, Gpt2LMHeadModel, LogitsFor, Pass};
//! # use candle_nn::{VarBuilder, VarMap};
//! # let config = Gpt2Config { vocab_size: 11, n_positions: 8, n_embd: 6, n_layer: 2, n_head: 3, ..Gpt2Config::gpt2() };
//! # let model = Gpt2LMHeadModel::load(&config, VarBuilder::from_varmap(&VarMap::new(), DType::F32, &Device::Cpu))?;
//! let ids = Tensor::new(&[[1u32, 2, 3, 4, 5]], &Device::Cpu)?; // a row of 3 tokens, then a row of 2
//! let pass = &mut Pass::inference().of_rows([3, 2].into());
//! let logits = model.forward_with(&ids, LogitsFor::LastToken, None, pass)?; // (1, 2, 11)
//! # assert_eq!(logits.dims(), [1, 2, 11]);
//! # Ok::<(), candle_core::Error>(())
//! ```
//!
//! [`Sublayer`] puts an attention or an MLP of your own into a model.
#![cfg_attr(docsrs, feature(doc_cfg))]
#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

mod cache;
mod config;
mod cross_attention;
mod diagnose;
mod embeddings;
mod encoder_states;
mod error;
mod head_kind;
mod heads;
mod logits_for;
mod model;
mod modules;
mod observed;
mod parameters;
mod parts;
mod recorder;
mod steps;
mod sublayer;
mod text;
mod watcher;

pub use cache::{Gpt2Cache, KvPool};
pub use candle_gpt2_arithmetic::{
    Dropout, KvSlot, NumberType, PackedMatrix, RandomStream, set_thread_count, thread_count,
};
pub use candle_gpt2_attention::{
    AttentionError, AttentionMask, AttentionMemory, FeedForward, HeadWidth, KvCache, KvCacheShape,
    MultiHeadAttention, MultiHeadAttentionConfig, Observer, Pass, Placement, ProjectionLayout, QkvProjection,
    ScaledDotProduct, Site, SiteKind,
};
pub use candle_gpt2_kernels::{
    Activation, AdaptedMatrix, ByOutput, DeviceError, InitialGradients, KernelError, KvDType, KvMemory,
    LayerNorm, Linear, Matrix, Packed, ParameterSize, ParameterSource, SlotGuard, carried, gradients,
    open_cuda, open_metal, using, without_gradients,
};
pub use config::{Gpt2Config, PRESETS};
pub use cross_attention::{CrossAttention, check_encoder_states};
pub use diagnose::{Diagnose, ErrorKind};
pub use error::{ConfigError, ModelError};
pub use head_kind::{HeadKind, ProblemType, Summary, SummaryType};
pub use heads::{Gpt2DoubleHeads, Gpt2ForSequenceClassification, Gpt2ForTokenClassification};
pub use logits_for::LogitsFor;
pub use model::{Block, Gpt2LMHeadModel, Gpt2Model};
pub use parameters::{
    LedgerRow, Parameter, ParameterCounts, ParameterKind, decays, expected_parameters, paper_size,
    parameter_ledger,
};
pub use sublayer::Sublayer;
pub use text::{GIT_LFS_POINTER, bounded_message, excerpt, is_unprintable, printable, printable_json};
