//! Values on their way to Python and back: JSON, token ids, paths, arrays.

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

use crate::errors::{Result, failed, wrong_type, wrong_value};

/// A text, or token ids.
pub(crate) enum Text {
    Words(String),
    Ids(Vec<u32>),
}

/// One, or a list of them, of which some may be none.
pub(crate) enum Texts {
    One(Text),
    Many(Vec<Result<Text>>),
}

impl Text {
    /// Reads a string, or integers in a sequence or an array, which may be the one row of an array.
    pub(crate) fn read(value: &Bound<'_, PyAny>) -> Result<Self> {
        let several = || wrong_type("expected one text or one sequence of token ids, found several");
        match Texts::read(value)? {
            Texts::One(text) => Ok(text),
            Texts::Many(mut texts) => match (texts.pop().transpose()?, texts.is_empty()) {
                (None, _) => Ok(Self::Ids(Vec::new())),
                (Some(row @ Self::Ids(_)), true) => Ok(row),
                _ => Err(several()),
            },
        }
    }

    /// Its tokens.
    pub(crate) fn into_ids(self, py: Python<'_>, vocabulary: &Vocabulary) -> Result<Vec<u32>> {
        py.detach(|| self.encoded(vocabulary))
    }

    /// The same, to be called without the interpreter's lock.
    pub(crate) fn encoded(self, vocabulary: &Vocabulary) -> Result<Vec<u32>> {
        match self {
            Self::Words(text) => Ok(vocabulary.encode(&text)?),
            Self::Ids(ids) => Ok(ids),
        }
    }

    /// The text of its tokens; to be called without the interpreter's lock.
    pub(crate) fn decoded(self, vocabulary: &Vocabulary, skip_special_tokens: bool) -> Result<String> {
        let ids = self.encoded(vocabulary)?;
        Ok(vocabulary.decode(&ids, skip_special_tokens)?)
    }
}

impl Texts {
    /// Reads a string, integers in a sequence or an array, or a list of either. An empty list is a list of none.
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

    /// Whether it is a list, and its members.
    pub(crate) fn into_list(self) -> (bool, Vec<Result<Text>>) {
        match self {
            Self::One(text) => (false, vec![Ok(text)]),
            Self::Many(texts) => (true, texts),
        }
    }
}

/// The string that a value is, or the items that it holds.
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
            Err(wrong_type(format!(
                "expected a text (str), token ids (a list or an array of integers), or a list of these, found {found}"
            )))
        }
    }
}

/// The items of an array, or of what else can be gone through and is neither text nor a mapping.
fn items<'py>(value: &Bound<'py, PyAny>) -> Result<Option<Vec<Bound<'py, PyAny>>>> {
    // Arrays of numpy and of others.
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

/// Whether it is a dict, or what else Python calls a mapping.
pub(crate) fn is_mapping(value: &Bound<'_, PyAny>) -> PyResult<bool> {
    // Most values are told by their type; asking Python takes long.
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
                wrong_type(format!(
                    "expected a text or token ids, which are integers, found one of type {found}"
                ))
            }
            false => wrong_value(format!("{item} is not a token id; ids are not negative and below 2**32")),
        })
    };
    items.iter().map(id).collect()
}

/// A token id, or several.
pub(crate) fn id_or_ids(value: &Bound<'_, PyAny>) -> Result<Vec<u32>> {
    match is_id(value) {
        true => ids(std::slice::from_ref(value)),
        false => ids(&items(value)?.ok_or_else(|| wrong_type("expected token ids"))?),
    }
}

/// Numbers of arguments.
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

/// A number of an argument. One that is out of its range is a wrong value.
pub(crate) fn number<T: Number>(value: &Bound<'_, PyAny>) -> PyResult<T> {
    T::read(value).map_err(|error| {
        if !error.is_instance_of::<PyOverflowError>(value.py()) {
            return error;
        }
        let expected = if value.lt(0).unwrap_or(false) { "from 0 on" } else { "that is not so large" };
        wrong_value(format!("expected a number {expected}, found {value}")).into()
    })
}

/// A value of Python's as JSON. Whatever else can be gone through becomes a list.
pub(crate) fn json_of(value: &Bound<'_, PyAny>) -> Result<Value> {
    json_within(value, 0)
}

fn json_within(value: &Bound<'_, PyAny>, depth: usize) -> Result<Value> {
    /// A little less than a text of JSON may have.
    const MOST_DEPTH: usize = 100;

    if depth > MOST_DEPTH {
        return Err(wrong_value(format!(
            "lists and dicts are more than {MOST_DEPTH} deep; does one hold itself?"
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
        return number.map_err(|_| wrong_value(format!("{value} is too large a number")));
    }
    if value.is_instance_of::<PyFloat>() {
        let number = value.extract::<f64>()?;
        let json = serde_json::Number::from_f64(number).map(Value::Number);
        return json.ok_or_else(|| wrong_value(format!("expected a finite number, found {number}")));
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
            Ok((key.str()?.to_string(), json_within(&value, depth + 1)?))
        };
        let items = value.call_method0(intern!(value.py(), "items"))?;
        return items.try_iter()?.map(entry).collect::<Result<Map<_, _>>>().map(Value::Object);
    }
    // A number of numpy's is an array without items.
    if let Some(tolist) = value.getattr_opt("tolist")? {
        return json_within(&tolist.call0()?, depth + 1);
    }
    match items(value)? {
        Some(items) => {
            let items = items.iter().map(|item| json_within(item, depth + 1));
            items.collect::<Result<Vec<_>>>().map(Value::Array)
        }
        None => {
            let found = type_name(value);
            Err(wrong_type(format!("expected a number, a text, or a list or dict of these, found {found}")))
        }
    }
}

/// JSON as values of Python's.
pub(crate) fn python_of<'py>(py: Python<'py>, value: &Value) -> PyResult<Bound<'py, PyAny>> {
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
            let items = items.iter().map(|item| python_of(py, item)).collect::<PyResult<Vec<_>>>()?;
            PyList::new(py, items)?.into_any()
        }
        Value::Object(entries) => {
            let dict = PyDict::new(py);
            entries.iter().try_for_each(|(key, value)| dict.set_item(key, python_of(py, value)?))?;
            dict.into_any()
        }
    })
}

/// A report as a dict, with the names of its JSON.
pub(crate) fn dict_of<'py>(py: Python<'py>, report: &impl Serialize) -> Result<Bound<'py, PyAny>> {
    let json = serde_json::to_value(report).map_err(|error| failed(error.to_string()))?;
    Ok(python_of(py, &json)?)
}

/// Paths of an option: one, or a list.
pub(crate) fn paths(option: &str, value: &Bound<'_, PyAny>) -> Result<Vec<PathBuf>> {
    if let Ok(path) = value.extract::<PathBuf>() {
        return Ok(vec![path]);
    }
    value.extract::<Vec<PathBuf>>().map_err(|_| {
        let found = type_name(value);
        wrong_type(format!("{option}: expected a path or a list of paths, found {found}"))
    })
}

/// What Python calls the type of a value.
pub(crate) fn type_name(value: &Bound<'_, PyAny>) -> String {
    value.get_type().name().map(|name| name.to_string()).unwrap_or_default()
}

/// An array of numpy's, of f32 and without gaps.
pub(crate) fn float_array<'py>(value: &Bound<'py, PyAny>) -> PyResult<PyReadonlyArrayDyn<'py, f32>> {
    let numpy = value.py().import("numpy")?;
    let array = numpy.call_method1("ascontiguousarray", (value, numpy.getattr("float32")?))?;
    Ok(array.cast_into::<PyArrayDyn<f32>>()?.readonly())
}

/// The same as a tensor on the CPU.
pub(crate) fn tensor(array: &Bound<'_, PyAny>) -> Result<Tensor> {
    let array = float_array(array)?;
    Ok(Tensor::from_vec(array.to_vec().map_err(PyErr::from)?, array.shape(), &Device::Cpu)?)
}

/// Numbers of a tensor and its shape, on their way to an array.
pub(crate) struct Values {
    pub(crate) numbers: Vec<f32>,
    pub(crate) shape: Vec<usize>,
}

impl Values {
    /// Those of a tensor, copied once.
    pub(crate) fn of(tensor: &Tensor) -> candle_core::Result<Self> {
        let shape = tensor.dims().to_vec();
        let numbers = tensor.to_device(&Device::Cpu)?.to_dtype(DType::F32)?.flatten_all()?.to_vec1()?;
        Ok(Self { numbers, shape })
    }

    /// An array that owns them.
    pub(crate) fn into_array(self, py: Python<'_>) -> PyResult<Bound<'_, PyArrayDyn<f32>>> {
        PyArray1::from_vec(py, self.numbers).reshape(self.shape)
    }
}
