//! Integration tests for the crate, with one module per subject.
//!
//! They form one program because linking takes longer than compiling.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod common;
mod constraint;
mod invalid_grammars;
mod json_schema;
mod json_schema_fuzz;
mod json_schema_suite;
mod texts;
mod vocabularies;
