#![doc = include_str!("../README.md")]

#[cfg(target_arch = "wasm32")]
mod blob;
mod memory;
mod session;
#[cfg(target_arch = "wasm32")]
mod wasm;

pub use memory::{check_memory, memory};
pub use session::{Activation, CompletionStream, Session};
