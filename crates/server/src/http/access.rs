//! Access control by the Host header, the page's origin and the API key.

use std::net::IpAddr;

use candle_gpt2_api::ApiError;
use hyper::header::{self, HeaderMap, HeaderValue};
use hyper::http::request::Parts;
use hyper::http::uri::Authority;
use hyper::{Method, Version};

use super::keys::Keys;
use crate::ServerOptions;

pub(crate) struct AccessControl {
    keys: Keys,
    /// Accepted host names; `None` accepts any.
    hosts: Option<Vec<String>>,
    allow_hosts: Vec<String>,
    cors_origins: Vec<String>,
}

/// Result of the origin check.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Origin {
    /// No origin, or the server itself.
    Own,
    /// Allowed page from another server.
    Shared(HeaderValue),
}

impl AccessControl {
    pub(crate) fn new(options: &ServerOptions, loopback: Option<IpAddr>) -> Self {
        let lower = |names: &[String]| names.iter().map(|name| name.to_ascii_lowercase()).collect::<Vec<_>>();
        let allow_hosts = lower(&options.allow_hosts);
        let own = loopback.map(|address| match address {
            IpAddr::V4(address) => address.to_string(),
            IpAddr::V6(address) => format!("[{address}]"),
        });
        // Prevents DNS rebinding: a page can point its own host name at this machine and read what only the
        // browser can reach.
        let hosts = (own.is_some() || !allow_hosts.is_empty()).then(|| {
            let known = ["localhost", "127.0.0.1", "[::1]"].map(str::to_owned);
            known.into_iter().chain(own).chain(allow_hosts.iter().cloned()).collect()
        });
        Self {
            keys: Keys::new(&options.keys),
            hosts,
            allow_hosts,
            cors_origins: lower(&options.cors_origins),
        }
    }

    /// Checks the Host header and the request target.
    pub(crate) fn check_host(&self, head: &Parts) -> Result<(), ApiError> {
        let mut values = head.headers.get_all(header::HOST).iter();
        let host = match (values.next(), values.next()) {
            (None, _) if head.version < Version::HTTP_11 => return Ok(()),
            (Some(value), None) => authority(value).ok_or_else(|| bad_host("invalid Host header"))?,
            (None, _) => return Err(bad_host("missing Host header")),
            (Some(_), Some(_)) => return Err(bad_host("more than one Host header")),
        };
        self.check_name(host.host())?;
        // The target is in absolute form, as in `GET http://name/path HTTP/1.1`.
        let Some(named) = head.uri.authority() else { return Ok(()) };
        if head.uri.scheme().is_none() || !is_host_and_port(named) {
            return Err(bad_host("invalid request target; expected a path or an http URL"));
        }
        self.check_name(named.host())
    }

    fn check_name(&self, name: &str) -> Result<(), ApiError> {
        let is_known = |hosts: &Vec<String>| hosts.iter().any(|host| host.eq_ignore_ascii_case(name));
        if self.hosts.as_ref().is_none_or(is_known) {
            return Ok(());
        }
        let message =
            "host not allowed; the accepted hosts are 127.0.0.1, localhost and those added with --allow-host";
        Err(ApiError::new(403, message).with_code("host_not_allowed"))
    }

    /// Checks the origin of the page that sends a request. Only browsers send the Origin header.
    pub(crate) fn check_origin(&self, headers: &HeaderMap) -> Result<Origin, ApiError> {
        let mut values = headers.get_all(header::ORIGIN).iter();
        let (Some(value), more) = (values.next(), values.next()) else {
            return Ok(Origin::Own);
        };
        let origin = value.to_str().unwrap_or_default().to_ascii_lowercase();
        let refused = || {
            let message = "origin not allowed; allow it with --cors-origin";
            Err(ApiError::new(403, message).with_code("origin_not_allowed"))
        };
        if more.is_some() {
            return refused();
        }
        if self.cors_origins.contains(&origin) {
            return Ok(Origin::Shared(value.clone()));
        }
        let rest = origin.strip_prefix("http://").or_else(|| origin.strip_prefix("https://"));
        let Some(from) = rest.and_then(|rest| rest.parse().ok()).filter(is_host_and_port) else {
            return refused();
        };
        let host = headers.get(header::HOST).and_then(authority);
        let is_own = host.is_some_and(|host| host.as_str().eq_ignore_ascii_case(from.as_str()));
        // Behind a proxy, the Host header may differ from the host name in the browser.
        if is_own || self.allow_hosts.iter().any(|allowed| allowed == from.host()) {
            Ok(Origin::Own)
        } else {
            refused()
        }
    }

    /// Returns the number of the request's API key, counted from 1, or 0 if the server has no keys.
    pub(crate) fn check_key(&self, headers: &HeaderMap) -> Result<u64, ApiError> {
        self.keys.check(headers)
    }

    /// Whether responses depend on the request's origin.
    pub(crate) fn shares(&self) -> bool {
        !self.cors_origins.is_empty()
    }
}

/// Whether the request is a CORS preflight.
pub(crate) fn is_preflight(head: &Parts) -> bool {
    head.method == Method::OPTIONS && head.headers.contains_key(header::ACCESS_CONTROL_REQUEST_METHOD)
}

fn authority(value: &HeaderValue) -> Option<Authority> {
    value.to_str().ok()?.parse().ok().filter(is_host_and_port)
}

/// Whether an authority is a host and an optional port number, without user information.
///
/// The `http` crate accepts any characters as the port.
fn is_host_and_port(authority: &Authority) -> bool {
    let is_port = |port: &str| {
        // RFC 3986 allows a colon without a number.
        port.is_empty() || (port.bytes().all(|byte| byte.is_ascii_digit()) && port.parse::<u16>().is_ok())
    };
    match authority.as_str().strip_prefix(authority.host()) {
        Some("") => !authority.host().is_empty(),
        Some(rest) => !authority.host().is_empty() && rest.strip_prefix(':').is_some_and(is_port),
        // User information precedes the host.
        None => false,
    }
}

fn bad_host(what: &str) -> ApiError {
    ApiError::invalid(what).with_code("bad_host")
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, Ipv6Addr};

    use hyper::Request;

    use super::*;

    fn access(allow_hosts: &[&str], cors_origins: &[&str], loopback: Option<IpAddr>) -> AccessControl {
        let owned = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        let options = ServerOptions {
            allow_hosts: owned(allow_hosts),
            cors_origins: owned(cors_origins),
            ..ServerOptions::default()
        };
        AccessControl::new(&options, loopback)
    }

    fn head(target: &str, headers: &[(&str, &str)]) -> Parts {
        let request = headers
            .iter()
            .fold(Request::builder().uri(target), |request, (name, value)| request.header(*name, *value));
        request.body(()).unwrap().into_parts().0
    }

    fn host(access: &AccessControl, target: &str, host: &str) -> u16 {
        access.check_host(&head(target, &[("host", host)])).map_or_else(|error| error.status(), |()| 200)
    }

    #[test]
    fn local_server_accepts_only_its_own_host_names() {
        let access = access(&["model.lan"], &[], Some(Ipv4Addr::new(127, 0, 0, 5).into()));
        for name in
            ["localhost", "LocalHost:99", "127.0.0.1:8080", "[::1]:8080", "[::1]", "127.0.0.5", "Model.lan:1"]
        {
            assert_eq!(host(&access, "/", name), 200, "{name}");
        }
        for name in [
            "evil.example",
            "localhost.evil.example",
            "127.0.0.1.evil.example",
            "127.0.0.2",
            "0.0.0.0",
            "[::2]",
        ] {
            assert_eq!(host(&access, "/", name), 403, "{name}");
        }
        for name in [
            "",
            "localhost@evil.example",
            "a b",
            "localhost/x",
            "localhost:-1",
            "localhost:+80",
            "localhost:65536",
            "localhost:80a",
            "[::1]:x",
            "[::1]80",
            ":80",
        ] {
            assert_eq!(host(&access, "/", name), 400, "{name}");
        }
        for name in ["localhost:", "localhost:0", "localhost:65535"] {
            assert_eq!(host(&access, "/", name), 200, "{name}");
        }
        assert_eq!(
            host(&access, "http://evil.example/health", "localhost"),
            403,
            "the target names another host"
        );
        assert_eq!(host(&access, "http://localhost/health", "localhost"), 200);
        for target in ["localhost:80", "http://me@localhost/health", "http://localhost:-1/health"] {
            assert_eq!(host(&access, target, "localhost"), 400, "{target}");
        }
        assert_eq!(access.check_host(&head("/", &[])).unwrap_err().status(), 400);
        let two = [("host", "localhost"), ("host", "localhost")];
        assert_eq!(access.check_host(&head("/", &two)).unwrap_err().status(), 400);
    }

    #[test]
    fn public_server_accepts_any_host_name_unless_restricted() {
        assert_eq!(host(&access(&[], &[], None), "/", "anything.example"), 200);
        assert_eq!(host(&access(&["model.lan"], &[], None), "/", "anything.example"), 403);
        assert_eq!(host(&access(&[], &[], Some(Ipv6Addr::LOCALHOST.into())), "/", "anything.example"), 403);
    }

    #[test]
    fn foreign_origins_are_rejected_unless_allowed() {
        let access = access(&["model.lan"], &["https://app.example"], Some(Ipv4Addr::LOCALHOST.into()));
        let check = |origin: &str| {
            let head = head("/", &[("host", "localhost:8080"), ("origin", origin)]);
            access.check_origin(&head.headers).map_err(|error| error.status())
        };
        assert_eq!(check("http://localhost:8080"), Ok(Origin::Own));
        assert_eq!(check("https://model.lan"), Ok(Origin::Own));
        let shared = Origin::Shared(HeaderValue::from_static("https://app.example"));
        assert_eq!(check("https://app.example"), Ok(shared));
        let foreign = [
            "http://localhost:8081",
            "http://evil.example",
            "null",
            "",
            "https://app.example.evil",
            "file://",
            "http://localhost:8080@evil",
            "http://localhost:-1",
        ];
        for origin in foreign {
            assert_eq!(check(origin), Err(403), "{origin:?}");
        }
        assert_eq!(access.check_origin(&head("/", &[]).headers), Ok(Origin::Own));
    }
}
