//! Python functions that observe, and may replace, a model's activations.

use std::sync::{Arc, Mutex};

use candle_core::Tensor;
use candle_gpt2::{Observer, Site};
use candle_gpt2_engine::LoadedModel;
use candle_gpt2_interpret::named_sites;
use numpy::{PyArrayDyn, PyArrayMethods, PyUntypedArrayMethods};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::control_vector::ControlVector;
use crate::errors::{Result, type_error, value_error};
use crate::model::Model;
use crate::raised::Raised;
use crate::steering::Steering;
use crate::values::{Values, float_array, tensor, type_name};

enum Hook {
    /// Python function.
    Function { sites: Vec<Site>, function: Py<PyAny> },
    /// Direction added to the residual stream.
    Steering(candle_gpt2_interpret::Steering),
    /// Directions added at every position.
    ControlVector(candle_gpt2_interpret::ControlVector),
    /// Array that replaces an activation.
    Array { site: Site, array: Tensor },
}

impl Hook {
    fn wants(&self, site: Site) -> bool {
        match self {
            Self::Function { sites, .. } => sites.contains(&site),
            Self::Steering(steering) => steering.wants(site),
            Self::ControlVector(vector) => vector.wants(site),
            Self::Array { site: replaced, .. } => *replaced == site,
        }
    }
}

/// Observer that calls Python functions and applies steering.
pub(crate) struct Hooks {
    hooks: Vec<Hook>,
    raised: Raised,
}

impl Hooks {
    /// Reads the `hooks` argument.
    ///
    /// The argument is a list of `Steering` objects, `ControlVector` objects, and pairs of a hook point
    /// name or pattern and a function or array. An array replaces the activation. A single `Steering` or
    /// `ControlVector` needs no list.
    pub(crate) fn read(value: Option<&Bound<'_, PyAny>>, n_layer: usize, raised: &Raised) -> Result<Self> {
        let mut hooks = Vec::new();
        let items: Vec<Bound<'_, PyAny>> = match value {
            // A single hook without a list.
            Some(item) if item.cast::<Steering>().is_ok() || item.cast::<ControlVector>().is_ok() => {
                vec![item.clone()]
            }
            Some(items) => items.try_iter()?.collect::<PyResult<_>>()?,
            None => Vec::new(),
        };
        for item in items {
            if let Ok(steering) = item.cast::<Steering>() {
                hooks.push(Hook::Steering(steering.get().fresh()));
                continue;
            }
            if let Ok(item) = item.cast::<ControlVector>() {
                hooks.push(Hook::ControlVector(item.get().0.clone()));
                continue;
            }
            let (name, function): (String, Bound<'_, PyAny>) = item.extract().map_err(|_| {
                type_error("hooks: expected a list of (name, function) pairs, such as [(\"blocks.0.hook_resid_post\", f)]")
            })?;
            let sites = named_sites(&name, n_layer)?;
            if !function.is_callable() {
                let Some(array) = tensor(&function).ok().filter(|_| function.len().is_ok()) else {
                    let found = type_name(&function);
                    return Err(type_error(format!(
                        "hooks: expected a function or an array for {name:?}, found {found}"
                    )));
                };
                hooks.extend(sites.into_iter().map(|site| Hook::Array { site, array: array.clone() }));
                continue;
            }
            hooks.push(Hook::Function { sites, function: function.unbind() });
        }
        Ok(Self { hooks, raised: raised.clone() })
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.hooks.is_empty()
    }

    /// Rejects Python functions, because they have no gradient.
    pub(crate) fn check_differentiable(&self) -> Result<()> {
        match self.hooks.iter().find_map(|hook| match hook {
            Hook::Function { sites, .. } => sites.first(),
            _ => None,
        }) {
            Some(site) => Err(value_error(format!(
                "hooks: the function at {site} cannot be differentiated; pass an array, a Steering or a ControlVector, or use \
                 HookedTransformer with torch"
            ))),
            None => Ok(()),
        }
    }
}

impl Observer for Hooks {
    fn wants(&self, site: Site) -> bool {
        self.hooks.iter().any(|hook| hook.wants(site))
    }

    fn begin(&mut self, past_lengths: &[usize], tokens: usize) {
        for hook in &mut self.hooks {
            if let Hook::Steering(steering) = hook {
                steering.begin(past_lengths, tokens);
            }
        }
    }

    fn observe(&mut self, site: Site, value: Tensor) -> candle_core::Result<Tensor> {
        let mut wanting = self.hooks.iter_mut().filter(|hook| hook.wants(site));
        wanting.try_fold(value, |value, hook| {
            let function = match hook {
                Hook::Steering(steering) => return steering.observe(site, value),
                Hook::ControlVector(vector) => return vector.observe(site, value),
                Hook::Array { array, .. } => return as_replacement(site, array, &value),
                Hook::Function { function, .. } => function,
            };
            let values = Values::from_tensor(&value)?;
            let result = self.raised.serving(|| Python::attach(|py| call_hook(py, function, site, values)));
            let replaced = result.map_err(|error| {
                self.raised.store(error);
                candle_core::Error::Msg(format!("a hook at {site} raised an exception"))
            })?;
            match replaced {
                Some(numbers) => {
                    Tensor::from_vec(numbers, value.shape(), value.device())?.to_dtype(value.dtype())
                }
                None => Ok(value),
            }
        })
    }
}

/// Converts an array to the dtype, device and shape of the activation that it replaces.
fn as_replacement(site: Site, array: &Tensor, value: &Tensor) -> candle_core::Result<Tensor> {
    let array = array.to_dtype(value.dtype())?.to_device(value.device())?;
    match array.broadcast_as(value.shape()) {
        Ok(array) => array.contiguous(),
        Err(_) => candle_core::bail!(
            "hooks: the array at {site} has shape {:?}; expected {:?}, or a shape that broadcasts to it",
            array.dims(),
            value.dims()
        ),
    }
}

/// Calls a hook and returns the values that replace the activation, or `None` to keep it.
fn call_hook(py: Python<'_>, function: &Py<PyAny>, site: Site, values: Values) -> PyResult<Option<Vec<f32>>> {
    let name = site.to_string();
    call_with_values(py, values, &format!("a hook at {site}"), |array| function.call1(py, (array, name)))
}

/// Calls a Python function with values, and returns its result unless it is `None`.
pub(crate) fn call_with_values<'py>(
    py: Python<'py>,
    values: Values,
    what: &str,
    function: impl FnOnce(Bound<'py, PyArrayDyn<f32>>) -> PyResult<Py<PyAny>>,
) -> PyResult<Option<Vec<f32>>> {
    let array = values.into_array(py)?;
    // Writes to this array would have no effect, so make it read-only.
    let flags = PyDict::new(py);
    flags.set_item("write", false)?;
    array.call_method("setflags", (), Some(&flags))?;
    let result = function(array.clone())?;
    if result.is_none(py) {
        return Ok(None);
    }
    let result = result.bind(py);
    let result = float_array(result).map_err(|error| {
        let (found, shape) = (type_name(result), array.shape());
        value_error(format!(
            "{what} returned a {found} that cannot be converted to an array of shape {shape:?}: {error}"
        ))
    })?;
    if result.shape() != array.shape() {
        let message = format!(
            "{what} returned an array of shape {:?}; expected shape {:?}",
            result.shape(),
            array.shape()
        );
        return Err(value_error(message).into());
    }
    result.to_vec().map(Some).map_err(Into::into)
}

impl Model {
    /// Returns a clone of the loaded model, with the hooks attached if there are any.
    pub(crate) fn hooked(&self, hooks: Option<&Bound<'_, PyAny>>, raised: &Raised) -> Result<LoadedModel> {
        let hooks = Hooks::read(hooks, self.loaded.config().n_layer, raised)?;
        let loaded = (*self.loaded).clone();
        Ok(if hooks.is_empty() { loaded } else { loaded.observed_by(Arc::new(Mutex::new(hooks))) })
    }
}
