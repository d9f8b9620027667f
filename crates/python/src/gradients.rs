//! Gradients of a prediction at hook points and inside dictionaries, with optional edits.

use candle_gpt2_interpret::ActivationGradient;
use candle_gpt2_look::{LookError, LookSubject, PredictionGradients, Reader};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::dictionary::Dictionary;
use crate::errors::Result;
use crate::hooks::Hooks;
use crate::inside::sites;
use crate::keywords::read;
use crate::look::fields;
use crate::model::Model;
use crate::process::{computing, start};
use crate::raised::Raised;
use crate::values::Values;

#[pymethods]
impl Model {
    /// Computes gradients of a prediction at hook points.
    ///
    /// Returns the prediction, a dict of activations, and a dict of the gradients with respect to them, both
    /// keyed by name. The prediction is defined as in `ablate`; without an answer it is the most probable
    /// token of the run without hooks.
    ///
    /// names, prepend_bos: see run_with_cache. hooks: a list of Steering, ControlVector, and pairs of a name
    /// and an array that replaces the activation; functions are rejected, because they cannot be
    /// differentiated. dictionaries: sparse autoencoders and transcoders to splice in. Both dicts then also
    /// contain their latents, "{hook}.hook_sae_acts_post", and with error_term their errors,
    /// "{hook}.hook_sae_error"; {hook} is the hook point that the dictionary writes. error_term: add the
    /// reconstruction error back, as a constant.
    #[expect(clippy::too_many_arguments, reason = "Python keyword arguments")]
    #[pyo3(signature = (text, names = None, hooks = None, dictionaries = Vec::new(), error_term = true, prepend_bos = false, **options), text_signature = "($self, text, names=None, hooks=None, dictionaries=(), error_term=True, prepend_bos=False, *, answer=None, against=None, position=-1, measure='logit')")]
    fn gradients<'py>(
        &self,
        py: Python<'py>,
        text: &Bound<'py, PyAny>,
        names: Option<&Bound<'py, PyAny>>,
        hooks: Option<&Bound<'py, PyAny>>,
        dictionaries: Vec<Bound<'py, Dictionary>>,
        error_term: bool,
        prepend_bos: bool,
        options: Option<&Bound<'py, PyDict>>,
    ) -> Result<(f32, Bound<'py, PyDict>, Bound<'py, PyDict>)> {
        start()?;
        let n_layer = self.loaded.config().n_layer;
        let others = ["names", "hooks", "dictionaries", "error_term", "prepend_bos"];
        let wanted: PredictionGradients = read(fields(&[("text", text)])?, options, &others)?;
        let wanted = PredictionGradients { without_error: !error_term, ..wanted };
        // The result always has the latents and errors.
        let is_spliced =
            |name: &str| name.ends_with(".hook_sae_acts_post") || name.ends_with(".hook_sae_error");
        let names = match names.and_then(|names| names.extract::<Vec<String>>().ok()) {
            Some(mut names) if !dictionaries.is_empty() => {
                names.retain(|name| !is_spliced(name));
                Some(names.into_pyobject(py)?)
            }
            _ => names.cloned(),
        };
        let sites = sites(names.as_ref(), n_layer)?;
        let mut hooks = Hooks::read(hooks, n_layer, &Raised::default())?;
        hooks.check_differentiable()?;
        let dictionaries: Vec<_> = dictionaries.iter().map(|one| one.get().inner().clone()).collect();
        let name = self.opened.name();
        let (metric, found) = computing(py, &self.loaded, || {
            let reader = Reader::new(self.loaded.vocabulary(), prepend_bos)?;
            let checked = wanted.check(&reader)?;
            let subject = LookSubject::new(&self.loaded, name, &reader);
            let found = wanted.found(&checked, &subject, &sites, &dictionaries, &mut hooks)?;
            let mut values = Vec::new();
            let mut push = |name: String, ActivationGradient { value, gradient }: ActivationGradient| {
                values.push((name, Values::from_tensor(&value)?, Values::from_tensor(&gradient)?));
                Ok::<_, LookError>(())
            };
            for (site, at_site) in found.sites {
                push(site.to_string(), at_site)?;
            }
            for (dictionary, (latents, error)) in dictionaries.iter().zip(found.splices) {
                let site = dictionary.explained_site();
                push(format!("{site}.hook_sae_acts_post"), latents)?;
                if let Some(error) = error {
                    push(format!("{site}.hook_sae_error"), error)?;
                }
            }
            Ok::<_, LookError>((found.metric, values))
        })?;
        let (activations, gradients) = (PyDict::new(py), PyDict::new(py));
        for (name, value, gradient) in found {
            activations.set_item(&name, value.into_array(py)?)?;
            gradients.set_item(&name, gradient.into_array(py)?)?;
        }
        Ok((metric, activations, gradients))
    }
}
