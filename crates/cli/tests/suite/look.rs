//! `gpt2 look`, `gpt2 cache` and `gpt2 generate --steer` as their users call them: flags, wrong calls, files. Their numbers are
//! compared with those of TransformerLens in `interpret` and `look`.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Tensor, safetensors};
use candle_gpt2_testing::{CheckpointFolder, fixture_path, page_in_browser};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::common::{FAILURE, Run, SUCCESS, USAGE, assert_refused, path, run};

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
fn a_token_in_front_is_part_of_the_text_and_said() {
    let flags = ["--ids", "353,383,71", "--json"];
    let look = |more: &[&str]| run(&[&["look", "attention"], &flags[..], more].concat()).json();
    check(&look(&["--bos"]), "attention", &[0, 353, 383, 71], true);
    check(&look(&["--bos", "--no-bos"]), "attention", &[353, 383, 71], false);
    let table = run(&["look", "ablate", "--bos", "--ids", "353,383"]);
    assert!(table.stdout.contains("(with a BOS token)"), "{}", table.stdout);
    // The tokens read twice have one in front, too.
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

/// Each flag by what it changes in the report; the numbers are compared where they are computed.
#[test]
fn flags_choose_what_is_reported() {
    let ids = ["--ids", "353,383,71", "--json"];
    let metric = ["--answer", "#300", "--against", "#301"];
    let two = ["--clean-ids", "353,383,71", "--corrupt-ids", "77,383,71", "--answer", "#300", "--json"];
    for (what, texts, more, axes) in [
        (
            "attention",
            &ids[..],
            &["--layers", "1,3"][..],
            &[("layer", 2), ("head", 3), ("query", 3), ("key", 3)][..],
        ),
        (
            "attention",
            &ids,
            &["--heads", "0.1,3.0,0.1"],
            &[("layer", 2), ("head", 2), ("query", 3), ("key", 3)],
        ),
        ("lens", &ids, &["--show", "entropy"], &[("layer", 7), ("token", 3)]),
        ("attribute", &ids, &["--unit", "layer"], &[("part", 13)]),
        ("attribute", &ids, &["--unit", "head"], &[("layer", 6), ("head", 3)]),
        ("attribute", &ids, &["--unit", "head", "--as", "transformer-lens"], &[("layer", 6), ("head", 3)]),
        ("attribute", &ids, &["--unit", "neuron", "--top", "7"], &[("part", 7)]),
        ("heads", &ids, &["--exclude-bos", "--exclude-current"], &[("kind", 3), ("layer", 6), ("head", 3)]),
        (
            "heads",
            &["--json"],
            &["--length", "20", "--seed", "3", "--rows", "3"],
            &[("kind", 3), ("layer", 6), ("head", 3)],
        ),
        ("heads", &["--json"], &["--from", "20", "--below", "50"], &[("kind", 3), ("layer", 6), ("head", 3)]),
        ("ablate", &ids, &["--with", "transformer-lens-zero"], &[("layer", 6), ("head", 3)]),
        ("ablate", &ids, &["--heads", "0.0", "--at", "-1"], &[("token", 3)]),
        ("saliency", &ids, &["--method", "gradient"], &[("token", 3)]),
        ("saliency", &ids, &["--steps", "5", "--baseline", "#1"], &[("token", 3)]),
        ("neurons", &ids, &["--neuron", "1.9", "--top", "2"], &[("place", 2)]),
        ("patch", &two, &[], &[("layer", 6), ("position", 3)]),
        ("patch", &two, &["--site", "blocks.*.hook_mlp_out"], &[("layer", 6), ("position", 3)]),
        ("patch", &two, &["--site", "z"], &[("layer", 6), ("head", 3)]),
        ("patch", &two, &["--site", "attn.hook_k", "--by", "layer"], &[("layer", 6)]),
        (
            "patch",
            &two,
            &["--site", "z", "--by", "head-and-position"],
            &[("layer", 6), ("position", 3), ("head", 3)],
        ),
        ("estimate", &two, &["--site", "z"], &[("layer", 6), ("head", 3)]),
        ("path", &two, &["--to", "2.1.q"], &[("layer", 2), ("head", 3)]),
        ("path", &two, &["--from", "1.2", "--to", "final"], &[("from", 1)]),
    ] {
        let report = run(&[&["look", what], texts, more].concat()).json();
        let found: Vec<(&str, usize)> =
            axis_names(&report).into_iter().zip((0..).map(|axis| labels(&report, axis).len())).collect();
        assert_eq!(found, axes, "{what} {more:?}");
    }
    let look = |what: &str, more: &[&str]| run(&[&["look", what], &ids[..], &metric, more].concat()).json();
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

/// Every look at the model inside the program, whose tokens are those of its tokenizer.
#[test]
fn every_look_works_on_the_built_in_model() {
    let (text, ids) = ("The big dog", [442, 677, 1082]);
    let folder = tempfile::tempdir().unwrap();
    let sae = dictionary(&folder, 192, 12);
    let sae = [text, "--sae", path(&sae), "--site", "1.resid_pre"];
    let both = ["--clean", text, "--corrupt", "My big dog", "--answer", "#300"];
    for (what, arguments, shape) in [
        ("attention", &[text][..], &[6, 3, 3, 3][..]),
        ("lens", &[text], &[7, 3]),
        ("attribute", &[text], &[14]),
        ("heads", &[text], &[3, 6, 3]),
        ("ablate", &[text], &[6, 3]),
        ("saliency", &[text], &[3]),
        ("features", &sae, &[0, 3]),
        ("graph", &[text], &[20]),
        ("patch", &both, &[6, 3]),
        ("path", &both, &[6, 3]),
        ("estimate", &both, &[6, 3]),
    ] {
        let report = run(&[&["look", what], arguments, &["--json"]].concat()).json();
        check(&report, what, &ids, false);
        let texts: Vec<&str> = report["tokens"]
            .as_array()
            .unwrap()
            .iter()
            .map(|token| token["text"].as_str().unwrap())
            .collect();
        assert_eq!(texts, ["The", "·big", "·dog"], "{what}");
        let dims = grid(&report).dims().to_vec();
        assert_eq!(dims.len(), shape.len(), "{what}");
        // Of features there are as many as are active.
        assert!(dims.iter().zip(shape).all(|(found, size)| found == size || *size == 0), "{what}: {dims:?}");
        let table = run(&[&["look", what], arguments].concat());
        assert_eq!((table.code, table.stderr.as_str()), (SUCCESS, ""), "{what}");
        assert!(table.stdout.contains("tokens (no BOS token)") && table.stdout.contains("·do"), "{what}");
    }
    let neurons = run(&["look", "neurons", text, "--neuron", "5.767", "--json"]).json();
    check(&neurons, "neurons", &ids, false);
    let piped = crate::common::run_with_input(&["look", "attention", "--json"], text.as_bytes());
    assert_eq!(piped.json(), run(&["look", "attention", text, "--json"]).json());
}

/// Pairs of a task in a file, and the circuit that is found on them.
#[test]
fn a_task_is_made_and_its_circuit_found() {
    let folder = tempfile::tempdir().unwrap();
    let pairs = folder.path().join("pairs.jsonl");
    let make = ["look", "data", "ioi", "--count", "3", "--seed", "2"];
    let made = run(&[&make[..], &["--out", path(&pairs)]].concat());
    assert_eq!((made.code, made.stderr.as_str()), (SUCCESS, ""));
    assert_eq!(made.stdout, format!("written: {}\n", pairs.display()));
    let text = std::fs::read_to_string(&pairs).unwrap();
    assert_eq!((run(&make).stdout, text.lines().count()), (text.clone(), 3));
    assert_told(&run(&[&make[..], &["--out", path(&pairs)]].concat()), FAILURE, "pairs.jsonl");

    let look = ["look", "circuit", "--data", path(&pairs)];
    let [picture, page] = ["circuit.svg", "circuit.html"].map(|name| folder.path().join(name));
    let report =
        run(&[&look[..], &["--json", "--svg", path(&picture), "--html", path(&page)]].concat()).json();
    check(&report, "circuit", &[], false);
    assert_eq!(
        (axis_names(&report), report["edges"].as_object().unwrap().len()),
        (vec!["share of edges"], 703)
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
            && size(&["--edges", "100%", "--method", "eap", "--select", "top"]) == 703
    );
    let table =
        run(&[&look[..], &["--metric", "prob-diff", "--method", "clean-corrupted", "--pairs", "2"]].concat());
    assert_eq!(table.code, SUCCESS, "{}", table.stderr);
    assert!(table.stdout.contains("probability difference, mean of 2 pairs"), "{}", table.stdout);

    for (arguments, code, told) in [
        (&["look", "circuit"][..], USAGE, "--data"),
        (&["look", "circuit", "--data", "/nowhere/pairs.jsonl"], FAILURE, "/nowhere/pairs.jsonl"),
        (
            &[look[0], look[1], look[2], look[3], "--edges", "many"],
            USAGE,
            "neither a number of edges nor a share",
        ),
        (
            &[look[0], look[1], look[2], look[3], "--metric", "kl", "--method", "eap"],
            USAGE,
            "--metric kl: its gradient",
        ),
        (&["look", "data", "docstring"], USAGE, "[possible values: ioi, greater-than, gender]"),
    ] {
        assert_told(&run(arguments), code, told);
    }
    std::fs::write(&pairs, "{\"clean\": \"The dog\", \"corrupt\": \"The big dog\", \"answer\": \" is\"}\n")
        .unwrap();
    assert_told(&run(&look), USAGE, "`clean` has 2 tokens and `corrupt` 3");
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
fn a_tuned_lens_is_read_from_its_file() {
    let folder = tempfile::tempdir().unwrap();
    let layer = |layer: usize| {
        let weight = Tensor::zeros((192, 192), DType::F32, &Device::Cpu).unwrap();
        let bias = candle_gpt2_testing::pattern(&[192], 1.0, 5);
        [(format!("{layer}.weight"), weight), (format!("{layer}.bias"), bias)]
    };
    let tensors: HashMap<String, Tensor> = (0..6).flat_map(layer).collect();
    let file = folder.path().join("lens.safetensors");
    safetensors::save(&tensors, &file).unwrap();
    let lens = |more: &[&str]| run(&[&["look", "lens", "The big dog", "--json"], more].concat()).json();
    let (plain, tuned) = (lens(&[]), lens(&["--tuned", path(&file)]));
    assert_ne!(tuned["values"], plain["values"]);
    assert_eq!(tuned["layers"][6], plain["layers"][6], "the last layer has no translation");
}

fn metadata(file: &Path) -> Value {
    let bytes = std::fs::read(file).unwrap();
    let len = usize::try_from(u64::from_le_bytes(bytes[..8].try_into().unwrap())).unwrap();
    serde_json::from_slice::<Value>(&bytes[8..8 + len]).unwrap()["__metadata__"].clone()
}

#[test]
fn a_cache_has_what_was_asked_for_in_either_format() {
    let folder = tempfile::tempdir().unwrap();
    let cached = |name: &str, more: &[&str]| {
        let file = folder.path().join(name);
        let run = run(&[&["cache", "--ids", "353,383,71", "--out", path(&file)], more].concat());
        assert_eq!((run.code, run.stderr.as_str()), (SUCCESS, ""));
        (file, run)
    };
    let (file, report) = cached("all.safetensors", &["--sites", "*", "--json"]);
    let (report, found) = (report.json(), safetensors::load(&file, &Device::Cpu).unwrap());
    assert_eq!((found.len(), report["tensors"].as_array().unwrap().len()), (6 + 18 * 6, 6 + 18 * 6));
    for tensor in report["tensors"].as_array().unwrap() {
        assert_eq!(tensor["shape"], json!(found[tensor["name"].as_str().unwrap()].dims()));
    }
    assert_eq!(report["bytes"], std::fs::metadata(&file).unwrap().len());
    let said = metadata(&file);
    assert_eq!((&said["schema"], &said["processing"]), (&json!("gpt2.cache/1"), &json!("raw")));
    assert_eq!((&said["bos"], &said["positions"]), (&json!("false"), &json!("null")));
    assert_eq!((&said["tokens"], &said["model"]), (&json!("[353,383,71]"), &json!("built-in")));
    let sites: Vec<String> = serde_json::from_str(said["sites"].as_str().unwrap()).unwrap();
    assert!(sites.len() == found.len() && sites.iter().all(|site| found.contains_key(site)));

    let (npz, told) = cached("all.npz", &["--sites", "*"]);
    assert!(told.stdout.contains(&format!("{} tensors", found.len())), "{}", told.stdout);
    for (name, value) in Tensor::read_npz(&npz).unwrap() {
        assert_eq!(candle_gpt2_testing::values(&value), candle_gpt2_testing::values(&found[&name]), "{name}");
        assert_eq!(value.dims(), found[&name].dims(), "{name}");
    }
    let chosen = ["--sites", "*", "--layers", "1", "--positions", "2,0-1,2", "--as", "transformer-lens"];
    let (file, _) = cached("part.safetensors", &chosen);
    assert_eq!(
        safetensors::load(&file, &Device::Cpu).unwrap().len(),
        6 + 18,
        "one block and what is outside"
    );
    let said = metadata(&file);
    assert_eq!((&said["positions"], &said["processing"]), (&json!("[0,1,2]"), &json!("transformer_lens")));
    // A name of theirs, one of ours, a shorthand, a pattern.
    let (file, _) = cached(
        "named.safetensors",
        &["--sites", "blocks.0.attn.hook_z, 1.resid_mid,pattern1,blocks.*.hook_mlp_out"],
    );
    let found = safetensors::load(&file, &Device::Cpu).unwrap();
    assert_eq!(found.len(), 3 + 6);
    assert!(
        found.contains_key("blocks.1.hook_resid_mid") && found.contains_key("blocks.1.attn.hook_pattern")
    );
}

#[test]
fn wrong_calls_end_with_code_2_and_say_what_to_do() {
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
    for (arguments, told) in [
        (
            &["attention", "The big dog", "--heads", "abc"][..],
            "`abc` is not a head; write LAYER.HEAD, such as 9.6",
        ),
        (&["attention", "The big dog", "--heads", "0.1", "--layers", "0"], "cannot be used with"),
        (&["attention", "The big dog", "--layers", "9-12"], "--layers: 9-12 is not among 0 to 5"),
        (&["attention", "--ids", "1,x"], "`x` is not a token id"),
        (&["attention", "The big dog", "--columns", "3"], "--columns"),
        (&["lens", "The big dog", "--show", "rank"], "--watch TEXT"),
        (
            &["ablate", "The big dog", "--answer", "#99999"],
            "--answer: token 99999 is outside the vocabulary of 2048",
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
        (&["heads", "--exclude-bos"], "are for a text; give one"),
        (&["saliency", "The big dog", "--baseline", "two words"], "--baseline"),
        (&["saliency", "The big dog", "--steps", "0"], "--steps"),
        (
            &["patch", "--clean", "The big dog", "--answer", "#3"],
            "--corrupt TEXT or --corrupt-ids ID,ID,… is missing",
        ),
        (
            &["patch", "--clean", "The big dog", "--corrupt", "The big dog", "--answer", "#3"],
            "both texts give the same value",
        ),
        (&[&["patch"], &two[..], &["--by", "head"]].concat(), "resid_pre has no heads; q, k, v, z"),
        (
            &[&["path"], &two[..], &["--from", "2.0", "--to", "1.0.q"]].concat(),
            "--from 2.0: it is not before --to 1.0.q",
        ),
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
        (&["--sites", "", "--out", &cache], "--sites"),
        (&["--sites", "z", "--layers", "9-12", "--out", &cache], "--layers: 9-12 is not among 0 to 5"),
        (&["--sites", "1.z", "--layers", "0", "--out", &cache], "--layers"),
        (&["--sites", "z", "--positions", "3", "--out", &cache], "--positions: 3 is not among 0 to 2"),
        (&["--sites", "z", "--out", &cache, "--html", &page], "--html"),
        (&["--sites", "z", "--out", &cache, "--svg", &picture], "--svg"),
        (&["--sites", "z"], "--out"),
        (&["--out", &cache], "--sites"),
    ] {
        assert_told(&run(&[&["cache", "The big dog"], arguments].concat()), USAGE, told);
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
        (&["--steer", "\" a\""], "--layer"),
        (&["--layer", "1"], "--steer"),
        (&["--everywhere"], "--steer"),
        (&["--steer", "\" a\"", "--layer", "99"], "the model's 6 layers are counted from 0"),
        (&["--steer", "\" a\"", "--layer", "1", "--scale", "nan"], "--scale NaN: expected a finite number"),
    ] {
        assert_told(&run(&[&["generate", "The", "--greedy"], arguments].concat()), USAGE, told);
    }
    let wordy = format!("\"{}\"", " a".repeat(600));
    let too_long = run(&["generate", "The", "--steer", &wordy, "--layer", "1"]);
    assert_told(&too_long, USAGE, "the model takes 1 to 512");

    // Heads of another model, by ids.
    let config = fixture_path("inside/plain/config.json");
    let model = ["--model", path(config.parent().unwrap()), "--heads", "2.0"];
    let other = run(&[&["look", "attention", "--ids", "1,2"], &model[..]].concat());
    assert_told(&other, USAGE, "the model has 2 layers of 3 heads");
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
    let deep = tensors("deep.safetensors", candle_gpt2_testing::pattern(&[2, 2, 192], 1.0, 1));
    let nothing = tensors("nothing.safetensors", Tensor::zeros((0, 192), DType::F32, &Device::Cpu).unwrap());
    let whole = tensors("whole.safetensors", Tensor::ones((1, 192), DType::U32, &Device::Cpu).unwrap());
    let subfolder = folder.path().join("sae");
    std::fs::create_dir(&subfolder).unwrap();
    let named = |run: &Run, name: &str| {
        assert!([FAILURE, USAGE].contains(&run.code), "{}: {}", run.code, run.stderr);
        assert_told(run, run.code, name);
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
    // Of another width than the model.
    let sae = dictionary(&folder, 18, 30);
    named(
        &run(&["look", "features", "The big dog", "--sae", path(&sae), "--site", "1.resid_pre"]),
        path(&sae),
    );
    named(
        &run(&["look", "features", "The big dog", "--sae", path(&sae), "--site", "z"]),
        "expected one place",
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
    // Texts of one length or of several are a mean, and so are the pieces of one that no context holds.
    for with in [format!("mean:{two}"), format!("mean:{short}"), format!("mean:{long}")] {
        let report = run(&["look", "ablate", "The big dog", "--with", &with, "--json"]).json();
        check(&report, "ablate", &[442, 677, 1082], false);
    }
}

/// What draws each look of the model inside the program.
fn drawn(folder: &TempDir) -> Vec<Vec<String>> {
    let sae = dictionary(folder, 192, 12);
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
        ("npz", &["cache", "The big dog", "--sites", "z", "--out"][..]),
        ("safetensors", &["cache", "The big dog", "--sites", "z", "--out"]),
        ("html", &["look", "attention", "The big dog", "--html"]),
        ("svg", &["look", "lens", "The big dog", "--svg"]),
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
        limited.args(["cache", "The big dog", "--sites", "resid_post", "--out", path(&file)]);
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
        &["look", "attention", "The big dog", "--html", path(&page)][..],
        &["look", "lens", "The big dog", "--svg", path(&picture), "--json"],
        &["cache", "The big dog", "--sites", "z", "--out", path(&cache)],
    ] {
        let run = run(arguments);
        assert_told(&run, FAILURE, "no-folder");
        assert_eq!(names_in(&folder), [""; 0]);
    }
    // A folder stands where the file would.
    let taken = folder.path().join("taken.html");
    std::fs::create_dir(&taken).unwrap();
    assert_told(&run(&["look", "attention", "The big dog", "--html", path(&taken)]), FAILURE, "taken.html");
    assert_eq!(names_in(&folder), ["taken.html"]);
    assert!(std::fs::read_dir(&taken).unwrap().next().is_none());
}

fn text(more: &[&str]) -> String {
    let run = run(&[&["generate", "One day, Mia was", "--max-new-tokens", "12"], more].concat());
    let is_nothing = more.windows(2).any(|flags| flags == ["--scale", "0"]);
    let note = if is_nothing {
        "note: the steering vector is zero everywhere; the text is as without it\n"
    } else {
        ""
    };
    assert_eq!((run.code, run.stderr.as_str()), (SUCCESS, note));
    run.stdout
}

/// What is added is checked in `look`.
#[test]
fn steering_is_added_by_its_flags() {
    let plain = text(&["--greedy"]);
    let steered =
        |steer: &str, more: &[&str]| text(&[&["--steer", steer, "--layer", "2", "--greedy"], more].concat());
    const PAIR: &str = "\" the\"-\" my\"";
    assert_eq!(steered(PAIR, &["--scale", "0"]), plain, "nothing is added");
    let strong = steered(PAIR, &["--scale", "40"]);
    assert!(strong != plain && strong == steered(PAIR, &["--scale", "40"]));
    let everywhere = steered(PAIR, &["--scale", "40", "--everywhere"]);
    assert!(everywhere != strong && everywhere != plain, "{everywhere}");
    assert_eq!(steered("\" my\"-\" the\"", &["--scale", "-40"]), strong, "the other way round");
    // A file of one direction.
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("direction.safetensors");
    let direction = candle_gpt2_testing::pattern(&[1, 192], 1.0, 3);
    safetensors::save(&HashMap::from([("direction", direction)]), &file).unwrap();
    assert_ne!(steered(path(&file), &["--scale", "40"]), plain);
}

#[test]
fn control_vectors_of_llama_cpp_are_added() {
    let plain = text(&["--greedy"]);
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("vector.gguf");
    let direction = |offset| candle_gpt2_testing::pattern(&[192], 30.0, offset);
    let directions = [(1, direction(3)), (3, direction(7))].into();
    candle_gpt2_weights::write_control_vector(&file, &directions).unwrap();
    let file = path(&file);
    let with = |more: &[&str]| text(&[&["--greedy"], more].concat());
    let once = with(&["--control-vector", file]);
    assert_ne!(once, plain);
    assert_eq!(with(&["--control-vector-scaled", file, "0"]), plain, "nothing is added");
    let twice = with(&["--control-vector-scaled", file, "2"]);
    assert_eq!(with(&["--control-vector", file, "--control-vector", file]), twice, "several add up");
    let more = ["--control-vector-scaled", file, "3", "--control-vector-scaled", file, "-1"];
    assert_eq!(with(&more), twice, "also with factors");
    let range = ["--control-vector-layer-range", "1", "3"];
    assert_eq!(with(&[&["--control-vector", file], &range[..]].concat()), once);
    let nowhere = ["--control-vector-layer-range", "2", "2"];
    assert_eq!(with(&[&["--control-vector", file], &nowhere[..]].concat()), plain);
    for (arguments, told) in [
        (&["--control-vector-scaled", file, "x"][..], "expected a file and a finite number, found x"),
        (&["--control-vector-layer-range", "1", "2"], "goes with --control-vector"),
        (
            &["--control-vector", file, "--control-vector-layer-range", "3", "1"],
            "the first block first, found 3 1",
        ),
        (&["--control-vector", file, "--steer", "\" a\"", "--layer", "1"], "--steer"),
    ] {
        assert_told(&run(&[&["generate", "The", "--greedy"], arguments].concat()), USAGE, told);
    }
    let missing = run(&["generate", "The", "--control-vector", "no/such.gguf"]);
    assert_told(&missing, FAILURE, "no/such.gguf");
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
    let (prompts, lines) = (folder.path().join("prompts.txt"), ["One day, Mia was", "The", "Once there was"]);
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

#[test]
fn the_built_in_models_transcoders_are_the_default() {
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
