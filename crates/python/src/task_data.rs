//! Prompt pairs for tasks with known circuits, as `gpt2 look data` writes them.

use candle_gpt2_look::{Reader, TaskData};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::errors::Result;
use crate::keywords::read;
use crate::look::fields;
use crate::model::Model;
use crate::values::report_to_dict;

#[pymethods]
impl Model {
    /// Generates prompt pairs for a task with a known circuit, as input for `circuit`.
    ///
    /// The pairs use words from the model's vocabulary. The same seed gives the same pairs.
    ///
    /// Returns a list of dicts. clean and corrupt are texts with the same number of tokens. answer lists the
    /// tokens to predict after clean, and against the tokens to compare them with. spans are named positions,
    /// counted from 0 without a BOS token.
    ///
    /// task: "ioi", "greater-than" or "gender". count: number of pairs.
    #[pyo3(signature = (task, **options), text_signature = "($self, task, *, count=100, seed=0)")]
    fn task_data<'py>(
        &self,
        py: Python<'py>,
        task: &Bound<'py, PyAny>,
        options: Option<&Bound<'py, PyDict>>,
    ) -> Result<Bound<'py, PyAny>> {
        let data: TaskData = read(fields(&[("task", task)])?, options, &[])?;
        report_to_dict(py, &data.pairs(&Reader::without_bos(self.loaded.vocabulary()))?)
    }
}
