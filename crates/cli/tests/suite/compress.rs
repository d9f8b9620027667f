//! `gpt2 compress` and `gpt2 decompress`: gzip's manners, and every byte on any number of threads and any instruction set.

use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::{Output, Stdio};

use candle_gpt2_testing::{CheckpointFolder, entries, temporary_folder};

use crate::common::{FAILURE, SUCCESS, USAGE, assert_refused, path, program, run};

const TEXT: &str = "ROMEO:\nBut soft, what light through yonder window breaks?\n";

/// A run with bytes as input, in an environment.
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
    // One that refuses its arguments reads nothing.
    _ = writer.join().unwrap();
    output
}

fn written(output: &Output) -> &[u8] {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    &output.stdout
}

/// Runs a command that reports on one line, and returns the line.
fn line(arguments: &[&str]) -> String {
    let told = run(arguments);
    assert_eq!(
        (told.code, told.stderr.as_str(), told.stdout.lines().count()),
        (SUCCESS, "", 1),
        "{arguments:?}"
    );
    told.stdout
}

fn silent(arguments: &[&str]) {
    let told = run(arguments);
    assert_eq!((told.code, told.stdout.as_str(), told.stderr.as_str()), (SUCCESS, "", ""), "{arguments:?}");
}

#[test]
fn a_file_is_kept_or_removed_and_comes_back() {
    let folder = temporary_folder();
    let file = folder.path().join("letters.txt");
    let compressed = folder.path().join("letters.txt.gpt2z");
    let text = TEXT.repeat(4);
    fs::write(&file, &text).unwrap();
    let modified = fs::metadata(&file).unwrap().modified().unwrap();
    let saved = line(&["compress", path(&file)]);
    assert_eq!(entries(folder.path()), ["letters.txt", "letters.txt.gpt2z"]);
    let size = fs::metadata(&compressed).unwrap().len();
    assert!(size < text.len() as u64);
    let share = size as f64 * 100.0 / text.len() as f64;
    let expected = format!("{}: {size} bytes, {share:.1}% of {}, ", path(&compressed), text.len());
    assert!(saved.starts_with(&expected) && saved.ends_with(" bits per byte\n"), "{saved}");
    line(&["compress", "--force", "--rm", path(&file)]);
    assert_eq!(entries(folder.path()), ["letters.txt.gpt2z"]);
    assert_eq!(fs::metadata(&compressed).unwrap().modified().unwrap(), modified);
    // What has the suffix is not compressed again, and what has none not restored, without a name for the result.
    assert_refused(&run(&["compress", path(&compressed)]), FAILURE, "it ends in .gpt2z already");
    assert_refused(&run(&["decompress", "Cargo.toml"]), FAILURE, "it does not end in .gpt2z");
    silent(&["decompress", "-k", path(&compressed)]);
    assert_eq!(entries(folder.path()), ["letters.txt", "letters.txt.gpt2z"]);
    assert_eq!(fs::read_to_string(&file).unwrap(), text);
    // Nothing is overwritten without --force.
    for arguments in [["compress", path(&file)], ["decompress", path(&compressed)]] {
        assert_refused(&run(&arguments), FAILURE, "it exists already");
    }
    silent(&["decompress", "-f", "--rm", path(&compressed)]);
    assert_eq!(entries(folder.path()), ["letters.txt"]);
    assert_refused(&run(&["compress", "--rm", "-k", path(&file)]), USAGE, "cannot be used with");
    // With a name for the result the file stays.
    let other = folder.path().join("other");
    line(&["compress", path(&file), "-o", path(&other)]);
    assert_eq!(entries(folder.path()), ["letters.txt", "other"]);
    let told = run(&["decompress", "--stdout", path(&other)]);
    assert_eq!((told.code, told.stdout), (SUCCESS, text));
}

#[test]
fn standard_input_goes_to_standard_output() {
    let inputs = [&b""[..], b"x", b"\xff\xfe\0<|endoftext|>\r\n", TEXT.as_bytes(), &[7; 300]];
    for input in inputs {
        let compressed = run_bytes(&["compress"], input, &[]);
        let restored = run_bytes(&["decompress", "-"], written(&compressed), &[]);
        assert_eq!(written(&restored), input);
    }
}

#[test]
fn an_estimate_writes_and_removes_nothing() {
    let folder = temporary_folder();
    let file = folder.path().join("letters.txt");
    fs::write(&file, TEXT.repeat(20)).unwrap();
    let report = run(&["compress", "--estimate", "--json", path(&file)]).json();
    assert_eq!(report["output"], serde_json::Value::Null);
    assert_eq!(report["bytes"], 20 * TEXT.len());
    assert_eq!(entries(folder.path()), ["letters.txt"]);
    let told = run(&["compress", "--estimate", path(&file)]);
    let bits = report["bits_per_byte"].as_f64().unwrap();
    assert!((0.5..5.0).contains(&bits), "{report}");
    let (bytes, size) = (20 * TEXT.len(), &report["compressed_bytes"]);
    let bytes = format!("{},{:03}", bytes / 1000, bytes % 1000);
    assert_eq!(told.stdout, format!("{bits:.3} bits per byte: {bytes} bytes become {size}\n"));
    // The file that is written is as large as was estimated, and tells as much.
    let written = run(&["compress", "--json", path(&file)]).json();
    assert_eq!(written["output"], format!("{}.gpt2z", path(&file)));
    let size = fs::metadata(written["output"].as_str().unwrap()).unwrap().len();
    for key in ["bytes", "compressed_bytes", "bits_per_byte", "tokens", "model_bits"] {
        assert_eq!(written[key], report[key], "{key}");
    }
    assert_eq!(written["compressed_bytes"], size);
    assert_refused(&run(&["compress", "--estimate", "--keep", "x"]), USAGE, "--keep");
    assert_refused(&run(&["compress", "--json", "-"]), USAGE, "--json: standard output is taken");
}

/// The instruction sets of this processor.
fn instruction_sets() -> Vec<String> {
    let refusal = program(&["score", "a"]).env("GPT2_INSTRUCTION_SET", "none").output().unwrap();
    let told = String::from_utf8(refusal.stderr).unwrap();
    let listed = told.split_once("processor's, ").unwrap().1.split_once(", found").unwrap().0;
    listed.split(", ").map(str::to_owned).collect()
}

#[test]
fn other_threads_and_instructions_restore_every_byte() {
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
            written(&run_bytes(&arguments, &text, &[("GPT2_INSTRUCTION_SET", set)])).to_vec()
        };
        let first = compress(&sets[0], "1");
        for (set, threads) in sets.iter().rev().zip(["7", "3", "2", "1"]) {
            assert_eq!(compress(set, threads), first, "{model} {dtype} {set} {threads}");
            let arguments = ["decompress", "--model", model, "--threads", threads];
            let restored = run_bytes(&arguments, &first, &[("GPT2_INSTRUCTION_SET", set)]);
            assert_eq!(written(&restored), text, "{model} {dtype} {set} {threads}");
        }
    }
}

#[test]
fn what_cannot_be_restored_leaves_no_file() {
    let folder = temporary_folder();
    let file = folder.path().join("letters.gpt2z");
    let good = written(&run_bytes(&["compress"], TEXT.as_bytes(), &[])).to_vec();
    let tiny = CheckpointFolder::tiny();
    let refused = |bytes: &[u8], more: &[&str], expected: &str| {
        fs::write(&file, bytes).unwrap();
        let told = run(&[&["decompress", path(&file)], more].concat());
        assert_refused(&told, FAILURE, expected);
        assert_eq!(told.stderr.lines().count(), 1, "{}", told.stderr);
        assert_eq!(entries(folder.path()), ["letters.gpt2z"]);
    };
    let with = |place: usize, change: u8| {
        let mut bytes = good.clone();
        bytes[place] ^= change;
        bytes
    };
    let model = ["--model", path(tiny.path())];
    refused(
        &good,
        &model,
        "compressed with another model, called `built-in`; decompress it with that one (--model)",
    );
    refused(&with(good.len() - 15, 1), &[], "the file is damaged");
    refused(&with(4, 1 ^ 2), &[], "the file has version 2 of the format, and this program reads version 1");
    refused(&good[..good.len() - 1], &[], "the file is truncated");
    refused(TEXT.as_bytes(), &[], "not in gpt2z format");
    refused(b"", &[], "not in gpt2z format");
}

#[test]
fn places_that_cannot_be_read_or_written_are_told() {
    let folder = temporary_folder();
    let missing = folder.path().join("missing");
    assert_refused(&run(&["compress", path(&missing)]), FAILURE, "missing");
    assert_refused(&run(&["compress", path(folder.path())]), FAILURE, "a folder; name a file");
    let file = folder.path().join("file");
    fs::write(&file, TEXT).unwrap();
    #[cfg(unix)]
    {
        let link = folder.path().join("link");
        std::os::unix::fs::symlink(&file, &link).unwrap();
        assert_refused(&run(&["compress", path(&link)]), FAILURE, "not a regular file");
        fs::remove_file(link).unwrap();
    }
    let nowhere = folder.path().join("no/where");
    assert_refused(&run(&["compress", path(&file), "-o", path(&nowhere)]), FAILURE, "no/where");
    assert_refused(
        &run(&["compress", path(&file), "--context", "1"]),
        USAGE,
        "--context: expected from 2 to the model's 512 positions",
    );
    assert_refused(&run(&["compress", path(&file), "-c", "-o", "x"]), USAGE, "cannot be used with");
    assert!(file.exists());
    // Ctrl-C ends it before anything is there.
    assert_ctrl_c(&file);
}

#[cfg(unix)]
fn assert_ctrl_c(file: &Path) {
    fs::write(file, TEXT.repeat(5000)).unwrap();
    let child =
        program(&["compress", path(file)]).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    // The folder that the result is made in is there once the model is loaded.
    while entries(file.parent().unwrap()).len() < 2 {
        std::thread::yield_now();
    }
    let id = child.id().to_string();
    assert!(std::process::Command::new("kill").args(["-INT", &id]).status().unwrap().success());
    let told = crate::common::Run::of(&child.wait_with_output().unwrap());
    assert_eq!((told.code, told.stderr.as_str()), (130, "error: interrupted\n"));
    assert_eq!(entries(file.parent().unwrap()), ["file"]);
}

#[cfg(not(unix))]
fn assert_ctrl_c(_: &Path) {}

/// The partial result of a private file is private from the start.
#[cfg(unix)]
#[test]
fn no_other_user_reads_a_partial_result() {
    use std::os::unix::fs::{MetadataExt, PermissionsExt};
    use std::time::{Duration, Instant};

    let folder = temporary_folder();
    let file = folder.path().join("secret.txt");
    fs::write(&file, TEXT.repeat(2_000)).unwrap();
    fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).unwrap();
    let mut child = program(&["compress", path(&file)]).stderr(Stdio::null()).spawn().unwrap();
    let start = Instant::now();
    let mode = loop {
        let partial = fs::read_dir(folder.path()).unwrap().find_map(|entry| {
            let entry = entry.unwrap();
            (entry.path() != file).then(|| entry.metadata().ok()).flatten()
        });
        if let Some(metadata) = partial.filter(|metadata| metadata.is_file()) {
            break metadata.mode() & 0o777;
        }
        assert!(start.elapsed() < Duration::from_secs(60), "no partial result");
        std::thread::sleep(Duration::from_millis(2));
    };
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(mode, 0o600);
}
