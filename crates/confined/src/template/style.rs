//! Template styles.

use serde::{Deserialize, Serialize};

/// Jinja settings that a template expects.
///
/// See [`Templates`](crate::Templates) for an example.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Style {
    /// Settings of transformers, for chat templates.
    Chat,
    /// Settings of lm-evaluation-harness, for task templates.
    Task,
}
