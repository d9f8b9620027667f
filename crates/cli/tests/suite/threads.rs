//! Results do not depend on the number of threads, whatever the precision.

use std::process::Command;

use gpt2_testing::CheckpointFolder;

#[test]
fn scores_and_texts_are_the_same_on_any_number_of_threads() {
    let folder = CheckpointFolder::tiny();
    let ids: Vec<String> = (0..40).map(|index| (index * 37 % 300).to_string()).collect();
    let (ids, model) = (ids.join(","), folder.path().to_str().unwrap());
    let score = ["score", "--ids", &ids, "--json"];
    // Texts come from a cache, in f32 or f16.
    let generate = |kv_dtype| ["generate", "--ids", "5,9,70", "--greedy", "--kv-dtype", kv_dtype];
    for dtype in ["f32", "f16", "q8", "q6", "q4"] {
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
            for threads in ["2", "3", "7"] {
                assert_eq!(run(threads), one, "{arguments:?}, {dtype}, {threads} threads");
            }
        }
    }
}
