//! Weight matrices laid out for this project's own products: packed once at load, used for one row and for many.
//!
//! A matrix `(out, in)` is cut into panels of 16 outputs. A panel holds its weights input by input, the 16 outputs side by
//! side, so that one vector holds the same input's weight of 16 outputs: a product needs no sums across a vector, and
//! reading a panel is reading memory in order. Inputs come in blocks of 64; what is missing to whole panels and blocks is
//! filled with zeros. See [`WeightFormat`] for the precisions; each is a file that implements [`block::Block`], or for integers
//! [`integers::Quants`], and a row of the table in [`formats`].

mod block;
mod f16;
mod f32;
mod floats;
mod formats;
mod integers;
mod matrix;
mod pack;
mod product;
mod q4;
mod q5;
mod q6;
#[cfg(test)]
mod tests;

pub use matrix::{PackedMatrix, WeightFormat};
pub use pack::{MatrixBytes, PackError, StoredFloat, StoredOrder, Strided};
