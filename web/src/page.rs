//! The page as a server gives it out.

use crate::{
    FEATURE_CSS, FEATURE_JS, GRAPH_CSS, GRAPH_HTML, GRAPH_JS, HEAD_HTML, LEARNED_CSS, LEARNED_JS, PARTS_CSS,
    PARTS_JS, REPORT_HTML, WRITING_CSS, WRITING_JS,
};

/// A file of the page, one of [`files`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PageFile {
    /// Its path on the server, such as `/page.js`.
    pub path: &'static str,
    /// Its `Content-Type`.
    pub content_type: &'static str,
    /// Its text.
    pub text: String,
}

/// The files of the page for a server that answers `v1/models`, `v1/completions`, `tokenize` and `look/…` beside it; the first
/// is the page itself. They hold no script and no style inside HTML, and ask for nothing from elsewhere.
///
/// ```
/// let files = candle_gpt2_web::files();
/// assert_eq!(files[0].path, "/");
/// for file in &files[1..] {
///     assert!(files[0].text.contains(&format!("=\"{}\"", &file.path[1..])), "{}", file.path);
/// }
/// ```
pub fn files() -> Vec<PageFile> {
    // Between pairs of `@@` are the names of what goes there.
    let index = include_str!("../index.html").split("@@").enumerate().map(|(n, piece)| match piece {
        "transport" => "server",
        "report" => REPORT_HTML,
        "head" => HEAD_HTML,
        "graph" => GRAPH_HTML,
        "feature" => include_str!("../parts/feature.html"),
        _ if n % 2 == 1 => "", // what the page in a file has beside
        html => html,
    });
    let page = PageFile { path: "/", content_type: "text/html; charset=utf-8", text: index.collect() };
    let others = FILES.map(|(path, text)| {
        let content_type = match path.ends_with(".css") {
            true => "text/css; charset=utf-8",
            false => "text/javascript; charset=utf-8",
        };
        PageFile { path, content_type, text: text.to_owned() }
    });
    std::iter::once(page).chain(others).collect()
}

/// Two files each of which are in the program once, as one text.
static STYLES: (&str, &str) = WRITING_CSS.split_at(include_str!("../parts/writing.css").len());
static PARTS: (&str, &str) = PARTS_JS.split_at(include_str!("../parts/parts.js").len());
static WRITING: (&str, &str) = WRITING_JS.split_at(include_str!("../parts/writing.js").len());

/// What the page loads; its transport is that of a server.
static FILES: [(&str, &str); 20] = [
    ("/parts.css", PARTS_CSS),
    ("/writing.css", STYLES.0),
    ("/head.css", STYLES.1),
    ("/learned.css", LEARNED_CSS),
    ("/feature.css", FEATURE_CSS),
    ("/graph.css", GRAPH_CSS),
    ("/page.css", include_str!("../page.css")),
    ("/parts.js", PARTS.0),
    ("/report.js", PARTS.1),
    ("/writing.js", WRITING.0),
    ("/head.js", WRITING.1),
    ("/learned.js", LEARNED_JS),
    ("/feature.js", FEATURE_JS),
    ("/graph.js", GRAPH_JS),
    ("/command.js", include_str!("../command.js")),
    ("/model.js", include_str!("../model.js")),
    ("/compression.js", include_str!("../compression.js")),
    ("/tour.js", include_str!("../tour.js")),
    ("/transport.js", include_str!("../server.js")),
    ("/page.js", include_str!("../page.js")),
];

#[cfg(test)]
mod tests {
    use super::*;

    /// What the model wrote is only ever put on the page as text.
    #[test]
    fn no_script_makes_html_from_text() {
        for PageFile { path, text, .. } in files() {
            for name in
                ["innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function"]
            {
                assert!(!text.contains(name), "{path}: {name}");
            }
        }
    }

    /// A policy without `unsafe-inline` lets the page run.
    #[test]
    fn the_page_has_no_script_and_no_style_inside() {
        let html = &files()[0].text;
        assert!(!html.contains("@@") && !html.contains("<style"), "{html}");
        assert!(!html.contains(" style=") && !html.contains(" onclick"), "{html}");
        assert_eq!(html.matches("<script").count(), html.matches("<script src=").count());
        let own = html
            .split("=\"")
            .filter_map(|part| part.split_once('"'))
            .filter(|(name, _)| name.ends_with(".js") || name.ends_with(".css"));
        assert_eq!(own.count(), FILES.len());
    }
}
