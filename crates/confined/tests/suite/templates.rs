//! Templates: the same text with and without a worker, and hostile templates of every kind.

use std::time::{Duration, Instant};

use candle_gpt2_confined::{Style, TemplateError, Templates, WorkerProgram};
use serde_json::{Value, json};

use crate::{Test, forking, spawning, tests};

pub(crate) const TESTS: &[Test] = tests![
    a_worker_renders_what_this_process_does,
    a_hostile_template_ends_its_own_render_alone,
    a_hostile_template_is_rejected_when_it_is_parsed,
    a_task_stops_when_all_its_entries_are_slow,
    what_a_template_leaks_goes_with_its_process,
    without_a_worker_nesting_and_time_are_bounded,
    a_killed_worker_is_started_again,
    an_error_message_is_short,
];

/// Longest time of a render that a limit ends: the limit, on a very busy machine.
const PATIENCE: Duration = Duration::from_secs(30);

/// Templates that end within the limits of steps, in a crash or much too late.
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
        ("a long text of lists", "{{ ([[[1]*1000]*1000]*9)|string|length }}".into()),
        ("indentation", "{{ [[1],[2]]|tojson(indent=10**9) }}".into()),
        ("padding", "{{ '{:1000000000}'.format(1) }}".into()),
    ]
}

/// Templates that are too deep to be parsed.
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
    // The templates of a task are parsed with their first entry.
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

fn a_worker_renders_what_this_process_does() {
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
            let here = rendered(style, source, None);
            assert_eq!(here, rendered(style, source, Some(&forking())), "{style:?} {source}");
            assert_eq!(here, rendered(style, source, Some(&spawning())), "{style:?} {source}");
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

fn a_hostile_template_ends_its_own_render_alone() {
    for program in [forking(), spawning()] {
        for (kind, source) in hostile() {
            let templates = templates(Style::Chat, &source, Some(&program)).unwrap();
            let started = Instant::now();
            let result = templates.render(&source, &context());
            let took = started.elapsed();
            // Some values are printed within the time and the stack.
            assert!(!matches!(result, Err(TemplateError::Busy { .. })), "{kind}: {result:?}");
            assert!(took < PATIENCE, "{kind}: {took:?}");
            assert_eq!(templates.render("{{ whole }}", &context()).unwrap(), "3", "{kind}");
        }
    }
}

fn a_hostile_template_is_rejected_when_it_is_parsed() {
    for source in deep() {
        let started = Instant::now();
        let error = templates(Style::Chat, &source, Some(&forking())).map(|_| ()).unwrap_err();
        assert!(error.to_string().len() < 200, "{error}");
        assert!(started.elapsed() < PATIENCE, "{}: {:?}", &source[..20], started.elapsed());
        // With the larger stack that a task's templates are parsed on, some of them pass.
        let task = Templates::new(Style::Task, &[], Some(&forking())).unwrap();
        _ = task.render(&source, &context());
        assert_eq!(task.render("{{ whole }}", &context()).unwrap(), "3");
    }
}

fn a_task_stops_when_all_its_entries_are_slow() {
    // Each takes less than the limit of one.
    let slow = "{% set s='é'*100000 %}{% for i in range(99) %}{% set x=s[-1] %}{% endfor %}";
    let templates = Templates::new(Style::Task, &[], Some(&forking())).unwrap();
    let started = Instant::now();
    let ended = (0..1000).map(|_| templates.render(slow, &context())).find_map(Result::err);
    assert!(started.elapsed() < PATIENCE, "{:?}", started.elapsed());
    let message = "the templates take more than 3s of CPU time in all";
    assert_eq!(ended.unwrap().to_string(), message);
    assert_eq!(templates.render("x", &context()).unwrap_err().to_string(), message);
}

fn what_a_template_leaks_goes_with_its_process() {
    // Cycles are never freed: 10 MB of them for each entry.
    let leaks = "{% for i in range(2000) %}{% set ns=namespace() %}{% set ns.b='x'*5000 %}{% set ns.a=ns %}{% endfor %}{{ whole }}";
    for program in [forking(), spawning()] {
        let templates = Templates::new(Style::Task, &[], Some(&program)).unwrap();
        for _ in 0..40 {
            assert_eq!(templates.render(leaks, &context()).unwrap(), "3");
        }
    }
}

fn without_a_worker_nesting_and_time_are_bounded() {
    for source in deep() {
        let error = templates(Style::Chat, &source, None).map(|_| ()).unwrap_err();
        assert!(error.to_string().contains("nested") || error.to_string().contains("elif"), "{error}");
        assert!(rendered(Style::Task, &source, None).is_err());
    }
    let slow = "{% set s='é'*3000000 %}{% for i in range(9999) %}{% set x=s[-1] %}{% endfor %}";
    let templates = Templates::new(Style::Chat, &[slow], None).unwrap();
    let started = Instant::now();
    let error = templates.render(slow, &context()).unwrap_err();
    assert!(started.elapsed() < PATIENCE, "{:?}", started.elapsed());
    assert_eq!(error.to_string(), "it takes longer than 5s");
    assert_eq!(templates.render("{{ whole }}", &context()).unwrap(), "3");
}

fn a_killed_worker_is_started_again() {
    if !cfg!(target_os = "linux") {
        return;
    }
    let templates = Templates::new(Style::Chat, &["{{ whole }}"], Some(&forking())).unwrap();
    // Those of this thread: other tests have theirs.
    for child in std::fs::read_to_string("/proc/thread-self/children").unwrap().split_whitespace() {
        assert!(std::process::Command::new("kill").args(["-KILL", child]).status().unwrap().success());
    }
    assert_eq!(templates.render("{{ whole }}", &context()).unwrap(), "3");
}

fn an_error_message_is_short() {
    for program in [None, Some(&forking())] {
        let error = rendered(Style::Chat, "{{ raise_exception('x' * 900000) }}", program).unwrap_err();
        assert!(error.to_string().len() < 1100, "{}", error.to_string().len());
    }
}
