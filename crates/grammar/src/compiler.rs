//! From a grammar to what it allows, for the tokens of one vocabulary.

use std::fmt;
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;
use std::time::Duration;

use gpt2_engine::{Spelling, Vocabulary};
use gpt2_generation::{GenerationConfig, LogitsProcessor, SearchMode};
use gpt2_weights::Tokenizer;
use llguidance::api::ParserLimits;
use llguidance::{Matcher, ParserFactory};

use crate::constraint::GrammarConstraint;
use crate::error::told;
use crate::tokens::Tokens;
use crate::{Grammar, GrammarError};

/// The library reads grammars by recursion, of a depth that it bounds: far below this for all that it accepts.
const COMPILER_STACK_BYTES: usize = 64 << 20;
/// Longest time to read a grammar. Schemas of tools take milliseconds; the library bounds its memory, but not in all cases its
/// time.
const LONGEST: Duration = Duration::from_secs(5);
/// Most grammars that are read at once; others wait. One that took too long cannot be stopped, and counts until its reading ends.
const MOST_AT_ONCE: usize = 4;

/// The tokens of a vocabulary as grammars need them; a clone shares them.
///
/// ```
/// use gpt2_engine::{ModelOptions, Silent};
/// use gpt2_grammar::{Compiler, Grammar};
///
/// let opened = ModelOptions::default().open(&Silent)?;
/// let compiler = Compiler::new(opened.vocabulary())?;
/// assert!(compiler.compile(&Grammar::Regex("(yes|no)".into()), &[]).is_ok());
/// assert!(compiler.compile(&Grammar::Regex("(yes|no".into()), &[]).is_err());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct Compiler(Arc<Inner>);

struct Inner {
    tokenizer: Arc<Tokenizer>,
    vocab_size: usize,
    /// What is built when the first grammar comes.
    prepared: OnceLock<Result<Prepared, GrammarError>>,
    /// Grammars that are being read.
    reading: Mutex<usize>,
    has_ended: Condvar,
}

/// What all grammars of a vocabulary share.
struct Prepared {
    tokens: Arc<Tokens>,
    factory: ParserFactory,
}

/// One of the grammars that are read at once.
struct Reading(Arc<Inner>);

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
        let (prepared, reading) = (OnceLock::new(), Mutex::default());
        Ok(Self(Arc::new(Inner { tokenizer, vocab_size, prepared, reading, has_ended: Condvar::new() })))
    }

    /// [`Compiler::compile`] for the texts of a configuration, whose search needs an end token where it is not token by token.
    ///
    /// # Errors
    /// As [`Compiler::compile`], and when there is no end token and one is needed; `spelling` is that of the option.
    pub fn compile_for(
        &self,
        grammar: &Grammar,
        config: &GenerationConfig,
        spelling: Spelling,
    ) -> Result<LogitsProcessor, GrammarError> {
        if config.search_mode() != SearchMode::TokenByToken && config.eos_token_id.is_empty() {
            return Err(GrammarError::NoEnd { option: spelling.of("eos_token_id") });
        }
        self.compile(grammar, &config.eos_token_id)
    }

    /// The constraint to texts of the grammar, which may end with any of `end_tokens`; without one they end where nothing may
    /// follow. One constraint is for all texts of a request. What a grammar may cost is bounded, so it may be a stranger's; the
    /// thread waits for it, five seconds at most, and as long for others before it.
    ///
    /// # Errors
    /// When the tokenizer cannot be used, or the grammar is wrong, too large, takes too long, or begins with what no token
    /// writes.
    pub fn compile(&self, grammar: &Grammar, end_tokens: &[u32]) -> Result<LogitsProcessor, GrammarError> {
        let kind = grammar.kind();
        grammar.check_length()?;
        let wrong = |what: String| GrammarError::Grammar { kind, what };
        let reading = Reading::begin(&self.0).ok_or(GrammarError::Busy { kind, most: MOST_AT_ONCE })?;
        let (grammar, end_tokens) = (grammar.clone(), end_tokens.to_vec());
        let (read, result) = sync_channel(1);
        let work = move || {
            let result = reading.0.read(&grammar, &end_tokens);
            drop(reading);
            // Whoever asked may have gone.
            _ = read.send(result);
        };
        let spawned = thread::Builder::new().stack_size(COMPILER_STACK_BYTES).spawn(work);
        spawned.map_err(|error| wrong(format!("no thread to read it: {error}")))?;
        let constraint = result.recv_timeout(LONGEST).map_err(|error| match error {
            RecvTimeoutError::Timeout => wrong("it takes too long to read; make it simpler".into()),
            RecvTimeoutError::Disconnected => wrong("it cannot be read".into()),
        })??;
        Ok(LogitsProcessor::Constraint(Arc::new(constraint)))
    }
}

impl Inner {
    fn read(&self, grammar: &Grammar, end_tokens: &[u32]) -> Result<GrammarConstraint, GrammarError> {
        let prepared = self.prepared.get_or_init(|| self.prepare()).as_ref().map_err(Clone::clone)?;
        let parser = grammar.parser(&prepared.factory)?;
        GrammarConstraint::new(
            grammar.kind(),
            Matcher::new(Ok(parser)),
            Arc::clone(&prepared.tokens),
            end_tokens,
        )
    }

    fn reading(&self) -> MutexGuard<'_, usize> {
        // A number is whole at any moment.
        self.reading.lock().unwrap_or_else(PoisonError::into_inner)
    }

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
    /// States of its lexer, each about a kilobyte.
    const MAX_LEXER_STATES: usize = 50_000;
    /// Items of its parser for a token, of which usual grammars have tens: texts of others wait for each step.
    const MAX_STEP_ITEMS: usize = 10_000;
    const MAX_ROW_ITEMS: usize = 500;
    ParserLimits {
        max_lexer_states: MAX_LEXER_STATES,
        step_max_items: MAX_STEP_ITEMS,
        max_items_in_row: MAX_ROW_ITEMS,
        verbose_errors: false,
        ..ParserLimits::default()
    }
}

impl Reading {
    /// Waits for its turn; not for ever.
    fn begin(inner: &Arc<Inner>) -> Option<Self> {
        let is_full = |reading: &mut usize| *reading >= MOST_AT_ONCE;
        let waited = inner.has_ended.wait_timeout_while(inner.reading(), LONGEST, is_full);
        let (mut reading, waited) = waited.unwrap_or_else(PoisonError::into_inner);
        if waited.timed_out() {
            return None;
        }
        *reading += 1;
        Some(Self(Arc::clone(inner)))
    }
}

impl Drop for Reading {
    fn drop(&mut self) {
        *self.0.reading() -= 1;
        self.0.has_ended.notify_one();
    }
}
