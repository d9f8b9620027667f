//! A checkpoint that is given as bytes is the checkpoint on disk.

use std::borrow::Cow;
use std::path::Path;

use candle_core::{Device, Tensor};
use gpt2::{Gpt2LMHead, LogitsFor, Pass};
use gpt2_testing::{fixture_path, values};
use gpt2_weights::{Checkpoint, EmbeddedFiles, LoadOptions, WeightsError, encode};

const FILES: EmbeddedFiles<'_> = EmbeddedFiles {
    config: include_str!("../../../testing/fixtures/tiny-checkpoint/config.json"),
    tokenizer: include_str!("../../../testing/fixtures/tiny-checkpoint/tokenizer.json"),
    generation_config: None,
    weights: Cow::Borrowed(include_bytes!("../../../testing/fixtures/tiny-checkpoint/model.safetensors")),
};

#[test]
fn an_embedded_checkpoint_equals_the_same_files_on_disk() {
    let on_disk = Checkpoint::open(&fixture_path("tiny-checkpoint")).unwrap();
    let embedded = Checkpoint::from_embedded("built-in", FILES).unwrap();
    assert_eq!(embedded.config(), on_disk.config());
    let text = "The first citizen, naïve café";
    let ids = encode(&embedded.tokenizer(None).unwrap(), text).unwrap();
    assert_eq!(ids, encode(&on_disk.tokenizer(None).unwrap(), text).unwrap());
    assert!(embedded.verify(&|_| ()).unwrap().is_empty());
    let ids = Tensor::from_slice(&ids, (1, ids.len()), &Device::Cpu).unwrap();
    let logits = |checkpoint: &Checkpoint| {
        let model: Gpt2LMHead = checkpoint.load(&LoadOptions::default(), &|_| ()).unwrap();
        values(&model.forward(&ids, LogitsFor::EveryToken, None, &mut Pass::inference()).unwrap())
    };
    assert_eq!(logits(&embedded), logits(&on_disk));

    // Bytes that were fetched while the program runs.
    let (config, tokenizer) = (FILES.config.to_owned(), FILES.tokenizer.to_owned());
    let weights = FILES.weights.to_vec().into();
    let files = EmbeddedFiles { config: &config, tokenizer: &tokenizer, weights, generation_config: None };
    let fetched = Checkpoint::from_embedded("fetched", files).unwrap();
    drop((config, tokenizer));
    assert_eq!(logits(&fetched), logits(&on_disk));
}

/// The given one, and never a file of the folder that the program happens to run in.
#[test]
fn the_generation_config_is_given_with_the_other_files() {
    let none = Checkpoint::from_embedded("built-in", FILES).unwrap();
    assert_eq!(none.generation_config().unwrap(), None);
    let json = r#"{"max_new_tokens": 7}"#.to_owned();
    let files = EmbeddedFiles { generation_config: Some(&json), ..FILES };
    let given = Checkpoint::from_embedded("fetched", files).unwrap();
    let expected = (Path::new("fetched").join("generation_config.json"), json);
    assert_eq!(given.generation_config().unwrap(), Some(expected));
    assert!(given.rules().contains(&"the checkpoint was given as bytes".to_owned()), "{:?}", given.rules());
}

#[test]
fn damaged_embedded_files_are_refused_by_name() {
    for (files, expected) in [
        (EmbeddedFiles { config: "{}", ..FILES }, "n_head"),
        (EmbeddedFiles { tokenizer: "{}", ..FILES }, "tokenizer"),
        (EmbeddedFiles { weights: b"no weights".to_vec().into(), ..FILES }, "safetensors"),
    ] {
        let error: WeightsError = Checkpoint::from_embedded("built-in", files).unwrap_err();
        let message = error.to_string();
        assert!(message.contains("built-in") && message.contains(expected), "{message}");
    }
}
