//! `gpt2 look`: shows what a model computes inside.
//!
//! The library defines the options of each view. This module adds the examples.

mod data;
pub(crate) mod view;

use std::process::ExitCode;

use anyhow::Result;
use candle_gpt2_engine::HubOptions;
use candle_gpt2_look::{
    Ablate, Attention, Attribute, CircuitSearch, Estimate, Features, Graph, HeadKinds, Lens, Neurons, Patch,
    PathPatching, Saliency,
};
use clap::{Args, Subcommand};

use crate::input::InputArguments;
use data::DataArguments;
use view::{LookArguments, NoInput, OptionalInput, TextsArguments};

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  gpt2 look attention \"When Mia and Tom went to the park, Tom gave a ball to\" --html attention.html
  gpt2 look lens \"The capital of France is\" --model gpt2 --bos
  gpt2 look heads --model gpt2
  gpt2 look attribute \"The capital of France is\" --model gpt2 --answer \" Paris\" --against \" London\" --unit head

Without --model, the built-in model is used. Every view is available as a table, one JSON object (--json), \
a page that works offline (--html FILE) or a figure for a paper (--svg FILE).")]
pub(crate) struct LookCommandArguments {
    /// View to compute.
    #[command(subcommand)]
    pub(crate) look: Look,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Look {
    /// Show where each head attends: the attention pattern of every head
    #[command(after_help = "\
Examples:
  gpt2 look attention \"The dog chased the cat because it\" --html attention.html
  gpt2 look attention --ids 464,3290 --model gpt2 --layers 4-6 --json
  gpt2 look attention \"The dog\" --model gpt2 --heads 4.11,5.5 --svg heads.svg --columns 1

Values are the weights of query tokens (rows) over key tokens (columns); a query has none for the keys after it.")]
    Attention(LookArguments<InputArguments, Attention>),
    /// Show what each layer would predict if it were the last (logit lens, tuned lens)
    #[command(after_help = "\
Examples:
  gpt2 look lens \"The capital of France is\" --model gpt2
  gpt2 look lens \"The capital of France is\" --model gpt2 --watch \" Paris\" --show rank --html lens.html
  gpt2 look lens \"The capital of France is\" --model gpt2 --tuned params.pt --json

The residual stream before each block, and after the last, goes through the final norm and the output head. Logarithms are natural.")]
    Lens(LookArguments<InputArguments, Lens>),
    /// Show what each part of the model adds to a prediction (direct logit attribution)
    #[command(after_help = "\
Examples:
  gpt2 look attribute \"The capital of France is\" --model gpt2 --answer \" Paris\" --against \" London\"
  gpt2 look attribute \"The capital of France is\" --model gpt2 --answer \" Paris\" --unit head --svg heads.svg
  gpt2 look attribute \"The capital of France is\" --model gpt2 --unit neuron --top 30 --json

Each part of the residual stream is divided by the final norm's scale in the whole run. The parts and the bias add up to the \
difference of the two logits, or, without --against, to the answer's logit minus the mean of all; with --unit layer they do not.")]
    Attribute(LookArguments<InputArguments, Attribute>),
    /// Show which heads attend to the previous token, to an earlier copy of the token, or to what followed
    /// it (induction)
    #[command(after_help = "\
Examples:
  gpt2 look heads --model gpt2 --length 100 --rows 2 --seed 0 --from 100 --below 20000
  gpt2 look heads \"the cat sat, and the cat sat\" --model gpt2
  gpt2 look heads --svg heads.svg

Without a text (standard input is not read), the model reads rows of random tokens, each row repeated once. \
A head's score is the mean attention from a token of the second half to the token before it (previous), to \
the same token in the first half (duplicate), or to the one after that (induction); for previous, the mean \
is over all tokens. The random tokens match torch's for the same seed. With a text, the score is the share \
of a head's attention that goes to such positions.")]
    Heads(LookArguments<OptionalInput, HeadKinds>),
    /// Show how a prediction changes without a head: each head in turn, or chosen ones together
    #[command(after_help = "\
Examples:
  gpt2 look ablate \"When Mia and Tom went to the park, Tom gave a ball to\" --answer \" Mia\" --against \" Tom\"
  gpt2 look ablate \"The capital of France is\" --model gpt2 --heads 9.9,9.6 --with mean:prompts.txt
  gpt2 look ablate \"The dog\" --svg ablation.svg

Without --heads, each head is ablated in turn, and the table shows how the metric changes. raw-zero sets a \
head's output (z) to zero; transformer-lens-zero to what is zero in TransformerLens, which folds the value \
biases into another bias.")]
    Ablate(LookArguments<InputArguments, Ablate>),
    /// Show which clean activations restore the prediction in another text (activation patching)
    #[command(after_help = "\
Examples:
  gpt2 look patch --clean \"When Mia and Tom went to the park, Tom gave a ball to\" \\
     --corrupt \"When Mia and Tom went to the park, Mia gave a ball to\" --answer \" Mia\" --against \" Tom\"
  gpt2 look patch --model gpt2 --clean … --corrupt … --answer \" John\" --site z --by head --svg heads.svg

Values are scaled so that 0 is the corrupted text's metric and 1 the clean one's.")]
    Patch(LookArguments<TextsArguments, Patch>),
    /// Show which later heads a head's output reaches, and what it changes there (path patching)
    #[command(after_help = "\
Examples:
  gpt2 look path --model gpt2 --clean \"…\" --corrupt \"…\" --answer \" John\" --against \" Mary\" --to final
  gpt2 look path --model gpt2 --clean \"…\" --corrupt \"…\" --answer \" John\" --from 8.6 --to 9.9.q

The clean text is run, but the receiver gets the output that a sending head has in the corrupted text. All \
other heads keep their clean output; norms and MLPs are recomputed. Without --from, every head before the \
receiver is tried.")]
    Path(LookArguments<TextsArguments, PathPatching>),
    /// Approximate `patch` with a single gradient (attribution patching)
    #[command(after_help = "\
Examples:
  gpt2 look estimate --model gpt2 --clean \"…\" --corrupt \"…\" --answer \" John\" --against \" Mary\" --site z

One gradient at the corrupted text, times the difference of both runs: an estimate of what `gpt2 look patch` measures with one run for \
each part. It is known to be inaccurate where the model is far from linear: in the early residual stream and at the first MLP.")]
    Estimate(LookArguments<TextsArguments, Estimate>),
    /// Show which edges between heads and MLPs carry a task (circuit discovery)
    #[command(after_help = "\
Examples:
  gpt2 look data ioi --count 100 --out ioi.jsonl
  gpt2 look circuit --data ioi.jsonl --svg circuit.svg
  gpt2 look circuit --data pairs.jsonl --model gpt2 --method eap-ig --edges 400 --json
  gpt2 look circuit --data pairs.jsonl --pairs 10 --method acdc --threshold 0.05

An edge is the output of one part (the token embeddings, a head, an MLP) as part of the input of another (a head's queries, keys or \
values, an MLP, the logits). A circuit keeps some edges; all others carry what they carry for the corrupted prompt. Gradients score edges \
(eap, eap-ig, clean-corrupted, position-aware), or runs do (acdc). Values are the faithfulness of circuits of ten sizes: 0 is the \
corrupted prompts' metric, 1 the whole model's. The score of a useful edge is negative for a difference and positive for kl; in the \
picture useful edges are blue.")]
    Circuit(LookArguments<NoInput, CircuitSearch>),
    /// Make prompt pairs for `circuit`: indirect objects, greater-than, he or she
    #[command(after_help = "\
Examples:
  gpt2 look data ioi --count 100 --seed 1 --out ioi.jsonl
  gpt2 look data greater-than --model gpt2

Each line is a JSON object: clean, corrupt, answer, against, and spans (named positions). Every word that matters is one token of the \
model's vocabulary. The weights are not read.")]
    Data(DataArguments),
    /// Show how much each token of the text matters for a prediction, by gradients
    #[command(after_help = "\
Examples:
  gpt2 look saliency \"The capital of France is\" --model gpt2 --answer \" Paris\" --measure probability
  gpt2 look saliency \"The capital of France is\" --model gpt2 --method input-x-gradient --html saliency.html

Gradients are with respect to the token embeddings. Values are the norms of the tokens' vectors, as shares \
of their total; the JSON also has the signed sums, which with --method integrated add up to the difference \
between the metric and that of a text of baseline tokens.")]
    Saliency(LookArguments<InputArguments, Saliency>),
    /// Show where in a text a neuron is most active
    #[command(after_help = "\
Examples:
  gpt2 look neurons --prompt-file book.txt --model gpt2 --neuron 11.611
  gpt2 look neurons \"The dog sat on the mat.\" --neuron 1.93 --top 5 --json

Values are outputs of the activation function (mlp_post). A long text is read in windows of the context.")]
    Neurons(LookArguments<InputArguments, Neurons>),
    /// Show which SAE features are active, token by token; and what each feature is active for
    #[command(after_help = "\
Examples:
  gpt2 look features \"The capital of France is\" --model gpt2 --sae blocks.8.hook_resid_pre
  gpt2 look features \"The capital of France is\" --model gpt2 --sae resid_post_mlp_v5_32k/8.pt --site 8.resid_post
  gpt2 look features --sae features --prompts-file stories.txt --html features.html
  gpt2 look features --sae features --prompts-file stories.txt --features 3,17-20 --json
  gpt2 look features --sae transcoders/3 --prompts-file stories.txt --features-dir features-3

--sae takes a SAELens folder (cfg.json and sae_weights.safetensors) or one of OpenAI's files (with --site). \
With --prompts-file, the page and the JSON have for each feature its strongest texts, texts from each quarter of \
those that it is active in, the tokens whose logits it raises and lowers most, its density and a histogram of its \
activations. Without a text (standard input is not read), all features of the dictionary are shown.")]
    Features(LookArguments<OptionalInput, Features>),
    /// Show which features of the MLPs carry a prediction, and how they act on each other (attribution
    /// graph)
    #[command(after_help = "\
Examples:
  gpt2 look graph \"A red ball and a blue cup, a red\" --html graph.html
  gpt2 look graph \"The capital of France is\" --model gpt2 --bos --transcoders transcoders --json > graph.json
  gpt2 look graph \"The capital of France is\" --model gpt2 --bos --transcoders transcoders --set 3_1201_4=0

Features of transcoders, or the most active neurons, replace the MLPs; attention patterns and norms are those of the run. Nodes are active features \
(LAYER_FEATURE_POSITION), the errors of the transcoders, the embeddings of tokens and of positions, and the most probable logits. \
An edge is what a node adds to a feature's pre-activation, or to a logit minus the mean of all. The JSON opens in the public \
attribution graph frontend. With --bos the first token has no features.")]
    Graph(LookArguments<InputArguments, Graph>),
}

pub(crate) fn run(arguments: &LookCommandArguments, hub: &HubOptions) -> Result<ExitCode> {
    match &arguments.look {
        Look::Attention(arguments) => arguments.run(hub, |look, text| look.text = text),
        Look::Lens(arguments) => arguments.run(hub, |look, text| look.text = text),
        Look::Attribute(arguments) => arguments.run(hub, |look, text| look.text = text),
        Look::Heads(arguments) => arguments.run(hub, |look, text| look.text = text),
        Look::Ablate(arguments) => arguments.run(hub, |look, text| look.text = text),
        Look::Patch(arguments) => arguments.run(hub, |look, texts| look.texts = texts),
        Look::Path(arguments) => arguments.run(hub, |look, texts| look.texts = texts),
        Look::Estimate(arguments) => arguments.run(hub, |look, texts| look.texts = texts),
        Look::Circuit(arguments) => arguments.run(hub, |_, ()| ()),
        Look::Data(arguments) => arguments.run(hub),
        Look::Saliency(arguments) => arguments.run(hub, |look, text| look.text = text),
        Look::Neurons(arguments) => arguments.run(hub, |look, text| look.text = text),
        Look::Features(arguments) => arguments.run(hub, |look, text| look.text = text),
        Look::Graph(arguments) => arguments.run(hub, |look, text| look.text = text),
    }?;
    Ok(ExitCode::SUCCESS)
}
