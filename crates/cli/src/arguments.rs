//! Command-line arguments of the program: the subcommands and their common options.
//!
//! The arguments of a single command are next to its code.

use clap::{Parser, Subcommand};

use crate::commands::bench::{BenchArguments, several_thread_counts};
use crate::commands::cache::CacheArguments;
use crate::commands::classify::ClassifyArguments;
use crate::commands::completions::CompletionsArguments;
use crate::commands::compress::{self, CompressArguments, DecompressArguments};
use crate::commands::convert::ConvertArguments;
use crate::commands::doctor::DoctorArguments;
use crate::commands::eval::EvalArguments;
use crate::commands::generate::GenerateArguments;
use crate::commands::inspect::InspectArguments;
use crate::commands::look::LookCommandArguments;
use crate::commands::man::ManArguments;
use crate::commands::score::ScoreArguments;
#[cfg(feature = "serve")]
use crate::commands::serve::ServeArguments;
use crate::commands::tokenize::TokenizeArguments;
use crate::commands::train::TrainArguments;
use crate::commands::verify::VerifyArguments;

/// Generate, score and classify text with GPT-2; train, inspect and serve models.
#[derive(Debug, Parser)]
#[command(
    name = "gpt2",
    version,
    help_expected = true,
    max_term_width = 80,
    after_help = "\
Exit codes: 0 success, 1 the job failed (for example, on a damaged file), 2 usage error.

Run `gpt2 COMMAND --help` for examples."
)]
pub(crate) struct Arguments {
    /// Use only local files and the cache, never the network (also HF_HUB_OFFLINE=1)
    #[arg(long, global = true, display_order = 990)] // before --help
    pub(crate) offline: bool,
    /// Value of the command's `--threads`; `parse.rs` fills it in.
    #[arg(skip)]
    pub(crate) threads: Option<usize>,
    /// Command to run; without one, the program prints how to begin.
    #[command(subcommand)]
    pub(crate) command: Option<Command>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Continue a prompt
    Generate(Box<GenerateArguments>),
    /// Score a text: per-token log-probabilities, loss, perplexity
    Score(Box<ScoreArguments>),
    /// Classify a text or each of its tokens, or pick the best of several choices
    Classify(Box<ClassifyArguments>),
    /// Evaluate with named protocols: LAMBADA, WikiText, HellaSwag and others, bits per byte, KL divergence
    /// of two models
    Eval(Box<EvalArguments>),
    /// Serve a model over HTTP: OpenAI-compatible API, web page, metrics
    #[cfg(feature = "serve")]
    Serve(Box<ServeArguments>),
    /// Look inside: attention, logit lens, attribution, ablation, patching, circuits, features, graphs
    Look(Box<LookCommandArguments>),
    /// Write the activations of a run to a file: residual streams, attention patterns, neurons
    Cache(Box<CacheArguments>),
    /// Print the tokens of a text, or encode files into token files to train on, in nanoGPT's or llm.c's
    /// format
    Tokenize(TokenizeArguments),
    /// Train a model from scratch, or train a checkpoint further
    Train(Box<TrainArguments>),
    /// Show a checkpoint's configuration, tensors, parameter counts and memory
    Inspect(InspectArguments),
    /// Write a checkpoint in another format: a Hugging Face folder, or a GGUF file for llama.cpp
    Convert(ConvertArguments),
    /// Compress any file with a model; text like its training data compresses best
    #[command(mut_arg("dtype", compress::dtype), mut_arg("device", compress::device))]
    Compress(Box<CompressArguments>),
    /// Restore a file that compress wrote
    Decompress(Box<DecompressArguments>),
    /// Check that a checkpoint holds every tensor, with the right shape and finite values
    Verify(VerifyArguments),
    /// Measure how fast a model loads, reads prompts and generates on this machine
    #[command(mut_arg("threads", several_thread_counts))]
    Bench(BenchArguments),
    /// Report this machine's CPU, memory and GPU, and measure how fast it reads memory and multiplies
    Doctor(DoctorArguments),
    /// Print shell completions for these commands and options
    Completions(CompletionsArguments),
    /// Print the manual page, or write the pages of all commands into a folder
    Man(ManArguments),
}

#[cfg(test)]
mod tests {
    #[test]
    fn arguments_have_help_texts_and_do_not_conflict() {
        crate::main_options::program().debug_assert();
    }
}
