//! Looking inside a loaded GPT-2: what a face of the project asks, as a report that can be shown as a table, a page or a picture.
//!
//! A [`Look`] holds options; [`Reader`] reads texts, tokens and heads and checks them before weights are needed, and writes the names
//! of options as the face does. What is found is a [`Found`]: a [`Report`](gpt2_pictures::Report) with details. [`Activations`] are
//! what a run has at chosen places, [`HeadSteps`] are those of one head for one token, [`NextTokens`] what may follow a token, and
//! [`Steer`] makes what is added to the runs of a model.
//!
//! ```
//! use gpt2_engine::{DeviceChoice, ModelOptions, Silent, Spelling};
//! use gpt2_look::{Lens, Look, Reader, Subject, Text};
//!
//! let options = ModelOptions { device: DeviceChoice::Cpu, ..ModelOptions::default() };
//! let opened = options.open(&Silent)?;
//! let reader = Reader::new(opened.vocabulary(), false, Spelling::Keywords)?;
//! let lens = Lens::new(Text::Words("Good night, good".into()));
//! let checked = lens.check(&reader)?; // before the weights are read
//! let loaded = opened.load(&Silent)?;
//! let found = lens.look(checked, &Subject::new(&loaded, "built-in".into(), &reader), &Silent)?;
//! assert_eq!(found.report.title, "logit lens: probability of the most probable token");
//! assert_eq!(found.report.values.len(), 5 * found.report.tokens.len());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod ablate;
mod attending;
mod attention;
mod attribute;
mod cache;
mod compared;
mod error;
mod features;
mod files;
mod found;
mod head;
mod lens;
mod look;
mod metric;
mod named;
mod neurons;
mod next;
mod patch;
mod path;
mod reader;
mod saliency;
mod steer;

pub use ablate::{Ablate, CheckedAblate, Instead};
pub use attending::{CheckedHeadKinds, HeadKinds};
pub use attention::Attention;
pub use attribute::Attribute;
pub use cache::{Activations, CacheFormat, Cached, CheckedActivations};
pub use compared::ComparedTexts;
pub use error::LookError;
pub use features::Features;
pub use found::{Details, Found, LensDetails};
pub use head::{CheckedHead, HeadSteps, OneHead};
pub use lens::{CheckedLens, Lens};
pub use look::{Look, Subject};
pub use metric::{CheckedMetric, MetricOptions};
pub use named::{Method, Name, Named, Numbers, Parts, named};
pub use neurons::Neurons;
pub use next::{NextToken, NextTokens, Reading};
pub use patch::{CheckedPatch, Estimate, Patch, Patched};
pub use path::{CheckedPath, PathPatching};
pub use reader::{Heads, Neuron, Ranges, Reader, Text, TokenChoice};
pub use saliency::Saliency;
pub use steer::{CheckedSteer, Steer, Towards};
