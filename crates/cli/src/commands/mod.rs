//! One file for each command; `generate` has one for each source of prompts.

pub(crate) mod convert;
pub(crate) mod generate;
mod generate_file;
mod generate_interactive;
pub(crate) mod inspect;
pub(crate) mod score;
pub(crate) mod train;
pub(crate) mod verify;
