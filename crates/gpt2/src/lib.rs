#![doc = include_str!("../README.md")]
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
mod text;
mod watcher;

pub use cache::{Gpt2Cache, KvPool};
pub use candle_gpt2_arithmetic::{
    Dropout, KvSlot, NumberType, PackedMatrix, RandomStream, set_thread_count, thread_count,
};
pub use candle_gpt2_attention::{
    AttentionError, AttentionMask, AttentionMemory, FeedForward, HeadWidth, KvCache, KvCacheShape,
    MultiHeadAttention, MultiHeadAttentionConfig, Observer, Pass, Placement, ProjectionLayout, QkvProjection,
    Site, SiteKind,
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
pub use text::{GIT_LFS_POINTER, bounded_message, excerpt, is_unprintable, printable, printable_json};
