//! Forward passes that record activations under TransformerLens' names.

use candle_gpt2::Site;
use candle_gpt2_interpret::named_sites;
use candle_gpt2_look::{Activations, LookError, LookSubject, Reader};
use numpy::PyArrayDyn;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::errors::Result;
use crate::hooks::Hooks;
use crate::keywords::{PREPEND_BOS, read};
use crate::look::fields;
use crate::model::Model;
use crate::process::{computing, start};
use crate::raised::Raised;
use crate::values::Values;

/// Reads hook point names from a comma-separated text or a list, or selects all for `None`.
pub(crate) fn sites(names: Option<&Bound<'_, PyAny>>, n_layer: usize) -> Result<Vec<Site>> {
    let list = match names.map(|names| names.extract::<String>().map_err(|_| names)) {
        None => "*".to_owned(),
        Some(Ok(list)) => list,
        Some(Err(names)) => match names.extract::<Vec<String>>()? {
            none if none.is_empty() => return Ok(Vec::new()),
            names => names.join(","),
        },
    };
    Ok(named_sites(&list, n_layer)?)
}

#[pymethods]
impl Model {
    /// Returns the logits (1, tokens, vocabulary) for a text and a dict of its activations.
    ///
    /// No BOS token is prepended by default.
    ///
    /// names: hook points by TransformerLens' names, as for `gpt2 cache` (`blocks.0.attn.hook_pattern`,
    /// `blocks.*.hook_resid_post`, `resid_post`); by default all. hooks: pairs of a name and a function of an
    /// array and its name. The array that the function returns replaces the activation; None keeps it.
    /// `steering` and `control_vector` create other hooks. prepend_bos: prepend a BOS token. layers,
    /// positions: record only these layers or token positions. as_: "raw", or "transformer-lens" for the
    /// values that TransformerLens shows.
    #[pyo3(signature = (text, names = None, hooks = None, prepend_bos = false, **options), text_signature = "($self, text, names=None, hooks=None, prepend_bos=False, *, layers=None, positions=None, as_='raw')")]
    fn run_with_cache<'py>(
        &self,
        py: Python<'py>,
        text: &Bound<'py, PyAny>,
        names: Option<&Bound<'py, PyAny>>,
        hooks: Option<&Bound<'py, PyAny>>,
        prepend_bos: bool,
        options: Option<&Bound<'py, PyDict>>,
    ) -> Result<(Bound<'py, PyArrayDyn<f32>>, Bound<'py, PyDict>)> {
        start()?;
        let n_layer = self.loaded.config().n_layer;
        let activations: Activations =
            read(fields(&[("text", text)])?, options, &["names", "hooks", PREPEND_BOS])?;
        let activations = Activations { sites: sites(names, n_layer)?, ..activations };
        let raised = Raised::default();
        let mut hooks = Hooks::read(hooks, n_layer, &raised)?;
        let (name, mut seen) = (self.opened.name(), Vec::new());
        let logits = computing(py, &self.loaded, || {
            let reader = Reader::new(self.loaded.vocabulary(), prepend_bos)?;
            let checked = activations.check(&reader)?;
            let subject = LookSubject::new(&self.loaded, name, &reader);
            let mut see = |site: Site, value| {
                seen.push((site.to_string(), Values::from_tensor(&value)?));
                Ok(())
            };
            let logits =
                raised.computing(|| activations.observed(&checked, &subject, &mut hooks, &mut see))?;
            Ok::<_, LookError>(Values::from_tensor(&logits)?)
        });
        let logits = raised.or(logits)?;
        let values = PyDict::new(py);
        for (name, value) in seen {
            values.set_item(name, value.into_array(py)?)?;
        }
        Ok((logits.into_array(py)?, values))
    }

    /// Names of all hook points for run_with_cache and hooks.
    #[getter]
    fn hook_names(&self) -> Vec<String> {
        Site::all(self.loaded.config().n_layer).iter().map(Site::to_string).collect()
    }
}
