//! Page files for a server to serve, and modules bundled into one script.

use crate::{GRAPH_HTML, HEAD_HTML, REPORT_HTML};

/// One of the page's files, as returned by [`files`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PageFile {
    /// Path on the server, such as `/page.js`.
    pub path: &'static str,
    /// `Content-Type` of the file.
    pub content_type: &'static str,
    /// Contents of the file.
    pub text: String,
}

/// Returns the page's files for a server to serve; the first file is the page itself.
///
/// The server must also provide `v1/models`, `v1/completions`, `tokenize` and `look/…` next to the page. The
/// HTML has no inline script or style, and the files load nothing from elsewhere.
///
/// ```
/// let files = candle_gpt2_web::files();
/// assert_eq!(files[0].path, "/");
/// assert!(files[0].text.contains("server-page.js"));
/// assert!(files.iter().any(|file| file.path == "/server-page.js"));
/// ```
pub fn files() -> Vec<PageFile> {
    // Placeholders are names between pairs of `@@`.
    let index = include_str!("../index.html").split("@@").enumerate().map(|(n, piece)| match piece {
        "transport" => "server",
        "script" => SERVER_PAGE,
        "report" => REPORT_HTML,
        "head" => HEAD_HTML,
        "graph" => GRAPH_HTML,
        "feature" => include_str!("../parts/feature.html"),
        _ if n % 2 == 1 => "", // elements of the single-file page
        html => html,
    });
    let page = PageFile { path: "/", content_type: "text/html; charset=utf-8", text: index.collect() };
    let mut modules = Vec::new();
    collect(SERVER_PAGE, &mut modules);
    let file =
        |path: &'static str, kind, text: &str| PageFile { path, content_type: kind, text: text.to_owned() };
    let styles = STYLES.iter().map(|&(path, text)| file(path, "text/css; charset=utf-8", text));
    let scripts = MODULES.iter().filter(|(path, _)| modules.contains(&&path[1..]));
    let scripts = scripts.map(|&(path, text)| file(path, "text/javascript; charset=utf-8", text));
    std::iter::once(page).chain(styles).chain(scripts).collect()
}

/// Bundles a module and its imports into one classic script.
///
/// A page opened from a file cannot load modules. Each module becomes an entry in the object `modules`,
/// keyed by its path. A module may import names with one statement per line, and may export functions,
/// classes and constants. Modules must not import each other in a cycle.
///
/// ```
/// let script = candle_gpt2_web::script("parts/report.js");
/// assert!(script.contains(r#"modules["parts/colors.js"] = "#));
/// assert!(!script.contains("\nimport ") && !script.contains("\nexport "));
/// ```
///
/// # Panics
///
/// If no module has this name.
pub fn script(module: &str) -> String {
    let mut paths = Vec::new();
    collect(module, &mut paths);
    let mut script = "\"use strict\";\nconst modules = {};\n".to_owned();
    for path in paths {
        let mut names = Vec::new();
        script += &format!("modules[{path:?}] = (() => {{\n");
        let text = without_comments(text_of(path));
        for line in text.lines().filter(|line| !line.trim().is_empty()) {
            if let Some((list, from)) = import(path, line) {
                if !list.is_empty() {
                    script += &format!("const {} = modules[{from:?}];", list.replace(" as ", ": "));
                }
            } else if let Some(declared) = line.strip_prefix("export ") {
                let words =
                    declared.split(|character: char| !character.is_alphanumeric() && character != '_');
                names.extend(words.filter(|word| !word.is_empty()).find(|word| !KEYWORDS.contains(word)));
                script += declared;
            } else {
                script += line;
            }
            script.push('\n');
        }
        script += &format!("return {{ {} }};\n}})();\n", names.join(", "));
    }
    script
}

/// Keywords before the name in an exported declaration.
const KEYWORDS: [&str; 5] = ["async", "function", "class", "const", "let"];

/// Removes block comments, which contain types, and line comments on lines of their own.
fn without_comments(text: &str) -> String {
    let mut pieces = text.split("/**");
    let first = pieces.next().unwrap_or_default().to_owned();
    let code =
        pieces.fold(first, |code, piece| code + piece.split_once("*/").map_or(piece, |(_, rest)| rest));
    let lines = code.lines().filter(|line| !line.trim_start().starts_with("//"));
    lines.flat_map(|line| [line.trim_end(), "\n"]).collect()
}

/// Returns the names that a line imports, and the path of the imported module.
fn import(path: &str, line: &str) -> Option<(String, String)> {
    let rest = line.strip_prefix("import ")?;
    let (list, from) = rest.split_once(" from ").unwrap_or(("", rest));
    let folder = path.rsplit_once('/').map_or(String::new(), |(folder, _)| format!("{folder}/"));
    Some((list.to_owned(), folder + from.trim_start_matches("\"./").trim_end_matches("\";")))
}

/// Adds the paths of a module's imports, and then its own path.
fn collect(path: &str, paths: &mut Vec<&'static str>) {
    if paths.contains(&path) {
        return;
    }
    for (_, from) in text_of(path).lines().filter_map(|line| import(path, line)) {
        collect(&from, paths);
    }
    paths.extend(MODULES.iter().map(|(known, _)| &known[1..]).find(|known| *known == path));
}

fn text_of(path: &str) -> &'static str {
    let found = MODULES.iter().find(|(known, _)| &known[1..] == path);
    found.unwrap_or_else(|| panic!("{path} is not a module of the page")).1
}

const SERVER_PAGE: &str = "server-page.js";

macro_rules! texts {
    ($($path:literal)*) => { &[$((concat!("/", $path), include_str!(concat!("../", $path)))),*] };
}

static STYLES: &[(&str, &str)] = texts!(
    "parts/parts.css" "parts/writing.css" "parts/head.css" "parts/learned.css" "parts/feature.css" "parts/graph.css" "page.css"
);

static MODULES: &[(&str, &str)] = texts!(
    "cache.js" "command.js" "failure.js" "generate.js" "model.js" "next.js" "page.js" "paper.js" "picker.js" "reproduce.js"
    "score.js" "server-page.js" "server.js" "settings.js" "state.js" "status.js" "tour.js" "undo.js" "views.js"
    "parts/bars.js" "parts/colors.js" "parts/controls.js" "parts/dom.js" "parts/feature-page.js" "parts/feature.js"
    "parts/graph-page.js" "parts/graph.js" "parts/head-example.js" "parts/head.js" "parts/heads.js" "parts/heatmap.js"
    "parts/learned-page.js" "parts/learned.js" "parts/report-page.js" "parts/report.js" "parts/svg.js" "parts/tokens.js"
);

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks that text from a model is never inserted into the page as HTML.
    #[test]
    fn scripts_never_create_html_from_text() {
        for PageFile { path, text, .. } in files() {
            for name in
                ["innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function"]
            {
                assert!(!text.contains(name), "{path}: {name}");
            }
        }
    }

    /// Checks that the page works under a content security policy without `unsafe-inline`.
    #[test]
    fn page_has_no_inline_script_or_style() {
        let files = files();
        let html = &files[0].text;
        assert!(!html.contains("@@") && !html.contains("<style"), "{html}");
        assert!(!html.contains(" style=") && !html.contains(" onclick"), "{html}");
        assert_eq!(html.matches("<script").count(), 1);
        let linked = |path: &str| html.contains(&format!("=\"{}\"", &path[1..]));
        assert!(files[1..].iter().filter(|file| file.path.ends_with(".css")).all(|file| linked(file.path)));
    }

    #[test]
    fn script_contains_each_module_once_after_its_imports() {
        let script = script("server-page.js");
        let offsets: Vec<_> = ["parts/dom.js", "state.js", "generate.js", "server-page.js"]
            .map(|path| script.find(&format!("modules[{path:?}] = ")).unwrap())
            .into();
        assert!(offsets.is_sorted());
        assert_eq!(script.matches("modules[\"state.js\"] = ").count(), 1);
        assert!(script.contains("return { dark, find, element, "), "the names of async and plain exports");
    }

    /// Checks that each export declares a single name, as `script` requires.
    #[test]
    fn modules_are_short_typed_and_export_names() {
        for (path, text) in MODULES {
            assert!(text.lines().count() <= 400, "{path}");
            assert!(text.starts_with("// @ts-check\n"), "{path}: missing `@ts-check`");
            for line in text.lines().filter(|line| line.starts_with("export ")) {
                let declared = line.replacen("async ", "", 1);
                let known = ["const ", "function ", "class "].iter().find_map(|kind| {
                    declared.strip_prefix("export ").and_then(|rest| rest.strip_prefix(kind))
                });
                assert!(known.is_some_and(|name| !name.starts_with(['[', '{'])), "{path}: {line}");
            }
        }
    }
}
