//! Dictionary training on texts and shards: identical files after interruptions, and rejected jobs.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use candle_gpt2_engine::{HubOptions, LoadedModel, ModelOptions, Reporter, RowFile, Silent};
use candle_gpt2_interpret::named_sites;
use candle_gpt2_jobs::{
    ActivationsJob, ActivationsOptions, JobError, Start, TrainEvent, TrainJob, TrainOptions, TrainReport,
};
use candle_gpt2_testing::{CheckpointFolder, files};
use candle_gpt2_training::{DictionaryKind, Task, layer_files};
use serde_json::Value;

use crate::interrupter::{Interrupter, scenes};

struct Work {
    folder: tempfile::TempDir,
    checkpoint: CheckpointFolder,
}

impl Work {
    fn new() -> Self {
        let work = Self { folder: tempfile::tempdir().unwrap(), checkpoint: CheckpointFolder::tiny() };
        fs::write(work.path("text.txt"), scenes(300)).unwrap();
        work
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn model(&self) -> LoadedModel {
        let options = ModelOptions { model: self.checkpoint.path().to_owned(), ..ModelOptions::default() };
        options.open(&Silent).unwrap().load(&Silent).unwrap()
    }

    fn job(&self, data: &str, out: &str, options: TrainOptions) -> TrainJob {
        TrainJob {
            data: vec![self.path(data)],
            start: Start::Checkpoint(self.checkpoint.path().to_owned()),
            tokenizer: None,
            out: self.path(out),
            options,
            hub: HubOptions::default(),
        }
    }

    /// Stores activations of the second MLP's input and output, and of the residual stream after it.
    fn cached(&self, bos: Option<u32>) -> PathBuf {
        let rows: String = (0..120)
            .map(|row| format!("{{\"prompt\": \"CITIZEN {row}: What say you, {}?\"}}\n", row * 37 % 101))
            .collect();
        let job = ActivationsJob {
            prompts: "rows.jsonl".into(),
            rows: RowFile::new(Path::new("rows.jsonl"), rows.into_bytes()),
            model: "tiny".into(),
            sites: named_sites("resid_mid,ln2.normalized,mlp_out,1.resid_post", 3).unwrap(),
            bos,
            out: self.path("activations"),
            options: ActivationsOptions { shard_size: 700, resume: false },
        };
        let report = job.run(&self.model(), &Silent).unwrap();
        assert!(report.shards.len() > 3);
        job.out
    }
}

fn options() -> TrainOptions {
    TrainOptions {
        task: Task::Dictionary,
        site: Some("blocks.1.hook_resid_post".into()),
        latents: Some(64),
        k: Some(6),
        steps: 40,
        batch_size: 4,
        context: Some(24),
        lr: Some(4e-3),
        eval_every: 20,
        save_every: 15,
        seed: 3,
        ..TrainOptions::default()
    }
}

fn run(job: &TrainJob) -> Result<TrainReport, JobError> {
    let silent: Arc<dyn Reporter> = Arc::new(Silent);
    job.run(&silent, &mut |_| {})
}

/// Options for a cross-layer transcoder.
fn cross_layer() -> TrainOptions {
    let kind = Some(DictionaryKind::CrossLayerTranscoder);
    TrainOptions { kind, site: Some("hook_resid_mid".into()), ..options() }
}

fn config(job: &TrainJob) -> Value {
    serde_json::from_slice(&fs::read(job.out.join("cfg.json")).unwrap()).unwrap()
}

#[test]
fn training_on_texts_writes_a_sae_lens_folder() {
    let work = Work::new();
    let job = work.job("text.txt", "out", options());
    let report = run(&job).unwrap();
    assert_eq!((report.steps, report.parameters), (40, 64 * (28 + 28 + 1) + 28));
    let metrics = report.dictionary.unwrap();
    assert!(metrics.l0 <= 6.0 && metrics.l0 > 4.0 && metrics.explained_variance > 0.3, "{metrics:?}");
    assert!((report.held_out_loss.unwrap() - (1.0 - metrics.explained_variance)).abs() < 1e-12);
    let config = config(&job);
    assert_eq!(
        (&config["architecture"], &config["k"], &config["d_in"], &config["d_sae"]),
        (&"topk".into(), &6.into(), &28.into(), &64.into())
    );
    assert_eq!(config["metadata"]["hook_name"], "blocks.1.hook_resid_post");
    assert_eq!(
        (&config["metadata"]["context_size"], &config["metadata"]["prepend_bos"]),
        (&24.into(), &false.into())
    );
    let names: Vec<String> = files(&job.out).into_iter().map(|(name, _)| name).collect();
    assert_eq!(
        names,
        ["cfg.json", "log.jsonl", "loss.svg", "sae_weights.safetensors", "training-state.safetensors"]
    );
    // The log contains steps and evaluations.
    let log = fs::read_to_string(job.out.join("log.jsonl")).unwrap();
    let entries: Vec<Value> = log.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(entries.len(), 40 + 2);
    let last = entries.last().unwrap();
    assert!(
        last["explained_variance"].is_f64()
            && last["delta_cross_entropy"].is_f64()
            && last["dead_latents"].is_u64(),
        "{last}"
    );
    assert!(fs::read_to_string(job.out.join("loss.svg")).unwrap().contains("of the variance not explained"));
}

#[test]
fn dictionaries_train_on_activation_shards() {
    let work = Work::new();
    let folder = work.cached(Some(0));
    for (kind, site) in
        [(DictionaryKind::BatchTopK, "1.resid_post"), (DictionaryKind::SkipTranscoder, "1.ln2.normalized")]
    {
        let options = TrainOptions { kind: Some(kind), site: Some(site.into()), ..options() };
        let job = work.job("activations", &kind.to_string(), options);
        let report = run(&job).unwrap();
        let metrics = report.dictionary.unwrap();
        assert!(metrics.explained_variance > 0.2, "{kind}: {metrics:?}");
        // The first token of each text is neither trained on nor measured.
        let all = fs::read_to_string(folder.join("activations.json")).unwrap();
        let all: Value = serde_json::from_str(&all).unwrap();
        let (tokens, sequences) = (all["tokens"].as_u64().unwrap(), all["sequences"].as_u64().unwrap());
        let held_out = report.held_out_tokens as u64;
        assert!(held_out * 12 > tokens && held_out * 8 < tokens, "{held_out} of {tokens} are held out");
        let texts = held_out - metrics.tokens as u64;
        assert_eq!(report.training_tokens as u64, tokens - held_out - (sequences - texts));
        let config = config(&job);
        assert_eq!(config["metadata"]["prepend_bos"], true);
        if kind.is_transcoder() {
            assert_eq!(config["metadata"]["hook_name_out"], "blocks.1.hook_mlp_out");
        }
    }
}

#[test]
fn cross_layer_transcoder_trains_on_texts_and_shards() {
    let work = Work::new();
    work.cached(Some(0));
    let layers: Vec<String> = (0..3).flat_map(layer_files).collect();
    for data in ["text.txt", "activations"] {
        let job = work.job(data, &format!("out-{data}"), TrainOptions { k: None, ..cross_layer() });
        let report = run(&job).unwrap();
        assert_eq!(report.parameters, 3 * (64 * (28 + 1) + 28) + 6 * 64 * 28);
        let metrics = report.dictionary.unwrap();
        let explained = &metrics.explained_variance_per_layer;
        assert!(explained.len() == 3 && explained.iter().all(|variance| *variance > 0.2), "{metrics:?}");
        // The default `k` is 16 per layer.
        assert!(metrics.l0 > 24.0 && metrics.l0 < 72.0, "{}", metrics.l0);
        let mut expected = layers.clone();
        expected.extend(
            ["config.yaml", "log.jsonl", "loss.svg", "training-state.safetensors"].map(str::to_owned),
        );
        expected.sort();
        let names: Vec<String> = files(&job.out).into_iter().map(|(name, _)| name).collect();
        assert_eq!(names, expected);
        let config = fs::read_to_string(job.out.join("config.yaml")).unwrap();
        assert!(config.contains("model_kind: cross_layer_transcoder\nfeature_input_hook: hook_resid_mid\n"));
    }

    // A killed process's leftovers for any layer do not cause the folder to be rejected.
    let out = work.path("killed");
    for left in ["W_enc_0.safetensors.partial-aB3dE6", "W_dec_1.safetensors.partial-aB3dE6"] {
        fs::create_dir_all(out.join(left)).unwrap();
    }
    fs::create_dir(out.join("W_enc_1.safetensors.partial-x2x4x6")).unwrap();
    run(&work.job("text.txt", "killed", TrainOptions { steps: 1, ..cross_layer() })).unwrap();
    assert!(files(&out).into_iter().all(|(name, _)| !name.contains("partial")));
}

/// Changes only weights: a model of the same size is still a different model.
#[test]
fn dictionary_of_another_model_is_not_resumed() {
    let mut work = Work::new();
    let resumed = TrainOptions { resume: true, ..options() };
    run(&work.job("text.txt", "out", options())).unwrap();
    run(&work.job("text.txt", "out", resumed.clone())).unwrap();
    work.checkpoint = CheckpointFolder::tiny().with_tensors(|tensors| {
        let bias = tensors.iter_mut().find(|(name, _)| name.ends_with("ln_f.bias")).unwrap().1;
        *bias = (&*bias + 0.5).unwrap();
    });
    let error = run(&work.job("text.txt", "out", resumed)).unwrap_err().to_string();
    assert!(error.contains("a run with a different model or configuration"), "{error}");
}

#[test]
fn resumed_training_writes_identical_files() {
    let work = Work::new();
    work.cached(None);
    let batch_top_k =
        TrainOptions { kind: Some(DictionaryKind::BatchTopK), dead_after: Some(400), ..options() };
    let cross_layer = TrainOptions { dead_after: Some(400), ..cross_layer() };
    for (data, options) in
        [("text.txt", &batch_top_k), ("activations", &batch_top_k), ("activations", &cross_layer)]
    {
        let name = format!("{data}-{}", options.kind.unwrap());
        let whole = work.job(data, &format!("whole-{name}"), options.clone());
        run(&whole).unwrap();
        let resumed =
            work.job(data, &format!("cut-{name}"), TrainOptions { resume: true, ..options.clone() });
        // Interrupt before the first evaluation, between saved states, and after the second-to-last
        // evaluation.
        for at in [7, 19, 33] {
            let interrupter = Arc::new(Interrupter::new(1));
            let reporter: Arc<dyn Reporter> = interrupter.clone();
            let stopped = resumed.run(&reporter, &mut |event| {
                if let TrainEvent::Entry(entry) = event
                    && entry.step >= at
                {
                    interrupter.begin();
                }
            });
            assert!(stopped.unwrap_err().is_interrupted());
        }
        run(&resumed).unwrap();
        // All files except the log and its curve, which contain times.
        let results = |job: &TrainJob| -> Vec<(String, Vec<u8>)> {
            files(&job.out).into_iter().filter(|(name, _)| !name.starts_with("lo")).collect()
        };
        let (found, expected) = (results(&resumed), results(&whole));
        assert!(expected.len() >= 3);
        for (found, expected) in found.iter().zip(&expected) {
            assert!(found == expected, "{name}: {} for {}", found.0, expected.0);
        }
        assert_eq!(found.len(), expected.len(), "{name}");
        // Different dictionary hyperparameters make it a different training run.
        let other = TrainOptions { resume: true, k: Some(7), ..options.clone() };
        let error = run(&work.job(data, &format!("cut-{name}"), other)).unwrap_err().to_string();
        assert!(error.contains("dictionary was {") && error.contains("use the same options"), "{error}");
    }
}

#[test]
fn incompatible_options_and_data_are_rejected() {
    let work = Work::new();
    let refused = |data: &str, options: TrainOptions| {
        let job = work.job(data, "refused", options);
        let error = run(&job).unwrap_err();
        assert!(!job.out.exists(), "{error}");
        error.to_string()
    };
    let text = |options: TrainOptions| refused("text.txt", options);
    for (options, expected) in [
        (TrainOptions { site: None, ..options() }, "needs `site`"),
        (TrainOptions { task: Task::Text, ..options() }, "`site` needs `task` dictionary"),
        (
            TrainOptions { lora_rank: Some(2), ..options() },
            "`lora_rank` cannot be used with `task` dictionary",
        ),
        (TrainOptions { sample: Some("What".into()), ..options() }, "`sample` needs `task` text or answer"),
        (
            TrainOptions { sparsity: Some(1.0), ..options() },
            "`sparsity` needs `kind` jump-relu, standard or gated; for top-k use `k`",
        ),
        (
            TrainOptions { kind: Some(DictionaryKind::Gated), ..options() },
            "`k` cannot be used with `kind` gated",
        ),
        (TrainOptions { k: Some(65), ..options() }, "`k`: expected from 1 to 64, the number of latents"),
        (TrainOptions { site: Some("blocks.7.hook_resid_post".into()), ..options() }, "there is no block 7"),
        (TrainOptions { context: Some(1), ..options() }, "at least 2 for a dictionary"),
        (
            TrainOptions { site: Some("1.resid_mid".into()), ..cross_layer() },
            "give the hook point without a block",
        ),
        (TrainOptions { output_site: Some("1.mlp_out".into()), ..cross_layer() }, "the outputs of all MLPs"),
        (
            TrainOptions { k: Some(3 * 64 + 1), ..cross_layer() },
            "`k`: expected from 1 to 192, the number of latents",
        ),
    ] {
        let found = text(options);
        assert!(found.contains(expected), "`{expected}` is not in: {found}");
    }
    let from_config = TrainJob {
        start: Start::ConfigFile("config.json".into()),
        ..work.job("text.txt", "refused", options())
    };
    assert!(run(&from_config).unwrap_err().to_string().contains("start from a checkpoint"));

    let folder = work.cached(None);
    let shards = |options: TrainOptions| refused("activations", options);
    let error = shards(TrainOptions { site: Some("blocks.0.hook_resid_post".into()), ..options() });
    assert!(
        error.contains("the folder contains activations at blocks.0.hook_resid_mid, ")
            && error.ends_with("but not at blocks.0.hook_resid_post"),
        "{error}"
    );
    assert!(
        shards(TrainOptions { random_positions: true, ..options() })
            .contains("`random_positions` applies only to texts")
    );
    let other = work.checkpoint.file("model.safetensors");
    let own = fs::read(&other).unwrap();
    let mut changed = own.clone();
    // Changes a weight: the last byte of the last tensor.
    *changed.last_mut().unwrap() ^= 1;
    fs::write(&other, changed).unwrap();
    assert!(shards(options()).contains("the activations were computed by another model"));
    fs::write(&other, own).unwrap();
    // Reject an incomplete folder, and a damaged shard of the correct length.
    let manifest = folder.join("activations.json");
    let written = fs::read_to_string(&manifest).unwrap();
    fs::write(&manifest, written.replace("\"complete\": true", "\"complete\": false")).unwrap();
    assert!(shards(options()).contains("its job was interrupted"));
    fs::write(&manifest, &written).unwrap();
    let shard = folder.join("activations_000000.safetensors");
    let bytes = fs::read(&shard).unwrap();
    let header = 8 + usize::try_from(u64::from_le_bytes(bytes[..8].try_into().unwrap())).unwrap();
    let tensors: Value = serde_json::from_slice(&bytes[8..header]).unwrap();
    let start = tensors["blocks.1.hook_resid_post"]["data_offsets"][0].as_u64().unwrap();
    // A value of the second token, because the first one is not trained on.
    let offset = header + usize::try_from(start).unwrap() + 28 * 4;
    let mut damaged = bytes.clone();
    damaged[offset..offset + 4].copy_from_slice(&f32::INFINITY.to_le_bytes());
    fs::write(&shard, damaged).unwrap();
    let error = shards(options());
    assert!(error.contains("the checksum does not match"), "{error}");
    // Folders from older versions have no checksums, so values are checked on use.
    let mut old: Value = serde_json::from_str(&written).unwrap();
    for shard in old["shards"].as_array_mut().unwrap() {
        assert!(shard.as_object_mut().unwrap().remove("crc32").is_some());
    }
    fs::write(&manifest, old.to_string()).unwrap();
    let error = run(&work.job("activations", "begun", options())).unwrap_err().to_string();
    assert!(
        error.contains("activations_000000.safetensors: `blocks.1.hook_resid_post`: expected finite numbers, found inf at token 1"),
        "{error}"
    );
    let damaged: Vec<u8> = [&[0xff; 8], &bytes[8..]].concat();
    fs::write(&shard, damaged).unwrap();
    assert!(shards(options()).contains("the shard is damaged"));
}
