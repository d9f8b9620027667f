//! Packed weight matrices, laid out once at load time for products with one row or many.
//!
//! A matrix `(out, in)` is cut into panels of 16 outputs. A panel stores its weights input by input, with the
//! 16 outputs contiguous. One vector thus holds an input's weights for 16 outputs. A product needs no sums
//! across a vector, and it reads a panel in memory order. Inputs are grouped into blocks of 64. Incomplete
//! panels and blocks are padded with zeros.
//!
//! Each [`NumberType`](crate::NumberType) of weights has a file that implements [`block::Block`], or
//! [`integers::Quants`] for integers, and a line in [`pack`].

mod block;
mod f16;
mod f32;
mod floats;
mod integers;
mod matrix;
mod pack;
mod product;
mod q4;
mod q5;
mod q6;
#[cfg(test)]
mod tests;

pub use matrix::PackedMatrix;
pub use pack::{MatrixBytes, PackError, StoredOrder, Strided};
