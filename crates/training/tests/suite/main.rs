//! The crate from outside, a module a subject. One program, because linking takes longer than compiling does.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod devices;
mod dictionary;
mod initialization;
mod lora;
mod positions;
mod pytorch;
mod tasks;
