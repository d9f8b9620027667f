//! Tests dictionary training: results on data with known structure, metrics, states and files.

use std::collections::{BTreeMap, HashMap};
use std::fs;

use candle_core::{DType, Device, Tensor};
use candle_gpt2::{Gpt2Config, Gpt2LMHeadModel};
use candle_gpt2_arithmetic::RandomStream;
use candle_gpt2_interpret::{
    Dictionary, DictionaryConfig, GraphOptions, LatentActivation, ReplacementModel, Run, TranscoderInput,
    TranscoderLayer, Transcoders, TranscodersConfig, named_sites,
};
use candle_gpt2_testing::{files, pattern, temporary_folder, values};
use candle_gpt2_training::state::{self, Progress};
use candle_gpt2_training::{
    ActivationRows, CONFIG_FILE, Data, DictionaryKind, DictionaryNumbers, Evaluation, HeldOut,
    Hyperparameters, LAYERS_CONFIG_FILE, Parameters, RowValues, Schedule, Task, Trainer, TrainingError,
    WEIGHTS_FILE, Windows, layer_files,
};
use candle_gpt2_weights::{TensorFile, WrittenDType};
use serde_json::Value;

const WIDTH: usize = 24;

fn sizes() -> Gpt2Config {
    Gpt2Config { vocab_size: 31, n_positions: 12, n_embd: WIDTH, n_layer: 2, n_head: 3, ..Gpt2Config::gpt2() }
}

/// Returns a model with logits that differ enough for ablations to change the loss.
fn model() -> Gpt2LMHeadModel {
    model_of(&sizes())
}

fn model_of(sizes: &Gpt2Config) -> Gpt2LMHeadModel {
    let parameters = Parameters::initialize(sizes, 3, &Device::Cpu).unwrap();
    let tensors: HashMap<String, Tensor> = parameters
        .iter()
        .map(|(name, variable)| {
            let value = variable.as_tensor().detach();
            let value = if name.ends_with("weight") && !name.contains("ln_") {
                (value * 6.0).unwrap()
            } else {
                value
            };
            (name.to_owned(), value)
        })
        .collect();
    let vb = candle_nn::VarBuilder::from_tensors(tensors, DType::F32, &Device::Cpu);
    Gpt2LMHeadModel::load(sizes, candle_gpt2::ByOutput(vb)).unwrap()
}

fn numbers(kind: DictionaryKind, latents: usize, k: usize) -> Hyperparameters {
    let is_cross_layer = kind == DictionaryKind::CrossLayerTranscoder;
    Hyperparameters {
        task: Task::Dictionary,
        steps: 600,
        batch_size: 8,
        context: 12,
        learning_rate: 4e-3,
        schedule: Schedule::Linear,
        final_share: 0.01,
        weight_decay: 0.0,
        beta_2: 0.999,
        dictionary: Some(DictionaryNumbers {
            kind,
            site: if is_cross_layer { "hook_resid_mid" } else { "blocks.0.hook_resid_post" }.into(),
            output_site: (kind.is_transcoder() && !is_cross_layer).then(|| "blocks.1.hook_mlp_out".into()),
            latents,
            k,
            sparsity: if kind.is_penalized() { 0.02 } else { 1.0 },
            dead_after: 20_000,
        }),
        ..Hyperparameters::default()
    }
}

fn trainer(numbers: &Hyperparameters) -> Trainer {
    Trainer::with_dictionary((model(), "tiny".into()), false, numbers.clone()).unwrap()
}

/// Low-rank Gaussian values around a mean; the targets are a linear map of them.
#[derive(Clone)]
struct Gaussians {
    x: Vec<f32>,
    y: Vec<f32>,
}

impl Gaussians {
    fn new(rank: usize, seed: u64) -> Self {
        let mut generator = RandomStream::new(7);
        let mut matrix =
            |rows: usize| -> Vec<f64> { (0..rows * WIDTH).map(|_| generator.normal()).collect() };
        let (basis, written, mean) = (matrix(rank), matrix(rank), matrix(1));
        let mut generator = RandomStream::new(seed);
        let (mut x, mut y) = (Vec::new(), Vec::new());
        for _ in 0..5000 {
            let inner: Vec<f64> = (0..rank).map(|_| generator.normal()).collect();
            let along = |rows: &[f64], place: usize| -> f64 {
                inner.iter().enumerate().map(|(index, value)| value * rows[index * WIDTH + place]).sum()
            };
            #[expect(clippy::cast_possible_truncation, reason = "values are f32")]
            let push = |to: &mut Vec<f32>, value: f64| to.push(value as f32);
            (0..WIDTH).for_each(|place| push(&mut x, 3.0 * mean[place] + along(&basis, place)));
            (0..WIDTH).for_each(|place| push(&mut y, mean[place] - 0.1 * along(&written, place)));
        }
        Self { x, y }
    }

    fn tensor(&self) -> Tensor {
        rows(&self.x)
    }
}

fn rows(values: &[f32]) -> Tensor {
    Tensor::from_slice(values, (values.len() / WIDTH, WIDTH), &Device::Cpu).unwrap()
}

/// Input and target values of each block.
struct FixedRows(Vec<[Vec<f32>; 2]>);

impl FixedRows {
    /// Creates values for a kind of dictionary.
    ///
    /// The target of the second block depends only on the first block's input, not on its own.
    fn new(kind: DictionaryKind, rank: usize, seed: u64) -> Self {
        let Gaussians { x, y } = Gaussians::new(rank, seed);
        Self(match kind {
            DictionaryKind::CrossLayerTranscoder => {
                let later =
                    y.chunks(WIDTH).flat_map(|row| row.iter().rev().map(|value| 5.0 * value + 2.0)).collect();
                vec![[x, y], [Gaussians::new(rank, seed + 100).x, later]]
            }
            kind if kind.is_transcoder() => vec![[x, y]],
            _ => vec![[x.clone(), x]],
        })
    }
}

impl RowValues for FixedRows {
    fn len(&self) -> usize {
        self.0[0][0].len() / WIDTH
    }

    fn read(&self, rows: &[usize]) -> candle_core::Result<[Tensor; 2]> {
        let of = |side: usize| {
            let of_blocks = self.0.iter().flat_map(|pair| {
                rows.iter().flat_map(|row| pair[side][row * WIDTH..(row + 1) * WIDTH].iter().copied())
            });
            Tensor::from_vec(
                of_blocks.collect::<Vec<f32>>(),
                (self.0.len() * rows.len(), WIDTH),
                &Device::Cpu,
            )
        };
        Ok([of(0)?, of(1)?])
    }
}

fn gaussians(rank: usize, numbers: &Hyperparameters) -> ActivationRows {
    let kind = numbers.dictionary.as_ref().unwrap().kind;
    ActivationRows::new(FixedRows::new(kind, rank, 1), numbers.context, numbers.seed).unwrap()
}

fn take(trainer: &mut Trainer, steps: u64, data: &dyn Data) {
    for _ in 0..steps {
        trainer.step(data).unwrap();
    }
}

/// Returns the tensors and configuration of a saved dictionary.
fn saved(trainer: &Trainer) -> (HashMap<String, Tensor>, Value) {
    let folder = temporary_folder();
    assert!(trainer.save_dictionary(folder.path(), WrittenDType::F32).unwrap());
    let tensors = TensorFile::read(&folder.path().join(WEIGHTS_FILE)).unwrap().tensors;
    let config = fs::read_to_string(folder.path().join(CONFIG_FILE)).unwrap();
    (tensors.into_iter().collect(), serde_json::from_str(&config).unwrap())
}

/// Returns the saved dictionary as `interpret` reads it.
fn read(trainer: &Trainer) -> Dictionary {
    let (tensors, config) = saved(trainer);
    let config = DictionaryConfig::from_json(&config.to_string()).unwrap();
    Dictionary::from_tensors(&tensors.into_iter().collect(), &config).unwrap()
}

fn assert_unit_directions(trainer: &Trainer) {
    for row in saved(trainer).0["W_dec"].to_vec2::<f32>().unwrap() {
        let length = row.iter().map(|value| f64::from(*value).powi(2)).sum::<f64>().sqrt();
        assert!((length - 1.0).abs() < 1e-5, "{length}");
    }
}

/// The values have rank 4, so 4 directions suffice; each token may use 8.
#[test]
fn low_rank_values_are_explained_by_few_latents() {
    for kind in [DictionaryKind::TopK, DictionaryKind::BatchTopK, DictionaryKind::Matryoshka] {
        let numbers = numbers(kind, 96, 8);
        let data = gaussians(4, &numbers);
        let mut trainer = trainer(&numbers);
        take(&mut trainer, numbers.steps, &data);
        assert_unit_directions(&trainer);
        // Evaluate the saved dictionary on values that were not in the training data.
        let fresh = Gaussians::new(4, 2).tensor();
        let dictionary = read(&trainer);
        let explained = dictionary.explained(&fresh).unwrap();
        let unexplained = 1.0 - explained.variance_explained.unwrap();
        assert!(unexplained < 0.01, "{kind}: {unexplained}");
        match kind {
            DictionaryKind::TopK => {
                assert_eq!(dictionary.config().activation, LatentActivation::TopK { k: 8 });
                let latents = dictionary.encode(&fresh).unwrap().to_vec2::<f32>().unwrap();
                let most = latents.iter().map(|row| row.iter().filter(|value| **value != 0.0).count()).max();
                assert!(most.unwrap() <= 8, "{most:?}");
            }
            _ => assert!((explained.mean_l0 - 8.0).abs() < 0.05 * 8.0, "{kind}: {}", explained.mean_l0),
        }
    }
}

/// The threshold must not depend mostly on the first batch.
#[test]
fn threshold_of_a_short_training_is_the_mean_over_batches() {
    const BATCHES: usize = 6;
    for accumulate in [1, 2] {
        // Such a small rate changes no parameter, so every step has the latents of the saved dictionary.
        let numbers = numbers(DictionaryKind::BatchTopK, 96, 8);
        let numbers = Hyperparameters { learning_rate: 1e-30, accumulate, ..numbers };
        let data = gaussians(4, &numbers);
        let mut trainer = trainer(&numbers);
        take(&mut trainer, (BATCHES / accumulate) as u64, &data);
        let (mut tensors, config) = saved(&trainer);
        let thresholds = tensors["threshold"].to_vec1::<f32>().unwrap();
        tensors.insert("threshold".into(), tensors["threshold"].zeros_like().unwrap());
        let config = DictionaryConfig::from_json(&config.to_string()).unwrap();
        let open = Dictionary::from_tensors(&tensors.into_iter().collect(), &config).unwrap();
        let smallest_kept: Vec<f64> = (0..BATCHES)
            .map(|batch| {
                let first = (batch * numbers.batch_size) as u64;
                let [x, _] = data.examples(first, numbers.batch_size).activations().unwrap().unwrap();
                let mut latents = values(&open.encode(&x).unwrap());
                latents.sort_by(|a, b| b.total_cmp(a));
                latents[8 * numbers.batch_size * numbers.context - 1]
            })
            .collect();
        let mean = smallest_kept.iter().sum::<f64>() / BATCHES as f64;
        assert!(
            thresholds.iter().all(|threshold| (f64::from(*threshold) - mean).abs() < 1e-4 * mean),
            "{thresholds:?} for {mean}"
        );
        assert!((smallest_kept[0] - mean).abs() > 1e-3 * mean, "{smallest_kept:?}");
    }
}

#[test]
fn jumprelu_gated_and_standard_kinds_explain_values() {
    let kinds =
        [(DictionaryKind::JumpRelu, 10.0), (DictionaryKind::Gated, 40.0), (DictionaryKind::Standard, 40.0)];
    for (kind, most_active) in kinds {
        let numbers = numbers(kind, 96, 8);
        let data = gaussians(4, &numbers);
        let mut trainer = trainer(&numbers);
        take(&mut trainer, numbers.steps, &data);
        assert_unit_directions(&trainer);
        let explained = read(&trainer).explained(&Gaussians::new(4, 2).tensor()).unwrap();
        let unexplained = 1.0 - explained.variance_explained.unwrap();
        assert!(unexplained < 0.05 && explained.mean_l0 < most_active, "{kind}: {explained:?}");
    }
}

/// Only a matryoshka's first latents explain the values on their own.
#[test]
fn first_matryoshka_latents_explain_values_alone() {
    let [nested, other] = [DictionaryKind::Matryoshka, DictionaryKind::BatchTopK].map(|kind| {
        let numbers = numbers(kind, 96, 8);
        let mut trainer = trainer(&numbers);
        take(&mut trainer, numbers.steps, &gaussians(4, &numbers));
        let (dictionary, fresh) = (read(&trainer), Gaussians::new(4, 2).tensor());
        let latents = dictionary.encode(&fresh).unwrap();
        let first = Tensor::cat(
            &[latents.narrow(1, 0, 24).unwrap(), latents.narrow(1, 24, 72).unwrap().zeros_like().unwrap()],
            1,
        );
        let left = (dictionary.decode(&first.unwrap(), &fresh).unwrap() - &fresh).unwrap();
        values(&left).iter().map(|value| value * value).sum::<f64>()
            / values(&fresh).iter().map(|value| value * value).sum::<f64>()
    });
    assert!(nested < 0.1 && other > 3.0 * nested, "{nested} and {other}");
}

#[test]
fn transcoders_predict_one_hook_point_from_another() {
    let mut unexplained = Vec::new();
    for kind in [DictionaryKind::Transcoder, DictionaryKind::SkipTranscoder] {
        let numbers = numbers(kind, 96, 8);
        let data = gaussians(4, &numbers);
        let mut trainer = trainer(&numbers);
        take(&mut trainer, numbers.steps, &data);
        assert_unit_directions(&trainer);
        let fresh = Gaussians::new(4, 2);
        let y = rows(&fresh.y);
        let dictionary = read(&trainer);
        assert_eq!(dictionary.config().site.to_string(), "blocks.0.hook_resid_post");
        assert_eq!(dictionary.explained_site().to_string(), "blocks.1.hook_mlp_out");
        let explained = dictionary.explained_target(&fresh.tensor(), &y).unwrap();
        // Outside training, the threshold is a running mean over batches.
        assert!((explained.mean_l0 - 8.0).abs() < 0.1 * 8.0, "{kind}: {}", explained.mean_l0);
        unexplained.push(1.0 - explained.variance_explained.unwrap());
        let (_, config) = saved(&trainer);
        assert_eq!(config["apply_b_dec_to_input"], false);
        assert_eq!(
            (&config["d_in"], &config["d_out"], &config["d_sae"]),
            (&24.into(), &24.into(), &96.into())
        );
    }
    assert!(
        unexplained[0] < 0.02 && unexplained[1] < 0.01,
        "{unexplained:?}: the skip connection can represent the linear map"
    );
}

/// Half-precision files are half the size and hold the same values, rounded to 8 significant bits.
#[test]
fn dictionary_can_be_saved_in_half_precision() {
    let numbers = numbers(DictionaryKind::Transcoder, 96, 8);
    let trainer = trainer(&numbers);
    let (exact, config) = saved(&trainer);
    let folder = temporary_folder();
    assert!(trainer.save_dictionary(folder.path(), WrittenDType::BF16).unwrap());
    let file = folder.path().join(WEIGHTS_FILE);
    let numbers: usize = exact.values().map(Tensor::elem_count).sum();
    let bytes = usize::try_from(fs::metadata(&file).unwrap().len()).unwrap();
    assert!((2 * numbers..2 * numbers + 1024).contains(&bytes), "{bytes} bytes for {numbers} numbers");
    for (name, rounded) in TensorFile::read(&file).unwrap().tensors {
        let [found, expected] =
            [&rounded, &exact[&name]].map(|tensor| tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap());
        assert!(found.iter().zip(&expected).all(|(a, b)| (a - b).abs() <= b.abs() / 256.0), "{name}");
    }
    let read = fs::read_to_string(folder.path().join(CONFIG_FILE)).unwrap();
    assert_eq!(serde_json::from_str::<Value>(&read).unwrap(), config);
}

/// Returns the tensors of a saved cross-layer transcoder by layer, and its configuration.
fn saved_layers(trainer: &Trainer) -> (Vec<BTreeMap<String, Tensor>>, TranscodersConfig) {
    let folder = temporary_folder();
    assert!(trainer.save_dictionary(folder.path(), WrittenDType::F32).unwrap());
    let mut names = trainer.dictionary_files();
    names.sort();
    assert_eq!(files(folder.path()).into_iter().map(|(name, _)| name).collect::<Vec<_>>(), names);
    let layers = (0..trainer.config().n_layer).map(|layer| {
        let of = |name: &String| TensorFile::read(&folder.path().join(name)).unwrap().tensors;
        layer_files(layer).iter().flat_map(of).collect()
    });
    let config = fs::read_to_string(folder.path().join(LAYERS_CONFIG_FILE)).unwrap();
    // Each line has a key and a string.
    let keys = config.lines().map(|line| {
        let (key, text) = line.split_once(": ").unwrap();
        (key.to_owned(), Value::from(text.trim_matches('"')))
    });
    let config = Value::Object(keys.collect());
    assert_eq!(config["model_name"], "tiny");
    (layers.collect(), TranscodersConfig::from_json(&config.to_string()).unwrap())
}

/// Computes each layer's output from the inputs, and counts active latents, using only the files.
fn written(layers: &[BTreeMap<String, Tensor>], inputs: &[Tensor]) -> (Vec<Tensor>, f64) {
    let of = |layer: usize, name: &str| layers[layer][&format!("{name}_{layer}")].clone();
    let latents = inputs.iter().enumerate().map(|(layer, x)| {
        let before = x.matmul(&of(layer, "W_enc").t().unwrap()).unwrap();
        let before = before.broadcast_add(&of(layer, "b_enc")).unwrap();
        let is_active = before.broadcast_gt(&of(layer, "threshold")).unwrap().to_dtype(DType::F32).unwrap();
        (before.relu().unwrap() * is_active).unwrap()
    });
    let latents: Vec<Tensor> = latents.collect();
    let outputs = (0..layers.len()).map(|target| {
        let bias = of(target, "b_dec").broadcast_as(inputs[0].shape()).unwrap();
        (0..=target).fold(bias, |sum, layer| {
            let decoder = of(layer, "W_dec").narrow(1, target - layer, 1).unwrap().squeeze(1).unwrap();
            (sum + latents[layer].matmul(&decoder.contiguous().unwrap()).unwrap()).unwrap()
        })
    });
    let active = latents.iter().map(|latents| values(latents).iter().filter(|value| **value > 0.0).count());
    (outputs.collect(), active.sum::<usize>() as f64)
}

/// Returns the fraction of variance unexplained.
fn unexplained(written: &Tensor, wanted: &Tensor) -> f64 {
    let squares = |tensor: Tensor| values(&tensor).iter().map(|value| value * value).sum::<f64>();
    let mean = wanted.mean_keepdim(0).unwrap();
    squares((written - wanted).unwrap()) / squares(wanted.broadcast_sub(&mean).unwrap())
}

#[test]
fn cross_layer_transcoder_predicts_later_layers() {
    let numbers = numbers(DictionaryKind::CrossLayerTranscoder, 96, 8);
    let data = gaussians(4, &numbers);
    let mut trainer = trainer(&numbers);
    take(&mut trainer, numbers.steps, &data);
    // A direction consists of a latent's outputs to all layers.
    let decoder = trainer.parameters().get("W_dec").unwrap().reshape((3, 96, WIDTH)).unwrap();
    let lengths = values(&decoder.sqr().unwrap().sum(2).unwrap());
    for latent in 0..96 {
        assert!((lengths[latent] + lengths[96 + latent] - 1.0).abs() < 1e-5, "{latent} of layer 0");
        assert!((lengths[192 + latent] - 1.0).abs() < 1e-5, "{latent} of layer 1");
    }

    let FixedRows(fresh) = FixedRows::new(DictionaryKind::CrossLayerTranscoder, 4, 2);
    let [inputs, outputs] =
        [0, 1].map(|side| fresh.iter().map(|pair| rows(&pair[side])).collect::<Vec<Tensor>>());
    let (mut layers, config) = saved_layers(&trainer);
    assert!(config.is_cross_layer && config.input == TranscoderInput::ResidMid);
    let (found, active) = written(&layers, &inputs);
    for (layer, (found, wanted)) in found.iter().zip(&outputs).enumerate() {
        let unexplained = unexplained(found, wanted);
        assert!(unexplained < 0.02, "layer {layer}: {unexplained}");
    }
    assert!((active / 5000.0 - 8.0).abs() < 0.05 * 8.0, "{}", active / 5000.0);
    // Only the matrix from the first to the second layer explains the second output.
    let decoder = layers[0]["W_dec_0"].narrow(1, 0, 1).unwrap();
    let alone = Tensor::cat(&[&decoder, &decoder.zeros_like().unwrap()], 1).unwrap();
    layers[0].insert("W_dec_0".into(), alone);
    assert!(unexplained(&written(&layers, &inputs).0[1], &outputs[1]) > 0.9);
}

/// Checks that the saved files give the same features and outputs as the trained dictionary.
#[test]
fn saved_cross_layer_transcoder_matches_the_trained_one() {
    let (trainer, [untrained, trained]) = trained_on_texts(DictionaryKind::CrossLayerTranscoder, 64);
    assert!(trained.loss < 0.7 * untrained.loss, "{} of {}", trained.loss, untrained.loss);
    let metrics = trained.dictionary.unwrap();
    assert!((trained.loss - (1.0 - metrics.explained_variance)).abs() < 1e-12);
    assert_eq!(metrics.definitions.len(), 8);
    assert!(metrics.definitions["l0"].contains("all layers"));

    let (tensors, config) = saved_layers(&trainer);
    let layers = tensors
        .iter()
        .enumerate()
        .map(|(layer, tensors)| TranscoderLayer::cross_layer(tensors, &config, layer, 2).unwrap());
    let transcoders = Transcoders::new(config.input, layers.collect()).unwrap();
    transcoders.check_model(&sizes()).unwrap();
    let model = model();
    let sites = |hook: &str| named_sites(hook, 2).unwrap();
    let (mut inputs, mut outputs, mut features) = (vec![Vec::new(); 2], vec![Vec::new(); 2], 0);
    for ids in texts() {
        let run = Run::new(&model, &ids).unwrap();
        let record = run.record(sites("resid_mid,mlp_out")).unwrap();
        let rows = |site| record.get(site).unwrap().squeeze(0).unwrap().narrow(0, 1, 11).unwrap();
        for layer in 0..2 {
            inputs[layer].push(rows(sites("resid_mid")[layer]));
            outputs[layer].push(rows(sites("mlp_out")[layer]));
        }
        let options = GraphOptions { skips_first: true, ..GraphOptions::default() };
        features += ReplacementModel::new(&run, &transcoders, &options).unwrap().features();
    }
    let [inputs, outputs] =
        [inputs, outputs].map(|of| of.iter().map(|rows| Tensor::cat(rows, 0).unwrap()).collect::<Vec<_>>());
    let (found, active) = written(&tensors, &inputs);
    // No latent is close enough to its threshold for rounding to matter.
    assert_eq!((active, features as f64), (metrics.l0 * 66.0, active));
    assert!(active > 66.0, "{active}");
    for layer in 0..2 {
        let explained = 1.0 - unexplained(&found[layer], &outputs[layer]);
        let expected = metrics.explained_variance_per_layer[layer];
        // Folding the scales into the weights rounds the weights.
        assert!((explained - expected).abs() < 1e-5, "layer {layer}: {explained} for {expected}");
    }
}

/// A cross-layer transcoder with one block equals a transcoder.
#[test]
fn one_block_cross_layer_transcoder_equals_a_transcoder() {
    let sizes = Gpt2Config { n_layer: 1, ..sizes() };
    let tokens: Vec<u32> = (0..600u32).map(|place| (place * place + 5 * place) % 31).collect();
    let windows = Windows::new(&tokens, 12, 0).unwrap();
    let trained = |kind: DictionaryKind, site: &str| {
        let mut numbers = numbers(kind, 40, 5);
        let dictionary = numbers.dictionary.as_mut().unwrap();
        (dictionary.site, dictionary.output_site, dictionary.dead_after) = (site.into(), None, 300);
        let model = (model_of(&sizes), "tiny".into());
        let mut trainer = Trainer::with_dictionary(model, false, numbers).unwrap();
        take(&mut trainer, 20, &windows);
        let bits: Vec<(String, Vec<u64>)> = trainer
            .parameters()
            .iter()
            .map(|(name, variable)| {
                (name.to_owned(), values(variable).iter().map(|value| value.to_bits()).collect())
            })
            .collect();
        (bits, measured(&trainer).dictionary.unwrap())
    };
    let (single, of_single) = trained(DictionaryKind::Transcoder, "blocks.0.hook_resid_mid");
    let (block, of_block) = trained(DictionaryKind::CrossLayerTranscoder, "hook_resid_mid");
    assert_eq!(single, block);
    assert_eq!(of_block.explained_variance.to_bits(), of_single.explained_variance.to_bits());
    assert_eq!(of_block.cross_entropy, of_single.cross_entropy);
    assert!((of_block.explained_variance_per_layer[0] - of_block.explained_variance).abs() < 1e-12);
}

fn texts() -> Vec<Vec<u32>> {
    (0..6u32).map(|text| (0..12).map(|place| (text * 7 + place * place + 3 * place) % 31).collect()).collect()
}

/// Returns a trainer after 150 steps on sequences, and the evaluations before and after.
fn trained_on_texts(kind: DictionaryKind, latents: usize) -> (Trainer, [Evaluation; 2]) {
    let numbers = Hyperparameters { steps: 150, ..numbers(kind, latents, 12) };
    let tokens: Vec<u32> = (0..600u32).map(|place| (place * place + 5 * place) % 31).collect();
    let windows = Windows::new(&tokens, 12, 0).unwrap();
    let mut trainer = trainer(&numbers);
    let untrained = measured(&trainer);
    take(&mut trainer, numbers.steps, &windows);
    let trained = measured(&trainer);
    (trainer, [untrained, trained])
}

fn measured(trainer: &Trainer) -> Evaluation {
    HeldOut::Texts(texts()).evaluate(trainer).unwrap()
}

/// Returns a trainer whose dictionary has these parameters; the others are zero.
fn with(numbers: &Hyperparameters, set: &[(&str, Tensor)]) -> Trainer {
    let trainer = trainer(numbers);
    for (name, variable) in trainer.parameters().iter() {
        let value = set.iter().find(|(of, _)| *of == name).map(|(_, value)| value.clone());
        variable.set(&value.unwrap_or(variable.zeros_like().unwrap())).unwrap();
    }
    trainer
}

/// Checks the metrics of untrained dictionaries with known parameters.
#[test]
fn metrics_of_known_dictionaries_are_correct() {
    let numbers = numbers(DictionaryKind::TopK, 2 * WIDTH, WIDTH);
    let eye = Tensor::eye(WIDTH, DType::F32, &Device::Cpu).unwrap();
    let both = Tensor::cat(&[&eye, &eye.neg().unwrap()], 0).unwrap();
    // Every value is the sum of its positive and negative parts.
    let identity = measured(&with(&numbers, &[("W_enc", both.clone()), ("W_dec", both)]));
    let metrics = identity.dictionary.unwrap();
    assert!(identity.loss.abs() < 1e-9 && (metrics.explained_variance - 1.0).abs() < 1e-9);
    assert!(metrics.delta_cross_entropy.abs() < 1e-6, "{}", metrics.delta_cross_entropy);
    assert!((metrics.recovered_from_zero.unwrap() - 1.0).abs() < 1e-4);
    assert!((metrics.recovered_from_mean.unwrap() - 1.0).abs() < 1e-4);
    assert_eq!((metrics.tokens, metrics.l0.round()), (66, 24.0), "first tokens are excluded");
    // Compute the model's own loss from its logits.
    let model = model();
    let mut expected = Vec::new();
    for ids in texts() {
        let logits = model.forward(&Tensor::from_slice(&ids, (1, ids.len()), &Device::Cpu).unwrap()).unwrap();
        let logits = logits.squeeze(0).unwrap().to_vec2::<f32>().unwrap();
        expected.extend((1..11).map(|place| {
            let row: Vec<f64> = logits[place].iter().map(|logit| f64::from(*logit)).collect();
            let total: f64 = row.iter().map(|logit| logit.exp()).sum();
            total.ln() - row[ids[place + 1] as usize]
        }));
    }
    let expected = expected.iter().sum::<f64>() / expected.len() as f64;
    assert!(
        (metrics.cross_entropy.model - expected).abs() < 1e-5,
        "{} for {expected}",
        metrics.cross_entropy.model
    );

    let zero = measured(&with(&numbers, &[])).dictionary.unwrap();
    assert_eq!((zero.l0, zero.dead_latents), (0.0, 2 * WIDTH));
    assert_eq!(zero.recovered_from_zero, Some(0.0));
    assert_eq!(zero.cross_entropy.reconstructed.to_bits(), zero.cross_entropy.zero.to_bits());
    assert!((zero.cross_entropy.zero - zero.cross_entropy.model).abs() > 1e-3, "{zero:?}");
    assert!(zero.explained_variance < 0.0, "the mean is not zero");

    // This dictionary always outputs the mean, as mean ablation does.
    let site = candle_gpt2_interpret::named_site("blocks.0.hook_resid_post").unwrap();
    let mut rows = Vec::new();
    for ids in texts() {
        let run = Run::new(&model, &ids).unwrap();
        rows.push(
            run.record([site]).unwrap().get(site).unwrap().squeeze(0).unwrap().narrow(0, 1, 11).unwrap(),
        );
    }
    let mean = Tensor::cat(&rows, 0).unwrap().mean(0).unwrap();
    let alone = measured(&with(&numbers, &[("b_dec", mean)])).dictionary.unwrap();
    assert!(alone.explained_variance.abs() < 1e-6, "{}", alone.explained_variance);
    assert!(alone.recovered_from_mean.unwrap().abs() < 1e-3, "{alone:?}");
    assert!(alone.definitions.contains_key("explained_variance") && alone.definitions.len() == 7);
}

/// The model reads the sequences, and the dictionary learns its activations.
#[test]
fn dictionary_learns_the_activations_of_texts() {
    let (_, [untrained, trained]) = trained_on_texts(DictionaryKind::TopK, 96);
    assert!(trained.loss < 0.5 * untrained.loss, "{} of {}", trained.loss, untrained.loss);
    let metrics = trained.dictionary.unwrap();
    assert!(metrics.l0 <= 12.0 && metrics.l0 > 6.0, "{}", metrics.l0);
    assert!((trained.loss - (1.0 - metrics.explained_variance)).abs() < 1e-12);
}

/// A resumed run must match an uninterrupted one bit for bit.
#[test]
fn resumed_training_is_bit_identical() {
    for (name, kind) in DictionaryKind::NAMES {
        let mut numbers = numbers(kind, 40, 5);
        numbers.accumulate = 2;
        numbers.dictionary.as_mut().unwrap().dead_after = 300;
        let data = gaussians(4, &numbers);
        let bytes = |trainer: &Trainer| {
            let progress = Progress {
                model: state::model_of(trainer),
                numbers: trainer.numbers().clone(),
                data_fingerprint: 5,
                steps_done: trainer.steps_done(),
                best: None,
                evaluations_since: 0,
                is_evaluation_due: false,
                log: None,
            };
            state::to_bytes(trainer, &progress).unwrap()
        };
        let mut whole = trainer(&numbers);
        let expected = numbers.dictionary.as_ref().unwrap().parameter_count(&sizes()).unwrap();
        assert_eq!(whole.parameters().count(), expected, "{name}");
        take(&mut whole, 6, &data);
        let middle = bytes(&whole);
        take(&mut whole, 6, &data);
        let mut resumed = trainer(&numbers);
        state::from_bytes(&middle, "state".as_ref(), &mut resumed, 5).unwrap();
        assert_eq!(bytes(&resumed), middle, "{name}");
        take(&mut resumed, 6, &data);
        assert_eq!(bytes(&resumed), bytes(&whole), "{name}");
        // A dictionary with different hyperparameters rejects the state.
        let mut other = numbers.clone();
        other.dictionary.as_mut().unwrap().k = 6;
        let error = state::from_bytes(&middle, "state".as_ref(), &mut trainer(&other), 5).unwrap_err();
        assert!(error.to_string().contains("dictionary was {"), "{error}");
    }
}

/// A latent with a weak encoder is never among the largest, dies, then learns from the remaining error.
#[test]
fn dead_latents_are_revived() {
    let alive = |dead_after| {
        let mut numbers = numbers(DictionaryKind::TopK, 24, 2);
        (numbers.learning_rate, numbers.schedule) = (1e-2, Schedule::Constant);
        numbers.dictionary.as_mut().unwrap().dead_after = dead_after;
        let data = gaussians(12, &numbers);
        let mut trainer = trainer(&numbers);
        trainer.step(&data).unwrap();
        let encoder = trainer.parameters().get("W_enc").unwrap();
        let halves = [0, 12].map(|first| encoder.narrow(0, first, 12).unwrap());
        let weak = (&halves[1] * 1e-3).unwrap();
        encoder.set(&Tensor::cat(&[&halves[0], &weak], 0).unwrap()).unwrap();
        take(&mut trainer, 400, &data);
        let latents = read(&trainer).encode(&Gaussians::new(12, 2).tensor()).unwrap();
        values(&latents.ne(0f32).unwrap().to_dtype(DType::F32).unwrap().sum(0).unwrap())
    };
    let active = |counts: &[f64]| counts.iter().filter(|count| **count > 0.0).count();
    let (without, with) = (alive(u64::MAX), alive(500));
    assert!(active(&with) > active(&without), "{} and {}", active(&with), active(&without));
}

#[test]
fn invalid_dictionary_options_are_reported() {
    let error_message = |change: &dyn Fn(&mut DictionaryNumbers)| {
        let mut numbers = numbers(DictionaryKind::TopK, 40, 5);
        change(numbers.dictionary.as_mut().unwrap());
        let trainer = Trainer::with_dictionary((model(), "tiny".into()), false, numbers);
        trainer.err().map(|error: TrainingError| error.to_string()).unwrap_or_default()
    };
    let clt = DictionaryKind::CrossLayerTranscoder;
    for (change, expected) in [
        (
            &(|d: &mut DictionaryNumbers| d.site = "blocks.2.hook_resid_pre".into())
                as &dyn Fn(&mut DictionaryNumbers),
            "there is no block 2",
        ),
        (&|d| d.site = "resid".into(), "`site`: "),
        (&|d| d.site = "blocks.0.attn.hook_pattern".into(), "does not have one vector per token"),
        (&|d| d.output_site = Some("blocks.1.hook_mlp_out".into()), "`output_site` is for transcoders"),
        (
            &|d| (d.kind, d.output_site) = (DictionaryKind::Transcoder, Some("hook_embed".into())),
            "comes before",
        ),
        // The embeddings come before all blocks, and the final norm comes after them.
        (
            &|d| {
                d.kind = DictionaryKind::Transcoder;
                (d.site, d.output_site) =
                    ("ln_final.hook_normalized".into(), Some("blocks.1.hook_mlp_out".into()));
            },
            "`output_site`: blocks.1.hook_mlp_out comes before the input ln_final.hook_normalized",
        ),
        (
            &|d| {
                d.kind = DictionaryKind::Transcoder;
                (d.site, d.output_site) = ("ln_final.hook_normalized".into(), Some("hook_embed".into()));
            },
            "`output_site`: hook_embed comes before the input ln_final.hook_normalized",
        ),
        (&|d| d.latents = 0, "`latents`: expected from 1 to"),
        (&|d| d.k = 41, "`k`: expected from 1 to 40, the number of latents, found 41"),
        (&|d| d.k = 0, "`k`: expected from 1"),
        (&|d| d.sparsity = f64::NAN, "`sparsity`: expected a number of at least 0"),
        (&|d| d.dead_after = 0, "`dead_after`: expected at least 1"),
        (
            &|d| (d.kind, d.site) = (clt, "blocks.1.hook_resid_mid".into()),
            "give the hook point without a block",
        ),
        (&|d| (d.kind, d.site) = (clt, "ln2.hook_normalized".into()), "reads hook_resid_mid in every block"),
        (&|d| (d.kind, d.site) = (clt, "hook_mid".into()), "`site`: "),
        (
            &|d| (d.kind, d.site, d.output_site) = (clt, "resid_mid".into(), Some("mlp_out".into())),
            "`output_site`: a cross-layer transcoder writes the outputs of all MLPs",
        ),
        (
            &|d| (d.kind, d.site, d.k) = (clt, "hook_resid_mid".into(), 81),
            "`k`: expected from 1 to 80, the number of latents, found 81",
        ),
    ] {
        let found = error_message(change);
        assert!(found.contains(expected), "{found} for {expected}");
    }
    for (site, output) in [
        ("hook_embed", "blocks.0.hook_mlp_out"),
        ("hook_embed", "ln_final.hook_normalized"),
        ("blocks.1.hook_resid_post", "ln_final.hook_normalized"),
    ] {
        let in_order = |d: &mut DictionaryNumbers| {
            d.kind = DictionaryKind::Transcoder;
            (d.site, d.output_site) = (site.into(), Some(output.into()));
        };
        assert_eq!(error_message(&in_order), "", "{site} to {output}");
    }
    let mut short = numbers(DictionaryKind::TopK, 40, 5);
    short.context = 1;
    let error = Trainer::with_dictionary((model(), "tiny".into()), false, short).err().unwrap();
    assert!(error.to_string().contains("at least 2 for a dictionary"), "{error}");
    let few = ActivationRows::new(FixedRows(vec![[vec![0.0; WIDTH], vec![0.0; WIDTH]]]), 12, 0);
    assert!(few.err().unwrap().to_string().contains("the training data has 1 tokens"));
    // The rows do not depend on the order of the requests.
    let data = gaussians(4, &numbers(DictionaryKind::TopK, 40, 5));
    let first = data.examples(3, 2).activations().unwrap().unwrap();
    drop(data.examples(900, 2));
    let again = data.examples(3, 2).activations().unwrap().unwrap();
    assert_eq!(values(&first[0]), values(&again[0]));
    assert_ne!(values(&first[0]), values(&pattern(&[24, WIDTH], 1.0, 0)));
}
