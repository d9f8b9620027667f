//! Tuned lens: results computed by hand and by PyTorch, the identity, and mismatched files.

use std::collections::BTreeMap;

use candle_core::{DType, Device, Tensor};
use candle_gpt2_interpret::{LensOptions, TunedLens, logit_lens};
use candle_gpt2_testing::{Fixture, assert_close_absolute, fixture_path, pattern, values};
use candle_gpt2_weights::TensorFile;

use crate::common::Case;

/// Tolerance for sums of a few products in f32.
const ROUNDING: f64 = 1e-5;

type Tensors = BTreeMap<String, Tensor>;

fn lens_tensors(prefix: &str, n_layer: usize, width: usize, scale: f64) -> Tensors {
    let layer = |layer: usize| {
        let tensor = |part: &str, shape: &[usize]| {
            (format!("{prefix}{layer}.{part}"), pattern(shape, scale, layer as u64))
        };
        [tensor("weight", &[width, width]), tensor("bias", &[width])]
    };
    (0..n_layer).flat_map(layer).collect()
}

#[test]
fn translation_matches_manual_computation() {
    let tensor = |rows: [[f32; 2]; 2]| Tensor::new(&rows, &Device::Cpu).unwrap();
    let tensors: Tensors = [
        ("0.weight".to_owned(), tensor([[1., 2.], [3., 4.]])),
        ("0.bias".to_owned(), Tensor::new(&[10f32, 20.], &Device::Cpu).unwrap()),
    ]
    .into();
    let lens = TunedLens::from_tensors(&tensors, 1, 2).unwrap();
    // [5, 6] + [1·5 + 2·6, 3·5 + 4·6] + [10, 20]
    let translated = lens.translate(0, &Tensor::new(&[5f32, 6.], &Device::Cpu).unwrap()).unwrap();
    assert_eq!(values(&translated), [32., 65.]);
}

#[test]
fn zero_lens_is_the_identity() {
    let lens = TunedLens::from_tensors(&lens_tensors("", 3, 7, 0.0), 3, 7).unwrap();
    let h = pattern(&[2, 5, 7], 100.0, 3);
    for layer in 0..3 {
        assert_eq!(values(&lens.translate(layer, &h).unwrap()), values(&h));
    }
    let half = h.to_dtype(DType::F16).unwrap();
    let translated = lens.translate(1, &half).unwrap();
    assert_eq!((translated.dtype(), values(&translated)), (DType::F16, values(&half)));
}

#[test]
fn tuned_lens_file_matches_pytorch() {
    let folder = fixture_path("dictionaries/tuned-lens");
    let config = std::fs::read_to_string(folder.join("config.json")).unwrap();
    TunedLens::check_config(&config, 2, 6).unwrap();
    let file = TensorFile::read(&folder.join("params.pt")).unwrap();
    let lens = TunedLens::from_tensors(&file.tensors, 2, 6).unwrap().to_device(&Device::Cpu).unwrap();
    let expected = Fixture::open("dictionaries/expected");
    for layer in 0..2 {
        let translated = lens.translate(layer, &expected.tensor("tuned-lens.input")).unwrap();
        let name = format!("tuned-lens.{layer}");
        assert_close_absolute(&translated, &expected.tensor(&name), ROUNDING, &name);
    }
}

#[test]
fn tensor_name_prefix_is_ignored() {
    let h = pattern(&[4, 7], 1.0, 9);
    let expected = TunedLens::from_tensors(&lens_tensors("", 3, 7, 1.0), 3, 7).unwrap();
    let mut tensors = lens_tensors("layer_translators.", 3, 7, 1.0);
    tensors.insert("unembed.unembedding.weight".into(), pattern(&[20, 7], 1.0, 1));
    let lens = TunedLens::from_tensors(&tensors, 3, 7).unwrap();
    for layer in 0..3 {
        let [found, expected] = [&lens, &expected].map(|lens| values(&lens.translate(layer, &h).unwrap()));
        assert_eq!(found, expected);
    }
}

#[test]
fn zero_lens_equals_the_logit_lens() {
    let case = Case::open("plain");
    let run = case.clean();
    let (n_layer, width) = (case.layers(), case.model.config().n_embd);
    let options = LensOptions { top: 5, watch: vec![1, 2] };
    let plain = logit_lens(&run, &options, &|_, h| Ok(h)).unwrap();
    let [zeros, others] = [0.0, 0.1].map(|scale| {
        let lens = TunedLens::from_tensors(&lens_tensors("", n_layer, width, scale), n_layer, width).unwrap();
        logit_lens(&run, &options, &|layer, h| lens.translate(layer, &h)).unwrap()
    });
    assert_eq!(zeros, plain);
    // The last residual stream is not translated.
    assert_eq!(others.last(), plain.last());
    assert!(others.iter().zip(&plain).take(n_layer).all(|(other, plain)| other != plain));
}

#[test]
fn mismatched_lens_is_rejected() {
    let error_message = |tensors: &Tensors, n_layer, width| {
        TunedLens::from_tensors(tensors, n_layer, width).unwrap_err().to_string()
    };
    let tensors = lens_tensors("", 3, 7, 1.0);
    let without = |name: &str| {
        let mut tensors = tensors.clone();
        tensors.remove(name);
        tensors
    };
    for (message, expected) in [
        (
            error_message(&Tensors::new(), 3, 7),
            "tensor `0.weight` is missing: expected shape (7, 7); the file has no tensors",
        ),
        (
            error_message(&tensors, 4, 7),
            "tensor `3.weight` is missing: expected shape (7, 7); the file has 0.bias, 0.weight, 1.bias",
        ),
        (error_message(&tensors, 2, 7), "`2.weight`: expected at most 2 layers"),
        (error_message(&tensors, 3, 8), "tensor `0.weight`: expected shape (8, 8), found (7, 7)"),
        (error_message(&without("1.bias"), 3, 7), "tensor `1.bias` is missing: expected shape (7)"),
    ] {
        assert!(message.contains(expected), "`{expected}` is not in: {message}");
    }
    let lens = TunedLens::from_tensors(&tensors, 3, 7).unwrap();
    let message = lens.translate(3, &pattern(&[7], 1.0, 0)).unwrap_err().to_string();
    assert!(
        message.starts_with("layer 3 is out of range; the tuned lens has 3 layers, counted from 0"),
        "{message}"
    );
    let message = lens.translate(0, &pattern(&[2, 6], 1.0, 0)).unwrap_err().to_string();
    assert!(message.starts_with("the tuned lens expects width 7, found shape [2, 6]"), "{message}");

    for (text, expected) in [
        (r#"{"d_model": 768}"#, "`d_model`: expected 7, for this model; found 768"),
        (r#"{"d_model": 7, "num_hidden_layers": 12}"#, "`num_hidden_layers`: expected 3"),
        (r#"{"lens_type": "jacobian_lens"}"#, "`lens_type`: expected \"linear_tuned_lens\""),
        ("{", "invalid JSON configuration"),
    ] {
        let message = TunedLens::check_config(text, 3, 7).unwrap_err().to_string();
        assert!(message.contains(expected), "`{expected}` is not in: {message}");
    }
    TunedLens::check_config("{}", 3, 7).unwrap();
}
