//! Tests of named choices and of short forms: tokens, heads, ranges and neurons.

use candle_gpt2_interpret::{GridAxis, Head, LensValue, Measure};
use candle_gpt2_look::{
    Heads, Method, Named, Neuron, Numbers, Parts, Ranges, SteeringSource, TokenChoice, named,
};

fn check<T: Named + std::fmt::Debug>() {
    for known in T::NAMES {
        assert_eq!(T::of_name(known.name), Some(known.value));
        assert!(!known.meaning.is_empty() && !known.name.contains('_'), "{known:?}");
        let same = T::NAMES.iter().filter(|other| other.value == known.value);
        assert_eq!(same.count(), 1, "{known:?}");
    }
    assert_eq!(T::of_name("nothing"), None);
}

#[test]
fn every_choice_has_one_name() {
    check::<LensValue>();
    check::<Measure>();
    check::<GridAxis>();
    check::<Numbers>();
    check::<Parts>();
    check::<Method>();
}

#[test]
fn unknown_name_error_lists_the_choices() {
    let error = named::<Numbers>("as", "mine").unwrap_err();
    assert_eq!(error.to_string(), "`as`: expected raw or transformer-lens, found \"mine\"");
    assert!(error.is_usage());
}

#[test]
fn short_forms_are_parsed() {
    for (text, expected) in [
        ("#300", TokenChoice::Id(300)),
        ("#", TokenChoice::Text("#".into())),
        ("#99999999999", TokenChoice::Text("#99999999999".into())),
        (" of", TokenChoice::Text(" of".into())),
    ] {
        assert_eq!(TokenChoice::from(text), expected, "{text}");
    }
    let heads: Heads = "9.9, 0.1,9.9".parse().unwrap();
    let [one, other] = [Head { layer: 9, head: 9 }, Head { layer: 0, head: 1 }];
    assert_eq!((&heads.0, heads.to_string().as_str()), (&vec![one, other, one], "9.9,0.1,9.9"));
    for wrong in ["", "9", "9.x", "9.1,", "-1.2"] {
        let message = wrong.parse::<Heads>().unwrap_err().to_string();
        assert!(message.contains("is not a head; write LAYER.HEAD"), "{wrong}: {message}");
    }
    assert_eq!("0,4, 8-11".parse::<Ranges>().unwrap(), "0-0,4-4,8-11".parse().unwrap());
    for wrong in ["", "-1", "1-", "a", "1,,2"] {
        assert!(wrong.parse::<Ranges>().unwrap_err().contains("is neither a number nor a range"), "{wrong}");
    }
    let neuron: Neuron = "11.611".parse().unwrap();
    assert_eq!(neuron, Neuron { layer: 11, neuron: 611 });
    for wrong in ["", "11", "11.x", "11.6.1"] {
        let message = wrong.parse::<Neuron>().unwrap_err();
        assert_eq!(message, format!("`{wrong}` is not a neuron; write LAYER.NEURON, such as 11.611"));
    }
    for (text, is_read) in [
        ("\" a\"-\" b\"", true),
        ("\" a\"", true),
        ("file", true),
        ("\"a", false),
        ("\"a\"-\"b\"-\"c\"", false),
    ] {
        assert_eq!(SteeringSource::read(text).is_ok(), is_read, "{text}");
    }
}
