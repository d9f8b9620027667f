//! Looks inside a model: pictures that a notebook shows by itself. The looks and their options are those of `gpt2 look`.

use std::path::PathBuf;

use candle_gpt2_interpret::Head;
use candle_gpt2_look::{
    Ablate, Attention, Attribute, ComparedTexts, Estimate, Features, HeadKinds, Heads, Instead, Lens, Look,
    MetricOptions, Named, Neuron, Neurons, Patch, Patched, PathPatching, Ranges, Reader, Saliency, Subject,
    Text, TokenChoice, named,
};
use pyo3::prelude::*;

use crate::errors::{Result, wrong_type, wrong_value};
use crate::model::Model;
use crate::picture::Picture;
use crate::process::{computing, start};
use crate::reporting::Listener;
use crate::values::{self, number};

/// A text, or token ids.
pub(crate) fn text(value: &Bound<'_, PyAny>) -> Result<Text> {
    Ok(match values::Text::read(value)? {
        values::Text::Words(words) => Text::Words(words),
        values::Text::Ids(ids) => Text::Ids(ids),
    })
}

/// A text of one token, or its id.
fn token(option: &str, value: &Bound<'_, PyAny>) -> Result<TokenChoice> {
    if let Ok(text) = value.extract::<String>() {
        return Ok(TokenChoice::Text(text));
    }
    value.extract().map(TokenChoice::Id).map_err(|_| {
        wrong_type(format!("{option}: expected a text of one token, or a token id, found {value}"))
    })
}

/// Numbers as a list, as one, or as the program reads them: `"0,4,8-11"`.
pub(crate) fn ranges(option: &str, value: Option<&Bound<'_, PyAny>>) -> Result<Option<Ranges>> {
    let Some(value) = value else { return Ok(None) };
    let read = if let Ok(text) = value.extract::<String>() {
        text.parse().map_err(|error| wrong_value(format!("{option}: {error}")))?
    } else if let Ok(number) = value.extract::<usize>() {
        vec![number].into()
    } else {
        let numbers: Vec<usize> = value.extract().map_err(|_| {
            wrong_type(format!(
                "{option}: expected numbers from 0 on, as a list or as a text such as \"0,4,8-11\", found {value}"
            ))
        })?;
        numbers.into()
    };
    Ok(Some(read))
}

/// Heads as a list of pairs of layer and head, or of texts such as `"9.6"`; or all in one text.
fn heads(option: &str, value: Option<&Bound<'_, PyAny>>) -> Result<Option<Heads>> {
    let Some(value) = value else { return Ok(None) };
    if let Ok(text) = value.extract::<String>() {
        return Ok(Some(text.parse()?));
    }
    let mut found = Vec::new();
    for item in value.try_iter()? {
        let item = item?;
        if let Ok((layer, head)) = item.extract() {
            found.push(Head { layer, head });
        } else if let Ok(text) = item.extract::<String>() {
            found.extend(text.parse::<Heads>()?.0);
        } else {
            return Err(wrong_type(format!(
                "{option}: expected pairs of layer and head, or texts such as \"9.6\", found {item}"
            )));
        }
    }
    Ok(Some(Heads(found)))
}

/// A neuron as a pair, or as the program reads it: `"11.611"`.
fn neuron(value: &Bound<'_, PyAny>) -> Result<Neuron> {
    match value.extract() {
        Ok((layer, neuron)) => Ok(Neuron { layer, neuron }),
        Err(_) => Ok(Neuron::read(&value.extract::<String>()?)?),
    }
}

/// What takes the place of a head's output: as the program reads it, or `("mean", texts)`, `("sample", text)`.
fn instead(value: &Bound<'_, PyAny>) -> Result<Instead> {
    if let Ok(text) = value.extract::<String>() {
        return Ok(Instead::read(&text)?);
    }
    let expected = || {
        wrong_type(format!(
            "with_: expected a text such as \"raw-zero\", or (\"mean\", texts) or (\"sample\", text), found {value}"
        ))
    };
    let (kind, texts): (String, Bound<'_, PyAny>) = value.extract().map_err(|_| expected())?;
    match kind.as_str() {
        "sample" => Ok(Instead::sample(text(&texts)?)),
        "mean" => {
            let texts = texts.try_iter()?.map(|item| text(&item?)).collect::<Result<_>>()?;
            Ok(Instead::mean(texts))
        }
        _ => Err(expected()),
    }
}

fn choice<T: Named>(option: &str, name: &str) -> Result<T> {
    Ok(named(option, name)?)
}

fn metric(
    answer: Option<&Bound<'_, PyAny>>,
    against: Option<&Bound<'_, PyAny>>,
    position: Option<i64>,
    measure: &str,
) -> Result<MetricOptions> {
    Ok(MetricOptions {
        answer: answer.map(|value| token("answer", value)).transpose()?,
        against: against.map(|value| token("against", value)).transpose()?,
        position: position.unwrap_or(MetricOptions::default().position),
        measure: choice("measure", measure)?,
    })
}

fn patched(site: &str, by: Option<&str>) -> Result<Patched> {
    Ok(Patched { site: site.to_owned(), by: by.map(|by| choice("by", by)).transpose()? })
}

impl Model {
    /// Looks without the interpreter's lock, with a bar where somebody sees it.
    fn look<L: Look + Sync>(&self, py: Python<'_>, bos: bool, look: &L) -> Result<Picture> {
        start()?;
        let (name, listener) = (self.opened.name(), Listener::new(py));
        let found = computing(py, &self.loaded, || {
            let reader = Reader::new(self.loaded.vocabulary(), bos)?;
            look.at(&Subject::new(&self.loaded, name, &reader), &listener)
        })?;
        listener.warn(py)?;
        Picture::new(py, found)
    }
}

#[pymethods]
impl Model {
    /// What each layer would predict if it were the last: a picture, whose values are of `show` (probability, entropy, divergence,
    /// next, rank, watched-probability; the last two of the first token of `watch`). Its details are arrays: top_ids and
    /// top_logprobs (layers, tokens, top), entropy, divergence and next_logprob (layers, tokens), and with `watch` watched_rank and
    /// watched_logprob (layers, tokens, watched).
    ///
    /// watch: texts of one token, or ids. bos: put the token that begins texts in front.
    #[pyo3(signature = (text, *, show = "probability", top = 5, watch = None, bos = false))]
    fn logit_lens(
        &self,
        py: Python<'_>,
        text: &Bound<'_, PyAny>,
        show: &str,
        #[pyo3(from_py_with = number)] top: usize,
        watch: Option<Vec<Bound<'_, PyAny>>>,
        bos: bool,
    ) -> Result<Picture> {
        self.lens(py, text, None, show, top, watch, bos)
    }

    /// The same through a tuned lens: `tuned` is its file (params.pt or safetensors) or folder.
    #[pyo3(signature = (text, tuned, *, show = "probability", top = 5, watch = None, bos = false))]
    #[expect(clippy::too_many_arguments, reason = "keywords of Python")]
    fn tuned_lens(
        &self,
        py: Python<'_>,
        text: &Bound<'_, PyAny>,
        tuned: PathBuf,
        show: &str,
        #[pyo3(from_py_with = number)] top: usize,
        watch: Option<Vec<Bound<'_, PyAny>>>,
        bos: bool,
    ) -> Result<Picture> {
        self.lens(py, text, Some(tuned), show, top, watch, bos)
    }

    /// Where heads attend: a picture of their attention patterns, whose values are (layer, head, query, key), nan after the query.
    /// layers: only these; or heads: pairs of layer and head, or texts such as "9.6".
    #[pyo3(signature = (text, *, layers = None, heads = None, bos = false))]
    fn attention(
        &self,
        py: Python<'_>,
        text: &Bound<'_, PyAny>,
        layers: Option<&Bound<'_, PyAny>>,
        heads: Option<&Bound<'_, PyAny>>,
        bos: bool,
    ) -> Result<Picture> {
        let look = Attention {
            text: self::text(text)?,
            layers: ranges("layers", layers)?,
            heads: self::heads("heads", heads)?,
        };
        self.look(py, bos, &look)
    }

    /// What each part of the model adds to a prediction (direct logit attribution): a picture over parts, or over layers and heads.
    /// The prediction is that of `answer` (a text of one token, or an id; the most probable one by default), against the token
    /// `against` or the mean of all, after the token at `position`, counted from 0, or from -1 at the end, which is the default.
    ///
    /// unit: component, layer, head or neuron. as_: raw, or transformer-lens, which counts what constant values of heads write with
    /// the remainder. top: only the strongest neurons. details: bias, which the final norm adds, and total.
    #[pyo3(signature = (
        text, *, answer = None, against = None, position = None, measure = "logit", unit = "component", as_ = "raw", top = 40,
        bos = false
    ))]
    #[expect(clippy::too_many_arguments, reason = "keywords of Python")]
    fn attribute(
        &self,
        py: Python<'_>,
        text: &Bound<'_, PyAny>,
        answer: Option<&Bound<'_, PyAny>>,
        against: Option<&Bound<'_, PyAny>>,
        position: Option<i64>,
        measure: &str,
        unit: &str,
        as_: &str,
        #[pyo3(from_py_with = number)] top: usize,
        bos: bool,
    ) -> Result<Picture> {
        let look = Attribute {
            text: self::text(text)?,
            metric: metric(answer, against, position, measure)?,
            unit: choice("unit", unit)?,
            numbers: choice("as", as_)?,
            top,
        };
        self.look(py, bos, &look)
    }

    /// Which heads attend to the previous token, to the same token before, or to what followed it (induction): a picture over kinds,
    /// layers and heads. Without a text rows of random tokens, those of torch.manual_seed, are each read twice.
    ///
    /// length, rows, seed, from_, below: of the random tokens. exclude_bos, exclude_current: with a text, leave out attention to the
    /// first token, or of tokens to themselves.
    #[pyo3(signature = (
        text = None, *, length = None, rows = 2, seed = 0, from_ = None, below = None, exclude_bos = false,
        exclude_current = false, bos = false
    ))]
    #[expect(clippy::too_many_arguments, reason = "keywords of Python")]
    fn heads(
        &self,
        py: Python<'_>,
        text: Option<&Bound<'_, PyAny>>,
        #[pyo3(from_py_with = number)] length: Option<usize>,
        #[pyo3(from_py_with = number)] rows: usize,
        #[pyo3(from_py_with = number)] seed: u32,
        #[pyo3(from_py_with = number)] from_: Option<u32>,
        #[pyo3(from_py_with = number)] below: Option<u32>,
        exclude_bos: bool,
        exclude_current: bool,
        bos: bool,
    ) -> Result<Picture> {
        let text = text.map(self::text).transpose()?;
        let look = HeadKinds { text, length, rows, seed, from: from_, below, exclude_bos, exclude_current };
        self.look(py, bos, &look)
    }

    /// What a prediction becomes without a head: a picture over layers and heads, or with `heads`, left out together, of how much
    /// less each token of the text is expected. The prediction is as in `attribute`.
    ///
    /// measure: logit, log-probability or probability. at: leave the heads out after this token alone. with_: what takes the place
    /// of a head's output: "raw-zero", "transformer-lens-zero", "mean:FILE" or ("mean", texts), "sample:FILE" or ("sample", text).
    #[pyo3(signature = (
        text, *, answer = None, against = None, position = None, measure = "logit", heads = None, at = None, with_ = None,
        bos = false
    ))]
    #[expect(clippy::too_many_arguments, reason = "keywords of Python")]
    fn ablate(
        &self,
        py: Python<'_>,
        text: &Bound<'_, PyAny>,
        answer: Option<&Bound<'_, PyAny>>,
        against: Option<&Bound<'_, PyAny>>,
        position: Option<i64>,
        measure: &str,
        heads: Option<&Bound<'_, PyAny>>,
        at: Option<i64>,
        with_: Option<&Bound<'_, PyAny>>,
        bos: bool,
    ) -> Result<Picture> {
        let look = Ablate {
            text: self::text(text)?,
            metric: metric(answer, against, position, measure)?,
            heads: self::heads("heads", heads)?,
            at,
            with: with_.map_or_else(|| Ok(Instead::raw_zero()), instead)?,
        };
        self.look(py, bos, &look)
    }

    /// Which part of one text's run carries its prediction over to another text (activation patching): a picture over layers and
    /// positions, or heads, of shares of the way from the prediction of the text `corrupt` (0) to that of `clean` (1). Both have as
    /// many tokens. The prediction is as in `ablate`.
    ///
    /// site: what is put from the one run into the other, such as resid_pre, mlp_out or z. by: layer, position, head or
    /// head-and-position.
    #[pyo3(signature = (
        clean, corrupt, *, answer = None, against = None, position = None, measure = "logit", site = "resid_pre", by = None,
        bos = false
    ))]
    #[expect(clippy::too_many_arguments, reason = "keywords of Python")]
    fn patch(
        &self,
        py: Python<'_>,
        clean: &Bound<'_, PyAny>,
        corrupt: &Bound<'_, PyAny>,
        answer: Option<&Bound<'_, PyAny>>,
        against: Option<&Bound<'_, PyAny>>,
        position: Option<i64>,
        measure: &str,
        site: &str,
        by: Option<&str>,
        bos: bool,
    ) -> Result<Picture> {
        let metric = metric(answer, against, position, measure)?;
        let texts = ComparedTexts { clean: text(clean)?, corrupt: text(corrupt)?, metric };
        self.look(py, bos, &Patch { texts, patched: patched(site, by)? })
    }

    /// What `patch` would say, estimated from one gradient (attribution patching).
    #[pyo3(signature = (
        clean, corrupt, *, answer = None, against = None, position = None, measure = "logit", site = "resid_pre", by = None,
        bos = false
    ))]
    #[expect(clippy::too_many_arguments, reason = "keywords of Python")]
    fn estimate(
        &self,
        py: Python<'_>,
        clean: &Bound<'_, PyAny>,
        corrupt: &Bound<'_, PyAny>,
        answer: Option<&Bound<'_, PyAny>>,
        against: Option<&Bound<'_, PyAny>>,
        position: Option<i64>,
        measure: &str,
        site: &str,
        by: Option<&str>,
        bos: bool,
    ) -> Result<Picture> {
        let metric = metric(answer, against, position, measure)?;
        let texts = ComparedTexts { clean: text(clean)?, corrupt: text(corrupt)?, metric };
        self.look(py, bos, &Estimate { texts, patched: patched(site, by)? })
    }

    /// Which way a head's output takes to later heads (path patching): the text `clean`, where only the path from a head, as it is in
    /// the text `corrupt`, to the receiver is another. A picture over layers and heads of how far the prediction goes from that of
    /// `clean` (0) to that of `corrupt` (1); one value with `from_`, heads that are taken together. The prediction is as in `ablate`.
    ///
    /// to: "final", the last residual stream, or queries, keys or values of a head, such as "9.9.q".
    #[pyo3(signature = (
        clean, corrupt, *, answer = None, against = None, position = None, measure = "logit", from_ = None, to = "final",
        bos = false
    ))]
    #[expect(clippy::too_many_arguments, reason = "keywords of Python")]
    fn path(
        &self,
        py: Python<'_>,
        clean: &Bound<'_, PyAny>,
        corrupt: &Bound<'_, PyAny>,
        answer: Option<&Bound<'_, PyAny>>,
        against: Option<&Bound<'_, PyAny>>,
        position: Option<i64>,
        measure: &str,
        from_: Option<&Bound<'_, PyAny>>,
        to: &str,
        bos: bool,
    ) -> Result<Picture> {
        let metric = metric(answer, against, position, measure)?;
        let texts = ComparedTexts { clean: text(clean)?, corrupt: text(corrupt)?, metric };
        self.look(py, bos, &PathPatching { texts, from: heads("from_", from_)?, to: to.to_owned() })
    }

    /// How much each token of a text matters for a prediction, by gradients: a picture over tokens. Its details are arrays: norms and
    /// the signed sums, which with method="integrated" add up to the prediction's difference from a text of baseline tokens. The
    /// prediction is as in `ablate`.
    ///
    /// method: integrated, input-x-gradient or gradient. steps, baseline: of integrated gradients; the baseline is the token that
    /// begins texts by default.
    #[pyo3(signature = (
        text, *, answer = None, against = None, position = None, measure = "logit", method = "integrated", steps = 50,
        baseline = None, bos = false
    ))]
    #[expect(clippy::too_many_arguments, reason = "keywords of Python")]
    fn saliency(
        &self,
        py: Python<'_>,
        text: &Bound<'_, PyAny>,
        answer: Option<&Bound<'_, PyAny>>,
        against: Option<&Bound<'_, PyAny>>,
        position: Option<i64>,
        measure: &str,
        method: &str,
        #[pyo3(from_py_with = number)] steps: usize,
        baseline: Option<&Bound<'_, PyAny>>,
        bos: bool,
    ) -> Result<Picture> {
        let look = Saliency {
            text: self::text(text)?,
            metric: metric(answer, against, position, measure)?,
            method: choice("method", method)?,
            steps,
            baseline: baseline.map(|value| token("baseline", value)).transpose()?,
        };
        self.look(py, bos, &look)
    }

    /// Where in a text, however long, a neuron is most active: a picture over places. details: places, a list of dicts with index,
    /// id, text, before, after and value.
    ///
    /// neuron: a pair of layer and neuron, or a text such as "11.611". top: how many places.
    #[pyo3(signature = (text, neuron, *, top = 20, bos = false))]
    fn neurons(
        &self,
        py: Python<'_>,
        text: &Bound<'_, PyAny>,
        neuron: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = number)] top: usize,
        bos: bool,
    ) -> Result<Picture> {
        self.look(py, bos, &Neurons { text: self::text(text)?, neuron: self::neuron(neuron)?, top })
    }

    /// Which features of a sparse autoencoder are active, token by token: a picture over features and tokens. details: site and
    /// explained (mean_l0, variance_explained, mse).
    ///
    /// sae: SAELens' folder with cfg.json and sae_weights.safetensors, or a file of OpenAI's. site: the place that it was trained on,
    /// where its file does not say. top: how many features.
    #[pyo3(signature = (text, sae, *, site = None, top = 20, bos = false))]
    fn features(
        &self,
        py: Python<'_>,
        text: &Bound<'_, PyAny>,
        sae: PathBuf,
        site: Option<String>,
        #[pyo3(from_py_with = number)] top: usize,
        bos: bool,
    ) -> Result<Picture> {
        self.look(py, bos, &Features { text: self::text(text)?, sae, site, top })
    }
}

impl Model {
    #[expect(clippy::too_many_arguments, reason = "those of two methods of Python's")]
    fn lens(
        &self,
        py: Python<'_>,
        text: &Bound<'_, PyAny>,
        tuned: Option<PathBuf>,
        show: &str,
        top: usize,
        watch: Option<Vec<Bound<'_, PyAny>>>,
        bos: bool,
    ) -> Result<Picture> {
        let watch = watch.unwrap_or_default();
        let look = Lens {
            text: self::text(text)?,
            show: choice("show", show)?,
            top,
            watch: watch.iter().map(|value| token("watch", value)).collect::<Result<_>>()?,
            tuned,
        };
        self.look(py, bos, &look)
    }
}
