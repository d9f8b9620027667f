//! Restricted pickle reader for containers, numbers, text and references to tensor data.
//!
//! A pickle is a program for a stack machine. Python's own reader imports and calls whatever the program
//! names. This reader accepts only the few names that `torch.save` writes, and rejects all others
//! immediately.
//!
//! Values are stored in one list and refer to each other by index. Memory therefore stays within a small
//! multiple of the file size, regardless of depth, cycles or repetition.
//!
//! Sources: CPython's `Lib/pickletools.py` for the instructions, PyTorch's `torch/_utils.py` and
//! `torch/serialization.py` for the names.

use std::collections::HashMap;
use std::rc::Rc;

use super::limits::MAX_RANK;

/// Index of a value in a pickle.
pub(crate) type Id = usize;

/// Value in a pickle.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Value {
    None,
    Bool(bool),
    Int(i64),
    Float(f64),
    Text(String),
    Bytes(Vec<u8>),
    List(Vec<Id>),
    Tuple(Vec<Id>),
    Dict(Vec<(Id, Id)>),
    /// Accepted name; see [`Callable`].
    Callable(Callable),
    /// Elements of one or more tensors, stored outside the pickle.
    Storage(Rc<Storage>),
    Tensor(Box<TensorReference>),
}

/// Data shared by one or more tensors.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Storage {
    /// Name or number of the storage in the file.
    pub(crate) key: String,
    /// PyTorch's name for the element type, such as `Float`.
    pub(crate) dtype: String,
    /// Number of elements.
    pub(crate) elements: usize,
}

/// View into a storage.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct TensorReference {
    pub(crate) storage: Rc<Storage>,
    /// Index of the first element in the storage.
    pub(crate) offset: usize,
    pub(crate) shape: Vec<usize>,
    pub(crate) strides: Vec<usize>,
    /// PyTorch's name for the element type, if it differs from the storage's.
    pub(crate) dtype: Option<Rc<str>>,
}

/// Names that a pickle may use.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Callable {
    /// `collections.OrderedDict`, `defaultdict` and `Counter`.
    Dict,
    /// `torch._utils._rebuild_tensor` and `_rebuild_tensor_v2`.
    RebuildTensor,
    /// `torch._utils._rebuild_tensor_v3`, whose seventh argument is the element type.
    RebuildTypedTensor,
    /// Element type such as `torch.uint16`, named but never called.
    DType(Rc<str>),
    /// Function treated as returning its first argument, such as `torch._utils._rebuild_parameter`.
    First,
    /// Storage type such as `torch.FloatStorage`, named but never called.
    StorageType(Rc<str>),
    /// Object that training programs save with the weights.
    ///
    /// It becomes `None`, and none of its code runs.
    Inert,
}

/// Maximum number of values in a pickle; GPT-2 XL's has about ten thousand.
const MAX_VALUES: usize = 1 << 20;
/// Maximum length of a storage or callable name in bytes; real names are a few words long.
const MAX_KEY_BYTES: usize = 256;
/// Non-tensor objects to skip, by module and name: numbers, types, paths, arguments.
const INERT: [(&str, &[&str]); 9] = [
    ("numpy", &["dtype", "ndarray"]),
    ("numpy.core.multiarray", &["scalar", "_reconstruct"]),
    ("numpy._core.multiarray", &["scalar", "_reconstruct"]),
    ("_codecs", &["encode"]),
    ("argparse", &["Namespace"]),
    ("pathlib", &["Path", "PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"]),
    ("torch", &["device", "dtype"]),
    ("builtins", &["complex", "slice", "set", "frozenset", "bytearray"]),
    ("__builtin__", &["complex", "slice", "set", "frozenset", "bytearray"]),
];
/// Element types, as named in the `torch` module.
pub(super) const DTYPES: [&str; 22] = [
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "int64",
    "int32",
    "int16",
    "int8",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "bool",
    "complex32",
    "complex64",
    "complex128",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "float4_e2m1fn_x2",
];
/// Names of callables that a pickle may use, with their replacements.
///
/// Besides these, only the types in `DTYPES`, the names in `INERT` and storage types are accepted.
const CALLABLES: [(&str, &str, Callable); 10] = [
    ("torch._utils", "_rebuild_tensor_v3", Callable::RebuildTypedTensor),
    ("collections", "Counter", Callable::Dict),
    ("torch.nn.parameter", "Buffer", Callable::First),
    ("collections", "OrderedDict", Callable::Dict),
    ("collections", "defaultdict", Callable::Dict),
    ("torch._utils", "_rebuild_tensor", Callable::RebuildTensor),
    ("torch._utils", "_rebuild_tensor_v2", Callable::RebuildTensor),
    ("torch._utils", "_rebuild_parameter", Callable::First),
    ("torch.nn.parameter", "Parameter", Callable::First),
    ("torch", "Size", Callable::First),
];

/// Decoded pickle: all of its values, and the index of the result.
#[derive(Debug)]
pub(crate) struct Pickle {
    values: Vec<Value>,
    root: Id,
    /// Size of the pickle in bytes.
    pub(crate) length: usize,
}

impl Pickle {
    /// Reads the pickle at the start of `bytes`.
    pub(crate) fn read(bytes: &[u8]) -> Result<Self, String> {
        let mut machine = Machine {
            bytes,
            position: 0,
            values: Vec::new(),
            stack: Vec::new(),
            marks: Vec::new(),
            memo: HashMap::new(),
        };
        let root =
            machine.run().map_err(|what| format!("{what} (at byte {} of the pickle)", machine.position))?;
        Ok(Self { values: machine.values, root, length: machine.position })
    }

    /// Returns the result of the pickle.
    pub(crate) fn root(&self) -> &Value {
        &self.values[self.root]
    }

    /// Returns the value with index `id`.
    pub(crate) fn value(&self, id: Id) -> &Value {
        &self.values[id]
    }

    /// Iterates over all tensors, at any depth.
    pub(crate) fn tensors(&self) -> impl Iterator<Item = &TensorReference> {
        self.values.iter().filter_map(|value| match value {
            Value::Tensor(tensor) => Some(&**tensor),
            _ => None,
        })
    }

    /// Returns a dictionary's value for a string key; if the key repeats, the last value.
    pub(crate) fn entry<'a>(&'a self, dict: &'a Value, key: &str) -> Option<&'a Value> {
        self.entries(dict).filter(|(name, _)| *name == key).last().map(|(_, value)| value)
    }

    /// Iterates over the entries of a dictionary that have string keys.
    pub(crate) fn entries<'a>(&'a self, dict: &'a Value) -> impl Iterator<Item = (&'a str, &'a Value)> {
        let entries = match dict {
            Value::Dict(entries) => entries.as_slice(),
            _ => &[],
        };
        entries.iter().filter_map(|(key, value)| match self.value(*key) {
            Value::Text(key) => Some((key.as_str(), self.value(*value))),
            _ => None,
        })
    }
}

struct Machine<'a> {
    bytes: &'a [u8],
    position: usize,
    values: Vec<Value>,
    stack: Vec<Id>,
    /// Stack heights at the open marks.
    marks: Vec<usize>,
    memo: HashMap<u64, Id>,
}

impl Machine<'_> {
    /// Runs up to the STOP instruction.
    ///
    /// The loop terminates, because each instruction consumes at least one byte.
    fn run(&mut self) -> Result<Id, String> {
        loop {
            let [instruction] = self.take::<1>()?;
            if self.values.len() > MAX_VALUES || self.stack.len() > 2 * MAX_VALUES {
                return Err(format!("the pickle contains more than {MAX_VALUES} values"));
            }
            match instruction {
                b'.' => return self.pop(),
                0x80 => drop(self.take::<1>()?), // PROTO
                0x95 => drop(self.take::<8>()?), // FRAME
                b'N' => self.push(Value::None),
                0x88 => self.push(Value::Bool(true)),
                0x89 => self.push(Value::Bool(false)),
                b'K' => {
                    let [value] = self.take()?;
                    self.push(Value::Int(value.into()));
                }
                b'M' => {
                    let value = u16::from_le_bytes(self.take()?);
                    self.push(Value::Int(value.into()));
                }
                b'J' => {
                    let value = i32::from_le_bytes(self.take()?);
                    self.push(Value::Int(value.into()));
                }
                0x8a => {
                    let [length] = self.take()?;
                    self.push_long(length.into())?;
                }
                0x8b => {
                    let length = u32::from_le_bytes(self.take()?);
                    self.push_long(length.into())?;
                }
                b'I' => {
                    let line = self.take_line()?.to_owned();
                    match line.as_str() {
                        "00" => self.push(Value::Bool(false)),
                        "01" => self.push(Value::Bool(true)),
                        line => self.push_integer(line)?,
                    }
                }
                b'L' => {
                    let line = self.take_line()?.trim_end_matches('L').to_owned();
                    self.push_integer(&line)?;
                }
                b'G' => {
                    let value = f64::from_be_bytes(self.take()?);
                    self.push(Value::Float(value));
                }
                b'F' => {
                    let value = self
                        .take_line()?
                        .parse()
                        .map_err(|_| "the pickle contains an invalid float".to_owned())?;
                    self.push(Value::Float(value));
                }
                b'X' => {
                    let length = u32::from_le_bytes(self.take()?);
                    self.push_text(length.into())?;
                }
                0x8c => {
                    let [length] = self.take()?;
                    self.push_text(length.into())?;
                }
                0x8d => {
                    let length = u64::from_le_bytes(self.take()?);
                    self.push_text(length)?;
                }
                // Python 2 byte strings become text, because old checkpoints use them as keys.
                b'T' => {
                    let length = u32::from_le_bytes(self.take()?);
                    self.push_text(length.into())?;
                }
                b'U' => {
                    let [length] = self.take()?;
                    self.push_text(length.into())?;
                }
                b'B' => {
                    let length = u32::from_le_bytes(self.take()?);
                    self.push_bytes(length.into())?;
                }
                b'C' => {
                    let [length] = self.take()?;
                    self.push_bytes(length.into())?;
                }
                0x8e => {
                    let length = u64::from_le_bytes(self.take()?);
                    self.push_bytes(length)?;
                }
                b')' => self.push(Value::Tuple(Vec::new())),
                0x85..=0x87 => {
                    let length = usize::from(instruction - 0x84);
                    let start = self.stack.len().checked_sub(length).ok_or("stack underflow")?;
                    let items = self.stack.split_off(start);
                    self.push(Value::Tuple(items));
                }
                b't' => {
                    let items = self.pop_to_mark()?;
                    self.push(Value::Tuple(items));
                }
                b']' | 0x8f => self.push(Value::List(Vec::new())),
                b'l' | 0x91 => {
                    let items = self.pop_to_mark()?;
                    self.push(Value::List(items));
                }
                b'a' => {
                    let item = self.pop()?;
                    self.extend_list(vec![item])?;
                }
                b'e' | 0x90 => {
                    let items = self.pop_to_mark()?;
                    self.extend_list(items)?;
                }
                b'}' => self.push(Value::Dict(Vec::new())),
                b'd' => {
                    let items = self.pop_to_mark()?;
                    self.push(Value::Dict(Vec::new()));
                    self.extend_dict(&items)?;
                }
                b's' => {
                    let (value, key) = (self.pop()?, self.pop()?);
                    self.extend_dict(&[key, value])?;
                }
                b'u' => {
                    let items = self.pop_to_mark()?;
                    self.extend_dict(&items)?;
                }
                b'(' if self.marks.len() > MAX_VALUES => return Err("the pickle opens too many marks".into()),
                b'(' => self.marks.push(self.stack.len()),
                b'0' => drop(self.pop()?),
                b'1' => drop(self.pop_to_mark()?),
                b'2' => {
                    let top = self.top()?;
                    self.stack.push(top);
                }
                0x94 => {
                    let index = self.memo.len() as u64;
                    self.memo.insert(index, self.top()?);
                }
                b'q' => {
                    let [index] = self.take()?;
                    self.memo.insert(index.into(), self.top()?);
                }
                b'r' => {
                    let index = u32::from_le_bytes(self.take()?);
                    self.memo.insert(index.into(), self.top()?);
                }
                b'p' => {
                    let index = self
                        .take_line()?
                        .parse()
                        .map_err(|_| "the pickle contains an invalid memo index".to_owned())?;
                    self.memo.insert(index, self.top()?);
                }
                b'h' => {
                    let [index] = self.take()?;
                    self.recall(index.into())?;
                }
                b'j' => {
                    let index = u32::from_le_bytes(self.take()?);
                    self.recall(index.into())?;
                }
                b'g' => {
                    let index = self
                        .take_line()?
                        .parse()
                        .map_err(|_| "the pickle contains an invalid memo index".to_owned())?;
                    self.recall(index)?;
                }
                b'c' => {
                    let module = self.take_line()?.to_owned();
                    let name = self.take_line()?.to_owned();
                    if name.len() > MAX_KEY_BYTES {
                        return Err("the pickle contains a name that is too long for torch.save".into());
                    }
                    self.push_callable(&module, &name)?;
                }
                0x93 => {
                    let (name, module) = (self.pop()?, self.pop()?);
                    let (Value::Text(module), Value::Text(name)) = (&self.values[module], &self.values[name])
                    else {
                        return Err("the pickle contains a name that is not a string".into());
                    };
                    if module.len().max(name.len()) > MAX_KEY_BYTES {
                        return Err("the pickle contains a name that is too long for torch.save".into());
                    }
                    let (module, name) = (module.clone(), name.clone());
                    self.push_callable(&module, &name)?;
                }
                b'Q' => {
                    let reference = self.pop()?;
                    let storage = self.storage(reference)?;
                    self.push(Value::Storage(Rc::new(storage)));
                }
                b'R' | 0x81 => {
                    let (arguments, callable) = (self.pop()?, self.pop()?);
                    self.call(callable, arguments)?;
                }
                // BUILD sets the attributes of an object, which do not matter for any supported object.
                b'b' => drop(self.pop()?),
                other => {
                    return Err(format!(
                        "unexpected instruction 0x{other:02x}, which torch.save does not write"
                    ));
                }
            }
        }
    }

    fn take_slice(&mut self, length: u64) -> Result<&[u8], String> {
        let end = usize::try_from(length).ok().and_then(|length| self.position.checked_add(length));
        let slice = end.and_then(|end| self.bytes.get(self.position..end)).ok_or("the pickle ends early")?;
        self.position += slice.len();
        Ok(slice)
    }

    fn take<const LENGTH: usize>(&mut self) -> Result<[u8; LENGTH], String> {
        let slice = self.take_slice(LENGTH as u64)?;
        slice.try_into().map_err(|_| "the pickle ends early".to_owned())
    }

    fn take_line(&mut self) -> Result<&str, String> {
        let rest = &self.bytes[self.position..];
        let length = rest.iter().position(|byte| *byte == b'\n').ok_or("the pickle ends early")?;
        self.position += length + 1;
        std::str::from_utf8(&rest[..length])
            .map_err(|_| "the pickle contains a name that is not UTF-8".to_owned())
    }

    fn push(&mut self, value: Value) {
        self.stack.push(self.values.len());
        self.values.push(value);
    }

    fn push_text(&mut self, length: u64) -> Result<(), String> {
        let text = String::from_utf8_lossy(self.take_slice(length)?).into_owned();
        self.push(Value::Text(text));
        Ok(())
    }

    fn push_bytes(&mut self, length: u64) -> Result<(), String> {
        let bytes = self.take_slice(length)?.to_vec();
        self.push(Value::Bytes(bytes));
        Ok(())
    }

    fn push_integer(&mut self, digits: &str) -> Result<(), String> {
        let value = digits.parse().map_err(|_| "the pickle contains an invalid integer".to_owned())?;
        self.push(Value::Int(value));
        Ok(())
    }

    /// Pushes a little-endian two's complement integer of any length.
    ///
    /// Integers longer than 64 bits are kept as bytes.
    fn push_long(&mut self, length: u64) -> Result<(), String> {
        let bytes = self.take_slice(length)?.to_vec();
        let value = if bytes.len() > 8 {
            Value::Bytes(bytes)
        } else {
            let fill = if bytes.last().is_some_and(|byte| *byte >= 0x80) { 0xff } else { 0 };
            let mut whole = [fill; 8];
            whole[..bytes.len()].copy_from_slice(&bytes);
            Value::Int(i64::from_le_bytes(whole))
        };
        self.push(value);
        Ok(())
    }

    fn push_callable(&mut self, module: &str, name: &str) -> Result<(), String> {
        let known = CALLABLES.iter().find(|(in_module, called, _)| (*in_module, *called) == (module, name));
        let callable = match (known, name.strip_suffix("Storage")) {
            (Some((_, _, callable)), _) => callable.clone(),
            (None, Some(dtype)) if matches!(module, "torch" | "torch.cuda" | "torch.storage") => {
                Callable::StorageType(dtype.into())
            }
            _ if module == "torch" && DTYPES.contains(&name) => Callable::DType(name.into()),
            _ if INERT.iter().any(|(of, names)| *of == module && names.contains(&name)) => Callable::Inert,
            _ => {
                return Err(format!(
                    "the pickle uses `{module}.{name}`, which weights do not need; nothing was run: save only the weights, \
                     `torch.save(model.state_dict(), path)`"
                ));
            }
        };
        self.push(Value::Callable(callable));
        Ok(())
    }

    fn pop(&mut self) -> Result<Id, String> {
        let floor = self.marks.last().copied().unwrap_or(0);
        if self.stack.len() <= floor {
            return Err("stack underflow".into());
        }
        self.stack.pop().ok_or_else(|| "stack underflow".to_owned())
    }

    fn top(&self) -> Result<Id, String> {
        self.stack.last().copied().ok_or_else(|| "stack underflow".to_owned())
    }

    fn pop_to_mark(&mut self) -> Result<Vec<Id>, String> {
        let mark = self.marks.pop().ok_or("the stack has no mark")?;
        if mark > self.stack.len() {
            return Err("stack underflow".into());
        }
        Ok(self.stack.split_off(mark))
    }

    fn recall(&mut self, index: u64) -> Result<(), String> {
        let id = self.memo.get(&index).copied().ok_or("the pickle uses an unknown memo index")?;
        self.stack.push(id);
        Ok(())
    }

    fn extend_list(&mut self, items: Vec<Id>) -> Result<(), String> {
        let list = self.top()?;
        match &mut self.values[list] {
            Value::List(list) => list.extend(items),
            _ => return Err("the pickle adds items to a value that is not a list".into()),
        }
        Ok(())
    }

    fn extend_dict(&mut self, items: &[Id]) -> Result<(), String> {
        let dict = self.top()?;
        let (pairs, []) = items.as_chunks::<2>() else {
            return Err("the pickle contains a key without a value".into());
        };
        match &mut self.values[dict] {
            Value::Dict(entries) => entries.extend(pairs.iter().map(|[key, value]| (*key, *value))),
            _ => return Err("the pickle adds entries to a value that is not a dictionary".into()),
        }
        Ok(())
    }

    fn call(&mut self, callable: Id, arguments: Id) -> Result<(), String> {
        let Value::Callable(callable) = self.values[callable].clone() else {
            return Err("the pickle calls a value that is not callable".into());
        };
        // Only the first arguments matter. Copying all of them in every call could take quadratic time.
        let arguments: Vec<Id> = match &self.values[arguments] {
            Value::Tuple(arguments) => arguments.iter().copied().take(7).collect(),
            _ => return Err("the pickle contains a call without a tuple of arguments".into()),
        };
        match (callable, arguments.as_slice()) {
            (Callable::Dict, _) => self.push(Value::Dict(Vec::new())),
            (Callable::Inert, _) => self.push(Value::None),
            (Callable::First, [first, ..]) => self.stack.push(*first),
            (
                callable @ (Callable::RebuildTensor | Callable::RebuildTypedTensor),
                [storage, offset, shape, strides, rest @ ..],
            ) => {
                let Value::Storage(storage) = self.values[*storage].clone() else {
                    return Err("the pickle contains a tensor without data".into());
                };
                let dtype = match (callable, rest) {
                    (Callable::RebuildTypedTensor, [_, _, dtype, ..]) => match &self.values[*dtype] {
                        Value::Callable(Callable::DType(name)) => Some(Rc::clone(name)),
                        _ => return Err("the pickle contains a tensor without an element type".into()),
                    },
                    (Callable::RebuildTypedTensor, _) => {
                        return Err("the pickle contains a tensor without an element type".into());
                    }
                    _ => None,
                };
                let tensor = TensorReference {
                    storage,
                    dtype,
                    offset: self.size(*offset)?,
                    shape: self.sizes(*shape)?,
                    strides: self.sizes(*strides)?,
                };
                if tensor.shape.len() != tensor.strides.len() {
                    return Err(
                        "the pickle contains a tensor whose shape and strides differ in length".into()
                    );
                }
                self.push(Value::Tensor(Box::new(tensor)));
            }
            (callable, _) => return Err(format!("the pickle calls {callable:?} with the wrong arguments")),
        }
        Ok(())
    }

    /// Reads the target of a persistent id: `("storage", type, key, location, elements, …)`.
    fn storage(&self, reference: Id) -> Result<Storage, String> {
        let Value::Tuple(parts) = &self.values[reference] else {
            return Err("the pickle contains a storage reference that is not a tuple".into());
        };
        let [kind, dtype, key, _, elements, view @ ..] = parts.as_slice() else {
            return Err("the pickle contains a storage reference with too few fields".into());
        };
        let views_whole = view.iter().all(|part| self.values[*part] == Value::None);
        match (&self.values[*kind], &self.values[*dtype], &self.values[*key]) {
            (Value::Text(kind), Value::Callable(Callable::StorageType(dtype)), Value::Text(key))
                if kind == "storage" && views_whole =>
            {
                if key.len() > MAX_KEY_BYTES || dtype.len() > MAX_KEY_BYTES {
                    return Err("the pickle contains a storage reference with a name that is too long".into());
                }
                Ok(Storage { key: key.clone(), dtype: dtype.to_string(), elements: self.size(*elements)? })
            }
            _ => Err("the pickle contains an invalid storage reference".into()),
        }
    }

    fn size(&self, id: Id) -> Result<usize, String> {
        match self.values[id] {
            Value::Int(size) => {
                usize::try_from(size).map_err(|_| format!("the pickle contains the invalid size {size}"))
            }
            _ => Err("the pickle contains a size that is not an integer".into()),
        }
    }

    fn sizes(&self, id: Id) -> Result<Vec<usize>, String> {
        match &self.values[id] {
            Value::Tuple(ids) | Value::List(ids) if ids.len() > MAX_RANK => {
                Err(format!("the pickle contains a tensor with {} dimensions", ids.len()))
            }
            Value::Tuple(ids) | Value::List(ids) => ids.iter().map(|id| self.size(*id)).collect(),
            _ => Err("the pickle contains sizes that are not a tuple".into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(bytes: &[u8]) -> String {
        Pickle::read(bytes).expect_err("the pickle should be rejected")
    }

    #[test]
    fn containers_and_numbers_are_read() {
        // {'a': [1, -2], 'b': (2.5, None, True)} in protocol 2.
        let bytes = b"\x80\x02}q\x00(X\x01\x00\x00\x00aq\x01]q\x02(K\x01J\xfe\xff\xff\xffeX\x01\x00\x00\x00bq\x03G@\x04\x00\x00\x00\x00\x00\x00N\x88\x87q\x04u.rest";
        let pickle = Pickle::read(bytes).unwrap();
        assert_eq!(pickle.length, bytes.len() - 4);
        let Some(Value::List(list)) = pickle.entry(pickle.root(), "a") else { panic!("no list") };
        assert_eq!(
            list.iter().map(|id| pickle.value(*id).clone()).collect::<Vec<_>>(),
            [Value::Int(1), Value::Int(-2)]
        );
        let Some(Value::Tuple(tuple)) = pickle.entry(pickle.root(), "b") else { panic!("no tuple") };
        assert_eq!(pickle.value(tuple[0]), &Value::Float(2.5));
    }

    #[test]
    fn long_integers_keep_their_sign() {
        let int = |bytes: &[u8]| Pickle::read(bytes).unwrap().root().clone();
        assert_eq!(int(b"\x8a\x01\xff."), Value::Int(-1));
        assert_eq!(int(b"\x8a\x02\xff\x00."), Value::Int(255));
        assert_eq!(int(b"\x8a\x00."), Value::Int(0));
        assert!(matches!(int(b"\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19."), Value::Bytes(_)));
    }

    #[test]
    fn globals_outside_the_allowlist_are_rejected() {
        for bytes in [
            &b"cos\nsystem\n(X\x02\x00\x00\x00lstR."[..],
            b"cbuiltins\neval\n.",
            b"\x8c\x05posix\x8c\x06system\x93.",
            b"ctorch\nload\n.",
            b"cos.FloatStorage\nFloatStorage\n.",
        ] {
            let message = error(bytes);
            assert!(
                message.contains("nothing was run") && message.contains("model.state_dict()"),
                "{message}"
            );
        }
        assert!(error(b"ios\nsystem\n.").contains("which torch.save does not write"), "INST");
        assert!(error(b"\x82\x01.").contains("which torch.save does not write"), "EXT1");
    }

    /// Checks tensors whose dtype has no storage type of its own, such as uint16 and the 8-bit floats.
    #[test]
    fn untyped_storages_use_the_tensor_dtype() {
        let storage =
            b"(X\x07\x00\x00\x00storagectorch\nUntypedStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x06tQ";
        let start = b"ctorch._utils\n_rebuild_tensor_v3\n(";
        let arguments = [&start[..], storage, b"K\x00K\x03\x85K\x01\x85\x89Nctorch\nuint16\ntR."].concat();
        let pickle = Pickle::read(&arguments).unwrap();
        let Value::Tensor(tensor) = pickle.root() else { panic!("{:?}", pickle.root()) };
        assert_eq!((tensor.dtype.as_deref(), tensor.shape.as_slice()), (Some("uint16"), &[3][..]));
        let untyped = [&start[..], storage, b"K\x00K\x03\x85K\x01\x85\x89NNtR."].concat();
        assert!(error(&untyped).contains("without an element type"), "{}", error(&untyped));
    }

    #[test]
    fn malformed_pickles_are_errors() {
        for bytes in [
            &b""[..],
            b".",
            b"R.",
            b"a.",
            b"s.",
            b"u.",
            b"t.",
            b"(.",
            b"K",
            b"X\xff\xff\xff\xffab.",
            b"h\x01.",
            b"N(u.",
            b"}(K\x01u.",
            b"0",
            b"((0t.",
            b"\x87.",
            b"Q.",
            b"NQ.",
            b"c\n",
            b"]]s.",
            b"Ix\n.",
            b"NNR.",
            b"b.",
        ] {
            error(bytes);
        }
    }

    #[test]
    fn value_and_mark_counts_are_limited() {
        assert!(error(&[b"N".repeat(3 << 20), b".".to_vec()].concat()).contains("more than"));
        assert!(error(&[b"(".repeat(3 << 20), b".".to_vec()].concat()).contains("too many marks"));
    }

    /// Checks NumPy numbers, arguments and paths, which many training programs save with the weights.
    #[test]
    fn non_tensor_training_state_is_skipped() {
        for bytes in [
            &b"cnumpy.core.multiarray\nscalar\n(cnumpy\ndtype\n(X\x02\x00\x00\x00f8K\x00K\x01tRC\x08\x00\x00\x00\x00\x00\x00\x00\x00tR."[..],
            b"cargparse\nNamespace\n)\x81}b.",
            b"cpathlib\nPosixPath\n(X\x01\x00\x00\x00atR.",
            b"c_codecs\nencode\n(X\x01\x00\x00\x00aX\x06\x00\x00\x00latin1tR.",
        ] {
            assert_eq!(Pickle::read(bytes).unwrap().root(), &Value::None);
        }
    }

    /// Checks that deep nesting, cycles and repetition need little memory.
    ///
    /// The inputs are a list nested half a million deep, a list that contains itself, and a value that is
    /// paired with itself thirty times. A copy of the last one would need 2^30 items in Python.
    #[test]
    fn deep_cyclic_and_repeated_values_are_cheap() {
        let mut deep = b"]".repeat(500_000);
        deep.extend(b"a".repeat(499_999));
        deep.push(b'.');
        assert!(Pickle::read(&deep).is_ok());
        assert!(Pickle::read(b"]q\x00h\x00a.").is_ok());
        let mut doubled = b"N".to_vec();
        doubled.extend(b"2\x86".repeat(30));
        doubled.push(b'.');
        assert!(Pickle::read(&doubled).is_ok());
    }
}
