//! Request bodies for views into the model.
//!
//! The routes are `/look/attention`, `/look/lens`, `/look/head` and `/look/next`. `/look/features`,
//! `/look/feature` and `/look/graph` need transcoders of the model. This module parses and validates the
//! bodies for a server, which interleaves computations with completions, and for a page that owns the model.

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

/// Maximum number of tokens for attention; a longer text would make the response too large to send.
const MAX_ATTENTION_TOKENS: usize = 256;
/// Maximum number of attention weights in one analysis; enough for 144 heads and the longest text.
const MAX_WEIGHTS: usize = 10_000_000;
/// Maximum number of tokens for the lens, which computes logits for each layer and token.
const MAX_LENS_TOKENS: usize = 128;
/// Maximum number of tokens for features, which are computed for each layer and token.
const MAX_FEATURES_TOKENS: usize = 128;
/// Maximum and default number of features per layer and token.
const MAX_STRONGEST: usize = 32;
const STRONGEST: usize = 3;
/// Maximum number of tokens for a graph, which has edges between the features of all tokens.
const MAX_GRAPH_TOKENS: usize = 64;
/// Maximum and default number of features with incoming edges.
///
/// The default takes about one second for the built-in model.
const MAX_GRAPH_FEATURES: usize = 1000;
const GRAPH_FEATURES: usize = 600;
/// Maximum and default number of next-token candidates.
const MAX_TOP: usize = 1000;
const TOP: usize = 20;
/// Maximum number of layers in a list; exceeds any model's layer count.
const MAX_LAYERS: usize = 1 << 12;
/// Maximum number of tokens in a body, above any context length; the context is checked later.
const MAX_TOKENS: usize = 1 << 20;

fields! {
    /// Fields of `/look/attention`.
    AttentionFields {
        /// The text.
        @required prompt: Option<LookText>,
        /// Layers to show; all layers by default.
        layers: Option<List<Number, MAX_LAYERS>>,
    }
}

fields! {
    /// Fields of `/look/lens`.
    LensFields {
        /// The text.
        @required prompt: Option<LookText>,
        /// Value shown in each cell.
        show: Show = Show::Probability,
    }
}

words! {
    /// Value shown in a cell of the lens.
    Show { "probability" => Probability, "entropy" => Entropy, "divergence" => Divergence, "next" => Next }
}

fields! {
    /// Fields of `/look/head`.
    HeadFields {
        /// The text.
        @required prompt: Option<LookText>,
        /// The layer.
        @required layer: Option<Number>,
        /// The head within the layer.
        @required head: Option<Number>,
        /// Index of the query token, from 0; negative values count from the end.
        query: Integer = Integer(-1),
        /// Index of the key token; the query token by default.
        key: Option<Number>,
    }
}

fields! {
    /// Fields of `/look/features`.
    FeaturesFields {
        /// The text.
        @required prompt: Option<LookText>,
        /// Layers to show; all layers by default.
        layers: Option<List<Number, MAX_LAYERS>>,
        /// Number of features shown per layer and token, strongest first.
        top: Count<1, MAX_STRONGEST> = Count(STRONGEST),
    }
}

fields! {
    /// Fields of `/look/feature`.
    FeatureFields {
        /// The text.
        @required prompt: Option<LookText>,
        /// The layer.
        @required layer: Option<Number>,
        /// Index of the feature in the layer's transcoder.
        @required feature: Option<Number>,
    }
}

fields! {
    /// Fields of `/look/graph`.
    GraphFields {
        /// The text; the graph explains its next token.
        @required prompt: Option<LookText>,
        /// Number of features whose edges are computed, most influential first.
        max_feature_nodes: Count<1, MAX_GRAPH_FEATURES> = Count(GRAPH_FEATURES),
        /// Fraction of the total influence that the kept nodes cover, from 0 to 1; 0.8 by default.
        node_threshold: Option<Real>,
        /// Fraction of the total influence that the kept edges cover, from 0 to 1; 0.98 by default.
        edge_threshold: Option<Real>,
    }
}

fields! {
    /// Fields of `/look/next`, in addition to a completion's fields.
    NextFields {
        /// The text.
        @required prompt: Option<LookText>,
        /// Index of the token whose successor is predicted, from 0; negative values count from the end.
        at: Integer = Integer(-1),
        /// Number of tokens that belong to the prompt, all by default; the others count as generated.
        prompt_tokens: Option<Number>,
        /// Number of candidates to return.
        top: Count<0, MAX_TOP> = Count(TOP),
    }
}

/// Index of a layer, head or token; the upper bound is checked later.
type Number = Count<0, MAX_TOKENS>;

/// Text to analyze.
type LookText = TextOrList<String, TokenId, MAX_TOKENS>;

/// All fields of `/look/next`; the route's own `prompt` replaces the completion field of that name.
pub(crate) static NEXT: LazyLock<Vec<Field>> = LazyLock::new(|| {
    let is_inside = |field: &Field| InsideFields::fields().iter().any(|inside| inside.name == field.name);
    let of_completion =
        completion::FIELDS.iter().filter(|field| field.name != "prompt" && !is_inside(field)).cloned();
    NextFields::fields().iter().cloned().chain(of_completion).collect()
});

/// `POST /look/attention`: `{"prompt": text or token ids, "layers": [0, 1]}`.
///
/// Without `layers`, all layers are included.
#[derive(Debug, Clone)]
pub(crate) struct AttentionRequest {
    /// Token ids of the text.
    pub(crate) ids: Vec<u32>,
    /// All heads of the requested layers.
    pub(crate) heads: Vec<Head>,
    /// Warnings about unknown fields.
    pub(crate) warnings: Warnings,
}

/// `POST /look/lens`: `{"prompt": text or token ids, "show": "probability"}`.
///
/// `show` may also be `entropy`, `divergence` or `next`.
#[derive(Debug, Clone)]
pub(crate) struct LensRequest {
    /// Token ids of the text.
    pub(crate) ids: Vec<u32>,
    /// Value shown in a cell.
    pub(crate) show: LensValue,
    /// Warnings about unknown fields.
    pub(crate) warnings: Warnings,
}

/// `POST /look/head`: one head and one pair of tokens.
///
/// The body is `{"prompt": text or token ids, "layer": 0, "head": 0, "query": -1, "key": 0}`. By default,
/// `query` is the last token, and `key` is the query itself.
#[derive(Debug, Clone)]
pub(crate) struct HeadRequest {
    /// Text, head and pair of tokens.
    pub(crate) head: CheckedHead,
    /// Warnings about unknown fields.
    pub(crate) warnings: Warnings,
}

/// `POST /look/features`: `{"prompt": text or token ids, "layers": [0, 1], "top": 3}`.
///
/// Without `layers`, all layers are included.
#[derive(Debug, Clone)]
pub(crate) struct FeaturesRequest {
    /// Token ids of the text.
    pub(crate) ids: Vec<u32>,
    /// Layers with their transcoders.
    pub(crate) dictionaries: Vec<(usize, Dictionary)>,
    /// Number of features per layer and token.
    pub(crate) top: usize,
    /// Warnings about unknown fields.
    pub(crate) warnings: Warnings,
}

/// `POST /look/feature`: `{"prompt": text or token ids, "layer": 0, "feature": 0}`.
#[derive(Debug, Clone)]
pub(crate) struct FeatureRequest {
    /// Token ids of the text.
    pub(crate) ids: Vec<u32>,
    /// Transcoder for the layer.
    pub(crate) dictionary: Dictionary,
    /// Index of the feature.
    pub(crate) feature: usize,
    /// Warnings about unknown fields.
    pub(crate) warnings: Warnings,
}

/// `POST /look/graph`: an attribution graph.
///
/// The body is
/// `{"prompt": text or token ids, "max_feature_nodes": 600, "node_threshold": 0.8, "edge_threshold": 0.98}`.
#[derive(Debug, Clone)]
pub(crate) struct GraphRequest {
    /// Token ids of the text.
    pub(crate) ids: Vec<u32>,
    /// Transcoders for all layers.
    pub(crate) transcoders: Transcoders,
    /// Size limits and pruning thresholds for the graph.
    pub(crate) graph: Graph,
    /// Warnings about unknown fields.
    pub(crate) warnings: Warnings,
}

/// `POST /look/next`: `{"prompt": text or token ids, "at": -1, "top": 20}` and a completion's fields.
///
/// Without `at`, the prediction follows the last token. The first `prompt_tokens` tokens up to `at` count as
/// the prompt and the others as generated. Without `prompt_tokens`, all of them are the prompt.
#[derive(Debug, Clone)]
pub(crate) struct NextRequest {
    /// Tokens up to the predicted position.
    pub(crate) ids: Vec<u32>,
    /// Whole text, which begins with `ids`.
    pub(crate) text: Vec<u32>,
    prompt_len: usize,
    top: usize,
    config: GenerationConfig,
    processors: Vec<LogitsProcessor>,
    /// Warnings about unknown fields.
    pub(crate) warnings: Warnings,
}

impl AttentionRequest {
    /// Parses and validates a request body.
    pub(crate) fn read(body: &[u8], served: &ServedModel) -> Result<Self, ApiError> {
        let body = Body::parse(body, AttentionFields::fields())?;
        let warnings = served.checked_warnings(&body)?;
        check_layers(&body, served)?;
        let fields: AttentionFields = read(&body)?;
        let ids = text(fields.prompt, MAX_ATTENTION_TOKENS, served)?;
        let layers = layers(&body, fields.layers, served)?;
        let n_head = served.config().n_head;
        let (count, tokens) = (layers.len().saturating_mul(n_head), ids.len());
        let weights = count.saturating_mul(tokens * tokens);
        if weights > MAX_WEIGHTS {
            let message = format!(
                "layers: {count} heads over {tokens} tokens have {weights} attention weights, more than {MAX_WEIGHTS}; choose fewer layers or a \
                 shorter text"
            );
            return Err(ApiError::invalid(message).with_param("layers"));
        }
        let of_layer = |layer| (0..n_head).map(move |head| Head { layer, head });
        Ok(Self { ids, heads: layers.into_iter().flat_map(of_layer).collect(), warnings })
    }
}

/// Checks that `layers` is a list, if present.
fn check_layers(body: &Body<'_>, served: &ServedModel) -> Result<(), ApiError> {
    match body.json("layers").is_some_and(|json| !json.starts_with('[')) {
        true => Err(wrong_layers(body, served)),
        false => Ok(()),
    }
}

/// Layers in a list, sorted and without duplicates; all layers if there is no list.
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
    body.wrong("layers", format_args!("a list of layers from 0 to {last}"))
}

impl FeaturesRequest {
    /// Parses and validates a request body.
    pub(crate) fn read(body: &[u8], served: &ServedModel) -> Result<Self, ApiError> {
        let body = Body::parse(body, FeaturesFields::fields())?;
        let warnings = served.checked_warnings(&body)?;
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
    /// Parses and validates a request body.
    pub(crate) fn read(body: &[u8], served: &ServedModel) -> Result<Self, ApiError> {
        let body = Body::parse(body, FeatureFields::fields())?;
        let warnings = served.checked_warnings(&body)?;
        let fields: FeatureFields = read(&body)?;
        let ids = text(fields.prompt, MAX_FEATURES_TOKENS, served)?;
        let layer = required(&body, "layer", fields.layer, served.config().n_layer)?;
        let dictionary = transcoders(served)?[layer].clone();
        let feature = required(&body, "feature", fields.feature, dictionary.latents())?;
        Ok(Self { ids, dictionary, feature, warnings })
    }
}

impl GraphRequest {
    /// Parses and validates a request body.
    pub(crate) fn read(body: &[u8], served: &ServedModel) -> Result<Self, ApiError> {
        let body = Body::parse(body, GraphFields::fields())?;
        let warnings = served.checked_warnings(&body)?;
        let fields: GraphFields = read(&body)?;
        let ids = text(fields.prompt, MAX_GRAPH_TOKENS, served)?;
        let share = |name: &str, share: Option<Real>, default: f64| match share {
            None => Ok(default),
            Some(Real(share)) if (0.0..=1.0).contains(&share) => Ok(share),
            Some(_) => Err(body.wrong(name, "a fraction from 0 to 1")),
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

/// Transcoders for the model, one per layer.
fn transcoders(served: &ServedModel) -> Result<&[Dictionary], ApiError> {
    let found = served.options.transcoders.get().filter(|found| found.len() == served.config().n_layer);
    found.map(Vec::as_slice).ok_or_else(|| {
        ApiError::invalid(
            "features and graphs need transcoders, which this server has only for the built-in model; for another model, train some \
             with `gpt2 train --task dictionary --kind transcoder` and pass them to `gpt2 look graph --transcoders`",
        )
    })
}

impl LensRequest {
    /// Parses and validates a request body.
    pub(crate) fn read(body: &[u8], served: &ServedModel) -> Result<Self, ApiError> {
        let body = Body::parse(body, LensFields::fields())?;
        let warnings = served.checked_warnings(&body)?;
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
    /// Parses and validates a request body.
    pub(crate) fn read(body: &[u8], served: &ServedModel) -> Result<Self, ApiError> {
        let body = Body::parse(body, HeadFields::fields())?;
        let warnings = served.checked_warnings(&body)?;
        let fields: HeadFields = read(&body)?;
        let ids = text(fields.prompt, MAX_ATTENTION_TOKENS, served)?;
        let config = served.config();
        let layer = required(&body, "layer", fields.layer, config.n_layer)?;
        let head = Head { layer, head: required(&body, "head", fields.head, config.n_head)? };
        let query = token_index(&body, "query", fields.query, ids.len())?;
        let key = fields.key.map_or(Ok(query), |key| count(&body, "key", key, query))?;
        let [query, key] = [query, key].map(|index| i64::try_from(index).unwrap_or(i64::MAX));
        let head = OneHead { text: Text::Ids(ids), head, query, key }.check(&served.reader());
        Ok(Self { head: head.map_err(refused)?, warnings })
    }
}

impl NextRequest {
    /// Parses and validates a request body.
    pub(crate) fn read(body: &[u8], served: &ServedModel) -> Result<Self, ApiError> {
        let mut body = Body::parse(body, &NEXT)?;
        let fields: NextFields = read(&body)?;
        let text = text(fields.prompt, served.config().n_positions, served)?;
        let at = token_index(&body, "at", fields.at, text.len())?;
        let ids: Vec<u32> = text.iter().take(at + 1).copied().collect();
        let prompt_len = fields
            .prompt_tokens
            .map_or(Ok(ids.len()), |tokens| count(&body, "prompt_tokens", tokens, text.len()))?;
        let CompletionRequest { options, warnings, .. } = CompletionRequest::from_body(&mut body)?;
        served.reject_unknown_fields(&warnings)?;
        served.check_name(options.fields.model.as_ref())?;
        // Nothing is generated, so the token limit does not matter and no seed is needed.
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

    /// Builds the reply from the logits `(V)` at the last token of [`NextRequest::ids`].
    pub(crate) fn into_reply(self, logits: &[f32], served: &ServedModel) -> Result<Reply, ApiError> {
        let next = self.answer(logits, served)?;
        Ok(Reply::new(json(&next), self.warnings))
    }

    /// Ranks next-token candidates by the logits `(V)` at the last token of [`NextRequest::ids`].
    pub(crate) fn answer(&self, logits: &[f32], served: &ServedModel) -> Result<NextTokens, ApiError> {
        let history = History { ids: &self.ids, prompt_len: self.prompt_len };
        let text_of = |id| name(served.pieces.bytes(id));
        let found = NextTokens::of(logits, history, &self.config, &self.processors, self.top, text_of);
        found.map_err(|error: GenerationError| ApiError::from(&error))
    }
}

impl ServedModel {
    /// Creates the reader that views use to parse texts and option names.
    pub fn reader(&self) -> Reader {
        Reader::without_bos(&self.vocabulary)
    }
}

/// Reads a view's fields; `prompt` is required.
fn read<'a, T: Deserialize<'a> + Fields>(body: &Body<'a>) -> Result<T, ApiError> {
    let json = body.json("prompt").unwrap_or_default();
    if !json.starts_with(['"', '[']) {
        let expected = "the text to analyze, as a string or token ids";
        return Err(wrong_value("prompt", expected, found(json)));
    }
    body.read()
}

/// Returns the token ids of `prompt`; rejects an empty text and more than `most` tokens.
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
        0 => Err(wrong("the text is empty; pass at least one token".into())),
        tokens if tokens > most => {
            Err(wrong(format!("the text has {tokens} tokens; this analysis accepts 1 to {most}")))
        }
        _ => Ok(ids),
    }
}

/// Checks that a field's value is from 0 to `most`.
fn count(body: &Body<'_>, name: &str, Count(number): Number, most: usize) -> Result<usize, ApiError> {
    match number <= most {
        true => Ok(number),
        false => Err(body.wrong(name, format_args!("a whole number from 0 to {most}"))),
    }
}

/// Checks that a required field's value is present and below `below`.
fn required(body: &Body<'_>, name: &str, number: Option<Number>, below: usize) -> Result<usize, ApiError> {
    let number = number.ok_or_else(|| wrong_value(name, "a whole number", "nothing"))?;
    count(body, name, number, below.saturating_sub(1))
}

/// Index of the token that a field selects; negative values count from the end.
fn token_index(
    body: &Body<'_>,
    name: &str,
    Integer(index): Integer,
    tokens: usize,
) -> Result<usize, ApiError> {
    let tokens = i64::try_from(tokens).unwrap_or(i64::MAX);
    if !(-tokens..tokens).contains(&index) {
        return Err(body.wrong(name, format_args!("a whole number from {} to {}", -tokens, tokens - 1)));
    }
    Ok(usize::try_from(if index < 0 { index + tokens } else { index }).unwrap_or(0))
}

pub(crate) fn refused(error: LookError) -> ApiError {
    if error.is_usage() { ApiError::invalid(error.to_string()) } else { ApiError::failed(error) }
}
