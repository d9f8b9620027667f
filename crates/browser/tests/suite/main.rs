//! What is asked of a model in a page, as Rust. The page itself is tested in a browser: `web/tests`.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod room;
mod session;
