//! Canned responses that replace the network in the fuzz target `hub_response`.

use std::cell::RefCell;
use std::path::{Path, PathBuf};
use std::time::Duration;

use secrecy::SecretString;
use ureq::http::Uri;
use ureq::http::header::{HeaderMap, HeaderName, HeaderValue};

use super::client::Client;
use super::error::HubError;
use super::http::{Failure, Response, Web};
use super::name::HubName;
use super::options::{HubOptions, Network};
use crate::{Progress, Reporter, Silent, Unit};

/// Response from the Hub: status, headers and body.
pub type CannedAnswer = (u16, Vec<(String, Vec<u8>)>, Vec<u8>);

/// Downloads a model from prepared responses, sent in order.
///
/// # Errors
/// If a response is rejected, or there are too few.
pub fn fetch_from_answers(
    model: &str,
    cache: &Path,
    answers: Vec<CannedAnswer>,
) -> Result<PathBuf, HubError> {
    let other = |cause: &str| HubError::Other { model: model.to_owned(), cause: cause.to_owned() };
    let name = HubName::of_model(model).ok_or_else(|| other("not a valid name on the Hub"))?;
    let options = HubOptions { network: Network::Allowed, cache: cache.to_owned(), ..HubOptions::default() };
    let web = Canned(RefCell::new(answers.into_iter()));
    Client::new(&name, &options, &Impatient, &web)?.model()
}

struct Canned(RefCell<std::vec::IntoIter<CannedAnswer>>);

impl Web for Canned {
    fn get(&self, _: &Uri, _: u64, _: Option<&SecretString>) -> Result<Response<'_>, Failure> {
        let answer = self.0.borrow_mut().next();
        let (status, named, body) = answer.ok_or(Failure::Silent(Duration::ZERO))?;
        let mut headers = HeaderMap::new();
        for (name, value) in named {
            let value = HeaderValue::from_bytes(&value);
            if let (Ok(name), Ok(value)) = (HeaderName::from_bytes(name.as_bytes()), value) {
                headers.append(name, value);
            }
        }
        let pieces: Vec<_> = body.chunks(1024).map(|piece| Ok(piece.to_vec())).collect();
        Ok(Response { status, headers, body: Box::new(pieces.into_iter()) })
    }
}

/// Reporter that interrupts the download instead of pausing before a retry.
struct Impatient;

impl Reporter for Impatient {
    fn start(&self, what: &str, total: u64, unit: Unit) -> Box<dyn Progress> {
        Silent.start(what, total, unit)
    }

    fn note(&self, _: &str) {}

    fn is_interrupted(&self) -> bool {
        true
    }
}
