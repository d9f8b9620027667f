//! Differentiable operations with their own backward pass, and the tape that runs it.
//!
//! Every operation is a candle custom op, so candle's `backward` also computes the operation's gradients. But
//! for each gradient that leaves an operation, candle allocates a tensor of zeros and adds the gradient to
//! it. candle also keeps all saved tensors until the end.
//!
//! [`gradients`] therefore runs its own backward pass through these operations. Gradients are added in place,
//! and products accumulate into existing sums. Gradients of variables use memory that the next step reuses.
//! An operation's saved tensors are freed after its backward pass.
//!
//! In this mode, candle sees each result as a variable. candle's own backward pass covers only its operations
//! between two of these operations, or between the last one and the loss.

#![expect(unsafe_code, reason = "gradients are written to uninitialized memory")]

use std::collections::HashSet;
use std::marker::PhantomData;
use std::sync::{Arc, Mutex, PoisonError};

use candle_core::op::BackpropOp;
use candle_core::{
    CpuStorage, CudaStorage, CustomOp1, CustomOp2, CustomOp3, DType, Device, InplaceOp1, Layout,
    MetalStorage, Result, Shape, Storage, Tensor, TensorId, Var,
};

use super::float::{CpuFloat, elements_mut, for_float, with_elements};
use crate::error::KernelError;
use crate::per_thread::{
    Operation, Recording, Step, Sum, Sums, Tape, check_interrupted, has_cpu_kernels, is_recording,
    is_without_gradients, with_recording, with_tape,
};

/// Records an operation and returns its output, through which gradients reach the inputs.
///
/// There are one to three inputs. The output must be contiguous in its storage, on the inputs' device.
pub(crate) fn record(
    inputs: &[&Tensor],
    output: Storage,
    shape: impl Into<Shape>,
    operation: impl Operation,
) -> Result<Tensor> {
    check_interrupted()?;
    let shape = shape.into();
    if is_without_gradients() || !inputs.iter().any(|input| input.track_op()) {
        return Ok(Tensor::from_storage(output, shape, BackpropOp::none(), false));
    }
    // Browser builds have no backward pass, which would be a quarter of the engine's code.
    if cfg!(all(target_arch = "wasm32", target_os = "unknown")) {
        candle_core::bail!("{}: gradients are not supported in browsers", operation.name());
    }
    let operation: Arc<dyn Operation> = Arc::new(operation);
    if is_recording() {
        let output = Tensor::from_storage(output, shape, BackpropOp::none(), true);
        let inputs = inputs.iter().map(|input| (*input).clone()).collect();
        let step = Step { output: output.id(), inputs, operation };
        with_recording(|recording| recording.steps.push(step));
        return Ok(output);
    }
    let node = Node { operation: Arc::clone(&operation), output: Mutex::new(Some((output, shape))) };
    match inputs {
        [x] => x.apply_op1(node),
        [x, y] => x.apply_op2(y, node),
        [x, y, z] => x.apply_op3(y, z, node),
        _ => candle_core::bail!("{}: expected one to three inputs, found {}", operation.name(), inputs.len()),
    }
}

/// Records an operation whose output was computed without gradients.
///
/// The output comes from a composition of candle operations or a GPU kernel.
pub(crate) fn record_tensor(inputs: &[&Tensor], y: Tensor, operation: impl Operation) -> Result<Tensor> {
    if is_without_gradients() || !inputs.iter().any(|input| input.track_op()) {
        check_interrupted()?;
        return Ok(y);
    }
    let y = if y.is_contiguous() && y.layout().start_offset() == 0 { y } else { y.force_contiguous()? };
    let (storage, layout) = y.storage_and_layout();
    record(inputs, storage.try_clone(layout)?, y.shape(), operation)
}

/// Memory for a variable's gradient that is computed before the backward pass begins.
///
/// Callers overwrite the memory, then pass it to [`Sums::add`].
pub(crate) fn memory_for(variable: &Tensor) -> Result<Tensor> {
    let memory = with_recording(|recording| recording.sums.take_memory(variable.id())).flatten();
    memory.map_or_else(|| unwritten(variable), Ok)
}

/// Uninitialized memory for a tensor's first gradient; callers must fill it before reading it.
fn unwritten(tensor: &Tensor) -> Result<Tensor> {
    // SAFETY: every bit pattern is a valid value of the dtype, and the first write does not depend on the
    // contents.
    unsafe { Tensor::empty(tensor.shape(), tensor.dtype(), tensor.device()) }
}

impl Sums {
    /// Whether `input` depends on a variable and therefore needs a gradient.
    pub(crate) fn wants(&self, input: &Tensor) -> bool {
        input.track_op()
    }

    /// Adds a gradient that has no other owner.
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

    /// Adds a gradient that may have other owners.
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

    /// Adds a gradient of a CPU tensor by calling `update` with the memory of the sum.
    ///
    /// If the flag passed to `update` is true, `update` must overwrite the memory. Otherwise it must add to
    /// it.
    pub(crate) fn update<T: CpuFloat>(
        &mut self,
        input: &Tensor,
        update: impl FnOnce(&mut [T], bool),
    ) -> Result<()> {
        if !self.wants(input) {
            return Ok(());
        }
        let (sum, is_fresh) = match self.0.remove(&input.id()) {
            None => (unwritten(input)?, true),
            Some(Sum::Memory(memory)) => (memory, true),
            Some(Sum::Owned(sum)) => (sum, false),
            Some(Sum::Shared(shared)) => (shared.force_contiguous()?, false),
        };
        in_place(&sum, |values| update(values, is_fresh))?;
        self.0.insert(input.id(), Sum::Owned(sum));
        Ok(())
    }

    /// Removes and returns the sum of a tensor's gradients, if there is one.
    fn take(&mut self, id: TensorId) -> Option<Tensor> {
        match self.0.remove(&id)? {
            Sum::Memory(_) => None,
            Sum::Owned(sum) | Sum::Shared(sum) => Some(sum),
        }
    }

    /// Like [`Sums::take`], but returns memory that has no other owner.
    fn take_owned(&mut self, id: TensorId) -> Result<Option<Tensor>> {
        match self.0.remove(&id) {
            Some(Sum::Owned(sum)) => Ok(Some(sum)),
            Some(Sum::Shared(sum)) => Ok(Some(sum.force_contiguous()?)),
            Some(Sum::Memory(_)) | None => Ok(None),
        }
    }

    /// Removes and returns the memory for a tensor's first gradient, if there is any.
    fn take_memory(&mut self, id: TensorId) -> Option<Tensor> {
        match self.0.remove(&id)? {
            Sum::Memory(memory) => Some(memory),
            sum => {
                self.0.insert(id, sum);
                None
            }
        }
    }

    /// Runs the backward pass through the steps that led to `output`, freeing each step after use.
    fn pass_back(&mut self, mut steps: Vec<Step>, output: Tensor, gradient: Tensor) -> Result<()> {
        self.share(&output, &gradient)?;
        self.pass_candle(&output)?;
        // From here on, only the steps own the tensors saved by the forward pass.
        drop((output, gradient));
        while let Some(Step { output, inputs, operation }) = steps.pop() {
            check_interrupted()?;
            if let Some(gradient) = self.take(output) {
                operation.backward(&inputs, &gradient, self)?;
                inputs.iter().try_for_each(|input| self.pass_candle(input))?;
            }
        }
        Ok(())
    }

    /// Backpropagates the gradient of `output` through the candle operations that computed it.
    fn pass_candle(&mut self, output: &Tensor) -> Result<()> {
        if output.is_variable() || !output.track_op() {
            return Ok(());
        }
        let Some(gradient) = self.take(output.id()) else { return Ok(()) };
        let mut store = (output * gradient.to_dtype(output.dtype())?)?.sum_all()?.backward()?;
        for node in output.sorted_nodes().into_iter().filter(|node| node.is_variable()) {
            if let Some(gradient) = store.remove(node) {
                // candle may return one tensor for several variables, and its gradients are still part of a
                // graph.
                self.share(node, &gradient.detach())?;
            }
        }
        Ok(())
    }
}

/// Adds a gradient to `sum`, in place if possible; `sum` must have no other owner.
fn added(sum: Tensor, gradient: &Tensor) -> Result<Tensor> {
    fn add<T: CpuFloat>(sum: &Tensor, gradient: &Tensor) -> Result<()> {
        with_elements::<T, 1, _>([gradient], |[gradient]| {
            in_place(sum, |values: &mut [T]| T::add_to(values, gradient))
        })
    }
    let is_alike = sum.shape() == gradient.shape() && sum.dtype() == gradient.dtype();
    // A storage that is being changed must not be read at the same time.
    if has_cpu_kernels(&sum) && sum.is_contiguous() && is_alike && storage_of(&sum) != storage_of(gradient) {
        for_float!(sum.dtype(), add(&sum, gradient))?;
        return Ok(sum);
    }
    sum + gradient
}

/// Address that identifies a tensor's storage; views share it.
pub(super) fn storage_of(tensor: &Tensor) -> *const Storage {
    let (storage, _) = tensor.storage_and_layout();
    &raw const *storage
}

/// Calls `change` with the elements of a contiguous tensor, which no other thread may be using.
pub(super) fn in_place<T: CpuFloat, R>(tensor: &Tensor, change: impl FnOnce(&mut [T]) -> R) -> Result<R> {
    /// Holds the closure before the call and its result after it.
    struct InPlace<F, R, T>(Mutex<(Option<F>, Option<R>)>, PhantomData<T>);
    impl<T: CpuFloat, R, F: FnOnce(&mut [T]) -> R> InplaceOp1 for InPlace<F, R, T> {
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
    result.ok_or_else(|| candle_core::Error::Msg("expected a tensor on the CPU".into()))
}

/// Node in candle's graph.
struct Node {
    operation: Arc<dyn Operation>,
    /// Computed output, until candle turns it into a tensor.
    output: Mutex<Option<(Storage, Shape)>>,
}

impl Node {
    /// Returns the computed output; `of_device` extracts the storage of the inputs' device.
    fn output<S>(&self, of_device: impl FnOnce(Storage) -> Option<S>) -> Result<(S, Shape)> {
        let (name, output) = (self.operation.name(), &self.output);
        let Some((output, shape)) = output.lock().unwrap_or_else(PoisonError::into_inner).take() else {
            candle_core::bail!("{name}: candle computed the operation twice");
        };
        match of_device(output) {
            Some(output) => Ok((output, shape)),
            None => candle_core::bail!("{name}: inputs and output are on different devices"),
        }
    }

    /// Computes the gradients of the inputs for candle's own backward pass.
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
                "{}: candle's backward pass would skip variables inside this operation; use this crate's `gradients`",
                self.operation.name()
            );
        }
        Ok(gradients)
    }
}

/// Expands to the given type; used to repeat the type once for each input.
macro_rules! for_input {
    ($input:ident, $type:ty) => {
        $type
    };
}

/// Implements candle's custom op trait for one input count; the output is already computed.
macro_rules! custom_op {
    ($custom_op:ident: $($input:ident)+ => $gradients:ty, $result:expr) => {
        impl $custom_op for Node {
            fn name(&self) -> &'static str {
                self.operation.name()
            }

            fn cpu_fwd(&self, $(_: for_input!($input, &CpuStorage), _: &Layout),+) -> Result<(CpuStorage, Shape)> {
                self.output(|output| if let Storage::Cpu(output) = output { Some(output) } else { None })
            }

            fn cuda_fwd(&self, $(_: for_input!($input, &CudaStorage), _: &Layout),+) -> Result<(CudaStorage, Shape)> {
                self.output(|output| if let Storage::Cuda(output) = output { Some(output) } else { None })
            }

            fn metal_fwd(&self, $(_: for_input!($input, &MetalStorage), _: &Layout),+) -> Result<(MetalStorage, Shape)> {
                self.output(|output| if let Storage::Metal(output) = output { Some(output) } else { None })
            }

            fn bwd(
                &self,
                $($input: &Tensor,)+
                _: &Tensor,
                gradient: &Tensor,
            ) -> Result<$gradients> {
                let [$($input),+] = self.gradients([$($input),+], gradient)?;
                Ok($result)
            }
        }
    };
}

custom_op!(CustomOp1: x => Option<Tensor>, x);
custom_op!(CustomOp2: x y => (Option<Tensor>, Option<Tensor>), (x, y));
custom_op!(CustomOp3: x y z => (Option<Tensor>, Option<Tensor>, Option<Tensor>), (x, y, z));

/// Initial contents of the gradient sums, for [`gradients`].
#[derive(Debug)]
pub enum InitialGradients {
    /// Starts without sums and allocates memory.
    Nothing,
    /// Reuses the memory of one contiguous tensor for each variable, in the variable's shape.
    ///
    /// The tensors must have no other owner. A tensor that shares memory with another one or with a variable
    /// is not used.
    Memory(Vec<Tensor>),
    /// Adds the new gradients to one contiguous tensor for each variable, in the variable's shape.
    ///
    /// The tensors must have no other owner. A tensor that shares memory with another one or with a variable
    /// is copied.
    Gradients(Vec<Tensor>),
}

impl InitialGradients {
    /// Initial sums for the variables.
    fn sums(self, variables: &[&Tensor]) -> Result<Sums> {
        let (tensors, is_memory) = match self {
            Self::Nothing => return Ok(Sums::default()),
            Self::Memory(tensors) => (tensors, true),
            Self::Gradients(tensors) => (tensors, false),
        };
        if tensors.len() != variables.len() {
            let (variables, found) = (variables.len(), tensors.len());
            return Err(KernelError::GradientCount { variables, found }.into());
        }
        let mut storages: HashSet<_> = variables.iter().map(|variable| storage_of(variable)).collect();
        let mut sums = Sums::default();
        for (variable, tensor) in variables.iter().zip(tensors) {
            let is_alike = tensor.shape() == variable.shape() && tensor.dtype() == variable.dtype();
            if !is_alike || !tensor.is_contiguous() || !tensor.device().same_device(variable.device()) {
                let (expected, found) = (variable.dims().to_vec(), tensor.dims().to_vec());
                return Err(KernelError::GradientShape { expected, found }.into());
            }
            let sum = match (storages.insert(storage_of(&tensor)), is_memory) {
                (true, true) => Sum::Memory(tensor),
                (true, false) => Sum::Owned(tensor),
                (false, true) => continue,
                (false, false) => Sum::Owned(tensor.force_contiguous()?),
            };
            sums.0.insert(variable.id(), sum);
        }
        Ok(sums)
    }
}

/// Computes a loss with `compute`, and the gradient of `factor · loss` for each variable.
///
/// The gradient is `None` if the loss does not depend on the variable.
///
/// ```
/// use candle_core::{Device, Tensor, Var};
/// use candle_gpt2_kernels::{InitialGradients, gradients};
///
/// let x = Var::new(&[2f32, 3., 5.], &Device::Cpu)?;
/// let (loss, found) = gradients(&[&x], InitialGradients::Nothing, 10.0, || x.sqr()?.sum_all())?;
/// assert_eq!(loss, 38.);
/// let gradient = found[0].as_ref().expect("the loss depends on it");
/// assert_eq!(gradient.to_vec1::<f32>()?, [40., 60., 100.]);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
/// If the computation fails or the loss is not a scalar. Also if the tensors in `before` differ from the
/// variables in number, shape, dtype or device, or are not contiguous.
pub fn gradients(
    variables: &[&Tensor],
    before: InitialGradients,
    factor: f64,
    compute: impl FnOnce() -> Result<Tensor>,
) -> Result<(f64, Vec<Option<Tensor>>)> {
    let sums = before.sums(variables)?;
    let recording = Tape::Recording(Recording { steps: Vec::new(), sums });
    let (loss, Recording { steps, mut sums }) = with_tape(recording, compute)?;
    let value = loss.to_device(&Device::Cpu)?.to_dtype(DType::F64)?.to_scalar::<f64>()?;
    let factor = Tensor::new(factor, &Device::Cpu)?.to_dtype(loss.dtype())?.to_device(loss.device())?;
    sums.pass_back(steps, loss, factor)?;
    let gradients = variables.iter().map(|variable| sums.take_owned(variable.id())).collect::<Result<_>>()?;
    Ok((value, gradients))
}

/// Computes `compute(x)` with gradient checkpointing.
///
/// Inside [`gradients`], only `x` is saved, and the backward pass runs `compute` again. `compute` must return
/// the same result each time.
///
/// ```
/// use candle_core::{Device, Var};
/// use candle_gpt2_kernels::{InitialGradients, gradients, recomputed};
///
/// let x = Var::new(&[2f32, 3., 5.], &Device::Cpu)?;
/// let fourth_powers = || recomputed(&x, |x| x.sqr()?.sqr())?.sum_all();
/// let (_, found) = gradients(&[&x], InitialGradients::Nothing, 1.0, fourth_powers)?;
/// let gradient = found[0].as_ref().expect("the loss depends on it");
/// assert_eq!(gradient.to_vec1::<f32>()?, [32., 108., 500.], "4 x³");
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
/// If the computation fails.
pub fn recomputed(
    x: &Tensor,
    compute: impl Fn(&Tensor) -> Result<Tensor> + Send + Sync + 'static,
) -> Result<Tensor> {
    if !is_recording() {
        return compute(x);
    }
    let (y, _) = with_tape(Tape::Paused, || compute(x))?;
    // With a constant input, the result would be a constant, even if `compute` uses variables.
    let x = if x.track_op() { x.clone() } else { Var::from_tensor(x)?.into_inner() };
    record_tensor(&[&x], y, Recomputed(Box::new(compute)))
}

/// Computation that the backward pass runs again.
struct Recomputed(Box<Computation>);

type Computation = dyn Fn(&Tensor) -> Result<Tensor> + Send + Sync;

impl Operation for Recomputed {
    fn name(&self) -> &'static str {
        "recomputed"
    }

    fn backward(&self, inputs: &[Tensor], gradient: &Tensor, sums: &mut Sums) -> Result<()> {
        let x = &inputs[0];
        let (y, recording) = with_tape(Tape::Recording(Recording::default()), || (self.0)(x))?;
        sums.pass_back(recording.steps, y, gradient.clone())
    }
}
