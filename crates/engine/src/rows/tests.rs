//! Bulk jobs without a model: a row's tokens are its prompt's bytes, and its result is their count.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;
use tempfile::TempDir;

use super::*;
use crate::Silent;

/// Selects and orders the rows that a job computes.
type Order = fn(Vec<usize>) -> Vec<usize>;

struct Fixture {
    folder: TempDir,
    settings: Value,
    is_resumed: bool,
    /// Indices of the computed rows.
    computed: Vec<usize>,
}

impl Fixture {
    fn new() -> Self {
        let settings = json!({"model": "tiny", "dtype": null, "config": {"temperature": 1.0}});
        Self { folder: tempfile::tempdir().unwrap(), settings, is_resumed: false, computed: Vec::new() }
    }

    fn output(&self) -> PathBuf {
        self.folder.path().join("made")
    }

    fn partial(&self) -> PathBuf {
        self.folder.path().join("made.partial")
    }

    /// Runs a job to its output file.
    fn run(&mut self, input: &str, content: &[u8], order: Order) -> Result<Vec<FailedRow>, EngineError> {
        let output = self.output();
        let output = RowsOutput::File { path: &output, resume: self.is_resumed };
        run_to(output, (input, content), &self.settings, order, &mut self.computed)
    }

    fn resume(&mut self, content: &[u8]) -> Result<Vec<FailedRow>, EngineError> {
        self.is_resumed = true;
        self.computed.clear();
        self.run("rows.txt", content, |rows| rows)
    }

    #[track_caller]
    fn assert_rejected(&mut self, content: &[u8], expected: &str) {
        let error = self.resume(content).unwrap_err().to_string();
        assert!(error.contains(expected), "`{expected}` is not in: {error}");
        assert_eq!(self.computed, [] as [usize; 0]);
    }
}

fn run_to(
    output: RowsOutput<'_>,
    (input, content): (&str, &[u8]),
    settings: &Value,
    order: Order,
    computed: &mut Vec<usize>,
) -> Result<Vec<FailedRow>, EngineError> {
    let job = RowsJob {
        input: Path::new(input),
        content: content.to_vec(),
        output,
        settings,
        what: "counting",
        format_error: &|error| error.to_string(),
        reporter: &Silent,
    };
    job.run(tokens, |rows| {
        let all = rows.next_rows(usize::MAX)?;
        for index in order(all.iter().map(|(index, _)| *index).collect()) {
            computed.push(index);
            let (_, tokens) = all.iter().find(|(other, _)| *other == index).unwrap();
            let answer = match &tokens[..] {
                b"stops" => return Err(EngineError::Interrupted),
                b"fails" => Err(EngineError::Row { what: "it fails".into() }),
                tokens => Ok(json!({"count": tokens.len()})),
            };
            rows.answer(index, answer)?;
        }
        Ok(())
    })
}

fn tokens(row: &Row) -> Result<Vec<u8>, EngineError> {
    Ok(row.key("ids", "a list of token ids")?.unwrap_or_else(|| row.text().as_bytes().to_vec()))
}

/// Returns the lines that a job prints and the rows that failed.
fn printed(input: &str, content: &[u8], order: Order) -> (Vec<String>, Vec<(usize, String)>) {
    let mut lines = Vec::new();
    let output = RowsOutput::Lines(Box::new(|line| {
        lines.push(line.to_owned());
        Ok(())
    }));
    let failed = run_to(output, (input, content), &Value::Null, order, &mut Vec::new()).unwrap();
    (lines, failed.into_iter().map(|row| (row.line, row.error)).collect())
}

#[test]
fn text_file_has_one_row_per_line() {
    let (lines, failed) = printed("rows.txt", b"\xef\xbb\xbfThe dog\n\n\xe9\nThe\r\n\n", |rows| rows);
    let error = "not valid UTF-8 at byte 0 of the line; convert the text to UTF-8";
    assert_eq!(
        lines,
        [
            r#"{"line":1,"prompt":"The dog","prompt_ids":[84,104,101,32,100,111,103],"count":7}"#.to_owned(),
            r#"{"line":2,"prompt":"","prompt_ids":[],"count":0}"#.into(),
            format!(r#"{{"line":3,"error":"{error}"}}"#),
            r#"{"line":4,"prompt":"The","prompt_ids":[84,104,101],"count":3}"#.into(),
            r#"{"line":5,"prompt":"","prompt_ids":[],"count":0}"#.into(),
        ]
    );
    assert_eq!(failed, [(3, error.to_owned())]);
    assert_eq!(printed("rows.txt", b"", |rows| rows).0, [] as [&str; 0]);
}

#[test]
fn jsonl_file_has_one_object_per_line() {
    let content = b"\xef\xbb\xbf{\"prompt\": \"a\", \"more\": 1}\r\n\r\n{\"ids\": [5, 6]}\n{\"text\": \"b\"}\nnonsense\n{}\n\
        {\"prompt\": 5}\n{\"prompt\": \"a\", \"ids\": [1]}\n{\"ids\": 5}\n{\"prompt\": \"\xe9\"}\n[\"a\"]\n\
        {\"prompt\": \"a\", \"prompt\": \"b\"}\n\n";
    let (lines, failed) = printed("ROWS.JSONL", content, |rows| rows);
    assert_eq!(lines[1], r#"{"line":3,"prompt_ids":[5,6],"count":2}"#);
    assert_eq!(lines[2], r#"{"line":4,"prompt":"b","prompt_ids":[98],"count":1}"#);
    assert_eq!(lines.len(), 11);
    let not_an_object = "expected {\"prompt\": TEXT} or {\"ids\": [ID, …]}: ";
    let no_key = "expected either `prompt` or `ids`";
    let expected = [
        (5, not_an_object),
        (6, no_key),
        (7, "`prompt`: expected a string"),
        (8, no_key),
        (9, "`ids`: expected a list of token ids: "),
        (10, "not valid UTF-8 at byte 12 of the line"),
        (11, not_an_object),
        (12, "expected {\"prompt\": TEXT} or {\"ids\": [ID, …]}: duplicate field `prompt`"),
    ];
    assert_eq!(failed.len(), expected.len());
    for ((found_line, error), (line, prefix)) in failed.into_iter().zip(expected) {
        assert!(found_line == line && error.starts_with(prefix), "{found_line}: {error}");
    }
}

#[test]
fn output_order_does_not_depend_on_computation_order() {
    let content = b"a\nfails\n\xe9\nbb\nccc\n\xe9\n";
    let (expected, failed) = printed("rows.txt", content, |rows| rows);
    assert_eq!(failed.iter().map(|(line, _)| *line).collect::<Vec<_>>(), [2, 3, 6]);
    let backwards = |rows: Vec<usize>| rows.into_iter().rev().collect();
    assert_eq!(printed("rows.txt", content, backwards), (expected, failed));
}

const CONTENT: &[u8] = b"a\n\xe9\nfails\nbb\n";

/// An output truncated at any byte can be resumed, and only the missing rows are computed.
#[test]
fn job_resumes_after_a_cut_at_any_byte() {
    let mut job = Fixture::new();
    let failed = job.run("rows.txt", CONTENT, |rows| rows).unwrap();
    let expected = fs::read_to_string(job.output()).unwrap();
    assert!(!job.partial().exists());
    let whole = format!("{}\n{expected}", job.settings);
    // Truncates just before and after each line break, and at multiples of 11.
    let is_tried = |cut: &usize| {
        cut.is_multiple_of(11) || whole[*cut..].starts_with('\n') || whole[..*cut].ends_with('\n')
    };
    for cut in (0..=whole.len()).filter(is_tried) {
        fs::remove_file(job.output()).unwrap();
        fs::write(job.partial(), &whole.as_bytes()[..cut]).unwrap();
        assert_eq!(job.resume(CONTENT).unwrap(), failed, "the rows of the first run failed too");
        assert_eq!(fs::read_to_string(job.output()).unwrap(), expected, "cut at {cut}");
        assert!(!job.partial().exists());
        let lines = whole[..cut].matches('\n').count().saturating_sub(1);
        let missing: Vec<usize> = [0, 2, 3].into_iter().filter(|index| *index >= lines).collect();
        assert_eq!(job.computed, missing, "cut at {cut}");
    }
    // Without `resume`, neither finished nor partial output is touched.
    job.is_resumed = false;
    let error = job.run("rows.txt", CONTENT, |rows| rows).unwrap_err();
    assert!(error.to_string().contains("already exists"), "{error}");
    assert!(!job.partial().exists());
    fs::write(job.partial(), "").unwrap();
    let error = job.run("rows.txt", CONTENT, |rows| rows).unwrap_err();
    assert!(matches!(error, EngineError::Unfinished { path } if path == job.partial()));
}

#[test]
fn foreign_partial_files_are_rejected_and_unchanged() {
    let mut job = Fixture::new();
    job.run("rows.txt", CONTENT, |rows| rows).unwrap();
    let output = fs::read_to_string(job.output()).unwrap();
    fs::remove_file(job.output()).unwrap();
    let settings = job.settings.clone();
    let [first, ..] = output.lines().collect::<Vec<_>>()[..] else { panic!("four lines") };
    for (content, expected) in [
        ("my notes\n".to_owned(), "made.partial: line 1: unrecognized content"),
        ("notes without an end".into(), "line 1: unrecognized content"),
        (format!("{settings}\nnotes\n"), "line 2: unrecognized content"),
        (format!("{settings}\n{}", output.replace("\"a\"", "\"c\"")), "line 2 is for a different prompt"),
        (format!("{settings}\n{}", output.replace("[97]", "[98]")), "line 2 is for a different prompt"),
        (format!("{settings}\n{}", output.replace("not valid", "valid")), "line 3 is for a different prompt"),
        (format!("{settings}\n{output}{first}\n"), "line 6 is for a different prompt"),
    ] {
        fs::write(job.partial(), &content).unwrap();
        job.assert_rejected(CONTENT, expected);
        assert_eq!(fs::read_to_string(job.partial()).unwrap(), content);
    }
}

#[test]
fn error_names_the_differing_setting() {
    let mut job = Fixture::new();
    fs::write(job.partial(), format!("{}\n", job.settings)).unwrap();
    job.settings["dtype"] = "q8".into();
    job.assert_rejected(
        CONTENT,
        "the interrupted run had `dtype` null, but this run has \"q8\"; use the same options",
    );
    job.settings["dtype"] = Value::Null;
    job.settings["config"]["temperature"] = 0.5.into();
    job.assert_rejected(CONTENT, "the interrupted run had `temperature` 1.0, but this run has 0.5");
    job.settings["config"]["temperature"] = 1.0.into();
    job.settings["later"] = true.into();
    job.assert_rejected(CONTENT, "the interrupted run had `later` null, but this run has true");
}

#[test]
fn output_is_locked_against_other_processes() {
    let mut job = Fixture::new();
    let other = fs::File::create(job.partial()).unwrap();
    other.lock().unwrap();
    job.assert_rejected(CONTENT, "made.partial: another process is writing to this file");
    drop(other);
    fs::write(job.folder.path().join("made.complete"), "mine").unwrap();
    job.resume(CONTENT).unwrap();
    let mut names: Vec<_> =
        fs::read_dir(job.folder.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, ["made", "made.complete"]);
}

/// A link in a downloaded folder must not create or change a file elsewhere.
#[cfg(unix)]
#[test]
fn symlinked_partial_files_are_rejected() {
    let mut job = Fixture::new();
    let target = job.folder.path().join("elsewhere");
    std::os::unix::fs::symlink(&target, job.partial()).unwrap();
    job.is_resumed = false;
    job.assert_rejected(CONTENT, "made.partial: a symbolic link; remove it");
    assert!(!target.exists());
    fs::write(&target, "mine").unwrap();
    job.is_resumed = true;
    job.assert_rejected(CONTENT, "made.partial: a symbolic link; remove it");
    assert_eq!(fs::read_to_string(&target).unwrap(), "mine");
}

#[test]
fn failed_job_keeps_its_written_lines() {
    let mut job = Fixture::new();
    // An invalid line is written only after a row has been computed.
    assert!(job.run("rows.txt", b"\xe9\nstops\n", |rows| rows).is_err());
    assert!(!job.partial().exists() && !job.output().exists());
    let error = job.run("rows.txt", b"a\nb\n", |rows| rows[..1].to_vec()).unwrap_err();
    assert!(error.is_interrupted(), "{error}");
    assert_eq!(fs::read_to_string(job.partial()).unwrap().lines().count(), 2);
    job.resume(b"a\nb\n").unwrap();
    assert_eq!(job.computed, [1]);
}
