#![doc = include_str!("../README.md")]
#![cfg_attr(docsrs, feature(doc_cfg))]
#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

mod bytes;
mod checks;
mod coder;
mod compress;
mod container;
mod decompress;
mod error;
mod frequencies;
mod identity;
mod windows;

pub use compress::{Compressor, Summary, TokenSize};
pub use container::{Header, SUFFIX};
pub use decompress::Compressed;
pub use error::CompressionError;
