//! What was seen inside a model, as a page, a picture or a table.
//!
//! A [`Report`] holds named axes, values and the tokens of the text; as JSON it is what programs read. [`page`] draws it as one
//! HTML file for a browser, [`svg()`] as a picture for a paper, [`table`] as text for a terminal. Nothing here knows models or tensors.
//!
//! ```
//! use gpt2_pictures::{Axis, Report, Scale, Token, Width, page, svg, table};
//!
//! let tokens = vec![Token::new(0, 15496, b"Hello"), Token::new(1, 995, b" world")];
//! let report = Report {
//!     schema: "gpt2.look.example/1".into(),
//!     title: "entropy of the next token, in nats".into(),
//!     model: "gpt2".into(),
//!     bos: false,
//!     axes: vec![Axis::tokens("token", &tokens)],
//!     tokens,
//!     values: vec![Some(6.5), Some(3.25)],
//!     texts: Vec::new(),
//!     metric: None,
//!     notes: Vec::new(),
//!     scale: Scale::Amount,
//! };
//! assert!(table(&report).contains("·world 1"));
//! assert!(page(&report).starts_with("<!doctype html>"));
//! assert!(svg(&report, Width::OneColumn)?.starts_with("<svg"));
//! # Ok::<(), gpt2_pictures::PictureError>(())
//! ```

mod error;
mod packed;
mod page;
mod report;
mod svg;
mod table;

pub use error::PictureError;
pub use page::{HEAD_HTML, PARTS_CSS, PARTS_JS, REPORT_HTML, WRITING_CSS, WRITING_JS, data, page};
pub use report::{Axis, Metric, Report, Scale, Token, shown};
pub use svg::{Width, svg};
pub use table::table;
