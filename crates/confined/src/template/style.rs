//! Kinds of templates.

use serde::{Deserialize, Serialize};

/// Settings of Jinja that a template expects.
///
/// See [`Templates`](crate::Templates) for an example.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Style {
    /// Those of transformers, for chat templates.
    Chat,
    /// Those of lm-evaluation-harness, for the templates of a task.
    Task,
}
