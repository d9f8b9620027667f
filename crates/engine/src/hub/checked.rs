//! Validation of untrusted text from the Hub before it becomes part of a path.

/// Maximum length of an ETag or commit, in bytes.
#[cfg(feature = "hub")]
const MAX_KEY_BYTES: usize = 128;
/// Maximum length of a file path, in bytes.
const MAX_PATH_BYTES: usize = 1024;
const MAX_COMPONENTS: usize = 16;
/// Maximum length of a path component, in bytes; the limit of most file systems.
const MAX_COMPONENT_BYTES: usize = 255;

/// An ETag or commit that is safe as one path component in the cache.
#[cfg(feature = "hub")]
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct CacheKey(String);

#[cfg(feature = "hub")]
impl CacheKey {
    /// Description of valid text, for error messages.
    pub(super) const EXPECTED: &str = "1 to 128 characters from [0-9A-Za-z._-]";

    /// Wraps the text, or returns `None` if it is unsafe in a path.
    pub(super) fn new(text: &str) -> Option<Self> {
        let is_plain = text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte));
        let is_safe = is_plain && text.len() <= MAX_KEY_BYTES && is_safe_component(text);
        is_safe.then(|| Self(text.to_owned()))
    }

    pub(super) fn as_str(&self) -> &str {
        &self.0
    }
}

/// Relative path of a file in a repository, with `/` as separator.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct FilePath(String);

impl FilePath {
    /// Wraps the path; `None` if it is absolute, escapes its folder, or is unsafe on any system.
    pub(super) fn new(text: &str) -> Option<Self> {
        let is_plain = |c: char| c.is_alphanumeric() || " !#$%&'()+,-.=@[]^_{}~/".contains(c);
        let is_safe = text.len() <= MAX_PATH_BYTES
            && text.chars().all(is_plain)
            && text.split('/').count() <= MAX_COMPONENTS
            && text.split('/').all(is_safe_component);
        is_safe.then(|| Self(text.to_owned()))
    }

    pub(super) fn as_str(&self) -> &str {
        &self.0
    }
}

/// Whether every file system interprets the component literally.
///
/// Windows removes trailing spaces and periods, and reserves some names.
fn is_safe_component(text: &str) -> bool {
    let stem = text.split('.').next().unwrap_or_default().trim_end().to_ascii_uppercase();
    let is_port = |end: &str| end.chars().count() == 1 && end.contains(|c| "0123456789¹²³".contains(c));
    let is_numbered = |name: &str| stem.strip_prefix(name).is_some_and(is_port);
    let is_reserved = ["CON", "PRN", "AUX", "NUL", "CONIN$", "CONOUT$"].contains(&stem.as_str())
        || ["COM", "LPT"].into_iter().any(is_numbered);
    !text.is_empty()
        && text.len() <= MAX_COMPONENT_BYTES
        && !text.starts_with(' ')
        && !text.ends_with([' ', '.'])
        && !is_reserved
}

/// Quotes text from the Hub for an error message, shortened and with control characters escaped.
#[cfg(feature = "hub")]
pub(super) fn quoted(text: &str) -> String {
    format!("{:?}", candle_gpt2::excerpt(text))
}

#[cfg(all(test, feature = "hub"))]
mod tests {
    use super::*;

    /// Components that at least one file system does not interpret literally.
    const UNSAFE: [&str; 16] = [
        "",
        ".",
        "..",
        "...",
        "a.",
        "a/../b",
        "../a",
        "/a",
        "a//b",
        "a/",
        "a\\b",
        "c:a",
        "nul",
        "Com1.txt",
        "a\0",
        "a\u{202e}b",
    ];

    #[test]
    fn unsafe_keys_and_paths_are_rejected() {
        for text in UNSAFE {
            assert_eq!(CacheKey::new(text), None, "{text:?}");
            assert_eq!(FilePath::new(text), None, "{text:?}");
        }
        for text in ["a b", "a/b", "é", "\"a\"", "~"] {
            assert_eq!(CacheKey::new(text), None, "{text:?}");
        }
        for text in [" a", "a ", "a /b", "a*", "a?", "a|b", "a\n", "\u{85}"] {
            assert_eq!(FilePath::new(text), None, "{text:?}");
        }
        assert_eq!(CacheKey::new(&"a".repeat(129)), None);
        assert_eq!(FilePath::new(&"a".repeat(256)), None);
        assert_eq!(FilePath::new(&["a"; 17].join("/")), None);
    }

    #[test]
    fn ordinary_keys_and_paths_are_accepted() {
        let longest = "a".repeat(128);
        for text in ["0123abcdef", "etag-model.safetensors", "9-5", ".a", longest.as_str()] {
            assert_eq!(CacheKey::new(text).unwrap().as_str(), text);
        }
        let deepest = ["a"; 16].join("/");
        for text in
            ["config.json", "data/a b.jsonl", "data/größe (1).txt", "com10", "comb", "~x", deepest.as_str()]
        {
            assert_eq!(FilePath::new(text).unwrap().as_str(), text);
        }
    }

    #[test]
    fn quoted_text_is_short_and_printable() {
        assert_eq!(quoted("a\u{1b}[31m\u{202e}\"\u{9b}"), r#""a\u{1b}[31m\u{202e}\"\u{9b}""#);
        assert_eq!(quoted(&"a".repeat(9999)).chars().count(), 83);
    }
}
