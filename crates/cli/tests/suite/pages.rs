//! What the program says of itself: alone, to shells, and on manual pages.

use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

use crate::common::{FAILURE, SUCCESS, USAGE, assert_refused, path, run};

/// Says that a program is not installed, so that something is not tried.
#[expect(clippy::print_stderr, reason = "a test that is left out says so")]
fn say_absent(program: &str) {
    eprintln!("{program} is not installed: what it would read is not read");
}

/// What a program says of a text that it reads; nothing where it is not installed.
fn told(program: &str, arguments: &[&str], input: &str) -> Option<(bool, String)> {
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
fn the_program_alone_says_how_to_begin() {
    let alone = run(&[]);
    assert_eq!((alone.code, alone.stderr.as_str()), (SUCCESS, ""));
    let lines: Vec<&str> = alone.stdout.lines().collect();
    assert_eq!(lines.len(), if cfg!(feature = "serve") { 5 } else { 4 });
    assert!(lines[1].starts_with("  gpt2 generate \"One day\" "), "{}", alone.stdout);
    assert!(lines.last().unwrap().contains("gpt2 --help") && lines.last().unwrap().contains("gpt2 doctor"));
    assert_refused(&run(&["--colour"]), USAGE, "--colour");
}

#[test]
fn shells_read_their_completions() {
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
        assert!(script.stdout.contains("GPT2_COMPLETE"), "{shell} does not ask the program");
        let Some(flag) = checked else { continue };
        match told(shell, &[flag], &script.stdout) {
            Some(said) => assert_eq!(said, (true, String::new()), "{shell}"),
            None => say_absent(shell),
        }
    }
    assert_refused(
        &run(&["completions", "tcsh"]),
        USAGE,
        "possible values: bash, elvish, fish, nushell, powershell, zsh",
    );
}

#[test]
fn manual_pages_have_every_command_and_no_mistake() {
    let page = run(&["man"]).stdout;
    assert!(page.contains(".TH gpt2 1"), "{page}");
    assert!(run(&["man", "look", "lens"]).stdout.contains("gpt2\\-look\\-lens"));
    assert_refused(&run(&["man", "nosuch"]), USAGE, "there is no command `nosuch` in `gpt2`");
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
        "pages that there are not"
    );
    assert!(read("gpt2-generate.1").contains("max\\-new\\-tokens"));
    assert!(read("gpt2-look-attention.1").contains("attention pattern"));
    assert!(
        read("gpt2-score.1").contains(".SH EXAMPLES\n.nf\nExamples:\n  gpt2 score "),
        "examples keep their lines"
    );
    for entry in fs::read_dir(&pages).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        match told("groff", &["-man", "-Kutf8", "-ww", "-z"], &read(&name)) {
            Some(said) => assert_eq!(said, (true, String::new()), "{name}"),
            None => {
                say_absent("groff");
                break;
            }
        }
    }
    let file = folder.path().join("file");
    fs::write(&file, "").unwrap();
    assert_refused(&run(&["man", "--out", path(&file)]), FAILURE, path(Path::new(&file)));
}
