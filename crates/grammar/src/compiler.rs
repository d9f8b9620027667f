//! From a grammar to what it allows, for the tokens of one vocabulary.

use std::fmt;
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;
use std::time::Duration;

use candle_gpt2_confined::WorkerProgram;
use candle_gpt2_engine::Vocabulary;
use candle_gpt2_generation::{Constraint, GenerationConfig, LogitsProcessor, SearchMode};
use candle_gpt2_weights::Tokenizer;

use crate::prepared::{LONGEST, Prepared, STACK_BYTES};
use crate::process::{Order, Processes};
use crate::shared::Shared;
use crate::tokens::Words;
use crate::{Grammar, GrammarError};

/// Most grammars that are read at once.
const MOST_AT_ONCE: usize = 3;
/// Most grammars that wait for their turn.
const MOST_WAITING: usize = 8;
/// Longest wait for a turn. Callers should retry afterward.
const LONGEST_WAIT: Duration = Duration::from_millis(800);

/// The tokens of a vocabulary as grammars need them; a clone shares them.
///
/// ```
/// use candle_gpt2_engine::{ModelOptions, Silent};
/// use candle_gpt2_grammar::{Compiler, Grammar};
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
    /// What is built when the first grammar is read in this process.
    prepared: OnceLock<Result<Prepared, GrammarError>>,
    /// Child processes that read grammars, and the grammars that texts follow there.
    isolated: Option<(Processes, Shared)>,
    turns: Mutex<Turns>,
    has_ended: Condvar,
}

#[derive(Default)]
struct Turns {
    /// Grammars that are being read.
    reading: usize,
    /// Grammars that wait to be.
    waiting: usize,
}

/// One of the grammars that are read at once.
struct Reading(Arc<Inner>);

impl fmt::Debug for Compiler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Compiler").field("vocab_size", &self.0.vocab_size).finish_non_exhaustive()
    }
}

impl Compiler {
    /// A compiler for the tokens of a vocabulary, which reads grammars on a thread of this process. It costs nothing before the
    /// first grammar.
    ///
    /// # Errors
    /// When there is no tokenizer.
    pub fn new(vocabulary: &Vocabulary) -> Result<Self, GrammarError> {
        Self::with_program(vocabulary, None)
    }

    /// A compiler for untrusted grammars. It reads and follows each in a child process of `program`, whose memory and time the
    /// system bounds. Equal grammars with equal end tokens share a process, and texts fail together if it exceeds a limit.
    ///
    /// # Errors
    /// If there is no tokenizer.
    pub fn isolated(vocabulary: &Vocabulary, program: WorkerProgram) -> Result<Self, GrammarError> {
        Self::with_program(vocabulary, Some(program))
    }

    fn with_program(vocabulary: &Vocabulary, program: Option<WorkerProgram>) -> Result<Self, GrammarError> {
        let tokenizer = Arc::clone(vocabulary.tokenizer().ok_or(GrammarError::NoTokenizer)?);
        let vocab_size = vocabulary.config().vocab_size;
        let (prepared, turns) = (OnceLock::new(), Mutex::default());
        let of_words = Arc::clone(&tokenizer);
        let words = move || Words::new(&of_words, vocab_size);
        let isolated = program.map(|program| (Processes::new(program, words), Shared::default()));
        let inner = Inner { tokenizer, vocab_size, prepared, isolated, turns, has_ended: Condvar::new() };
        Ok(Self(Arc::new(inner)))
    }

    /// [`Compiler::compile`] for the texts of a configuration, whose search needs an end token if it is not token by token.
    ///
    /// # Errors
    /// As [`Compiler::compile`], and when there is no end token and one is needed.
    pub fn compile_for(
        &self,
        grammar: &Grammar,
        config: &GenerationConfig,
    ) -> Result<LogitsProcessor, GrammarError> {
        if config.search_mode() != SearchMode::TokenByToken && config.eos_token_id.is_empty() {
            return Err(GrammarError::NoEnd);
        }
        self.compile(grammar, &config.eos_token_id)
    }

    /// The constraint to texts of the grammar, which may end with any of `end_tokens`; without one they end if nothing may
    /// follow. One constraint is for all texts of a request. What a grammar may cost is bounded, so it may be a stranger's; the
    /// thread waits for it, five seconds at most, and a second at most for others before it.
    ///
    /// # Errors
    /// When the tokenizer cannot be used, or the grammar is wrong, too large, takes too long, or begins with what no token
    /// writes; [`GrammarError::Busy`] while others are read.
    pub fn compile(&self, grammar: &Grammar, end_tokens: &[u32]) -> Result<LogitsProcessor, GrammarError> {
        let kind = grammar.kind();
        grammar.check_length()?;
        let begin = || Reading::begin(&self.0).ok_or(GrammarError::Busy { kind });
        let constraint: Arc<dyn Constraint> = match &self.0.isolated {
            Some((processes, shared)) => {
                let order = Order { grammar: grammar.clone(), end_tokens: end_tokens.to_vec() };
                shared.read_with(&order, || {
                    let _reading = begin()?;
                    processes.read(&order)
                })?
            }
            None => read_on_a_thread(begin()?, grammar, end_tokens)?,
        };
        Ok(LogitsProcessor::Constraint(constraint))
    }
}

/// The library bounds what a grammar costs, but perhaps not in all cases: what takes too long is left to itself.
fn read_on_a_thread(
    reading: Reading,
    grammar: &Grammar,
    end_tokens: &[u32],
) -> Result<Arc<dyn Constraint>, GrammarError> {
    let kind = grammar.kind();
    let wrong = |what: String| GrammarError::Grammar { kind, what };
    let (grammar, end_tokens) = (grammar.clone(), end_tokens.to_vec());
    let (read, result) = sync_channel(1);
    let work = move || {
        let result = reading.0.prepared().and_then(|prepared| prepared.read(&grammar, &end_tokens));
        drop(reading);
        // The caller may have gone.
        _ = read.send(result);
    };
    let spawned = thread::Builder::new().stack_size(STACK_BYTES).spawn(work);
    spawned.map_err(|error| wrong(format!("no thread to read it: {error}")))?;
    let constraint = result.recv_timeout(LONGEST).map_err(|error| match error {
        RecvTimeoutError::Timeout => wrong("it takes too long to read; make it simpler".into()),
        RecvTimeoutError::Disconnected => wrong("it cannot be read".into()),
    })??;
    Ok(Arc::new(constraint))
}

impl Inner {
    fn words(&self) -> Result<Words, GrammarError> {
        Words::new(&self.tokenizer, self.vocab_size)
    }

    fn prepared(&self) -> Result<&Prepared, GrammarError> {
        let prepared = self.prepared.get_or_init(|| Prepared::new(self.words()?));
        prepared.as_ref().map_err(Clone::clone)
    }

    fn turns(&self) -> MutexGuard<'_, Turns> {
        // Numbers are whole at any moment.
        self.turns.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Reading {
    /// Waits for its turn, if not too many do; not for ever.
    fn begin(inner: &Arc<Inner>) -> Option<Self> {
        let mut turns = inner.turns();
        if turns.reading >= MOST_AT_ONCE && turns.waiting >= MOST_WAITING {
            return None;
        }
        turns.waiting += 1;
        let is_full = |turns: &mut Turns| turns.reading >= MOST_AT_ONCE;
        let waited = inner.has_ended.wait_timeout_while(turns, LONGEST_WAIT, is_full);
        let (mut turns, waited) = waited.unwrap_or_else(PoisonError::into_inner);
        turns.waiting -= 1;
        if waited.timed_out() {
            return None;
        }
        turns.reading += 1;
        Some(Self(Arc::clone(inner)))
    }
}

impl Drop for Reading {
    fn drop(&mut self) {
        self.0.turns().reading -= 1;
        self.0.has_ended.notify_one();
    }
}
