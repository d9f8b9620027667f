//! Headers and URLs in the Hub's responses.

use ureq::http::Uri;
use ureq::http::header::{CONTENT_RANGE, HeaderMap};

use super::checked::quoted;

/// Returns the value of a header, with invalid UTF-8 replaced so that it fails validation.
pub(super) fn header(headers: &HeaderMap, name: &str) -> Option<String> {
    headers.get(name).map(|value| String::from_utf8_lossy(value.as_bytes()).into_owned())
}

pub(super) fn number(headers: &HeaderMap, name: &str) -> Result<Option<u64>, String> {
    let parsed = |text: String| {
        let is_number = text.bytes().all(|byte| byte.is_ascii_digit());
        let number = text.parse().ok().filter(|_| is_number);
        number.ok_or_else(|| format!("header {name} is {}; expected a number of bytes", quoted(&text)))
    };
    header(headers, name).map(parsed).transpose()
}

/// Range of a file in a response, `bytes START-END/TOTAL`.
#[derive(Clone, Copy)]
pub(super) struct ContentRange {
    pub(super) start: u64,
    pub(super) total: u64,
}

impl ContentRange {
    pub(super) fn of(headers: &HeaderMap) -> Result<Option<Self>, String> {
        let Some(text) = header(headers, CONTENT_RANGE.as_str()) else { return Ok(None) };
        let parsed = || {
            let (range, total) = text.strip_prefix("bytes ")?.split_once('/')?;
            Some(Self { start: range.split_once('-')?.0.parse().ok()?, total: total.parse().ok()? })
        };
        let found = || format!("header content-range is {}; expected bytes START-END/TOTAL", quoted(&text));
        parsed().map(Some).ok_or_else(found)
    }
}

pub(super) fn is_http(uri: &Uri) -> bool {
    uri.host().is_some() && matches!(uri.scheme_str(), Some("http" | "https"))
}

/// Returns the scheme, host and port.
pub(super) fn origin(uri: &Uri) -> (Option<&str>, Option<String>, u16) {
    let usual = if uri.scheme_str() == Some("https") { 443 } else { 80 };
    (uri.scheme_str(), uri.host().map(str::to_ascii_lowercase), uri.port_u16().unwrap_or(usual))
}

/// Resolves the target of a redirect.
pub(super) fn redirected(from: &Uri, location: &str) -> Option<Uri> {
    let (scheme, authority) = (from.scheme_str()?, from.authority()?);
    let address = match location {
        _ if location.starts_with("//") => format!("{scheme}:{location}"),
        _ if location.starts_with('/') => format!("{scheme}://{authority}{location}"),
        _ => location.to_owned(),
    };
    address.parse().ok().filter(is_http)
}

/// Percent-encodes a path.
pub(super) fn encoded(path: &str) -> String {
    let encoded = |byte: u8| match byte {
        b'0'..=b'9' | b'A'..=b'Z' | b'a'..=b'z' | b'-' | b'.' | b'_' | b'~' | b'/' => {
            char::from(byte).to_string()
        }
        byte => format!("%{byte:02X}"),
    };
    path.bytes().map(encoded).collect()
}
