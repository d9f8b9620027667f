//! Where the system cannot bound a process as `process.rs` needs it, grammars are read on threads of this one.

use std::ffi::OsString;
use std::io;
use std::path::PathBuf;

use crate::constraint::GrammarConstraint;
use crate::tokens::Words;
use crate::{Grammar, GrammarError};

/// The program that reads grammars; it is not called on this system.
#[derive(Debug, Clone)]
pub struct GrammarReader {
    /// The program.
    pub program: PathBuf,
    /// Its arguments.
    pub arguments: Vec<OsString>,
}

/// There are none.
pub(crate) enum Processes {}

impl Processes {
    pub(crate) fn new(_: GrammarReader) -> Option<Self> {
        None
    }

    pub(crate) fn read(
        &self,
        _: impl Fn() -> Result<Words, GrammarError>,
        _: &Grammar,
        _: &[u32],
    ) -> Result<GrammarConstraint, GrammarError> {
        match *self {}
    }
}

/// Reads no grammars on this system.
///
/// # Errors
/// Always.
pub fn read_grammars() -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}
