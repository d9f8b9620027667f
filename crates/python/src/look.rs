//! Analyses of a model: pictures that a notebook displays. The analyses and their options are those of `gpt2 look`.

use candle_gpt2_look::{
    Ablate, Attention, Attribute, CircuitSearch, Estimate, Features, Graph, HeadKinds, Lens, Look,
    LookSubject, Neurons, Patch, PathPatching, Reader, Saliency, Text,
};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use crate::errors::{Result, failed};
use crate::keywords::{PREPEND_BOS, TEXTS, read, take_bos};
use crate::model::Model;
use crate::picture::Picture;
use crate::process::{computing, start};
use crate::reporting::Listener;
use crate::values::{self, json_of};

/// A text, or token ids.
pub(crate) fn text(value: &Bound<'_, PyAny>) -> Result<Text> {
    Ok(match values::Text::read(value)? {
        values::Text::Words(words) => Text::Words(words),
        values::Text::Ids(ids) => Text::Ids(ids),
    })
}

/// Arguments that a method names itself, as fields of its options.
pub(crate) fn fields(named: &[(&str, &Bound<'_, PyAny>)]) -> Result<Map<String, Value>> {
    let field = |(name, value): &(&str, &Bound<'_, PyAny>)| {
        let json = match TEXTS.contains(name) {
            true => serde_json::to_value(text(value)?).map_err(|error| failed(error.to_string()))?,
            false => json_of(value)?,
        };
        Ok(((*name).to_owned(), json))
    };
    named.iter().map(field).collect()
}

impl Model {
    /// Looks without the interpreter's lock, with a bar at a terminal.
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

/// Methods, each with its options in the library and what it names itself. The signatures are what Python shows; they are written by
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
    /// What each layer would predict if it were the last: a picture, whose values are of `show` (probability, entropy, divergence,
    /// next, rank, watched-probability; the last two of the first token of `watch`). Its details are arrays: top_ids and
    /// top_logprobs (layers, tokens, top), entropy, divergence and next_logprob (layers, tokens), and with `watch` watched_rank and
    /// watched_logprob (layers, tokens, watched).
    ///
    /// watch: texts of one token, or ids. prepend_bos: put the BOS token in front of texts.
    logit_lens: Lens(text), "($self, text, *, top=5, watch=None, show='probability', prepend_bos=False)";

    /// The same through a tuned lens: `tuned` is its file (params.pt or safetensors) or folder.
    tuned_lens: Lens(text, tuned), "($self, text, tuned, *, top=5, watch=None, show='probability', prepend_bos=False)";

    /// Where heads attend: a picture of their attention patterns, whose values are (layer, head, query, key), nan after the query.
    /// layers: only these; or heads: pairs of layer and head, or texts such as "9.6".
    attention: Attention(text), "($self, text, *, layers=None, heads=None, prepend_bos=False)";

    /// What each part of the model adds to a prediction (direct logit attribution): a picture over parts, or over layers and heads.
    /// The prediction is that of `answer` (a text of one token, or an id; the most probable one by default), against the token
    /// `against` or the mean of all, after the token at `position`, counted from 0, or from -1 at the end, which is the default.
    ///
    /// unit: component, layer, head or neuron. as_: raw, or transformer-lens, which counts what constant values of heads write with
    /// the remainder. top: only the strongest neurons. details: bias, which the final norm adds, and total; without `against` also logit
    /// and mean_logit, whose difference the total is.
    attribute: Attribute(text), "($self, text, *, answer=None, against=None, position=-1, measure='logit', unit='component', as_='raw', top=40, prepend_bos=False)";

    /// What a prediction becomes without a head: a picture over layers and heads, or with `heads`, left out together, of how much
    /// less each token of the text is expected. The prediction is as in `attribute`.
    ///
    /// measure: logit, log-probability or probability. at: leave the heads out after this token alone. with_: what takes the place
    /// of a head's output: "raw-zero", "transformer-lens-zero", "mean:FILE" or ("mean", texts), "sample:FILE" or ("sample", text).
    ablate: Ablate(text), "($self, text, *, answer=None, against=None, position=-1, measure='logit', heads=None, at=None, with_='raw-zero', prepend_bos=False)";

    /// Which part of one text's run carries its prediction over to another text (activation patching): a picture over layers and
    /// positions, or heads, of shares of the way from the prediction of the text `corrupt` (0) to that of `clean` (1). Both have as
    /// many tokens. The prediction is as in `ablate`.
    ///
    /// site: what is put from the one run into the other, such as resid_pre, mlp_out or z. by: layer, position, head or
    /// head-and-position.
    patch: Patch(clean, corrupt), "($self, clean, corrupt, *, answer=None, against=None, position=-1, measure='logit', site='resid_pre', by=None, prepend_bos=False)";

    /// What `patch` would say, estimated from one gradient (attribution patching).
    estimate: Estimate(clean, corrupt), "($self, clean, corrupt, *, answer=None, against=None, position=-1, measure='logit', site='resid_pre', by=None, prepend_bos=False)";

    /// Which way a head's output takes to later heads (path patching): the text `clean`, where only the path from a head, as it is in
    /// the text `corrupt`, to the receiver is another. A picture over layers and heads of how far the prediction goes from that of
    /// `clean` (0) to that of `corrupt` (1); one value with `from_`, heads that are taken together. The prediction is as in `ablate`.
    ///
    /// to: "final", the last residual stream, or queries, keys or values of a head, such as "9.9.q".
    path: PathPatching(clean, corrupt), "($self, clean, corrupt, *, answer=None, against=None, position=-1, measure='logit', from_=None, to='final', prepend_bos=False)";

    /// How much each token of a text matters for a prediction, by gradients: a picture over tokens. Its details are arrays: norms and
    /// the signed sums, which with method="integrated" add up to the prediction's difference from a text of baseline tokens. The
    /// prediction is as in `ablate`.
    ///
    /// method: integrated, input-x-gradient or gradient. steps, baseline: of integrated gradients; the baseline is the token that
    /// begins texts by default.
    saliency: Saliency(text), "($self, text, *, answer=None, against=None, position=-1, measure='logit', method='integrated', steps=50, baseline=None, prepend_bos=False)";

    /// Where in a text, however long, a neuron is most active: a picture over places. details: places, a list of dicts with index,
    /// id, text, before, after and value.
    ///
    /// neuron: a pair of layer and neuron, or a text such as "11.611". top: how many places.
    neurons: Neurons(text, neuron), "($self, text, neuron, *, top=20, prepend_bos=False)";

    /// Which features of the MLPs carry the prediction of a text, and how they act on each other (attribution graph): a picture of
    /// nodes and edges; its values are the influence of the nodes with the most. details: nodes and links as circuit-tracer's frontend
    /// has them, replacement_score, completeness_score, and with `set` interventions. A feature's node has clerp and top_logits (the
    /// tokens that it makes most probable), examples_quantiles (texts in which it is active: this one, or those of prompts_file), the
    /// `gpt2 look features` command that shows more of it, and, among the first `top` nodes, zeroed: the predicted and the actual change
    /// of the most probable logit if it is set to 0.
    ///
    /// transcoders: a folder of circuit-tracer, or with a SAELens folder for each layer, or "built-in", those of the model inside the
    /// package; without it features are neurons. set: features, active or not, that are set to values, such as ["3_1201_4=0"] (layer, feature,
    /// position). max_memory: in MiB.
    attribution_graph: Graph(text), "($self, text, *, transcoders=None, max_feature_nodes=4096, max_memory=4096, node_threshold=0.8, edge_threshold=0.98, set=None, top=20, prompts_file=None, examples=6, prepend_bos=False)";

    /// Which edges between heads and MLPs carry what the model does on a task: a picture of the circuit and its faithfulness.
    /// details: the circuit and its scores as `gpt2 look circuit --json` has them.
    ///
    /// data: prompt pairs, as `task_data` makes them, or a JSON Lines file of them, as `gpt2 look data` writes it. edges: a number of
    /// edges, or a share such as "5%".
    circuit: CircuitSearch(data), "($self, data, *, method='eap-ig', metric='logit-diff', edges=None, select='greedy', steps=5, threshold=0.01, pairs=None, prepend_bos=False)";
}

#[pymethods]
impl Model {
    /// Which heads attend to the previous token, to the same token before, or to what followed it (induction): a picture over kinds,
    /// layers and heads. Without a text, rows of random tokens (those of torch.manual_seed) are read twice each.
    ///
    /// length, rows, seed, from_, below: of the random tokens. exclude_bos, exclude_current: with a text, leave out attention to the
    /// first token, or of tokens to themselves.
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
    /// Which features of a sparse autoencoder are active, token by token: a picture over features and tokens. details: site and
    /// explained (mean_l0, variance_explained, mse). Without a text: how often each feature is active in the texts of prompts_file.
    ///
    /// sae: SAELens' folder with cfg.json and sae_weights.safetensors, a file of OpenAI's, or "built-in", the built-in model's transcoder
    /// at site, or else in its middle block. site: the place that it was trained on,
    /// where its file does not say. top: how many features. prompts_file: a file with a text in each line, or a .jsonl file; details
    /// then has features, a list of dicts: index, density, act_min, act_max, histogram, top_logits, bottom_logits and
    /// examples_quantiles, the texts that the feature is active in. features: only these, as a list or as "3,17-20". examples: how
    /// many strongest texts, and how many of each quarter of the others. features_dir: a new folder that gets a JSON file of each feature,
    /// as circuit-tracer's frontend fetches it.
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
