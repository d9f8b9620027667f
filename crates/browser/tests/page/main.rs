//! What is asked of a model, and the built page in browsers, from end to end.
//!
//! `GPT2_WEB` names the folder that `scripts/build_web.sh` made, `web/dist`; without it, and without a browser and its driver, each test
//! says what was skipped. A page opened from a file has no network: names are not found, and whatever goes to an address goes nowhere.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod common;
mod faults;
mod host;
mod inside;
mod own_models;
mod room;
mod session;
mod surroundings;
mod writing;
