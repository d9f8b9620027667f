//! Answers an OpenAI request without HTTP, both in one response and as a stream.
//!
//! Run it with `cargo run -p candle-gpt2-api --example answer_completion`.
#![expect(clippy::print_stdout, reason = "an example shows what it does")]

use std::error::Error;
use std::sync::Arc;

use candle_gpt2_api::{ApiError, ApiOptions, Endpoint, ServedModel, Session, Work};
use candle_gpt2_engine::{ModelOptions, Silent};
use candle_gpt2_generation::SchedulerOptions;

/// Returns everything sent to the client.
fn answer(body: &str, session: &mut Session) -> Result<Vec<String>, ApiError> {
    match session.served().read(Endpoint::Completions, body.as_bytes(), None)? {
        Work::Texts(call) if call.stream => {
            let (call, mut chunks) = (session.begin(call)?, Vec::new());
            while let Some(more) = session.step(call)? {
                chunks.extend(more);
            }
            session.end(call);
            Ok(chunks)
        }
        work => Ok(session.answer(work, || true)?.into_iter().map(|reply| reply.json).collect()),
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let model = ModelOptions::default().open(&Silent)?.load(&Silent)?;
    let options = ApiOptions { name: "built-in".into(), ..ApiOptions::default() };
    let served = Arc::new(ServedModel::new(&model, options)?);
    let scheduler = model.scheduler(SchedulerOptions { max_texts: 4, kv_tokens: 512, chunk_tokens: 64 })?;
    let mut session = Session::new(model, served, scheduler);

    let whole = r#"{"prompt": ["One day", "Once there was"], "max_tokens": 12, "seed": 7}"#;
    println!("whole:\n{}", answer(whole, &mut session)?.concat());

    let streamed = r#"{"prompt": "One day", "max_tokens": 6, "temperature": 0, "stream": true}"#;
    println!("\npiece by piece:\n{}", answer(streamed, &mut session)?.join("\n"));

    if let Err(error) = answer(r#"{"prompt": "One day", "temperature": "hot"}"#, &mut session) {
        println!("\nstatus {}:\n{}", error.status(), error.to_json());
    }
    Ok(())
}
