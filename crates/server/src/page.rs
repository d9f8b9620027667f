//! Web page at `/`: its files, their ETags and its content security policy.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::LazyLock;

/// Policy that forbids inline scripts and styles, framing, and content from other servers.
pub(crate) const CONTENT_SECURITY_POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; \
    connect-src 'self'; img-src data:; base-uri 'none'; frame-ancestors 'none'; form-action 'none'";

/// File that belongs to the web page.
pub(crate) struct PageFile {
    path: &'static str,
    pub(crate) content_type: &'static str,
    pub(crate) body: &'static [u8],
    /// Entity tag including quotes, as in the header.
    pub(crate) etag: String,
}

/// Finds the file at a URL path.
pub(crate) fn file(path: &str) -> Option<&'static PageFile> {
    FILES.iter().find(|file| file.path == path)
}

static TEXTS: LazyLock<Vec<candle_gpt2_web::PageFile>> = LazyLock::new(candle_gpt2_web::files);

static FILES: LazyLock<Vec<PageFile>> = LazyLock::new(|| {
    let tagged = TEXTS.iter().map(|file| {
        // The tag only has to distinguish files from different builds.
        let mut hasher = DefaultHasher::new();
        file.text.hash(&mut hasher);
        let etag = format!("\"{:016x}\"", hasher.finish());
        PageFile { path: file.path, content_type: file.content_type, body: file.text.as_bytes(), etag }
    });
    tagged.collect()
});
