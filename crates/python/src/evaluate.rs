//! Benchmarks that follow named protocols.
//!
//! Reports are dicts with the keys of `gpt2 eval --json`.

use std::path::PathBuf;
use std::result;
use std::sync::Arc;

use candle_gpt2_engine::{LoadedModel, ModelOptions};
use candle_gpt2_evaluation::{EvaluationError, EvaluationOptions, ModelFacts, Plan, Report, listing};
use candle_gpt2_kernels::using;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyString};
use serde_json::Map;

use crate::errors::{Failure, Result, gpt2_error, type_error};
use crate::keywords::read;
use crate::model::Model;
use crate::process::{computing_partly, start};
use crate::reporting::Listener;
use crate::values::{paths, report_to_dict, type_name};

/// A model and the options that it was opened with.
struct EvaluatedModel {
    options: ModelOptions,
    loaded: Arc<LoadedModel>,
}

impl EvaluatedModel {
    fn from_model(model: &Model) -> Result<Self> {
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
    /// Evaluates the model with a named protocol, as `gpt2 eval` does.
    ///
    /// Returns a dict with the keys of `gpt2 eval --json` (metrics, dataset, notes, …), or a list of dicts
    /// for a list of protocols. `candle_gpt2.protocols()` lists the protocols.
    ///
    /// protocol: a protocol's name, a list of names, or the YAML file of an lm-evaluation-harness task. data:
    /// a file (JSONL, CSV, text), a folder of files, or owner/name[@revision]/path of a dataset on the Hub;
    /// for a list of protocols one dataset for all, or a list; by default the published dataset from the Hub.
    /// limit: evaluate only the first items. context: tokens per window, for wikitext:llama.cpp and kl.
    ///
    /// num_fewshot: examples before each question, sampled from fewshot_data with fewshot_seed (1234) as the
    /// harness does.
    ///
    /// items: a file that receives the result of each item immediately; resume=True continues such a file
    /// after an interruption. against: the items file of another run, for comparison item by item. base: for
    /// kl, the model to compare with, by default the same model in f32.
    ///
    /// If an evaluation of a list of protocols ends early, the exception's `partial` has the reports so far.
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
        let model = EvaluatedModel::from_model(self)?;
        let base = base.map(|base| EvaluatedModel::from_model(base.get())).transpose()?;
        let plan = EvaluationOptions {
            protocols: names(protocol)?,
            data: data_paths("data", data)?,
            fewshot_data: data_paths("fewshot_data", fewshot_data)?,
            base: base.as_ref().map(|base| base.options.model.clone()),
            hub: model.options.hub.clone(),
            ..read(Map::new(), options, &["data", "fewshot_data", "base"])?
        };
        let plan = plan.check()?;
        // The models may be on different devices.
        let base_device = base.as_ref().unwrap_or(&model).loaded.device().clone();
        let (listener, mut reports) = (Listener::new(py), Vec::new());
        let work = || using(&base_device, || measure(&plan, &model, base, &listener, &mut reports));
        let (outcome, raised) = computing_partly(py, model.loaded.device(), work)?;
        listener.warn(py)?;
        let mut dicts =
            reports.iter().map(|report| report_to_dict(py, report)).collect::<Result<Vec<_>>>()?;
        let error = raised.or_else(|| outcome.err().map(|error| Failure::from(error).into()));
        match error {
            None if is_list => Ok(PyList::new(py, dicts)?.into_any()),
            None => dicts.pop().ok_or_else(|| gpt2_error("the evaluation returned no report")),
            Some(error) => {
                if is_list {
                    error.value(py).setattr("partial", dicts)?;
                }
                Err(error.into())
            }
        }
    }
}

/// Runs a plan and appends each report as soon as it is complete.
///
/// The reports include the notes on the data.
fn measure(
    plan: &Plan,
    model: &EvaluatedModel,
    base: Option<EvaluatedModel>,
    listener: &Listener,
    reports: &mut Vec<Report>,
) -> result::Result<(), EvaluationError> {
    let base = match base {
        Some(base) => Some(base),
        None => plan.base_of(&model.options).map(|base| EvaluatedModel::open(base, listener)).transpose()?,
    };
    let base_facts = base.as_ref().map(EvaluatedModel::facts);
    let evaluation = plan.prepare(&model.facts(), base_facts.as_ref(), listener)?;
    let base = base.as_ref().map(|base| &*base.loaded);
    for report in evaluation.run(&model.loaded, base, listener) {
        reports.push(report?);
    }
    Ok(())
}

/// Reads an option that accepts one path or a list of paths.
fn data_paths(option: &str, value: Option<&Bound<'_, PyAny>>) -> Result<Vec<PathBuf>> {
    Ok(value.map(|value| paths(option, value)).transpose()?.unwrap_or_default())
}

/// Reads protocol names from one name or a list.
fn names(protocol: &Bound<'_, PyAny>) -> Result<Vec<String>> {
    if let Ok(name) = protocol.cast::<PyString>() {
        return Ok(vec![name.to_str()?.to_owned()]);
    }
    protocol.extract().map_err(|_| {
        let found = type_name(protocol);
        type_error(format!("protocol: expected the name of a protocol or a list of names, found {found}"))
    })
}

/// Lists the protocols for `Model.evaluate` as dicts with the keys of `gpt2 eval --list --json`.
///
/// The keys include each protocol's dataset and published results.
#[pyfunction]
pub(crate) fn protocols(py: Python<'_>) -> Result<Vec<Bound<'_, PyAny>>> {
    listing().iter().map(|listed| report_to_dict(py, listed)).collect()
}
