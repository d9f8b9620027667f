//! Cost of confinement: the time to render a template with and without a worker.
//!
//! Run: `cargo bench -p candle-gpt2-confined --bench cost`.

#![expect(clippy::print_stdout, reason = "it reports to a terminal")]

use std::error::Error;
use std::time::{Duration, Instant};

use candle_gpt2_confined::{Style, TEMPLATES, Templates, WorkerProgram, run_worker};
use serde_json::json;

/// Argument that makes this program act as a worker.
const WORKER: &str = "worker";
const RENDERS: u32 = 500;
const SOURCE: &str =
    "{% for message in messages %}{{ message.role|upper }}: {{ message.content.strip() }}\n{% endfor %}A:";

fn main() -> Result<(), Box<dyn Error>> {
    if std::env::args().nth(1).as_deref() == Some(WORKER) {
        return Ok(run_worker(&[TEMPLATES])?);
    }
    let forking = WorkerProgram::this(WORKER)?;
    let spawning = WorkerProgram { forks: false, ..forking.clone() };
    for style in [Style::Chat, Style::Task] {
        for (executor, program) in
            [("in process", None), ("forked", Some(&forking)), ("spawned", Some(&spawning))]
        {
            let start = Instant::now();
            let templates = Templates::new(style, &[SOURCE], program)?;
            let started = start.elapsed();
            let mut times: Vec<Duration> =
                (0..RENDERS).map(|_| time(&templates)).collect::<Result<_, _>>()?;
            times.sort();
            let [median, late] = [2, 10].map(|part| times[times.len() - times.len() / part - 1]);
            println!("{style:?} {executor}: start {started:?}, render {median:?}, 90% within {late:?}");
        }
    }
    Ok(())
}

fn time(templates: &Templates) -> Result<Duration, Box<dyn Error>> {
    let message = json!({ "role": "user", "content": " word ".repeat(50) });
    let context = json!({ "messages": [message, message, message] });
    let start = Instant::now();
    templates.render(SOURCE, &context)?;
    Ok(start.elapsed())
}
