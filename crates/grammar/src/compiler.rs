//! Compiles grammars into constraints on the tokens of one vocabulary.

use std::fmt;
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;
use std::time::Duration;

use candle_gpt2_confined::WorkerProgram;
use candle_gpt2_engine::Vocabulary;
use candle_gpt2_generation::{Constraint, GenerationConfig, LogitsProcessor, SearchMode};
use candle_gpt2_weights::Tokenizer;

use crate::prepared::{COMPILE_TIMEOUT, Prepared, STACK_BYTES};
use crate::process::{CompileRequest, Processes};
use crate::shared::Shared;
use crate::tokens::TokenBytes;
use crate::{Grammar, GrammarError};

/// Maximum number of grammars compiled concurrently.
const MAX_CONCURRENT: usize = 3;
/// Maximum number of grammars waiting in the queue.
const MAX_WAITING: usize = 8;
/// Maximum time in the queue, after which callers should retry.
const MAX_WAIT: Duration = Duration::from_millis(800);

/// Grammar compiler for the tokens of one vocabulary.
///
/// Clones share their data.
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
    /// Data that all grammars compiled in this process share, built when the first grammar is compiled.
    prepared: OnceLock<Result<Prepared, GrammarError>>,
    /// Child processes that compile grammars, and the constraints currently in use.
    isolated: Option<(Processes, Shared)>,
    queue: Mutex<Queue>,
    has_ended: Condvar,
}

#[derive(Default)]
struct Queue {
    /// Number of grammars being compiled.
    compiling: usize,
    /// Number of grammars waiting in the queue.
    waiting: usize,
}

/// RAII guard that counts one running compilation.
struct CompilePermit(Arc<Inner>);

impl fmt::Debug for Compiler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Compiler").field("vocab_size", &self.0.vocab_size).finish_non_exhaustive()
    }
}

impl Compiler {
    /// Creates a compiler that compiles grammars on threads of this process.
    ///
    /// Creation is cheap: the vocabulary's tables are built when the first grammar is compiled.
    ///
    /// # Errors
    /// If the vocabulary has no tokenizer.
    pub fn new(vocabulary: &Vocabulary) -> Result<Self, GrammarError> {
        Self::with_program(vocabulary, None)
    }

    /// Creates a compiler for untrusted grammars.
    ///
    /// The compiler compiles and evaluates each grammar in a child process that runs `program`, with memory
    /// and time limits that the system enforces. Equal grammars with equal end tokens share a process; if
    /// that process exceeds a limit, all their sequences fail.
    ///
    /// # Errors
    /// If the vocabulary has no tokenizer.
    pub fn isolated(vocabulary: &Vocabulary, program: WorkerProgram) -> Result<Self, GrammarError> {
        Self::with_program(vocabulary, Some(program))
    }

    fn with_program(vocabulary: &Vocabulary, program: Option<WorkerProgram>) -> Result<Self, GrammarError> {
        let tokenizer = Arc::clone(vocabulary.tokenizer().ok_or(GrammarError::NoTokenizer)?);
        let vocab_size = vocabulary.config().vocab_size;
        let (prepared, queue) = (OnceLock::new(), Mutex::default());
        let of_words = Arc::clone(&tokenizer);
        let words = move || TokenBytes::new(&of_words, vocab_size);
        let isolated = program.map(|program| (Processes::new(program, words), Shared::default()));
        let inner = Inner { tokenizer, vocab_size, prepared, isolated, queue, has_ended: Condvar::new() };
        Ok(Self(Arc::new(inner)))
    }

    /// Compiles a grammar for sequences generated with `config`.
    ///
    /// Beam search and contrastive search need an end token.
    ///
    /// # Errors
    /// Same as [`Compiler::compile`]; also if the search mode needs an end token and `config` has none.
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

    /// Compiles a grammar into a constraint that any number of a request's sequences can share.
    ///
    /// A sequence may end with any of `end_tokens`. If there are none, a sequence ends when nothing more may
    /// follow.
    ///
    /// The cost of a grammar is limited, so the grammar may come from an untrusted source. The call blocks
    /// for at most a second in the queue and at most five seconds of compilation. If child processes are
    /// used, the call may also have to prepare the vocabulary first.
    ///
    /// # Errors
    /// If the tokenizer is unsupported, if the grammar is invalid, too large or too slow to compile, or if no
    /// token can begin the output. Returns [`GrammarError::Busy`] if the queue is full or waiting times out.
    pub fn compile(&self, grammar: &Grammar, end_tokens: &[u32]) -> Result<LogitsProcessor, GrammarError> {
        let kind = grammar.kind();
        grammar.check_length()?;
        let begin = || CompilePermit::begin(&self.0).ok_or(GrammarError::Busy { kind });
        let constraint: Arc<dyn Constraint> = match &self.0.isolated {
            Some((processes, shared)) => {
                let request = CompileRequest { grammar: grammar.clone(), end_tokens: end_tokens.to_vec() };
                shared.read_with(&request, || {
                    let _permit = begin()?;
                    processes.read(&request)
                })?
            }
            None => compile_on_thread(begin()?, grammar, end_tokens)?,
        };
        Ok(LogitsProcessor::Constraint(constraint))
    }
}

/// Compiles a grammar on a new thread and waits at most [`COMPILE_TIMEOUT`].
///
/// The library limits the cost of a grammar, but possibly not in all cases. After a timeout, the thread
/// continues in the background.
fn compile_on_thread(
    permit: CompilePermit,
    grammar: &Grammar,
    end_tokens: &[u32],
) -> Result<Arc<dyn Constraint>, GrammarError> {
    let kind = grammar.kind();
    let wrong = |what: String| GrammarError::Grammar { kind, what };
    let (grammar, end_tokens) = (grammar.clone(), end_tokens.to_vec());
    let (read, result) = sync_channel(1);
    let work = move || {
        let result = permit.0.prepared().and_then(|prepared| prepared.read(&grammar, &end_tokens));
        drop(permit);
        // Fails if the receiver has timed out.
        _ = read.send(result);
    };
    let spawned = thread::Builder::new().stack_size(STACK_BYTES).spawn(work);
    spawned.map_err(|error| wrong(format!("cannot start a compiler thread: {error}")))?;
    let constraint = result.recv_timeout(COMPILE_TIMEOUT).map_err(|error| match error {
        RecvTimeoutError::Timeout => wrong(format!("compilation timed out; simplify the {kind}")),
        RecvTimeoutError::Disconnected => wrong(format!("the compiler crashed; simplify the {kind}")),
    })??;
    Ok(Arc::new(constraint))
}

impl Inner {
    fn words(&self) -> Result<TokenBytes, GrammarError> {
        TokenBytes::new(&self.tokenizer, self.vocab_size)
    }

    fn prepared(&self) -> Result<&Prepared, GrammarError> {
        let prepared = self.prepared.get_or_init(|| Prepared::new(self.words()?));
        prepared.as_ref().map_err(Clone::clone)
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        // The counters are consistent at every point, so poisoning is harmless.
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl CompilePermit {
    /// Waits for a permit; returns `None` if the queue is full or the wait times out.
    fn begin(inner: &Arc<Inner>) -> Option<Self> {
        let mut queue = inner.queue();
        if queue.compiling >= MAX_CONCURRENT && queue.waiting >= MAX_WAITING {
            return None;
        }
        queue.waiting += 1;
        let is_full = |queue: &mut Queue| queue.compiling >= MAX_CONCURRENT;
        let waited = inner.has_ended.wait_timeout_while(queue, MAX_WAIT, is_full);
        let (mut queue, waited) = waited.unwrap_or_else(PoisonError::into_inner);
        queue.waiting -= 1;
        if waited.timed_out() {
            return None;
        }
        queue.compiling += 1;
        Some(Self(Arc::clone(inner)))
    }
}

impl Drop for CompilePermit {
    fn drop(&mut self) {
        self.0.queue().compiling -= 1;
        self.0.has_ended.notify_one();
    }
}
