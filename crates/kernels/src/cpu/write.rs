//! Writing new tokens into the memory of a cache.

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, InplaceOp2, Layout, Result};
use gpt2_arithmetic::{KvSlot, KvValues, write_tokens};

use super::attention::heads_of;
use crate::error::KernelError;

/// Writes tokens into their slots of a contiguous memory; shapes and types are checked.
pub(crate) struct WriteTokens<'a> {
    pub(crate) slots: &'a [KvSlot],
    /// Place of the first token of each row in its slot.
    pub(crate) positions: &'a [usize],
}

impl InplaceOp2 for WriteTokens<'_> {
    fn name(&self) -> &'static str {
        "write-tokens"
    }

    fn cpu_fwd(
        &self,
        memory: &mut CpuStorage,
        memory_layout: &Layout,
        tokens: &CpuStorage,
        tokens_layout: &Layout,
    ) -> Result<()> {
        let tokens = heads_of(tokens.as_slice::<f32>()?, tokens_layout)?;
        let (start, end) = memory_layout.contiguous_offsets().unwrap_or_default();
        let memory = match memory {
            CpuStorage::F32(memory) => KvValues::F32(&mut memory[start..end]),
            CpuStorage::F16(memory) => KvValues::F16(&mut memory[start..end]),
            _ => return Err(KernelError::NotCpuFloats { found: memory.dtype() }.into()),
        };
        write_tokens(memory, &tokens, self.slots, self.positions);
        Ok(())
    }
}
