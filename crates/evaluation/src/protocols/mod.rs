//! Built-in protocols, with one file per task or group of similar tasks.
//!
//! A file contains its protocols, the functions that build items, and the published results.

mod blimp;
pub(crate) mod few_shot;
pub(crate) mod harness;
mod hellaswag;
mod lambada;
pub(crate) mod llama_cpp;
mod lm_eval;
mod questions;
pub(crate) mod shared;
pub(crate) mod text;
mod wikitext;
mod winogrande;

use crate::{Dataset, Kl, Protocol};
use shared::DEFAULTS;

/// All protocols, in listing order.
pub(crate) const ALL: &[&Protocol] = &[
    &wikitext::LM_EVAL,
    &wikitext::HF,
    &wikitext::MEGATRON,
    &wikitext::LLAMA_CPP,
    &lambada::LM_EVAL,
    &lambada::LAST_TOKEN,
    &lambada::MEGATRON_STRICT,
    &lambada::STOP_WORDS,
    &hellaswag::LM_EVAL,
    &hellaswag::LLM_C,
    &hellaswag::LLAMA_CPP,
    &questions::PIQA,
    &questions::ARC_EASY,
    &questions::ARC_CHALLENGE,
    &questions::OPENBOOKQA,
    &questions::SCIQ,
    &winogrande::LM_EVAL,
    &blimp::LM_EVAL,
    &text::BITS,
];

/// Description of `kl`, the comparison of two models.
pub(crate) const KL: Protocol = Protocol { name: Kl::NAME, about: Kl::ABOUT, source: Kl::SOURCE, ..DEFAULTS };
/// Description of a task from a YAML file, which names its own data.
pub(crate) const TASK: Protocol = Protocol {
    source: "lm-evaluation-harness 0.4.13, a task from a YAML file",
    dataset: Dataset { name: "the data of the task file", ..DEFAULTS.dataset },
    ..DEFAULTS
};
