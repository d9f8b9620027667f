//! Many texts in one go: prompts are asked for as there is room for them, and texts are handed on as they are finished.

use std::iter;
use std::ops::ControlFlow;
use std::time::Duration;

use gpt2_generation::{
    BatchGenerator, GeneratedToken, GenerationConfig, GenerationError, LogitsProcessor, SearchMode,
    StopReason, beam_search, contrastive_search,
};
use serde::{Serialize, Serializer};

use crate::{LoadedModel, Reporter, Unit};

/// A finished text.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Text {
    /// Its tokens, with the one that ended it.
    pub ids: Vec<u32>,
    /// What they say; absent without a tokenizer.
    pub text: Option<String>,
    /// Why it ended; as JSON its [name](StopReason::name).
    #[serde(serialize_with = "by_name")]
    pub stop_reason: StopReason,
    /// Of a beam: its log-probability over its length.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub score: Option<f64>,
}

fn by_name<S: Serializer>(reason: &StopReason, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(reason.name())
}

/// Where prompts come from and where their texts go. Prompts are numbered from 0 in the order in which they are given.
pub trait Job {
    /// What can go wrong with the texts once they are made, and with the machine.
    type Error: From<GenerationError>;

    /// The next prompt; `None` after the last one.
    ///
    /// # Errors
    /// What ends the whole job.
    fn next_prompt(&mut self) -> Result<Option<Vec<u32>>, Self::Error>;

    /// A token as it comes, where texts are made token by token. One that fails may begin anew, when others fail beside it.
    ///
    /// # Errors
    /// What ends the whole job.
    fn on_token(&mut self, token: &GeneratedToken) -> Result<(), Self::Error> {
        let _ = token;
        Ok(())
    }

    /// All texts of a prompt, best first where they were searched for, or why there are none.
    ///
    /// # Errors
    /// What ends the whole job.
    fn on_texts(
        &mut self,
        prompt: usize,
        texts: Result<Vec<Text>, GenerationError>,
    ) -> Result<(), Self::Error>;

    /// Whether to end what is being made, asked after each token.
    fn is_interrupted(&self) -> bool {
        false
    }
}

/// Prompts that are taken in one round, as a multiple of those that are continued at once.
const ROUND: usize = 16;

impl LoadedModel {
    /// Continues every prompt of a job, `batch_size` at a time where texts are made token by token. `config` is
    /// [complete](crate::Defaults::complete). Returns the time to the first token, where there was one.
    ///
    /// # Errors
    /// Those of the job, and when the device fails. A prompt that cannot go on is the job's to hear of.
    pub fn generate<J: Job>(
        &self,
        job: &mut J,
        batch_size: usize,
        config: &GenerationConfig,
        reporter: &dyn Reporter,
    ) -> Result<Option<Duration>, J::Error> {
        if config.search_mode() == SearchMode::TokenByToken {
            return self.token_by_token(job, batch_size, config);
        }
        for index in 0.. {
            let Some(prompt) = job.next_prompt()?.filter(|_| !job.is_interrupted()) else { break };
            let texts = self.search(job, &prompt, config, reporter);
            hand_on(job, index, texts)?;
        }
        Ok(None)
    }

    fn token_by_token<J: Job>(
        &self,
        job: &mut J,
        batch_size: usize,
        config: &GenerationConfig,
    ) -> Result<Option<Duration>, J::Error> {
        let (mut first, mut time_to_first_token) = (0, None);
        loop {
            let length = batch_size.saturating_mul(ROUND);
            let prompts = iter::from_fn(|| job.next_prompt().transpose()).take(length);
            let prompts = prompts.collect::<Result<Vec<_>, _>>()?;
            if prompts.is_empty() || job.is_interrupted() {
                return Ok(time_to_first_token);
            }
            let mut round = Round::new(self, first, &prompts, config);
            let made = round.make(job, batch_size)?;
            if let Err(error) = made {
                // One prompt cannot go on, and nobody says which: each of the others is continued alone.
                if let [_] = prompts[..] {
                    hand_on(job, first, Err(error))?;
                } else {
                    for index in round.unfinished() {
                        let prompt = &prompts[index..=index];
                        let alone = Round::new(self, first + index, prompt, config).make(job, 1)?;
                        if let Err(error) = alone {
                            hand_on(job, first + index, Err(error))?;
                        }
                    }
                }
            }
            time_to_first_token = time_to_first_token.or(round.time_to_first_token);
            first += prompts.len();
        }
    }

    fn search<J: Job>(
        &self,
        job: &J,
        prompt: &[u32],
        config: &GenerationConfig,
        reporter: &dyn Reporter,
    ) -> Result<Vec<Text>, GenerationError> {
        let processors = LogitsProcessor::of_config(config);
        let steps = config.max_new_tokens.min(self.config().n_positions);
        let bar = reporter.start("searching", steps as u64, Unit::Items("tokens"));
        let count = || {
            bar.advance(1);
            if job.is_interrupted() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        };
        let (model, device) = (self.model(), self.device());
        let found: Vec<_> = if config.search_mode() == SearchMode::Beams {
            let found = beam_search(model, prompt, config, &processors, device, &count)?;
            found.into_iter().map(|text| (text.ids, text.stop_reason, Some(text.score))).collect()
        } else {
            let (ids, reason) = contrastive_search(model, prompt, config, &processors, device, &count)?;
            vec![(ids, reason, None)]
        };
        if found.is_empty() {
            return Ok(self.empty_texts(config));
        }
        let text = |(ids, stop_reason, score): (Vec<u32>, StopReason, Option<f64>)| {
            let text =
                self.vocabulary().tokenizer().map(|tokenizer| tokenizer.decode(&ids, true)).transpose();
            let text = text.map_err(|error| GenerationError::Decode(error.to_string()))?;
            Ok(Text { ids, text, stop_reason, score })
        };
        found.into_iter().map(text).collect()
    }

    /// What a prompt gives before its first token.
    fn empty_texts(&self, config: &GenerationConfig) -> Vec<Text> {
        let text = self.vocabulary().tokenizer().map(|_| String::new());
        let stop_reason = StopReason::MaxNewTokens;
        vec![Text { ids: Vec::new(), text, stop_reason, score: None }; config.num_return_sequences]
    }
}

/// Hands on what became of a prompt. A device that fails would fail for every other one too.
fn hand_on<J: Job>(
    job: &mut J,
    prompt: usize,
    texts: Result<Vec<Text>, GenerationError>,
) -> Result<(), J::Error> {
    match texts {
        Err(error @ GenerationError::Candle(_)) => Err(error.into()),
        texts => job.on_texts(prompt, texts),
    }
}

/// Prompts that are made in one go.
struct Round<'a> {
    model: &'a LoadedModel,
    config: &'a GenerationConfig,
    /// Number of the first prompt.
    first: usize,
    prompts: &'a [Vec<u32>],
    /// The texts of each prompt so far; none once they are handed on.
    texts: Vec<Vec<Text>>,
    /// How many of them are not finished.
    running: Vec<usize>,
    time_to_first_token: Option<Duration>,
}

impl<'a> Round<'a> {
    fn new(
        model: &'a LoadedModel,
        first: usize,
        prompts: &'a [Vec<u32>],
        config: &'a GenerationConfig,
    ) -> Self {
        Self {
            model,
            config,
            first,
            prompts,
            texts: vec![model.empty_texts(config); prompts.len()],
            running: vec![config.num_return_sequences; prompts.len()],
            time_to_first_token: None,
        }
    }

    /// The prompts whose texts were not handed on.
    fn unfinished(&self) -> impl Iterator<Item = usize> {
        (0..self.prompts.len()).filter(|index| !self.texts[*index].is_empty())
    }

    /// Makes the texts; the inner error is one of a prompt.
    fn make<J: Job>(
        &mut self,
        job: &mut J,
        batch_size: usize,
    ) -> Result<Result<(), GenerationError>, J::Error> {
        let tokenizer = self.model.vocabulary().tokenizer().map(AsRef::as_ref);
        let (model, device) = (self.model.model(), self.model.device());
        let tokens = BatchGenerator::new(model, self.prompts, batch_size, self.config, tokenizer, device);
        let mut tokens = match tokens {
            Ok(tokens) => tokens,
            Err(error) => return Ok(Err(error)),
        };
        while let Some(token) = tokens.next() {
            let mut token = match token {
                Ok(token) => token,
                Err(error) => return Ok(Err(error)),
            };
            self.time_to_first_token = tokens.time_to_first_token();
            let prompt = token.prompt;
            token.prompt += self.first;
            let text = &mut self.texts[prompt][token.sequence];
            text.ids.push(token.id);
            if let Some(text) = &mut text.text {
                text.push_str(&token.text);
            }
            job.on_token(&token)?;
            if job.is_interrupted() {
                text.stop_reason = token.stop_reason.unwrap_or(StopReason::Interrupted);
                break;
            }
            if let Some(reason) = token.stop_reason {
                text.stop_reason = reason;
                self.running[prompt] -= 1;
                if self.running[prompt] == 0 {
                    job.on_texts(self.first + prompt, Ok(std::mem::take(&mut self.texts[prompt])))?;
                }
            }
        }
        // Texts that were interrupted, and texts of no tokens, which have had none to end with.
        for (prompt, texts) in self.texts.iter_mut().enumerate().filter(|(_, texts)| !texts.is_empty()) {
            job.on_texts(self.first + prompt, Ok(std::mem::take(texts)))?;
        }
        Ok(Ok(()))
    }
}
