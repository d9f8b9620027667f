//! Result of an analysis: a report and details.

use std::sync::Arc;

use candle_gpt2_engine::Vocabulary;
use candle_gpt2_interpret::{LensCell, LensLayer, LensValue};
use candle_gpt2_pictures::{
    AttributionGraph, FeatureCard, PictureError, Report, Width, feature_page, graph_page, graph_svg, page,
    printable_token, svg,
};
use serde::Serialize;
use serde::ser::Serializer;
use serde_json::{Value, json};

/// Result of an analysis.
///
/// Returned by [`Look::look`](crate::Look::look).
#[derive(Debug, Clone)]
pub struct Analysis {
    /// Values with their axes, tokens and notes.
    pub report: Report,
    /// Additional results, besides the report.
    pub details: Details,
    /// Attribution graph, drawn instead of the values.
    pub graph: Option<AttributionGraph>,
    /// Features with example texts, one for each label of the first axis.
    ///
    /// Pages show them below the values.
    pub features: Vec<FeatureCard>,
}

/// Additional results of an analysis, besides its report.
///
/// Part of the result of [`Look::look`](crate::Look::look).
#[derive(Debug, Clone)]
pub enum Details {
    /// A JSON object, or null.
    Json(Value),
    /// Cells of a lens.
    Lens(LensDetails),
}

impl Details {
    /// Returns the details as a JSON object, or null if there are none.
    pub fn to_json(&self) -> Value {
        match self {
            Self::Json(value) => value.clone(),
            Self::Lens(details) => details.to_json(),
        }
    }
}

impl Analysis {
    pub(crate) fn new(report: Report, details: Value) -> Self {
        Self { report, details: Details::Json(details), graph: None, features: Vec::new() }
    }

    /// Renders a self-contained HTML file that works offline.
    pub fn page(&self) -> String {
        match &self.graph {
            Some(graph) => graph_page(&self.report, graph),
            None if !self.features.is_empty() => feature_page(&self.report, &self.features),
            None => page(&self.report),
        }
    }

    /// Renders an SVG figure for a paper.
    ///
    /// # Errors
    /// If there is nothing to draw, or too much for one picture.
    pub fn svg(&self, width: Width) -> Result<String, PictureError> {
        match &self.graph {
            Some(graph) => graph_svg(&self.report, graph, width),
            None => svg(&self.report, width),
        }
    }
}

/// Serializes the report, the details and the features as one flat object.
impl Serialize for Analysis {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        #[derive(Serialize)]
        struct Whole<'a> {
            #[serde(flatten)]
            report: &'a Report,
            #[serde(flatten)]
            details: Value,
            #[serde(skip_serializing_if = "<[_]>::is_empty")]
            features: &'a [FeatureCard],
        }
        Whole { report: &self.report, details: self.details.to_json(), features: &self.features }
            .serialize(serializer)
    }
}

/// Cells of a lens.
///
/// Stored in [`Details::Lens`] by [`Lens`](crate::Lens).
#[derive(Debug, Clone)]
pub struct LensDetails {
    /// Value that the report shows for each cell.
    pub show: LensValue,
    /// Layers with their cells.
    pub layers: Vec<LensLayer>,
    /// Tokens whose rank and probability are also reported.
    pub watch: Vec<u32>,
    pub(crate) vocabulary: Arc<Vocabulary>,
}

impl LensDetails {
    /// Returns an object with `show` and `layers`.
    pub fn to_json(&self) -> Value {
        let text = |id: u32| printable_token(&self.vocabulary.token_bytes(id));
        let token = |id: u32| json!({ "id": id, "text": text(id) });
        let watched = |(id, (rank, logprob)): (&u32, &(usize, f32))| json!({ "token": token(*id), "rank": rank, "logprob": logprob });
        let cell = |cell: &LensCell| {
            let top = cell.top.iter().map(|(id, logprob)| json!({ "token": token(*id), "logprob": logprob }));
            json!({
                "top": top.collect::<Vec<_>>(), "entropy": cell.entropy, "divergence": cell.divergence,
                "next_logprob": cell.next,
                "watched": self.watch.iter().zip(&cell.watched).map(watched).collect::<Vec<_>>(),
            })
        };
        let layer = |layer: &LensLayer| json!({ "layer": layer.label, "cells": layer.cells.iter().map(cell).collect::<Vec<_>>() });
        json!({ "show": self.show.title(), "layers": self.layers.iter().map(layer).collect::<Vec<_>>() })
    }
}
