//! Chat completions.

use candle_gpt2_api::{ApiError, ApiOptions, ChatRequest, ChatTemplateChoice, ServedModel};
use serde_json::{Value, json};

use crate::common::{Tested, load, options, tiny, tiny_with};

fn with_eos_join() -> Tested {
    tiny_with("unused", "", ChatTemplateChoice::EosJoin)
}

fn with_template(template: &str) -> Tested {
    tiny_with("chat_template.jinja", template, ChatTemplateChoice::Checkpoint)
}

fn prompt(tested: &Tested, messages: Value) -> String {
    let call = tested.chat(&json!({ "messages": messages, "max_tokens": 1 })).unwrap();
    let tokenizer = tested.model.vocabulary().tokenizer().unwrap();
    tokenizer.decode(&call.requests[0].prompt, false).unwrap()
}

fn refused(tested: &Tested, body: &Value) -> ApiError {
    match tested.chat(body) {
        Ok(_) => panic!("{body} was not rejected"),
        Err(error) => error,
    }
}

fn hello() -> Value {
    json!([{ "role": "user", "content": "Hi" }, { "role": "assistant", "content": "Yes" }, { "role": "user", "content": "so" }])
}

#[test]
fn base_model_error_suggests_alternatives() {
    let error = refused(tiny(), &json!({ "messages": hello() }));
    assert_eq!((error.status(), error.code()), (400, Some("no_chat_template")));
    assert_eq!(
        error.to_string(),
        "this model has no chat template: it continues text and was not trained on conversations; use /v1/completions, or \
         start the server with --chat-template"
    );
}

#[test]
fn eos_join_ends_every_message_with_eos() {
    let tested = with_eos_join();
    assert_eq!(prompt(&tested, hello()), "Hi<|endoftext|>Yes<|endoftext|>so<|endoftext|>");
    let parts = json!([{ "role": "user", "content": [{ "type": "text", "text": "a" }, { "type": "text", "text": "b" }] }]);
    assert_eq!(prompt(&tested, parts), "ab<|endoftext|>");
    assert_eq!(prompt(&tested, json!([{ "role": "user", "content": null }])), "<|endoftext|>");
}

/// Truncation keeps the end of a conversation, as in vLLM.
#[test]
fn truncation_keeps_the_end_of_a_conversation() {
    let tested = with_eos_join();
    let ids = tested.ids(&format!("{}<|endoftext|>", "word ".repeat(200)));
    let body = |truncated: i64| {
        json!({
            "messages": [{ "role": "user", "content": "word ".repeat(200) }], "max_tokens": 8, "truncate_prompt_tokens": truncated,
        })
    };
    for (truncated, kept) in [(5, 5), (-1, 40)] {
        let found = tested.chat(&body(truncated)).unwrap();
        assert_eq!(found.requests[0].prompt, ids[ids.len() - kept..]);
    }
}

#[test]
fn checkpoint_template_formats_the_prompt() {
    let template = "{% for message in messages %}\n  {% if message['role'] == 'user' %}\nQ: {{ message.content.strip() | upper }}\n\
                    {% else %}\nA: {{ message['content'] }}{{ eos_token }}\n{% endif %}\n{% endfor %}\n\
                    {% if add_generation_prompt %}\nA:{% endif %}";
    let expected = "Q: HI\nA: Yes<|endoftext|>\nQ: SO\nA:";
    assert_eq!(prompt(&with_template(template), hello()), expected);
    let config = json!({ "chat_template": template }).to_string();
    assert_eq!(
        prompt(&tiny_with("tokenizer_config.json", &config, ChatTemplateChoice::Checkpoint), hello()),
        expected
    );
    let named = json!({ "chat_template": [{ "name": "tool_use", "template": "x" }, { "name": "default", "template": template }] });
    let named = tiny_with("tokenizer_config.json", &named.to_string(), ChatTemplateChoice::Checkpoint);
    assert_eq!(prompt(&named, hello()), expected);
    let explicit = tiny_with("chat_template.jinja", "no", ChatTemplateChoice::Jinja(template.into()));
    assert_eq!(prompt(&explicit, hello()), expected);
}

#[test]
fn unusable_template_disables_chat_but_not_completions() {
    for (file, contents) in [
        ("chat_template.jinja", "{% for %}"),
        ("tokenizer_config.json", "{"),
        ("tokenizer_config.json", "{\"chat_template\": \"{{\"}"),
    ] {
        let tested = tiny_with(file, contents, ChatTemplateChoice::Checkpoint);
        let error = refused(&tested, &json!({ "messages": hello() }));
        assert_eq!((error.status(), error.code()), (400, Some("chat_template_unusable")), "{file}");
        assert_eq!(tested.complete(&json!({ "max_tokens": 1 }))["usage"]["completion_tokens"], 1);
    }
    // A template that the operator supplies is checked at startup.
    let options = ApiOptions { chat_template: ChatTemplateChoice::Jinja("{% if %}".into()), ..options() };
    let error = ServedModel::new(&tiny().model, options).unwrap_err();
    assert!(error.to_string().starts_with("the chat template: syntax error"), "{error}");
}

#[test]
fn untrusted_templates_are_bounded() {
    let cases = [
        (
            "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
            "ran out of fuel",
        ),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recursion"),
        ("{{ 'x' * 10000000000 }}", "ran out of fuel"),
        (
            "{% for i in range(100000) %}{{ messages[0].content * 100 }}{% endfor %}",
            "the output exceeds 1048576 bytes",
        ),
        (
            "{% set ns = namespace(x='x') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
            "ran out of fuel",
        ),
        (
            "{% set ns = namespace(x='xx') %}{% for i in range(99) %}{% set ns.x = ns.x.replace('x', 'xx') %}{% endfor %}",
            "the result is too long",
        ),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content.nothing() }}", "method"),
        ("{% include '/etc/passwd' %}", "tried to include non-existing template"),
    ];
    for (template, expected) in cases {
        let tested = tiny_with("unused", "", ChatTemplateChoice::Jinja(template.into()));
        let error = refused(&tested, &json!({ "messages": hello() }));
        assert_eq!((error.status(), error.param()), (400, Some("messages")), "{template}");
        assert!(error.to_string().contains(expected), "{template}: {error}");
    }
}

#[test]
fn response_has_the_openai_chat_shape() {
    let tested = with_eos_join();
    let body = json!({ "messages": hello(), "max_completion_tokens": 5, "temperature": 0, "logprobs": true, "top_logprobs": 2, "n": 2 });
    let (answer, _) = tested.run(tested.chat(&body).unwrap()).unwrap();
    assert!(answer.id().starts_with("chatcmpl-"));
    let response: Value = serde_json::from_str(&answer.into_response()).unwrap();
    assert_eq!((&response["object"], &response["model"]), (&json!("chat.completion"), &json!("tiny")));
    assert_eq!(response["choices"].as_array().unwrap().len(), 2);
    let choice = &response["choices"][1];
    let message = choice["message"].as_object().unwrap();
    assert_eq!((&message["role"], &message["refusal"]), (&json!("assistant"), &Value::Null));
    let content = choice["logprobs"]["content"].as_array().unwrap();
    assert_eq!(response["usage"]["completion_tokens"], 2 * content.len());
    for entry in content {
        assert_eq!(entry["top_logprobs"].as_array().unwrap().len(), 2);
        assert_eq!(entry["logprob"], entry["top_logprobs"][0]["logprob"], "greedy");
        let bytes: Vec<u8> = serde_json::from_value(entry["bytes"].clone()).unwrap();
        let token = entry["token"].as_str().unwrap();
        assert!(token.is_empty() || token.starts_with("bytes:") || token.as_bytes() == bytes, "{entry}");
    }
}

#[test]
fn chunks_start_with_the_role_and_join_to_the_response() {
    let tested = with_eos_join();
    let mut body = json!({ "messages": hello(), "max_tokens": 12, "seed": 3, "n": 2, "logprobs": true });
    let (answer, _) = tested.run(tested.chat(&body).unwrap()).unwrap();
    let whole: Value = serde_json::from_str(&answer.into_response()).unwrap();
    (body["stream"], body["stream_options"]) = (json!(true), json!({ "include_usage": true }));
    let (_, streamed) = tested.run(tested.chat(&body).unwrap()).unwrap();
    let chunks: Vec<Value> = streamed.iter().map(|chunk| serde_json::from_str(chunk).unwrap()).collect();
    let (last, chunks) = chunks.split_last().unwrap();
    assert_eq!((&last["choices"], &last["usage"]), (&json!([]), &whole["usage"]));
    for index in 0..2 {
        let pieces: Vec<&Value> = chunks
            .iter()
            .map(|chunk| &chunk["choices"][0])
            .filter(|choice| choice["index"] == index)
            .collect();
        assert_eq!(pieces[0]["delta"], json!({ "role": "assistant", "content": "" }));
        let content: String =
            pieces.iter().filter_map(|choice| choice["delta"]["content"].as_str()).collect();
        assert_eq!(whole["choices"][index]["message"]["content"], content);
        let finishes: Vec<&Value> =
            pieces.iter().map(|choice| &choice["finish_reason"]).filter(|reason| !reason.is_null()).collect();
        assert_eq!(finishes, [&whole["choices"][index]["finish_reason"]]);
        let entries: Vec<Value> = pieces
            .iter()
            .flat_map(|choice| choice["logprobs"]["content"].as_array().unwrap().clone())
            .collect();
        assert_eq!(json!(entries), whole["choices"][index]["logprobs"]["content"]);
    }
    assert!(chunks.iter().all(|chunk| chunk["object"] == "chat.completion.chunk"));
}

#[test]
fn max_tokens_defaults_to_the_rest_of_the_context() {
    let tested = with_eos_join();
    let call = tested.chat(&json!({ "messages": hello() })).unwrap();
    assert_eq!(call.requests[0].prompt.len() + call.requests[0].config.max_new_tokens, 48);
    let long = json!([{ "role": "user", "content": "word ".repeat(60) }]);
    let error = refused(&tested, &json!({ "messages": long }));
    assert_eq!((error.code(), error.param()), (Some("context_length_exceeded"), Some("messages")));
    let error = refused(&tested, &json!({ "messages": hello(), "max_tokens": 48 }));
    assert_eq!(error.code(), Some("context_length_exceeded"));
}

#[test]
fn invalid_messages_report_the_field() {
    let part = json!([{ "role": "user", "content": [{ "type": "image_url", "image_url": {} }] }]);
    let cases = [
        (json!({}), "messages: expected a list of at least one message, found none"),
        (json!({ "messages": "Hi" }), "messages: expected a list of messages, found \"Hi\""),
        (
            json!({ "messages": [{ "content": "Hi" }] }),
            "messages[0]: expected an object with a role, found {\"content\":\"Hi\"}",
        ),
        (
            json!({ "messages": [{ "role": "user", "content": 5 }] }),
            "messages[0].content: expected a string or a list of parts, found 5",
        ),
        (json!({ "messages": part }), "messages[0].content[0].type: expected `text`, found \"image_url\""),
        (json!({ "messages": hello(), "top_logprobs": 2 }), "top_logprobs: requires logprobs to be true"),
        (json!({ "messages": hello(), "logprobs": 2 }), "logprobs: expected true or false, found 2"),
        (
            json!({ "messages": hello(), "max_completion_tokens": -1 }),
            "max_completion_tokens: expected a whole number from 0 to 4294967295, found -1",
        ),
        (
            json!({ "messages": hello(), "chat_template": "x" }),
            "chat_template: this server does not support this field; set the template with the server's --chat-template",
        ),
    ];
    for (body, expected) in cases {
        let error = ChatRequest::parse(body.to_string().as_bytes()).unwrap_err();
        assert_eq!(error.to_string(), expected);
    }
}

#[test]
fn eos_join_needs_an_eos_token() {
    let folder = candle_gpt2_testing::CheckpointFolder::tiny()
        .with("generation_config.json", "{\"eos_token_id\": []}");
    let model = load(folder.path());
    let options = ApiOptions { chat_template: ChatTemplateChoice::EosJoin, ..options() };
    let error = ServedModel::new(&model, options).unwrap_err();
    assert_eq!(
        error.to_string(),
        "the chat template: eos-join needs an end-of-text token, and this model has none"
    );
}
