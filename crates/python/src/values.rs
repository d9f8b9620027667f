//! Conversions between Python and Rust: JSON, token IDs, paths and arrays.

use std::path::PathBuf;

use candle_core::{DType, Device, Tensor};
use candle_gpt2_engine::Vocabulary;
use numpy::{PyArray1, PyArrayDyn, PyArrayMethods, PyReadonlyArrayDyn, PyUntypedArrayMethods};
use pyo3::exceptions::{PyOverflowError, PyTypeError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyByteArray, PyBytes, PyDict, PyFloat, PyInt, PyList, PyString, PyTuple};
use serde::Serialize;
use serde_json::{Map, Value};

use crate::errors::{Result, gpt2_error, type_error, value_error};

/// A text or token IDs.
pub(crate) enum Text {
    Words(String),
    Ids(Vec<u32>),
}

/// One text, or a list whose members may be invalid.
pub(crate) enum Texts {
    One(Text),
    Many(Vec<Result<Text>>),
}

impl Text {
    /// Reads a string, or a sequence or array of integers.
    ///
    /// An array may also have two dimensions and a single row.
    pub(crate) fn read(value: &Bound<'_, PyAny>) -> Result<Self> {
        let several = || type_error("expected one text or one sequence of token ids, found several");
        match Texts::read(value)? {
            Texts::One(text) => Ok(text),
            Texts::Many(mut texts) => match (texts.pop().transpose()?, texts.is_empty()) {
                (None, _) => Ok(Self::Ids(Vec::new())),
                (Some(row @ Self::Ids(_)), true) => Ok(row),
                _ => Err(several()),
            },
        }
    }

    /// Encodes the text, unless it is token IDs already.
    ///
    /// The caller must have released the GIL.
    pub(crate) fn encoded(self, vocabulary: &Vocabulary) -> Result<Vec<u32>> {
        match self {
            Self::Words(text) => Ok(vocabulary.encode(&text)?),
            Self::Ids(ids) => Ok(ids),
        }
    }

    /// Encodes the text, preceded by a BOS token if there is one; token IDs remain unchanged.
    ///
    /// The caller must have released the GIL.
    pub(crate) fn encoded_after(self, bos: Option<u32>, vocabulary: &Vocabulary) -> Result<Vec<u32>> {
        let bos = bos.filter(|_| matches!(self, Self::Words(_)));
        Ok(bos.into_iter().chain(self.encoded(vocabulary)?).collect())
    }

    /// Decodes the tokens.
    ///
    /// The caller must have released the GIL.
    pub(crate) fn decoded(self, vocabulary: &Vocabulary, skip_special_tokens: bool) -> Result<String> {
        let ids = self.encoded(vocabulary)?;
        Ok(vocabulary.decode(&ids, skip_special_tokens)?)
    }
}

impl Texts {
    /// Reads a string, a sequence or array of integers, or a list of either.
    ///
    /// An empty list counts as a list of texts.
    pub(crate) fn read(value: &Bound<'_, PyAny>) -> Result<Self> {
        let items = match words_or_items(value)? {
            Ok(words) => return Ok(Self::One(Text::Words(words))),
            Err(items) => items,
        };
        if items.first().is_some_and(is_id) {
            return Ok(Self::One(Text::Ids(ids(&items)?)));
        }
        let text = |item: &Bound<'_, PyAny>| {
            Ok(match words_or_items(item)? {
                Ok(words) => Text::Words(words),
                Err(items) => Text::Ids(ids(&items)?),
            })
        };
        Ok(Self::Many(items.iter().map(text).collect()))
    }

    /// Returns whether the value was a list, and its members.
    pub(crate) fn into_list(self) -> (bool, Vec<Result<Text>>) {
        match self {
            Self::One(text) => (false, vec![Ok(text)]),
            Self::Many(texts) => (true, texts),
        }
    }
}

/// Returns the string, or the items of a sequence.
fn words_or_items<'py>(
    value: &Bound<'py, PyAny>,
) -> Result<std::result::Result<String, Vec<Bound<'py, PyAny>>>> {
    if let Ok(text) = value.cast::<PyString>() {
        return Ok(Ok(text.to_str()?.to_owned()));
    }
    match items(value)? {
        Some(items) => Ok(Err(items)),
        None => {
            let found = type_name(value);
            Err(type_error(format!(
                "expected a string, token ids (a list or an array of integers), or a list of these, found {found}"
            )))
        }
    }
}

/// Returns the items of an array or another iterable, or `None` for strings, bytes and mappings.
fn items<'py>(value: &Bound<'py, PyAny>) -> Result<Option<Vec<Bound<'py, PyAny>>>> {
    // Arrays from NumPy and other libraries.
    let listed = match value.getattr_opt("tolist")? {
        Some(tolist) => tolist.call0()?,
        None => value.clone(),
    };
    let is_text = listed.is_instance_of::<PyString>()
        || listed.is_instance_of::<PyBytes>()
        || listed.is_instance_of::<PyByteArray>();
    if is_text || is_mapping(&listed)? {
        return Ok(None);
    }
    match listed.try_iter() {
        Ok(items) => Ok(Some(items.collect::<PyResult<_>>()?)),
        Err(error) if error.is_instance_of::<PyTypeError>(value.py()) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Whether the value is a dict or another mapping.
pub(crate) fn is_mapping(value: &Bound<'_, PyAny>) -> PyResult<bool> {
    // Most values are lists or tuples, and the check in Python is slow.
    if value.is_instance_of::<PyList>() || value.is_instance_of::<PyTuple>() {
        return Ok(false);
    }
    let mapping = value.py().import(intern!(value.py(), "collections.abc"))?;
    value.is_instance(&mapping.getattr(intern!(value.py(), "Mapping"))?)
}

fn is_id(item: &Bound<'_, PyAny>) -> bool {
    !item.is_instance_of::<PyString>() && item.hasattr("__index__").unwrap_or(false) && item.len().is_err()
}

fn ids(items: &[Bound<'_, PyAny>]) -> Result<Vec<u32>> {
    let id = |item: &Bound<'_, PyAny>| {
        item.extract::<u32>().map_err(|error| match error.is_instance_of::<PyTypeError>(item.py()) {
            true => {
                let found = type_name(item);
                type_error(format!("expected a string or integer token ids, found an item of type {found}"))
            }
            false => {
                value_error(format!("{item} is not a token id; expected a whole number from 0 to 2**32 - 1"))
            }
        })
    };
    items.iter().map(id).collect()
}

/// Reads one token ID or several.
pub(crate) fn id_or_ids(value: &Bound<'_, PyAny>) -> Result<Vec<u32>> {
    match is_id(value) {
        true => ids(std::slice::from_ref(value)),
        false => ids(&items(value)?.ok_or_else(|| type_error("expected token ids"))?),
    }
}

/// Numeric type of an argument.
pub(crate) trait Number: Sized {
    fn read(value: &Bound<'_, PyAny>) -> PyResult<Self>;
}

impl Number for usize {
    fn read(value: &Bound<'_, PyAny>) -> PyResult<Self> {
        value.extract()
    }
}

impl Number for u64 {
    fn read(value: &Bound<'_, PyAny>) -> PyResult<Self> {
        value.extract()
    }
}

impl Number for u32 {
    fn read(value: &Bound<'_, PyAny>) -> PyResult<Self> {
        value.extract()
    }
}

impl<T: Number> Number for Option<T> {
    fn read(value: &Bound<'_, PyAny>) -> PyResult<Self> {
        if value.is_none() { Ok(None) } else { T::read(value).map(Some) }
    }
}

/// Reads a numeric argument; raises a `ValueError` if it is out of range.
pub(crate) fn number<T: Number>(value: &Bound<'_, PyAny>) -> PyResult<T> {
    T::read(value).map_err(|error| {
        if !error.is_instance_of::<PyOverflowError>(value.py()) {
            return error;
        }
        let expected =
            if value.lt(0).unwrap_or(false) { "a non-negative number" } else { "a smaller number" };
        value_error(format!("expected {expected}, found {value}")).into()
    })
}

/// Converts a Python value to JSON, with iterables as arrays.
pub(crate) fn to_json(value: &Bound<'_, PyAny>) -> Result<Value> {
    json_at_depth(value, 0)
}

fn json_at_depth(value: &Bound<'_, PyAny>, depth: usize) -> Result<Value> {
    /// Maximum nesting depth, slightly below the limit for JSON text.
    const MAX_DEPTH: usize = 100;

    if depth > MAX_DEPTH {
        return Err(value_error(format!(
            "lists and dicts are nested more than {MAX_DEPTH} levels deep; does one contain itself?"
        )));
    }
    if value.is_none() {
        return Ok(Value::Null);
    }
    if value.is_instance_of::<PyBool>() {
        return Ok(Value::Bool(value.extract()?));
    }
    if value.is_instance_of::<PyInt>() {
        let number = value.extract::<u64>().map(Value::from);
        let number = number.or_else(|_| value.extract::<i64>().map(Value::from));
        return number.map_err(|_| value_error(format!("{value} is too large")));
    }
    if value.is_instance_of::<PyFloat>() {
        let number = value.extract::<f64>()?;
        let json = serde_json::Number::from_f64(number).map(Value::Number);
        return json.ok_or_else(|| value_error(format!("expected a finite number, found {number}")));
    }
    if let Ok(text) = value.cast::<PyString>() {
        return Ok(Value::String(text.to_str()?.to_owned()));
    }
    if value.hasattr(intern!(value.py(), "__fspath__"))? {
        return Ok(Value::String(value.extract::<PathBuf>()?.to_string_lossy().into_owned()));
    }
    if is_mapping(value)? {
        let entry = |item: PyResult<Bound<'_, PyAny>>| {
            let (key, value): (Bound<'_, PyAny>, Bound<'_, PyAny>) = item?.extract()?;
            Ok((key.str()?.to_string(), json_at_depth(&value, depth + 1)?))
        };
        let items = value.call_method0(intern!(value.py(), "items"))?;
        return items.try_iter()?.map(entry).collect::<Result<Map<_, _>>>().map(Value::Object);
    }
    // A NumPy scalar has `tolist` but no items.
    if let Some(tolist) = value.getattr_opt("tolist")? {
        return json_at_depth(&tolist.call0()?, depth + 1);
    }
    match items(value)? {
        Some(items) => {
            let items = items.iter().map(|item| json_at_depth(item, depth + 1));
            items.collect::<Result<Vec<_>>>().map(Value::Array)
        }
        None => {
            let found = type_name(value);
            Err(type_error(format!("expected a number, a string, or a list or dict of these, found {found}")))
        }
    }
}

/// Converts JSON to Python values.
pub(crate) fn to_python<'py>(py: Python<'py>, value: &Value) -> PyResult<Bound<'py, PyAny>> {
    Ok(match value {
        Value::Null => py.None().into_bound(py),
        Value::Bool(value) => value.into_pyobject(py)?.to_owned().into_any(),
        Value::Number(number) => match (number.as_u64(), number.as_i64()) {
            (Some(number), _) => number.into_pyobject(py)?.into_any(),
            (_, Some(number)) => number.into_pyobject(py)?.into_any(),
            _ => number.as_f64().into_pyobject(py)?.into_any(),
        },
        Value::String(text) => text.into_pyobject(py)?.into_any(),
        Value::Array(items) => {
            let items = items.iter().map(|item| to_python(py, item)).collect::<PyResult<Vec<_>>>()?;
            PyList::new(py, items)?.into_any()
        }
        Value::Object(entries) => {
            let dict = PyDict::new(py);
            entries.iter().try_for_each(|(key, value)| dict.set_item(key, to_python(py, value)?))?;
            dict.into_any()
        }
    })
}

/// Converts a report to a dict with the keys of its JSON.
pub(crate) fn report_to_dict<'py>(py: Python<'py>, report: &impl Serialize) -> Result<Bound<'py, PyAny>> {
    let json = serde_json::to_value(report).map_err(|error| gpt2_error(error.to_string()))?;
    Ok(to_python(py, &json)?)
}

/// Reads one path or a list of paths.
pub(crate) fn paths(option: &str, value: &Bound<'_, PyAny>) -> Result<Vec<PathBuf>> {
    if let Ok(path) = value.extract::<PathBuf>() {
        return Ok(vec![path]);
    }
    value.extract::<Vec<PathBuf>>().map_err(|_| {
        let found = type_name(value);
        type_error(format!("{option}: expected a path or a list of paths, found {found}"))
    })
}

/// Returns the name of a value's Python type.
pub(crate) fn type_name(value: &Bound<'_, PyAny>) -> String {
    value.get_type().name().map(|name| name.to_string()).unwrap_or_default()
}

/// Converts a value to a contiguous float32 NumPy array.
pub(crate) fn float_array<'py>(value: &Bound<'py, PyAny>) -> PyResult<PyReadonlyArrayDyn<'py, f32>> {
    let numpy = value.py().import("numpy")?;
    let array = numpy.call_method1("ascontiguousarray", (value, numpy.getattr("float32")?))?;
    Ok(array.cast_into::<PyArrayDyn<f32>>()?.readonly())
}

/// Converts a value to a float32 tensor on the CPU.
pub(crate) fn tensor(array: &Bound<'_, PyAny>) -> Result<Tensor> {
    let array = float_array(array)?;
    Ok(Tensor::from_vec(array.to_vec().map_err(PyErr::from)?, array.shape(), &Device::Cpu)?)
}

/// Values and shape of a tensor, for conversion to an array.
pub(crate) struct Values {
    pub(crate) numbers: Vec<f32>,
    pub(crate) shape: Vec<usize>,
}

impl Values {
    /// Reads a tensor's values and shape.
    pub(crate) fn from_tensor(tensor: &Tensor) -> candle_core::Result<Self> {
        let shape = tensor.dims().to_vec();
        let numbers = tensor.to_device(&Device::Cpu)?.to_dtype(DType::F32)?.flatten_all()?.to_vec1()?;
        Ok(Self { numbers, shape })
    }

    /// Converts the values to an array that owns them.
    pub(crate) fn into_array(self, py: Python<'_>) -> PyResult<Bound<'_, PyArrayDyn<f32>>> {
        PyArray1::from_vec(py, self.numbers).reshape(self.shape)
    }
}
