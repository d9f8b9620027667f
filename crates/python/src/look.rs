//! Analyses of a model, returned as pictures that a notebook displays.
//!
//! The analyses and their options are those of `gpt2 look`.

use candle_gpt2_look::{
    Ablate, Attention, Attribute, CircuitSearch, Estimate, Features, Graph, HeadKinds, Lens, Look,
    LookSubject, Neurons, Patch, PathPatching, Reader, Saliency, Text,
};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use crate::errors::{Result, gpt2_error};
use crate::keywords::{PREPEND_BOS, TEXTS, read, take_bos};
use crate::model::Model;
use crate::picture::Picture;
use crate::process::{computing, start};
use crate::reporting::Listener;
use crate::values::{self, to_json};

/// Reads a text or token IDs.
pub(crate) fn text(value: &Bound<'_, PyAny>) -> Result<Text> {
    Ok(match values::Text::read(value)? {
        values::Text::Words(words) => Text::Words(words),
        values::Text::Ids(ids) => Text::Ids(ids),
    })
}

/// Converts a method's declared arguments to fields of its options.
pub(crate) fn fields(named: &[(&str, &Bound<'_, PyAny>)]) -> Result<Map<String, Value>> {
    let field = |(name, value): &(&str, &Bound<'_, PyAny>)| {
        let json = match TEXTS.contains(name) {
            true => serde_json::to_value(text(value)?).map_err(|error| gpt2_error(error.to_string()))?,
            false => to_json(value)?,
        };
        Ok(((*name).to_owned(), json))
    };
    named.iter().map(field).collect()
}

impl Model {
    /// Runs an analysis with the GIL released, showing a progress bar in a terminal.
    fn look<L: Look + DeserializeOwned + Sync>(
        &self,
        py: Python<'_>,
        named: &[(&str, &Bound<'_, PyAny>)],
        options: Option<&Bound<'_, PyDict>>,
    ) -> Result<Picture> {
        start()?;
        let bos = take_bos(options)?;
        let look: L = read(fields(named)?, options, &[PREPEND_BOS])?;
        let (name, listener) = (self.opened.name(), Listener::new(py));
        let found = computing(py, &self.loaded, || {
            let reader = Reader::new(self.loaded.vocabulary(), bos)?;
            look.at(&LookSubject::new(&self.loaded, name, &reader), &listener)
        })?;
        listener.warn(py)?;
        Picture::new(py, found)
    }
}

/// Defines a method for each analysis, from its options struct and declared arguments.
///
/// The text signatures are what Python shows. To regenerate them, run
/// `WRITE_OPTIONS=1 cargo test -p candle-gpt2-book --test suite options`.
macro_rules! looks {
    ($($(#[doc = $doc:tt])+ $name:ident: $look:ident($($argument:ident),+), $signature:tt;)+) => {
        #[pymethods]
        impl Model {
            $(
                $(#[doc = $doc])+
                #[pyo3(signature = ($($argument,)+ **options), text_signature = $signature)]
                fn $name(
                    &self,
                    py: Python<'_>,
                    $($argument: &Bound<'_, PyAny>,)+
                    options: Option<&Bound<'_, PyDict>>,
                ) -> Result<Picture> {
                    self.look::<$look>(py, &[$((stringify!($argument), $argument)),+], options)
                }
            )+
        }
    };
}

looks! {
    /// Logit lens: predictions of each layer as if it were the last.
    ///
    /// Returns a picture of `show` (probability, entropy, divergence, next, rank, watched-probability); rank
    /// and watched-probability are those of the first token of `watch`. Its details are arrays: top_ids and
    /// top_logprobs (layers, tokens, top), entropy, divergence and next_logprob (layers, tokens), and with
    /// `watch` also watched_rank and watched_logprob (layers, tokens, watched).
    ///
    /// watch: single-token texts, or token IDs. prepend_bos: prepend the BOS token to texts.
    logit_lens: Lens(text), "($self, text, *, top=5, watch=None, show='probability', prepend_bos=False)";

    /// Logit lens that applies a tuned lens to each layer.
    ///
    /// tuned: the lens file (params.pt or safetensors) or its folder. Other options and results are those of
    /// `logit_lens`.
    tuned_lens: Lens(text, tuned), "($self, text, tuned, *, top=5, watch=None, show='probability', prepend_bos=False)";

    /// Attention patterns of heads: a picture with values (layer, head, query, key).
    ///
    /// Values for keys after the query are NaN.
    ///
    /// layers: show only these layers. heads: show only these heads, as (layer, head) pairs or texts such as
    /// "9.6".
    attention: Attention(text), "($self, text, *, layers=None, heads=None, prepend_bos=False)";

    /// Direct logit attribution: contributions of the model's components to a prediction.
    ///
    /// Returns a picture over components, or over layers and heads. The prediction is that of `answer`,
    /// compared with the token `against` or with the mean of all tokens. `answer` is a single-token text or a
    /// token ID, by default the most probable token. `position` is the token whose next token is predicted,
    /// counted from 0, or from -1 (the default) at the end.
    ///
    /// unit: component, layer, head or neuron. as_: "raw", or "transformer-lens" to count the heads' constant
    /// bias terms in the remainder. top: show only the strongest neurons. details: bias, which the final norm
    /// adds, and total; without `against` also logit and mean_logit, whose difference is the total.
    attribute: Attribute(text), "($self, text, *, answer=None, against=None, position=-1, measure='logit', unit='component', as_='raw', top=40, prepend_bos=False)";

    /// Ablates heads one at a time: a picture over layers and heads of the change in a prediction.
    ///
    /// With `heads`, ablates these together and shows how much less probable each token of the text becomes.
    /// The prediction is defined as in `attribute`.
    ///
    /// measure: logit, log-probability or probability. at: ablate only at this token position. with_:
    /// replacement for a head's output: "raw-zero", "transformer-lens-zero", "mean:FILE" or ("mean", texts),
    /// "sample:FILE" or ("sample", text).
    ablate: Ablate(text), "($self, text, *, answer=None, against=None, position=-1, measure='logit', heads=None, at=None, with_='raw-zero', prepend_bos=False)";

    /// Activation patching: restores activations of the clean run in a run of the corrupted text.
    ///
    /// Returns a picture over layers and positions, or heads, of the fraction of the prediction that is
    /// restored: 0 is the prediction for `corrupt`, 1 the prediction for `clean`. Both texts must have the
    /// same number of tokens. The prediction is defined as in `ablate`.
    ///
    /// site: the activation to patch, such as resid_pre, mlp_out or z. by: layer, position, head or
    /// head-and-position.
    patch: Patch(clean, corrupt), "($self, clean, corrupt, *, answer=None, against=None, position=-1, measure='logit', site='resid_pre', by=None, prepend_bos=False)";

    /// Attribution patching: estimates the results of `patch` from one gradient.
    estimate: Estimate(clean, corrupt), "($self, clean, corrupt, *, answer=None, against=None, position=-1, measure='logit', site='resid_pre', by=None, prepend_bos=False)";

    /// Path patching: effect of each head's output on a prediction through a later receiver.
    ///
    /// Runs `clean` with the output of one head taken from `corrupt` along the path to the receiver only.
    /// Returns a picture over layers and heads: 0 is the prediction for `clean`, 1 the prediction for
    /// `corrupt`. With `from_`, returns a single value for these heads together. The prediction is defined as
    /// in `ablate`.
    ///
    /// to: "final", the last residual stream, or the queries, keys or values of a head, such as "9.9.q".
    path: PathPatching(clean, corrupt), "($self, clean, corrupt, *, answer=None, against=None, position=-1, measure='logit', from_=None, to='final', prepend_bos=False)";

    /// Gradient-based importance of each input token for a prediction: a picture over tokens.
    ///
    /// Its details are arrays: norms, and signed sums. With method="integrated" the sums add up to the
    /// difference from the prediction for a text of baseline tokens. The prediction is defined as in
    /// `ablate`.
    ///
    /// method: integrated, input-x-gradient or gradient. steps: number of integration steps. baseline:
    /// baseline token, by default the beginning-of-text token.
    saliency: Saliency(text), "($self, text, *, answer=None, against=None, position=-1, measure='logit', method='integrated', steps=50, baseline=None, prepend_bos=False)";

    /// Positions where a neuron is most active in a text of any length: a picture over positions.
    ///
    /// details: places, a list of dicts with index, id, text, before, after and value.
    ///
    /// neuron: a (layer, neuron) pair, or a text such as "11.611". top: number of positions.
    neurons: Neurons(text, neuron), "($self, text, neuron, *, top=20, prepend_bos=False)";

    /// Attribution graph: MLP features behind a prediction and their effects on each other.
    ///
    /// Returns a picture of nodes and edges; its values are the largest influences of nodes. details: nodes
    /// and links in the format of circuit-tracer's frontend, replacement_score, completeness_score, and with
    /// `set` also interventions. A feature node has clerp, top_logits (the tokens that it promotes most) and
    /// examples_quantiles (texts in which it is active: this text, or those of prompts_file). Its command is
    /// the `gpt2 look features` command that shows more of it. Each of the first `top` nodes also has zeroed:
    /// the predicted and the actual change of the most probable logit when the feature is set to 0.
    ///
    /// transcoders: a circuit-tracer folder, a folder with one SAELens folder for each layer, or "built-in"
    /// for those of the built-in model; by default features are neurons. set: features to set to a value,
    /// active or not, such as ["3_1201_4=0"] (layer, feature, position). max_memory: limit in MiB.
    attribution_graph: Graph(text), "($self, text, *, transcoders=None, max_feature_nodes=4096, max_memory=4096, node_threshold=0.8, edge_threshold=0.98, set=None, top=20, prompts_file=None, examples=6, prepend_bos=False)";

    /// Circuit discovery: finds the edges between heads and MLPs that matter for a task.
    ///
    /// Returns a picture of the circuit and its faithfulness. details: the circuit and its scores, as in
    /// `gpt2 look circuit --json`.
    ///
    /// data: prompt pairs from `task_data`, or a JSON Lines file from `gpt2 look data`. edges: number of
    /// edges, or a fraction such as "5%".
    circuit: CircuitSearch(data), "($self, data, *, method='eap-ig', metric='logit-diff', edges=None, select='greedy', steps=5, threshold=0.01, pairs=None, prepend_bos=False)";
}

#[pymethods]
impl Model {
    /// Scores heads as previous-token, duplicate-token or induction heads.
    ///
    /// Returns a picture over kinds, layers and heads. Without a text, the input is rows of random tokens
    /// (those of torch.manual_seed), and each row is repeated once.
    ///
    /// length, rows, seed, from_, below: settings of the random tokens. exclude_bos, exclude_current: with a
    /// text, ignore attention to the first token, or from tokens to themselves.
    #[pyo3(signature = (text = None, **options), text_signature = "($self, text=None, *, length=None, rows=2, seed=0, from_=None, below=None, exclude_bos=False, exclude_current=False, prepend_bos=False)")]
    fn heads(
        &self,
        py: Python<'_>,
        text: Option<&Bound<'_, PyAny>>,
        options: Option<&Bound<'_, PyDict>>,
    ) -> Result<Picture> {
        let named: Vec<_> = text.into_iter().map(|text| ("text", text)).collect();
        self.look::<HeadKinds>(py, &named, options)
    }
    /// Active features of a sparse autoencoder: a picture over features and tokens.
    ///
    /// details: site and explained (mean_l0, variance_explained, mse). Without a text, shows how often each
    /// feature is active in the texts of prompts_file.
    ///
    /// sae: a SAELens folder with cfg.json and sae_weights.safetensors, an OpenAI file, or "built-in", the
    /// built-in model's transcoder at `site`, by default in the middle block. site: the hook point that the
    /// autoencoder was trained on, if its files do not record it. top: number of features to show.
    /// prompts_file: a file with one text per line, or a .jsonl file. With it, details also has features, a
    /// list of dicts: index, density, act_min, act_max, histogram, top_logits, bottom_logits and
    /// examples_quantiles (texts in which the feature is active). features: only these features, as a list or
    /// as "3,17-20". examples: number of strongest texts, and of texts in each quarter of the others.
    /// features_dir: a new folder for one JSON file per feature, as circuit-tracer's frontend reads it.
    #[pyo3(signature = (text, sae = None, **options), text_signature = "($self, text, sae='built-in', *, site=None, top=20, prompts_file=None, features=None, examples=6, features_dir=None, prepend_bos=False)")]
    fn features(
        &self,
        py: Python<'_>,
        text: Option<&Bound<'_, PyAny>>,
        sae: Option<&Bound<'_, PyAny>>,
        options: Option<&Bound<'_, PyDict>>,
    ) -> Result<Picture> {
        let named: Vec<_> =
            text.into_iter().map(|text| ("text", text)).chain(sae.map(|sae| ("sae", sae))).collect();
        self.look::<Features>(py, &named, options)
    }
}
