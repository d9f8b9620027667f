//! Values on their way to Python and back: JSON, token ids, paths, arrays.

use std::path::PathBuf;

use candle_core::{DType, Device, Tensor};
use gpt2_engine::Vocabulary;
use numpy::{PyArray1, PyArrayDyn, PyArrayMethods, PyReadonlyArrayDyn};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyDict, PyFloat, PyInt, PyList, PyString, PyTuple};
use serde::Serialize;
use serde_json::{Map, Number, Value};

use crate::errors::{Result, failed, wrong_type, wrong_value};

/// A text, or token ids.
pub(crate) enum Text {
    Words(String),
    Ids(Vec<u32>),
}

/// One, or a list of them.
pub(crate) enum Texts {
    One(Text),
    Many(Vec<Text>),
}

impl Text {
    /// Reads a string, or a sequence or array of integers.
    pub(crate) fn read(value: &Bound<'_, PyAny>) -> Result<Self> {
        match Texts::read(value)? {
            Texts::One(text) => Ok(text),
            Texts::Many(texts) if texts.is_empty() => Ok(Self::Ids(Vec::new())),
            Texts::Many(_) => {
                Err(wrong_type("expected one text or one sequence of token ids, found several"))
            }
        }
    }

    /// Its tokens.
    pub(crate) fn into_ids(self, vocabulary: &Vocabulary) -> Result<Vec<u32>> {
        match self {
            Self::Words(text) => Ok(vocabulary.encode(&text)?),
            Self::Ids(ids) => Ok(ids),
        }
    }
}

impl Texts {
    /// Reads a string, a sequence or array of integers, or a list of either. An empty list is a list of none.
    pub(crate) fn read(value: &Bound<'_, PyAny>) -> Result<Self> {
        if let Ok(text) = value.cast::<PyString>() {
            return Ok(Self::One(Text::Words(text.to_str()?.to_owned())));
        }
        // Arrays of numpy and of others.
        let listed = match value.getattr_opt("tolist")? {
            Some(tolist) => tolist.call0()?,
            None => value.clone(),
        };
        let expected = || {
            let found = type_name(value);
            wrong_type(format!(
                "expected a text (str), token ids (a list or an array of integers), or a list of these, found {found}"
            ))
        };
        let is_sequence = listed.is_instance_of::<PyList>() || listed.is_instance_of::<PyTuple>();
        if !is_sequence {
            return Err(expected());
        }
        let items: Vec<Bound<'_, PyAny>> = listed.try_iter()?.collect::<PyResult<_>>()?;
        let is_id = |item: &Bound<'_, PyAny>| {
            !item.is_instance_of::<PyString>()
                && item.hasattr("__index__").unwrap_or(false)
                && item.len().is_err()
        };
        match items.first() {
            Some(first) if is_id(first) => Ok(Self::One(Text::Ids(ids(&items)?))),
            _ => items.iter().map(Text::read).collect::<Result<_>>().map(Self::Many),
        }
    }

    /// Whether it is a list, and its members.
    pub(crate) fn into_list(self) -> (bool, Vec<Text>) {
        match self {
            Self::One(text) => (false, vec![text]),
            Self::Many(texts) => (true, texts),
        }
    }
}

fn ids(items: &[Bound<'_, PyAny>]) -> Result<Vec<u32>> {
    let id = |item: &Bound<'_, PyAny>| {
        item.extract::<u32>().map_err(|error| match error.is_instance_of::<PyTypeError>(item.py()) {
            true => wrong_type(format!("expected token ids, which are integers, found {item}")),
            false => wrong_value(format!("{item} is no token id; ids are not negative and below 2**32")),
        })
    };
    items.iter().map(id).collect()
}

/// A value of Python's as JSON. Arrays become lists.
pub(crate) fn json_of(value: &Bound<'_, PyAny>) -> Result<Value> {
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
        let json = Number::from_f64(number).map(Value::Number);
        return json.ok_or_else(|| wrong_value(format!("expected a finite number, found {number}")));
    }
    if let Ok(text) = value.cast::<PyString>() {
        return Ok(Value::String(text.to_str()?.to_owned()));
    }
    if let Ok(dict) = value.cast::<PyDict>() {
        let entry = |(key, value): (Bound<'_, PyAny>, Bound<'_, PyAny>)| {
            Ok((key.str()?.to_string(), json_of(&value)?))
        };
        return dict.iter().map(entry).collect::<Result<Map<_, _>>>().map(Value::Object);
    }
    if let Some(tolist) = value.getattr_opt("tolist")? {
        return json_of(&tolist.call0()?);
    }
    if value.is_instance_of::<PyList>() || value.is_instance_of::<PyTuple>() {
        let items = value.try_iter()?.map(|item| json_of(&item?));
        return items.collect::<Result<Vec<_>>>().map(Value::Array);
    }
    let found = type_name(value);
    Err(wrong_type(format!("expected a number, a text, or a list or dict of these, found {found}")))
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
