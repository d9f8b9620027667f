//! Types that users choose by name.

use thiserror::Error;

/// A name that is none of those that are known.
///
/// ```
/// use candle_gpt2_weights::UnknownName;
///
/// let error = UnknownName { expected: "u16 or u32".into() };
/// assert_eq!(error.to_string(), "expected u16 or u32");
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("expected {expected}")]
pub struct UnknownName {
    /// The names that are known, in words.
    pub expected: String,
}

impl UnknownName {
    /// What has this name.
    ///
    /// ```
    /// use candle_gpt2_weights::UnknownName;
    ///
    /// let sizes = [("small", 1), ("large", 2)];
    /// assert_eq!(UnknownName::find(&sizes, "large"), Ok(2));
    /// assert_eq!(UnknownName::find(&sizes, "huge").unwrap_err().expected, "one of small, large");
    /// ```
    ///
    /// # Errors
    /// When nothing has; the error lists the names.
    pub fn find<T: Copy>(named: &[(&str, T)], name: &str) -> Result<T, Self> {
        let found = named.iter().find(|(known, _)| *known == name).map(|(_, value)| *value);
        let names = || named.iter().map(|(known, _)| *known).collect::<Vec<_>>().join(", ");
        found.ok_or_else(|| Self { expected: format!("one of {}", names()) })
    }
}

/// Makes an enum of rows of variant and name: with a list of all, the name, parsing, and the error of a name that none has.
macro_rules! named {
    (
        $(#[$doc:meta])* $type:ident, $unknown:ident {
            $($(#[$variant_doc:meta])* $variant:ident $name:literal,)+
        }
    ) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum $type {
            $($(#[$variant_doc])* $variant,)+
        }

        impl $type {
            /// Every one.
            pub const ALL: [Self; [$($name),+].len()] = [$(Self::$variant),+];

            /// Its name, which [`FromStr`](std::str::FromStr) reads and [`Display`](std::fmt::Display) writes.
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $name,)+
                }
            }
        }

        impl std::fmt::Display for $type {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(self.name())
            }
        }

        #[doc = concat!("A name that no [`", stringify!($type), "`] has. What parsing a [`", stringify!($type), "`] returns then.")]
        #[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
        #[error("expected one of {}", $type::ALL.map($type::name).join(", "))]
        pub struct $unknown;

        impl std::str::FromStr for $type {
            type Err = $unknown;

            fn from_str(name: &str) -> Result<Self, $unknown> {
                Self::ALL.into_iter().find(|known| known.name() == name).ok_or($unknown)
            }
        }
    };
}
pub(crate) use named;
