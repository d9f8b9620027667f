//! Rust tests for a page's requests to a model; `web/tests` tests the page in a browser.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod memory;
mod session;
