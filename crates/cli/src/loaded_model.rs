//! A loaded model with everything that generation needs, and the one way in which the commands generate.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Result;
use gpt2::Gpt2LMHead;
use gpt2_generation::{
    BatchGenerator, Clock, GeneratedToken, GenerationConfig, GenerationError, LogitsProcessor, Request,
    SearchMode, StopReason, beam_search, contrastive_search,
};
use gpt2_weights::Tokenizer;
use serde::Serialize;

use crate::{interrupt, progress};

/// A text, as `--json` prints it.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Text {
    pub(crate) ids: Vec<u32>,
    /// Absent without a tokenizer.
    pub(crate) text: Option<String>,
    pub(crate) stop_reason: &'static str,
    /// Of a beam: its log-probability over its length.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) score: Option<f64>,
}

/// A model, and how to generate with it.
pub(crate) struct LoadedModel<'a> {
    pub(crate) model: &'a Gpt2LMHead,
    pub(crate) tokenizer: Option<&'a Tokenizer>,
    pub(crate) config: &'a GenerationConfig,
}

impl LoadedModel<'_> {
    /// Continues every prompt. `on_token` sees each token as it comes, where texts come token by token, and may end the
    /// work; `on_texts` gets all texts of a prompt once they are finished. Returns the time to the first token.
    pub(crate) fn generate(
        &self,
        prompts: &[Vec<u32>],
        batch_size: usize,
        on_token: &mut dyn FnMut(&GeneratedToken) -> Result<ControlFlow<()>>,
        on_texts: &mut dyn FnMut(usize, Vec<Text>) -> Result<()>,
    ) -> Result<Option<Duration>> {
        match self.config.search_mode() {
            SearchMode::TokenByToken => self.token_by_token(prompts, batch_size, on_token, on_texts),
            SearchMode::Beams | SearchMode::Contrastive => {
                for (index, prompt) in prompts.iter().enumerate() {
                    on_texts(index, self.search(prompt)?)?;
                }
                Ok(None)
            }
        }
    }

    fn token_by_token(
        &self,
        prompts: &[Vec<u32>],
        batch_size: usize,
        on_token: &mut dyn FnMut(&GeneratedToken) -> Result<ControlFlow<()>>,
        on_texts: &mut dyn FnMut(usize, Vec<Text>) -> Result<()>,
    ) -> Result<Option<Duration>> {
        let (model, config) = (self.model, self.config);
        let started = Instant::now();
        let mut first = None;
        let requests = Request::each(prompts, config);
        let mut tokens =
            BatchGenerator::new(model, requests, batch_size, self.tokenizer)?.with_clock(clock());
        let mut texts = vec![self.empty_texts(); prompts.len()];
        let mut running = vec![config.num_return_sequences; prompts.len()];
        for token in tokens.by_ref() {
            let token = token.map_err(|failed| failed.error)?;
            first.get_or_insert_with(|| started.elapsed());
            let text = &mut texts[token.prompt][token.sequence];
            text.ids.push(token.id);
            if let Some(text) = &mut text.text {
                text.push_str(&token.text);
            }
            if on_token(&token)?.is_break() {
                text.stop_reason = token.stop_reason.unwrap_or(StopReason::Interrupted).name();
                break;
            }
            if let Some(reason) = token.stop_reason {
                text.stop_reason = reason.name();
                running[token.prompt] -= 1;
                if running[token.prompt] == 0 {
                    on_texts(token.prompt, std::mem::take(&mut texts[token.prompt]))?;
                }
            }
        }
        // Texts that were interrupted, and texts of no tokens, which have had none to end with.
        for (prompt, texts) in texts.into_iter().enumerate().filter(|(_, texts)| !texts.is_empty()) {
            on_texts(prompt, texts)?;
        }
        Ok(first)
    }

    /// What a prompt gives before its first token.
    fn empty_texts(&self) -> Vec<Text> {
        let text = self.tokenizer.map(|_| String::new());
        let stop_reason = StopReason::MaxNewTokens.name();
        vec![Text { ids: Vec::new(), text, stop_reason, score: None }; self.config.num_return_sequences]
    }

    fn search(&self, prompt: &[u32]) -> Result<Vec<Text>> {
        let processors = LogitsProcessor::of_config(self.config);
        let steps = self.config.max_new_tokens.min(self.model.config().n_positions);
        let bar = progress::items("searching", steps as u64, "tokens");
        let count = || {
            bar.inc(1);
            if interrupt::is_requested() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        };
        let (model, config, clock) = (self.model, self.config, clock());
        let found: Vec<_> = if config.search_mode() == SearchMode::Beams {
            let found = beam_search(model, prompt, config, &processors, Some(&clock), &count)?;
            found.into_iter().map(|text| (text.ids, text.stop_reason, Some(text.score))).collect()
        } else {
            let (ids, reason) = contrastive_search(model, prompt, config, &processors, Some(&clock), &count)?;
            vec![(ids, reason, None)]
        };
        bar.finish_and_clear();
        if found.is_empty() {
            return Ok(self.empty_texts());
        }
        let text = |(ids, reason, score): (Vec<u32>, StopReason, Option<f64>)| {
            let text = self.tokenizer.map(|tokenizer| tokenizer.decode(&ids, true)).transpose();
            let text = text.map_err(|error| GenerationError::Decode(error.to_string()))?;
            Ok(Text { ids, text, stop_reason: reason.name(), score })
        };
        found.into_iter().map(text).collect()
    }
}

/// The time since now.
fn clock() -> Clock {
    let started = Instant::now();
    Arc::new(move || started.elapsed())
}
