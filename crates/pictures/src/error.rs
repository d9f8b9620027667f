//! Why a report cannot be drawn.

/// Why a report cannot be drawn.
///
/// ```
/// use candle_gpt2_pictures::{PictureError, Report, Width, svg};
///
/// let empty = Report::new("example", "nothing".into(), "gpt2".into(), Vec::new(), false);
/// assert_eq!(svg(&empty, Width::OneColumn), Err(PictureError::Nothing));
/// ```
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PictureError {
    /// The number of values is not the product of the axes.
    #[error(
        "a report with the axes ({axes}) cannot have {found} values: their lengths do not multiply to it"
    )]
    Values {
        /// The axes with their lengths.
        axes: String,
        /// How many values there are.
        found: usize,
    },
    /// There are texts, but not one for each value.
    #[error("a report of {expected} values has {found} texts: expected one for each value, or none")]
    Texts {
        /// How many values there are.
        expected: usize,
        /// How many texts there are.
        found: usize,
    },
    /// There is no value at all.
    #[error("there is nothing to draw: the report has no values")]
    Nothing,
    /// The leading axes make more panels than a picture can hold.
    #[error("{panels} panels are too many for one picture (at most {limit}): choose fewer of {axes}")]
    TooManyPanels {
        /// How many panels there are.
        panels: usize,
        /// How many a picture holds.
        limit: usize,
        /// The axes to choose from.
        axes: String,
    },
    /// The picture would have more cells than it can hold.
    #[error(
        "{cells} cells are too many for one picture (at most {limit}): choose fewer of {axes}, or a shorter text"
    )]
    TooManyCells {
        /// How many cells there are.
        cells: usize,
        /// How many a picture holds.
        limit: usize,
        /// The axes to choose from.
        axes: String,
    },
    /// A graph has more links than a picture can hold.
    #[error("{links} links are too many for one picture (at most {limit}): choose fewer edges")]
    TooManyLinks {
        /// How many links there are.
        links: usize,
        /// How many a picture holds.
        limit: usize,
    },
}
