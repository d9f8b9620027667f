//! Styles and HTML elements of pages that show reports and of pages that generate text.

/// Style of the parts: heatmap, bars, token line, table, small heads and whole report.
pub static PARTS_CSS: &str = include_str!("../parts/parts.css");
/// Style of pages that generate text, for use after [`PARTS_CSS`].
///
/// It covers buttons, fields, settings, choices and the steps of a head.
pub static WRITING_CSS: &str =
    concat!(include_str!("../parts/writing.css"), include_str!("../parts/head.css"));
/// Elements that `headSteps` of `parts/head.js` draws into.
///
/// A page that shows the steps of a head contains them once, along with the [`script`](crate::script) of that
/// module.
pub static HEAD_HTML: &str = include_str!("../parts/head.html");
/// Elements that `drawReport` of `parts/report.js` draws into; a page with reports contains them once.
pub static REPORT_HTML: &str = include_str!("../parts/report.html");
/// Elements that `drawLearned` of `parts/learned.js` draws into.
///
/// They are a slider over the checkpoints of a training run, and the measurements of each. The page also
/// needs the [`script`](crate::script) of that module.
pub static LEARNED_HTML: &str = include_str!("../parts/learned.html");
/// Style of [`LEARNED_HTML`], for use after [`PARTS_CSS`].
pub static LEARNED_CSS: &str = include_str!("../parts/learned.css");
/// Elements that `drawGraph` of `parts/graph.js` draws into.
///
/// They show an attribution graph, its selected node and its pinned nodes. The page also needs the
/// [`script`](crate::script) of that module.
pub static GRAPH_HTML: &str = include_str!("../parts/graph.html");
/// Style of [`GRAPH_HTML`], for use after [`PARTS_CSS`].
pub static GRAPH_CSS: &str = include_str!("../parts/graph.css");
/// Elements that `drawFeature` of `parts/feature.js` draws into.
///
/// They show a dictionary's feature and texts in which it is active. Place them after [`REPORT_HTML`] or
/// [`GRAPH_HTML`].
pub static FEATURE_HTML: &str = include_str!("../parts/feature.html");
/// Style of [`FEATURE_HTML`], for use after [`PARTS_CSS`].
pub static FEATURE_CSS: &str = include_str!("../parts/feature.css");
/// Template for the page of one report.
///
/// The placeholders `title`, `style`, `report`, `data` and `script` are between pairs of `@@`. The scripts
/// are those that [`script`](crate::script) builds from `parts/report-page.js`, `parts/feature-page.js`,
/// `parts/graph-page.js` and `parts/learned-page.js`.
pub static REPORT_PAGE_HTML: &str = include_str!("../parts/report-page.html");
/// Style of [`REPORT_PAGE_HTML`], for use after [`PARTS_CSS`].
pub static REPORT_PAGE_CSS: &str = include_str!("../parts/report-page.css");
