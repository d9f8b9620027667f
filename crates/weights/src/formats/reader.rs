//! The interface of a kind of file: how its content is recognised, and how it is read.

use std::collections::BTreeMap;

use crate::WeightsError;
use crate::checkpoint_file::CheckpointFile;
use crate::files::Files;
use crate::source::Source;

/// Any tensors of a file, and what it says beside them.
pub(super) type TensorsAndEntries = (Source, BTreeMap<String, String>);

/// One kind of file.
pub(super) struct Reader {
    /// Number of the kind, by which files are listed.
    pub(super) rank: u8,
    /// Whether the file, whose first bytes are given too, is of this kind.
    pub(super) recognises: fn(&CheckpointFile, &[u8]) -> Result<bool, WeightsError>,
    /// Reads a model; the files beside it are given too.
    pub(super) read: fn(&Files, CheckpointFile) -> Result<Source, WeightsError>,
    /// Reads any tensors, if the kind may hold others than a model's.
    pub(super) read_all: Option<fn(CheckpointFile) -> Result<TensorsAndEntries, WeightsError>>,
}
