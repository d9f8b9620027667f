//! Published results for OpenAI's weights on the published data.
//!
//! A result is checked if `GPT2_PUBLISHED` names a folder with the model (`gpt2`, `gpt2-large`) and the
//! data is available. The data is in the folder that `GPT2_EVALUATION_DATA` names, or in `texts` next to
//! the folder that `GPT2_CHECKPOINTS` names. Otherwise, the test reports what is missing.
//!
//! `gpt2 eval --list` shows the source of each result.

use std::env;
use std::path::{Path, PathBuf};

use candle_gpt2_engine::{DeviceChoice, LoadedModel, ModelOptions, Silent, WeightDType};
use candle_gpt2_evaluation::{Data, Setting, named};
use candle_gpt2_testing::{CHECKPOINTS_VARIABLE, skipped};

/// Environment variable for the folder with the published checkpoints.
const PUBLISHED_VARIABLE: &str = "GPT2_PUBLISHED";
/// Environment variable for the folder with the data.
const DATA_VARIABLE: &str = "GPT2_EVALUATION_DATA";

/// Model, protocol and data file, with the published metrics: name, value and tolerance.
type PublishedCase = (&'static str, &'static str, &'static str, &'static [(&'static str, f64, f64)]);

/// Tolerance for LAMBADA accuracies: three items may flip with other kernels.
const LAMBADA_ITEMS: f64 = 3.0 / 5153.0;
/// Tolerance for HellaSwag accuracies: five items may flip, because most results come from TF32.
const HELLASWAG_ITEMS: f64 = 5.0 / 10_042.0;
/// Rounding error of a result that is published with four digits.
const FOUR_DIGITS: f64 = 0.5e-4;
const HUNDREDTH: f64 = 0.01;

const LAMBADA: [PublishedCase; 3] = [
    (
        "gpt2",
        "lambada:lm-eval",
        "lambada_openai.jsonl",
        &[("acc", 0.3256, LAMBADA_ITEMS + FOUR_DIGITS), ("perplexity", 40.0554, HUNDREDTH)],
    ),
    ("gpt2", "lambada:last-token", "lambada_openai.jsonl", &[("acc", 0.4667, LAMBADA_ITEMS + FOUR_DIGITS)]),
    ("gpt2", "lambada:stop-words", "lambada_openai.jsonl", &[("acc", 0.4198, LAMBADA_ITEMS + FOUR_DIGITS)]),
];

const WIKITEXT: [PublishedCase; 4] = [
    (
        "gpt2",
        "wikitext:lm-eval",
        "wiki.test.raw",
        &[
            ("word_perplexity", 37.3698, 1e-4),
            ("byte_perplexity", 1.9682, 1e-4),
            ("bits_per_byte", 0.9769, 1e-4),
        ],
    ),
    ("gpt2", "wikitext:hf-1024", "wiki.test.raw", &[("perplexity", 29.94, HUNDREDTH)]),
    ("gpt2-large", "wikitext:hf-1024", "wiki.test.raw", &[("perplexity", 19.44, HUNDREDTH)]),
    ("gpt2-large", "wikitext:hf-512", "wiki.test.raw", &[("perplexity", 16.44, HUNDREDTH)]),
];

const HELLASWAG: [PublishedCase; 2] = [
    (
        "gpt2",
        "hellaswag:lm-eval",
        "hellaswag_val.jsonl",
        &[("acc", 2904.0 / 10_042.0, HELLASWAG_ITEMS), ("acc_norm", 3127.0 / 10_042.0, HELLASWAG_ITEMS)],
    ),
    (
        "gpt2",
        "hellaswag:llm.c",
        "hellaswag_val.jsonl",
        &[
            ("acc", 0.2859, HELLASWAG_ITEMS + FOUR_DIGITS),
            ("acc_norm", 0.2955, HELLASWAG_ITEMS + FOUR_DIGITS),
        ],
    ),
];

/// Returns the folder of a published model.
///
/// # Panics
/// Panics if the variable does not name a folder, because a run that requests these tests must not skip
/// all of them.
fn model_folder(name: &str) -> Option<PathBuf> {
    let folder = PathBuf::from(env::var_os(PUBLISHED_VARIABLE)?);
    assert!(folder.is_dir(), "{PUBLISHED_VARIABLE}={} is not a folder", folder.display());
    Some(folder.join(name)).filter(|folder| folder.is_dir())
}

/// Finds a data file in the folder that the variable names, or in `texts` next to the checkpoints.
fn data_file(name: &str) -> Option<PathBuf> {
    let sibling = |checkpoints: PathBuf| checkpoints.join("..").join("texts");
    let named = env::var_os(DATA_VARIABLE).map(PathBuf::from);
    let folders = [named, env::var_os(CHECKPOINTS_VARIABLE).map(PathBuf::from).map(sibling)];
    folders.into_iter().flatten().map(|folder| folder.join(name)).find(|path| path.is_file())
}

fn load(folder: &Path) -> LoadedModel {
    let options = ModelOptions {
        model: folder.to_owned(),
        device: DeviceChoice::Cpu,
        dtype: Some(WeightDType::F32),
        ..ModelOptions::default()
    };
    options.open(&Silent).unwrap().load(&Silent).unwrap()
}

/// Checks the results whose model and data are available, and reports the others as skipped.
#[track_caller]
fn check(cases: &[PublishedCase]) {
    let mut loaded: Option<(&str, LoadedModel)> = None;
    let mut wrong = Vec::new();
    for (model, protocol, data, metrics) in cases {
        let (Some(folder), Some(path)) = (model_folder(model), data_file(data)) else {
            skipped(&format!(
                "{protocol} of {model}: it needs {PUBLISHED_VARIABLE} to name a folder with {model}, and {DATA_VARIABLE} one with {data}"
            ));
            continue;
        };
        if loaded.as_ref().is_none_or(|(name, _)| name != model) {
            loaded = Some((model, load(&folder)));
        }
        let Some((_, loaded)) = &loaded else { continue };
        let (protocol_of_name, number) = named(protocol).unwrap();
        let data = Data::read(&path).unwrap();
        let setting =
            Setting { parameter: number.unwrap_or(0), ..Setting::new(loaded.vocabulary(), &Silent) };
        let prepared = (protocol_of_name.prepare)(&data, &setting).unwrap();
        assert_eq!(prepared.damaged, None, "{protocol}");
        let results = prepared.evaluate(loaded, Vec::new(), &Silent, &mut |_| Ok(())).unwrap();
        let measured = (protocol_of_name.measure)(&prepared.totals, &results);
        for (name, value, tolerance) in *metrics {
            let found = measured.iter().find(|metric| metric.name == *name).map(|metric| metric.value);
            if found.is_none_or(|found| (found - value).abs() > *tolerance || found.is_nan()) {
                wrong.push(format!(
                    "{protocol} of {model}: {name} {value} ± {tolerance:.1e}, found {found:?}"
                ));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn lambada_matches_published_results() {
    check(&LAMBADA);
}

#[test]
fn wikitext_matches_published_results() {
    check(&WIKITEXT);
}

#[test]
fn hellaswag_matches_published_results() {
    check(&HELLASWAG);
}
