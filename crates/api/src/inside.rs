//! What requests change inside the model and what they are shown of it: `steering` and `activations`, fields beside OpenAI's, and
//! `/v1/activations`, which shows a prompt without generating. A server serves them that was started so.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};

use base64::{Engine, engine::general_purpose::STANDARD};
use candle_core::{Device, Tensor};
use candle_gpt2::{Site, SiteKind};
use candle_gpt2_generation::{GenerationConfig, Request};
use candle_gpt2_interpret::{
    Add, Edit, Inspection, Positions, ProjectOut, Replace, named_site, named_sites, stop_after, token_shape,
};

use crate::answer::{Head, PromptAnswer, Shape, Wants};
use crate::body::{Body, Count, Fields, List, Text, TextOrList, fields, one_of, wrong_value};
use crate::completion::Prompts;
use crate::encoding::Encoding;
use crate::inside_fields::{
    ActivationFields, Asked, MAX_POSITIONS, MAX_SITE_BYTES, MAX_SITES, MAX_STEERING, MAX_VECTOR, Mode, Of,
    Place, Real, SteeringFields, Which,
};
use crate::options::{MAX_NAME_BYTES, Truncation};
use crate::prompts::{PromptTokens, tokens_of};
use crate::seen::{Inspected, ShownSites, observers};
use crate::{Answer, ApiError, Call, ServedModel};

/// Bytes of an activation.
const F32_BYTES: usize = 4;
/// What a server says that does not look inside.
const OFF: &str = "this server returns and steers no activations; start it with --activations";

fields! {
    /// The fields of `/v1/activations`.
    PromptActivationFields {
        /// The served name of the model, or an alias; may be absent.
        model: Option<Text<MAX_NAME_BYTES>>,
        /// A text, texts, token ids, or lists of token ids; without one, or empty, the token that begins texts.
        prompt | input: Option<Prompts>,
        /// Hook points by TransformerLens' names, such as `blocks.6.hook_resid_post` or `pattern3`; `*` matches any characters, and a name
        /// without its layer means every block.
        @required sites: List<Text<MAX_SITE_BYTES>, MAX_SITES>,
        /// `last`, which is the default, `all`, or a list of positions counted from 0.
        positions: Option<TextOrList<Which, Place, MAX_POSITIONS>>,
        /// `base64` of little-endian f32, or `float`, a list of numbers.
        encoding_format: Encoding = Encoding::Base64,
        /// Changes to activations, made at every token before they are returned.
        steering: List<SteeringFields, MAX_STEERING>,
        /// Keeps the last tokens of a text: this many, or with -1 those that the context holds.
        truncate_prompt_tokens: Option<Truncation>,
    }
    ignored ["user", "priority", "add_special_tokens"]
}

/// What becomes of it for a model.
#[derive(Debug, Default)]
pub(crate) struct Inside {
    shown: Option<Shown>,
    edits: Vec<Edit>,
}

/// What is shown.
#[derive(Debug)]
struct Shown {
    sites: Vec<Site>,
    wanted: Wanted,
    of: Of,
    encoding: Encoding,
    /// In front of the names of its fields: nothing, or the field that has them.
    path: &'static str,
}

/// The tokens that are shown of the part of a text.
#[derive(Debug)]
enum Wanted {
    Last,
    All,
    /// Each of them once, with its first place in the list of the request.
    These(BTreeMap<usize, usize>),
}

impl From<Option<TextOrList<Which, Place, MAX_POSITIONS>>> for Wanted {
    fn from(positions: Option<TextOrList<Which, Place, MAX_POSITIONS>>) -> Self {
        match positions {
            None | Some(TextOrList::Text(Which::Last)) => Self::Last,
            Some(TextOrList::Text(Which::All)) => Self::All,
            Some(TextOrList::List(places)) => {
                let mut these = BTreeMap::new();
                for (number, Count(place)) in places.into_iter().enumerate() {
                    these.entry(place).or_insert(number);
                }
                Self::These(these)
            }
        }
    }
}

impl Asked {
    /// Checked for the model.
    pub(crate) fn of_model(self, served: &ServedModel) -> Result<Inside, ApiError> {
        let asks = [("activations", self.activations.is_some()), ("steering", !self.steering.is_empty())];
        if let Some((field, _)) = asks.into_iter().find(|(_, is_asked)| *is_asked) {
            served.check_inside(Some(field))?;
        }
        let shown = match self.activations {
            Some(ActivationFields { sites, positions, of, encoding_format }) => {
                let (path, of) = ("activations.", of.unwrap_or(Of::Prompt));
                let encoding = encoding_format.unwrap_or(Encoding::Base64);
                let sites = sites_of(sites, path, served)?;
                Some(Shown { sites, wanted: positions.into(), of, encoding, path })
            }
            None => None,
        };
        Ok(Inside { shown, edits: edits_of(self.steering, served)? })
    }
}

impl ServedModel {
    /// Whether this server serves what is inside its model, which `field` asks for.
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
    /// Whether the texts are steered.
    pub(crate) fn is_steered(&self) -> bool {
        !self.edits.is_empty()
    }

    /// The block before which the passes over a prompt stop if nothing but its activations is wanted.
    fn stop_at_layer(&self) -> Option<usize> {
        stop_after(self.shown.as_ref()?.sites.iter().copied())
    }

    /// How the activations are reported.
    pub(crate) fn told(&self, served: &ServedModel) -> Option<Box<ShownSites>> {
        let Shown { sites, encoding, .. } = self.shown.as_ref()?;
        let (sites, config) = (sites.clone(), served.config().clone());
        Some(Box::new(ShownSites { sites, config, encoding: *encoding }))
    }

    /// Bytes of what is shown of all texts, which are no more than the server returns.
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
            let of_text = numbers.saturating_mul(F32_BYTES).saturating_mul(positions.most(tokens));
            bytes = bytes.saturating_add(of_text.saturating_mul(texts));
        }
        if bytes > most {
            let path = format!("{}sites", shown.path);
            let message = format!(
                "{path}: this server returns at most {most} bytes of activations per request, and this one asks for up to {bytes}; \
                 request fewer sites or positions"
            );
            return Err(ApiError::invalid(message).with_param(path));
        }
        Ok(bytes)
    }

    /// An inspection for each text of a prompt, or none if nothing is asked for.
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
    /// The direction of a feature of a dictionary, at the place that it explains.
    fn feature(&self, name: &str, feature: usize, path: &str) -> Result<(Site, Tensor), ApiError> {
        let dictionaries = &self.options.dictionaries;
        let Some(dictionary) = dictionaries.get(name) else {
            let path = format!("{path}.dictionary");
            let names: Vec<&str> = dictionaries.keys().map(String::as_str).collect();
            let known = match names.is_empty() {
                true => "this server has none; start it with --dictionary".to_owned(),
                false => format!("this server has {}", one_of(&names)),
            };
            return Err(
                ApiError::invalid(format!("{path}: there is no such dictionary; {known}")).with_param(path)
            );
        };
        if feature >= dictionary.latents() {
            let path = format!("{path}.feature");
            let expected = format_args!("a feature below {}, counted from 0", dictionary.latents());
            return Err(wrong_value(&path, expected, feature.to_string()));
        }
        let site = dictionary.explained_site();
        let direction = dictionary.direction(feature)?;
        Ok((site, direction.reshape(token_shape(self.config(), site.kind, 0))?))
    }
}

impl Shown {
    /// The positions that are recorded of a text, and the tokens that the model reads of it at most.
    fn positions_of(
        &self,
        prompt_tokens: usize,
        max_tokens: usize,
        served: &ServedModel,
    ) -> Result<(Positions, usize), ApiError> {
        let read =
            prompt_tokens.saturating_add(max_tokens.saturating_sub(1)).min(served.config().n_positions);
        let range = match self.of {
            Of::Prompt => 0..prompt_tokens,
            Of::Completion => prompt_tokens..read,
            Of::Both => 0..read,
        };
        let positions = match &self.wanted {
            Wanted::Last => Positions::Last(range.clone()),
            Wanted::All => Positions::All(range.clone()),
            Wanted::These(these) => {
                let beyond = these.range(range.len()..).min_by_key(|(_, number)| **number);
                if let Some((place, number)) = beyond {
                    return Err(self.beyond(*place, *number, range.len(), max_tokens));
                }
                Positions::These(these.keys().map(|place| range.start + place).collect())
            }
        };
        Ok((positions, range.end))
    }

    /// The refusal of a position that a text does not have.
    fn beyond(&self, place: usize, number: usize, tokens: usize, max_tokens: usize) -> ApiError {
        let path = format!("{}positions[{number}]", self.path);
        if tokens > 0 {
            let expected = format_args!("a position below {tokens}, counted from 0");
            return wrong_value(&path, expected, place.to_string());
        }
        let message = format!(
            "{path}: there are no activations of this completion, since the model does not read its last token and max_tokens is \
             {max_tokens}; ask for more tokens, or for the activations of the prompt"
        );
        ApiError::invalid(message).with_param(path)
    }
}

/// The places that a list names, in its order.
fn sites_of(
    List(names): List<Text<MAX_SITE_BYTES>, MAX_SITES>,
    before: &str,
    served: &ServedModel,
) -> Result<Vec<Site>, ApiError> {
    let mut sites: Vec<Site> = Vec::new();
    for (place, Text(name)) in names.iter().enumerate() {
        let refused = |what: String| {
            let path = format!("{before}sites[{place}]");
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

/// The changes, but for those that change nothing.
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
        let given = [("site", site.is_some()), ("vector", vector.is_some())];
        if let Some((field, _)) = given.into_iter().find(|(_, is_given)| *is_given) {
            let path = format!("{path}.{field}");
            let message = format!("{path}: a feature has its own; leave out this field or the dictionary");
            return Err(ApiError::invalid(message).with_param(path));
        }
        let Text(name) = dictionary.ok_or_else(|| missing("dictionary", "the name of a dictionary"))?;
        let Count(feature) = feature.ok_or_else(|| missing("feature", "the number of a feature"))?;
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
            wrong_value(&path, "a direction to project out, which has a number that is not 0", "zeros")
        })?,
    };
    Ok((scale, edit.scaled(scale)?))
}

/// Whether a vector of f32 is still one when it is multiplied.
fn is_finite(vector: &Tensor, scale: f64) -> Result<bool, ApiError> {
    let largest = vector.abs()?.max_all()?.to_scalar::<f32>()?;
    #[expect(clippy::cast_possible_truncation, reason = "the model computes in f32")]
    let product = (f64::from(largest).max(1.0) * scale) as f32;
    Ok(product.is_finite())
}

/// A place that a vector fits.
fn steered_site(name: &str, path: &str, served: &ServedModel) -> Result<Site, ApiError> {
    let refused = |what: String| ApiError::invalid(format!("{path}: {what}")).with_param(path);
    let site = named_site(name).map_err(|error| refused(error.to_string()))?;
    let n_layer = served.config().n_layer;
    if site.layer.is_some_and(|layer| layer >= n_layer) {
        // Says how many there are.
        named_sites(name, n_layer).map_err(|error| refused(error.to_string()))?;
    }
    match site.kind {
        SiteKind::Ln1Scale | SiteKind::Ln2Scale | SiteKind::LnFinalScale => {
            Err(refused(format!("{site} is one number per token; steer at a hook point that has a vector")))
        }
        SiteKind::AttnScores | SiteKind::Pattern => Err(refused(format!(
            "{site} has a number for each pair of tokens; steer at a hook point that has a vector for each token"
        ))),
        SiteKind::Logits => Err(refused("logits cannot be steered; use logit_bias".into())),
        _ => Ok(site),
    }
}

/// The numbers of a vector, one for each element of the shape.
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
            let bytes = bytes
                .map_err(|error| wrong("numbers of f32 in base64", format!("text that is not: {error}")))?;
            let (numbers, rest) = bytes.as_chunks::<F32_BYTES>();
            if !rest.is_empty() {
                return Err(wrong("numbers of four bytes", format!("{} bytes", bytes.len())));
            }
            numbers.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
        }
    };
    if numbers.len() != count {
        return Err(wrong("numbers", numbers.len().to_string()));
    }
    match numbers.iter().position(|number| !number.is_finite()) {
        Some(place) => Err(wrong("finite numbers", format!("{} as number {place}", numbers[place]))),
        None => Ok(numbers),
    }
}

fn tensor(numbers: Vec<f32>, shape: &[usize]) -> Result<Tensor, ApiError> {
    Ok(Tensor::from_vec(numbers, shape, &Device::Cpu)?)
}

impl Call {
    /// A call of `/v1/activations`: a text for each prompt, of which nothing is generated.
    ///
    /// # Errors
    /// When the body is wrong, or the model cannot serve it.
    pub(crate) fn of_activations(body: &[u8], served: &ServedModel) -> Result<Self, ApiError> {
        served.check_inside(None)?;
        let body = Body::parse(body, PromptActivationFields::fields())?;
        let warnings = served.known(&body)?;
        let fields: PromptActivationFields = body.read()?;
        served.check_name(fields.model.as_ref())?;
        let PromptActivationFields { sites, positions, encoding_format, steering: List(steering), .. } =
            fields;
        let shown = Shown {
            sites: sites_of(sites, "", served)?,
            wanted: positions.into(),
            of: Of::Prompt,
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
        for PromptTokens { ids, told_from, path } in prompts {
            let inspections = inside.inspections(ids.len(), (1, 0), served)?;
            let observers = observers(&inspections);
            let stop_at_layer = inside.stop_at_layer();
            let request = Request::new(ids.clone(), Arc::clone(&config));
            requests.push(Request { observers, stop_at_layer, ..request });
            answers.push(
                PromptAnswer::new(ids, told_from, path, (1, false), &served.pieces)?.inspected(inspections),
            );
        }
        let head = Head {
            id: String::new(),
            created: (served.options.now)(),
            model: served.name().to_owned(),
            seed: None,
        };
        let wants = Wants {
            shape: Shape::Activations,
            n: 1,
            best_of: 1,
            shown: inside.told(served),
            is_steered: inside.is_steered(),
            ..Wants::default()
        };
        let answer = Answer::new(head, wants, Arc::clone(&served.pieces), answers, warnings);
        Ok(Self { requests, answer, stream: false, activation_bytes })
    }
}
