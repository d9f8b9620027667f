//! Conversion of an adapter's tensors into changes to a model's parameters.

use std::collections::{BTreeMap, BTreeSet};

use candle_core::{Result, Tensor};
use candle_gpt2::{Gpt2Config, HeadKind, Parameter, ParameterKind, expected_parameters};

use super::change::{Change, Changes, Product};
use super::folder::Adapter;
use crate::error::ShapeOf;
use crate::naming::{EMBEDDING, HEAD, MODEL_PREFIX, Orientation, Origin, checkpoint_shape, is_of_head};
use crate::{Checkpoint, TensorFile, WeightsError};

/// Prefix that PEFT adds to the model's own names.
const PEFT_PREFIX: &str = "base_model.model.";
/// PEFT's default adapter name, which files rarely contain.
const DEFAULT_NAME: &str = ".default";
/// Modules that can have adapters in addition to the linear layers of the blocks.
const TABLES: [&str; 2] = ["wte", "wpe"];

/// Role of a tensor in an adapter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Part {
    A,
    B,
    /// Bias of the `B` matrix.
    Bias,
    EmbeddingA,
    EmbeddingB,
}

impl Part {
    const ALL: [(Self, &'static str); 5] = [
        (Self::A, "lora_A.weight"),
        (Self::B, "lora_B.weight"),
        (Self::Bias, "lora_B.bias"),
        (Self::EmbeddingA, "lora_embedding_A"),
        (Self::EmbeddingB, "lora_embedding_B"),
    ];

    fn name(self) -> &'static str {
        Self::ALL.iter().find(|(part, _)| *part == self).map_or("", |(_, name)| name)
    }
}

/// Adapter tensors grouped by purpose.
struct Sorted<'a> {
    /// Low-rank product tensors, by module and part.
    parts: BTreeMap<(String, Part), &'a Tensor>,
    /// Full parameters, keyed by their names in the model.
    ///
    /// Each entry has a base-layer flag, the name in the file, and the value.
    /// A base layer is shared with a tied head.
    whole: BTreeMap<String, (bool, &'a str, &'a Tensor)>,
    /// Prefix of the model's parameter names in the file.
    prefix: &'static str,
}

/// Reasons why an adapter does not match the model, one per line.
type Faults = Vec<String>;

/// Adds an adapter's changes to a checkpoint.
pub(super) fn apply(
    checkpoint: &mut Checkpoint,
    adapter: &Adapter,
    weight: f64,
) -> std::result::Result<(), WeightsError> {
    let refuse = |what: String| WeightsError::Adapter { path: adapter.file.clone(), what };
    if !weight.is_finite() {
        return Err(refuse(format!("the adapter weight {weight} is not a finite number")));
    }
    let TensorFile { tensors, .. } = TensorFile::read(&adapter.file)?;
    let sorted = sort(&tensors).map_err(refuse)?;
    // PEFT finds tied embeddings only through `lm_head`; GPT-2's `wte` is not among the names it knows.
    let has_head =
        sorted.whole.contains_key(HEAD) || sorted.parts.keys().any(|(module, _)| module == "lm_head");
    if adapter.config.ties_head && has_head {
        let what = "`ensure_weight_tying` for `lm_head` is not supported; merge the adapter with PEFT's `merge_and_unload()`";
        return Err(refuse(what.into()));
    }
    let own_config = with_head(checkpoint.config(), &sorted);
    let parameters = parameters(&own_config);
    let mut faults = Faults::new();
    let (found, base_layers) = changes(adapter, weight, &sorted, &parameters, &own_config, &mut faults)?;
    if faults.is_empty() && found.is_empty() {
        faults.push("the file contains no adapter tensors".into());
    }
    if !faults.is_empty() {
        let (path, model) = (adapter.file.clone(), checkpoint.weights_path().to_owned());
        let base = adapter.base_model().map(|base| candle_gpt2::excerpt(base).into_owned());
        return Err(WeightsError::AdapterMismatch { path, model, base, faults });
    }
    check_combination(checkpoint, weight, &found).map_err(refuse)?;
    merge_changes(checkpoint, own_config, found, &base_layers);
    let rule = format!("the adapter {} is merged, with weight {weight}", adapter.folder().display());
    checkpoint.add_rule(rule);
    Ok(())
}

/// Groups an adapter's tensors by their names.
fn sort(tensors: &BTreeMap<String, Tensor>) -> std::result::Result<Sorted<'_>, String> {
    let mut sorted = Sorted { parts: BTreeMap::new(), whole: BTreeMap::new(), prefix: "" };
    for (file_name, tensor) in tensors {
        let shown = candle_gpt2::excerpt(file_name);
        let name = file_name.strip_prefix(PEFT_PREFIX).unwrap_or(file_name);
        if name.contains("lora_magnitude_vector") {
            return Err(format!(
                "tensor `{shown}`: DoRA adapters are not supported; merge the adapter with PEFT's `merge_and_unload()`"
            ));
        }
        if !is_finite(tensor) {
            return Err(format!(
                "tensor `{shown}` contains NaN or infinite values; train or download the adapter again"
            ));
        }
        if name.starts_with(MODEL_PREFIX) {
            sorted.prefix = MODEL_PREFIX;
        }
        let name = name.strip_prefix(MODEL_PREFIX).unwrap_or(name).replace(DEFAULT_NAME, "");
        let part = Part::ALL.iter().find_map(|(part, ending)| {
            Some((name.strip_suffix(ending)?.strip_suffix('.')?.to_owned(), *part))
        });
        let is_new = match part {
            Some(key) => sorted.parts.insert(key, tensor).is_none(),
            None => {
                let name = name.replace(".modules_to_save.", ".");
                let is_base = name.contains(".base_layer.");
                let name = name.replace(".base_layer.", ".");
                sorted.whole.insert(name, (is_base, file_name, tensor)).is_none()
            }
        };
        if !is_new {
            return Err(format!(
                "tensor `{shown}` occurs twice, with and without prefixes; save the adapter again"
            ));
        }
    }
    Ok(sorted)
}

fn is_finite(tensor: &Tensor) -> bool {
    let values = tensor.flatten_all().and_then(|flat| flat.to_vec1::<f32>());
    values.is_ok_and(|values| values.iter().all(|value| value.is_finite()))
}

/// Returns the model's configuration, including the adapter's classification head if it has one.
fn with_head(config: &Gpt2Config, sorted: &Sorted) -> Gpt2Config {
    let head = sorted.whole.iter().find_map(|(name, (.., tensor))| {
        let kind =
            HeadKind::of_parameter(name).filter(|kind| kind.has_labels() && name.ends_with(".weight"))?;
        Some((kind, *tensor.dims().first()?))
    });
    match head {
        Some((kind, labels)) if config.head == HeadKind::LanguageModel => {
            let id2label = (0..labels).map(|label| format!("LABEL_{label}")).collect();
            Gpt2Config { head: kind, id2label, ..config.clone() }
        }
        _ => config.clone(),
    }
}

/// Returns the parameters by name, including the language-model head even if it is tied.
fn parameters(config: &Gpt2Config) -> BTreeMap<String, Parameter> {
    let untied = Gpt2Config { tie_word_embeddings: false, ..config.clone() };
    expected_parameters(&untied).into_iter().map(|parameter| (parameter.name.clone(), parameter)).collect()
}

/// Returns an adapter's changes and the parameters whose base layer it replaces.
fn changes(
    adapter: &Adapter,
    weight: f64,
    sorted: &Sorted,
    parameters: &BTreeMap<String, Parameter>,
    config: &Gpt2Config,
    faults: &mut Faults,
) -> Result<(Changes, BTreeSet<String>)> {
    let mut changes = Changes::new();
    let mut base_layers = BTreeSet::new();
    for (name, (is_base, file_name, tensor)) in &sorted.whole {
        let shown = candle_gpt2::excerpt(file_name);
        let Some(parameter) = parameters.get(name) else {
            faults.push(unknown(&shown, tensor, config));
            continue;
        };
        let stored = checkpoint_shape(parameter, Orientation::Conv1D);
        if tensor.dims() != stored {
            faults.push(format!(
                "tensor `{shown}`: expected shape {}, found {}",
                ShapeOf(&stored),
                ShapeOf(tensor.dims())
            ));
            continue;
        }
        // The kind determines the layout, because the shape can be ambiguous: `attn.c_proj` is square.
        let value = match parameter.kind {
            ParameterKind::Linear => tensor.t()?.contiguous()?,
            _ => (*tensor).clone(),
        };
        changes.entry(name.clone()).or_default().replacement = Some(value);
        let module = name.rsplit_once('.').map_or(name.as_str(), |(module, _)| module);
        if *is_base || !adapter.config.is_saved(&full_name(sorted.prefix, module)) {
            base_layers.insert(name.clone());
        }
    }
    for (name, Parameter { shape, kind, .. }) in parameters {
        let Some((module, part)) = name.rsplit_once('.') else { continue };
        let full = full_name(sorted.prefix, module);
        let file_name = |part: Part| format!("{PEFT_PREFIX}{full}.{}", part.name());
        if adapter.config.is_saved(&full) && !sorted.whole.contains_key(name) {
            faults.push(format!(
                "tensor `{PEFT_PREFIX}{full}.{part}` is missing: expected shape {}",
                ShapeOf(shape)
            ));
        }
        if part != "weight" {
            continue;
        }
        let is_table = TABLES.contains(&module);
        let is_linear = is_linear(name, *kind);
        if !(is_table || kind.is_multiplied()) || !adapter.config.is_target(&full, is_linear) {
            continue;
        }
        let [out_features, in_features] = *shape.as_slice() else { continue };
        let rank = adapter.config.rank(&full);
        // An embedding's `A` has one column for each row of the table.
        let (kinds, expected) = match is_table {
            true => ([Part::EmbeddingA, Part::EmbeddingB], [[rank, out_features], [in_features, rank]]),
            false => ([Part::A, Part::B], [[rank, in_features], [out_features, rank]]),
        };
        let mut pair = Vec::new();
        for (part, expected) in kinds.into_iter().zip(expected) {
            match sorted.parts.get(&(module.to_owned(), part)) {
                Some(tensor) if tensor.dims() == expected => pair.push((*tensor).clone()),
                Some(tensor) => faults.push(format!(
                    "tensor `{}`: expected shape {}, found {}",
                    file_name(part),
                    ShapeOf(&expected),
                    ShapeOf(tensor.dims())
                )),
                None => {
                    faults.push(format!(
                        "tensor `{}` is missing: expected shape {}",
                        file_name(part),
                        ShapeOf(&expected)
                    ));
                }
            }
        }
        let scale = weight * adapter.config.scale(&full);
        #[expect(clippy::cast_possible_truncation, reason = "weights are f32")]
        if !(scale as f32).is_finite() {
            faults.push(format!("`{full}`: the adapter scale {scale} is outside the range of f32"));
        }
        if let [a, b] = pair.as_slice() {
            let (a, b) = if is_table { (b.t()?, a.t()?) } else { (a.clone(), b.clone()) };
            changes.entry(name.clone()).or_default().products.push(Product { a, b, scale });
        }
        if adapter.config.has_bias && !is_table {
            let bias = format!("{module}.bias");
            match sorted.parts.get(&(module.to_owned(), Part::Bias)) {
                Some(offset) if parameters.contains_key(&bias) && offset.dims() == [out_features] => {
                    changes.entry(bias).or_default().offsets.push((*offset * scale)?);
                }
                Some(_) if !parameters.contains_key(&bias) => {
                    faults.push(format!("tensor `{}`: the layer has no bias", file_name(Part::Bias)));
                }
                other => faults.push(format!(
                    "tensor `{}`: expected shape ({out_features}), found {}",
                    file_name(Part::Bias),
                    other.map_or_else(|| "no tensor".to_owned(), |tensor| ShapeOf(tensor.dims()).to_string())
                )),
            }
        }
    }
    for ((module, part), tensor) in &sorted.parts {
        let name = format!("{module}.weight");
        let full = full_name(sorted.prefix, module);
        let shown = format!("{PEFT_PREFIX}{}.{}", candle_gpt2::excerpt(&full), part.name());
        let is_linear = parameters.get(&name).is_some_and(|parameter| is_linear(&name, parameter.kind));
        let is_table = TABLES.contains(&module.as_str());
        let is_own = match part {
            Part::EmbeddingA | Part::EmbeddingB => is_table,
            Part::A | Part::B => !is_table,
            Part::Bias => !is_table && adapter.config.has_bias,
        };
        if !parameters.contains_key(&name) {
            faults.push(unknown(&shown, tensor, config));
        } else if !is_own || !adapter.config.is_target(&full, is_linear) {
            faults.push(format!(
                "the file contains tensor `{shown}` of shape {}, but adapter_config.json does not select it \
                 (target_modules, layers_to_transform, lora_bias)",
                ShapeOf(tensor.dims())
            ));
        }
    }
    Ok((changes, base_layers))
}

/// Whether PEFT's `all-linear` selects this weight: every linear layer except the language-model head.
fn is_linear(name: &str, kind: ParameterKind) -> bool {
    kind.is_multiplied() && ![EMBEDDING, HEAD].contains(&name)
}

/// Returns the error message for a tensor without a matching parameter in the model.
fn unknown(name: &str, tensor: &Tensor, config: &Gpt2Config) -> String {
    format!(
        "tensor `{name}` of shape {} is not a parameter of this model with {} blocks",
        ShapeOf(tensor.dims()),
        config.n_layer
    )
}

/// Returns a module's full name in the model that PEFT wraps.
fn full_name(prefix: &str, module: &str) -> String {
    if is_of_head(&format!("{module}.weight")) { module.to_owned() } else { format!("{prefix}{module}") }
}

/// Rejects invalid combinations: products add up, but only one adapter can replace a parameter.
fn check_combination(
    checkpoint: &Checkpoint,
    weight: f64,
    found: &Changes,
) -> std::result::Result<(), String> {
    let mut whole: Vec<&String> =
        found.iter().filter(|(_, change)| change.is_replacement()).map(|(name, _)| name).collect();
    whole.sort_unstable();
    #[expect(clippy::float_cmp, reason = "only the default is exact")]
    if let (Some(name), true) = (whole.first(), weight != 1.0) {
        return Err(format!(
            "the adapter replaces `{name}` (modules_to_save or bias), so it cannot be scaled; \
             omit the weight of this adapter"
        ));
    }
    let is_replaced = |name: &String| checkpoint.changes.get(name).is_some_and(Change::is_replacement);
    if let Some(name) = whole.iter().find(|name| is_replaced(name)) {
        return Err(format!("another adapter also replaces `{name}`; use only one of them"));
    }
    Ok(())
}

/// Adds the changes to a checkpoint, and unties the head if it may then differ from the embedding.
fn merge_changes(
    checkpoint: &mut Checkpoint,
    config: Gpt2Config,
    mut found: Changes,
    base_layers: &BTreeSet<String>,
) {
    let is_tied = config.head.has_language_model() && config.tie_word_embeddings;
    // In PEFT's base model, embedding and head are one tensor: replacing one replaces both.
    let shared = |from: &str, to: &str, found: &mut Changes| {
        let value = found.get(from).and_then(|change| change.replacement.clone());
        let has_own = found.get(to).is_some_and(Change::is_replacement);
        if let (true, true, false, Some(value)) = (is_tied, base_layers.contains(from), has_own, value) {
            found.entry(to.to_owned()).or_default().replacement = Some(value);
        }
    };
    shared(EMBEDDING, HEAD, &mut found);
    shared(HEAD, EMBEDDING, &mut found);
    checkpoint.config = config;
    if is_tied && (found.contains_key(EMBEDDING) || found.contains_key(HEAD)) {
        checkpoint.config.tie_word_embeddings = false;
        if let Some((origin, parameter)) = checkpoint.naming.parameters.get(EMBEDDING).cloned() {
            let head = Parameter { name: HEAD.to_owned(), ..parameter };
            checkpoint.naming.parameters.insert(HEAD.to_owned(), (origin, head));
        }
        if let Some(change) = checkpoint.changes.get(EMBEDDING).cloned() {
            checkpoint.changes.insert(HEAD.to_owned(), change);
        }
    }
    for (name, change) in found {
        let whole = checkpoint.changes.entry(name).or_default();
        whole.replacement = change.replacement.or(whole.replacement.take());
        whole.products.extend(change.products);
        whole.offsets.extend(change.offsets);
    }
    // Adds the parameters of a head that only the adapter has.
    for parameter in expected_parameters(&checkpoint.config) {
        let name = parameter.name.clone();
        checkpoint.naming.parameters.entry(name).or_insert((Origin::Zeros, parameter));
    }
}
