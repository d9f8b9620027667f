//! JSON bodies: their fields by name, each with its path for messages. What nobody asks for is never built, so a body costs
//! little more memory than its own bytes, however it is nested.

mod given;
mod unknown;
mod walk;

pub(crate) use given::Given;
pub(crate) use unknown::Unknown;
pub use unknown::{Reply, Warnings};

use given::Path;

use crate::ApiError;

/// What becomes of a field that is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Use {
    /// It is read.
    Served,
    /// It is another name of a field that is read.
    Alias(&'static str),
    /// It may have any value.
    Ignored,
    /// It is not served, and refused where it asks for something; with the way out.
    Refused(&'static str),
}

/// A field that is known.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Field {
    pub(crate) name: &'static str,
    pub(crate) use_: Use,
}

/// Fields that are used in one way.
pub(crate) const fn fields<const N: usize>(names: [&'static str; N], use_: Use) -> [Field; N] {
    let mut fields = [Field { name: "", use_ }; N];
    let mut place = 0;
    while place < N {
        fields[place].name = names[place];
        place += 1;
    }
    fields
}

/// The fields of an object that are known and not null.
#[derive(Debug)]
pub(crate) struct Fields<'a, 'p> {
    path: Path<'p>,
    /// The name that it is read under, the name that was given, the value.
    given: Vec<(&'static str, &'static str, &'a str)>,
}

impl<'a, 'p> Fields<'a, 'p> {
    /// The fields of a body, which is a JSON object. Those of it and of the objects in it that are unknown are noted.
    pub(crate) fn of_body(
        body: &'a [u8],
        tables: &[&'static [Field]],
        unknown: &'p Unknown,
    ) -> Result<Self, ApiError> {
        let text = std::str::from_utf8(body).map_err(|error| {
            ApiError::invalid(format!(
                "the body: expected UTF-8, found another byte at {}",
                error.valid_up_to()
            ))
        })?;
        Self::of(Given::body(text.trim_matches([' ', '\t', '\n', '\r']), unknown), tables)
    }

    /// The fields of an object.
    pub(crate) fn of(object: Given<'a, 'p>, tables: &[&'static [Field]]) -> Result<Self, ApiError> {
        let path = object.path();
        let mut given: Vec<(&'static str, &'static str, &'a str)> = Vec::new();
        object.each_entry("a JSON object", |name, value| {
            let known = tables.iter().copied().flatten().find(|field| field.name == name);
            let Some(field) = known else {
                if value.json() != "null" {
                    path.unknown().note(name, value, tables);
                }
                return Ok(());
            };
            if field.use_ == Use::Ignored {
                return Ok(());
            }
            if given.iter().any(|(_, earlier, _)| *earlier == name) {
                return Err(value.wrong_as("one value", "a second one"));
            }
            let read_as = match field.use_ {
                Use::Alias(read_as) => read_as,
                Use::Refused(hint) if !value.is_nothing() => return Err(value.refused(hint)),
                _ => field.name,
            };
            given.push((read_as, field.name, value.json()));
            Ok(())
        })?;
        given.retain(|(.., json)| *json != "null");
        let fields = Self { path, given };
        fields.check_aliases()?;
        Ok(fields)
    }

    /// Two names of one field may not say different things.
    fn check_aliases(&self) -> Result<(), ApiError> {
        for (place, (read_as, name, json)) in self.given.iter().enumerate() {
            let other = self.given.iter().take(place).find(|(other, _, _)| other == read_as);
            if let Some((_, other, _)) = other.filter(|(.., other)| other != json) {
                let message =
                    format!("{name} and {other} are the same and have different values; give one of them");
                return Err(ApiError::invalid(message).with_param(*name));
            }
        }
        Ok(())
    }

    /// The value of a field, if it was given.
    pub(crate) fn get<'f>(&'f self, name: &str) -> Option<Given<'a, 'f>>
    where
        'p: 'f,
    {
        let (_, given_as, json) = self.given.iter().find(|(read_as, ..)| *read_as == name)?;
        Some(Given::new(json, Path::Key(&self.path, given_as)))
    }

    /// What `read` makes of a field, if it was given.
    pub(crate) fn read<T>(
        &self,
        name: &str,
        read: impl FnOnce(Given<'a, '_>) -> Result<T, ApiError>,
    ) -> Result<Option<T>, ApiError> {
        self.get(name).map(read).transpose()
    }

    /// A field that is true or false; without it, or null, this.
    pub(crate) fn boolean(&self, name: &str, without: bool) -> Result<bool, ApiError> {
        Ok(self.read(name, |given| given.boolean())?.unwrap_or(without))
    }
}
