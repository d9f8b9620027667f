//! Tests of `gpt2 look`, `gpt2 cache` and `gpt2 generate --steer`: flags, invalid calls and files.
//!
//! The crates `interpret` and `look` compare the numbers with TransformerLens.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Tensor, safetensors};
use candle_gpt2_testing::{CheckpointFolder, fixture_path, page_in_browser};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::common::{FAILURE, Run, SUCCESS, USAGE, assert_refused, path, run};

/// Returns the values of a report, with NaN for null.
fn numbers(values: &Value) -> Vec<f64> {
    values.as_array().unwrap().iter().map(|value| value.as_f64().unwrap_or(f64::NAN)).collect()
}

fn labels(report: &Value, axis: usize) -> Vec<String> {
    serde_json::from_value(report["axes"][axis]["labels"].clone()).unwrap()
}

fn axis_names(report: &Value) -> Vec<&str> {
    report["axes"].as_array().unwrap().iter().map(|axis| axis["name"].as_str().unwrap()).collect()
}

/// Returns the report's values as a tensor with one dimension per axis.
fn grid(report: &Value) -> Tensor {
    let shape: Vec<usize> = (0..axis_names(report).len()).map(|axis| labels(report, axis).len()).collect();
    Tensor::from_vec(numbers(&report["values"]), shape, &Device::Cpu).unwrap()
}

/// Checks the parts common to all reports: schema, tokens, axes and number of values.
#[track_caller]
fn check(report: &Value, view: &str, ids: &[u32], bos: bool) {
    assert_eq!(report["schema"], format!("gpt2.look.{view}/1"));
    assert_eq!(report["bos"], bos, "{view}");
    let tokens = report["tokens"].as_array().unwrap();
    assert_eq!(tokens.len(), ids.len(), "{view}: {tokens:?}");
    for (index, (token, id)) in tokens.iter().zip(ids).enumerate() {
        assert_eq!((&token["index"], &token["id"]), (&json!(index), &json!(id)), "{view}");
        assert!(!token["text"].as_str().unwrap().is_empty(), "{view}: {token}");
    }
    let axes = report["axes"].as_array().unwrap();
    let cells: usize = axes.iter().map(|axis| axis["labels"].as_array().unwrap().len()).product();
    assert!(!axes.is_empty(), "{view}");
    assert_eq!(report["values"].as_array().unwrap().len(), cells, "{view}");
    assert!(report["notes"].is_array() && report["title"].is_string() && report["model"].is_string());
}

/// Checks that a command fails with this message and without an internal error.
#[track_caller]
fn assert_fails_with(run: &Run, code: i32, expected: &str) {
    assert_refused(run, code, expected);
    assert!(!run.stderr.contains("internal error"), "{}", run.stderr);
}

fn file_names(folder: &TempDir) -> Vec<String> {
    let names = std::fs::read_dir(folder.path()).unwrap();
    let mut names: Vec<String> =
        names.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn bos_flag_adds_a_token_and_is_reported() {
    let flags = ["--ids", "353,383,71", "--json"];
    let look = |more: &[&str]| run(&[&["look", "attention"], &flags[..], more].concat()).json();
    check(&look(&["--bos"]), "attention", &[0, 353, 383, 71], true);
    check(&look(&["--bos", "--no-bos"]), "attention", &[353, 383, 71], false);
    let table = run(&["look", "ablate", "--bos", "--ids", "353,383"]);
    assert!(table.stdout.contains("(with a BOS token)"), "{}", table.stdout);
    // With `--bos`, rows of random tokens also begin with a BOS token.
    let heads = run(&["look", "heads", "--bos", "--length", "5", "--json"]).json();
    check(&heads, "heads", &[], true);
    assert!(heads["notes"].to_string().contains("with a BOS token"), "{}", heads["notes"]);
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("a.safetensors");
    let cached =
        run(&[&["cache", "--bos", "--sites", "resid_post", "--out", path(&out)], &flags[..]].concat());
    let cached = cached.json();
    assert_eq!((&cached["bos"], cached["tokens"].as_array().unwrap().len()), (&json!(true), 4));
}

/// Checks what each flag changes in the report; other tests compare the numbers.
#[test]
fn flags_select_the_reported_values() {
    let ids = ["--ids", "353,383,71", "--json"];
    let metric = ["--answer", "#300", "--against", "#301"];
    let two = ["--clean-ids", "353,383,71", "--corrupt-ids", "77,383,71", "--answer", "#300", "--json"];
    for (view, texts, more, axes) in [
        (
            "attention",
            &ids[..],
            &["--layers", "1,3"][..],
            &[("layer", 2), ("head", 4), ("query", 3), ("key", 3)][..],
        ),
        (
            "attention",
            &ids,
            &["--heads", "0.1,3.0,0.1"],
            &[("layer", 2), ("head", 2), ("query", 3), ("key", 3)],
        ),
        ("lens", &ids, &["--show", "entropy"], &[("layer", 8), ("token", 3)]),
        ("attribute", &ids, &["--unit", "layer"], &[("part", 15)]),
        ("attribute", &ids, &["--unit", "head"], &[("layer", 7), ("head", 4)]),
        ("attribute", &ids, &["--unit", "head", "--as", "transformer-lens"], &[("layer", 7), ("head", 4)]),
        ("attribute", &ids, &["--unit", "neuron", "--top", "7"], &[("part", 7)]),
        ("heads", &ids, &["--exclude-bos", "--exclude-current"], &[("kind", 3), ("layer", 7), ("head", 4)]),
        (
            "heads",
            &["--json"],
            &["--length", "20", "--seed", "3", "--rows", "3"],
            &[("kind", 3), ("layer", 7), ("head", 4)],
        ),
        ("heads", &["--json"], &["--from", "20", "--below", "50"], &[("kind", 3), ("layer", 7), ("head", 4)]),
        ("ablate", &ids, &["--with", "transformer-lens-zero"], &[("layer", 7), ("head", 4)]),
        ("ablate", &ids, &["--heads", "0.0", "--at", "-1"], &[("token", 3)]),
        ("saliency", &ids, &["--method", "gradient"], &[("token", 3)]),
        ("saliency", &ids, &["--steps", "5", "--baseline", "#1"], &[("token", 3)]),
        ("neurons", &ids, &["--neuron", "1.9", "--top", "2"], &[("place", 2)]),
        ("patch", &two, &[], &[("layer", 7), ("position", 3)]),
        ("patch", &two, &["--site", "blocks.*.hook_mlp_out"], &[("layer", 7), ("position", 3)]),
        ("patch", &two, &["--site", "z"], &[("layer", 7), ("head", 4)]),
        ("patch", &two, &["--site", "attn.hook_k", "--by", "layer"], &[("layer", 7)]),
        (
            "patch",
            &two,
            &["--site", "z", "--by", "head-and-position"],
            &[("layer", 7), ("position", 3), ("head", 4)],
        ),
        ("estimate", &two, &["--site", "z"], &[("layer", 7), ("head", 4)]),
        ("path", &two, &["--to", "2.1.q"], &[("layer", 2), ("head", 4)]),
        ("path", &two, &["--from", "1.2", "--to", "final"], &[("from", 1)]),
    ] {
        let report = run(&[&["look", view], texts, more].concat()).json();
        let found: Vec<(&str, usize)> =
            axis_names(&report).into_iter().zip((0..).map(|axis| labels(&report, axis).len())).collect();
        assert_eq!(found, axes, "{view} {more:?}");
    }
    let look = |view: &str, more: &[&str]| run(&[&["look", view], &ids[..], &metric, more].concat()).json();
    let name = |report: &Value| report["metric"]["name"].as_str().unwrap().to_owned();
    let probability = look("ablate", &["--measure", "probability", "--position", "1"]);
    assert!(
        name(&probability).starts_with("probability difference (")
            && name(&probability).ends_with("at position 1")
    );
    assert!(name(&look("attribute", &[])).contains(" − "), "the answer against the other token");
    let lens =
        run(&[&["look", "lens"], &ids[..], &["--watch", "#300", "--watch", "#301", "--top", "3"]].concat());
    let cell = &lens.json()["layers"][0]["cells"][0];
    assert_eq!((cell["top"].as_array().unwrap().len(), cell["watched"].as_array().unwrap().len()), (3, 2));
    let heads = |seed: &str| run(&["look", "heads", "--length", "20", "--seed", seed, "--json"]).json();
    assert_ne!(heads("3")["values"], heads("4")["values"]);
}

/// Runs every view on the built-in model and checks the tokens.
#[test]
fn every_view_works_on_the_built_in_model() {
    let (text, ids) = ("The big dog", [486, 427, 617]);
    let folder = tempfile::tempdir().unwrap();
    let sae = dictionary(&folder, 256, 12);
    let sae = [text, "--sae", path(&sae), "--site", "1.resid_pre"];
    let both = ["--clean", text, "--corrupt", "My big dog", "--answer", "#300"];
    for (view, arguments, shape) in [
        ("attention", &[text][..], &[7, 4, 3, 3][..]),
        ("lens", &[text], &[8, 3]),
        ("attribute", &[text], &[16]),
        ("heads", &[text], &[3, 7, 4]),
        ("ablate", &[text], &[7, 4]),
        ("saliency", &[text], &[3]),
        ("features", &sae, &[0, 3]),
        ("graph", &[text], &[20]),
        ("patch", &both, &[7, 3]),
        ("path", &both, &[7, 4]),
        ("estimate", &both, &[7, 3]),
    ] {
        let report = run(&[&["look", view], arguments, &["--json"]].concat()).json();
        check(&report, view, &ids, false);
        let texts: Vec<&str> = report["tokens"]
            .as_array()
            .unwrap()
            .iter()
            .map(|token| token["text"].as_str().unwrap())
            .collect();
        assert_eq!(texts, ["The", "·big", "·dog"], "{view}");
        let dims = grid(&report).dims().to_vec();
        assert_eq!(dims.len(), shape.len(), "{view}");
        // The number of active features may vary.
        assert!(dims.iter().zip(shape).all(|(found, size)| found == size || *size == 0), "{view}: {dims:?}");
        let table = run(&[&["look", view], arguments].concat());
        assert_eq!((table.code, table.stderr.as_str()), (SUCCESS, ""), "{view}");
        assert!(table.stdout.contains("tokens (no BOS token)") && table.stdout.contains("·do"), "{view}");
    }
    let neurons = run(&["look", "neurons", text, "--neuron", "6.1023", "--json"]).json();
    check(&neurons, "neurons", &ids, false);
    let piped = crate::common::run_with_input(&["look", "attention", "--json"], text.as_bytes());
    assert_eq!(piped.json(), run(&["look", "attention", text, "--json"]).json());
}

/// Generates a task's prompt pairs and uses them to find a circuit.
#[test]
fn circuit_is_found_for_a_generated_task() {
    let folder = tempfile::tempdir().unwrap();
    let pairs = folder.path().join("pairs.jsonl");
    let make = ["look", "data", "ioi", "--count", "3", "--seed", "2"];
    let result = run(&[&make[..], &["--out", path(&pairs)]].concat());
    assert_eq!((result.code, result.stderr.as_str()), (SUCCESS, ""));
    assert_eq!(result.stdout, format!("written: {}\n", pairs.display()));
    let text = std::fs::read_to_string(&pairs).unwrap();
    assert_eq!((run(&make).stdout, text.lines().count()), (text.clone(), 3));
    assert_fails_with(&run(&[&make[..], &["--out", path(&pairs)]].concat()), FAILURE, "pairs.jsonl");

    let look = ["look", "circuit", "--data", path(&pairs)];
    let [picture, page] = ["circuit.svg", "circuit.html"].map(|name| folder.path().join(name));
    let report =
        run(&[&look[..], &["--json", "--svg", path(&picture), "--html", path(&page)]].concat()).json();
    check(&report, "circuit", &[], false);
    assert_eq!(
        (axis_names(&report), report["edges"].as_object().unwrap().len()),
        (vec!["share of edges"], 1520)
    );
    for file in [&picture, &page] {
        assert!(std::fs::read_to_string(file).unwrap().contains(">logits</text>"));
    }
    let size = |more: &[&str]| {
        let report = run(&[&look[..], more, &["--json"]].concat()).json();
        report["edges"].as_object().unwrap().values().filter(|edge| edge["in_graph"] == true).count()
    };
    assert!(
        size(&["--edges", "12"]) <= 12
            && size(&["--edges", "100%", "--method", "eap", "--select", "top"]) == 1520
    );
    let table =
        run(&[&look[..], &["--metric", "prob-diff", "--method", "clean-corrupted", "--pairs", "2"]].concat());
    assert_eq!(table.code, SUCCESS, "{}", table.stderr);
    assert!(table.stdout.contains("probability difference, mean of 2 pairs"), "{}", table.stdout);

    for (arguments, code, expected) in [
        (&["look", "circuit"][..], USAGE, "--data"),
        (&["look", "circuit", "--data", "/nowhere/pairs.jsonl"], FAILURE, "/nowhere/pairs.jsonl"),
        (
            &[look[0], look[1], look[2], look[3], "--edges", "many"],
            USAGE,
            "neither a number of edges nor a percentage",
        ),
        (
            &[look[0], look[1], look[2], look[3], "--metric", "kl", "--method", "eap"],
            USAGE,
            "--metric kl: its gradient",
        ),
        (&["look", "data", "docstring"], USAGE, "[possible values: ioi, greater-than, gender]"),
    ] {
        assert_fails_with(&run(arguments), code, expected);
    }
    std::fs::write(&pairs, "{\"clean\": \"The dog\", \"corrupt\": \"The big dog\", \"answer\": \" is\"}\n")
        .unwrap();
    assert_fails_with(&run(&look), USAGE, "`clean` has 2 tokens and `corrupt` 3");
}

/// Writes a dictionary in OpenAI's format: latents `relu(W · (x − pre_bias) + latent_bias)`.
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
fn tuned_lens_is_loaded_from_a_file() {
    let folder = tempfile::tempdir().unwrap();
    let layer = |layer: usize| {
        let weight = Tensor::zeros((256, 256), DType::F32, &Device::Cpu).unwrap();
        let bias = candle_gpt2_testing::pattern(&[256], 1.0, 5);
        [(format!("{layer}.weight"), weight), (format!("{layer}.bias"), bias)]
    };
    let tensors: HashMap<String, Tensor> = (0..7).flat_map(layer).collect();
    let file = folder.path().join("lens.safetensors");
    safetensors::save(&tensors, &file).unwrap();
    let lens = |more: &[&str]| run(&[&["look", "lens", "The big dog", "--json"], more].concat()).json();
    let (plain, tuned) = (lens(&[]), lens(&["--tuned", path(&file)]));
    assert_ne!(tuned["values"], plain["values"]);
    assert_eq!(tuned["layers"][7], plain["layers"][7], "the last layer has no translation");
}

fn metadata(file: &Path) -> Value {
    let bytes = std::fs::read(file).unwrap();
    let len = usize::try_from(u64::from_le_bytes(bytes[..8].try_into().unwrap())).unwrap();
    serde_json::from_slice::<Value>(&bytes[8..8 + len]).unwrap()["__metadata__"].clone()
}

#[test]
fn cache_stores_the_requested_tensors_in_both_formats() {
    let folder = tempfile::tempdir().unwrap();
    let cached = |name: &str, more: &[&str]| {
        let file = folder.path().join(name);
        let run = run(&[&["cache", "--ids", "353,383,71", "--out", path(&file)], more].concat());
        assert_eq!((run.code, run.stderr.as_str()), (SUCCESS, ""));
        (file, run)
    };
    let (file, report) = cached("all.safetensors", &["--sites", "*", "--json"]);
    let (report, found) = (report.json(), safetensors::load(&file, &Device::Cpu).unwrap());
    assert_eq!((found.len(), report["tensors"].as_array().unwrap().len()), (6 + 18 * 7, 6 + 18 * 7));
    for tensor in report["tensors"].as_array().unwrap() {
        assert_eq!(tensor["shape"], json!(found[tensor["name"].as_str().unwrap()].dims()));
    }
    assert_eq!(report["bytes"], std::fs::metadata(&file).unwrap().len());
    let header = metadata(&file);
    assert_eq!((&header["schema"], &header["processing"]), (&json!("gpt2.cache/1"), &json!("raw")));
    assert_eq!((&header["bos"], &header["positions"]), (&json!("false"), &json!("null")));
    assert_eq!((&header["tokens"], &header["model"]), (&json!("[353,383,71]"), &json!("built-in")));
    let sites: Vec<String> = serde_json::from_str(header["sites"].as_str().unwrap()).unwrap();
    assert!(sites.len() == found.len() && sites.iter().all(|site| found.contains_key(site)));

    let (npz, output) = cached("all.npz", &["--sites", "*"]);
    assert!(output.stdout.contains(&format!("{} tensors", found.len())), "{}", output.stdout);
    for (name, value) in Tensor::read_npz(&npz).unwrap() {
        assert_eq!(candle_gpt2_testing::values(&value), candle_gpt2_testing::values(&found[&name]), "{name}");
        assert_eq!(value.dims(), found[&name].dims(), "{name}");
    }
    let chosen = ["--sites", "*", "--layers", "1", "--positions", "2,0-1,2", "--as", "transformer-lens"];
    let (file, _) = cached("part.safetensors", &chosen);
    assert_eq!(
        safetensors::load(&file, &Device::Cpu).unwrap().len(),
        6 + 18,
        "one block and everything outside the blocks"
    );
    let header = metadata(&file);
    assert_eq!(
        (&header["positions"], &header["processing"]),
        (&json!("[0,1,2]"), &json!("transformer_lens"))
    );
    // A TransformerLens name, a name of this project, a short name and a pattern.
    let (file, _) = cached(
        "named.safetensors",
        &["--sites", "blocks.0.attn.hook_z, 1.resid_mid,pattern1,blocks.*.hook_mlp_out"],
    );
    let found = safetensors::load(&file, &Device::Cpu).unwrap();
    assert_eq!(found.len(), 3 + 7);
    assert!(
        found.contains_key("blocks.1.hook_resid_mid") && found.contains_key("blocks.1.attn.hook_pattern")
    );
}

#[test]
fn invalid_calls_exit_2_and_explain_what_to_do() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let (page, picture, cache, text) =
        (file("a.html"), file("a.svg"), file("a.safetensors"), file("file.txt"));
    let bare = CheckpointFolder::tiny();
    let config = std::fs::read_to_string(bare.file("config.json")).unwrap();
    let mut config: Value = serde_json::from_str(&config).unwrap();
    config["bos_token_id"] = Value::Null;
    let bare = bare.with("config.json", config.to_string());
    let files = ["--html", &page, "--svg", &picture];
    let two = ["--clean", "The big dog", "--corrupt", "My big dog", "--answer", "#300"];
    for (arguments, expected) in [
        (
            &["attention", "The big dog", "--heads", "abc"][..],
            "`abc` is not a head; write LAYER.HEAD, such as 9.6",
        ),
        (&["attention", "The big dog", "--heads", "0.1", "--layers", "0"], "cannot be used with"),
        (
            &["attention", "The big dog", "--layers", "9-12"],
            "--layers: 9-12 is out of range; expected 0 to 6",
        ),
        (&["attention", "--ids", "1,x"], "`x` is not a token id"),
        (&["attention", "The big dog", "--columns", "3"], "--columns"),
        (&["lens", "The big dog", "--show", "rank"], "--watch TEXT"),
        (
            &["ablate", "The big dog", "--answer", "#99999"],
            "--answer: token 99999 is outside the vocabulary of 4096",
        ),
        (&["ablate", "The big dog", "--against", "#1"], "--answer"),
        (
            &["ablate", "The big dog", "--position", "99"],
            "--position 99: the text has 3 tokens, counted from 0",
        ),
        (&["ablate", "The big dog", "--at", "0"], "--heads"),
        (
            &["ablate", "The big dog", "--with", "nothing"],
            "expected raw-zero, transformer-lens-zero, mean:FILE or sample:FILE",
        ),
        (&["attribute", "The big dog", "--measure", "probability"], "--measure logit"),
        (&["heads", "--exclude-bos"], "--exclude-bos and --exclude-current require a text"),
        (&["saliency", "The big dog", "--baseline", "two words"], "--baseline"),
        (&["saliency", "The big dog", "--steps", "0"], "--steps"),
        (
            &["patch", "--clean", "The big dog", "--answer", "#3"],
            "missing --corrupt TEXT or --corrupt-ids ID,ID,…",
        ),
        (
            &["patch", "--clean", "The big dog", "--corrupt", "The big dog", "--answer", "#3"],
            "both texts have the same metric",
        ),
        (&[&["patch"], &two[..], &["--by", "head"]].concat(), "resid_pre has no heads; use q, k, v, z"),
        (
            &[&["path"], &two[..], &["--from", "2.0", "--to", "1.0.q"]].concat(),
            "--from 2.0: expected a head in an earlier layer than --to 1.0.q",
        ),
    ] {
        let run = run(&[&["look"], arguments, &files].concat());
        assert_fails_with(&run, USAGE, expected);
        assert_eq!(file_names(&folder), [""; 0], "{arguments:?}");
    }
    let bare_model = ["--model", path(bare.path())];
    let no_bos = run(&[&["look", "attention", "The", "--bos"], &bare_model[..], &files].concat());
    assert_fails_with(&no_bos, USAGE, "--bos: the model's configuration has no valid bos_token_id");
    let no_baseline =
        run(&[&["look", "saliency", "The", "--answer", "#3"], &bare_model[..], &files].concat());
    assert_fails_with(&no_baseline, USAGE, "pass --baseline TEXT");

    for (arguments, expected) in [
        (&["--sites", "z", "--out", &text][..], ".safetensors or .npz"),
        (&["--sites", "z", "--out", path(folder.path())], ".safetensors or .npz"),
        (&["--sites", "", "--out", &cache], "--sites"),
        (
            &["--sites", "z", "--layers", "9-12", "--out", &cache],
            "--layers: 9-12 is out of range; expected 0 to 6",
        ),
        (&["--sites", "1.z", "--layers", "0", "--out", &cache], "--layers"),
        (
            &["--sites", "z", "--positions", "3", "--out", &cache],
            "--positions: 3 is out of range; expected 0 to 2",
        ),
        (&["--sites", "z", "--out", &cache, "--html", &page], "--html"),
        (&["--sites", "z", "--out", &cache, "--svg", &picture], "--svg"),
        (&["--sites", "z"], "--out"),
        (&["--out", &cache], "--sites"),
    ] {
        assert_fails_with(&run(&[&["cache", "The big dog"], arguments].concat()), USAGE, expected);
        assert_eq!(file_names(&folder), [""; 0], "{arguments:?}");
    }
    let empty = run(&["cache", "", "--sites", "z", "--out", &cache]);
    assert_fails_with(&empty, USAGE, "the text is empty");

    for (arguments, expected) in [
        (&["--steer", "\"a", "--layer", "1"][..], "expected '\"TEXT\"-\"TEXT\"', '\"TEXT\"' or a file name"),
        (&["--steer", "\" a\"-\" b", "--layer", "1"], "expected '\"TEXT\"-\"TEXT\"'"),
        (&["--steer", "\"\"", "--layer", "1"], "0 tokens"),
        (&["--steer", "\" a\""], "--layer"),
        (&["--layer", "1"], "--steer"),
        (&["--everywhere"], "--steer"),
        (&["--steer", "\" a\"", "--layer", "99"], "the model has 7 layers, counted from 0"),
        (&["--steer", "\" a\"", "--layer", "1", "--scale", "nan"], "--scale NaN: expected a finite number"),
    ] {
        assert_fails_with(&run(&[&["generate", "The", "--greedy"], arguments].concat()), USAGE, expected);
    }
    let wordy = format!("\"{}\"", " a".repeat(600));
    let too_long = run(&["generate", "The", "--steer", &wordy, "--layer", "1"]);
    assert_fails_with(&too_long, USAGE, "the model accepts 1 to 512");

    // A head missing from the other model, with the prompt given as ids.
    let config = fixture_path("inside/plain/config.json");
    let model = ["--model", path(config.parent().unwrap()), "--heads", "2.0"];
    let other = run(&[&["look", "attention", "--ids", "1,2"], &model[..]].concat());
    assert_fails_with(&other, USAGE, "the model has 2 layers of 3 heads");
}

#[test]
fn unreadable_files_are_named() {
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
        assert_fails_with(run, run.code, name);
    };
    for name in [&missing, &empty, &damaged, &pickle, &wide, path(&other)] {
        named(&run(&["look", "lens", "The big dog", "--tuned", name]), name);
        named(&run(&["look", "features", "The big dog", "--sae", name]), name);
        named(&run(&["look", "features", "The big dog", "--sae", name, "--site", "1.resid_pre"]), name);
        named(&run(&["generate", "The", "--steer", name, "--layer", "1"]), name);
    }
    for name in [&deep, &nothing, &whole] {
        named(&run(&["generate", "The", "--steer", name, "--layer", "1"]), name);
    }
    named(&run(&["look", "lens", "The big dog", "--tuned", path(&subfolder)]), path(&subfolder));
    named(&run(&["look", "features", "The big dog", "--sae", path(&subfolder)]), "cfg.json");
    for config in [&b"\xff"[..], b"{", b"[]", b"{}", br#"{"hook_name": "nowhere"}"#] {
        std::fs::write(subfolder.join("cfg.json"), config).unwrap();
        std::fs::copy(&wide, subfolder.join("sae_weights.safetensors")).unwrap();
        named(&run(&["look", "features", "The big dog", "--sae", path(&subfolder)]), path(&subfolder));
    }
    // The dictionary's width differs from the model's.
    let sae = dictionary(&folder, 18, 30);
    named(
        &run(&["look", "features", "The big dog", "--sae", path(&sae), "--site", "1.resid_pre"]),
        path(&sae),
    );
    named(
        &run(&["look", "features", "The big dog", "--sae", path(&sae), "--site", "z"]),
        "expected a single hook point",
    );
    named(&run(&["look", "features", "The big dog", "--sae", path(&sae), "--site", "zz"]), "did you mean");

    let long = write("long.txt", "a b c d e ".repeat(200).as_bytes());
    let bytes = write("bytes.txt", b"\xff\n");
    let two = write("two.txt", b"The big dog\nMy big dog\n");
    let short = write("short.txt", b"The\n");
    let none = write("none.txt", b"\n \n");
    for (with, name) in [
        (format!("mean:{missing}"), &missing),
        (format!("sample:{long}"), &long),
        (format!("mean:{bytes}"), &bytes),
        (format!("mean:{none}"), &none),
        (format!("sample:{two}"), &two),
        (format!("sample:{short}"), &short),
    ] {
        named(&run(&["look", "ablate", "The big dog", "--with", &with]), name);
    }
    // A mean accepts texts of equal or different lengths, and splits a text that exceeds the context.
    for with in [format!("mean:{two}"), format!("mean:{short}"), format!("mean:{long}")] {
        let report = run(&["look", "ablate", "The big dog", "--with", &with, "--json"]).json();
        check(&report, "ablate", &[486, 427, 617], false);
    }
}

/// Returns the arguments for the views to draw, all on the built-in model.
fn views_to_draw(folder: &TempDir) -> Vec<Vec<String>> {
    let sae = dictionary(folder, 256, 12);
    let hostile = "</script> &lt;b&gt; 😀";
    let two = ["--clean", "The big dog", "--corrupt", "My big dog", "--answer", "#300"];
    [
        &["attention", hostile][..],
        &["attention", hostile, "--heads", "0.1,2.2"],
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
fn every_view_writes_complete_pages_and_pictures() {
    let (files, folder) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (page, picture) = (folder.path().join("page.html"), folder.path().join("picture.svg"));
    let mut pictures = Vec::new();
    for arguments in views_to_draw(&files) {
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        for columns in ["1", "2"] {
            let flags = ["--html", path(&page), "--svg", path(&picture), "--columns", columns];
            let run = run(&[&["look"], &arguments[..], &flags].concat());
            assert_eq!((run.code, run.stderr.as_str()), (SUCCESS, ""), "{arguments:?}");
            let written = format!("written: {}\nwritten: {}\n", page.display(), picture.display());
            assert_eq!(run.stdout, written);
            assert_eq!(file_names(&folder), ["page.html", "picture.svg"]);
            let (html, svg) = [&page, &picture].map(|file| std::fs::read_to_string(file).unwrap()).into();
            assert!(
                html.to_lowercase().starts_with("<!doctype html>") && html.trim_end().ends_with("</html>")
            );
            assert!(svg.trim_start().starts_with('<') && svg.trim_end().ends_with("</svg>"), "{arguments:?}");
            for text in [&html, &svg] {
                let rest = text.replace("http://www.w3.org/2000/svg", "").replace("<meta http-equiv=", "");
                assert!(!rest.contains("http"), "{arguments:?} refers to a network resource");
            }
            assert_eq!(html.matches("</script>").count(), html.matches("<script").count(), "{arguments:?}");
            assert!(!svg.contains("<script") && svg.contains("<text"), "{arguments:?}");
            pictures.push(svg);
            std::fs::remove_file(&page).unwrap();
            std::fs::remove_file(&picture).unwrap();
        }
    }
    // A browser parses every picture as XML.
    let data = serde_json::to_string(&pictures).unwrap().replace('<', "\\u003c");
    let script = format!(
        "const of = text => new DOMParser().parseFromString(text, 'image/svg+xml');
        document.body.dataset.wrong = {data}.filter(text => of(text).querySelector('parsererror')).length"
    );
    let html = format!("<!doctype html><body><script>{script}</script></body>");
    let Some(dom) = page_in_browser(&html, "", "") else { return };
    assert!(dom.contains("data-wrong=\"0\""), "{}", &dom[dom.len() - 200..]);
}

/// Checks that commands never overwrite an existing file, as with `gpt2 convert` and `--output`.
#[test]
fn existing_files_are_not_overwritten() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("precious");
    for (ending, arguments) in [
        ("npz", &["cache", "The big dog", "--sites", "z", "--out"][..]),
        ("safetensors", &["cache", "The big dog", "--sites", "z", "--out"]),
        ("html", &["look", "attention", "The big dog", "--html"]),
        ("svg", &["look", "lens", "The big dog", "--svg"]),
    ] {
        let file = file.with_extension(ending);
        std::fs::write(&file, "mine").unwrap();
        let expected = format!("{}: already exists; remove it, or choose another name", file.display());
        assert_fails_with(&run(&[arguments, &[path(&file)]].concat()), FAILURE, &expected);
        assert_eq!(std::fs::read_to_string(&file).unwrap(), "mine");
    }
    assert_eq!(file_names(&folder).len(), 4, "nothing else is left");
}

/// Simulates a full disk by limiting files to 4 KiB.
#[cfg(unix)]
#[test]
fn full_disk_error_names_the_file() {
    let folder = tempfile::tempdir().unwrap();
    for ending in ["npz", "safetensors"] {
        let file = folder.path().join("cache").with_extension(ending);
        let mut limited = std::process::Command::new("sh");
        // Ignore the signal that would end the program, so that writing fails as on a full disk.
        limited.args(["-c", "trap '' XFSZ; ulimit -f 8; exec \"$@\"", "sh", env!("CARGO_BIN_EXE_gpt2")]);
        limited.args(["cache", "The big dog", "--sites", "resid_post", "--out", path(&file)]);
        let result = Run::from_output(&limited.output().unwrap());
        let expected = format!("error: {}: cannot be written: ", file.display());
        assert!(
            result.stderr.starts_with(&expected) && result.stderr.lines().count() == 1,
            "{}",
            result.stderr
        );
        assert!(result.stderr.contains("File too large"), "{}", result.stderr);
        assert_eq!(result.code, FAILURE);
        assert_eq!(file_names(&folder), [""; 0], "no partial file remains");
    }
}

#[test]
fn unwritable_path_exits_1_and_leaves_no_file() {
    let folder = tempfile::tempdir().unwrap();
    let in_missing_folder = |name: &str| folder.path().join("no-folder").join(name);
    let (page, picture, cache) =
        (in_missing_folder("a.html"), in_missing_folder("a.svg"), in_missing_folder("a.npz"));
    for arguments in [
        &["look", "attention", "The big dog", "--html", path(&page)][..],
        &["look", "lens", "The big dog", "--svg", path(&picture), "--json"],
        &["cache", "The big dog", "--sites", "z", "--out", path(&cache)],
    ] {
        let run = run(arguments);
        assert_fails_with(&run, FAILURE, "no-folder");
        assert_eq!(file_names(&folder), [""; 0]);
    }
    // A folder with the output file's name already exists.
    let taken = folder.path().join("taken.html");
    std::fs::create_dir(&taken).unwrap();
    assert_fails_with(
        &run(&["look", "attention", "The big dog", "--html", path(&taken)]),
        FAILURE,
        "taken.html",
    );
    assert_eq!(file_names(&folder), ["taken.html"]);
    assert!(std::fs::read_dir(&taken).unwrap().next().is_none());
}

fn completion(more: &[&str]) -> String {
    let run = run(&[&["generate", "One day, Mia was", "--max-new-tokens", "12"], more].concat());
    let is_zero = more.windows(2).any(|flags| flags == ["--scale", "0"]);
    let note = if is_zero { "note: the steering vector is zero and has no effect\n" } else { "" };
    assert_eq!((run.code, run.stderr.as_str()), (SUCCESS, note));
    run.stdout
}

/// Checks that the steering flags take effect; tests in the `look` crate check the values.
#[test]
fn steering_flags_change_the_completion() {
    let plain = completion(&["--greedy"]);
    let steered = |steer: &str, more: &[&str]| {
        completion(&[&["--steer", steer, "--layer", "2", "--greedy"], more].concat())
    };
    const PAIR: &str = "\" the\"-\" my\"";
    assert_eq!(steered(PAIR, &["--scale", "0"]), plain, "a zero scale changes nothing");
    let strong = steered(PAIR, &["--scale", "40"]);
    assert!(strong != plain && strong == steered(PAIR, &["--scale", "40"]));
    let everywhere = steered(PAIR, &["--scale", "40", "--everywhere"]);
    assert!(everywhere != strong && everywhere != plain, "{everywhere}");
    assert_eq!(
        steered("\" my\"-\" the\"", &["--scale", "-40"]),
        strong,
        "an opposite direction with the opposite sign"
    );
    // A file with one direction.
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("direction.safetensors");
    let direction = candle_gpt2_testing::pattern(&[1, 256], 1.0, 3);
    safetensors::save(&HashMap::from([("direction", direction)]), &file).unwrap();
    assert_ne!(steered(path(&file), &["--scale", "40"]), plain);
}

#[test]
fn llama_cpp_control_vectors_are_applied() {
    let plain = completion(&["--greedy"]);
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("vector.gguf");
    let direction = |offset| candle_gpt2_testing::pattern(&[256], 30.0, offset);
    let directions = [(1, direction(3)), (3, direction(7))].into();
    candle_gpt2_weights::write_control_vector(&file, &directions).unwrap();
    let file = path(&file);
    let with = |more: &[&str]| completion(&[&["--greedy"], more].concat());
    let once = with(&["--control-vector", file]);
    assert_ne!(once, plain);
    assert_eq!(with(&["--control-vector-scaled", file, "0"]), plain, "a zero scale changes nothing");
    let twice = with(&["--control-vector-scaled", file, "2"]);
    assert_eq!(with(&["--control-vector", file, "--control-vector", file]), twice, "several add up");
    let more = ["--control-vector-scaled", file, "3", "--control-vector-scaled", file, "-1"];
    assert_eq!(with(&more), twice, "scales add up too");
    let range = ["--control-vector-layer-range", "1", "3"];
    assert_eq!(with(&[&["--control-vector", file], &range[..]].concat()), once);
    let no_layer = ["--control-vector-layer-range", "2", "2"];
    assert_eq!(with(&[&["--control-vector", file], &no_layer[..]].concat()), plain);
    for (arguments, expected) in [
        (&["--control-vector-scaled", file, "x"][..], "expected a file and a finite number, found x"),
        (&["--control-vector-layer-range", "1", "2"], "needs --control-vector"),
        (
            &["--control-vector", file, "--control-vector-layer-range", "3", "1"],
            "expected FIRST to be at most LAST, found 3 1",
        ),
        (&["--control-vector", file, "--steer", "\" a\"", "--layer", "1"], "--steer"),
    ] {
        assert_fails_with(&run(&[&["generate", "The", "--greedy"], arguments].concat()), USAGE, expected);
    }
    let missing = run(&["generate", "The", "--control-vector", "no/such.gguf"]);
    assert_fails_with(&missing, FAILURE, "no/such.gguf");
}

#[test]
fn steering_works_with_beams_seeds_and_prompt_files() {
    let pair = ["--steer", "\" the\"-\" my\"", "--layer", "1"];
    let beams = ["--num-beams", "2"];
    let with = |scale: &str, more: &[&str]| completion(&[&pair[..], &["--scale", scale], more].concat());
    assert_eq!(with("0", &beams), completion(&beams));
    assert_ne!(with("-40", &beams), completion(&beams));
    assert_eq!(with("-40", &beams), with("-40", &beams));
    let seeded = ["--seed", "9", "--temperature", "0.9"];
    assert_eq!(with("5", &seeded), with("5", &seeded));
    assert_eq!(with("0", &seeded), completion(&seeded));

    // Each line gives the same result as a single prompt, regardless of its batch.
    let folder = tempfile::tempdir().unwrap();
    let (prompts, lines) = (folder.path().join("prompts.txt"), ["One day, Mia was", "The", "Once there was"]);
    std::fs::write(&prompts, lines.join("\n")).unwrap();
    for more in [&["--scale", "40"][..], &["--scale", "40", "--everywhere"]] {
        let flags = [&pair[..], more, &["--greedy", "--max-new-tokens", "9"]].concat();
        let all = run(&[&["generate", "--prompts-file", path(&prompts)], &flags[..]].concat());
        assert_eq!((all.code, all.stderr.as_str()), (SUCCESS, ""));
        let all: Vec<Value> = all.stdout.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(all.len(), lines.len());
        for (line, found) in lines.iter().zip(&all) {
            let single = run(&[&["generate", *line, "--json"], &flags[..]].concat()).json();
            assert_eq!((&found["ids"], &found["text"]), (&single["ids"], &single["text"]), "{line}");
        }
    }
}

#[test]
fn built_in_transcoders_are_the_default() {
    let text = "One day, Mia";
    let report = run(&["look", "features", text, "--json"]).json();
    assert_eq!(report, run(&["look", "features", text, "--sae", "built-in", "--json"]).json());
    let last = run(&["look", "features", text, "--site", "5.resid_mid", "--json"]).json();
    assert_ne!(report, last);
    let elsewhere = run(&["look", "features", text, "--site", "5.resid_post"]);
    assert_refused(
        &elsewhere,
        USAGE,
        "built-in has no transcoder there; expected one of blocks.0.hook_resid_mid",
    );
}
