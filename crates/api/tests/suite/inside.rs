//! Steering and activations.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use base64::{Engine, engine::general_purpose::STANDARD};
use candle_core::{DType, Device, Tensor};
use candle_gpt2::{LogitsFor, Pass};
use candle_gpt2_api::{
    Answer, ApiError, ApiOptions, Call, ChatTemplateChoice, CompletionRequest, Endpoint, Limits, ServedModel,
    Work,
};
use candle_gpt2_generation::{Scheduler, SchedulerOptions};
use candle_gpt2_interpret::{ControlVector, Dictionary, DictionaryConfig, Run, named_sites};
use candle_gpt2_testing::{pattern, values};
use serde_json::{Value, json};

use crate::common::{Tested, call, error, options, tiny, tiny_with};

/// Tolerance for log-probabilities that differently shaped products compute from the same input.
const SAME_LOGPROBS: f64 = 1e-4;

fn width() -> usize {
    tiny().model.config().n_embd
}

fn last_block() -> String {
    format!("blocks.{}.hook_resid_post", tiny().model.config().n_layer - 1)
}

/// Random direction, as a list of numbers.
fn direction(seed: u64) -> Vec<f64> {
    values(&pattern(&[width()], 3.0, seed))
}

/// First choice in a completion response.
fn choice(body: &Value) -> Value {
    tiny().complete(body)["choices"][0].take()
}

fn floats(data: &Value) -> Vec<f64> {
    data.as_array().unwrap().iter().map(|number| number.as_f64().unwrap()).collect()
}

/// Answer from `/v1/activations` for a body.
fn activations(served: &ServedModel, body: &Value) -> Result<Answer, ApiError> {
    match served.read(Endpoint::Activations, body.to_string().as_bytes(), None)? {
        Work::Texts(call) => Ok(tiny().run(call)?.0),
        work => panic!("{work:?}"),
    }
}

fn shown(body: &Value) -> Value {
    serde_json::from_str(&activations(&tiny().served, body).unwrap().into_response()).unwrap()
}

/// The last block's hidden states reproduce the log-probabilities in the same response.
///
/// This holds for the prompt and the completion, with and without steering.
#[test]
fn last_hidden_states_reproduce_the_logprobs() {
    let (model, prompt) = (tiny().model.model(), [5, 6, 7, 130, 200]);
    let steering = json!([{ "site": "blocks.0.hook_resid_post", "vector": direction(1), "scale": 0.5 }]);
    for (steering, max_tokens) in [(json!([]), 7), (steering, 7), (json!([]), 0)] {
        let choice = choice(&json!({
            "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "logprobs": 0, "echo": true, "ignore_eos": true,
            "steering": steering,
            "activations": { "sites": [last_block()], "positions": "all", "of": "both", "encoding_format": "float" },
        }));
        let entry = &choice["activations"][0];
        let read = prompt.len() + 7_usize.min(max_tokens).saturating_sub(1);
        assert_eq!(entry["site"], last_block());
        assert_eq!(entry["shape"], json!([read, width()]));
        assert_eq!(entry["positions"], json!((0..read).collect::<Vec<_>>()));
        let hidden = Tensor::from_vec(floats(&entry["data"]), (1, read, width()), &Device::Cpu).unwrap();
        let hidden = hidden.to_dtype(DType::F32).unwrap();
        let logits =
            model.forward_from(model.config().n_layer, hidden, LogitsFor::EveryToken, &mut Pass::inference());
        let logits = logits.unwrap().squeeze(0).unwrap().to_vec2::<f32>().unwrap();
        let (ids, logprobs) =
            (&choice["activations_info"]["token_ids"], &choice["logprobs"]["token_logprobs"]);
        assert_eq!(ids.as_array().unwrap().len(), prompt.len() + max_tokens);
        assert_eq!(logprobs[0], Value::Null);
        for (position, logits) in logits.iter().enumerate().take(ids.as_array().unwrap().len() - 1) {
            let next = usize::try_from(ids[position + 1].as_u64().unwrap()).unwrap();
            let sum: f64 = logits.iter().map(|logit| f64::from(*logit).exp()).sum();
            let logprob = f64::from(logits[next]) - sum.ln();
            let found = logprobs[position + 1].as_f64().unwrap();
            assert!((found - logprob).abs() < SAME_LOGPROBS, "token {}: {found} for {logprob}", position + 1);
        }
    }
}

/// Recording, an empty steering list and a scale of 0 leave every byte of the response unchanged.
#[test]
fn recording_and_zero_scale_do_not_change_the_text() {
    let body = |extra: Value| {
        let mut body = json!({
            "prompt": ["The", "A word"], "n": 2, "seed": 3, "logprobs": 2, "max_tokens": 9, "temperature": 1.2,
        });
        body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        body
    };
    let plain = tiny().complete(&body(json!({})))["choices"].take();
    let vector = direction(2);
    for mode in ["add", "project_out", "replace"] {
        let steering =
            |scale: f64| json!([{ "site": "resid_pre1", "vector": vector, "mode": mode, "scale": scale }]);
        let steered =
            |scale| tiny().complete(&body(json!({ "steering": steering(scale) })))["choices"].take();
        assert_eq!(steered(0.0), plain, "{mode}");
        assert_ne!(steered(1.0), plain, "{mode}");
    }
    let sites = ["hook_resid_post", "hook_embed", "attn_out0", "mlp_out0"];
    let mut recorded =
        tiny().complete(&body(json!({ "activations": { "sites": sites, "of": "both" } })))["choices"].take();
    for choice in recorded.as_array_mut().unwrap() {
        let choice = choice.as_object_mut().unwrap();
        assert!(choice.remove("activations").is_some() && choice.remove("activations_info").is_some());
    }
    assert_eq!(recorded, plain);
}

/// Adding a vector at `hook_resid_post` has the same effect as `--control-vector`.
#[test]
fn steering_matches_a_control_vector() {
    let (vector, scale) = (pattern(&[width()], 3.0, 4), 0.75);
    let directions = BTreeMap::from([(0, vector.clone())]);
    let control = ControlVector::new(directions, tiny().model.config()).unwrap();
    let control = Arc::new(Mutex::new(control.scaled(scale, 0..=0).unwrap()));
    let model = tiny().model.clone().observed_by(control);
    let served = ServedModel::new(&model, options()).unwrap();
    let steered = Tested { model, served };
    let body = json!({ "prompt": "The word", "max_tokens": 12, "temperature": 0, "logprobs": 3 });
    let expected = steered.complete(&body)["choices"].take();
    let bytes: Vec<u8> = vector.to_vec1::<f32>().unwrap().into_iter().flat_map(f32::to_le_bytes).collect();
    for vector in [json!(values(&vector)), json!(STANDARD.encode(bytes))] {
        let mut body = body.clone();
        body["steering"] = json!([{ "site": "blocks.0.hook_resid_post", "vector": vector, "scale": scale }]);
        assert_eq!(tiny().complete(&body)["choices"], expected);
    }
    assert_ne!(tiny().complete(&body)["choices"], expected);
}

/// Sixteen concurrent clients, one steered and one recorded, get the same responses as alone.
#[test]
fn concurrent_clients_get_the_same_answers_as_alone() {
    let bodies: Vec<Value> = (0..16)
        .map(|client| {
            let mut body = json!({
                "prompt": [9, 8, 7, 6, 5, client], "max_tokens": 5 + client, "seed": client, "logprobs": 1,
                "temperature": if client % 2 == 0 { 0.0 } else { 1.0 },
            });
            if client == 4 {
                body["steering"] = json!([{ "site": "resid_pre1", "vector": direction(7) }]);
            }
            if client == 11 {
                body["activations"] =
                    json!({ "sites": ["resid_post", "mlp_post0"], "positions": "all", "of": "both" });
            }
            body
        })
        .collect();
    let alone: Vec<Value> = bodies.iter().map(|body| tiny().complete(body)["choices"].take()).collect();
    assert!(alone[11][0]["activations"][0]["shape"][0].as_u64() > Some(6));
    let options = SchedulerOptions { max_texts: 16, kv_tokens: 1024, chunk_tokens: 16 };
    let tokenizer = tiny().model.vocabulary().tokenizer().map(Arc::clone);
    let mut scheduler = Scheduler::new(tiny().model.model(), tokenizer, options).unwrap();
    let (mut answers, mut clients) = (Vec::new(), BTreeMap::new());
    for body in &bodies {
        let request = CompletionRequest::parse(body.to_string().as_bytes()).unwrap();
        let Call { mut requests, answer, .. } =
            Call::of_completion(request, &tiny().served, Some(1)).unwrap();
        clients.insert(scheduler.submit(requests.remove(0)).unwrap(), answers.len());
        answers.push(answer);
    }
    while !scheduler.is_idle() {
        for event in scheduler.step().into_result().unwrap() {
            answers[clients[&event.request()]].handle_event(0, event).unwrap();
        }
    }
    for (client, (answer, alone)) in answers.into_iter().zip(&alone).enumerate() {
        let response: Value = serde_json::from_str(&answer.into_response()).unwrap();
        assert!(response["choices"] == *alone, "client {client}");
    }
}

/// Positions selected from a part of the sequence have the same values as in the whole sequence.
#[test]
fn positions_select_tokens_of_the_sequence() {
    let prompt = [5, 6, 7, 130];
    let select = |positions: Value, part: &str| {
        let entry = choice(&json!({
            "prompt": prompt, "max_tokens": 5, "temperature": 0, "ignore_eos": true,
            "activations": { "sites": ["resid_post0"], "positions": positions, "of": part, "encoding_format": "float" },
        }))["activations"][0]
            .take();
        let found: Vec<usize> = serde_json::from_value(entry["positions"].clone()).unwrap();
        assert_eq!(entry["shape"], json!([found.len(), width()]));
        (found, floats(&entry["data"]))
    };
    let (positions, whole) = select(json!("all"), "both");
    assert_eq!(positions, (0..8).collect::<Vec<_>>());
    for (positions, part, expected) in [
        (json!(null), "prompt", vec![3]),
        (json!("last"), "completion", vec![7]),
        (json!("last"), "both", vec![7]),
        (json!("all"), "prompt", vec![0, 1, 2, 3]),
        (json!("all"), "completion", vec![4, 5, 6, 7]),
        (json!([2, 0, 2]), "prompt", vec![0, 2]),
        (json!([3, 1]), "completion", vec![5, 7]),
        (json!([7, 0]), "both", vec![0, 7]),
        (json!([]), "both", vec![]),
    ] {
        let (selected, found) = select(positions.clone(), part);
        assert_eq!(selected, expected, "{positions} of {part}");
        let numbers: Vec<f64> =
            selected.iter().flat_map(|position| &whole[position * width()..][..width()]).copied().collect();
        assert!(found == numbers, "{positions} of {part}");
    }
}

/// Values have TransformerLens' shape without the batch axis, and both encodings agree bitwise.
#[test]
fn every_hook_point_has_the_same_bits_in_both_encodings() {
    let body = |format: Value| {
        json!({
            "prompt": [5, 6, 7, 130], "max_tokens": 3, "temperature": 0, "ignore_eos": true,
            "activations": { "sites": ["*"], "positions": [1, 3], "encoding_format": format },
        })
    };
    let (written, listed) = (choice(&body(json!(null))), choice(&body(json!("float"))));
    let (written, listed) = (&written["activations"], listed["activations"].as_array().unwrap());
    let config = tiny().model.config();
    let sites = named_sites("*", config.n_layer).unwrap();
    assert_eq!(listed.len(), sites.len() - 1, "all but the logits");
    let ids = [5, 6, 7, 130];
    let record = Run::new(tiny().model.model(), &ids).unwrap().record(sites.clone()).unwrap();
    for ((entry, written), site) in listed.iter().zip(written.as_array().unwrap()).zip(&sites) {
        assert_eq!((&entry["site"], &entry["dtype"]), (&json!(site.to_string()), &json!("float32")));
        let rows = Tensor::new(&[1_u32, 3], &Device::Cpu).unwrap();
        let expected = record.get(*site).unwrap().index_select(&rows, site.kind.token_axis()).unwrap();
        assert_eq!(entry["shape"], json!(expected.dims()[1..]), "{site}");
        let bytes = STANDARD.decode(written["data"].as_str().unwrap()).unwrap();
        let numbers = bytes.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes));
        let expected = expected.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        let listed = entry["data"].as_array().unwrap();
        assert_eq!(listed.len(), expected.len());
        for ((listed, number), expected) in listed.iter().zip(numbers).zip(expected) {
            match listed.as_f64() {
                #[expect(clippy::cast_possible_truncation, reason = "it was written as f32")]
                Some(listed) => {
                    assert_eq!((listed as f32).to_bits(), number.to_bits());
                    assert!((number - expected).abs() < 2e-4, "{site}: {number} for {expected}");
                }
                // JSON has null for the attention scores that the mask hides.
                None => assert_eq!((number, expected), (f32::NEG_INFINITY, f32::NEG_INFINITY), "{site}"),
            }
        }
    }
}

/// Each completion has its own activations; copies of a greedy completion share one set.
#[test]
fn each_choice_has_its_own_activations() {
    for (temperature, best_of) in [(0.0, 3), (1.5, 3), (1.5, 5)] {
        let response = tiny().complete(&json!({
            "prompt": ["The", "A word"], "n": 3, "best_of": best_of, "seed": 1, "temperature": temperature,
            "max_tokens": 6, "logprobs": 0, "ignore_eos": true,
            "activations": { "sites": ["hook_embed", "blocks.1.hook_resid_post"], "positions": "all", "of": "both" },
        }));
        let choices = response["choices"].as_array().unwrap();
        assert_eq!(choices.len(), 6);
        for choice in choices {
            let ids: Vec<u32> =
                serde_json::from_value(choice["activations_info"]["token_ids"].clone()).unwrap();
            let sites = named_sites("hook_embed,blocks.1.hook_resid_post", 2).unwrap();
            let read = &ids[..ids.len() - 1];
            let record = Run::new(tiny().model.model(), read).unwrap().record(sites.clone()).unwrap();
            for (entry, site) in choice["activations"].as_array().unwrap().iter().zip(sites) {
                let bytes = STANDARD.decode(entry["data"].as_str().unwrap()).unwrap();
                let found = bytes.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes));
                let expected = record.get(site).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
                assert_eq!(bytes.len(), 4 * expected.len());
                assert!(
                    found.zip(expected).all(|(found, expected)| (found - expected).abs() < 2e-4),
                    "{site}"
                );
            }
        }
    }
}

/// A stream sends each choice's activations once, in the last chunk; chat responses have them too.
#[test]
fn streams_send_activations_in_the_last_chunk() {
    let activations = json!({ "sites": ["resid_post0"], "positions": "all", "of": "both" });
    let body = json!({
        "prompt": "The", "n": 2, "seed": 1, "max_tokens": 5, "temperature": 1.1, "activations": activations,
        "ignore_eos": true,
    });
    let whole = tiny().complete(&body);
    let mut finished = 0;
    for chunk in tiny().stream(&body) {
        for choice in chunk["choices"].as_array().unwrap() {
            let is_last = !choice["finish_reason"].is_null();
            assert_eq!(
                (choice.get("activations").is_some(), choice.get("activations_info").is_some()),
                (is_last, is_last)
            );
            if is_last {
                finished += 1;
                let index = usize::try_from(choice["index"].as_u64().unwrap()).unwrap();
                for name in ["activations", "activations_info"] {
                    assert_eq!(choice[name], whole["choices"][index][name]);
                }
            }
        }
    }
    assert_eq!(finished, 2);
    let chats = tiny_with("note.txt", "", ChatTemplateChoice::EosJoin);
    let body = json!({
        "messages": [{ "role": "user", "content": "The" }], "max_tokens": 4, "temperature": 0, "activations": activations,
        "steering": [{ "site": "resid_pre0", "vector": direction(1) }],
    });
    let (answer, _) = chats.run(chats.chat(&body).unwrap()).unwrap();
    let response: Value = serde_json::from_str(&answer.into_response()).unwrap();
    let choice = &response["choices"][0];
    assert_eq!(choice["activations"][0]["site"], "blocks.0.hook_resid_post");
    assert!(choice["message"]["content"].is_string() && choice["activations_info"]["token_ids"].is_array());
}

/// `/v1/activations` returns the same values as a completion, and its file stores the same bits.
#[test]
fn activations_route_matches_a_completion() {
    let wanted = json!({ "sites": ["resid_post", "pattern1"], "positions": "all" });
    let steering = json!([{ "site": "resid_pre1", "vector": direction(3), "scale": 2 }]);
    for (prompt, steering) in [(json!("The word"), json!([])), (json!([[5, 6, 7], [0, 9]]), steering)] {
        let completed = tiny().complete(&json!({
            "prompt": prompt, "max_tokens": 1, "temperature": 0, "steering": steering, "activations": wanted,
        }));
        let mut body = json!({ "model": "tiny", "prompt": prompt, "steering": steering });
        body.as_object_mut().unwrap().extend(wanted.as_object().unwrap().clone());
        let response = shown(&body);
        assert_eq!((&response["object"], &response["model"]), (&json!("list"), &json!("tiny")));
        let data = response["data"].as_array().unwrap();
        let usage = &completed["usage"]["prompt_tokens"];
        assert_eq!(
            response["usage"],
            json!({ "prompt_tokens": usage, "completion_tokens": 0, "total_tokens": usage })
        );
        let file = activations(&tiny().served, &body).unwrap().into_safetensors().unwrap();
        let tensors = candle_core::safetensors::load_buffer(&file, &Device::Cpu).unwrap();
        let choices = completed["choices"].as_array().unwrap();
        assert_eq!(data.len(), choices.len());
        for (index, (shown, choice)) in data.iter().zip(choices).enumerate() {
            assert_eq!((&shown["object"], &shown["index"]), (&json!("activations"), &json!(index)));
            assert_eq!(shown["activations"], choice["activations"]);
            let tokens = shown["activations_info"]["token_ids"].as_array().unwrap();
            assert_eq!(
                tokens[..],
                choice["activations_info"]["token_ids"].as_array().unwrap()[..tokens.len()]
            );
            assert_eq!(shown["activations_info"]["bos"], json!(tokens[0] == 0));
            for entry in shown["activations"].as_array().unwrap() {
                let site = entry["site"].as_str().unwrap();
                let name = if data.len() == 1 { site.to_owned() } else { format!("{index}.{site}") };
                let tensor = &tensors[&name];
                assert_eq!(json!(tensor.dims()), entry["shape"]);
                let values = tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap();
                let bytes: Vec<u8> = values.into_iter().flat_map(f32::to_le_bytes).collect();
                assert_eq!(STANDARD.encode(bytes), entry["data"].as_str().unwrap());
            }
        }
        assert_eq!(tensors.len(), data.len() * (tiny().model.config().n_layer + 1));
    }
    let empty = shown(&json!({ "sites": ["resid_post0"] }));
    assert_eq!(empty["data"][0]["activations_info"]["token_ids"], json!([0]), "the BOS token");
}

/// Prefill skips the blocks after the last hook point if only activations are needed.
#[test]
fn prefill_stops_after_the_last_hook_point() {
    for (sites, expected) in [
        (json!(["resid_pre1", "hook_embed"]), Some(1)),
        (json!(["pattern0"]), Some(1)),
        (json!(["resid_post"]), Some(tiny().model.config().n_layer)),
        (json!(["pattern0", "ln_final.hook_scale"]), None),
    ] {
        let body = json!({ "prompt": [5, 6], "sites": sites }).to_string();
        let work = tiny().served.read(Endpoint::Activations, body.as_bytes(), None).unwrap();
        let Work::Texts(call) = work else { panic!("{work:?}") };
        assert_eq!(call.requests[0].stop_at_layer, expected, "{sites}");
    }
}

/// The safetensors file contains the warnings too.
#[test]
fn safetensors_file_contains_the_warnings() {
    let body = |extra: Value| {
        let mut body = json!({ "prompt": [5, 6], "sites": ["resid_post0"] });
        body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        let file = activations(&tiny().served, &body).unwrap().into_safetensors().unwrap();
        // The first eight bytes are the header's length.
        let length = usize::try_from(u64::from_le_bytes(*file.first_chunk().unwrap())).unwrap();
        let header: Value = serde_json::from_slice(&file[8..8 + length]).unwrap();
        (header["__metadata__"]["warnings"].clone(), shown(&body)["warnings"].clone())
    };
    assert_eq!(body(json!({})), (Value::Null, Value::Null));
    let (from_file, from_json) = body(json!({ "positons": "all" }));
    let from_file: Value = serde_json::from_str(from_file.as_str().unwrap()).unwrap();
    assert_eq!(from_file, json!(["unknown field `positons` was ignored; did you mean `positions`?"]));
    assert_eq!(from_file, from_json);
}

/// A dictionary feature steers along its decoder direction, at the hook point that it explains.
#[test]
fn dictionary_feature_steers_along_its_direction() {
    let (width, site, output) = (width(), "blocks.1.hook_resid_pre", "blocks.1.hook_mlp_out");
    let decoder = pattern(&[3, width], 3.0, 8);
    let tensors = BTreeMap::from([
        ("W_enc".to_owned(), pattern(&[width, 3], 1.0, 9)),
        ("b_enc".to_owned(), pattern(&[3], 1.0, 1)),
        ("W_dec".to_owned(), decoder.clone()),
        ("b_dec".to_owned(), pattern(&[width], 1.0, 1)),
    ]);
    let dictionary = |more: Value| {
        let mut config = json!({
            "hook_name": site, "architecture": "standard", "d_in": width, "d_sae": 3, "activation_fn": "relu",
            "apply_b_dec_to_input": true,
        });
        config.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let config = DictionaryConfig::from_json(&config.to_string()).unwrap();
        Arc::new(Dictionary::from_tensors(&tensors, &config).unwrap())
    };
    let transcoder = json!({
        "architecture": "transcoder", "apply_b_dec_to_input": false, "hook_name": "blocks.1.ln2.hook_normalized",
        "hook_name_out": output, "d_out": width,
    });
    let dictionaries = BTreeMap::from([
        ("res1".to_owned(), dictionary(json!({}))),
        ("mlp1".to_owned(), dictionary(transcoder)),
    ]);
    let served = ServedModel::new(&tiny().model, ApiOptions { dictionaries, ..options() }).unwrap();
    let tested = Tested { model: tiny().model.clone(), served };
    let body = |steering: Value| json!({ "prompt": "The", "max_tokens": 9, "temperature": 0, "logprobs": 1, "steering": [steering] });
    let vector = values(&decoder.get(2).unwrap());
    for (name, site) in [("res1", site), ("mlp1", output)] {
        let by_feature = tested.complete(&body(json!({ "dictionary": name, "feature": 2, "scale": 4 })));
        let by_vector = tested.complete(&body(json!({ "site": site, "vector": vector, "scale": 4 })));
        assert_eq!(by_feature["choices"], by_vector["choices"], "{name}");
    }
    let refused = |steering: Value| {
        let request = CompletionRequest::parse(body(steering).to_string().as_bytes()).unwrap();
        Call::of_completion(request, &tested.served, None).unwrap_err().to_string()
    };
    assert_eq!(
        refused(json!({ "dictionary": "res8", "feature": 2 })),
        "steering[0].dictionary: unknown dictionary; expected `mlp1` or `res1`"
    );
    assert_eq!(
        refused(json!({ "dictionary": "res1", "feature": 3 })),
        "steering[0].feature: expected a zero-based feature index below 3, found 3"
    );
    assert_eq!(
        refused(json!({ "dictionary": "res1" })),
        "steering[0].feature: expected the index of a feature, found nothing"
    );
    assert_eq!(
        refused(json!({ "feature": 1 })),
        "steering[0].dictionary: expected the name of a dictionary, found nothing"
    );
    assert_eq!(
        refused(json!({ "dictionary": "res1", "feature": 1, "site": site })),
        "steering[0].site: cannot be combined with a dictionary feature; set only one of the two"
    );
}

#[test]
fn invalid_requests_report_the_field() {
    let vector = direction(1);
    let (short, n_layer) = (&vector[1..], tiny().model.config().n_layer);
    let bytes =
        |numbers: &[f32]| STANDARD.encode(numbers.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<_>>());
    let mut infinite = vec![0_f32; width()];
    infinite[3] = f32::INFINITY;
    let steering = |site: &str, vector: Value| json!({ "steering": [{ "site": site, "vector": vector }] });
    let sites = |sites: Value| json!({ "activations": { "sites": sites } });
    let (width, found) = (width(), short.len());
    for (extra, expected) in [
        (sites(json!([])), "activations.sites: expected names of hook points, such as blocks.0.hook_resid_post, found none".to_owned()),
        (sites(json!("resid_post0")), "activations.sites: expected a list of strings, found \"resid_post0\"".into()),
        (
            sites(json!(["resid_post0", "resid_pst1"])),
            "activations.sites[1]: unknown hook point `resid_pst1`; did you mean `resid_post1`?".into(),
        ),
        (
            sites(json!(["z7"])),
            format!("activations.sites[0]: `z7`: block 7 is out of range; the model has {n_layer} blocks, counted from 0"),
        ),
        (sites(json!(["logits"])), "activations.sites[0]: logits are not returned; use logprobs".into()),
        (
            json!({ "activations": { "sites": ["z0"], "positions": [0, 3] } }),
            "activations.positions[1]: expected a zero-based position below 3, found 3".into(),
        ),
        (
            json!({ "activations": { "sites": ["z0"], "positions": [4], "of": "completion" } }),
            "activations.positions[0]: expected a zero-based position below 4, found 4".into(),
        ),
        (
            json!({ "activations": { "sites": ["z0"], "positions": [7, 0, 5, 7] } }),
            "activations.positions[0]: expected a zero-based position below 3, found 7".into(),
        ),
        (
            json!({ "max_tokens": 1, "activations": { "sites": ["z0"], "positions": [0], "of": "completion" } }),
            "activations.positions[0]: this completion has no activations, because the model does not read the last token and \
             max_tokens is 1; request more tokens, or the activations of the prompt"
                .into(),
        ),
        (
            json!({ "activations": { "sites": ["z0"], "positions": "first" } }),
            "activations.positions: expected `last` or `all`, found \"first\"".into(),
        ),
        (
            json!({ "activations": { "sites": ["z0"], "of": "text" } }),
            "activations.of: expected `prompt`, `completion` or `both`, found \"text\"".into(),
        ),
        (
            json!({ "steering": [{ "vector": vector }] }),
            "steering[0].site: expected the name of a hook point, found nothing".into(),
        ),
        (
            json!({ "steering": [{ "site": "resid_pre1" }] }),
            "steering[0].vector: expected a vector, found nothing".into(),
        ),
        (
            steering("resid_pre1", json!(short)),
            format!("steering[0].vector: expected {width} numbers, found {found}"),
        ),
        (
            steering("resid_pre1", json!(bytes(&infinite))),
            format!("steering[0].vector: expected {width} finite numbers, found inf at index 3"),
        ),
        (
            steering("resid_pre1", json!("AAAA")),
            format!("steering[0].vector: expected {width} f32 values of four bytes, found 3 bytes"),
        ),
        (
            steering("resid_pre", json!(vector)),
            "steering[0].site: every block has a hook point `resid_pre`; choose one of them, such as `blocks.0.hook_resid_pre`".into(),
        ),
        (
            steering("resid_pre9", json!(vector)),
            format!("steering[0].site: `resid_pre9`: block 9 is out of range; the model has {n_layer} blocks, counted from 0"),
        ),
        (steering("logits", json!(vector)), "steering[0].site: logits cannot be steered; use logit_bias".into()),
        (
            steering("pattern0", json!(vector)),
            "steering[0].site: blocks.0.attn.hook_pattern has a number for each pair of tokens; steer at a hook point that has a vector \
             for each token"
                .into(),
        ),
        (
            json!({ "steering": [{ "site": "resid_pre1", "vector": vec![0; width], "mode": "project_out" }] }),
            "steering[0].vector: expected a nonzero direction to project out, found only zeros".into(),
        ),
        (
            json!({ "steering": [{ "site": "resid_pre1", "vector": vector, "scale": "2" }] }),
            "steering[0].scale: expected a number, found \"2\"".into(),
        ),
        (
            json!({ "steering": [{ "site": "resid_pre1", "vector": vec![1e30; width], "scale": 1e30 }] }),
            "steering[0].scale: expected a scale whose product with the vector is finite in f32, found 1e30".into(),
        ),
        (
            json!({ "steering": [{ "dictionary": "res8", "feature": 1 }] }),
            "steering[0].dictionary: unknown dictionary; this server has no dictionaries; start it with --dictionary".into(),
        ),
    ] {
        let mut body = json!({ "prompt": [5, 6, 7], "max_tokens": 5 });
        body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        let error = error(&body);
        assert_eq!(error.to_string(), expected);
        assert_eq!(error.status(), 400);
        assert!(expected.starts_with(error.param().unwrap()), "{expected}");
    }
}

/// Steering that produces non-finite values is reported as the client's error.
#[test]
fn overflowing_steering_scale_is_a_client_error() {
    let body = json!({
        "prompt": "The", "max_tokens": 5,
        "steering": [{ "site": "blocks.0.hook_resid_post", "vector": direction(1), "scale": 1e38 }],
    });
    let error = tiny().run(call(&body).unwrap()).unwrap_err();
    assert_eq!((error.status(), error.param()), (400, Some("steering")));
    assert_eq!(error.to_string(), "steering: the model's logits are not finite; use a smaller scale");
}

/// The error names the overflowing hook point; no answer contains a null in its place.
#[test]
fn overflowing_activations_name_the_hook_point() {
    let steering = json!([{ "site": "blocks.0.hook_resid_post", "vector": direction(1), "scale": 1e30 }]);
    let expected = "steering: blocks.1.ln1.hook_scale is inf at token 0; use a smaller scale";
    let sites = json!(["blocks.0.hook_resid_post", "blocks.1.ln1.hook_scale"]);
    for format in ["float", "base64"] {
        let mut body = json!({
            "prompt": "The word", "sites": sites, "positions": "all", "encoding_format": format, "steering": steering,
        });
        let error = activations(&tiny().served, &body).unwrap_err();
        assert_eq!(
            (error.status(), error.param(), error.to_string()),
            (400, Some("steering"), expected.to_owned())
        );
        // Steering overflows only after this hook point, whose values are all finite.
        body["sites"] = json!(["blocks.0.hook_resid_post"]);
        assert!(activations(&tiny().served, &body).is_ok());
        let shown = json!({ "sites": sites, "positions": "all", "encoding_format": format });
        let body = json!({ "prompt": "The", "max_tokens": 3, "steering": steering, "activations": shown });
        let error = tiny().run(call(&body).unwrap()).unwrap_err();
        assert_eq!((error.status(), error.param()), (400, Some("steering")));
    }
}

#[test]
fn activation_bytes_per_request_are_limited() {
    let limits = Limits { max_activation_bytes: 4 * 3 * width(), ..options().limits };
    let served = ServedModel::new(&tiny().model, ApiOptions { limits, ..options() }).unwrap();
    let parse = |prompt: Value, n: usize, max_tokens: usize, activations: Value| {
        let body = json!({ "prompt": prompt, "n": n, "max_tokens": max_tokens, "activations": activations });
        let request = CompletionRequest::parse(body.to_string().as_bytes()).unwrap();
        Call::of_completion(request, &served, None).map_err(|error| error.to_string())
    };
    let refused = |bytes: usize| {
        format!(
            "activations.sites: this server returns at most {} bytes of activations per request, but this one requests up to {bytes}; \
             request fewer sites or positions",
            12 * width()
        )
    };
    let ids = json!([5, 6, 7]);
    let all = |of: &str| json!({ "sites": ["resid_post0"], "positions": "all", "of": of });
    assert!(parse(ids.clone(), 1, 30, all("prompt")).is_ok());
    assert!(parse(ids.clone(), 1, 1, all("both")).is_ok());
    assert_eq!(parse(ids.clone(), 1, 2, all("both")).unwrap_err(), refused(16 * width()));
    assert_eq!(parse(ids.clone(), 2, 1, all("prompt")).unwrap_err(), refused(24 * width()));
    assert_eq!(parse(json!([[5, 6, 7], [5]]), 1, 1, all("prompt")).unwrap_err(), refused(16 * width()));
    let last = |sites: &[&str]| json!({ "sites": sites });
    assert!(parse(ids.clone(), 1, 30, last(&["resid_post0", "resid_pre0", "z0"])).is_ok());
    assert!(parse(ids, 1, 30, last(&["resid_post0", "resid_pre0", "z0", "pattern0"])).is_err());
    let error = activations(&served, &json!({ "prompt": [5, 6, 7, 8], "sites": ["z0"], "positions": "all" }))
        .unwrap_err();
    assert_eq!((error.status(), error.param()), (400, Some("sites")));
}

/// A server started without the option rejects activations and steering.
#[test]
fn activations_and_steering_are_off_by_default() {
    let served = ServedModel::new(&tiny().model, ApiOptions { activations: false, ..options() }).unwrap();
    let off = "this server does not expose activations or steering; start it with --activations";
    for (field, value) in [
        ("activations", json!({ "sites": ["resid_post0"] })),
        ("steering", json!([{ "site": "resid_pre0", "vector": direction(1), "scale": 0 }])),
    ] {
        let body = json!({ "prompt": "The", field: value }).to_string();
        let request = CompletionRequest::parse(body.as_bytes()).unwrap();
        let error = Call::of_completion(request, &served, None).unwrap_err();
        assert_eq!((error.status(), error.param()), (400, Some(field)));
        assert_eq!(
            (error.to_string(), error.code()),
            (format!("{field}: {off}"), Some("unsupported_parameter"))
        );
    }
    let error = activations(&served, &json!({ "sites": ["resid_post0"] })).unwrap_err();
    assert_eq!((error.status(), error.to_string()), (400, off.to_owned()));
    let plain =
        CompletionRequest::parse(br#"{"prompt": "The", "steering": [], "activations": null}"#).unwrap();
    let call = Call::of_completion(plain, &served, None).unwrap();
    assert!(call.requests[0].observers.is_empty(), "a request without inspection has no observer");
}
