//! Tests that invalid input is rejected without the weights, and that errors name the option.

use std::path::PathBuf;

use candle_gpt2_engine::{BUILT_IN, ModelOptions, Silent};
use candle_gpt2_look::{
    Ablate, Analysis, Attention, Attribute, ComparedTexts, Estimate, Features, HeadKinds, Lens, Look,
    LookError, MetricOptions, Neuron, Neurons, Patch, Patched, PathPatching, Reader, Saliency,
    StoredDictionary, Text,
};
use candle_gpt2_testing::{CheckpointFolder, temporary_folder};
use candle_gpt2_weights::WeightsError;

use crate::common::{built_in, look, reader, words};

fn dogs() -> ComparedTexts {
    let [clean, corrupt] = ["The big dog", "My big dog"].map(words);
    ComparedTexts { clean, corrupt }
}

fn default_metric() -> MetricOptions {
    MetricOptions::default()
}

fn attention(text: Text) -> Attention {
    Attention { text, layers: None, heads: None }
}

/// Checks that an analysis is rejected with this message.
#[track_caller]
fn assert_rejected<L: Look<Checked: std::fmt::Debug>>(reader: &Reader, look: &L, expected: &str) {
    let error = look.check(reader).unwrap_err();
    assert!(error.is_usage(), "{error}");
    assert!(error.to_string().contains(expected), "`{expected}` is not in: {error}");
}

#[test]
fn invalid_options_are_rejected_by_name() {
    let loaded = built_in();
    let reader = reader(&loaded);
    let text = || words("The big dog");

    assert_rejected(&reader, &attention(words("")), "the text is empty; pass at least one token, or `bos`");
    let long = Text::Ids(vec![1; 513]);
    assert_rejected(&reader, &attention(long), "the text has 513 tokens; this model takes at most 512");
    assert_rejected(
        &reader,
        &attention(Text::Ids(vec![4096])),
        "token 4096 is outside the vocabulary of 4096",
    );
    let heads = Attention { heads: Some("0.4".parse().unwrap()), ..attention(text()) };
    assert_rejected(&reader, &heads, "head 0.4 is out of range");
    let layers = Attention { layers: Some("2-1".parse().unwrap()), ..attention(text()) };
    assert_rejected(&reader, &layers, "`layers`: 2-1 is out of range; expected 0 to 6");
    let none = Attention { layers: Some(Vec::new().into()), ..attention(text()) };
    assert_rejected(&reader, &none, "`layers`: expected at least one index");
    let both_chosen = Attention { heads: Some("0.0".parse().unwrap()), ..layers };
    assert_rejected(&reader, &both_chosen, "`layers` and `heads` are mutually exclusive");

    let watch = Lens { watch: vec!["two words".into()], ..Lens::new(text()) };
    assert_rejected(&reader, &watch, "`watch` \"two words\" has");
    assert_rejected(&reader, &watch, "or its id (#ID)");
    let metric = MetricOptions { against: Some("#1".into()), ..MetricOptions::default() };
    let against = Attribute { metric, ..Attribute::new(text()) };
    assert_rejected(&reader, &against, "`against` requires `answer`");
    let metric = MetricOptions { position: -4, ..MetricOptions::default() };
    let position = Ablate { metric, ..Ablate::new(text()) };
    assert_rejected(&reader, &position, "`position` -4: the text has 3 tokens");
    let at = Ablate { at: Some(0), ..Ablate::new(text()) };
    assert_rejected(&reader, &at, "`at` requires `heads`");
    let steps = Saliency { steps: 1001, ..Saliency::new(text()) };
    assert_rejected(&reader, &steps, "`steps`: expected a number from 1 to 1000, found 1001");

    let rows = HeadKinds { rows: 0, ..HeadKinds::default() };
    assert_rejected(&reader, &rows, "`rows`: expected a number from 1");
    let from = HeadKinds { from: Some(20), below: Some(20), ..HeadKinds::default() };
    assert_rejected(&reader, &from, "`from` 20, `below` 20: expected a range");
    let below = HeadKinds { below: Some(4097), ..HeadKinds::default() };
    assert_rejected(&reader, &below, "expected a range within the vocabulary of 4096");
    for length in [0, 257] {
        let length = HeadKinds { length: Some(length), ..HeadKinds::default() };
        assert_rejected(
            &reader,
            &length,
            "expected a number from 1 to 256, since the context must hold each row twice",
        );
    }
    for (layer, neuron) in [(7, 0), (0, 1024)] {
        let neurons = Neurons { text: text(), neuron: Neuron { layer, neuron }, top: 1 };
        assert_rejected(
            &reader,
            &neurons,
            &format!("`neuron` {layer}.{neuron}: this model has 7 layers of 1024 neurons"),
        );
    }
    for top in [0, 1001] {
        assert_rejected(
            &reader,
            &Lens { top, ..Lens::new(text()) },
            "`top`: expected a number from 1 to 1000",
        );
    }

    let corrupt = words("The");
    let patch = Patch {
        texts: ComparedTexts { corrupt, ..dogs() },
        metric: default_metric(),
        patched: Patched::default(),
    };
    assert_rejected(&reader, &patch, "`clean` has 3 tokens and `corrupt` 1");
    for (site, expected) in [
        ("resid_prr", "did you mean `resid_pre`?"),
        ("9.z", "the model has 7 blocks, counted from 0"),
        ("logits", "expected a single kind of hook point"),
        ("embed", "expected a single kind of hook point"),
        ("final_norm", "expected a single kind of hook point"),
        ("*", "expected a single kind of hook point"),
        ("1.z", "the grid has a row for every layer; omit the layer and write z"),
    ] {
        let patched = Patched { site: site.into(), by: None };
        assert_rejected(&reader, &Estimate { texts: dogs(), metric: default_metric(), patched }, expected);
    }
    let late = PathPatching {
        texts: dogs(),
        metric: default_metric(),
        from: Some("2.0".parse().unwrap()),
        to: "1.0.q".into(),
    };
    assert_rejected(&reader, &late, "`from` 2.0: expected a head in an earlier layer than `to` 1.0.q");
    for (to, expected) in [
        ("9.0.q", "head 9.0 is out of range"),
        ("there", "expected final"),
        ("1.0.x", "LAYER.HEAD.q"),
        ("0.0.q", "layer 0 has no earlier heads"),
    ] {
        assert_rejected(
            &reader,
            &PathPatching { texts: dogs(), metric: default_metric(), from: None, to: to.into() },
            expected,
        );
    }
    let sae =
        Features { text: Some(text()), site: Some("z".into()), ..Features::new(PathBuf::from("nowhere.pt")) };
    assert_rejected(&reader, &sae, "`site` z: expected a single hook point");
}

#[test]
fn missing_files_are_not_usage_errors() {
    let loaded = built_in();
    let reader = reader(&loaded);
    let nowhere = || PathBuf::from("/nowhere/file.safetensors");
    let site = Some("1.resid_pre".to_owned());
    let features = Features { text: Some(words("The big dog")), site, ..Features::new(nowhere()) };
    let lens = Lens { tuned: Some(nowhere()), ..Lens::new(words("The big dog")) };
    let found = [features.check(&reader).map(drop), lens.check(&reader).map(drop)];
    let with = "mean:/nowhere/file.safetensors".parse().unwrap();
    let mean = Ablate { with, ..Ablate::new(words("The big dog")) }.check(&reader).map(drop);
    for error in found.into_iter().chain([mean]).map(Result::unwrap_err) {
        assert!(error.to_string().contains("/nowhere/file.safetensors"), "{error}");
        assert!(!error.is_usage());
        assert!(matches!(error, LookError::Weights(_) | LookError::Read { .. }), "{error:?}");
    }
}

#[test]
fn unwritable_folder_is_a_write_error() {
    let folder = temporary_folder();
    let file = folder.path().join("file");
    std::fs::write(&file, "").unwrap();
    let dictionary = StoredDictionary::read(BUILT_IN.as_ref(), None).unwrap();
    for path in [file.clone(), file.join("below")] {
        let error = dictionary.save(&path).unwrap_err();
        let is_write_error = matches!(&error, LookError::Weights(WeightsError::Unwritable { .. }));
        assert!(is_write_error && error.to_string().contains("cannot be written"), "{error:?}");
        assert!(!error.is_usage());
    }
}

/// Checks for the same error as in `generate` and `score`; a top token would be meaningless.
#[test]
fn models_without_finite_logits_are_rejected() {
    for value in [f32::NAN, f32::INFINITY] {
        let folder = CheckpointFolder::tiny().with_tensors(|tensors| {
            let table = tensors.iter_mut().find(|(name, _)| name.ends_with("wpe.weight")).unwrap().1;
            *table = (&*table * f64::from(value)).unwrap();
        });
        let model = ModelOptions { model: folder.path().to_owned(), ..ModelOptions::default() };
        let loaded = model.open(&Silent).unwrap().load(&Silent).unwrap();
        let text = || Text::Ids(vec![1, 2, 3]);
        let assert_rejected = |result: Result<Analysis, LookError>| {
            let error = result.err().unwrap();
            assert!(!error.is_usage());
            assert_eq!(
                error.to_string(),
                "the model's logits are not finite; verify its weights, and use an f32 KV cache"
            );
        };
        assert_rejected(look(&loaded, &Lens::new(text())));
        assert_rejected(look(&loaded, &attention(text())));
        assert_rejected(look(&loaded, &Saliency::new(text())));
        assert_rejected(look(&loaded, &Attribute::new(text())));
        assert_rejected(look(&loaded, &Ablate::new(text())));
        let neuron = Neuron { layer: 0, neuron: 0 };
        assert_rejected(look(&loaded, &Neurons { text: text(), neuron, top: 3 }));
        assert_rejected(look(&loaded, &HeadKinds { text: Some(text()), ..HeadKinds::default() }));
        assert_rejected(look(&loaded, &HeadKinds::default()));
    }
}

/// Checks that rows of random tokens, which are repeated, need a context of at least two tokens.
#[test]
fn random_rows_need_a_context_of_two_tokens() {
    let folder = CheckpointFolder::tiny()
        .with_config(serde_json::json!({"n_positions": 1, "n_ctx": 1}))
        .with_tensors(|tensors| {
            let table = tensors.iter_mut().find(|(name, _)| name.ends_with("wpe.weight")).unwrap().1;
            *table = table.narrow(0, 0, 1).unwrap().contiguous().unwrap();
        });
    let model = ModelOptions { model: folder.path().to_owned(), ..ModelOptions::default() };
    let opened = model.open(&Silent).unwrap();
    let reader = Reader::new(opened.vocabulary(), false).unwrap();
    assert_rejected(
        &reader,
        &HeadKinds::default(),
        "the context of 1 tokens is too short for repeated random rows",
    );
}
