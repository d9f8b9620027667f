//! Benchmarks by protocols that have names: `lambada:lm-eval` is one number, and `lambada` alone is none.
//!
//! A [`Protocol`] is data and two small functions: one makes [`Item`]s of the [`Data`], the other makes [`Metric`]s of what the
//! model said to each. Between them stands one way to ask a model, [`Prepared::evaluate`], and what it answers to an item,
//! [`ItemResult`], is also the line of the log from which an interrupted run goes on.
//!
//! ```
//! use gpt2_engine::{ModelOptions, Silent};
//! use gpt2_evaluation::{Data, Setting, named};
//!
//! # let folder = tempfile::tempdir()?;
//! # let path = folder.path().join("passages.jsonl");
//! # std::fs::write(&path, r#"{"text": "My lord, the king of France is dead, and long live the king"}"#)?;
//! let (protocol, _) = named("lambada:lm-eval")?;
//! let opened = ModelOptions::default().open(&Silent)?;
//! let setting = Setting { vocabulary: opened.vocabulary(), parameter: 0, context: None, limit: None };
//! let prepared = (protocol.prepare)(&Data::read(&path)?, &setting)?;
//! // What is wrong with the data is known before any weights are read.
//! assert!(prepared.damaged.is_none());
//! let model = opened.load(&Silent)?;
//! let results = prepared.evaluate(&model, Vec::new(), &Silent, &mut |_| Ok(()))?;
//! let metrics = (protocol.measure)(&prepared.totals, &results);
//! assert_eq!(metrics.iter().map(|metric| metric.name).collect::<Vec<_>>(), ["perplexity", "acc"]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod answer;
mod basic_tokenizer;
mod compare;
mod data;
mod detokenize;
mod error;
mod evaluate;
mod item;
mod kl;
mod log;
mod metric;
mod names;
mod number;
mod preparation;
mod protocol;
mod protocols;
mod published;
mod report;

pub use answer::{ChoiceResult, ItemResult, Predicted};
pub use compare::{Comparison, Flips, PairedDifference};
pub use data::{Data, Record, Records};
pub use error::{DataError, EvaluationError};
pub use item::{Choice, Item, Work};
pub use kl::{Kl, KlWindow};
pub use log::{ItemLog, LogHead, logged_results};
pub use metric::{Metric, StderrKind};
pub use names::{named, protocols};
pub use preparation::{Prepared, Setting, Totals};
pub use protocol::{Dataset, Parameter, Protocol};
pub use published::{Published, Size};
pub use report::{BaseReport, DatasetReport, MetricReport, Report};
