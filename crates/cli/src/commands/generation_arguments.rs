//! The arguments that say how to generate, and the configuration that they make of a checkpoint's.

use std::path::PathBuf;
use std::str::FromStr;

use anyhow::Result;
use candle_gpt2_engine::{GenerationOptions, Opened, Spelling};
use candle_gpt2_generation::{EarlyStopping, GenerationConfig};
use clap::{Args, ValueEnum};

use super::grammar::GrammarArguments;
use super::steering::SteeringArguments;
use crate::output;

/// How to generate, whatever the prompts.
#[derive(Debug, Args)]
pub(crate) struct GenerationArguments {
    /// Most tokens to generate; generation also ends at an end-of-text token, and where the context is full [default: 100]
    #[arg(short = 'n', long, value_name = "N", allow_negative_numbers = true, help_heading = "When to stop")]
    pub(crate) max_new_tokens: Option<usize>,
    /// No end-of-text token before N new tokens
    #[arg(long, value_name = "N", allow_negative_numbers = true, help_heading = "When to stop")]
    pub(crate) min_new_tokens: Option<usize>,
    /// Longest time for a text, checked after each token
    #[arg(long, value_name = "SECONDS", allow_negative_numbers = true, help_heading = "When to stop")]
    pub(crate) max_time: Option<f64>,
    /// Token that ends the text, in place of the checkpoint's; may be given several times
    #[arg(long, value_name = "ID", allow_negative_numbers = true, help_heading = "When to stop")]
    pub(crate) eos_token_id: Vec<u32>,
    /// End the text in front of TEXT, which is not printed; may be given several times
    #[arg(long, value_name = "TEXT", help_heading = "When to stop")]
    pub(crate) stop: Vec<String>,

    /// Always take the most probable token
    #[arg(long, help_heading = "Searching")]
    pub(crate) greedy: bool,
    /// Divide the logits by this: below 1 sharper, above 1 flatter, 0 is --greedy [default: 1]
    #[arg(long, value_name = "T", allow_negative_numbers = true, help_heading = "Drawing at random")]
    pub(crate) temperature: Option<f64>,
    /// Draw from the K most probable tokens only, at least 1 [default: 50]
    #[arg(long, value_name = "K", allow_negative_numbers = true, help_heading = "Drawing at random")]
    pub(crate) top_k: Option<usize>,
    /// Draw from the smallest set of tokens whose probabilities add up to P, in (0, 1] [default: 1]
    #[arg(long, value_name = "P", allow_negative_numbers = true, help_heading = "Drawing at random")]
    pub(crate) top_p: Option<f64>,
    /// Draw from tokens with at least the share P of the largest probability, from 0 to 1
    #[arg(long, value_name = "P", allow_negative_numbers = true, help_heading = "Drawing at random")]
    pub(crate) min_p: Option<f64>,
    /// Locally typical sampling with mass P, in (0, 1]
    #[arg(long, value_name = "P", allow_negative_numbers = true, help_heading = "Drawing at random")]
    pub(crate) typical_p: Option<f64>,
    /// Draw from tokens with at least probability P, in [0, 1)
    #[arg(long, value_name = "P", allow_negative_numbers = true, help_heading = "Drawing at random")]
    pub(crate) epsilon_cutoff: Option<f64>,
    /// The same, lower where the distribution is flat, in [0, 1)
    #[arg(long, value_name = "P", allow_negative_numbers = true, help_heading = "Drawing at random")]
    pub(crate) eta_cutoff: Option<f64>,
    /// Seed of the random draws [default: 0]
    #[arg(
        short,
        long,
        value_name = "SEED",
        allow_negative_numbers = true,
        help_heading = "Drawing at random"
    )]
    pub(crate) seed: Option<u64>,
    /// Texts for each prompt [default: 1]
    #[arg(long, value_name = "N", allow_negative_numbers = true, help_heading = "Drawing at random")]
    pub(crate) num_return_sequences: Option<usize>,

    /// Divide positive and multiply negative logits of all tokens so far by X, greater than 0
    #[arg(long, value_name = "X", allow_negative_numbers = true, help_heading = "Changing the logits")]
    pub(crate) repetition_penalty: Option<f64>,
    /// Subtract X from the logits of tokens generated so far
    #[arg(long, value_name = "X", allow_negative_numbers = true, help_heading = "Changing the logits")]
    pub(crate) presence_penalty: Option<f64>,
    /// Subtract X from a token's logit for each time it was generated
    #[arg(long, value_name = "X", allow_negative_numbers = true, help_heading = "Changing the logits")]
    pub(crate) frequency_penalty: Option<f64>,
    /// Forbid repeated N-grams, those of the prompt included
    #[arg(long, value_name = "N", allow_negative_numbers = true, help_heading = "Changing the logits")]
    pub(crate) no_repeat_ngram_size: Option<usize>,
    /// Never write TEXT, at the beginning of a text or after a space; may be given several times
    #[arg(long, value_name = "TEXT", help_heading = "Changing the logits")]
    pub(crate) bad_word: Vec<String>,
    /// Add X to the logit of token ID (-inf removes it); may be given several times
    #[arg(long, value_name = "ID=X", help_heading = "Changing the logits")]
    pub(crate) logit_bias: Vec<LogitBias>,
    /// Begin the text with token ID
    #[arg(long, value_name = "ID", allow_negative_numbers = true, help_heading = "Changing the logits")]
    pub(crate) forced_bos_token_id: Option<u32>,

    /// Search with N beams for the most probable text
    #[arg(long, value_name = "N", allow_negative_numbers = true, help_heading = "Searching")]
    pub(crate) num_beams: Option<usize>,
    /// Divide the beams into N groups that avoid each other's tokens
    #[arg(long, value_name = "N", allow_negative_numbers = true, help_heading = "Searching")]
    pub(crate) num_beam_groups: Option<usize>,
    /// Penalty for tokens that another group chose
    #[arg(long, value_name = "X", allow_negative_numbers = true, help_heading = "Searching")]
    pub(crate) diversity_penalty: Option<f64>,
    /// Divide a beam's score by its length to the power X: above 0 favours long texts [default: 1]
    #[arg(long, value_name = "X", allow_negative_numbers = true, help_heading = "Searching")]
    pub(crate) length_penalty: Option<f64>,
    /// End with as many texts as beams (true), when no beam promises more (false), or when none ever can (never)
    #[arg(long, value_name = "WHEN", num_args = 0..=1, default_missing_value = "true", help_heading = "Searching")]
    pub(crate) early_stopping: Option<EarlyStoppingArgument>,
    /// Contrastive search among the --top-k most probable tokens, with weight X on being unlike the text so far
    #[arg(long, value_name = "X", allow_negative_numbers = true, help_heading = "Searching")]
    pub(crate) penalty_alpha: Option<f64>,

    /// Let a smaller model with the same vocabulary draft tokens, of which the model checks several in one pass; named like the model. The text stays the same
    #[arg(long, value_name = "DIR", help_heading = "Drafting")]
    pub(crate) assistant_model: Option<PathBuf>,
    /// Most tokens that the assistant drafts at once; fewer where they are seldom right [default: 20]
    #[arg(long, value_name = "N", requires = "assistant_model", help_heading = "Drafting")]
    pub(crate) num_assistant_tokens: Option<usize>,
    /// Draft up to N tokens from what followed the last ones where they stood before: for texts that repeat their prompt or themselves. The text stays the same
    #[arg(long, value_name = "N", conflicts_with = "assistant_model", help_heading = "Drafting")]
    pub(crate) prompt_lookup: Option<usize>,

    #[command(flatten)]
    pub(crate) grammar: GrammarArguments,
    #[command(flatten)]
    pub(crate) steering: SteeringArguments,

    /// Keep the last N tokens of a prompt that is longer than the context; without it such a prompt is refused
    #[arg(long, value_name = "N", allow_negative_numbers = true, help_heading = "Long texts")]
    pub(crate) keep_last: Option<usize>,
    /// Also keep the first N tokens: of a long prompt, and when the window slides
    #[arg(long, value_name = "N", allow_negative_numbers = true, help_heading = "Long texts")]
    pub(crate) keep_head: Option<usize>,
    /// Where the context is full, go on with the last half of it
    #[arg(long, help_heading = "Long texts")]
    pub(crate) slide: bool,
}

/// When a beam search ends.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum EarlyStoppingArgument {
    /// With as many texts as beams
    True,
    /// When no running beam beats the worst of them at its present length
    False,
    /// When no running beam can ever beat it
    Never,
}

/// A token and what is added to its logit.
#[derive(Debug, Clone)]
pub(crate) struct LogitBias {
    pub(crate) token: u32,
    pub(crate) bias: f64,
}

impl FromStr for LogitBias {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (token, bias) =
            text.split_once('=').ok_or("expected a token id, = and a number, such as 464=-2.5")?;
        let token = token.trim().parse().map_err(|error| format!("`{token}` is no token id: {error}"))?;
        let bias = bias.trim().parse().map_err(|error| format!("`{bias}` is no number: {error}"))?;
        Ok(Self { token, bias })
    }
}

impl GenerationArguments {
    /// Checks what can be checked of the arguments before a checkpoint is opened.
    pub(super) fn check(&self) -> Result<()> {
        Ok(self.options().check(Spelling::Flags)?)
    }

    /// The configuration of a request: that of the checkpoint, changed by the arguments and checked. What is worth knowing of it
    /// is noted.
    pub(super) fn config(&self, opened: &Opened) -> Result<GenerationConfig> {
        let defaults = opened.defaults()?;
        let options = self.options();
        let config = options.config(defaults, Spelling::Flags)?;
        let notes = options.notes(Spelling::Flags).into_iter().chain(defaults.notes(&config));
        notes.for_each(|note| output::print_note(&note));
        Ok(config)
    }

    fn options(&self) -> GenerationOptions {
        GenerationOptions {
            max_new_tokens: self.max_new_tokens,
            min_new_tokens: self.min_new_tokens,
            max_time: self.max_time,
            eos_token_id: given(&self.eos_token_id),
            stop_strings: given(&self.stop),
            do_sample: self.greedy.then_some(false),
            temperature: self.temperature,
            top_k: self.top_k,
            top_p: self.top_p,
            min_p: self.min_p,
            typical_p: self.typical_p,
            epsilon_cutoff: self.epsilon_cutoff,
            eta_cutoff: self.eta_cutoff,
            seed: self.seed,
            num_return_sequences: self.num_return_sequences,
            repetition_penalty: self.repetition_penalty,
            presence_penalty: self.presence_penalty,
            frequency_penalty: self.frequency_penalty,
            no_repeat_ngram_size: self.no_repeat_ngram_size,
            bad_words: self.bad_word.clone(),
            sequence_bias: self.logit_bias.iter().map(|bias| (vec![bias.token], bias.bias)).collect(),
            forced_bos_token_id: self.forced_bos_token_id,
            num_beams: self.num_beams,
            num_beam_groups: self.num_beam_groups,
            diversity_penalty: self.diversity_penalty,
            length_penalty: self.length_penalty,
            early_stopping: self.early_stopping.map(EarlyStopping::from),
            penalty_alpha: self.penalty_alpha,
            has_assistant: self.assistant_model.is_some(),
            num_assistant_tokens: self.num_assistant_tokens,
            prompt_lookup_num_tokens: self.prompt_lookup,
            keep_last: self.keep_last,
            keep_head: self.keep_head,
            slide: self.slide,
            ..GenerationOptions::default()
        }
    }
}

/// An option that may be given several times, where it is.
fn given<T: Clone>(values: &[T]) -> Option<Vec<T>> {
    (!values.is_empty()).then(|| values.to_vec())
}

impl From<EarlyStoppingArgument> for EarlyStopping {
    fn from(argument: EarlyStoppingArgument) -> Self {
        match argument {
            EarlyStoppingArgument::True => Self::Full,
            EarlyStoppingArgument::False => Self::Heuristic,
            EarlyStoppingArgument::Never => Self::Never,
        }
    }
}
