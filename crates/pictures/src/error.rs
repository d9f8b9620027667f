//! Errors from drawing a report.

/// Reason why a report cannot be drawn.
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
    /// The number of values is not the product of the axis lengths.
    #[error(
        "a report with axes ({axes}) cannot have {found} values; expected the product of the axis lengths"
    )]
    Values {
        /// Axes with their lengths.
        axes: String,
        /// Number of values.
        found: usize,
    },
    /// The number of texts is neither zero nor the number of values.
    #[error("expected {expected} cell texts (one per value) or none, found {found}")]
    Texts {
        /// Number of values.
        expected: usize,
        /// Number of texts.
        found: usize,
    },
    /// The report has no values.
    #[error("nothing to draw: the report has no values")]
    Nothing,
    /// The leading axes require more panels than a picture can hold.
    #[error(
        "{panels} panels are too many for one picture (at most {limit}); \
         select fewer entries on these axes: {axes}"
    )]
    TooManyPanels {
        /// Number of panels.
        panels: usize,
        /// Maximum number of panels in a picture.
        limit: usize,
        /// Axes to choose from.
        axes: String,
    },
    /// The picture would have more cells than allowed.
    #[error(
        "{cells} cells are too many for one picture (at most {limit}); \
         shorten the text, or select fewer entries on these axes: {axes}"
    )]
    TooManyCells {
        /// Number of cells.
        cells: usize,
        /// Maximum number of cells in a picture.
        limit: usize,
        /// Axes to choose from.
        axes: String,
    },
    /// A graph has more links than a picture can hold.
    #[error("{links} links are too many for one picture (at most {limit}): choose fewer edges")]
    TooManyLinks {
        /// Number of links.
        links: usize,
        /// Maximum number of links in a picture.
        limit: usize,
    },
}
