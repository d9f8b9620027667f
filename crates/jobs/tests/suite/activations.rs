//! Shards of activations: their values, identical files after interruptions, and rejected jobs.

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

/// Two-layer model with a context of 8, and an output folder.
struct Work {
    folder: tempfile::TempDir,
    model: LoadedModel,
}

/// Prompts as ids: short ones, an empty one, and one longer than the context.
fn prompts() -> String {
    let line = |line: usize| {
        let length = [3, 1, 0, 8, 21, 5][line % 6];
        let ids: Vec<usize> = (0..length).map(|index| (7 * line + 3 * index) % 50).collect();
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
fn activations_match_a_run_of_each_sequence() {
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
        // A line of 21 tokens yields three sequences of 8, 8 and 5, even with one of the 8 positions for
        // a BOS token. An empty line yields none.
        let sequences_of = |line: usize| lines.iter().filter(|found| **found == line).count();
        assert_eq!((sequences_of(1), sequences_of(3), sequences_of(5)), (1, 0, 3), "{lines:?}");
        assert!(lines.is_sorted());
    }
}

#[test]
fn resumed_job_writes_identical_files() {
    let work = Work::new();
    let whole = work.job("whole", None);
    let report = whole.run(&work.model, &Silent).unwrap();
    let expected = files(&whole.out);
    let run_until = |job: &ActivationsJob, at| {
        let reporter = Interrupter::in_phase("computing", at);
        job.run(&work.model, &reporter)
    };
    for at in 0..report.shards.len() as u64 {
        let job = work.job("cut", None);
        let error = run_until(&job, at + 1).unwrap_err();
        assert!(error.is_interrupted(), "{error}");
        // Only complete shards exist and are listed. Without any, the folder is missing or empty.
        let created = if job.out.is_dir() { entries(&job.out) } else { Default::default() };
        let names = created.iter().filter(|name| name.ends_with(".safetensors"));
        assert_eq!(names.count() as u64, at, "{created:?}");
        assert_eq!(created.len() as u64, if at == 0 { 0 } else { at + 1 }, "{created:?}");
        if at > 0 {
            // Without `resume`, the job is rejected. A resumed job removes leftovers from another process.
            assert!(work.refused(&job).contains("add `resume`"));
            for name in ["activations.json".to_owned(), format!("activations_{at:06}.safetensors")] {
                fs::create_dir(job.out.join(name + ".partial-Ab12Cd")).unwrap();
            }
        }
        let job = if at > 0 { resumed(&job) } else { job };
        let done = run_until(&job, u64::MAX).unwrap();
        assert_eq!((done.tokens, &done.shards), (report.tokens, &report.shards));
        assert!(done.computed_tokens < report.tokens || at == 0);
        assert_eq!(files(&job.out), expected, "cut at {at}");
        // Resuming a finished job computes nothing.
        assert_eq!(run_until(&resumed(&job), 0).unwrap().computed_tokens, 0);
        assert_eq!(files(&job.out), expected);
        fs::remove_dir_all(&job.out).unwrap();
    }
}

/// Covers another file format, in which the same bytes yield different sequences.
#[test]
fn same_bytes_with_different_tokens_are_rejected() {
    let folder = tempfile::tempdir().unwrap();
    candle_gpt2_stories::FILES
        .iter()
        .for_each(|(name, bytes)| fs::write(folder.path().join(name), bytes).unwrap());
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
    assert!(error.contains("checksum of the prompts' token ids was \""), "{error}");
}

/// Checks that shards have ordinary permissions, so that other users can read a shared folder.
#[cfg(unix)]
#[test]
fn shards_have_ordinary_file_permissions() {
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
fn mismatched_folder_is_rejected_with_the_difference() {
    let work = Work::new();
    let job = work.job("out", None);
    job.run(&work.model, &Silent).unwrap();
    let job = resumed(&job);
    let refused = |job: ActivationsJob| work.refused(&job);
    let rows = RowFile::new(Path::new("prompts.jsonl"), prompts().replace("7", "8").into_bytes());
    let error = refused(ActivationsJob { rows, ..job.clone() });
    assert!(error.contains("prompts_file was {") && error.contains("use the same options"), "{error}");
    let error = refused(ActivationsJob { sites: named_sites("resid_pre1", 2).unwrap(), ..job.clone() });
    assert!(
        error.contains("sites was [\"blocks.0.attn.hook_z\"")
            && error.contains("is now [\"blocks.1.hook_resid_pre\"]"),
        "{error}"
    );
    let error = refused(ActivationsJob { bos: Some(3), ..job.clone() });
    assert!(error.contains("bos was null and is now 3"), "{error}");
    let options = ActivationsOptions { shard_size: 51, resume: true };
    let error = refused(ActivationsJob { options, ..job.clone() });
    assert!(error.contains("shard_size was 50 and is now 51"), "{error}");
    // Reject a different model with the same name.
    let other_weights = checkpoint().with_tensors(|tensors| {
        let bias = tensors.iter_mut().find(|(name, _)| name.ends_with("ln_f.bias")).unwrap().1;
        *bias = (&*bias + 0.5).unwrap();
    });
    let error = job.run(&opened(&other_weights), &Silent).unwrap_err().to_string();
    assert!(error.contains("model was \"tiny with weights in f32 (fingerprint "), "{error}");
    // Reject file names that escape the folder, and shards that have changed.
    let manifest = job.out.join("activations.json");
    let written = fs::read_to_string(&manifest).unwrap();
    let damage = |from: &str, to: &str| {
        fs::write(&manifest, written.replacen(from, to, 1)).unwrap();
        let error = work.refused(&job);
        fs::write(&manifest, &written).unwrap();
        error
    };
    let error = damage("activations_000000.safetensors", "../activations.safetensors");
    assert!(error.contains("expected shards named activations_000000.safetensors"), "{error}");
    assert!(damage("activations/1", "activations/9").contains("found gpt2.activations/9"));
    assert!(damage("\"complete\": true", "\"complete\": 5").contains("not a valid activation manifest"));
    let shard = job.out.join("activations_000001.safetensors");
    let bytes = fs::read(&shard).unwrap();
    fs::write(&shard, &bytes[..bytes.len() - 1]).unwrap();
    let error = work.refused(&job);
    assert!(
        error.contains("activations_000001.safetensors: expected") && error.contains("damaged"),
        "{error}"
    );
    fs::remove_file(&shard).unwrap();
    assert!(work.refused(&job).contains("activations_000001.safetensors"));
    // Reject flipped bits anywhere in a shard.
    for offset in [0, 9, bytes.len() / 2, bytes.len() - 1] {
        let mut flipped = bytes.clone();
        flipped[offset] ^= 1;
        fs::write(&shard, &flipped).unwrap();
        let error = work.refused(&job);
        assert!(
            error.contains(
                "activations_000001.safetensors: the checksum does not match; the shard is damaged: remove"
            ),
            "{error}"
        );
    }
    // Accept folders from before checksums were introduced.
    fs::write(&shard, &bytes).unwrap();
    let mut old: Value = serde_json::from_str(&written).unwrap();
    for shard in old["shards"].as_array_mut().unwrap() {
        shard.as_object_mut().unwrap().remove("crc32").unwrap();
    }
    fs::write(&manifest, old.to_string()).unwrap();
    assert_eq!(job.run(&work.model, &Silent).unwrap().computed_tokens, 0);
}

#[test]
fn invalid_jobs_are_rejected_before_the_model_runs() {
    let work = Work::new();
    let with_rows = |rows: &str| {
        let rows = RowFile::new(Path::new("prompts.jsonl"), rows.as_bytes().to_vec());
        let error = work.refused(&ActivationsJob { rows, ..work.job("refused", None) });
        assert!(!work.folder.path().join("refused").exists(), "{error}");
        error
    };
    assert_eq!(
        with_rows("{\"ids\": [1]}\n\nnonsense\n").split(": expected {").next(),
        Some("prompts.jsonl: line 3")
    );
    let vocabulary = work.model.config().vocab_size;
    let error = with_rows(&format!("{{\"ids\": [1, {vocabulary}]}}\n"));
    assert_eq!(
        error,
        format!("prompts.jsonl: line 1: token {vocabulary} is outside the vocabulary of {vocabulary} tokens")
    );
    assert_eq!(with_rows("{\"ids\": []}\n"), "prompts.jsonl: the file contains no tokens");
    assert_eq!(with_rows(""), "prompts.jsonl: the file contains no tokens");
    let with_sites = |sites: Vec<Site>| work.refused(&ActivationsJob { sites, ..work.job("refused", None) });
    assert!(
        with_sites(named_sites("pattern", 2).unwrap())
            .starts_with("`sites`: blocks.0.attn.hook_pattern does not have one vector")
    );
    assert!(with_sites(Vec::new()).contains("at least one hook point"));
    let options = ActivationsOptions { shard_size: 0, resume: false };
    let job = ActivationsJob { options, ..work.job("refused", None) };
    assert_eq!(work.refused(&job), "`shard_size`: expected at least 1, found 0");
    let taken: PathBuf = work.folder.path().join("taken");
    fs::create_dir(&taken).unwrap();
    fs::write(taken.join("notes.txt"), "mine").unwrap();
    let job = ActivationsJob { out: taken, ..work.job("refused", None) };
    assert!(work.refused(&job).contains("the folder is not empty"));
    assert!(
        work.refused(&resumed(&job)).contains("the folder is not empty"),
        "there is nothing to resume from"
    );
}

#[test]
fn manifest_describes_the_shards() {
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
