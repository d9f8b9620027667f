//! What looks find is what TransformerLens finds, and what the report and its JSON say of it.

use std::collections::HashMap;

use candle_core::{DType, Device, Tensor, safetensors};
use candle_gpt2_engine::{ModelOptions, Silent};
use candle_gpt2_interpret::{By, Head, LensValue, Measure};
use candle_gpt2_look::{
    Ablate, Attention, Attribute, ComparedTexts, Details, Features, Found, HeadKinds, Heads, Instead, Lens,
    Look, LookSubject, MetricOptions, Neuron, Neurons, Numbers, Parts, Patch, Patched, PathPatching, Reader,
    Saliency, Text, TokenChoice,
};
use candle_gpt2_testing::{CheckpointFolder, Fixture, assert_close};
use serde_json::{Value, json};

use crate::common::{Case, GRIDS, Told, built_in, grid, look, words};

impl Case {
    fn metric(&self) -> MetricOptions {
        let [answer, against] = ["answer", "wrong"].map(|name| Some(self.token(name)));
        MetricOptions { answer, against, ..MetricOptions::default() }
    }

    fn texts(&self) -> ComparedTexts {
        let [clean, corrupt] = ["clean_ids", "corrupted_ids"].map(|name| self.text(name));
        ComparedTexts { clean, corrupt }
    }
}

/// What `interpret` counts in logits, the report counts in shares and differences.
#[test]
fn grids_are_shares_and_differences_of_what_transformer_lens_has() {
    let case = Case::open("untied");
    let patched = Patched { site: "z".into(), by: None };
    let found = look(&case.loaded, &Patch { texts: case.texts(), metric: case.metric(), patched }).unwrap();
    let expected = case.analyses.tensor("patch.attn_head_out_all_pos");
    assert_close(&grid(&found), &expected, GRIDS, "patching");
    let metric = found.report.metric.as_ref().unwrap();
    assert!((metric.before - case.logit_difference("corrupted")).abs() < GRIDS);
    assert!((metric.after.unwrap() - case.logit_difference("clean")).abs() < GRIDS);
    let details = found.details.to_json();
    assert_eq!((&details["site"], found.report.axes[1].name.as_str()), (&json!("z"), "head"));
    assert_eq!(details["corrupted_tokens"][1]["id"], case.recorded["corrupted_ids"][1]);

    let clean = case.logit_difference("clean");
    let path = PathPatching { texts: case.texts(), metric: case.metric(), from: None, to: "final".into() };
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

/// Without a token to compare with, the number that is split is named for what it is.
#[test]
fn an_attributed_logit_is_less_the_mean_of_all() {
    let found = look(&built_in(), &Attribute::new(words("The dog"))).unwrap();
    let details = found.details.to_json();
    let [total, logit, mean] = ["total", "logit", "mean_logit"].map(|name| details[name].as_f64().unwrap());
    assert!((total - (logit - mean)).abs() < GRIDS, "{total} for {logit} less {mean}");
    let metric = found.report.metric.unwrap();
    assert!(metric.name.ends_with("at position 1, minus the mean of all logits"), "{}", metric.name);
    assert!(found.report.title.ends_with(&metric.name), "{}", found.report.title);
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
    }
    // The most probable tokens are not the watched one; they are beside their own probabilities.
    assert!(
        found.report.texts.is_empty() && found.report.title.contains("\"·the\""),
        "{}",
        found.report.title
    );
    let found = look(&loaded, &Lens { show: LensValue::Probability, ..lens }).unwrap();
    let json = found.details.to_json();
    for (place, text) in found.report.texts.iter().enumerate() {
        assert_eq!(&json["layers"][place / tokens]["cells"][place % tokens]["top"][0]["token"]["text"], text);
    }
    assert_eq!(found.report.texts.len(), found.report.values.len());
}

#[test]
fn a_token_in_front_is_part_of_every_text() {
    let loaded = built_in();
    let first = loaded.config().start_token().unwrap();
    let reader = Reader::new(loaded.vocabulary(), true).unwrap();
    let ids = reader.text(&words("The dog")).unwrap();
    assert_eq!(ids, [first, 442, 1082]);
    let attention = Attention {
        text: words("The dog"),
        layers: None,
        heads: Some(Heads(vec![Head { layer: 1, head: 2 }])),
    };
    let subject = LookSubject::new(&loaded, "a model".into(), &reader);
    let with = attention.at(&subject, &Told::default()).unwrap();
    let same = Attention { text: Text::Ids(ids), ..attention };
    let given = look(&loaded, &same).unwrap();
    assert!(with.report.bos && !given.report.bos);
    assert_eq!((with.report.values, with.report.tokens), (given.report.values, given.report.tokens));
    assert!(reader.text(&Text::Ids(Vec::new())).is_ok(), "the token in front is enough");
}

#[test]
fn what_is_left_out_may_come_from_texts() {
    let loaded = built_in();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("lines.txt");
    std::fs::write(&file, "The cat sat\n \nMy dog\n").unwrap();
    let read = format!("mean:{}", file.display()).parse().unwrap();
    let given = Instead::mean(vec![words("The cat sat"), words("My dog")]);
    let [of_file, of_texts] =
        [read, given].map(|with| look(&loaded, &Ablate { with, ..Ablate::new(words("The dog")) }).unwrap());
    assert_eq!(of_file.report.values, of_texts.report.values);
    assert!(of_texts.report.notes[0].ends_with("mean of 2 texts"));
    // Rows of JSON are read as rows, not as text.
    let rows = folder.path().join("rows.jsonl");
    let ids = loaded.vocabulary().encode("My dog").unwrap();
    std::fs::write(&rows, format!("{{\"prompt\": \"The cat sat\"}}\n\n{{\"ids\": {ids:?}}}\n")).unwrap();
    let with = || format!("mean:{}", rows.display()).parse().unwrap();
    let of_rows = look(&loaded, &Ablate { with: with(), ..Ablate::new(words("The dog")) }).unwrap();
    assert_eq!(of_rows.report.values, of_texts.report.values);
    std::fs::write(&rows, "{\"prompt\": \"The cat sat\"}\n{\"clean\": \"a\", \"corrupt\": \"b\"}\n").unwrap();
    let error = look(&loaded, &Ablate { with: with(), ..Ablate::new(words("The dog")) }).unwrap_err();
    let told = format!("{error}: {}", std::error::Error::source(&error).unwrap());
    assert!(told.contains("rows.jsonl, line 2: ") && told.contains("keys `prompt` and `ids`"), "{told}");
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
    let subject = LookSubject::new(&loaded, "a model".into(), &reader);
    let told = Told::default();
    Ablate::new(words("The dog")).at(&subject, &told).unwrap();
    let [clean, corrupt] = ["The dog", "My dog"].map(words);
    let texts = ComparedTexts { clean, corrupt };
    Patch { texts: texts.clone(), metric: MetricOptions::default(), patched: Patched::default() }
        .at(&subject, &told)
        .unwrap();
    PathPatching { texts, metric: MetricOptions::default(), from: None, to: "2.0.k".into() }
        .at(&subject, &told)
        .unwrap();
    let neuron = Neuron { layer: 0, neuron: 0 };
    Neurons { text: words("The dog"), neuron, top: 1 }.at(&subject, &told).unwrap();
    let expected = [("ablating", 6), ("patching", 6), ("patching", 6), ("reading", 2)];
    let jobs = told.jobs.into_inner().unwrap();
    let jobs: Vec<(&str, u64)> = jobs.iter().map(|(what, total)| (what.as_str(), *total)).collect();
    assert_eq!(jobs, expected);
}

#[test]
fn heads_on_random_tokens_and_weights_of_tokens_are_shares() {
    let loaded = built_in();
    let kinds = HeadKinds { length: Some(20), seed: 3, ..HeadKinds::default() };
    let found = look(&loaded, &kinds).unwrap();
    assert_eq!(grid(&found).dims(), [3, 6, 3]);
    assert_eq!(look(&loaded, &kinds).unwrap().report, found.report, "the same under the same seed");
    let other = look(&loaded, &HeadKinds { seed: 4, ..kinds }).unwrap();
    assert_ne!(other.report.values, found.report.values);

    let metric = MetricOptions { measure: Measure::Probability, ..MetricOptions::default() };
    let saliency = Saliency { steps: 8, metric, ..Saliency::new(words("The dog sat")) };
    let found = look(&loaded, &saliency).unwrap();
    let total: f32 = found.report.values.iter().flatten().sum();
    assert!((total - 1.0).abs() < 1e-5, "{total}");
}

#[test]
fn saliency_says_what_its_sums_make() {
    let case = Case::open("untied");
    let baseline = Some(TokenChoice::Id(1));
    let saliency =
        Saliency { steps: 100, metric: case.metric(), baseline, ..Saliency::new(case.text("clean_ids")) };
    let found = look(&case.loaded, &saliency).unwrap();
    let details = found.details.to_json();
    let sum = |name: &str| -> f64 {
        details[name].as_array().unwrap().iter().map(|value| value.as_f64().unwrap()).sum()
    };
    // The metric of a text of baseline tokens, from a look of its own.
    let text = Text::Ids(vec![1; found.report.tokens.len()]);
    let of_baseline = look(&case.loaded, &Ablate { metric: case.metric(), ..Ablate::new(text) }).unwrap();
    let before = |found: &Found| found.report.metric.as_ref().unwrap().before;
    let difference = before(&found) - before(&of_baseline);
    assert!(
        (sum("sums") - difference).abs() < 0.01 * difference.abs().max(1.0),
        "{details} for {difference}"
    );
    let note = format!("make {:.4} of the metric's difference {difference:.4}", sum("sums"));
    assert!(found.report.notes[0].contains(&note), "{:?}", found.report.notes);
    for (share, norm) in found.report.values.iter().zip(details["norms"].as_array().unwrap()) {
        assert!((f64::from(share.unwrap()) - norm.as_f64().unwrap() / sum("norms")).abs() < 1e-6);
    }
}

#[test]
fn neurons_are_shown_where_they_are_most_active() {
    let case = Case::open("untied");
    let Text::Ids(clean) = case.text("clean_ids") else { panic!("the fixture has ids") };
    let post = Fixture::open("inside/untied/raw").tensor("blocks.1.mlp.hook_post").squeeze(0).unwrap();
    let expected: Vec<f32> = post.narrow(1, 9, 1).unwrap().squeeze(1).unwrap().to_vec1().unwrap();
    let neuron = Neuron { layer: 1, neuron: 9 };
    let neurons = |ids: Vec<u32>, top| Neurons { text: Text::Ids(ids), neuron, top };
    let found = look(&case.loaded, &neurons(clean.clone(), 4)).unwrap();
    let mut order: Vec<usize> = (0..clean.len()).collect();
    order.sort_by(|a, b| expected[*b].total_cmp(&expected[*a]));
    for (place, index) in found.details.to_json()["places"].as_array().unwrap().iter().zip(order) {
        assert_eq!((&place["index"], &place["id"]), (&json!(index), &json!(clean[index])));
        assert!((place["value"].as_f64().unwrap() - f64::from(expected[index])).abs() < 1e-5, "{place}");
        let before: String =
            clean[index.saturating_sub(8)..index].iter().map(|id| format!("#{id}")).collect();
        assert_eq!(place["before"], before);
    }
    // A text longer than the context is read in windows of it, each with the token in front.
    let long: Vec<u32> = clean.iter().copied().cycle().take(case.loaded.config().n_positions + 3).collect();
    for bos in [false, true] {
        let reader = Reader::new(case.loaded.vocabulary(), bos).unwrap();
        let subject = LookSubject::new(&case.loaded, "a model".into(), &reader);
        let found = neurons(long.clone(), 1000).at(&subject, &Told::default()).unwrap();
        assert_eq!((found.report.bos, found.report.tokens.len()), (bos, 0), "a long text is not listed");
        let details = found.details.to_json();
        let places = details["places"].as_array().unwrap();
        assert_eq!(places.len(), long.len());
        for place in places {
            let index = usize::try_from(place["index"].as_u64().unwrap()).unwrap() - usize::from(bos);
            assert_eq!(place["id"], long[index]);
        }
    }
}

#[test]
fn features_are_the_sums_of_their_dictionary() {
    let case = Case::open("untied");
    let folder = tempfile::tempdir().unwrap();
    let tensor = |shape: &[usize], offset: u64| candle_gpt2_testing::pattern(shape, 1.0, offset);
    let tensors = HashMap::from([
        ("encoder.weight", tensor(&[30, 18], 1)),
        ("latent_bias", tensor(&[30], 2)),
        ("decoder.weight", tensor(&[18, 30], 3)),
        ("pre_bias", tensor(&[18], 4)),
    ]);
    let sae = folder.path().join("sae.safetensors");
    safetensors::save(&tensors, &sae).unwrap();
    let features = Features {
        text: Some(case.text("clean_ids")),
        site: Some("1.resid_pre".into()),
        top: 30,
        ..Features::new(sae)
    };
    let found = look(&case.loaded, &features).unwrap();
    assert_eq!(found.details.to_json()["site"], "blocks.1.hook_resid_pre");
    let x = Fixture::open("inside/untied/raw").tensor("blocks.1.hook_resid_pre").squeeze(0).unwrap();
    let x = x.broadcast_sub(&tensors["pre_bias"]).unwrap();
    let sums = x.matmul(&tensors["encoder.weight"].t().unwrap()).unwrap();
    let latents = sums.broadcast_add(&tensors["latent_bias"]).unwrap().relu().unwrap().t().unwrap(); // (F, T)
    let shown: Vec<u32> = found.report.axes[0].labels.iter().map(|label| label.parse().unwrap()).collect();
    let chosen = Tensor::new(shown.clone(), &Device::Cpu).unwrap();
    let expected = latents.contiguous().unwrap().index_select(&chosen, 0).unwrap();
    assert_close(&grid(&found), &expected, GRIDS, "features");
    let largest: Vec<f32> = latents.max(1).unwrap().to_vec1().unwrap();
    assert_eq!(shown.len(), largest.iter().filter(|value| **value > 0.0).count());
    assert!(shown.windows(2).all(|pair| largest[pair[0] as usize] >= largest[pair[1] as usize]));
}

/// The loss of a token is its log-probability with the sign turned, which the metric is before and after.
#[test]
fn the_loss_of_a_token_rises_as_its_probability_falls() {
    let case = Case::open("untied");
    let ids: Vec<u32> = serde_json::from_value(case.recorded["clean_ids"].clone()).unwrap();
    let (last, answer) = (ids.len() - 1, TokenChoice::Id(ids[ids.len() - 1]));
    let metric =
        MetricOptions { answer: Some(answer), against: None, position: -2, measure: Measure::LogProbability };
    let heads = Some("0.1".parse().unwrap());
    let found = look(&case.loaded, &Ablate { metric, heads, ..Ablate::new(Text::Ids(ids)) }).unwrap();
    let metric = found.report.metric.as_ref().unwrap();
    let expected = metric.before - metric.after.unwrap();
    assert!(expected.abs() > 0.01, "{expected}");
    assert!(
        (f64::from(found.report.values[last].unwrap()) - expected).abs() < GRIDS,
        "{:?}",
        found.report.values
    );
}

/// Logits so far apart that probabilities are 0 in f32.
#[test]
fn losses_of_very_unlikely_tokens_are_numbers() {
    let folder = CheckpointFolder::tiny().with_tensors(|tensors| {
        let key = tensors.keys().find(|key| key.ends_with("ln_f.weight")).unwrap().clone();
        let scaled = (&tensors[&key] * 1e4).unwrap();
        tensors.insert(key, scaled);
    });
    let model = ModelOptions { model: folder.path().to_owned(), ..ModelOptions::default() };
    let loaded = model.open(&Silent).unwrap().load(&Silent).unwrap();
    let text = || Text::Ids(vec![1, 2, 250, 4, 99, 6, 7]);
    let ablate = Ablate { heads: Some("0.0".parse().unwrap()), ..Ablate::new(text()) };
    let found = look(&loaded, &ablate).unwrap();
    assert!(found.report.values[1..].iter().all(|change| change.unwrap().is_finite()));
    let lens = Lens { show: LensValue::Next, ..Lens::new(text()) };
    let Details::Lens(details) = look(&loaded, &lens).unwrap().details else { panic!("a lens has cells") };
    let next = details.layers.last().unwrap().cells[0].next.unwrap();
    assert!(next < -110.0, "beyond what a probability in f32 says: {next}");
}

/// What is asked as JSON is what the fields say, whatever form a value has.
#[test]
fn options_are_read_from_json() {
    let read = |text: &str| serde_json::from_str::<Ablate>(text).map(|look| format!("{look:?}"));
    let heads = r#""text": "The dog", "heads": [[9, 6], "10.7"]"#;
    let asked = read(&format!(r#"{{{heads}, "answer": 5, "at": -1, "with": ["mean", ["a", [1, 2]]]}}"#));
    let with = Instead::mean(vec![words("a"), Text::Ids(vec![1, 2])]);
    let metric = MetricOptions { answer: Some(TokenChoice::Id(5)), ..MetricOptions::default() };
    let heads = Some("9.6,10.7".parse().unwrap());
    let expected = Ablate { metric, heads, at: Some(-1), with, ..Ablate::new(words("The dog")) };
    assert_eq!(asked.unwrap(), format!("{expected:?}"));
    // As a line of prompt pairs has it.
    let listed =
        [r#"{"answer": [" a"]}"#, r#"{"answer": " a"}"#, r#"{"answer": [5]}"#, r#"{"answer": 5}"#].map(read);
    let [list, alone, list_of_id, id] = listed.map(Result::unwrap);
    assert!(list == alone && list_of_id == id && list != id);
    for (wrong, told) in [
        (r#"{"head": "1.1"}"#, "unknown field `head`"),
        (r#"{"measure": "size"}"#, "expected logit, log-probability or probability, found \"size\""),
        (r#"{"heads": [1]}"#, "expected pairs of layer and head"),
        (
            r#"{"answer": [" a", " b"]}"#,
            "expected a text of one token, or a token id; in a list there may be only one",
        ),
        (
            r#"{"with": "mean"}"#,
            "mean:FILE or sample:FILE, found \"mean\"; texts of your own are (\"mean\", texts)",
        ),
        (r#"{"with": ["median", ["a"]]}"#, "expected a text such as \"raw-zero\""),
    ] {
        let error = read(wrong).unwrap_err().to_string();
        assert!(error.contains(told), "{wrong}: {error}");
    }
    let patch = r#"{"clean": "a", "corrupt": [1], "answer": " b", "site": "z", "by": "head"}"#;
    let patch: Patch = serde_json::from_str(patch).unwrap();
    assert_eq!((patch.texts.corrupt, patch.patched.by), (Text::Ids(vec![1]), Some(By::Head)));
    assert!(serde_json::from_str::<Patch>(r#"{"clean": "a", "corrupt": "b", "sight": "z"}"#).is_err());
}
