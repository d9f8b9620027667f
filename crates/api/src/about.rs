//! Responses that describe the server and its model.

use candle_gpt2_generation::{GenerationOptions, OptionRow, RequestField};
use percent_encoding::percent_decode_str;
use serde_json::{Value, json};

use crate::options::{request_options, sampling};
use crate::{ApiError, ServedModel};

/// Response of `/v1/models`, which lists the model under its name and each alias.
pub(crate) fn models(served: &ServedModel) -> String {
    let names = std::iter::once(&served.options.name).chain(&served.options.aliases);
    let data: Vec<Value> = names.map(|name| described(name, served)).collect();
    json!({ "object": "list", "data": data }).to_string()
}

/// Response of `/v1/models/{id}`; `id` is the path segment, still percent-encoded.
///
/// # Errors
/// 404 if the model does not exist.
///
/// ```
/// use candle_gpt2_api::{ApiOptions, ServedModel, model};
///
/// # let loaded = candle_gpt2_engine::ModelOptions::default().open(&candle_gpt2_engine::Silent)?.load(&candle_gpt2_engine::Silent)?;
/// # let served = ServedModel::new(&loaded, ApiOptions { name: "built-in".into(), ..ApiOptions::default() })?;
/// assert!(model("built-in", &served)?.contains(r#""max_model_len":512"#));
/// assert_eq!(model("another", &served).map_err(|error| error.status()), Err(404));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn model(id: &str, served: &ServedModel) -> Result<String, ApiError> {
    // Invalid UTF-8 never matches a model name.
    let name = percent_decode_str(id).decode_utf8_lossy();
    served.check_named(&name)?;
    Ok(described(&name, served).to_string())
}

/// Model description: OpenAI's keys, vLLM's `root` and `max_model_len`, and llama.cpp's `meta`.
fn described(name: &str, served: &ServedModel) -> Value {
    let config = served.config();
    json!({
        "id": name,
        "object": "model",
        "created": served.options.created,
        "owned_by": "gpt2",
        "root": served.name(),
        "max_model_len": config.n_positions,
        "meta": {
            "n_vocab": config.vocab_size,
            "n_ctx_train": config.n_positions,
            "n_embd": config.n_embd,
            "n_params": served.parameters,
        },
    })
}

/// Response of `/version`.
pub(crate) fn version() -> String {
    json!({ "version": env!("CARGO_PKG_VERSION") }).to_string()
}

/// Options that `/props` reports under llama.cpp's names, in addition to `temperature`.
const LLAMA_CPP_NAMES: [&str; 7] =
    ["top_k", "top_p", "min_p", "typical_p", "repeat_penalty", "presence_penalty", "frequency_penalty"];

/// Response of `/props`: the default request settings, under llama.cpp's names.
pub(crate) fn props(served: &ServedModel) -> String {
    let config = sampling(GenerationOptions::default(), served);
    let values = json!(config);
    let mut params = json!({
        "n_predict": config.max_new_tokens,
        "temperature": if config.do_sample { config.temperature } else { 0.0 },
    });
    for name in LLAMA_CPP_NAMES {
        let is_named =
            |option: &OptionRow, field: RequestField| option.name == name || field.alias == Some(name);
        let option = request_options().find(|(option, field)| is_named(option, *field));
        let value = option.and_then(|(option, _)| values.get(option.name)).filter(|value| !value.is_null());
        params[name] = value.cloned().unwrap_or(json!(0.0));
    }
    json!({
        "default_generation_settings": { "n_ctx": served.config().n_positions, "params": params },
        "total_slots": served.options.parallel,
        "model_path": served.name(),
        "model_alias": served.name(),
        "build_info": concat!("gpt2-", env!("CARGO_PKG_VERSION")),
    })
    .to_string()
}

/// Response of `/health` when the server is ready; otherwise the route returns an error.
pub(crate) fn health() -> String {
    json!({ "status": "ok" }).to_string()
}
