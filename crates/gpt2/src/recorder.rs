//! Steps of one or a few tokens on NVIDIA GPUs, recorded once for each cache and number of tokens, and then replayed.
//!
//! A step starts about a hundred kernels, most of which do less than it takes to start them. A recording starts them all
//! in one call, each with the arguments of the step that was recorded. So what changes from step to step lies in the GPU's
//! memory, at the same place for all of them: the ids, their positions, the logits.

#![expect(
    unsafe_code,
    reason = "a recording uses memory that it does not hold, and captures other threads' work"
)]

use std::mem;
use std::sync::Arc;

use candle_core::{D, DType, Result, Tensor};
use candle_gpt2_attention::Placement;
use candle_gpt2_kernels::{Recording, expect_ids, prepared, using};

use crate::steps::{Step, StepMemory, StepRecorder};
use crate::{Gpt2Cache, Gpt2LMHeadModel, LogitsFor, Pass};

/// Steps of a cache that are computed like any other pass: the caches of a beam search mostly live no longer, and would be
/// recorded in vain.
const UNRECORDED_STEPS: usize = 2;

impl StepMemory {
    fn set(&self, ids: &Tensor, positions: &Tensor) -> Result<()> {
        self.ids.slice_set(&ids.contiguous()?, 0, 0)?;
        self.positions.slice_set(positions, 0, 0)
    }
}

impl StepRecorder {
    /// The logits `(B, T, V)` of a step of a few tokens for each row; `None` if it is none, or cannot be recorded.
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
        let tokens = ids.dim(D::Minus1)?;
        match cache.steps.of_mut(tokens) {
            None | Some(Step::Never(_)) => return Ok(None),
            Some(Step::Counted(steps)) if *steps < UNRECORDED_STEPS => {
                *steps += 1;
                return Ok(None);
            }
            Some(_) => {}
        }
        using(ids.device(), || expect_ids(ids, model.config().vocab_size))?;
        let step = cache.steps.of_mut(tokens).map(mem::take).unwrap_or_default();
        let (logits, step) = match self.next(model, ids, cache, step) {
            Ok(computed) => computed,
            // The count of these steps begins anew.
            Err(_) if candle_gpt2_kernels::is_interrupted() => return Ok(None),
            // The same step is then computed like any other pass, which returns what is wrong with it, if anything is. After the
            // first line may be a backtrace.
            Err(error) => {
                (None, Step::Never(error.to_string().lines().next().unwrap_or_default().to_owned()))
            }
        };
        if let Some(place) = cache.steps.of_mut(tokens) {
            *place = step;
        }
        if logits.is_some() {
            cache.advance(tokens)?;
        }
        Ok(logits)
    }

    /// The logits of a step, and the state after it; no logits if it was to be recorded, while other threads use the device. The
    /// lengths of the cache stay as they are.
    fn next(
        &self,
        model: &Gpt2LMHeadModel,
        ids: &Tensor,
        cache: &mut Gpt2Cache,
        step: Step,
    ) -> Result<(Option<Tensor>, Step)> {
        let device = ids.device();
        let (rows, tokens) = ids.dims2()?;
        let counted = |position: usize| u32::try_from(position).map_err(candle_core::Error::wrap);
        let places = cache.lengths().iter().flat_map(|length| *length..length + tokens);
        let positions = places.map(counted).collect::<Result<Vec<_>>>()?;
        let positions = using(device, || Tensor::from_vec(positions, (rows, tokens), device))?;
        let is_ours = |memory: &StepMemory| Arc::ptr_eq(&memory.model, &self.model);
        let (mut recording, memory) = match step {
            Step::Recorded(recording, memory) if is_ours(&memory) => (recording, memory),
            Step::Prepared(memory) if is_ours(&memory) => {
                let step = || {
                    let logits = compute(model, &memory.ids, &memory.positions, cache)?;
                    memory.logits.slice_set(&logits, 0, 0)
                };
                // SAFETY: it is replayed by models with this mark only, which hold the weights, and with this cache only, which
                // holds the layers and this memory; a step uploads shapes and strides, and nothing leaves the closure.
                match unsafe { Recording::of(device, step)? } {
                    Some(recording) => (recording, memory),
                    None => return Ok((None, Step::Prepared(memory))),
                }
            }
            _ => return using(device, || self.prepare(model, ids, positions, cache)),
        };
        using(device, || {
            memory.set(ids, &positions)?;
            recording.replay()?;
            Ok((Some(memory.logits.copy()?), Step::Recorded(recording, memory)))
        })
    }

    /// Computes a step as it will be recorded.
    fn prepare(
        &self,
        model: &Gpt2LMHeadModel,
        ids: &Tensor,
        positions: Tensor,
        cache: &mut Gpt2Cache,
    ) -> Result<(Option<Tensor>, Step)> {
        let ids = ids.contiguous()?.copy()?;
        let logits = prepared(ids.device(), || compute(model, &ids, &positions, cache))?;
        if logits.track_op() {
            candle_core::bail!("a recording has no gradients, and some weights want theirs");
        }
        let memory =
            StepMemory { ids, positions, logits: logits.zeros_like()?, model: Arc::clone(&self.model) };
        // As the recording will: every kernel of it has then run once.
        memory.logits.slice_set(&logits, 0, 0)?;
        Ok((Some(logits), Step::Prepared(memory)))
    }
}

/// Whether a pass is what a recording does: inference of as many tokens after those of each row, whose logits are all wanted, in the
/// types of the model.
fn is_step(
    model: &Gpt2LMHeadModel,
    ids: &Tensor,
    logits_for: LogitsFor,
    cache: &Gpt2Cache,
    pass: &Pass,
) -> bool {
    let Ok((rows, tokens)) = ids.dims2() else { return false };
    let wants_all = match logits_for {
        LogitsFor::EveryToken => true,
        LogitsFor::LastToken => tokens == 1,
        LogitsFor::Tokens { first, count } => (first, count) == (0, tokens),
    };
    let end = cache.capacity().min(model.config().n_positions);
    wants_all
        && ids.dtype() == DType::U32
        && rows == cache.lengths().len()
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
        && cache.lengths().iter().all(|length| length + tokens <= end)
}

/// The logits of a step whose positions are read from the GPU's memory.
fn compute(
    model: &Gpt2LMHeadModel,
    ids: &Tensor,
    positions: &Tensor,
    cache: &mut Gpt2Cache,
) -> Result<Tensor> {
    let pass = &mut Pass::inference().at(positions.clone());
    let hidden_states = model.transformer().forward_with(ids, Some(cache), pass)?;
    model.head(&hidden_states, LogitsFor::EveryToken)
}

impl Gpt2LMHeadModel {
    /// The same model, which on NVIDIA GPUs records steps of one to eight tokens of each row whose logits are all wanted,
    /// and replays them.
    ///
    /// The fourth step of so many tokens with a cache is recorded, and all others after it take one call to start, which is
    /// most of their time otherwise. Each number of tokens has a recording of its own, which holds memory for its logits
    /// and what is computed on the way, until the cache is dropped or its rows change. Steps that cannot be recorded are
    /// computed as usual, see [`Gpt2Cache::recording`]: with heads wider than 256, with keys and values of another type
    /// than the activations, if gradients are wanted, and on devices that [`candle_gpt2_kernels::open_cuda`] has not
    /// opened. Elsewhere this changes nothing.
    ///
    /// No step is recorded while other threads use the device inside [`candle_gpt2_kernels::using`]; they wait for the
    /// milliseconds that a recording takes. Models and caches call it themselves.
    ///
    /// # Safety
    /// The recording captures everything that any thread submits to the device meanwhile. So as long as a cache of this model
    /// exists, all other work of this process on the same GPU must run inside [`candle_gpt2_kernels::using`]: every operation on
    /// a tensor of the device, and every allocation and drop of one. Work outside it ends up in the recording, does not run when
    /// it was submitted, and is repeated by each replay on memory that may have been freed.
    pub unsafe fn with_recorded_steps(mut self) -> Self {
        self.step_recorder = Some(StepRecorder { model: Arc::new(()) });
        self
    }
}

impl Gpt2Cache {
    /// Whether steps of so many tokens of each row are replayed with this cache, see [`Gpt2LMHeadModel::with_recorded_steps`]: `None`
    /// before it is known, and if it is not asked for.
    ///
    /// # Errors
    /// Why they cannot be recorded.
    pub fn recording(&self, tokens: usize) -> Option<std::result::Result<(), &str>> {
        match self.steps.of(tokens)? {
            Step::Counted(_) | Step::Prepared(_) => None,
            Step::Recorded(..) => Some(Ok(())),
            Step::Never(reason) => Some(Err(reason)),
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
    fn only_plain_steps_that_give_all_their_logits_are_recorded() {
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
        assert!(!of(Pass::inference().at(Tensor::zeros((2, 1), DType::U32, &cpu).unwrap())));
        assert!(!of(Pass::inference().attending_to(Tensor::zeros((1, 3, 6), DType::F32, &cpu).unwrap())));
        assert!(!of(Pass::inference().observed_by(&mut Looks)));
        assert!(!of(Pass::training(&mut candle_gpt2_arithmetic::RandomStream::new(1))));
        for tokens in 2..=4 {
            let (step, pass) = (ids(2, tokens), Pass::inference);
            assert!(is(&step, LogitsFor::EveryToken, &cache, pass()), "{tokens}");
            assert!(is(&step, LogitsFor::Tokens { first: 0, count: tokens }, &cache, pass()), "{tokens}");
            assert!(!is(&step, LogitsFor::LastToken, &cache, pass()), "{tokens}");
            assert!(!is(&step, LogitsFor::Tokens { first: 1, count: tokens - 1 }, &cache, pass()));
        }
        assert!(!is(&ids(2, 5), LogitsFor::EveryToken, &cache, Pass::inference()), "there is room for four");
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
