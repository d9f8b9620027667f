//! Runs all blocks of a page in one bash.
//!
//! Folders, variables and background jobs persist from block to block. The session starts in an empty folder,
//! with `gpt2` on the path, without a terminal and without a network. Its Hub cache contains the small
//! built-in model under the names of the published models.

use std::env;
use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::symlink;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::OnceLock;
use std::thread;
use std::time::{Duration, Instant};

use crate::page::{Step, StepKind};

/// Time limit for a page.
const LIMIT: Duration = Duration::from_secs(240);
/// Polling interval while a page runs.
const INTERVAL: Duration = Duration::from_millis(20);
/// Published models that each session's cache pretends to contain.
const PUBLISHED: [&str; 5] = [
    "openai-community--gpt2",
    "openai-community--gpt2-medium",
    "openai-community--gpt2-large",
    "openai-community--gpt2-xl",
    "distilbert--distilgpt2",
];
const REVISION: &str = "0000000000000000000000000000000000000000";

/// Result of a step.
pub(crate) struct Run {
    pub(crate) output: String,
    pub(crate) end: End,
}

pub(crate) enum End {
    Code(i32),
    /// The step ended the session; holds the command that failed under `set -e`, if known.
    Session(Option<String>),
    TimeOut,
    /// An earlier step ended the session.
    NotRun,
}

/// Picture file that a page's steps wrote to their folder.
pub(crate) struct Picture {
    pub(crate) name: OsString,
    pub(crate) bytes: Vec<u8>,
}

/// Runs the steps of a page and returns their results and the pictures that they wrote.
pub(crate) fn run(program: &Path, steps: &[Step]) -> Result<(Vec<Run>, Vec<Picture>), String> {
    let folder = tempfile::tempdir().map_err(|error| error.to_string())?;
    let folder = folder.path();
    let failed = |error: io::Error| format!("cannot start the session: {error}");
    let path = prepare(program, folder, steps).map_err(failed)?;
    let log = File::create(folder.join("steps/log")).map_err(failed)?;
    let mut bash = Command::new("bash");
    bash.arg(folder.join("steps/all"))
        .current_dir(folder.join("work"))
        .env_clear()
        .env("PATH", path)
        .env("HOME", folder.join("home"))
        .env("HF_HOME", folder.join("hub"))
        .env("HF_HUB_OFFLINE", "1")
        .env("LANG", "C.UTF-8")
        .env("NO_COLOR", "1")
        .stdin(Stdio::null())
        .stdout(log.try_clone().map_err(failed)?)
        .stderr(log)
        .process_group(0);
    let group = Group(match bash.spawn() {
        Ok(child) => child,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return Err("bash is not on the path, and the book's commands need it".to_owned());
        }
        Err(error) => return Err(failed(error)),
    });
    let status = group.wait().map_err(failed)?;
    Ok((results(folder, steps, status), pictures(&folder.join("work")).map_err(failed)?))
}

fn pictures(folder: &Path) -> io::Result<Vec<Picture>> {
    let mut pictures = Vec::new();
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if let (Some("svg"), Some(name)) = (path.extension().and_then(OsStr::to_str), path.file_name()) {
            pictures.push(Picture { name: name.to_owned(), bytes: fs::read(&path)? });
        }
    }
    Ok(pictures)
}

/// Returns the built-in model as a Hugging Face folder, converted once for all sessions.
fn stories() -> &'static Path {
    static STORIES: OnceLock<PathBuf> = OnceLock::new();
    STORIES.get_or_init(|| {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("book-stories");
        let _ = fs::remove_dir_all(&folder);
        let mut convert = Command::new(crate::program());
        convert.args(["convert", "built-in"]).arg(&folder).args(["--dtype", "f16"]);
        let output = convert.output();
        assert!(output.as_ref().is_ok_and(|output| output.status.success()), "{output:?}");
        folder
    })
}

/// Creates the folders and files of a session and returns its search path.
fn prepare(program: &Path, folder: &Path, steps: &[Step]) -> io::Result<OsString> {
    for name in ["bin", "home", "work", "steps"] {
        fs::create_dir(folder.join(name))?;
    }
    symlink(fs::canonicalize(program)?, folder.join("bin/gpt2"))?;
    for model in PUBLISHED {
        let model = folder.join("hub/hub").join(format!("models--{model}"));
        let snapshot = model.join("snapshots").join(REVISION);
        fs::create_dir_all(&snapshot)?;
        fs::create_dir(model.join("refs"))?;
        fs::write(model.join("refs/main"), REVISION)?;
        for file in ["config.json", "tokenizer.json", "model.safetensors"] {
            symlink(stories().join(file), snapshot.join(file))?;
        }
    }
    let steps_folder = folder.join("steps");
    for (number, step) in steps.iter().enumerate() {
        fs::write(steps_folder.join(number.to_string()), format!("{}\n", step.commands))?;
    }
    fs::write(steps_folder.join("all"), script(&steps_folder, steps))?;
    let mut path = vec![folder.join("bin")];
    path.extend(env::var_os("PATH").iter().flat_map(env::split_paths));
    env::join_paths(path).map_err(io::Error::other)
}

/// Returns a script that reads every step into the same shell, with separate output files.
///
/// At the start of a step, `$?` is the exit code of the previous step.
fn script(folder: &Path, steps: &[Step]) -> String {
    let at = |number: usize, end: &str| format!("'{}/{number}{end}'", folder.display());
    let mut script = "trap 'kill -KILL $(jobs -p)' EXIT\nbook_code=0\n".to_owned();
    for (number, step) in steps.iter().enumerate() {
        let [file, out, failed, code] = ["", ".out", ".failed", ".code"].map(|end| at(number, end));
        let source = format!(". {file} > {out} 2>&1 < /dev/null");
        let lines = match step.kind {
            StepKind::Command(_) => format!("(exit $book_code)\n{source}\nbook_code=$?\n"),
            StepKind::Script => format!(
                "trap 'printf %s \"$BASH_COMMAND\" > {}' ERR\nset -e\n{source}\nset +e\ntrap - ERR\nbook_code=0\n",
                failed.replace('\'', "'\\''")
            ),
        };
        script.push_str(&format!("{lines}echo $book_code > {code}\n"));
    }
    script
}

fn results(folder: &Path, steps: &[Step], status: Option<ExitStatus>) -> Vec<Run> {
    let read = |number: usize, end: &str| fs::read(folder.join(format!("steps/{number}.{end}")));
    let read = |number, end| read(number, end).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).ok();
    let mut has_ended = false;
    let run = |number: usize| {
        let code = read(number, "code").and_then(|code| code.trim().parse().ok());
        let end = match code {
            Some(code) => End::Code(code),
            None if has_ended => End::NotRun,
            None if status.is_none() => End::TimeOut,
            None => End::Session(read(number, "failed")),
        };
        has_ended |= code.is_none();
        Run { output: read(number, "out").unwrap_or_default(), end }
    };
    (0..steps.len()).map(run).collect()
}

/// A process and everything it started.
struct Group(Child);

impl Group {
    /// Waits for the process; returns `None` on a timeout.
    fn wait(mut self) -> io::Result<Option<ExitStatus>> {
        let start = Instant::now();
        while start.elapsed() < LIMIT {
            if let Some(status) = self.0.try_wait()? {
                return Ok(Some(status));
            }
            thread::sleep(INTERVAL);
        }
        Ok(None)
    }
}

impl Drop for Group {
    /// Kills the remaining processes: background servers, and the shell itself after a timeout.
    fn drop(&mut self) {
        let command = format!("kill -KILL -- -{}", self.0.id());
        // It is not an error if no process remains.
        let _ = Command::new("bash").arg("-c").arg(command).stderr(Stdio::null()).status();
        let _ = self.0.wait();
    }
}

/// Returns the message for a page that exceeds its time limit.
pub(crate) fn time_limit() -> String {
    format!("the page takes longer than {} seconds; it ended in this command", LIMIT.as_secs())
}
