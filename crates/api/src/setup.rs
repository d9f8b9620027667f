//! Creates a served model with all features, including chat and structured output.

use candle_gpt2_engine::LoadedModel;
use candle_gpt2_generation::LogitsProcessor;
use candle_gpt2_grammar::{Compiler, Grammar, GrammarError};

use crate::chat::ChatTemplate;
use crate::served::{Compiles, ReadChat};
use crate::work::read_chat;
use crate::{ApiOptions, ChatTemplateChoice, ServedModel, SetupError};

/// DialoGPT's chat format: each message followed by the EOS token.
const EOS_JOIN: &str = "{% for message in messages %}{{ message.content }}{{ eos_token }}{% endfor %}";

impl Compiles for Compiler {
    fn compile(&self, grammar: &Grammar, ends: &[u32]) -> Result<LogitsProcessor, GrammarError> {
        Self::compile(self, grammar, ends)
    }
}

impl ServedModel {
    /// Creates a served model with chat and structured output.
    ///
    /// # Errors
    /// If the checkpoint's `generation_config.json` or the chat template named by `options` is unusable.
    pub fn new(model: &LoadedModel, options: ApiOptions) -> Result<Self, SetupError> {
        let vocabulary = model.vocabulary();
        let named = |what| SetupError::ChatTemplate { what };
        let parsed = |source: &str| ChatTemplate::new(source, options.worker.as_ref());
        let template = match &options.chat_template {
            ChatTemplateChoice::EosJoin => Ok(Some(parsed(EOS_JOIN).map_err(named)?)),
            ChatTemplateChoice::Jinja(source) => Ok(Some(parsed(source).map_err(named)?)),
            ChatTemplateChoice::Checkpoint => {
                let source = vocabulary.chat_template().map_err(ToString::to_string);
                source.and_then(|source| source.map(parsed).transpose())
            }
        };
        let compiler = match options.worker.clone() {
            Some(program) => Compiler::isolated(vocabulary, program),
            None => Compiler::new(vocabulary),
        };
        let compiler = compiler.ok();
        let compiler = compiler.map(|compiler| Box::new(compiler) as Box<dyn Compiles>);
        let read_chat = Some(read_chat as ReadChat);
        let served = Self { template, compiler, read_chat, ..Self::of_completions(model, options)? };
        if served.options.chat_template == ChatTemplateChoice::EosJoin && served.eos_token().is_none() {
            return Err(named("eos-join needs an end-of-text token, and this model has none".into()));
        }
        Ok(served)
    }
}
