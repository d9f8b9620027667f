//! Fuzzes the responses of a hostile Hub: the list of files, and each file's headers and contents.
//!
//! Nothing outside the repository's folder in the cache may change. The byte 0xFF separates responses. A
//! response has a status, `name: value` lines, an empty line and a body.
#![no_main]

use std::fs;
use std::path::Path;

use candle_gpt2_engine::{CannedAnswer, fetch_from_answers};

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    let answers = input.split(|byte| *byte == 0xff).take(16).map(answer).collect();
    let root = tempfile::tempdir().expect("a temporary folder");
    let outside = root.path().join("outside");
    fs::write(&outside, "precious").expect("a file to write");
    let cache = root.path().join("cache");
    let _ = fetch_from_answers("someone/tiny", &cache, answers);

    assert_eq!(fs::read(&outside).expect("the file outside"), b"precious");
    assert!(names(root.path()).iter().all(|name| ["cache", "outside"].contains(&name.as_str())));
    if !cache.exists() {
        return;
    }
    assert_eq!(names(&cache), ["models--someone--tiny"]);
    let repository = cache.join("models--someone--tiny");
    for name in names(&repository) {
        assert!(["blobs", "snapshots", "refs"].contains(&name.as_str()), "{name}");
    }
    for commit in names(&repository.join("snapshots")) {
        let snapshot = repository.join("snapshots").join(commit);
        for file in names(&snapshot) {
            let contents = fs::canonicalize(snapshot.join(file)).expect("a link to a blob");
            let blobs = fs::canonicalize(repository.join("blobs")).expect("the blobs");
            assert_eq!(contents.parent(), Some(blobs.as_path()));
        }
    }
});

fn answer(bytes: &[u8]) -> CannedAnswer {
    let end = bytes.windows(2).position(|end| end == b"\n\n");
    let (head, body) = end.map_or((bytes, &bytes[..0]), |end| (&bytes[..end], &bytes[end + 2..]));
    let mut lines = head.split(|byte| *byte == b'\n');
    let status = lines.next().and_then(|line| std::str::from_utf8(line).ok()?.parse().ok());
    let header = |line: &[u8]| {
        let colon = line.iter().position(|byte| *byte == b':')?;
        let name = String::from_utf8(line[..colon].to_vec()).ok()?;
        Some((name, line[colon + 1..].trim_ascii().to_vec()))
    };
    (status.unwrap_or(200), lines.filter_map(header).collect(), body.to_vec())
}

fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten();
    entries.map(|entry| entry.expect("an entry").file_name().into_string().expect("a plain name")).collect()
}
