//! One file for each command with its arguments; `generate` has one for each source of prompts.

mod begin;
pub(crate) mod bench;
pub(crate) mod cache;
pub(crate) mod classify;
pub(crate) mod completions;
mod continued;
pub(crate) mod convert;
pub(crate) mod doctor;
pub(crate) mod eval;
pub(crate) mod generate;
mod generate_file;
mod generate_interactive;
mod generation_arguments;
mod grammar;
pub(crate) mod inspect;
mod line_reports;
pub(crate) mod look;
pub(crate) mod man;
mod partial_file;
mod prompt_lines;
pub(crate) mod score;
#[cfg(feature = "serve")]
pub(crate) mod serve;
mod steering;
pub(crate) mod text_tokens;
mod texts;
pub(crate) mod tokenize;
pub(crate) mod train;
pub(crate) mod verify;

pub(crate) use begin::begin;
