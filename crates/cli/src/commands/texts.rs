//! Texts that were made, as `--json` prints them.

use std::sync::Arc;
use std::time::Instant;

use candle_gpt2_engine::Text;
use candle_gpt2_generation::Clock;
use serde::Serialize;

/// Texts that are made at once: enough to share the reading of the weights, and memory for their keys and values is there
/// on every machine.
pub(super) const BATCH_SIZE: usize = 8;

/// One text, or several of one prompt.
#[derive(Serialize)]
#[serde(untagged)]
pub(super) enum Texts {
    One(Text),
    Several { sequences: Vec<Text> },
}

impl From<Vec<Text>> for Texts {
    fn from(mut texts: Vec<Text>) -> Self {
        match (texts.len(), texts.pop()) {
            (1, Some(text)) => Self::One(text),
            (_, last) => {
                texts.extend(last);
                Self::Several { sequences: texts }
            }
        }
    }
}

/// The time since now, by which the time of texts is counted.
pub(super) fn clock() -> Clock {
    let start = Instant::now();
    Arc::new(move || start.elapsed())
}
