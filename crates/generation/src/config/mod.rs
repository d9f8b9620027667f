//! Generation options.
//!
//! Fields have the names and defaults of transformers' `generation_config.json`, except for the default
//! number of new tokens. `table.rs` lists every option, `checks.rs` validates combinations of values,
//! and `options.rs` merges a request's options into a checkpoint's.

mod checks;
mod json;
mod kinds;
mod options;
mod search;
mod table;

pub(crate) use checks::{check_ids, slid_tokens};
pub use kinds::{EarlyStopping, LongPrompt, MAX_TEXTS, MIN_TEMPERATURE, WhenFull};
pub use options::samples_at;
pub use search::SearchMode;
pub use table::{GenerationConfig, GenerationOptions, MAX_NEW_TOKENS, OPTIONS, OptionRow, RequestField};
