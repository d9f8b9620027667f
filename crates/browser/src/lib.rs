#![doc = include_str!("../README.md")]

#[cfg(target_arch = "wasm32")]
mod blob;
mod room;
mod session;
#[cfg(target_arch = "wasm32")]
mod wasm;

pub use room::{check_room, memory};
pub use session::{Session, Writing};
