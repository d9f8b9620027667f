//! Interface for file formats: detection and reading.

use std::collections::BTreeMap;

use crate::WeightsError;
use crate::checkpoint_file::CheckpointFile;
use crate::files::Files;
use crate::source::Source;

/// Tensors and text metadata of a file.
pub(super) type TensorsAndEntries = (Source, BTreeMap<String, String>);

/// Reader for one file format.
pub(super) struct Reader {
    /// Unique rank of the format, by which candidate files are sorted.
    pub(super) rank: u8,
    /// Whether a file has this format; the second argument is its first bytes.
    pub(super) matches: fn(&CheckpointFile, &[u8]) -> Result<bool, WeightsError>,
    /// Reads a model; some formats also need the files next to it.
    pub(super) read: fn(&Files, CheckpointFile) -> Result<Source, WeightsError>,
    /// Reads arbitrary tensors, for formats that can hold more than a model's parameters.
    pub(super) read_all: Option<fn(CheckpointFile) -> Result<TensorsAndEntries, WeightsError>>,
}
