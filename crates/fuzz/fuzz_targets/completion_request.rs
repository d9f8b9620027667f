//! Bodies of the server's routes, with the small model inside the program: what is read of them, and what becomes of that before
//! anything is computed.
#![no_main]

use std::sync::LazyLock;

use candle_gpt2_api::{ApiOptions, Call, ChatRequest, ChatTemplateChoice, CompletionRequest, ServedModel};
use candle_gpt2_engine::{ModelOptions, Silent};

static SERVED: LazyLock<ServedModel> = LazyLock::new(|| {
    let opened = ModelOptions::default().open(&Silent).expect("the model inside the program");
    let model = opened.load(&Silent).expect("its weights");
    let options = ApiOptions {
        name: "built-in".into(),
        chat_template: ChatTemplateChoice::EosJoin,
        ..ApiOptions::default()
    };
    ServedModel::new(&model, options).expect("a model that can be served")
});

libfuzzer_sys::fuzz_target!(|body: &[u8]| {
    let completion =
        CompletionRequest::parse(body).and_then(|request| Call::of_completion(request, &SERVED, Some(1)));
    let chat = ChatRequest::parse(body).and_then(|request| Call::of_chat(request, &SERVED, None));
    for call in [completion, chat] {
        match call {
            Ok(call) => assert!(!call.requests.is_empty() && call.requests.len() <= 64),
            // Whatever is wrong is the body's fault, and is told as JSON.
            Err(error) => {
                assert!(matches!(error.status(), 400 | 404) && error.to_json().starts_with("{\"error\""))
            }
        }
    }
    for answer in [candle_gpt2_api::tokenize(body, &SERVED), candle_gpt2_api::detokenize(body, &SERVED)] {
        match answer {
            Ok(reply) => assert!(reply.json.starts_with('{') && reply.json.ends_with('}')),
            Err(error) => assert!(matches!(error.status(), 400 | 404)),
        }
    }
});
