//! Text that always parses: JSON, JSON by a schema, a regular expression, a grammar.
//!
//! A [`Compiler`] knows the tokens of one vocabulary and turns a [`Grammar`] into a
//! [`LogitsProcessor`](gpt2_generation::LogitsProcessor) that leaves the tokens with which a text can still become one of the
//! grammar's. Which tokens those are is what [llguidance](https://docs.rs/llguidance) finds; here stand what it is told of the
//! tokens, bounds for grammars of strangers, and what is remembered from token to token.
//!
//! ```
//! use gpt2_engine::{ModelOptions, Silent};
//! use gpt2_generation::{Event, GenerationConfig, Request, SchedulerOptions};
//! use gpt2_grammar::{Compiler, Grammar};
//!
//! let model = ModelOptions::default().open(&Silent)?.load(&Silent)?;
//! let date = Grammar::Regex(r"[0-3]\d (May|June) 1\d\d\d".into());
//! let constraint = Compiler::new(model.vocabulary())?.compile(&date, &[])?;
//!
//! let prompt = model.vocabulary().encode("ROMEO:")?;
//! let mut request = Request::new(prompt, GenerationConfig { max_new_tokens: 50, ..GenerationConfig::default() });
//! request.processors.push(constraint);
//! let options = SchedulerOptions { max_texts: 1, kv_tokens: 128, chunk_tokens: 64 };
//! let mut scheduler = model.scheduler(options)?;
//! scheduler.submit(request)?;
//! let mut date = String::new();
//! for event in scheduler.into_events() {
//!     if let Event::Token { text, .. } = event? {
//!         date.push_str(&text);
//!     }
//! }
//! assert!(date[2..].starts_with(" May 1") || date[2..].starts_with(" June 1"), "{date}");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod compiler;
mod constraint;
mod error;
mod grammar;
mod schema;
mod states;
mod tokens;

pub use compiler::Compiler;
pub use error::GrammarError;
pub use grammar::{Grammar, MAX_SOURCE_BYTES};
