//! Tests of feature examples from a file, compared with loops over each text's latents.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};

use candle_core::safetensors;
use candle_gpt2::Gpt2LMHeadModel;
use candle_gpt2_interpret::{FeatureExamples, Processing, Run, feature_logits};
use candle_gpt2_look::{Features, Look, LookError, LookSubject, Reader, Text, read_dictionary};
use candle_gpt2_pictures::{FeatureCard, FeatureText};
use candle_gpt2_testing::pattern;
use serde_json::{Value, json};

use crate::common::{Case, RecordingReporter, look, reader};

const LATENTS: usize = 30;
const SITE: &str = "1.resid_pre";

/// Writes a dictionary for a model of hidden size 18.
fn dictionary(folder: &Path) -> PathBuf {
    let tensors = HashMap::from([
        ("encoder.weight", pattern(&[LATENTS, 18], 1.0, 1)),
        ("latent_bias", pattern(&[LATENTS], 1.0, 2)),
        ("decoder.weight", pattern(&[18, LATENTS], 1.0, 3)),
        ("pre_bias", pattern(&[18], 1.0, 4)),
    ]);
    let file = folder.join("sae.safetensors");
    safetensors::save(&tensors, &file).unwrap();
    file
}

/// Texts of different lengths, one longer than the context and one empty.
fn texts(model: &Gpt2LMHeadModel) -> Vec<Vec<u32>> {
    let config = model.config();
    let length = |text: usize| match text {
        3 => 0,
        5 => 2 * config.n_positions + 3,
        _ => 1 + text * 5 % config.n_positions,
    };
    let token =
        |text: usize, index: usize| u32::try_from((text * 31 + index * 17) % config.vocab_size).unwrap();
    (0..25).map(|text| (0..length(text)).map(|index| token(text, index)).collect()).collect()
}

fn written(folder: &Path, texts: &[Vec<u32>]) -> PathBuf {
    let file = folder.join("texts.jsonl");
    fs::write(&file, texts.iter().map(|ids| json!({ "ids": ids }).to_string() + "\n").collect::<String>())
        .unwrap();
    file
}

/// Latents of a text that is run alone, by token.
fn latents(case: &Case, sae: &Path, ids: &[u32]) -> Vec<Vec<f32>> {
    let model = case.loaded.model();
    let dictionary = read_dictionary(sae, Some(SITE), model.config()).unwrap();
    let site = dictionary.config().site;
    let record = Run::new(model, ids).unwrap().record([site]).unwrap();
    let processing = Processing::new(model).unwrap();
    let input = dictionary.input(record.get(site).unwrap(), &processing).unwrap();
    dictionary.encode(&input).unwrap().squeeze(0).unwrap().to_vec2().unwrap()
}

fn shown(ids: &[u32]) -> Vec<String> {
    ids.iter().map(|id| format!("#{id}")).collect()
}

#[test]
fn cards_match_each_text_computed_alone() {
    let case = Case::open("untied");
    let model = case.loaded.model();
    let folder = tempfile::tempdir().unwrap();
    let sae = dictionary(folder.path());
    let texts = texts(model);
    let file = written(folder.path(), &texts);
    for has_bos in [false, true] {
        let reader = Reader::new(case.loaded.vocabulary(), has_bos).unwrap();
        let bos = reader.bos();
        assert_eq!(bos.is_some(), has_bos);
        let window = model.config().n_positions - usize::from(bos.is_some());
        let pieces: Vec<Vec<u32>> = texts
            .iter()
            .flat_map(|text| text.chunks(window))
            .map(|piece| bos.iter().chain(piece).copied().collect())
            .collect();
        let alone: Vec<Vec<Vec<f32>>> = pieces.iter().map(|ids| latents(&case, &sae, ids)).collect();
        let tokens: usize = pieces.iter().map(|ids| ids.len() - 1).sum();
        let options = Features {
            site: Some(SITE.into()),
            prompts_file: Some(file.clone()),
            examples: 3,
            ..Features::new(sae.clone())
        };
        let reporter = RecordingReporter::default();
        let subject = LookSubject::new(&case.loaded, "a model".into(), &reader);
        let found = options.at(&subject, &reporter).unwrap();
        assert_eq!(*reporter.jobs.lock().unwrap(), [("collecting examples".to_owned(), 25)]);
        assert_eq!(found.features.len(), LATENTS);
        let dictionary = read_dictionary(&sae, Some(SITE), model.config()).unwrap();
        let features: Vec<usize> = (0..LATENTS).collect();
        let logits = feature_logits(model, &dictionary, &features, 10).unwrap().unwrap();
        for (feature, card) in found.features.iter().enumerate() {
            let values: Vec<f32> = alone
                .iter()
                .flat_map(|rows| rows.iter().skip(1).map(|row| row[feature]))
                .filter(|value| *value > 0.0)
                .collect();
            assert_eq!(card.index, feature);
            assert_eq!(card.density, values.len() as f32 / tokens as f32);
            assert_eq!(found.report.values[feature], Some(card.density));
            assert_eq!(card.act_max, values.iter().copied().fold(0.0, f32::max));
            assert_eq!(card.histogram.counts.iter().sum::<u64>(), values.len() as u64);
            let of = |logits: &[(u32, f32)]| shown(&logits.iter().map(|(id, _)| *id).collect::<Vec<_>>());
            assert_eq!(card.top_logits, of(&logits[feature].top));
            assert_eq!(card.bottom_logits, of(&logits[feature].bottom));
            // Strongest token of each piece, strongest piece first.
            let mut best: Vec<(usize, usize, f32)> = Vec::new();
            for (piece, rows) in alone.iter().enumerate() {
                let tokens = rows.iter().map(|row| row[feature]).enumerate().skip(1);
                let strongest = tokens.max_by(|a, b| a.1.total_cmp(&b.1).then(b.0.cmp(&a.0)));
                best.extend(
                    strongest.filter(|(_, value)| *value > 0.0).map(|(token, value)| (piece, token, value)),
                );
            }
            best.sort_by(|a, b| b.2.total_cmp(&a.2).then(a.0.cmp(&b.0)));
            let top = &card.examples_quantiles[0];
            assert_eq!((&top.quantile_name[..], top.examples.len()), ("Top activations", best.len().min(3)));
            for (example, (piece, token, _)) in top.examples.iter().zip(&best) {
                let first = token.saturating_sub(16);
                let end = pieces[*piece].len().min(token + 9);
                let act = |token: usize| if token == 0 { 0.0 } else { alone[*piece][token][feature] };
                let expected = FeatureText {
                    tokens: shown(&pieces[*piece][first..end]),
                    tokens_acts_list: (first..end).map(act).collect(),
                    train_token_ind: token - first,
                    is_repeated_datapoint: false,
                };
                assert_eq!(*example, expected);
            }
            assert_eq!(card.examples_quantiles.len(), if best.len() > 3 { 5 } else { 1 });
            let repeated = card.examples_quantiles.iter().skip(1).flat_map(|quantile| &quantile.examples);
            let strongest: Vec<_> = top.examples.iter().map(|text| &text.tokens).collect();
            assert!(
                repeated.clone().all(|text| text.is_repeated_datapoint == strongest.contains(&&text.tokens))
            );
        }
        let notes = found.report.notes.join("\n");
        assert!(notes.contains(&format!("{tokens} tokens from {} texts", pieces.len())), "{notes}");
    }
}

/// Checks the JSON files of features, numbered by Cantor's pairing of layer and feature.
///
/// Nodes of an attribution graph have the same numbers.
#[test]
fn each_feature_is_written_as_a_frontend_file() {
    let case = Case::open("untied");
    let folder = tempfile::tempdir().unwrap();
    let sae = dictionary(folder.path());
    let file = written(folder.path(), &texts(case.loaded.model()));
    let out = folder.path().join("features");
    let options = Features {
        site: Some(SITE.into()),
        prompts_file: Some(file),
        features: Some(serde_json::from_value(json!([0, 7, 20])).unwrap()),
        features_dir: Some(out.clone()),
        ..Features::new(sae)
    };
    let found = look(&case.loaded, &options).unwrap();
    let mut names: Vec<String> =
        fs::read_dir(&out).unwrap().map(|file| file.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    // In layer 1, feature f has the number (1 + f) (2 + f) / 2 + f.
    assert_eq!(names, ["1.json", "251.json", "43.json"]);
    for (card, name) in found.features.iter().zip(["1.json", "43.json", "251.json"]) {
        let read: Value = serde_json::from_slice(&fs::read(out.join(name)).unwrap()).unwrap();
        let expected = serde_json::to_string(card).unwrap();
        assert_eq!(read, serde_json::from_str::<Value>(&expected).unwrap());
        assert_eq!(read["index"], card.index);
        for (key, is) in [
            ("examples_quantiles", Value::is_array as fn(&Value) -> bool),
            ("top_logits", Value::is_array),
            ("bottom_logits", Value::is_array),
            ("act_min", Value::is_number),
            ("act_max", Value::is_number),
            ("histogram", Value::is_object),
        ] {
            assert!(is(&read[key]), "{key}: {}", read[key]);
        }
    }
    let note = format!("wrote 3 features to {}", out.display());
    assert!(found.report.notes.contains(&note), "{:?}", found.report.notes);
    // Existing files are not overwritten, and the error comes before the model runs.
    let error = options.check(&reader(&case.loaded)).unwrap_err();
    assert!(error.to_string().contains("already exists"), "{error}");
    let error = Features { prompts_file: None, text: Some(Text::Ids(vec![1])), ..options }
        .check(&reader(&case.loaded))
        .unwrap_err();
    assert!(
        error.is_usage() && error.to_string().contains("`features_dir` requires `prompts_file`"),
        "{error}"
    );
}

#[test]
fn cards_follow_the_features_of_the_text() {
    let case = Case::open("untied");
    let folder = tempfile::tempdir().unwrap();
    let sae = dictionary(folder.path());
    let file = written(folder.path(), &texts(case.loaded.model()));
    let options = Features {
        text: Some(case.text("clean_ids")),
        site: Some(SITE.into()),
        top: 4,
        prompts_file: Some(file),
        ..Features::new(sae)
    };
    let found = look(&case.loaded, &options).unwrap();
    let labels = |cards: &[FeatureCard]| cards.iter().map(|card| card.index.to_string()).collect::<Vec<_>>();
    assert_eq!((labels(&found.features), found.features.len()), (found.report.axes[0].labels.clone(), 4));
    let chosen =
        look(&case.loaded, &Features { features: Some(vec![7, 2].into()), ..options.clone() }).unwrap();
    assert_eq!(
        (labels(&chosen.features), &chosen.report.axes[0].labels[..]),
        (vec!["2".into(), "7".into()], &["2".to_owned(), "7".to_owned()][..])
    );
    // In JSON, the features are next to the report.
    let json = serde_json::to_value(&found).unwrap();
    assert_eq!(json["features"][0]["index"].to_string(), labels(&found.features)[0]);
    assert_eq!(json["schema"], "gpt2.look.features/1");
    let plain = look(&case.loaded, &Features { prompts_file: None, ..options }).unwrap();
    assert!(serde_json::to_value(&plain).unwrap().get("features").is_none());
    assert_eq!(plain.report.values, found.report.values);
    assert!(found.page().contains("examples_quantiles") && !plain.page().contains("examples_quantiles"));
}

#[test]
fn invalid_files_and_options_are_rejected() {
    let case = Case::open("untied");
    let reader = reader(&case.loaded);
    let folder = tempfile::tempdir().unwrap();
    let sae = dictionary(folder.path());
    let plain = Features { site: Some(SITE.into()), ..Features::new(sae) };
    let with = |contents: &str| {
        let file = folder.path().join("lines.jsonl");
        fs::write(&file, contents).unwrap();
        Features { prompts_file: Some(file), ..plain.clone() }
    };
    let usage_message = |features: &Features| {
        let error = features.check(&reader).map(drop).unwrap_err();
        assert!(error.is_usage(), "{error}");
        error.to_string()
    };
    assert!(usage_message(&plain).contains("pass a text, or `prompts_file`"));
    let texts = with("{\"ids\": [1, 2, 3]}\n");
    assert!(
        usage_message(&Features { examples: 0, ..texts.clone() }).contains("`examples`: expected at least 1")
    );
    let outside = Features { features: Some(vec![30].into()), ..texts.clone() };
    assert!(usage_message(&outside).contains("`features`: 30 is out of range; expected 0 to 29"));
    let many = 1 + (1 << 30) / usize::try_from(FeatureExamples::max_bytes(LATENTS, 1)).unwrap();
    let message = usage_message(&Features { examples: many * 2, ..texts.clone() });
    assert!(message.contains("30 features may need") && message.contains("select fewer"), "{message}");
    let few = Features { features: Some(vec![3].into()), examples: many, ..texts };
    assert!(few.check(&reader).is_ok(), "a single feature may have more examples");

    let file_message = |contents: &str| {
        let error = look(&case.loaded, &with(contents)).unwrap_err();
        let LookError::In { origin, error } = error else { panic!("{error}") };
        assert!(origin.contains("lines.jsonl"), "{origin}");
        format!("{origin}: {error}")
    };
    assert!(file_message("{\"ids\": [1]}\n").contains("expected texts of at least two tokens"));
    assert!(file_message("").contains("expected texts of at least two tokens"));
    let message = file_message("{\"ids\": [1, 2]}\n\n{\"ids\": [1, 100000]}\n");
    assert!(message.contains("line 3: token 100000 is outside the vocabulary"), "{message}");
    assert!(file_message("{\"ids\": 5}\n").contains("line 1: `ids`"));
    let nowhere = Features { prompts_file: Some("/nowhere/texts.txt".into()), ..plain };
    let error = nowhere.check(&reader).map(drop).unwrap_err();
    assert!(!error.is_usage() && error.to_string().contains("/nowhere/texts.txt"), "{error}");
}
