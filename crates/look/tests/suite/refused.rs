//! What cannot be asked is refused before the weights are needed, and the options are named.

use std::path::PathBuf;

use candle_gpt2_engine::{ModelOptions, Silent};
use candle_gpt2_look::{
    Ablate, Attention, Attribute, ComparedTexts, Estimate, Features, Found, HeadKinds, Lens, Look, LookError,
    MetricOptions, Neuron, Neurons, Patch, Patched, PathPatching, Reader, Saliency, Text,
};
use candle_gpt2_testing::CheckpointFolder;

use crate::common::{built_in, look, reader, words};

fn dogs() -> ComparedTexts {
    let [clean, corrupt] = ["The big dog", "My big dog"].map(words);
    ComparedTexts { clean, corrupt }
}

fn usual() -> MetricOptions {
    MetricOptions::default()
}

fn attention(text: Text) -> Attention {
    Attention { text, layers: None, heads: None }
}

/// Checks that a look is refused with these words.
#[track_caller]
fn refused<L: Look<Checked: std::fmt::Debug>>(reader: &Reader, look: &L, told: &str) {
    let error = look.check(reader).unwrap_err();
    assert!(error.is_usage(), "{error}");
    assert!(error.to_string().contains(told), "`{told}` is not in: {error}");
}

#[test]
fn wrong_questions_are_refused_and_options_named() {
    let loaded = built_in();
    let reader = reader(&loaded);
    let text = || words("The big dog");

    refused(&reader, &attention(words("")), "the text is empty; give at least one token, or `bos`");
    let long = Text::Ids(vec![1; 513]);
    refused(&reader, &attention(long), "the text has 513 tokens; this model takes at most 512");
    refused(&reader, &attention(Text::Ids(vec![2048])), "token 2048 is outside the vocabulary of 2048");
    let heads = Attention { heads: Some("0.3".parse().unwrap()), ..attention(text()) };
    refused(&reader, &heads, "there is no head 0.3");
    let layers = Attention { layers: Some("2-1".parse().unwrap()), ..attention(text()) };
    refused(&reader, &layers, "`layers`: 2-1 is not among 0 to 5");
    let none = Attention { layers: Some(Vec::new().into()), ..attention(text()) };
    refused(&reader, &none, "`layers`: none is given");
    let both_chosen = Attention { heads: Some("0.0".parse().unwrap()), ..layers };
    refused(&reader, &both_chosen, "`layers` and `heads` cannot");

    let watch = Lens { watch: vec!["two words".into()], ..Lens::new(text()) };
    refused(&reader, &watch, "`watch` \"two words\" has");
    refused(&reader, &watch, "or its id (#ID)");
    let metric = MetricOptions { against: Some("#1".into()), ..MetricOptions::default() };
    let against = Attribute { metric, ..Attribute::new(text()) };
    refused(&reader, &against, "`against` is compared with `answer`");
    let metric = MetricOptions { position: -4, ..MetricOptions::default() };
    let position = Ablate { metric, ..Ablate::new(text()) };
    refused(&reader, &position, "`position` -4: the text has 3 tokens");
    let at = Ablate { at: Some(0), ..Ablate::new(text()) };
    refused(&reader, &at, "`at` is of chosen heads; give `heads`");
    let steps = Saliency { steps: 1001, ..Saliency::new(text()) };
    refused(&reader, &steps, "`steps`: expected from 1 to 1000, found 1001");

    let rows = HeadKinds { rows: 0, ..HeadKinds::default() };
    refused(&reader, &rows, "`rows`: expected from 1");
    let from = HeadKinds { from: Some(20), below: Some(20), ..HeadKinds::default() };
    refused(&reader, &from, "`from` 20 `below` 20: expected a range");
    let below = HeadKinds { below: Some(2049), ..HeadKinds::default() };
    refused(&reader, &below, "expected a range within the vocabulary of 2048");
    for length in [0, 257] {
        let length = HeadKinds { length: Some(length), ..HeadKinds::default() };
        refused(&reader, &length, "expected from 1 to 256, since the context must hold each row twice");
    }
    for (layer, neuron) in [(6, 0), (0, 768)] {
        let neurons = Neurons { text: text(), neuron: Neuron { layer, neuron }, top: 1 };
        refused(
            &reader,
            &neurons,
            &format!("`neuron` {layer}.{neuron}: this model has 6 layers of 768 neurons"),
        );
    }
    for top in [0, 1001] {
        refused(&reader, &Lens { top, ..Lens::new(text()) }, "`top`: expected from 1 to 1000");
    }

    let corrupt = words("The");
    let patch =
        Patch { texts: ComparedTexts { corrupt, ..dogs() }, metric: usual(), patched: Patched::default() };
    refused(&reader, &patch, "`clean` has 3 tokens and `corrupt` 1");
    for (site, told) in [
        ("resid_prr", "did you mean `resid_pre`?"),
        ("9.z", "the model's 6 blocks are counted from 0"),
        ("logits", "expected one kind of hook point"),
        ("embed", "expected one kind of hook point"),
        ("final_norm", "expected one kind of hook point"),
        ("*", "expected one kind of hook point"),
        ("1.z", "the grid has a row for every layer; write z"),
    ] {
        let patched = Patched { site: site.into(), by: None };
        refused(&reader, &Estimate { texts: dogs(), metric: usual(), patched }, told);
    }
    let late = PathPatching {
        texts: dogs(),
        metric: usual(),
        from: Some("2.0".parse().unwrap()),
        to: "1.0.q".into(),
    };
    refused(&reader, &late, "`from` 2.0: it is not before `to` 1.0.q");
    for (to, told) in [
        ("9.0.q", "there is no head 9.0"),
        ("there", "expected final"),
        ("1.0.x", "LAYER.HEAD.q"),
        ("0.0.q", "no head is before layer 0"),
    ] {
        refused(&reader, &PathPatching { texts: dogs(), metric: usual(), from: None, to: to.into() }, told);
    }
    let sae =
        Features { text: Some(text()), site: Some("z".into()), ..Features::new(PathBuf::from("nowhere.pt")) };
    refused(&reader, &sae, "`site` z: expected one place");
}

#[test]
fn files_that_are_not_there_are_named_and_are_no_wrong_question() {
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

/// Same refusal as `generate` and `score`: a most probable token would be invented.
#[test]
fn models_without_finite_logits_are_refused() {
    for value in [f32::NAN, f32::INFINITY] {
        let folder = CheckpointFolder::tiny().with_tensors(|tensors| {
            let table = tensors.iter_mut().find(|(name, _)| name.ends_with("wpe.weight")).unwrap().1;
            *table = (&*table * f64::from(value)).unwrap();
        });
        let model = ModelOptions { model: folder.path().to_owned(), ..ModelOptions::default() };
        let loaded = model.open(&Silent).unwrap().load(&Silent).unwrap();
        let text = || Text::Ids(vec![1, 2, 3]);
        let refused = |told: Result<Found, LookError>| {
            let error = told.err().unwrap();
            assert!(!error.is_usage());
            assert_eq!(
                error.to_string(),
                "the model's logits are not finite; verify its weights, and keep keys and values in f32"
            );
        };
        refused(look(&loaded, &Lens::new(text())));
        refused(look(&loaded, &attention(text())));
        refused(look(&loaded, &Saliency::new(text())));
        refused(look(&loaded, &Attribute::new(text())));
        refused(look(&loaded, &Ablate::new(text())));
        let neuron = Neuron { layer: 0, neuron: 0 };
        refused(look(&loaded, &Neurons { text: text(), neuron, top: 3 }));
        refused(look(&loaded, &HeadKinds { text: Some(text()), ..HeadKinds::default() }));
        refused(look(&loaded, &HeadKinds::default()));
    }
}

/// Random rows are read twice, which takes a context of two tokens.
#[test]
fn random_rows_need_a_context_of_two() {
    let folder = CheckpointFolder::tiny()
        .with_config(serde_json::json!({"n_positions": 1, "n_ctx": 1}))
        .with_tensors(|tensors| {
            let table = tensors.iter_mut().find(|(name, _)| name.ends_with("wpe.weight")).unwrap().1;
            *table = table.narrow(0, 0, 1).unwrap().contiguous().unwrap();
        });
    let model = ModelOptions { model: folder.path().to_owned(), ..ModelOptions::default() };
    let opened = model.open(&Silent).unwrap();
    let reader = Reader::new(opened.vocabulary(), false).unwrap();
    refused(&reader, &HeadKinds::default(), "the context of 1 is too short for random rows");
}
