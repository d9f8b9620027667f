//! The pictures of the book: those that its commands make, and one of a terminal in which some of them run.

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::path::Path;
use std::process::Command;

use anstyle_svg::Term;

use crate::{overwrites, program};

/// What one types at the terminal of the README.
const TYPED: [&str; 2] = [
    "gpt2 generate \"One day\" --temperature 0.7 --seed 20",
    "gpt2 look patch --clean \"A red ball and a blue cup, a red\" --corrupt \"A red cup and a blue ball, a red\" --answer \" ball\" --against \" cup\" --site z",
];

/// Compares a picture that a page's commands made with the one that the book shows, if it shows one of that name.
pub(crate) fn check(root: &Path, name: &OsStr, made: &[u8]) -> Result<(), String> {
    let shown = root.join("docs/src/pictures").join(name);
    if shown.exists() { compare(&shown, made) } else { Ok(()) }
}

fn compare(path: &Path, made: &[u8]) -> Result<(), String> {
    if fs::read(path).is_ok_and(|shown| shown == made) {
        return Ok(());
    }
    if overwrites() {
        return fs::write(path, made).map_err(|error| format!("{}: {error}", path.display()));
    }
    Err(format!("{} is not what its command makes; BOOK=overwrite replaces it", path.display()))
}

/// Types at a terminal, as `script` of Linux makes one, and compares its picture with the README's.
#[expect(clippy::print_stderr, reason = "says what is not tested")]
pub(crate) fn check_terminal(root: &Path) -> Result<(), String> {
    let mut screen = String::new();
    for typed in TYPED {
        let Some(answer) = answer(typed)? else {
            eprintln!(
                "the picture of a terminal is not drawn: util-linux' `script`, which makes one, is missing"
            );
            return Ok(());
        };
        screen += &format!("\x1b[1m$ {typed}\x1b[0m\n{}\n\n", answer.replace("\r\n", "\n").trim_end());
    }
    compare(
        &root.join("docs/src/pictures/terminal.svg"),
        Term::new().render_svg(screen.trim_end()).as_bytes(),
    )
}

/// What the program answers at a terminal, without its remarks on time; none where no terminal can be made.
fn answer(typed: &str) -> Result<Option<String>, String> {
    let at_terminal =
        format!("{} 2>/dev/null", typed.replacen("gpt2", &format!("'{}'", program().display()), 1));
    let mut script = Command::new("script");
    script.args(["--quiet", "--return", "--command", &at_terminal, "/dev/null"]);
    // No settings of the user's: those of colours, widths and threads would be seen.
    script.env_remove("NO_COLOR").env("COLUMNS", "120").env("TERM", "xterm-256color");
    match script.output() {
        Ok(output) if output.status.success() => {
            Ok(Some(String::from_utf8_lossy(&output.stdout).into_owned()))
        }
        Ok(output) => Err(format!("{typed}: {}", String::from_utf8_lossy(&output.stdout))),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(format!("{typed}: {error}")),
    }
}
