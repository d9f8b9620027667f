//! Types and size limits shared by `training` and the NVIDIA GPU kernels.

use candle_core::Tensor;
use candle_gpt2_arithmetic::Dropout;

/// Maps the elements of a tensor, viewed as rows, to dropout's random samples.
///
/// Row `r` uses stream `r / tokens * queries + first_query + r % tokens`, starting at sample `first`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Draws {
    pub(crate) rows: usize,
    pub(crate) width: usize,
    /// Number of rows for each head; consecutive heads are `queries` streams apart.
    pub(crate) tokens: usize,
    pub(crate) queries: usize,
    pub(crate) first_query: usize,
    pub(crate) first: usize,
}

impl Draws {
    /// Creates the mapping for a tensor with `width` elements, all from stream 0.
    pub(crate) fn in_order(width: usize) -> Self {
        Self { rows: 1, width, tokens: 1, queries: 1, first_query: 0, first: 0 }
    }

    /// Returns the keep mask: 1 for each element that dropout keeps, 0 for each one that it drops.
    pub(crate) fn kept(&self, dropout: Dropout) -> Vec<u8> {
        let mut kept = vec![false; self.rows * self.width];
        for (row, kept) in kept.chunks_mut(self.width.max(1)).enumerate() {
            let stream = row / self.tokens * self.queries + self.first_query + row % self.tokens;
            dropout.sample(stream as u64, self.first as u64, kept);
        }
        kept.into_iter().map(u8::from).collect()
    }
}

/// Maximum number of rows whose logits [`head_loss`](crate::head_loss()) holds at the same time.
///
/// Applies to NVIDIA GPUs and to compositions of candle operations.
pub const LOSS_ROWS: usize = 1024;

/// Maximum number of scores that [`heads_attention`](crate::heads_attention()) holds on a GPU.
///
/// The limit is 256 MiB in f32. A single sequence with more scores exceeds it.
pub const MAX_SCORES_ON_GPU: usize = 1 << 26;

/// Mean loss over a batch of rows and, if requested, its gradients, computed by NVIDIA GPU kernels.
pub(crate) struct LossOnGpu {
    /// Scalar in f32.
    pub(crate) mean: Tensor,
    /// Gradient of the hidden states, in their dtype.
    pub(crate) of_hidden: Option<Tensor>,
    /// Gradient of the head's weight, in f32.
    pub(crate) of_weight: Option<Tensor>,
}
