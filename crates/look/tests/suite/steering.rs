//! Tests of steering vectors added to the residual stream.

use std::sync::{Arc, Mutex};

use candle_core::{DType, Device, Tensor};
use candle_gpt2::{LogitsFor, Pass};
use candle_gpt2_engine::{LoadedModel, Silent};
use candle_gpt2_interpret::{Run, named_site};
use candle_gpt2_look::{Steer, SteeringSource};
use candle_gpt2_testing::{pattern, values};

use crate::common::{RecordingReporter, built_in, reader, words};

fn steer(towards: SteeringSource) -> Steer {
    Steer { towards, layer: 2, scale: 3.0, everywhere: false }
}

fn texts(towards: &str, away: &str) -> SteeringSource {
    SteeringSource::Texts { towards: words(towards), away: words(away) }
}

/// Logits of a steered run.
fn logits(loaded: &LoadedModel, steer: &Steer) -> Vec<f64> {
    let checked = steer.check(&reader(loaded)).unwrap();
    let steering = checked.steering(loaded, &Silent).unwrap();
    let steered = loaded.clone().observed_by(Arc::new(Mutex::new(steering)));
    let input = Tensor::new(&[[353u32, 383, 71]], &Device::Cpu).unwrap();
    let pass = &mut Pass::inference();
    values(&steered.model().forward_with(&input, LogitsFor::LastToken, None, pass).unwrap())
}

#[test]
fn direction_is_the_same_from_texts_vectors_and_file() {
    let loaded = built_in();
    let from_texts = logits(&loaded, &steer(texts(" the", " my")));
    let site = named_site("2.resid_pre").unwrap();
    let residual = |word: &str| {
        let ids = loaded.vocabulary().encode(word).unwrap();
        let record = Run::new(loaded.model(), &ids).unwrap().record([site]).unwrap();
        record.get(site).unwrap().squeeze(0).unwrap()
    };
    let difference = (residual(" the") - residual(" my")).unwrap();
    assert_eq!(logits(&loaded, &steer(SteeringSource::Vectors(difference.clone()))), from_texts);
    assert_eq!(logits(&loaded, &steer(SteeringSource::Vectors(difference.squeeze(0).unwrap()))), from_texts);
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("direction.safetensors");
    let tensors = std::collections::HashMap::from([("direction", difference)]);
    candle_core::safetensors::save(&tensors, &file).unwrap();
    assert_eq!(logits(&loaded, &steer(SteeringSource::File(file))), from_texts);
    let reversed = Steer { scale: -3.0, ..steer(texts(" my", " the")) };
    assert_eq!(logits(&loaded, &reversed), from_texts);
    // The shorter text is padded with spaces.
    let spaces = Steer { everywhere: true, ..steer(texts(" the good", " ")) };
    assert_eq!(
        logits(&loaded, &Steer { everywhere: true, ..steer(texts(" the good", "")) }),
        logits(&loaded, &spaces)
    );
    assert_ne!(logits(&loaded, &spaces), from_texts);
}

#[test]
fn zero_vector_is_noted_and_invalid_vectors_are_rejected() {
    let loaded = built_in();
    let reader = reader(&loaded);
    let reporter = RecordingReporter::default();
    let zero = Steer { scale: 0.0, ..steer(texts(" the", " my")) };
    zero.check(&reader).unwrap().steering(&loaded, &reporter).unwrap();
    let note = "the steering vector is zero and has no effect";
    assert_eq!(reporter.notes.into_inner().unwrap(), [note]);
    let narrow = steer(SteeringSource::Vectors(pattern(&[2, 7], 1.0, 1)));
    let error = narrow.check(&reader).unwrap().steering(&loaded, &Silent).map(drop).unwrap_err();
    assert!(error.is_usage() && error.to_string() == "`steer`", "{error}");
    let whole = Tensor::ones((1, 256), DType::U32, &Device::Cpu).unwrap();
    for (wrong, expected) in [
        (steer(SteeringSource::Vectors(whole)), "`steer`: expected a floating-point tensor, found u32"),
        (Steer { layer: 7, ..steer(texts("a", "b")) }, "layer 7 is out of range"),
        (Steer { scale: f64::NAN, ..steer(texts("a", "b")) }, "`scale` NaN: expected a finite number"),
    ] {
        let error = wrong.check(&reader).unwrap_err();
        assert!(error.is_usage() && error.to_string().contains(expected), "{error}");
    }
}
