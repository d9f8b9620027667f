//! The page at `/`: its files, which stand in the program, and what a browser may do with them.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::LazyLock;

use candle_gpt2_pictures::{HEAD_HTML, PARTS_CSS, PARTS_JS, REPORT_HTML, WRITING_CSS, WRITING_JS};

/// Nothing from elsewhere, no script and no style inside the document, no requests but to this server, and no frame around it.
pub(crate) const CONTENT_SECURITY_POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; \
    connect-src 'self'; img-src data:; base-uri 'none'; frame-ancestors 'none'; form-action 'none'";

const HTML: &str = "text/html; charset=utf-8";
const CSS: &str = "text/css; charset=utf-8";
const SCRIPT: &str = "text/javascript; charset=utf-8";

/// A file of the page.
pub(crate) struct PageFile {
    pub(crate) content_type: &'static str,
    pub(crate) body: &'static [u8],
    /// With its quotes, as the header has it.
    pub(crate) etag: String,
}

/// The file at this path of the address.
pub(crate) fn file(path: &str) -> Option<&'static PageFile> {
    FILES.iter().find(|(of, _)| *of == path).map(|(_, file)| file)
}

static INDEX: LazyLock<String> = LazyLock::new(|| {
    include_str!("index.html").replace("@@report@@", REPORT_HTML).replace("@@head@@", HEAD_HTML)
});

static FILES: LazyLock<[(&str, PageFile); 9]> = LazyLock::new(|| {
    [
        ("/", page_file(HTML, &INDEX)),
        ("/page.css", page_file(CSS, include_str!("page.css"))),
        ("/page.js", page_file(SCRIPT, include_str!("page.js"))),
        ("/editor.js", page_file(SCRIPT, include_str!("editor.js"))),
        ("/request.js", page_file(SCRIPT, include_str!("request.js"))),
        ("/parts.css", page_file(CSS, PARTS_CSS)),
        ("/parts.js", page_file(SCRIPT, PARTS_JS)),
        ("/writing.css", page_file(CSS, WRITING_CSS)),
        ("/writing.js", page_file(SCRIPT, WRITING_JS)),
    ]
});

fn page_file(content_type: &'static str, text: &'static str) -> PageFile {
    // It need only tell one build's file from another's.
    let mut hasher = DefaultHasher::new();
    text.hash(&mut hasher);
    PageFile { content_type, body: text.as_bytes(), etag: format!("\"{:016x}\"", hasher.finish()) }
}
