//! What reports, and pages that write with a model, are drawn with.

/// Style of the parts: heatmap, bars, line of tokens, table, small heads, a whole report.
pub static PARTS_CSS: &str = include_str!("../parts/parts.css");
/// Script of the parts: one object `parts` of functions that decode patterns and draw; `parts.report` draws a report into
/// [`REPORT_HTML`].
pub static PARTS_JS: &str = concat!(include_str!("../parts/parts.js"), include_str!("../parts/report.js"));
/// Style of pages that write with a model: their buttons, fields, settings and choices, and the steps of a head. It comes after
/// [`PARTS_CSS`].
pub static WRITING_CSS: &str =
    concat!(include_str!("../parts/writing.css"), include_str!("../parts/head.css"));
/// Script of pages that write with a model, after [`PARTS_JS`]: further functions of `parts`, for the tokens of a text and their
/// alternatives, for settings, and `parts.head` for one attention weight step by step.
pub static WRITING_JS: &str = concat!(include_str!("../parts/writing.js"), include_str!("../parts/head.js"));
/// Elements that `parts.head.view` draws into, after [`PARTS_JS`]: a page that shows the steps of a head has this once.
pub static HEAD_HTML: &str = include_str!("../parts/head.html");
/// Elements that `parts.report` draws into: a page that shows reports has this once.
pub static REPORT_HTML: &str = include_str!("../parts/report.html");
/// Elements that `parts.learned` of [`LEARNED_JS`] draws into, as into [`REPORT_HTML`] a report: a slider over the checkpoints of a
/// training, and what was measured of each.
pub static LEARNED_HTML: &str = include_str!("../parts/learned.html");
/// Their style, after [`PARTS_CSS`].
pub static LEARNED_CSS: &str = include_str!("../parts/learned.css");
/// Their script, after [`PARTS_JS`].
pub static LEARNED_JS: &str = include_str!("../parts/learned.js");

/// Elements that `parts.graph` of [`GRAPH_JS`] draws into, in place of [`REPORT_HTML`]: an attribution graph, its chosen node, and the
/// pinned ones.
pub static GRAPH_HTML: &str = include_str!("../parts/graph.html");
/// Their style, after [`PARTS_CSS`].
pub static GRAPH_CSS: &str = include_str!("../parts/graph.css");
/// Their script, after [`PARTS_JS`].
pub static GRAPH_JS: &str = include_str!("../parts/graph.js");

/// The elements of [`REPORT_HTML`], and those that `parts.feature` of [`FEATURE_JS`] draws into: a feature of a dictionary, and texts
/// that it is active in.
pub static FEATURE_HTML: &str =
    concat!(include_str!("../parts/report.html"), include_str!("../parts/feature.html"));
/// Their style, after [`PARTS_CSS`].
pub static FEATURE_CSS: &str = include_str!("../parts/feature.css");
/// Their script, after [`PARTS_JS`].
pub static FEATURE_JS: &str = include_str!("../parts/feature.js");

/// The page of one report, drawn by [`PARTS_JS`], with `title`, `style`, `report`, `data` and `script` between pairs of `@@`.
pub static REPORT_PAGE_HTML: &str = include_str!("../parts/report-page.html");
/// Its style, after [`PARTS_CSS`].
pub static REPORT_PAGE_CSS: &str = include_str!("../parts/report-page.css");
/// Its script, after [`PARTS_JS`].
pub static REPORT_PAGE_JS: &str = include_str!("../parts/report-page.js");
/// The script of a page of how one model learned, in place of [`REPORT_PAGE_JS`] and after [`PARTS_JS`] and
/// [`LEARNED_JS`]; [`LEARNED_HTML`] is its report.
pub static LEARNED_PAGE_JS: &str = include_str!("../parts/learned-page.js");
/// The script of a page of one attribution graph, in place of [`REPORT_PAGE_JS`] and after [`PARTS_JS`] and [`GRAPH_JS`]; [`GRAPH_HTML`]
/// is its report.
pub static GRAPH_PAGE_JS: &str = include_str!("../parts/graph-page.js");
/// The script of a page of features, in place of [`REPORT_PAGE_JS`] and after [`PARTS_JS`] and [`FEATURE_JS`]; [`FEATURE_HTML`] has its
/// report.
pub static FEATURE_PAGE_JS: &str = include_str!("../parts/feature-page.js");
