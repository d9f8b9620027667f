//! Attention over tensors, and over the memories of a cache.

use std::ops::Range;

use candle_core::{CpuStorage, CustomOp3, Layout, Result, Shape};
use gpt2_arithmetic::{Heads, KvHeads, KvSlot, attention};

/// Where keys and values lie.
pub(crate) enum HeldIn {
    /// In tensors `(B, H, S, D)`.
    Tensors,
    /// In memories `(N, H · D)`, the rows of the batch in these slots.
    Slots(Vec<KvSlot>),
}

/// Attention of queries `(B, H, T, D)` over keys and values; shapes and types are checked.
pub(crate) struct WindowAttention {
    pub(crate) scale: f32,
    /// The keys that each query sees.
    pub(crate) visible: Vec<Range<usize>>,
    pub(crate) held: HeldIn,
}

impl WindowAttention {
    /// Keys or values.
    fn heads<'a, E>(&self, values: &'a [E], layout: &Layout, q: &[usize; 4]) -> Result<Heads<'a, E>> {
        let slots = match &self.held {
            HeldIn::Tensors => return heads_of(values, layout),
            HeldIn::Slots(slots) => slots,
        };
        let [_, heads, tokens, head_dim] = *q;
        // What no query of a row sees may belong to another row, and is not read.
        let seen = |row: usize| {
            let visible = &self.visible[row * tokens..(row + 1) * tokens];
            visible.iter().map(|keys| keys.end).max().unwrap_or(0)
        };
        Ok(Heads::in_slots(&values[layout.start_offset()..], slots, (heads, head_dim), seen))
    }
}

/// Those of a tensor `(B, H, T, D)`, which has the values of a token side by side.
pub(super) fn heads_of<'a, E>(values: &'a [E], layout: &Layout) -> Result<Heads<'a, E>> {
    let (batch, heads, tokens, head_dim) = layout.shape().dims4()?;
    let stride = |axis: usize| layout.stride().get(axis).copied().unwrap_or(0);
    let values = &values[layout.start_offset()..];
    Ok(Heads::strided(values, [batch, heads, tokens, head_dim], [stride(0), stride(1), stride(2)]))
}

impl CustomOp3 for WindowAttention {
    fn name(&self) -> &'static str {
        "window-attention"
    }

    /// Returns `(B, T, H, Dv)`.
    fn cpu_fwd(
        &self,
        q: &CpuStorage,
        q_layout: &Layout,
        k: &CpuStorage,
        k_layout: &Layout,
        v: &CpuStorage,
        v_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let (batch, heads, tokens, head_dim) = q_layout.shape().dims4()?;
        let sizes = [batch, heads, tokens, head_dim];
        let (kv, value_dim) = match (k, v) {
            (CpuStorage::F16(k), CpuStorage::F16(v)) => {
                let v = self.heads(v, v_layout, &sizes)?;
                let value_dim = v.head_dim();
                (KvHeads::F16([self.heads(k, k_layout, &sizes)?, v]), value_dim)
            }
            _ => {
                let v = self.heads(v.as_slice::<f32>()?, v_layout, &sizes)?;
                let value_dim = v.head_dim();
                (KvHeads::F32([self.heads(k.as_slice::<f32>()?, k_layout, &sizes)?, v]), value_dim)
            }
        };
        let q = heads_of(q.as_slice::<f32>()?, q_layout)?;
        let output = attention(&q, &kv, self.scale, &self.visible);
        Ok((CpuStorage::F32(output), (batch, tokens, heads, value_dim).into()))
    }
}
