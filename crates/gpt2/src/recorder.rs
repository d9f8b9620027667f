//! Steps of one token on NVIDIA GPUs, recorded once for each cache and then replayed.
//!
//! A step starts about a hundred kernels, most of which do less than it takes to start them. A recording starts them all
//! in one call, each with the arguments of the step that was recorded. So what changes from step to step lies in the GPU's
//! memory, at the same place for all of them: the ids, the lengths of the rows, the logits.

#![expect(unsafe_code, reason = "a recording uses memory that it does not hold")]

use std::mem;
use std::sync::Arc;

use candle_core::{DType, Result, Tensor};
use candle_gpt2_attention::Placement;
use candle_gpt2_kernels::{Recording, expect_ids, prepared, using};

use crate::steps::{StepMemory, StepRecorder, Steps};
use crate::{Gpt2Cache, Gpt2LMHeadModel, LogitsFor, Pass};

/// Steps of a cache that are computed like any other pass: the caches of a beam search mostly live no longer, and would be
/// recorded in vain.
const UNRECORDED_STEPS: usize = 2;

impl StepMemory {
    fn set(&self, ids: &Tensor, lengths: &Tensor) -> Result<()> {
        self.ids.slice_set(&ids.contiguous()?, 0, 0)?;
        self.lengths.slice_set(lengths, 0, 0)
    }
}

impl StepRecorder {
    /// The logits `(B, 1, V)` of a step of one token for each row; `None` if it is none, or cannot be recorded.
    pub(crate) fn step(
        &self,
        model: &Gpt2LMHeadModel,
        ids: &Tensor,
        logits_for: LogitsFor,
        cache: &mut Gpt2Cache,
        pass: &Pass,
    ) -> Result<Option<Tensor>> {
        if !ids.device().is_cuda() || !is_step(model, ids, logits_for, cache, pass) {
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
        using(ids.device(), || expect_ids(ids, model.config().vocab_size))?;
        let steps = mem::take(&mut cache.steps);
        match self.next(model, ids, cache, steps) {
            Ok((logits, steps)) => {
                cache.steps = steps;
                if logits.is_some() {
                    cache.advance()?;
                }
                Ok(logits)
            }
            Err(_) if candle_gpt2_kernels::is_interrupted() => Ok(None),
            // The same step is then computed like any other pass, which returns what is wrong with it, if anything is.
            Err(error) => {
                // After the first line may be a backtrace.
                cache.steps = Steps::Never(error.to_string().lines().next().unwrap_or_default().to_owned());
                Ok(None)
            }
        }
    }

    /// The logits of a step, and the state after it; no logits if it was to be recorded, while other threads use the device. The
    /// lengths of the cache stay as they are.
    fn next(
        &self,
        model: &Gpt2LMHeadModel,
        ids: &Tensor,
        cache: &mut Gpt2Cache,
        steps: Steps,
    ) -> Result<(Option<Tensor>, Steps)> {
        let device = ids.device();
        let counted = |length: &usize| u32::try_from(*length).map_err(candle_core::Error::wrap);
        let lengths = cache.lengths().iter().map(counted).collect::<Result<Vec<_>>>()?;
        let lengths = using(device, || Tensor::from_vec(lengths, cache.lengths().len(), device))?;
        let is_ours = |memory: &StepMemory| Arc::ptr_eq(&memory.model, &self.model);
        let (mut recording, memory) = match steps {
            Steps::Recorded(recording, memory) if is_ours(&memory) => (recording, memory),
            Steps::Prepared(memory) if is_ours(&memory) => {
                let step = || {
                    let logits = compute(model, &memory.ids, &memory.lengths, cache)?;
                    memory.logits.slice_set(&logits, 0, 0)
                };
                // SAFETY: it is replayed by models with this mark only, which hold the weights, and with this cache only, which
                // holds the layers and this memory; a step uploads shapes and strides, and nothing leaves the closure.
                match unsafe { Recording::of(device, step)? } {
                    Some(recording) => (recording, memory),
                    None => return Ok((None, Steps::Prepared(memory))),
                }
            }
            _ => return using(device, || self.prepare(model, ids, lengths, cache)),
        };
        using(device, || {
            memory.set(ids, &lengths)?;
            recording.replay()?;
            Ok((Some(memory.logits.copy()?), Steps::Recorded(recording, memory)))
        })
    }

    /// Computes a step as it will be recorded.
    fn prepare(
        &self,
        model: &Gpt2LMHeadModel,
        ids: &Tensor,
        lengths: Tensor,
        cache: &mut Gpt2Cache,
    ) -> Result<(Option<Tensor>, Steps)> {
        let ids = ids.contiguous()?.copy()?;
        let logits = prepared(ids.device(), || compute(model, &ids, &lengths, cache))?;
        if logits.track_op() {
            candle_core::bail!("a recording has no gradients, and some weights want theirs");
        }
        let memory =
            StepMemory { ids, lengths, logits: logits.zeros_like()?, model: Arc::clone(&self.model) };
        // As the recording will: every kernel of it has then run once.
        memory.logits.slice_set(&logits, 0, 0)?;
        Ok((Some(logits), Steps::Prepared(memory)))
    }
}

/// Whether a pass is what a recording does: inference of one token after those of each row, whose logits are wanted, in the types of
/// the model.
fn is_step(
    model: &Gpt2LMHeadModel,
    ids: &Tensor,
    logits_for: LogitsFor,
    cache: &Gpt2Cache,
    pass: &Pass,
) -> bool {
    let wants_the_token = match logits_for {
        LogitsFor::EveryToken | LogitsFor::LastToken => true,
        LogitsFor::Tokens { first, count } => (first, count) == (0, 1),
    };
    wants_the_token
        && ids.dtype() == DType::U32
        && ids.dims() == [cache.lengths().len(), 1]
        && pass.is_inference()
        && matches!(pass.placement(), Placement::AfterCache)
        && pass.first_position() == 0
        && pass.stop_at_layer().is_none()
        && pass.encoder_states().is_none()
        && pass.dtype().is_none_or(|dtype| dtype == model.dtype())
        && !model.is_observed()
        && !model.has_encoder_states()
        && cache.expect_whole().is_ok()
        && cache.layer_count() == model.config().n_layer
        && cache.lengths().iter().all(|length| *length < cache.capacity().min(model.config().n_positions))
}

/// The logits of a step whose lengths are read from the GPU's memory.
fn compute(model: &Gpt2LMHeadModel, ids: &Tensor, lengths: &Tensor, cache: &mut Gpt2Cache) -> Result<Tensor> {
    let pass = &mut Pass::inference().after(lengths.clone());
    let hidden_states = model.transformer().forward_with(ids, Some(cache), pass)?;
    model.head(&hidden_states, LogitsFor::LastToken)
}

impl Gpt2LMHeadModel {
    /// The same model, which on NVIDIA GPUs records a step of one token for each row and replays it for the following ones.
    ///
    /// The fourth step with a cache is recorded, and all others after it take one call to start, which is most of their time
    /// otherwise. Steps that cannot be recorded are computed as usual, see [`Gpt2Cache::recording`]: with heads wider than
    /// 256, with keys and values of another type than the activations, if gradients are wanted, and on devices that
    /// [`candle_gpt2_kernels::open_cuda`] has not opened. Elsewhere this changes nothing.
    ///
    /// No step is recorded while other threads use the device, whose work would be recorded too, and not done; they wait for the
    /// milliseconds that a recording takes. Models and caches see to that themselves: operations on tensors that a program gives
    /// the same device from other threads belong into [`candle_gpt2_kernels::using`].
    pub fn with_recorded_steps(mut self) -> Self {
        self.step_recorder = Some(StepRecorder { model: Arc::new(()) });
        self
    }
}

impl Gpt2Cache {
    /// Whether steps with this cache are replayed, see [`Gpt2LMHeadModel::with_recorded_steps`]: `None` before it is known, and
    /// if it is not asked for.
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

#[cfg(test)]
mod tests {
    use candle_core::Device;
    use candle_gpt2_attention::{Observer, Site};
    use candle_nn::VarBuilder;

    use super::*;
    use crate::Gpt2Config;

    struct Looks;

    impl Observer for Looks {
        fn wants(&self, _: Site) -> bool {
            false
        }

        fn observe(&mut self, _: Site, value: Tensor) -> Result<Tensor> {
            Ok(value)
        }
    }

    fn model() -> Gpt2LMHeadModel {
        let config = Gpt2Config {
            vocab_size: 11,
            n_positions: 8,
            n_embd: 6,
            n_layer: 2,
            n_head: 3,
            ..Gpt2Config::gpt2()
        };
        Gpt2LMHeadModel::load(&config, VarBuilder::zeros(DType::F32, &Device::Cpu)).unwrap()
    }

    #[test]
    fn only_a_plain_step_of_one_token_is_recorded() {
        let (model, cpu) = (model(), Device::Cpu);
        let ids = |rows, tokens| Tensor::zeros((rows, tokens), DType::U32, &cpu).unwrap();
        let mut cache = model.new_cache(2, 4).unwrap();
        let is = |ids: &Tensor, logits_for, cache: &Gpt2Cache, pass: Pass| {
            is_step(&model, ids, logits_for, cache, &pass)
        };
        let step = ids(2, 1);

        for logits_for in
            [LogitsFor::LastToken, LogitsFor::EveryToken, LogitsFor::Tokens { first: 0, count: 1 }]
        {
            assert!(is(&step, logits_for, &cache, Pass::inference()), "{logits_for:?}");
        }
        for (first, count) in [(0, 0), (1, 1), (0, 2), (1, 0), (usize::MAX, 1)] {
            assert!(
                !is(&step, LogitsFor::Tokens { first, count }, &cache, Pass::inference()),
                "{first}, {count}"
            );
        }
        let of = |pass: Pass| is(&step, LogitsFor::LastToken, &cache, pass);
        assert!(of(Pass::inference().computed_in(DType::F32)), "the model's own type");
        for dtype in [DType::BF16, DType::F16, DType::F64] {
            assert!(!of(Pass::inference().computed_in(dtype)), "{dtype:?}");
        }
        assert!(!of(Pass::inference().stopping_at(1)), "hidden states are no logits");
        assert!(!of(Pass::inference().of_rows([1, 1].into())), "rows in one text");
        assert!(!of(Pass::inference().after(Tensor::zeros(2, DType::U32, &cpu).unwrap())));
        assert!(!of(Pass::inference().attending_to(Tensor::zeros((1, 3, 6), DType::F32, &cpu).unwrap())));
        assert!(!of(Pass::inference().observed_by(&mut Looks)));
        assert!(!of(Pass::training(&mut candle_gpt2_kernels::RandomStream::new(1))));
        for other in [ids(2, 2), ids(1, 1), ids(3, 1), step.to_dtype(DType::I64).unwrap()] {
            assert!(!is(&other, LogitsFor::LastToken, &cache, Pass::inference()), "{other}");
        }
        let observed = self::model().observed_by(Arc::new(std::sync::Mutex::new(Looks)));
        assert!(!is_step(&observed, &step, LogitsFor::LastToken, &cache, &Pass::inference()));
        model
            .forward_with(&ids(2, 4), LogitsFor::LastToken, Some(&mut cache), &mut Pass::inference())
            .unwrap();
        assert!(!is(&step, LogitsFor::LastToken, &cache, Pass::inference()), "the cache is full");
    }
}
