//! Fuzzes chat templates, which a worker process renders; the worker runs this same program.
//!
//! A crash of the parent process or a late response is a finding. The worker's limits must stop any template.
#![no_main]

use std::process::exit;
use std::time::{Duration, Instant};

use candle_gpt2_confined::{Style, TEMPLATES, TemplateError, Templates, WorkerProgram, run_worker};
use serde_json::json;

/// Command-line argument that starts this program as a worker.
const WORKER: &str = "worker";
/// Time limit for a response: the worker's CPU time limits plus a margin for a busy machine.
const LATE: Duration = Duration::from_secs(9);

libfuzzer_sys::fuzz_target!(
    init: {
        if std::env::args().nth(1).as_deref() == Some(WORKER) {
            exit(i32::from(run_worker(&[TEMPLATES]).is_err()));
        }
    },
    |source: &str| {
        let started = Instant::now();
        let program = WorkerProgram::this(WORKER).expect("the path of this program");
        let messages = json!([{ "role": "user", "content": "Hi \u{e9}" }, { "role": "assistant", "content": "" }]);
        let context = json!({ "messages": messages, "add_generation_prompt": true, "eos_token": "</s>", "bos_token": "" });
        let rendered = Templates::new(Style::Chat, &[source], Some(&program))
            .and_then(|templates| templates.render(source, &context));
        assert!(!matches!(rendered, Err(TemplateError::Busy { .. })), "{rendered:?}");
        assert!(started.elapsed() < LATE, "{:?}", started.elapsed());
    }
);
