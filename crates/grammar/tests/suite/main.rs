//! The crate from outside, a module a subject. One program, because linking takes longer than compiling does.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod common;
mod constraint;
mod json_schema;
mod json_schema_fuzz;
mod json_schema_suite;
mod refused;
mod texts;
mod vocabularies;
