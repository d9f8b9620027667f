//! Complete evaluations: invalid options, notes, ordered reports, and interrupted and resumed runs.

use std::fs;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use candle_gpt2_engine::{
    DeviceChoice, LoadedModel, ModelOptions, Progress, Reporter, Silent, Unit, WeightDType,
};
use candle_gpt2_evaluation::{EvaluationError, EvaluationOptions, ModelFacts, Report, listing, protocols};
use candle_gpt2_kernels::interruptible;

/// Passages written for this suite.
const PASSAGES: &str = r#"{"text": "First Citizen: Before we proceed any further, hear me speak.\nAll: Speak, speak"}
{"text": "My lord, the king of France is dead, and long live the king"}
{"text": "He said: Come hither, boy, and give me thy hand"}
{"text": "What is the city but the people? True, the people are the city."}
"#;

struct Folder(tempfile::TempDir);

impl Folder {
    fn new() -> Self {
        let folder = Self(tempfile::tempdir().unwrap());
        fs::write(folder.file("passages.jsonl"), PASSAGES).unwrap();
        fs::write(folder.file("text.txt"), "The king of France is dead, and long live the king. ".repeat(30))
            .unwrap();
        folder
    }

    fn file(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }
}

fn options(protocols: &[&str]) -> EvaluationOptions {
    EvaluationOptions::new(protocols.iter().copied())
}

fn model_options() -> ModelOptions {
    ModelOptions { device: DeviceChoice::Cpu, ..ModelOptions::default() }
}

fn loaded(options: &ModelOptions) -> LoadedModel {
    options.open(&Silent).unwrap().load(&Silent).unwrap()
}

/// Notes from a run, its reports, and the error that ended the run, if any.
type Evaluated = (Vec<String>, Vec<Report>, Option<EvaluationError>);

fn evaluate(options: EvaluationOptions, reporter: &dyn Reporter) -> Result<Evaluated, EvaluationError> {
    let plan = options.check()?;
    let model = loaded(&model_options());
    let base_options = plan.base_of(&model_options());
    let base = base_options.as_ref().map(loaded);
    let facts = ModelFacts::of_loaded(&model_options(), &model);
    let base_facts = base_options.as_ref().zip(base.as_ref());
    let base_facts = base_facts.map(|(options, base)| ModelFacts::of_loaded(options, base));
    let evaluation = plan.prepare(&facts, base_facts.as_ref(), reporter)?;
    let notes = evaluation.notes().to_vec();
    let (mut reports, mut error) = (Vec::new(), None);
    for report in evaluation.run(&model, base.as_ref(), reporter) {
        assert!(error.is_none(), "nothing follows an error");
        match report {
            Ok(report) => reports.push(report),
            Err(cause) => error = Some(cause),
        }
    }
    Ok((notes, reports, error))
}

/// Clears the fields that depend on speed or on previously completed work.
fn reproducible(reports: &[Report]) -> Vec<Report> {
    let fixed = |report: &Report| Report { seconds: 0.0, tokens_read: 0, tokens_scored: 0, ..report.clone() };
    reports.iter().map(fixed).collect()
}

/// Reporter that interrupts after a fixed number of checks.
struct Interrupter {
    checks: AtomicUsize,
    after: usize,
}

impl Interrupter {
    fn after(after: usize) -> Self {
        Self { checks: AtomicUsize::new(0), after }
    }
}

impl Reporter for Interrupter {
    fn start(&self, what: &str, total: u64, unit: Unit) -> Box<dyn Progress> {
        Silent.start(what, total, unit)
    }

    fn note(&self, _: &str) {}

    fn is_interrupted(&self) -> bool {
        self.checks.fetch_add(1, Ordering::Relaxed) >= self.after
    }
}

#[test]
fn invalid_options_are_rejected() {
    let refused = |options: EvaluationOptions, expected: &str| {
        let error = options.check().unwrap_err();
        assert_eq!(error.to_string(), expected);
        assert!(error.is_usage(), "{error}");
    };
    let lambada = || options(&["lambada:lm-eval"]);
    refused(options(&[]), "specify at least one protocol");
    refused(options(&["kl", "lambada:lm-eval", "kl"]), "`kl`: requested twice");
    refused(EvaluationOptions { limit: Some(0), ..lambada() }, "`limit`: expected at least 1, found 0");
    refused(
        EvaluationOptions { context: Some(64), ..lambada() },
        "`context` applies only to wikitext:llama.cpp and kl",
    );
    refused(
        EvaluationOptions { resume: true, ..lambada() },
        "`resume` needs `items`, the log of the interrupted run",
    );
    refused(
        EvaluationOptions { data: vec!["a".into(), "b".into()], ..lambada() },
        "`data`: expected one path for all protocols, or one for each of the 1 protocols, found 2",
    );
    refused(
        EvaluationOptions { against: Some("log".into()), ..options(&["kl"]) },
        "`against` compares items and cannot be used with kl, which already compares two models",
    );
    refused(
        EvaluationOptions { base: Some("gpt2".into()), ..lambada() },
        "`base` applies only to kl, which compares two models",
    );
    refused(
        EvaluationOptions { base_dtype: Some(WeightDType::Q8), ..lambada() },
        "`base_dtype` applies only to kl, which compares two models",
    );
    let error = options(&["lambada:lm-evil"]).check().unwrap_err();
    assert!(matches!(error, EvaluationError::UnknownProtocol { .. }), "{error}");

    let plan = options(&["text:bits"]).check().unwrap();
    let (options, model) = (model_options(), loaded(&model_options()));
    let facts = ModelFacts::of_loaded(&options, &model);
    let error = plan.prepare(&facts, None, &Silent).err().unwrap();
    let expected =
        "`text:bits` has no single data file on the Hub; specify its data (any UTF-8 text) with `data`";
    assert_eq!((error.to_string().as_str(), error.is_usage()), (expected, true));
}

#[test]
fn base_defaults_to_the_same_model_in_f32() {
    let model = ModelOptions {
        model: "a".into(),
        dtype: Some(WeightDType::Q4),
        kv_dtype: Some("q8".parse().unwrap()),
        n_head: Some(4),
        ..model_options()
    };
    let base = |options: EvaluationOptions| options.check().unwrap().base_of(&model);
    let same = base(options(&["lambada:lm-eval", "kl"])).unwrap();
    assert_eq!((same.model, same.dtype, same.n_head), ("a".into(), Some(WeightDType::F32), Some(4)));
    assert!(same.kv_dtype.is_none(), "the default that matches the weights");
    let options_of = |base_dtype| EvaluationOptions {
        base: Some("b".into()),
        base_dtype: Some(base_dtype),
        ..options(&["kl"])
    };
    let other = base(options_of(WeightDType::Q8)).unwrap();
    assert_eq!((other.model, other.dtype, other.n_head), ("b".into(), Some(WeightDType::Q8), None));
    assert!(base(options(&["lambada:lm-eval"])).is_none());
}

#[test]
fn kl_needs_a_second_model() {
    let folder = Folder::new();
    let options = EvaluationOptions { data: vec![folder.file("text.txt")], ..options(&["kl"]) };
    let plan = options.check().unwrap();
    let (options, model) = (model_options(), loaded(&model_options()));
    let facts = ModelFacts::of_loaded(&options, &model);
    assert!(matches!(plan.prepare(&facts, None, &Silent), Err(EvaluationError::NoBase)));
    let evaluation = plan.prepare(&facts, Some(&facts), &Silent).unwrap();
    let mut reports = evaluation.run(&model, None, &Silent);
    assert!(matches!(reports.next(), Some(Err(EvaluationError::NoBase))));
    assert!(reports.next().is_none());
}

#[test]
fn interrupted_run_keeps_its_items_and_resumes() {
    let folder = Folder::new();
    // The protocols cover scored choices, generated words, and windows for two models.
    let options_with = |items: &str, resume: bool| EvaluationOptions {
        data: ["passages.jsonl", "passages.jsonl", "text.txt"].map(|name| folder.file(name)).into(),
        context: Some(64),
        items: Some(folder.file(items)),
        resume,
        ..options(&["lambada:lm-eval", "lambada:stop-words", "kl"])
    };
    let (_, whole, error) = evaluate(options_with("whole.jsonl", false), &Silent).unwrap();
    assert!(error.is_none() && whole.len() == 3);
    let log = fs::read_to_string(folder.file("whole.jsonl")).unwrap();
    let lines: Vec<&str> = log.lines().collect();
    assert!(lines.len() > 10, "{}", lines.len());

    // The run checks for an interruption once per entry and protocol before evaluation, and once per
    // result afterwards.
    let before = 4 + 1 + 4 + 1 + 1;
    assert!(matches!(
        evaluate(options_with("none.jsonl", false), &Interrupter::after(2)),
        Err(EvaluationError::Interrupted)
    ));
    assert!(!folder.file("none.jsonl").exists());
    for (kept, checks) in [(1, before), (3, before + 2), (6, before + 5), (10, before + 9)] {
        let name = format!("cut-{kept}.jsonl");
        let (_, reports, error) = evaluate(options_with(&name, false), &Interrupter::after(checks)).unwrap();
        assert!(matches!(error, Some(EvaluationError::Interrupted)), "{error:?}");
        let text = fs::read_to_string(folder.file(&name)).unwrap();
        assert_eq!(text.lines().collect::<Vec<_>>(), lines[..kept], "kept {kept}");
        assert_eq!(reproducible(&reports), reproducible(&whole)[..(kept - 1) / 4]);
        let (notes, again, error) = evaluate(options_with(&name, true), &Silent).unwrap();
        assert!(error.is_none(), "{error:?}");
        assert_eq!(reproducible(&again), reproducible(&whole));
        let done = format!("lambada:lm-eval: {} of 4 items are in the log", kept.min(4));
        assert!(notes.contains(&done), "{notes:?}");
        assert_eq!(fs::read_to_string(folder.file(&name)).unwrap(), log);
    }
}

#[test]
fn interruption_stops_the_preparation_of_a_long_text() {
    let folder = Folder::new();
    fs::write(folder.file("long.txt"), "The king of France is dead. ".repeat(60_000)).unwrap();
    for protocol in ["text:bits", "wikitext:hf-64", "wikitext:megatron", "wikitext:llama.cpp", "kl"] {
        let options = EvaluationOptions { data: vec![folder.file("long.txt")], ..options(&[protocol]) };
        // The first check for an interruption happens while the text is being encoded.
        let found = evaluate(options, &Interrupter::after(0));
        assert!(matches!(found, Err(EvaluationError::Interrupted)), "{protocol}");
    }
}

#[test]
fn interrupted_model_ends_the_run_without_a_partial_item() {
    let folder = Folder::new();
    // Interrupt the first forward pass over scored choices, and the generation of a word after a few
    // tokens.
    for (protocol, after) in [("lambada:lm-eval", 3), ("lambada:stop-words", 30)] {
        let options = EvaluationOptions {
            data: vec![folder.file("passages.jsonl")],
            items: Some(folder.file("log.jsonl")),
            ..options(&[protocol])
        };
        let plan = options.check().unwrap();
        let (options, reporter) = (model_options(), Arc::new(Interrupter::after(after)));
        let interrupter = Arc::clone(&reporter);
        let model = loaded(&options);
        let facts = ModelFacts::of_loaded(&options, &model);
        interruptible(Arc::new(move || interrupter.is_interrupted()), || {
            let mut reports = plan.prepare(&facts, None, &Silent).unwrap().run(&model, None, &*reporter);
            assert!(matches!(reports.next(), Some(Err(EvaluationError::Interrupted))), "{protocol}");
            assert!(reports.next().is_none());
        });
        let log = fs::read_to_string(folder.file("log.jsonl")).unwrap_or_default();
        assert!(log.lines().count() < 4, "{log}");
        let _ = fs::remove_file(folder.file("log.jsonl"));
    }
}

#[test]
fn damaged_row_is_reported_after_the_other_reports() {
    let folder = Folder::new();
    fs::write(folder.file("bad.jsonl"), format!("{PASSAGES}{{\"text\": 7}}\n")).unwrap();
    let options_with = |items: Option<&str>| EvaluationOptions {
        data: ["bad.jsonl", "passages.jsonl"].map(|name| folder.file(name)).into(),
        items: items.map(|name| folder.file(name)),
        ..options(&["lambada:lm-eval", "lambada:last-token"])
    };
    let expected = "line 5: field `text`: expected a string, found 7";
    let error = evaluate(options_with(None), &Silent).err().unwrap();
    assert!(error.to_string().ends_with(expected), "{error}");
    let (notes, reports, error) = evaluate(options_with(Some("log.jsonl")), &Silent).unwrap();
    assert_eq!(
        reports.iter().map(|report| report.protocol.as_str()).collect::<Vec<_>>(),
        ["lambada:last-token"]
    );
    assert!(error.unwrap().to_string().ends_with(expected));
    assert!(notes[0].ends_with("; the 4 items before this entry are evaluated and logged"), "{notes:?}");
}

#[test]
fn every_protocol_is_listed() {
    let listed = listing();
    let names: Vec<&str> = listed.iter().map(|listed| listed.protocol).collect();
    let expected: Vec<&str> = protocols().iter().map(|protocol| protocol.name).chain(["kl"]).collect();
    assert_eq!(names, expected);
    for (listed, protocol) in listed.iter().zip(protocols()) {
        assert_eq!(listed.dataset, Some(protocol.dataset));
        let text = listed.to_string();
        assert!(text.starts_with(&format!("{}: {}\n", protocol.name, protocol.about)), "{text}");
        assert_eq!(text.matches("\n    published: ").count(), protocol.published.len());
    }
}

/// Hostile task files must fail quickly, with short errors.
#[test]
fn hostile_task_files_fail_quickly() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| {
        let path = folder.path().join(name);
        fs::write(&path, text).unwrap();
        path.display().to_string()
    };
    let refused = |name: &str, text: &str, expected: &str| {
        let path = write(name, text);
        let start = std::time::Instant::now();
        let error = options(&[path.as_str()]).check().unwrap_err().to_string();
        assert!(error.contains(expected) && error.len() < 3000, "{name}: {error}");
        assert!(start.elapsed().as_secs() < 8, "{name}: {:?}", start.elapsed());
    };
    let million = 1_000_000;
    refused("flow.yaml", &format!("x: {}", "[".repeat(million)), "nested deeper than 64 levels");
    refused("map.yaml", &"{a: ".repeat(million / 4), "nested deeper than 64 levels");
    refused("block.yaml", &"- ".repeat(million / 2), "nested deeper than 64 levels");
    refused("hidden.yaml", &format!("a: |2\n  '\nb: {}", "[".repeat(million / 2)), "nested deeper");
    refused(
        "blanks.yaml",
        &format!("a: \"{}{}\"", " ".repeat(million / 2), "a ".repeat(million / 5)),
        "in a row",
    );
    refused("tags.yaml", &"%TAG !a! b\n".repeat(million / 12), "directives");
    refused("large.yaml", &"#\n".repeat(million), "larger than 1048576 bytes");
    refused("key.yaml", &format!("? {}\n: 1", "k".repeat(900_000)), "unknown field");
    // Each of 14 files includes the next one 20 times.
    for level in 0..14 {
        let names = vec![format!("level-{}.yaml", level + 1); 20].join(", ");
        write(&format!("level-{level}.yaml"), &format!("include: [{names}]\n"));
    }
    write("level-14.yaml", "output_type: loglikelihood\n");
    refused("levels.yaml", "include: level-0.yaml\n", "expected at most 64 included files in total");
    // Below the limit, a file that is included several times is read only once.
    write("twice.yaml", "include: [level-14.yaml, level-14.yaml]\n");
    refused("diamond.yaml", "include: [twice.yaml, twice.yaml, level-14.yaml]\n", "`doc_to_text` is missing");
    #[cfg(unix)]
    {
        let fifo = folder.path().join("fifo");
        assert!(std::process::Command::new("mkfifo").arg(&fifo).status().unwrap().success());
        for file in [fifo.to_str().unwrap(), "/dev/zero"] {
            refused("include.yaml", &format!("include: {file}\n"), "not a regular file");
            let task = format!(
                "output_type: loglikelihood\ndoc_to_text: a\ndoc_to_target: b\ntest_split: test\ndataset_path: json\n\
                 dataset_kwargs: {{data_files: {{test: {file}}}}}\n"
            );
            let path = write("data.yaml", &task);
            let opened = ModelOptions::default().open(&Silent).unwrap();
            let model = ModelOptions::default();
            let facts = ModelFacts::of_opened(&model, &opened);
            let plan = options(&[path.as_str()]).check().unwrap();
            let error = plan.prepare(&facts, None, &Silent).unwrap_err().to_string();
            assert_eq!(error, format!("{file}: not a regular file"));
        }
        let endless = EvaluationOptions { data: vec!["/dev/zero".into()], ..options(&["text:bits"]) };
        let opened = ModelOptions::default().open(&Silent).unwrap();
        let model = ModelOptions::default();
        let error = endless
            .check()
            .unwrap()
            .prepare(&ModelFacts::of_opened(&model, &opened), None, &Silent)
            .unwrap_err();
        assert_eq!(error.to_string(), "/dev/zero: larger than 268435456 bytes");
    }
}

#[test]
fn invalid_examples_and_task_files_are_rejected() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        let path = folder.path().join(name);
        fs::write(&path, text).unwrap();
        path.display().to_string()
    };
    let wikitext = EvaluationOptions { num_fewshot: Some(1), ..options(&["wikitext:lm-eval"]) };
    let error = wikitext.check().unwrap_err();
    assert!(error.is_usage() && error.to_string().contains("does not support examples"), "{error}");
    let unused = EvaluationOptions { fewshot_data: vec!["a".into()], ..options(&["piqa:lm-eval"]) };
    assert!(unused.check().unwrap_err().to_string().starts_with("`fewshot_data` needs `num_fewshot`"));
    let piqa = r#"{"goal": "Open it", "sol1": "Pull", "sol2": "Eat", "label": 0}"#;
    let few = EvaluationOptions {
        num_fewshot: Some(1),
        data: vec![file("piqa.jsonl", piqa).into()],
        ..options(&["piqa:lm-eval"])
    };
    let opened = ModelOptions::default().open(&Silent).unwrap();
    let model = ModelOptions::default();
    let facts = ModelFacts::of_opened(&model, &opened);
    let error = few.check().unwrap().prepare(&facts, None, &Silent).unwrap_err().to_string();
    assert_eq!(error, "`num_fewshot`: expected at most 0, the number of entries to sample from, found 1");

    for (name, text, expected) in [
        ("list.yaml", "- 1\n", "expected a YAML mapping"),
        ("broken.yaml", "a: [1\n", "did not find expected"),
        ("code.yaml", "doc_to_text: !function utils.text\n", "`!function` is not supported: task code"),
        ("docs.yaml", "process_docs: utils.docs\n", "`process_docs` is not supported"),
        ("unknown.yaml", "output_typ: multiple_choice\n", "unknown field `output_typ`"),
        ("written.yaml", "output_type: generate_until\n", "`output_type`: expected one of multiple_choice"),
        ("itself.yaml", "include: itself.yaml\n", "the file includes itself"),
        ("text.yaml", "output_type: loglikelihood\n", "`doc_to_text` is missing"),
        (
            "metric.yaml",
            "output_type: loglikelihood\nmetric_list: [{metric: f1}]\n",
            "expected metrics for loglikelihood (perplexity by perplexity, acc by mean), found f1",
        ),
        (
            "split.yaml",
            "output_type: loglikelihood\ndoc_to_text: a\ndoc_to_target: b\ntest_split: test\ndataset_path: json\ndataset_kwargs: {data_files: x.jsonl}\n",
            "no files for the split `test`",
        ),
        (
            "bomb.yaml",
            "a: &a [x,x,x,x,x,x,x,x,x]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a,*a]\nc: &c [*b,*b,*b,*b,*b,*b,*b,*b,*b]\nd: &d [*c,*c,*c,*c,*c,*c,*c,*c,*c]\ne: &e [*d,*d,*d,*d,*d,*d,*d,*d,*d]\nf: &f [*e,*e,*e,*e,*e,*e,*e,*e,*e]\ng: [*f,*f,*f,*f,*f,*f,*f,*f,*f]\n",
            "repetition limit exceeded",
        ),
    ] {
        let path = file(name, text);
        let error = options(&[path.as_str()]).check().unwrap_err().to_string();
        assert!(error.contains(name) && error.contains(expected), "`{expected}` is not in: {error}");
    }
    let keys = "output_type: loglikelihood\ndoc_to_target: b\ntest_split: test\ndataset_path: json\n\
                dataset_kwargs: {data_files: {test: rows.jsonl}}\ndoc_to_text: ";
    file("rows.jsonl", "{\"a\": \"x\", \"b\": \" y\"}\n");
    for (name, template, expected) in [
        (
            "missing.yaml",
            "'{{nothing}}'",
            "rows.jsonl: line 1: `doc_to_text` in the task file: the template cannot be rendered",
        ),
        (
            "endless.yaml",
            "'{% for i in range(100000) %}{% for j in range(100000) %}x{% endfor %}{% endfor %}'",
            "template",
        ),
    ] {
        let path = file(name, &format!("{keys}{template}\n"));
        let plan = options(&[path.as_str()]).check().unwrap();
        let error = plan.prepare(&facts, None, &Silent).unwrap_err().to_string();
        assert!(error.contains(expected), "`{expected}` is not in: {error}");
    }
}
