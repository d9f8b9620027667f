//! How checkpoints name and turn the parameters of a GPT-2: the one place that knows prefixes, `Conv1D`, separate
//! query, key and value, buffers, padding and tied heads.
//!
//! The model's own names are those of Hugging Face without the `transformer.` prefix, its matrices `(out, in)`. Each
//! [`Scheme`] is a table from another origin's names to these.

use std::cmp::Ordering;
use std::collections::HashMap;

use candle_gpt2::{Gpt2Config, HeadKind, Parameter, expected_parameters};

use crate::Mismatch;
use crate::source::Source;
use crate::stored::StoredTensor;

/// How one origin names the parameters.
struct Scheme {
    name: &'static str,
    /// Parameters outside the blocks. The first that is there decides the scheme, and the text before it is the prefix of
    /// all names.
    outside: &'static [(&'static str, &'static str)],
    /// The text before and after the number of a block.
    block: (&'static str, char),
    /// Parameters of a block.
    inside: &'static [(&'static str, &'static str)],
    /// Parameters of a block that are the first, second or third part of one.
    thirds: &'static [(&'static str, &'static str, usize)],
    /// What a block holds besides parameters: the causal mask and the value it was filled with.
    buffers: &'static [&'static str],
    /// How linear weights are stored; `None` if the file must tell.
    orientation: Option<Orientation>,
}

const SCHEMES: [Scheme; 4] = [
    Scheme {
        name: "Hugging Face",
        outside: &[
            ("wte.weight", "wte.weight"),
            ("wpe.weight", "wpe.weight"),
            ("ln_f.weight", "ln_f.weight"),
            ("ln_f.bias", "ln_f.bias"),
            (HEAD, HEAD),
        ],
        block: ("h.", '.'),
        inside: &[
            ("ln_1.weight", "ln_1.weight"),
            ("ln_1.bias", "ln_1.bias"),
            ("attn.c_attn.weight", "attn.c_attn.weight"),
            ("attn.c_attn.bias", "attn.c_attn.bias"),
            ("attn.c_proj.weight", "attn.c_proj.weight"),
            ("attn.c_proj.bias", "attn.c_proj.bias"),
            ("ln_cross_attn.weight", "ln_cross_attn.weight"),
            ("ln_cross_attn.bias", "ln_cross_attn.bias"),
            ("crossattention.q_attn.weight", "crossattention.q_attn.weight"),
            ("crossattention.q_attn.bias", "crossattention.q_attn.bias"),
            ("crossattention.c_attn.weight", "crossattention.c_attn.weight"),
            ("crossattention.c_attn.bias", "crossattention.c_attn.bias"),
            ("crossattention.c_proj.weight", "crossattention.c_proj.weight"),
            ("crossattention.c_proj.bias", "crossattention.c_proj.bias"),
            ("ln_2.weight", "ln_2.weight"),
            ("ln_2.bias", "ln_2.bias"),
            ("mlp.c_fc.weight", "mlp.c_fc.weight"),
            ("mlp.c_fc.bias", "mlp.c_fc.bias"),
            ("mlp.c_proj.weight", "mlp.c_proj.weight"),
            ("mlp.c_proj.bias", "mlp.c_proj.bias"),
        ],
        thirds: &[],
        buffers: &["attn.bias", "attn.masked_bias", "crossattention.bias", "crossattention.masked_bias"],
        orientation: None,
    },
    Scheme {
        name: "OpenAI",
        outside: &[
            ("wte", "wte.weight"),
            ("wpe", "wpe.weight"),
            ("ln_f/g", "ln_f.weight"),
            ("ln_f/b", "ln_f.bias"),
        ],
        block: ("h", '/'),
        inside: &[
            ("ln_1/g", "ln_1.weight"),
            ("ln_1/b", "ln_1.bias"),
            ("attn/c_attn/w", "attn.c_attn.weight"),
            ("attn/c_attn/b", "attn.c_attn.bias"),
            ("attn/c_proj/w", "attn.c_proj.weight"),
            ("attn/c_proj/b", "attn.c_proj.bias"),
            ("ln_2/g", "ln_2.weight"),
            ("ln_2/b", "ln_2.bias"),
            ("mlp/c_fc/w", "mlp.c_fc.weight"),
            ("mlp/c_fc/b", "mlp.c_fc.bias"),
            ("mlp/c_proj/w", "mlp.c_proj.weight"),
            ("mlp/c_proj/b", "mlp.c_proj.bias"),
        ],
        thirds: &[],
        buffers: &[],
        orientation: Some(Orientation::Conv1D),
    },
    Scheme {
        name: GGUF,
        outside: &[
            ("token_embd.weight", "wte.weight"),
            ("position_embd.weight", "wpe.weight"),
            ("output_norm.weight", "ln_f.weight"),
            ("output_norm.bias", "ln_f.bias"),
            ("output.weight", HEAD),
        ],
        block: ("blk.", '.'),
        inside: &[
            ("attn_norm.weight", "ln_1.weight"),
            ("attn_norm.bias", "ln_1.bias"),
            ("attn_qkv.weight", "attn.c_attn.weight"),
            ("attn_qkv.bias", "attn.c_attn.bias"),
            ("attn_output.weight", "attn.c_proj.weight"),
            ("attn_output.bias", "attn.c_proj.bias"),
            ("ffn_norm.weight", "ln_2.weight"),
            ("ffn_norm.bias", "ln_2.bias"),
            ("ffn_up.weight", "mlp.c_fc.weight"),
            ("ffn_up.bias", "mlp.c_fc.bias"),
            ("ffn_down.weight", "mlp.c_proj.weight"),
            ("ffn_down.bias", "mlp.c_proj.bias"),
        ],
        thirds: &[],
        buffers: &[],
        orientation: Some(Orientation::Linear),
    },
    Scheme {
        name: "Build a Large Language Model (From Scratch)",
        outside: &[
            ("tok_emb.weight", "wte.weight"),
            ("pos_emb.weight", "wpe.weight"),
            ("final_norm.scale", "ln_f.weight"),
            ("final_norm.shift", "ln_f.bias"),
            ("out_head.weight", HEAD),
        ],
        block: ("trf_blocks.", '.'),
        inside: &[
            ("norm1.scale", "ln_1.weight"),
            ("norm1.shift", "ln_1.bias"),
            ("att.out_proj.weight", "attn.c_proj.weight"),
            ("att.out_proj.bias", "attn.c_proj.bias"),
            ("norm2.scale", "ln_2.weight"),
            ("norm2.shift", "ln_2.bias"),
            ("ff.layers.0.weight", "mlp.c_fc.weight"),
            ("ff.layers.0.bias", "mlp.c_fc.bias"),
            ("ff.layers.2.weight", "mlp.c_proj.weight"),
            ("ff.layers.2.bias", "mlp.c_proj.bias"),
        ],
        thirds: &[
            ("att.W_query.weight", "attn.c_attn.weight", 0),
            ("att.W_key.weight", "attn.c_attn.weight", 1),
            ("att.W_value.weight", "attn.c_attn.weight", 2),
            ("att.W_query.bias", "attn.c_attn.bias", 0),
            ("att.W_key.bias", "attn.c_attn.bias", 1),
            ("att.W_value.bias", "attn.c_attn.bias", 2),
        ],
        buffers: &["att.mask"],
        orientation: Some(Orientation::Linear),
    },
];

/// llama.cpp's names.
const GGUF: &str = "GGUF";
/// The linear layers of a block, whose weights GPT-2 stores as `Conv1D`, `(in, out)`.
const LINEAR_WEIGHTS: [&str; 7] = [
    ".attn.c_attn.weight",
    ".attn.c_proj.weight",
    ".crossattention.q_attn.weight",
    ".crossattention.c_attn.weight",
    ".crossattention.c_proj.weight",
    ".mlp.c_fc.weight",
    ".mlp.c_proj.weight",
];
/// The prefix of the model's names in a model with a head, which the head's names lack.
pub(crate) const MODEL_PREFIX: &str = "transformer.";
/// The output head.
pub(crate) const HEAD: &str = "lm_head.weight";
/// The token embedding.
pub(crate) const EMBEDDING: &str = "wte.weight";

/// Whether a parameter belongs to a head, which is outside the model: its name does not begin with [`MODEL_PREFIX`].
pub(crate) fn is_of_head(name: &str) -> bool {
    name == HEAD || HeadKind::of_parameter(name).is_some()
}

/// The kind of head that the tensors of a file show, if nothing else tells it.
pub(crate) fn head_shown_by(stored: &[StoredTensor]) -> HeadKind {
    let (_, prefix) = scheme_and_prefix(stored);
    let before_head = prefix.strip_suffix(MODEL_PREFIX).unwrap_or(&prefix);
    let kind = |tensor: &StoredTensor| HeadKind::of_parameter(tensor.name.strip_prefix(before_head)?);
    stored.iter().find_map(kind).unwrap_or_default()
}

/// How a checkpoint stores the weights of linear layers.
/// [`Checkpoint::orientation`](crate::Checkpoint::orientation) says which.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Orientation {
    /// `(in, out)`, as OpenAI's and Hugging Face's GPT-2.
    Conv1D,
    /// `(out, in)`, as `nn.Linear` of PyTorch: minGPT, nanoGPT, llm.c, GGUF.
    Linear,
}

/// The shape in which a checkpoint stores a parameter.
///
/// ```
/// use candle_gpt2::{Gpt2Config, expected_parameters};
/// use candle_gpt2_weights::{Orientation, checkpoint_shape};
///
/// let parameters = expected_parameters(&Gpt2Config::gpt2());
/// let c_attn = parameters.iter().find(|one| one.name == "h.0.attn.c_attn.weight").expect("of every block");
/// assert_eq!(c_attn.shape, [2304, 768]);
/// assert_eq!(checkpoint_shape(c_attn, Orientation::Conv1D), [768, 2304]);
/// ```
pub fn checkpoint_shape(parameter: &Parameter, orientation: Orientation) -> Vec<usize> {
    let mut shape = parameter.shape.clone();
    if orientation == Orientation::Conv1D && is_linear_weight(&parameter.name) {
        shape.reverse();
    }
    shape
}

/// The name of a parameter in a GGUF file.
pub(crate) fn gguf_name(name: &str) -> String {
    let gguf = SCHEMES.iter().find(|scheme| scheme.name == GGUF).unwrap_or(&SCHEMES[0]);
    gguf.file_name("", name)
}

/// Whether a parameter is the weight of a block's linear layer, which `Conv1D` stores as `(in, out)`.
pub(crate) fn is_linear_weight(name: &str) -> bool {
    name.starts_with("h.") && LINEAR_WEIGHTS.iter().any(|suffix| name.ends_with(suffix))
}

/// Where the values of a parameter come from. Numbers are indices of stored tensors.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Origin {
    /// One tensor, of which the first rows are the parameter if more are stored.
    Whole(usize),
    /// Query, key and value, stored one by one.
    Thirds([usize; 3]),
    /// Nothing is stored: a bias of a model without biases.
    Zeros,
}

/// Which stored tensor is which parameter.
#[derive(Debug)]
pub(crate) struct Naming {
    /// Whose names the file uses.
    pub(crate) scheme: &'static str,
    /// The prefix of the names in the file.
    pub(crate) prefix: String,
    /// How linear weights are stored.
    pub(crate) orientation: Orientation,
    /// How the orientation was decided, in words.
    pub(crate) orientation_evidence: String,
    /// The source of each parameter, by the model's name, with the parameter's shape `(out, in)`.
    pub(crate) parameters: HashMap<String, (Origin, Vec<usize>)>,
    /// Indices of causal masks, which are no parameters.
    pub(crate) buffers: Vec<usize>,
    /// Indices of tensors of integers, booleans and other types without weights, which are no parameters.
    pub(crate) skipped: Vec<usize>,
    /// Index of a copy of the token embedding under the head's name.
    pub(crate) tied_head: Option<usize>,
    /// Whether the token embedding is stored under the head's name alone.
    pub(crate) is_embedding_head: bool,
    /// Number of blocks that the names show.
    pub(crate) stored_layers: usize,
    /// Everything that does not fit.
    pub(crate) mismatches: Vec<Mismatch>,
}

/// What a name in a file means.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Meaning {
    Parameter(String),
    Third(String, usize),
    Buffer,
    Unknown,
}

impl Naming {
    /// Compares the tensors of a checkpoint with the parameters of a model.
    pub(crate) fn new(config: &Gpt2Config, source: &Source) -> Self {
        let stored = &source.tensors;
        let (scheme, prefix) = scheme_and_prefix(stored);
        let meanings: Vec<Meaning> =
            stored.iter().map(|tensor| scheme.meaning(config, &prefix, &tensor.name)).collect();
        let by_meaning: HashMap<&Meaning, usize> =
            meanings.iter().enumerate().map(|(index, meaning)| (meaning, index)).collect();
        let find = |meaning: Meaning| by_meaning.get(&meaning).copied();

        let expected = expected_parameters(config);
        let found_weights =
            expected.iter().filter(|parameter| is_linear_weight(&parameter.name)).filter_map(|parameter| {
                let index = find(Meaning::Parameter(parameter.name.clone()))?;
                Some((parameter.shape.as_slice(), stored[index].shape.as_slice()))
            });
        let (orientation, orientation_evidence) = match scheme.orientation {
            Some(orientation) => (orientation, format!("{} files always store them so", scheme.name)),
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
        let mut has_place = vec![false; stored.len()];
        let has_no_third_biases = !meanings
            .iter()
            .any(|meaning| matches!(meaning, Meaning::Third(name, _) if name.ends_with(".bias")));
        for parameter in expected {
            let shape = checkpoint_shape(&parameter, orientation);
            let thirds = [0, 1, 2].map(|third| find(Meaning::Third(parameter.name.clone(), third)));
            let own = find(Meaning::Parameter(parameter.name.clone()));
            // Of two tied matrices either is enough: safetensors' `save_model` keeps one name.
            let is_tied =
                parameter.name == EMBEDDING && config.head.has_language_model() && config.tie_word_embeddings;
            let tied =
                if own.is_none() && is_tied { find(Meaning::Parameter(HEAD.to_owned())) } else { None };
            naming.is_embedding_head |= tied.is_some();
            let from = if let Some(index) = own.or(tied) {
                has_place[index] = true;
                let tensor = &stored[index];
                let is_padded =
                    source.may_be_padded && parameter.name == EMBEDDING && tensor.shape[1..] == shape[1..];
                if !is_padded {
                    naming.mismatches.extend(
                        labels_mismatch(config, &parameter, tensor).or_else(|| mismatch(tensor, shape)),
                    );
                }
                Origin::Whole(index)
            } else if let [Some(query), Some(key), Some(value)] = thirds {
                let mut third_shape = shape;
                third_shape[0] /= 3;
                for index in [query, key, value] {
                    has_place[index] = true;
                    naming.mismatches.extend(mismatch(&stored[index], third_shape.clone()));
                }
                Origin::Thirds([query, key, value])
            } else if parameter.name.ends_with(".bias")
                && (source.is_bias_free
                    || (!scheme.thirds.is_empty()
                        && parameter.name.ends_with("c_attn.bias")
                        && has_no_third_biases))
            {
                Origin::Zeros
            } else {
                let name = scheme.file_name(&prefix, &parameter.name);
                naming.mismatches.push(Mismatch::Missing { name, expected: shape });
                continue;
            };
            naming.parameters.insert(parameter.name, (from, parameter.shape));
        }
        for (index, tensor) in stored.iter().enumerate().filter(|(index, _)| !has_place[*index]) {
            match &meanings[index] {
                Meaning::Parameter(name) if name == HEAD && config.head.has_language_model() => {
                    // The configuration ties the head: the file repeats the embedding under a second name.
                    naming.mismatches.extend(mismatch(tensor, vec![config.vocab_size, config.n_embd]));
                    naming.tied_head = Some(index);
                }
                Meaning::Buffer => naming.buffers.push(index),
                _ if !tensor.dtype.holds_weights() => naming.skipped.push(index),
                _ => {
                    let (name, found) = (tensor.name.clone(), tensor.shape.clone());
                    naming.mismatches.push(Mismatch::Surplus { name, found });
                }
            }
        }
        naming
    }

    /// Whether the stored tensor of parameter `name` must be turned to become `(out, in)`.
    pub(crate) fn is_transposed(&self, name: &str) -> bool {
        self.orientation == Orientation::Conv1D && is_linear_weight(name)
    }

    /// The shape of a parameter's tensor in the file, `(out, in)`.
    fn stored_shape(&self, name: &str, stored: &[StoredTensor]) -> Option<Vec<usize>> {
        let (Origin::Whole(index), _) = self.parameters.get(name)? else { return None };
        let mut shape = stored[*index].shape.clone();
        if self.is_transposed(name) {
            shape.reverse();
        }
        Some(shape)
    }

    /// Sizes of the configuration that the tensors contradict: the key, its value, and the size that they show.
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

    /// The number of parameters that are not stored and taken as zero.
    pub(crate) fn zero_count(&self) -> usize {
        self.parameters.values().filter(|(from, _)| *from == Origin::Zeros).count()
    }
}

impl Scheme {
    /// Number of blocks of which a file has tensors.
    fn layers(&self, prefix: &str, stored: &[StoredTensor]) -> usize {
        let layer = |tensor: &StoredTensor| {
            let (layer, _) =
                tensor.name.strip_prefix(prefix)?.strip_prefix(self.block.0)?.split_once(self.block.1)?;
            layer.parse::<usize>().ok().filter(|_| is_number(layer))
        };
        stored.iter().filter_map(layer).max().map_or(0, |last| last.saturating_add(1))
    }

    /// What a name in a file of this scheme means.
    fn meaning(&self, config: &Gpt2Config, prefix: &str, name: &str) -> Meaning {
        let head_prefix = prefix.strip_suffix(MODEL_PREFIX).unwrap_or(prefix);
        if let Some(head) = name.strip_prefix(head_prefix).filter(|name| is_of_head(name)) {
            return Meaning::Parameter(head.to_owned());
        }
        let Some(name) = name.strip_prefix(prefix) else {
            return Meaning::Unknown;
        };
        if let Some((_, own)) = self.outside.iter().find(|(theirs, _)| *theirs == name) {
            return Meaning::Parameter((*own).to_owned());
        }
        let block = name.strip_prefix(self.block.0).and_then(|rest| rest.split_once(self.block.1));
        let is_block = |layer: &str| layer.parse().is_ok_and(|layer: usize| layer < config.n_layer);
        let Some((layer, name)) = block.filter(|(layer, _)| is_number(layer) && is_block(layer)) else {
            return Meaning::Unknown;
        };
        let own_name = |own: &str| format!("h.{layer}.{own}");
        if let Some((_, own)) = self.inside.iter().find(|(theirs, _)| *theirs == name) {
            Meaning::Parameter(own_name(own))
        } else if let Some((_, own, third)) = self.thirds.iter().find(|(theirs, ..)| *theirs == name) {
            Meaning::Third(own_name(own), *third)
        } else if self.buffers.contains(&name) {
            Meaning::Buffer
        } else {
            Meaning::Unknown
        }
    }

    /// The name a parameter would have in a file of this scheme.
    fn file_name(&self, prefix: &str, own: &str) -> String {
        if is_of_head(own) && self.outside.iter().all(|(theirs, known)| *known != own || theirs == known) {
            return format!("{}{own}", prefix.strip_suffix(MODEL_PREFIX).unwrap_or(prefix));
        }
        if let Some((theirs, _)) = self.outside.iter().find(|(_, known)| *known == own) {
            return format!("{prefix}{theirs}");
        }
        let (layer, own) = own.strip_prefix("h.").and_then(|rest| rest.split_once('.')).unwrap_or(("", own));
        let whole = self.inside.iter().find(|(_, known)| *known == own).map(|(theirs, _)| *theirs);
        let third = self.thirds.iter().find(|(_, known, _)| *known == own).map(|(theirs, ..)| *theirs);
        let (before, after) = self.block;
        format!("{prefix}{before}{layer}{after}{}", whole.or(third).unwrap_or(own))
    }
}

fn is_number(text: &str) -> bool {
    let has_leading_zero = text.len() > 1 && text.starts_with('0');
    !text.is_empty() && !has_leading_zero && text.bytes().all(|byte| byte.is_ascii_digit())
}

/// The scheme one of whose outer parameters is there, and its prefix; the shortest if it is there under several.
fn scheme_and_prefix(stored: &[StoredTensor]) -> (&'static Scheme, String) {
    for scheme in &SCHEMES {
        // The head is outside the model, so it says nothing about the others' prefix.
        for (anchor, _) in scheme.outside.iter().filter(|(anchor, _)| *anchor != HEAD) {
            let prefixes = stored.iter().filter_map(|tensor| tensor.name.strip_suffix(anchor));
            let whole = prefixes.filter(|prefix| prefix.is_empty() || prefix.ends_with(['.', '/']));
            if let Some(prefix) = whole.min_by_key(|prefix| prefix.len()) {
                return (scheme, prefix.to_owned());
            }
        }
    }
    (&SCHEMES[0], String::new())
}

/// Tells the orientation from the weights whose two sizes differ, given as pairs of the model's shape `(out, in)` and
/// the stored one, by majority: a single damaged tensor then shows as one. The square `attn.c_proj` never decides, not
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
    let told = linear + conv1d;
    match linear.cmp(&conv1d) {
        Ordering::Greater => {
            (Orientation::Linear, format!("{linear} of the {told} weights that are not square are (out, in)"))
        }
        Ordering::Less => {
            (Orientation::Conv1D, format!("{conv1d} of the {told} weights that are not square are (in, out)"))
        }
        Ordering::Equal => {
            (Orientation::Conv1D, "all weights are square, so the layout of GPT-2 is assumed".to_owned())
        }
    }
}

/// The difference of a head whose rows are labels, if only their number is another one.
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
