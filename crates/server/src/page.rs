//! The page at `/`: what a browser may do with its files, and their tags.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::LazyLock;

/// Nothing from elsewhere, no script and no style inside the document, no requests but to this server, and no frame around it.
pub(crate) const CONTENT_SECURITY_POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; \
    connect-src 'self'; img-src data:; base-uri 'none'; frame-ancestors 'none'; form-action 'none'";

/// A file of the page.
pub(crate) struct PageFile {
    path: &'static str,
    pub(crate) content_type: &'static str,
    pub(crate) body: &'static [u8],
    /// With its quotes, as the header has it.
    pub(crate) etag: String,
}

/// The file at this path of the address.
pub(crate) fn file(path: &str) -> Option<&'static PageFile> {
    FILES.iter().find(|file| file.path == path)
}

static TEXTS: LazyLock<Vec<candle_gpt2_web::PageFile>> = LazyLock::new(candle_gpt2_web::files);

static FILES: LazyLock<Vec<PageFile>> = LazyLock::new(|| {
    let tagged = TEXTS.iter().map(|file| {
        // It need only tell one build's file from another's.
        let mut hasher = DefaultHasher::new();
        file.text.hash(&mut hasher);
        let etag = format!("\"{:016x}\"", hasher.finish());
        PageFile { path: file.path, content_type: file.content_type, body: file.text.as_bytes(), etag }
    });
    tagged.collect()
});
