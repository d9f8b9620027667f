//! Packed weights against the same checkpoint as plain tensors: the whole model, every precision, with a cache in f16 too.

use std::path::Path;

use candle_core::{DType, Device, Tensor};
use candle_gpt2::{
    ByOutput, Gpt2Cache, Gpt2LMHeadModel, KvDType, LogitsFor, Parameter, Pass, expected_parameters,
};
use candle_gpt2_arithmetic::WeightFormat;
use candle_gpt2_kernels::Matrix;
use candle_gpt2_testing::{CheckpointFolder, STORY, checkpoints, fixture_path};
use candle_gpt2_weights::{Checkpoint, LoadOptions, WeightDType, WeightsError, encode};
use candle_nn::VarBuilder;

/// Logits of a prompt in one piece.
fn logits(model: &Gpt2LMHeadModel, ids: &[u32]) -> Vec<f32> {
    let ids = Tensor::from_slice(ids, (1, ids.len()), &Device::Cpu).unwrap();
    let logits = model.forward_with(&ids, LogitsFor::EveryToken, None, &mut Pass::inference()).unwrap();
    logits.flatten_all().unwrap().to_vec1().unwrap()
}

/// The same with a cache: first half of the prompt, then token by token.
fn cached_logits(model: &Gpt2LMHeadModel, ids: &[u32], kv_dtype: KvDType) -> Vec<f32> {
    let mut cache = Gpt2Cache::new(model.config(), 1, ids.len(), kv_dtype, &Device::Cpu).unwrap();
    let (first, rest) = ids.split_at(ids.len() / 2);
    let mut logits = Vec::new();
    for chunk in std::iter::once(first).chain(rest.chunks(1)) {
        let ids = Tensor::from_slice(chunk, (1, chunk.len()), &Device::Cpu).unwrap();
        let pass = &mut Pass::inference();
        let step = model.forward_with(&ids, LogitsFor::EveryToken, Some(&mut cache), pass).unwrap();
        logits.extend(step.flatten_all().unwrap().to_vec1::<f32>().unwrap());
    }
    logits
}

fn prompt(model: &Gpt2LMHeadModel, tokens: usize) -> Vec<u32> {
    let vocab_size = u32::try_from(model.config().vocab_size).unwrap();
    (0..u32::try_from(tokens).unwrap()).map(|index| (index * 7919 + 3) % vocab_size).collect()
}

/// Largest difference, in shares of the largest logit.
fn difference(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    assert!(a.iter().chain(b).all(|logit| logit.is_finite()));
    let largest = b.iter().fold(0.0f32, |largest, b| largest.max(b.abs()));
    a.iter().zip(b).fold(0.0f32, |worst, (a, b)| worst.max((a - b).abs())) / largest
}

/// The model of plain f32 tensors: the reference of the packed products.
fn dense(checkpoint: &Checkpoint) -> Gpt2LMHeadModel {
    let named = expected_parameters(checkpoint.config()).into_iter().map(|Parameter { name, .. }| {
        let tensor = checkpoint.parameter(&name, &Device::Cpu, &|_| ()).unwrap().unwrap();
        (name, tensor)
    });
    let vb = VarBuilder::from_tensors(named.collect(), DType::F32, &Device::Cpu);
    Gpt2LMHeadModel::load(checkpoint.config(), ByOutput(vb)).unwrap()
}

fn load(checkpoint: &Checkpoint, dtype: WeightDType) -> Gpt2LMHeadModel {
    let options = LoadOptions { dtype: Some(dtype), ..LoadOptions::default() };
    checkpoint.load(&options, &|_| ()).unwrap()
}

/// The formats that compute in f32.
fn assert_float_formats(path: &Path, tokens: usize) {
    let checkpoint = Checkpoint::open(path).unwrap();
    let dense = dense(&checkpoint);
    let ids = prompt(&dense, tokens);
    let expected = logits(&dense, &ids);
    // f32: other orders of the same sums through all layers. f16: weights rounded by 2^-12 of each at most, averaged by the sums
    // and carried through the layers; the figure is about twice what the tiny model shows.
    for (dtype, tolerance) in [(WeightDType::F32, 1e-5), (WeightDType::F16, 1e-3)] {
        let packed = load(&checkpoint, dtype);
        assert_eq!(packed.parameter_count(), dense.parameter_count());
        // Biases, norms and positions stay in f32, and packed matrices fill whole panels.
        let matrix_bytes = if dtype == WeightDType::F16 { 2 } else { 4 };
        assert_eq!(dense.weight_bytes(), 4 * dense.parameter_count());
        assert!(packed.weight_bytes() >= matrix_bytes * dense.parameter_count(), "{dtype}");
        let found = logits(&packed, &ids);
        let off = difference(&found, &expected);
        assert!(off <= tolerance, "{dtype}: logits differ by {off:e} of the largest");
        // q8: keys, values and queries rounded to 2^-8 of the largest of their group; twice what the tiny model shows.
        for (kv_dtype, tolerance) in [(KvDType::F32, 1e-5), (KvDType::F16, 2e-3), (KvDType::Q8, 2e-2)] {
            let off = difference(&cached_logits(&packed, &ids, kv_dtype), &found);
            assert!(off <= tolerance, "{dtype}: with a cache in {kv_dtype:?} the logits differ by {off:e}");
        }
    }
}

#[test]
fn the_tiny_checkpoint_in_floating_point() {
    assert_float_formats(CheckpointFolder::tiny().path(), 24);
}

#[test]
fn a_trained_checkpoint_in_floating_point() {
    if let Some(folder) = checkpoints() {
        assert_float_formats(&folder.join("tarotble"), 64);
    }
}

/// What the rounding to integers does to the predictions of a trained model: how often the most probable token stays, and how
/// far the distributions move (mean Kullback-Leibler divergence from the exact one, in nats). A model of random weights has flat
/// distributions, in which any rounding changes the first token.
///
/// Found were 98.8%, 96.8%, 97.6% and 92.4% of 249 tokens, and divergences of 3.5e-4, 2.0e-3, 5.3e-3 and 1.2e-2: the bounds are twice the
/// tokens lost and twice the divergence. It falls with the square of the rounding, so a step of two bits between formats is
/// seen. In f32 the cache in f16 alone moves it, by 4e-8.
#[test]
fn integers_keep_the_predictions_of_a_trained_model() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/stories");
    let checkpoint = Checkpoint::open(&folder).unwrap();
    let ids = encode(&checkpoint.tokenizer(None).unwrap(), STORY).unwrap();
    assert_eq!(ids.len(), 249);
    let vocab_size = checkpoint.config().vocab_size;
    let expected = logits(&dense(&checkpoint), &ids);
    for (dtype, least_agreement, largest_divergence) in [
        (WeightDType::F32, 1.0, 1e-7),
        (WeightDType::Q8, 0.97, 7e-4),
        (WeightDType::Q6, 0.93, 4e-3),
        (WeightDType::Q5, 0.95, 1.1e-2),
        (WeightDType::Q4, 0.84, 2.5e-2),
    ] {
        let packed = load(&checkpoint, dtype);
        let ways = [
            ("in one piece", logits(&packed, &ids)),
            ("with a cache in f32", cached_logits(&packed, &ids, KvDType::F32)),
            ("with a cache in f16", cached_logits(&packed, &ids, KvDType::F16)),
        ];
        for (way, found) in ways {
            let (agreement, divergence) = compared(&found, &expected, vocab_size);
            let shown = format!("{dtype} {way}: {agreement:.3} agree, divergence {divergence:.2e}");
            assert!(agreement >= least_agreement && divergence <= largest_divergence, "{shown}");
            assert!(
                dtype == WeightDType::F32 || divergence > largest_divergence / 20.0,
                "not rounded: {shown}"
            );
        }
    }
}

/// The share of tokens whose most probable successor is the same, and the mean divergence of `found` from `expected`.
fn compared(found: &[f32], expected: &[f32], vocab_size: usize) -> (f64, f64) {
    assert_eq!(found.len(), expected.len());
    let rows = expected.len() / vocab_size;
    let (mut agreeing, mut divergence) = (0, 0.0);
    for (found, expected) in found.chunks(vocab_size).zip(expected.chunks(vocab_size)) {
        let (found, expected) = (log_softmax(found), log_softmax(expected));
        let most_probable = |row: &[f64]| (0..row.len()).max_by(|a, b| row[*a].total_cmp(&row[*b]));
        agreeing += usize::from(most_probable(&found) == most_probable(&expected));
        divergence += expected.iter().zip(&found).map(|(e, f)| e.exp() * (e - f)).sum::<f64>();
    }
    (agreeing as f64 / rows as f64, divergence / rows as f64)
}

fn log_softmax(logits: &[f32]) -> Vec<f64> {
    assert!(logits.iter().all(|logit| logit.is_finite()));
    let total: f64 = logits.iter().map(|logit| f64::from(*logit).exp()).sum();
    logits.iter().map(|logit| f64::from(*logit) - total.ln()).collect()
}

/// Keys and values are rounded where loading has rounded the weights as coarsely, and nowhere else.
#[test]
fn the_same_weights_have_the_same_caches() {
    let stored_in_f16 = CheckpointFolder::tiny().with_tensors(|tensors| {
        for tensor in tensors.values_mut() {
            *tensor = tensor.to_dtype(DType::F16).unwrap();
        }
    });
    let (full, half) = (CheckpointFolder::tiny(), stored_in_f16);
    let kv_dtype = |folder: &CheckpointFolder, dtype, kv_dtype| {
        let options = LoadOptions { dtype, kv_dtype, ..LoadOptions::default() };
        Checkpoint::open(folder.path()).unwrap().load(&options, &|_| ()).unwrap().kv_dtype()
    };
    for (dtype, of_full, of_half) in [
        (None, KvDType::F32, KvDType::F32),
        (Some(WeightDType::F32), KvDType::F32, KvDType::F32),
        (Some(WeightDType::F16), KvDType::F16, KvDType::F32),
        (Some(WeightDType::Q8), KvDType::F16, KvDType::F16),
        (Some(WeightDType::Q6), KvDType::F16, KvDType::F16),
        (Some(WeightDType::Q5), KvDType::F16, KvDType::F16),
        (Some(WeightDType::Q4), KvDType::F16, KvDType::F16),
    ] {
        assert_eq!(kv_dtype(&full, dtype, None), of_full, "{dtype:?} of f32");
        assert_eq!(kv_dtype(&half, dtype, None), of_half, "{dtype:?} of f16");
        for chosen in [KvDType::F32, KvDType::F16, KvDType::Q8] {
            assert_eq!(kv_dtype(&full, dtype, Some(chosen)), chosen, "{dtype:?}");
        }
    }
}

/// A type that the device does not hold is refused, and named.
#[test]
fn weights_in_bf16_are_refused_on_the_cpu() {
    let options = LoadOptions { dtype: Some(WeightDType::BF16), ..LoadOptions::default() };
    let checkpoint = Checkpoint::open(CheckpointFolder::tiny().path()).unwrap();
    let error = checkpoint.load(&options, &|_| ()).unwrap_err();
    assert!(matches!(error, WeightsError::NotOnCpu { dtype: WeightDType::BF16 }), "{error}");
}

/// Four or five bits for the blocks, six for embedding and head, which are one matrix here.
#[test]
fn q4_and_q5_hold_the_tables_in_q6() {
    let checkpoint = Checkpoint::open(CheckpointFolder::tiny().path()).unwrap();
    for dtype in [WeightDType::Q4, WeightDType::Q5] {
        let model = load(&checkpoint, dtype);
        let head = format!("PackedMatrix(q6 ({},", model.config().vocab_size);
        let shown = format!("{model:?}");
        let tables = (shown.matches(&head).count(), shown.matches("PackedMatrix(q6").count());
        assert_eq!(tables, (2, 2), "{shown}");
        assert_eq!(shown.matches(&format!("PackedMatrix({dtype}")).count(), 4 * model.config().n_layer);
    }
}

/// Weights of GGUF's Q5_0, as candle reads them, are weights in q5 without another rounding.
#[test]
fn q5_holds_what_gguf_stores_in_q5_0() {
    let checkpoint = Checkpoint::open(&fixture_path("formats/gguf/q5_0.gguf")).unwrap();
    let stored = checkpoint.tensors().iter().filter(|tensor| tensor.dtype.to_string() == "Q5_0").count();
    let parameters = expected_parameters(checkpoint.config()).into_iter();
    let matrices =
        parameters.filter(|parameter| parameter.shape.len() == 2 && parameter.name != "wpe.weight");
    for Parameter { name, .. } in matrices {
        let values = checkpoint.parameter(&name, &Device::Cpu, &|_| ()).unwrap().unwrap();
        let held = Matrix::pack(&values, WeightFormat::Q5).unwrap().to_tensor().unwrap();
        assert_eq!(held.to_vec2::<f32>().unwrap(), values.to_vec2::<f32>().unwrap(), "{name}");
    }
    let config = checkpoint.config();
    assert_eq!(stored, 4 * config.n_layer + 1, "blocks, and the embedding, which is also the head");
    let model = format!("{:?}", load(&checkpoint, WeightDType::Q5));
    assert_eq!(model.matches("PackedMatrix(q5").count(), stored + 1);
}

/// Q4_0 has other integers than q4, and q5 has all of them.
#[test]
fn quantized_files_are_computed_as_they_are_stored() {
    for (name, dtype, held) in [
        ("q8_0", Some(WeightDType::Q8), "q8"),
        ("q5_0", Some(WeightDType::Q5), "q5"),
        ("q4_0", Some(WeightDType::Q4), "q5"),
        ("q4_1", None, "f32"),
        ("q6_k", None, "f32"),
    ] {
        let checkpoint =
            Checkpoint::open(&fixture_path("formats/gguf").join(format!("{name}.gguf"))).unwrap();
        assert_eq!(
            (checkpoint.quantized_dtype(), checkpoint.is_unpacked()),
            (dtype, dtype.is_none()),
            "{name}"
        );
        let default = checkpoint.load(&LoadOptions::default(), &|_| ()).unwrap();
        let shown = format!("{default:?}");
        let matrices = 4 * default.config().n_layer + 2;
        assert_eq!(shown.matches(&format!("PackedMatrix({held}")).count(), matrices, "{name}: {shown}");
        let Some(dtype) = dtype else { continue };
        let chosen = load(&checkpoint, dtype);
        assert_eq!(format!("{chosen:?}"), shown, "{name}");
        for Parameter { name: parameter, shape, .. } in expected_parameters(checkpoint.config()) {
            if shape.len() != 2 || parameter == "wpe.weight" {
                continue;
            }
            let values = checkpoint.parameter(&parameter, &Device::Cpu, &|_| ()).unwrap().unwrap();
            let format = if held == "q8" { WeightFormat::Q8 } else { WeightFormat::Q5 };
            let packed = Matrix::pack(&values, format).unwrap().to_tensor().unwrap();
            assert_eq!(
                packed.to_vec2::<f32>().unwrap(),
                values.to_vec2::<f32>().unwrap(),
                "{name}: {parameter}"
            );
        }
    }
}
