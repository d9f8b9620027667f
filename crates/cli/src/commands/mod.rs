//! One file for each command.

pub(crate) mod convert;
pub(crate) mod generate;
pub(crate) mod inspect;
pub(crate) mod score;
pub(crate) mod train;
pub(crate) mod verify;
