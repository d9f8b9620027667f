//! Fuzzes request bodies for the server's endpoints, with the small built-in model.
//!
//! Covers parsing and every other step before the computation.
#![no_main]

use std::sync::LazyLock;

use candle_gpt2_api::{ApiOptions, ChatTemplateChoice, Endpoint, ServedModel, Work};
use candle_gpt2_engine::{ModelOptions, Silent};

static SERVED: LazyLock<ServedModel> = LazyLock::new(|| {
    let opened = ModelOptions::default().open(&Silent).expect("the model inside the program");
    let model = opened.load(&Silent).expect("its weights");
    let options = ApiOptions {
        name: "built-in".into(),
        chat_template: ChatTemplateChoice::EosJoin,
        activations: true,
        ..ApiOptions::default()
    };
    ServedModel::new(&model, options).expect("a model that can be served")
});

const ENDPOINTS: [Endpoint; 13] = [
    Endpoint::Completions,
    Endpoint::ChatCompletions,
    Endpoint::Tokenize,
    Endpoint::Detokenize,
    Endpoint::Embeddings,
    Endpoint::Activations,
    Endpoint::LookAttention,
    Endpoint::LookLens,
    Endpoint::LookHead,
    Endpoint::LookNext,
    Endpoint::LookFeatures,
    Endpoint::LookFeature,
    Endpoint::LookGraph,
];

libfuzzer_sys::fuzz_target!(|body: &[u8]| {
    for endpoint in ENDPOINTS {
        match SERVED.read(endpoint, body, Some(1)) {
            Ok(Work::Texts(call)) => assert!(!call.requests.is_empty() && call.requests.len() <= 64),
            Ok(Work::Reply(reply)) => assert!(reply.json.starts_with('{') && reply.json.ends_with('}')),
            Ok(_) => {}
            // Every error must blame the request (400 or 404) and be reported as JSON.
            Err(error) => {
                assert!(matches!(error.status(), 400 | 404) && error.to_json().starts_with("{\"error\""))
            }
        }
    }
});
