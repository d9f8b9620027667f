//! Steps of one token on NVIDIA GPUs, recorded once for each cache and then replayed.
//!
//! A step starts about a hundred kernels, most of which do less than it takes to start them. A recording starts them all
//! in one call, each with the arguments of the step that was recorded. So what changes from step to step lies in the GPU's
//! memory, at the same place for all of them: the ids, the lengths of the rows, the logits.

#![expect(unsafe_code, reason = "a recording uses memory that it does not hold")]

use std::mem;
use std::sync::Arc;

use candle_core::{DType, Result, Tensor};
use gpt2_kernels::{Recording, prepared};

use crate::{Gpt2Cache, Gpt2LMHead, LogitsFor, Pass};

/// Records the steps of a model and its clones.
#[derive(Debug, Clone)]
pub(crate) struct StepRecorder {
    /// Tells these weights from all others: a recording goes on reading those that it was made with.
    model: Arc<()>,
}

/// How far the recording for a cache has come.
#[derive(Debug)]
pub(crate) enum Steps {
    /// This many steps were computed like any other pass.
    Counted(usize),
    /// A step was computed as it will be recorded, and has loaded what its kernels need.
    Prepared(StepMemory),
    /// The next step is replayed.
    Recorded(Recording, StepMemory),
    /// Steps cannot be recorded, for this reason; it may pass, but the attempt is made once for each cache.
    Never(String),
}

impl Default for Steps {
    fn default() -> Self {
        Self::Counted(0)
    }
}

/// Steps of a cache that are computed like any other pass: the caches of a beam search mostly live no longer, and would be
/// recorded in vain.
const UNRECORDED_STEPS: usize = 2;

/// What a recording reads and writes besides weights, keys and values.
#[derive(Debug)]
pub(crate) struct StepMemory {
    /// `(B, 1)` of u32.
    ids: Tensor,
    /// `(B)` of u32.
    lengths: Tensor,
    /// `(B, 1, V)`.
    logits: Tensor,
    model: Arc<()>,
}

impl StepMemory {
    fn set(&self, ids: &Tensor, lengths: &Tensor) -> Result<()> {
        self.ids.slice_set(&ids.contiguous()?, 0, 0)?;
        self.lengths.slice_set(lengths, 0, 0)
    }
}

impl StepRecorder {
    /// The logits `(B, 1, V)` of a step of one token for each row; `None` where it is none, or cannot be recorded.
    pub(crate) fn step(
        &self,
        model: &Gpt2LMHead,
        ids: &Tensor,
        cache: &mut Gpt2Cache,
        pass: &Pass,
    ) -> Result<Option<Tensor>> {
        let is_step = ids.device().is_cuda()
            && ids.dtype() == DType::U32
            && ids.dims() == [cache.lengths().len(), 1]
            && pass.is_inference()
            && !model.is_observed()
            && !model.has_encoder_states()
            && pass.encoder_states().is_none()
            && pass.lengths().is_none()
            && cache.layer_count() == model.config().n_layer
            && cache
                .lengths()
                .iter()
                .all(|length| *length < cache.capacity().min(model.config().n_positions));
        if !is_step {
            return Ok(None);
        }
        match &mut cache.steps {
            Steps::Never(_) => return Ok(None),
            Steps::Counted(steps) if *steps < UNRECORDED_STEPS => {
                *steps += 1;
                return Ok(None);
            }
            _ => {}
        }
        let steps = mem::take(&mut cache.steps);
        match self.next(model, ids, cache, steps) {
            Ok((logits, steps)) => {
                cache.steps = steps;
                cache.advance()?;
                Ok(Some(logits))
            }
            Err(_) if gpt2_kernels::is_interrupted() => Ok(None),
            // The same step is then computed like any other pass, which returns what is wrong with it, if anything is.
            Err(error) => {
                // After the first line may be a backtrace.
                cache.steps = Steps::Never(error.to_string().lines().next().unwrap_or_default().to_owned());
                Ok(None)
            }
        }
    }

    /// The logits of a step, and the state after it. The lengths of the cache stay as they are.
    fn next(
        &self,
        model: &Gpt2LMHead,
        ids: &Tensor,
        cache: &mut Gpt2Cache,
        steps: Steps,
    ) -> Result<(Tensor, Steps)> {
        let device = ids.device();
        let counted = |length: &usize| u32::try_from(*length).map_err(candle_core::Error::wrap);
        let lengths = cache.lengths().iter().map(counted).collect::<Result<Vec<_>>>()?;
        let lengths = Tensor::from_vec(lengths, cache.lengths().len(), device)?;
        let is_ours = |memory: &StepMemory| Arc::ptr_eq(&memory.model, &self.model);
        let (mut recording, memory) = match steps {
            Steps::Recorded(recording, memory) if is_ours(&memory) => {
                memory.set(ids, &lengths)?;
                (recording, memory)
            }
            Steps::Prepared(memory) if is_ours(&memory) => {
                memory.set(ids, &lengths)?;
                let step = || {
                    let logits = compute(model, &memory.ids, &memory.lengths, cache)?;
                    memory.logits.slice_set(&logits, 0, 0)
                };
                // SAFETY: it is replayed by models with this mark only, which hold the weights, and with this cache only, which
                // holds the layers and this memory; a step uploads shapes and strides, and nothing leaves the closure.
                (unsafe { Recording::of(device, step)? }, memory)
            }
            _ => {
                let (ids, model_id) = (ids.contiguous()?.copy()?, Arc::clone(&self.model));
                let logits = prepared(device, || compute(model, &ids, &lengths, cache))?;
                if logits.track_op() {
                    candle_core::bail!("a recording has no gradients, and some weights want theirs");
                }
                let memory = StepMemory { ids, lengths, logits: logits.zeros_like()?, model: model_id };
                // As the recording will: every kernel of it has then run once.
                memory.logits.slice_set(&logits, 0, 0)?;
                return Ok((logits, Steps::Prepared(memory)));
            }
        };
        recording.replay()?;
        Ok((memory.logits.copy()?, Steps::Recorded(recording, memory)))
    }
}

/// The logits of a step whose lengths are read from the GPU's memory.
fn compute(model: &Gpt2LMHead, ids: &Tensor, lengths: &Tensor, cache: &mut Gpt2Cache) -> Result<Tensor> {
    let pass = &mut Pass::inference().after(lengths.clone());
    let hidden_states = model.transformer().forward(ids, Some(cache), pass)?;
    model.logits(&hidden_states, LogitsFor::LastToken)
}

impl Gpt2LMHead {
    /// The same model, which on NVIDIA GPUs records a step of one token for each row and replays it for the following ones.
    ///
    /// The fourth step with a cache is recorded, and all others after it take one call to start, which is most of their time
    /// otherwise. Steps that cannot be recorded are computed as usual, see [`Gpt2Cache::recording`]: with heads wider than
    /// 256, with keys and values of another type than the activations, where gradients are wanted, and on devices that
    /// [`gpt2_kernels::open_cuda`] has not opened. Elsewhere this changes nothing.
    ///
    /// While a step is recorded, what other threads give the same device to do would be recorded too, and not done: this is
    /// for programs that use a device from one thread at a time.
    pub fn with_recorded_steps(mut self) -> Self {
        self.step_recorder = Some(StepRecorder { model: Arc::new(()) });
        self
    }
}

impl Gpt2Cache {
    /// Whether steps with this cache are replayed, see [`Gpt2LMHead::with_recorded_steps`]: `None` before it is known, and
    /// where it is not asked for.
    ///
    /// # Errors
    /// Why they cannot be recorded.
    pub fn recording(&self) -> Option<std::result::Result<(), &str>> {
        match &self.steps {
            Steps::Counted(_) | Steps::Prepared(_) => None,
            Steps::Recorded(..) => Some(Ok(())),
            Steps::Never(reason) => Some(Err(reason)),
        }
    }
}
