//! Tests of analyses: parsing, results, errors and option names.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]
mod activations;
mod circuit;
mod common;
mod features;
mod graph;
mod invalid_input;
mod names;
mod results;
mod steering;
mod steps;
