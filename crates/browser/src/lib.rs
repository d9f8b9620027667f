//! The engine in a browser: classes that JavaScript calls in a worker, without a line about the page.
//!
//! A [`Session`] is a loaded model that is asked as the server is: by a path and a body in JSON, see [`Session::ask`] and
//! [`Session::start`]. That is ordinary Rust, which is tested wherever tests run. What JavaScript sees stands in `wasm.rs`, which
//! is compiled for wasm32 alone: `Files`, `Checkpoint`, `Model`, `Writing`, `version` and `last_panic`. No DOM, no network, no
//! thread; the clock and random numbers are the browser's.
//!
//! ```
//! use gpt2_browser::Session;
//! use gpt2_engine::{ModelOptions, Silent};
//!
//! let model = ModelOptions::default().open(&Silent)?.load(&Silent)?;
//! let session = Session::new(model, "built-in", || 0)?;
//! let body = br#"{"prompt": "ROMEO:", "max_tokens": 5, "temperature": 0, "stream": true}"#;
//! let mut writing = session.start("v1/completions", body)?;
//! let mut chunks = Vec::new();
//! while let Some(step) = writing.step()? {
//!     chunks.extend(step);
//! }
//! assert_eq!(chunks.len(), 5);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

#[cfg(target_arch = "wasm32")]
mod blob;
mod room;
mod session;
#[cfg(target_arch = "wasm32")]
mod wasm;

pub use room::{check_room, memory};
pub use session::{Session, Writing};
