//! Requests for beam or contrastive search; one step finds all completions of a request.

use std::ops::{ControlFlow, Deref};

use candle_gpt2_kernels::is_interrupted;
use tokenizers::Tokenizer;

use super::Scheduler;
use super::event::{Event, Found, StopReason};
use super::request::{Request, Search};
use crate::{GenerationError, SearchMode, beam_search, contrastive_search, decode};

impl<T: Deref<Target = Tokenizer> + Clone> Scheduler<T> {
    /// Runs the first waiting search.
    pub(super) fn search(&mut self, progress: &dyn Fn() -> ControlFlow<()>) -> Result<(), GenerationError> {
        let Some(Search { id, request }) = self.searches.pop_front() else { return Ok(()) };
        match self.run_search(&request, progress) {
            Ok(texts) => self.ready.push(Event::Found { request: id, texts }),
            Err(error @ GenerationError::Candle(_)) => return Err(error),
            Err(error) => self.fail(id, error),
        }
        Ok(())
    }

    fn run_search(
        &self,
        request: &Request,
        progress: &dyn Fn() -> ControlFlow<()>,
    ) -> Result<Vec<Found>, GenerationError> {
        let Request { prompt, config, processors, .. } = request;
        let (model, clock) = (&self.model, self.clock.as_ref());
        let mut texts: Vec<_> = if config.search_mode() == SearchMode::Beams {
            let hypotheses = beam_search(model, prompt, config, processors, clock, progress)?;
            hypotheses.into_iter().map(|text| (text.ids, text.stop_reason, Some(text.score))).collect()
        } else {
            let (ids, reason) = contrastive_search(model, prompt, config, processors, clock, progress)?;
            vec![(ids, reason, None)]
        };
        if texts.is_empty() {
            let reason = if is_interrupted() { StopReason::Interrupted } else { StopReason::MaxNewTokens };
            texts = vec![(Vec::new(), reason, None); config.num_return_sequences];
        }
        let to_found = |(ids, stop_reason, score): (Vec<u32>, StopReason, Option<f64>)| {
            let text = self.tokenizer.as_ref().map(|tokenizer| decode(tokenizer, &ids, true)).transpose()?;
            let text = text.unwrap_or_default();
            Ok(Found { ids, text, stop_reason, score })
        };
        texts.into_iter().map(to_found).collect()
    }
}
