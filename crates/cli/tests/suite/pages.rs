//! Tests of the program without arguments, its shell completions and its manual pages.

use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

use crate::common::{FAILURE, SUCCESS, USAGE, assert_refused, path, run};

/// Reports that a program is not installed and that its checks are skipped.
#[expect(clippy::print_stderr, reason = "a skipped check reports it")]
fn report_missing(program: &str) {
    eprintln!("{program} is not installed: its checks are skipped");
}

/// Passes text to a program; returns whether the program succeeded, and its error output.
///
/// Returns `None` if the program is not installed.
fn check_with(program: &str, arguments: &[&str], input: &str) -> Option<(bool, String)> {
    let mut child = Command::new(program)
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .ok()?;
    child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    Some((output.status.success(), String::from_utf8_lossy(&output.stderr).into_owned()))
}

#[test]
fn program_without_arguments_shows_first_steps() {
    let result = run(&[]);
    assert_eq!((result.code, result.stderr.as_str()), (SUCCESS, ""));
    let lines: Vec<&str> = result.stdout.lines().collect();
    assert_eq!(lines.len(), if cfg!(feature = "serve") { 5 } else { 4 });
    assert!(lines[1].starts_with("  gpt2 generate \"One day\" "), "{}", result.stdout);
    assert!(lines.last().unwrap().contains("gpt2 --help") && lines.last().unwrap().contains("gpt2 doctor"));
    assert_refused(&run(&["--colour"]), USAGE, "--colour");
}

#[test]
fn shells_parse_their_completions() {
    for (shell, checked) in [
        ("bash", Some("-n")),
        ("zsh", Some("-n")),
        ("fish", Some("-n")),
        ("powershell", None),
        ("elvish", None),
        ("nushell", None),
    ] {
        let script = run(&["completions", shell]);
        assert_eq!((script.code, script.stderr.as_str()), (SUCCESS, ""), "{shell}");
        assert!(script.stdout.contains("GPT2_COMPLETE"), "{shell} does not call the program");
        let Some(flag) = checked else { continue };
        match check_with(shell, &[flag], &script.stdout) {
            Some(result) => assert_eq!(result, (true, String::new()), "{shell}"),
            None => report_missing(shell),
        }
    }
    assert_refused(
        &run(&["completions", "tcsh"]),
        USAGE,
        "possible values: bash, elvish, fish, nushell, powershell, zsh",
    );
}

#[test]
fn manual_pages_cover_every_command_and_parse_cleanly() {
    let page = run(&["man"]).stdout;
    assert!(page.contains(".TH gpt2 1"), "{page}");
    assert!(run(&["man", "look", "lens"]).stdout.contains("gpt2\\-look\\-lens"));
    assert_refused(&run(&["man", "nosuch"]), USAGE, "unknown command `nosuch` in `gpt2`");
    let folder = tempfile::tempdir().unwrap();
    let pages = folder.path().join("man1");
    let written = run(&["man", "--out", path(&pages)]);
    assert_eq!((written.code, written.stderr.as_str()), (SUCCESS, ""));
    let read = |name: &str| fs::read_to_string(pages.join(name)).unwrap();
    assert_eq!(read("gpt2.1"), page);
    for command in ["generate", "score", "classify", "eval", "look", "train", "doctor", "completions", "man"]
    {
        assert!(page.contains(&format!("gpt2\\-{command}(1)")), "{command} is not in: {page}");
        assert!(read(&format!("gpt2-{command}.1")).contains(".SH SYNOPSIS"), "{command}");
    }
    assert!(
        !page.contains("gpt2\\-help(1)") && !read("gpt2-look.1").contains("look\\-help(1)"),
        "references to missing pages"
    );
    assert!(read("gpt2-generate.1").contains("max\\-new\\-tokens"));
    assert!(read("gpt2-look-attention.1").contains("attention pattern"));
    assert!(
        read("gpt2-score.1").contains(".SH EXAMPLES\n.nf\nExamples:\n  gpt2 score "),
        "examples keep their lines"
    );
    for entry in fs::read_dir(&pages).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        match check_with("groff", &["-man", "-Kutf8", "-ww", "-z"], &read(&name)) {
            Some(result) => assert_eq!(result, (true, String::new()), "{name}"),
            None => {
                report_missing("groff");
                break;
            }
        }
    }
    let file = folder.path().join("file");
    fs::write(&file, "").unwrap();
    assert_refused(&run(&["man", "--out", path(&file)]), FAILURE, path(Path::new(&file)));
}
