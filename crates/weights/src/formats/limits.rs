//! Limits on the tensors of a checkpoint in any format.

/// Maximum number of tensors in a file; GPT-2 XL has 580.
pub(super) const MAX_TENSORS: usize = 100_000;
/// Maximum number of elements in a tensor, which take 4 TiB in f32.
pub(super) const MAX_ELEMENTS: u64 = 1 << 40;
/// Maximum number of dimensions of a tensor.
pub(super) const MAX_RANK: usize = 8;
