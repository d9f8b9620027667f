//! Walks over the items of a JSON list and the entries of an object, whose values stay as they are written.

use std::borrow::Cow;
use std::fmt;

use serde::de::{Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::value::RawValue;

use crate::ApiError;

/// Why a walk ended early.
pub(super) enum Interruption {
    /// The JSON is wrong.
    Json(serde_json::Error),
    /// Whoever looks at the items said so.
    Said(ApiError),
}

/// Calls `take` with each item of a list.
pub(super) fn items<'a>(
    json: &'a str,
    mut take: impl FnMut(&'a str) -> Result<(), ApiError>,
) -> Result<(), Interruption> {
    walk(json, |deserializer, said| {
        deserializer.deserialize_seq(Walker { take: |_: &str, item| take(item), said })
    })
}

/// Calls `take` with each name and value of an object.
pub(super) fn entries<'a>(
    json: &'a str,
    take: impl FnMut(&str, &'a str) -> Result<(), ApiError>,
) -> Result<(), Interruption> {
    walk(json, |deserializer, said| deserializer.deserialize_map(Walker { take, said }))
}

fn walk<'a>(
    json: &'a str,
    go: impl FnOnce(
        &mut serde_json::Deserializer<serde_json::de::StrRead<'a>>,
        &mut Option<ApiError>,
    ) -> serde_json::Result<()>,
) -> Result<(), Interruption> {
    let mut deserializer = serde_json::Deserializer::from_str(json);
    let mut said = None;
    let walked = go(&mut deserializer, &mut said).and_then(|()| deserializer.end());
    match said {
        Some(error) => Err(Interruption::Said(error)),
        None => walked.map_err(Interruption::Json),
    }
}

/// What it is told goes to `take`; an error of it into `said`, since serde's errors are texts.
struct Walker<'s, F> {
    take: F,
    said: &'s mut Option<ApiError>,
}

impl<F> Walker<'_, F> {
    fn stop<E: Error>(&mut self, error: ApiError) -> E {
        *self.said = Some(error);
        E::custom("stopped")
    }
}

impl<'a, F: FnMut(&str, &'a str) -> Result<(), ApiError>> Visitor<'a> for Walker<'_, F> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list or an object")
    }

    fn visit_seq<A: SeqAccess<'a>>(mut self, mut list: A) -> Result<(), A::Error> {
        while let Some(item) = list.next_element::<&'a RawValue>()? {
            (self.take)("", item.get()).map_err(|error| self.stop(error))?;
        }
        Ok(())
    }

    fn visit_map<A: MapAccess<'a>>(mut self, mut object: A) -> Result<(), A::Error> {
        while let Some(name) = object.next_key::<Cow<'a, str>>()? {
            let value = object.next_value::<&'a RawValue>()?;
            (self.take)(&name, value.get()).map_err(|error| self.stop(error))?;
        }
        Ok(())
    }
}
