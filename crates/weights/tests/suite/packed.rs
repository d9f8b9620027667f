//! Packed weights, compared with the plain tensors of the same checkpoint.
//!
//! The tests run the whole model in every precision, with KV caches in f32, f16 and q8.

use std::path::Path;

use candle_core::{DType, Device, Tensor};
use candle_gpt2::{
    ByOutput, Gpt2Cache, Gpt2LMHeadModel, KvDType, LogitsFor, Packed, Parameter, Pass, expected_parameters,
};
use candle_gpt2_arithmetic::NumberType;
use candle_gpt2_kernels::Matrix;
use candle_gpt2_testing::{CheckpointFolder, STORY, checkpoints, fixture_path};
use candle_gpt2_weights::{Checkpoint, LoadOptions, WeightDType, WeightsError, encode};
use candle_nn::VarBuilder;

/// Computes the logits of a prompt in one pass.
fn logits(model: &Gpt2LMHeadModel, ids: &[u32]) -> Vec<f32> {
    let ids = Tensor::from_slice(ids, (1, ids.len()), &Device::Cpu).unwrap();
    let logits = model.forward_with(&ids, LogitsFor::EveryToken, None, &mut Pass::inference()).unwrap();
    logits.flatten_all().unwrap().to_vec1().unwrap()
}

/// Computes the logits with a cache: half of the prompt in one pass, then token by token.
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

/// Returns the largest difference, relative to the largest logit of `b`.
fn difference(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    assert!(a.iter().chain(b).all(|logit| logit.is_finite()));
    let largest = b.iter().fold(0.0f32, |largest, b| largest.max(b.abs()));
    a.iter().zip(b).fold(0.0f32, |worst, (a, b)| worst.max((a - b).abs())) / largest
}

/// Returns the checkpoint's plain f32 tensors.
fn tensors(checkpoint: &Checkpoint) -> ByOutput<'static> {
    let named = expected_parameters(checkpoint.config()).into_iter().map(|Parameter { name, .. }| {
        let tensor = checkpoint.parameter(&name, &Device::Cpu, &|_| ()).unwrap().unwrap();
        (name, tensor)
    });
    ByOutput(VarBuilder::from_tensors(named.collect(), DType::F32, &Device::Cpu))
}

/// Loads the model as plain f32 tensors, the reference for packed products.
fn dense(checkpoint: &Checkpoint) -> Gpt2LMHeadModel {
    Gpt2LMHeadModel::load(checkpoint.config(), tensors(checkpoint)).unwrap()
}

fn load(checkpoint: &Checkpoint, dtype: WeightDType) -> Gpt2LMHeadModel {
    let options = LoadOptions { dtype: Some(dtype), ..LoadOptions::default() };
    checkpoint.load(&options, &|_| ()).unwrap()
}

/// Checks the formats that compute in f32.
fn assert_float_formats(path: &Path, tokens: usize) {
    let checkpoint = Checkpoint::open(path).unwrap();
    let dense = dense(&checkpoint);
    let ids = prompt(&dense, tokens);
    let expected = logits(&dense, &ids);
    // f32: the same sums in another order, through all layers. f16: each weight is rounded by at most 2^-11.
    // The sums average these errors, and the layers propagate them. The tolerance is about twice the tiny
    // model's error.
    for (dtype, tolerance) in [(WeightDType::F32, 1e-5), (WeightDType::F16, 1e-3)] {
        let packed = load(&checkpoint, dtype);
        assert_eq!(packed.parameter_count(), dense.parameter_count());
        // Biases, norms and positions stay in f32, and packed matrices fill whole panels.
        let matrix_bytes = if dtype == WeightDType::F16 { 2 } else { 4 };
        assert_eq!(dense.weight_bytes(), 4 * dense.parameter_count());
        assert!(packed.weight_bytes() >= matrix_bytes * dense.parameter_count(), "{dtype}");
        let found = logits(&packed, &ids);
        let error = difference(&found, &expected);
        assert!(error <= tolerance, "{dtype}: logits differ by {error:e} of the largest");
        // q8: keys, values and queries are rounded to 2^-8 of the largest value in their group. The tolerance
        // is twice the tiny model's error.
        for (kv_dtype, tolerance) in [(KvDType::F32, 1e-5), (KvDType::F16, 2e-3), (KvDType::Q8, 2e-2)] {
            let error = difference(&cached_logits(&packed, &ids, kv_dtype), &found);
            assert!(
                error <= tolerance,
                "{dtype}: with a cache in {kv_dtype:?} the logits differ by {error:e}"
            );
        }
    }
}

#[test]
fn weights_packed_from_a_var_builder_equal_the_loaders() {
    let folder = CheckpointFolder::tiny();
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    for dtype in WeightDType::all().filter(|dtype| dtype.check(&Device::Cpu).is_ok()) {
        let packed = Packed::new(tensors(&checkpoint), dtype.number_type());
        let packed = Gpt2LMHeadModel::load(checkpoint.config(), packed).unwrap();
        let loaded = load(&checkpoint, dtype);
        assert_eq!(packed.weight_bytes(), loaded.weight_bytes(), "{dtype}");
        let ids = prompt(&loaded, 24);
        assert_eq!(logits(&packed, &ids), logits(&loaded, &ids), "{dtype}");
    }
}

#[test]
fn float_formats_match_dense_on_the_tiny_model() {
    assert_float_formats(CheckpointFolder::tiny().path(), 24);
}

#[test]
fn float_formats_match_dense_on_a_trained_model() {
    if let Some(folder) = checkpoints() {
        assert_float_formats(&folder.join("tarotble"), 64);
    }
}

/// Checks the effect of integer quantization on a trained model's predictions.
///
/// The test measures how often the most probable token stays the same. It also measures the mean
/// Kullback-Leibler divergence from the exact distribution, in nats. A model with random weights has flat
/// distributions, in which any rounding changes the most probable token.
///
/// The measured agreement for q8, q6, q5 and q4 was 98.8%, 96.3%, 93.4% and 90.6% of 244 tokens. The
/// divergences were 2.4e-4, 3.1e-3, 6.8e-3 and 1.9e-2. The bounds allow twice the disagreement and twice the
/// divergence.
///
/// The divergence grows with the square of the rounding error, so a difference of two bits between formats is
/// detected. With f32 weights, an f16 cache alone causes a divergence of 4e-8.
#[test]
fn quantized_formats_keep_a_trained_models_predictions() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/stories");
    let checkpoint = Checkpoint::open(folder).unwrap();
    let ids = encode(&checkpoint.tokenizer(None).unwrap(), STORY).unwrap();
    assert_eq!(ids.len(), 244);
    let vocab_size = checkpoint.config().vocab_size;
    let expected = logits(&dense(&checkpoint), &ids);
    for (dtype, least_agreement, largest_divergence) in [
        (WeightDType::F32, 1.0, 1e-7),
        (WeightDType::Q8, 0.97, 5e-4),
        (WeightDType::Q6, 0.92, 6.5e-3),
        (WeightDType::Q5, 0.86, 1.4e-2),
        (WeightDType::Q4, 0.81, 3.7e-2),
    ] {
        let packed = load(&checkpoint, dtype);
        let runs = [
            ("in one pass", logits(&packed, &ids)),
            ("with a cache in f32", cached_logits(&packed, &ids, KvDType::F32)),
            ("with a cache in f16", cached_logits(&packed, &ids, KvDType::F16)),
        ];
        for (run, found) in runs {
            let (agreement, divergence) = compare(&found, &expected, vocab_size);
            let shown = format!("{dtype} {run}: {agreement:.3} agree, divergence {divergence:.2e}");
            assert!(agreement >= least_agreement && divergence <= largest_divergence, "{shown}");
            assert!(
                dtype == WeightDType::F32 || divergence > largest_divergence / 20.0,
                "not rounded: {shown}"
            );
        }
    }
}

/// Returns the fraction of equal top tokens, and the mean divergence of `found` from `expected`.
fn compare(found: &[f32], expected: &[f32], vocab_size: usize) -> (f64, f64) {
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

/// The default cache is rounded only if loading rounded the weights at least as coarsely.
#[test]
fn default_cache_dtype_follows_weight_rounding() {
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
    for (dtype, expected_full, expected_half) in [
        (None, KvDType::F32, KvDType::F32),
        (Some(WeightDType::F32), KvDType::F32, KvDType::F32),
        (Some(WeightDType::F16), KvDType::F16, KvDType::F32),
        (Some(WeightDType::Q8), KvDType::F16, KvDType::F16),
        (Some(WeightDType::Q6), KvDType::F16, KvDType::F16),
        (Some(WeightDType::Q5), KvDType::F16, KvDType::F16),
        (Some(WeightDType::Q4), KvDType::F16, KvDType::F16),
    ] {
        assert_eq!(kv_dtype(&full, dtype, None), expected_full, "{dtype:?} from f32");
        assert_eq!(kv_dtype(&half, dtype, None), expected_half, "{dtype:?} from f16");
        for chosen in [KvDType::F32, KvDType::F16, KvDType::Q8] {
            assert_eq!(kv_dtype(&full, dtype, Some(chosen)), chosen, "{dtype:?}");
        }
    }
}

/// A dtype that the device does not support is rejected, and the error names it.
#[test]
fn bf16_weights_are_rejected_on_the_cpu() {
    let options = LoadOptions { dtype: Some(WeightDType::BF16), ..LoadOptions::default() };
    let checkpoint = Checkpoint::open(CheckpointFolder::tiny().path()).unwrap();
    let error = checkpoint.load(&options, &|_| ()).unwrap_err();
    assert!(matches!(error, WeightsError::NotOnCpu { dtype: WeightDType::BF16 }), "{error}");
}

/// Linear layers use four or five bits; the embedding and head, one tied matrix here, use six.
#[test]
fn q4_and_q5_store_the_embedding_and_head_in_q6() {
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

/// GGUF's Q5_0 weights, as candle reads them, convert to q5 without further rounding.
#[test]
fn q5_represents_gguf_q5_0_exactly() {
    let checkpoint = Checkpoint::open(fixture_path("formats/gguf/q5_0.gguf")).unwrap();
    let stored = checkpoint.tensors().iter().filter(|tensor| tensor.dtype.to_string() == "Q5_0").count();
    let parameters = expected_parameters(checkpoint.config()).into_iter();
    let matrices =
        parameters.filter(|parameter| parameter.shape.len() == 2 && parameter.name != "wpe.weight");
    for Parameter { name, .. } in matrices {
        let values = checkpoint.parameter(&name, &Device::Cpu, &|_| ()).unwrap().unwrap();
        let packed = Matrix::pack(&values, NumberType::Q5).unwrap().to_tensor().unwrap();
        assert_eq!(packed.to_vec2::<f32>().unwrap(), values.to_vec2::<f32>().unwrap(), "{name}");
    }
    let config = checkpoint.config();
    assert_eq!(stored, 4 * config.n_layer + 1, "blocks, and the embedding, which is also the head");
    let model = format!("{:?}", load(&checkpoint, WeightDType::Q5));
    assert_eq!(model.matches("PackedMatrix(q5").count(), stored + 1);
}

/// Q4_0's integers differ from q4's, but q5 can represent all of them.
#[test]
fn quantized_gguf_weights_load_losslessly() {
    for (name, dtype, format_name) in [
        ("q8_0", Some(WeightDType::Q8), "q8"),
        ("q5_0", Some(WeightDType::Q5), "q5"),
        ("q4_0", Some(WeightDType::Q4), "q5"),
        ("q4_1", None, "f32"),
        ("q6_k", None, "f32"),
    ] {
        let checkpoint = Checkpoint::open(fixture_path("formats/gguf").join(format!("{name}.gguf"))).unwrap();
        assert_eq!(
            (checkpoint.quantized_dtype(), checkpoint.is_unpacked()),
            (dtype, dtype.is_none()),
            "{name}"
        );
        let default = checkpoint.load(&LoadOptions::default(), &|_| ()).unwrap();
        let shown = format!("{default:?}");
        let matrices = 4 * default.config().n_layer + 2;
        assert_eq!(
            shown.matches(&format!("PackedMatrix({format_name}")).count(),
            matrices,
            "{name}: {shown}"
        );
        let Some(dtype) = dtype else { continue };
        let chosen = load(&checkpoint, dtype);
        assert_eq!(format!("{chosen:?}"), shown, "{name}");
        for Parameter { name: parameter, shape, .. } in expected_parameters(checkpoint.config()) {
            if shape.len() != 2 || parameter == "wpe.weight" {
                continue;
            }
            let values = checkpoint.parameter(&parameter, &Device::Cpu, &|_| ()).unwrap().unwrap();
            let format = if format_name == "q8" { NumberType::Q8 } else { NumberType::Q5 };
            let packed = Matrix::pack(&values, format).unwrap().to_tensor().unwrap();
            assert_eq!(
                packed.to_vec2::<f32>().unwrap(),
                values.to_vec2::<f32>().unwrap(),
                "{name}: {parameter}"
            );
        }
    }
}
