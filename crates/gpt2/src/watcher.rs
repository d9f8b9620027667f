//! The observer of a model.

use std::fmt;
use std::sync::{Arc, Mutex};

use candle_gpt2_attention::Observer;

/// Sees every pass of a model.
#[derive(Clone)]
pub(crate) struct Watcher(pub(crate) Arc<Mutex<dyn Observer + Send>>);

impl fmt::Debug for Watcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Watcher")
    }
}
