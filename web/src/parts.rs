//! Style sheets and HTML elements for pages that show reports and pages that generate text.

/// Style sheet for the parts: heatmap, bars, token line, table, head thumbnails and whole report.
pub static PARTS_CSS: &str = include_str!("../parts/parts.css");
/// Style sheet for pages that generate text, for use after [`PARTS_CSS`].
///
/// It covers buttons, fields, settings, choices and the steps of a head.
pub static WRITING_CSS: &str =
    concat!(include_str!("../parts/writing.css"), include_str!("../parts/head.css"));
/// Elements that `headSteps` in `parts/head.js` draws into.
///
/// A page that shows the steps of a head contains them once, along with the [`script`](crate::script) of that
/// module.
pub static HEAD_HTML: &str = include_str!("../parts/head.html");
/// Elements that `drawReport` in `parts/report.js` draws into; a page with reports contains them once.
pub static REPORT_HTML: &str = include_str!("../parts/report.html");
/// Elements that `drawLearned` in `parts/learned.js` draws into.
///
/// They are a slider over the checkpoints of a training run, and the measurements for each checkpoint. The
/// page also needs the [`script`](crate::script) of that module.
pub static LEARNED_HTML: &str = include_str!("../parts/learned.html");
/// Style sheet for [`LEARNED_HTML`], for use after [`PARTS_CSS`].
pub static LEARNED_CSS: &str = include_str!("../parts/learned.css");
/// Elements that `drawGraph` in `parts/graph.js` draws into.
///
/// They show an attribution graph, its selected node and its pinned nodes. The page also needs the
/// [`script`](crate::script) of that module.
pub static GRAPH_HTML: &str = include_str!("../parts/graph.html");
/// Style sheet for [`GRAPH_HTML`], for use after [`PARTS_CSS`].
pub static GRAPH_CSS: &str = include_str!("../parts/graph.css");
/// Elements that `drawFeature` in `parts/feature.js` draws into.
///
/// They show a dictionary's feature and texts in which it is active. Place them after [`REPORT_HTML`] or
/// [`GRAPH_HTML`].
pub static FEATURE_HTML: &str = include_str!("../parts/feature.html");
/// Style sheet for [`FEATURE_HTML`], for use after [`PARTS_CSS`].
pub static FEATURE_CSS: &str = include_str!("../parts/feature.css");
/// Template for a page with one report.
///
/// The placeholders `title`, `style`, `report`, `data` and `script` are between pairs of `@@`. The scripts
/// are those that [`script`](crate::script) builds from `parts/report-page.js`, `parts/feature-page.js`,
/// `parts/graph-page.js` and `parts/learned-page.js`.
pub static REPORT_PAGE_HTML: &str = include_str!("../parts/report-page.html");
/// Style sheet for [`REPORT_PAGE_HTML`], for use after [`PARTS_CSS`].
pub static REPORT_PAGE_CSS: &str = include_str!("../parts/report-page.css");
