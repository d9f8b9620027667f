//! Tests of a page's requests to a model, in Rust; `web/tests` tests the page in a browser.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod memory;
mod session;
