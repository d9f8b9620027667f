//! Tests of the program as users call it: output, exit codes and messages.

use std::io::Read;
use std::path::{MAIN_SEPARATOR, Path};
use std::process::Stdio;

use candle_core::{DType, Device, Tensor};
use candle_gpt2_kernels::{DeviceError, open_cuda};
use candle_gpt2_testing::{CheckpointFolder, json_fixture};
use serde_json::{Value, json};

use crate::common::{FAILURE, Run, SUCCESS, USAGE, assert_refused, path, program, run, run_with_input};

fn greedy_case() -> Value {
    json_fixture("tiny_checkpoint_expected")["greedy"][0].clone()
}

#[test]
fn generate_matches_transformers() {
    let case = greedy_case();
    let folder = CheckpointFolder::tiny().with("prompt.txt", case["prompt"].as_str().unwrap());
    let (model, prompt) = (path(folder.path()), case["prompt"].as_str().unwrap());
    let flags = ["--model", model, "--greedy", "--max-new-tokens", "20"];
    let expected_text = format!("{}\n", case["text"].as_str().unwrap());

    let plain = run(&[&["generate", prompt][..], &flags].concat());
    assert_eq!(
        (plain.code, plain.stdout.as_str(), plain.stderr.as_str()),
        (SUCCESS, expected_text.as_str(), "")
    );

    let piped = run_with_input(&[&["generate"][..], &flags].concat(), prompt.as_bytes());
    assert_eq!(piped.stdout, expected_text);

    let prompt_file = folder.file("prompt.txt");
    let from_file = run(&[&["generate", "--prompt-file", path(&prompt_file)][..], &flags].concat());
    assert_eq!(from_file.stdout, expected_text);

    let report = run(&[&["generate", prompt, "--json"][..], &flags].concat()).json();
    for key in ["prompt_ids", "ids", "text"] {
        assert_eq!(report[key], case[key], "{key}");
    }
    assert_eq!(report["stop_reason"], "max_new_tokens");
    assert!(report["tokens_per_s"].as_f64().unwrap() > 0.0);
}

#[test]
fn generate_from_ids_needs_no_tokenizer() {
    let case = greedy_case();
    let folder =
        CheckpointFolder::tiny().without("tokenizer.json").without("vocab.json").without("merges.txt");
    let list = |key: &str| {
        let ids: Vec<u32> = serde_json::from_value(case[key].clone()).unwrap();
        ids.iter().map(u32::to_string).collect::<Vec<_>>()
    };
    let ids = list("prompt_ids").join(",");
    let flags =
        ["generate", "--ids", &ids, "--model", path(folder.path()), "--greedy", "--max-new-tokens", "20"];
    assert_eq!(run(&flags).stdout, format!("{}\n", list("ids").join(",")));
    let report = run(&[&flags[..], &["--json"]].concat()).json();
    assert_eq!((&report["ids"], &report["text"]), (&case["ids"], &Value::Null));

    let spaced = run(&["generate", "--ids", " 1, 2 ", "--model", path(folder.path()), "--greedy"]);
    assert_eq!(spaced.code, SUCCESS);
    let text = run(&["generate", "The", "--model", path(folder.path())]);
    assert_refused(&text, FAILURE, "or use another tokenizer (--tokenizer FILE, or --ids in place of text)");
    let gguf = folder.file("copy.gguf");
    let converted = run(&["convert", path(folder.path()), path(&gguf)]);
    assert_refused(&converted, FAILURE, "or use another tokenizer (--tokenizer FILE)\n");
    let verified = run(&["verify", "--model", path(folder.path())]);
    assert_eq!(verified.code, SUCCESS);
    assert!(
        verified.stdout.ends_with("sound, but without a tokenizer; text needs `--tokenizer FILE`\n"),
        "{}",
        verified.stdout
    );
    // An explicit tokenizer must exist.
    let empty = tempfile::tempdir().unwrap();
    let verified = run(&["verify", "--model", path(folder.path()), "--tokenizer", path(empty.path())]);
    assert_eq!(verified.code, FAILURE);
    assert!(verified.stdout.ends_with("not sound: 1 problem\n"), "{}", verified.stdout);
    let folder = folder.with("my.tokenizer.json", "{}");
    let text = run(&["generate", "The", "--model", path(folder.path())]);
    assert_refused(
        &text,
        FAILURE,
        "my.tokenizer.json may be one; pass it as the tokenizer (--tokenizer FILE, or --ids",
    );
    let other = CheckpointFolder::tiny();
    let tokenizer = other.file("tokenizer.json");
    let named = run(&["generate", "The", "--model", path(folder.path()), "--tokenizer", path(&tokenizer)]);
    assert_eq!(named.code, SUCCESS, "{}", named.stderr);
    let verified = run(&["verify", "--model", path(folder.path()), "--tokenizer", path(&tokenizer)]);
    assert!(
        verified.stdout.ends_with("sound: every tensor is present, with the right shape and finite values\n")
    );
}

#[test]
fn quantized_files_run_in_their_own_type_or_with_a_note() {
    let gguf = candle_gpt2_testing::fixture_path("formats/gguf");
    let score = |file: &str, more: &[&str]| {
        run(&[&["score", "--ids", "1,2", "--model", path(&gguf.join(file))][..], more].concat())
    };
    let quantized = score("q4_k.gguf", &[]);
    assert_eq!(
        (quantized.code, quantized.stderr.as_str()),
        (
            SUCCESS,
            "note: the quantized weights are expanded to f32; --dtype q8 is faster and needs about a quarter of the memory\n"
        )
    );
    for (file, more) in
        [("q4_k.gguf", &["--dtype", "q8"][..]), ("q8_0.gguf", &["--dtype", "f32"]), ("f16.gguf", &[])]
    {
        assert_eq!(score(file, more).stderr, "", "{file} {more:?}");
    }
    for (file, dtype) in [("q8_0.gguf", "q8"), ("q5_0.gguf", "q5"), ("q4_0.gguf", "q4")] {
        let (default, chosen) = (score(file, &[]), score(file, &["--dtype", dtype]));
        assert_eq!((default.stderr.as_str(), &default.stdout), ("", &chosen.stdout), "{file}");
        assert_ne!(default.stdout, score(file, &["--dtype", "f32"]).stdout, "{file}");
    }
}

#[test]
fn empty_prompt_starts_from_bos() {
    let folder = CheckpointFolder::tiny();
    let report =
        run_with_input(&["generate", "--model", path(folder.path()), "--greedy", "--json"], b"").json();
    assert_eq!(report["prompt_ids"], json!([0]));
    let folder = folder.with_config(json!({"bos_token_id": 299}));
    let report = run(&["generate", "", "--model", path(folder.path()), "--greedy", "--json"]).json();
    assert_eq!(report["prompt_ids"], json!([299]));
    let config = std::fs::read_to_string(folder.file("config.json")).unwrap();
    let folder = folder.with("config.json", config.replace("\"bos_token_id\":299", "\"bos_token_id\":null"));
    let none = run(&["generate", "", "--model", path(folder.path())]);
    assert_refused(&none, USAGE, "the configuration has no valid `bos_token_id` to start from");
}

/// Checks that generation_config.json overrides `eos_token_id` in config.json, as in transformers.
#[test]
fn generation_ends_at_the_eos_token() {
    let case = greedy_case();
    let (second, prompt) = (case["ids"][1].clone(), case["prompt"].as_str().unwrap());
    let by_generation_config = CheckpointFolder::tiny()
        .with("generation_config.json", json!({"eos_token_id": [299, second]}).to_string());
    let by_config = CheckpointFolder::tiny()
        .without("generation_config.json")
        .with_config(json!({"eos_token_id": [second]}));
    for folder in [by_generation_config, by_config] {
        let report = run(&["generate", prompt, "--model", path(folder.path()), "--greedy", "--json"]).json();
        assert_eq!(report["stop_reason"], "eos");
        assert_eq!(report["ids"], json!([case["ids"][0], second]));
    }
    let broken = CheckpointFolder::tiny().with("generation_config.json", "{\"eos_token_id\": \"x\"}");
    let run = run(&["generate", prompt, "--model", path(broken.path())]);
    assert_refused(
        &run,
        FAILURE,
        "generation_config.json: `eos_token_id`: invalid type: string \"x\", expected u32",
    );
}

#[test]
fn score_prints_each_token_and_the_loss() {
    let folder = CheckpointFolder::tiny();
    let case = json_fixture("tiny_checkpoint_expected")["score_strided"][1].clone();
    let (model, text) = (path(folder.path()), case["text"].as_str().unwrap());
    let score = |more: &[&str]| run(&[&["score", text, "--model", model][..], more].concat());
    let report = score(&["--stride", "24", "--json"]).json();
    assert_eq!((&report["ids"], &report["logprobs"][0]), (&case["ids"], &Value::Null));
    assert_eq!(score(&["--json"]).json(), report, "the default stride is half of the context");
    let human = score(&[]);
    assert!(human.stdout.lines().last().unwrap().starts_with("loss "), "{}", human.stdout);
    for (ids, stride, expected) in [
        ("1", "24", "scoring needs at least 2"),
        ("1,2", "49", "stride: expected from 1 to"),
        ("1,2", "0", "stride: expected from 1 to"),
    ] {
        let refused = run(&["score", "--ids", ids, "--model", model, "--stride", stride]);
        assert_refused(&refused, USAGE, expected);
    }
}

#[test]
fn inspect_describes_checkpoints_and_presets() {
    let inspect = |arguments: &[&str]| run(&[&["inspect"], arguments].concat());
    let folder = CheckpointFolder::tiny();
    let tiny = ["--model", path(folder.path())];
    let report = inspect(&[&tiny[..], &["--json"]].concat()).json();
    assert_eq!((&report["format"], &report["prefix"]), (&json!("safetensors"), &json!("transformer.")));
    let expected = json!({
        "name": "transformer.h.0.attn.c_attn.weight", "shape": [28, 84], "dtype": "F32", "role": "parameter",
    });
    assert!(report["tensors"].as_array().unwrap().contains(&expected));
    assert_eq!(inspect(&[tiny[1], "--json"]).json(), report, "the model as an argument");
    assert_eq!(inspect(&[]).stdout, inspect(&["built-in"]).stdout);
    let human = inspect(&tiny).stdout;
    assert!(human.contains("transformer.h.2.mlp.c_proj.weight"), "{human}");
    let measured = inspect(&[&tiny[..], &["--tensors", "--json"]].concat()).json();
    assert_eq!(measured["tensors"][0]["statistics"]["nan"], 0);

    let preset = ["--preset", "gpt2", "--ledger"];
    let report = inspect(&[&preset[..2], &["--json"]].concat()).json();
    assert_eq!(
        (&report["parameters"]["unique"], &report["ledger"][3]["count"]),
        (&json!(124_439_808), &json!(124_439_808))
    );
    let ledger = inspect(&preset).stdout;
    assert!(ledger.contains("163,037,184") && ledger.contains("117M"), "{ledger}");
    assert_refused(&inspect(&["--preset", "gpt5"]), USAGE, "the presets are distilgpt2, gpt2,");

    let formats = candle_gpt2_testing::fixture_path("formats");
    let report = inspect(&["--model", path(&formats.join("nanogpt")), "--json"]).json();
    assert_eq!(
        (&report["format"], &report["orientation"]),
        (&json!("pytorch (zip)"), &json!("Linear (out, in)"))
    );
    let rules = report["rules"].as_array().unwrap();
    assert!(rules.contains(&json!("13 biases are not stored and are set to zero")), "{rules:?}");
    let padded = formats.join("llmc/gpt2.bin");
    let human = inspect(&["--model", path(&padded)]).stdout;
    assert!(human.contains("the last 84 rows of the token embedding are padding"), "{human}");
    let same = inspect(&["--model", path(&padded), "--diff", path(&padded), "--json"]).json();
    assert_eq!(same["equal"], true);
}

#[test]
fn verify_exit_code_reports_soundness() {
    let sound = CheckpointFolder::tiny();
    let run_on = |folder: &CheckpointFolder, json: bool| {
        let flags: &[&str] = if json { &["--json"] } else { &[] };
        run(&[&["verify", "--model", path(folder.path())][..], flags].concat())
    };
    let report = run_on(&sound, true).json();
    assert_eq!(
        (&report["sound"], &report["problems"], &report["notes"]),
        (&json!(true), &json!([]), &json!([]))
    );
    assert!(report["cache_difference"].as_f64().unwrap() < 1e-4);
    assert!(run_on(&sound, false).stdout.lines().last().unwrap().starts_with("sound:"));

    let damaged = CheckpointFolder::tiny().with_tensors(|tensors| {
        tensors.remove("transformer.h.1.ln_2.bias");
        let nan = Tensor::from_vec(vec![f32::NAN; 28], 28, &Device::Cpu).unwrap();
        tensors.insert("transformer.ln_f.weight".into(), nan);
    });
    let human = run_on(&damaged, false);
    assert_eq!(human.code, FAILURE);
    assert!(
        human.stdout.contains("tensor `transformer.h.1.ln_2.bias` is missing: expected shape (28)"),
        "{}",
        human.stdout
    );
    assert!(
        human.stdout.contains("tensor `transformer.ln_f.weight`: 28 of 28 values are NaN"),
        "{}",
        human.stdout
    );
    assert!(human.stdout.ends_with("not sound: 2 problems\n"), "{}", human.stdout);
    let report: Value = serde_json::from_str(&run_on(&damaged, true).stdout).unwrap();
    assert_eq!((&report["sound"], report["problems"].as_array().unwrap().len()), (&json!(false), 2));
    let formats = candle_gpt2_testing::fixture_path("formats");
    let (rounded, exact) = (formats.join("llmc/gpt2_bf16.bin"), formats.join("safetensors-shards"));
    let against = ["verify", "--model", path(&rounded), "--against", path(&exact)];
    let differing = run(&against);
    assert_eq!(differing.code, FAILURE);
    assert!(differing.stdout.contains("; --tolerance is 1e-3\n"), "{}", differing.stdout);
    assert_eq!(run(&[&against[..], &["--tolerance", "0.5"]].concat()).code, SUCCESS);
    let (f32, q8) = (formats.join("gguf/f32.gguf"), formats.join("gguf/q8_0.gguf"));
    let quantized = run(&["verify", "--model", path(&q8), "--against", path(&f32)]).stdout;
    assert!(
        quantized.contains("--tolerance is 1e-3; a few tenths are normal for q8_0, more for fewer bits\n"),
        "{quantized}"
    );
    let absent = run(&["verify", "--model", "/no/such/folder", "--json"]);
    assert_eq!(absent.code, FAILURE);
    assert!(absent.stdout.contains("no such file or folder"), "{}", absent.stdout);
}

#[test]
fn temperature_0_is_greedy_and_lists_ignored_options() {
    let folder = CheckpointFolder::tiny();
    let generate = |arguments: &[&str]| {
        run(&[&["generate", "the", "--model", path(folder.path()), "--max-new-tokens", "12"][..], arguments]
            .concat())
    };
    let greedy = generate(&["--greedy"]);
    for (arguments, note) in [
        (&["--temperature", "0"][..], None),
        (&["--temperature", "0", "--greedy"], None),
        (
            &["--temperature", "0", "--top-k", "3"],
            Some("--temperature 0 selects greedy decoding, so --top-k has no effect"),
        ),
        (
            &["--temperature", "0.0", "--top-p", "0.5", "--seed", "1"],
            Some("--temperature 0 selects greedy decoding, so --top-p, --seed have no effect"),
        ),
    ] {
        let found = generate(arguments);
        assert_eq!(
            (found.code, found.stdout.as_str()),
            (SUCCESS, greedy.stdout.as_str()),
            "{}",
            found.stderr
        );
        assert_eq!(found.stderr.contains("no effect"), note.is_some(), "{}", found.stderr);
        assert!(found.stderr.contains(note.unwrap_or_default()), "{}", found.stderr);
    }
}

#[test]
fn invalid_arguments_exit_2() {
    let folder = CheckpointFolder::tiny();
    let model = path(folder.path());
    let refuse = |arguments: &[&str], expected: &str| {
        assert_refused(&run(&[&["generate", "--model", model][..], arguments].concat()), USAGE, expected);
    };
    refuse(&["x", "--temperature", "-0.5"], "--temperature: expected at least 0 (0 selects greedy decoding)");
    refuse(&["x", "--temperature", "warm"], "--temperature");
    refuse(&["x", "--top-p", "1.5"], "--top-p: expected from 0 to 1, found 1.5");
    refuse(&["x", "--top-k", "-3"], "--top-k");
    refuse(&["x", "--max-new-tokens", "-1"], "--max-new-tokens");
    refuse(&["x", "--seed", "a"], "--seed");
    refuse(&["x", "--ids", "1"], "cannot be used with");
    refuse(&["--ids", "1,,2"], "is not a token id");
    refuse(&["--ids", "5,300"], "token id 300 (token 2 of the input) is outside the vocabulary of 300");
    refuse(&["--ids", &["7"; 49].join(",")], "the prompt has 49 tokens, but the model's context has 48");
    refuse(&["x", "--device", "tpu"], "expected auto, cpu, cuda, cuda:N or metal");
    refuse(&["x", "--device", "cuda:x"], "expected auto, cpu, cuda, cuda:N or metal");
    refuse(&["x", "--dtype", "q2"], "expected one of f32, f16, q8, q6, q5, q4, bf16");
    refuse(
        &["x", "--device", "cpu", "--dtype", "bf16"],
        "bf16 weights are not supported on the CPU; use f32, f16, q8, q6, q5 or q4",
    );
    refuse(
        &["x", "--device", "cpu", "--tf32"],
        "TF32 requires an NVIDIA GPU, but the device is cpu; disable TF32 (--tf32)",
    );
    refuse(&["x", "--colour"], "--colour");
    for command in ["inspect", "verify", "bench"] {
        let twice = run(&[command, model, "--model", model]);
        assert_refused(&twice, USAGE, "'[MODEL]' cannot be used with '--model <MODEL>'");
    }
    assert_refused(&run(&["inspect", model, "--preset", "gpt2"]), USAGE, "cannot be used with");
    assert_refused(
        &run(&["verify", model, "--dtype", "q8"]),
        USAGE,
        "--dtype needs --fingerprint or --published",
    );
    for tolerance in ["nan", "-1", "inf"] {
        let verify = run(&["verify", "--model", model, "--against", model, "--tolerance", tolerance]);
        assert_refused(&verify, USAGE, "expected a number of at least 0");
    }
    let integers = run(&["convert", model, path(&folder.file("out")), "--dtype", "q8_0"]);
    assert_refused(&integers, USAGE, "--dtype q8_0: a Hugging Face folder can only store f32, f16 or bf16");
    assert_refused(&run(&["dance"]), USAGE, "unrecognized subcommand");
    if !candle_core::utils::cuda_is_available() {
        refuse(&["x", "--device", "cuda"], "built without CUDA; build it with --features cuda");
    }
}

#[test]
fn failed_runs_exit_1() {
    let refuse = |folder: &CheckpointFolder, expected: &str| {
        assert_refused(&run(&["generate", "x", "--model", path(folder.path())]), FAILURE, expected);
    };
    assert_refused(&run(&["generate", "x", "--model", "/no/such/folder"]), FAILURE, "no such file or folder");
    assert_refused(&run(&["generate", "x", "--model", "typo.gguf"]), FAILURE, "no such file or folder");
    refuse(&CheckpointFolder::tiny().with("model.safetensors", "<html></html>"), "an HTML or XML page");
    let nan = CheckpointFolder::tiny().with_tensors(|tensors| {
        let nan = Tensor::from_vec(vec![f32::NAN; 28], 28, &Device::Cpu).unwrap();
        tensors.insert("transformer.ln_f.weight".into(), nan);
    });
    let run_on_nan = run(&["generate", "x", "--model", path(nan.path())]);
    assert_eq!(run_on_nan.code, FAILURE);
    let expected = "the model's logits are not finite; verify its weights, and use an f32 KV cache (`gpt2 verify`, \
                --kv-dtype f32)";
    assert!(run_on_nan.stderr.contains(expected), "{}", run_on_nan.stderr);
    for view in [&["lens"][..], &["attention"], &["heads"], &["saliency"], &["neurons", "--neuron", "0.0"]] {
        let look = run(&[&["look"], view, &["x", "--json", "--model", path(nan.path())]].concat());
        assert_refused(&look, FAILURE, "the model's logits are not finite");
    }

    let folder = CheckpointFolder::tiny();
    let invalid = run_with_input(&["generate", "--model", path(folder.path())], b"caf\xe9");
    assert_refused(&invalid, FAILURE, "standard input: not valid UTF-8 at byte 3; convert the text to UTF-8");
    let device = run(&["generate", "--prompt-file", "/dev/zero", "--model", path(folder.path())]);
    assert_refused(&device, FAILURE, "/dev/zero: larger than 268435456 bytes");
    let missing = run(&["generate", "--prompt-file", "/no/such/file", "--model", path(folder.path())]);
    assert_refused(&missing, FAILURE, "/no/such/file");
    if let Err(DeviceError::NoDriver { .. }) = open_cuda(0) {
        for device in ["cuda", "cuda:3"] {
            let no_driver = run(&["generate", "x", "--model", path(folder.path()), "--device", device]);
            assert_refused(&no_driver, FAILURE, "no NVIDIA driver with a GPU was found");
        }
    }
}

#[test]
fn closed_pipe_ends_the_program_quietly() {
    let folder = CheckpointFolder::tiny();
    let mut child = program(&["inspect", "--preset", "gpt2-xl"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the program runs");
    let mut first = [0u8; 10];
    child.stdout.take().expect("a pipe").read_exact(&mut first).expect("some output");
    let output = child.wait_with_output().expect("an exit status");
    assert_eq!((output.status.code(), output.stderr.as_slice()), (Some(SUCCESS), &b""[..]));

    // The exit code reports the verdict even if the output is not read.
    let unsound = CheckpointFolder::tiny().with_config(json!({"n_layer": 1000}));
    let mut child = program(&["verify", "--model", path(unsound.path())])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the program runs");
    drop(child.stdout.take());
    let output = child.wait_with_output().expect("an exit status");
    assert_eq!((output.status.code(), output.stderr.as_slice()), (Some(FAILURE), &b""[..]));

    let mut child =
        program(&["generate", "--ids", "1", "--model", path(folder.path()), "--max-new-tokens", "40"])
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the program runs");
    drop(child.stdout.take());
    let output = child.wait_with_output().expect("an exit status");
    assert_eq!((output.status.code(), output.stderr.as_slice()), (Some(SUCCESS), &b""[..]));
}

/// Checks that every command fails if its output cannot be written.
///
/// A closed standard output becomes /dev/null before `main`.
#[cfg(target_os = "linux")]
#[test]
fn unwritable_stdout_is_a_failure() {
    let folder = CheckpointFolder::tiny();
    let model = path(folder.path());
    let run_redirected = |arguments: &[&str], redirection: &str| {
        let mut shell = std::process::Command::new("sh");
        shell
            .args(["-c", &format!("\"$@\" {redirection}"), "sh", env!("CARGO_BIN_EXE_gpt2")])
            .args(arguments);
        let output = shell.stdin(Stdio::null()).output().unwrap();
        (output.status.code(), String::from_utf8(output.stderr).unwrap())
    };
    let commands: [&[&str]; 12] = [
        &[],
        &["--help"],
        &["--version"],
        &["help", "generate"],
        &["generate", "-h"],
        &["generate", "The", "--model", model, "--max-new-tokens", "2"],
        &["generate", "The", "--model", model, "--max-new-tokens", "2", "--json"],
        &["tokenize", "The"],
        &["inspect", "--preset", "gpt2"],
        &["verify", "--model", model],
        &["completions", "bash"],
        &["man"],
    ];
    for command in commands {
        let (code, error) = run_redirected(command, "> /dev/full");
        assert_eq!(code, Some(FAILURE), "{command:?}: {error}");
        assert_eq!(
            error, "error: cannot write to standard output: No space left on device (os error 28)\n",
            "{command:?}"
        );
        let (code, error) = run_redirected(command, ">&-");
        assert_eq!(code, Some(FAILURE), "{command:?}: {error}");
        assert_eq!(
            error, "error: standard output is closed: redirect it to a file, a program or /dev/null\n",
            "{command:?}"
        );
        for discarded in ["> /dev/null", "1<> /dev/null", "<&- > /dev/null"] {
            assert_eq!(
                run_redirected(command, discarded),
                (Some(SUCCESS), String::new()),
                "{command:?} {discarded}"
            );
        }
    }
    let (code, error) = run_redirected(&["generate", "--colour"], ">&-");
    assert!(code == Some(USAGE) && error.contains("--colour"), "{error}");
}

/// Checks that short forms of options do not change the output.
#[test]
fn short_options_give_the_same_output() {
    let folder = CheckpointFolder::tiny();
    let model = path(folder.path());
    let long = ["generate", "The dog", "--model", model, "--max-new-tokens", "8", "--seed", "5"];
    let expected = run(&long).stdout;
    assert!(!expected.trim().is_empty());
    for (at, short) in [(2, "-m"), (4, "-n"), (6, "-s")] {
        let mut arguments = long;
        arguments[at] = short;
        assert_eq!(run(&arguments).stdout, expected, "{short}");
    }
    for prompt in ["-p", "--prompt"] {
        let arguments = [&["generate", prompt], &long[1..]].concat();
        assert_eq!(run(&arguments).stdout, expected, "{prompt}");
        assert_refused(&run(&["generate", "x", prompt, "y"]), USAGE, "cannot be used with");
        assert_refused(&run(&["generate", "--ids", "1", prompt, "y"]), USAGE, "cannot be used with");
    }
    let heads = |arguments: &[&str]| {
        run(&[&["look", "heads", "--model", model, "--length", "5"], arguments].concat()).stdout
    };
    assert_eq!(heads(&["-s", "7"]), heads(&["--seed", "7"]));
    assert_ne!(heads(&["-s", "7"]), heads(&["-s", "8"]));
    assert_eq!(heads(&["-p", "The dog"]), heads(&["The dog"]), "a prompt, not random tokens");
}

#[test]
fn help_has_examples() {
    for command in [
        "generate",
        "score",
        "compress",
        "decompress",
        "inspect",
        "convert",
        "verify",
        "doctor",
        "completions",
        "man",
    ] {
        let help = run(&[command, "--help"]);
        assert_eq!(help.code, SUCCESS);
        assert!(help.stdout.contains("Examples:"), "{command}");
    }
    assert!(run(&["--version"]).stdout.starts_with("gpt2 "));
}

#[test]
fn short_help_fits_a_screen() {
    let names = |words: &[&str]| -> Vec<String> {
        let help = run(&[words, &["--help"]].concat()).stdout;
        let list = help.split("Commands:\n").nth(1).unwrap_or_default().split("\n\n").next().unwrap();
        let names = list
            .lines()
            .filter(|line| !line.starts_with("   "))
            .filter_map(|line| line.split_whitespace().next());
        names.filter(|name| *name != "help").map(str::to_owned).collect()
    };
    let commands = names(&[]);
    assert!(commands.len() > 12, "{commands:?}");
    let all_commands = commands.iter().flat_map(|command| {
        let subcommands = names(&[command]).into_iter().map(|name| vec![command.clone(), name]);
        subcommands.chain([vec![command.clone()]]).collect::<Vec<_>>()
    });
    for command in all_commands {
        let mut words: Vec<&str> = command.iter().map(String::as_str).collect();
        words.push("-h");
        let help = run(&words).stdout;
        assert!(help.contains("Usage: ") && help.lines().count() <= 40, "{command:?}: {help}");
    }
}

#[test]
fn shells_complete_values_and_cached_models() {
    let cache = tempfile::tempdir().unwrap();
    let snapshot = cache.path().join("models--someone--tiny/snapshots/1");
    std::fs::create_dir_all(&snapshot).unwrap();
    std::fs::write(snapshot.join("config.json"), r#"{"model_type": "gpt2"}"#).unwrap();
    let completed_by = |shell: &str, words: &[&str]| {
        let mut program = program(&[&["--", "gpt2"], words].concat());
        let output = program.env("GPT2_COMPLETE", shell).env("HF_HUB_CACHE", cache.path()).output().unwrap();
        String::from_utf8(output.stdout).unwrap()
    };
    let completed = |words: &[&str]| completed_by("fish", words);
    assert_eq!(completed(&["generate", "--dtype", "q"]), "q8\nq6\nq5\nq4\n");
    assert_eq!(completed(&["generate", "--kv-dtype", "f"]), "f32\nf16\n");
    assert_eq!(completed(&["verify", "--model", "some"]), "someone/tiny\n");
    assert_eq!(completed(&["verify", "--model", "buil"]), "built-in\n");
    assert!(completed(&["gen"]).starts_with("generate"));
    assert!(completed(&["generate", "--max-n"]).starts_with("--max-new-tokens"));
    assert!(completed(&["look", "att"]).starts_with("attention"));
    let in_nushell: Value =
        serde_json::from_str(&completed_by("nushell", &["generate", "--max-new"])).unwrap();
    let [candidate] = in_nushell.as_array().unwrap().as_slice() else { panic!("{in_nushell}") };
    assert_eq!(candidate["value"], "--max-new-tokens");
    assert!(candidate["description"].as_str().unwrap().starts_with("Maximum number of tokens"));
}

/// Checks that panics in the tokenizers library become errors about the tokenizer file.
#[test]
fn tokenizer_panics_become_errors() {
    let tiny = std::fs::read(CheckpointFolder::tiny().file("tokenizer.json")).unwrap();
    let tiny: Value = serde_json::from_slice(&tiny).unwrap();
    let template = json!({
        "type": "TemplateProcessing", "pair": [], "special_tokens": {},
        "single": [{"SpecialToken": {"id": "[X]", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    });
    let precompiled = json!({"type": "Precompiled", "precompiled_charsmap": "/////w=="});
    for (key, value) in [("post_processor", template), ("normalizer", precompiled)] {
        let mut tokenizer = tiny.clone();
        tokenizer[key] = value;
        let folder = CheckpointFolder::tiny().with("tokenizer.json", tokenizer.to_string());
        let run = run(&["generate", "The", "--model", path(folder.path())]);
        assert_refused(&run, FAILURE, "token");
        assert!(!run.stderr.contains("internal error"), "{}", run.stderr);
    }
}

#[test]
fn tensor_names_cannot_control_the_terminal() {
    let folder = CheckpointFolder::tiny().with_tensors(|tensors| {
        let evil = Tensor::zeros(2, DType::F32, &Device::Cpu).unwrap();
        tensors.insert("\u{1b}[31mevil\u{7}".into(), evil);
    });
    for command in ["inspect", "verify"] {
        let run = run(&[command, "--model", path(folder.path())]);
        assert!(run.stdout.contains("[31mevil") && !run.stdout.contains('\u{1b}'), "{command}");
    }
}

#[test]
fn convert_writes_folders_and_gguf_files() {
    let (source, folder) =
        (candle_gpt2_testing::fixture_path("formats/tensorflow"), tempfile::tempdir().unwrap());
    let (copy, gguf) = (folder.path().join("copy"), folder.path().join("copy.gguf"));
    let report = run(&["convert", path(&source), path(&copy), "--dtype", "f16", "--json"]).json();
    let bytes = std::fs::metadata(copy.join("model.safetensors")).unwrap().len();
    assert_eq!((&report["format"], &report["dtype"]), (&json!("safetensors"), &json!("f16")));
    assert_eq!(report["bytes"], bytes);
    let to_gguf = run(&["convert", path(&source), path(&gguf), "--dtype", "q8_0"]);
    assert!(to_gguf.stdout.starts_with("wrote "), "{}", to_gguf.stderr);
    let text = |model: &Path| {
        run(&["generate", "The first", "--model", path(model), "--greedy", "--max-new-tokens", "3", "--json"])
            .json()
    };
    assert_eq!(text(&copy)["prompt_ids"], text(&source)["prompt_ids"]);
    assert_eq!(text(&gguf)["prompt_ids"], text(&source)["prompt_ids"]);

    let again = run(&["convert", path(&source), path(&copy)]);
    assert_refused(&again, FAILURE, "already exists; remove it, or choose another name");
    assert_refused(
        &run(&["convert", path(&source), "x", "--dtype", "q2"]),
        USAGE,
        "expected one of f32, f16, bf16",
    );
    assert_refused(&run(&["convert", path(&source)]), USAGE, "<OUT>");
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 2, "nothing else is left");
}

/// Checks that every command that opens a checkpoint accepts `--n-head`.
///
/// The fixture `book` does not record it. Without `--n-head`, the number is guessed with a note.
#[test]
fn number_of_heads_can_be_specified() {
    let book = candle_gpt2_testing::fixture_path("formats/book");
    let score = ["score", "--ids", "1,2,3", "--json", "--model", path(&book)];
    let guessed = run(&score);
    assert!(
        guessed.stderr.contains(
            "note: the number of attention heads is not recorded; assuming 1 with head dimension 64"
        ),
        "{}",
        guessed.stderr
    );
    let named = run(&[&score[..], &["--n-head", "4"]].concat());
    assert_eq!(named.stderr, "");
    assert_ne!(named.json()["loss"], guessed.json()["loss"], "another model");
    let folder = tempfile::tempdir().unwrap();
    let copy = folder.path().join("copy");
    let converted = run(&["convert", path(&book), path(&copy), "--n-head", "4", "--threads", "1"]);
    assert_eq!((converted.code, converted.stderr.as_str()), (SUCCESS, ""));
    let copy_score = run(&["score", "--ids", "1,2,3", "--json", "--model", path(&copy)]).json();
    let close = |a: &Value, b: &Value| (a.as_f64().unwrap() - b.as_f64().unwrap()).abs() < 1e-6;
    assert!(close(&copy_score["loss"], &named.json()["loss"]), "{copy_score}");
    for command in ["inspect", "verify"] {
        let found = run(&[command, "--model", path(&book), "--n-head", "4", "--threads", "2", "--json"]);
        assert_eq!((found.code, found.stderr.as_str()), (SUCCESS, ""), "{command}");
    }
    let inspected = run(&["inspect", "--model", path(&book), "--n-head", "4", "--json"]).json();
    assert_eq!(inspected["config"]["n_head"], 4);
    let other = run(&["inspect", "--model", path(&copy), "--n-head", "2"]);
    assert_refused(&other, FAILURE, "4 attention heads, but 2 were requested; omit the number (--n-head)");
    let built_in = run(&["inspect", "--model", "built-in", "--n-head", "2"]);
    assert_refused(
        &built_in,
        FAILURE,
        &format!(
            "built-in{MAIN_SEPARATOR}model.gguf: the configuration has 4 attention heads, but 2 were requested"
        ),
    );
    assert_refused(
        &run(&["inspect", "--preset", "gpt2", "--n-head", "3"]),
        USAGE,
        "--n-head applies only to checkpoints",
    );
}

/// Checks that weights larger than memory are rejected before they are read.
///
/// The file has llm.c's format and GPT-3's sizes. Only its header is written.
#[cfg(target_os = "linux")]
#[test]
fn weights_larger_than_memory_are_rejected_before_reading() {
    let (positions, tokens, layers, heads, width, rows) = (2048_u64, 50_257, 96, 96, 12_288_u64, 50_304);
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("huge.bin");
    let mut header = vec![20_240_326_u32, 3];
    header.extend([positions, tokens, layers, heads, width, rows].map(|size| u32::try_from(size).unwrap()));
    header.resize(256, 0);
    let bytes: Vec<u8> = header.into_iter().flat_map(u32::to_le_bytes).collect();
    std::fs::write(&file, bytes).unwrap();
    let parameters = (rows + positions) * width + layers * (12 * width * width + 13 * width) + 2 * width;
    let sparse = std::fs::OpenOptions::new().write(true).open(&file).unwrap();
    sparse.set_len(1024 + 4 * parameters).unwrap();
    let refused = run(&["generate", "--ids", "1", "--model", path(&file), "--offline", "--device", "cpu"]);
    assert_refused(&refused, FAILURE, "the weights need 650.5 GiB of memory in f32, but only ");
}

/// Checks that running out of memory ends the program with a message, whatever the limit.
///
/// A backtrace would contain only unknown addresses.
#[cfg(target_os = "linux")]
#[test]
fn out_of_memory_is_reported_without_a_backtrace() {
    let mut failures = 0;
    for mebibytes in (40..200).step_by(4) {
        let limited = format!("ulimit -v {}; exec \"$@\"", mebibytes << 10);
        let output = std::process::Command::new("sh")
            .args([
                "-c",
                &limited,
                "sh",
                env!("CARGO_BIN_EXE_gpt2"),
                "generate",
                "a",
                "--max-new-tokens",
                "2",
            ])
            .env("RUST_BACKTRACE", "1")
            .output()
            .unwrap();
        let message = String::from_utf8_lossy(&output.stderr);
        assert!(!message.contains("<unknown>") && !message.contains("stack backtrace"), "{message}");
        failures += usize::from(message.contains("memory allocation of "));
    }
    assert!(failures > 0, "no limit made an allocation fail");
}

/// Checks that escapes protect terminals from generated text and that JSON parsers undo them.
#[test]
fn json_escapes_control_and_bidirectional_characters() {
    let folder = CheckpointFolder::tiny();
    let text = "a\u{7f}\u{9b}31m\u{202e}\u{2066}\u{61c}b";
    let prompts = folder.file("prompts.txt");
    std::fs::write(&prompts, text).unwrap();
    let rows =
        run(&["generate", "--prompts-file", path(&prompts), "--model", path(folder.path()), "-n", "1"]);
    assert_eq!(rows.code, SUCCESS, "{}", rows.stderr);
    assert!(rows.stdout.contains(r"a\u007f\u009b31m\u202e\u2066\u061cb"), "{}", rows.stdout);
    let prompt: Value = serde_json::from_str(rows.stdout.lines().next().unwrap()).unwrap();
    assert_eq!(prompt["prompt"], text);
    let missing = run(&["verify", "--model", "no\u{202e}such\u{9b}model"]);
    assert_refused(&missing, FAILURE, "nosuchmodel");
}

/// Checks that messages stay short even if values in files are long.
#[test]
fn messages_do_not_grow_with_their_input() {
    let assert_short = |run: &Run, expected: &str| {
        assert!(run.stderr.contains(expected), "`{expected}` is not in {:.300}", run.stderr);
        assert!(run.stderr.len() < 10_000, "{} bytes", run.stderr.len());
    };
    let verify = |folder: &CheckpointFolder| run(&["verify", "--model", path(folder.path())]);
    let long_name = CheckpointFolder::tiny().with_tensors(|tensors| {
        let tensor = tensors.remove("transformer.ln_f.weight").unwrap();
        tensors.insert("n".repeat(3_000_000), tensor);
    });
    let result = verify(&long_name);
    assert!(result.stdout.len() + result.stderr.len() < 20_000, "{} bytes", result.stdout.len());
    let many_axes = CheckpointFolder::tiny().with_tensors(|tensors| {
        let tensor = tensors.remove("transformer.ln_f.weight").unwrap();
        let sizes = [vec![1; 100_000], tensor.dims().to_vec()].concat();
        tensors.insert("transformer.ln_f.weight".into(), tensor.reshape(sizes).unwrap());
    });
    let result = verify(&many_axes);
    assert!(result.stdout.len() + result.stderr.len() < 20_000, "{} bytes", result.stdout.len());
    let folder = CheckpointFolder::tiny();
    for (name, task, expected) in [
        ("key.yaml", format!("? {}\n: 1", "k".repeat(900_000)), "unknown field"),
        (
            "choice.yaml",
            format!(
                "output_type: multiple_choice\ndoc_to_text: text\ndoc_to_target: 0\ndoc_to_choice: {}\ntest_split: test\n\
                 dataset_path: json\ndataset_kwargs: {{data_files: {{test: rows.jsonl}}}}\n",
                "c".repeat(50_000)
            ),
            "doc_to_choice",
        ),
    ] {
        std::fs::write(folder.file("rows.jsonl"), "{\"text\": \"a\"}\n").unwrap();
        std::fs::write(folder.file(name), task).unwrap();
        let result = run(&["eval", path(&folder.file(name)), "--model", path(folder.path())]);
        assert_short(&result, expected);
    }
}
