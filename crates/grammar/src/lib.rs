#![doc = include_str!("../README.md")]

mod compiler;
mod constraint;
mod error;
mod grammar;
mod prepared;
mod process;
mod reading;
mod recursion;
mod schema;
mod shared;
mod states;
mod tokens;

pub use compiler::Compiler;
pub use error::GrammarError;
pub use grammar::{Grammar, MAX_SOURCE_BYTES};
pub use process::GRAMMARS;
