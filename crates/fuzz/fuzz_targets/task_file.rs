//! Fuzzes `gpt2 eval` task files: YAML syntax, size limits and keys, without running templates.
#![no_main]

use candle_gpt2_evaluation::EvaluationOptions;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let path = candle_gpt2_fuzz::file("task.yaml", bytes);
    let protocols = vec![path.display().to_string()];
    let _ = EvaluationOptions { protocols, ..EvaluationOptions::default() }.check();
});
