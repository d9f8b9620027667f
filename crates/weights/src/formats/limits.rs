//! Limits on the tensors of a checkpoint, in any format.

/// Most tensors of one file; GPT-2 XL has 580.
pub(super) const MAX_TENSORS: usize = 100_000;
/// Most elements of one tensor: 4 TB in f32.
pub(super) const MAX_ELEMENTS: u64 = 1 << 40;
/// Most axes of one tensor.
pub(super) const MAX_RANK: usize = 8;
