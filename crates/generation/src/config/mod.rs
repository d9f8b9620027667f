//! How to generate: fields named as in transformers' `generation_config.json`, with the defaults of transformers but for the number
//! of new tokens. `table.rs` has every option, `checks.rs` says which values go together, and `options.rs` how a request changes
//! what a checkpoint's files say.

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
