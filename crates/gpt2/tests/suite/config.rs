//! `config.json`: every key and alias takes effect, and unsupported features are rejected by name.

use candle_gpt2::{
    Activation, ConfigError, Gpt2Config, HeadKind, ParameterCounts, ProblemType, Summary, SummaryType,
    expected_parameters,
};
use candle_gpt2_testing::table;
use serde_json::{Value, json};

fn base() -> Value {
    json!({"model_type": "gpt2", "vocab_size": 61, "n_positions": 19, "n_embd": 24, "n_layer": 2, "n_head": 3})
}

fn read(changes: Value) -> Result<Gpt2Config, ConfigError> {
    let mut config = base();
    for (key, value) in changes.as_object().unwrap() {
        config[key] = value.clone();
    }
    Gpt2Config::from_json(&config.to_string())
}

/// Removes `key` from the base configuration and adds the keys in `additions`.
fn read_without(key: &str, additions: Value) -> Result<Gpt2Config, ConfigError> {
    let mut config = base();
    config.as_object_mut().unwrap().remove(key);
    config.as_object_mut().unwrap().extend(additions.as_object().unwrap().clone());
    Gpt2Config::from_json(&config.to_string())
}

fn json_of(text: &str) -> Value {
    serde_json::from_str(text).unwrap()
}

fn message(result: Result<Gpt2Config, ConfigError>) -> String {
    result.unwrap_err().to_string()
}

#[test]
fn missing_keys_use_transformers_defaults() {
    let config = read(json!({})).unwrap();
    let expected = Gpt2Config {
        vocab_size: 61,
        n_positions: 19,
        n_embd: 24,
        n_layer: 2,
        n_head: 3,
        ..Gpt2Config::gpt2()
    };
    assert_eq!(config, expected);
    assert_eq!(config.inner_width(), 96);
    assert_eq!(config.head_dim(), 8);
    assert_eq!(read(json!({"n_inner": null})).unwrap(), expected);
}

#[test]
fn every_key_takes_effect() {
    let config = read(json!({
        "n_inner": 50, "activation_function": "quick_gelu", "layer_norm_epsilon": 1e-3,
        "scale_attn_weights": false, "scale_attn_by_inverse_layer_idx": true, "reorder_and_upcast_attn": true,
        "tie_word_embeddings": false, "embd_pdrop": 0.2, "attn_pdrop": 0, "resid_pdrop": 1,
        "initializer_range": 0.5, "bos_token_id": 7, "eos_token_id": [1, 2],
        "pad_token_id": 3, "add_cross_attention": true
    }))
    .unwrap();
    let expected = Gpt2Config {
        vocab_size: 61,
        n_positions: 19,
        n_embd: 24,
        n_layer: 2,
        n_head: 3,
        n_inner: Some(50),
        activation_function: Activation::QuickGelu,
        layer_norm_epsilon: 1e-3,
        scale_attn_weights: false,
        scale_attn_by_inverse_layer_idx: true,
        reorder_and_upcast_attn: true,
        tie_word_embeddings: false,
        embd_pdrop: 0.2,
        attn_pdrop: 0.0,
        resid_pdrop: 1.0,
        initializer_range: 0.5,
        bos_token_id: Some(7),
        eos_token_id: vec![1, 2],
        pad_token_id: Some(3),
        add_cross_attention: true,
        ..Gpt2Config::gpt2()
    };
    assert_eq!(config, expected);
    assert_eq!(Gpt2Config::from_json(&config.to_json().to_string()).unwrap(), expected, "round trip");
}

/// serde reads and writes like `from_json` and `to_json`, with the same errors.
#[test]
fn serde_matches_from_json_and_to_json() {
    let labels = json!({
        "architectures": ["GPT2ForSequenceClassification"], "id2label": {"0": "no", "1": "yes"}, "eos_token_id": [1, 2],
    });
    for changes in [json!({}), json!({"n_inner": 50, "activation_function": "relu"}), labels] {
        let config = read(changes).unwrap();
        let text = serde_json::to_string(&config).unwrap();
        assert_eq!(serde_json::from_str::<Value>(&text).unwrap(), config.to_json());
        assert_eq!(serde_json::from_str::<Gpt2Config>(&text).unwrap(), config);
    }
    for (key, value) in [("n_layer", json!(0)), ("model_type", json!("llama")), ("hidden_size", json!(48))] {
        let mut config = base();
        config[key] = value;
        let found = serde_json::from_value::<Gpt2Config>(config.clone()).unwrap_err().to_string();
        assert_eq!(found, message(Gpt2Config::from_json(&config.to_string())));
    }
}

/// Found by fuzzing: parsed numbers were off by one unit in the last place.
#[test]
fn numbers_are_parsed_exactly() {
    for (text, epsilon) in
        [("1e-45", 1e-45), ("5.684341886080802e-14", 5.684341886080802e-14), ("1e-05", 1e-5)]
    {
        let json =
            base().to_string().replace("\"n_layer\"", &format!("\"layer_norm_epsilon\":{text},\"n_layer\""));
        assert_eq!(Gpt2Config::from_json(&json).unwrap().layer_norm_epsilon, epsilon, "{text}");
    }
}

#[test]
fn attention_scales_follow_both_flags() {
    let scale = |weights, depth, layer| {
        let flags = json!({"scale_attn_weights": weights, "scale_attn_by_inverse_layer_idx": depth});
        read(flags).unwrap().attention_scale(layer)
    };
    assert_eq!(scale(true, false, 1), 1.0 / 8f64.sqrt());
    assert_eq!(scale(false, false, 1), 1.0);
    assert_eq!(scale(false, true, 1), 0.5);
    assert_eq!(scale(true, true, 3), 1.0 / (8f64.sqrt() * 4.0));
}

#[test]
fn aliases_are_accepted_and_must_agree() {
    for (key, alias, value) in [
        ("n_embd", "hidden_size", 24),
        ("n_positions", "max_position_embeddings", 19),
        ("n_positions", "n_ctx", 19),
        ("n_head", "num_attention_heads", 3),
        ("n_layer", "num_hidden_layers", 2),
    ] {
        assert_eq!(read_without(key, json!({alias: value})), read(json!({})), "{alias}");
    }
    let found = message(read(json!({"hidden_size": 48})));
    assert_eq!(found, "`n_embd` is 24, but its alias `hidden_size` is 48; remove one of them");
    // transformers ignores `n_ctx` if `n_positions` is present.
    assert_eq!(read(json!({"n_ctx": 512})).unwrap().n_positions, 19);
}

#[test]
fn missing_sizes_are_reported_by_name() {
    for key in ["vocab_size", "n_positions", "n_embd", "n_layer", "n_head"] {
        let found = message(read_without(key, json!({})));
        assert!(found.starts_with(&format!("the key `{key}` is missing")), "{found}");
    }
    assert!(message(read_without("n_embd", json!({}))).contains("`hidden_size`"));
}

#[test]
fn out_of_range_values_are_rejected() {
    for [changes, expected] in table(
        r#"
{"n_layer": 0} | `n_layer`: expected a whole number from 1 to 1024, found 0
{"n_embd": -24} | `n_embd`: expected a whole number from 1 to 4194304, found -24
{"n_embd": 1e18} | `n_embd`: expected a whole number from 1 to 4194304, found 1e+18
{"vocab_size": 18446744073709551615} | `vocab_size`: expected a whole number from 1 to 67108864, found 18446744073709551615
{"n_positions": 2.5} | `n_positions`: expected a whole number from 1 to 67108864, found 2.5
{"n_head": "3"} | `n_head`: expected a whole number from 1 to 4194304, found "3"
{"n_inner": 0} | `n_inner`: expected a whole number from 1 to 4194304, found 0
{"n_head": 5} | `n_head` = 5 does not divide `n_embd` = 24; every head needs the same width
{"layer_norm_epsilon": -1} | `layer_norm_epsilon`: expected a number from 0 to 1, found -1
{"attn_pdrop": 1.5} | `attn_pdrop`: expected a number from 0 to 1, found 1.5
{"tie_word_embeddings": "yes"} | `tie_word_embeddings`: expected true or false, found "yes"
{"scale_attn_weights": null} | `scale_attn_weights`: expected true or false, found null
{"eos_token_id": "x"} | `eos_token_id`: expected a token id or a list of token ids, found "x"
"#,
    ) {
        assert_eq!(message(read(json_of(changes))), expected);
    }
}

#[test]
fn unsupported_features_are_rejected_by_name() {
    for [changes, expected] in table(
        r#"
{"model_type": "llama"} | `model_type` = "llama" is not supported
{"architectures": ["GPT2ForQuestionAnswering"]} | `architectures` = "GPT2ForQuestionAnswering" is not supported: expected one of GPT2LMHeadModel,
{"architectures": ["GPT2DoubleHeadsModel"], "summary_type": "attn"} | `summary_type` = "attn" is not supported: expected one of cls_index, last, first, mean
{"architectures": ["GPT2DoubleHeadsModel"], "summary_use_proj": false} | `summary_use_proj` = false is not supported: the head must output one logit for each choice
{"architectures": ["GPT2ForSequenceClassification"], "problem_type": "ranking"} | `problem_type` = "ranking" is not supported: expected one of regression,
{ "architectures": ["GPT2ForSequenceClassification"], "num_labels": 1, "problem_type": "single_label_classification" } | `problem_type` = "single_label_classification" is not supported: a single label
{"is_encoder_decoder": true} | `is_encoder_decoder` = true is not supported
{"activation_function": "gelu_fast"} | `activation_function` = "gelu_fast" is not supported
{"pruned_heads": {"0": [1]}} | `pruned_heads` = {"0":[1]} is not supported
{"quantization_config": {"bits": 4}} | `quantization_config` = {"bits":4} is not supported
"#,
    ) {
        let found = message(read(json_of(changes)));
        assert!(found.starts_with(expected), "{found}");
    }
    assert!(read(json!({"pruned_heads": {}, "add_cross_attention": false})).is_ok());
    // Keys that only other heads read are ignored.
    let other = json!({"summary_type": "attn", "problem_type": "ranking", "id2label": {"3": 4}});
    assert!(read(other).is_ok());
}

#[test]
fn labels_are_parsed_from_any_of_their_keys() {
    let labels = |keys: Value| {
        let mut keys = keys;
        keys["architectures"] = json!(["GPT2ForTokenClassification"]);
        read(keys).map(|config| config.id2label)
    };
    assert_eq!(labels(json!({})).unwrap(), ["LABEL_0", "LABEL_1"]);
    assert_eq!(labels(json!({"num_labels": 3})).unwrap(), ["LABEL_0", "LABEL_1", "LABEL_2"]);
    let twelve: Vec<String> = (0..12).map(|id| format!("{}", 'a' as usize + id)).collect();
    let by_id: Value = twelve.iter().enumerate().map(|(id, name)| (id.to_string(), json!(name))).collect();
    let by_name: Value = twelve.iter().enumerate().map(|(id, name)| (name.clone(), json!(id))).collect();
    assert_eq!(labels(json!({"id2label": by_id})).unwrap(), twelve);
    assert_eq!(labels(json!({"label2id": by_name})).unwrap(), twelve);
    assert_eq!(labels(json!({"label2id": {"yes": "1", "no": "0"}})).unwrap(), ["no", "yes"]);
    assert_eq!(labels(json!({"id2label": by_id, "label2id": by_name, "num_labels": 12})).unwrap(), twelve);
    // transformers writes such a file if only `id2label` was set.
    let stale =
        json!({"id2label": {"0": "no", "1": "yes"}, "label2id": {"LABEL_0": 0, "LABEL_1": 1, "LABEL_2": 2}});
    assert_eq!(labels(stale).unwrap(), ["no", "yes"]);
    for [keys, expected] in table(
        r#"
{"id2label": {"0": "no", "1": "yes"}, "num_labels": 3} | `num_labels` is 3, but its alias `id2label` is {"0":"no","1":"yes"}; remove one of them
{"label2id": {"no": 0}, "num_labels": 2} | `num_labels` is 2, but its alias `label2id` is
{"id2label": {"0": "no", "2": "yes"}} | `id2label`: expected a name for each index starting at 0
{"id2label": {"0": 7}} | `id2label`: expected a name for each index starting at 0
{"label2id": {"no": 0, "yes": 2}} | `label2id`: expected consecutive indices starting at 0
{"label2id": {"no": 0, "yes": 0}} | `label2id`: expected consecutive indices starting at 0
{"label2id": ["no"]} | `label2id`: expected consecutive indices starting at 0
{"id2label": {"0": "no", "1": "no"}} | `id2label`: expected a unique name for each label
{"id2label": {}} | `id2label`: expected 1 to 1048576 labels, found 0
{"num_labels": 2097152} | `num_labels`: expected a whole number from 1 to 1048576
{"num_labels": 0} | `num_labels`: expected a whole number from 1 to 1048576, found 0
"#,
    ) {
        let found = labels(json_of(keys)).unwrap_err().to_string();
        assert!(found.starts_with(expected), "{found}");
    }
}

#[test]
fn transformers_class_names_select_the_head() {
    let head = |keys: Value| read(keys).unwrap().head;
    assert_eq!(head(json!({})), HeadKind::LanguageModel);
    for (class, kind) in [
        ("GPT2LMHeadModel", HeadKind::LanguageModel),
        ("GPT2Model", HeadKind::LanguageModel),
        ("GPT2ForSequenceClassification", HeadKind::SequenceClassification),
        ("GPT2ForTokenClassification", HeadKind::TokenClassification),
        ("GPT2DoubleHeadsModel", HeadKind::DoubleHeads),
    ] {
        assert_eq!(head(json!({"architectures": [class]})), kind);
        assert!(class == "GPT2Model" || kind.class_name() == class);
    }
    for unnamed in [json!([]), json!(null)] {
        assert_eq!(Gpt2Config::named_head(&json!({"architectures": unnamed}).to_string()), Ok(None));
    }
    let named = json!({"architectures": ["GPT2DoubleHeadsModel"]}).to_string();
    assert_eq!(Gpt2Config::named_head(&named), Ok(Some(HeadKind::DoubleHeads)));
    for wrong in [json!("GPT2LMHeadModel"), json!([3])] {
        let found = message(read(json!({"architectures": wrong})));
        assert!(found.starts_with("`architectures`: expected a list of class names"), "{found}");
    }
    // A caller that knows the tensors supplies the head for a file that names no class.
    let text = base().to_string();
    let config = Gpt2Config::from_json_with_head(&text, HeadKind::SequenceClassification).unwrap();
    assert_eq!((config.head, config.num_labels()), (HeadKind::SequenceClassification, 2));
}

#[test]
fn head_keys_take_effect_and_round_trip() {
    let sequence = read(json!({
        "architectures": ["GPT2ForSequenceClassification"], "id2label": {"0": "no", "1": "\u{e9}t\u{e9}"},
        "problem_type": "multi_label_classification", "pad_token_id": 60, "add_cross_attention": true,
    }))
    .unwrap();
    assert_eq!(sequence.id2label, ["no", "\u{e9}t\u{e9}"]);
    assert_eq!(sequence.problem(), ProblemType::MultiLabelClassification);
    assert_eq!((sequence.pad_token_id, sequence.add_cross_attention), (Some(60), true));
    let token = |keys: Value| {
        let mut keys = keys;
        keys["architectures"] = json!(["GPT2ForTokenClassification"]);
        read(keys).unwrap()
    };
    assert_eq!(token(json!({})).classifier_dropout, 0.1);
    assert_eq!(token(json!({"hidden_dropout": 0.3})).classifier_dropout, 0.3);
    let token = token(json!({"classifier_dropout": 0.25, "hidden_dropout": 0.3, "num_labels": 3}));
    assert_eq!(token.classifier_dropout, 0.25);
    let double = read(json!({
        "architectures": ["GPT2DoubleHeadsModel"], "num_labels": 4, "summary_type": "mean",
        "summary_activation": "tanh", "summary_first_dropout": 0.2, "summary_last_dropout": 0.3,
    }))
    .unwrap();
    assert_eq!(double.num_labels(), 0, "its single logit has no label");
    let expected = Summary {
        token: SummaryType::Mean,
        activation: Some(Activation::Tanh),
        first_dropout: 0.2,
        last_dropout: 0.3,
    };
    assert_eq!(double.summary, expected);
    for config in [sequence, token, double] {
        let written = config.to_json().to_string();
        assert_eq!(Gpt2Config::from_json(&written), Ok(config), "round trip");
    }
}

#[test]
fn one_label_is_regression_and_several_are_classification() {
    let problem = |labels: usize| {
        let keys = json!({"architectures": ["GPT2ForSequenceClassification"], "num_labels": labels});
        read(keys).unwrap().problem()
    };
    assert_eq!(problem(1), ProblemType::Regression);
    assert_eq!(problem(2), ProblemType::SingleLabelClassification);
}

/// Expected counts are transformers' `num_parameters()`, counted by hand from its modules.
#[test]
fn parameter_counts_include_heads_and_cross_attention() {
    let counts = |keys: Value| ParameterCounts::new(&read(keys).unwrap());
    let block = (24 * 72 + 72) + (24 * 24 + 24) + 2 * 24 * 96 + 96 + 24 + 4 * 24;
    let tied = (61 + 19) * 24 + 2 * block + 2 * 24;
    assert_eq!(counts(json!({})).unique, tied);
    let of = |class: &str| {
        counts(json!({"architectures": [class], "num_labels": 3, "tie_word_embeddings": false}))
    };
    let sequence = of("GPT2ForSequenceClassification");
    assert_eq!((sequence.unique, sequence.with_untied_head, sequence.head), (tied + 72, tied + 72, 72));
    assert_eq!(of("GPT2ForTokenClassification").unique, tied + 75);
    let double = of("GPT2DoubleHeadsModel");
    assert_eq!((double.unique, double.head), (tied + 61 * 24 + 25, 25));
    let cross = counts(json!({"add_cross_attention": true}));
    let attention = (24 * 24 + 24) + (24 * 48 + 48) + (24 * 24 + 24);
    assert_eq!(cross.cross_attention_per_block, attention);
    assert_eq!(cross.unique, tied + 2 * (attention + 2 * 24));
    let rows = |keys: Value| candle_gpt2::parameter_ledger(&read(keys).unwrap());
    let classifier = rows(json!({"architectures": ["GPT2ForSequenceClassification"], "num_labels": 3}));
    let counted: Vec<usize> = classifier.iter().map(|row| row.count).collect();
    assert_eq!(counted, [2 * block + 48, tied, tied + 72]);
    for config in [
        "GPT2LMHeadModel",
        "GPT2ForSequenceClassification",
        "GPT2ForTokenClassification",
        "GPT2DoubleHeadsModel",
    ] {
        let config = read(json!({"architectures": [config], "add_cross_attention": true})).unwrap();
        let sizes = expected_parameters(&config)
            .into_iter()
            .map(|parameter| parameter.shape.iter().product::<usize>());
        assert_eq!(sizes.sum::<usize>(), ParameterCounts::new(&config).unique);
    }
}

#[test]
fn invalid_config_files_are_rejected() {
    assert!(message(Gpt2Config::from_json("<!DOCTYPE html>")).starts_with("not valid JSON"));
    assert!(message(Gpt2Config::from_json("")).starts_with("not valid JSON"));
    assert_eq!(message(Gpt2Config::from_json("[1]")), "expected a JSON object, found a list");
    assert!(Gpt2Config::from_json(&"[".repeat(100_000)).is_err(), "deep nesting ends in an error");
    let with_mark = format!("\u{feff}{}", base());
    assert!(Gpt2Config::from_json(&with_mark).is_ok(), "a byte order mark is allowed");
}

#[test]
fn presets_are_found_by_name() {
    let xl = Gpt2Config::preset("gpt2-xl").unwrap();
    assert_eq!((xl.n_layer, xl.n_head, xl.n_embd, xl.head_dim()), (48, 25, 1600, 64));
    let found = Gpt2Config::preset("gpt3").unwrap_err().to_string();
    assert_eq!(
        found,
        "unknown preset `gpt3`; the presets are distilgpt2, gpt2, gpt2-medium, gpt2-large, gpt2-xl"
    );
}

/// A small configuration without token IDs defaults to GPT-2's, which its vocabulary lacks.
#[test]
fn special_tokens_outside_the_vocabulary_are_dropped_and_noted() {
    let absent = read(json!({})).unwrap();
    assert_eq!((absent.eos_token_id.as_slice(), absent.bos_token_id), (&[50_256][..], Some(50_256)));
    assert_eq!((absent.end_tokens(), absent.start_token()), (vec![], None));
    let note = "eos_token_id 50256 is outside the vocabulary of 61 tokens and is ignored";
    assert_eq!(absent.end_token_note().unwrap(), note);

    let some = read(json!({"eos_token_id": [60, 61, 7, 99], "bos_token_id": 60})).unwrap();
    assert_eq!((some.end_tokens(), some.start_token()), (vec![60, 7], Some(60)));
    assert!(some.end_token_note().unwrap().starts_with("eos_token_id 61, 99 is outside"), "all are named");

    for config in [Gpt2Config::gpt2(), read(json!({"eos_token_id": null})).unwrap()] {
        assert_eq!(config.end_tokens(), config.eos_token_id);
        assert_eq!(config.end_token_note(), None);
    }
}

/// Fields are public, so a configuration built in code is validated like a parsed one.
#[test]
fn config_built_in_code_is_validated() {
    let base = read(json!({})).unwrap();
    assert_eq!(base.check(), Ok(()));
    for (config, expected) in [
        (
            Gpt2Config { n_head: 0, ..base.clone() },
            "`n_head`: expected a whole number from 1 to 4194304, found 0",
        ),
        (Gpt2Config { n_head: 7, ..base.clone() }, "`n_head` = 7 does not divide `n_embd` = 24"),
        (
            Gpt2Config { n_embd: 0, ..base.clone() },
            "`n_embd`: expected a whole number from 1 to 4194304, found 0",
        ),
        (
            Gpt2Config { n_layer: usize::MAX, ..base.clone() },
            "`n_layer`: expected a whole number from 1 to 1024",
        ),
        (Gpt2Config { n_inner: Some(0), ..base.clone() }, "`n_inner`: expected a whole number from 1"),
        (Gpt2Config { vocab_size: 0, ..base.clone() }, "`vocab_size`: expected a whole number from 1"),
        (Gpt2Config { n_positions: 0, ..base.clone() }, "`n_positions`: expected a whole number from 1"),
        (
            Gpt2Config { attn_pdrop: 1.5, ..base.clone() },
            "`attn_pdrop`: expected a number from 0 to 1, found 1.5",
        ),
        (
            Gpt2Config { layer_norm_epsilon: f64::NAN, ..base.clone() },
            "`layer_norm_epsilon`: expected a number from 0 to 1, found null",
        ),
        (
            Gpt2Config { initializer_range: -1.0, ..base.clone() },
            "`initializer_range`: expected a number of at least 0, found -1",
        ),
    ] {
        let found = config.check().unwrap_err().to_string();
        assert!(found.starts_with(expected), "{found}");
        // Computing derived values must not panic either.
        let _ = (config.head_dim(), config.attention_scale(0), config.inner_width());
        let _ = ParameterCounts::new(&config);
    }
    let none = Gpt2Config { n_head: 0, ..base.clone() };
    assert_eq!(none.head_dim(), 0);
    let endless = Gpt2Config { n_layer: usize::MAX, n_embd: usize::MAX, ..base };
    assert_eq!(ParameterCounts::new(&endless).unique, usize::MAX);
    assert_eq!(endless.inner_width(), usize::MAX);
}

/// Every size is in range, but the 3 · 2^56 parameters of the blocks exceed 32 bits (not 64).
#[test]
fn model_larger_than_the_address_space_is_rejected() {
    let sizes = json!({"n_embd": 1 << 22, "n_head": 1, "n_layer": 1 << 10, "vocab_size": 1 << 26});
    let found = read(sizes);
    match usize::BITS {
        64 => assert_eq!(ParameterCounts::new(&found.unwrap()).blocks >> 56, 3),
        _ => assert_eq!(found, Err(ConfigError::TooLarge)),
    }
}
