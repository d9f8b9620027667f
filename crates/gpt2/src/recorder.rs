//! Recorded steps of a few tokens on NVIDIA GPUs.
//!
//! Each cache has one recording per number of tokens, which later steps replay.
//!
//! A step launches about a hundred kernels, and most of them run for less time than their launch takes. A
//! recording launches all of them in one call, with the arguments of the recorded step. So everything that
//! changes between steps is stored in GPU memory at fixed addresses: the IDs, their positions and the logits.

#![expect(
    unsafe_code,
    reason = "a recording uses memory that it does not own, and captures work of other threads"
)]

use std::mem;
use std::sync::Arc;

use candle_core::{D, DType, Device, Result, Tensor};
use candle_gpt2_attention::Placement;
use candle_gpt2_kernels::{Recording, expect_ids, prepared, using};

use crate::steps::{Step, StepMemory, StepRecorder, Steps};
use crate::{Gpt2Cache, Gpt2LMHeadModel, LogitsFor, Pass};

/// Number of steps per cache that run before recording begins.
///
/// Most caches of a beam search do not live longer than this, so recording them would be wasted.
const UNRECORDED_STEPS: usize = 2;

/// GPU work that can be replayed; tests replace it with a fake.
trait Replay: Sized {
    /// Records `work`; see [`Recording::of`].
    ///
    /// # Safety
    /// Same as [`Recording::of`].
    unsafe fn of(device: &Device, work: impl FnOnce() -> Result<()>) -> Result<Option<Self>>;

    /// Replays the work; see [`Recording::replay`].
    fn replay(&mut self) -> Result<()>;
}

impl Replay for Recording {
    unsafe fn of(device: &Device, work: impl FnOnce() -> Result<()>) -> Result<Option<Self>> {
        // SAFETY: both functions have the same contract, and the caller upholds it.
        unsafe { Self::of(device, work) }
    }

    fn replay(&mut self) -> Result<()> {
        self.replay()
    }
}

impl StepMemory {
    fn set(&self, ids: &Tensor, positions: &Tensor) -> Result<()> {
        self.ids.slice_set(&ids.contiguous()?, 0, 0)?;
        self.positions.slice_set(positions, 0, 0)
    }
}

impl StepRecorder {
    /// Computes the logits `(B, T, V)` of a step with a few tokens per row.
    ///
    /// Returns `None` if the pass is not such a step or cannot be recorded.
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
        let mut steps = mem::take(&mut cache.steps);
        let logits = self.advance(model, ids, cache, &mut steps);
        cache.steps = steps;
        logits
    }

    /// Computes the logits of a step that can be recorded, and advances the cache and its recordings.
    ///
    /// Returns `None` if the caller should compute this step as usual; the cache is then unchanged.
    fn advance<R: Replay>(
        &self,
        model: &Gpt2LMHeadModel,
        ids: &Tensor,
        cache: &mut Gpt2Cache,
        steps: &mut Steps<R>,
    ) -> Result<Option<Tensor>> {
        let tokens = ids.dim(D::Minus1)?;
        match steps.of_mut(tokens) {
            None | Some(Step::Never(_)) => return Ok(None),
            Some(Step::Counted(steps)) if *steps < UNRECORDED_STEPS => {
                *steps += 1;
                return Ok(None);
            }
            Some(_) => {}
        }
        using(ids.device(), || expect_ids(ids, model.config().vocab_size))?;
        let step = steps.of_mut(tokens).map(mem::take).unwrap_or_default();
        let (logits, step) = match self.next(model, ids, cache, step) {
            Ok(computed) => computed,
            // `mem::take` left the default in place, so counting restarts.
            Err(_) if candle_gpt2_kernels::is_interrupted() => return Ok(None),
            // The caller then computes the same step without recording. If the step itself is invalid, that
            // computation returns the error. Lines after the first may be a backtrace.
            Err(error) => {
                (None, Step::Never(error.to_string().lines().next().unwrap_or_default().to_owned()))
            }
        };
        if let Some(slot) = steps.of_mut(tokens) {
            *slot = step;
        }
        if logits.is_some() {
            cache.advance(tokens)?;
        }
        Ok(logits)
    }

    /// Computes the logits of a step, and the state after it.
    ///
    /// Returns no logits if the step should be recorded but other threads use the device. Does not change the
    /// cache's lengths.
    fn next<R: Replay>(
        &self,
        model: &Gpt2LMHeadModel,
        ids: &Tensor,
        cache: &mut Gpt2Cache,
        step: Step<R>,
    ) -> Result<(Option<Tensor>, Step<R>)> {
        let device = ids.device();
        let (rows, tokens) = ids.dims2()?;
        let counted = |position: usize| u32::try_from(position).map_err(candle_core::Error::wrap);
        let indices = cache.lengths().iter().flat_map(|length| *length..length + tokens);
        let positions = indices.map(counted).collect::<Result<Vec<_>>>()?;
        let positions = using(device, || Tensor::from_vec(positions, (rows, tokens), device))?;
        let is_ours = |memory: &StepMemory| Arc::ptr_eq(&memory.model, &self.model);
        let (mut recording, memory) = match step {
            Step::Recorded(recording, memory) if is_ours(&memory) => (recording, memory),
            Step::Prepared(memory) if is_ours(&memory) => {
                let step = || {
                    let logits = compute(model, &memory.ids, &memory.positions, cache)?;
                    memory.logits.slice_set(&logits, 0, 0)
                };
                // SAFETY: Only models with this identity replay the recording, and they own the weights. Only
                // this cache replays the recording, and the cache owns the layers and this memory. A step
                // uploads shapes and strides, and no tensor leaves the closure.
                match unsafe { R::of(device, step)? } {
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

    /// Computes a step with the same kernels that the recording will use.
    fn prepare<R>(
        &self,
        model: &Gpt2LMHeadModel,
        ids: &Tensor,
        positions: Tensor,
        cache: &mut Gpt2Cache,
    ) -> Result<(Option<Tensor>, Step<R>)> {
        let ids = ids.contiguous()?.copy()?;
        let logits = prepared(ids.device(), || compute(model, &ids, &positions, cache))?;
        if logits.track_op() {
            candle_core::bail!("a recording computes no gradients, but some weights require them");
        }
        let memory =
            StepMemory { ids, positions, logits: logits.zeros_like()?, model: Arc::clone(&self.model) };
        // The recording will copy the logits too, so now each of its kernels has run once.
        memory.logits.slice_set(&logits, 0, 0)?;
        Ok((Some(logits), Step::Prepared(memory)))
    }
}

/// Whether a recording can compute this pass.
///
/// It must be inference of `tokens` new tokens after each cached row, with all logits wanted and in the
/// model's dtypes.
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
        && cache.check_consistent().is_ok()
        && cache.expect_filled_to(model.config().n_layer, model.config().n_layer).is_ok()
        && cache.lengths().iter().all(|length| length + tokens <= end)
}

/// Computes the logits of a step with positions in GPU memory.
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
    /// Enables recording of small steps on NVIDIA GPUs.
    ///
    /// The model records and replays steps of one to eight tokens per row, if all their logits are wanted.
    /// From the fourth step of a given size with a cache, each step takes one launch. Without a recording,
    /// launches take most of the time.
    ///
    /// Each number of tokens has its own recording. It owns memory for its logits and intermediates until the
    /// cache is dropped or its rows change.
    ///
    /// Some steps cannot be recorded and are computed as usual; see [`Gpt2Cache::recording`]. Reasons are
    /// heads wider than 256, keys and values in a different dtype than the activations, required gradients,
    /// and devices not opened by [`candle_gpt2_kernels::open_cuda`]. On other devices, this setting has no
    /// effect.
    ///
    /// Nothing is recorded while other threads use the device inside [`candle_gpt2_kernels::using`]. During a
    /// recording, those threads wait for a few milliseconds. Forward passes call `using` themselves, as do
    /// allocations, writes and copies of KV caches. Loading with [`Gpt2LMHeadModel::load`], reads of results
    /// and drops do not.
    ///
    /// # Safety
    /// While a step is recorded, the recording captures all work that any thread submits to the device. As
    /// long as a cache of this model exists, all other work of this process on the same GPU must run inside
    /// [`candle_gpt2_kernels::using`]. This includes every operation on a tensor of the device, and every
    /// allocation and drop of one, so also loading and dropping models and caches. Work outside it becomes
    /// part of the recording and does not run when submitted. Each replay then repeats it on memory that may
    /// have been freed.
    pub unsafe fn with_recorded_steps(mut self) -> Self {
        self.step_recorder = Some(StepRecorder { model: Arc::new(()) });
        self
    }
}

impl Gpt2Cache {
    /// Reports whether steps of `tokens` tokens per row are replayed with this cache.
    ///
    /// Returns `None` before this is decided, or if the model does not record steps; see
    /// [`Gpt2LMHeadModel::with_recorded_steps`].
    ///
    /// # Errors
    /// The reason why the steps cannot be recorded.
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
    use std::cell::Cell;
    use std::thread::LocalKey;

    use candle_gpt2_attention::{Observer, Site};
    use candle_nn::{VarBuilder, VarMap};

    use super::*;
    use crate::Gpt2Config;

    struct NoopObserver;

    impl Observer for NoopObserver {
        fn wants(&self, _: Site) -> bool {
            false
        }

        fn observe(&mut self, _: Site, value: Tensor) -> Result<Tensor> {
            Ok(value)
        }
    }

    fn config() -> Gpt2Config {
        Gpt2Config { vocab_size: 11, n_positions: 8, n_embd: 6, n_layer: 2, n_head: 3, ..Gpt2Config::gpt2() }
    }

    fn model() -> Gpt2LMHeadModel {
        Gpt2LMHeadModel::load(&config(), VarBuilder::zeros(DType::F32, &Device::Cpu)).unwrap()
    }

    #[test]
    fn only_plain_steps_that_return_all_logits_are_recorded() {
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
        assert!(!of(Pass::inference().stopping_at(1)), "hidden states are not logits");
        assert!(!of(Pass::inference().of_rows([1, 1].into())), "packed rows");
        assert!(!of(Pass::inference().at(Tensor::zeros((2, 1), DType::U32, &cpu).unwrap())));
        assert!(!of(Pass::inference().attending_to(Tensor::zeros((1, 3, 6), DType::F32, &cpu).unwrap())));
        assert!(!of(Pass::inference().observed_by(&mut NoopObserver)));
        assert!(!of(Pass::training(&mut candle_gpt2_arithmetic::RandomStream::new(1))));
        for tokens in 2..=4 {
            let (step, pass) = (ids(2, tokens), Pass::inference);
            assert!(is(&step, LogitsFor::EveryToken, &cache, pass()), "{tokens}");
            assert!(is(&step, LogitsFor::Tokens { first: 0, count: tokens }, &cache, pass()), "{tokens}");
            assert!(!is(&step, LogitsFor::LastToken, &cache, pass()), "{tokens}");
            assert!(!is(&step, LogitsFor::Tokens { first: 1, count: tokens - 1 }, &cache, pass()));
        }
        assert!(
            !is(&ids(2, 5), LogitsFor::EveryToken, &cache, Pass::inference()),
            "the capacity is four tokens"
        );
        for other in [ids(2, 2), ids(1, 1), ids(3, 1), step.to_dtype(DType::I64).unwrap()] {
            assert!(!is(&other, LogitsFor::LastToken, &cache, Pass::inference()), "{other}");
        }
        let observed = self::model().observed_by(Arc::new(std::sync::Mutex::new(NoopObserver)));
        assert!(!is_step(&observed, &step, LogitsFor::LastToken, &cache, &Pass::inference()));
        model
            .forward_with(&ids(2, 4), LogitsFor::LastToken, Some(&mut cache), &mut Pass::inference())
            .unwrap();
        assert!(!is(&step, LogitsFor::LastToken, &cache, Pass::inference()), "the cache is full");
    }

    /// Outcome of the next attempts to record.
    #[derive(Clone, Copy)]
    enum Attempt {
        Records,
        DeviceIsInUse,
        Fails,
    }

    thread_local! {
        static ATTEMPT: Cell<Attempt> = const { Cell::new(Attempt::Records) };
        static ATTEMPTS: Cell<usize> = const { Cell::new(0) };
        static REPLAYS: Cell<usize> = const { Cell::new(0) };
        static DROPS: Cell<usize> = const { Cell::new(0) };
    }

    fn count(counter: &'static LocalKey<Cell<usize>>) {
        counter.set(counter.get() + 1);
    }

    /// Recording that counts its replays and computes nothing.
    struct Fake;

    impl Replay for Fake {
        unsafe fn of(_: &Device, work: impl FnOnce() -> Result<()>) -> Result<Option<Self>> {
            count(&ATTEMPTS);
            match ATTEMPT.get() {
                Attempt::Records => work().map(|()| Some(Self)),
                Attempt::DeviceIsInUse => Ok(None),
                Attempt::Fails => candle_core::bail!("out of memory\n  in frame 1\n  in frame 2"),
            }
        }

        fn replay(&mut self) -> Result<()> {
            count(&REPLAYS);
            Ok(())
        }
    }

    impl Drop for Fake {
        fn drop(&mut self) {
            count(&DROPS);
        }
    }

    /// Model, cache and recordings for one sequence of steps.
    struct Sequence {
        model: Gpt2LMHeadModel,
        recorder: StepRecorder,
        cache: Gpt2Cache,
        steps: Steps<Fake>,
    }

    impl Sequence {
        fn new() -> Self {
            ATTEMPT.set(Attempt::Records);
            [&ATTEMPTS, &REPLAYS, &DROPS].into_iter().for_each(|counter| counter.set(0));
            let vars = VarMap::new();
            let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
            Gpt2LMHeadModel::load(&config(), vb).unwrap();
            // Steps are recorded only without gradients, so the variables are detached.
            let vars = vars.data().lock().unwrap();
            let tensors = vars.iter().map(|(name, var)| (name.clone(), var.as_detached_tensor())).collect();
            let vb = VarBuilder::from_tensors(tensors, DType::F32, &Device::Cpu);
            let model = Gpt2LMHeadModel::load(&config(), vb).unwrap();
            let cache = model.new_cache(1, 8).unwrap();
            Self { model, recorder: StepRecorder { model: Arc::new(()) }, cache, steps: Steps::default() }
        }

        fn step(&mut self, id: u32) -> Option<Vec<f32>> {
            let ids = Tensor::new(&[[id]], &Device::Cpu).unwrap();
            let logits = self.recorder.advance(&self.model, &ids, &mut self.cache, &mut self.steps).unwrap();
            logits.map(|logits| logits.flatten_all().unwrap().to_vec1().unwrap())
        }

        /// Computes a step without recording.
        fn usual_step(&mut self, id: u32) -> Vec<f32> {
            let ids = Tensor::new(&[[id]], &Device::Cpu).unwrap();
            let logits = self.model.forward_with(
                &ids,
                LogitsFor::LastToken,
                Some(&mut self.cache),
                &mut Pass::inference(),
            );
            logits.unwrap().flatten_all().unwrap().to_vec1().unwrap()
        }

        fn prepared() -> Self {
            let mut sequence = Self::new();
            for id in [1, 2] {
                assert_eq!(sequence.step(id), None);
                sequence.usual_step(id);
            }
            assert!(sequence.step(3).is_some());
            assert!(matches!(sequence.steps.of(1), Some(Step::Prepared(_))));
            sequence
        }

        /// ID and position that the recording reads.
        fn inputs(&self) -> [u32; 2] {
            let Some(Step::Recorded(_, memory) | Step::Prepared(memory)) = self.steps.of(1) else {
                panic!("expected memory, found none");
            };
            [&memory.ids, &memory.positions].map(|tensor| tensor.flatten_all().unwrap().to_vec1().unwrap()[0])
        }
    }

    #[test]
    fn steps_are_counted_then_prepared_then_replayed() {
        let (mut sequence, mut usual) = (Sequence::prepared(), Sequence::new());
        usual.model = sequence.model.clone();
        usual.usual_step(1);
        usual.usual_step(2);
        let expected = usual.usual_step(3);
        assert_eq!((sequence.inputs(), sequence.cache.lengths()), ([3, 2], [3].as_slice()));
        // The fake recording runs the work once, on the prepared inputs, so replays do not change the logits.
        assert_eq!(sequence.step(4), Some(expected.clone()));
        assert_eq!((sequence.inputs(), sequence.cache.lengths()), ([4, 3], [4].as_slice()));
        assert_eq!(sequence.step(5), Some(expected));
        assert_eq!((sequence.inputs(), sequence.cache.lengths()), ([5, 4], [5].as_slice()));
        assert_eq!((ATTEMPTS.get(), REPLAYS.get(), DROPS.get()), (1, 2, 0));
        drop(sequence);
        assert_eq!(DROPS.get(), 1);
    }

    #[test]
    fn returned_logits_do_not_share_memory_with_the_recording() {
        let mut sequence = Sequence::prepared();
        let ids = Tensor::new(&[[4u32]], &Device::Cpu).unwrap();
        let logits =
            sequence.recorder.advance(&sequence.model, &ids, &mut sequence.cache, &mut sequence.steps);
        let logits = logits.unwrap().unwrap();
        let before: Vec<f32> = logits.flatten_all().unwrap().to_vec1().unwrap();
        let Some(Step::Recorded(_, memory)) = sequence.steps.of(1) else { panic!("expected a recording") };
        memory.logits.slice_set(&memory.logits.zeros_like().unwrap(), 0, 0).unwrap();
        assert_eq!(logits.flatten_all().unwrap().to_vec1::<f32>().unwrap(), before);
    }

    #[test]
    fn recording_waits_while_other_threads_use_the_device() {
        let mut sequence = Sequence::prepared();
        ATTEMPT.set(Attempt::DeviceIsInUse);
        assert_eq!(sequence.step(4), None);
        assert_eq!(sequence.cache.lengths(), [3]);
        assert!(matches!(sequence.steps.of(1), Some(Step::Prepared(_))));
        sequence.usual_step(4);
        ATTEMPT.set(Attempt::Records);
        assert!(sequence.step(5).is_some());
        assert_eq!((sequence.inputs(), sequence.cache.lengths()), ([5, 4], [5].as_slice()));
    }

    #[test]
    fn failed_recording_is_not_attempted_again() {
        let mut sequence = Sequence::prepared();
        ATTEMPT.set(Attempt::Fails);
        assert_eq!(sequence.step(4), None);
        assert!(matches!(sequence.steps.of(1), Some(Step::Never(reason)) if reason == "out of memory"));
        ATTEMPT.set(Attempt::Records);
        sequence.usual_step(4);
        assert_eq!((sequence.step(5), ATTEMPTS.get(), REPLAYS.get()), (None, 1, 0));
        assert_eq!(sequence.cache.lengths(), [4]);
    }

    #[test]
    fn recording_of_other_weights_is_replaced() {
        let mut sequence = Sequence::prepared();
        assert!(sequence.step(4).is_some());
        sequence.recorder = StepRecorder { model: Arc::new(()) };
        assert!(sequence.step(5).is_some());
        assert!(matches!(sequence.steps.of(1), Some(Step::Prepared(_))));
        assert_eq!((sequence.inputs(), REPLAYS.get(), DROPS.get()), ([5, 4], 1, 1));
    }

    #[test]
    fn invalid_id_is_refused_before_a_replay() {
        let mut sequence = Sequence::prepared();
        assert!(sequence.step(4).is_some());
        let ids = Tensor::new(&[[11u32]], &Device::Cpu).unwrap();
        let result =
            sequence.recorder.advance(&sequence.model, &ids, &mut sequence.cache, &mut sequence.steps);
        assert!(result.is_err());
        assert_eq!((sequence.inputs(), sequence.cache.lengths(), REPLAYS.get()), ([4, 3], [4].as_slice(), 1));
    }
}
