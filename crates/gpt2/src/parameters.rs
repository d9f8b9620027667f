//! Every parameter of a GPT-2: its name, its shape, and what they add up to.

use serde::Serialize;

use crate::Gpt2Config;

/// A parameter that a model needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Parameter {
    /// Name as in a Hugging Face checkpoint, without the `transformer.` prefix.
    pub name: String,
    /// Shape as the model takes it: matrices of linear layers are `(out, in)`. GPT-2 checkpoints of Hugging Face store
    /// them the other way round; `gpt2-weights` knows which.
    pub shape: Vec<usize>,
}

/// Every parameter of a model, in the order of computation. A tied head is the token embedding and not listed.
pub fn expected_parameters(config: &Gpt2Config) -> Vec<Parameter> {
    let (width, inner) = (config.n_embd, config.inner_width());
    let mut parameters = Vec::with_capacity(12 * config.n_layer + 5);
    let mut add = |name: String, shape: &[usize]| parameters.push(Parameter { name, shape: shape.to_vec() });
    add("wte.weight".into(), &[config.vocab_size, width]);
    add("wpe.weight".into(), &[config.n_positions, width]);
    for layer in 0..config.n_layer {
        for (name, shape) in [
            ("ln_1.weight", &[width][..]),
            ("ln_1.bias", &[width]),
            ("attn.c_attn.weight", &[3 * width, width]),
            ("attn.c_attn.bias", &[3 * width]),
            ("attn.c_proj.weight", &[width, width]),
            ("attn.c_proj.bias", &[width]),
            ("ln_2.weight", &[width]),
            ("ln_2.bias", &[width]),
            ("mlp.c_fc.weight", &[inner, width]),
            ("mlp.c_fc.bias", &[inner]),
            ("mlp.c_proj.weight", &[width, inner]),
            ("mlp.c_proj.bias", &[width]),
        ] {
            add(format!("h.{layer}.{name}"), shape);
        }
    }
    add("ln_f.weight".into(), &[width]);
    add("ln_f.bias".into(), &[width]);
    if !config.tie_word_embeddings {
        add("lm_head.weight".into(), &[config.vocab_size, width]);
    }
    parameters
}

/// How many parameters a model has, by the definitions in use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct ParameterCounts {
    /// Distinct values: what transformers' `num_parameters()` gives. A tied head counts once.
    pub unique: usize,
    /// The same with the head counted by itself, tied or not.
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
}

impl ParameterCounts {
    /// The counts of a model with this configuration.
    pub fn new(config: &Gpt2Config) -> Self {
        let parameters = expected_parameters(config);
        let sum = |belongs: &dyn Fn(&str) -> bool| -> usize {
            let counted = parameters.iter().filter(|parameter| belongs(&parameter.name));
            counted.map(|parameter| parameter.shape.iter().product::<usize>()).sum()
        };
        let unique = sum(&|_| true);
        let head = if config.tie_word_embeddings { config.vocab_size * config.n_embd } else { 0 };
        Self {
            unique,
            with_untied_head: unique + head,
            embedding: sum(&|name| name.starts_with("wte.") || name.starts_with("wpe.")),
            blocks: sum(&|name| name.starts_with("h.")),
            per_block: sum(&|name| name.starts_with("h.0.")),
            attention_per_block: sum(&|name| name.starts_with("h.0.attn.")),
            mlp_per_block: sum(&|name| name.starts_with("h.0.mlp.")),
        }
    }
}

/// One way of counting a model's parameters.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct LedgerRow {
    /// Short name of the count.
    pub name: &'static str,
    /// The count for this model.
    pub count: usize,
    /// Who counts so, and what.
    pub definition: &'static str,
}

/// The counts in circulation for one and the same model, from the smallest to the largest: each is right by its own
/// definition. For the 124M model they are 85.06, 123.65, 124.41, 124.44, 124.48, 163.01 and 163.04 million; the paper's
/// 117M follows from none (OpenAI: "wrong due to an error").
pub fn parameter_ledger(config: &Gpt2Config) -> Vec<LedgerRow> {
    /// nanoGPT pads the vocabulary to a multiple of this.
    const PADDING: usize = 64;
    let ParameterCounts { with_untied_head: untied, blocks, .. } = ParameterCounts::new(config);
    let width = config.n_embd;
    let tied = untied - config.vocab_size * width;
    let qkv_biases = config.n_layer * 3 * width;
    let padding_rows = config.vocab_size.next_multiple_of(PADDING) - config.vocab_size;
    let row = |name, definition, count| LedgerRow { name, count, definition };
    vec![
        row(
            "blocks",
            "blocks and final norm, no embeddings: what \"85M\" means for the smallest",
            blocks + 2 * width,
        ),
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
            "a head of its own, without query, key and value biases: the book's chapter 4",
            untied - qkv_biases,
        ),
        row("untied", "a head of its own, or the tied one counted twice: transformer + lm_head", untied),
    ]
}

/// The size in the GPT-2 paper's name of a published model, where the configuration is one of them; OpenAI's README
/// says that these "were wrong due to an error".
pub fn paper_size(config: &Gpt2Config) -> Option<&'static str> {
    let sizes = [(12, 768, "117M"), (24, 1024, "345M"), (36, 1280, "762M"), (48, 1600, "1542M")];
    let (.., size) =
        sizes.into_iter().find(|(layers, width, _)| (*layers, *width) == (config.n_layer, config.n_embd))?;
    Some(size)
}
