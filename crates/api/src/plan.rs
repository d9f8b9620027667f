//! Turns a parsed body into a call: scheduler requests and the answer that collects their output.

use std::sync::Arc;

use candle_gpt2_engine::{EngineError, banned_tokens};
use candle_gpt2_generation::{AllowedTokens, GenerationConfig, GenerationError, LogitsProcessor, Request};
use candle_gpt2_grammar::GrammarError;

use crate::answer::{Head, PromptAnswer, ResponseOptions, Shape};
use crate::body::{Count, Seed, Text, TokenIds};
use crate::completion::Prompt;
use crate::error::RETRY_AFTER;
use crate::options::Options;
use crate::prompts::{PromptTokens, check_context, lost_note, tokens_of, unreadable};
use crate::recorded::observers;
use crate::served::fresh_number;
use crate::{Answer, ApiError, Call, ChatRequest, CompletionRequest, ServedModel, Warnings};

/// Error code for a request that found no free grammar worker; it may succeed a moment later.
///
/// ```
/// assert_eq!(candle_gpt2_api::GRAMMARS_BUSY, "grammars_busy");
/// ```
pub const GRAMMARS_BUSY: &str = "grammars_busy";

/// Parsed and validated request, shared by both completion routes.
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
    /// Creates a call for `/v1/completions`.
    ///
    /// Calls with the same `reuse` value may share the KV cache of a common prefix.
    ///
    /// # Errors
    /// If the model cannot serve the request.
    pub fn of_completion(
        request: CompletionRequest,
        served: &ServedModel,
        reuse: Option<u64>,
    ) -> Result<Self, ApiError> {
        let CompletionRequest { prompts, best_of, echo, logprobs, options, mut warnings } = request;
        served.reject_unknown_fields(&warnings)?;
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
        let prompts = tokens_of(
            prompts,
            options.fields.truncate_prompt_tokens,
            options.reserved_tokens(usual, served),
            served,
        )?;
        let longest = prompts.iter().map(|prompt| prompt.ids.len()).max().unwrap_or(0);
        let max_tokens = options.max_tokens.unwrap_or(most.min(n_positions.saturating_sub(longest).max(1)));
        if let (true, Some(logprobs)) = (echo, logprobs) {
            check_echo(&prompts, options.fields.n.0, logprobs)?;
        }
        let shape = Shape::Completion;
        Plan { shape, prompts, max_tokens, best_of, echo, logprobs, options, warnings }
            .into_call(served, reuse)
    }

    /// Creates a call for `/v1/chat/completions`.
    ///
    /// # Errors
    /// If the model cannot serve the request, for example because it has no chat template.
    pub fn of_chat(request: ChatRequest, served: &ServedModel, reuse: Option<u64>) -> Result<Self, ApiError> {
        served.reject_unknown_fields(&request.warnings)?;
        served.check_name(request.options.fields.model.as_ref())?;
        let (ids, lost) = request.prompt(served)?;
        let ChatRequest { logprobs, options, mut warnings, .. } = request;
        warnings.add(lost);
        let capacity = served.config().n_positions.saturating_sub(ids.len()).max(1);
        let max_tokens = options.max_tokens.unwrap_or(capacity);
        check_limits(served, 1, ("n", options.fields.n.0), max_tokens, logprobs)?;
        check_context("messages", ids.len(), max_tokens, served)?;
        let prompts = vec![PromptTokens { ids, echo_start: 0, path: "messages".into() }];
        let (shape, best_of) = (Shape::Chat, options.fields.n.0);
        Plan { shape, prompts, max_tokens, best_of, echo: false, logprobs, options, warnings }
            .into_call(served, reuse)
    }
}

/// Rejects requests that exceed the server's limits before doing any work.
fn check_limits(
    served: &ServedModel,
    prompts: usize,
    (field, texts): (&'static str, usize),
    max_tokens: usize,
    logprobs: Option<usize>,
) -> Result<(), ApiError> {
    let limits = &served.options.limits;
    // `check_context` rejects a prompt whose tokens and new tokens exceed the context.
    let of_text = max_tokens.min(served.config().n_positions);
    let total = prompts.saturating_mul(texts).saturating_mul(of_text);
    let checks = [
        (field, "completions per prompt (n, best_of)", limits.max_n, texts),
        ("logprobs", "logprobs", limits.max_logprobs, logprobs.unwrap_or(0)),
        ("max_tokens", "new tokens (prompts × completions × max_tokens)", limits.max_total_tokens, total),
    ];
    for (param, what, most, found) in checks {
        if found > most {
            let message = format!("{param}: this server accepts at most {most} {what}, found {found}");
            return Err(ApiError::invalid(message).with_param(param));
        }
    }
    Ok(())
}

/// Rejects requests for too many echoed log-probabilities.
fn check_echo(prompts: &[PromptTokens], texts: usize, logprobs: usize) -> Result<(), ApiError> {
    /// Maximum number of log-probabilities, each with its token's text: about 20 MB.
    const MAX_ECHOED_LOGPROBS: usize = 1 << 19;
    let tokens: usize = prompts.iter().map(|prompt| prompt.ids.len()).sum();
    let total = tokens.saturating_mul(texts).saturating_mul(logprobs + 1);
    if total > MAX_ECHOED_LOGPROBS {
        let message = format!(
            "logprobs: a response holds at most {MAX_ECHOED_LOGPROBS} log-probabilities of echoed prompts, but {total} were \
             requested: {tokens} tokens × {texts} completions × {} per token; request fewer",
            logprobs + 1
        );
        return Err(ApiError::invalid(message).with_param("logprobs"));
    }
    Ok(())
}

impl Plan {
    fn into_call(self, served: &ServedModel, reuse: Option<u64>) -> Result<Call, ApiError> {
        let Self { shape, prompts, max_tokens, best_of, echo, logprobs, mut options, warnings } = self;
        let inside = std::mem::take(&mut options.inside).validate(served)?;
        let activation_bytes = inside.bytes(&prompts, (best_of, max_tokens), served)?;
        let (stream, Count(n)) = (options.fields.stream, options.fields.n);
        // Greedy completions of a prompt are identical.
        let sampling = options.sampling(served);
        let is_copied = !sampling.do_sample && best_of > 1;
        let made = if is_copied { 1 } else { best_of };
        let seed = options.fields.seed.or_else(|| sampling.do_sample.then(fresh_seed));
        let config = Arc::new(config_of(&options, sampling, max_tokens, made, seed, served)?);
        let processors = processors_of(&options, &config, served)?;
        let prompt_logprobs = logprobs.filter(|_| echo);
        // Ranking `best_of` candidates needs log-probabilities.
        let logprobs_made = logprobs.or((made > n).then_some(0));
        let salt = options.fields.cache_salt.as_ref().map(|Text(salt)| salt.as_str());
        let share = options.fields.cache_prompt.then(|| served.reuse(reuse, salt)).flatten();
        let streams = (0..).step_by(best_of);
        let inspected = prompts.iter().map(|prompt| {
            // One inspection per completion, because each is steered and recorded separately.
            inside.inspections(prompt.ids.len(), (made, max_tokens), served)
        });
        let inspected = inspected.collect::<Result<Vec<_>, _>>()?;
        let requests = prompts.iter().zip(&inspected).zip(streams).map(|((prompt, inspected), stream)| {
            let mut request = Request::new(prompt.ids.clone(), Arc::clone(&config));
            request.processors.clone_from(&processors);
            (request.stream, request.logprobs, request.prompt_logprobs) =
                (stream, logprobs_made, prompt_logprobs);
            (request.reuse, request.observers) = (share, observers(inspected));
            request.echoed = echo.then_some(prompt.echo_start);
            request
        });
        let requests = requests.collect();
        let answer_of = |(PromptTokens { ids, echo_start, path }, inspected)| {
            let answer = PromptAnswer::new(ids, echo_start, path, (made, echo), &served.pieces)?;
            Ok(answer.inspected(inspected))
        };
        let prompts = prompts.into_iter().zip(inspected).map(answer_of).collect::<Result<_, ApiError>>()?;
        let head = head_of(shape, &options, seed, served);
        let response = ResponseOptions {
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
            shown: inside.shown_sites(served),
            is_steered: inside.is_steered(),
        };
        let answer = Answer::new(head, response, Arc::clone(&served.pieces), prompts, warnings);
        Ok(Call { requests, answer, stream, activation_bytes })
    }
}

/// Random seed of 53 bits, so that JSON parsers that use f64 represent the seed exactly.
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
    sampling: GenerationConfig,
    max_tokens: usize,
    texts: usize,
    seed: Option<Seed>,
    served: &ServedModel,
) -> Result<GenerationConfig, ApiError> {
    if sampling.min_new_tokens > max_tokens {
        let found = sampling.min_new_tokens;
        let message =
            format!("min_tokens: expected at most max_tokens, which is {max_tokens}, found {found}");
        return Err(ApiError::invalid(message).with_param("min_tokens"));
    }
    for (ids, _) in &sampling.sequence_bias {
        ids.iter().try_for_each(|id| served.check_token(*id, || format!("logit_bias.{id}")))?;
    }
    for (index, id) in options.fields.stop_token_ids.0.iter().enumerate() {
        served.check_token(*id, || format!("stop_token_ids[{index}]"))?;
    }
    // The checkpoint's files contribute only model properties, such as end tokens; the request controls
    // sampling.
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
        ..sampling
    };
    served.defaults.complete(config).map_err(refused)
}

/// Token sequences of banned words.
fn bad_words(options: &Options, served: &ServedModel) -> Result<Vec<Vec<u32>>, ApiError> {
    let mut sequences = Vec::new();
    for (index, Text(word)) in options.fields.bad_words.0.iter().enumerate() {
        let refused = |error: EngineError| unreadable(&error, &format!("bad_words[{index}]"));
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
        for (index, id) in ids.iter().enumerate() {
            served.check_token(*id, || format!("allowed_token_ids[{index}]"))?;
        }
        let ids = ids.clone();
        processors.push(LogitsProcessor::AllowedTokens(AllowedTokens::new(move |_| ids.clone())));
    }
    if let Some((path, grammar)) = &options.grammar {
        let refused = |what: String| ApiError::invalid(format!("{path}: {what}")).with_param(path.clone());
        let without = || match served.vocabulary.tokenizer() {
            Some(_) => refused("this server does not support structured output; remove this field".into()),
            None => refused("structured output needs a tokenizer, and this model has none".into()),
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

/// Converts library errors to messages about request fields.
fn refused(error: EngineError) -> ApiError {
    match error {
        EngineError::Generation(GenerationError::OptionOutOfRange { option, expected, found }) => {
            let message = format!("{option}: expected {expected}, found {found}");
            ApiError::invalid(message).with_param(option)
        }
        EngineError::Generation(GenerationError::StopStringsWithoutTokenizer) => {
            let message = "stop: stop strings need a tokenizer, and this model has none";
            ApiError::invalid(message).with_param("stop")
        }
        EngineError::Generation(error) => (&error).into(),
        error => ApiError::failed(error),
    }
}

impl From<&GenerationError> for ApiError {
    /// Reports errors in the request and hides internal errors.
    fn from(error: &GenerationError) -> Self {
        let of_request = matches!(error, GenerationError::Constraint { .. });
        match error {
            GenerationError::NoTokenLeft { options } => {
                let of_api =
                    |option: &&'static str| if *option == "min_new_tokens" { "min_tokens" } else { *option };
                let options: Vec<&str> = options.iter().map(of_api).collect();
                // A name that contains a space is a kind of structured output, not a field.
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
    fn busy_grammar_compiler_returns_a_retryable_error() {
        let model = ModelOptions::default().open(&Silent).unwrap().load(&Silent).unwrap();
        let mut served = ServedModel::new(&model, ApiOptions::default()).unwrap();
        served.compiler = Some(Box::new(AlwaysBusy));
        let request = CompletionRequest::parse(br#"{"prompt": "a", "guided_regex": "b"}"#).unwrap();
        let error = Call::of_completion(request, &served, None).unwrap_err();
        assert_eq!((error.status(), error.code()), (503, Some("grammars_busy")));
        assert_eq!(error.retry_after(), Some(Duration::from_secs(1)));
    }
}
