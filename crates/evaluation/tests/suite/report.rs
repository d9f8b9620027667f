//! Reports: published results of the same model size, standard errors, infinities and NaN in JSON.

use candle_gpt2::Gpt2Config;
use candle_gpt2_evaluation::{DatasetReport, Metric, MetricReport, Published, Report, Size, StderrKind};
use serde_json::{Value, json};

const SOURCE: &str = "a log";

fn published(model: Size, value: f64, protocol: &'static str, exact: bool) -> Published {
    Published { model, metric: "acc", value, source: SOURCE, protocol, exact }
}

fn published_results() -> [Published; 5] {
    [
        published(Size::Small, 0.46, "not published", false),
        published(Size::Small, 0.3, "task:one", true),
        published(Size::Small, 0.35, "task:one-512", true),
        published(Size::Xl, 0.5, "task:one", true),
        Published { metric: "perplexity", ..published(Size::Small, 40.0, "task:one", true) },
    ]
}

fn acc(value: f64, stderr: Option<f64>) -> Metric {
    Metric { name: "acc", value, stderr, stderr_kind: StderrKind::Binomial, count: 100 }
}

fn report(metrics: Vec<MetricReport>, known: Option<bool>, limit: Option<usize>) -> Report {
    Report {
        model: "gpt2".into(),
        dtype: "f32",
        kv_dtype: "f32",
        device: "cpu".into(),
        base: None,
        protocol: "task:one".into(),
        protocol_source: "a program",
        num_fewshot: 0,
        dataset: DatasetReport {
            name: "data",
            path: "data.jsonl".into(),
            revision: Some("abc".into()),
            sha256: "0f".into(),
            known,
            items: 100,
            limit,
        },
        metrics,
        against: None,
        cut: 0,
        notes: Vec::new(),
        tokens_read: 1234,
        tokens_scored: 200,
        seconds: 2.0,
        version: Report::VERSION,
    }
}

#[test]
fn metric_is_compared_with_its_own_size_and_protocol() {
    let report =
        MetricReport::new(&acc(0.32, Some(0.01)), "task:one", &published_results(), Some(Size::Small));
    let found: Vec<_> = report.published.iter().map(|published| (published.value, published.exact)).collect();
    assert_eq!(found, [(0.46, false), (0.3, true), (0.35, false)]);
    assert!((report.z.unwrap() - 2.0).abs() < 1e-9);
    let with_parameter =
        MetricReport::new(&acc(0.32, Some(0.01)), "task:one-512", &published_results(), Some(Size::Small));
    assert!((with_parameter.z.unwrap() + 3.0).abs() < 1e-9, "the result with the same parameter");
    let compared =
        |stderr, size| MetricReport::new(&acc(0.32, stderr), "task:one", &published_results(), size);
    assert_eq!(compared(None, Some(Size::Small)).z, None);
    assert_eq!(compared(Some(0.0), Some(Size::Small)).z, None, "no standard error to divide by");
    assert_eq!(compared(Some(0.01), Some(Size::Medium)).published, []);
    assert_eq!(compared(Some(0.01), None).z, None);
}

#[test]
fn json_encodes_non_finite_numbers_as_strings() {
    let metrics = vec![
        MetricReport::new(&acc(0.32, Some(0.01)), "task:one", &published_results()[1..2], Some(Size::Small)),
        MetricReport::new(&acc(f64::INFINITY, Some(f64::NAN)), "task:one", &[], None),
        MetricReport::new(&acc(f64::NEG_INFINITY, None), "task:one", &[], None),
    ];
    let text = serde_json::to_string(&report(metrics, Some(true), None)).unwrap();
    let value: Value = serde_json::from_str(&text).unwrap();
    let published = json!([
        { "model": "gpt2", "metric": "acc", "value": 0.3, "source": "a log", "protocol": "task:one", "exact": true }
    ]);
    assert_eq!(value["metrics"][0]["published"], published);
    assert_eq!(value["metrics"][0]["stderr_kind"], "binomial");
    assert_eq!([&value["metrics"][1]["value"], &value["metrics"][1]["stderr"]], ["Infinity", "NaN"]);
    assert_eq!(
        [&value["metrics"][2]["value"], &value["metrics"][2]["stderr"]],
        [&json!("-Infinity"), &Value::Null]
    );
    assert!(value.get("base").is_none());
}

#[test]
fn table_shows_metrics_and_comparable_results() {
    let small = Metric { name: "kl", stderr_kind: StderrKind::Delta, ..acc(0.000_012_34, None) };
    let metrics = || {
        vec![
            MetricReport::new(&acc(0.32, Some(0.01)), "task:one", &published_results(), Some(Size::Small)),
            MetricReport::new(&small, "task:one", &published_results(), Some(Size::Small)),
        ]
    };
    let table = report(metrics(), Some(true), None).to_string();
    let expected = "\
protocol  metric     value  ± stderr  published  difference (in standard errors)
task:one  acc       0.3200  ± 0.0100     0.3000  +0.0200 (+2.00)
task:one  kl      1.234e-5         -          -  -
  acc 0.4600 by a log (protocol not published)
  acc 0.3000 by a log (this protocol)
  acc 0.3500 by a log (another protocol: task:one-512)
  the published figures are for the same items, so no difference is due to chance
  data: data.jsonl at abc, 100 items, sha256 0f, the published file
  model: gpt2 in f32, on cpu; 1234 tokens read in 2.0 s";
    assert_eq!(table, expected);
    let line = |known, limit| report(metrics(), known, limit).to_string().lines().nth(6).unwrap().to_owned();
    assert_eq!(line(Some(false), None), "  the published figures are for other items");
    assert_eq!(line(Some(true), Some(100)), "  the published figures are for other items");
    assert_eq!(line(None, None), "  the published figures may be for other items");
    let limited = report(metrics(), Some(true), Some(100)).to_string();
    assert!(limited.contains("data.jsonl at abc, the first 100 items, sha256 0f"), "{limited}");
}

#[test]
fn size_is_detected_from_the_shape() {
    let config =
        |n_layer, n_embd, vocab_size| Gpt2Config { n_layer, n_embd, vocab_size, ..Gpt2Config::gpt2() };
    assert_eq!(Size::of(&config(12, 768, 50257)).map(Size::name), Some("gpt2"));
    assert_eq!(Size::of(&config(24, 1024, 50257)).map(Size::name), Some("gpt2-medium"));
    assert_eq!(Size::of(&config(36, 1280, 50257)).map(Size::name), Some("gpt2-large"));
    assert_eq!(Size::of(&config(48, 1600, 50257)).map(Size::name), Some("gpt2-xl"));
    // distilgpt2, and a model that differs from gpt2 only in its vocabulary size.
    assert_eq!(Size::of(&config(6, 768, 50257)), None);
    assert_eq!(Size::of(&config(12, 768, 1024)), None);
}
