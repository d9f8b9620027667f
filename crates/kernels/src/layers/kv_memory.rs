//! The memory in which a cache holds keys and values, on any device.
//!
//! On a CPU in f32, f16 and q8 it is laid out for the kernel that reads it. Elsewhere, and in other types, it is two tensors.

#[cfg(test)]
#[path = "kv_memory_tests.rs"]
mod tests;

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use candle_core::{DType, Device, Result, Tensor};
use candle_gpt2_arithmetic::{self as arithmetic, KvSizes, KvSlot};

use crate::device_use::using;
use crate::error::KernelError;
use crate::kv_dtype::KvDType;
use crate::{cpu, cuda};

/// Axis of the batch in a `(B, H, T, D)` tensor.
const BATCH_DIM: usize = 0;
/// Axis of the tokens in a `(B, H, T, D)` tensor.
const TOKEN_DIM: usize = 2;

/// Room for the keys and values of some tokens of one attention layer. A clone is the same memory.
///
/// Rows of a batch have slots of it, which [`KvMemory::take`] and [`KvMemory::claim`] give to one owner at a time.
/// [`step_attention`](crate::step_attention) reads and writes it.
#[derive(Debug, Clone)]
pub struct KvMemory {
    num_heads: usize,
    head_dim: usize,
    dtype: KvDType,
    held: Held,
    taken: Arc<Mutex<Taken>>,
}

/// The slots that are in use: the end of each by its start.
type Taken = BTreeMap<usize, usize>;

/// A slot that is given to no other caller until this is dropped. [`KvMemory::take`] returns it.
#[derive(Debug)]
pub struct TakenSlot {
    place: KvSlot,
    taken: Arc<Mutex<Taken>>,
}

impl TakenSlot {
    /// Where it is.
    pub fn place(&self) -> KvSlot {
        self.place
    }
}

impl Drop for TakenSlot {
    fn drop(&mut self) {
        // Room for no tokens takes no place.
        if self.place.capacity > 0 {
            self.taken.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.place.start);
        }
    }
}

#[derive(Debug, Clone)]
enum Held {
    /// For the CPU's kernel.
    Panels(Arc<RwLock<arithmetic::KvMemory>>),
    /// Keys and values `(N, H · D)`; a slot of them is `(H, S, D)` with as many tokens as it takes room.
    Tensors([Tensor; 2]),
}

impl KvMemory {
    /// Memory for `tokens` tokens in `num_heads` heads of width `head_dim`, and for what is missing to a multiple of 16. On a CPU
    /// the system gives a page of it once something is written there, so room that is never used costs nothing.
    ///
    /// # Errors
    /// When it cannot be allocated on the device, or the device has not the type.
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
        let format = dtype.on_cpu().filter(|_| device.is_cpu());
        let held = if let Some(format) = format {
            let sizes = KvSizes { heads: num_heads, key_dim: head_dim, value_dim: head_dim };
            let memory = arithmetic::KvMemory::new(format, sizes, tokens).ok_or_else(no_memory)?;
            Held::Panels(Arc::new(RwLock::new(memory)))
        } else {
            let of_tensors = dtype.of_tensors().ok_or(KernelError::OnlyOnCpu { dtype })?;
            let tokens = KvSlot::room_of(tokens);
            let bytes = tokens.checked_mul(width).and_then(|all| all.checked_mul(of_tensors.size_in_bytes()));
            // Where the allocation of a vector fails, the process ends; this asks first.
            let is_there = |bytes| !device.is_cpu() || Vec::<u8>::new().try_reserve_exact(bytes).is_ok();
            bytes.filter(|bytes| is_there(*bytes)).ok_or_else(no_memory)?;
            let zeros = || Tensor::zeros((tokens, width), of_tensors, device);
            Held::Tensors([zeros()?, zeros()?])
        };
        Ok(Self { num_heads, head_dim, dtype, held, taken: Arc::default() })
    }

    /// Takes the first slot with room for `capacity` tokens in one piece; `None` if there is none.
    ///
    /// ```
    /// use candle_core::{DType, Device};
    /// use candle_gpt2_kernels::KvMemory;
    ///
    /// let memory = KvMemory::new(2, 3, 48, DType::F32, &Device::Cpu)?;
    /// let [first, second] = [memory.take(20), memory.take(16)].map(|slot| slot.expect("there is room"));
    /// assert_eq!((first.place().start, second.place().start), (0, 32));
    /// assert!(memory.take(1).is_none() && memory.claim(first.place()).is_err());
    /// drop(first);
    /// assert_eq!(memory.tokens_taken(), 16);
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    pub fn take(&self, capacity: usize) -> Option<TakenSlot> {
        let (room, tokens, mut taken) = (KvSlot::room_of(capacity), self.tokens(), self.taken());
        let mut start = 0;
        for (next, end) in taken.iter() {
            if next - start >= room {
                break;
            }
            start = *end;
        }
        let place = KvSlot { start, capacity };
        place.is_in(tokens).then(|| self.taken_slot(place, &mut taken))
    }

    /// Takes the slot at this place.
    ///
    /// # Errors
    /// When it is not one of this memory, or overlaps a slot that is taken.
    pub fn claim(&self, place: KvSlot) -> Result<TakenSlot> {
        self.expect(place, &(0..0))?;
        let mut taken = self.taken();
        let end = place.start + place.room();
        let before = taken.range(..end).next_back();
        if let Some((start, other_end)) =
            before.filter(|(_, other)| place.capacity > 0 && **other > place.start)
        {
            return Err(KernelError::SlotTaken { slot: place, taken: *start..*other_end }.into());
        }
        Ok(self.taken_slot(place, &mut taken))
    }

    /// Tokens of the slots that are taken.
    pub fn tokens_taken(&self) -> usize {
        self.taken().iter().map(|(start, end)| end - start).sum()
    }

    /// Whether a slot was taken from this memory.
    pub fn has(&self, slot: &TakenSlot) -> bool {
        Arc::ptr_eq(&self.taken, &slot.taken)
    }

    /// Whether both are the same memory.
    pub fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.taken, &other.taken)
    }

    fn taken(&self) -> MutexGuard<'_, Taken> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn taken_slot(&self, place: KvSlot, taken: &mut Taken) -> TakenSlot {
        if place.capacity > 0 {
            taken.insert(place.start, place.start + place.room());
        }
        TakenSlot { place, taken: Arc::clone(&self.taken) }
    }

    /// Number of heads.
    pub fn num_heads(&self) -> usize {
        self.num_heads
    }

    /// Width of a head.
    pub fn head_dim(&self) -> usize {
        self.head_dim
    }

    /// The type of keys and values.
    pub fn dtype(&self) -> KvDType {
        self.dtype
    }

    /// The device that it is on.
    pub fn device(&self) -> &Device {
        match &self.held {
            Held::Panels(_) => &Device::Cpu,
            Held::Tensors([keys, _]) => keys.device(),
        }
    }

    /// Tokens that there is room for.
    pub fn tokens(&self) -> usize {
        match &self.held {
            Held::Panels(memory) => memory.read().unwrap_or_else(PoisonError::into_inner).tokens(),
            Held::Tensors([keys, _]) => keys.dims().first().copied().unwrap_or(0),
        }
    }

    /// Writes the keys and values of new tokens in place, those of row `b` into its slot from place `positions[b]` on, rounded to
    /// the type of the memory. No gradient goes through it.
    ///
    /// # Shapes
    /// `keys` and `values` `(B, H, T, D)` with any strides; a slot and a position for each of the `B` rows.
    ///
    /// # Errors
    /// When the shapes are not these, or the tokens of a row do not fit into its slot from its position on.
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
        using(self.device(), || match &self.held {
            Held::Panels(memory) => {
                let [keys, values] = [keys, values].map(|x| cpu::HeadsTensor::of(&x.to_dtype(DType::F32)?));
                let ([keys, values], mut memory) =
                    ([keys?, values?], memory.write().unwrap_or_else(PoisonError::into_inner));
                keys.with(|keys| values.with(|values| memory.write(slots, [keys, values], positions)))?
            }
            Held::Tensors(_) => {
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

    /// Whether [`KvMemory::attention`] reads it.
    pub fn has_kernel(&self) -> bool {
        matches!(self.held, Held::Panels(_))
    }

    /// Attention on the CPU over what the memory holds. No gradient goes through it. A query has the same bits whatever other
    /// queries are computed with it.
    ///
    /// # Shapes
    /// `q` `(B, H, T, D)` in f32; a slot for each row. `visible` has for each of the `B · T` queries the keys that it sees, at
    /// least one of those that its slot has room for. Returns `(B, H, T, D)`, laid out as `(B, T, H, D)`.
    ///
    /// # Errors
    /// When the shapes are not these, `q` is not in f32 on the CPU, or the memory is made of tensors.
    pub fn attention(
        &self,
        q: &Tensor,
        slots: &[KvSlot],
        scale: f64,
        visible: &[Range<usize>],
    ) -> Result<Tensor> {
        let (batch, heads, tokens, head_dim) = q.dims4()?;
        let Held::Panels(memory) = &self.held else {
            return Err(KernelError::OnlyOnCpu { dtype: self.dtype }.into());
        };
        let memory = memory.read().unwrap_or_else(PoisonError::into_inner);
        let is_seen = |(query, seen): (usize, &Range<usize>)| {
            !seen.is_empty() && slots.get(query / tokens).is_some_and(|slot| seen.end <= slot.capacity)
        };
        let fits = head_dim > 0
            && (heads, head_dim) == (self.num_heads, self.head_dim)
            && slots.len() == batch
            && slots.iter().all(|slot| slot.is_in(memory.tokens()))
            && visible.len() == batch * tokens
            && visible.iter().enumerate().all(is_seen);
        if !fits {
            let held = vec![memory.tokens(), self.num_heads, self.head_dim];
            return Err(
                KernelError::AttentionShapes { q: q.dims().to_vec(), k: held.clone(), v: held }.into()
            );
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

    /// The keys and the values of some tokens of a slot, `(1, H, T, D)` each: on a CPU in f32 if its kernel holds them, else in
    /// the type of the memory.
    ///
    /// # Errors
    /// When the slot is not one of this memory, or has fewer tokens.
    pub fn read(&self, slot: KvSlot, tokens: Range<usize>) -> Result<[Tensor; 2]> {
        self.expect(slot, &tokens)?;
        match &self.held {
            Held::Panels(memory) => {
                let shape = (1, self.num_heads, tokens.len(), self.head_dim);
                let read = memory.read().unwrap_or_else(PoisonError::into_inner).read(slot, tokens);
                let [keys, values] = read.map(|values| Tensor::from_vec(values, shape, &Device::Cpu));
                Ok([keys?, values?])
            }
            Held::Tensors(_) => {
                let [keys, values] =
                    self.slot(slot)?.map(|x| x.narrow(TOKEN_DIM, tokens.start, tokens.len()));
                Ok([keys?, values?])
            }
        }
    }

    /// Copies tokens of a slot of `from`, which may be this memory, to the same places of a slot of this one. The tokens before
    /// them must be the same in both slots; what is after them in the slot of this one means nothing any more.
    ///
    /// # Errors
    /// When the heads are others, a slot is not one of its memory, or has fewer tokens.
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
        match (&self.held, &from.held) {
            (Held::Panels(memory), Held::Panels(source)) if Arc::ptr_eq(memory, source) => {
                let mut memory = memory.write().unwrap_or_else(PoisonError::into_inner);
                memory.copy(to, None, from_slot, tokens);
            }
            (Held::Panels(memory), Held::Panels(source)) => {
                // In one order for all threads, so that no two wait for each other.
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

    /// The memories of keys and values as tensors `(B, H, S, D)`, views of them, with `S` the room of a slot: if they are
    /// tensors, and the slots have the same room side by side.
    ///
    /// # Errors
    /// When a slot is not one of this memory.
    pub fn side_by_side(&self, slots: &[KvSlot]) -> Result<Option<[Tensor; 2]>> {
        let (Held::Tensors(memories), Some(first)) = (&self.held, slots.first().copied()) else {
            return Ok(None);
        };
        slots.iter().try_for_each(|slot| self.expect(*slot, &(0..0)))?;
        let (batch, room) = (slots.len(), first.room());
        let is_beside = |(row, slot): (usize, &KvSlot)| {
            slot.room() == room && slot.start.checked_sub(first.start) == row.checked_mul(room)
        };
        if !slots.iter().enumerate().all(is_beside) {
            return Ok(None);
        }
        let [keys, values] = memories.each_ref().map(|memory| {
            let rows = memory.narrow(0, first.start, batch * room)?;
            rows.reshape((batch, self.num_heads, room, self.head_dim))
        });
        Ok(Some([keys?, values?]))
    }

    /// The tensors of a slot, `(1, H, S, D)`.
    fn slot(&self, slot: KvSlot) -> Result<[Tensor; 2]> {
        self.side_by_side(&[slot])?.ok_or_else(|| KernelError::OnlyOnCpu { dtype: self.dtype }.into())
    }

    /// Writes keys and values `(1, H, T, D)`, which may lie in the same memory, into the tensors of a slot.
    fn set(&self, slot: KvSlot, tokens: [&Tensor; 2], position: usize) -> Result<()> {
        for (memory, tokens) in self.slot(slot)?.iter().zip(tokens) {
            if tokens.dim(TOKEN_DIM)? > 0 {
                // By way of a copy of these tokens alone: candle writes nothing into the memory that it reads.
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
