//! Shards of activations: their numbers, the same files however often the making was interrupted, and what is refused.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};

use candle_core::{Device, Tensor};
use candle_gpt2::Site;
use candle_gpt2_engine::{LoadedModel, ModelOptions, RowFile, Silent};
use candle_gpt2_interpret::{Run, named_sites, token_rows};
use candle_gpt2_jobs::{ActivationsJob, ActivationsOptions, ActivationsReport};
use candle_gpt2_testing::{CheckpointFolder, entries, files, values};
use serde_json::{Value, json};

use crate::interrupter::Interrupter;

/// A model of two layers with a context of 8, and a folder for results.
struct Work {
    folder: tempfile::TempDir,
    model: LoadedModel,
}

/// Prompts of ids: short ones, an empty one, and one that is longer than the context.
fn prompts() -> String {
    let line = |line: usize| {
        let length = [3, 1, 0, 8, 21, 5][line % 6];
        let ids: Vec<usize> = (0..length).map(|place| (7 * line + 3 * place) % 50).collect();
        format!("{{\"ids\": {ids:?}}}\n")
    };
    (0..40).map(line).collect()
}

fn opened(folder: &CheckpointFolder) -> LoadedModel {
    let options = ModelOptions { model: folder.path().to_owned(), ..ModelOptions::default() };
    options.open(&Silent).unwrap().load(&Silent).unwrap()
}

fn checkpoint() -> CheckpointFolder {
    let shorter = CheckpointFolder::tiny().with_config(json!({"n_positions": 8, "n_ctx": 8}));
    shorter.with_tensors(|tensors| {
        let table = tensors.iter_mut().find(|(name, _)| name.ends_with("wpe.weight")).unwrap().1;
        *table = table.narrow(0, 0, 8).unwrap().contiguous().unwrap();
    })
}

impl Work {
    fn new() -> Self {
        Self { folder: tempfile::tempdir().unwrap(), model: opened(&checkpoint()) }
    }

    fn job(&self, out: &str, bos: Option<u32>) -> ActivationsJob {
        ActivationsJob {
            prompts: "prompts.jsonl".into(),
            rows: RowFile::new(Path::new("prompts.jsonl"), prompts().into_bytes()),
            model: "tiny".into(),
            sites: named_sites("resid_pre1,z0,mlp_post0", 2).unwrap(),
            bos,
            out: self.folder.path().join(out),
            options: ActivationsOptions { shard_size: 50, resume: false },
        }
    }

    fn refused(&self, job: &ActivationsJob) -> String {
        let before = job.out.is_dir().then(|| files(&job.out));
        let error = job.run(&self.model, &Silent).unwrap_err();
        assert_eq!(before, job.out.is_dir().then(|| files(&job.out)), "{error}");
        error.to_string()
    }
}

fn resumed(job: &ActivationsJob) -> ActivationsJob {
    let options = ActivationsOptions { resume: true, ..job.options.clone() };
    ActivationsJob { options, ..job.clone() }
}

fn shards(report: &ActivationsReport) -> Vec<HashMap<String, Tensor>> {
    let load = |name: &String| candle_core::safetensors::load(report.out.join(name), &Device::Cpu).unwrap();
    report.shards.iter().map(load).collect()
}

fn numbers(tensor: &Tensor) -> Vec<usize> {
    tensor.to_vec1::<i64>().unwrap().into_iter().map(|number| usize::try_from(number).unwrap()).collect()
}

#[test]
fn every_token_has_the_numbers_of_its_own_run() {
    let work = Work::new();
    for bos in [None, Some(49)] {
        let job = work.job(if bos.is_some() { "bos" } else { "plain" }, bos);
        let report = job.run(&work.model, &Silent).unwrap();
        assert!(report.shards.len() > 3 && report.computed_tokens == report.tokens, "{report:?}");
        let (mut lines, mut tokens) = (Vec::new(), 0);
        for shard in shards(&report) {
            let ids = shard["tokens"].to_vec1::<u32>().unwrap();
            assert!(ids.len() <= 50, "{} tokens", ids.len());
            let starts = numbers(&shard["starts"]);
            lines.extend(numbers(&shard["lines"]));
            for (index, start) in starts.iter().copied().enumerate() {
                let end = starts.get(index + 1).copied().unwrap_or(ids.len());
                let ids = &ids[start..end];
                assert!(ids.len() <= 8 && bos.is_none_or(|bos| ids[0] == bos), "{ids:?}");
                let run = Run::new(work.model.model(), ids).unwrap();
                let record = run.record(job.sites.iter().copied()).unwrap();
                for site in &job.sites {
                    let alone = token_rows(*site, record.get(*site).unwrap()).unwrap();
                    let found = shard[&site.to_string()].narrow(0, start, ids.len()).unwrap();
                    assert_eq!(values(&found), values(&alone), "{site}");
                }
            }
            tokens += ids.len();
        }
        assert_eq!((tokens, lines.len()), (report.tokens, report.sequences));
        // A line of 21 tokens is three sequences of 8, 8 and 5, also with one of the 8 places for a BOS token; an empty line is none.
        let of_line = |line: usize| lines.iter().filter(|found| **found == line).count();
        assert_eq!((of_line(1), of_line(3), of_line(5)), (1, 0, 3), "{lines:?}");
        assert!(lines.is_sorted());
    }
}

#[test]
fn an_interrupted_job_resumes_to_the_same_bytes() {
    let work = Work::new();
    let whole = work.job("whole", None);
    let report = whole.run(&work.model, &Silent).unwrap();
    let expected = files(&whole.out);
    let resuming = |job: &ActivationsJob, at| {
        let reporter = Interrupter::in_phase("computing", at);
        job.run(&work.model, &reporter)
    };
    for at in 0..report.shards.len() as u64 {
        let job = work.job("cut", None);
        let error = resuming(&job, at + 1).unwrap_err();
        assert!(error.is_interrupted(), "{error}");
        // Whole shards alone are there, and are listed; before the first of them the folder is as it was.
        let made = if job.out.is_dir() { entries(&job.out) } else { Default::default() };
        let names = made.iter().filter(|name| name.ends_with(".safetensors"));
        assert_eq!(names.count() as u64, at, "{made:?}");
        assert_eq!(made.len() as u64, if at == 0 { 0 } else { at + 1 }, "{made:?}");
        if at > 0 {
            // Without `resume` it is not touched; what another process left in the making goes.
            assert!(work.refused(&job).contains("add `resume`"));
            for name in ["activations.json".to_owned(), format!("activations_{at:06}.safetensors")] {
                fs::create_dir(job.out.join(name + ".partial-Ab12Cd")).unwrap();
            }
        }
        let job = if at > 0 { resumed(&job) } else { job };
        let done = resuming(&job, u64::MAX).unwrap();
        assert_eq!((done.tokens, &done.shards), (report.tokens, &report.shards));
        assert!(done.computed_tokens < report.tokens || at == 0);
        assert_eq!(files(&job.out), expected, "cut at {at}");
        // A finished one is recognised.
        assert_eq!(resuming(&resumed(&job), 0).unwrap().computed_tokens, 0);
        assert_eq!(files(&job.out), expected);
        fs::remove_dir_all(&job.out).unwrap();
    }
}

/// The same bytes are other sequences as another format, or to another tokenizer.
#[test]
fn the_same_bytes_that_are_other_tokens_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let files = [
        ("config.json", candle_gpt2_stories::CONFIG),
        ("tokenizer.json", candle_gpt2_stories::TOKENIZER),
        ("model.safetensors", candle_gpt2_stories::WEIGHTS),
    ];
    files.iter().for_each(|(name, bytes)| fs::write(folder.path().join(name), bytes).unwrap());
    let options = ModelOptions { model: folder.path().to_owned(), ..ModelOptions::default() };
    let model = options.open(&Silent).unwrap().load(&Silent).unwrap();
    let bytes = b"{\"prompt\": \"The dog ran\"}\n";
    let job = |name: &str| ActivationsJob {
        prompts: name.into(),
        rows: RowFile::new(Path::new(name), bytes.to_vec()),
        model: "built-in".into(),
        sites: named_sites("resid_pre0", model.config().n_layer).unwrap(),
        bos: None,
        out: folder.path().join("out"),
        options: ActivationsOptions { resume: name.ends_with(".jsonl"), ..ActivationsOptions::default() },
    };
    job("prompts.txt").run(&model, &Silent).unwrap();
    let error = job("prompts.jsonl").run(&model, &Silent).unwrap_err().to_string();
    assert!(error.contains("token ids of the prompts is \"with the checksum "), "{error}");
}

/// A shared folder is read by other users, as files are that any program makes.
#[cfg(unix)]
#[test]
fn shards_have_the_rights_of_ordinary_files() {
    use std::os::unix::fs::PermissionsExt;

    let work = Work::new();
    let job = work.job("out", None);
    let report = job.run(&work.model, &Silent).unwrap();
    let ordinary = job.out.join("ordinary");
    fs::write(&ordinary, []).unwrap();
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode();
    assert_eq!(mode(&job.out.join(&report.shards[0])), mode(&ordinary));
}

#[test]
fn a_folder_of_something_else_is_refused_with_what_differs() {
    let work = Work::new();
    let job = work.job("out", None);
    job.run(&work.model, &Silent).unwrap();
    let job = resumed(&job);
    let other = |job: ActivationsJob| work.refused(&job);
    let rows = RowFile::new(Path::new("prompts.jsonl"), prompts().replace("7", "8").into_bytes());
    let told = other(ActivationsJob { rows, ..job.clone() });
    assert!(told.contains("prompts_file is {") && told.contains("give the same ones"), "{told}");
    let told = other(ActivationsJob { sites: named_sites("resid_pre1", 2).unwrap(), ..job.clone() });
    assert!(
        told.contains("sites is [\"blocks.0.attn.hook_z\"")
            && told.contains("[\"blocks.1.hook_resid_pre\"] here"),
        "{told}"
    );
    let told = other(ActivationsJob { bos: Some(3), ..job.clone() });
    assert!(told.contains("bos is null there and 3 here"), "{told}");
    let options = ActivationsOptions { shard_size: 51, resume: true };
    let told = other(ActivationsJob { options, ..job.clone() });
    assert!(told.contains("shard_size is 50 there and 51 here"), "{told}");
    // Another model that has the same name.
    let other_weights = checkpoint().with_tensors(|tensors| {
        let bias = tensors.iter_mut().find(|(name, _)| name.ends_with("ln_f.bias")).unwrap().1;
        *bias = (&*bias + 0.5).unwrap();
    });
    let error = job.run(&opened(&other_weights), &Silent).unwrap_err().to_string();
    assert!(error.contains("model is \"tiny with weights in f32 (fingerprint "), "{error}");
    // Names of files that lead out of the folder, and shards that are not as they were.
    let manifest = job.out.join("activations.json");
    let written = fs::read_to_string(&manifest).unwrap();
    let damage = |from: &str, to: &str| {
        fs::write(&manifest, written.replacen(from, to, 1)).unwrap();
        let told = work.refused(&job);
        fs::write(&manifest, &written).unwrap();
        told
    };
    let told = damage("activations_000000.safetensors", "../activations.safetensors");
    assert!(told.contains("its shards are not activations_000000.safetensors"), "{told}");
    assert!(damage("activations/1", "activations/9").contains("found gpt2.activations/9"));
    assert!(
        damage("\"complete\": true", "\"complete\": 5").contains("not the list of a folder of activations")
    );
    let shard = job.out.join("activations_000001.safetensors");
    let bytes = fs::read(&shard).unwrap();
    fs::write(&shard, &bytes[..bytes.len() - 1]).unwrap();
    let told = work.refused(&job);
    assert!(told.contains("activations_000001.safetensors: expected") && told.contains("damaged"), "{told}");
    fs::remove_file(&shard).unwrap();
    assert!(work.refused(&job).contains("activations_000001.safetensors"));
    // Bits flipped anywhere in a shard.
    for place in [0, 9, bytes.len() / 2, bytes.len() - 1] {
        let mut flipped = bytes.clone();
        flipped[place] ^= 1;
        fs::write(&shard, &flipped).unwrap();
        let told = work.refused(&job);
        assert!(
            told.contains(
                "activations_000001.safetensors: its checksum does not match: it is damaged; remove"
            ),
            "{told}"
        );
    }
    // Folders from before there were checksums.
    fs::write(&shard, &bytes).unwrap();
    let mut old: Value = serde_json::from_str(&written).unwrap();
    for shard in old["shards"].as_array_mut().unwrap() {
        shard.as_object_mut().unwrap().remove("crc32").unwrap();
    }
    fs::write(&manifest, old.to_string()).unwrap();
    assert_eq!(job.run(&work.model, &Silent).unwrap().computed_tokens, 0);
}

#[test]
fn what_cannot_be_written_is_refused_before_the_model_runs() {
    let work = Work::new();
    let with = |rows: &str| {
        let rows = RowFile::new(Path::new("prompts.jsonl"), rows.as_bytes().to_vec());
        let told = work.refused(&ActivationsJob { rows, ..work.job("refused", None) });
        assert!(!work.folder.path().join("refused").exists(), "{told}");
        told
    };
    assert_eq!(with("{\"ids\": [1]}\n\nnonsense\n").split(": not {").next(), Some("prompts.jsonl: line 3"));
    let vocabulary = work.model.config().vocab_size;
    let told = with(&format!("{{\"ids\": [1, {vocabulary}]}}\n"));
    assert_eq!(
        told,
        format!("prompts.jsonl: line 1: token {vocabulary} is outside the vocabulary of {vocabulary}")
    );
    assert_eq!(with("{\"ids\": []}\n"), "prompts.jsonl: the file has no prompt with a token");
    assert_eq!(with(""), "prompts.jsonl: the file has no prompt with a token");
    let of = |sites: Vec<Site>| work.refused(&ActivationsJob { sites, ..work.job("refused", None) });
    assert!(
        of(named_sites("pattern", 2).unwrap())
            .starts_with("`sites`: blocks.0.attn.hook_pattern has no vector")
    );
    assert!(of(Vec::new()).contains("at least one hook point"));
    let options = ActivationsOptions { shard_size: 0, resume: false };
    let job = ActivationsJob { options, ..work.job("refused", None) };
    assert_eq!(work.refused(&job), "`shard_size`: expected at least 1, found 0");
    let taken: PathBuf = work.folder.path().join("taken");
    fs::create_dir(&taken).unwrap();
    fs::write(taken.join("notes.txt"), "mine").unwrap();
    let job = ActivationsJob { out: taken, ..work.job("refused", None) };
    assert!(work.refused(&job).contains("the folder is not empty"));
    assert!(work.refused(&resumed(&job)).contains("the folder is not empty"), "with nothing to go on from");
}

#[test]
fn the_manifest_says_what_the_shards_are_of() {
    let work = Work::new();
    let job = work.job("out", Some(49));
    let report = job.run(&work.model, &Silent).unwrap();
    let manifest: Value =
        serde_json::from_slice(&fs::read(job.out.join("activations.json")).unwrap()).unwrap();
    assert_eq!(manifest["complete"], true);
    assert_eq!(
        manifest["fingerprint"],
        candle_gpt2_engine::fingerprint(work.model.model(), &Silent).unwrap()
    );
    assert_eq!(
        (&manifest["bos"], &manifest["context"], &manifest["dtype"]),
        (&49.into(), &8.into(), &"F32".into())
    );
    assert_eq!(manifest["tokens"], report.tokens);
    let total: u64 =
        manifest["shards"].as_array().unwrap().iter().map(|shard| shard["tokens"].as_u64().unwrap()).sum();
    assert_eq!(total, report.tokens as u64);
}
