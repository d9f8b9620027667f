//! Valid and damaged data in every format; errors name the file, the line and the field.

use std::path::Path;

use candle_gpt2_evaluation::{Data, EvaluationError, Record};

fn data(name: &str, bytes: impl AsRef<[u8]>) -> Data {
    Data::from_bytes(Path::new(name), bytes.as_ref().to_vec()).unwrap()
}

/// Line number and field `text` of each entry, up to the first error.
fn texts(data: &Data) -> Vec<String> {
    let line = |record: &Record| format!("{} {}", record.line(), record.text("text").unwrap());
    data.records()
        .map(|record| record.map_or_else(|error| error.to_string(), |record| line(&record)))
        .collect()
}

/// Parses a line of JSON as a single entry.
fn record(line: &str) -> Record {
    data("items.jsonl", line).records().next().unwrap().unwrap()
}

#[test]
fn json_lines_keep_their_file_line_numbers() {
    let bytes = "\u{feff}{\"text\": \"a\"}\r\n\r\n  \t\n{\"text\": \"b\\u2028\u{2028}\"}\n{\"text\": \"c\"}";
    assert_eq!(texts(&data("items.jsonl", bytes)), ["1 a", "4 b\u{2028}\u{2028}", "5 c"]);
    assert!(texts(&data("items.jsonl", "\n\n")).is_empty());
}

#[test]
fn non_object_row_is_reported_and_ends_the_stream() {
    let cases: [(&[u8], &str); 6] = [
        (
            b"{\"text\": 1",
            "items.jsonl: line 2: expected a JSON object, found invalid JSON: EOF while parsing an object at column 10",
        ),
        (b"[1, \"x\"]", "items.jsonl: line 2: expected a JSON object, found [1,\"x\"]"),
        (b"null", "items.jsonl: line 2: expected a JSON object, found null"),
        (
            b"{} {}",
            "items.jsonl: line 2: expected a JSON object, found invalid JSON: trailing characters at column 4",
        ),
        (
            b"{\"text\": \"\xff\"}",
            "items.jsonl: line 2: expected UTF-8, found an invalid byte after 10 bytes of the line",
        ),
        (
            b"{\"text\": \"\\ud800\"}",
            "items.jsonl: line 2: expected a JSON object, found invalid JSON: unexpected end of hex escape at column 17",
        ),
    ];
    for (line, expected) in cases {
        let bytes = [b"{\"text\": \"good\"}\n", line, b"\n{\"text\": \"behind\"}\n"].concat();
        assert_eq!(texts(&data("items.jsonl", bytes)), ["1 good", expected]);
    }
    let deep = "[".repeat(100_000);
    let error = texts(&data("deep.jsonl", format!("{{\"text\": {deep}"))).remove(0);
    assert!(error.contains("deep.jsonl: line 1: ") && error.contains("recursion limit exceeded"), "{error}");
}

#[test]
fn field_errors_name_the_field_and_the_value() {
    let record = record(
        r#"{"text": 7, "list": ["a", 2], "empty": ["a", ""], "label": 4, "word": "three", "half": 1.5, "none": "", "inner": {"x": []}}"#,
    );
    let line = "items.jsonl: line 1: ";
    let cases = [
        (record.text("text").unwrap_err(), "field `text`: expected a string, found 7"),
        (
            record.text("body").unwrap_err(),
            "field `body`: missing; available fields: `empty`, `half`, `inner`, `label`, `list`, `none`, `text`, `word`",
        ),
        (record.filled("none").unwrap_err(), "field `none`: expected a non-empty string"),
        (record.texts("list").unwrap_err(), "field `list[1]`: expected a string, found 2"),
        (record.texts("empty").unwrap_err(), "field `empty[1]`: expected a non-empty string"),
        (record.texts("text").unwrap_err(), "field `text`: expected a list of strings, found 7"),
        (record.index("label", 0, 4).unwrap_err(), "field `label`: expected a number from 0 to 3, found 4"),
        (
            record.index("word", 1, 2).unwrap_err(),
            "field `word`: expected a number from 1 to 2, found \"three\"",
        ),
        (record.index("half", 0, 4).unwrap_err(), "field `half`: expected a number from 0 to 3, found 1.5"),
        (
            record.index("inner", 0, 4).unwrap_err(),
            "field `inner`: expected a number from 0 to 3, found {\"x\":[]}",
        ),
        (record.fields("label").unwrap_err(), "field `label`: expected an object, found 4"),
        (record.list("list").unwrap_err(), "field `list[0]`: expected an object, found \"a\""),
        (
            record.fields("inner").unwrap().text("y").unwrap_err(),
            "field `inner.y`: missing; available fields: `x`",
        ),
    ];
    for (error, expected) in cases {
        assert_eq!(error.to_string(), format!("{line}{expected}"));
    }
}

#[test]
fn index_may_be_a_string_and_one_based() {
    let record = record(r#"{"zero": 0, "text": " 3 ", "one": "1", "two": 2}"#);
    let index = |field, first| record.index(field, first, 4).ok();
    assert_eq!(
        [index("zero", 0), index("text", 0), index("one", 1), index("two", 1)],
        [Some(0), Some(3), Some(0), Some(1)]
    );
    assert_eq!(index("zero", 1), None);
}

#[test]
fn long_value_is_truncated_in_the_error() {
    let found =
        record(&format!(r#"{{"label": "{}"}}"#, "é".repeat(10_000))).index("label", 0, 4).unwrap_err();
    assert_eq!(
        found.to_string(),
        format!(
            "items.jsonl: line 1: field `label`: expected a number from 0 to 3, found \"{}…",
            "é".repeat(59)
        )
    );
}

#[test]
fn record_id_is_read_from_known_fields() {
    let name = |line| record(line).id();
    assert_eq!(name(r#"{"id": "Mercury_7", "ind": 4}"#).as_deref(), Some("Mercury_7"));
    assert_eq!(name(r#"{"ind": 24}"#).as_deref(), Some("24"));
    assert_eq!(name(r#"{"qID": "3-1"}"#).as_deref(), Some("3-1"));
    assert_eq!(name(r#"{"id": null, "text": ""}"#), None);
}

#[test]
fn csv_header_names_the_columns() {
    let bytes = "\u{feff}text,label\r\n\"one, and\r\n \"\"two\"\"\",1\r\nthree,2\r\n";
    let csv = data("items.CSV", bytes);
    let records: Vec<Record> = csv.records().map(Result::unwrap).collect();
    let fields = |record: &Record| {
        (record.line(), record.text("text").unwrap().to_owned(), record.index("label", 1, 2).unwrap())
    };
    assert_eq!(
        records.iter().map(fields).collect::<Vec<_>>(),
        [(2, "one, and\r\n \"two\"".to_owned(), 0), (4, "three".to_owned(), 1)]
    );
}

#[test]
fn csv_without_header_uses_default_column_names() {
    const COLUMNS: &[&str] = &["index", "text"];
    let rows = |bytes: &str| -> Vec<_> {
        let csv = data("items.csv", bytes);
        let records = csv.records_with_columns(COLUMNS).map(Result::unwrap);
        records.map(|record| (record.line(), record.text("text").unwrap().to_owned())).collect()
    };
    let expected = |lines: [usize; 2]| [(lines[0], "a".to_owned()), (lines[1], "b".to_owned())];
    assert_eq!(rows("7,a\n8,b\n"), expected([1, 2]));
    assert_eq!(rows("text,index\na,7\nb,8\n"), expected([2, 3]));
}

#[test]
fn damaged_csv_row_is_reported_with_its_line() {
    let cases: [(&[u8], &str); 3] = [
        (b"text,label\na,1\nb\nc,2\n", "items.csv: line 3: expected 2 columns, found 1"),
        (b"text,label\na,1\n\xff,2\n", "items.csv: line 3: column 1: expected UTF-8, found an invalid byte"),
        (b"text,label\na,1\nb,2,3\n", "items.csv: line 3: expected 2 columns, found 3"),
    ];
    for (bytes, expected) in cases {
        assert_eq!(texts(&data("items.csv", bytes)), ["2 a", expected]);
    }
    const COLUMNS: &[&str] = &["index", "text"];
    let short = data("items.csv", "only\n");
    let error = short.records_with_columns(COLUMNS).next().unwrap().unwrap_err();
    assert_eq!(error.to_string(), "items.csv: line 1: expected 2 columns (index, text), found 1");
}

#[test]
fn text_is_returned_verbatim_and_must_be_utf_8() {
    assert_eq!(data("a.txt", "é\r\n\u{feff}").text().unwrap(), "é\r\n\u{feff}");
    let error = |bytes: &[u8]| data("a.txt", bytes).text().unwrap_err().to_string();
    assert_eq!(error(b""), "a.txt: expected text, found an empty file");
    assert_eq!(
        error(b"one\ntwo\xff"),
        "a.txt: line 2: expected UTF-8, found an invalid byte after 7 bytes of the file"
    );
}

#[test]
fn hash_covers_all_bytes() {
    // Computed with `printf abc | sha256sum`.
    let abc = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
    assert_eq!(data("a.txt", "abc").sha256(), abc);
    let folder = tempfile::tempdir().unwrap();
    for (name, text) in [("2.jsonl", "c"), ("1.jsonl", "ab"), ("README.md", "other")] {
        std::fs::write(folder.path().join(name), text).unwrap();
    }
    let read = Data::read(folder.path()).unwrap();
    assert_eq!(read.sha256(), abc);
    assert_eq!(read.path(), folder.path());
}

#[test]
fn folder_files_are_read_in_name_order() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
    write("b.jsonl", "{\"text\": \"2\"}\n");
    write("a.csv", "text\n0\n1\n");
    let read = Data::read(folder.path()).unwrap();
    let stems: Vec<_> = read.records().map(|record| record.unwrap().file_stem()).collect();
    assert_eq!(
        (texts(&read), stems),
        (vec!["2 0".into(), "3 1".into(), "1 2".into()], vec!["a".into(), "a".into(), "b".into()])
    );
    write("aa.jsonl", "[]");
    let damaged = texts(&Data::read(folder.path()).unwrap());
    assert_eq!(damaged.len(), 3);
    assert!(damaged[2].ends_with("aa.jsonl: line 1: expected a JSON object, found []"), "{damaged:?}");
}

#[test]
fn missing_file_and_empty_folder_are_reported() {
    let folder = tempfile::tempdir().unwrap();
    let error = Data::read(folder.path()).unwrap_err();
    assert!(
        matches!(&error, EvaluationError::Unusable { what, .. } if what.contains("contains no .jsonl")),
        "{error}"
    );
    let missing = folder.path().join("missing.jsonl");
    let error = Data::read(&missing).unwrap_err();
    assert!(error.to_string().starts_with(&missing.display().to_string()), "{error}");
}

#[cfg(not(feature = "parquet"))]
#[test]
fn parquet_requires_its_feature() {
    for (name, bytes) in [("items.parquet", b"".as_slice()), ("blob", b"PAR1...")] {
        let error = Data::from_bytes(Path::new(name), bytes.to_vec()).unwrap_err().to_string();
        assert_eq!(
            error,
            format!(
                "{name}: the file is in Parquet, and this program was built without the feature `parquet`; build it with `--features parquet`, \
                 or convert the data to JSONL"
            )
        );
    }
}

#[cfg(feature = "parquet")]
mod parquet {
    use std::sync::Arc;

    use parquet::data_type::{ByteArray, ByteArrayType, Int64Type};
    use parquet::file::properties::WriterProperties;
    use parquet::file::writer::SerializedFileWriter;
    use parquet::schema::parser::parse_message_type;

    use super::{data, texts};

    /// Parquet file with two rows: a string, a number and a list of strings, encoded as on the Hub.
    fn file() -> Vec<u8> {
        let schema = "message rows { optional binary text (UTF8); optional int64 label; \
                      optional group choices (LIST) { repeated group list { optional binary element (UTF8); } } }";
        let schema = Arc::new(parse_message_type(schema).unwrap());
        let snappy = parquet::basic::Compression::SNAPPY;
        let properties = WriterProperties::builder().set_compression(snappy).build();
        let mut bytes = Vec::new();
        let mut writer = SerializedFileWriter::new(&mut bytes, schema, Arc::new(properties)).unwrap();
        let mut group = writer.next_row_group().unwrap();
        let text = |text: &str| ByteArray::from(text);
        let mut column = group.next_column().unwrap().unwrap();
        column.typed::<ByteArrayType>().write_batch(&[text("a"), text("é\n")], Some(&[1, 1]), None).unwrap();
        column.close().unwrap();
        let mut column = group.next_column().unwrap().unwrap();
        column.typed::<Int64Type>().write_batch(&[3, 0], Some(&[1, 1]), None).unwrap();
        column.close().unwrap();
        let mut column = group.next_column().unwrap().unwrap();
        let [x, y, z] = ["x", "y", "z"].map(text);
        column.typed::<ByteArrayType>().write_batch(&[x, y, z], Some(&[3, 3, 3]), Some(&[0, 1, 0])).unwrap();
        column.close().unwrap();
        group.close().unwrap();
        writer.close().unwrap();
        bytes
    }

    #[test]
    fn parquet_rows_are_records() {
        // Parquet is also recognized by its magic bytes.
        for name in ["items.parquet", "blob"] {
            let rows = data(name, file());
            assert!(rows.has_records());
            assert_eq!(texts(&rows), ["1 a", "2 é\n"]);
            let records: Vec<_> = rows.records().map(Result::unwrap).collect();
            assert_eq!(records[0].index("label", 0, 4), Ok(3));
            assert_eq!(records[0].texts("choices").unwrap(), ["x", "y"]);
            assert_eq!(records[1].texts("choices").unwrap(), ["z"]);
        }
    }

    /// Checks that damage causes an error or a different value, but never a panic.
    #[test]
    fn damaged_parquet_is_rejected_without_panic() {
        let whole = file();
        let mut errors = 0;
        for cut in 0..whole.len() {
            errors +=
                usize::from(data("items.parquet", &whole[..cut]).records().any(|record| record.is_err()));
        }
        assert_eq!(errors, whole.len(), "every truncated file is rejected");
        for index in 0..whole.len() {
            for flipped in [0x01, 0x80, 0xff] {
                let mut bytes = whole.clone();
                bytes[index] ^= flipped;
                let damaged = data("items.parquet", bytes);
                let read = damaged.records().take(1000).count();
                assert!(read < 1000, "byte {index} turned two rows into many");
            }
        }
    }
}
