//! Features of a dictionary: what circuit-tracer's frontend fetches for each, and a page of them.

use candle_gpt2_web::{FEATURE_CSS, FEATURE_HTML, REPORT_HTML, script};
use serde::Serialize;

use crate::Report;
use crate::page::{data, filled};

/// A feature with the texts that it is active in. As JSON it is what circuit-tracer's frontend reads.
///
/// ```
/// use candle_gpt2_pictures::{Axis, FeatureCard, FeatureHistogram, FeatureQuantile, FeatureText, Report, feature_page};
///
/// let text = FeatureText {
///     tokens: vec!["a".into(), " red".into(), " ball".into()],
///     tokens_acts_list: vec![0.0, 2.5, 0.0],
///     train_token_ind: 1,
///     is_repeated_datapoint: false,
/// };
/// let card = FeatureCard {
///     index: 17,
///     density: 0.01,
///     act_min: 0.5,
///     act_max: 2.5,
///     histogram: FeatureHistogram { bin_width: 0.25, counts: vec![0, 0, 3, 0, 0, 0, 0, 0, 0, 0, 1] },
///     top_logits: vec![" ball".into()],
///     bottom_logits: vec![" the".into()],
///     examples_quantiles: vec![FeatureQuantile { quantile_name: "Top activations".into(), examples: vec![text] }],
/// };
/// let mut report = Report::new("features", "features of a hook point".into(), "gpt2".into(), Vec::new(), false);
/// report.axes = vec![Axis::numbers("feature", [17])];
/// report.values = vec![Some(0.01)];
/// assert!(feature_page(&report, &[card]).contains("\"tokens_acts_list\":[0.0,2.5,0.0]"));
/// ```
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct FeatureCard {
    /// Its number in the dictionary.
    pub index: usize,
    /// Share of the tokens at which it is active, from 0 to 1.
    pub density: f32,
    /// Its least activation that is not 0.
    pub act_min: f32,
    /// Its largest activation.
    pub act_max: f32,
    /// How often it has which activation.
    pub histogram: FeatureHistogram,
    /// Tokens that it makes more probable by itself, the first the most; empty where it adds nothing to the residual stream.
    pub top_logits: Vec<String>,
    /// Tokens that it makes less probable, the first the most.
    pub bottom_logits: Vec<String>,
    /// Texts by how strong it is in them.
    pub examples_quantiles: Vec<FeatureQuantile>,
}

/// How often a feature has which activation. Part of a [`FeatureCard`], which has an example.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct FeatureHistogram {
    /// Width of a bin; the first begins at 0.
    pub bin_width: f32,
    /// Tokens in each bin.
    pub counts: Vec<u64>,
}

/// Texts in which a feature is about equally strong. Part of a [`FeatureCard`], which has an example.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct FeatureQuantile {
    /// Which texts these are.
    pub quantile_name: String,
    /// The texts, the strongest first.
    pub examples: Vec<FeatureText>,
}

/// A part of a text. Part of a [`FeatureCard`], which has an example.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct FeatureText {
    /// Its tokens.
    pub tokens: Vec<String>,
    /// The activation at each of them.
    pub tokens_acts_list: Vec<f32>,
    /// The place of the token that it was chosen for.
    pub train_token_ind: usize,
    /// Whether the same text is among those before it.
    pub is_repeated_datapoint: bool,
}

/// A report and features as one HTML file that asks for nothing. The report's first axis, or the one before the last, are the features:
/// the one that is chosen in it is shown, and the fragment of the address keeps it.
///
/// See [`FeatureCard`] for an example.
pub fn feature_page(report: &Report, features: &[FeatureCard]) -> String {
    let features = serde_json::to_string(features).unwrap_or_default();
    let data = format!(r#"{{"report":{},"features":{features}}}"#, data(report));
    let elements = [REPORT_HTML, FEATURE_HTML].concat();
    filled(&report.title, &elements, FEATURE_CSS, &script("parts/feature-page.js"), &data)
}
