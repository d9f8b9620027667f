//! Errors for mistyped names.

use thiserror::Error;

/// Error for an unknown name.
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
    /// Known names, as listed in the message.
    pub expected: String,
}

impl UnknownName {
    /// Returns the value with this name.
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
    /// If the name is unknown; the error lists the known ones.
    pub fn find<T: Copy>(named: &[(&str, T)], name: &str) -> Result<T, Self> {
        let found = named.iter().find(|(known, _)| *known == name).map(|(_, value)| *value);
        let names = || named.iter().map(|(known, _)| *known).collect::<Vec<_>>().join(", ");
        found.ok_or_else(|| Self { expected: format!("one of {}", names()) })
    }
}
