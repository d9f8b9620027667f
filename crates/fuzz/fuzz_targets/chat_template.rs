//! Fuzzes chat templates in a worker process, which is this program itself.
//!
//! A crash of the parent process or a late response is a finding. The worker's limits must end any template.
#![no_main]

use std::process::exit;
use std::time::{Duration, Instant};

use candle_gpt2_confined::{Style, TEMPLATES, TemplateError, Templates, WorkerProgram, run_worker};
use serde_json::json;

/// Argument that makes this program a worker.
const WORKER: &str = "worker";
/// CPU time limits for parsing and rendering, with a margin for a busy machine.
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
