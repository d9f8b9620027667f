//! Benchmarks by protocols that have names: reports as dicts with the names of `gpt2 eval --json`.

use std::path::PathBuf;
use std::result;
use std::sync::Arc;

use candle_gpt2_engine::{LoadedModel, ModelOptions};
use candle_gpt2_evaluation::{EvaluationError, EvaluationOptions, ModelFacts, Plan, Report, listing};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyString};
use serde_json::Map;

use crate::errors::{Failure, Result, failed, wrong_type};
use crate::keywords::read;
use crate::model::Model;
use crate::process::{computing_partly, start};
use crate::reporting::Listener;
use crate::values::{dict_of, paths, type_name};

/// A model and what it was opened with.
struct Side {
    options: ModelOptions,
    loaded: Arc<LoadedModel>,
}

impl Side {
    fn of(model: &Model) -> Result<Self> {
        Ok(Self { options: model.opened.options()?, loaded: Arc::clone(&model.loaded) })
    }

    fn open(options: ModelOptions, listener: &Listener) -> result::Result<Self, EvaluationError> {
        let loaded = options.open(listener)?.load(listener)?;
        Ok(Self { options, loaded: Arc::new(loaded) })
    }

    fn facts(&self) -> ModelFacts<'_> {
        ModelFacts::of_loaded(&self.options, &self.loaded)
    }
}

#[pymethods]
impl Model {
    /// Measures the model by named protocols, as `gpt2 eval` does: a dict with the keys of its --json (metrics, dataset, notes, …);
    /// for a list of protocols a list of dicts. `candle_gpt2.protocols()` lists them all.
    ///
    /// data: a file (JSONL, CSV, text), a folder of files, or owner/name[@revision]/path of a dataset on the Hub; for a list of
    /// protocols one for all of them or a list; by default the published data, from the Hub. limit: only the first items. context:
    /// tokens per window, for wikitext:llama.cpp and kl.
    ///
    /// protocol may also be the YAML file of a task of lm-evaluation-harness. num_fewshot: examples before each question, sampled from
    /// fewshot_data by fewshot_seed (1234) as the harness does.
    ///
    /// items: a file to which the model's result for each item is written as soon as it is known; resume continues that of an
    /// interrupted run. against: the items of another run, compared item by item. base: for kl, the model to compare
    /// with, by default the same one in f32.
    ///
    /// If a list of protocols ends early, the exception has the reports until then as `partial`.
    #[pyo3(signature = (protocol, data = None, *, fewshot_data = None, base = None, **options), text_signature = "($self, protocol, data=None, *, num_fewshot=None, fewshot_data=None, fewshot_seed=None, limit=None, context=None, items=None, resume=False, against=None, base=None)")]
    fn evaluate<'py>(
        &self,
        py: Python<'py>,
        protocol: &Bound<'py, PyAny>,
        data: Option<&Bound<'py, PyAny>>,
        fewshot_data: Option<&Bound<'py, PyAny>>,
        base: Option<&Bound<'py, Self>>,
        options: Option<&Bound<'py, PyDict>>,
    ) -> Result<Bound<'py, PyAny>> {
        start()?;
        let is_list = !protocol.is_instance_of::<PyString>();
        let model = Side::of(self)?;
        let base = base.map(|base| Side::of(base.get())).transpose()?;
        let plan = EvaluationOptions {
            protocols: names(protocol)?,
            data: files("data", data)?,
            fewshot_data: files("fewshot_data", fewshot_data)?,
            base: base.as_ref().map(|base| base.options.model.clone()),
            hub: model.options.hub.clone(),
            ..read(Map::new(), options, &["data", "fewshot_data", "base"])?
        };
        let plan = plan.check()?;
        // On a GPU both take turns with others that compute there.
        let on_gpu = base.as_ref().filter(|base| !base.loaded.device().is_cpu());
        let turn = Arc::clone(&on_gpu.unwrap_or(&model).loaded);
        let (listener, mut reports) = (Listener::new(py), Vec::new());
        let work = || measure(&plan, &model, base, &listener, &mut reports);
        let (ended, raised) = computing_partly(py, turn.device(), work)?;
        listener.warn(py)?;
        let mut dicts = reports.iter().map(|report| dict_of(py, report)).collect::<Result<Vec<_>>>()?;
        let error = raised.or_else(|| ended.err().map(|error| Failure::from(error).into()));
        match error {
            None if is_list => Ok(PyList::new(py, dicts)?.into_any()),
            None => dicts.pop().ok_or_else(|| failed("there is no report")),
            Some(error) => {
                if is_list {
                    error.value(py).setattr("partial", dicts)?;
                }
                Err(error.into())
            }
        }
    }
}

/// Adds the reports as they are made. They contain the notes on the data.
fn measure(
    plan: &Plan,
    model: &Side,
    base: Option<Side>,
    listener: &Listener,
    reports: &mut Vec<Report>,
) -> result::Result<(), EvaluationError> {
    let base = match base {
        Some(base) => Some(base),
        None => plan.base_of(&model.options).map(|base| Side::open(base, listener)).transpose()?,
    };
    let base_facts = base.as_ref().map(Side::facts);
    let evaluation = plan.prepare(&model.facts(), base_facts.as_ref(), listener)?;
    let base = base.as_ref().map(|base| &*base.loaded);
    for report in evaluation.run(&model.loaded, base, listener) {
        reports.push(report?);
    }
    Ok(())
}

/// The files of an option.
fn files(option: &str, given: Option<&Bound<'_, PyAny>>) -> Result<Vec<PathBuf>> {
    Ok(given.map(|given| paths(option, given)).transpose()?.unwrap_or_default())
}

/// The name of a protocol, or those of a list.
fn names(protocol: &Bound<'_, PyAny>) -> Result<Vec<String>> {
    if let Ok(name) = protocol.cast::<PyString>() {
        return Ok(vec![name.to_str()?.to_owned()]);
    }
    protocol.extract().map_err(|_| {
        let found = type_name(protocol);
        wrong_type(format!("protocol: expected the name of a protocol or a list of names, found {found}"))
    })
}

/// Every protocol of `Model.evaluate`: dicts with the keys of `gpt2 eval --list --json`, among them its dataset and the published
/// figures.
#[pyfunction]
pub(crate) fn protocols(py: Python<'_>) -> Result<Vec<Bound<'_, PyAny>>> {
    listing().iter().map(|listed| dict_of(py, listed)).collect()
}
