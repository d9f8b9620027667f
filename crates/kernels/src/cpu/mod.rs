//! Inference on a CPU: candle's custom operations around the functions of `candle-gpt2-arithmetic`. No gradient goes through them,
//! but for the product with packed weights, whose input may lead to variables.

mod attention;
mod product;

pub(crate) use attention::HeadsTensor;
pub(crate) use product::{PackedProduct, expanded};
