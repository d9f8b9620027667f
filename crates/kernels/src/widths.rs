//! A size that the kernels of several devices agree on.

/// The widest heads for which a GPU has a kernel for one query, which reads the visible keys and values only. Other queries
/// take matrix products, in which a hidden value that is NaN reaches the result.
/// [`prefix_attention_on_gpu`](crate::prefix_attention_on_gpu) and [`step_attention`](crate::step_attention) have it.
pub const WIDEST_SINGLE_QUERY: usize = 256;
