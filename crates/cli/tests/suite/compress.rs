//! Tests of `gpt2 compress` and `gpt2 decompress`.
//!
//! They follow gzip's conventions and restore every byte on any number of threads and any instruction set.

use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::{Output, Stdio};

use candle_gpt2_testing::{CheckpointFolder, entries, temporary_folder};

#[cfg(unix)]
use crate::common::wait_until;
use crate::common::{FAILURE, SUCCESS, USAGE, assert_refused, path, program, run};

const TEXT: &str = "ROMEO:\nBut soft, what light through yonder window breaks?\n";

/// Runs the program with this input and these environment variables.
fn run_bytes(arguments: &[&str], input: &[u8], environment: &[(&str, &str)]) -> Output {
    let mut child = program(arguments)
        .envs(environment.iter().copied())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let input = input.to_vec();
    let writer = std::thread::spawn(move || stdin.write_all(&input));
    let output = child.wait_with_output().unwrap();
    // A run that rejects its arguments does not read its input.
    _ = writer.join().unwrap();
    output
}

fn stdout_of(output: &Output) -> &[u8] {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    &output.stdout
}

/// Runs a command that prints a one-line report and returns the line.
fn report_line(arguments: &[&str]) -> String {
    let result = run(arguments);
    assert_eq!(
        (result.code, result.stderr.as_str(), result.stdout.lines().count()),
        (SUCCESS, "", 1),
        "{arguments:?}"
    );
    result.stdout
}

fn assert_silent(arguments: &[&str]) {
    let result = run(arguments);
    assert_eq!(
        (result.code, result.stdout.as_str(), result.stderr.as_str()),
        (SUCCESS, "", ""),
        "{arguments:?}"
    );
}

#[test]
fn files_round_trip_and_flags_follow_gzip() {
    let folder = temporary_folder();
    let file = folder.path().join("letters.txt");
    let compressed = folder.path().join("letters.txt.gpt2z");
    let text = TEXT.repeat(4);
    fs::write(&file, &text).unwrap();
    let modified = fs::metadata(&file).unwrap().modified().unwrap();
    let saved = report_line(&["compress", path(&file)]);
    assert_eq!(entries(folder.path()), ["letters.txt", "letters.txt.gpt2z"]);
    let size = fs::metadata(&compressed).unwrap().len();
    assert!(size < text.len() as u64);
    let percent = size as f64 * 100.0 / text.len() as f64;
    let expected = format!("{}: {size} bytes, {percent:.1}% of {}, ", path(&compressed), text.len());
    assert!(saved.starts_with(&expected) && saved.ends_with(" bits per byte\n"), "{saved}");
    report_line(&["compress", "--force", "--rm", path(&file)]);
    assert_eq!(entries(folder.path()), ["letters.txt.gpt2z"]);
    assert_eq!(fs::metadata(&compressed).unwrap().modified().unwrap(), modified);
    // Without `--out`, compressed files are not compressed again, and files without the suffix are not
    // restored.
    assert_refused(&run(&["compress", path(&compressed)]), FAILURE, "already ends in .gpt2z");
    assert_refused(&run(&["decompress", "Cargo.toml"]), FAILURE, "does not end in .gpt2z");
    assert_silent(&["decompress", "-k", path(&compressed)]);
    assert_eq!(entries(folder.path()), ["letters.txt", "letters.txt.gpt2z"]);
    assert_eq!(fs::read_to_string(&file).unwrap(), text);
    // Nothing is overwritten without --force.
    for arguments in [["compress", path(&file)], ["decompress", path(&compressed)]] {
        assert_refused(&run(&arguments), FAILURE, "already exists");
    }
    assert_silent(&["decompress", "-f", "--rm", path(&compressed)]);
    assert_eq!(entries(folder.path()), ["letters.txt"]);
    assert_refused(&run(&["compress", "--rm", "-k", path(&file)]), USAGE, "cannot be used with");
    // With `--out`, the input file is kept.
    let other = folder.path().join("other");
    report_line(&["compress", path(&file), "-o", path(&other)]);
    assert_eq!(entries(folder.path()), ["letters.txt", "other"]);
    let restored = run(&["decompress", "--stdout", path(&other)]);
    assert_eq!((restored.code, restored.stdout), (SUCCESS, text));
}

#[test]
fn stdin_round_trips_through_stdout() {
    let inputs = [&b""[..], b"x", b"\xff\xfe\0<|endoftext|>\r\n", TEXT.as_bytes(), &[7; 300]];
    for input in inputs {
        let compressed = run_bytes(&["compress"], input, &[]);
        let restored = run_bytes(&["decompress", "-"], stdout_of(&compressed), &[]);
        assert_eq!(stdout_of(&restored), input);
    }
}

#[test]
fn estimate_matches_the_result_and_writes_nothing() {
    let folder = temporary_folder();
    let file = folder.path().join("letters.txt");
    fs::write(&file, TEXT.repeat(20)).unwrap();
    let report = run(&["compress", "--estimate", "--json", path(&file)]).json();
    assert_eq!(report["output"], serde_json::Value::Null);
    assert_eq!(report["bytes"], 20 * TEXT.len());
    assert_eq!(entries(folder.path()), ["letters.txt"]);
    let estimate = run(&["compress", "--estimate", path(&file)]);
    let bits = report["bits_per_byte"].as_f64().unwrap();
    assert!((0.5..5.0).contains(&bits), "{report}");
    let (bytes, size) = (20 * TEXT.len(), &report["compressed_bytes"]);
    let bytes = format!("{},{:03}", bytes / 1000, bytes % 1000);
    assert_eq!(estimate.stdout, format!("{bits:.3} bits per byte: {bytes} bytes become {size}\n"));
    // The written file has the estimated size, and its report has the same values.
    let compressed = run(&["compress", "--json", path(&file)]).json();
    assert_eq!(compressed["output"], format!("{}.gpt2z", path(&file)));
    let size = fs::metadata(compressed["output"].as_str().unwrap()).unwrap().len();
    for key in ["bytes", "compressed_bytes", "bits_per_byte", "tokens", "model_bits"] {
        assert_eq!(compressed[key], report[key], "{key}");
    }
    assert_eq!(compressed["compressed_bytes"], size);
    assert_refused(&run(&["compress", "--estimate", "--keep", "x"]), USAGE, "--keep");
    assert_refused(&run(&["compress", "--json", "-"]), USAGE, "--json: standard output carries the data");
}

/// Returns this processor's instruction sets, read from an error message.
fn instruction_sets() -> Vec<String> {
    let rejected = program(&["score", "a"]).env("GPT2_INSTRUCTION_SET", "none").output().unwrap();
    let message = String::from_utf8(rejected.stderr).unwrap();
    let listed = message.split_once("processor supports (").unwrap().1.split_once("), found").unwrap().0;
    listed.split(", ").map(str::to_owned).collect()
}

#[test]
fn bytes_do_not_depend_on_threads_or_instruction_set() {
    let sets = instruction_sets();
    let folder = CheckpointFolder::tiny();
    let text = [TEXT.repeat(30).as_bytes(), "\u{e9}<p>".as_bytes(), b"\xff"].concat();
    for (model, dtype, kv_dtype) in
        [("built-in", "q8", "f16"), (path(folder.path()), "f16", "q8"), (path(folder.path()), "f32", "f32")]
    {
        let compress = |set: &str, threads: &str| {
            let arguments = [
                "compress",
                "--model",
                model,
                "--dtype",
                dtype,
                "--kv-dtype",
                kv_dtype,
                "--threads",
                threads,
            ];
            stdout_of(&run_bytes(&arguments, &text, &[("GPT2_INSTRUCTION_SET", set)])).to_vec()
        };
        let first = compress(&sets[0], "1");
        for (set, threads) in sets.iter().rev().zip(["7", "3", "2", "1"]) {
            assert_eq!(compress(set, threads), first, "{model} {dtype} {set} {threads}");
            let arguments = ["decompress", "--model", model, "--threads", threads];
            let restored = run_bytes(&arguments, &first, &[("GPT2_INSTRUCTION_SET", set)]);
            assert_eq!(stdout_of(&restored), text, "{model} {dtype} {set} {threads}");
        }
    }
}

#[test]
fn failed_decompress_leaves_no_file() {
    let folder = temporary_folder();
    let file = folder.path().join("letters.gpt2z");
    let good = stdout_of(&run_bytes(&["compress"], TEXT.as_bytes(), &[])).to_vec();
    let tiny = CheckpointFolder::tiny();
    let refused = |bytes: &[u8], more: &[&str], expected: &str| {
        fs::write(&file, bytes).unwrap();
        let result = run(&[&["decompress", path(&file)], more].concat());
        assert_refused(&result, FAILURE, expected);
        assert_eq!(result.stderr.lines().count(), 1, "{}", result.stderr);
        assert_eq!(entries(folder.path()), ["letters.gpt2z"]);
    };
    let flipped = |offset: usize, mask: u8| {
        let mut bytes = good.clone();
        bytes[offset] ^= mask;
        bytes
    };
    let model = ["--model", path(tiny.path())];
    refused(
        &good,
        &model,
        "compressed with a different model, `built-in`; decompress it with that model (--model)",
    );
    refused(&flipped(good.len() - 15, 1), &[], "the file is damaged");
    refused(&flipped(4, 1 ^ 2), &[], "the file has format version 2, but this program reads version 1");
    refused(&good[..good.len() - 1], &[], "the file is truncated");
    refused(TEXT.as_bytes(), &[], "not in gpt2z format");
    refused(b"", &[], "not in gpt2z format");
}

#[test]
fn unusable_paths_and_interrupts_are_reported() {
    let folder = temporary_folder();
    let missing = folder.path().join("missing");
    assert_refused(&run(&["compress", path(&missing)]), FAILURE, "missing");
    assert_refused(&run(&["compress", path(folder.path())]), FAILURE, "expected a file, found a folder");
    let file = folder.path().join("file");
    fs::write(&file, TEXT).unwrap();
    #[cfg(unix)]
    {
        let link = folder.path().join("link");
        std::os::unix::fs::symlink(&file, &link).unwrap();
        assert_refused(&run(&["compress", path(&link)]), FAILURE, "not a regular file");
        fs::remove_file(link).unwrap();
    }
    let unwritable = folder.path().join("no/where");
    assert_refused(&run(&["compress", path(&file), "-o", path(&unwritable)]), FAILURE, "no/where");
    assert_refused(
        &run(&["compress", path(&file), "--context", "1"]),
        USAGE,
        "--context: expected 2 to 512 tokens (the model's limit)",
    );
    assert_refused(&run(&["compress", path(&file), "-c", "-o", "x"]), USAGE, "cannot be used with");
    assert!(file.exists());
    // Ctrl-C ends the run before any output exists.
    assert_ctrl_c(&file);
}

#[cfg(unix)]
fn assert_ctrl_c(file: &Path) {
    fs::write(file, TEXT.repeat(5000)).unwrap();
    let child =
        program(&["compress", path(file)]).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    // The partial result appears next to the file once the model is loaded.
    wait_until("no partial result", || entries(file.parent().unwrap()).len() >= 2);
    let id = child.id().to_string();
    assert!(std::process::Command::new("kill").args(["-INT", &id]).status().unwrap().success());
    let result = crate::common::Run::from_output(&child.wait_with_output().unwrap());
    assert_eq!((result.code, result.stderr.as_str()), (130, "error: interrupted\n"));
    assert_eq!(entries(file.parent().unwrap()), ["file"]);
}

#[cfg(not(unix))]
fn assert_ctrl_c(_: &Path) {}

/// Checks that the partial result of a private file is private from the start.
#[cfg(unix)]
#[test]
fn partial_result_of_a_private_file_is_private() {
    use std::os::unix::fs::{MetadataExt, PermissionsExt};

    let folder = temporary_folder();
    let file = folder.path().join("secret.txt");
    fs::write(&file, TEXT.repeat(2_000)).unwrap();
    fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).unwrap();
    let mut child = program(&["compress", path(&file)]).stderr(Stdio::null()).spawn().unwrap();
    let mut mode = None;
    wait_until("no partial result", || {
        let partial = fs::read_dir(folder.path()).unwrap().find_map(|entry| {
            let entry = entry.unwrap();
            (entry.path() != file).then(|| entry.metadata().ok()).flatten()
        });
        mode = partial.filter(|metadata| metadata.is_file()).map(|metadata| metadata.mode() & 0o777);
        mode.is_some()
    });
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(mode, Some(0o600));
}
