//! Iteration over JSON objects and lists without parsing their values.

use std::borrow::Cow;
use std::fmt;

use serde::de::{Deserializer, MapAccess, SeqAccess, Visitor};
use serde_json::value::RawValue;

/// Key of a value in an object or a list.
pub(super) enum Key<'k> {
    Name(&'k str),
    Index(usize),
}

/// Calls `take` with each key and value in an object or a list; any other JSON is an error.
pub(super) fn walk<'a>(json: &'a str, take: impl FnMut(Key<'_>, &'a RawValue)) -> serde_json::Result<()> {
    let mut deserializer = serde_json::Deserializer::from_str(json);
    match json.starts_with('[') {
        true => deserializer.deserialize_seq(Walker(take))?,
        false => deserializer.deserialize_map(Walker(take))?,
    }
    deserializer.end()
}

struct Walker<F>(F);

impl<'a, F: FnMut(Key<'_>, &'a RawValue)> Visitor<'a> for Walker<F> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list or an object")
    }

    fn visit_seq<A: SeqAccess<'a>>(mut self, mut list: A) -> Result<(), A::Error> {
        let mut index = 0;
        while let Some(item) = list.next_element()? {
            (self.0)(Key::Index(index), item);
            index += 1;
        }
        Ok(())
    }

    fn visit_map<A: MapAccess<'a>>(mut self, mut object: A) -> Result<(), A::Error> {
        while let Some(name) = object.next_key::<Cow<'a, str>>()? {
            (self.0)(Key::Name(&name), object.next_value()?);
        }
        Ok(())
    }
}
