//! Storage for cached keys and values, on any device.
//!
//! On a CPU, f32, f16 and q8 use the layout of the attention kernel. Other devices and dtypes use two
//! tensors.

#[cfg(test)]
#[path = "kv_memory_tests.rs"]
mod tests;

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use candle_core::{DType, Device, Result, Tensor};
use candle_gpt2_arithmetic::{self as arithmetic, KvSizes, KvSlot, uses};

use crate::device_use::using;
use crate::error::KernelError;
use crate::kv_dtype::{KvDType, tensor_dtype};
use crate::{cpu, cuda};

/// Axis of the batch in a `(B, H, T, D)` tensor.
const BATCH_DIM: usize = 0;
/// Axis of the tokens in a `(B, H, T, D)` tensor.
const TOKEN_DIM: usize = 2;

/// Key and value storage of one attention layer, for a fixed number of tokens.
///
/// Clones share the same memory.
///
/// Each row of a batch has a slot in the storage. [`KvMemory::take`] and [`KvMemory::claim`] assign a slot to
/// one owner at a time. [`step_attention`](crate::step_attention) reads and writes the storage.
#[derive(Debug, Clone)]
pub struct KvMemory {
    num_heads: usize,
    head_dim: usize,
    dtype: KvDType,
    storage: Storage,
    taken: Arc<Mutex<Taken>>,
}

/// Slots in use: maps the start of each slot to its end.
type Taken = BTreeMap<usize, usize>;

/// RAII guard for a slot; no other caller can take the slot until the guard is dropped.
///
/// [`KvMemory::take`] and [`KvMemory::claim`] return it.
#[derive(Debug)]
pub struct SlotGuard {
    place: KvSlot,
    taken: Arc<Mutex<Taken>>,
}

impl SlotGuard {
    /// Returns the slot's location in the storage.
    pub fn place(&self) -> KvSlot {
        self.place
    }
}

impl Drop for SlotGuard {
    fn drop(&mut self) {
        // A slot without capacity occupies no memory.
        if self.place.capacity > 0 {
            self.taken.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.place.start);
        }
    }
}

#[derive(Debug, Clone)]
enum Storage {
    /// Keys and values in the layout of the CPU kernel.
    Panels(Arc<RwLock<arithmetic::KvMemory>>),
    /// Keys and values, `(N, H · D)` each; a slot is viewed as `(H, S, D)` with its padded size `S`.
    Tensors([Tensor; 2]),
}

impl KvMemory {
    /// Allocates storage for `tokens` tokens, rounded up to a multiple of 16, in `num_heads` heads.
    ///
    /// Each head is `head_dim` wide. On a CPU, the operating system maps a page on the first write, so
    /// capacity that is never used costs nothing.
    ///
    /// # Errors
    /// If allocation fails or the device does not support the storage type.
    pub fn new(
        num_heads: usize,
        head_dim: usize,
        tokens: usize,
        dtype: impl Into<KvDType>,
        device: &Device,
    ) -> Result<Self> {
        let dtype = dtype.into();
        let width = num_heads.saturating_mul(head_dim);
        let no_memory = || KernelError::NoMemory { tokens, width, dtype };
        let storage = if device.is_cpu() && dtype.number_type().is_for(uses::KV_CACHE) {
            let sizes = KvSizes { heads: num_heads, key_dim: head_dim, value_dim: head_dim };
            let memory = arithmetic::KvMemory::new(dtype.number_type(), sizes, tokens);
            let memory = memory.ok_or_else(no_memory)?;
            Storage::Panels(Arc::new(RwLock::new(memory)))
        } else {
            let tensor_dtype = tensor_dtype(dtype.number_type()).ok_or(KernelError::OnlyOnCpu { dtype })?;
            let tokens = KvSlot::room_of(tokens);
            let bytes =
                tokens.checked_mul(width).and_then(|all| all.checked_mul(tensor_dtype.size_in_bytes()));
            // A failed vector allocation would abort the process, so this first checks whether it can
            // succeed.
            let can_allocate = |bytes| !device.is_cpu() || Vec::<u8>::new().try_reserve_exact(bytes).is_ok();
            bytes.filter(|bytes| can_allocate(*bytes)).ok_or_else(no_memory)?;
            let zeros = || using(device, || Tensor::zeros((tokens, width), tensor_dtype, device));
            Storage::Tensors([zeros()?, zeros()?])
        };
        Ok(Self { num_heads, head_dim, dtype, storage, taken: Arc::default() })
    }

    /// Takes the first free range of `capacity` tokens as a slot, or returns `None` if there is none.
    ///
    /// ```
    /// use candle_core::{DType, Device};
    /// use candle_gpt2_kernels::KvMemory;
    ///
    /// let memory = KvMemory::new(2, 3, 48, DType::F32, &Device::Cpu)?;
    /// let [first, second] = [memory.take(20), memory.take(16)].map(|slot| slot.expect("enough memory"));
    /// assert_eq!((first.place().start, second.place().start), (0, 32));
    /// assert!(memory.take(1).is_none() && memory.claim(first.place()).is_err());
    /// drop(first);
    /// assert_eq!(memory.tokens_taken(), 16);
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    pub fn take(&self, capacity: usize) -> Option<SlotGuard> {
        let (room, tokens, mut taken) = (KvSlot::room_of(capacity), self.tokens(), self.taken());
        let mut start = 0;
        for (next, end) in taken.iter() {
            if next - start >= room {
                break;
            }
            start = *end;
        }
        let place = KvSlot { start, capacity };
        place.is_in(tokens).then(|| self.guard(place, &mut taken))
    }

    /// Takes the slot at `place`.
    ///
    /// # Errors
    /// If the slot is outside this storage or overlaps a slot in use.
    pub fn claim(&self, place: KvSlot) -> Result<SlotGuard> {
        self.expect(place, &(0..0))?;
        let mut taken = self.taken();
        let end = place.start + place.room();
        let before = taken.range(..end).next_back();
        if let Some((start, other_end)) =
            before.filter(|(_, other)| place.capacity > 0 && **other > place.start)
        {
            return Err(KernelError::SlotTaken { slot: place, taken: *start..*other_end }.into());
        }
        Ok(self.guard(place, &mut taken))
    }

    /// Total number of tokens in the slots in use.
    pub fn tokens_taken(&self) -> usize {
        self.taken().iter().map(|(start, end)| end - start).sum()
    }

    /// Whether the slot was taken from this storage.
    pub fn has(&self, slot: &SlotGuard) -> bool {
        Arc::ptr_eq(&self.taken, &slot.taken)
    }

    /// Whether `other` shares this storage's memory.
    pub fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.taken, &other.taken)
    }

    fn taken(&self) -> MutexGuard<'_, Taken> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn guard(&self, place: KvSlot, taken: &mut Taken) -> SlotGuard {
        if place.capacity > 0 {
            taken.insert(place.start, place.start + place.room());
        }
        SlotGuard { place, taken: Arc::clone(&self.taken) }
    }

    /// Number of heads.
    pub fn num_heads(&self) -> usize {
        self.num_heads
    }

    /// Width of a head.
    pub fn head_dim(&self) -> usize {
        self.head_dim
    }

    /// Storage type of the keys and values.
    pub fn dtype(&self) -> KvDType {
        self.dtype
    }

    /// Device of the storage.
    pub fn device(&self) -> &Device {
        match &self.storage {
            Storage::Panels(_) => &Device::Cpu,
            Storage::Tensors([keys, _]) => keys.device(),
        }
    }

    /// Capacity in tokens, including padding.
    pub fn tokens(&self) -> usize {
        match &self.storage {
            Storage::Panels(memory) => memory.read().unwrap_or_else(PoisonError::into_inner).tokens(),
            Storage::Tensors([keys, _]) => keys.dims().first().copied().unwrap_or(0),
        }
    }

    /// Writes new keys and values in place, rounded to the storage type.
    ///
    /// The tokens of row `b` are written to its slot starting at `positions[b]`. There is no backward pass.
    ///
    /// # Shapes
    /// `keys` and `values` `(B, H, T, D)`, with any strides; one slot and one position for each of the `B`
    /// rows.
    ///
    /// # Errors
    /// If the shapes do not match, or the tokens of a row do not fit into its slot at its position.
    pub fn write(&self, slots: &[KvSlot], [keys, values]: [&Tensor; 2], positions: &[usize]) -> Result<()> {
        let (batch, heads, added, head_dim) = keys.dims4()?;
        let held = self.tokens();
        let has_room = |(slot, position): (&KvSlot, &usize)| {
            slot.is_in(held) && position.checked_add(added).is_some_and(|end| end <= slot.capacity)
        };
        let fits = (heads, head_dim) == (self.num_heads, self.head_dim)
            && values.dims() == keys.dims()
            && [slots.len(), positions.len()] == [batch; 2]
            && slots.iter().zip(positions).all(has_room);
        if !fits {
            let memory = vec![held, self.num_heads * self.head_dim];
            let tokens = [keys, values].map(|x| x.dims().to_vec());
            return Err(KernelError::TokensDoNotFit { memory, tokens, positions: positions.to_vec() }.into());
        }
        if keys.elem_count() == 0 {
            return Ok(());
        }
        using(self.device(), || match &self.storage {
            Storage::Panels(memory) => {
                let [keys, values] = [keys, values].map(|x| cpu::HeadsTensor::of(&x.to_dtype(DType::F32)?));
                let ([keys, values], mut memory) =
                    ([keys?, values?], memory.write().unwrap_or_else(PoisonError::into_inner));
                keys.with(|keys| values.with(|values| memory.write(slots, [keys, values], positions)))?
            }
            Storage::Tensors(_) => {
                if let Some([key_memory, value_memory]) = self.side_by_side(slots)?
                    && keys.device().is_cuda()
                    && cuda::write_tokens([&key_memory, &value_memory], [keys, values], positions)?
                {
                    return Ok(());
                }
                for (row, (slot, position)) in slots.iter().zip(positions).enumerate() {
                    let of_row = |x: &Tensor| x.narrow(BATCH_DIM, row, 1);
                    self.set(*slot, [&of_row(keys)?, &of_row(values)?], *position)?;
                }
                Ok(())
            }
        })
    }

    /// Whether [`KvMemory::attention`] supports this storage.
    pub fn has_kernel(&self) -> bool {
        matches!(self.storage, Storage::Panels(_))
    }

    /// Attention on the CPU over the stored keys and values.
    ///
    /// There is no backward pass. The result for a query is bit-identical no matter which other queries are
    /// in the call.
    ///
    /// # Shapes
    /// `q` `(B, H, T, D)` in f32; one slot for each row. `visible` has the range of visible keys for each of
    /// the `B · T` queries: at least one key, within the capacity of the slot. Returns `(B, H, T, D)`, stored
    /// as `(B, T, H, D)`.
    ///
    /// # Errors
    /// If the shapes do not match, `q` is not f32 on the CPU, or the storage consists of tensors.
    pub fn attention(
        &self,
        q: &Tensor,
        slots: &[KvSlot],
        scale: f64,
        visible: &[Range<usize>],
    ) -> Result<Tensor> {
        let (batch, heads, tokens, head_dim) = q.dims4()?;
        let Storage::Panels(memory) = &self.storage else {
            return Err(KernelError::OnlyOnCpu { dtype: self.dtype }.into());
        };
        let memory = memory.read().unwrap_or_else(PoisonError::into_inner);
        let has_visible_keys = |(query, seen): (usize, &Range<usize>)| {
            !seen.is_empty() && slots.get(query / tokens).is_some_and(|slot| seen.end <= slot.capacity)
        };
        let fits = head_dim > 0
            && (heads, head_dim) == (self.num_heads, self.head_dim)
            && slots.len() == batch
            && slots.iter().all(|slot| slot.is_in(memory.tokens()))
            && visible.len() == batch * tokens
            && visible.iter().enumerate().all(has_visible_keys);
        if !fits {
            let memory_shape = vec![memory.tokens(), self.num_heads, self.head_dim];
            return Err(KernelError::AttentionShapes {
                q: q.dims().to_vec(),
                k: memory_shape.clone(),
                v: memory_shape,
            }
            .into());
        }
        if q.elem_count() == 0 {
            return q.zeros_like();
        }
        #[expect(clippy::cast_possible_truncation, reason = "the scores are f32")]
        let scale = scale as f32;
        let context = cpu::HeadsTensor::of(q)?
            .with(|q| arithmetic::slot_attention(q, &memory, slots, scale, visible))?;
        Tensor::from_vec(context, (batch, tokens, heads, head_dim), &Device::Cpu)?.transpose(1, 2)
    }

    /// Returns the keys and values of a token range in a slot, `(1, H, T, D)` each.
    ///
    /// They are f32 if the storage has the layout of the CPU kernel, otherwise the storage dtype.
    ///
    /// # Errors
    /// If the slot is outside this storage or the tokens are outside the slot.
    pub fn read(&self, slot: KvSlot, tokens: Range<usize>) -> Result<[Tensor; 2]> {
        self.expect(slot, &tokens)?;
        match &self.storage {
            Storage::Panels(memory) => {
                let shape = (1, self.num_heads, tokens.len(), self.head_dim);
                let read = memory.read().unwrap_or_else(PoisonError::into_inner).read(slot, tokens);
                let [keys, values] = read.map(|values| Tensor::from_vec(values, shape, &Device::Cpu));
                Ok([keys?, values?])
            }
            Storage::Tensors(_) => {
                let [keys, values] =
                    self.slot(slot)?.map(|x| x.narrow(TOKEN_DIM, tokens.start, tokens.len()));
                Ok([keys?, values?])
            }
        }
    }

    /// Copies a token range from a slot of `from` to the same positions in a slot of this storage.
    ///
    /// `from` may be this storage. The tokens before the range must be the same in both slots. Tokens after
    /// the range in the target slot become meaningless.
    ///
    /// # Errors
    /// If the heads differ in number or width, a slot is outside its storage, or the tokens are outside a
    /// slot.
    pub fn copy(&self, to: KvSlot, from: &Self, from_slot: KvSlot, tokens: Range<usize>) -> Result<()> {
        self.expect(to, &tokens)?;
        from.expect(from_slot, &tokens)?;
        if (from.num_heads, from.head_dim) != (self.num_heads, self.head_dim) {
            let shape = |memory: &Self| vec![memory.tokens(), memory.num_heads, memory.head_dim];
            let (memory, found) = (shape(self), shape(from));
            let tokens = [found.clone(), found];
            return Err(KernelError::TokensDoNotFit { memory, tokens, positions: Vec::new() }.into());
        }
        if tokens.is_empty() {
            return Ok(());
        }
        using(self.device(), || self.copied(to, from, from_slot, tokens))
    }

    fn copied(&self, to: KvSlot, from: &Self, from_slot: KvSlot, tokens: Range<usize>) -> Result<()> {
        match (&self.storage, &from.storage) {
            (Storage::Panels(memory), Storage::Panels(source)) if Arc::ptr_eq(memory, source) => {
                let mut memory = memory.write().unwrap_or_else(PoisonError::into_inner);
                memory.copy(to, None, from_slot, tokens);
            }
            (Storage::Panels(memory), Storage::Panels(source)) => {
                // Locks in address order on all threads, which prevents deadlocks.
                let (source, mut memory) = if Arc::as_ptr(memory) < Arc::as_ptr(source) {
                    let memory = memory.write().unwrap_or_else(PoisonError::into_inner);
                    (source.read().unwrap_or_else(PoisonError::into_inner), memory)
                } else {
                    let source = source.read().unwrap_or_else(PoisonError::into_inner);
                    (source, memory.write().unwrap_or_else(PoisonError::into_inner))
                };
                memory.copy(to, Some(&source), from_slot, tokens);
            }
            _ => {
                let position = tokens.start;
                let [keys, values] = from.read(from_slot, tokens)?;
                if self.has_kernel() {
                    return self.write(&[to], [&keys, &values], &[position]);
                }
                return self.set(to, [&keys, &values], position);
            }
        }
        Ok(())
    }

    /// Views keys and values as tensors `(B, H, S, D)`, where `S` is the padded size of a slot.
    ///
    /// Returns `None` unless the storage consists of tensors and the slots are adjacent and of equal size.
    ///
    /// # Errors
    /// If a slot is outside this storage.
    pub fn side_by_side(&self, slots: &[KvSlot]) -> Result<Option<[Tensor; 2]>> {
        let (Storage::Tensors(memories), Some(first)) = (&self.storage, slots.first().copied()) else {
            return Ok(None);
        };
        slots.iter().try_for_each(|slot| self.expect(*slot, &(0..0)))?;
        let (batch, room) = (slots.len(), first.room());
        let is_adjacent = |(row, slot): (usize, &KvSlot)| {
            slot.room() == room && slot.start.checked_sub(first.start) == row.checked_mul(room)
        };
        if !slots.iter().enumerate().all(is_adjacent) {
            return Ok(None);
        }
        let [keys, values] = memories.each_ref().map(|memory| {
            let rows = memory.narrow(0, first.start, batch * room)?;
            rows.reshape((batch, self.num_heads, room, self.head_dim))
        });
        Ok(Some([keys?, values?]))
    }

    /// Views the keys and values of one slot, `(1, H, S, D)` each.
    fn slot(&self, slot: KvSlot) -> Result<[Tensor; 2]> {
        self.side_by_side(&[slot])?.ok_or_else(|| KernelError::OnlyOnCpu { dtype: self.dtype }.into())
    }

    /// Writes keys and values `(1, H, T, D)` into a slot's tensors, which they may be views of.
    fn set(&self, slot: KvSlot, tokens: [&Tensor; 2], position: usize) -> Result<()> {
        for (memory, tokens) in self.slot(slot)?.iter().zip(tokens) {
            if tokens.dim(TOKEN_DIM)? > 0 {
                // Copies the tokens first, because candle cannot write to the memory that it reads from.
                let tokens = tokens.to_dtype(memory.dtype())?.force_contiguous()?;
                memory.slice_set(&tokens, TOKEN_DIM, position)?;
            }
        }
        Ok(())
    }

    fn expect(&self, slot: KvSlot, tokens: &Range<usize>) -> Result<()> {
        let held = self.tokens();
        if !slot.is_in(held) || tokens.end > slot.capacity {
            return Err(KernelError::NoSuchSlot { slot, tokens: tokens.clone(), held }.into());
        }
        Ok(())
    }
}
