#![doc = include_str!("../README.md")]

mod compiler;
mod constraint;
mod error;
mod grammar;
mod schema;
mod states;
mod tokens;

pub use compiler::Compiler;
pub use error::GrammarError;
pub use grammar::{Grammar, MAX_SOURCE_BYTES};
