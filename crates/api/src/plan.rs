//! From a body that was read to a call: requests for the scheduler, and the answer that they fill.

use std::sync::Arc;

use candle_gpt2_engine::{EngineError, banned_tokens};
use candle_gpt2_generation::{AllowedTokens, GenerationConfig, GenerationError, LogitsProcessor, Request};
use candle_gpt2_grammar::GrammarError;

use crate::answer::{Head, PromptAnswer, Shape, Wants};
use crate::body::{Count, Seed, Text, TokenIds};
use crate::completion::Prompt;
use crate::error::RETRY_AFTER;
use crate::options::Options;
use crate::prompts::{PromptTokens, check_context, lost_note, tokens_of, unreadable};
use crate::seen::observers;
use crate::served::fresh_number;
use crate::{Answer, ApiError, Call, ChatRequest, CompletionRequest, ServedModel, Warnings};

/// Code of the error for a grammar that finds no room; the same request may succeed a moment later.
///
/// ```
/// assert_eq!(candle_gpt2_api::GRAMMARS_BUSY, "grammars_busy");
/// ```
pub const GRAMMARS_BUSY: &str = "grammars_busy";

/// What both routes make of a body.
struct Plan {
    shape: Shape,
    prompts: Vec<PromptTokens>,
    max_tokens: usize,
    best_of: usize,
    echo: bool,
    logprobs: Option<usize>,
    options: Options,
    warnings: Warnings,
}

impl Call {
    /// A call of `/v1/completions`. Calls with the same number `reuse` may share what was computed of equal beginnings.
    ///
    /// # Errors
    /// When the model cannot serve the request.
    pub fn of_completion(
        request: CompletionRequest,
        served: &ServedModel,
        reuse: Option<u64>,
    ) -> Result<Self, ApiError> {
        let CompletionRequest { prompts, best_of, echo, logprobs, options, mut warnings } = request;
        served.check_known(&warnings)?;
        served.check_name(options.fields.model.as_ref())?;
        let n_positions = served.config().n_positions;
        let usual = options.sampling(served).max_new_tokens.min(n_positions);
        let most = options.max_tokens.unwrap_or(usual);
        let texts = if best_of > options.fields.n.0 { "best_of" } else { "n" };
        prompts.check_count(served)?;
        check_limits(served, prompts.prompts.len(), (texts, best_of), most, logprobs)?;
        let texts = prompts.prompts.iter().filter_map(|prompt| match prompt {
            Prompt::Text(text) => Some(&**text),
            Prompt::Ids(_) => None,
        });
        warnings.add(lost_note(texts, "prompt", served));
        let prompts =
            tokens_of(prompts, options.fields.truncate_prompt_tokens, options.room(usual, served), served)?;
        let longest = prompts.iter().map(|prompt| prompt.ids.len()).max().unwrap_or(0);
        let max_tokens = options.max_tokens.unwrap_or(most.min(n_positions.saturating_sub(longest).max(1)));
        if let (true, Some(logprobs)) = (echo, logprobs) {
            check_echo(&prompts, options.fields.n.0, logprobs)?;
        }
        let shape = Shape::Completion;
        Plan { shape, prompts, max_tokens, best_of, echo, logprobs, options, warnings }
            .into_call(served, reuse)
    }

    /// A call of `/v1/chat/completions`.
    ///
    /// # Errors
    /// When the model cannot serve the request, above all when it has no chat template.
    pub fn of_chat(request: ChatRequest, served: &ServedModel, reuse: Option<u64>) -> Result<Self, ApiError> {
        served.check_known(&request.warnings)?;
        served.check_name(request.options.fields.model.as_ref())?;
        let (ids, lost) = request.prompt(served)?;
        let ChatRequest { logprobs, options, mut warnings, .. } = request;
        warnings.add(lost);
        let room = served.config().n_positions.saturating_sub(ids.len()).max(1);
        let max_tokens = options.max_tokens.unwrap_or(room);
        check_limits(served, 1, ("n", options.fields.n.0), max_tokens, logprobs)?;
        check_context("messages", ids.len(), max_tokens, served)?;
        let prompts = vec![PromptTokens { ids, told_from: 0, path: "messages".into() }];
        let (shape, best_of) = (Shape::Chat, options.fields.n.0);
        Plan { shape, prompts, max_tokens, best_of, echo: false, logprobs, options, warnings }
            .into_call(served, reuse)
    }
}

/// What could be too much is refused before anything is made of it.
fn check_limits(
    served: &ServedModel,
    prompts: usize,
    (field, texts): (&'static str, usize),
    max_tokens: usize,
    logprobs: Option<usize>,
) -> Result<(), ApiError> {
    let limits = &served.options.limits;
    // More than the context holds is refused by each prompt.
    let of_text = max_tokens.min(served.config().n_positions);
    let total = prompts.saturating_mul(texts).saturating_mul(of_text);
    let checks = [
        (field, "texts of a prompt (n, best_of)", limits.max_n, texts),
        ("logprobs", "logprobs", limits.max_logprobs, logprobs.unwrap_or(0)),
        ("max_tokens", "new tokens (prompts × texts × max_tokens)", limits.max_total_tokens, total),
    ];
    for (param, what, most, found) in checks {
        if found > most {
            let message = format!("{param}: this server takes at most {most} {what}, found {found}");
            return Err(ApiError::invalid(message).with_param(param));
        }
    }
    Ok(())
}

/// What is reported of prompts is bounded too.
fn check_echo(prompts: &[PromptTokens], texts: usize, logprobs: usize) -> Result<(), ApiError> {
    /// Log-probabilities, each with the token's text: some 20 MB.
    const MOST_TOLD: usize = 1 << 19;
    let tokens: usize = prompts.iter().map(|prompt| prompt.ids.len()).sum();
    let told = tokens.saturating_mul(texts).saturating_mul(logprobs + 1);
    if told > MOST_TOLD {
        let message = format!(
            "logprobs: an answer holds at most {MOST_TOLD} log-probabilities of echoed prompts, and {told} were asked for: \
             {tokens} tokens × {texts} texts × {} for each; ask for fewer",
            logprobs + 1
        );
        return Err(ApiError::invalid(message).with_param("logprobs"));
    }
    Ok(())
}

impl Plan {
    fn into_call(self, served: &ServedModel, reuse: Option<u64>) -> Result<Call, ApiError> {
        let Self { shape, prompts, max_tokens, best_of, echo, logprobs, mut options, warnings } = self;
        let inside = std::mem::take(&mut options.inside).of_model(served)?;
        let activation_bytes = inside.bytes(&prompts, (best_of, max_tokens), served)?;
        let (stream, Count(n)) = (options.fields.stream, options.fields.n);
        // The most probable texts are all the same.
        let sampling = options.sampling(served);
        let is_copied = !sampling.do_sample && best_of > 1;
        let made = if is_copied { 1 } else { best_of };
        let seed = options.fields.seed.or_else(|| sampling.do_sample.then(fresh_seed));
        let config = Arc::new(config_of(&options, sampling, max_tokens, made, seed, served)?);
        let processors = processors_of(&options, &config, served)?;
        let prompt_logprobs = logprobs.filter(|_| echo);
        // The most probable texts are found by their log-probabilities.
        let logprobs_made = logprobs.or((made > n).then_some(0));
        let salt = options.fields.cache_salt.as_ref().map(|Text(salt)| salt.as_str());
        let share = options.fields.cache_prompt.then(|| served.reuse(reuse, salt)).flatten();
        let streams = (0..).step_by(best_of);
        let inspected = prompts.iter().map(|prompt| {
            // One for each text, which is changed and observed by itself.
            inside.inspections(prompt.ids.len(), (made, max_tokens), served)
        });
        let inspected = inspected.collect::<Result<Vec<_>, _>>()?;
        let requests = prompts.iter().zip(&inspected).zip(streams).map(|((prompt, inspected), stream)| {
            let mut request = Request::new(prompt.ids.clone(), Arc::clone(&config));
            request.processors.clone_from(&processors);
            (request.stream, request.logprobs, request.prompt_logprobs) =
                (stream, logprobs_made, prompt_logprobs);
            (request.reuse, request.observers) = (share, observers(inspected));
            request.echoed = echo.then_some(prompt.told_from);
            request
        });
        let requests = requests.collect();
        let answer_of = |(PromptTokens { ids, told_from, path }, inspected)| {
            let answer = PromptAnswer::new(ids, told_from, path, (made, echo), &served.pieces)?;
            Ok(answer.inspected(inspected))
        };
        let prompts = prompts.into_iter().zip(inspected).map(answer_of).collect::<Result<_, ApiError>>()?;
        let head = head_of(shape, &options, seed, served);
        let wants = Wants {
            shape,
            stream,
            include_usage: options.includes_usage(),
            echo,
            logprobs: logprobs.is_some(),
            n,
            best_of,
            is_copied,
            stops: options.settings.stop_strings.unwrap_or_default(),
            stop_token_ids: options.fields.stop_token_ids.0,
            include_stop: options.fields.include_stop_str_in_output,
            return_token_ids: options.fields.return_token_ids,
            tokens_as_ids: options.fields.return_tokens_as_token_ids,
            prompt_tokens_details: served.options.prompt_tokens_details,
            shown: inside.told(served),
            is_steered: inside.is_steered(),
        };
        let answer = Answer::new(head, wants, Arc::clone(&served.pieces), prompts, warnings);
        Ok(Call { requests, answer, stream, activation_bytes })
    }
}

/// One that JSON's readers keep, whose numbers are f64.
fn fresh_seed() -> Seed {
    Seed::Unsigned(fresh_number() >> 11)
}

fn head_of(shape: Shape, options: &Options, seed: Option<Seed>, served: &ServedModel) -> Head {
    let prefix = if shape == Shape::Chat { "chatcmpl" } else { "cmpl" };
    let number = || format!("{:016x}{:016x}", fresh_number(), fresh_number());
    let id = options.fields.request_id.as_ref().map_or_else(number, |Text(id)| id.clone());
    Head {
        id: format!("{prefix}-{id}"),
        created: (served.options.now)(),
        model: served.name().to_owned(),
        seed,
    }
}

pub(crate) fn config_of(
    options: &Options,
    asked: GenerationConfig,
    max_tokens: usize,
    texts: usize,
    seed: Option<Seed>,
    served: &ServedModel,
) -> Result<GenerationConfig, ApiError> {
    if asked.min_new_tokens > max_tokens {
        let found = asked.min_new_tokens;
        let message =
            format!("min_tokens: expected at most max_tokens, which is {max_tokens}, found {found}");
        return Err(ApiError::invalid(message).with_param("min_tokens"));
    }
    for (ids, _) in &asked.sequence_bias {
        ids.iter().try_for_each(|id| served.check_token(*id, || format!("logit_bias.{id}")))?;
    }
    for (place, id) in options.fields.stop_token_ids.0.iter().enumerate() {
        served.check_token(*id, || format!("stop_token_ids[{place}]"))?;
    }
    // Of the files only what belongs to the model: how to choose is the request's business.
    let files = served.defaults.config();
    let own_ends = files.eos_token_id.iter().filter(|_| !options.fields.ignore_eos);
    let config = GenerationConfig {
        max_new_tokens: max_tokens,
        num_return_sequences: texts,
        seed: seed.map_or(0, Seed::bits),
        eos_token_id: own_ends.chain(&options.fields.stop_token_ids.0).copied().collect(),
        bad_words_ids: files.bad_words_ids.iter().cloned().chain(bad_words(options, served)?).collect(),
        suppress_tokens: files.suppress_tokens.clone(),
        begin_suppress_tokens: files.begin_suppress_tokens.clone(),
        ..asked
    };
    served.defaults.complete(config).map_err(refused)
}

/// The tokens of words that are never generated.
fn bad_words(options: &Options, served: &ServedModel) -> Result<Vec<Vec<u32>>, ApiError> {
    let mut sequences = Vec::new();
    for (place, Text(word)) in options.fields.bad_words.0.iter().enumerate() {
        let refused = |error: EngineError| unreadable(&error, &format!("bad_words[{place}]"));
        for ids in banned_tokens(&served.vocabulary, word).map_err(refused)? {
            if !sequences.contains(&ids) {
                sequences.push(ids);
            }
        }
    }
    Ok(sequences)
}

pub(crate) fn processors_of(
    options: &Options,
    config: &GenerationConfig,
    served: &ServedModel,
) -> Result<Vec<LogitsProcessor>, ApiError> {
    let mut processors = Vec::new();
    let TokenIds(ids) = &options.fields.allowed_token_ids;
    if !ids.is_empty() {
        for (place, id) in ids.iter().enumerate() {
            served.check_token(*id, || format!("allowed_token_ids[{place}]"))?;
        }
        let ids = ids.clone();
        processors.push(LogitsProcessor::AllowedTokens(AllowedTokens::new(move |_| ids.clone())));
    }
    if let Some((path, grammar)) = &options.grammar {
        let refused = |what: String| ApiError::invalid(format!("{path}: {what}")).with_param(path.clone());
        let without = || match served.vocabulary.tokenizer() {
            Some(_) => refused("there are no grammars here; leave it out".into()),
            None => {
                refused("a text that conforms to something needs a tokenizer, and this model has none".into())
            }
        };
        let compiler = served.compiler.as_ref().ok_or_else(without)?;
        let compiled = compiler.compile(grammar, &config.eos_token_id);
        processors.push(compiled.map_err(|error| match error {
            GrammarError::Busy { .. } => ApiError::busy(503, error.to_string(), GRAMMARS_BUSY, RETRY_AFTER),
            error => refused(error.to_string()),
        })?);
    }
    Ok(processors)
}

/// What the library refuses, in the words of the request.
fn refused(error: EngineError) -> ApiError {
    match error {
        EngineError::Generation(GenerationError::OptionOutOfRange { option, expected, found }) => {
            let message = format!("{option}: expected {expected}, found {found}");
            ApiError::invalid(message).with_param(option)
        }
        EngineError::Generation(GenerationError::StopStringsWithoutTokenizer) => {
            let message =
                "stop: strings are searched in the text, and this model has no tokenizer to make it";
            ApiError::invalid(message).with_param("stop")
        }
        EngineError::Generation(error) => (&error).into(),
        error => ApiError::failed(error),
    }
}

impl From<&GenerationError> for ApiError {
    /// Errors of the request are reported; nothing internal is.
    fn from(error: &GenerationError) -> Self {
        let of_request = matches!(error, GenerationError::Constraint { .. });
        match error {
            GenerationError::NoTokenLeft { options } => {
                let of_api =
                    |option: &&'static str| if *option == "min_new_tokens" { "min_tokens" } else { *option };
                let options: Vec<&str> = options.iter().map(of_api).collect();
                // Kinds of structured output are not fields.
                let field = options.iter().copied().find(|option| !option.contains(' '));
                let refusal = Self::invalid(GenerationError::NoTokenLeft { options }.to_string());
                match field {
                    Some(field) => refusal.with_param(field),
                    None => refusal,
                }
            }
            error if error.is_usage() || of_request => Self::invalid(error.to_string()),
            error => Self::failed(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use candle_gpt2_engine::{ModelOptions, Silent};
    use candle_gpt2_grammar::Grammar;

    use super::*;
    use crate::ApiOptions;
    use crate::served::Compiles;

    #[derive(Debug)]
    struct AlwaysBusy;

    impl Compiles for AlwaysBusy {
        fn compile(&self, _: &Grammar, _: &[u32]) -> Result<LogitsProcessor, GrammarError> {
            Err(GrammarError::Busy { kind: "regular expression" })
        }
    }

    #[test]
    fn a_grammar_that_finds_no_room_is_worth_sending_again() {
        let model = ModelOptions::default().open(&Silent).unwrap().load(&Silent).unwrap();
        let mut served = ServedModel::new(&model, ApiOptions::default()).unwrap();
        served.compiler = Some(Box::new(AlwaysBusy));
        let request = CompletionRequest::parse(br#"{"prompt": "a", "guided_regex": "b"}"#).unwrap();
        let error = Call::of_completion(request, &served, None).unwrap_err();
        assert_eq!((error.status(), error.code()), (503, Some("grammars_busy")));
        assert_eq!(error.retry_after(), Some(Duration::from_secs(1)));
    }
}
