//! Metrics for known results, checked against the formulas in the published scripts.

use candle_gpt2_evaluation::{
    ChoiceResult, ItemResult, Metric, Predicted, StderrKind, Totals, named, protocols,
};

/// Tolerance for the rounding errors of a few operations.
const ROUNDING: f64 = 1e-12;

/// Creates a choice with this log-probability and these counts, at two bytes per character.
fn choice(logprob: f64, tokens: usize, characters: usize) -> ChoiceResult {
    let (bytes, squares) = (2 * characters, logprob.powi(2));
    ChoiceResult { logprob, tokens, characters, bytes, squares, ..ChoiceResult::default() }
}

fn result(index: usize, choices: Vec<ChoiceResult>, gold: Option<usize>) -> ItemResult {
    let predicted = gold.map(|_| Predicted::of(&choices));
    let correct = gold.zip(predicted).map(|(gold, predicted)| gold == predicted.sum);
    ItemResult { index, choices, gold, predicted, correct, ..ItemResult::default() }
}

fn texts(texts: impl IntoIterator<Item = ChoiceResult>) -> Vec<ItemResult> {
    texts.into_iter().enumerate().map(|(index, text)| result(index, vec![text], None)).collect()
}

fn measure(protocol: &str, totals: Totals, results: &[ItemResult]) -> Vec<Metric> {
    (named(protocol).unwrap().0.measure)(&totals, results)
}

#[track_caller]
fn assert_metric(metrics: &[Metric], name: &str, value: f64, count: usize) {
    let metric = metrics
        .iter()
        .find(|metric| metric.name == name)
        .unwrap_or_else(|| panic!("no {name} in {metrics:?}"));
    assert!(
        (metric.value - value).abs() <= ROUNDING * value.abs(),
        "{name}: expected {value}, found {}",
        metric.value
    );
    assert_eq!(metric.count, count, "{name}");
}

fn names(metrics: &[Metric]) -> Vec<&str> {
    metrics.iter().map(|metric| metric.name).collect()
}

/// Returns one item: choice 0 is best by sum, choice 1 per character, and choice 2 per token.
fn undecided(gold: usize) -> Vec<ItemResult> {
    vec![result(0, vec![choice(-4.0, 1, 2), choice(-6.0, 2, 6), choice(-8.0, 8, 5)], Some(gold))]
}

#[test]
fn each_protocol_uses_its_length_normalization() {
    let values = |protocol: &str| -> Vec<(String, [f64; 3])> {
        let measured = |gold| measure(protocol, Totals::default(), &undecided(gold));
        let [a, b, c] = [measured(0), measured(1), measured(2)];
        (0..a.len())
            .map(|index| (a[index].name.to_owned(), [a[index].value, b[index].value, c[index].value]))
            .collect()
    };
    let acc = ("acc".to_owned(), [1.0, 0.0, 0.0]);
    let by_characters = ("acc_norm".to_owned(), [0.0, 1.0, 0.0]);
    let by_tokens = ("acc_norm".to_owned(), [0.0, 0.0, 1.0]);
    let questions = "piqa:lm-eval arc-easy:lm-eval arc-challenge:lm-eval openbookqa:lm-eval sciq:lm-eval \
        hellaswag:lm-eval";
    for protocol in questions.split(' ') {
        assert_eq!(values(protocol), [acc.clone(), by_characters.clone()], "{protocol}");
    }
    assert_eq!(values("hellaswag:llm.c"), [acc.clone(), by_tokens.clone()]);
    assert_eq!(values("hellaswag:llama.cpp"), [by_tokens]);
    assert_eq!(values("winogrande:lm-eval"), std::slice::from_ref(&acc));
    assert_eq!(values("blimp:lm-eval"), [acc]);
}

#[test]
fn empty_choice_never_wins_by_characters() {
    let choices = vec![choice(-1.0, 1, 0), choice(-50.0, 2, 3)];
    let metrics = measure("hellaswag:lm-eval", Totals::default(), &[result(0, choices, Some(1))]);
    assert_metric(&metrics, "acc_norm", 1.0, 1);
}

#[test]
fn lambada_metrics_are_per_word() {
    let greedy = ChoiceResult { is_greedy: true, ..choice(-1.0, 1, 4) };
    let results = texts([greedy, choice(-2.0, 3, 4), choice(-6.0, 2, 4)]);
    let metrics = measure("lambada:lm-eval", Totals::default(), &results);
    assert_eq!(names(&metrics), ["perplexity", "acc"]);
    assert_metric(&metrics, "perplexity", 3.0_f64.exp(), 3);
    assert_metric(&metrics, "acc", 1.0 / 3.0, 3);
    // Standard errors: ppl * sd / sqrt(n) for the perplexity, sqrt(p (1 - p) / (n - 1)) for the accuracy.
    let expected = [3.0_f64.exp() * 7.0_f64.sqrt() / 3.0_f64.sqrt(), (2.0_f64 / 9.0 / 2.0).sqrt()];
    for (metric, expected) in metrics.iter().zip(expected) {
        assert!((metric.stderr.unwrap() - expected).abs() < ROUNDING * expected, "{metric:?}");
    }
    assert_eq!((metrics[0].stderr_kind, metrics[1].stderr_kind), (StderrKind::Delta, StderrKind::Binomial));
    for protocol in ["lambada:last-token", "lambada:megatron-strict"] {
        let metrics = measure(protocol, Totals::default(), &results);
        assert_eq!(names(&metrics), ["acc"]);
        assert_metric(&metrics, "acc", 1.0 / 3.0, 3);
    }
}

#[test]
fn generated_words_must_match_exactly() {
    let word = |index, right: &str, written: &str| ItemResult {
        words: Some([right.to_owned(), written.to_owned()]),
        ..result(index, vec![], None)
    };
    let results = [word(0, "signs", "signs"), word(1, "dead", "deadly"), word(2, "a", ""), word(3, "b", "b")];
    let metrics = measure("lambada:stop-words", Totals::default(), &results);
    assert_eq!(names(&metrics), ["acc"]);
    assert_metric(&metrics, "acc", 0.5, 4);
}

#[test]
fn blimp_accuracy_averages_paradigms() {
    let sentence = |index, group: &str, is_right: bool| {
        let [a, b] = if is_right { [-1.0, -2.0] } else { [-2.0, -1.0] };
        ItemResult {
            group: Some(group.to_owned()),
            ..result(index, vec![choice(a, 1, 1), choice(b, 1, 1)], Some(0))
        }
    };
    // The mean covers 3 of 4 and 0 of 2, not 3 of 6. The errors are sqrt(3/16 / 3) = 1/4 and 0.
    let groups = [("a", true), ("b", false), ("a", true), ("a", false), ("a", true), ("b", false)];
    let results: Vec<_> = groups
        .into_iter()
        .enumerate()
        .map(|(index, (group, is_right))| sentence(index, group, is_right))
        .collect();
    let metrics = measure("blimp:lm-eval", Totals::default(), &results);
    assert_metric(&metrics, "acc", 0.375, 6);
    assert_eq!(metrics[0].stderr, Some(0.125));
    // A paradigm with one sentence has no standard error.
    assert_eq!(measure("blimp:lm-eval", Totals::default(), &results[..2])[0].stderr, None);
}

#[test]
fn page_metrics_are_per_word_and_per_byte() {
    let page = |logprob, words| ChoiceResult { words: Some(words), ..choice(logprob, 7, 50) };
    let metrics = measure("wikitext:lm-eval", Totals::default(), &texts([page(-30.0, 10), page(-70.0, 15)]));
    assert_eq!(names(&metrics), ["word_perplexity", "byte_perplexity", "bits_per_byte"]);
    assert_metric(&metrics, "word_perplexity", 4.0_f64.exp(), 25);
    assert_metric(&metrics, "byte_perplexity", 0.5_f64.exp(), 200);
    assert_metric(&metrics, "bits_per_byte", 0.5 / 2.0_f64.ln(), 200);
}

/// Weights each window's mean loss by the window's number of labels minus one, as the script does.
fn hf_script(windows: &[(f64, usize, usize)]) -> f64 {
    let mut nll_sum = 0.0;
    let mut n_tokens = 0;
    for (nll, scored, labels) in windows {
        nll_sum += nll / *scored as f64 * (labels - 1) as f64;
        n_tokens += labels - 1;
    }
    (nll_sum / n_tokens as f64).exp()
}

#[test]
fn hf_window_weights_match_the_script() {
    let results = texts([choice(-300.0, 99, 1), choice(-130.0, 50, 1), choice(-90.0, 30, 1)]);
    // In overlapping windows, the first window's first token is a label, and the other windows' first tokens
    // are not.
    let overlapping = measure("wikitext:hf-50", Totals { tokens: 180, words: 0 }, &results);
    assert_eq!(names(&overlapping), ["perplexity", "token_perplexity"]);
    assert_metric(
        &overlapping,
        "perplexity",
        hf_script(&[(300.0, 99, 100), (130.0, 50, 50), (90.0, 30, 30)]),
        177,
    );
    assert_metric(&overlapping, "token_perplexity", (520.0_f64 / 179.0).exp(), 179);
    // In adjacent windows, the first token of each window is an unscored label.
    let adjacent = measure("wikitext:hf-100", Totals { tokens: 182, words: 0 }, &results);
    assert_metric(
        &adjacent,
        "perplexity",
        hf_script(&[(300.0, 99, 100), (130.0, 50, 51), (90.0, 30, 31)]),
        179,
    );
    assert_eq!(adjacent[0].value, adjacent[1].value);
    let one = measure("wikitext:hf-100", Totals { tokens: 100, words: 0 }, &results[..1]);
    assert_metric(&one, "perplexity", hf_script(&[(300.0, 99, 100)]), 99);
}

#[test]
fn megatron_perplexity_is_adjusted_and_capped_at_exp_20() {
    let results = texts([choice(-300.0, 100, 1), choice(-100.0, 20, 1)]);
    let metrics = measure("wikitext:megatron", Totals { tokens: 121, words: 101 }, &results);
    assert_eq!(names(&metrics), ["perplexity", "adjusted_perplexity"]);
    let loss = 400.0 / 120.0;
    assert_metric(&metrics, "perplexity", f64::exp(loss), 120);
    assert_metric(&metrics, "adjusted_perplexity", f64::exp(loss * 120.0 / 100.0), 120);
    let capped = measure("wikitext:megatron", Totals { tokens: 121, words: 11 }, &results);
    assert_metric(&capped, "perplexity", f64::exp(loss), 120);
    assert_metric(&capped, "adjusted_perplexity", f64::exp(20.0), 120);
    assert_eq!((capped[1].stderr, capped[1].stderr_kind), (None, StderrKind::None));
    assert!(capped[0].stderr.is_some());
    let one_word = measure("wikitext:megatron", Totals { tokens: 121, words: 1 }, &results);
    assert_eq!(names(&one_word), ["perplexity"]);
}

/// Checks the standard error against the formula in llama.cpp's `llama-perplexity`.
#[test]
fn llama_cpp_stderr_treats_tokens_as_independent() {
    let squares = |choice: ChoiceResult, squares| ChoiceResult { squares, ..choice };
    let results = texts([squares(choice(-9.0, 3, 1), 35.0), squares(choice(-6.0, 2, 1), 20.0)]);
    let metrics = measure("wikitext:llama.cpp", Totals::default(), &results);
    assert_eq!(names(&metrics), ["perplexity"]);
    assert_metric(&metrics, "perplexity", 3.0_f64.exp(), 5);
    let expected = 3.0_f64.exp() * ((55.0_f64 / 5.0 - 9.0) / 4.0).sqrt();
    assert!((metrics[0].stderr.unwrap() - expected).abs() < ROUNDING * expected);
}

#[test]
fn text_bits_are_reported_per_unit() {
    let nats = 2.0_f64.ln();
    let results = texts([choice(-30.0 * nats, 10, 30), choice(-50.0 * nats, 30, 50)]);
    let metrics = measure("text:bits", Totals { tokens: 40, words: 20 }, &results);
    let expected = [
        ("bits_per_byte", 0.5, 160),
        ("bits_per_character", 1.0, 80),
        ("bits_per_token", 2.0, 40),
        ("byte_perplexity", 0.5_f64.exp2(), 160),
        ("token_perplexity", 4.0, 40),
        ("word_perplexity", 16.0, 20),
    ];
    assert_eq!(names(&metrics), expected.map(|(name, ..)| name));
    for (name, value, count) in expected {
        assert_metric(&metrics, name, value, count);
    }
    assert_eq!(metrics[5].stderr, None);
}

/// Checks that zero items yield no metrics, rather than NaN values.
#[test]
fn zero_items_yield_no_metrics() {
    for protocol in protocols() {
        assert_eq!((protocol.measure)(&Totals::default(), &[]), [], "{}", protocol.name);
    }
}
