#![doc = include_str!("../README.md")]

mod compiler;
mod constraint;
mod error;
mod first_step;
mod grammar;
mod prepared;
#[cfg(target_os = "linux")]
mod process;
#[cfg(not(target_os = "linux"))]
#[path = "no_process.rs"]
mod process;
mod schema;
mod states;
mod tokens;

pub use compiler::Compiler;
pub use error::GrammarError;
pub use grammar::{Grammar, MAX_SOURCE_BYTES};
pub use process::{GrammarReader, read_grammars};
