//! Operations with a backward pass of their own, and the way back through them.
//!
//! Every operation is one of candle's custom operations, so candle's `backward` finds its gradients among all others. But for
//! each gradient that leaves an operation candle makes a tensor of zeros, adds, and keeps what the forward pass made until
//! the end. [`gradients`] therefore goes its own way where a loss consists of these operations alone: gradients are added in
//! place, products add theirs to what is there, those of variables go into memory that is used again in the next step, and
//! what an operation kept is freed once it has been passed.

use std::cell::RefCell;
use std::collections::{HashMap, HashSet};
use std::marker::PhantomData;
use std::sync::{Arc, Mutex, PoisonError};

use candle_core::{
    CpuStorage, CustomOp1, CustomOp2, CustomOp3, DType, Device, InplaceOp1, Layout, Result, Shape, Tensor,
    TensorId, Var,
};

use super::arithmetic::Real;
use super::elementwise::add_to;
use super::{elements_mut, for_real, with_elements};

/// The backward pass of an operation.
pub(crate) trait Operation: Send + Sync + 'static {
    /// Name for messages.
    fn name(&self) -> &'static str;

    /// Adds the gradients of the inputs, as far as they are wanted, to the sums.
    fn backward(&self, inputs: &[Tensor], gradient: &Tensor, sums: &mut Sums) -> Result<()>;
}

/// The result of an operation, through which gradients lead to its inputs, of which there are one to three.
pub(crate) fn record<T: Real>(
    inputs: &[&Tensor],
    output: Vec<T>,
    shape: impl Into<Shape>,
    operation: impl Operation,
) -> Result<Tensor> {
    let shape = shape.into();
    let is_paused = TAPE.with_borrow(|tape| matches!(tape, Tape::Paused));
    if is_paused || !inputs.iter().any(|input| input.track_op()) {
        return Tensor::from_vec(output, shape, &Device::Cpu);
    }
    let operation: Arc<dyn Operation> = Arc::new(operation);
    let node = Node {
        operation: Arc::clone(&operation),
        output: Mutex::new(Some((T::to_cpu_storage_owned(output), shape))),
    };
    let output = match inputs {
        [x] => x.apply_op1(node),
        [x, y] => x.apply_op2(y, node),
        [x, y, z] => x.apply_op3(y, z, node),
        _ => candle_core::bail!("{}: one to three inputs, not {}", operation.name(), inputs.len()),
    }?;
    TAPE.with_borrow_mut(|tape| {
        if let Tape::Recording(recording) = tape {
            let inputs = inputs.iter().map(|input| (*input).clone()).collect();
            recording.steps.push(Step { output: output.id(), inputs, operation });
        }
    });
    Ok(output)
}

/// What operations on this thread leave behind.
enum Tape {
    /// Nothing but candle's graph.
    Off,
    /// The steps since the recording began.
    Recording(Recording),
    /// Nothing at all: the results are constants.
    Paused,
}

/// What is known of gradients while a loss is computed.
#[derive(Default)]
struct Recording {
    steps: Vec<Step>,
    sums: Sums,
}

/// An operation that was computed.
struct Step {
    output: TensorId,
    inputs: Vec<Tensor>,
    operation: Arc<dyn Operation>,
}

thread_local! {
    static TAPE: RefCell<Tape> = const { RefCell::new(Tape::Off) };
}

/// Whether gradients will be asked for of what this thread computes.
pub(super) fn is_recording() -> bool {
    TAPE.with_borrow(|tape| !matches!(tape, Tape::Off))
}

/// Computes with another tape, and gives back what it holds then.
fn with_tape<R>(tape: Tape, compute: impl FnOnce() -> Result<R>) -> Result<(R, Recording)> {
    /// Puts the tape before it back, in a panic too.
    struct Restore(Option<Tape>);
    impl Drop for Restore {
        fn drop(&mut self) {
            TAPE.set(self.0.take().unwrap_or(Tape::Off));
        }
    }
    let _restore = Restore(Some(TAPE.replace(tape)));
    let result = compute()?;
    match TAPE.replace(Tape::Off) {
        Tape::Recording(recording) => Ok((result, recording)),
        Tape::Off | Tape::Paused => Ok((result, Recording::default())),
    }
}

/// Computes without keeping anything for gradients.
///
/// # Errors
/// Those of the computation.
pub fn without_gradients<R>(compute: impl FnOnce() -> Result<R>) -> Result<R> {
    Ok(with_tape(Tape::Paused, compute)?.0)
}

/// Memory for the gradient of a variable that is known before the way back begins; to be handed to [`Sums::add`] then.
pub(crate) fn memory_for(variable: &Tensor) -> Result<Tensor> {
    let memory = TAPE.with_borrow_mut(|tape| match tape {
        Tape::Recording(recording) => recording.sums.take_memory(variable.id()),
        Tape::Off | Tape::Paused => None,
    });
    memory.map_or_else(|| Tensor::zeros(variable.shape(), variable.dtype(), variable.device()), Ok)
}

/// Sums of gradients by the tensor that they belong to.
#[derive(Default)]
pub(crate) struct Sums(HashMap<TensorId, Sum>);

/// The gradient of one tensor so far.
enum Sum {
    /// Memory for the first gradient; what it holds means nothing.
    Memory(Tensor),
    /// A tensor that nobody else holds.
    Owned(Tensor),
    /// A tensor that may be the gradient of other tensors too.
    Shared(Tensor),
}

impl Sums {
    /// Whether `input` leads to a variable.
    pub(crate) fn wants(&self, input: &Tensor) -> bool {
        input.track_op()
    }

    /// Adds a gradient that nobody else holds.
    pub(crate) fn add(&mut self, input: &Tensor, gradient: Tensor) -> Result<()> {
        if !self.wants(input) {
            return Ok(());
        }
        let sum = match self.0.remove(&input.id()) {
            None | Some(Sum::Memory(_)) => gradient,
            Some(Sum::Owned(sum)) => added(sum, &gradient)?,
            Some(Sum::Shared(shared)) => added(gradient, &shared)?,
        };
        self.0.insert(input.id(), Sum::Owned(sum));
        Ok(())
    }

    /// Adds a gradient that others may hold too.
    pub(crate) fn share(&mut self, input: &Tensor, gradient: &Tensor) -> Result<()> {
        if !self.wants(input) {
            return Ok(());
        }
        let sum = match self.0.remove(&input.id()) {
            None | Some(Sum::Memory(_)) => Sum::Shared(gradient.clone()),
            Some(Sum::Owned(sum)) => Sum::Owned(added(sum, gradient)?),
            Some(Sum::Shared(shared)) => Sum::Owned((shared + gradient)?),
        };
        self.0.insert(input.id(), sum);
        Ok(())
    }

    /// Adds a gradient by `update`, which is given the memory of the sum and told whether it is to overwrite it; else it adds
    /// to it.
    pub(crate) fn update<T: Real>(
        &mut self,
        input: &Tensor,
        update: impl FnOnce(&mut [T], bool),
    ) -> Result<()> {
        if !self.wants(input) {
            return Ok(());
        }
        let (sum, is_fresh) = match self.0.remove(&input.id()) {
            None => (Tensor::zeros(input.shape(), input.dtype(), input.device())?, true),
            Some(Sum::Memory(memory)) => (memory, true),
            Some(Sum::Owned(sum)) => (sum, false),
            Some(Sum::Shared(shared)) => (shared.copy()?, false),
        };
        in_place(&sum, |values| update(values, is_fresh))?;
        self.0.insert(input.id(), Sum::Owned(sum));
        Ok(())
    }

    /// The sum of a tensor's gradients, if it got any.
    fn take(&mut self, id: TensorId) -> Option<Tensor> {
        match self.0.remove(&id)? {
            Sum::Memory(_) => None,
            Sum::Owned(sum) | Sum::Shared(sum) => Some(sum),
        }
    }

    /// The same, in memory that nobody else has.
    fn take_owned(&mut self, id: TensorId) -> Result<Option<Tensor>> {
        match self.0.remove(&id) {
            Some(Sum::Owned(sum)) => Ok(Some(sum)),
            Some(Sum::Shared(sum)) => Ok(Some(sum.copy()?)),
            Some(Sum::Memory(_)) | None => Ok(None),
        }
    }

    /// The memory for a tensor's first gradient, if there is some.
    fn take_memory(&mut self, id: TensorId) -> Option<Tensor> {
        match self.0.remove(&id)? {
            Sum::Memory(memory) => Some(memory),
            sum => {
                self.0.insert(id, sum);
                None
            }
        }
    }

    /// Takes the steps backwards, and frees each when it has been taken.
    fn pass_back(&mut self, mut steps: Vec<Step>) -> Result<()> {
        while let Some(step) = steps.pop() {
            if let Some(gradient) = self.take(step.output) {
                step.operation.backward(&step.inputs, &gradient, self)?;
            }
        }
        Ok(())
    }
}

/// `sum`, which nobody else holds, with a gradient added to it.
fn added(sum: Tensor, gradient: &Tensor) -> Result<Tensor> {
    fn add<T: Real>(sum: &Tensor, gradient: &Tensor) -> Result<()> {
        with_elements::<T, 1, _>([gradient], |[gradient]| {
            in_place(sum, |values: &mut [T]| add_to(values, gradient))
        })
    }
    for_real!(sum.dtype(), add(&sum, gradient))?;
    Ok(sum)
}

/// Gives the elements of a contiguous tensor, which nobody else may be using, to `change`.
pub(super) fn in_place<T: Real, R>(tensor: &Tensor, change: impl FnOnce(&mut [T]) -> R) -> Result<R> {
    /// The change, and then its result.
    struct InPlace<F, R, T>(Mutex<(Option<F>, Option<R>)>, PhantomData<T>);
    impl<T: Real, R, F: FnOnce(&mut [T]) -> R> InplaceOp1 for InPlace<F, R, T> {
        fn name(&self) -> &'static str {
            "change-in-place"
        }

        fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> Result<()> {
            let mut slot = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(change) = slot.0.take() {
                slot.1 = Some(change(elements_mut(storage, layout)?));
            }
            Ok(())
        }
    }
    let operation = InPlace(Mutex::new((Some(change), None)), PhantomData);
    tensor.inplace_op1(&operation)?;
    let (_, result) = operation.0.into_inner().unwrap_or_else(PoisonError::into_inner);
    result.ok_or_else(|| candle_core::Error::Msg("a tensor on the CPU was expected".into()))
}

/// A step in candle's graph.
struct Node {
    operation: Arc<dyn Operation>,
    /// What was computed, until candle has made a tensor of it.
    output: Mutex<Option<(CpuStorage, Shape)>>,
}

impl Node {
    fn output(&self) -> Result<(CpuStorage, Shape)> {
        let output = self.output.lock().unwrap_or_else(PoisonError::into_inner).take();
        output.ok_or_else(|| candle_core::Error::Msg(format!("{}: computed twice", self.operation.name())))
    }

    /// The gradients of the inputs, for candle's own way back.
    fn gradients<const N: usize>(
        &self,
        inputs: [&Tensor; N],
        gradient: &Tensor,
    ) -> Result<[Option<Tensor>; N]> {
        let mut sums = Sums::default();
        self.operation.backward(&inputs.map(Tensor::clone), gradient, &mut sums)?;
        let gradients = inputs.map(|input| sums.take(input.id()));
        if !sums.0.is_empty() {
            candle_core::bail!(
                "{}: variables inside would get no gradients, since operations of candle's follow it",
                self.operation.name()
            );
        }
        Ok(gradients)
    }
}

impl CustomOp1 for Node {
    fn name(&self) -> &'static str {
        self.operation.name()
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        self.output()
    }

    fn bwd(&self, x: &Tensor, _: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        let [x] = self.gradients([x], gradient)?;
        Ok(x)
    }
}

impl CustomOp2 for Node {
    fn name(&self) -> &'static str {
        self.operation.name()
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        self.output()
    }

    fn bwd(
        &self,
        x: &Tensor,
        y: &Tensor,
        _: &Tensor,
        gradient: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let [x, y] = self.gradients([x, y], gradient)?;
        Ok((x, y))
    }
}

impl CustomOp3 for Node {
    fn name(&self) -> &'static str {
        self.operation.name()
    }

    fn cpu_fwd(
        &self,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        self.output()
    }

    fn bwd(
        &self,
        x: &Tensor,
        y: &Tensor,
        z: &Tensor,
        _: &Tensor,
        gradient: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let [x, y, z] = self.gradients([x, y, z], gradient)?;
        Ok((x, y, z))
    }
}

/// What gradients start from.
#[derive(Debug)]
pub enum Before {
    /// Nothing.
    Nothing,
    /// Tensors in the shapes of the variables, whose memory is taken for the gradients.
    Memory(Vec<Tensor>),
    /// Gradients that the new ones are added to, which nobody else may hold.
    Gradients(Vec<Tensor>),
}

/// The loss that `compute` gives, and the gradients of `factor · loss` for each of the variables, where it has one.
///
/// # Errors
/// Those of the computation; and when the loss is no scalar.
pub fn gradients(
    variables: &[&Tensor],
    before: Before,
    factor: f64,
    compute: impl FnOnce() -> Result<Tensor>,
) -> Result<(f64, Vec<Option<Tensor>>)> {
    let mut sums = Sums::default();
    let ids = variables.iter().map(|variable| variable.id());
    match before {
        Before::Nothing => {}
        Before::Memory(tensors) => sums.0.extend(ids.zip(tensors.into_iter().map(Sum::Memory))),
        Before::Gradients(tensors) => sums.0.extend(ids.zip(tensors.into_iter().map(Sum::Owned))),
    }
    let recording = Tape::Recording(Recording { steps: Vec::new(), sums });
    let (loss, Recording { steps, mut sums }) = with_tape(recording, compute)?;
    let value = loss.to_dtype(DType::F64)?.to_scalar::<f64>()?;
    if is_complete(&loss, &steps, None) {
        sums.0.insert(loss.id(), Sum::Owned(Tensor::new(factor, &Device::Cpu)?.to_dtype(loss.dtype())?));
        // The steps alone hold what the forward pass kept, from here on.
        drop(loss);
        sums.pass_back(steps)?;
    } else {
        drop(steps);
        let mut store = (loss * factor)?.backward()?;
        for variable in variables {
            if let Some(gradient) = store.remove(variable) {
                sums.add(variable, gradient)?;
            }
        }
    }
    let gradients = variables.iter().map(|variable| sums.take_owned(variable.id())).collect::<Result<_>>()?;
    Ok((value, gradients))
}

/// What `compute` makes of `x`, where gradients are asked for: without keeping anything but `x`, and by computing it again
/// on the way back. It must compute the same each time, of the operations of this crate.
///
/// # Errors
/// Those of the computation; on the way back also when it uses other operations.
pub fn recomputed(
    x: &Tensor,
    compute: impl Fn(&Tensor) -> Result<Tensor> + Send + Sync + 'static,
) -> Result<Tensor> {
    fn record_again<T: Real>(x: &Tensor, y: &Tensor, operation: Recomputed) -> Result<Tensor> {
        let values = with_elements::<T, 1, _>([y], |[y]| Ok(y.to_vec()))?;
        record(&[x], values, y.shape(), operation)
    }
    if !TAPE.with_borrow(|tape| matches!(tape, Tape::Recording(_))) {
        return compute(x);
    }
    let (y, _) = with_tape(Tape::Paused, || compute(x))?;
    // A constant input would make a constant of the result, although variables are used on the way to it.
    let x = if x.track_op() { x.clone() } else { Var::from_tensor(x)?.into_inner() };
    for_real!(y.dtype(), record_again(&x, &y, Recomputed(Box::new(compute))))
}

/// A computation that is to be made again.
struct Recomputed(Box<Computation>);

type Computation = dyn Fn(&Tensor) -> Result<Tensor> + Send + Sync;

impl Operation for Recomputed {
    fn name(&self) -> &'static str {
        "recomputed"
    }

    fn backward(&self, inputs: &[Tensor], gradient: &Tensor, sums: &mut Sums) -> Result<()> {
        let x = &inputs[0];
        let (y, recording) = with_tape(Tape::Recording(Recording::default()), || (self.0)(x))?;
        if !is_complete(&y, &recording.steps, Some(x)) {
            candle_core::bail!("only operations with a backward pass of their own can be computed again");
        }
        sums.0.insert(y.id(), Sum::Shared(gradient.clone()));
        drop(y);
        sums.pass_back(recording.steps)
    }
}

/// Whether `output` follows from variables, and from `input`, by these steps alone.
fn is_complete(output: &Tensor, steps: &[Step], input: Option<&Tensor>) -> bool {
    let before = input.map(Tensor::sorted_nodes).unwrap_or_default();
    let known: HashSet<TensorId> =
        steps.iter().map(|step| step.output).chain(before.into_iter().map(Tensor::id)).collect();
    output.sorted_nodes().into_iter().all(|node| node.is_variable() || known.contains(&node.id()))
}
