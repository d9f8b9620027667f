//! Prompts of tasks whose circuits are known, as `gpt2 look data` writes them.

use candle_gpt2_look::{Reader, TaskData};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::errors::Result;
use crate::keywords::read;
use crate::look::fields;
use crate::model::Model;
use crate::values::dict_of;

#[pymethods]
impl Model {
    /// Pairs of prompts of a task whose circuit is known, in words of the model's vocabulary: a list of dicts, as `circuit` takes
    /// them. The same seed gives the same pairs.
    ///
    /// A pair has the texts clean and corrupt, of as many tokens; answer and against, lists of tokens to predict after clean and to
    /// compare them with; and spans, named positions, counted from 0 without a BOS token.
    ///
    /// task: "ioi", "greater-than" or "gender". count: how many pairs.
    #[pyo3(signature = (task, **options), text_signature = "($self, task, *, count=100, seed=0)")]
    fn task_data<'py>(
        &self,
        py: Python<'py>,
        task: &Bound<'py, PyAny>,
        options: Option<&Bound<'py, PyDict>>,
    ) -> Result<Bound<'py, PyAny>> {
        let data: TaskData = read(fields(&[("task", task)])?, options, &[])?;
        dict_of(py, &data.pairs(&Reader::without_bos(self.loaded.vocabulary()))?)
    }
}
