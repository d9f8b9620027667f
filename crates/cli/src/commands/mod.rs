//! Commands with their arguments, one per file.
//!
//! `rows.rs` processes files of prompts for several commands.

mod begin;
pub(crate) mod bench;
pub(crate) mod cache;
pub(crate) mod classify;
pub(crate) mod completions;
pub(crate) mod compress;
mod continued;
pub(crate) mod convert;
pub(crate) mod doctor;
pub(crate) mod eval;
pub(crate) mod generate;
mod generate_interactive;
mod generation_arguments;
mod grammar;
mod in_place;
pub(crate) mod inspect;
pub(crate) mod look;
pub(crate) mod man;
mod rows;
pub(crate) mod score;
#[cfg(feature = "serve")]
pub(crate) mod serve;
mod steering;
pub(crate) mod text_tokens;
pub(crate) mod tokenize;
pub(crate) mod train;
pub(crate) mod verify;

pub(crate) use begin::begin;
