//! Template styles.

use serde::{Deserialize, Serialize};

/// Jinja settings that a template expects.
///
/// See [`Templates`](crate::Templates) for an example.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Style {
    /// Settings as in transformers, for chat templates.
    Chat,
    /// Settings as in lm-evaluation-harness, for task templates.
    Task,
}
