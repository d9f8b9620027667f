//! Tests of results against TransformerLens, and of their reports and JSON.

use std::collections::HashMap;

use candle_core::{DType, Device, Tensor, safetensors};
use candle_gpt2_engine::{ModelOptions, Silent};
use candle_gpt2_interpret::{GridAxis, Head, LensValue, Measure};
use candle_gpt2_look::{
    Ablate, Analysis, Attention, Attribute, ComparedTexts, Details, Features, HeadKinds, Heads, Lens, Look,
    LookSubject, MetricOptions, Neuron, Neurons, Numbers, Parts, Patch, Patched, PathPatching, Reader,
    Replacement, Saliency, Text, TokenChoice,
};
use candle_gpt2_testing::{CheckpointFolder, Fixture, assert_close};
use serde_json::{Value, json};

use crate::common::{Case, GRIDS, RecordingReporter, built_in, grid, look, words};

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

/// Checks that reports convert logits from `interpret` to fractions and differences.
#[test]
fn grids_match_transformer_lens() {
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

    for (name, with) in
        [("raw_zero", Replacement::raw_zero()), ("tl_zero", Replacement::transformer_lens_zero())]
    {
        let ablate = Ablate { metric: case.metric(), with, ..Ablate::new(case.text("clean_ids")) };
        let without = case.analyses.tensor(&format!("ablate.{name}")).to_dtype(DType::F64).unwrap();
        assert_close(&grid(&look(&case.loaded, &ablate).unwrap()), &(without - clean).unwrap(), GRIDS, name);
    }
}

#[test]
fn attributions_sum_to_the_metric() {
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

/// Checks that without a comparison token, the metric's name mentions the subtracted mean.
#[test]
fn attributed_logit_is_relative_to_the_mean_logit() {
    let found = look(&built_in(), &Attribute::new(words("The dog"))).unwrap();
    let details = found.details.to_json();
    let [total, logit, mean] = ["total", "logit", "mean_logit"].map(|name| details[name].as_f64().unwrap());
    assert!((total - (logit - mean)).abs() < GRIDS, "{total} for {logit} less {mean}");
    let metric = found.report.metric.unwrap();
    assert!(metric.name.ends_with("at position 1, minus the mean of all logits"), "{}", metric.name);
    assert!(found.report.title.ends_with(&metric.name), "{}", found.report.title);
}

#[test]
fn json_merges_report_and_details() {
    let loaded = built_in();
    let neurons = Neurons { text: words("The dog"), neuron: Neuron { layer: 1, neuron: 9 }, top: 2 };
    let json = serde_json::to_value(look(&loaded, &neurons).unwrap()).unwrap();
    assert_eq!((&json["schema"], &json["model"]), (&json!("gpt2.look.neurons/1"), &json!("a model")));
    assert_eq!(json["places"].as_array().unwrap().len(), 2);
    // Without details, the JSON equals the report's JSON.
    let attention = Attention { text: words("The dog"), layers: None, heads: None };
    let found = look(&loaded, &attention).unwrap();
    assert_eq!(found.details.to_json(), Value::Null);
    assert_eq!(serde_json::to_value(&found).unwrap(), serde_json::to_value(&found.report).unwrap());
}

#[test]
fn lens_cells_match_their_json() {
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
        let (cell, json_cell) = (&details.layers[layer].cells[token], &json["layers"][layer]["cells"][token]);
        let (rank, logprob) = cell.watched[0];
        assert_eq!(*value, Some(rank as f32));
        assert_eq!(json_cell["watched"][0]["rank"], rank);
        assert_eq!(json_cell["watched"][0]["logprob"], json!(logprob));
        assert_eq!(json_cell["watched"][1]["token"]["id"], 5);
        assert_eq!(json_cell["top"].as_array().unwrap().len(), 3);
    }
    // The most probable tokens are listed with their own probabilities, not with the watched token's values.
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
fn bos_token_is_prepended_to_every_text() {
    let loaded = built_in();
    let first = loaded.config().start_token().unwrap();
    let reader = Reader::new(loaded.vocabulary(), true).unwrap();
    let ids = reader.text(&words("The dog")).unwrap();
    assert_eq!(ids, [first, 486, 617]);
    let attention = Attention {
        text: words("The dog"),
        layers: None,
        heads: Some(Heads(vec![Head { layer: 1, head: 2 }])),
    };
    let subject = LookSubject::new(&loaded, "a model".into(), &reader);
    let with = attention.at(&subject, &RecordingReporter::default()).unwrap();
    let same = Attention { text: Text::Ids(ids), ..attention };
    let explicit = look(&loaded, &same).unwrap();
    assert!(with.report.bos && !explicit.report.bos);
    assert_eq!((with.report.values, with.report.tokens), (explicit.report.values, explicit.report.tokens));
    assert!(reader.text(&Text::Ids(Vec::new())).is_ok(), "the BOS token alone is enough");
}

#[test]
fn ablation_replacements_can_come_from_texts_and_files() {
    let loaded = built_in();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("lines.txt");
    std::fs::write(&file, "The cat sat\n \nMy dog\n").unwrap();
    let read = format!("mean:{}", file.display()).parse().unwrap();
    let in_memory = Replacement::mean(vec![words("The cat sat"), words("My dog")]);
    let [from_file, from_texts] = [read, in_memory]
        .map(|with| look(&loaded, &Ablate { with, ..Ablate::new(words("The dog")) }).unwrap());
    assert_eq!(from_file.report.values, from_texts.report.values);
    assert!(from_texts.report.notes[0].ends_with("mean of 2 texts"));
    // A `.jsonl` file is parsed as rows, not as text.
    let rows = folder.path().join("rows.jsonl");
    let ids = loaded.vocabulary().encode("My dog").unwrap();
    std::fs::write(&rows, format!("{{\"prompt\": \"The cat sat\"}}\n\n{{\"ids\": {ids:?}}}\n")).unwrap();
    let with = || format!("mean:{}", rows.display()).parse().unwrap();
    let from_rows = look(&loaded, &Ablate { with: with(), ..Ablate::new(words("The dog")) }).unwrap();
    assert_eq!(from_rows.report.values, from_texts.report.values);
    std::fs::write(&rows, "{\"prompt\": \"The cat sat\"}\n{\"clean\": \"a\", \"corrupt\": \"b\"}\n").unwrap();
    let error = look(&loaded, &Ablate { with: with(), ..Ablate::new(words("The dog")) }).unwrap_err();
    let message = format!("{error}: {}", std::error::Error::source(&error).unwrap());
    assert!(
        message.contains("rows.jsonl, line 2: ") && message.contains("expected either `prompt` or `ids`"),
        "{message}"
    );
    // Replacing a head's output with its own output changes nothing, and a note reports this.
    let with = Replacement::sample(words("The dog"));
    let same = look(&loaded, &Ablate { with, ..Ablate::new(words("The dog")) }).unwrap();
    assert!(same.report.values.iter().all(|value| *value == Some(0.0)));
    assert!(same.report.notes.iter().any(|note| note.contains("nothing changed")));
}

#[test]
fn long_analyses_report_their_progress() {
    let loaded = built_in();
    let reader = Reader::new(loaded.vocabulary(), false).unwrap();
    let subject = LookSubject::new(&loaded, "a model".into(), &reader);
    let reporter = RecordingReporter::default();
    Ablate::new(words("The dog")).at(&subject, &reporter).unwrap();
    let [clean, corrupt] = ["The dog", "My dog"].map(words);
    let texts = ComparedTexts { clean, corrupt };
    Patch { texts: texts.clone(), metric: MetricOptions::default(), patched: Patched::default() }
        .at(&subject, &reporter)
        .unwrap();
    PathPatching { texts, metric: MetricOptions::default(), from: None, to: "2.0.k".into() }
        .at(&subject, &reporter)
        .unwrap();
    let neuron = Neuron { layer: 0, neuron: 0 };
    Neurons { text: words("The dog"), neuron, top: 1 }.at(&subject, &reporter).unwrap();
    let expected = [("ablating", 7), ("patching", 7), ("patching", 8), ("reading", 2)];
    let jobs = reporter.jobs.into_inner().unwrap();
    let jobs: Vec<(&str, u64)> = jobs.iter().map(|(what, total)| (what.as_str(), *total)).collect();
    assert_eq!(jobs, expected);
}

#[test]
fn head_scores_follow_the_seed_and_saliency_sums_to_one() {
    let loaded = built_in();
    let kinds = HeadKinds { length: Some(20), seed: 3, ..HeadKinds::default() };
    let found = look(&loaded, &kinds).unwrap();
    assert_eq!(grid(&found).dims(), [3, 7, 4]);
    assert_eq!(look(&loaded, &kinds).unwrap().report, found.report, "the same seed gives the same report");
    let other = look(&loaded, &HeadKinds { seed: 4, ..kinds }).unwrap();
    assert_ne!(other.report.values, found.report.values);

    let metric = MetricOptions { measure: Measure::Probability, ..MetricOptions::default() };
    let saliency = Saliency { steps: 8, metric, ..Saliency::new(words("The dog sat")) };
    let found = look(&loaded, &saliency).unwrap();
    let total: f32 = found.report.values.iter().flatten().sum();
    assert!((total - 1.0).abs() < 1e-5, "{total}");
}

#[test]
fn integrated_gradients_sum_to_the_metric_difference() {
    let case = Case::open("untied");
    let baseline = Some(TokenChoice::Id(1));
    let saliency =
        Saliency { steps: 100, metric: case.metric(), baseline, ..Saliency::new(case.text("clean_ids")) };
    let found = look(&case.loaded, &saliency).unwrap();
    let details = found.details.to_json();
    let sum = |name: &str| -> f64 {
        details[name].as_array().unwrap().iter().map(|value| value.as_f64().unwrap()).sum()
    };
    // Metric for a text of baseline tokens, from a separate analysis.
    let text = Text::Ids(vec![1; found.report.tokens.len()]);
    let baseline_run = look(&case.loaded, &Ablate { metric: case.metric(), ..Ablate::new(text) }).unwrap();
    let before = |found: &Analysis| found.report.metric.as_ref().unwrap().before;
    let difference = before(&found) - before(&baseline_run);
    assert!(
        (sum("sums") - difference).abs() < 0.01 * difference.abs().max(1.0),
        "{details} for {difference}"
    );
    let note = format!("add up to {:.4}, and the metric differs by {difference:.4}", sum("sums"));
    assert!(found.report.notes[0].contains(&note), "{:?}", found.report.notes);
    for (share, norm) in found.report.values.iter().zip(details["norms"].as_array().unwrap()) {
        assert!((f64::from(share.unwrap()) - norm.as_f64().unwrap() / sum("norms")).abs() < 1e-6);
    }
}

#[test]
fn neuron_tokens_are_sorted_by_activation() {
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
    // A text longer than the context is read in windows, each with the BOS token.
    let long: Vec<u32> = clean.iter().copied().cycle().take(case.loaded.config().n_positions + 3).collect();
    for bos in [false, true] {
        let reader = Reader::new(case.loaded.vocabulary(), bos).unwrap();
        let subject = LookSubject::new(&case.loaded, "a model".into(), &reader);
        let found = neurons(long.clone(), 1000).at(&subject, &RecordingReporter::default()).unwrap();
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
fn features_match_the_dictionary_encoder() {
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

/// Checks losses against the metric: a loss is a negative log-probability.
#[test]
fn loss_change_equals_the_negative_log_probability_change() {
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

/// Checks losses for logits so far apart that probabilities are 0 in f32.
#[test]
fn losses_of_very_unlikely_tokens_are_finite() {
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
    assert!(next < -110.0, "smaller than any positive f32 probability: {next}");
}

/// Checks that JSON options parse to the same values as fields, in every form.
#[test]
fn options_are_parsed_from_json() {
    let read = |text: &str| serde_json::from_str::<Ablate>(text).map(|look| format!("{look:?}"));
    let heads = r#""text": "The dog", "heads": [[9, 6], "10.7"]"#;
    let parsed = read(&format!(r#"{{{heads}, "answer": 5, "at": -1, "with": ["mean", ["a", [1, 2]]]}}"#));
    let with = Replacement::mean(vec![words("a"), Text::Ids(vec![1, 2])]);
    let metric = MetricOptions { answer: Some(TokenChoice::Id(5)), ..MetricOptions::default() };
    let heads = Some("9.6,10.7".parse().unwrap());
    let expected = Ablate { metric, heads, at: Some(-1), with, ..Ablate::new(words("The dog")) };
    assert_eq!(parsed.unwrap(), format!("{expected:?}"));
    // Files of prompt pairs have these forms.
    let listed =
        [r#"{"answer": [" a"]}"#, r#"{"answer": " a"}"#, r#"{"answer": [5]}"#, r#"{"answer": 5}"#].map(read);
    let [list, alone, list_of_id, id] = listed.map(Result::unwrap);
    assert!(list == alone && list_of_id == id && list != id);
    for (wrong, expected) in [
        (r#"{"head": "1.1"}"#, "unknown field `head`"),
        (r#"{"measure": "size"}"#, "expected logit, log-probability or probability, found \"size\""),
        (r#"{"heads": [1]}"#, "expected pairs of layer and head"),
        (
            r#"{"answer": [" a", " b"]}"#,
            "expected a string of one token, or a token id; a list may have only one element",
        ),
        (
            r#"{"with": "mean"}"#,
            "mean:FILE or sample:FILE, found \"mean\"; for your own texts, use (\"mean\", texts)",
        ),
        (r#"{"with": ["median", ["a"]]}"#, "expected a string such as \"raw-zero\""),
    ] {
        let error = read(wrong).unwrap_err().to_string();
        assert!(error.contains(expected), "{wrong}: {error}");
    }
    let patch = r#"{"clean": "a", "corrupt": [1], "answer": " b", "site": "z", "by": "head"}"#;
    let patch: Patch = serde_json::from_str(patch).unwrap();
    assert_eq!((patch.texts.corrupt, patch.patched.by), (Text::Ids(vec![1]), Some(GridAxis::Head)));
    assert!(serde_json::from_str::<Patch>(r#"{"clean": "a", "corrupt": "b", "sight": "z"}"#).is_err());
}
