//! What is added to the residual stream.

use std::sync::{Arc, Mutex};

use candle_core::{DType, Device, Tensor};
use candle_gpt2::{LogitsFor, Pass};
use candle_gpt2_engine::{LoadedModel, Silent};
use candle_gpt2_interpret::{Run, named_site};
use candle_gpt2_look::{Steer, Towards};
use candle_gpt2_testing::{pattern, values};

use crate::common::{Told, built_in, reader, words};

fn steer(towards: Towards) -> Steer {
    Steer { towards, layer: 2, scale: 3.0, everywhere: false }
}

fn texts(towards: &str, away: &str) -> Towards {
    Towards::Texts { towards: words(towards), away: words(away) }
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
fn a_direction_is_the_same_from_texts_vectors_and_a_file() {
    let loaded = built_in();
    let of_texts = logits(&loaded, &steer(texts(" the", " my")));
    let site = named_site("2.resid_pre").unwrap();
    let residual = |word: &str| {
        let ids = loaded.vocabulary().encode(word).unwrap();
        let record = Run::new(loaded.model(), &ids).unwrap().record([site]).unwrap();
        record.get(site).unwrap().squeeze(0).unwrap()
    };
    let difference = (residual(" the") - residual(" my")).unwrap();
    assert_eq!(logits(&loaded, &steer(Towards::Vectors(difference.clone()))), of_texts);
    assert_eq!(logits(&loaded, &steer(Towards::Vectors(difference.squeeze(0).unwrap()))), of_texts);
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("direction.safetensors");
    let tensors = std::collections::HashMap::from([("direction", difference)]);
    candle_core::safetensors::save(&tensors, &file).unwrap();
    assert_eq!(logits(&loaded, &steer(Towards::File(file))), of_texts);
    let turned = Steer { scale: -3.0, ..steer(texts(" my", " the")) };
    assert_eq!(logits(&loaded, &turned), of_texts);
    // The shorter text has spaces after it.
    let spaces = Steer { everywhere: true, ..steer(texts(" the good", " ")) };
    assert_eq!(
        logits(&loaded, &Steer { everywhere: true, ..steer(texts(" the good", "")) }),
        logits(&loaded, &spaces)
    );
    assert_ne!(logits(&loaded, &spaces), of_texts);
}

#[test]
fn nothing_is_noted_and_what_does_not_fit_refused() {
    let loaded = built_in();
    let reader = reader(&loaded);
    let told = Told::default();
    let nothing = Steer { scale: 0.0, ..steer(texts(" the", " my")) };
    nothing.check(&reader).unwrap().steering(&loaded, &told).unwrap();
    let note = "the steering vector is zero everywhere; the text is as without it";
    assert_eq!(told.notes.into_inner().unwrap(), [note]);
    let narrow = steer(Towards::Vectors(pattern(&[2, 7], 1.0, 1)));
    let error = narrow.check(&reader).unwrap().steering(&loaded, &Silent).map(drop).unwrap_err();
    assert!(error.is_usage() && error.to_string() == "`steer`", "{error}");
    let whole = Tensor::ones((1, 256), DType::U32, &Device::Cpu).unwrap();
    for (wrong, expected) in [
        (steer(Towards::Vectors(whole)), "`steer`: expected numbers in floating point, found u32"),
        (Steer { layer: 6, ..steer(texts("a", "b")) }, "there is no layer 6"),
        (Steer { scale: f64::NAN, ..steer(texts("a", "b")) }, "`scale` NaN: expected a finite number"),
    ] {
        let error = wrong.check(&reader).unwrap_err();
        assert!(error.is_usage() && error.to_string().contains(expected), "{error}");
    }
}
