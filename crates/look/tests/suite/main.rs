//! The tests of looks: what they read, what they find, what they refuse, and how the names of options are written.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]
mod activations;
mod circuit;
mod common;
mod features;
mod found;
mod graph;
mod names;
mod refused;
mod steering;
mod steps;
