//! `gpt2 look`, `gpt2 cache` and `gpt2 generate --steer` as their users call them: numbers against those of TransformerLens
//! (`scripts/reference/inside.py`), wrong calls, files.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Tensor, safetensors};
use candle_gpt2_testing::{
    CheckpointFolder, Fixture, assert_close, fixture_path, json_fixture, page_in_browser,
};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::common::{FAILURE, Run, SUCCESS, USAGE, assert_refused, path, run};

/// f32 beside the f64 of the fixtures: activations are sums of up to a hundred products of values near 1.
const ACTIVATIONS: f64 = 1e-5;
/// Grids and stacks are sums and quotients of these.
const GRIDS: f64 = 1e-4;
/// The attention page has its values as whole numbers of this size.
const PACKED: f64 = 1.0 / 65535.0;

/// Every checkpoint with numbers of TransformerLens.
const CASES: [&str; 7] = ["plain", "inverse_layer", "untied", "gelu", "relu_inner", "unscaled", "epsilon"];
/// The two that every command is tried on: other numbers of layers and heads, a context of another length, an untied head.
const TWO: [&str; 2] = ["inverse_layer", "untied"];

/// A checkpoint without a tokenizer, and what TransformerLens says of it.
struct Case {
    name: &'static str,
    model: PathBuf,
    raw: Fixture,
    compat: Fixture,
    analyses: Fixture,
    recorded: Value,
    layers: usize,
    heads: usize,
}

impl Case {
    fn open(name: &'static str) -> Self {
        let config = json_fixture(&format!("inside/{name}/config"));
        let number = |key: &str| usize::try_from(config[key].as_u64().unwrap()).unwrap();
        let of = |part: &str| Fixture::open(&format!("inside/{name}/{part}"));
        Self {
            name,
            model: fixture_path(&format!("inside/{name}/config.json")).parent().unwrap().to_owned(),
            raw: of("raw"),
            compat: of("compat"),
            analyses: of("analyses"),
            recorded: json_fixture(&format!("inside/{name}/analyses")),
            layers: number("n_layer"),
            heads: number("n_head"),
        }
    }

    fn two() -> [Self; 2] {
        TWO.map(Self::open)
    }

    fn clean(&self) -> Vec<u32> {
        ids(&self.recorded["clean_ids"])
    }

    fn corrupted(&self) -> Vec<u32> {
        ids(&self.recorded["corrupted_ids"])
    }

    /// A token as `--answer` takes it.
    fn token(&self, name: &str) -> String {
        format!("#{}", self.recorded[name])
    }

    fn logit_difference(&self, name: &str) -> f64 {
        self.recorded["logit_difference"][name].as_f64().unwrap()
    }

    /// The report of a look at the clean tokens.
    fn look(&self, what: &str, more: &[&str]) -> Value {
        let ids = joined(&self.clean());
        let report =
            run(&[&["look", what, "--ids", &ids, "--model", path(&self.model), "--json"], more].concat());
        let report = report.json();
        check(&report, what, &self.clean(), false);
        report
    }

    /// The same with a metric: the answer against the wrong one.
    fn metric_look(&self, what: &str, more: &[&str]) -> Value {
        let (answer, wrong) = (self.token("answer"), self.token("wrong"));
        self.look(what, &[&["--answer", &answer, "--against", &wrong], more].concat())
    }

    /// The report of a comparison of both texts.
    fn compare(&self, what: &str, more: &[&str]) -> Value {
        let (clean, corrupted) = (joined(&self.clean()), joined(&self.corrupted()));
        let (answer, wrong) = (self.token("answer"), self.token("wrong"));
        let texts = ["--clean-ids", &clean, "--corrupt-ids", &corrupted, "--answer", &answer];
        let rest = ["--against", &wrong, "--model", path(&self.model), "--json"];
        let report = run(&[&["look", what], &texts[..], &rest, more].concat()).json();
        check(&report, what, &self.clean(), false);
        let metric = |key: &str| report["metric"][key].as_f64().unwrap();
        assert!((metric("before") - self.logit_difference("corrupted")).abs() < GRIDS, "{report}");
        assert!((metric("after") - self.logit_difference("clean")).abs() < GRIDS, "{report}");
        report
    }

    fn analysis(&self, name: &str) -> Tensor {
        self.analyses.tensor(name)
    }
}

fn ids(value: &Value) -> Vec<u32> {
    serde_json::from_value(value.clone()).unwrap()
}

fn joined(ids: &[u32]) -> String {
    ids.iter().map(u32::to_string).collect::<Vec<_>>().join(",")
}

/// The values of a report, nothing as NaN.
fn numbers(values: &Value) -> Vec<f64> {
    values.as_array().unwrap().iter().map(|value| value.as_f64().unwrap_or(f64::NAN)).collect()
}

fn labels(report: &Value, axis: usize) -> Vec<String> {
    serde_json::from_value(report["axes"][axis]["labels"].clone()).unwrap()
}

fn axis_names(report: &Value) -> Vec<&str> {
    report["axes"].as_array().unwrap().iter().map(|axis| axis["name"].as_str().unwrap()).collect()
}

/// The values as a tensor of the axes' lengths.
fn grid(report: &Value) -> Tensor {
    let shape: Vec<usize> = (0..axis_names(report).len()).map(|axis| labels(report, axis).len()).collect();
    Tensor::from_vec(numbers(&report["values"]), shape, &Device::Cpu).unwrap()
}

/// What every report has: schema, tokens, and as many values as its axes say.
#[track_caller]
fn check(report: &Value, what: &str, ids: &[u32], bos: bool) {
    assert_eq!(report["schema"], format!("gpt2.look.{what}/1"));
    assert_eq!(report["bos"], bos, "{what}");
    let tokens = report["tokens"].as_array().unwrap();
    assert_eq!(tokens.len(), ids.len(), "{what}: {tokens:?}");
    for (index, (token, id)) in tokens.iter().zip(ids).enumerate() {
        assert_eq!((&token["index"], &token["id"]), (&json!(index), &json!(id)), "{what}");
        assert!(!token["text"].as_str().unwrap().is_empty(), "{what}: {token}");
    }
    let axes = report["axes"].as_array().unwrap();
    let cells: usize = axes.iter().map(|axis| axis["labels"].as_array().unwrap().len()).product();
    assert!(!axes.is_empty(), "{what}");
    assert_eq!(report["values"].as_array().unwrap().len(), cells, "{what}");
    assert!(report["notes"].is_array() && report["title"].is_string() && report["model"].is_string());
}

/// What a command that fails says: never that it is our mistake.
#[track_caller]
fn assert_told(run: &Run, code: i32, told: &str) {
    assert_refused(run, code, told);
    assert!(!run.stderr.contains("internal error"), "{}", run.stderr);
}

fn names_in(folder: &TempDir) -> Vec<String> {
    let names = std::fs::read_dir(folder.path()).unwrap();
    let mut names: Vec<String> =
        names.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn attention_is_the_pattern_of_transformer_lens() {
    for case in Case::two() {
        let report = case.look("attention", &[]);
        assert_eq!(axis_names(&report), ["layer", "head", "query", "key"]);
        let tokens = case.clean().len();
        let first = case.clean()[0];
        assert_eq!(report["tokens"][0], json!({"index": 0, "id": first, "text": format!("#{first}")}));
        assert_eq!(labels(&report, 3)[2], format!("#{} 2", case.clean()[2]));
        for (place, value) in report["values"].as_array().unwrap().iter().enumerate() {
            let (query, key) = (place / tokens % tokens, place % tokens);
            assert_eq!(value.is_null(), key > query, "{}: query {query}, key {key}", case.name);
        }
        let values: Vec<f64> = numbers(&report["values"])
            .iter()
            .map(|value| if value.is_nan() { 0.0 } else { *value })
            .collect();
        let shape = (case.layers, case.heads, tokens, tokens);
        let found = Tensor::from_vec(values, shape, &Device::Cpu).unwrap();
        let of_layer = |layer: usize| case.raw.tensor(&format!("blocks.{layer}.attn.hook_pattern"));
        let expected = Tensor::cat(&(0..case.layers).map(of_layer).collect::<Vec<_>>(), 0).unwrap();
        assert_close(&found, &expected, ACTIVATIONS, case.name);

        let last = format!("{}.0", case.layers - 1);
        let chosen = case.look("attention", &["--heads", &format!("0.1,{last},0.1")]);
        assert_eq!((labels(&chosen, 0).len(), labels(&chosen, 1)), (2, vec!["0".to_owned(), "1".to_owned()]));
        let block = tokens * tokens;
        let of = |report: &Value, head: usize| {
            report["values"].as_array().unwrap()[head * block..][..block].to_vec()
        };
        assert_eq!(of(&chosen, 1), of(&report, 1), "layer 0, head 1");
        assert!(of(&chosen, 0).iter().chain(&of(&chosen, 3)).all(Value::is_null), "not asked for");
        let layers = case.look("attention", &["--layers", "1"]);
        assert_eq!(labels(&layers, 0), ["1"]);
        // Where lower layers are not looked at they are computed another way, with other roundings.
        let last = (of(&chosen, 2), of(&report, (case.layers - 1) * case.heads));
        for (found, expected) in [last, (of(&layers, 0), of(&report, case.heads))] {
            for (found, expected) in numbers(&json!(found)).iter().zip(numbers(&json!(expected))) {
                assert!((found - expected).abs() < ACTIVATIONS || (found.is_nan() && expected.is_nan()));
            }
        }
    }
}

/// The token in front is the fixture's own first one.
#[test]
fn a_token_in_front_is_part_of_the_text_and_said() {
    let case = Case::open("plain");
    let clean = case.clean();
    assert_eq!(clean[0], 0, "the configuration's bos_token_id");
    let rest = joined(&clean[1..]);
    let flags = ["--ids", &rest, "--model", path(&case.model), "--json"];
    let (answer, wrong) = (case.token("answer"), case.token("wrong"));
    let metric = ["--answer", &answer, "--against", &wrong];
    for (what, more) in [
        ("attention", &[][..]),
        ("lens", &[]),
        ("ablate", &metric),
        ("attribute", &metric),
        ("saliency", &metric),
    ] {
        let with = run(&[&["look", what, "--bos"], &flags[..], more].concat()).json();
        check(&with, what, &clean, true);
        let mut plain = case.look(what, more);
        plain["bos"] = json!(true);
        assert_eq!(with, plain, "{what}");
        let without = run(&[&["look", what, "--bos", "--no-bos"], &flags[..], more].concat()).json();
        check(&without, what, &clean[1..], false);
    }
    let both = [&clean[1..], &case.corrupted()[1..]].map(joined);
    let texts = ["--clean-ids", &both[0], "--corrupt-ids", &both[1], "--model", path(&case.model), "--json"];
    let patched = run(&[&["look", "patch", "--bos"], &texts[..], &metric].concat()).json();
    check(&patched, "patch", &clean, true);
    assert_eq!(patched["values"], case.compare("patch", &[])["values"]);
    let table = run(&["look", "ablate", "--bos", "--ids", &rest, "--model", path(&case.model)]);
    assert!(table.stdout.contains("<|endoftext|> in front"), "{}", table.stdout);
    // The tokens read twice have one in front, too.
    let heads =
        run(&["look", "heads", "--bos", "--length", "5", "--model", path(&case.model), "--json"]).json();
    check(&heads, "heads", &[], true);
    assert!(heads["notes"].to_string().contains("with <|endoftext|> in front"), "{}", heads["notes"]);
    let neurons = run(&[
        "look",
        "neurons",
        "--bos",
        "--neuron",
        "1.9",
        "--ids",
        &rest,
        "--model",
        path(&case.model),
        "--json",
    ]);
    let neurons = neurons.json();
    check(&neurons, "neurons", &clean, true);
    let post = case.raw.tensor("blocks.1.mlp.hook_post").squeeze(0).unwrap().to_vec2::<f32>().unwrap();
    for place in neurons["places"].as_array().unwrap() {
        let index = usize::try_from(place["index"].as_u64().unwrap()).unwrap();
        assert_eq!(place["id"], clean[index]);
        assert!(
            (place["value"].as_f64().unwrap() - f64::from(post[index][9])).abs() < ACTIVATIONS,
            "{place}"
        );
    }
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("a.safetensors");
    let cached = ["cache", "--bos", "--sites", "resid_post", "--out", path(&out)];
    let cached = run(&[&cached[..], &flags].concat()).json();
    assert_eq!((&cached["bos"], cached["tokens"].as_array().unwrap().len()), (&json!(true), clean.len()));
    let name = "blocks.1.hook_resid_post";
    let found = &safetensors::load(&out, &Device::Cpu).unwrap()[name];
    assert_close(found, &case.raw.tensor(name), ACTIVATIONS, name);
}

#[test]
fn patching_grids_are_those_of_transformer_lens() {
    for case in Case::two() {
        for (name, more, axes) in [
            ("resid_pre", &[][..], &["layer", "position"][..]),
            ("resid_mid", &["--site", "resid_mid"], &["layer", "position"]),
            ("attn_out", &["--site", "hook_attn_out"], &["layer", "position"]),
            ("mlp_out", &["--site", "blocks.*.hook_mlp_out"], &["layer", "position"]),
            ("attn_head_out_all_pos", &["--site", "z"], &["layer", "head"]),
            ("attn_head_q_all_pos", &["--site", "q"], &["layer", "head"]),
            ("attn_head_k_all_pos", &["--site", "attn.hook_k"], &["layer", "head"]),
            ("attn_head_v_all_pos", &["--site", "v", "--by", "head"], &["layer", "head"]),
            ("attn_head_pattern_all_pos", &["--site", "pattern"], &["layer", "head"]),
            (
                "attn_head_out_by_pos",
                &["--site", "z", "--by", "head-and-position"],
                &["layer", "position", "head"],
            ),
        ] {
            let report = case.compare("patch", more);
            assert_eq!(axis_names(&report), axes, "{name}");
            let what = format!("{}: {name}", case.name);
            assert_close(&grid(&report), &case.analysis(&format!("patch.{name}")), GRIDS, &what);
        }
        // The whole of a layer's input is the whole of the clean text.
        let whole = case.compare("patch", &["--by", "layer"]);
        assert!(numbers(&whole["values"]).iter().all(|share| (share - 1.0).abs() < GRIDS), "{whole}");
    }
}

#[test]
fn estimates_are_those_of_transformer_lens() {
    for case in Case::two() {
        for (name, more) in [
            ("resid_pre", &[][..]),
            ("mlp_out", &["--site", "mlp_out"]),
            ("z", &["--site", "z"]),
            ("z_by_pos", &["--site", "z", "--by", "head-and-position"]),
        ] {
            let found = grid(&case.compare("estimate", more));
            let what = format!("{}: {name}", case.name);
            assert_close(&found, &case.analysis(&format!("attribution.{name}")), GRIDS, &what);
        }
    }
}

#[test]
fn ablations_are_those_of_transformer_lens() {
    for case in Case::two() {
        let clean = case.logit_difference("clean");
        for (name, with) in [("raw_zero", "raw-zero"), ("tl_zero", "transformer-lens-zero")] {
            let report = case.metric_look("ablate", &["--with", with]);
            assert_eq!(axis_names(&report), ["layer", "head"]);
            assert!((report["metric"]["before"].as_f64().unwrap() - clean).abs() < GRIDS);
            assert_eq!(report["metric"]["after"], Value::Null);
            let expected =
                (case.analysis(&format!("ablate.{name}")).to_dtype(DType::F64).unwrap() - clean).unwrap();
            assert_close(&grid(&report), &expected, GRIDS, &format!("{}: {name}", case.name));
            // One head by its name gives the same number.
            let one = case.metric_look("ablate", &["--with", with, "--heads", "1.1,1.1"]);
            let change = one["metric"]["after"].as_f64().unwrap() - clean;
            assert!((change - numbers(&report["values"])[case.heads + 1]).abs() < GRIDS, "{one}");
            assert_eq!((axis_names(&one), &one["values"][0]), (vec!["token"], &Value::Null));
            assert!(!one["notes"].to_string().contains("nothing changed"), "{}", one["notes"]);
        }
        // After the last token alone, and the change of the losses: nothing before it is another.
        let last = case.metric_look("ablate", &["--heads", "0.0", "--at", "-1"]);
        assert!(numbers(&last["values"])[1..].iter().all(|change| *change == 0.0), "{last}");
        assert_ne!(last["metric"]["after"], last["metric"]["before"]);
        let first = case.metric_look("ablate", &["--heads", "0.0", "--at", "0"]);
        assert!(numbers(&first["values"])[1..].iter().any(|change| change.abs() > 1e-6), "{first}");
    }
}

/// Logits so far apart that probabilities are 0 in f32.
#[test]
fn losses_of_very_unlikely_tokens_are_numbers() {
    let model = CheckpointFolder::tiny().with_tensors(|tensors| {
        let key = tensors.keys().find(|key| key.ends_with("ln_f.weight")).unwrap().clone();
        let scaled = (&tensors[&key] * 1e4).unwrap();
        tensors.insert(key, scaled);
    });
    let ids = "1,2,250,4,99,6,7";
    let flags = ["--ids", ids, "--model", path(model.path()), "--json"];
    let report = run(&[&["look", "ablate", "--heads", "0.0", "--answer", "#5"], &flags[..]].concat()).json();
    assert!(numbers(&report["values"])[1..].iter().all(|change| change.is_finite()), "{report}");
    let lens = run(&[&["look", "lens", "--show", "next"], &flags[..]].concat()).json();
    let last = lens["layers"].as_array().unwrap().last().unwrap();
    let next = last["cells"][0]["next_logprob"].as_f64().unwrap();
    assert!(next < -110.0, "beyond what a probability in f32 says: {next}");
}

#[test]
fn the_lens_is_that_of_transformer_lens() {
    for case in Case::two() {
        let (answer, wrong) = (case.token("answer"), case.token("wrong"));
        let flags = ["--watch", &answer, "--watch", &wrong, "--top", "3", "--show"];
        let report = case.look("lens", &[&flags[..], &["entropy"]].concat());
        assert_eq!(labels(&report, 0), texts_of(&case.recorded["labels.lens"]));
        let entropy = case.analysis("lens.entropy").squeeze(1).unwrap();
        assert_close(&grid(&report), &entropy, GRIDS, case.name);
        let layers = report["layers"].as_array().unwrap();
        for (number, layer) in layers.iter().enumerate() {
            assert_eq!(layer["layer"], labels(&report, 0)[number]);
            let cells = layer["cells"].as_array().unwrap();
            assert_eq!(cells.len(), case.clean().len());
            for (token, cell) in cells.iter().enumerate() {
                for (index, name) in ["answer", "wrong"].into_iter().enumerate() {
                    let expected = &case.recorded["lens.ranks"][name][number][token];
                    assert_eq!(&cell["watched"][index]["rank"], expected, "{}: {name}", case.name);
                    assert_eq!(cell["watched"][index]["token"]["id"], case.recorded[name]);
                }
                let place = entropy.get(number).unwrap().get(token).unwrap().to_scalar::<f32>().unwrap();
                assert!((cell["entropy"].as_f64().unwrap() - f64::from(place)).abs() < GRIDS);
                assert_eq!(cell["top"].as_array().unwrap().len(), 3);
                assert_eq!(cell["next_logprob"].is_null(), token + 1 == cells.len());
            }
        }
        // What is shown is what is in the cells.
        let cell = |layer: usize, token: usize| &layers[layer]["cells"][token];
        let shown = |name: &str| numbers(&case.look("lens", &[&flags[..], &[name]].concat())["values"]);
        let tokens = case.clean().len();
        let (rank, probability) = (shown("rank"), shown("watched-probability"));
        let divergence = case.analysis("lens.kl").squeeze(1).unwrap();
        let found = grid(&case.look("lens", &["--show", "divergence"]));
        assert_close(&found, &divergence, GRIDS, case.name);
        for place in 0..tokens * layers.len() {
            let watched = &cell(place / tokens, place % tokens)["watched"][0];
            assert_eq!(Some(rank[place]), watched["rank"].as_f64());
            assert!((probability[place].ln() - watched["logprob"].as_f64().unwrap()).abs() < GRIDS);
        }
        let best = shown("probability")[0].ln();
        assert!((best - cell(0, 0)["top"][0]["logprob"].as_f64().unwrap()).abs() < GRIDS);
    }
}

fn texts_of(value: &Value) -> Vec<String> {
    serde_json::from_value(value.clone()).unwrap()
}

#[test]
fn attributions_are_those_of_transformer_lens() {
    for case in Case::two() {
        let last = case.clean().len() - 1;
        for (unit, stack) in [("component", "decompose_resid"), ("layer", "accumulated_resid")] {
            let report = case.metric_look("attribute", &["--unit", unit]);
            assert_eq!(labels(&report, 0), texts_of(&case.recorded[format!("labels.{stack}")]));
            let expected = case.analysis(&format!("logit_attrs.{stack}.difference"));
            let expected = expected.squeeze(1).unwrap().narrow(1, last, 1).unwrap().squeeze(1).unwrap();
            assert_close(&grid(&report), &expected, GRIDS, &format!("{}: {unit}", case.name));
            let total = report["total"].as_f64().unwrap();
            assert!((total - case.logit_difference("clean")).abs() < GRIDS, "{total}");
            if unit == "component" {
                let sum = numbers(&report["values"]).iter().sum::<f64>() + report["bias"].as_f64().unwrap();
                assert!((sum - total).abs() < GRIDS, "{sum} for {total}");
            }
        }
        let heads = case.metric_look("attribute", &["--unit", "head"]);
        assert_eq!(axis_names(&heads), ["layer", "head"]);
        let heads = case.metric_look("attribute", &["--unit", "head", "--as", "transformer-lens"]);
        let expected = case.analysis("logit_attrs.stack_head_results.difference").squeeze(1).unwrap();
        let expected: Vec<Vec<f32>> = expected.to_vec2().unwrap();
        for (found, expected) in numbers(&heads["values"]).iter().zip(&expected) {
            let expected = f64::from(*expected.last().unwrap());
            assert!((found - expected).abs() < GRIDS, "{found} for {expected}");
        }
        // Every neuron, by its label; the strongest come first.
        let all = texts_of(&case.recorded["labels.stack_neuron_results"]);
        let expected = case.analysis("logit_attrs.stack_neuron_results.last.difference").squeeze(1).unwrap();
        let expected: Vec<f32> = expected.to_vec1().unwrap();
        let neurons = case.metric_look("attribute", &["--unit", "neuron", "--top", "7"]);
        let values = numbers(&neurons["values"]);
        assert_eq!(values.len(), 7);
        assert!(values.windows(2).all(|pair| pair[0].abs() >= pair[1].abs()), "{values:?}");
        for (label, value) in labels(&neurons, 0).iter().zip(values) {
            let place = all.iter().position(|name| name == label).unwrap();
            assert!((value - f64::from(expected[place])).abs() < GRIDS, "{label}: {value}");
        }
    }
}

#[test]
fn heads_of_a_text_are_those_that_transformer_lens_detects() {
    for case in Case::two() {
        let text = joined(&ids(&case.recorded["detect_head"]["ids"]));
        let flags = ["look", "heads", "--ids", &text, "--model", path(&case.model), "--json"];
        for (index, more) in
            [&[][..], &["--exclude-bos"], &["--exclude-current"], &["--exclude-bos", "--exclude-current"]]
                .into_iter()
                .enumerate()
        {
            let report = run(&[&flags[..], more].concat()).json();
            check(&report, "heads", &ids(&case.recorded["detect_head"]["ids"]), false);
            assert_eq!(labels(&report, 0), ["previous", "duplicate", "induction"]);
            let of = |name: &str| case.analysis(&format!("detect_head.{name}.mul")).get(index).unwrap();
            let expected = ["previous_token_head", "duplicate_token_head", "induction_head"].map(of);
            assert_close(&grid(&report), &Tensor::stack(&expected, 0).unwrap(), GRIDS, case.name);
        }
    }
}

#[test]
fn heads_on_random_tokens_repeat_under_their_seed() {
    let score = |more: &[&str]| run(&[&["look", "heads", "--length", "20", "--json"], more].concat()).json();
    let report = score(&["--seed", "3"]);
    check(&report, "heads", &[], false);
    assert_eq!(grid(&report).dims(), [3, 4, 8]);
    assert!(numbers(&report["values"]).iter().all(|share| (0.0..=1.0 + 1e-6).contains(share)));
    assert_eq!(score(&["--seed", "3"]), report);
    assert_ne!(score(&["--seed", "4"])["values"], report["values"]);
    assert_ne!(score(&["--seed", "3", "--rows", "3"])["values"], report["values"]);
    // A vocabulary of fewer than a hundred tokens needs no flags.
    for case in Case::two() {
        let report = run(&["look", "heads", "--model", path(&case.model), "--json"]).json();
        check(&report, "heads", &[], false);
        assert_eq!(grid(&report).dims(), [3, case.layers, case.heads]);
        assert!(report["notes"].to_string().contains("random tokens from 0 to "), "{}", report["notes"]);
    }
}

#[test]
fn paths_are_those_of_transformer_lens() {
    for case in Case::two() {
        let [clean, corrupted] = ["clean", "corrupted"].map(|name| case.logit_difference(name));
        let share = |value: f64| (clean - value) / (clean - corrupted);
        let all = case.compare("path", &[]);
        let expected = case.analysis("path.to_final").to_dtype(DType::F64).unwrap();
        let expected = ((clean - expected).unwrap() / (clean - corrupted)).unwrap();
        assert_eq!(axis_names(&all), ["layer", "head"]);
        assert_close(&grid(&all), &expected, GRIDS, case.name);
        for recorded in case.recorded["paths"].as_array().unwrap() {
            let head = |name: &str| format!("{}.{}", recorded[name][0], recorded[name][1]);
            let (from, to) = (head("sender"), head("receiver"));
            for (part, receiver) in [
                ("q", format!("{to}.q")),
                ("k", format!("{to}.k")),
                ("v", format!("{to}.v")),
                ("final", "final".to_owned()),
            ] {
                let expected = share(recorded["logit_difference"][part].as_f64().unwrap());
                let one = case.compare("path", &["--from", &from, "--to", &receiver]);
                assert_eq!((axis_names(&one), labels(&one, 0)), (vec!["from"], vec![from.clone()]));
                let found = numbers(&one["values"])[0];
                assert!((found - expected).abs() < GRIDS, "{}: {part}: {found} for {expected}", case.name);
                // The grid of all senders has it, too.
                let every = case.compare("path", &["--to", &receiver]);
                let [layer, head] = ["0", "1"]
                    .map(|place| recorded["sender"][place.parse::<usize>().unwrap()].as_u64().unwrap());
                let place = usize::try_from(layer).unwrap() * case.heads + usize::try_from(head).unwrap();
                assert!((numbers(&every["values"])[place] - found).abs() < 1e-6, "{part}");
            }
        }
    }
}

#[test]
fn saliency_adds_up_as_its_note_says() {
    for case in Case::two() {
        let report = case.metric_look("saliency", &["--steps", "100", "--baseline", "#1"]);
        assert_eq!(axis_names(&report), ["token"]);
        let total: f64 = numbers(&report["values"]).iter().sum();
        assert!((total - 1.0).abs() < 1e-5, "shares of all: {total}");
        let (sums, norms) = (numbers(&report["sums"]), numbers(&report["norms"]));
        let all: f64 = norms.iter().sum();
        for (share, norm) in numbers(&report["values"]).iter().zip(&norms) {
            assert!((share - norm / all).abs() < 1e-6);
        }
        // The metric of a text of baseline tokens, from a look of its own.
        let baseline = joined(&vec![1; case.clean().len()]);
        let (answer, wrong) = (case.token("answer"), case.token("wrong"));
        let flags = ["--model", path(&case.model), "--answer", &answer, "--against", &wrong, "--json"];
        let of_baseline = run(&[&["look", "ablate", "--ids", &baseline], &flags[..]].concat()).json();
        let before = |report: &Value| report["metric"]["before"].as_f64().unwrap();
        let difference = before(&report) - before(&of_baseline);
        assert!((before(&report) - case.logit_difference("clean")).abs() < GRIDS);
        let sum: f64 = sums.iter().sum();
        assert!((sum - difference).abs() < 0.01 * difference.abs().max(1.0), "{sum} for {difference}");
        let note = report["notes"][0].as_str().unwrap();
        assert!(
            note.contains(&format!("make {sum:.4} of the metric's difference {difference:.4}")),
            "{note}"
        );
        for method in ["gradient", "input-x-gradient"] {
            let other = case.metric_look("saliency", &["--method", method]);
            assert!((numbers(&other["values"]).iter().sum::<f64>() - 1.0).abs() < 1e-5);
            assert_ne!(other["values"], report["values"]);
        }
    }
}

#[test]
fn neurons_are_shown_where_they_are_most_active() {
    for case in Case::two() {
        let clean = case.clean();
        let ids = joined(&clean);
        let flags = ["--ids", &ids, "--model", path(&case.model), "--json"];
        let post = case.raw.tensor("blocks.1.mlp.hook_post").squeeze(0).unwrap();
        let expected: Vec<f32> = post.narrow(1, 9, 1).unwrap().squeeze(1).unwrap().to_vec1().unwrap();
        let report =
            run(&[&["look", "neurons", "--neuron", "1.9", "--top", "4"], &flags[..]].concat()).json();
        check(&report, "neurons", &clean, false);
        let places = report["places"].as_array().unwrap();
        assert_eq!((places.len(), report["values"].as_array().unwrap().len()), (4, 4));
        let mut order: Vec<usize> = (0..clean.len()).collect();
        order.sort_by(|a, b| expected[*b].total_cmp(&expected[*a]));
        for (place, index) in places.iter().zip(order) {
            assert_eq!((&place["index"], &place["id"]), (&json!(index), &json!(clean[index])));
            let value = place["value"].as_f64().unwrap();
            assert!((value - f64::from(expected[index])).abs() < ACTIVATIONS, "{value}");
            let before: String =
                clean[index.saturating_sub(8)..index].iter().map(|id| format!("#{id}")).collect();
            assert_eq!(place["before"], before);
        }
        // A text longer than the context is read in windows of it.
        let context = json_fixture(&format!("inside/{}/config", case.name))["n_positions"].as_u64().unwrap();
        let long: Vec<u32> =
            clean.iter().copied().cycle().take(usize::try_from(context).unwrap() + 3).collect();
        let long = joined(&long);
        let flags = ["--ids", &long, "--model", path(&case.model), "--top", "1000", "--json"];
        for more in [&[][..], &["--bos"]] {
            let report = run(&[&["look", "neurons", "--neuron", "1.9"], &flags[..], more].concat()).json();
            assert_eq!(report["places"].as_array().unwrap().len() as u64, context + 3);
            assert_eq!(report["bos"], !more.is_empty());
            assert_eq!(report["tokens"], json!([]), "those of a long text are not listed");
            let bos = usize::from(!more.is_empty());
            let read = |place: &Value| usize::try_from(place["index"].as_u64().unwrap()).unwrap() - bos;
            let every: Vec<&str> = long.split(',').collect();
            for place in report["places"].as_array().unwrap() {
                assert_eq!(place["id"].to_string(), every[read(place)]);
            }
            let front = if bos == 1 { "<|endoftext|> in front" } else { "nothing in front" };
            assert!(report["notes"][0].as_str().unwrap().contains(front), "{}", report["notes"]);
        }
    }
}

/// Every look at the model inside the program, whose tokens are those of its tokenizer.
#[test]
fn every_look_works_on_the_built_in_model() {
    let (text, ids) = ("The dog", [353, 383, 71]);
    let folder = tempfile::tempdir().unwrap();
    let sae = dictionary(&folder, 256, 12);
    let sae = [text, "--sae", path(&sae), "--site", "1.resid_pre"];
    let both = ["--clean", text, "--corrupt", "My dog", "--answer", "#300"];
    for (what, arguments, shape) in [
        ("attention", &[text][..], &[4, 8, 3, 3][..]),
        ("lens", &[text], &[5, 3]),
        ("attribute", &[text], &[10]),
        ("heads", &[text], &[3, 4, 8]),
        ("ablate", &[text], &[4, 8]),
        ("saliency", &[text], &[3]),
        ("features", &sae, &[0, 3]),
        ("patch", &both, &[4, 3]),
        ("path", &both, &[4, 8]),
        ("estimate", &both, &[4, 3]),
    ] {
        let report = run(&[&["look", what], arguments, &["--json"]].concat()).json();
        check(&report, what, &ids, false);
        let texts: Vec<&str> = report["tokens"]
            .as_array()
            .unwrap()
            .iter()
            .map(|token| token["text"].as_str().unwrap())
            .collect();
        assert_eq!(texts, ["The", "·do", "g"], "{what}");
        let dims = grid(&report).dims().to_vec();
        assert_eq!(dims.len(), shape.len(), "{what}");
        // Of features there are as many as are active.
        assert!(dims.iter().zip(shape).all(|(found, size)| found == size || *size == 0), "{what}: {dims:?}");
        let table = run(&[&["look", what], arguments].concat());
        assert_eq!((table.code, table.stderr.as_str()), (SUCCESS, ""), "{what}");
        assert!(table.stdout.contains("tokens (nothing in front)") && table.stdout.contains("·do"), "{what}");
    }
    let neurons = run(&["look", "neurons", text, "--neuron", "3.1023", "--json"]).json();
    check(&neurons, "neurons", &ids, false);
    let piped = crate::common::run_with_input(&["look", "attention", "--json"], text.as_bytes());
    assert_eq!(piped.json(), run(&["look", "attention", text, "--json"]).json());
}

/// A dictionary in the format of OpenAI: latents `relu(W · (x − pre_bias) + latent_bias)`.
fn dictionary(folder: &TempDir, width: usize, latents: usize) -> PathBuf {
    let tensor = |shape: &[usize], offset: u64| candle_gpt2_testing::pattern(shape, 1.0, offset);
    let tensors = HashMap::from([
        ("encoder.weight", tensor(&[latents, width], 1)),
        ("latent_bias", tensor(&[latents], 2)),
        ("decoder.weight", tensor(&[width, latents], 3)),
        ("pre_bias", tensor(&[width], 4)),
    ]);
    let file = folder.path().join("sae.safetensors");
    safetensors::save(&tensors, &file).unwrap();
    file
}

#[test]
fn features_are_the_sums_of_their_dictionary() {
    let case = Case::open("untied");
    let folder = tempfile::tempdir().unwrap();
    let file = dictionary(&folder, 18, 30);
    let report = case.look("features", &["--sae", path(&file), "--site", "1.resid_pre", "--top", "30"]);
    assert_eq!(
        (axis_names(&report), &report["site"]),
        (vec!["feature", "token"], &json!("blocks.1.hook_resid_pre"))
    );
    let tensors = safetensors::load(&file, &Device::Cpu).unwrap();
    let x = case.raw.tensor("blocks.1.hook_resid_pre").squeeze(0).unwrap();
    let x = x.broadcast_sub(&tensors["pre_bias"]).unwrap();
    let sums = x.matmul(&tensors["encoder.weight"].t().unwrap()).unwrap();
    let latents = sums.broadcast_add(&tensors["latent_bias"]).unwrap().relu().unwrap().t().unwrap(); // (F, T)
    let rows = grid(&report);
    let shown: Vec<u32> = labels(&report, 0).iter().map(|label| label.parse().unwrap()).collect();
    let expected = latents.contiguous().unwrap();
    let expected = expected.index_select(&Tensor::new(shown.clone(), &Device::Cpu).unwrap(), 0).unwrap();
    assert_close(&rows, &expected, GRIDS, "features");
    let largest: Vec<f32> = latents.max(1).unwrap().to_vec1().unwrap();
    assert_eq!(shown.len(), largest.iter().filter(|value| **value > 0.0).count());
    assert!(shown.windows(2).all(|pair| largest[pair[0] as usize] >= largest[pair[1] as usize]));
}

#[test]
fn a_tuned_lens_of_zeros_is_the_logit_lens() {
    let case = Case::open("untied");
    let folder = tempfile::tempdir().unwrap();
    let save = |name: &str, bias: f32| {
        let layer = |layer: usize| {
            let weight = Tensor::zeros((18, 18), DType::F32, &Device::Cpu).unwrap();
            let bias = candle_gpt2_testing::pattern(&[18], f64::from(bias), 5);
            [(format!("{layer}.weight"), weight), (format!("{layer}.bias"), bias)]
        };
        let tensors: HashMap<String, Tensor> = (0..case.layers).flat_map(layer).collect();
        let file = folder.path().join(name);
        safetensors::save(&tensors, &file).unwrap();
        file
    };
    let plain = case.look("lens", &[]);
    let zeros = case.look("lens", &["--tuned", path(&save("zeros.safetensors", 0.0))]);
    assert_eq!(zeros["layers"], plain["layers"]);
    let other = case.look("lens", &["--tuned", path(&save("other.safetensors", 1.0))]);
    assert_ne!(other["values"], plain["values"]);
    let last = |report: &Value| report["layers"][case.layers].clone();
    assert_eq!(last(&other), last(&plain), "the last layer has no translation");
}

fn metadata(file: &Path) -> Value {
    let bytes = std::fs::read(file).unwrap();
    let len = usize::try_from(u64::from_le_bytes(bytes[..8].try_into().unwrap())).unwrap();
    serde_json::from_slice::<Value>(&bytes[8..8 + len]).unwrap()["__metadata__"].clone()
}

#[test]
fn caches_are_those_of_transformer_lens_key_by_key() {
    for case in CASES.map(Case::open) {
        let folder = tempfile::tempdir().unwrap();
        let ids = joined(&case.clean());
        for (numbers, recorded, expected) in
            [("raw", "raw", &case.raw), ("transformer-lens", "transformer_lens", &case.compat)]
        {
            let flags =
                ["cache", "--ids", &ids, "--model", path(&case.model), "--as", numbers, "--sites", "*"];
            let [file, npz] =
                ["safetensors", "npz"].map(|end| folder.path().join(format!("{numbers}.{end}")));
            let report = run(&[&flags[..], &["--out", path(&file), "--json"]].concat()).json();
            let found = safetensors::load(&file, &Device::Cpu).unwrap();
            let names: Vec<&str> = report["tensors"]
                .as_array()
                .unwrap()
                .iter()
                .map(|tensor| tensor["name"].as_str().unwrap())
                .collect();
            assert_eq!((names.len(), found.len()), (6 + 18 * case.layers, 6 + 18 * case.layers));
            let theirs: HashMap<String, Tensor> = expected.tensors_below("");
            let mut keys: Vec<&str> = found.keys().map(String::as_str).collect();
            let mut their_keys: Vec<&str> =
                theirs.keys().map(|name| if name == "logits" { "unembed.hook_out" } else { name }).collect();
            keys.sort_unstable();
            their_keys.sort_unstable();
            assert_eq!(keys, their_keys, "{}", case.name);
            for (name, value) in &found {
                let key = if name == "unembed.hook_out" { "logits" } else { name };
                let what = format!("{}: {numbers}: {name}", case.name);
                assert_close(value, &theirs[key], ACTIVATIONS, &what);
            }
            assert_eq!(report["bytes"], std::fs::metadata(&file).unwrap().len());
            let said = metadata(&file);
            assert_eq!((&said["schema"], &said["processing"]), (&json!("gpt2.cache/1"), &json!(recorded)));
            assert_eq!((&said["bos"], &said["positions"]), (&json!("false"), &json!("null")));
            assert_eq!(said["tokens"], format!("[{ids}]"));
            assert_eq!(said["model"], path(&case.model));
            let strings: Vec<String> = serde_json::from_str(said["token_strings"].as_str().unwrap()).unwrap();
            assert_eq!(strings[1], format!("#{}", case.clean()[1]));
            let sites: Vec<String> = serde_json::from_str(said["sites"].as_str().unwrap()).unwrap();
            let [mut sites, mut names] = [sites, names.iter().map(|name| (*name).to_owned()).collect()];
            sites.sort();
            names.sort();
            assert_eq!(sites, names, "metadata and report list the same");

            let told = run(&[&flags[..], &["--out", path(&npz)]].concat());
            assert_eq!(told.code, SUCCESS, "{}", told.stderr);
            assert!(told.stdout.contains(&format!("{} tensors", found.len())), "{}", told.stdout);
            let read: HashMap<String, Tensor> = Tensor::read_npz(&npz).unwrap().into_iter().collect();
            assert_eq!(read.len(), found.len());
            for (name, value) in &read {
                assert_eq!(
                    candle_gpt2_testing::values(value),
                    candle_gpt2_testing::values(&found[name]),
                    "{name}"
                );
                assert_eq!(value.dims(), found[name].dims(), "{name}");
            }
        }
    }
}

#[test]
fn a_cache_has_the_layers_and_positions_that_were_asked_for() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("part.safetensors");
    for case in Case::two() {
        let ids = joined(&case.clean());
        for (numbers, expected) in [("raw", &case.raw), ("transformer-lens", &case.compat)] {
            let flags =
                ["cache", "--ids", &ids, "--model", path(&case.model), "--out", path(&file), "--as", numbers];
            let cached = |more: &[&str]| {
                let _ = std::fs::remove_file(&file);
                let run = run(&[&flags[..], more].concat());
                assert_eq!((run.code, run.stderr.as_str()), (SUCCESS, ""));
                safetensors::load(&file, &Device::Cpu).unwrap()
            };
            let found = cached(&["--sites", "*", "--layers", "1", "--positions", "5,1-2,1"]);
            assert_eq!(found.len(), 6 + 18, "one block and what is outside the blocks");
            assert_eq!(metadata(&file)["positions"], "[1,2,5]");
            let positions = Tensor::new(&[1u32, 2, 5], &Device::Cpu).unwrap();
            for (name, value) in &found {
                let key = if name == "unembed.hook_out" { "logits" } else { name };
                let axis =
                    if name.ends_with("hook_pattern") || name.ends_with("attn_scores") { 2 } else { 1 };
                let expected = expected.tensor(key).index_select(&positions, axis).unwrap();
                assert_close(value, &expected, ACTIVATIONS, &format!("{}: {numbers}: {name}", case.name));
            }
            // A name of theirs, one of ours, a shorthand, a pattern.
            let found =
                cached(&["--sites", "blocks.0.attn.hook_z, 1.resid_mid,pattern1,blocks.*.hook_mlp_out"]);
            let mut names: Vec<&str> = found.keys().map(String::as_str).collect();
            names.sort_unstable();
            let mut expected =
                vec!["blocks.0.attn.hook_z", "blocks.1.hook_resid_mid", "blocks.1.attn.hook_pattern"];
            let outs: Vec<String> =
                (0..case.layers).map(|layer| format!("blocks.{layer}.hook_mlp_out")).collect();
            expected.extend(outs.iter().map(String::as_str));
            expected.sort_unstable();
            assert_eq!(names, expected);
        }
    }
}

#[test]
fn wrong_calls_end_with_code_2_and_say_what_to_do() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let (page, picture, cache, text) =
        (file("a.html"), file("a.svg"), file("a.safetensors"), file("file.txt"));
    let plain = Case::open("plain");
    let bare = CheckpointFolder::tiny();
    let config = std::fs::read_to_string(bare.file("config.json")).unwrap();
    let mut config: Value = serde_json::from_str(&config).unwrap();
    config["bos_token_id"] = Value::Null;
    let bare = bare.with("config.json", config.to_string());
    let files = ["--html", &page, "--svg", &picture];
    let two = ["--clean", "The dog", "--corrupt", "My dog", "--answer", "#300"];
    let long = vec!["1"; 257].join(",");
    for (arguments, told) in [
        (
            &["attention", "The dog", "--heads", "9.9"][..],
            "the model has 4 layers of 8 heads, counted from 0",
        ),
        (&["attention", "The dog", "--heads", "0.8"], "there is no head 0.8"),
        (&["attention", "The dog", "--heads", "abc"], "`abc` is no head; write LAYER.HEAD, such as 9.6"),
        (&["attention", "The dog", "--heads", "0.1,"], "write LAYER.HEAD"),
        (&["attention", "The dog", "--heads", "0.1", "--layers", "0"], "cannot be used with"),
        (&["attention", "The dog", "--layers", "9-12"], "--layers: 9-12 is not among 0 to 3"),
        (&["attention", "The dog", "--layers", "2-1"], "--layers: 2-1 is not among 0 to 3"),
        (&["attention", "The dog", "--layers", "all"], "no range such as 0-5"),
        (&["attention", ""], "the text is empty; give at least one token, or --bos"),
        (&["attention", "--ids", &long], "the text has 257 tokens; this model takes at most 256"),
        (&["attention", "--ids", "1,1024"], "token 1024 is outside the vocabulary of 1024"),
        (&["attention", "--ids", "1,x"], "`x` is no token id"),
        (&["attention", "The dog", "--columns", "3"], "--columns"),
        (&["neurons", "", "--neuron", "0.0"], "the text is empty"),
        (&["neurons", "The dog", "--neuron", "99.0"], "4 layers of 1024 neurons, counted from 0"),
        (&["neurons", "The dog", "--neuron", "0.1024"], "4 layers of 1024 neurons, counted from 0"),
        (&["neurons", "The dog", "--neuron", "x"], "write LAYER.NEURON, such as 11.611"),
        (&["lens", "The dog", "--show", "rank"], "--watch TEXT"),
        (&["lens", "The dog", "--watch", " supercalifragilistic"], "give one token"),
        (&["ablate", "The dog", "--answer", " supercalifragilistic"], "give one token"),
        (&["ablate", "The dog", "--answer", ""], "has 0 tokens"),
        (
            &["ablate", "The dog", "--answer", "#99999"],
            "--answer: token 99999 is outside the vocabulary of 1024",
        ),
        (&["ablate", "The dog", "--answer", "#99999999999"], "give one token"),
        (&["ablate", "The dog", "--answer", "#1", "--against", "#99999"], "--against: token 99999"),
        (&["ablate", "The dog", "--against", "#1"], "--answer"),
        (&["ablate", "The dog", "--position", "99"], "--position 99: the text has 3 tokens, counted from 0"),
        (&["ablate", "The dog", "--position", "-4"], "--position -4: the text has 3 tokens"),
        (&["ablate", "The dog", "--heads", "0.0", "--at", "99"], "--at 99: the text has 3 tokens"),
        (&["ablate", "The dog", "--at", "0"], "--heads"),
        (&["ablate", "The dog", "--heads", "4.0"], "there is no head 4.0"),
        (
            &["ablate", "The dog", "--with", "nothing"],
            "expected raw-zero, transformer-lens-zero, mean:FILE or sample:FILE",
        ),
        (&["attribute", "The dog", "--measure", "probability"], "--measure logit"),
        (&["heads", "--length", "0"], "tokens can be read twice by this model"),
        (&["heads", "--length", "129"], "1 to 128 tokens can be read twice by this model"),
        (&["heads", "--from", "20", "--below", "20"], "expected a range within the vocabulary of 1024"),
        (&["heads", "--exclude-bos"], "are for a text; give one"),
        (&["heads", "--below", "1025"], "expected a range within the vocabulary of 1024"),
        (&["saliency", "The dog", "--baseline", "two words"], "--baseline"),
        (&["saliency", "The dog", "--steps", "0"], "--steps"),
        (&["patch", "--clean", "The dog", "--corrupt", "The", "--answer", "#3"], "make them as long"),
        (
            &["patch", "--clean", "The dog", "--answer", "#3"],
            "--corrupt TEXT or --corrupt-ids ID,ID,… is missing",
        ),
        (
            &["patch", "--clean", "The dog", "--corrupt", "The dog", "--answer", "#3"],
            "both texts give the same value",
        ),
        (&["estimate", "--clean", "The dog", "--corrupt", "The dog"], "both texts give the same value"),
        (&["path", "--clean", "The dog", "--corrupt", "The dog"], "both texts give the same value"),
        (&["patch", "--clean-ids", &long, "--corrupt-ids", &long], "this model takes at most 256"),
        (&[&["patch"], &two[..], &["--site", "resid_prr"]].concat(), "the nearest name is `resid_pre`"),
        (&[&["patch"], &two[..], &["--site", "9.z"]].concat(), "the model's 4 blocks are counted from 0"),
        (&[&["patch"], &two[..], &["--site", "logits"]].concat(), "such as resid_pre or z"),
        (&[&["patch"], &two[..], &["--site", "embed"]].concat(), "such as resid_pre or z"),
        (&[&["estimate"], &two[..], &["--site", "final_norm"]].concat(), "such as resid_pre or z"),
        (&[&["patch"], &two[..], &["--site", "*"]].concat(), "such as resid_pre or z"),
        (&[&["patch"], &two[..], &["--by", "head"]].concat(), "resid_pre has no heads; q, k, v, z"),
        (&[&["estimate"], &two[..], &["--by", "head-and-position"]].concat(), "resid_pre has no heads"),
        (&[&["patch"], &two[..], &["--position", "3"]].concat(), "--position 3: the text has 3 tokens"),
        (&[&["path"], &two[..], &["--to", "0.0.q"]].concat(), "no head is before layer 0"),
        (&[&["path"], &two[..], &["--to", "1.0.x"]].concat(), "LAYER.HEAD.q, .k or .v"),
        (&[&["path"], &two[..], &["--to", "there"]].concat(), "expected final"),
        (&[&["path"], &two[..], &["--to", "9.0.q"]].concat(), "there is no head 9.0"),
        (
            &[&["path"], &two[..], &["--from", "2.0", "--to", "1.0.q"]].concat(),
            "--from 2.0: it is not before --to 1.0.q",
        ),
        (
            &[&["path"], &two[..], &["--from", "1.7", "--to", "1.0.v"]].concat(),
            "--from 1.7: it is not before",
        ),
        (&[&["path"], &two[..], &["--from", "9.0"]].concat(), "there is no head 9.0"),
    ] {
        let run = run(&[&["look"], arguments, &files].concat());
        assert_told(&run, USAGE, told);
        assert_eq!(names_in(&folder), [""; 0], "{arguments:?}");
    }
    let of_bare = ["--model", path(bare.path())];
    let no_bos = run(&[&["look", "attention", "The", "--bos"], &of_bare[..], &files].concat());
    assert_told(&no_bos, USAGE, "--bos: this model's configuration names no bos_token_id");
    let no_baseline = run(&[&["look", "saliency", "The", "--answer", "#3"], &of_bare[..], &files].concat());
    assert_told(&no_baseline, USAGE, "give --baseline TEXT");

    for (arguments, told) in [
        (&["--sites", "z", "--out", &text][..], ".safetensors or .npz"),
        (&["--sites", "z", "--out", path(folder.path())], ".safetensors or .npz"),
        (&["--sites", "resid_prr", "--out", &cache], "the nearest name is `resid_pre`"),
        (&["--sites", "blocks.1.attn.hook_zz", "--out", &cache], "`blocks.1.attn.hook_z`"),
        (&["--sites", "", "--out", &cache], "--sites"),
        (&["--sites", "z", "--layers", "9-12", "--out", &cache], "--layers: 9-12 is not among 0 to 3"),
        (&["--sites", "1.z", "--layers", "0", "--out", &cache], "--layers"),
        (&["--sites", "z", "--positions", "3", "--out", &cache], "--positions: 3 is not among 0 to 2"),
        (&["--sites", "z", "--positions", "-1", "--out", &cache], "--positions"),
        (&["--sites", "z", "--out", &cache, "--html", &page], "--html"),
        (&["--sites", "z", "--out", &cache, "--svg", &picture], "--svg"),
        (&["--sites", "z"], "--out"),
        (&["--out", &cache], "--sites"),
    ] {
        assert_told(&run(&[&["cache", "The dog"], arguments].concat()), USAGE, told);
        assert_eq!(names_in(&folder), [""; 0], "{arguments:?}");
    }
    let empty = run(&["cache", "", "--sites", "z", "--out", &cache]);
    assert_told(&empty, USAGE, "the text is empty");

    for (arguments, told) in [
        (
            &["--steer", "\"a", "--layer", "1"][..],
            "expected '\"TEXT\"-\"TEXT\"', '\"TEXT\"' or the name of a file",
        ),
        (&["--steer", "\" a\"-\" b", "--layer", "1"], "expected '\"TEXT\"-\"TEXT\"'"),
        (&["--steer", "\"\"", "--layer", "1"], "0 tokens"),
        (&["--steer", "\"a\"-\"b\"-\"c\"", "--layer", "1"], "expected '\"TEXT\"-\"TEXT\"'"),
        (&["--steer", "\" a\""], "--layer"),
        (&["--layer", "1"], "--steer"),
        (&["--everywhere"], "--steer"),
        (&["--steer", "\" a\"", "--layer", "99"], "the model's 4 layers are counted from 0"),
        (&["--steer", "\" a\"", "--layer", "1", "--scale", "nan"], "--scale NaN: expected a finite number"),
    ] {
        assert_told(&run(&[&["generate", "The", "--greedy"], arguments].concat()), USAGE, told);
    }
    let wordy = format!("\"{}\"", " a".repeat(300));
    let too_long = run(&["generate", "The", "--steer", &wordy, "--layer", "1"]);
    assert_told(&too_long, USAGE, "the model takes 1 to 256");

    // Heads of another model, by ids.
    let ids = ["look", "attention", "--ids", "1,2", "--model", path(&plain.model), "--heads", "2.0"];
    assert_told(&run(&ids), USAGE, "the model has 2 layers of 3 heads");
}

#[test]
fn files_that_cannot_be_read_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let write = |name: &str, contents: &[u8]| {
        std::fs::write(folder.path().join(name), contents).unwrap();
        file(name)
    };
    let tensors = |name: &str, tensor: Tensor| {
        safetensors::save(&HashMap::from([("x", tensor)]), folder.path().join(name)).unwrap();
        file(name)
    };
    let (missing, empty) = (file("missing.pt"), write("empty.safetensors", b""));
    let damaged = write("damaged.safetensors", &[200; 100]);
    let pickle = write("damaged.pt", b"PK\x03\x04 and no more");
    let other = fixture_path("inside/plain/model.safetensors");
    let wide = tensors("wide.safetensors", candle_gpt2_testing::pattern(&[2, 7], 1.0, 1));
    let deep = tensors("deep.safetensors", candle_gpt2_testing::pattern(&[2, 2, 256], 1.0, 1));
    let nothing = tensors("nothing.safetensors", Tensor::zeros((0, 256), DType::F32, &Device::Cpu).unwrap());
    let whole = tensors("whole.safetensors", Tensor::ones((1, 256), DType::U32, &Device::Cpu).unwrap());
    let subfolder = folder.path().join("sae");
    std::fs::create_dir(&subfolder).unwrap();
    let named = |run: &Run, name: &str| {
        assert!([FAILURE, USAGE].contains(&run.code), "{}: {}", run.code, run.stderr);
        assert_told(run, run.code, name);
    };
    for name in [&missing, &empty, &damaged, &pickle, &wide, path(&other)] {
        named(&run(&["look", "lens", "The dog", "--tuned", name]), name);
        named(&run(&["look", "features", "The dog", "--sae", name]), name);
        named(&run(&["look", "features", "The dog", "--sae", name, "--site", "1.resid_pre"]), name);
        named(&run(&["generate", "The", "--steer", name, "--layer", "1"]), name);
    }
    for name in [&deep, &nothing, &whole] {
        named(&run(&["generate", "The", "--steer", name, "--layer", "1"]), name);
    }
    named(&run(&["look", "lens", "The dog", "--tuned", path(&subfolder)]), path(&subfolder));
    named(&run(&["look", "features", "The dog", "--sae", path(&subfolder)]), "cfg.json");
    for config in [&b"\xff"[..], b"{", b"[]", b"{}", br#"{"hook_name": "nowhere"}"#] {
        std::fs::write(subfolder.join("cfg.json"), config).unwrap();
        std::fs::copy(&wide, subfolder.join("sae_weights.safetensors")).unwrap();
        named(&run(&["look", "features", "The dog", "--sae", path(&subfolder)]), path(&subfolder));
    }
    // Of another width than the model.
    let sae = dictionary(&folder, 18, 30);
    named(&run(&["look", "features", "The dog", "--sae", path(&sae), "--site", "1.resid_pre"]), path(&sae));
    named(&run(&["look", "features", "The dog", "--sae", path(&sae), "--site", "z"]), "expected one place");
    named(&run(&["look", "features", "The dog", "--sae", path(&sae), "--site", "zz"]), "the nearest name");

    let long = write("long.txt", "a b c d e ".repeat(100).as_bytes());
    let bytes = write("bytes.txt", b"\xff\n");
    let two = write("two.txt", b"The dog\nMy dog\n");
    let short = write("short.txt", b"The\n");
    let none = write("none.txt", b"\n \n");
    for (with, name) in [
        (format!("mean:{missing}"), &missing),
        (format!("mean:{long}"), &long),
        (format!("mean:{bytes}"), &bytes),
        (format!("mean:{none}"), &none),
        (format!("sample:{two}"), &two),
        (format!("sample:{short}"), &short),
    ] {
        named(&run(&["look", "ablate", "The dog", "--with", &with]), name);
    }
    // Texts of one length or of several are a mean.
    for with in [format!("mean:{two}"), format!("mean:{short}")] {
        let report = run(&["look", "ablate", "The dog", "--with", &with, "--json"]).json();
        check(&report, "ablate", &[353, 383, 71], false);
    }
}

/// What draws each look of the model inside the program.
fn drawn(folder: &TempDir) -> Vec<Vec<String>> {
    let sae = dictionary(folder, 256, 12);
    let hostile = "</script> &lt;b&gt; 😀";
    let two = ["--clean", "The dog", "--corrupt", "My dog", "--answer", "#300"];
    [
        &["attention", hostile][..],
        &["attention", hostile, "--heads", "0.1,2.3"],
        &["lens", hostile],
        &["lens", hostile, "--show", "next"],
        &["attribute", hostile],
        &["attribute", hostile, "--unit", "head"],
        &["attribute", hostile, "--unit", "neuron"],
        &["heads"],
        &["heads", hostile],
        &["ablate", hostile],
        &["ablate", hostile, "--heads", "0.1"],
        &["saliency", hostile],
        &["neurons", hostile, "--neuron", "1.17"],
        &["features", hostile, "--sae", path(&sae), "--site", "1.resid_pre"],
        &[&["patch"], &two[..]].concat(),
        &[&["patch"], &two[..], &["--site", "z", "--by", "head-and-position"]].concat(),
        &[&["path"], &two[..]].concat(),
        &[&["path"], &two[..], &["--from", "0.1"]].concat(),
        &[&["estimate"], &two[..]].concat(),
    ]
    .map(|arguments| arguments.iter().map(|argument| (*argument).to_owned()).collect())
    .to_vec()
}

#[test]
fn every_look_writes_whole_pages_and_pictures() {
    let (files, folder) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (page, picture) = (folder.path().join("page.html"), folder.path().join("picture.svg"));
    let mut pictures = Vec::new();
    for arguments in drawn(&files) {
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        for columns in ["1", "2"] {
            let flags = ["--html", path(&page), "--svg", path(&picture), "--columns", columns];
            let run = run(&[&["look"], &arguments[..], &flags].concat());
            assert_eq!((run.code, run.stderr.as_str()), (SUCCESS, ""), "{arguments:?}");
            let written = format!("written: {}\nwritten: {}\n", page.display(), picture.display());
            assert_eq!(run.stdout, written);
            assert_eq!(names_in(&folder), ["page.html", "picture.svg"]);
            let (html, svg) = [&page, &picture].map(|file| std::fs::read_to_string(file).unwrap()).into();
            assert!(
                html.to_lowercase().starts_with("<!doctype html>") && html.trim_end().ends_with("</html>")
            );
            assert!(svg.trim_start().starts_with('<') && svg.trim_end().ends_with("</svg>"), "{arguments:?}");
            for text in [&html, &svg] {
                let rest = text.replace("http://www.w3.org/2000/svg", "").replace("<meta http-equiv=", "");
                assert!(!rest.contains("http"), "{arguments:?} asks for something");
            }
            assert_eq!(html.matches("</script>").count(), html.matches("<script").count(), "{arguments:?}");
            assert!(!svg.contains("<script") && svg.contains("<text"), "{arguments:?}");
            pictures.push(svg);
            std::fs::remove_file(&page).unwrap();
            std::fs::remove_file(&picture).unwrap();
        }
    }
    // A browser reads every picture as XML.
    let data = serde_json::to_string(&pictures).unwrap().replace('<', "\\u003c");
    let script = format!(
        "const of = text => new DOMParser().parseFromString(text, 'image/svg+xml');
        document.body.dataset.wrong = {data}.filter(text => of(text).querySelector('parsererror')).length"
    );
    let html = format!("<!doctype html><body><script>{script}</script></body>");
    let Some(dom) = page_in_browser(&html, "", "") else { return };
    assert!(dom.contains("data-wrong=\"0\""), "{}", &dom[dom.len() - 200..]);
}

/// As `gpt2 convert` and `--output` do.
#[test]
fn nothing_that_exists_is_overwritten() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("precious");
    for (ending, arguments) in [
        ("npz", &["cache", "The dog", "--sites", "z", "--out"][..]),
        ("safetensors", &["cache", "The dog", "--sites", "z", "--out"]),
        ("html", &["look", "attention", "The dog", "--html"]),
        ("svg", &["look", "lens", "The dog", "--svg"]),
    ] {
        let file = file.with_extension(ending);
        std::fs::write(&file, "mine").unwrap();
        let told = format!("{}: it exists already; remove it, or choose another name", file.display());
        assert_told(&run(&[arguments, &[path(&file)]].concat()), FAILURE, &told);
        assert_eq!(std::fs::read_to_string(&file).unwrap(), "mine");
    }
    assert_eq!(names_in(&folder).len(), 4, "nothing else is left");
}

/// Files of this process tree may not grow beyond 4 KiB.
#[cfg(unix)]
#[test]
fn a_full_disk_is_told_with_the_name_of_the_file() {
    let folder = tempfile::tempdir().unwrap();
    for ending in ["npz", "safetensors"] {
        let file = folder.path().join("cache").with_extension(ending);
        let mut limited = std::process::Command::new("sh");
        // Without the signal that would end the program, writing fails as it does on a full disk.
        limited.args(["-c", "trap '' XFSZ; ulimit -f 8; exec \"$@\"", "sh", env!("CARGO_BIN_EXE_gpt2")]);
        limited.args(["cache", "The dog", "--sites", "resid_post", "--out", path(&file)]);
        let told = Run::of(&limited.output().unwrap());
        let expected = format!("error: {}: cannot be written: ", file.display());
        assert!(told.stderr.starts_with(&expected) && told.stderr.lines().count() == 1, "{}", told.stderr);
        assert!(told.stderr.contains("File too large"), "{}", told.stderr);
        assert_eq!(told.code, FAILURE);
        assert_eq!(names_in(&folder), [""; 0], "nothing half written is left");
    }
}

#[test]
fn an_unwritable_path_ends_with_code_1_and_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let nowhere = |name: &str| folder.path().join("no-folder").join(name);
    let (page, picture, cache) = (nowhere("a.html"), nowhere("a.svg"), nowhere("a.npz"));
    for arguments in [
        &["look", "attention", "The dog", "--html", path(&page)][..],
        &["look", "lens", "The dog", "--svg", path(&picture), "--json"],
        &["cache", "The dog", "--sites", "z", "--out", path(&cache)],
    ] {
        let run = run(arguments);
        assert_told(&run, FAILURE, "no-folder");
        assert_eq!(names_in(&folder), [""; 0]);
    }
    // A folder stands where the file would.
    let taken = folder.path().join("taken.html");
    std::fs::create_dir(&taken).unwrap();
    assert_told(&run(&["look", "attention", "The dog", "--html", path(&taken)]), FAILURE, "taken.html");
    assert_eq!(names_in(&folder), ["taken.html"]);
    assert!(std::fs::read_dir(&taken).unwrap().next().is_none());
}

/// The rows of the page's table of values, each with its first cell, the label.
fn rows(dom: &str) -> Vec<(String, Vec<String>)> {
    let (_, table) = dom.split_once("<table>").unwrap();
    let (table, _) = table.split_once("</table>").unwrap();
    let text = |cell: &str| cell.split('<').next().unwrap().to_owned();
    table
        .split("<tr>")
        .skip(2)
        .map(|row| {
            let label = row.split("<th").nth(1).unwrap_or_default().split_once('>').unwrap_or_default().1;
            (text(label), row.split("<td>").skip(1).map(text).collect())
        })
        .collect()
}

/// Compares what the page draws of a head with the report's values, and returns how many it compared.
#[track_caller]
fn compare_with_page(report: &Value, html: &str, (layer, head): (usize, usize), row: usize) -> Option<usize> {
    let dom = page_in_browser(html, &format!("layer={layer}&head={head}&row={row}&column=0"), "")?;
    let tokens = labels(report, 2);
    let start = (layer * labels(report, 1).len() + head) * tokens.len() * tokens.len();
    let values = numbers(&report["values"]);
    let found = rows(&dom);
    let mut compared = 0;
    for (number, (label, cells)) in found.iter().enumerate() {
        // Of long texts the table has the chosen row alone.
        let query = if found.len() == 1 { row } else { number };
        let escaped =
            label.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&").replace('\u{200e}', "");
        assert_eq!(escaped, tokens[query], "layer {layer}, head {head}");
        assert_eq!(cells.len(), tokens.len());
        for (key, cell) in cells.iter().enumerate() {
            let expected = values[start + query * tokens.len() + key];
            if expected.is_nan() {
                assert_eq!(cell, "none", "{query}, {key}");
                continue;
            }
            let shown: f64 = cell.parse().unwrap();
            assert!((shown - expected).abs() <= PACKED, "{query}, {key}: {shown} for {expected}");
            compared += 1;
        }
    }
    Some(compared)
}

#[test]
fn the_attention_page_draws_the_values_of_the_json() {
    let folder = tempfile::tempdir().unwrap();
    let page = folder.path().join("page.html");
    let tokens = |text: &str| run(&["look", "attention", text, "--json"]).json()["tokens"].clone();
    let lone = tokens("😀")[1].clone();
    assert!(lone["text"].as_str().unwrap().starts_with("\\x"), "a byte that is no text by itself: {lone}");
    let text = tokens("a </script><script>alert(1)</script> &lt;b&gt; 😀");
    let mut ids: Vec<String> = text.as_array().unwrap().iter().map(|token| token["id"].to_string()).collect();
    ids.insert(1, lone["id"].to_string());
    let ids = ids.join(",");
    let flags = ["look", "attention", "--ids", &ids, "--html", path(&page), "--json"];
    let report = run(&flags).json();
    assert_eq!(report["tokens"][1]["text"], lone["text"]);
    let html = std::fs::read_to_string(&page).unwrap();
    assert!(!html.contains("alert(1)</script>"));
    let count = report["tokens"].as_array().unwrap().len();
    for head in [(0, 0), (3, 7)] {
        let Some(compared) = compare_with_page(&report, &html, head, 2) else { return };
        assert_eq!(compared, count * (count + 1) / 2);
    }
}

#[test]
fn the_attention_page_of_300_tokens_draws_the_values_of_the_json() {
    const TOKENS: usize = 300;
    let model = CheckpointFolder::tiny().with_config(json!({"n_positions": 320, "n_ctx": 320})).with_tensors(
        |tensors| {
            let key = tensors.keys().find(|key| key.ends_with("wpe.weight")).unwrap().clone();
            let (_, width) = tensors[&key].dims2().unwrap();
            tensors.insert(key, candle_gpt2_testing::pattern(&[320, width], 0.5, 7));
        },
    );
    let folder = tempfile::tempdir().unwrap();
    let page = folder.path().join("page.html");
    let ids: Vec<u32> = (0..TOKENS).map(|index| u32::try_from(index * 7 % 290).unwrap()).collect();
    let ids = joined(&ids);
    let flags =
        ["look", "attention", "--ids", &ids, "--model", path(model.path()), "--html", path(&page), "--json"];
    let report = run(&flags).json();
    check(&report, "attention", &ids.split(',').map(|id| id.parse().unwrap()).collect::<Vec<_>>(), false);
    let html = std::fs::read_to_string(&page).unwrap();
    assert!(html.len() < 3_000_000, "{} bytes", html.len());
    for row in [0, 299] {
        let Some(compared) = compare_with_page(&report, &html, (2, 1), row) else { return };
        assert!(compared > row, "{compared}");
    }
}

fn text(more: &[&str]) -> String {
    let run = run(&[&["generate", "I think you are", "--max-new-tokens", "12"], more].concat());
    let is_nothing = more.windows(2).any(|flags| flags == ["--scale", "0"]);
    let note = if is_nothing {
        "note: the steering vector is zero everywhere; the text is as without it\n"
    } else {
        ""
    };
    assert_eq!((run.code, run.stderr.as_str()), (SUCCESS, note));
    run.stdout
}

/// The residual stream of a text of one token before layer 2.
fn residual(folder: &TempDir, word: &str) -> Tensor {
    let file = folder.path().join("residual.safetensors");
    let run = run(&["cache", word, "--sites", "2.resid_pre", "--out", path(&file), "--json"]).json();
    assert_eq!(run["tokens"].as_array().unwrap().len(), 1, "{word}");
    let found = safetensors::load(&file, &Device::Cpu).unwrap();
    std::fs::remove_file(&file).unwrap();
    found["blocks.2.hook_resid_pre"].squeeze(0).unwrap()
}

#[test]
fn steering_adds_the_difference_of_two_texts() {
    const PAIR: &str = "\" the\"-\" my\"";
    let folder = tempfile::tempdir().unwrap();
    let plain = text(&["--greedy"]);
    let pair = ["--steer", PAIR, "--layer", "2", "--greedy"];
    let steered = |more: &[&str]| text(&[&pair[..], more].concat());
    assert_eq!(steered(&["--scale", "0"]), plain, "nothing is added");
    assert_eq!(steered(&["--scale", "0", "--everywhere"]), plain);
    let strong = steered(&["--scale", "40"]);
    assert_ne!(strong, plain);
    assert_eq!(steered(&["--scale", "40"]), strong);
    let everywhere = steered(&["--scale", "40", "--everywhere"]);
    assert!(everywhere != strong && everywhere != plain, "{everywhere}");
    // The same direction from a file, in both forms, and the other way round with the other sign.
    let difference = (residual(&folder, " the") - residual(&folder, " my")).unwrap();
    for (name, tensor) in [("rows", difference.clone()), ("row", difference.squeeze(0).unwrap())] {
        let file = folder.path().join(format!("{name}.safetensors"));
        safetensors::save(&HashMap::from([("direction", tensor)]), &file).unwrap();
        let from_file = ["--steer", path(&file), "--layer", "2", "--greedy"];
        assert_eq!(text(&[&from_file[..], &["--scale", "40"]].concat()), strong, "{name}");
        assert_eq!(text(&[&from_file[..], &["--scale", "40", "--everywhere"]].concat()), everywhere);
    }
    let turned = ["--steer", "\" my\"-\" the\"", "--layer", "2", "--greedy", "--scale", "-40"];
    assert_eq!(text(&turned), strong);
    // Less spaces, where there is one text; and texts of different lengths.
    let one = ["--steer", "\" the\"", "--layer", "2", "--greedy", "--scale", "40"];
    let spaces = ["--steer", "\" the\"-\" \"", "--layer", "2", "--greedy", "--scale", "40"];
    assert_eq!(text(&one), text(&spaces));
    let lengths = ["--steer", "\" the good king\"-\" my\"", "--layer", "2", "--greedy", "--scale", "40"];
    assert_ne!(text(&lengths), plain);
}

#[test]
fn steering_goes_with_beams_files_of_prompts_and_seeds() {
    let pair = ["--steer", "\" the\"-\" my\"", "--layer", "1"];
    let beams = ["--num-beams", "2"];
    let with = |scale: &str, more: &[&str]| text(&[&pair[..], &["--scale", scale], more].concat());
    assert_eq!(with("0", &beams), text(&beams));
    assert_ne!(with("40", &beams), text(&beams));
    assert_eq!(with("40", &beams), with("40", &beams));
    let seeded = ["--seed", "9", "--temperature", "0.9"];
    assert_eq!(with("5", &seeded), with("5", &seeded));
    assert_eq!(with("0", &seeded), text(&seeded));

    // Each line as a prompt by itself, whatever shares its batch.
    let folder = tempfile::tempdir().unwrap();
    let (prompts, lines) =
        (folder.path().join("prompts.txt"), ["I think you are", "The", "O good my lord, speak"]);
    std::fs::write(&prompts, lines.join("\n")).unwrap();
    for more in [&["--scale", "40"][..], &["--scale", "40", "--everywhere"]] {
        let flags = [&pair[..], more, &["--greedy", "--max-new-tokens", "9"]].concat();
        let all = run(&[&["generate", "--prompts-file", path(&prompts)], &flags[..]].concat());
        assert_eq!((all.code, all.stderr.as_str()), (SUCCESS, ""));
        let all: Vec<Value> = all.stdout.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(all.len(), lines.len());
        for (line, found) in lines.iter().zip(&all) {
            let alone = run(&[&["generate", *line, "--json"], &flags[..]].concat()).json();
            assert_eq!((&found["ids"], &found["text"]), (&alone["ids"], &alone["text"]), "{line}");
        }
    }
}
