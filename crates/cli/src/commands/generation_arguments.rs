//! The arguments that say how to generate, and the configuration that they make of a checkpoint's.

use std::path::PathBuf;
use std::str::FromStr;

use anyhow::Result;
use clap::{Args, ValueEnum};
use gpt2_engine::{Opened, Vocabulary};
use gpt2_generation::{EarlyStopping, GenerationConfig, LongPrompt, SearchMode, WhenFull};
use gpt2_weights::encode_piece;

use super::grammar::GrammarArguments;
use super::steering::SteeringArguments;
use crate::exit::UsageError;
use crate::output;

/// How to generate, whatever the prompts.
#[derive(Debug, Args)]
pub(crate) struct GenerationArguments {
    /// Most tokens to generate; generation also ends at an end-of-text token, and where the context is full [default: 100]
    #[arg(long, value_name = "N", allow_negative_numbers = true, help_heading = "When to stop")]
    pub(crate) max_new_tokens: Option<usize>,
    /// No end-of-text token before N new tokens
    #[arg(long, value_name = "N", allow_negative_numbers = true, help_heading = "When to stop")]
    pub(crate) min_new_tokens: Option<usize>,
    /// Longest time of a text, looked at after each token
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
    /// Divide the logits by this: below 1 sharper, above 1 flatter, greater than 0 [default: 1]
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
    /// Draw from the tokens closest to the expected information that add up to P, in (0, 1]
    #[arg(long, value_name = "P", allow_negative_numbers = true, help_heading = "Drawing at random")]
    pub(crate) typical_p: Option<f64>,
    /// Draw from tokens with at least probability P, in [0, 1)
    #[arg(long, value_name = "P", allow_negative_numbers = true, help_heading = "Drawing at random")]
    pub(crate) epsilon_cutoff: Option<f64>,
    /// The same, lower where the distribution is flat, in [0, 1)
    #[arg(long, value_name = "P", allow_negative_numbers = true, help_heading = "Drawing at random")]
    pub(crate) eta_cutoff: Option<f64>,
    /// Seed of the random draws [default: 0]
    #[arg(long, value_name = "SEED", allow_negative_numbers = true, help_heading = "Drawing at random")]
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
    /// No sequence of N tokens twice, the prompt included
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
    /// What a token of another group costs a beam
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

    /// Of a prompt longer than the context keep the last N tokens; without it such a prompt is refused
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
        let refuse = |message: &str| Err(UsageError(message.into()).into());
        if self.top_k == Some(0) {
            return refuse(
                "top_k: expected at least 1 (the size of the vocabulary keeps every token), found 0",
            );
        }
        let searches = self.asks_for_a_search();
        if searches
            && (self.greedy
                || self.num_beams.is_some_and(|beams| beams > 1)
                    && self.penalty_alpha.is_some_and(|x| x > 0.0))
        {
            return refuse(
                "--greedy, --num-beams and --penalty-alpha cannot be used with each other; give one of them",
            );
        }
        let draws = self.drawing_options();
        if let Some(option) = draws.first().filter(|_| searches || self.greedy) {
            let message = format!(
                "{option} is for drawing at random and cannot be used with --greedy, --num-beams or --penalty-alpha"
            );
            return refuse(&message);
        }
        if self.assistant_model.is_some() && searches {
            return refuse(
                "--assistant-model drafts texts that are made token by token, and cannot be used with --num-beams or --penalty-alpha",
            );
        }
        if self.bad_word.iter().any(String::is_empty) {
            return refuse("--bad-word: expected a text, found an empty one");
        }
        if self.keep_head.is_some() && self.keep_last.is_none() && !self.slide {
            return refuse("--keep-head keeps tokens where others go; give --keep-last or --slide too");
        }
        // Tokens and combinations are looked at later, with what the checkpoint says.
        let drawing = GenerationConfig { do_sample: true, ..GenerationConfig::default() };
        Ok(self.applied_to(drawing).check_ranges()?)
    }

    /// The configuration of a request: that of the checkpoint, changed by the arguments and checked. What is worth knowing of it
    /// is noted.
    pub(super) fn config(&self, opened: &Opened) -> Result<GenerationConfig> {
        let defaults = opened.defaults()?;
        let mut config = self.applied_to(defaults.config().clone());
        self.ban_words(&mut config, opened.vocabulary())?;
        config
            .sequence_bias
            .extend(self.logit_bias.iter().map(|LogitBias { token, bias }| (vec![*token], *bias)));
        if let Some(option) = self.options_of_beams().first()
            && config.search_mode() != SearchMode::Beams
        {
            return Err(UsageError(format!("{option} is of beam search; give --num-beams")).into());
        }
        let config = defaults.complete(config)?;
        defaults.notes(&config).iter().for_each(|note| output::print_note(note));
        Ok(config)
    }

    fn ban_words(&self, config: &mut GenerationConfig, vocabulary: &Vocabulary) -> Result<()> {
        for word in &self.bad_word {
            let missing =
                || UsageError(format!("--bad-word {word:?}: there is no tokenizer to make tokens of it"));
            let tokenizer = vocabulary.tokenizer().ok_or_else(missing)?;
            config.bad_words_ids.push(encode_piece(tokenizer, word)?);
            // Inside a text a word has a space before it, and is another token then.
            if !word.starts_with(char::is_whitespace) {
                config.bad_words_ids.push(encode_piece(tokenizer, &format!(" {word}"))?);
            }
        }
        Ok(())
    }

    /// The configuration with what is given put in its place.
    fn applied_to(&self, mut config: GenerationConfig) -> GenerationConfig {
        // One of the ways to choose tokens takes the place of what the file asks for.
        let draws = !self.drawing_options().is_empty();
        if draws || self.greedy || self.asks_for_a_search() {
            (config.num_beams, config.num_beam_groups, config.diversity_penalty) = (1, 1, 0.0);
            (config.penalty_alpha, config.do_sample) = (0.0, draws);
            if self.asks_for_a_search() {
                config.prompt_lookup_num_tokens = None;
            }
        }
        if self.greedy {
            config.num_return_sequences = 1;
        }
        if self.max_new_tokens.is_some() {
            config.max_length = None;
        }
        set(&mut config.max_new_tokens, self.max_new_tokens);
        set(&mut config.min_new_tokens, self.min_new_tokens);
        config.max_time = self.max_time.or(config.max_time);
        if !self.eos_token_id.is_empty() {
            config.eos_token_id.clone_from(&self.eos_token_id);
        }
        if !self.stop.is_empty() {
            config.stop_strings.clone_from(&self.stop);
        }
        set(&mut config.temperature, self.temperature);
        set(&mut config.top_k, self.top_k);
        set(&mut config.top_p, self.top_p);
        config.min_p = self.min_p.or(config.min_p);
        set(&mut config.typical_p, self.typical_p);
        set(&mut config.epsilon_cutoff, self.epsilon_cutoff);
        set(&mut config.eta_cutoff, self.eta_cutoff);
        set(&mut config.seed, self.seed);
        set(&mut config.repetition_penalty, self.repetition_penalty);
        set(&mut config.presence_penalty, self.presence_penalty);
        set(&mut config.frequency_penalty, self.frequency_penalty);
        set(&mut config.no_repeat_ngram_size, self.no_repeat_ngram_size);
        config.forced_bos_token_id = self.forced_bos_token_id.or(config.forced_bos_token_id);
        set(&mut config.num_beams, self.num_beams);
        set(&mut config.num_beam_groups, self.num_beam_groups);
        set(&mut config.diversity_penalty, self.diversity_penalty);
        set(&mut config.length_penalty, self.length_penalty);
        set(&mut config.early_stopping, self.early_stopping.map(EarlyStopping::from));
        set(&mut config.num_return_sequences, self.num_return_sequences);
        set(&mut config.penalty_alpha, self.penalty_alpha);
        set(&mut config.num_assistant_tokens, self.num_assistant_tokens);
        if self.assistant_model.is_some() {
            config.prompt_lookup_num_tokens = None;
        }
        let lookup = self.prompt_lookup.or(config.prompt_lookup_num_tokens);
        config.prompt_lookup_num_tokens = lookup.filter(|tokens| *tokens > 0);
        let head = self.keep_head.unwrap_or(0);
        if let Some(last) = self.keep_last {
            config.long_prompt = LongPrompt::Keep { head, last };
        }
        if self.slide {
            config.when_full = WhenFull::Slide { head };
        }
        config
    }

    /// Whether an argument asks for beams or contrastive search.
    fn asks_for_a_search(&self) -> bool {
        self.num_beams.is_some_and(|beams| beams != 1) || self.penalty_alpha.is_some_and(|alpha| alpha != 0.0)
    }

    /// The arguments that only a random draw knows. Contrastive search chooses among the top k too.
    fn drawing_options(&self) -> Vec<&'static str> {
        let is_contrastive = self.penalty_alpha.is_some_and(|alpha| alpha != 0.0);
        given([
            ("--temperature", self.temperature.is_some()),
            ("--top-k", self.top_k.is_some() && !is_contrastive),
            ("--top-p", self.top_p.is_some()),
            ("--min-p", self.min_p.is_some()),
            ("--typical-p", self.typical_p.is_some()),
            ("--epsilon-cutoff", self.epsilon_cutoff.is_some()),
            ("--eta-cutoff", self.eta_cutoff.is_some()),
            ("--seed", self.seed.is_some()),
        ])
    }

    /// The arguments that only beam search knows.
    fn options_of_beams(&self) -> Vec<&'static str> {
        given([
            ("--num-beam-groups", self.num_beam_groups.is_some()),
            ("--diversity-penalty", self.diversity_penalty.is_some()),
            ("--length-penalty", self.length_penalty.is_some()),
            ("--early-stopping", self.early_stopping.is_some()),
        ])
    }
}

/// The options that are given.
fn given<const N: usize>(options: [(&'static str, bool); N]) -> Vec<&'static str> {
    options.into_iter().filter(|(_, is_given)| *is_given).map(|(option, _)| option).collect()
}

fn set<T>(field: &mut T, value: Option<T>) {
    if let Some(value) = value {
        *field = value;
    }
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
