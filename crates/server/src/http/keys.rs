//! API keys, compared in constant time.

use candle_gpt2_api::ApiError;
use hyper::HeaderMap;
use hyper::header::{AUTHORIZATION, HeaderValue};
use secrecy::{ExposeSecret, SecretString};
use subtle::{ConditionallySelectable, ConstantTimeEq};

use crate::options::MAX_KEY;

pub(crate) struct Keys(Vec<Padded>);

/// Key padded with zero bytes, which valid keys never contain.
type Padded = [u8; MAX_KEY];

impl Keys {
    /// Creates the set of keys from already validated options.
    pub(crate) fn new(keys: &[SecretString]) -> Self {
        Self(keys.iter().filter_map(|key| padded(key.expose_secret().as_bytes())).collect())
    }

    /// Returns the number of the request's API key, counted from 1, or 0 if the server has no keys.
    pub(crate) fn check(&self, headers: &HeaderMap) -> Result<u64, ApiError> {
        if self.0.is_empty() {
            return Ok(0);
        }
        let mut values = headers.get_all(AUTHORIZATION).iter();
        let shown = match (values.next().and_then(bearer), values.next()) {
            (Some(key), None) => padded(key),
            _ => return Err(refusal("missing API key; send the header `Authorization: Bearer KEY`")),
        };
        let shown = shown.ok_or_else(invalid)?;
        // Compares with all keys, so that the time does not reveal which key matches.
        let mut found = 0_u64;
        for (number, key) in (1_u64..).zip(&self.0) {
            found.conditional_assign(&number, key.ct_eq(&shown));
        }
        if found == 0 { Err(invalid()) } else { Ok(found) }
    }
}

/// Returns the key that follows `Bearer`.
fn bearer(value: &HeaderValue) -> Option<&[u8]> {
    let (scheme, key) = value.as_bytes().split_at_checked(7)?;
    let key = scheme.eq_ignore_ascii_case(b"bearer ").then(|| key.trim_ascii())?;
    (!key.is_empty()).then_some(key)
}

fn padded(key: &[u8]) -> Option<Padded> {
    let mut padded = [0; MAX_KEY];
    padded.get_mut(..key.len())?.copy_from_slice(key);
    Some(padded)
}

fn invalid() -> ApiError {
    refusal("invalid API key; check the header `Authorization: Bearer KEY`")
}

fn refusal(message: &str) -> ApiError {
    ApiError::new(401, message).with_code("invalid_api_key")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(keys: &[&str], authorization: &[&str]) -> Result<u64, u16> {
        let keys = Keys::new(&keys.iter().map(|key| SecretString::from(*key)).collect::<Vec<_>>());
        let mut headers = HeaderMap::new();
        for value in authorization {
            headers.append(AUTHORIZATION, HeaderValue::from_str(value).unwrap());
        }
        keys.check(&headers).map_err(|error| error.status())
    }

    #[test]
    fn only_configured_keys_pass() {
        let keys = ["first", "second"];
        assert_eq!(check(&keys, &["Bearer first"]), Ok(1));
        assert_eq!(check(&keys, &["bearer  second "]), Ok(2));
        let longest = "k".repeat(MAX_KEY);
        assert_eq!(check(&[&longest], &[&format!("Bearer {longest}")]), Ok(1));
        let wrong = [
            "Bearer firs",
            "Bearer firsts",
            "Bearer First",
            "Bearer",
            "Bearer ",
            "Basic first",
            "first",
            "Bearer first second",
            "",
        ];
        for value in wrong {
            assert_eq!(check(&keys, &[value]), Err(401), "{value:?}");
        }
        assert_eq!(check(&[&longest], &[&format!("Bearer {longest}k")]), Err(401), "longer than any key");
        assert_eq!(check(&keys, &[]), Err(401));
        assert_eq!(check(&keys, &["Bearer first", "Bearer first"]), Err(401), "one header, not two");
    }

    #[test]
    fn everything_passes_without_keys() {
        for headers in [&[][..], &["Bearer "], &["Bearer anything"]] {
            assert_eq!(check(&[], headers), Ok(0));
        }
    }
}
