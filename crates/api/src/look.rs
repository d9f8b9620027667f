//! Bodies that ask for a look into the model: `/look/attention`, `/look/lens`, `/look/head`, `/look/next`. What a body says is read and
//! checked here, for a server that computes between the texts of others and for a page that has the model to itself.

use candle_gpt2_generation::{GenerationConfig, GenerationError, History, LogitsProcessor};
use candle_gpt2_interpret::{Head, LensValue};
use candle_gpt2_look::{CheckedHead, LookError, NextTokens, OneHead, Reader, Text};

use crate::answer::json;
use crate::body::{Field, Fields, Given, Unknown, Use, fields};
use crate::call::{config_of, processors_of};
use crate::completion::CompletionRequest;
use crate::pieces::name;
use crate::prompts::{check_ids, check_length, encode};
use crate::{ApiError, Reply, ServedModel, Warnings};

/// Attention of longer texts is too large to be sent.
const MAX_ATTENTION_TOKENS: usize = 256;
/// Attention weights of one look: those of 144 heads over as many tokens, and a few more.
const MAX_WEIGHTS: usize = 10_000_000;
/// The lens computes the whole vocabulary for each layer and token.
const MAX_LENS_TOKENS: usize = 128;
/// Most tokens that are told of those that may follow, and how many are where nothing is said.
const MAX_TOP: usize = 1000;
const TOP: usize = 20;
/// Most layers of a list: more than any model has.
const MAX_LAYERS: usize = 1 << 12;
/// Most tokens of a body: more than any context, whose own length is checked later.
const MAX_TOKENS: usize = 1 << 20;

const ATTENTION: [Field; 2] = fields(["prompt", "layers"], Use::Served);
const LENS: [Field; 2] = fields(["prompt", "show"], Use::Served);
const HEAD: [Field; 5] = fields(["prompt", "layer", "head", "query", "key"], Use::Served);
const NEXT: [Field; 4] = fields(["prompt", "at", "prompt_tokens", "top"], Use::Served);

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
        let unknown = Unknown::default();
        let fields = Fields::of_body(body, &[&ATTENTION], &unknown)?;
        let warnings = served.known(&unknown)?;
        let ids = text(&fields, MAX_ATTENTION_TOKENS, served)?;
        let n_layer = served.config().n_layer;
        let mut layers = match fields.get("layers") {
            None => (0..n_layer).collect(),
            Some(given) => layers(given, n_layer)?,
        };
        layers.sort_unstable();
        layers.dedup();
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

impl LensRequest {
    /// Reads a body.
    pub(crate) fn read(body: &[u8], served: &ServedModel) -> Result<Self, ApiError> {
        let unknown = Unknown::default();
        let fields = Fields::of_body(body, &[&LENS], &unknown)?;
        let warnings = served.known(&unknown)?;
        let ids = text(&fields, MAX_LENS_TOKENS, served)?;
        let show = fields.read("show", show)?.unwrap_or(LensValue::Probability);
        Ok(Self { ids, show, warnings })
    }
}

impl HeadRequest {
    /// Reads a body.
    pub(crate) fn read(body: &[u8], served: &ServedModel) -> Result<Self, ApiError> {
        let unknown = Unknown::default();
        let fields = Fields::of_body(body, &[&HEAD], &unknown)?;
        let warnings = served.known(&unknown)?;
        let ids = text(&fields, MAX_ATTENTION_TOKENS, served)?;
        let config = served.config();
        let number = |name, below: usize| {
            let expected =
                || ApiError::invalid(format!("{name}: expected its number, found nothing")).with_param(name);
            let given = fields.get(name).ok_or_else(expected)?;
            given.count(0..=below.saturating_sub(1))
        };
        let head = Head { layer: number("layer", config.n_layer)?, head: number("head", config.n_head)? };
        let query = place(&fields, "query", ids.len())?;
        let key = match fields.get("key") {
            Some(given) => given.count(0..=query)?,
            None => query,
        };
        let [query, key] = [query, key].map(|place| i64::try_from(place).unwrap_or(i64::MAX));
        let head = OneHead { text: Text::Ids(ids), head, query, key }.check(&served.reader());
        Ok(Self { head: head.map_err(refused)?, warnings })
    }
}

impl NextRequest {
    /// Reads a body.
    pub(crate) fn read(body: &[u8], served: &ServedModel) -> Result<Self, ApiError> {
        let mut tables = CompletionRequest::tables();
        tables.push(&NEXT);
        let unknown = Unknown::default();
        let fields = Fields::of_body(body, &tables, &unknown)?;
        let text = text(&fields, served.config().n_positions, served)?;
        let at = place(&fields, "at", text.len())?;
        let ids: Vec<u32> = text.iter().take(at + 1).copied().collect();
        let prompt_len = fields.read("prompt_tokens", |given| given.count(0..=text.len()))?;
        let CompletionRequest { options, .. } = CompletionRequest::of(&fields)?;
        let warnings = served.known(&unknown)?;
        served.check_name(options.model.as_deref())?;
        // However long the text becomes; which token would be drawn is not asked.
        let config = config_of(&options, options.sampling(served), usize::MAX, 1, None, served)?;
        Ok(Self {
            prompt_len: prompt_len.unwrap_or(ids.len()).min(ids.len()),
            ids,
            text,
            top: fields.read("top", |given| given.count(0..=MAX_TOP))?.unwrap_or(TOP),
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

/// The names of the fields that each look reads, besides those of a completion in `/look/next`.
///
/// ```
/// let [(path, fields), ..] = candle_gpt2_api::look_fields();
/// assert_eq!(path, "/look/attention");
/// assert!(fields.contains(&"layers"));
/// ```
pub fn look_fields() -> [(&'static str, Vec<&'static str>); 4] {
    let names = |fields: &[Field]| fields.iter().map(|field| field.name).collect();
    [
        ("/look/attention", names(&ATTENTION)),
        ("/look/lens", names(&LENS)),
        ("/look/head", names(&HEAD)),
        ("/look/next", names(&NEXT)),
    ]
}

/// The tokens of `prompt`, from 1 to `most` of them.
fn text(fields: &Fields<'_, '_>, most: usize, served: &ServedModel) -> Result<Vec<u32>, ApiError> {
    let wrong = |what: String| ApiError::invalid(format!("prompt: {what}")).with_param("prompt");
    let ids = match fields.get("prompt") {
        Some(given) if given.is_list() => check_ids(given.token_ids(MAX_TOKENS)?, "prompt", served)?,
        Some(given) if given.is_text() => {
            let text = given.text()?;
            check_length(text.len(), "prompt", served)?;
            encode(&text, "prompt", served)?
        }
        _ => return Err(wrong("expected the text to look at, as a string or as token ids".into())),
    };
    let most = most.min(served.config().n_positions);
    match ids.len() {
        0 => Err(wrong("the text is empty; give at least one token".into())),
        tokens if tokens > most => {
            Err(wrong(format!("the text has {tokens} tokens; this look takes 1 to {most}")))
        }
        _ => Ok(ids),
    }
}

/// The token that a field names, counted from 0, or from -1 at the end, where it is without the field.
fn place(fields: &Fields<'_, '_>, name: &str, tokens: usize) -> Result<usize, ApiError> {
    let tokens = i64::try_from(tokens).unwrap_or(i64::MAX);
    let place = fields.read(name, |given| given.integer(-tokens..=tokens - 1))?.unwrap_or(-1);
    Ok(usize::try_from(if place < 0 { place + tokens } else { place }).unwrap_or(0))
}

fn layers(given: Given<'_, '_>, n_layer: usize) -> Result<Vec<usize>, ApiError> {
    let last = n_layer.saturating_sub(1);
    let expected = format!("a list of layers, which are counted from 0 to {last}");
    let layers = match given.is_list() {
        true => given
            .list(&expected, MAX_LAYERS, |layer| layer.count(0..=last).map_err(|_| given.wrong(&expected)))?,
        false => Vec::new(),
    };
    if layers.is_empty() { Err(given.wrong(expected)) } else { Ok(layers) }
}

fn show(given: Given<'_, '_>) -> Result<LensValue, ApiError> {
    let name = if given.is_text() { given.text()? } else { String::new() };
    match name.as_str() {
        "probability" => Ok(LensValue::Probability),
        "entropy" => Ok(LensValue::Entropy),
        "divergence" => Ok(LensValue::Divergence),
        "next" => Ok(LensValue::Next),
        _ => Err(given.wrong("`probability`, `entropy`, `divergence` or `next`")),
    }
}

fn refused(error: LookError) -> ApiError {
    if error.is_usage() { ApiError::invalid(error.to_string()) } else { ApiError::failed(error) }
}
