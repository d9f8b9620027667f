//! Tests merging a request's options into the options from a checkpoint's files.

use candle_gpt2_generation::{EarlyStopping, GenerationConfig, GenerationOptions, OPTIONS};
use serde_json::{Value, json};

fn options(fields: &Value) -> GenerationOptions {
    let mut options = GenerationOptions::default();
    for (field, value) in fields.as_object().into_iter().flatten() {
        options.set(field, value.clone()).unwrap();
    }
    options
}

fn applied(fields: &Value, to: GenerationConfig) -> GenerationConfig {
    options(fields).applied_to(to).unwrap()
}

#[test]
fn every_config_field_is_an_option() {
    let config = serde_json::to_value(GenerationConfig::default()).unwrap();
    let fields: Vec<&str> = config.as_object().unwrap().keys().map(String::as_str).collect();
    let options: Vec<&str> = OPTIONS.iter().map(|option| option.name).collect();
    assert_eq!(fields, options);
}

/// The defaults stated in help texts are the actual defaults.
#[test]
fn help_shows_the_actual_defaults() {
    let config = serde_json::to_value(GenerationConfig::default()).unwrap();
    let with_default = OPTIONS.iter().filter_map(|option| {
        let (_, default) = option.doc.rsplit_once("[default: ")?;
        Some((option.name, default.strip_suffix(']')?.parse::<f64>().ok()))
    });
    let with_default: Vec<_> = with_default.collect();
    assert!(with_default.len() > 5);
    for (name, default) in with_default {
        assert_eq!(config[name].as_f64(), default, "{name}");
    }
}

#[test]
fn requested_decoding_method_replaces_the_configured_one() {
    let beams = || GenerationConfig {
        num_beams: 4,
        num_beam_groups: 2,
        diversity_penalty: 0.5,
        num_return_sequences: 3,
        max_length: Some(9),
        prompt_lookup_num_tokens: Some(5),
        ..GenerationConfig::default()
    };
    let changed = applied(&json!({"seed": 7}), beams());
    let one = GenerationConfig { num_beams: 1, num_beam_groups: 1, diversity_penalty: 0.0, ..beams() };
    assert_eq!(changed, GenerationConfig { seed: 7, do_sample: true, ..one.clone() });
    let greedy = applied(&json!({"do_sample": false}), beams());
    assert_eq!(greedy, GenerationConfig { num_return_sequences: 1, ..one.clone() });
    let searched = applied(&json!({"num_beams": 2}), beams());
    assert_eq!(searched, GenerationConfig { num_beams: 2, prompt_lookup_num_tokens: None, ..one.clone() });
    let contrastive = applied(&json!({"penalty_alpha": 0.6, "top_k": 4}), beams());
    let alone = GenerationConfig { penalty_alpha: 0.6, top_k: 4, prompt_lookup_num_tokens: None, ..one };
    assert_eq!(contrastive, alone);
    let kept = applied(&json!({"max_new_tokens": 3, "max_length": 5}), beams());
    assert_eq!(kept, GenerationConfig { max_new_tokens: 3, max_length: None, ..beams() });
    let length = applied(&json!({"max_length": 5}), beams());
    assert_eq!(length, GenerationConfig { max_new_tokens: usize::MAX, max_length: Some(5), ..beams() });
    let assisted = GenerationOptions { has_assistant: true, ..GenerationOptions::default() };
    assert_eq!(assisted.applied_to(beams()).unwrap().prompt_lookup_num_tokens, None);
    assert_eq!(applied(&json!({"prompt_lookup_num_tokens": 0}), beams()).prompt_lookup_num_tokens, None);
}

#[test]
fn single_value_is_accepted_as_a_list() {
    let read = options(&json!({"eos_token_id": 3, "stop_strings": "a", "early_stopping": "never"}));
    assert_eq!((read.eos_token_id, read.stop_strings), (Some(vec![3]), Some(vec!["a".into()])));
    assert_eq!(read.early_stopping, Some(EarlyStopping::Never));
    let mut options = GenerationOptions::default();
    let error = options.set("temperature", json!("hot")).unwrap_err().to_string();
    assert!(error.starts_with("`temperature`: invalid type: string"), "{error}");
    assert!(options.set("seed", json!(-1)).is_err() && options.set("heat", json!(1)).is_err());
}

/// A temperature of 0 is equivalent to `--greedy` and `do_sample=False`, whatever else is set.
#[test]
fn zero_temperature_is_greedy() {
    let files =
        || GenerationConfig { do_sample: true, num_beams: 3, top_k: 7, ..GenerationConfig::default() };
    let greedy = applied(&json!({"do_sample": false}), files());
    assert!(!greedy.do_sample);
    for fields in [
        json!({"temperature": 0.0}),
        json!({"temperature": 1e-40}),
        json!({"temperature": 0, "do_sample": true}),
        json!({"temperature": 0, "do_sample": false}),
        json!({"temperature": 0, "top_k": 4, "top_p": 0.5, "min_p": 0.1, "seed": 7, "eta_cutoff": 0.1}),
    ] {
        assert_eq!(applied(&fields, files()), greedy, "{fields}");
    }
    let beams = applied(&json!({"temperature": 0, "num_beams": 4}), files());
    assert_eq!(beams, applied(&json!({"num_beams": 4}), files()));
    let contrastive = applied(&json!({"temperature": 0, "penalty_alpha": 0.6, "top_k": 4}), files());
    assert_eq!(contrastive, applied(&json!({"penalty_alpha": 0.6, "top_k": 4}), files()));
    // The smallest valid temperature samples.
    assert!(applied(&json!({"temperature": 1e-6}), files()).do_sample);
}

#[test]
fn zero_temperature_notes_ignored_options() {
    let notes = |fields: Value| options(&fields).notes();
    let expected = "`temperature` 0 selects greedy decoding, so `top_k`, `seed` have no effect";
    assert_eq!(notes(json!({"temperature": 0.0, "top_k": 4, "seed": 7})), [expected]);
    let expected = "`temperature` 0 selects greedy decoding, so `do_sample` has no effect";
    assert_eq!(notes(json!({"temperature": 0.0, "do_sample": true})), [expected]);
    for silent in [json!({"temperature": 0.0}), json!({"temperature": 0.5, "top_k": 4}), json!({})] {
        assert_eq!(notes(silent), Vec::<String>::new());
    }
}

#[test]
fn conflicts_name_the_options() {
    let error_of = |fields: Value| options(&fields).check().err().map(|error| error.to_string());
    for (fields, expected) in [
        (json!({"num_beams": 3, "top_p": 0.5}), "`top_p` is for sampling"),
        (
            json!({"num_beams": 3, "penalty_alpha": 0.5}),
            "`num_beams` and `penalty_alpha` are mutually exclusive",
        ),
        (json!({"temperature": -0.5}), "`temperature`: expected at least 0 (0 selects greedy decoding)"),
        (json!({"temperature": 1e39}), "`temperature`: expected at least 0 (0 selects greedy decoding)"),
        (json!({"num_assistant_tokens": 3}), "`num_assistant_tokens` needs an assistant"),
        (json!({"repetition_penalty": 0.0}), "`repetition_penalty`: expected greater than 0"),
    ] {
        let error = error_of(fields).unwrap();
        assert!(error.starts_with(expected), "{error}");
    }
    for harmless in [json!({"do_sample": false, "temperature": 0.5}), json!({"top_k": 0})] {
        assert_eq!(error_of(harmless), None);
    }
    let empty = GenerationOptions { bad_words: Some(vec![String::new()]), ..GenerationOptions::default() };
    assert!(empty.check().unwrap_err().to_string().starts_with("`bad_words`: "));
    let head = GenerationOptions { keep_head: Some(3), ..GenerationOptions::default() };
    let error = head.check().unwrap_err().to_string();
    assert_eq!(error, "`keep_head` has no effect without `keep_last` or `slide`; set one of them");
    let lengths = GenerationOptions { length_penalty: Some(2.0), ..GenerationOptions::default() };
    let error = lengths.applied_to(GenerationConfig::default()).unwrap_err().to_string();
    assert_eq!(error, "`length_penalty` needs beam search; set `num_beams`");
}

#[test]
fn non_greedy_options_are_reported() {
    for (fields, expected) in [
        (json!({"do_sample": false, "top_k": 4}), Some("top_k")),
        (json!({"temperature": 0.5}), Some("temperature")),
        (json!({"num_beams": 2}), Some("num_beams")),
        (json!({"penalty_alpha": 0.5, "top_k": 4}), Some("penalty_alpha")),
        (json!({"temperature": 0, "top_k": 4, "num_beams": 1, "repetition_penalty": 2.0}), None),
    ] {
        assert_eq!(options(&fields).non_greedy_option(), expected, "{fields}");
    }
}

#[test]
fn options_deserialize_with_serde() {
    let read: GenerationOptions =
        serde_json::from_value(json!({"top_k": 4, "stop_strings": "a", "bad_words": ["b"], "seed": null}))
            .unwrap();
    let expected = GenerationOptions {
        top_k: Some(4),
        stop_strings: Some(vec!["a".into()]),
        bad_words: Some(vec!["b".into()]),
        ..GenerationOptions::default()
    };
    assert_eq!(read, expected);
    let error = serde_json::from_value::<GenerationOptions>(json!({"heat": 1})).unwrap_err().to_string();
    assert!(error.starts_with("unknown field `heat`"), "{error}");
}

/// Configured biases remain; the request's biases follow and take precedence.
#[test]
fn request_biases_extend_the_configured_ones() {
    let files = GenerationConfig { sequence_bias: vec![(vec![1], 2.0)], ..GenerationConfig::default() };
    let changed = applied(&json!({"sequence_bias": [[[3, 4], -1.0]]}), files);
    assert_eq!(changed.sequence_bias, [(vec![1], 2.0), (vec![3, 4], -1.0)]);
}
