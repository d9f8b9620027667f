//! From the arguments of `gpt2 generate` and the checkpoint's `generation_config.json` to a configuration.

use anyhow::{Context, Result};
use gpt2_generation::{EarlyStopping, GenerationConfig, LongPrompt, SearchMode, WhenFull};
use gpt2_weights::{Checkpoint, Tokenizer, encode_piece, ordinary_token};

use crate::UsageError;
use crate::arguments::{EarlyStoppingArgument, GenerateArguments, LogitBias};

/// Most new tokens where nothing says how many.
const MAX_NEW_TOKENS: usize = 100;

/// What `generation_config.json` and the configuration say. Where neither asks for a search, texts are drawn at random
/// from the 50 most probable tokens.
pub(crate) fn of_checkpoint(checkpoint: &Checkpoint) -> Result<GenerationConfig> {
    let start = GenerationConfig {
        max_new_tokens: MAX_NEW_TOKENS,
        eos_token_id: checkpoint.config().eos_token_id.clone(),
        ..GenerationConfig::default()
    };
    let Some((path, json)) = checkpoint.generation_config()? else {
        return Ok(GenerationConfig { do_sample: true, ..start });
    };
    let read = |start: GenerationConfig| start.with_json(&json).with_context(|| path.display().to_string());
    let do_sample = read(start.clone())?.search_mode() == SearchMode::TokenByToken;
    read(GenerationConfig { do_sample, ..start })
}

/// Checks what can be checked of the arguments before a checkpoint is opened.
pub(crate) fn check(arguments: &GenerateArguments) -> Result<()> {
    let a = arguments;
    let refuse = |message: &str| Err(UsageError(message.into()).into());
    if a.top_k == Some(0) {
        return refuse("top_k: expected at least 1 (the size of the vocabulary keeps every token), found 0");
    }
    // The parser does not require an option that conflicts with a given one.
    if a.prompts_file.is_none() && (a.output.is_some() || a.resume || a.batch_size.is_some()) {
        return refuse("--output, --resume and --batch-size are for many prompts; give --prompts-file");
    }
    if a.keep_head.is_some() && a.keep_last.is_none() && !a.slide {
        return refuse("--keep-head keeps tokens where others go; give --keep-last or --slide too");
    }
    // Tokens are looked at later, when there is a tokenizer.
    with_arguments(GenerationConfig { do_sample: true, ..GenerationConfig::default() }, arguments).check()?;
    Ok(())
}

/// The configuration of the checkpoint, changed by the arguments.
pub(crate) fn read(
    arguments: &GenerateArguments,
    checkpoint: &Checkpoint,
    tokenizer: Option<&Tokenizer>,
) -> Result<GenerationConfig> {
    let mut config = with_arguments(of_checkpoint(checkpoint)?, arguments);
    let ids_of = |option: &str, text: &str| -> Result<Vec<u32>> {
        let missing = || UsageError(format!("{option} {text:?}: there is no tokenizer to make tokens of it"));
        Ok(encode_piece(tokenizer.ok_or_else(missing)?, text)?)
    };
    for word in &arguments.bad_word {
        config.bad_words_ids.push(ids_of("--bad-word", word)?);
        // Inside a text a word has a space before it, and is another token then.
        if !word.starts_with(char::is_whitespace) {
            config.bad_words_ids.push(ids_of("--bad-word", &format!(" {word}"))?);
        }
    }
    for LogitBias { token, bias } in &arguments.logit_bias {
        config.sequence_bias.push((vec![*token], *bias));
    }
    let of_beams = [
        ("--num-beam-groups", arguments.num_beam_groups.is_some()),
        ("--diversity-penalty", arguments.diversity_penalty.is_some()),
        ("--length-penalty", arguments.length_penalty.is_some()),
        ("--early-stopping", arguments.early_stopping.is_some()),
    ];
    if let Some((option, _)) = of_beams.iter().find(|(_, is_given)| *is_given)
        && config.search_mode() != SearchMode::Beams
    {
        return Err(UsageError(format!("{option} is of beam search; give --num-beams")).into());
    }
    config.suppress_tokens.extend(checkpoint.padding_token_ids(tokenizer));
    config.check()?;
    config.check_tokens(checkpoint.config())?;
    Ok(config)
}

/// What a reader should know about the configuration, and nothing of which is an error.
pub(crate) fn notes(config: &GenerationConfig, tokenizer: Option<&Tokenizer>) -> Vec<String> {
    let Some(tokenizer) = tokenizer else { return Vec::new() };
    let ends = config.eos_token_id.iter();
    let ordinary = ends.filter_map(|id| Some((id, ordinary_token(tokenizer, *id)?)));
    let note =
        |(id, text)| format!("eos_token_id {id} is the ordinary token {text:?}; texts will end with it");
    ordinary.map(note).collect()
}

fn with_arguments(mut config: GenerationConfig, arguments: &GenerateArguments) -> GenerationConfig {
    let a = arguments;
    let draws = [a.temperature, a.top_p, a.min_p, a.typical_p, a.epsilon_cutoff, a.eta_cutoff];
    let is_contrastive = a.penalty_alpha.is_some();
    if draws.iter().any(Option::is_some) || (a.top_k.is_some() && !is_contrastive) {
        config.do_sample = true;
    }
    if a.greedy || is_contrastive || a.num_beams.is_some_and(|beams| beams > 1) {
        config.do_sample = false;
    }
    if a.greedy {
        (config.num_beams, config.num_beam_groups, config.diversity_penalty) = (1, 1, 0.0);
        (config.penalty_alpha, config.num_return_sequences) = (0.0, 1);
    }
    if a.max_new_tokens.is_some() {
        config.max_length = None;
    }
    set(&mut config.max_new_tokens, a.max_new_tokens);
    set(&mut config.min_new_tokens, a.min_new_tokens);
    config.max_time = a.max_time.or(config.max_time);
    if !a.eos_token_id.is_empty() {
        config.eos_token_id.clone_from(&a.eos_token_id);
    }
    if !a.stop.is_empty() {
        config.stop_strings.clone_from(&a.stop);
    }
    set(&mut config.temperature, a.temperature);
    set(&mut config.top_k, a.top_k);
    set(&mut config.top_p, a.top_p);
    config.min_p = a.min_p.or(config.min_p);
    set(&mut config.typical_p, a.typical_p);
    set(&mut config.epsilon_cutoff, a.epsilon_cutoff);
    set(&mut config.eta_cutoff, a.eta_cutoff);
    set(&mut config.seed, a.seed);
    set(&mut config.repetition_penalty, a.repetition_penalty);
    set(&mut config.presence_penalty, a.presence_penalty);
    set(&mut config.frequency_penalty, a.frequency_penalty);
    set(&mut config.no_repeat_ngram_size, a.no_repeat_ngram_size);
    config.forced_bos_token_id = a.forced_bos_token_id.or(config.forced_bos_token_id);
    set(&mut config.num_beams, a.num_beams);
    set(&mut config.num_beam_groups, a.num_beam_groups);
    set(&mut config.diversity_penalty, a.diversity_penalty);
    set(&mut config.length_penalty, a.length_penalty);
    set(&mut config.early_stopping, a.early_stopping.map(EarlyStopping::from));
    set(&mut config.num_return_sequences, a.num_return_sequences);
    set(&mut config.penalty_alpha, a.penalty_alpha);
    let head = a.keep_head.unwrap_or(0);
    if let Some(last) = a.keep_last {
        config.long_prompt = LongPrompt::Keep { head, last };
    }
    if a.slide {
        config.when_full = WhenFull::Slide { head };
    }
    config
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
