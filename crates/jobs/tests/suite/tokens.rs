//! Token files: byte-exact formats, identical files after interruptions, and errors for damaged files.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use candle_gpt2::Gpt2Config;
use candle_gpt2_engine::{HubOptions, Progress, Reporter, Silent, Unit};
use candle_gpt2_jobs::{
    JobError, ShardFormat, Start, TokenFolder, TokenWidth, TokenizeJob, TokenizeOptions, TokenizeReport,
    TrainJob, TrainOptions,
};
use candle_gpt2_testing::{CheckpointFolder, entries, files};
use candle_gpt2_training::{Tokens, TrainingError};
use candle_gpt2_weights::{Tokenizer, encode_piece, load_tokenizer};
use serde_json::{Value, json};

use crate::interrupter::{Interrupter, scenes};

/// A folder with texts, and a checkpoint with its tokenizer.
struct Work {
    folder: tempfile::TempDir,
    checkpoint: CheckpointFolder,
}

impl Work {
    fn new() -> Self {
        let work = Self { folder: tempfile::tempdir().unwrap(), checkpoint: CheckpointFolder::tiny() };
        fs::write(work.path("text.txt"), scenes(300)).unwrap();
        let row = |row: u32| json!({"text": format!("Row {row}, of those that are short.")}).to_string();
        fs::write(work.path("rows.jsonl"), (0..40).map(row).collect::<Vec<_>>().join("\n")).unwrap();
        work
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn job(&self, out: &str, options: TokenizeOptions) -> TokenizeJob {
        TokenizeJob {
            data: vec![self.path("text.txt"), self.path("rows.jsonl")],
            model: Some(self.checkpoint.path().to_owned()),
            tokenizer: None,
            out: self.path(out),
            options,
            n_head: None,
            hub: HubOptions::default(),
        }
    }

    fn tokenizer(&self) -> Tokenizer {
        load_tokenizer(self.checkpoint.path()).unwrap()
    }

    /// Runs a job with these options, and returns its folder and report.
    fn tokenized(&self, out: &str, options: TokenizeOptions) -> (PathBuf, TokenizeReport) {
        let job = self.job(out, options);
        let report = job.run(&Silent).unwrap();
        (job.out, report)
    }

    fn open(&self, folder: &Path) -> Result<TokenFolder, TrainingError> {
        TokenFolder::open(folder, (&self.tokenizer(), self.vocab_size()), &Silent)
    }

    fn refused(&self, folder: &Path) -> String {
        self.open(folder).unwrap_err().to_string()
    }

    fn vocab_size(&self) -> usize {
        let config: Value =
            serde_json::from_slice(&fs::read(self.checkpoint.path().join("config.json")).unwrap()).unwrap();
        usize::try_from(config["vocab_size"].as_u64().unwrap()).unwrap()
    }

    fn end(&self) -> u32 {
        self.tokenizer().token_to_id("<|endoftext|>").unwrap()
    }

    /// Expected tokens of both parts: the last tenth of each file is held out, starting at a line.
    fn expected(&self) -> [Vec<u32>; 2] {
        let (tokenizer, end) = (self.tokenizer(), self.end());
        let mut parts = [Vec::new(), Vec::new()];
        let mut add = |part: usize, text: &str| {
            parts[part].extend(encode_piece(&tokenizer, text).unwrap());
            parts[part].push(end);
        };
        let text = fs::read_to_string(self.path("text.txt")).unwrap();
        let target = text.len() * 9 / 10;
        let cut = target + text[target..].find('\n').unwrap() + 1;
        add(0, &text[..cut]);
        add(1, &text[cut..]);
        let rows = fs::read_to_string(self.path("rows.jsonl")).unwrap();
        let mut offset = 0;
        for row in rows.split_inclusive('\n') {
            // A row that contains the split point belongs to the first part as a whole.
            let part = usize::from(offset > rows.len() * 9 / 10);
            add(part, serde_json::from_str::<Value>(row).unwrap()["text"].as_str().unwrap());
            offset += row.len();
        }
        parts
    }
}

fn tenth() -> TokenizeOptions {
    TokenizeOptions { held_out: 0.1, ..TokenizeOptions::default() }
}

fn all(tokens: &impl Tokens) -> Vec<u32> {
    let mut found = Vec::new();
    tokens.read(0, tokens.len(), &mut found);
    found
}

#[test]
fn nanogpt_files_contain_only_tokens() {
    let work = Work::new();
    let [training, held_out] = work.expected();
    for (dtype, out) in [(None, "u16"), (Some(TokenWidth::U32), "u32")] {
        let (folder, report) = work.tokenized(out, TokenizeOptions { dtype, ..tenth() });
        let bytes = |tokens: &[u32]| -> Vec<u8> {
            match dtype {
                None => tokens.iter().flat_map(|id| u16::try_from(*id).unwrap().to_le_bytes()).collect(),
                Some(_) => tokens.iter().flat_map(|id| id.to_le_bytes()).collect(),
            }
        };
        assert_eq!(fs::read(folder.join("train.bin")).unwrap(), bytes(&training), "{out}");
        assert_eq!(fs::read(folder.join("val.bin")).unwrap(), bytes(&held_out), "{out}");
        assert_eq!((report.training_tokens, report.held_out_tokens), (training.len(), held_out.len()));
        assert_eq!((report.documents, report.shards), (2 + 40, vec!["train.bin".into(), "val.bin".into()]));
    }
}

/// Builds the header independently, following llm.c's `dev/data/data_common.py`.
#[test]
fn llm_c_files_have_a_header_and_numbered_names() {
    let work = Work::new();
    let [training, held_out] = work.expected();
    for (dtype, magic, version) in
        [(TokenWidth::U16, 20_240_520_i32, 1_i32), (TokenWidth::U32, 20_240_801, 7)]
    {
        let out = format!("{magic}");
        let format = ShardFormat::LlmC;
        let options = TokenizeOptions { format, dtype: Some(dtype), shard_tokens: Some(1001), ..tenth() };
        let (folder, report) = work.tokenized(&out, options);
        let file = |tokens: &[u32]| -> Vec<u8> {
            let count = i32::try_from(tokens.len()).unwrap();
            let mut bytes: Vec<u8> =
                [magic, version, count].iter().flat_map(|number| number.to_le_bytes()).collect();
            bytes.resize(1024, 0);
            let narrow = |id: &u32| id.to_le_bytes()[..dtype.bytes()].to_vec();
            bytes.extend(tokens.iter().flat_map(narrow));
            bytes
        };
        let shards: Vec<&[u32]> = training.chunks(1001).collect();
        assert!(shards.len() > 3 && held_out.len() < 1001, "{} {}", training.len(), held_out.len());
        for (index, tokens) in shards.iter().enumerate() {
            let name = format!("train_{index:06}.bin");
            assert_eq!(report.shards[index], name);
            assert_eq!(fs::read(folder.join(&name)).unwrap(), file(tokens), "{name}");
        }
        assert_eq!(fs::read(folder.join("val_000000.bin")).unwrap(), file(&held_out));
        assert_eq!(report.shards.len(), shards.len() + 1);
    }
}

#[test]
fn shards_of_any_layout_read_as_one_sequence() {
    let work = Work::new();
    let [training, held_out] = work.expected();
    let characters = |part: &[u32]| {
        let text = work.tokenizer().decode(part, true).unwrap();
        text.chars().count()
    };
    for (index, shard_tokens) in [None, Some(7), Some(1000)].into_iter().enumerate() {
        for format in [ShardFormat::NanoGpt, ShardFormat::LlmC] {
            let options = TokenizeOptions { format, shard_tokens, ..tenth() };
            let (folder, _) = work.tokenized(&format!("{format:?}{index}"), options);
            for is_foreign in [false, true] {
                if is_foreign {
                    fs::remove_file(folder.join("tokens.json")).unwrap();
                }
                let opened = work.open(&folder).unwrap();
                assert_eq!(all(&opened.training), training);
                let tokens = opened.held_out.unwrap();
                assert_eq!(all(&tokens), held_out);
                assert_eq!(opened.held_out_characters, characters(&held_out));
                // Read across shard boundaries.
                let mut found = Vec::new();
                for start in (0..training.len() - 30).step_by(13) {
                    found.clear();
                    opened.training.read(start, 30, &mut found);
                    assert_eq!(found, training[start..start + 30], "from {start}");
                }
            }
        }
    }
}

/// Writes long texts, because interruptions are checked once per piece.
fn long_texts(work: &Work) {
    let line = |line: u32| format!("Line {line}: the word {} and {}.\n", line % 91, line * 7919 % 10007);
    fs::write(work.path("text.txt"), (0..40_000).map(line).collect::<String>()).unwrap();
    let row = |row: u32| {
        json!({"text": (0..30).map(|part| line(row * 31 + part)).collect::<String>()}).to_string() + "\n"
    };
    fs::write(work.path("rows.jsonl"), (0..1500).map(row).collect::<String>()).unwrap();
}

#[test]
fn resumed_job_writes_identical_files() {
    let work = Work::new();
    long_texts(&work);
    let options = TokenizeOptions { format: ShardFormat::LlmC, shard_tokens: Some(150_001), ..tenth() };
    let (whole, report) = work.tokenized("whole", options.clone());
    let expected = files(&whole);
    assert!(expected.len() > 6, "{}", expected.len());

    let job = work.job("interrupted", TokenizeOptions { resume: true, ..options });
    let mut interruptions = 0;
    let resumed = loop {
        let interrupter = Interrupter::in_phase("encoding", 1 + interruptions % 2);
        match job.run(&interrupter) {
            Ok(report) => break report,
            Err(JobError::Training(TrainingError::Interrupted { state: Some(state) })) => {
                assert_eq!(state, job.out.join("tokens.json"));
                let error = work.refused(&job.out);
                assert!(
                    error.ends_with(
                        "incomplete, because its job was interrupted; resume the job, or remove the folder and start over"
                    ),
                    "{error}"
                );
                spoil(&job.out, &expected, interruptions);
            }
            Err(error) => panic!("{error}"),
        }
        interruptions += 1;
        assert!(interruptions < 100);
    };
    assert!(interruptions > 6, "{interruptions}");
    assert!(files(&job.out) == expected, "other files");
    assert!(resumed.encoded_bytes < report.encoded_bytes && resumed.bytes == report.bytes);
    let again = job.run(&Silent).unwrap();
    assert_eq!((again.encoded_bytes, again.shards), (0, report.shards));
}

/// Simulates a process that was killed after a save.
///
/// Such a process may leave extra data in the incomplete shard, or the completed shard with its header and
/// name. It may also leave the beginning of the next shard and an incomplete manifest.
fn spoil(folder: &Path, whole: &[(String, Vec<u8>)], attempt: u64) {
    let manifest = folder.join("tokens.json.partial-aB3dE6");
    fs::create_dir(&manifest).unwrap();
    fs::write(manifest.join("tokens.json"), "{\"comp").unwrap();
    let partial = entries(folder).into_iter().find(|name| name.ends_with(".bin.partial"));
    let Some(name) = partial else { return };
    let partial = folder.join(&name);
    let mut bytes = fs::read(&partial).unwrap();
    bytes.extend([0xab; 5001]);
    if attempt.is_multiple_of(2) {
        return fs::write(&partial, bytes).unwrap();
    }
    bytes[..12].copy_from_slice(&[7; 12]);
    fs::write(partial.with_extension(""), bytes).unwrap();
    fs::remove_file(&partial).unwrap();
    let later = whole.iter().find(|(later, _)| format!("{later}.partial") > name && later.ends_with(".bin"));
    if let Some((later, _)) = later {
        fs::write(folder.join(format!("{later}.partial")), [1; 3000]).unwrap();
    }
}

#[test]
fn mismatched_job_is_not_resumed() {
    let work = Work::new();
    long_texts(&work);
    let options = TokenizeOptions { shard_tokens: Some(150_001), ..tenth() };
    let job = work.job("out", options.clone());
    let interrupter = Interrupter::in_phase("encoding", 2);
    job.run(&interrupter).unwrap_err();
    let refused = |options: TokenizeOptions| {
        let error = work.job("out", options).run(&Silent).unwrap_err();
        (error.is_usage(), error.to_string().split_once(": ").unwrap().1.to_owned())
    };
    let resumed = TokenizeOptions { resume: true, ..options.clone() };
    assert_eq!(
        refused(options),
        (
            true,
            "the folder is not empty; add `resume` to continue the job in it, or choose another name".into()
        )
    );
    let (is_usage, message) = refused(TokenizeOptions { dtype: Some(TokenWidth::U32), ..resumed.clone() });
    assert!(
        !is_usage
            && message.starts_with(
                "written by a run with different options: dtype was \"u16\" and is now \"u32\";"
            ),
        "{message}"
    );
    let (_, message) = refused(TokenizeOptions { held_out: 0.2, ..resumed.clone() });
    assert!(message.starts_with("written by a run with different options: held_out_from was ["), "{message}");
    let other = TokenizeJob { data: vec![work.path("text.txt")], ..work.job("out", resumed.clone()) };
    let message = other.run(&Silent).unwrap_err().to_string();
    assert!(
        message.contains("written by a run with different data or a different tokenizer; use the same data"),
        "{message}"
    );
    // A text of the same size whose first part differs.
    let text = fs::read_to_string(work.path("text.txt")).unwrap();
    fs::write(work.path("text.txt"), text.replacen("Line 0", "Line 1", 1)).unwrap();
    let (is_usage, message) = refused(resumed.clone());
    assert_eq!(
        (is_usage, message.as_str()),
        (false, "modified after its first part was tokenized; restore the file, or choose another folder")
    );
    fs::write(work.path("text.txt"), text).unwrap();
    // A folder with other contents.
    fs::create_dir(work.path("taken")).unwrap();
    fs::write(work.path("taken/notes"), "mine").unwrap();
    let error = work.job("taken", resumed).run(&Silent).unwrap_err();
    assert!(
        error.is_usage() && error.to_string().ends_with("the folder is not empty; choose another name"),
        "{error}"
    );
    assert_eq!(files(&work.path("taken")), [("notes".to_owned(), b"mine".to_vec())]);
}

/// Reporter that runs a second job in the same folder while the first one is running.
struct ConcurrentJob(TokenizeJob);

impl Reporter for ConcurrentJob {
    fn start(&self, what: &str, total: u64, unit: Unit) -> Box<dyn Progress> {
        if what == "encoding" {
            let before = entries(&self.0.out);
            let refused = self.0.run(&Silent).unwrap_err();
            let expected =
                "another process is writing to this folder; wait until it finishes, or choose another folder";
            assert_eq!(refused.to_string(), format!("{}: {expected}", self.0.out.display()));
            assert!(
                matches!(refused, JobError::Training(TrainingError::InUse { .. })) && !refused.is_usage()
            );
            assert_eq!(entries(&self.0.out), before, "the refused job changes nothing");
        }
        Silent.start(what, total, unit)
    }

    fn note(&self, _: &str) {}
}

#[test]
fn only_one_job_can_write_a_folder() {
    let work = Work::new();
    for resume in [false, true] {
        let job = work.job(&format!("resume-{resume}"), TokenizeOptions { resume, ..tenth() });
        job.run(&ConcurrentJob(job.clone())).unwrap();
        assert_eq!(entries(&job.out), ["tokenizer.json", "tokens.json", "train.bin", "val.bin"]);
    }
}

/// Covers jobs that fail with an incomplete shard, alone or after complete ones.
#[test]
fn failed_job_leaves_nothing_and_can_be_rerun() {
    let work = Work::new();
    let rows = fs::read_to_string(work.path("rows.jsonl")).unwrap();
    for (exists, shard_tokens) in [(false, None), (false, Some(100)), (true, Some(1000))] {
        fs::write(work.path("rows.jsonl"), format!("{rows}\n{{\"txt\": 1}}\n")).unwrap();
        let job =
            work.job(&format!("{exists}-{shard_tokens:?}"), TokenizeOptions { shard_tokens, ..tenth() });
        if exists {
            fs::create_dir(&job.out).unwrap();
        }
        let error = job.run(&Silent).unwrap_err().to_string();
        assert!(error.contains("rows.jsonl: line 41: the object has no `text`"), "{error}");
        assert_eq!(job.out.exists(), exists, "an existing folder is kept");
        assert!(!exists || entries(&job.out).is_empty(), "{:?}", entries(&job.out));
        fs::write(work.path("rows.jsonl"), &rows).unwrap();
        job.run(&Silent).unwrap();
    }
}

#[test]
fn invalid_options_and_texts_are_rejected() {
    let work = Work::new();
    let refused = |options| work.job("out", options).run(&Silent).unwrap_err().to_string();
    assert_eq!(
        refused(TokenizeOptions { shard_tokens: Some(0), ..tenth() }),
        "`shard_tokens`: expected at least 1, found 0"
    );
    let format = ShardFormat::LlmC;
    assert_eq!(
        refused(TokenizeOptions { shard_tokens: Some(1 << 31), format, ..tenth() }),
        "`shard_tokens`: expected 1 to 2147483647, the largest count that llm.c's header can store, found 2147483648"
    );
    assert!(
        refused(TokenizeOptions { held_out: 1.0, ..tenth() }).starts_with("`held_out`: expected a fraction")
    );
    fs::write(work.path("rows.jsonl"), "{\"text\": \"good\"}\n\n{\"txt\": \"bad\"}\n").unwrap();
    let error = refused(TokenizeOptions { held_out: 0.0, ..tenth() });
    assert!(error.ends_with("rows.jsonl: line 3: the object has no `text`"), "{error}");
    let neither = TokenizeJob { model: None, ..work.job("out2", tenth()) };
    assert_eq!(neither.run(&Silent).unwrap_err().to_string(), "specify `model` or `tokenizer`");
}

/// Each case changes a folder in one way and expects an error.
#[test]
fn damaged_shards_are_reported_by_name() {
    let work = Work::new();
    let options = TokenizeOptions { format: ShardFormat::LlmC, shard_tokens: Some(1000), ..tenth() };
    let (whole, _) = work.tokenized("whole", options);
    let name = "train_000001.bin";
    let change_bytes = |folder: &Path, change: &dyn Fn(&mut Vec<u8>)| {
        let mut bytes = fs::read(folder.join(name)).unwrap();
        change(&mut bytes);
        fs::write(folder.join(name), bytes).unwrap();
    };
    let change_json = |folder: &Path, change: &dyn Fn(&mut Value)| {
        let path = folder.join("tokens.json");
        let mut json: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        change(&mut json);
        fs::write(path, json.to_string()).unwrap();
    };
    type Change<'a> = &'a dyn Fn(&Path);
    // Unix and Windows use the same number for this error.
    let not_found = format!("train_000001.bin: {}", std::io::Error::from_raw_os_error(2));
    let cases: [(Change, &str); 12] = [
        (
            &|folder| change_bytes(folder, &|bytes| bytes.truncate(2000)),
            "train_000001.bin: truncated: expected 3024 bytes for 1000 16-bit tokens, found 2000",
        ),
        (&|folder| change_bytes(folder, &Vec::clear), "train_000001.bin: the file is empty"),
        (
            &|folder| change_bytes(folder, &|bytes| bytes.push(0)),
            "train_000001.bin: too long: expected 3024 bytes",
        ),
        (
            &|folder| change_bytes(folder, &|bytes| bytes.extend([0; 2000])),
            "train_000001.bin: the tokens are 32-bit: expected 3024 bytes for 1000 16-bit tokens, found 5024",
        ),
        (&|folder| change_bytes(folder, &|bytes| bytes[0] ^= 1), "train_000001.bin: the header was modified"),
        (
            &|folder| change_bytes(folder, &|bytes| bytes[2000] ^= 1),
            "train_000001.bin: the checksum of the tokens does not match: the file is damaged",
        ),
        (
            &|folder| change_bytes(folder, &|bytes| bytes[2001] = 0xff),
            "train_000001.bin: token 488 (counted from 0) has id 65",
        ),
        (&|folder| fs::remove_file(folder.join(name)).unwrap(), &not_found),
        (
            &|folder| change_json(folder, &|json| json["vocabulary_crc32"] = json!(5)),
            "the tokens come from a different vocabulary (",
        ),
        (&|folder| change_json(folder, &|json| json["complete"] = json!(false)), "its job was interrupted"),
        (
            &|folder| change_json(folder, &|json| json["training"]["shards"][1]["file"] = json!("../x.bin")),
            "tokens.json: not a valid token manifest: `../x.bin` is not a plain file name",
        ),
        (
            &|folder| fs::write(folder.join("tokens.json"), "{\"complete\": tr").unwrap(),
            "tokens.json: not a valid token manifest: ",
        ),
    ];
    for (index, (change, expected)) in cases.into_iter().enumerate() {
        let folder = work.path(&format!("changed{index}"));
        fs::create_dir(&folder).unwrap();
        for (name, bytes) in files(&whole) {
            fs::write(folder.join(name), bytes).unwrap();
        }
        assert!(work.open(&folder).is_ok());
        change(&folder);
        let error = work.refused(&folder);
        assert!(error.contains(expected), "{expected:?} is not in {error:?}");
        assert!(error.contains(&folder.display().to_string()), "{error}");
    }
    let error = TokenFolder::open(&whole, (&work.tokenizer(), 200), &Silent).unwrap_err().to_string();
    assert!(
        error.contains("train_000000.bin: token ") && error.contains("the vocabulary has 200 tokens"),
        "{error}"
    );
}

#[test]
fn foreign_token_files_are_validated() {
    let work = Work::new();
    let narrow = |ids: &[u16]| -> Vec<u8> { ids.iter().flat_map(|id| id.to_le_bytes()).collect() };
    let wide = |ids: &[u32]| -> Vec<u8> { ids.iter().flat_map(|id| id.to_le_bytes()).collect() };
    let header = |numbers: &[i32], tokens: &[u8]| -> Vec<u8> {
        let mut bytes: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
        bytes.resize(1024, 0);
        bytes.extend(tokens);
        bytes
    };
    let mut count = 0;
    let mut opened = |bytes: &[u8]| {
        count += 1;
        let folder = work.path(&format!("foreign{count}"));
        fs::create_dir(&folder).unwrap();
        fs::write(folder.join("tiny_train.bin"), bytes).unwrap();
        work.open(&folder).map(|opened| all(&opened.training)).map_err(|error| error.to_string())
    };
    assert_eq!(opened(&narrow(&[5, 6, 7])).unwrap(), [5, 6, 7]);
    assert_eq!(opened(&header(&[20_240_520, 1, 3], &narrow(&[5, 6, 7]))).unwrap(), [5, 6, 7]);
    assert_eq!(opened(&header(&[20_240_801, 7, 3], &wide(&[5, 6, 7]))).unwrap(), [5, 6, 7]);
    for (bytes, expected) in [
        (narrow(&[5, 6, 40_000]), "token 2 (counted from 0) has id 40000, but the vocabulary has"),
        (
            narrow(&[5, 6])[..3].to_vec(),
            "3 bytes are not a whole number of 16-bit tokens: the file is truncated",
        ),
        (wide(&[5, 6, 7].repeat(6)), "every second 16-bit number is 0, so the tokens are probably 32-bit"),
        (
            header(&[20_240_520, 2, 3], &narrow(&[5, 6, 7])),
            "llm.c's header has version 2; expected 1 for the magic number 20240520",
        ),
        (
            header(&[20_240_801, 1, 3], &narrow(&[5, 6, 7])),
            "llm.c's header has version 1; expected 7 for the magic number 20240801",
        ),
        (
            header(&[20_240_520, 1, 4], &narrow(&[5, 6, 7])),
            "declares 4 16-bit tokens; expected 1032 bytes including the header, found 1030: truncated",
        ),
        (header(&[20_240_520, 1, 2], &narrow(&[5, 6, 7])), "found 1030: too long"),
        (
            header(&[20_240_520, 1, -5], &narrow(&[5, 6, 7])),
            "llm.c's header declares -5 tokens; expected at least one",
        ),
        (header(&[20_240_520, 1, i32::MAX], &narrow(&[5, 6, 7])), ": truncated"),
        (20_240_520_i32.to_le_bytes().to_vec(), "llm.c's header has version 0"),
        (header(&[20_240_521, 1, 3], &narrow(&[5, 6, 7])), "token 0 (counted from 0) has id"),
        (Vec::new(), "the file is empty"),
    ] {
        let error = opened(&bytes).unwrap_err();
        assert!(
            error.contains(expected) && error.contains("tiny_train.bin: "),
            "{expected:?} is not in {error:?}"
        );
    }
    let empty = work.path("empty");
    fs::create_dir(&empty).unwrap();
    assert!(work.refused(&empty).contains("contains neither tokens.json nor files such as train.bin"));
}

#[test]
fn training_on_token_files_equals_training_on_texts() {
    let work = Work::new();
    let (folder, _) = work.tokenized("tokens", TokenizeOptions { ..tenth() });
    let options = TrainOptions {
        steps: 4,
        batch_size: 2,
        eval_every: 2,
        held_out: 0.1,
        seed: 3,
        ..TrainOptions::default()
    };
    let job = |data: Vec<PathBuf>, out: &str| TrainJob {
        data,
        start: Start::Checkpoint(work.checkpoint.path().to_owned()),
        tokenizer: None,
        out: work.path(out),
        options: options.clone(),
        hub: HubOptions::default(),
    };
    let silent: Arc<dyn Reporter> = Arc::new(Silent);
    let texts = job(vec![work.path("text.txt"), work.path("rows.jsonl")], "of-texts");
    let tokens = job(vec![folder.clone()], "of-tokens");
    let from_texts = texts.run(&silent, &mut |_| {}).unwrap();
    let from_tokens = tokens.run(&silent, &mut |_| {}).unwrap();
    assert!(from_texts.held_out_loss_per_character.unwrap() > 0.1);
    assert_eq!(from_texts.held_out_loss_per_character, from_tokens.held_out_loss_per_character);
    for name in ["model.safetensors", "training-state.safetensors"] {
        assert!(
            fs::read(texts.out.join(name)).unwrap() == fs::read(tokens.out.join(name)).unwrap(),
            "{name}"
        );
    }
    assert!(!texts.out.join("tokens").exists());

    // A new model uses the tokenizer next to the tokens.
    let config = format!(
        r#"{{"vocab_size": {}, "n_positions": 16, "n_embd": 12, "n_layer": 2, "n_head": 3}}"#,
        work.vocab_size()
    );
    let start = Start::Config(Box::new(Gpt2Config::from_json(&config).unwrap()));
    let fresh = TrainJob { start, ..job(vec![folder.clone()], "fresh") };
    fresh.run(&silent, &mut |_| {}).unwrap();
    let vocabulary = |path: &Path| load_tokenizer(path).unwrap().get_vocab(true);
    assert_eq!(vocabulary(&fresh.out), vocabulary(work.checkpoint.path()));
    fs::remove_file(folder.join("tokenizer.json")).unwrap();
    let error = TrainJob { out: work.path("none"), ..fresh }.run(&silent, &mut |_| {}).unwrap_err();
    assert!(
        error.is_usage() && error.to_string().contains("no tokenizer.json next to the tokens"),
        "{error}"
    );
    let mixed = job(vec![work.path("text.txt"), folder], "mixed").run(&silent, &mut |_| {}).unwrap_err();
    assert!(
        mixed.is_usage() && mixed.to_string().contains("a folder of tokens cannot be combined"),
        "{mixed}"
    );
}
