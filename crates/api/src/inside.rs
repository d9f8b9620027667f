//! Request fields `steering` and `activations`, and the route `/v1/activations`.
//!
//! The fields extend OpenAI's. `/v1/activations` returns a prompt's activations without generating text. A
//! server supports them only if `ApiOptions::activations` is set.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};

use base64::{Engine, engine::general_purpose::STANDARD};
use candle_core::{Device, Tensor};
use candle_gpt2::{Site, SiteKind};
use candle_gpt2_generation::{GenerationConfig, Request};
use candle_gpt2_interpret::{
    Add, Edit, Inspection, Positions, ProjectOut, Replace, named_site, named_sites, stop_after, token_shape,
};

use crate::answer::{Head, PromptAnswer, ResponseOptions, Shape};
use crate::body::{Body, Count, Fields, List, Text, TextOrList, fields, one_of, wrong_value};
use crate::completion::Prompts;
use crate::encoding::Encoding;
use crate::inside_fields::{
    ActivationFields, Index, InsideOptions, MAX_POSITIONS, MAX_SITE_BYTES, MAX_SITES, MAX_STEERING,
    MAX_VECTOR, Mode, NamedPositions, Real, SequencePart, SteeringFields,
};
use crate::options::{MAX_NAME_BYTES, Truncation};
use crate::prompts::{PromptTokens, tokens_of};
use crate::recorded::{Inspected, ShownSites, observers};
use crate::{Answer, ApiError, Call, ServedModel};

/// Size of one activation value, in bytes.
const F32_BYTES: usize = 4;
/// Error message if the server does not expose activations.
const OFF: &str = "this server does not expose activations or steering; start it with --activations";

fields! {
    /// Fields of `/v1/activations`.
    PromptActivationFields {
        /// The served name of the model, or an alias; may be absent.
        model: Option<Text<MAX_NAME_BYTES>>,
        /// A text, a list of texts, token ids, or lists of token ids; if absent or empty, the BOS token.
        prompt | input: Option<Prompts>,
        /// TransformerLens names of hook points, such as `blocks.6.hook_resid_post` or `pattern3`; `*`
        /// matches any characters, and a name without a layer means every block.
        @required sites: List<Text<MAX_SITE_BYTES>, MAX_SITES>,
        /// `last` (the default), `all`, or a list of positions counted from 0.
        positions: Option<TextOrList<NamedPositions, Index, MAX_POSITIONS>>,
        /// Value encoding: `base64` (little-endian f32 values) or `float` (a list of numbers).
        encoding_format: Encoding = Encoding::Base64,
        /// Edits to activations, applied at every token before the values are returned.
        steering: List<SteeringFields, MAX_STEERING>,
        /// Number of tokens to keep from the end of a text; -1 keeps all that fit into the context.
        truncate_prompt_tokens: Option<Truncation>,
    }
    ignored ["user", "priority", "add_special_tokens"]
}

/// Activations and steering validated against a model.
#[derive(Debug, Default)]
pub(crate) struct Inside {
    shown: Option<ActivationSelection>,
    edits: Vec<Edit>,
}

/// Activations to return.
#[derive(Debug)]
struct ActivationSelection {
    sites: Vec<Site>,
    positions: PositionSelection,
    part: SequencePart,
    encoding: Encoding,
    /// Prefix for field names in error messages: empty, or the name of the enclosing field.
    path: &'static str,
}

/// Positions to return within a part of a sequence.
#[derive(Debug)]
enum PositionSelection {
    Last,
    All,
    /// Distinct positions, each with the index of its first occurrence in the request's list.
    These(BTreeMap<usize, usize>),
}

impl From<Option<TextOrList<NamedPositions, Index, MAX_POSITIONS>>> for PositionSelection {
    fn from(positions: Option<TextOrList<NamedPositions, Index, MAX_POSITIONS>>) -> Self {
        match positions {
            None | Some(TextOrList::Text(NamedPositions::Last)) => Self::Last,
            Some(TextOrList::Text(NamedPositions::All)) => Self::All,
            Some(TextOrList::List(indices)) => {
                let mut these = BTreeMap::new();
                for (number, Count(position)) in indices.into_iter().enumerate() {
                    these.entry(position).or_insert(number);
                }
                Self::These(these)
            }
        }
    }
}

impl InsideOptions {
    /// Validates the fields against the model.
    pub(crate) fn validate(self, served: &ServedModel) -> Result<Inside, ApiError> {
        let used = [("activations", self.activations.is_some()), ("steering", !self.steering.is_empty())];
        if let Some((field, _)) = used.into_iter().find(|(_, is_used)| *is_used) {
            served.check_inside(Some(field))?;
        }
        let shown = match self.activations {
            Some(ActivationFields { sites, positions, of, encoding_format }) => {
                let (path, part) = ("activations.", of.unwrap_or(SequencePart::Prompt));
                let encoding = encoding_format.unwrap_or(Encoding::Base64);
                let sites = sites_of(sites, path, served)?;
                Some(ActivationSelection { sites, positions: positions.into(), part, encoding, path })
            }
            None => None,
        };
        Ok(Inside { shown, edits: edits_of(self.steering, served)? })
    }
}

impl ServedModel {
    /// Checks that this server exposes activations; if it does not, the error names `field`.
    pub(crate) fn check_inside(&self, field: Option<&str>) -> Result<(), ApiError> {
        match (self.options.activations, field) {
            (true, _) => Ok(()),
            (false, None) => Err(ApiError::invalid(OFF).with_code("unsupported_parameter")),
            (false, Some(field)) => {
                let refusal = ApiError::invalid(format!("{field}: {OFF}")).with_param(field);
                Err(refusal.with_code("unsupported_parameter"))
            }
        }
    }
}

impl Inside {
    /// Whether the completions are steered.
    pub(crate) fn is_steered(&self) -> bool {
        !self.edits.is_empty()
    }

    /// Block at which a prefill that only needs the prompt's activations may stop.
    fn stop_at_layer(&self) -> Option<usize> {
        stop_after(self.shown.as_ref()?.sites.iter().copied())
    }

    /// Hook points to return in the response, and the encoding of their values.
    pub(crate) fn shown_sites(&self, served: &ServedModel) -> Option<Box<ShownSites>> {
        let ActivationSelection { sites, encoding, .. } = self.shown.as_ref()?;
        let (sites, config) = (sites.clone(), served.config().clone());
        Some(Box::new(ShownSites { sites, config, encoding: *encoding }))
    }

    /// Maximum activation size of all sequences, in bytes; an error if it exceeds the server's limit.
    pub(crate) fn bytes(
        &self,
        prompts: &[PromptTokens],
        (texts, max_tokens): (usize, usize),
        served: &ServedModel,
    ) -> Result<usize, ApiError> {
        let Some(shown) = &self.shown else { return Ok(0) };
        let most = served.options.limits.max_activation_bytes;
        let mut bytes = 0_usize;
        for prompt in prompts {
            let (positions, tokens) = shown.positions_of(prompt.ids.len(), max_tokens, served)?;
            let of_token =
                |site: &Site| token_shape(served.config(), site.kind, tokens).iter().product::<usize>();
            let numbers: usize = shown.sites.iter().map(of_token).sum();
            let of_text = numbers.saturating_mul(F32_BYTES).saturating_mul(positions.max_count(tokens));
            bytes = bytes.saturating_add(of_text.saturating_mul(texts));
        }
        if bytes > most {
            let path = format!("{}sites", shown.path);
            let message = format!(
                "{path}: this server returns at most {most} bytes of activations per request, but this one requests up to {bytes}; \
                 request fewer sites or positions"
            );
            return Err(ApiError::invalid(message).with_param(path));
        }
        Ok(bytes)
    }

    /// Creates an inspection for each of a prompt's sequences, or none if nothing is requested.
    pub(crate) fn inspections(
        &self,
        prompt_tokens: usize,
        (texts, max_tokens): (usize, usize),
        served: &ServedModel,
    ) -> Result<Vec<Inspected>, ApiError> {
        let (sites, positions) = match &self.shown {
            Some(shown) => (&*shown.sites, shown.positions_of(prompt_tokens, max_tokens, served)?.0),
            None if self.edits.is_empty() => return Ok(Vec::new()),
            None => (&[][..], Positions::These(BTreeSet::new())),
        };
        let inspection = || Inspection::new(self.edits.clone(), sites.to_vec(), positions.clone());
        Ok((0..texts).map(|_| Arc::new(Mutex::new(inspection()))).collect())
    }
}

impl ServedModel {
    /// Decoder direction of a dictionary feature, and the hook point that the feature explains.
    fn feature(&self, name: &str, feature: usize, path: &str) -> Result<(Site, Tensor), ApiError> {
        let dictionaries = &self.options.dictionaries;
        let Some(dictionary) = dictionaries.get(name) else {
            let path = format!("{path}.dictionary");
            let names: Vec<&str> = dictionaries.keys().map(String::as_str).collect();
            let known = match names.is_empty() {
                true => "this server has no dictionaries; start it with --dictionary".to_owned(),
                false => format!("expected {}", one_of(&names)),
            };
            return Err(ApiError::invalid(format!("{path}: unknown dictionary; {known}")).with_param(path));
        };
        if feature >= dictionary.latents() {
            let path = format!("{path}.feature");
            let expected = format_args!("a zero-based feature index below {}", dictionary.latents());
            return Err(wrong_value(&path, expected, feature.to_string()));
        }
        let site = dictionary.explained_site();
        let direction = dictionary.direction(feature)?;
        Ok((site, direction.reshape(token_shape(self.config(), site.kind, 0))?))
    }
}

impl ActivationSelection {
    /// Positions to record in a sequence, and the end of the requested part.
    fn positions_of(
        &self,
        prompt_tokens: usize,
        max_tokens: usize,
        served: &ServedModel,
    ) -> Result<(Positions, usize), ApiError> {
        let read =
            prompt_tokens.saturating_add(max_tokens.saturating_sub(1)).min(served.config().n_positions);
        let range = match self.part {
            SequencePart::Prompt => 0..prompt_tokens,
            SequencePart::Completion => prompt_tokens..read,
            SequencePart::Both => 0..read,
        };
        let positions = match &self.positions {
            PositionSelection::Last => Positions::Last(range.clone()),
            PositionSelection::All => Positions::All(range.clone()),
            PositionSelection::These(these) => {
                let beyond = these.range(range.len()..).min_by_key(|(_, number)| **number);
                if let Some((position, number)) = beyond {
                    return Err(self.out_of_range(*position, *number, range.len(), max_tokens));
                }
                Positions::These(these.keys().map(|position| range.start + position).collect())
            }
        };
        Ok((positions, range.end))
    }

    /// Error for a position outside the sequence.
    fn out_of_range(&self, position: usize, number: usize, tokens: usize, max_tokens: usize) -> ApiError {
        let path = format!("{}positions[{number}]", self.path);
        if tokens > 0 {
            let expected = format_args!("a zero-based position below {tokens}");
            return wrong_value(&path, expected, position.to_string());
        }
        let message = format!(
            "{path}: this completion has no activations, because the model does not read the last token and max_tokens is \
             {max_tokens}; request more tokens, or the activations of the prompt"
        );
        ApiError::invalid(message).with_param(path)
    }
}

/// Resolves a list of hook point names, in list order.
fn sites_of(
    List(names): List<Text<MAX_SITE_BYTES>, MAX_SITES>,
    before: &str,
    served: &ServedModel,
) -> Result<Vec<Site>, ApiError> {
    let mut sites: Vec<Site> = Vec::new();
    for (index, Text(name)) in names.iter().enumerate() {
        let refused = |what: String| {
            let path = format!("{before}sites[{index}]");
            ApiError::invalid(format!("{path}: {what}")).with_param(path)
        };
        let mut found =
            named_sites(name, served.config().n_layer).map_err(|error| refused(error.to_string()))?;
        found.retain(|site| site.kind != SiteKind::Logits && !sites.contains(site));
        if found.is_empty() && named_site(name) == Ok(Site::outside(SiteKind::Logits)) {
            return Err(refused("logits are not returned; use logprobs".into()));
        }
        sites.extend(found);
    }
    if sites.is_empty() {
        let path = format!("{before}sites");
        return Err(wrong_value(&path, "names of hook points, such as blocks.0.hook_resid_post", "none"));
    }
    Ok(sites)
}

/// Validated steering edits, except those with a scale of 0.
fn edits_of(steering: Vec<SteeringFields>, served: &ServedModel) -> Result<Vec<Edit>, ApiError> {
    let mut edits = Vec::new();
    for (number, fields) in steering.into_iter().enumerate() {
        let (scale, edit) = edit_of(fields, &format!("steering[{number}]"), served)?;
        edits.extend(Some(edit).filter(|_| scale != 0.0));
    }
    Ok(edits)
}

fn edit_of(fields: SteeringFields, path: &str, served: &ServedModel) -> Result<(f64, Edit), ApiError> {
    let SteeringFields { site, vector, dictionary, feature, scale, mode } = fields;
    let Real(scale) = scale.unwrap_or(Real(1.0));
    let missing = |field: &str, expected: &str| wrong_value(&format!("{path}.{field}"), expected, "nothing");
    let (site, vector) = if dictionary.is_some() || feature.is_some() {
        let conflicting = [("site", site.is_some()), ("vector", vector.is_some())];
        if let Some((field, _)) = conflicting.into_iter().find(|(_, is_set)| *is_set) {
            let path = format!("{path}.{field}");
            let message =
                format!("{path}: cannot be combined with a dictionary feature; set only one of the two");
            return Err(ApiError::invalid(message).with_param(path));
        }
        let Text(name) = dictionary.ok_or_else(|| missing("dictionary", "the name of a dictionary"))?;
        let Count(feature) = feature.ok_or_else(|| missing("feature", "the index of a feature"))?;
        served.feature(&name, feature, path)?
    } else {
        let Text(name) = site.ok_or_else(|| missing("site", "the name of a hook point"))?;
        let site = steered_site(&name, &format!("{path}.site"), served)?;
        let vector = vector.ok_or_else(|| missing("vector", "a vector"))?;
        let shape = token_shape(served.config(), site.kind, 0);
        (site, tensor(numbers(vector, &shape, &format!("{path}.vector"))?, &shape)?)
    };
    if !is_finite(&vector, scale)? {
        let expected = "a scale whose product with the vector is finite in f32";
        return Err(wrong_value(&format!("{path}.scale"), expected, format_args!("{scale:e}")));
    }
    let edit = match mode.unwrap_or(Mode::Add) {
        Mode::Add => Add::new(site, vector),
        Mode::Replace => Replace::new(site, vector),
        Mode::ProjectOut => ProjectOut::new(site, &vector).map_err(|_| {
            let path = format!("{path}.vector");
            wrong_value(&path, "a nonzero direction to project out", "only zeros")
        })?,
    };
    Ok((scale, edit.scaled(scale)?))
}

/// Whether an f32 vector stays finite after multiplication by `scale`.
fn is_finite(vector: &Tensor, scale: f64) -> Result<bool, ApiError> {
    let largest = vector.abs()?.max_all()?.to_scalar::<f32>()?;
    #[expect(clippy::cast_possible_truncation, reason = "the model computes in f32")]
    let product = (f64::from(largest).max(1.0) * scale) as f32;
    Ok(product.is_finite())
}

/// Hook point that accepts a steering vector.
fn steered_site(name: &str, path: &str, served: &ServedModel) -> Result<Site, ApiError> {
    let refused = |what: String| ApiError::invalid(format!("{path}: {what}")).with_param(path);
    let site = named_site(name).map_err(|error| refused(error.to_string()))?;
    let n_layer = served.config().n_layer;
    if site.layer.is_some_and(|layer| layer >= n_layer) {
        // Resolves the name again for its error, which reports the number of layers.
        named_sites(name, n_layer).map_err(|error| refused(error.to_string()))?;
    }
    match site.kind {
        SiteKind::Ln1Scale | SiteKind::Ln2Scale | SiteKind::LnFinalScale => {
            Err(refused(format!("{site} has one number per token; steer at a hook point that has a vector")))
        }
        SiteKind::AttnScores | SiteKind::Pattern => Err(refused(format!(
            "{site} has a number for each pair of tokens; steer at a hook point that has a vector for each token"
        ))),
        SiteKind::Logits => Err(refused("logits cannot be steered; use logit_bias".into())),
        _ => Ok(site),
    }
}

/// Parses a vector with one value for each element of `shape`.
fn numbers(
    vector: TextOrList<String, Real, MAX_VECTOR>,
    shape: &[usize],
    path: &str,
) -> Result<Vec<f32>, ApiError> {
    let count: usize = shape.iter().product();
    let wrong = |expected: &str, found: String| wrong_value(path, format_args!("{count} {expected}"), found);
    let numbers: Vec<f32> = match vector {
        #[expect(clippy::cast_possible_truncation, reason = "vectors are f32, as the model is")]
        TextOrList::List(numbers) => numbers.into_iter().map(|Real(number)| number as f32).collect(),
        TextOrList::Text(text) => {
            let bytes = STANDARD.decode(&text);
            let bytes =
                bytes.map_err(|error| wrong("f32 values in base64", format!("invalid base64: {error}")))?;
            let (numbers, rest) = bytes.as_chunks::<F32_BYTES>();
            if !rest.is_empty() {
                return Err(wrong("f32 values of four bytes", format!("{} bytes", bytes.len())));
            }
            numbers.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
        }
    };
    if numbers.len() != count {
        return Err(wrong("numbers", numbers.len().to_string()));
    }
    match numbers.iter().position(|number| !number.is_finite()) {
        Some(index) => Err(wrong("finite numbers", format!("{} at index {index}", numbers[index]))),
        None => Ok(numbers),
    }
}

fn tensor(numbers: Vec<f32>, shape: &[usize]) -> Result<Tensor, ApiError> {
    Ok(Tensor::from_vec(numbers, shape, &Device::Cpu)?)
}

impl Call {
    /// Creates a call for `/v1/activations`: one sequence per prompt, without new tokens.
    ///
    /// # Errors
    /// If the body is invalid or the model cannot serve it.
    pub(crate) fn of_activations(body: &[u8], served: &ServedModel) -> Result<Self, ApiError> {
        served.check_inside(None)?;
        let body = Body::parse(body, PromptActivationFields::fields())?;
        let warnings = served.checked_warnings(&body)?;
        let fields: PromptActivationFields = body.read()?;
        served.check_name(fields.model.as_ref())?;
        let PromptActivationFields { sites, positions, encoding_format, steering: List(steering), .. } =
            fields;
        let shown = ActivationSelection {
            sites: sites_of(sites, "", served)?,
            positions: positions.into(),
            part: SequencePart::Prompt,
            encoding: encoding_format,
            path: "",
        };
        let inside = Inside { shown: Some(shown), edits: edits_of(steering, served)? };
        let prompts = fields.prompt.unwrap_or_else(Prompts::empty);
        prompts.check_count(served)?;
        let prompts = tokens_of(prompts, fields.truncate_prompt_tokens, 0, served)?;
        let activation_bytes = inside.bytes(&prompts, (1, 0), served)?;
        let config = Arc::new(GenerationConfig { max_new_tokens: 0, ..served.defaults.config().clone() });
        let (mut requests, mut answers) = (Vec::new(), Vec::new());
        for PromptTokens { ids, echo_start, path } in prompts {
            let inspections = inside.inspections(ids.len(), (1, 0), served)?;
            let observers = observers(&inspections);
            let stop_at_layer = inside.stop_at_layer();
            let request = Request::new(ids.clone(), Arc::clone(&config));
            requests.push(Request { observers, stop_at_layer, ..request });
            answers.push(
                PromptAnswer::new(ids, echo_start, path, (1, false), &served.pieces)?.inspected(inspections),
            );
        }
        let head = Head {
            id: String::new(),
            created: (served.options.now)(),
            model: served.name().to_owned(),
            seed: None,
        };
        let options = ResponseOptions {
            shape: Shape::Activations,
            n: 1,
            best_of: 1,
            shown: inside.shown_sites(served),
            is_steered: inside.is_steered(),
            ..ResponseOptions::default()
        };
        let answer = Answer::new(head, options, Arc::clone(&served.pieces), answers, warnings);
        Ok(Self { requests, answer, stream: false, activation_bytes })
    }
}
