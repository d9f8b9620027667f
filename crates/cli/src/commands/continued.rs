//! Completion of a single prompt, printed while it is generated.

use std::time::{Duration, Instant};

use anyhow::Result;
use candle_gpt2_engine::{Completion, Job, LoadedModel};
use candle_gpt2_generation::{
    GeneratedToken, GenerationConfig, GenerationError, LogitsProcessor, StopReason,
};

use crate::progress::Terminal;
use crate::{interrupt, output};

/// Default batch size.
///
/// It is large enough to amortize reading the weights, and its KV cache fits on every machine.
pub(super) const BATCH_SIZE: usize = 8;

/// Completions for a prompt, with their generation speed.
pub(super) struct Continued {
    pub(super) texts: Vec<Completion>,
    pub(super) tokens_per_s: f64,
    pub(super) time_to_first_token_s: Option<f64>,
}

/// Completes one prompt.
///
/// If `is_printed`, streams a single completion, or prints several one below the other.
pub(super) fn continue_prompt(
    loaded: &LoadedModel,
    config: &GenerationConfig,
    conforming: Option<&LogitsProcessor>,
    prompt: Vec<u32>,
    is_printed: bool,
) -> Result<Continued> {
    let start = Instant::now();
    let is_streamed = is_printed && config.num_return_sequences == 1;
    let has_text = loaded.vocabulary().tokenizer().is_some();
    let mut job = OnePrompt {
        prompt: Some(prompt),
        conforming: conforming.cloned(),
        is_streamed,
        has_text,
        start,
        time_to_first_token: None,
        count: 0,
        printed: 0,
        texts: Vec::new(),
    };
    loaded.generate(&mut job, BATCH_SIZE, config, &Terminal)?;
    let elapsed_s = start.elapsed().as_secs_f64();
    let OnePrompt { texts, count, printed, time_to_first_token, .. } = job;
    let count = count.max(texts.iter().map(|text| text.ids.len()).sum());
    let tokens_per_s = count as f64 / elapsed_s;
    let time_to_first_token_s = time_to_first_token.map(|time| time.as_secs_f64());
    if is_printed {
        if printed == 0 {
            let whole: Vec<String> = texts.iter().map(whole_text).collect();
            output::write_text(&whole.join("\n\n"))?;
        }
        output::write_text("\n")?;
        let first = time_to_first_token_s.map_or(String::new(), |s| format!(", the first after {s:.3} s"));
        let reason = texts.first().map(|text| format!(", ended by {}", text.stop_reason.name()));
        let reason = reason.unwrap_or_default();
        output::print_status(&format!("{count} tokens{first}, {tokens_per_s:.1} tokens/s{reason}"));
    }
    if let Some(text) = texts.iter().find(|text| conforming.is_some() && !is_whole(text.stop_reason)) {
        let reason = text.stop_reason.name();
        output::print_note(&format!(
            "the completion was cut off ({reason}) and may not match the required structure; raise `max_new_tokens`; a JSON schema allows \
             further properties unless it has \"additionalProperties\": false"
        ));
    }
    Ok(Continued { texts, tokens_per_s, time_to_first_token_s })
}

/// Whether a structured completion ended where the grammar allows it.
fn is_whole(reason: StopReason) -> bool {
    matches!(reason, StopReason::Eos | StopReason::Complete)
}

/// Job for a single prompt; Ctrl-C ends it.
struct OnePrompt {
    prompt: Option<Vec<u32>>,
    /// Constraint on the completions.
    conforming: Option<LogitsProcessor>,
    is_streamed: bool,
    has_text: bool,
    start: Instant,
    time_to_first_token: Option<Duration>,
    /// Number of generated tokens; `printed` counts those already printed.
    count: usize,
    printed: usize,
    texts: Vec<Completion>,
}

impl Job for OnePrompt {
    type Error = anyhow::Error;

    fn next_prompt(&mut self) -> Result<Option<Vec<u32>>> {
        Ok(self.prompt.take())
    }

    fn on_token(&mut self, token: &GeneratedToken) -> Result<()> {
        self.count += 1;
        self.time_to_first_token.get_or_insert_with(|| self.start.elapsed());
        if self.is_streamed {
            // Without a tokenizer, print the ids.
            match (self.has_text, self.printed) {
                (true, _) => output::write_text(&token.text)?,
                (false, 0) => output::write_text(&token.id.to_string())?,
                (false, _) => output::write_text(&format!(",{}", token.id))?,
            }
            self.printed += 1;
        }
        Ok(())
    }

    fn on_texts(&mut self, _: usize, texts: Result<Vec<Completion>, GenerationError>) -> Result<()> {
        self.texts = texts?;
        Ok(())
    }

    fn is_interrupted(&self) -> bool {
        interrupt::is_requested()
    }

    fn processors(&self) -> Vec<LogitsProcessor> {
        self.conforming.iter().cloned().collect()
    }
}

fn whole_text(text: &Completion) -> String {
    let ids = || text.ids.iter().map(ToString::to_string).collect::<Vec<_>>().join(",");
    text.text.clone().unwrap_or_else(ids)
}
