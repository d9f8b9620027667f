//! `config.json`: every key and alias is honoured, and what is not supported is refused by name.

use gpt2::{Activation, ConfigError, Gpt2Config, ParameterCounts};
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

/// Removes `key` from the base configuration and adds others.
fn read_without(key: &str, additions: Value) -> Result<Gpt2Config, ConfigError> {
    let mut config = base();
    config.as_object_mut().unwrap().remove(key);
    config.as_object_mut().unwrap().extend(additions.as_object().unwrap().clone());
    Gpt2Config::from_json(&config.to_string())
}

fn message(result: Result<Gpt2Config, ConfigError>) -> String {
    result.expect_err("a refusal").to_string()
}

#[test]
fn absent_keys_take_the_defaults_of_transformers() {
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
fn every_key_is_honoured() {
    let config = read(json!({
        "n_inner": 50, "activation_function": "quick_gelu", "layer_norm_epsilon": 1e-3,
        "scale_attn_weights": false, "scale_attn_by_inverse_layer_idx": true, "reorder_and_upcast_attn": true,
        "tie_word_embeddings": false, "embd_pdrop": 0.2, "attn_pdrop": 0, "resid_pdrop": 1,
        "initializer_range": 0.5, "bos_token_id": 7, "eos_token_id": [1, 2]
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
    };
    assert_eq!(config, expected);
    assert_eq!(
        Gpt2Config::from_json(&config.to_json().to_string()).unwrap(),
        expected,
        "written and read again"
    );
}

/// Found by fuzzing: numbers were read one unit in the last place beside what the file says.
#[test]
fn numbers_are_read_exactly() {
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
fn aliases_are_read_and_must_agree() {
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
    // transformers ignores n_ctx where n_positions is there.
    assert_eq!(read(json!({"n_ctx": 512})).unwrap().n_positions, 19);
}

#[test]
fn missing_sizes_are_named() {
    for key in ["vocab_size", "n_positions", "n_embd", "n_layer", "n_head"] {
        let found = message(read_without(key, json!({})));
        assert!(found.starts_with(&format!("the key `{key}` is missing")), "{found}");
    }
    assert!(message(read_without("n_embd", json!({}))).contains("`hidden_size`"));
}

#[test]
fn values_out_of_range_are_refused() {
    for (changes, expected) in [
        (json!({"n_layer": 0}), "`n_layer`: expected a whole number from 1 to 1024, found 0"),
        (json!({"n_embd": -24}), "`n_embd`: expected a whole number from 1 to 4194304, found -24"),
        (json!({"n_embd": 1e18}), "`n_embd`: expected a whole number from 1 to 4194304, found 1e+18"),
        (
            json!({"vocab_size": u64::MAX}),
            "`vocab_size`: expected a whole number from 1 to 67108864, found 18446744073709551615",
        ),
        (json!({"n_positions": 2.5}), "`n_positions`: expected a whole number from 1 to 67108864, found 2.5"),
        (json!({"n_head": "3"}), "`n_head`: expected a whole number from 1 to 4194304, found \"3\""),
        (json!({"n_inner": 0}), "`n_inner`: expected a whole number from 1 to 4194304, found 0"),
        (json!({"n_head": 5}), "`n_head` = 5 does not divide `n_embd` = 24; every head needs the same width"),
        (json!({"layer_norm_epsilon": -1}), "`layer_norm_epsilon`: expected a number from 0 to 1, found -1"),
        (json!({"attn_pdrop": 1.5}), "`attn_pdrop`: expected a number from 0 to 1, found 1.5"),
        (
            json!({"tie_word_embeddings": "yes"}),
            "`tie_word_embeddings`: expected true or false, found \"yes\"",
        ),
        (json!({"scale_attn_weights": null}), "`scale_attn_weights`: expected true or false, found null"),
        (json!({"scale_attn_weights": null}), "`scale_attn_weights`: expected true or false, found null"),
        (json!({"eos_token_id": "x"}), "`eos_token_id`: expected a token id, or a list of them, found \"x\""),
    ] {
        assert_eq!(message(read(changes)), expected);
    }
}

#[test]
fn what_is_not_supported_is_refused_by_name() {
    for (changes, expected) in [
        (json!({"model_type": "llama"}), "`model_type` = \"llama\" is not supported"),
        (json!({"add_cross_attention": true}), "`add_cross_attention` = true is not supported"),
        (json!({"is_encoder_decoder": true}), "`is_encoder_decoder` = true is not supported"),
        (
            json!({"activation_function": "gelu_fast"}),
            "`activation_function` = \"gelu_fast\" is not supported",
        ),
        (json!({"pruned_heads": {"0": [1]}}), "`pruned_heads` = {\"0\":[1]} is not supported"),
        (
            json!({"quantization_config": {"bits": 4}}),
            "`quantization_config` = {\"bits\":4} is not supported",
        ),
    ] {
        let found = message(read(changes));
        assert!(found.starts_with(expected), "{found}");
    }
    assert!(read(json!({"pruned_heads": {}, "add_cross_attention": false})).is_ok());
}

#[test]
fn text_that_is_no_configuration_is_refused() {
    assert!(message(Gpt2Config::from_json("<!DOCTYPE html>")).starts_with("not valid JSON"));
    assert!(message(Gpt2Config::from_json("")).starts_with("not valid JSON"));
    assert_eq!(message(Gpt2Config::from_json("[1]")), "expected a JSON object, found a list");
    assert!(Gpt2Config::from_json(&"[".repeat(100_000)).is_err(), "deep nesting ends in an error");
    let with_mark = format!("\u{feff}{}", base());
    assert!(Gpt2Config::from_json(&with_mark).is_ok(), "a byte order mark is no error");
}

#[test]
fn presets_are_known_by_their_names() {
    let xl = Gpt2Config::preset("gpt2-xl").unwrap();
    assert_eq!((xl.n_layer, xl.n_head, xl.n_embd, xl.head_dim()), (48, 25, 1600, 64));
    let found = Gpt2Config::preset("gpt3").unwrap_err().to_string();
    assert_eq!(
        found,
        "unknown preset `gpt3`; the presets are distilgpt2, gpt2, gpt2-medium, gpt2-large, gpt2-xl"
    );
}

/// A small configuration without token ids takes those of GPT-2, which its vocabulary does not have.
#[test]
fn special_tokens_beyond_the_vocabulary_are_left_out_and_said() {
    let absent = read(json!({})).unwrap();
    assert_eq!((absent.eos_token_id.as_slice(), absent.bos_token_id), (&[50_256][..], Some(50_256)));
    assert_eq!((absent.end_tokens(), absent.start_token()), (vec![], None));
    let note = "eos_token_id 50256 is beyond the vocabulary of 61 tokens, and ends no text";
    assert_eq!(absent.end_token_note().unwrap(), note);

    let some = read(json!({"eos_token_id": [60, 61, 7, 99], "bos_token_id": 60})).unwrap();
    assert_eq!((some.end_tokens(), some.start_token()), (vec![60, 7], Some(60)));
    assert!(some.end_token_note().unwrap().starts_with("eos_token_id 61, 99 is beyond"), "all are named");

    for config in [Gpt2Config::gpt2(), read(json!({"eos_token_id": null})).unwrap()] {
        assert_eq!(config.end_tokens(), config.eos_token_id);
        assert_eq!(config.end_token_note(), None);
    }
}

/// Fields are open, so a configuration made by hand is checked like one that was read.
#[test]
fn a_configuration_made_by_hand_is_checked() {
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
        // What is computed from it ends without a panic all the same.
        let _ = (config.head_dim(), config.attention_scale(0), config.inner_width());
        let _ = ParameterCounts::new(&config);
    }
    let none = Gpt2Config { n_head: 0, ..base.clone() };
    assert_eq!(none.head_dim(), 0);
    let endless = Gpt2Config { n_layer: usize::MAX, n_embd: usize::MAX, ..base };
    assert_eq!(ParameterCounts::new(&endless).unique, usize::MAX);
    assert_eq!(endless.inner_width(), usize::MAX);
}

/// Every size is in its range; blocks of 3 · 2^56 parameters can be counted in 64 bits, and not in 32.
#[test]
fn a_model_that_cannot_be_addressed_is_refused() {
    let sizes = json!({"n_embd": 1 << 22, "n_head": 1, "n_layer": 1 << 10, "vocab_size": 1 << 26});
    let found = read(sizes);
    match usize::BITS {
        64 => assert_eq!(ParameterCounts::new(&found.unwrap()).blocks >> 56, 3),
        _ => assert_eq!(found, Err(ConfigError::TooLarge)),
    }
}
