//! CPU inference: candle custom operations around the functions of `candle-gpt2-arithmetic`.
//!
//! The operations have no backward pass, except for the product with packed weights, whose input may depend
//! on variables.

mod attention;
mod product;

pub(crate) use attention::HeadsTensor;
pub(crate) use product::{PackedProduct, expanded};
