//! Tests of `gpt2 cache --prompts-file` and `gpt2 train --task dictionary`.
//!
//! They cover output, files and invalid calls. The crates `jobs` and `training` test the contents of shards
//! and the training of dictionaries.

use std::fs;

use candle_gpt2_testing::entries;
use serde_json::json;

use crate::common::{FAILURE, SUCCESS, USAGE, assert_refused, path, run};

#[test]
fn dictionary_is_trained_from_cached_activations() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str| folder.path().join(name);
    let (prompts, shards, features) = (file("prompts.txt"), file("shards"), file("features"));
    let names = ["Mia", "Tom", "Ben", "Lily", "Sam"];
    let line =
        |line: usize| format!("One day, {} and {} went to the park.\n", names[line % 5], names[line * 2 % 3]);
    fs::write(&prompts, (0..60).map(line).collect::<String>()).unwrap();
    let cache = |more: &[&str]| {
        let arguments = [
            "cache",
            "--prompts-file",
            path(&prompts),
            "--sites",
            "3.resid_post,1.z",
            "--out",
            path(&shards),
        ];
        run(&[&arguments, more].concat())
    };
    let written = cache(&["--shard-size", "200"]);
    assert_eq!((written.code, written.stderr.as_str()), (SUCCESS, ""));
    assert!(
        written.stdout.contains(" tokens from 60 sequences in ") && written.stdout.ends_with(" tokens/s\n"),
        "{}",
        written.stdout
    );
    let before = entries(&shards);
    assert!(before.len() > 3 && before[0] == "activations.json", "{before:?}");
    assert_refused(&cache(&["--shard-size", "200"]), USAGE, "add --resume to continue the job in it");
    let report = cache(&["--shard-size", "200", "--resume", "--json"]).json();
    assert_eq!(
        (&report["computed_tokens"], &report["sequences"]),
        (&json!(0), &json!(60)),
        "already complete"
    );
    assert_eq!(
        report["sites"],
        json!([{"name": "blocks.1.attn.hook_z", "width": 256}, {"name": "blocks.3.hook_resid_post", "width": 256}])
    );
    assert_refused(
        &cache(&["--shard-size", "300", "--resume"]),
        FAILURE,
        "shard_size was 200 and is now 300",
    );
    assert_refused(&cache(&["--resume", "--positions", "1"]), USAGE, "--positions");
    assert_refused(
        &run(&["cache", "--sites", "z", "--shard-size", "5", "--out", path(&shards), "text"]),
        USAGE,
        "--prompts-file",
    );
    let scores = ["cache", "--prompts-file", path(&prompts), "--sites", "pattern", "--out", path(&shards)];
    let with_layers =
        [&scores[..3], &["--sites", "resid_post,z", "--layers", "3", "--out", path(&shards)]].concat();
    assert_refused(
        &run(&with_layers),
        USAGE,
        "write the layers in --sites, such as 3.resid_post for resid_post of layer 3",
    );
    assert_refused(
        &run(&scores),
        USAGE,
        "--sites: blocks.0.attn.hook_pattern does not have one vector per token",
    );

    let train = |more: &[&str]| {
        let arguments = [
            "train",
            "--task",
            "dictionary",
            "--data",
            path(&shards),
            "--init",
            "built-in",
            "--out",
            path(&features),
        ];
        run(&[
            &arguments[..],
            &["--latents", "64", "--k", "8", "--steps", "12", "--batch-size", "4", "--context", "16"],
            more,
        ]
        .concat())
    };
    assert_refused(&train(&[]), USAGE, "needs --site, the hook point to train on");
    assert_refused(&train(&["--site", "3.resid_post", "--kind", "top"]), USAGE, "--kind");
    let trained = train(&["--site", "3.resid_post", "--kind", "batch-top-k", "--json"]).json();
    let metrics = &trained["dictionary"];
    for number in ["l0", "explained_variance", "cross_entropy", "recovered_from_zero"] {
        assert!(
            metrics["definitions"][number].is_string() && !metrics[number].is_null(),
            "{number}: {metrics}"
        );
    }
    assert_eq!(trained["parameters"], 64 * (256 + 256 + 1) + 256);
    // Other commands can read the dictionary from its folder.
    let looked = run(&["look", "features", "One day, Mia was", "--sae", path(&features), "--json"]);
    assert_eq!(looked.code, SUCCESS, "{}", looked.stderr);
    // Show examples of each feature as JSON, as a page, and for chosen features. Standard input is not read.
    let examples = |more: &[&str]| {
        run(&[&["look", "features", "--sae", path(&features), "--prompts-file", path(&prompts)], more]
            .concat())
    };
    let found = examples(&["--json"]).json();
    let cards = found["features"].as_array().unwrap();
    assert_eq!(cards.len(), 64);
    for key in [
        "index",
        "examples_quantiles",
        "top_logits",
        "bottom_logits",
        "act_min",
        "act_max",
        "histogram",
        "density",
    ] {
        assert!(cards.iter().all(|card| !card[key].is_null()), "{key}");
    }
    let page = file("features.html");
    let written = examples(&["--html", path(&page), "--features", "0-2", "--examples", "2"]);
    assert_eq!((written.code, written.stdout), (SUCCESS, format!("written: {}\n", page.display())));
    assert!(fs::read_to_string(&page).unwrap().contains("\"examples_quantiles\""));
    assert_refused(
        &examples(&["--features", "64"]),
        USAGE,
        "--features: 64 is out of range; expected 0 to 63",
    );
    assert_refused(&run(&["look", "features", "--sae", path(&features)]), USAGE, "--prompts-file");
    // An existing folder is resumed only with `--resume`.
    assert_refused(&train(&["--site", "3.resid_post", "--kind", "batch-top-k"]), USAGE, "--resume");
}

#[test]
fn cross_layer_transcoder_is_trained_and_traced() {
    let folder = tempfile::tempdir().unwrap();
    let (text, layers) = (folder.path().join("text.txt"), folder.path().join("layers"));
    let names = ["Mia", "Tom", "Ben", "Lily", "Sam"];
    let sentence =
        |line: usize| format!("One day, {} and {} had a red ball. ", names[line % 5], names[line * 2 % 3]);
    fs::write(&text, (0..120).map(sentence).collect::<String>()).unwrap();
    let arguments =
        ["train", "--task", "dictionary", "--kind", "cross-layer-transcoder", "--data", path(&text)];
    let sizes = ["--latents", "64", "--k", "24", "--steps", "8", "--batch-size", "4", "--context", "16"];
    let train = |site: &str, more: &[&str]| {
        let site = ["--init", "built-in", "--site", site, "--out", path(&layers)];
        run(&[&arguments[..], &sizes, &site, more].concat())
    };
    assert_refused(&train("3.resid_mid", &[]), USAGE, "--site: a cross-layer transcoder reads all blocks");
    let trained = train("resid_mid", &[]);
    assert_eq!(trained.code, SUCCESS, "{}", trained.stderr);
    let by_layer = trained.stdout.lines().find_map(|line| line.strip_prefix("explained variance by layer: "));
    let numbers: Vec<f64> = by_layer.unwrap().split(' ').map(|number| number.parse().unwrap()).collect();
    assert_eq!(numbers.len(), 7, "{numbers:?}");
    // The decoder has one matrix for each pair of layers.
    let parameters = 7 * (64 * (256 + 1) + 256) + 28 * 64 * 256;
    assert_eq!(parameters, 575_680);
    assert!(trained.stdout.starts_with("575,680 parameters, "), "{}", trained.stdout);
    let note = "a cross-layer transcoder with 575,680 parameters; training it needs about ";
    assert!(trained.stderr.contains(note), "{}", trained.stderr);

    let graph = ["look", "graph", "One day, Mia had a red", "--transcoders", path(&layers)];
    let traced = run(&[&graph[..], &["--json"]].concat()).json();
    let is_feature = |node: &&serde_json::Value| node["feature_type"] == "cross layer transcoder";
    assert!(traced["nodes"].as_array().unwrap().iter().filter(is_feature).count() > 0, "{traced}");
    assert!(!traced["links"].as_array().unwrap().is_empty());
    // A folder that was not written completely has no config.yaml and is rejected.
    fs::remove_file(layers.join("config.yaml")).unwrap();
    assert_refused(&run(&graph), USAGE, "no transcoders found");
}
