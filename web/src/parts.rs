//! Styles, elements and scripts that reports, and pages that write with a model, are drawn with.

/// Style of the parts: heatmap, bars, line of tokens, table, small heads, a whole report.
pub static PARTS_CSS: &str = include_str!("../parts/parts.css");
/// Style of pages that write with a model: their buttons, fields, settings and choices, and the steps of a head. It comes after
/// [`PARTS_CSS`].
pub static WRITING_CSS: &str =
    concat!(include_str!("../parts/writing.css"), include_str!("../parts/head.css"));
/// Elements that `headSteps` of `parts/head.js` draws into: a page that shows the steps of a head has this once, and the
/// [`script`](crate::script) of that module.
pub static HEAD_HTML: &str = include_str!("../parts/head.html");
/// Elements that `drawReport` of `parts/report.js` draws into: a page that shows reports has this once.
pub static REPORT_HTML: &str = include_str!("../parts/report.html");
/// Elements that `drawLearned` of `parts/learned.js` draws into: a slider over the checkpoints of a training, and what was
/// measured of each, by the [`script`](crate::script) of that module.
pub static LEARNED_HTML: &str = include_str!("../parts/learned.html");
/// Style of [`LEARNED_HTML`], after [`PARTS_CSS`].
pub static LEARNED_CSS: &str = include_str!("../parts/learned.css");
/// Elements that `drawGraph` of `parts/graph.js` draws into, by the [`script`](crate::script) of that module: an attribution graph, its
/// chosen node, and the pinned ones.
pub static GRAPH_HTML: &str = include_str!("../parts/graph.html");
/// Style of [`GRAPH_HTML`], after [`PARTS_CSS`].
pub static GRAPH_CSS: &str = include_str!("../parts/graph.css");
/// Elements that `drawFeature` of `parts/feature.js` draws into, after [`REPORT_HTML`] or [`GRAPH_HTML`]: a feature of a dictionary,
/// and texts in which it is active.
pub static FEATURE_HTML: &str = include_str!("../parts/feature.html");
/// Style of [`FEATURE_HTML`], after [`PARTS_CSS`].
pub static FEATURE_CSS: &str = include_str!("../parts/feature.css");
/// The page of one report, with `title`, `style`, `report`, `data` and `script` between pairs of `@@`. Its scripts are those
/// that [`script`](crate::script) makes of `parts/report-page.js`, `parts/feature-page.js`, `parts/graph-page.js` and `parts/learned-page.js`.
pub static REPORT_PAGE_HTML: &str = include_str!("../parts/report-page.html");
/// Style of [`REPORT_PAGE_HTML`], after [`PARTS_CSS`].
pub static REPORT_PAGE_CSS: &str = include_str!("../parts/report-page.css");
