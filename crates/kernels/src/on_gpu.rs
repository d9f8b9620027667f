//! What the operations of `training` and the kernels of NVIDIA GPUs tell each other, and how much they hold at once.

use candle_core::Tensor;
use candle_gpt2_arithmetic::Dropout;

/// Which draws of dropout are those of a tensor, seen as rows: row `r` has the ones from place `first` on of stream
/// `r / tokens * queries + first_query + r % tokens`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Draws {
    pub(crate) rows: usize,
    pub(crate) width: usize,
    /// Rows of a head, and how far its streams are from those of the next.
    pub(crate) tokens: usize,
    pub(crate) queries: usize,
    pub(crate) first_query: usize,
    pub(crate) first: usize,
}

impl Draws {
    /// Those of a tensor of so many elements: of stream 0.
    pub(crate) fn in_order(width: usize) -> Self {
        Self { rows: 1, width, tokens: 1, queries: 1, first_query: 0, first: 0 }
    }

    /// Whether each element is kept, 1 or 0.
    pub(crate) fn kept(&self, dropout: Dropout) -> Vec<u8> {
        let mut kept = vec![false; self.rows * self.width];
        for (row, kept) in kept.chunks_mut(self.width.max(1)).enumerate() {
            let stream = row / self.tokens * self.queries + self.first_query + row % self.tokens;
            dropout.draw(stream as u64, self.first as u64, kept);
        }
        kept.into_iter().map(u8::from).collect()
    }
}

/// Rows whose logits [`head_loss`](crate::head_loss()) holds at once, on NVIDIA GPUs and in compositions of candle's operations.
pub const LOSS_ROWS: usize = 1024;

/// Elements of the scores that [`heads_attention`](crate::heads_attention()) holds at once on NVIDIA GPUs, unless a single text has more: a
/// quarter of a GiB in f32.
pub const MOST_SCORES_ON_GPU: usize = 1 << 26;

/// What the kernels of NVIDIA GPUs make of rows: their mean loss and, where they are wanted, its gradients.
pub(crate) struct LossOnGpu {
    /// A scalar in f32.
    pub(crate) mean: Tensor,
    /// Of the hidden states, in their type.
    pub(crate) of_hidden: Option<Tensor>,
    /// Of the head, in f32.
    pub(crate) of_weight: Option<Tensor>,
}
