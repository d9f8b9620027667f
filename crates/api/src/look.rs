//! Bodies that ask for a look into the model: `/look/attention`, `/look/lens`, `/look/head`, `/look/next`, and with transcoders of the
//! model `/look/features`, `/look/feature`, `/look/graph`. What a body says is read and checked here, for a server that computes between
//! the texts of others and for a page that has the model to itself.

use std::sync::LazyLock;

use candle_gpt2_generation::{GenerationConfig, GenerationError, History, LogitsProcessor};
use candle_gpt2_interpret::{Dictionary, Head, LensValue, Transcoders};
use candle_gpt2_look::{CheckedHead, Graph, LookError, NextTokens, OneHead, Reader, Text};
use serde::Deserialize;

use crate::answer::json;
use crate::body::{
    Body, Count, Field, Fields, Integer, List, TextOrList, TokenId, fields, found, words, wrong_value,
};
use crate::completion::{self, CompletionRequest};
use crate::inside_fields::{InsideFields, Real};
use crate::pieces::name;
use crate::plan::{config_of, processors_of};
use crate::prompts::{check_ids, check_length, encode};
use crate::{ApiError, Reply, ServedModel, Warnings};

/// Attention of longer texts is too large to be sent.
const MAX_ATTENTION_TOKENS: usize = 256;
/// Attention weights of one analysis: those of 144 heads over as many tokens, and a few more.
const MAX_WEIGHTS: usize = 10_000_000;
/// The lens computes the whole vocabulary for each layer and token.
const MAX_LENS_TOKENS: usize = 128;
/// Each layer has its features at each token.
const MAX_FEATURES_TOKENS: usize = 128;
/// Most features of a layer at a token, and their number by default.
const MAX_STRONGEST: usize = 32;
const STRONGEST: usize = 3;
/// A graph has edges between the features of all its tokens.
const MAX_GRAPH_TOKENS: usize = 64;
/// Most features with edges into them, and their number by default: a second of work for the built-in model.
const MAX_GRAPH_FEATURES: usize = 1000;
const GRAPH_FEATURES: usize = 600;
/// Most candidates for the next token in an answer, and their number by default.
const MAX_TOP: usize = 1000;
const TOP: usize = 20;
/// Most layers of a list: more than any model has.
const MAX_LAYERS: usize = 1 << 12;
/// Most tokens of a body: more than any context, whose own length is checked later.
const MAX_TOKENS: usize = 1 << 20;

fields! {
    /// The fields of `/look/attention`.
    AttentionFields {
        /// The text.
        @required prompt: Option<LookText>,
        /// Without it those of all layers.
        layers: Option<List<Number, MAX_LAYERS>>,
    }
}

fields! {
    /// The fields of `/look/lens`.
    LensFields {
        /// The text.
        @required prompt: Option<LookText>,
        /// What a cell shows.
        show: Show = Show::Probability,
    }
}

words! {
    /// What a cell of the lens shows.
    Show { "probability" => Probability, "entropy" => Entropy, "divergence" => Divergence, "next" => Next }
}

fields! {
    /// The fields of `/look/head`.
    HeadFields {
        /// The text.
        @required prompt: Option<LookText>,
        /// The layer.
        @required layer: Option<Number>,
        /// The head of the layer.
        @required head: Option<Number>,
        /// The query token, counted from 0, or from -1 at the end.
        query: Integer = Integer(-1),
        /// The token that is looked at; without it that of the query.
        key: Option<Number>,
    }
}

fields! {
    /// The fields of `/look/features`.
    FeaturesFields {
        /// The text.
        @required prompt: Option<LookText>,
        /// Without it those of all layers.
        layers: Option<List<Number, MAX_LAYERS>>,
        /// How many features of a layer are shown for a token, the strongest first.
        top: Count<1, MAX_STRONGEST> = Count(STRONGEST),
    }
}

fields! {
    /// The fields of `/look/feature`.
    FeatureFields {
        /// The text.
        @required prompt: Option<LookText>,
        /// The layer.
        @required layer: Option<Number>,
        /// The feature of the layer's transcoder.
        @required feature: Option<Number>,
    }
}

fields! {
    /// The fields of `/look/graph`.
    GraphFields {
        /// The text, whose next token is explained.
        @required prompt: Option<LookText>,
        /// Features whose edges are computed, those with the most influence.
        max_feature_nodes: Count<1, MAX_GRAPH_FEATURES> = Count(GRAPH_FEATURES),
        /// Nodes with the most influence are kept until they have this share of all: from 0 to 1, by default 0.8.
        node_threshold: Option<Real>,
        /// Edges with the most influence are kept until they have this share of all: from 0 to 1, by default 0.98.
        edge_threshold: Option<Real>,
    }
}

fields! {
    /// The fields of `/look/next`, beside those of a completion.
    NextFields {
        /// The text.
        @required prompt: Option<LookText>,
        /// The token whose successor is predicted, counted from 0, or from -1 at the end.
        at: Integer = Integer(-1),
        /// How many of the tokens are the prompt; the others count as generated. Without it all are.
        prompt_tokens: Option<Number>,
        /// How many tokens are returned.
        top: Count<0, MAX_TOP> = Count(TOP),
    }
}

/// The number of a layer, a head or a token; how many there are is checked later.
type Number = Count<0, MAX_TOKENS>;

/// The text of a look.
type LookText = TextOrList<String, TokenId, MAX_TOKENS>;

/// All fields of `/look/next`: the prompt is its own.
pub(crate) static NEXT: LazyLock<Vec<Field>> = LazyLock::new(|| {
    let is_inside = |field: &Field| InsideFields::fields().iter().any(|inside| inside.name == field.name);
    let of_completion =
        completion::FIELDS.iter().filter(|field| field.name != "prompt" && !is_inside(field)).cloned();
    NextFields::fields().iter().cloned().chain(of_completion).collect()
});

/// `POST /look/attention`: `{"prompt": text or token ids, "layers": [0, 1]}`, without `layers` those of all.
#[derive(Debug, Clone)]
pub(crate) struct AttentionRequest {
    /// The text.
    pub(crate) ids: Vec<u32>,
    /// All heads of the layers.
    pub(crate) heads: Vec<Head>,
    /// Its unknown fields.
    pub(crate) warnings: Warnings,
}

/// `POST /look/lens`: `{"prompt": text or token ids, "show": "probability"}`, or `entropy`, `divergence`, `next`.
#[derive(Debug, Clone)]
pub(crate) struct LensRequest {
    /// The text.
    pub(crate) ids: Vec<u32>,
    /// What a cell shows.
    pub(crate) show: LensValue,
    /// Its unknown fields.
    pub(crate) warnings: Warnings,
}

/// `POST /look/head`: `{"prompt": text or token ids, "layer": 0, "head": 0, "query": -1, "key": 0}`; without `query` the last token's,
/// without `key` that of the query itself.
#[derive(Debug, Clone)]
pub(crate) struct HeadRequest {
    /// The text, the head and the pair of tokens.
    pub(crate) head: CheckedHead,
    /// Its unknown fields.
    pub(crate) warnings: Warnings,
}

/// `POST /look/features`: `{"prompt": text or token ids, "layers": [0, 1], "top": 3}`, without `layers` those of all.
#[derive(Debug, Clone)]
pub(crate) struct FeaturesRequest {
    /// The text.
    pub(crate) ids: Vec<u32>,
    /// The layers with their transcoders.
    pub(crate) dictionaries: Vec<(usize, Dictionary)>,
    /// Features of a layer at a token.
    pub(crate) top: usize,
    /// Its unknown fields.
    pub(crate) warnings: Warnings,
}

/// `POST /look/feature`: `{"prompt": text or token ids, "layer": 0, "feature": 0}`.
#[derive(Debug, Clone)]
pub(crate) struct FeatureRequest {
    /// The text.
    pub(crate) ids: Vec<u32>,
    /// The transcoder of the layer.
    pub(crate) dictionary: Dictionary,
    /// The feature.
    pub(crate) feature: usize,
    /// Its unknown fields.
    pub(crate) warnings: Warnings,
}

/// `POST /look/graph`: `{"prompt": text or token ids, "max_feature_nodes": 600, "node_threshold": 0.8, "edge_threshold": 0.98}`.
#[derive(Debug, Clone)]
pub(crate) struct GraphRequest {
    /// The text.
    pub(crate) ids: Vec<u32>,
    /// The transcoders of all layers.
    pub(crate) transcoders: Transcoders,
    /// Its limits, and how it is pruned.
    pub(crate) graph: Graph,
    /// Its unknown fields.
    pub(crate) warnings: Warnings,
}

/// `POST /look/next`: `{"prompt": text or token ids, "at": -1, "top": 20}` and the fields of a completion. Without `at` after the last
/// token; of `prompt_tokens` tokens and those before `at` the first are the prompt and the others were generated, without it all are
/// the prompt.
#[derive(Debug, Clone)]
pub(crate) struct NextRequest {
    /// The text up to the token after which is asked.
    pub(crate) ids: Vec<u32>,
    /// The whole text, of which that is the beginning.
    pub(crate) text: Vec<u32>,
    prompt_len: usize,
    top: usize,
    config: GenerationConfig,
    processors: Vec<LogitsProcessor>,
    /// Its unknown fields.
    pub(crate) warnings: Warnings,
}

impl AttentionRequest {
    /// Reads a body.
    pub(crate) fn read(body: &[u8], served: &ServedModel) -> Result<Self, ApiError> {
        let body = Body::parse(body, AttentionFields::fields())?;
        let warnings = served.known(&body)?;
        check_layers(&body, served)?;
        let fields: AttentionFields = read(&body)?;
        let ids = text(fields.prompt, MAX_ATTENTION_TOKENS, served)?;
        let layers = layers(&body, fields.layers, served)?;
        let n_head = served.config().n_head;
        let (count, tokens) = (layers.len().saturating_mul(n_head), ids.len());
        let weights = count.saturating_mul(tokens * tokens);
        if weights > MAX_WEIGHTS {
            let message = format!(
                "layers: {count} heads of {tokens} tokens have {weights} weights, more than {MAX_WEIGHTS}; choose fewer layers or a \
                 shorter text"
            );
            return Err(ApiError::invalid(message).with_param("layers"));
        }
        let of_layer = |layer| (0..n_head).map(move |head| Head { layer, head });
        Ok(Self { ids, heads: layers.into_iter().flat_map(of_layer).collect(), warnings })
    }
}

/// That `layers` is a list, if it is there.
fn check_layers(body: &Body<'_>, served: &ServedModel) -> Result<(), ApiError> {
    match body.json("layers").is_some_and(|json| !json.starts_with('[')) {
        true => Err(wrong_layers(body, served)),
        false => Ok(()),
    }
}

/// The layers of a list, each once and in their order; without one all.
fn layers(
    body: &Body<'_>,
    given: Option<List<Number, MAX_LAYERS>>,
    served: &ServedModel,
) -> Result<Vec<usize>, ApiError> {
    let n_layer = served.config().n_layer;
    let Some(List(layers)) = given else { return Ok((0..n_layer).collect()) };
    let known = |Count(layer)| Some(layer).filter(|layer| *layer < n_layer);
    let layers: Option<Vec<usize>> = layers.into_iter().map(known).collect();
    let mut layers = layers.filter(|layers| !layers.is_empty()).ok_or_else(|| wrong_layers(body, served))?;
    layers.sort_unstable();
    layers.dedup();
    Ok(layers)
}

fn wrong_layers(body: &Body<'_>, served: &ServedModel) -> ApiError {
    let last = served.config().n_layer.saturating_sub(1);
    body.wrong("layers", format_args!("a list of layers, which are counted from 0 to {last}"))
}

impl FeaturesRequest {
    /// Reads a body.
    pub(crate) fn read(body: &[u8], served: &ServedModel) -> Result<Self, ApiError> {
        let body = Body::parse(body, FeaturesFields::fields())?;
        let warnings = served.known(&body)?;
        check_layers(&body, served)?;
        let fields: FeaturesFields = read(&body)?;
        let ids = text(fields.prompt, MAX_FEATURES_TOKENS, served)?;
        let layers = layers(&body, fields.layers, served)?;
        let dictionaries = transcoders(served)?;
        let dictionaries = layers.into_iter().map(|layer| (layer, dictionaries[layer].clone())).collect();
        Ok(Self { ids, dictionaries, top: fields.top.0, warnings })
    }
}

impl FeatureRequest {
    /// Reads a body.
    pub(crate) fn read(body: &[u8], served: &ServedModel) -> Result<Self, ApiError> {
        let body = Body::parse(body, FeatureFields::fields())?;
        let warnings = served.known(&body)?;
        let fields: FeatureFields = read(&body)?;
        let ids = text(fields.prompt, MAX_FEATURES_TOKENS, served)?;
        let layer = required(&body, "layer", fields.layer, served.config().n_layer)?;
        let dictionary = transcoders(served)?[layer].clone();
        let feature = required(&body, "feature", fields.feature, dictionary.latents())?;
        Ok(Self { ids, dictionary, feature, warnings })
    }
}

impl GraphRequest {
    /// Reads a body.
    pub(crate) fn read(body: &[u8], served: &ServedModel) -> Result<Self, ApiError> {
        let body = Body::parse(body, GraphFields::fields())?;
        let warnings = served.known(&body)?;
        let fields: GraphFields = read(&body)?;
        let ids = text(fields.prompt, MAX_GRAPH_TOKENS, served)?;
        let share = |name: &str, share: Option<Real>, default: f64| match share {
            None => Ok(default),
            Some(Real(share)) if (0.0..=1.0).contains(&share) => Ok(share),
            Some(_) => Err(body.wrong(name, "a share from 0 to 1")),
        };
        let graph = Graph {
            max_feature_nodes: fields.max_feature_nodes.0,
            node_threshold: share("node_threshold", fields.node_threshold, Graph::default().node_threshold)?,
            edge_threshold: share("edge_threshold", fields.edge_threshold, Graph::default().edge_threshold)?,
            ..Graph::default()
        };
        let transcoders = Transcoders::of_dictionaries(transcoders(served)?.to_vec());
        let transcoders = transcoders.map_err(ApiError::failed)?;
        Ok(Self { ids, transcoders, graph, warnings })
    }
}

/// The transcoders of the model, one for each layer.
fn transcoders(served: &ServedModel) -> Result<&[Dictionary], ApiError> {
    let found = served.options.transcoders.get().filter(|found| found.len() == served.config().n_layer);
    found.map(Vec::as_slice).ok_or_else(|| {
        ApiError::invalid(
            "features and graphs are of the built-in model, whose transcoders the program has; for another model, train some with \
             `gpt2 train --task dictionary --kind transcoder` and read them with `gpt2 look graph --transcoders`",
        )
    })
}

impl LensRequest {
    /// Reads a body.
    pub(crate) fn read(body: &[u8], served: &ServedModel) -> Result<Self, ApiError> {
        let body = Body::parse(body, LensFields::fields())?;
        let warnings = served.known(&body)?;
        let fields: LensFields = read(&body)?;
        let ids = text(fields.prompt, MAX_LENS_TOKENS, served)?;
        let show = match fields.show {
            Show::Probability => LensValue::Probability,
            Show::Entropy => LensValue::Entropy,
            Show::Divergence => LensValue::Divergence,
            Show::Next => LensValue::Next,
        };
        Ok(Self { ids, show, warnings })
    }
}

impl HeadRequest {
    /// Reads a body.
    pub(crate) fn read(body: &[u8], served: &ServedModel) -> Result<Self, ApiError> {
        let body = Body::parse(body, HeadFields::fields())?;
        let warnings = served.known(&body)?;
        let fields: HeadFields = read(&body)?;
        let ids = text(fields.prompt, MAX_ATTENTION_TOKENS, served)?;
        let config = served.config();
        let layer = required(&body, "layer", fields.layer, config.n_layer)?;
        let head = Head { layer, head: required(&body, "head", fields.head, config.n_head)? };
        let query = place(&body, "query", fields.query, ids.len())?;
        let key = fields.key.map_or(Ok(query), |key| count(&body, "key", key, query))?;
        let [query, key] = [query, key].map(|place| i64::try_from(place).unwrap_or(i64::MAX));
        let head = OneHead { text: Text::Ids(ids), head, query, key }.check(&served.reader());
        Ok(Self { head: head.map_err(refused)?, warnings })
    }
}

impl NextRequest {
    /// Reads a body.
    pub(crate) fn read(body: &[u8], served: &ServedModel) -> Result<Self, ApiError> {
        let mut body = Body::parse(body, &NEXT)?;
        let fields: NextFields = read(&body)?;
        let text = text(fields.prompt, served.config().n_positions, served)?;
        let at = place(&body, "at", fields.at, text.len())?;
        let ids: Vec<u32> = text.iter().take(at + 1).copied().collect();
        let prompt_len = fields
            .prompt_tokens
            .map_or(Ok(ids.len()), |tokens| count(&body, "prompt_tokens", tokens, text.len()))?;
        let CompletionRequest { options, warnings, .. } = CompletionRequest::of(&mut body)?;
        served.check_known(&warnings)?;
        served.check_name(options.fields.model.as_ref())?;
        // However long the text becomes; which token would be drawn is not asked.
        let config = config_of(&options, options.sampling(served), usize::MAX, 1, None, served)?;
        Ok(Self {
            prompt_len: prompt_len.min(ids.len()),
            ids,
            text,
            top: fields.top.0,
            processors: processors_of(&options, &config, served)?,
            config,
            warnings,
        })
    }

    /// The answer with what may follow, by the logits `(V)` after the last of [`NextRequest::ids`].
    pub(crate) fn into_reply(self, logits: &[f32], served: &ServedModel) -> Result<Reply, ApiError> {
        let next = self.answer(logits, served)?;
        Ok(Reply::new(json(&next), self.warnings))
    }

    /// What may follow, by the logits `(V)` after the last of [`NextRequest::ids`].
    pub(crate) fn answer(&self, logits: &[f32], served: &ServedModel) -> Result<NextTokens, ApiError> {
        let history = History { ids: &self.ids, prompt_len: self.prompt_len };
        let text_of = |id| name(served.pieces.bytes(id));
        let found = NextTokens::of(logits, history, &self.config, &self.processors, self.top, text_of);
        found.map_err(|error: GenerationError| ApiError::from(&error))
    }
}

impl ServedModel {
    /// What reads texts and names of options for looks.
    pub fn reader(&self) -> Reader {
        Reader::without_bos(&self.vocabulary)
    }
}

/// The fields of a look, whose text is required.
fn read<'a, T: Deserialize<'a> + Fields>(body: &Body<'a>) -> Result<T, ApiError> {
    let json = body.json("prompt").unwrap_or_default();
    if !json.starts_with(['"', '[']) {
        let expected = "the text to look at, as a string or as token ids";
        return Err(wrong_value("prompt", expected, found(json)));
    }
    body.read()
}

/// The tokens of `prompt`, from 1 to `most` of them.
fn text(prompt: Option<LookText>, most: usize, served: &ServedModel) -> Result<Vec<u32>, ApiError> {
    let wrong = |what: String| ApiError::invalid(format!("prompt: {what}")).with_param("prompt");
    let ids = match prompt {
        None => Vec::new(),
        Some(TextOrList::List(ids)) => {
            check_ids(ids.into_iter().map(|TokenId(id)| id).collect(), "prompt", served)?
        }
        Some(TextOrList::Text(text)) => {
            check_length(text.len(), "prompt", served)?;
            encode(&text, "prompt", served)?
        }
    };
    let most = most.min(served.config().n_positions);
    match ids.len() {
        0 => Err(wrong("the text is empty; give at least one token".into())),
        tokens if tokens > most => {
            Err(wrong(format!("the text has {tokens} tokens; this analysis takes 1 to {most}")))
        }
        _ => Ok(ids),
    }
}

/// A number of a field, from 0 to `most`.
fn count(body: &Body<'_>, name: &str, Count(number): Number, most: usize) -> Result<usize, ApiError> {
    match number <= most {
        true => Ok(number),
        false => Err(body.wrong(name, format_args!("a whole number from 0 to {most}"))),
    }
}

/// The number of a field that has to be there, below `below`.
fn required(body: &Body<'_>, name: &str, number: Option<Number>, below: usize) -> Result<usize, ApiError> {
    let number = number.ok_or_else(|| wrong_value(name, "its number", "nothing"))?;
    count(body, name, number, below.saturating_sub(1))
}

/// The token that a field names, counted from 0, or from -1 at the end.
fn place(body: &Body<'_>, name: &str, Integer(place): Integer, tokens: usize) -> Result<usize, ApiError> {
    let tokens = i64::try_from(tokens).unwrap_or(i64::MAX);
    if !(-tokens..tokens).contains(&place) {
        return Err(body.wrong(name, format_args!("a whole number from {} to {}", -tokens, tokens - 1)));
    }
    Ok(usize::try_from(if place < 0 { place + tokens } else { place }).unwrap_or(0))
}

pub(crate) fn refused(error: LookError) -> ApiError {
    if error.is_usage() { ApiError::invalid(error.to_string()) } else { ApiError::failed(error) }
}
