//! From the arguments of `gpt2 generate` and the checkpoint's `generation_config.json` to a configuration.

use std::path::PathBuf;

use anyhow::{Result, anyhow};
use gpt2_generation::{EarlyStopping, GenerationConfig, GenerationError, LongPrompt, SearchMode, WhenFull};
use gpt2_weights::{Checkpoint, Tokenizer, encode_piece, ordinary_token};

use crate::UsageError;
use crate::arguments::{EarlyStoppingArgument, GenerateArguments, LogitBias};

/// Most new tokens where nothing says how many.
const MAX_NEW_TOKENS: usize = 100;

/// What `generation_config.json` and the configuration say, with the file checked.
pub(crate) fn of_checkpoint(checkpoint: &Checkpoint) -> Result<GenerationConfig> {
    let (config, path) = of_files(checkpoint)?;
    match (check_all(&config, checkpoint), path) {
        (Err(error), Some(path)) => Err(anyhow!("{}: {error}", path.display())),
        _ => Ok(config),
    }
}

/// What the files say, and the path of `generation_config.json` where there is one. Where they ask for no search, texts
/// are drawn at random from the 50 most probable tokens.
fn of_files(checkpoint: &Checkpoint) -> Result<(GenerationConfig, Option<PathBuf>)> {
    let start = GenerationConfig {
        max_new_tokens: MAX_NEW_TOKENS,
        eos_token_id: checkpoint.config().eos_token_id.clone(),
        ..GenerationConfig::default()
    };
    let Some((path, json)) = checkpoint.generation_config()? else {
        return Ok((GenerationConfig { do_sample: true, ..start }, None));
    };
    let read = |start: GenerationConfig| {
        start.with_json(&json).map_err(|error| anyhow!("{}: {error}", path.display()))
    };
    let searches = read(start.clone())?.search_mode() != SearchMode::TokenByToken;
    let config = read(GenerationConfig { do_sample: !searches, ..start })?;
    Ok((config, Some(path)))
}

fn check_all(config: &GenerationConfig, checkpoint: &Checkpoint) -> Result<(), GenerationError> {
    config.check()?;
    config.check_model(checkpoint.config())
}

/// Checks what can be checked of the arguments before a checkpoint is opened.
pub(crate) fn check(arguments: &GenerateArguments) -> Result<()> {
    let a = arguments;
    let refuse = |message: &str| Err(UsageError(message.into()).into());
    if a.top_k == Some(0) {
        return refuse("top_k: expected at least 1 (the size of the vocabulary keeps every token), found 0");
    }
    let searches = asks_for_a_search(a);
    if searches
        && (a.greedy
            || a.num_beams.is_some_and(|beams| beams > 1) && a.penalty_alpha.is_some_and(|x| x > 0.0))
    {
        return refuse(
            "--greedy, --num-beams and --penalty-alpha cannot be used with each other; give one of them",
        );
    }
    let draws = drawing_options(a);
    if let Some(option) = draws.first().filter(|_| searches || a.greedy) {
        let message = format!(
            "{option} is for drawing at random and cannot be used with --greedy, --num-beams or --penalty-alpha"
        );
        return refuse(&message);
    }
    if a.bad_word.iter().any(String::is_empty) {
        return refuse("--bad-word: expected a text, found an empty one");
    }
    // The parser does not require an option that conflicts with a given one.
    if a.prompts_file.is_none() && (a.output.is_some() || a.resume || a.batch_size.is_some()) {
        return refuse("--output, --resume and --batch-size are for many prompts; give --prompts-file");
    }
    if a.keep_head.is_some() && a.keep_last.is_none() && !a.slide {
        return refuse("--keep-head keeps tokens where others go; give --keep-last or --slide too");
    }
    // Tokens and combinations are looked at later, with what the checkpoint says.
    let drawing = GenerationConfig { do_sample: true, ..GenerationConfig::default() };
    Ok(with_arguments(drawing, arguments).check_ranges()?)
}

/// The configuration of the checkpoint, changed by the arguments.
pub(crate) fn read(
    arguments: &GenerateArguments,
    checkpoint: &Checkpoint,
    tokenizer: Option<&Tokenizer>,
) -> Result<GenerationConfig> {
    let (of_files, path) = of_files(checkpoint)?;
    let mut config = with_arguments(of_files.clone(), arguments);
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
    if let Some(tokenizer) = tokenizer {
        // A special token gives no text to find a stop string in; it ends the text as a token.
        let special =
            |text: &String| tokenizer.token_to_id(text).filter(|id| ordinary_token(tokenizer, *id).is_none());
        config.eos_token_id.extend(config.stop_strings.iter().filter_map(special));
        config.stop_strings.retain(|text| special(text).is_none());
    } else if !config.stop_strings.is_empty() {
        return Err(GenerationError::StopStringsWithoutTokenizer.into());
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
    if let Err(error) = check_all(&config, checkpoint) {
        // What is wrong with a file already is not the caller's mistake.
        let of_file = check_all(&of_files, checkpoint).err();
        return match (path, of_file.filter(|of_file| of_file.to_string() == error.to_string())) {
            (Some(path), Some(error)) => Err(anyhow!("{}: {error}", path.display())),
            _ => Err(error.into()),
        };
    }
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
    // One of the ways to choose tokens takes the place of what the file asks for.
    let draws = !drawing_options(a).is_empty();
    if draws || a.greedy || asks_for_a_search(a) {
        (config.num_beams, config.num_beam_groups, config.diversity_penalty) = (1, 1, 0.0);
        (config.penalty_alpha, config.do_sample) = (0.0, draws);
    }
    if a.greedy {
        config.num_return_sequences = 1;
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

/// Whether an argument asks for beams or contrastive search.
fn asks_for_a_search(a: &GenerateArguments) -> bool {
    a.num_beams.is_some_and(|beams| beams != 1) || a.penalty_alpha.is_some_and(|alpha| alpha != 0.0)
}

/// The arguments that only a random draw knows. Contrastive search chooses among the top k too.
fn drawing_options(a: &GenerateArguments) -> Vec<&'static str> {
    let is_contrastive = a.penalty_alpha.is_some_and(|alpha| alpha != 0.0);
    let options = [
        ("--temperature", a.temperature.is_some()),
        ("--top-k", a.top_k.is_some() && !is_contrastive),
        ("--top-p", a.top_p.is_some()),
        ("--min-p", a.min_p.is_some()),
        ("--typical-p", a.typical_p.is_some()),
        ("--epsilon-cutoff", a.epsilon_cutoff.is_some()),
        ("--eta-cutoff", a.eta_cutoff.is_some()),
        ("--seed", a.seed.is_some()),
    ];
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
