#![doc = include_str!("../README.md")]

mod attribution_graph;
mod error;
mod feature_card;
mod graph;
mod packed;
mod page;
mod report;
mod svg;
mod table;

pub use attribution_graph::{
    AttributionGraph, GraphLine, GraphPoint, PointKind, graph_data, graph_page, graph_svg,
};
pub use candle_gpt2_web::{HEAD_HTML, PARTS_CSS, REPORT_HTML, WRITING_CSS, script};
pub use error::PictureError;
pub use feature_card::{FeatureCard, FeatureHistogram, FeatureQuantile, FeatureText, feature_page};
pub use graph::{Graph, GraphLink, GraphNode};
pub use page::{data, learned_page, page};
pub use report::{Axis, Metric, Report, Scale, Token, printable_token};
pub use svg::{Width, svg};
pub use table::table;
