//! One file for each task, or for several of one kind: its protocols, what makes items of its data, and its published figures.

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
use shared::PLAIN;

/// All of them, in the order in which they are listed.
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

/// What is known of two models side by side.
pub(crate) const KL: Protocol = Protocol { name: Kl::NAME, about: Kl::ABOUT, source: Kl::SOURCE, ..PLAIN };
/// What is known of a task of a YAML file, whose data are those of the file.
pub(crate) const TASK: Protocol = Protocol {
    source: "lm-evaluation-harness 0.4.13, a task of a YAML file",
    dataset: Dataset { name: "those of the task file", ..PLAIN.dataset },
    ..PLAIN
};
