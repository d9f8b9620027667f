//! Results do not depend on the number of threads, whatever the precision.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::process::Command;

use gpt2_testing::CheckpointFolder;

#[test]
fn scores_are_the_same_bits_on_any_number_of_threads() {
    let folder = CheckpointFolder::tiny();
    let ids: Vec<String> = (0..40).map(|index| (index * 37 % 300).to_string()).collect();
    for dtype in ["f32", "f16", "q8", "q4"] {
        let score = |threads: &str| {
            let arguments =
                ["score", "--ids", &ids.join(","), "--json", "--dtype", dtype, "--threads", threads];
            let model = folder.path().to_str().unwrap();
            let output = Command::new(env!("CARGO_BIN_EXE_gpt2"))
                .args(arguments)
                .args(["--model", model])
                .output()
                .unwrap();
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            output.stdout
        };
        let one = score("1");
        for threads in ["2", "3", "7"] {
            assert_eq!(score(threads), one, "{dtype}, {threads} threads");
        }
    }
}
