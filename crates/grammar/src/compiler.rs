//! From a grammar to what it allows, for the tokens of one vocabulary.

use std::fmt;
use std::sync::{Arc, OnceLock};
use std::thread;

use gpt2_engine::Vocabulary;
use gpt2_generation::LogitsProcessor;
use gpt2_weights::Tokenizer;
use llguidance::api::ParserLimits;
use llguidance::{Matcher, ParserFactory, TokenParser};

use crate::constraint::GrammarConstraint;
use crate::error::told;
use crate::tokens::Tokens;
use crate::{Grammar, GrammarError};

/// The library reads grammars by recursion, of a depth that it bounds: far below this for all that it accepts.
const COMPILER_STACK_BYTES: usize = 64 << 20;

/// The tokens of a vocabulary as grammars need them; a clone shares them.
#[derive(Clone)]
pub struct Compiler(Arc<Inner>);

struct Inner {
    tokenizer: Arc<Tokenizer>,
    vocab_size: usize,
    /// What is built when the first grammar comes.
    prepared: OnceLock<Result<Prepared, GrammarError>>,
}

/// What all grammars of a vocabulary share.
struct Prepared {
    tokens: Arc<Tokens>,
    factory: ParserFactory,
}

impl fmt::Debug for Compiler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Compiler").field("vocab_size", &self.0.vocab_size).finish_non_exhaustive()
    }
}

impl Compiler {
    /// A compiler for the tokens of a vocabulary. It costs nothing before the first grammar.
    ///
    /// # Errors
    /// When there is no tokenizer.
    pub fn new(vocabulary: &Vocabulary) -> Result<Self, GrammarError> {
        let tokenizer = Arc::clone(vocabulary.tokenizer().ok_or(GrammarError::NoTokenizer)?);
        let vocab_size = vocabulary.config().vocab_size;
        Ok(Self(Arc::new(Inner { tokenizer, vocab_size, prepared: OnceLock::new() })))
    }

    /// The constraint to texts of the grammar, which may end with any of `end_tokens`; without one they end where nothing may
    /// follow. One constraint is for all texts of a request. What a grammar may cost is bounded, so it may be a stranger's.
    ///
    /// # Errors
    /// When the tokenizer cannot be used, or the grammar is wrong, too large, or begins with what no token writes.
    pub fn compile(&self, grammar: &Grammar, end_tokens: &[u32]) -> Result<LogitsProcessor, GrammarError> {
        let prepared = self.0.prepared.get_or_init(|| self.0.prepare()).as_ref().map_err(Clone::clone)?;
        let kind = grammar.kind();
        let wrong = |what: &str| GrammarError::Grammar { kind, what: told(what) };
        let source = grammar.to_llguidance()?;
        let compile = || {
            let parser = prepared.factory.create_parser(source).map_err(|error| wrong(&format!("{error:#}")))?;
            check(&parser).map_err(|what| wrong(what))?;
            let matcher = Matcher::new(Ok(parser));
            GrammarConstraint::new(kind, matcher, Arc::clone(&prepared.tokens), end_tokens)
        };
        let constraint = thread::scope(|scope| {
            let compiling = thread::Builder::new().stack_size(COMPILER_STACK_BYTES).spawn_scoped(scope, compile);
            let compiling = compiling.map_err(|error| wrong(&format!("no thread to read it: {error}")))?;
            compiling.join().map_err(|_| wrong("it cannot be read"))?
        })?;
        Ok(LogitsProcessor::Constraint(Arc::new(constraint)))
    }
}

impl Inner {
    fn prepare(&self) -> Result<Prepared, GrammarError> {
        let tokens = Arc::new(Tokens::new(&self.tokenizer, self.vocab_size)?);
        let failed = |what: String| GrammarError::Tokenizer { what: told(&what) };
        let built = ParserFactory::new_simple(&tokens.trie);
        let mut factory = built.map_err(|error| failed(format!("{error:#}")))?;
        factory.quiet();
        *factory.limits_mut() = limits();
        Ok(Prepared { tokens, factory })
    }
}

/// What a grammar may cost, in the library's units.
fn limits() -> ParserLimits {
    let get = |n: &str, d: u64| std::env::var(n).ok().and_then(|v| v.parse().ok()).unwrap_or(d);
    ParserLimits { verbose_errors: false, precompute_large_lexemes: get("PRE", 1) == 1, initial_lexer_fuel: get("INIT", 1000000), step_lexer_fuel: get("STEP", 200000), max_lexer_states: get("STATES", 250000) as usize, ..ParserLimits::default() }
}

/// Refuses what a text that is never taken back cannot keep.
fn check(parser: &TokenParser) -> Result<(), &'static str> {
    let lexemes = parser.parser.grammar().lexer_spec();
    if lexemes.special_token_rx.is_some() {
        return Err("special tokens and tokens by number, such as <[5]>, cannot be used; write what the text is to be");
    }
    if lexemes.has_stop {
        return Err("stop= removes what was written, which cannot be done here; use suffix=");
    }
    Ok(())
}
