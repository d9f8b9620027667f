//! What looks find is what TransformerLens finds, and what the report and its JSON say of it.

use candle_core::DType;
use candle_gpt2_interpret::{Head, LensValue, Measure};
use candle_gpt2_look::{
    Ablate, Attention, Attribute, ComparedTexts, Details, HeadKinds, Heads, Instead, Lens, Look,
    MetricOptions, Neuron, Neurons, Numbers, Parts, Patch, Patched, PathPatching, Reader, Saliency, Subject,
};
use candle_gpt2_testing::assert_close;
use serde_json::{Value, json};

use crate::common::{Case, GRIDS, Told, built_in, grid, look, words};

impl Case {
    fn metric(&self) -> MetricOptions {
        let [answer, against] = ["answer", "wrong"].map(|name| Some(self.token(name)));
        MetricOptions { answer, against, ..MetricOptions::default() }
    }

    fn texts(&self) -> ComparedTexts {
        let [clean, corrupt] = ["clean_ids", "corrupted_ids"].map(|name| self.text(name));
        ComparedTexts { clean, corrupt, metric: self.metric() }
    }
}

/// What `interpret` counts in logits, the report counts in shares and differences.
#[test]
fn grids_are_shares_and_differences_of_what_transformer_lens_has() {
    let case = Case::open("untied");
    let patched = Patched { site: "z".into(), by: None };
    let found = look(&case.loaded, &Patch { texts: case.texts(), patched }).unwrap();
    let expected = case.analyses.tensor("patch.attn_head_out_all_pos");
    assert_close(&grid(&found), &expected, GRIDS, "patching");
    let metric = found.report.metric.as_ref().unwrap();
    assert!((metric.before - case.logit_difference("corrupted")).abs() < GRIDS);
    assert!((metric.after.unwrap() - case.logit_difference("clean")).abs() < GRIDS);
    let details = found.details.to_json();
    assert_eq!((&details["site"], found.report.axes[1].name.as_str()), (&json!("z"), "head"));
    assert_eq!(details["corrupted_tokens"][1]["id"], case.recorded["corrupted_ids"][1]);

    let clean = case.logit_difference("clean");
    let path = PathPatching { texts: case.texts(), from: None, to: "final".into() };
    let expected = case.analyses.tensor("path.to_final").to_dtype(DType::F64).unwrap();
    let expected = ((clean - expected).unwrap() / (clean - case.logit_difference("corrupted"))).unwrap();
    assert_close(&grid(&look(&case.loaded, &path).unwrap()), &expected, GRIDS, "path");

    for (name, with) in [("raw_zero", Instead::raw_zero()), ("tl_zero", Instead::transformer_lens_zero())] {
        let ablate = Ablate { metric: case.metric(), with, ..Ablate::new(case.text("clean_ids")) };
        let without = case.analyses.tensor(&format!("ablate.{name}")).to_dtype(DType::F64).unwrap();
        assert_close(&grid(&look(&case.loaded, &ablate).unwrap()), &(without - clean).unwrap(), GRIDS, name);
    }
}

#[test]
fn parts_add_up_to_the_prediction() {
    let case = Case::open("untied");
    for unit in [Parts::Component, Parts::Head] {
        for numbers in [Numbers::Raw, Numbers::TransformerLens] {
            let metric = case.metric();
            let attribute = Attribute { metric, unit, numbers, ..Attribute::new(case.text("clean_ids")) };
            let found = look(&case.loaded, &attribute).unwrap();
            let details = found.details.to_json();
            let total = details["total"].as_f64().unwrap();
            assert!((total - case.logit_difference("clean")).abs() < GRIDS);
            assert_eq!(found.report.metric.unwrap().before, total);
            if unit == Parts::Component {
                let sum: f32 = found.report.values.iter().flatten().sum();
                let sum = f64::from(sum) + details["bias"].as_f64().unwrap();
                assert!((sum - total).abs() < GRIDS, "{sum} for {total}");
            }
        }
    }
}

#[test]
fn the_json_of_a_look_is_one_object() {
    let loaded = built_in();
    let neurons = Neurons { text: words("The dog"), neuron: Neuron { layer: 1, neuron: 9 }, top: 2 };
    let json = serde_json::to_value(look(&loaded, &neurons).unwrap()).unwrap();
    assert_eq!((&json["schema"], &json["model"]), (&json!("gpt2.look.neurons/1"), &json!("a model")));
    assert_eq!(json["places"].as_array().unwrap().len(), 2);
    // Where there are no details, the report is all there is.
    let attention = Attention { text: words("The dog"), layers: None, heads: None };
    let found = look(&loaded, &attention).unwrap();
    assert_eq!(found.details.to_json(), Value::Null);
    assert_eq!(serde_json::to_value(&found).unwrap(), serde_json::to_value(&found.report).unwrap());
}

#[test]
fn the_cells_of_a_lens_are_what_its_json_has() {
    let loaded = built_in();
    let watch = vec![" the".into(), "#5".into()];
    let lens = Lens { show: LensValue::Rank, top: 3, watch, ..Lens::new(words("The dog sat on")) };
    let found = look(&loaded, &lens).unwrap();
    let Details::Lens(details) = &found.details else { panic!("a lens has cells") };
    let json = found.details.to_json();
    assert_eq!(json["show"], "rank of the watched token");
    let tokens = found.report.tokens.len();
    for (place, value) in found.report.values.iter().enumerate() {
        let (layer, token) = (place / tokens, place % tokens);
        let (cell, told) = (&details.layers[layer].cells[token], &json["layers"][layer]["cells"][token]);
        let (rank, logprob) = cell.watched[0];
        assert_eq!(*value, Some(rank as f32));
        assert_eq!(told["watched"][0]["rank"], rank);
        assert_eq!(told["watched"][0]["logprob"], json!(logprob));
        assert_eq!(told["watched"][1]["token"]["id"], 5);
        assert_eq!(told["top"].as_array().unwrap().len(), 3);
        assert_eq!(told["top"][0]["token"]["text"], found.report.texts[place]);
    }
}

#[test]
fn a_token_in_front_is_part_of_every_text() {
    let loaded = built_in();
    let first = loaded.config().start_token().unwrap();
    let reader = Reader::new(loaded.vocabulary(), true).unwrap();
    let ids = reader.text(&words("The dog")).unwrap();
    assert_eq!(ids, [first, 353, 383, 71]);
    let attention = Attention {
        text: words("The dog"),
        layers: None,
        heads: Some(Heads(vec![Head { layer: 1, head: 2 }])),
    };
    let subject = Subject::new(&loaded, "a model".into(), &reader);
    let with = attention.at(&subject, &Told::default()).unwrap();
    let same = Attention { text: candle_gpt2_look::Text::Ids(ids), ..attention };
    let given = look(&loaded, &same).unwrap();
    assert!(with.report.bos && !given.report.bos);
    assert_eq!((with.report.values, with.report.tokens), (given.report.values, given.report.tokens));
    assert!(reader.text(&candle_gpt2_look::Text::Ids(Vec::new())).is_ok(), "the token in front is enough");
}

#[test]
fn what_is_left_out_may_come_from_texts() {
    let loaded = built_in();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("lines.txt");
    std::fs::write(&file, "The cat sat\n \nMy dog\n").unwrap();
    let read = Instead::read(&format!("mean:{}", file.display())).unwrap();
    let given = Instead::mean(vec![words("The cat sat"), words("My dog")]);
    let [of_file, of_texts] =
        [read, given].map(|with| look(&loaded, &Ablate { with, ..Ablate::new(words("The dog")) }).unwrap());
    assert_eq!(of_file.report.values, of_texts.report.values);
    assert!(of_texts.report.notes[0].ends_with("mean of 2 texts"));
    // What a text itself has in the place of a head's output changes nothing, and that is told.
    let with = Instead::sample(words("The dog"));
    let same = look(&loaded, &Ablate { with, ..Ablate::new(words("The dog")) }).unwrap();
    assert!(same.report.values.iter().all(|value| *value == Some(0.0)));
    assert!(same.report.notes.iter().any(|note| note.contains("nothing changed")));
}

#[test]
fn long_looks_tell_how_far_they_are() {
    let loaded = built_in();
    let reader = Reader::new(loaded.vocabulary(), false).unwrap();
    let subject = Subject::new(&loaded, "a model".into(), &reader);
    let told = Told::default();
    Ablate::new(words("The dog")).at(&subject, &told).unwrap();
    let [clean, corrupt] = ["The dog", "My dog"].map(words);
    let texts = ComparedTexts { clean, corrupt, metric: MetricOptions::default() };
    Patch { texts: texts.clone(), patched: Patched::default() }.at(&subject, &told).unwrap();
    PathPatching { texts, from: None, to: "2.0.k".into() }.at(&subject, &told).unwrap();
    let neuron = Neuron { layer: 0, neuron: 0 };
    Neurons { text: words("The dog"), neuron, top: 1 }.at(&subject, &told).unwrap();
    let expected = [("ablating", 4), ("patching", 4), ("patching", 16), ("reading", 3)];
    let jobs = told.jobs.into_inner().unwrap();
    let jobs: Vec<(&str, u64)> = jobs.iter().map(|(what, total)| (what.as_str(), *total)).collect();
    assert_eq!(jobs, expected);
}

#[test]
fn heads_on_random_tokens_and_weights_of_tokens_are_shares() {
    let loaded = built_in();
    let kinds = HeadKinds { length: Some(20), seed: 3, ..HeadKinds::default() };
    let found = look(&loaded, &kinds).unwrap();
    assert_eq!(grid(&found).dims(), [3, 4, 8]);
    assert_eq!(look(&loaded, &kinds).unwrap().report, found.report, "the same under the same seed");
    let other = look(&loaded, &HeadKinds { seed: 4, ..kinds }).unwrap();
    assert_ne!(other.report.values, found.report.values);

    let metric = MetricOptions { measure: Measure::Probability, ..MetricOptions::default() };
    let saliency = Saliency { steps: 8, metric, ..Saliency::new(words("The dog sat")) };
    let found = look(&loaded, &saliency).unwrap();
    let total: f32 = found.report.values.iter().flatten().sum();
    assert!((total - 1.0).abs() < 1e-5, "{total}");
}
