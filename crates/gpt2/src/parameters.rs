//! Parameters of a GPT-2: names, shapes, roles, initial values and counts.

use candle_core::{Result, Tensor};
use candle_gpt2_kernels::{LayerNorm, Linear, ParameterSource};
use candle_nn::Init;
use serde::Serialize;

use crate::{Gpt2Config, HeadKind, ModelError};

/// Role of a [`Parameter`], which determines its layout in checkpoints.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ParameterKind {
    /// Token embedding, or weight of a head: one row per token or label.
    Table,
    /// Position embedding.
    Positions,
    /// Weight of a linear layer in a block; GPT-2 checkpoints store it as `Conv1D`, `(in, out)`.
    Linear,
    /// Weight of a layer norm.
    Norm,
    /// Bias of a layer.
    Bias,
}

impl ParameterKind {
    /// Whether the model multiplies by this parameter, so that it can be packed and quantized.
    pub fn is_multiplied(self) -> bool {
        matches!(self, Self::Table | Self::Linear)
    }
}

/// Parameter of a model, returned by [`expected_parameters`].
#[derive(Debug, Clone)]
pub struct Parameter {
    /// Name as in a Hugging Face checkpoint, without the `transformer.` prefix.
    pub name: String,
    /// Shape in the model: the matrix of a linear layer is `(out, in)`.
    ///
    /// Hugging Face checkpoints of GPT-2 store the matrices of the blocks transposed. A model reads
    /// `(out, in)` from [`ByOutput`](crate::ByOutput) and `(in, out)` from a `VarBuilder`.
    pub shape: Vec<usize>,
    /// Role in the model.
    pub kind: ParameterKind,
    /// Distribution of the initial values.
    ///
    /// Weights are normal with a standard deviation of `initializer_range`. It is divided by
    /// `sqrt(2 n_layer)` for the two projections of each block that write to the residual stream. Biases are
    /// 0, and weights of layer norms are 1.
    ///
    /// Sources: "Language Models are Unsupervised Multitask Learners", section 2.3; transformers'
    /// `GPT2PreTrainedModel._init_weights`.
    pub init: Init,
}

/// Whether weight decay applies to a parameter of this shape: to matrices, not to biases and norms.
///
/// ```
/// use candle_gpt2::decays;
///
/// assert!(decays(&[768, 2304]));
/// assert!(!decays(&[2304]));
/// ```
pub fn decays(shape: &[usize]) -> bool {
    shape.len() >= 2
}

/// Returns every parameter of a model with its head, in the order of computation.
///
/// A tied head is the token embedding and is not listed.
///
/// ```
/// use candle_gpt2::{Gpt2Config, expected_parameters};
///
/// let parameters = expected_parameters(&Gpt2Config::gpt2());
/// assert_eq!(parameters.len(), 148);
/// assert_eq!(parameters[0].name, "wte.weight");
/// assert_eq!(parameters[0].shape, [50257, 768]);
/// ```
pub fn expected_parameters(config: &Gpt2Config) -> Vec<Parameter> {
    let width = config.n_embd;
    let mut list = List::new(config);
    list.add("wte.weight", ParameterKind::Table, &[config.vocab_size, width]);
    list.add("wpe.weight", ParameterKind::Positions, &[config.n_positions, width]);
    let block = block_parameters(config);
    for layer in 0..config.n_layer {
        let named = |one: &Parameter| Parameter { name: format!("h.{layer}.{}", one.name), ..one.clone() };
        list.parameters.extend(block.iter().map(named));
    }
    list.add_norm("ln_f");
    if config.has_untied_head() {
        list.add("lm_head.weight", ParameterKind::Table, &[config.vocab_size, width]);
    }
    list.parameters.extend(head_parameters(config));
    list.parameters
}

/// Returns the parameters of a classification or choice head.
fn head_parameters(config: &Gpt2Config) -> Vec<Parameter> {
    let mut list = List::new(config);
    let (name, rows) = match config.head {
        HeadKind::LanguageModel => return Vec::new(),
        HeadKind::SequenceClassification => ("score", config.num_labels()),
        HeadKind::TokenClassification => ("classifier", config.num_labels()),
        HeadKind::DoubleHeads => ("multiple_choice_head.summary", 1),
    };
    list.add(&format!("{name}.weight"), ParameterKind::Table, &[rows, config.n_embd]);
    if config.head != HeadKind::SequenceClassification {
        list.add(&format!("{name}.bias"), ParameterKind::Bias, &[rows]);
    }
    list.parameters
}

/// Returns the parameters of one block, named relative to the block.
fn block_parameters(config: &Gpt2Config) -> Vec<Parameter> {
    let (width, inner) = (config.n_embd, config.inner_width());
    let mut list = List::new(config);
    list.add_norm("ln_1");
    list.add_linear("attn.c_attn", width, width.saturating_mul(3));
    list.add_linear("attn.c_proj", width, width);
    if config.add_cross_attention {
        list.add_norm("ln_cross_attn");
        list.add_linear("crossattention.q_attn", width, width);
        list.add_linear("crossattention.c_attn", width, width.saturating_mul(2));
        list.add_linear("crossattention.c_proj", width, width);
    }
    list.add_norm("ln_2");
    list.add_linear("mlp.c_fc", width, inner);
    list.add_linear("mlp.c_proj", inner, width);
    list.parameters
}

/// List of parameters that grows layer by layer.
struct List<'a> {
    config: &'a Gpt2Config,
    parameters: Vec<Parameter>,
}

impl<'a> List<'a> {
    fn new(config: &'a Gpt2Config) -> Self {
        Self { config, parameters: Vec::new() }
    }

    fn add(&mut self, name: &str, kind: ParameterKind, shape: &[usize]) {
        let range = self.config.initializer_range;
        let init = match kind {
            ParameterKind::Norm => Init::Const(1.0),
            ParameterKind::Bias => Init::Const(0.0),
            // Two layers of each block write to the residual stream.
            ParameterKind::Linear if name.ends_with("c_proj.weight") => {
                Init::Randn { mean: 0.0, stdev: range / (2.0 * self.config.n_layer as f64).sqrt() }
            }
            _ => Init::Randn { mean: 0.0, stdev: range },
        };
        self.parameters.push(Parameter { name: name.to_owned(), shape: shape.to_vec(), kind, init });
    }

    fn add_norm(&mut self, layer: &str) {
        self.add(&format!("{layer}.weight"), ParameterKind::Norm, &[self.config.n_embd]);
        self.add(&format!("{layer}.bias"), ParameterKind::Bias, &[self.config.n_embd]);
    }

    fn add_linear(&mut self, layer: &str, inputs: usize, outputs: usize) {
        self.add(&format!("{layer}.weight"), ParameterKind::Linear, &[outputs, inputs]);
        self.add(&format!("{layer}.bias"), ParameterKind::Bias, &[outputs]);
    }
}

/// Sources for the head and for all other parameters, which may be stored below `transformer.`.
pub(crate) fn head_and_model<S: ParameterSource>(source: &S) -> [S; 2] {
    source.head_and_model("transformer", "wte.weight")
}

/// Checks that the source has no block after the configured ones.
pub(crate) fn check_block_count(config: &Gpt2Config, source: &impl ParameterSource) -> Result<()> {
    let has_block = |layer: usize| source.below("h").below(layer).contains("ln_1.weight");
    // Sources of random values have a tensor for every name.
    if has_block(config.n_layer) && !has_block(usize::MAX) {
        return Err(ModelError::MoreBlocks { n_layer: config.n_layer }.into());
    }
    Ok(())
}

/// Source of layers, with shapes and initial values from a list of parameters.
pub(crate) struct Layers<S> {
    parameters: Vec<Parameter>,
    epsilon: f64,
    source: S,
}

impl<S: ParameterSource> Layers<S> {
    /// Layers of a block, named relative to the block.
    pub(crate) fn of_block(config: &Gpt2Config, source: S) -> Self {
        Self { parameters: block_parameters(config), epsilon: config.layer_norm_epsilon, source }
    }

    /// Layers outside the blocks.
    pub(crate) fn outside_blocks(config: &Gpt2Config, source: S) -> Self {
        let without_blocks = Gpt2Config { n_layer: 0, ..config.clone() };
        let parameters = expected_parameters(&without_blocks);
        Self { parameters, epsilon: config.layer_norm_epsilon, source }
    }

    /// Finds the parameter `part` of a layer in the list.
    fn find(&self, layer: &str, part: &str) -> Option<&Parameter> {
        let is_wanted =
            |name: &str| name.strip_prefix(layer).and_then(|rest| rest.strip_prefix('.')) == Some(part);
        self.parameters.iter().find(|parameter| is_wanted(&parameter.name))
    }

    fn expect(&self, layer: &str, part: &str) -> Result<&Parameter> {
        let missing = || candle_core::Error::Msg(format!("this model has no parameter `{layer}.{part}`"));
        self.find(layer, part).ok_or_else(missing)
    }

    /// Loads the tensor `part` of a layer.
    pub(crate) fn tensor(&self, layer: &str, part: &str) -> Result<Tensor> {
        let Parameter { shape, init, .. } = self.expect(layer, part)?;
        self.source.below(layer).parameter(shape.as_slice(), part, *init)
    }

    /// Loads a layer norm.
    pub(crate) fn norm(&self, layer: &str) -> Result<LayerNorm> {
        Ok(LayerNorm::new(self.tensor(layer, "weight")?, Some(self.tensor(layer, "bias")?), self.epsilon))
    }

    /// Loads a linear layer, with a bias if the list has one.
    pub(crate) fn linear(&self, layer: &str) -> Result<Linear> {
        let weight = self.expect(layer, "weight")?;
        let [outputs, inputs] = *weight.shape.as_slice() else {
            candle_core::bail!("`{}` is not a matrix", weight.name)
        };
        let source = self.source.below(layer);
        let matrix = match weight.kind {
            ParameterKind::Linear => source.conv1d(outputs, inputs, "weight", weight.init)?,
            _ => source.table(outputs, inputs, "weight", weight.init)?,
        };
        let bias = self.find(layer, "bias").map(|_| self.tensor(layer, "bias")).transpose()?;
        Linear::from_matrix(matrix, bias)
    }
}

/// Parameter counts of a model, by common definitions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct ParameterCounts {
    /// Distinct parameters, as in transformers' `num_parameters()`; a tied head counts once.
    pub unique: usize,
    /// Distinct parameters, with a head over the vocabulary counted separately even if it is tied.
    pub with_untied_head: usize,
    /// Token and position embedding.
    pub embedding: usize,
    /// All blocks.
    pub blocks: usize,
    /// One block.
    pub per_block: usize,
    /// Attention of one block, with biases and output projection, without the norm.
    pub attention_per_block: usize,
    /// MLP of one block, with biases, without the norm.
    pub mlp_per_block: usize,
    /// Cross-attention of one block, with biases, without the norm.
    #[serde(skip_serializing_if = "is_zero")]
    pub cross_attention_per_block: usize,
    /// Classification or choice head, with biases.
    #[serde(skip_serializing_if = "is_zero")]
    pub head: usize,
}

fn is_zero(count: &usize) -> bool {
    *count == 0
}

impl ParameterCounts {
    /// Counts the parameters of a model with this configuration.
    ///
    /// A count that exceeds this machine's range is `usize::MAX`.
    pub fn new(config: &Gpt2Config) -> Self {
        let sum = |counts: &[usize]| counts.iter().fold(0, |sum: usize, count| sum.saturating_add(*count));
        let product =
            |sizes: &[usize]| sizes.iter().fold(1, |product: usize, size| product.saturating_mul(*size));
        let of = |parameters: Vec<Parameter>, part: &str| {
            let counted = parameters.into_iter().filter(|parameter| parameter.name.starts_with(part));
            sum(&counted.map(|parameter| product(&parameter.shape)).collect::<Vec<_>>())
        };
        let of_block = |part: &str| of(block_parameters(config), part);
        let Gpt2Config { vocab_size, n_positions, n_embd, n_layer, .. } = *config;
        let per_block = of_block("");
        let blocks = product(&[per_block, n_layer]);
        let vocabulary = product(&[vocab_size, n_embd]);
        let embedding = sum(&[vocabulary, product(&[n_positions, n_embd])]);
        let final_norm = product(&[2, n_embd]);
        let head = of(head_parameters(config), "");
        let tied = sum(&[embedding, blocks, final_norm, head]);
        let with_untied_head = if config.head.has_language_model() { sum(&[tied, vocabulary]) } else { tied };
        Self {
            unique: if config.has_untied_head() { with_untied_head } else { tied },
            with_untied_head,
            embedding,
            blocks,
            per_block,
            attention_per_block: of_block("attn."),
            mlp_per_block: of_block("mlp."),
            cross_attention_per_block: of_block("crossattention."),
            head,
        }
    }
}

/// One way to count a model's parameters, returned by [`parameter_ledger`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct LedgerRow {
    /// Short name of the count.
    pub name: &'static str,
    /// Count for this model.
    pub count: usize,
    /// Source of this count, and its parts.
    pub definition: &'static str,
}

/// Returns the published ways to count a model's parameters, from smallest to largest count.
///
/// Each count is correct by its own definition. For the 124M model they are 85.06, 123.65, 124.41, 124.44,
/// 124.48, 163.01 and 163.04 million. The paper's 117M matches none of them (OpenAI: "wrong due to an
/// error"). A classifier has fewer counts, because it has no head over the vocabulary that could be tied.
///
/// ```
/// use candle_gpt2::{Gpt2Config, parameter_ledger};
///
/// let ledger = parameter_ledger(&Gpt2Config::gpt2());
/// let count = |name| ledger.iter().find(|row| row.name == name).expect("a row with this name").count;
/// assert_eq!((count("tied"), count("untied")), (124_439_808, 163_037_184));
/// ```
pub fn parameter_ledger(config: &Gpt2Config) -> Vec<LedgerRow> {
    /// Multiple to which nanoGPT pads the vocabulary.
    const PADDING: usize = 64;
    let ParameterCounts { with_untied_head: untied, blocks, head, .. } = ParameterCounts::new(config);
    let width = config.n_embd;
    let row = |name, definition, count| LedgerRow { name, count, definition };
    let blocks = row(
        "blocks",
        "blocks and final norm, no embeddings: the \"85M\" of the smallest model",
        blocks + 2 * width,
    );
    if !config.head.has_language_model() {
        return vec![
            blocks,
            row("transformer", "embeddings, blocks and final norm, without the head", untied - head),
            row("with the head", "every distinct parameter: num_parameters() of the class", untied),
        ];
    }
    let tied = untied - config.vocab_size * width;
    let attentions = if config.add_cross_attention { 2 } else { 1 };
    let qkv_biases = config.n_layer * attentions * 3 * width;
    let padding_rows = config.vocab_size.next_multiple_of(PADDING) - config.vocab_size;
    vec![
        blocks,
        row(
            "without positions",
            "tied, without position embedding: the count that nanoGPT prints",
            tied - config.n_positions * width,
        ),
        row(
            "book, tied",
            "tied, without query, key and value biases: the book's chapter 4 after tying",
            tied - qkv_biases,
        ),
        row("tied", "every distinct parameter, head tied: the published checkpoint, num_parameters()", tied),
        row(
            "padded",
            "tied, vocabulary padded to a multiple of 64: nanoGPT's own models",
            tied + padding_rows * width,
        ),
        row(
            "book, untied",
            "untied head, without query, key and value biases: the book's chapter 4",
            untied - qkv_biases,
        ),
        row("untied", "untied head, or the tied one counted twice: transformer + lm_head", untied),
    ]
}

/// Returns the size that the GPT-2 paper gives for this model, if the model is a published one.
///
/// OpenAI's README says that these sizes "were wrong due to an error".
///
/// ```
/// use candle_gpt2::{Gpt2Config, paper_size};
///
/// assert_eq!(paper_size(&Gpt2Config::gpt2()), Some("117M"));
/// assert_eq!(paper_size(&Gpt2Config { n_layer: 13, ..Gpt2Config::gpt2() }), None);
/// ```
pub fn paper_size(config: &Gpt2Config) -> Option<&'static str> {
    let sizes = [(12, 768, "117M"), (24, 1024, "345M"), (36, 1280, "762M"), (48, 1600, "1542M")];
    let (.., size) =
        sizes.into_iter().find(|(layers, width, _)| (*layers, *width) == (config.n_layer, config.n_embd))?;
    Some(size)
}

impl Gpt2Config {
    /// Whether this machine can count all parameters and address the largest tensor in f32.
    pub(crate) fn is_addressable(&self) -> bool {
        let widths =
            [self.inner_width(), 3 * self.n_embd, self.vocab_size, self.n_positions, self.id2label.len()];
        let widest = widths.into_iter().max().unwrap_or(0);
        let largest = widest.checked_mul(self.n_embd).and_then(|elements| elements.checked_mul(4));
        let is_countable = ParameterCounts::new(self).with_untied_head < usize::MAX;
        is_countable && largest.is_some_and(|bytes| isize::try_from(bytes).is_ok())
    }
}
