//! Tiny checkpoint to serve, and helpers that run requests to completion.

use std::sync::{Arc, OnceLock};

use candle_gpt2_api::{
    Answer, ApiError, ApiOptions, Call, ChatRequest, ChatTemplateChoice, CompletionRequest, Endpoint, Limits,
    ServedModel, Work,
};
use candle_gpt2_engine::{DeviceChoice, LoadedModel, ModelOptions, Silent};
use candle_gpt2_generation::{
    Drafts, Event, RequestId, Scheduler, SchedulerOptions, StopReason, TokenLogprobs,
};
use candle_gpt2_interpret::{Dictionary, DictionaryConfig};
use candle_gpt2_testing::{CheckpointFolder, fixture_path, pattern};
use serde_json::{Value, json};

/// Tolerance for `score`, which adds f32 values in a different order because it uses no cache.
pub(crate) const SCORE_TOLERANCE: f64 = 1e-5;

/// Sizes of the tiny checkpoint and its transcoders.
const LAYERS: usize = 3;
const WIDTH: usize = 28;
pub(crate) const LATENTS: usize = 13;

/// Model under test, and the served model built from it.
pub(crate) struct Tested {
    pub(crate) model: LoadedModel,
    pub(crate) served: ServedModel,
}

pub(crate) fn options() -> ApiOptions {
    ApiOptions {
        name: "tiny".into(),
        aliases: vec!["owner/tiny".into()],
        created: 1_700_000_000,
        activations: true,
        parallel: 4,
        limits: Limits { max_total_tokens: 40_000, ..Limits::default() },
        transcoders: Arc::new(transcoders().into()),
        ..ApiOptions::default()
    }
}

/// Random transcoders with [`LATENTS`] latents for the layers of the tiny checkpoint.
pub(crate) fn transcoders() -> Vec<Dictionary> {
    let transcoder = |layer: usize| {
        let random = |shape: &[usize], offset: u64| pattern(shape, 1.0, offset + 1000 * layer as u64);
        let tensors = [
            ("W_enc", random(&[WIDTH, LATENTS], 0)),
            ("b_enc", random(&[LATENTS], 300)),
            ("W_dec", random(&[LATENTS, WIDTH], 400)),
            ("b_dec", random(&[WIDTH], 700)),
        ];
        let config = json!({
            "architecture": "transcoder", "hook_name": format!("blocks.{layer}.hook_resid_mid"),
            "hook_name_out": format!("blocks.{layer}.hook_mlp_out"), "d_in": WIDTH, "d_out": WIDTH, "d_sae": LATENTS,
        });
        let config = DictionaryConfig::from_json(&config.to_string()).unwrap();
        let tensors = tensors.into_iter().map(|(name, tensor)| (name.to_owned(), tensor)).collect();
        Dictionary::from_tensors(&tensors, &config).unwrap()
    };
    (0..LAYERS).map(transcoder).collect()
}

pub(crate) fn load(folder: &std::path::Path) -> LoadedModel {
    let options = ModelOptions { model: folder.into(), device: DeviceChoice::Cpu, ..ModelOptions::default() };
    options.open(&Silent).unwrap().load(&Silent).unwrap()
}

/// Tiny checkpoint with 48 positions and 300 tokens; token 0 is the EOS token.
pub(crate) fn tiny() -> &'static Tested {
    static TINY: OnceLock<Tested> = OnceLock::new();
    TINY.get_or_init(|| {
        let model = load(&fixture_path("tiny-checkpoint"));
        let served = ServedModel::new(&model, options()).unwrap();
        Tested { model, served }
    })
}

/// Tiny checkpoint with an additional file in its folder.
pub(crate) fn tiny_with(file: &str, contents: &str, template: ChatTemplateChoice) -> Tested {
    let folder = CheckpointFolder::tiny().with(file, contents);
    let model = load(folder.path());
    let served = ServedModel::new(&model, ApiOptions { chat_template: template, ..options() }).unwrap();
    Tested { model, served }
}

/// Tiny checkpoint with an added token (id 299).
pub(crate) fn tiny_with_token(token: &str) -> Tested {
    let folder = CheckpointFolder::tiny().with_added_token(token);
    let model = load(folder.path());
    let served = ServedModel::new(&model, options()).unwrap();
    Tested { model, served }
}

/// Call for a completion body.
pub(crate) fn call(body: &Value) -> Result<Call, ApiError> {
    let request = CompletionRequest::parse(body.to_string().as_bytes())?;
    Call::of_completion(request, &tiny().served, None)
}

/// Error for an invalid body.
pub(crate) fn error(body: &Value) -> ApiError {
    match call(body) {
        Ok(_) => panic!("{body} was not rejected"),
        Err(error) => error,
    }
}

impl Tested {
    /// Runs a call to completion; returns the answer and its streamed chunks.
    pub(crate) fn run(&self, call: Call) -> Result<(Answer, Vec<String>), ApiError> {
        let options = SchedulerOptions { max_texts: 3, kv_tokens: 1024, chunk_tokens: 16 };
        let tokenizer = self.model.vocabulary().tokenizer().map(Arc::clone);
        let mut scheduler = Scheduler::new(self.model.model(), tokenizer, options).unwrap();
        let ids: Vec<RequestId> =
            call.requests.into_iter().map(|request| scheduler.submit(request).unwrap()).collect();
        let (mut answer, mut chunks) = (call.answer, Vec::new());
        while !scheduler.is_idle() {
            for event in scheduler.step().into_result().unwrap() {
                let prompt = ids.iter().position(|id| *id == event.request()).unwrap();
                chunks.extend(answer.handle_event(prompt, event)?);
            }
        }
        chunks.extend(answer.last_chunks());
        Ok((answer, chunks))
    }

    /// Response to a completion request.
    pub(crate) fn complete(&self, body: &Value) -> Value {
        let request = CompletionRequest::parse(body.to_string().as_bytes()).unwrap();
        let (answer, chunks) = self.run(Call::of_completion(request, &self.served, None).unwrap()).unwrap();
        assert_eq!(chunks, Vec::<String>::new(), "only streams emit chunks before the answer");
        serde_json::from_str(&answer.into_response()).unwrap()
    }

    /// Streamed chunks of a completion.
    pub(crate) fn stream(&self, body: &Value) -> Vec<Value> {
        let mut body = body.clone();
        body["stream"] = json!(true);
        let request = CompletionRequest::parse(body.to_string().as_bytes()).unwrap();
        let (_, chunks) = self.run(Call::of_completion(request, &self.served, None).unwrap()).unwrap();
        chunks.iter().map(|chunk| serde_json::from_str(chunk).unwrap()).collect()
    }

    /// Call for a chat body.
    pub(crate) fn chat(&self, body: &Value) -> Result<Call, ApiError> {
        Call::of_chat(ChatRequest::parse(body.to_string().as_bytes())?, &self.served, None)
    }

    /// Token ids of a text.
    pub(crate) fn ids(&self, text: &str) -> Vec<u32> {
        self.model.vocabulary().encode(text).unwrap()
    }
}

/// Reply from an endpoint that needs no model step.
pub(crate) fn reply(endpoint: Endpoint, body: &[u8]) -> Result<String, ApiError> {
    match tiny().served.read(endpoint, body, None)? {
        Work::Reply(reply) => Ok(reply.json),
        work => panic!("{work:?}"),
    }
}

pub(crate) fn begun(prompt: Vec<Option<TokenLogprobs>>) -> Event {
    Event::Begun { request: RequestId(0), cached_tokens: 0, prompt }
}

/// Token log-probability with alternatives.
pub(crate) fn logprobs(logprob: f64, alternatives: &[(u32, f64)]) -> Option<TokenLogprobs> {
    Some(TokenLogprobs { logprob, alternatives: alternatives.to_vec() })
}

pub(crate) fn token(
    id: u32,
    text: &str,
    logprobs: Option<TokenLogprobs>,
    stop_reason: Option<StopReason>,
) -> Event {
    token_of(0, id, text, logprobs, stop_reason)
}

pub(crate) fn token_of(
    sequence: usize,
    id: u32,
    text: &str,
    logprobs: Option<TokenLogprobs>,
    stop_reason: Option<StopReason>,
) -> Event {
    let (request, text, drafts) = (RequestId(0), text.to_owned(), Drafts::default());
    Event::Token { request, sequence, id, text, logprobs, stop_reason, drafts }
}
