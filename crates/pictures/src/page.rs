//! Renders a report as one HTML file with inline data, style and script that makes no requests.
//!
//! The data is in a script element of type `application/json`, in which only `<` is special to HTML. The
//! script inserts every string as text. Styles, elements and scripts are in `candle-gpt2-web`.

use candle_gpt2_web::{
    LEARNED_CSS, LEARNED_HTML, PARTS_CSS, REPORT_HTML, REPORT_PAGE_CSS, REPORT_PAGE_HTML, script,
};
use serde::Serialize;

use crate::packed::{Pattern, pack};
use crate::report::escaped;
use crate::{Axis, Metric, Report, Scale, Token, Width, svg};

/// Data for the page's script: the report, with attention patterns packed.
#[derive(Serialize)]
struct Data<'a> {
    schema: &'a str,
    title: &'a str,
    model: &'a str,
    tokens: &'a [Token],
    bos: bool,
    axes: &'a [Axis],
    #[serde(skip_serializing_if = "Option::is_none")]
    values: Option<&'a [Option<f32>]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pattern: Option<Pattern>,
    #[serde(skip_serializing_if = "<[_]>::is_empty")]
    texts: &'a [String],
    metric: Option<&'a Metric>,
    notes: Vec<String>,
    scale: Scale,
    bottom_up: bool,
}

/// Renders a report as one self-contained HTML file.
///
/// Attention patterns become a grid of heads with a large view of one. Two axes become a heatmap; more axes
/// add lists to choose from. One axis becomes bars, or colored tokens if it is the text. A graph is shown
/// below.
///
/// The URL fragment holds the selection: `#layer=3&head=1&row=5&column=2`. Attention patterns are rounded, to
/// 1/65535 in texts of at most 128 tokens, and the page states this. Numbers have three digits. The page of a
/// report that fails [`Report::check`] shows the error.
///
/// ```
/// use candle_gpt2_pictures::{Report, page};
///
/// let report = Report::new("example", "a < b".into(), "gpt2".into(), Vec::new(), false);
/// let html = page(&report);
/// assert!(html.contains("<title>a &lt; b"));
/// assert!(!html.contains("https://"), "the page loads nothing");
/// ```
pub fn page(report: &Report) -> String {
    // If the graph is too large to draw, the page shows the values without it.
    let picture = report.graph.as_ref().and_then(|_| svg(report, Width::TwoColumns).ok()).unwrap_or_default();
    // HTML recognizes inline SVG without a namespace.
    let picture = picture.replace(" xmlns=\"http://www.w3.org/2000/svg\"", "");
    fill_template(
        &report.title,
        &[REPORT_HTML, &picture].concat(),
        "",
        &script("parts/report-page.js"),
        &data(report),
    )
}

/// Renders the training history of a model as one self-contained HTML file.
///
/// The page shows loss, heads, abilities and a sample for every saved checkpoint, with a slider. `history` is
/// the JSON that `story-probes history` prints.
///
/// ```
/// use candle_gpt2_pictures::learned_page;
///
/// let html = learned_page("How it learned", r#"[{"training": "rows", "step": 0}]"#);
/// assert!(html.contains("<title>How it learned") && !html.contains("https://"));
/// ```
pub fn learned_page(title: &str, history: &str) -> String {
    fill_template(title, LEARNED_HTML, LEARNED_CSS, &script("parts/learned-page.js"), history)
}

/// Fills the page template with elements, style, script and data.
pub(crate) fn fill_template(title: &str, elements: &str, style: &str, script: &str, data: &str) -> String {
    let data = data.replace('<', "\\u003c");
    // Placeholders are names between pairs of `@@`.
    REPORT_PAGE_HTML
        .split("@@")
        .map(|piece| match piece {
            "report" => elements.to_owned(),
            "title" => escaped(title),
            "style" => [PARTS_CSS, REPORT_PAGE_CSS, style].concat(),
            "script" => script.to_owned(),
            "data" => data.clone(),
            html => html.to_owned(),
        })
        .collect()
}

/// Serializes a report as the JSON that `drawReport` in `parts/report.js` expects.
///
/// Attention patterns are packed.
///
/// ```
/// use candle_gpt2_pictures::{PARTS_CSS, REPORT_HTML, Report, data, script};
///
/// let report = Report::new("example", "a title".into(), "gpt2".into(), Vec::new(), false);
/// let data = data(&report).replace('<', r"\u003c"); // so that no text in it can end the script
/// assert!(data.contains(r#""title":"a title""#));
/// // A custom page.
/// let page = format!(
///     "<style>{PARTS_CSS}</style>{REPORT_HTML}\
///      <script>{}modules[\"parts/report.js\"].drawReport({data}, \"\", () => {{}});</script>",
///     script("parts/report.js")
/// );
/// assert!(page.ends_with("</script>"));
/// ```
pub fn data(report: &Report) -> String {
    let fault = report.check().err();
    let pattern = if fault.is_none() { pack(report) } else { None };
    let data = Data {
        schema: &report.schema,
        title: &report.title,
        model: &report.model,
        tokens: &report.tokens,
        bos: report.bos,
        axes: if fault.is_none() { &report.axes } else { &[] },
        values: pattern.is_none().then_some(if fault.is_none() { &report.values } else { &[] }),
        pattern,
        texts: if fault.is_none() { &report.texts } else { &[] },
        metric: report.metric.as_ref(),
        notes: report.notes.iter().cloned().chain(fault.map(|fault| fault.to_string())).collect(),
        scale: report.scale,
        bottom_up: report.is_bottom_up(),
    };
    serde_json::to_string(&data).unwrap_or_default()
}
