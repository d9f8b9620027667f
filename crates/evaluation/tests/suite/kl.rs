//! `kl`: metrics for synthetic values, and for the built-in model versus its quantized versions.

use std::path::PathBuf;

use candle_gpt2_engine::{LoadedModel, ModelOptions, Silent, WeightDType};
use candle_gpt2_evaluation::{Data, EvaluationError, Kl, KlWindow, Metric, Setting, StderrKind};
use candle_gpt2_testing::{CheckpointFolder, STORY};

/// Tolerance for f64 sums of the same few values in a different order.
const SUM_TOLERANCE: f64 = 1e-12;

/// Two windows with synthetic values.
fn synthetic_windows() -> Vec<KlWindow> {
    let window = |index, kl: &[f64], base_logprob: &[f64], logprob: &[f64], other_top: usize| KlWindow {
        index,
        context_tokens: kl.len() + 1,
        tokens: vec![7; kl.len()],
        kl: kl.to_vec(),
        base_logprob: base_logprob.to_vec(),
        logprob: logprob.to_vec(),
        same_top: (0..kl.len()).map(|position| position != other_top).collect(),
    };
    vec![
        window(
            0,
            &[0.0707, 0.0224, 0.0598, 0.0404, 0.126],
            &[-1.865, -2.327, -1.109, -0.18, -1.872],
            &[-2.3, -2.149, -1.278, -0.005, -1.74],
            4,
        ),
        window(
            1,
            &[0.0564, 0.1568, 0.0326, 0.0588, 0.0194, 0.019, 0.0188, 0.0152],
            &[-0.495, -0.572, -2.69, -2.115, -7.37, -2.305, -0.828, -4.379],
            &[-1.038, -0.66, -2.506, -2.501, -7.273, -2.66, -0.877, -4.534],
            5,
        ),
    ]
}

/// Name, value and standard error of each metric, computed with NumPy from the synthetic windows.
///
/// Errors come from sums and sums of squares, as in llama.cpp's tool. The crate itself uses deviations
/// from the mean. Percentiles come from `numpy.percentile`.
const EXPECTED: [(&str, f64, Option<f64>); 34] = [
    ("perplexity", 9.6875945423886, Some(5.0789120257383)),
    ("base_perplexity", 8.6891656592745, Some(4.6493234116241)),
    ("ln_perplexity_ratio", 0.10876923076923, Some(0.071208627560522)),
    ("perplexity_ratio", 1.1149050348751, Some(0.079390857393769)),
    ("perplexity_difference", 0.99842888311414, Some(0.7756024758066)),
    ("perplexity_correlation", 0.99117003531672, None),
    ("kl", 0.053561538461538, Some(0.012115573462102)),
    ("kl_max", 0.1568, None),
    ("kl_99.9", 0.1564304, None),
    ("kl_99", 0.153104, None),
    ("kl_95", 0.13832, None),
    ("kl_90", 0.11494, None),
    ("kl_median", 0.0404, None),
    ("kl_10", 0.01884, None),
    ("kl_5", 0.01736, None),
    ("kl_1", 0.015632, None),
    ("kl_0.1", 0.0152432, None),
    ("kl_min", 0.0152, None),
    ("dp", -0.021983265320628, Some(0.024831086063707)),
    ("dp_max", 0.15974226778141, None),
    ("dp_99.9", 0.15808581670504, None),
    ("dp_99", 0.14317775701767, None),
    ("dp_95", 0.076919713962705, None),
    ("dp_90", 0.021166267985443, None),
    ("dp_75", 0.013713023839737, None),
    ("dp_median", -0.020893128766789, None),
    ("dp_25", -0.047544183627659, None),
    ("dp_10", -0.053968843603899, None),
    ("dp_5", -0.13494586313436, None),
    ("dp_1", -0.23131605950106, None),
    ("dp_0.1", -0.25299935368357, None),
    ("dp_min", -0.25540860859274, None),
    ("dp_rms", 0.088782081386933, Some(0.028954152629338)),
    ("same_top", 0.84615384615385, Some(0.10415433852097)),
];

fn model(dtype: WeightDType) -> LoadedModel {
    let options = ModelOptions { dtype: Some(dtype), ..ModelOptions::default() };
    options.open(&Silent).unwrap().load(&Silent).unwrap()
}

/// Loads a model with another vocabulary and a context of 48 tokens.
fn tiny() -> LoadedModel {
    let tiny = CheckpointFolder::tiny();
    let options = ModelOptions { model: tiny.path().to_owned(), ..ModelOptions::default() };
    options.open(&Silent).unwrap().load(&Silent).unwrap()
}

/// Writes the text to a file that is deleted with the folder.
fn file(text: &str) -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("text.txt");
    std::fs::write(&path, text).unwrap();
    (folder, path)
}

fn prepared(
    model: &LoadedModel,
    text: &str,
    context: Option<usize>,
    limit: Option<usize>,
) -> Result<Kl, EvaluationError> {
    let (_folder, path) = file(text);
    let setting = Setting { context, limit, ..Setting::new(model.vocabulary(), &Silent) };
    Kl::prepare(&Data::read(&path).unwrap(), &setting)
}

fn evaluated(kl: &Kl, base: &LoadedModel, model: &LoadedModel) -> Vec<KlWindow> {
    kl.evaluate(base, model, Vec::new(), &Silent, &mut |_| Ok(())).unwrap()
}

fn value(metrics: &[Metric], name: &str) -> f64 {
    metrics.iter().find(|metric| metric.name == name).unwrap_or_else(|| panic!("no metric `{name}`")).value
}

#[test]
fn metrics_match_numpy() {
    let metrics = Kl::measure(&synthetic_windows());
    assert_eq!(metrics.len(), EXPECTED.len());
    let close =
        |found: f64, expected: f64| (found - expected).abs() <= SUM_TOLERANCE * expected.abs().max(1.0);
    for (metric, (name, expected, stderr)) in metrics.iter().zip(EXPECTED) {
        assert_eq!(metric.name, name);
        assert_eq!(metric.count, 13, "{name}");
        assert!(close(metric.value, expected), "{name}: expected {expected}, found {}", metric.value);
        assert_eq!(metric.stderr.is_some(), stderr.is_some(), "{name}");
        let (found, expected) = (metric.stderr.unwrap_or(0.0), stderr.unwrap_or(0.0));
        assert!(close(found, expected), "stderr of {name}: expected {expected}, found {found}");
        let kind = match stderr {
            None => StderrKind::None,
            Some(_) if name == "same_top" => StderrKind::Binomial,
            Some(_) => StderrKind::Delta,
        };
        assert_eq!(metric.stderr_kind, kind, "{name}");
    }
}

#[test]
fn one_token_has_no_stderr_and_no_tokens_have_no_metrics() {
    let whole = &synthetic_windows()[0];
    let one = KlWindow {
        tokens: vec![7],
        kl: whole.kl[..1].to_vec(),
        base_logprob: whole.base_logprob[..1].to_vec(),
        logprob: whole.logprob[..1].to_vec(),
        same_top: vec![true],
        ..whole.clone()
    };
    let metrics = Kl::measure(&[one]);
    assert!(metrics.iter().all(|metric| metric.stderr.is_none()));
    assert!(metrics.iter().all(|metric| metric.value.is_finite()));
    assert_eq!((value(&metrics, "kl_0.1"), value(&metrics, "kl_max")), (0.0707, 0.0707));
    // The correlation of a single pair is undefined.
    assert!(metrics.iter().all(|metric| metric.name != "perplexity_correlation"));
    assert_eq!(Kl::measure(&[]), []);
}

#[test]
fn model_has_zero_divergence_from_itself() {
    let f32 = model(WeightDType::F32);
    let kl = prepared(&f32, STORY, Some(48), None).unwrap();
    let metrics = Kl::measure(&evaluated(&kl, &f32, &model(WeightDType::F32)));
    for metric in &metrics {
        let name = metric.name;
        match name {
            "perplexity_ratio" | "perplexity_correlation" | "same_top" => {
                assert_eq!(metric.value, 1.0, "{name}")
            }
            "perplexity" | "base_perplexity" => continue,
            _ => assert_eq!(metric.value, 0.0, "{name}"),
        }
        assert_eq!(metric.stderr.unwrap_or(0.0), 0.0, "stderr of {name}");
    }
    assert_eq!(metrics.len(), EXPECTED.len());
    assert_eq!(value(&metrics, "perplexity"), value(&metrics, "base_perplexity"));
    assert!(value(&metrics, "perplexity") > 1.0);
}

#[test]
fn coarser_quantization_increases_divergence() {
    let f32 = model(WeightDType::F32);
    let kl = prepared(&f32, STORY, Some(64), None).unwrap();
    let distance = |dtype| {
        let metrics = Kl::measure(&evaluated(&kl, &f32, &model(dtype)));
        assert!(value(&metrics, "kl_min") > -1e-12, "{dtype:?}");
        (value(&metrics, "kl"), value(&metrics, "dp_rms"), value(&metrics, "same_top"))
    };
    let (q8, q4) = (distance(WeightDType::Q8), distance(WeightDType::Q4));
    assert!(1e-6 < q8.0 && q8.0 < 1e-3, "{q8:?}");
    assert!(q8.0 < q4.0 && q4.0 < 4e-2, "{q8:?} {q4:?}");
    assert!(0.0 < q8.1 && q8.1 < q4.1, "{q8:?} {q4:?}");
    assert!(0.9 < q8.2 && 0.8 < q4.2, "{q8:?} {q4:?}");
}

#[test]
fn second_half_of_each_window_is_scored() {
    let f32 = model(WeightDType::F32);
    let kl = prepared(&f32, STORY, Some(50), None).unwrap();
    // The trailing line break is not part of the text.
    let ids = f32.vocabulary().encode(STORY.strip_suffix('\n').unwrap()).unwrap();
    let windows = evaluated(&kl, &f32, &f32);
    assert_eq!(windows.len(), ids.len() / 50);
    assert_eq!(
        kl.tokens_to_read(2),
        49 * (windows.len() as u64 - 1),
        "the last completed window is computed again"
    );
    for (index, window) in windows.iter().enumerate() {
        // In a window of 50 tokens, llama.cpp uses the logits after tokens 25 to 48, counted from 0.
        assert_eq!((window.index, window.context_tokens), (index, 26));
        assert_eq!(window.tokens, ids[index * 50 + 26..index * 50 + 50]);
        assert_eq!(
            [window.kl.len(), window.base_logprob.len(), window.logprob.len(), window.same_top.len()],
            [24; 4]
        );
        assert_eq!(window.base_logprob, window.logprob);
    }
    // Half of an odd window length is rounded down.
    let odd = evaluated(&prepared(&f32, STORY, Some(51), Some(1)).unwrap(), &f32, &f32);
    assert_eq!(odd.len(), 1);
    assert_eq!(odd[0].tokens, ids[26..51]);
    // The values equal the results of `score` for a text that consists of this window.
    let score = candle_gpt2_generation::score(f32.model(), &ids[..51], 51, 0, &|_| ()).unwrap();
    let scored: Vec<f64> = score.logprobs[26..].iter().copied().flatten().collect();
    let largest = odd[0].logprob.iter().zip(&scored).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
    assert_eq!(scored.len(), odd[0].logprob.len());
    assert!(largest < 1e-4, "{largest}");
}

#[test]
fn resumed_run_equals_an_uninterrupted_run() {
    let (f32, q8) = (model(WeightDType::F32), model(WeightDType::Q8));
    let kl = prepared(&f32, STORY, Some(40), None).unwrap();
    let mut lines = Vec::new();
    let whole = kl
        .evaluate(&f32, &q8, Vec::new(), &Silent, &mut |window| {
            lines.push(serde_json::to_string(window).unwrap());
            Ok(())
        })
        .unwrap();
    assert_eq!(lines.len(), kl.windows());
    let done: Vec<KlWindow> = lines[..2].iter().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert!(done.iter().enumerate().all(|(index, line)| kl.check_result(index, line).is_ok()));
    let mut computed = Vec::new();
    let keep = &mut |window: &KlWindow| {
        computed.push(window.index);
        Ok(())
    };
    let resumed = kl.evaluate(&f32, &q8, done, &Silent, keep).unwrap();
    assert_eq!(computed, (2..kl.windows()).collect::<Vec<_>>());
    assert_eq!(resumed, whole);
    assert_eq!(Kl::measure(&resumed), Kl::measure(&whole));
}

#[test]
fn logged_window_of_another_text_is_rejected() {
    let f32 = model(WeightDType::F32);
    let kl = prepared(&f32, STORY, Some(40), Some(2)).unwrap();
    let line = evaluated(&kl, &f32, &f32).remove(1);
    assert_eq!(kl.check_result(1, &line), Ok(()));
    let differs = |index, line: &KlWindow, what: &str| {
        let found = kl.check_result(index, line).unwrap_err();
        assert!(found.contains(what), "{found}");
    };
    differs(0, &line, "`index`: expected 0, found 1");
    differs(2, &line, "the text has only 2 windows");
    differs(1, &KlWindow { context_tokens: 20, ..line.clone() }, "`context_tokens`: expected 21, found 20");
    differs(1, &KlWindow { tokens: vec![7; 19], ..line.clone() }, "`tokens`");
    differs(
        1,
        &KlWindow { same_top: vec![true; 18], ..line.clone() },
        "lists of 19 numbers, one for each token, found a list of 18",
    );
}

#[test]
fn log_write_error_stops_the_evaluation() {
    let f32 = model(WeightDType::F32);
    let kl = prepared(&f32, STORY, Some(40), None).unwrap();
    let mut kept = 0;
    let error = kl.evaluate(&f32, &f32, Vec::new(), &Silent, &mut |_| {
        kept += 1;
        Err(EvaluationError::Unusable { file: "log".into(), what: "full".into() })
    });
    assert_eq!((error.unwrap_err().to_string().as_str(), kept), ("log: full", 1));
}

#[test]
fn window_lengths_are_validated_and_noted() {
    let f32 = model(WeightDType::F32);
    let prepare = |context, text: &str| prepared(&f32, text, context, None);
    let kl = prepare(None, &STORY.repeat(6)).unwrap();
    assert!(kl.notes().is_empty(), "llama.cpp's windows have 512 tokens too");
    let shorter = prepared(&tiny(), STORY, None, None).unwrap();
    assert_eq!(shorter.notes(), ["windows have 48 tokens (the model's context) instead of llama.cpp's 512"]);
    assert!(prepare(Some(64), STORY).unwrap().notes().is_empty());
    for wrong in [0, 2, 513] {
        let error = prepare(Some(wrong), STORY).unwrap_err();
        assert_eq!(
            error.to_string(),
            format!("`context`: expected from 3 to 512 tokens (the model's context), found {wrong}")
        );
        assert!(error.is_usage());
    }
    let error = prepared(&f32, STORY, None, Some(0)).unwrap_err();
    assert_eq!(error.to_string(), "`limit`: expected at least 1 item, found 0");
    // A text shorter than a window becomes a single window.
    let short = prepare(Some(64), "One day, Mia went").unwrap();
    let tokens = f32.vocabulary().encode("One day, Mia went").unwrap().len();
    assert_eq!((short.windows(), short.tokens_to_read(0)), (1, tokens as u64 - 1));
    assert_eq!(
        short.notes(),
        [format!("the text has {tokens} tokens, so its only window is shorter than 64 tokens")]
    );
    let error = prepare(Some(64), "a\n").unwrap_err().to_string();
    assert!(error.ends_with("text.txt: expected text of at least 3 tokens, found 1"), "{error}");
}

#[test]
fn special_token_names_are_plain_text() {
    let f32 = model(WeightDType::F32);
    let text = "Good night.<|endoftext|>One day";
    assert!(f32.vocabulary().encode(text).unwrap().contains(&0));
    let kl = prepared(&f32, text, Some(256), None).unwrap();
    let windows = evaluated(&kl, &f32, &f32);
    assert!(kl.tokens_to_read(0) >= f32.vocabulary().encode(text).unwrap().len() as u64);
    assert!(!windows[0].tokens.contains(&0) && !windows[0].tokens.is_empty());
}

#[test]
fn base_with_another_vocabulary_size_is_rejected() {
    let f32 = model(WeightDType::F32);
    let kl = prepared(&f32, STORY, Some(64), None).unwrap();
    kl.check_base(f32.vocabulary(), f32.vocabulary()).unwrap();
    let tiny = tiny();
    let unexpected = &mut |_: &KlWindow| panic!("no window should be computed");
    let error = kl.evaluate(&tiny, &f32, Vec::new(), &Silent, unexpected).unwrap_err();
    let size = tiny.config().vocab_size;
    assert_eq!(
        error.to_string(),
        format!(
            "vocabulary of the base model: expected 4096 tokens, as in the evaluated model, found {size}"
        )
    );
    assert!(error.is_usage());
}

#[test]
fn base_with_reassigned_token_ids_is_rejected() {
    let f32 = model(WeightDType::F32);
    let kl = prepared(&f32, STORY, Some(64), None).unwrap();
    // Swap the ids of two words in the built-in tokenizer.
    let tokenizer =
        std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/stories/tokenizer.json"));
    let mut tokenizer: serde_json::Value = serde_json::from_str(&tokenizer.unwrap()).unwrap();
    let vocabulary = &mut tokenizer["model"]["vocab"];
    let [and, the] = ["Ġand", "Ġthe"].map(|token| vocabulary[token].take());
    (vocabulary["Ġand"], vocabulary["Ġthe"]) = (the.clone(), and);
    let (_folder, path) = file(&tokenizer.to_string());
    let options = ModelOptions { tokenizer: Some(path), ..ModelOptions::default() };
    let other = options.open(&Silent).unwrap().load(&Silent).unwrap();
    let error = kl.check_base(other.vocabulary(), f32.vocabulary()).unwrap_err();
    assert_eq!(
        error.to_string(),
        format!(
            "token {the} of the base model: expected \" the\", as in the evaluated model, found \" and\""
        )
    );
}
