//! Where the system cannot bound a process as `process.rs` needs it, grammars are read on threads of this one.

use std::ffi::OsString;
use std::io;
use std::path::PathBuf;

use crate::constraint::GrammarConstraint;
use crate::tokens::Words;
use crate::{Grammar, GrammarError};

/// The program that reads grammars; it is not called on this system.
///
/// ```
/// use candle_gpt2_engine::{ModelOptions, Silent};
/// use candle_gpt2_grammar::{Compiler, GrammarReader};
///
/// // In a program whose `main` calls `read_grammars` for this argument, before it starts a thread.
/// let reader = GrammarReader { program: std::env::current_exe()?, arguments: vec!["read-grammars".into()] };
/// let opened = ModelOptions::default().open(&Silent)?;
/// let compiler = Compiler::isolated(opened.vocabulary(), reader)?; // the program runs when a grammar comes
/// # let _ = compiler;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
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

/// Reads no grammars on this system. See [`GrammarReader`].
///
/// # Errors
/// Always.
pub fn read_grammars() -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}
