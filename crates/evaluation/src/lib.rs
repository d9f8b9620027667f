//! Benchmarks by protocols that have names: `lambada:lm-eval` is one number, and `lambada` alone is none.
//!
//! A [`Protocol`] is data and two small functions: one makes [`Item`]s of the [`Data`], the other makes [`Metric`]s of what the
//! model said to each. Between them stands one way to ask a model, [`Prepared::evaluate`], and what it answers to an item,
//! [`ItemResult`], is also the line of the log from which an interrupted run goes on.
//!
//! [`EvaluationOptions`] say all that a caller may ask for. They become a [`Plan`], that an [`Evaluation`], which holds all data
//! checked and ready before any weights are read, and that [`Report`]s.
//!
//! ```
//! use gpt2_engine::{ModelOptions, Silent};
//! use gpt2_evaluation::{EvaluationOptions, ModelFacts};
//!
//! # let folder = tempfile::tempdir()?;
//! # let path = folder.path().join("passages.jsonl");
//! # std::fs::write(&path, r#"{"text": "My lord, the king of France is dead, and long live the king"}"#)?;
//! let options = EvaluationOptions { data: vec![path], ..EvaluationOptions::new(["lambada:lm-eval"]) };
//! let plan = options.check()?;
//! let options = ModelOptions::default();
//! let opened = options.open(&Silent)?;
//! // What is wrong with the data is known before any weights are read.
//! let evaluation = plan.prepare(&ModelFacts::of_opened(&options, &opened), None, &Silent)?;
//! let model = opened.load(&Silent)?;
//! let reports = evaluation.run(&model, None, &Silent).collect::<Result<Vec<_>, _>>()?;
//! let names = reports[0].metrics.iter().map(|metric| metric.name);
//! assert_eq!(names.collect::<Vec<_>>(), ["perplexity", "acc"]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

#![cfg_attr(docsrs, feature(doc_cfg))]

mod answer;
mod asked;
mod basic_tokenizer;
mod compare;
mod data;
mod detokenize;
mod error;
mod evaluate;
mod facts;
mod item;
mod kl;
mod listing;
mod log;
mod long_text;
mod metric;
mod names;
mod number;
mod options;
mod plan;
mod preparation;
mod protocol;
mod protocols;
mod published;
mod report;
mod task;

pub use answer::{ChoiceResult, ItemResult, Predicted};
pub use compare::{Comparison, Flips, PairedDifference};
pub use data::{Data, Record, Records};
pub use error::{DataError, EvaluationError};
pub use facts::ModelFacts;
pub use item::{Choice, Item, Work};
pub use kl::{Kl, KlWindow};
pub use listing::{Listed, listing};
pub use log::{ItemLog, LogHead, logged_results};
pub use metric::{Metric, StderrKind};
pub use names::{named, protocols};
pub use options::EvaluationOptions;
pub use plan::{Evaluation, Plan, Reports};
pub use preparation::{Prepared, Setting, Totals};
pub use protocol::{Dataset, Parameter, Protocol};
pub use published::{Published, Size};
pub use report::{BaseReport, DatasetReport, MetricReport, Report};
