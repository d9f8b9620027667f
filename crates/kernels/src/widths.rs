//! Size limits shared by the kernels of several devices.

/// Largest head width supported by the GPU's single-query kernel.
///
/// This kernel reads only the visible keys and values. All other queries run as matrix products, in which a
/// hidden value that is NaN reaches the result. The limit applies to
/// [`prefix_attention_on_gpu`](crate::prefix_attention_on_gpu) and [`step_attention`](crate::step_attention).
pub const WIDEST_SINGLE_QUERY: usize = 256;
