//! Template tests: equal output with and without a worker, and hostile templates of all kinds.

use std::time::{Duration, Instant};

use candle_gpt2_confined::{Style, TemplateError, Templates, WorkerProgram};
use serde_json::{Value, json};

use crate::{Test, forking, spawning, tests};

pub(crate) const TESTS: &[Test] = tests![
    worker_and_in_process_renders_are_identical,
    hostile_template_does_not_break_later_renders,
    deeply_nested_template_is_rejected_at_parse_time,
    task_stops_at_its_total_cpu_limit,
    leaked_memory_does_not_accumulate_across_renders,
    nesting_and_time_are_limited_without_a_worker,
    killed_worker_is_restarted,
    error_messages_are_truncated,
];

/// Maximum duration of a render that a limit stops, with a large margin for a busy machine.
const TIMEOUT: Duration = Duration::from_secs(30);

/// Templates that stay within the step limit but would crash the process or run far too long.
fn hostile() -> Vec<(&'static str, String)> {
    let levels = |set: &str, end: &str| {
        format!(
            "{{% set ns=namespace(s=[]) %}}{{% for i in range(99000) %}}{{% set ns.s={set} %}}{{% endfor %}}{end}"
        )
    };
    let cycle = |end: &str| format!("{{% set ns=namespace() %}}{{% set ns.a=ns %}}{end}");
    let slow = |text: &str, step: &str| {
        format!("{{% set s={text} %}}{{% for i in range(99999) %}}{step}{{% endfor %}}")
    };
    vec![
        ("deep lists, printed", levels("[ns.s]", "{{ ns.s }}")),
        ("deep dicts, printed", levels("{'a': ns.s}", "{{ ns.s }}")),
        ("deep lists as JSON", levels("[ns.s]", "{{ ns.s|tojson }}")),
        ("deep lists, compared", levels("[ns.s]", "{{ ns.s == [ns.s] }}{{ ns.s < [ns.s] }}")),
        ("a cycle, printed", cycle("{{ ns }}")),
        (
            "a cycle, compared",
            cycle("{% set m=namespace() %}{% set m.a=ns %}{{ m == ns }}{{ ns < m }}{{ ns|tojson }}"),
        ),
        ("a cycle as JSON", cycle("{{ ns|tojson }}")),
        ("indices", slow("\"é\"*10000000", "{% set x=s[-1] %}")),
        ("comparisons", slow("\"é\"*10000000", "{% set x=s==(s~'') %}")),
        ("sets of characters", slow("\"é\"*2000000", "{% set x=s.strip(s) %}")),
        ("lists as a long string", "{{ ([[[1]*1000]*1000]*9)|string|length }}".into()),
        ("indentation", "{{ [[1],[2]]|tojson(indent=10**9) }}".into()),
        ("padding", "{{ '{:1000000000}'.format(1) }}".into()),
    ]
}

/// Templates that are nested too deeply to parse.
fn deep() -> Vec<String> {
    let repeated = |before: &str, part: &str, after: &str| format!("{before}{}{after}", part.repeat(50_000));
    vec![
        repeated("{{ ", "- ", "1 }}"),
        repeated("{{ ", "not ", "1 }}"),
        repeated("{{ 1", "+1", " }}"),
        repeated("{{ 1", "~1", " }}"),
        repeated("{{ a", ".a", " }}"),
        repeated("{{ x", "[0:1]", " }}"),
        repeated("{{ 'a'", "|upper", " }}"),
        repeated("{{ 1", " and 1", " }}"),
        repeated("{{ f", "()", " }}"),
        repeated("{% if 1 %}", "{% elif 1 %}", "{% endif %}"),
    ]
}

fn templates(
    style: Style,
    source: &str,
    program: Option<&WorkerProgram>,
) -> Result<Templates, TemplateError> {
    // A task's templates are parsed when the first entry is rendered.
    let sources = if style == Style::Chat { vec![source] } else { Vec::new() };
    Templates::new(style, &sources, program)
}

fn rendered(style: Style, source: &str, program: Option<&WorkerProgram>) -> Result<String, TemplateError> {
    templates(style, source, program)?.render(source, &context())
}

fn context() -> Value {
    json!({
        "messages": [{ "role": "user", "content": "Hi  there" }, { "role": "assistant", "content": "é\n" }],
        "eos_token": "<|endoftext|>", "number": 1e300, "whole": 3, "none": null, "long": "word ".repeat(1000),
    })
}

fn worker_and_in_process_renders_are_identical() {
    let sources = [
        "{% for m in messages %}\n  {% if m['role'] == 'user' %}\nQ: {{ m.content.strip()|upper }}\n{% else %}\nA: {{ m }}{{ eos_token }}\n\
         {% endif %}\n{% endfor %}\n",
        "{{ number }} {{ whole }} {{ none }} {{ messages|tojson }} {{ long|length }}",
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + loop.index %}{% endfor %}{{ ns.n }}",
        "{{ messages[0].content.split() }} {{ messages[0].content.replace('i', 'o').title() }} {{ messages[0].items()|list }}",
        "{{ missing }}",
        "{{ missing.further }}",
        "{% for %}",
        "{{ raise_exception('roles must alternate') }}",
        "{{ [1, 2].index(3) }}",
        "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
        "{% for i in range(100000) %}{{ long * 100 }}{% endfor %}",
        "a template.html {{ '<&>' }}.html",
        "{% include 'other' %}",
    ];
    for style in [Style::Chat, Style::Task] {
        for source in sources {
            let in_process = rendered(style, source, None);
            assert_eq!(in_process, rendered(style, source, Some(&forking())), "{style:?} {source}");
            assert_eq!(in_process, rendered(style, source, Some(&spawning())), "{style:?} {source}");
        }
    }
    assert_eq!(rendered(Style::Chat, sources[2], None).unwrap(), "3");
    for program in [None, Some(&forking()), Some(&spawning())] {
        let templates = Templates::new(Style::Task, &[], program).unwrap();
        assert_eq!(templates.list("['a', \"b\"]").unwrap(), Some(vec!["a".into(), "b".into()]));
        assert_eq!(templates.list("[1]").unwrap(), None);
        assert_eq!(templates.list("['a' ").unwrap(), None);
        assert_eq!(templates.list(&"[".repeat(100_000)).unwrap_or_default(), None);
    }
}

fn hostile_template_does_not_break_later_renders() {
    for program in [forking(), spawning()] {
        for (kind, source) in hostile() {
            let templates = templates(Style::Chat, &source, Some(&program)).unwrap();
            let started = Instant::now();
            let result = templates.render(&source, &context());
            let elapsed = started.elapsed();
            // Some of these templates succeed within the time and stack limits.
            assert!(!matches!(result, Err(TemplateError::Busy { .. })), "{kind}: {result:?}");
            assert!(elapsed < TIMEOUT, "{kind}: {elapsed:?}");
            assert_eq!(templates.render("{{ whole }}", &context()).unwrap(), "3", "{kind}");
        }
    }
}

fn deeply_nested_template_is_rejected_at_parse_time() {
    for source in deep() {
        let started = Instant::now();
        let error = templates(Style::Chat, &source, Some(&forking())).map(|_| ()).unwrap_err();
        assert!(error.to_string().len() < 200, "{error}");
        assert!(started.elapsed() < TIMEOUT, "{}: {:?}", &source[..20], started.elapsed());
        // Task templates are parsed on a larger stack, so some of them succeed.
        let task = Templates::new(Style::Task, &[], Some(&forking())).unwrap();
        _ = task.render(&source, &context());
        assert_eq!(task.render("{{ whole }}", &context()).unwrap(), "3");
    }
}

fn task_stops_at_its_total_cpu_limit() {
    // Each entry stays below the limit for a single render.
    let slow = "{% set s='é'*100000 %}{% for i in range(99) %}{% set x=s[-1] %}{% endfor %}";
    let templates = Templates::new(Style::Task, &[], Some(&forking())).unwrap();
    let started = Instant::now();
    let error = (0..1000).map(|_| templates.render(slow, &context())).find_map(Result::err);
    assert!(started.elapsed() < TIMEOUT, "{:?}", started.elapsed());
    let message = "the templates exceeded the total CPU time limit of 3s";
    assert_eq!(error.unwrap().to_string(), message);
    assert_eq!(templates.render("x", &context()).unwrap_err().to_string(), message);
}

fn leaked_memory_does_not_accumulate_across_renders() {
    // Cycles are never freed, so each entry leaks 10 MB.
    let leaks = "{% for i in range(2000) %}{% set ns=namespace() %}{% set ns.b='x'*5000 %}{% set ns.a=ns %}{% endfor %}{{ whole }}";
    for program in [forking(), spawning()] {
        let templates = Templates::new(Style::Task, &[], Some(&program)).unwrap();
        for _ in 0..40 {
            assert_eq!(templates.render(leaks, &context()).unwrap(), "3");
        }
    }
}

fn nesting_and_time_are_limited_without_a_worker() {
    for source in deep() {
        let error = templates(Style::Chat, &source, None).map(|_| ()).unwrap_err();
        assert!(error.to_string().contains("nested") || error.to_string().contains("elif"), "{error}");
        assert!(rendered(Style::Task, &source, None).is_err());
    }
    let slow = "{% set s='é'*3000000 %}{% for i in range(9999) %}{% set x=s[-1] %}{% endfor %}";
    let templates = Templates::new(Style::Chat, &[slow], None).unwrap();
    let started = Instant::now();
    let error = templates.render(slow, &context()).unwrap_err();
    assert!(started.elapsed() < TIMEOUT, "{:?}", started.elapsed());
    assert_eq!(error.to_string(), "exceeded the time limit of 5s");
    assert_eq!(templates.render("{{ whole }}", &context()).unwrap(), "3");
}

fn killed_worker_is_restarted() {
    if !cfg!(target_os = "linux") {
        return;
    }
    let templates = Templates::new(Style::Chat, &["{{ whole }}"], Some(&forking())).unwrap();
    // Kills only the children of this thread, because other tests have their own workers.
    for child in std::fs::read_to_string("/proc/thread-self/children").unwrap().split_whitespace() {
        assert!(std::process::Command::new("kill").args(["-KILL", child]).status().unwrap().success());
    }
    assert_eq!(templates.render("{{ whole }}", &context()).unwrap(), "3");
}

fn error_messages_are_truncated() {
    for program in [None, Some(&forking())] {
        let error = rendered(Style::Chat, "{{ raise_exception('x' * 900000) }}", program).unwrap_err();
        assert!(error.to_string().len() < 1100, "{}", error.to_string().len());
    }
}
