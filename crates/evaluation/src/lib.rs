#![doc = include_str!("../README.md")]
//!
//! [`EvaluationOptions::check`] returns a [`Plan`], [`Plan::prepare`] an [`Evaluation`] with all data read
//! and validated, and [`Evaluation::run`] one [`Report`] after the other. A log of items allows resuming a
//! run and comparing two runs. A [`Protocol`] is data and two functions, so a program can define its own.
#![cfg_attr(docsrs, feature(doc_cfg))]
#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

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
pub use listing::{ProtocolEntry, listing};
pub use log::{ItemLog, LogHead, logged_results};
pub use metric::{Metric, StderrKind};
pub use names::{named, protocols};
pub use options::EvaluationOptions;
pub use plan::{Evaluation, Plan, Reports};
pub use preparation::{ExampleSource, Prepared, Setting, Shots, Totals};
pub use protocol::{Dataset, Parameter, Protocol};
pub use published::{Published, Size};
pub use report::{BaseReport, DatasetReport, MetricReport, Report};
