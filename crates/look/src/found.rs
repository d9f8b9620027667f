//! The result of an analysis: a report, and details.

use std::sync::Arc;

use candle_gpt2_engine::Vocabulary;
use candle_gpt2_interpret::{LensCell, LensLayer, LensValue};
use candle_gpt2_pictures::{
    AttributionGraph, FeatureCard, PictureError, Report, Width, feature_page, graph_page, graph_svg, page,
    shown, svg,
};
use serde::Serialize;
use serde::ser::Serializer;
use serde_json::{Value, json};

/// The result of an analysis.
///
/// Given by [`Look::look`](crate::Look::look).
#[derive(Debug, Clone)]
pub struct Found {
    /// Values over axes.
    pub report: Report,
    /// Further results.
    pub details: Details,
    /// The nodes and edges of an attribution graph, which are drawn instead of the values.
    pub graph: Option<AttributionGraph>,
    /// Features with the texts that they are active in, one for each label of the first axis; a page has them below the values.
    pub features: Vec<FeatureCard>,
}

/// The results of an analysis besides the values of its report.
///
/// Part of what [`Look::look`](crate::Look::look) gives.
#[derive(Debug, Clone)]
pub enum Details {
    /// Nothing, or an object.
    Json(Value),
    /// The cells of a lens.
    Lens(LensDetails),
}

impl Details {
    /// An object, or null if there is nothing.
    pub fn to_json(&self) -> Value {
        match self {
            Self::Json(value) => value.clone(),
            Self::Lens(details) => details.to_json(),
        }
    }
}

impl Found {
    pub(crate) fn new(report: Report, details: Value) -> Self {
        Self { report, details: Details::Json(details), graph: None, features: Vec::new() }
    }

    /// One HTML file, which works without a network.
    pub fn page(&self) -> String {
        match &self.graph {
            Some(graph) => graph_page(&self.report, graph),
            None if !self.features.is_empty() => feature_page(&self.report, &self.features),
            None => page(&self.report),
        }
    }

    /// A picture for a paper.
    ///
    /// # Errors
    /// When there is nothing to draw, or too much for one picture.
    pub fn svg(&self, width: Width) -> Result<String, PictureError> {
        match &self.graph {
            Some(graph) => graph_svg(&self.report, graph, width),
            None => svg(&self.report, width),
        }
    }
}

/// One object: the report, and the details and features beside its entries.
impl Serialize for Found {
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

/// The cells of a lens.
///
/// Given by [`Lens`](crate::Lens), in [`Details::Lens`].
#[derive(Debug, Clone)]
pub struct LensDetails {
    /// Which number of a cell the report has.
    pub show: LensValue,
    /// The layers with their cells.
    pub layers: Vec<LensLayer>,
    /// The watched tokens.
    pub watch: Vec<u32>,
    pub(crate) vocabulary: Arc<Vocabulary>,
}

impl LensDetails {
    /// An object with `show` and `layers`.
    pub fn to_json(&self) -> Value {
        let text = |id: u32| shown(&self.vocabulary.token_bytes(id));
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
