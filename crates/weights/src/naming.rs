//! Mapping between a checkpoint's tensors and the parameters of a GPT-2 model.
//!
//! This module alone handles prefixes, `Conv1D`, separate query, key and value, buffers, padding and tied
//! heads. The model uses Hugging Face's names without the `transformer.` prefix, and its matrices are
//! `(out, in)`. Each [`Scheme`] lists another origin's names for the layers of [`expected_parameters`].

use std::cmp::Ordering;
use std::collections::HashMap;

use candle_gpt2::{Gpt2Config, HeadKind, Parameter, ParameterKind, expected_parameters};

use crate::Mismatch;
use crate::source::Source;
use crate::stored::StoredTensor;

/// Naming scheme of files from one source, such as OpenAI.
struct Scheme {
    name: &'static str,
    /// Layers outside the blocks, as (model name, file name); unlisted names are unchanged.
    outside: &'static [(&'static str, &'static str)],
    /// Text before and after the block index.
    block: (&'static str, char),
    /// Layers of a block, as (model name, file name); unlisted names are unchanged.
    inside: &'static [(&'static str, &'static str)],
    /// Separate query, key and value layers that replace `attn.c_attn`.
    thirds: Option<[&'static str; 3]>,
    /// Suffixes of a linear layer's weight and bias.
    linear: [&'static str; 2],
    /// Suffixes of a norm's weight and bias.
    norm: [&'static str; 2],
    /// Suffix of an embedding or a head.
    table: &'static str,
    /// Tensors of a block that are not parameters: the causal mask and its fill value.
    buffers: &'static [&'static str],
    /// Layout of linear weights; `None` if it must be inferred from the file.
    orientation: Option<Orientation>,
}

const SCHEMES: [Scheme; 4] = [
    HUGGING_FACE,
    Scheme {
        name: "OpenAI",
        block: ("h", '/'),
        inside: &[
            ("attn.c_attn", "attn/c_attn"),
            ("attn.c_proj", "attn/c_proj"),
            ("mlp.c_fc", "mlp/c_fc"),
            ("mlp.c_proj", "mlp/c_proj"),
        ],
        linear: ["/w", "/b"],
        norm: ["/g", "/b"],
        table: "",
        buffers: &[],
        orientation: Some(Orientation::Conv1D),
        ..HUGGING_FACE
    },
    GGUF,
    Scheme {
        name: "Build a Large Language Model (From Scratch)",
        outside: &[("wte", "tok_emb"), ("wpe", "pos_emb"), ("ln_f", "final_norm"), ("lm_head", "out_head")],
        block: ("trf_blocks.", '.'),
        inside: &[
            ("ln_1", "norm1"),
            ("attn.c_proj", "att.out_proj"),
            ("ln_2", "norm2"),
            ("mlp.c_fc", "ff.layers.0"),
            ("mlp.c_proj", "ff.layers.2"),
        ],
        thirds: Some(["att.W_query", "att.W_key", "att.W_value"]),
        norm: [".scale", ".shift"],
        buffers: &["att.mask"],
        orientation: Some(Orientation::Linear),
        ..HUGGING_FACE
    },
];

/// Names used by the model itself.
const HUGGING_FACE: Scheme = Scheme {
    name: "Hugging Face",
    outside: &[],
    block: ("h.", '.'),
    inside: &[],
    thirds: None,
    linear: [".weight", ".bias"],
    norm: [".weight", ".bias"],
    table: ".weight",
    buffers: &["attn.bias", "attn.masked_bias", "crossattention.bias", "crossattention.masked_bias"],
    orientation: None,
};
/// Names used by llama.cpp.
const GGUF: Scheme = Scheme {
    name: "GGUF",
    outside: &[
        ("wte", "token_embd"),
        ("wpe", "position_embd"),
        ("ln_f", "output_norm"),
        ("lm_head", "output"),
    ],
    block: ("blk.", '.'),
    inside: &[
        ("ln_1", "attn_norm"),
        ("attn.c_attn", "attn_qkv"),
        ("attn.c_proj", "attn_output"),
        ("ln_2", "ffn_norm"),
        ("mlp.c_fc", "ffn_up"),
        ("mlp.c_proj", "ffn_down"),
    ],
    buffers: &[],
    orientation: Some(Orientation::Linear),
    ..HUGGING_FACE
};
/// Prefix of the base model's parameter names in models with a head; the head's names lack it.
pub(crate) const MODEL_PREFIX: &str = "transformer.";
/// Name of the output head.
pub(crate) const HEAD: &str = "lm_head.weight";
/// Name of the token embedding.
pub(crate) const EMBEDDING: &str = "wte.weight";

/// Whether a parameter belongs to a head; head names lack [`MODEL_PREFIX`].
pub(crate) fn is_of_head(name: &str) -> bool {
    name == HEAD || HeadKind::of_parameter(name).is_some()
}

/// Infers the kind of head from a file's tensors, for configurations that do not specify it.
pub(crate) fn head_shown_by(stored: &[StoredTensor]) -> HeadKind {
    let (_, prefix) = scheme_and_prefix(stored);
    let before_head = prefix.strip_suffix(MODEL_PREFIX).unwrap_or(&prefix);
    let kind = |tensor: &StoredTensor| HeadKind::of_parameter(tensor.name.strip_prefix(before_head)?);
    stored.iter().find_map(kind).unwrap_or_default()
}

/// Storage layout of linear weights.
///
/// Returned by [`Checkpoint::orientation`](crate::Checkpoint::orientation).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Orientation {
    /// `(in, out)`, as in OpenAI's and Hugging Face's GPT-2.
    Conv1D,
    /// `(out, in)`, as in PyTorch's `nn.Linear`: minGPT, nanoGPT, llm.c, GGUF.
    Linear,
}

/// Returns the shape in which a checkpoint stores a parameter.
///
/// ```
/// use candle_gpt2::{Gpt2Config, expected_parameters};
/// use candle_gpt2_weights::{Orientation, checkpoint_shape};
///
/// let parameters = expected_parameters(&Gpt2Config::gpt2());
/// let c_attn = parameters.iter().find(|one| one.name == "h.0.attn.c_attn.weight").expect("block 0 has this weight");
/// assert_eq!(c_attn.shape, [2304, 768]);
/// assert_eq!(checkpoint_shape(c_attn, Orientation::Conv1D), [768, 2304]);
/// ```
pub fn checkpoint_shape(parameter: &Parameter, orientation: Orientation) -> Vec<usize> {
    let mut shape = parameter.shape.clone();
    if orientation == Orientation::Conv1D && parameter.kind == ParameterKind::Linear {
        shape.reverse();
    }
    shape
}

/// Returns the name of a parameter in a GGUF file.
pub(crate) fn gguf_name(name: &str) -> String {
    GGUF.file_name("", name)
}

/// Source of a parameter's values, by tensor index.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Origin {
    /// Single tensor. If it has extra rows, only the first ones belong to the parameter.
    Whole(usize),
    /// Separate query, key and value tensors.
    Thirds([usize; 3]),
    /// Not stored: the bias of a model without biases.
    Zeros,
}

/// Assignment of stored tensors to parameters.
#[derive(Debug)]
pub(crate) struct Naming {
    /// Name of the scheme.
    pub(crate) scheme: &'static str,
    /// Prefix of the names in the file.
    pub(crate) prefix: String,
    /// Layout of linear weights.
    pub(crate) orientation: Orientation,
    /// Description of how the layout was determined.
    pub(crate) orientation_evidence: String,
    /// Parameters by model name, each with its source tensors.
    pub(crate) parameters: HashMap<String, (Origin, Parameter)>,
    /// Indices of causal masks, which are not parameters.
    pub(crate) buffers: Vec<usize>,
    /// Indices of tensors whose dtype cannot hold weights, such as integers.
    pub(crate) skipped: Vec<usize>,
    /// Index of a copy of the token embedding under the head's name.
    pub(crate) tied_head: Option<usize>,
    /// Whether the token embedding is stored only under the head's name.
    pub(crate) is_embedding_head: bool,
    /// Number of blocks according to the tensor names.
    pub(crate) stored_layers: usize,
    /// All differences between the tensors and the model.
    pub(crate) mismatches: Vec<Mismatch>,
}

impl Naming {
    /// Matches the tensors of a checkpoint with the parameters of a model.
    pub(crate) fn new(config: &Gpt2Config, source: &Source) -> Self {
        let stored = &source.tensors;
        let (scheme, prefix) = scheme_and_prefix(stored);
        let by_name: HashMap<&str, usize> =
            stored.iter().enumerate().map(|(index, tensor)| (tensor.name.as_str(), index)).collect();
        let find = |name: &String| by_name.get(name.as_str()).copied();
        let own = |name: &str| scheme.file_names(&prefix, name).iter().find_map(find);
        let thirds = |name: &str| scheme.third_names(&prefix, name).map(|names| names.each_ref().map(find));

        let expected = expected_parameters(config);
        let linear = expected.iter().filter(|parameter| parameter.kind == ParameterKind::Linear);
        let found_weights = linear.filter_map(|parameter| {
            let index = own(&parameter.name)?;
            Some((parameter.shape.as_slice(), stored[index].shape.as_slice()))
        });
        let (orientation, orientation_evidence) = match scheme.orientation {
            Some(orientation) => (orientation, format!("{} files always use this layout", scheme.name)),
            None => orientation(found_weights),
        };
        let mut naming = Self {
            scheme: scheme.name,
            prefix: prefix.clone(),
            orientation,
            orientation_evidence,
            parameters: HashMap::new(),
            buffers: Vec::new(),
            skipped: Vec::new(),
            tied_head: None,
            is_embedding_head: false,
            stored_layers: scheme.layers(&prefix, stored),
            mismatches: Vec::new(),
        };
        let mut is_assigned = vec![false; stored.len()];
        let biases = expected.iter().filter(|parameter| parameter.kind == ParameterKind::Bias);
        let has_third_biases =
            biases.filter_map(|parameter| thirds(&parameter.name)).flatten().any(|third| third.is_some());
        for parameter in expected {
            let shape = checkpoint_shape(&parameter, orientation);
            let (own, thirds) = (own(&parameter.name), thirds(&parameter.name));
            // For tied matrices either name suffices: safetensors' `save_model` keeps only one.
            let is_tied =
                parameter.name == EMBEDDING && config.head.has_language_model() && config.tie_word_embeddings;
            let head = || scheme.file_names(&prefix, HEAD).iter().find_map(find);
            let tied = if own.is_none() && is_tied { head() } else { None };
            naming.is_embedding_head |= tied.is_some();
            let from = if let Some(index) = own.or(tied) {
                is_assigned[index] = true;
                let tensor = &stored[index];
                let is_padded =
                    source.may_be_padded && parameter.name == EMBEDDING && tensor.shape[1..] == shape[1..];
                if !is_padded {
                    naming.mismatches.extend(
                        labels_mismatch(config, &parameter, tensor).or_else(|| mismatch(tensor, shape)),
                    );
                }
                Origin::Whole(index)
            } else if let Some([Some(query), Some(key), Some(value)]) = thirds {
                let mut third_shape = shape;
                third_shape[0] /= 3;
                for index in [query, key, value] {
                    is_assigned[index] = true;
                    naming.mismatches.extend(mismatch(&stored[index], third_shape.clone()));
                }
                Origin::Thirds([query, key, value])
            } else if parameter.kind == ParameterKind::Bias
                && (source.is_bias_free || (thirds.is_some() && !has_third_biases))
            {
                Origin::Zeros
            } else {
                let name = scheme.file_name(&prefix, &parameter.name);
                naming.mismatches.push(Mismatch::Missing { name, expected: shape });
                continue;
            };
            naming.parameters.insert(parameter.name.clone(), (from, parameter));
        }
        let heads = scheme.file_names(&prefix, HEAD);
        for (index, tensor) in stored.iter().enumerate().filter(|(index, _)| !is_assigned[*index]) {
            if config.head.has_language_model() && heads.contains(&tensor.name) {
                // The configuration ties the head: the file repeats the embedding under a second name.
                naming.mismatches.extend(mismatch(tensor, vec![config.vocab_size, config.n_embd]));
                naming.tied_head = Some(index);
            } else if scheme.is_buffer(config, &prefix, &tensor.name) {
                naming.buffers.push(index);
            } else if !tensor.dtype.holds_weights() {
                naming.skipped.push(index);
            } else {
                let (name, found) = (tensor.name.clone(), tensor.shape.clone());
                naming.mismatches.push(Mismatch::Surplus { name, found });
            }
        }
        naming
    }

    /// Whether the stored tensor of parameter `name` must be transposed to `(out, in)`.
    pub(crate) fn is_transposed(&self, name: &str) -> bool {
        self.orientation == Orientation::Conv1D && self.is_linear(name)
    }

    /// Whether parameter `name` is the weight of a linear layer in a block.
    pub(crate) fn is_linear(&self, name: &str) -> bool {
        self.parameters.get(name).is_some_and(|(_, parameter)| parameter.kind == ParameterKind::Linear)
    }

    /// Returns the shape of a parameter's tensor in the file, as `(out, in)`.
    fn stored_shape(&self, name: &str, stored: &[StoredTensor]) -> Option<Vec<usize>> {
        let (Origin::Whole(index), _) = self.parameters.get(name)? else { return None };
        let mut shape = stored[*index].shape.clone();
        if self.is_transposed(name) {
            shape.reverse();
        }
        Some(shape)
    }

    /// Returns configured sizes that contradict the tensors: key, configured value and actual size.
    pub(crate) fn other_sizes(
        &self,
        config: &Gpt2Config,
        stored: &[StoredTensor],
    ) -> Vec<(&'static str, usize, usize)> {
        let size = |name: &str, axis: usize| self.stored_shape(name, stored)?.get(axis).copied();
        let sizes = [
            ("vocab_size", config.vocab_size, size(EMBEDDING, 0)),
            ("n_positions", config.n_positions, size("wpe.weight", 0)),
            ("n_embd", config.n_embd, size("wpe.weight", 1).or_else(|| size(EMBEDDING, 1))),
            ("n_layer", config.n_layer, Some(self.stored_layers).filter(|layers| *layers > 0)),
            ("n_inner", config.inner_width(), size("h.0.mlp.c_fc.weight", 0)),
        ];
        let differing =
            sizes.into_iter().filter_map(|(key, configured, shown)| Some((key, configured, shown?)));
        differing.filter(|(_, configured, shown)| configured != shown).collect()
    }

    /// Returns the number of parameters that are missing from the file and default to zero.
    pub(crate) fn zero_count(&self) -> usize {
        self.parameters.values().filter(|(from, _)| *from == Origin::Zeros).count()
    }
}

impl Scheme {
    /// Returns the number of blocks in a file.
    fn layers(&self, prefix: &str, stored: &[StoredTensor]) -> usize {
        let layer = |tensor: &StoredTensor| self.in_block(prefix, &tensor.name)?.0.parse::<usize>().ok();
        stored.iter().filter_map(layer).max().map_or(0, |last| last.saturating_add(1))
    }

    /// Splits a name into the block index and the name within the block.
    fn in_block<'a>(&self, prefix: &str, name: &'a str) -> Option<(&'a str, &'a str)> {
        let (layer, name) =
            name.strip_prefix(prefix)?.strip_prefix(self.block.0)?.split_once(self.block.1)?;
        is_number(layer).then_some((layer, name))
    }

    /// Whether this is the name of a buffer in one of the model's blocks.
    fn is_buffer(&self, config: &Gpt2Config, prefix: &str, name: &str) -> bool {
        self.in_block(prefix, name).is_some_and(|(layer, name)| {
            self.buffers.contains(&name) && layer.parse().is_ok_and(|layer: usize| layer < config.n_layer)
        })
    }

    /// Returns the name of a parameter in a file that uses this scheme.
    fn file_name(&self, prefix: &str, own: &str) -> String {
        if let Some([query, ..]) = self.third_names(prefix, own) {
            return query;
        }
        let (layer, part) = own.rsplit_once('.').unwrap_or((own, ""));
        let theirs = theirs(self.outside, layer);
        if is_of_head(own) && theirs == layer {
            return format!("{}{own}", prefix.strip_suffix(MODEL_PREFIX).unwrap_or(prefix));
        }
        match layer.strip_prefix("h.").and_then(|rest| rest.split_once('.')) {
            Some((index, layer)) => self.name_in_block(prefix, index, (layer, part)),
            None => {
                let [weight, bias] = if layer == "ln_f" { self.norm } else { [self.table, ".bias"] };
                format!("{prefix}{theirs}{}", if part == "bias" { bias } else { weight })
            }
        }
    }

    fn name_in_block(&self, prefix: &str, index: &str, (layer, part): (&str, &str)) -> String {
        let (before, after) = self.block;
        let [weight, bias] = if layer.starts_with("ln_") { self.norm } else { self.linear };
        let suffix = if part == "bias" { bias } else { weight };
        format!("{prefix}{before}{index}{after}{}{suffix}", theirs(self.inside, layer))
    }

    /// Returns the possible names of a parameter that is stored as a single tensor.
    ///
    /// A head is outside the base model, but its name may include the prefix.
    fn file_names(&self, prefix: &str, own: &str) -> Vec<String> {
        if self.third_names(prefix, own).is_some() {
            return Vec::new();
        }
        let mut names = vec![self.file_name(prefix, own)];
        if is_of_head(own) {
            names.push(format!("{}{own}", prefix.strip_suffix(MODEL_PREFIX).unwrap_or(prefix)));
            names.push(format!("{prefix}{own}"));
        }
        names
    }

    /// Returns the names of the separate query, key and value tensors, if they replace `own`.
    fn third_names(&self, prefix: &str, own: &str) -> Option<[String; 3]> {
        let (index, own) = own.strip_prefix("h.")?.split_once('.')?;
        let part = own.strip_prefix("attn.c_attn.")?;
        Some(self.thirds?.map(|third| self.name_in_block(prefix, index, (third, part))))
    }
}

/// Looks up the name that the file uses for a layer.
fn theirs<'a>(table: &[(&str, &'static str)], ours: &'a str) -> &'a str {
    table.iter().find(|(known, _)| *known == ours).map_or(ours, |(_, theirs)| *theirs)
}

fn is_number(text: &str) -> bool {
    let has_leading_zero = text.len() > 1 && text.starts_with('0');
    !text.is_empty() && !has_leading_zero && text.bytes().all(|byte| byte.is_ascii_digit())
}

/// Returns a file's naming scheme and name prefix; the shortest prefix if there are several.
///
/// A scheme matches if the file contains one of its parameters outside the blocks.
fn scheme_and_prefix(stored: &[StoredTensor]) -> (&'static Scheme, String) {
    for scheme in &SCHEMES {
        // The head is outside the base model, so its name does not determine the prefix.
        for anchor in ["wte.weight", "wpe.weight", "ln_f.weight", "ln_f.bias"] {
            let anchor = scheme.file_name("", anchor);
            let prefixes = stored.iter().filter_map(|tensor| tensor.name.strip_suffix(anchor.as_str()));
            let whole = prefixes.filter(|prefix| prefix.is_empty() || prefix.ends_with(['.', '/']));
            if let Some(prefix) = whole.min_by_key(|prefix| prefix.len()) {
                return (scheme, prefix.to_owned());
            }
        }
    }
    (&SCHEMES[0], String::new())
}

/// Infers the layout of linear weights by majority vote.
///
/// Each item pairs the model's shape `(out, in)` with the stored shape. Only weights with two different
/// sizes vote, so a single corrupt tensor shows up as a mismatch. The square `attn.c_proj` never votes, not
/// even about itself.
fn orientation<'a>(weights: impl Iterator<Item = (&'a [usize], &'a [usize])>) -> (Orientation, String) {
    let (mut linear, mut conv1d) = (0, 0);
    for (own, found) in weights {
        match (own, found) {
            ([output, input], [first, second]) if output != input && (output, input) == (first, second) => {
                linear += 1
            }
            ([output, input], [first, second]) if output != input && (output, input) == (second, first) => {
                conv1d += 1
            }
            _ => {}
        }
    }
    let votes = linear + conv1d;
    match linear.cmp(&conv1d) {
        Ordering::Greater => {
            (Orientation::Linear, format!("{linear} of {votes} non-square weights are (out, in)"))
        }
        Ordering::Less => {
            (Orientation::Conv1D, format!("{conv1d} of {votes} non-square weights are (in, out)"))
        }
        Ordering::Equal => {
            (Orientation::Conv1D, "all weights are square, so GPT-2's layout is assumed".to_owned())
        }
    }
}

/// Returns a mismatch if a head differs from the configuration only in its number of labels.
fn labels_mismatch(config: &Gpt2Config, parameter: &Parameter, tensor: &StoredTensor) -> Option<Mismatch> {
    let (rows, columns) = tensor.shape.split_first()?;
    let (labels, width) = parameter.shape.split_first()?;
    let is_other_count =
        config.head.has_labels() && is_of_head(&parameter.name) && columns == width && rows != labels;
    is_other_count.then(|| Mismatch::Labels { name: tensor.name.clone(), rows: *rows, labels: *labels })
}

fn mismatch(tensor: &StoredTensor, expected: Vec<usize>) -> Option<Mismatch> {
    let name = tensor.name.clone();
    if tensor.shape != expected {
        return Some(Mismatch::Shape { name, expected, found: tensor.shape.clone() });
    }
    (!tensor.dtype.holds_weights()).then(|| Mismatch::DType { name, found: tensor.dtype.to_string() })
}
