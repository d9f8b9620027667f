//! Features of a dictionary: the JSON that circuit-tracer's frontend fetches, and a page.

use candle_gpt2_web::{FEATURE_CSS, FEATURE_HTML, REPORT_HTML, script};
use serde::Serialize;

use crate::Report;
use crate::page::{data, fill_template};

/// A feature with example texts, in the JSON format of circuit-tracer's frontend.
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
    /// Index in the dictionary.
    pub index: usize,
    /// Fraction of the tokens at which the feature is active, from 0 to 1.
    pub density: f32,
    /// Smallest activation above 0.
    pub act_min: f32,
    /// Largest activation.
    pub act_max: f32,
    /// Histogram of the activations.
    pub histogram: FeatureHistogram,
    /// Tokens that the feature makes more probable on its own, strongest first.
    ///
    /// The list is empty if the feature adds nothing to the residual stream.
    pub top_logits: Vec<String>,
    /// Tokens that the feature makes less probable, strongest first.
    pub bottom_logits: Vec<String>,
    /// Example texts, grouped by activation.
    pub examples_quantiles: Vec<FeatureQuantile>,
}

/// Histogram of a feature's activations.
///
/// Part of a [`FeatureCard`], which has an example.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct FeatureHistogram {
    /// Width of a bin; the first starts at 0.
    pub bin_width: f32,
    /// Number of tokens in each bin.
    pub counts: Vec<u64>,
}

/// Texts in which a feature has similar activations.
///
/// Part of a [`FeatureCard`], which has an example.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct FeatureQuantile {
    /// Name of the group.
    pub quantile_name: String,
    /// Texts, strongest first.
    pub examples: Vec<FeatureText>,
}

/// An excerpt of example text.
///
/// Part of a [`FeatureCard`], which has an example.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct FeatureText {
    /// Tokens of the excerpt.
    pub tokens: Vec<String>,
    /// Activation at each token.
    pub tokens_acts_list: Vec<f32>,
    /// Index of the token for which the excerpt was chosen.
    pub train_token_ind: usize,
    /// Whether an earlier group contains the same text.
    pub is_repeated_datapoint: bool,
}

/// Renders a report and its features as one self-contained HTML file.
///
/// The report's first axis, or the one before the last, lists the features. The page shows the selected
/// feature, and the URL fragment holds the selection.
///
/// See [`FeatureCard`] for an example.
pub fn feature_page(report: &Report, features: &[FeatureCard]) -> String {
    let features = serde_json::to_string(features).unwrap_or_default();
    let data = format!(r#"{{"report":{},"features":{features}}}"#, data(report));
    let elements = [REPORT_HTML, FEATURE_HTML].concat();
    fill_template(&report.title, &elements, FEATURE_CSS, &script("parts/feature-page.js"), &data)
}
