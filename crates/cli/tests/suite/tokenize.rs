//! Tests of `gpt2 tokenize`: files, training on them, resuming after a kill, and rejected calls.

use std::fs;
use std::process::Stdio;

use candle_gpt2_testing::{CheckpointFolder, entries, files};
use serde_json::Value;

use crate::common::{
    FAILURE, SUCCESS, USAGE, assert_refused, path, program, run, run_with_input, wait_until,
};

/// Uses the tiny vocabulary, because GPT-2's own would need a download.
///
/// It has a token for "The", and splits a character of two bytes into two tokens.
#[test]
fn tokens_of_a_text_are_printed() {
    let tiny = CheckpointFolder::tiny();
    let model = path(tiny.path());
    let report = run(&["tokenize", "The é", "-m", model, "--json"]).json();
    let tokens = report["tokens"].as_array().unwrap();
    let bytes = |token: &Value| -> Vec<u8> { serde_json::from_value(token["bytes"].clone()).unwrap() };
    assert_eq!(tokens.iter().flat_map(bytes).collect::<Vec<u8>>(), "The é".as_bytes());
    let ids: Vec<String> = tokens.iter().map(|token| token["id"].to_string()).collect();
    let prompt = run(&["generate", "The é", "-m", model, "--greedy", "-n", "1", "--json"]).json();
    assert_eq!(
        prompt["prompt_ids"].to_string(),
        format!("[{}]", ids.join(",")),
        "the same tokens as in a prompt"
    );
    for (index, token) in tokens.iter().enumerate() {
        assert_eq!(token["index"], index);
        assert_eq!(token["text"], String::from_utf8_lossy(&bytes(token)).as_ref());
    }

    let table = run(&["tokenize", "The é", "-m", model]);
    assert_eq!((table.code, table.stderr.as_str()), (SUCCESS, ""));
    let lines: Vec<&str> = table.stdout.lines().collect();
    assert_eq!(lines.len(), tokens.len() + 1);
    for (line, id) in lines.iter().zip(&ids) {
        assert!(line.trim_start().starts_with(&format!("{id}  \"")), "{line}");
    }
    assert!(lines[tokens.len() - 1].ends_with(" a9"), "{}", table.stdout);
    assert_eq!(lines[tokens.len()], format!("{} tokens, 6 bytes of text", tokens.len()));
    assert_eq!(run_with_input(&["tokenize", "-m", model], "The é".as_bytes()).stdout, table.stdout);
    let tokenizer = tiny.file("tokenizer.json");
    assert_eq!(run(&["tokenize", "The é", "--tokenizer", path(&tokenizer)]).stdout, table.stdout);
    assert_eq!(
        run(&["tokenize", ""]).stdout,
        "0 tokens, 0 bytes of text\n",
        "the built-in model's tokenizer"
    );

    assert_refused(&run(&["tokenize", "a", "b"]), USAGE, "put the text in quotes, or use --out DIR");
    assert_refused(&run(&["tokenize", "a", "--shard-tokens", "5"]), USAGE, "--out <DIR>");
    let file = run(&["tokenize", path(&tokenizer), "-m", model]);
    assert_eq!(file.code, SUCCESS);
    assert!(file.stderr.contains("is treated as text, not as a file"), "{}", file.stderr);
}

#[test]
fn train_reads_the_written_token_files() {
    let tiny = CheckpointFolder::tiny();
    let (text, tokens, out) = (tiny.file("book.txt"), tiny.file("tokens"), tiny.file("trained"));
    fs::write(&text, "What say you, neighbour?\n".repeat(200)).unwrap();
    let model = path(tiny.path());
    let options = ["--model", model, "--out", path(&tokens), "--held-out", "0.2", "--format", "llm.c"];
    let report = run(&[&["tokenize", path(&text), "--json"], &options[..]].concat()).json();
    let tokens_of = |name: &str| usize::try_from(report[name].as_u64().unwrap()).unwrap();
    for (name, file) in [("training_tokens", "train_000000.bin"), ("held_out_tokens", "val_000000.bin")] {
        let bytes = fs::read(tokens.join(file)).unwrap();
        assert_eq!((bytes.len(), tokens_of(name) > 100), (1024 + 2 * tokens_of(name), true), "{file}");
        assert_eq!(bytes[..8], [20_240_520_i32.to_le_bytes(), 1_i32.to_le_bytes()].concat());
    }
    assert_eq!(report["documents"], 2);
    let arguments = ["train", "--data", path(&tokens), "--init", model, "--out", path(&out)];
    let report = run(&[&arguments[..], &["--steps", "1", "--batch-size", "2", "--json"]].concat()).json();
    assert_eq!(report["training_tokens"].as_u64(), Some(tokens_of("training_tokens") as u64));

    let again = run(&[&["tokenize", path(&text)], &options[..]].concat());
    assert_refused(
        &again,
        USAGE,
        "the folder is not empty; add --resume to continue the job in it, or choose another name",
    );
    let bytes = fs::read(tokens.join("train_000000.bin")).unwrap();
    fs::write(tokens.join("train_000000.bin"), &bytes[..bytes.len() - 2]).unwrap();
    let arguments = ["train", "--data", path(&tokens), "--init", model, "--out", path(&out), "--resume"];
    assert_refused(&run(&arguments), FAILURE, "train_000000.bin: truncated");
}

/// Kills the run at its start, and again after it has saved progress.
#[test]
fn killed_run_resumes_to_the_same_files() {
    let tiny = CheckpointFolder::tiny();
    let (text, whole, killed) = (tiny.file("book.txt"), tiny.file("whole"), tiny.file("killed"));
    let line =
        |line: u32| format!("Line {line}: the words {} and {}.\n", line % 91, line % 10007 * 7919 % 10007);
    fs::write(&text, (0..800_000).map(line).collect::<String>()).unwrap();
    assert!(fs::metadata(&text).unwrap().len() > 24 << 20);
    let call = |out, threads| {
        let model = path(tiny.path());
        let arguments = ["tokenize", path(&text), "--model", model, "--out", path(out), "--threads", threads];
        let mut command = program(&[&arguments[..], &["--resume", "--shard-tokens", "3000000"]].concat());
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        command
    };
    assert_eq!(call(&whole, "1").status().unwrap().code(), Some(SUCCESS));
    let read = || -> Option<u64> {
        let manifest: Value = serde_json::from_slice(&fs::read(killed.join("tokens.json")).ok()?).ok()?;
        assert_eq!(manifest["complete"], false);
        manifest["sources"][0]["read"].as_u64()
    };
    for minimum in [0, 1] {
        let mut process = call(&killed, "3").spawn().unwrap();
        wait_until("no text is read", || {
            assert!(process.try_wait().unwrap().is_none(), "the run finished before it was killed");
            read().is_some_and(|read| read >= minimum)
        });
        process.kill().unwrap();
        process.wait().unwrap();
        // A file with a final shard name is complete.
        let expected = files(&whole);
        for name in entries(&killed).into_iter().filter(|name| name.ends_with(".bin")) {
            let bytes = fs::read(killed.join(&name)).unwrap();
            assert!(expected.contains(&(name.clone(), bytes)), "{name}");
        }
        let (model, out) = (path(tiny.path()), tiny.file("trained"));
        let arguments = ["train", "--data", path(&killed), "--init", model, "--out", path(&out)];
        assert_refused(&run(&arguments), FAILURE, "its job was interrupted");
    }
    assert_eq!(call(&killed, "2").status().unwrap().code(), Some(SUCCESS));
    assert!(files(&killed) == files(&whole), "the files differ");
}

#[test]
fn invalid_calls_are_rejected() {
    let tiny = CheckpointFolder::tiny();
    let text = tiny.file("book.txt");
    fs::write(&text, "words\n").unwrap();
    let out = tiny.file("tokens");
    let tokenize = |more: &[&str]| run(&[&["tokenize", path(&text), "--out", path(&out)], more].concat());
    let model = ["--model", path(tiny.path())];
    assert_refused(&tokenize(&[]), USAGE, "--model <CHECKPOINT>");
    assert_refused(&tokenize(&[&model[..], &["--format", "npy"]].concat()), USAGE, "nanogpt or llm.c");
    assert_refused(&tokenize(&[&model[..], &["--dtype", "u8"]].concat()), USAGE, "u16 or u32");
    assert_refused(
        &tokenize(&[&model[..], &["--shard-tokens", "0"]].concat()),
        USAGE,
        "--shard-tokens: expected at least 1",
    );
    assert_refused(&tokenize(&["--tokenizer", path(&text)]), FAILURE, "book.txt");
    assert!(!out.exists());
}
