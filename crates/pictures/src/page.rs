//! A report as one HTML file: data, style and script inside it, no request to anywhere.
//!
//! The data is in a script element of type `application/json`, where only `<` has a meaning to HTML; the script puts every text
//! on the page as text. What it is drawn with is in `candle-gpt2-web`.

use candle_gpt2_web::{
    LEARNED_CSS, LEARNED_HTML, PARTS_CSS, REPORT_HTML, REPORT_PAGE_CSS, REPORT_PAGE_HTML, script,
};
use serde::Serialize;

use crate::packed::{Pattern, pack};
use crate::report::escaped;
use crate::{Axis, Metric, Report, Scale, Token, Width, svg};

/// What the script of the page reads: the report, with patterns of attention packed.
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

/// A report as one HTML file that asks for nothing: attention patterns as a grid of heads with a large view of one, two axes as a
/// heatmap, more with lists to choose from, one axis as bars or, where it is the text, as coloured tokens. A graph is below.
///
/// The fragment of the address holds the selection: `#layer=3&head=1&row=5&column=2`. Patterns of attention are rounded, to
/// 1/65535 in texts of at most 128 tokens, and the page says so. Numbers have three digits. A report that fails
/// [`Report::check`] gives a page that says so.
///
/// ```
/// use candle_gpt2_pictures::{Report, page};
///
/// let report = Report::new("example", "a < b".into(), "gpt2".into(), Vec::new(), false);
/// let html = page(&report);
/// assert!(html.contains("<title>a &lt; b"));
/// assert!(!html.contains("https://"), "a page that loads nothing");
/// ```
pub fn page(report: &Report) -> String {
    // What is too large for a picture is on no page either; the values are.
    let picture = report.graph.as_ref().and_then(|_| svg(report, Width::TwoColumns).ok()).unwrap_or_default();
    // HTML knows the element by its name.
    let picture = picture.replace(" xmlns=\"http://www.w3.org/2000/svg\"", "");
    filled(
        &report.title,
        &[REPORT_HTML, &picture].concat(),
        "",
        &script("parts/report-page.js"),
        &data(report),
    )
}

/// How a model learned, as one HTML file that asks for nothing: loss, heads, abilities and a sample of every checkpoint that was kept, and
/// a slider over them. `history` is the JSON that `story-probes history` prints.
///
/// ```
/// use candle_gpt2_pictures::learned_page;
///
/// let html = learned_page("How it learned", r#"[{"training": "rows", "step": 0}]"#);
/// assert!(html.contains("<title>How it learned") && !html.contains("https://"));
/// ```
pub fn learned_page(title: &str, history: &str) -> String {
    filled(title, LEARNED_HTML, LEARNED_CSS, &script("parts/learned-page.js"), history)
}

/// The page of one thing, with these elements, style, script and data.
pub(crate) fn filled(title: &str, elements: &str, style: &str, script: &str, data: &str) -> String {
    let data = data.replace('<', "\\u003c");
    // Between pairs of `@@` stand the names of what goes there.
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

/// A report as the JSON that `drawReport` of the module `parts/report.js` draws; patterns of attention are packed.
///
/// ```
/// use candle_gpt2_pictures::{PARTS_CSS, REPORT_HTML, Report, data, script};
///
/// let report = Report::new("example", "a title".into(), "gpt2".into(), Vec::new(), false);
/// let data = data(&report).replace('<', r"\u003c"); // so that no text in it can end the script
/// assert!(data.contains(r#""title":"a title""#));
/// // A page of one's own.
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
