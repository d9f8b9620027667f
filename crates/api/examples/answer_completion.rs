//! How do I answer an OpenAI client without HTTP? Whole, and piece by piece: `cargo run -p candle-gpt2-api --example answer_completion`.
#![expect(clippy::print_stdout, reason = "an example shows what it does")]

use std::error::Error;

use candle_gpt2_api::{ApiOptions, Call, CompletionRequest, ServedModel};
use candle_gpt2_engine::{LoadedModel, ModelOptions, Silent};

/// Everything that a client is sent.
fn answer(body: &str, served: &ServedModel, model: &LoadedModel) -> Result<Vec<String>, Box<dyn Error>> {
    let request = CompletionRequest::parse(body.as_bytes())?;
    let Call { requests, mut answer, stream, .. } = Call::of_completion(request, served, None)?;
    let mut chunks = Vec::new();
    for event in model.batch(requests, 4, None)? {
        let event = event?;
        chunks.extend(answer.take(event.request().place(), event)?);
    }
    if !stream {
        return Ok(vec![answer.into_response()]);
    }
    chunks.extend(answer.last_chunks());
    Ok(chunks)
}

fn main() -> Result<(), Box<dyn Error>> {
    let model = ModelOptions::default().open(&Silent)?.load(&Silent)?;
    let options = ApiOptions { name: "built-in".into(), ..ApiOptions::default() };
    let served = ServedModel::new(&model, options)?;

    let whole = r#"{"prompt": ["ROMEO:", "JULIET:"], "max_tokens": 12, "seed": 7}"#;
    println!("whole:\n{}", answer(whole, &served, &model)?.concat());

    let streamed = r#"{"prompt": "ROMEO:", "max_tokens": 6, "temperature": 0, "stream": true}"#;
    println!("\npiece by piece:\n{}", answer(streamed, &served, &model)?.join("\n"));

    let wrong = CompletionRequest::parse(br#"{"prompt": "ROMEO:", "temperature": "hot"}"#);
    if let Err(error) = wrong {
        println!("\nstatus {}:\n{}", error.status(), error.to_json());
    }
    Ok(())
}
