//! Tests that the report of `gpt2 doctor` matches the machine.

use std::fs;
use std::path::Path;
use std::thread::available_parallelism;

use serde_json::{Value, json};

use crate::common::{Run, SUCCESS, USAGE, assert_refused, path, program, run};

fn fill_cache(folder: &Path) {
    let write = |name: &str, text: &str| {
        let file = folder.join(name);
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(file, text).unwrap();
    };
    let config = r#"{"model_type": "gpt2"}"#;
    write("models--openai-community--gpt2/snapshots/1/config.json", config);
    write("models--openai-community--gpt2/snapshots/1/model.safetensors", "");
    write("models--openai-community--gpt2/blobs/a", &"x".repeat(3_000_000));
    write("models--openai-community--gpt2/blobs/b", config);
    // Without symbolic links, the snapshot holds the files themselves. This model's weights are missing.
    write("models--someone--half/snapshots/1/config.json", config);
    write("models--someone--bert/snapshots/1/config.json", r#"{"model_type": "bert"}"#);
    write("models--someone--empty/refs/main", "1");
    write("datasets--someone--texts/snapshots/1/texts.jsonl", "{}");
}

fn doctor(arguments: &[&str], folder: &Path) -> Run {
    let mut command = program(&[&["doctor"], arguments].concat());
    let output = command
        .env("HF_HUB_CACHE", path(folder))
        .env("HF_ENDPOINT", "http://hub.example/")
        .env_remove("HF_HUB_OFFLINE")
        .env("HF_TOKEN", "secret")
        .env_remove("GPT2_INSTRUCTION_SET")
        .env_remove("GPT2_LARGE_PAGES")
        .output()
        .unwrap();
    Run::from_output(&output)
}

#[test]
fn json_report_describes_the_machine() {
    let folder = tempfile::tempdir().unwrap();
    fill_cache(folder.path());
    let result = doctor(&["--json"], folder.path());
    assert!(!result.stdout.contains("secret"));
    let report = result.json();
    let keys: Vec<&String> = report.as_object().unwrap().keys().collect();
    let expected = [
        "version",
        "features",
        "system",
        "processor",
        "memory",
        "large_pages",
        "gpu",
        "hub",
        "has_built_in_model",
        "speeds",
        "estimates",
    ];
    assert_eq!(keys, expected);
    assert_eq!(report["version"], env!("CARGO_PKG_VERSION"));
    assert_eq!(report["has_built_in_model"], true);
    assert_eq!(report["large_pages"]["is_asked"], true);
    let features: Vec<&str> =
        report["features"].as_array().unwrap().iter().filter_map(Value::as_str).collect();
    assert_eq!(features.contains(&"serve"), cfg!(feature = "serve"));
    assert_eq!(features.contains(&"cuda"), cfg!(feature = "cuda"));
    assert_eq!(report["system"], std::env::consts::OS);

    let processor = &report["processor"];
    let cores = available_parallelism().unwrap().get();
    assert_eq!((&processor["cores"], &processor["threads"]), (&json!(cores), &json!(cores)));
    let sets = processor["instruction_sets"].as_array().unwrap();
    assert_eq!(sets[0], "portable");
    assert_eq!(sets.last(), Some(&processor["instruction_set"]), "the fastest one is selected");

    let hub = &report["hub"];
    assert_eq!((&hub["endpoint"], &hub["is_offline"]), (&json!("http://hub.example"), &json!(false)));
    assert_eq!((&hub["cache"], &hub["has_token"]), (&json!(path(folder.path())), &json!(true)));
    let models = json!({
        "gpt2": [
            {"name": "openai-community/gpt2", "bytes": 3_000_022, "is_whole": true},
            {"name": "someone/half", "bytes": 22, "is_whole": false},
        ],
        "others": 2,
    });
    assert_eq!(hub["models"], models);

    if cfg!(target_os = "linux") {
        let number = |key: &str| report["memory"][key].as_u64().unwrap();
        assert!(number("total_bytes") >= number("available_bytes") && number("available_bytes") > 0);
        let driver = Path::new("/proc/driver/nvidia/version").exists();
        assert_eq!(report["gpu"]["nvidia_driver"]["version"].is_string(), driver, "{}", report["gpu"]);
    }
    if !cfg!(feature = "cuda") {
        let expected = json!({
            "is_built": false, "device": null, "free_bytes": null,
            "problem": "this program was built without CUDA; build it with --features cuda",
        });
        assert_eq!(report["gpu"]["cuda"], expected);
    }
}

/// Checks measurements against limits that no current machine reaches.
///
/// The limits are 10 TB/s from memory, and 1000 multiply-adds per core in each of 10 billion cycles.
#[test]
fn measured_speeds_are_plausible() {
    let folder = tempfile::tempdir().unwrap();
    let report = doctor(&["--json", "--threads", "1", "--offline"], folder.path()).json();
    assert_eq!(report["processor"]["threads"], 1);
    assert_eq!(report["hub"]["is_offline"], true);
    assert_eq!(report["hub"]["models"], json!({"gpt2": [], "others": 0}));
    let speed = |key: &str| report["speeds"][key].as_f64().unwrap();
    assert!((1e7..1e13).contains(&speed("read_bytes_per_s")), "{}", report["speeds"]);
    for key in ["f32_multiply_adds_per_s", "q8_multiply_adds_per_s", "q4_multiply_adds_per_s"] {
        assert!((1e7..1e13).contains(&speed(key)), "{}", report["speeds"]);
    }
    assert!(speed("best_read_bytes_per_s") >= speed("read_bytes_per_s") && speed("read_rounds") >= 1.0);
    let estimates = report["estimates"].as_array().unwrap();
    let dtypes: Vec<&Value> = estimates.iter().map(|estimate| &estimate["dtype"]).collect();
    assert_eq!(dtypes, ["f32", "f16", "q8", "q4"]);
    for estimate in estimates {
        let (read, tokens) =
            (estimate["read_bytes"].as_f64().unwrap(), estimate["new_tokens_per_s"].as_f64().unwrap());
        assert!(tokens > 0.0 && tokens * read <= speed("read_bytes_per_s") * 1.000_001, "{estimate}");
    }
}

#[test]
fn text_report_describes_the_machine() {
    let folder = tempfile::tempdir().unwrap();
    fill_cache(folder.path());
    let result = doctor(&[], folder.path());
    assert_eq!((result.code, result.stderr.as_str()), (SUCCESS, ""));
    for part in [
        "program       gpt2 ",
        "\ninstructions  ",
        "\nlarge pages   ",
        " them (set by GPT2_LARGE_PAGES)\n",
        "\n              openai-community/gpt2, 3 MB\n",
        "\n              someone/half, 0 MB, incomplete\n",
        "\n              2 models other than GPT-2\n",
        " GB/s from memory\n",
        "\n  q8          generates ",
    ] {
        assert!(result.stdout.contains(part), "`{part}` is not in: {}", result.stdout);
    }
    assert!(!result.stdout.contains("secret"));
    assert_refused(&run(&["doctor", "--threads", "0"]), USAGE, "--threads");
    let refused = program(&["doctor"]).env("GPT2_LARGE_PAGES", "huge").output().unwrap();
    assert_refused(&Run::from_output(&refused), USAGE, "GPT2_LARGE_PAGES: expected on or off, found `huge`");
}
