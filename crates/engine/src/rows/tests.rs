//! Jobs without a model: a row's tokens are the bytes of its prompt, and its answer is how many there are.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;
use tempfile::TempDir;

use super::*;
use crate::Silent;

/// Which of these rows a job computes, and in which order.
type Order = fn(Vec<usize>) -> Vec<usize>;

struct Fixture {
    folder: TempDir,
    settings: Value,
    is_resumed: bool,
    /// The indices of the rows that were computed.
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
    fn assert_refused(&mut self, content: &[u8], expected: &str) {
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
        told: &|error| error.to_string(),
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

/// The lines that a job prints, and the rows that failed.
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
fn a_text_file_has_a_row_on_each_line() {
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
fn a_jsonl_file_has_an_object_on_each_line() {
    let content = b"\xef\xbb\xbf{\"prompt\": \"a\", \"more\": 1}\r\n\r\n{\"ids\": [5, 6]}\n{\"text\": \"b\"}\nnonsense\n{}\n\
        {\"prompt\": 5}\n{\"prompt\": \"a\", \"ids\": [1]}\n{\"ids\": 5}\n{\"prompt\": \"\xe9\"}\n[\"a\"]\n\
        {\"prompt\": \"a\", \"prompt\": \"b\"}\n\n";
    let (lines, failed) = printed("ROWS.JSONL", content, |rows| rows);
    assert_eq!(lines[1], r#"{"line":3,"prompt_ids":[5,6],"count":2}"#);
    assert_eq!(lines[2], r#"{"line":4,"prompt":"b","prompt_ids":[98],"count":1}"#);
    assert_eq!(lines.len(), 11);
    let no_object = "not {\"prompt\": TEXT} or {\"ids\": [ID, …]}: ";
    let no_key = "expected one of the keys `prompt` and `ids`";
    let expected = [
        (5, no_object),
        (6, no_key),
        (7, "`prompt`: expected a text"),
        (8, no_key),
        (9, "`ids`: expected a list of token ids: "),
        (10, "not valid UTF-8 at byte 12 of the line"),
        (11, no_object),
        (12, "not {\"prompt\": TEXT} or {\"ids\": [ID, …]}: duplicate field `prompt`"),
    ];
    assert_eq!(failed.len(), expected.len());
    for ((found, error), (number, told)) in failed.into_iter().zip(expected) {
        assert!(found == number && error.starts_with(told), "{found}: {error}");
    }
}

#[test]
fn lines_are_in_the_order_of_the_rows_whatever_is_computed_first() {
    let content = b"a\nfails\n\xe9\nbb\nccc\n\xe9\n";
    let (expected, failed) = printed("rows.txt", content, |rows| rows);
    assert_eq!(failed.iter().map(|(line, _)| *line).collect::<Vec<_>>(), [2, 3, 6]);
    let backwards = |rows: Vec<usize>| rows.into_iter().rev().collect();
    assert_eq!(printed("rows.txt", content, backwards), (expected, failed));
}

const CONTENT: &[u8] = b"a\n\xe9\nfails\nbb\n";

/// Wherever the file was cut, what is missing is computed and nothing else.
#[test]
fn a_job_resumes_wherever_it_was_cut() {
    let mut job = Fixture::new();
    let failed = job.run("rows.txt", CONTENT, |rows| rows).unwrap();
    let expected = fs::read_to_string(job.output()).unwrap();
    assert!(!job.partial().exists());
    let whole = format!("{}\n{expected}", job.settings);
    // Before and behind each line break, and here and there between.
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
    // Without `resume` neither what is made nor what is half made is touched.
    job.is_resumed = false;
    let error = job.run("rows.txt", CONTENT, |rows| rows).unwrap_err();
    assert!(error.to_string().contains("it exists already"), "{error}");
    assert!(!job.partial().exists());
    fs::write(job.partial(), "").unwrap();
    let error = job.run("rows.txt", CONTENT, |rows| rows).unwrap_err();
    assert!(matches!(error, EngineError::Unfinished { path } if path == job.partial()));
}

#[test]
fn lines_of_something_else_are_refused_and_left_alone() {
    let mut job = Fixture::new();
    job.run("rows.txt", CONTENT, |rows| rows).unwrap();
    let made = fs::read_to_string(job.output()).unwrap();
    fs::remove_file(job.output()).unwrap();
    let settings = job.settings.clone();
    let [first, ..] = made.lines().collect::<Vec<_>>()[..] else { panic!("four lines") };
    for (content, told) in [
        ("my notes\n".to_owned(), "made.partial: line 1: unknown content"),
        ("notes without an end".into(), "line 1: unknown content"),
        (format!("{settings}\nnotes\n"), "line 2: unknown content"),
        (format!("{settings}\n{}", made.replace("\"a\"", "\"c\"")), "line 2 is of another prompt"),
        (format!("{settings}\n{}", made.replace("[97]", "[98]")), "line 2 is of another prompt"),
        (format!("{settings}\n{}", made.replace("not valid", "valid")), "line 3 is of another prompt"),
        (format!("{settings}\n{made}{first}\n"), "line 6 is of another prompt"),
    ] {
        fs::write(job.partial(), &content).unwrap();
        job.assert_refused(CONTENT, told);
        assert_eq!(fs::read_to_string(job.partial()).unwrap(), content);
    }
}

#[test]
fn the_setting_that_differs_is_named() {
    let mut job = Fixture::new();
    fs::write(job.partial(), format!("{}\n", job.settings)).unwrap();
    job.settings["dtype"] = "q8".into();
    job.assert_refused(
        CONTENT,
        "the interrupted run had `dtype` null, this one \"q8\"; give the same options",
    );
    job.settings["dtype"] = Value::Null;
    job.settings["config"]["temperature"] = 0.5.into();
    job.assert_refused(CONTENT, "the interrupted run had `temperature` 1.0, this one 0.5");
    job.settings["config"]["temperature"] = 1.0.into();
    job.settings["later"] = true.into();
    job.assert_refused(CONTENT, "the interrupted run had `later` null, this one true");
}

#[test]
fn a_job_has_its_output_to_itself() {
    let mut job = Fixture::new();
    let other = fs::File::create(job.partial()).unwrap();
    other.lock().unwrap();
    job.assert_refused(CONTENT, "made.partial: another run is writing it");
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
fn links_in_place_of_partial_files_are_not_followed() {
    let mut job = Fixture::new();
    let target = job.folder.path().join("elsewhere");
    std::os::unix::fs::symlink(&target, job.partial()).unwrap();
    job.is_resumed = false;
    job.assert_refused(CONTENT, "made.partial: a symbolic link; remove it");
    assert!(!target.exists());
    fs::write(&target, "mine").unwrap();
    job.is_resumed = true;
    job.assert_refused(CONTENT, "made.partial: a symbolic link; remove it");
    assert_eq!(fs::read_to_string(&target).unwrap(), "mine");
}

#[test]
fn a_job_that_fails_keeps_the_lines_that_it_wrote() {
    let mut job = Fixture::new();
    // A line that cannot be read is not written before a row is computed.
    assert!(job.run("rows.txt", b"\xe9\nstops\n", |rows| rows).is_err());
    assert!(!job.partial().exists() && !job.output().exists());
    let error = job.run("rows.txt", b"a\nb\n", |rows| rows[..1].to_vec()).unwrap_err();
    assert!(error.is_interrupted(), "{error}");
    assert_eq!(fs::read_to_string(job.partial()).unwrap().lines().count(), 2);
    job.resume(b"a\nb\n").unwrap();
    assert_eq!(job.computed, [1]);
}
