//! Tests that results do not depend on the number of threads, at any precision.

use std::process::Command;

use candle_gpt2_testing::CheckpointFolder;

use crate::common::{SUCCESS, USAGE, assert_refused, run};

#[test]
fn thread_count_does_not_change_scores_or_completions() {
    let folder = CheckpointFolder::tiny();
    let ids: Vec<String> = (0..40).map(|index| (index * 37 % 300).to_string()).collect();
    let (ids, model) = (ids.join(","), folder.path().to_str().unwrap());
    let score = ["score", "--ids", &ids, "--json"];
    // Completions use a KV cache in f32 or f16.
    let generate = |kv_dtype| ["generate", "--ids", "5,9,70", "--greedy", "--kv-dtype", kv_dtype];
    for dtype in ["f32", "f16", "q8", "q6", "q5", "q4"] {
        for arguments in [&score[..], &generate("f32"), &generate("f16")] {
            let run = |threads: &str| {
                let output = Command::new(env!("CARGO_BIN_EXE_gpt2"))
                    .args(arguments)
                    .args(["--dtype", dtype, "--threads", threads, "--model", model])
                    .output()
                    .unwrap();
                assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
                output.stdout
            };
            let one = run("1");
            for threads in ["2", "3", "7", "64"] {
                assert_eq!(run(threads), one, "{arguments:?}, {dtype}, {threads} threads");
            }
        }
    }
}

#[test]
fn bench_decodes_fewer_tokens_in_short_contexts() {
    let folder = CheckpointFolder::tiny();
    let measured = run(&["bench", "--json", folder.path().to_str().unwrap()]);
    assert_eq!(measured.code, SUCCESS, "{}", measured.stderr);
    let note = "the context has 48 tokens: decode generates 40 after 8 instead of 128";
    assert!(measured.stderr.contains(note), "{}", measured.stderr);
    let report: serde_json::Value = serde_json::from_str(&measured.stdout).unwrap();
    assert!(report["decode"].as_f64().unwrap() > 0.0 && report["decode_at_896"].is_null(), "{report}");
    assert_eq!((&report["dtype"], report["prefill"].as_object().unwrap().len()), (&"f32".into(), 0));
}

#[test]
fn bench_measures_each_thread_count() {
    let measured = run(&["bench", "--json", "--dtype", "q8", "--threads", "1,3"]);
    assert_eq!((measured.code, measured.stderr.as_str()), (SUCCESS, ""));
    let reports: Vec<serde_json::Value> =
        measured.stdout.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let threads: Vec<_> = reports.iter().map(|report| report["threads"].as_u64().unwrap()).collect();
    assert_eq!(threads, [1, 3]);
    for report in &reports {
        // Each of the six blocks has five parallel regions, counting attention as one. The output head adds
        // another.
        let regions = report["regions_per_token"].as_f64().unwrap();
        assert!((25.0..44.0).contains(&regions), "{report}");
    }
    assert_refused(&run(&["bench", "--threads", "1,0"]), USAGE, "--threads");
    assert_refused(&run(&["score", "a", "--threads", "1,2"]), USAGE, "--threads");
}

/// Checks that an instruction set can be selected by name.
///
/// A set that the processor lacks is rejected with a list of the available ones.
#[test]
fn instruction_set_is_selected_by_name() {
    let folder = CheckpointFolder::tiny();
    let run = |name: &str| {
        Command::new(env!("CARGO_BIN_EXE_gpt2"))
            .args([
                "generate",
                "--ids",
                "5,9,70",
                "--greedy",
                "--json",
                "--model",
                folder.path().to_str().unwrap(),
            ])
            .env("GPT2_INSTRUCTION_SET", name)
            .output()
            .unwrap()
    };
    let ids = |name: &str| {
        let output = run(name);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_slice::<serde_json::Value>(&output.stdout).unwrap()["ids"].clone()
    };
    assert_eq!(ids("portable"), ids(""));
    let rejected = run("avx9");
    let message = String::from_utf8_lossy(&rejected.stderr).into_owned();
    assert_eq!(rejected.status.code(), Some(2), "{message}");
    assert!(message.contains("`avx9`") && message.contains("portable"), "{message}");
}
