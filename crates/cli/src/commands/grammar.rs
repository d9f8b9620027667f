//! `gpt2 generate --json-schema`, `--json-object`, `--regex`, `--grammar`: structured output.

#[cfg(feature = "grammar")]
use std::path::{Path, PathBuf};

use anyhow::Result;
use candle_gpt2_engine::Opened;
use candle_gpt2_generation::{GenerationConfig, LogitsProcessor};
use clap::Args;
use serde_json::Value;

/// Constraint for all completions; empty if the program is built without the feature `grammar`.
#[derive(Debug, Args)]
pub(crate) struct GrammarArguments {
    /// Generate JSON that conforms to the JSON schema in FILE; the completion ends where the JSON does
    #[cfg(feature = "grammar")]
    #[arg(long, value_name = "FILE", help_heading = "Structured output")]
    pub(crate) json_schema: Option<PathBuf>,
    /// Generate a JSON object
    #[cfg(feature = "grammar")]
    #[arg(long, conflicts_with = "json_schema", help_heading = "Structured output")]
    pub(crate) json_object: bool,
    /// Generate text that matches a regular expression from beginning to end
    #[cfg(feature = "grammar")]
    #[arg(long, value_name = "PATTERN", conflicts_with_all = ["json_schema", "json_object"], help_heading = "Structured output")]
    pub(crate) regex: Option<String>,
    /// Generate text that conforms to the grammar in FILE, in llguidance's variant of Lark, whose start
    /// rule is `start`
    #[cfg(feature = "grammar")]
    #[arg(long, value_name = "FILE", conflicts_with_all = ["json_schema", "json_object", "regex"], help_heading = "Structured output")]
    pub(crate) grammar: Option<PathBuf>,
}

#[cfg(not(feature = "grammar"))]
impl GrammarArguments {
    pub(super) fn compile(&self, _: &Opened, _: &GenerationConfig) -> Result<Option<LogitsProcessor>> {
        Ok(None)
    }

    pub(super) fn settings(&self) -> Result<Option<Value>> {
        Ok(None)
    }
}

#[cfg(feature = "grammar")]
impl GrammarArguments {
    /// Compiles the requested constraint, if there is one.
    pub(super) fn compile(
        &self,
        opened: &Opened,
        config: &GenerationConfig,
    ) -> Result<Option<LogitsProcessor>> {
        use candle_gpt2_grammar::Compiler;

        use crate::exit::UsageError;

        let Some(RequestedGrammar { name, grammar }) = self.requested()? else { return Ok(None) };
        let refuse = |what: String| UsageError(format!("{name}: {what}"));
        let compiler = Compiler::new(opened.vocabulary()).map_err(|error| refuse(error.to_string()))?;
        let compiled = compiler.compile_for(&grammar, config);
        Ok(Some(compiled.map_err(|error| refuse(error.to_string()))?))
    }

    /// Returns the settings that must match when a run is resumed.
    pub(super) fn settings(&self) -> Result<Option<Value>> {
        use candle_gpt2_grammar::Grammar;
        use serde_json::json;

        Ok(self.requested()?.map(|requested| match requested.grammar {
            Grammar::JsonSchema(schema) => json!({ "json_schema": schema }),
            Grammar::Regex(pattern) => json!({ "regex": pattern }),
            Grammar::Lark(grammar) => json!({ "grammar": grammar }),
            _ => json!("json_object"),
        }))
    }

    fn requested(&self) -> Result<Option<RequestedGrammar>> {
        use candle_gpt2_grammar::Grammar;

        let file = |path: &Path| path.display().to_string();
        Ok(if let Some(path) = &self.json_schema {
            Some(RequestedGrammar { name: file(path), grammar: Grammar::JsonSchema(schema(path)?) })
        } else if let Some(path) = &self.grammar {
            Some(RequestedGrammar { name: file(path), grammar: Grammar::Lark(text(path)?) })
        } else if let Some(pattern) = &self.regex {
            Some(RequestedGrammar { name: "--regex".into(), grammar: Grammar::Regex(pattern.clone()) })
        } else {
            self.json_object
                .then(|| RequestedGrammar { name: "--json-object".into(), grammar: Grammar::JsonObject })
        })
    }
}

/// Requested constraint.
#[cfg(feature = "grammar")]
struct RequestedGrammar {
    /// Source of the constraint, for error messages.
    name: String,
    grammar: candle_gpt2_grammar::Grammar,
}

#[cfg(feature = "grammar")]
fn schema(path: &Path) -> Result<Value> {
    let text = text(path)?;
    let wrong = |error| crate::exit::UsageError(format!("{}: not valid JSON: {error}", path.display()));
    Ok(serde_json::from_str(&text).map_err(wrong)?)
}

#[cfg(feature = "grammar")]
fn text(path: &Path) -> Result<String> {
    // Users of llama.cpp may pass the grammar or schema itself, as its options expect.
    let argument = path.to_string_lossy();
    if (argument.contains("::=") || argument.trim_start().starts_with('{')) && !path.exists() {
        return Err(crate::exit::UsageError(
            "expected the path of a file, found a grammar or schema; write the grammar or schema to a file"
                .into(),
        )
        .into());
    }
    let bytes = crate::input::read_file(path)?;
    let wrong = |error| crate::exit::UsageError(format!("{}: not valid UTF-8: {error}", path.display()));
    let text = String::from_utf8(bytes).map_err(wrong)?;
    // Drop the byte order mark that some editors prepend.
    Ok(text.strip_prefix('\u{FEFF}').map(str::to_owned).unwrap_or(text))
}
