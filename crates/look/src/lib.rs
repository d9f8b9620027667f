#![doc = include_str!("../README.md")]
#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

mod ablate;
mod attending;
mod attention;
mod attribute;
mod cache;
mod compared;
mod control_vector;
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
pub use control_vector::read_control_vector;
pub use error::LookError;
pub use features::{Features, read_dictionary};
pub use found::{Details, Found, LensDetails};
pub use head::{CheckedHead, HeadSteps, OneHead};
pub use lens::{CheckedLens, Lens};
pub use look::{Look, LookSubject};
pub use metric::{CheckedMetric, MetricOptions};
pub use named::{Method, Name, Named, Numbers, Parts, named};
pub use neurons::Neurons;
pub use next::{NextToken, NextTokens, Reading};
pub use patch::{CheckedPatch, Estimate, Patch, Patched};
pub use path::{CheckedPath, PathPatching};
pub use reader::{Heads, Neuron, Ranges, Reader, Text, TokenChoice};
pub use saliency::Saliency;
pub use steer::{CheckedSteer, Steer, Towards};
