//! How checkpoints name and turn the parameters of a GPT-2: the one place that knows prefixes, `Conv1D`, buffers and
//! tied heads.
//!
//! The model's own names are those of Hugging Face without the `transformer.` prefix, its matrices `(out, in)`.

use std::collections::HashMap;

use gpt2::{Gpt2Config, Parameter, expected_parameters};

use crate::Mismatch;
use crate::stored::StoredTensor;

/// The linear layers of a block: GPT-2 stores their weights as `Conv1D`, `(in, out)`.
const CONV1D_SUFFIXES: [&str; 4] = [
    "attn.c_attn.weight",
    "attn.c_proj.weight",
    "mlp.c_fc.weight",
    "mlp.c_proj.weight",
];
/// What old checkpoints carry inside a block besides parameters: the causal mask and the value it was filled with.
const BUFFER_SUFFIXES: [&str; 2] = ["attn.bias", "attn.masked_bias"];
/// Parameters outside the blocks; what stands in front of one is the prefix of all. The first that is there decides.
const ANCHORS: [&str; 3] = ["wte.weight", "wpe.weight", "ln_f.weight"];
/// The name of the model inside a model with a head, as part of the prefix.
const MODEL_PREFIX: &str = "transformer.";
/// The output head, which stands beside the model and not inside it.
const HEAD: &str = "lm_head.weight";

/// How a checkpoint stores the weights of linear layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Orientation {
    /// `(in, out)`, as OpenAI's and Hugging Face's GPT-2.
    Conv1D,
    /// `(out, in)`, as `nn.Linear` of PyTorch: minGPT, nanoGPT.
    Linear,
}

/// The shape in which a checkpoint stores a parameter.
pub fn checkpoint_shape(parameter: &Parameter, orientation: Orientation) -> Vec<usize> {
    let mut shape = parameter.shape.clone();
    if orientation == Orientation::Conv1D && is_linear_weight(&parameter.name) {
        shape.reverse();
    }
    shape
}

fn is_linear_weight(name: &str) -> bool {
    block_suffix(name).is_some_and(|suffix| CONV1D_SUFFIXES.contains(&suffix))
}

/// What follows `h.{i}.` in a name.
fn block_suffix(name: &str) -> Option<&str> {
    let (layer, suffix) = name.strip_prefix("h.")?.split_once('.')?;
    layer.bytes().all(|byte| byte.is_ascii_digit()).then_some(suffix)
}

/// Which stored tensor is which parameter.
#[derive(Debug)]
pub(crate) struct Naming {
    /// What stands in front of the names in the file.
    pub(crate) prefix: String,
    /// How linear weights are stored.
    pub(crate) orientation: Orientation,
    /// Index of the stored tensor of each parameter, by the model's name.
    pub(crate) parameters: HashMap<String, usize>,
    /// Indices of causal masks, which are no parameters.
    pub(crate) buffers: Vec<usize>,
    /// Index of a copy of the token embedding under the head's name.
    pub(crate) tied_head: Option<usize>,
    /// Everything that does not fit.
    pub(crate) mismatches: Vec<Mismatch>,
}

impl Naming {
    /// Compares the tensors of a file with the parameters of a model.
    pub(crate) fn new(config: &Gpt2Config, stored: &[StoredTensor]) -> Self {
        let prefix = prefix(stored);
        let head_prefix = prefix.strip_suffix(MODEL_PREFIX).unwrap_or(&prefix).to_owned();
        let file_name = |name: &str| {
            if name == HEAD {
                format!("{head_prefix}{name}")
            } else {
                format!("{prefix}{name}")
            }
        };
        let own_name = |tensor: &StoredTensor| {
            let name = tensor.name.as_str();
            if name.strip_prefix(&head_prefix) == Some(HEAD) {
                return Some(HEAD.to_owned());
            }
            name.strip_prefix(&prefix).map(str::to_owned)
        };
        let by_name: HashMap<String, usize> = stored
            .iter()
            .enumerate()
            .filter_map(|(index, tensor)| Some((own_name(tensor)?, index)))
            .collect();

        let expected = expected_parameters(config);
        let orientation = orientation(&expected, &by_name, stored);
        let mut naming = Self {
            prefix: prefix.clone(),
            orientation,
            parameters: HashMap::new(),
            buffers: Vec::new(),
            tied_head: None,
            mismatches: Vec::new(),
        };
        let mut has_place = vec![false; stored.len()];
        for parameter in expected {
            let shape = checkpoint_shape(&parameter, orientation);
            match by_name.get(&parameter.name) {
                None => {
                    let name = file_name(&parameter.name);
                    naming.mismatches.push(Mismatch::Missing {
                        name,
                        expected: shape,
                    });
                }
                Some(index) => {
                    has_place[*index] = true;
                    naming.mismatches.extend(mismatch(&stored[*index], shape));
                    naming.parameters.insert(parameter.name, *index);
                }
            }
        }
        for (index, tensor) in stored.iter().enumerate().filter(|(index, _)| !has_place[*index]) {
            let name = own_name(tensor).unwrap_or_default();
            if name == HEAD {
                // The configuration ties the head: the file repeats the embedding under a second name.
                let shape = vec![config.vocab_size, config.n_embd];
                naming.mismatches.extend(mismatch(tensor, shape));
                naming.tied_head = Some(index);
            } else if block_suffix(&name).is_some_and(|suffix| BUFFER_SUFFIXES.contains(&suffix)) {
                naming.buffers.push(index);
            } else {
                let (name, found) = (tensor.name.clone(), tensor.shape.clone());
                naming.mismatches.push(Mismatch::Surplus { name, found });
            }
        }
        naming
    }

    /// Whether the stored tensor of parameter `name` must be turned to become `(out, in)`.
    pub(crate) fn is_transposed(&self, name: &str) -> bool {
        self.orientation == Orientation::Conv1D && is_linear_weight(name)
    }
}

/// What stands in front of the names; the shortest where an anchor is there under several.
fn prefix(stored: &[StoredTensor]) -> String {
    let before = |anchor: &str| {
        let prefixes = stored
            .iter()
            .filter_map(|tensor| tensor.name.strip_suffix(anchor));
        let whole = prefixes.filter(|prefix| prefix.is_empty() || prefix.ends_with('.'));
        whole.min_by_key(|prefix| prefix.len()).map(str::to_owned)
    };
    ANCHORS.into_iter().find_map(before).unwrap_or_default()
}

/// Tells the orientation from the weights whose two sizes differ: `(out, in)` only where every one of them says so.
/// The square `attn.c_proj` never decides, not even about itself.
fn orientation(
    expected: &[Parameter],
    by_name: &HashMap<String, usize>,
    stored: &[StoredTensor],
) -> Orientation {
    let mut linear = 0;
    for parameter in expected
        .iter()
        .filter(|parameter| is_linear_weight(&parameter.name))
    {
        let Some(found) = by_name
            .get(&parameter.name)
            .map(|index| stored[*index].shape.as_slice())
        else {
            continue;
        };
        match found {
            [first, second] if first == second => {}
            found if found == parameter.shape => linear += 1,
            _ => return Orientation::Conv1D,
        }
    }
    if linear > 0 {
        Orientation::Linear
    } else {
        Orientation::Conv1D
    }
}

fn mismatch(tensor: &StoredTensor, expected: Vec<usize>) -> Option<Mismatch> {
    let name = tensor.name.clone();
    if tensor.shape != expected {
        return Some(Mismatch::Shape {
            name,
            expected,
            found: tensor.shape.clone(),
        });
    }
    tensor.dtype.candle().is_none().then(|| Mismatch::DType {
        name,
        found: tensor.dtype.to_string(),
    })
}
