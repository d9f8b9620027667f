//! Inference on a CPU: candle's custom operations around the functions of `candle-gpt2-arithmetic`. No gradient goes through them,
//! but for the product with packed weights, whose input may lead to variables.

mod attention;
mod product;

use candle_core::{CpuStorage, Layout, Result};

pub(crate) use attention::HeadsTensor;
pub(crate) use product::{PackedProduct, expanded};

/// The values of a contiguous f32 tensor.
fn contiguous<'a>(storage: &'a CpuStorage, layout: &Layout) -> Result<&'a [f32]> {
    let values = storage.as_slice::<f32>()?;
    let range = layout.contiguous_offsets().and_then(|(start, end)| values.get(start..end));
    range.ok_or_else(|| candle_core::Error::RequiresContiguous { op: "a product with packed weights" }.bt())
}
