//! Every parameter of a GPT-2: its name, its shape, and what they add up to.

use candle_core::Result;
use candle_gpt2_kernels::{Linear, ParameterSource};
use serde::Serialize;

use crate::{Gpt2Config, HeadKind};

/// A parameter that a model needs. [`expected_parameters`] lists those of a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Parameter {
    /// Name as in a Hugging Face checkpoint, without the `transformer.` prefix.
    pub name: String,
    /// Shape as the model holds it: matrices of linear layers are `(out, in)`. GPT-2 checkpoints of Hugging Face store those of
    /// the blocks the other way round. A model takes these from [`ByOutput`](crate::ByOutput), and those from a `VarBuilder`.
    pub shape: Vec<usize>,
}

/// Every parameter of a model with its head, in the order of computation. A tied head is the token embedding and not listed.
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
    let mut parameters = Vec::new();
    let mut add = |name: String, shape: &[usize]| parameters.push(Parameter { name, shape: shape.to_vec() });
    add("wte.weight".into(), &[config.vocab_size, width]);
    add("wpe.weight".into(), &[config.n_positions, width]);
    for layer in 0..config.n_layer {
        for (name, shape) in block_parameters(config) {
            add(format!("h.{layer}.{name}"), &shape);
        }
    }
    add("ln_f.weight".into(), &[width]);
    add("ln_f.bias".into(), &[width]);
    if config.has_untied_head() {
        add("lm_head.weight".into(), &[config.vocab_size, width]);
    }
    for (name, shape) in head_parameters(config) {
        add(name.into(), &shape);
    }
    parameters
}

/// The parameters of a head that is not over the vocabulary.
fn head_parameters(config: &Gpt2Config) -> Vec<(&'static str, Vec<usize>)> {
    let (width, labels) = (config.n_embd, config.num_labels());
    match config.head {
        HeadKind::LanguageModel => Vec::new(),
        HeadKind::SequenceClassification => vec![("score.weight", vec![labels, width])],
        HeadKind::TokenClassification => {
            vec![("classifier.weight", vec![labels, width]), ("classifier.bias", vec![labels])]
        }
        HeadKind::DoubleHeads => vec![
            ("multiple_choice_head.summary.weight", vec![1, width]),
            ("multiple_choice_head.summary.bias", vec![1]),
        ],
    }
}

/// The parameters of one block: names in the block, and shapes.
fn block_parameters(config: &Gpt2Config) -> Vec<(&'static str, Vec<usize>)> {
    let (width, inner) = (config.n_embd, config.inner_width());
    let (halves, thirds) = (width.saturating_mul(2), width.saturating_mul(3));
    let mut parameters = vec![
        ("ln_1.weight", vec![width]),
        ("ln_1.bias", vec![width]),
        ("attn.c_attn.weight", vec![thirds, width]),
        ("attn.c_attn.bias", vec![thirds]),
        ("attn.c_proj.weight", vec![width, width]),
        ("attn.c_proj.bias", vec![width]),
    ];
    if config.add_cross_attention {
        parameters.extend([
            ("ln_cross_attn.weight", vec![width]),
            ("ln_cross_attn.bias", vec![width]),
            ("crossattention.q_attn.weight", vec![width, width]),
            ("crossattention.q_attn.bias", vec![width]),
            ("crossattention.c_attn.weight", vec![halves, width]),
            ("crossattention.c_attn.bias", vec![halves]),
            ("crossattention.c_proj.weight", vec![width, width]),
            ("crossattention.c_proj.bias", vec![width]),
        ]);
    }
    parameters.extend([
        ("ln_2.weight", vec![width]),
        ("ln_2.bias", vec![width]),
        ("mlp.c_fc.weight", vec![inner, width]),
        ("mlp.c_fc.bias", vec![inner]),
        ("mlp.c_proj.weight", vec![width, inner]),
        ("mlp.c_proj.bias", vec![width]),
    ]);
    parameters
}

/// A layer from the width of the model without a bias: the token embedding, the head over it, and that of a classifier.
pub(crate) fn table(config: &Gpt2Config, rows: usize, vb: impl ParameterSource) -> Result<Linear> {
    Linear::from_matrix(vb.matrix(rows, config.n_embd, "weight", config.initializer_range)?, None)
}

/// How many parameters a model has, by the definitions in use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct ParameterCounts {
    /// Distinct values: what transformers' `num_parameters()` gives. A tied head counts once.
    pub unique: usize,
    /// The same with a head over the vocabulary counted by itself, tied or not.
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
    /// The head that is not over the vocabulary, with biases.
    #[serde(skip_serializing_if = "is_zero")]
    pub head: usize,
}

fn is_zero(count: &usize) -> bool {
    *count == 0
}

impl ParameterCounts {
    /// The counts of a model with this configuration; a count that is too large for this machine is `usize::MAX`.
    pub fn new(config: &Gpt2Config) -> Self {
        let sum = |counts: &[usize]| counts.iter().fold(0, |sum: usize, count| sum.saturating_add(*count));
        let product =
            |sizes: &[usize]| sizes.iter().fold(1, |product: usize, size| product.saturating_mul(*size));
        let of = |parameters: Vec<(&str, Vec<usize>)>, part: &str| {
            let counted = parameters.into_iter().filter(|(name, _)| name.starts_with(part));
            sum(&counted.map(|(_, shape)| product(&shape)).collect::<Vec<_>>())
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

/// One way of counting a model's parameters. [`parameter_ledger`] gives them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct LedgerRow {
    /// Short name of the count.
    pub name: &'static str,
    /// The count for this model.
    pub count: usize,
    /// The source of this count, and what it includes.
    pub definition: &'static str,
}

/// The counts in circulation for one and the same model, from the smallest to the largest: each is right by its own
/// definition. For the 124M model they are 85.06, 123.65, 124.41, 124.44, 124.48, 163.01 and 163.04 million; the paper's
/// 117M follows from none (OpenAI: "wrong due to an error"). A classifier has fewer: it has no head over the vocabulary that
/// could be tied.
///
/// ```
/// use candle_gpt2::{Gpt2Config, parameter_ledger};
///
/// let ledger = parameter_ledger(&Gpt2Config::gpt2());
/// let count = |name| ledger.iter().find(|row| row.name == name).expect("a row of this name").count;
/// assert_eq!((count("tied"), count("untied")), (124_439_808, 163_037_184));
/// ```
pub fn parameter_ledger(config: &Gpt2Config) -> Vec<LedgerRow> {
    /// nanoGPT pads the vocabulary to a multiple of this.
    const PADDING: usize = 64;
    let ParameterCounts { with_untied_head: untied, blocks, head, .. } = ParameterCounts::new(config);
    let width = config.n_embd;
    let row = |name, definition, count| LedgerRow { name, count, definition };
    let blocks = row(
        "blocks",
        "blocks and final norm, no embeddings: what \"85M\" means for the smallest",
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
            "tied, without position embedding: what nanoGPT prints",
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

/// The size in the GPT-2 paper's name of a published model, if the configuration is one of them; OpenAI's README
/// says that these "were wrong due to an error".
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
    /// Whether this machine can count all parameters, and address the largest of them in f32.
    pub(crate) fn is_addressable(&self) -> bool {
        let widths =
            [self.inner_width(), 3 * self.n_embd, self.vocab_size, self.n_positions, self.id2label.len()];
        let widest = widths.into_iter().max().unwrap_or(0);
        let largest = widest.checked_mul(self.n_embd).and_then(|elements| elements.checked_mul(4));
        let is_countable = ParameterCounts::new(self).with_untied_head < usize::MAX;
        is_countable && largest.is_some_and(|bytes| isize::try_from(bytes).is_ok())
    }
}
