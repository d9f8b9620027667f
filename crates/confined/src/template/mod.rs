//! Jinja templates from checkpoints and evaluation tasks.
//!
//! Templates are untrusted programs that turn a conversation or a task entry into text. If there is a worker,
//! child processes parse and render them. Otherwise, a thread of this process does. In that case, nesting is
//! checked before parsing, steps and output are limited, and the caller waits only until a deadline.

mod engine;
mod nesting;
mod style;

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use minijinja::value::{Serde, Value};
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::{Answer, Limit, Limits, Program, Service, Session, Worker, WorkerError, WorkerProgram};
use engine::Engine;

pub use style::Style;

/// Limits on one answer in a worker, and on parsing the templates supplied up front.
const LIMITS: Limits =
    Limits { cpu: Duration::from_secs(2), memory_bytes: 256 << 20, wall: Duration::from_secs(10) };
/// Maximum total CPU time of a task's renders, not counting the first [`FREE_TIME`] of each.
const TASK_TIME: Duration = Duration::from_secs(3);
/// CPU time per render that does not count toward the total.
///
/// Typical templates take less than a tenth of this time.
const FREE_TIME: Duration = Duration::from_millis(2);
/// Maximum number of a task's renders in one process.
///
/// Any memory that a template leaks is freed when the process exits.
const RENDERS_PER_PROCESS: usize = 256;
/// Maximum number of conversations rendered concurrently; each may use the full memory limit.
const MAX_CONCURRENT: usize = 4;
/// Maximum wait for one of the running renders to finish.
const MAX_WAIT: Duration = Duration::from_secs(5);
/// Deadline for a render on a thread of this process.
#[cfg(not(target_family = "wasm"))]
const DEADLINE: Duration = Duration::from_secs(5);
/// Stack size of a rendering thread; generous, because the nesting of values is not limited.
#[cfg(not(target_family = "wasm"))]
const STACK_BYTES: usize = 64 << 20;

/// Stack size in a worker; a well-behaved template needs a fraction of a megabyte.
const WORKER_STACK_BYTES: usize = 8 << 20;

/// Service that renders templates in a worker.
///
/// ```
/// // In a program's `main`, before it starts a thread:
/// if std::env::args().nth(1).as_deref() == Some("confined") {
///     candle_gpt2_confined::run_worker(&[candle_gpt2_confined::TEMPLATES])?;
/// }
/// # Ok::<(), std::io::Error>(())
/// ```
pub const TEMPLATES: Service = Service { name: "templates", stack_bytes: WORKER_STACK_BYTES, prepare };

/// Template error.
///
/// Returned by [`Templates::render`]; see [`Templates`] for an example.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum TemplateError {
    /// The template is invalid, or does not match its context.
    #[error("{what}")]
    Invalid {
        /// Error message.
        what: String,
    },
    /// The template exceeded a limit.
    #[error("{what}")]
    Exceeded {
        /// Description of the limit.
        what: String,
    },
    /// Too many renders are running, or the system cannot start a process. A retry may succeed.
    #[error("cannot render templates: {what}; retry")]
    Busy {
        /// Description of the missing resource.
        what: String,
    },
}

/// Templates from one source, either a checkpoint or a task.
///
/// ```
/// use candle_gpt2_confined::{Style, TemplateError, Templates};
///
/// let templates = Templates::new(Style::Chat, &["Hello, {{ name }}!"], None)?;
/// let context = serde_json::json!({ "name": "Mia" });
/// assert_eq!(templates.render("Hello, {{ name }}!", &context)?, "Hello, Mia!");
/// assert!(matches!(templates.render("{{ name.x.y }}", &context), Err(TemplateError::Invalid { .. })));
/// # Ok::<(), TemplateError>(())
/// ```
#[derive(Debug)]
pub struct Templates {
    style: Style,
    executor: Executor,
}

/// Process that renders templates: this process or a worker.
#[derive(Debug)]
enum Executor {
    InProcess { engine: Arc<Mutex<Engine>>, permits: Arc<RenderPermits> },
    Worker { worker: Box<Worker>, permits: Arc<RenderPermits>, task: Mutex<TaskProcess> },
}

/// Process that renders a task's entries, and the total time spent so far.
#[derive(Debug, Default)]
struct TaskProcess {
    session: Option<Session>,
    /// Number of renders in the current process.
    renders: usize,
    /// CPU time of all renders, not counting the first [`FREE_TIME`] of each.
    spent: Duration,
}

/// Program source for the worker: the templates to parse up front.
#[derive(Serialize, Deserialize)]
struct Source {
    style: Style,
    templates: Vec<String>,
}

#[derive(Serialize)]
enum Question<'a, C> {
    Render { template: &'a str, context: C },
    List { text: &'a str },
}

#[derive(Deserialize)]
enum OwnedQuestion {
    Render { template: String, context: serde_json::Value },
    List { text: String },
}

/// Answer to a question.
#[derive(Debug, Serialize, Deserialize)]
enum Reply {
    Text(String),
    List(Option<Vec<String>>),
    Wrong(String),
}

/// Prepares the program for [`TEMPLATES`].
fn prepare(source: &[u8]) -> Result<Box<dyn Program>, String> {
    let Source { style, templates } = serde_json::from_slice(source).map_err(|error| error.to_string())?;
    let mut engine = Engine::new(style)?;
    templates.into_iter().try_for_each(|template| engine.add(template))?;
    Ok(Box::new(engine))
}

impl Program for Engine {
    fn answer(&mut self, question: &[u8]) -> Vec<u8> {
        let answer = match serde_json::from_slice(question) {
            Ok(OwnedQuestion::Render { template, context }) => {
                self.answer_render(&template, Value::from(Serde(context)))
            }
            Ok(OwnedQuestion::List { text }) => Reply::List(self.list(&text)),
            Err(error) => Reply::Wrong(error.to_string()),
        };
        serde_json::to_vec(&answer).unwrap_or_default()
    }
}

impl Engine {
    fn answer_render(&mut self, template: &str, context: Value) -> Reply {
        let rendered = self.add(template.to_owned()).and_then(|()| self.render(template, context));
        rendered.map_or_else(Reply::Wrong, Reply::Text)
    }
}

impl Templates {
    /// Creates templates in this style.
    ///
    /// Child processes that run `program` parse and render the templates; if there is no program, this
    /// process does. Templates in `sources` are parsed up front, which checks them and speeds up their first
    /// render.
    ///
    /// # Errors
    /// If one of `sources` is invalid or takes too long to parse, or no process can be started.
    pub fn new(
        style: Style,
        sources: &[&str],
        program: Option<&WorkerProgram>,
    ) -> Result<Self, TemplateError> {
        let permits = Arc::<RenderPermits>::default();
        let templates = sources.iter().map(|source| (*source).to_owned());
        let Some(program) = program else {
            let mut engine = Engine::new(style).map_err(invalid)?;
            let templates: Vec<String> = templates.collect();
            let parse = move || {
                let parsed = templates.iter().try_for_each(|template| {
                    nesting::check(template)?;
                    engine.add(template.clone())
                });
                parsed.map(|()| engine)
            };
            let engine = within_deadline(Permit::acquire(&permits)?, parse)?.map_err(invalid)?;
            return Ok(Self {
                style,
                executor: Executor::InProcess { engine: Arc::new(Mutex::new(engine)), permits },
            });
        };
        let source = Source { style, templates: templates.collect() };
        let source = serde_json::to_vec(&source).map_err(|error| invalid(error.to_string()))?;
        let is_parsed_now = !sources.is_empty();
        let worker = Worker::new(program.clone(), TEMPLATES.name, LIMITS, move || Ok(source.clone()));
        let worker = Box::new(worker);
        if is_parsed_now {
            worker.session().map_err(TemplateError::of_worker)?;
        }
        Ok(Self { style, executor: Executor::Worker { worker, permits, task: Mutex::default() } })
    }

    /// Renders a template.
    ///
    /// # Errors
    /// If the template is invalid, does not match the context or exceeds a limit, or if too many slow
    /// renders are already running.
    pub fn render(&self, template: &str, context: &impl Serialize) -> Result<String, TemplateError> {
        let rendered = match &self.executor {
            Executor::InProcess { engine, permits } => {
                let (template, context) = (template.to_owned(), Value::from(Serde(context)));
                self.run_in_process(engine, permits, move |engine| match nesting::check(&template) {
                    Ok(()) => engine.answer_render(&template, context),
                    Err(what) => Reply::Wrong(what),
                })?
            }
            Executor::Worker { .. } => self.ask(&Question::Render { template, context })?,
        };
        match rendered {
            Reply::Text(text) => Ok(text),
            Reply::Wrong(what) => Err(invalid(what)),
            Reply::List(_) => Err(invalid("expected text, found a list".into())),
        }
    }

    /// Parses `text` as a Python list of strings, such as `['yes', 'no']`; otherwise, returns `None`.
    ///
    /// # Errors
    /// If parsing exceeds a limit, or too many slow renders are already running.
    ///
    /// ```
    /// use candle_gpt2_confined::{Style, Templates};
    ///
    /// let templates = Templates::new(Style::Task, &[], None)?;
    /// assert_eq!(templates.list("['yes', 'no']")?, Some(vec!["yes".to_owned(), "no".to_owned()]));
    /// assert_eq!(templates.list("yes, no and more")?, None);
    /// # Ok::<(), candle_gpt2_confined::TemplateError>(())
    /// ```
    pub fn list(&self, text: &str) -> Result<Option<Vec<String>>, TemplateError> {
        let listed = match &self.executor {
            Executor::InProcess { engine, permits } => {
                let text = text.to_owned();
                self.run_in_process(engine, permits, move |engine| {
                    Reply::List(nesting::check_expression(&text).ok().and_then(|()| engine.list(&text)))
                })?
            }
            Executor::Worker { .. } => self.ask(&Question::List::<()> { text })?,
        };
        Ok(match listed {
            Reply::List(list) => list,
            Reply::Text(_) | Reply::Wrong(_) => None,
        })
    }

    /// Runs `work` on a thread of this process.
    fn run_in_process(
        &self,
        engine: &Arc<Mutex<Engine>>,
        permits: &Arc<RenderPermits>,
        work: impl FnOnce(&mut Engine) -> Reply + Send + 'static,
    ) -> Result<Reply, TemplateError> {
        let engine = Arc::clone(engine);
        let permit = Permit::acquire(permits)?;
        within_deadline(permit, move || {
            // Each render uses a copy of the engine, so a render that never finishes does not block others.
            let mut own = locked(&engine).clone();
            work(&mut own)
        })
    }

    /// Asks the worker a question.
    ///
    /// Each conversation gets its own process; a task's entries share a process for many renders.
    fn ask<C: Serialize>(&self, question: &Question<'_, C>) -> Result<Reply, TemplateError> {
        let Executor::Worker { worker, permits, task } = &self.executor else {
            return Err(TemplateError::Busy { what: "no worker is running".into() });
        };
        let question = serde_json::to_vec(question).map_err(|error| invalid(error.to_string()))?;
        let answer = match self.style {
            Style::Chat => {
                let _permit = Permit::acquire(permits)?;
                let (_, answer) =
                    worker.begin(&question, &LIMITS, false).map_err(TemplateError::of_worker)?;
                answer.bytes
            }
            Style::Task => locked(task).ask(worker, &question)?,
        };
        serde_json::from_slice(&answer).map_err(|error| invalid(error.to_string()))
    }
}

impl TaskProcess {
    fn ask(&mut self, worker: &Worker, question: &[u8]) -> Result<Vec<u8>, TemplateError> {
        let cpu = LIMITS.cpu.min(TASK_TIME.saturating_sub(self.spent));
        if cpu.is_zero() {
            return Err(TemplateError::Exceeded { what: too_slow() });
        }
        let limits = Limits { cpu, ..LIMITS };
        let is_new = self.session.is_none() || self.renders >= RENDERS_PER_PROCESS;
        let answer = match self.once(worker, question, &limits) {
            // Memory left over from earlier renders must not count against this render, so retry it in a new
            // process.
            Err(WorkerError::Ended | WorkerError::Exceeded { limit: Limit::Memory, .. }) if !is_new => {
                self.once(worker, question, &limits)
            }
            answer => answer,
        };
        if matches!(answer, Err(WorkerError::Exceeded { limit: Limit::CpuTime, .. })) {
            self.spent += cpu;
        }
        let answer = answer.map_err(|error| match error {
            WorkerError::Exceeded { limit: Limit::CpuTime, .. } if cpu < LIMITS.cpu => {
                TemplateError::Exceeded { what: too_slow() }
            }
            error => TemplateError::of_worker(error),
        })?;
        self.spent += answer.cpu.saturating_sub(FREE_TIME);
        Ok(answer.bytes)
    }

    fn once(&mut self, worker: &Worker, question: &[u8], limits: &Limits) -> Result<Answer, WorkerError> {
        let current = self.session.take().filter(|_| self.renders < RENDERS_PER_PROCESS);
        let mut session = match current {
            Some(session) => session,
            None => {
                self.renders = 0;
                worker.session()?
            }
        };
        let answer = session.ask(question, limits, false)?;
        self.renders += 1;
        self.session = Some(session);
        Ok(answer)
    }
}

fn too_slow() -> String {
    format!("the templates exceeded the total CPU time limit of {TASK_TIME:?}")
}

impl TemplateError {
    fn of_worker(error: WorkerError) -> Self {
        match error {
            WorkerError::Refused { what } => Self::Invalid { what },
            WorkerError::Unavailable { what } => Self::Busy { what },
            error => Self::Exceeded { what: error.to_string() },
        }
    }
}

fn invalid(what: String) -> TemplateError {
    TemplateError::Invalid { what }
}

/// Runs `work` on a thread and waits until the deadline.
///
/// A thread that misses the deadline is abandoned, but holds its permit until it finishes.
#[cfg(not(target_family = "wasm"))]
fn within_deadline<T: Send + 'static>(
    permit: Permit,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, TemplateError> {
    use std::sync::mpsc::{RecvTimeoutError, sync_channel};

    let (sender, result) = sync_channel(1);
    let work = move || {
        let done = work();
        drop(permit);
        // Fails if the caller has given up.
        _ = sender.send(done);
    };
    let spawned = std::thread::Builder::new().stack_size(STACK_BYTES).spawn(work);
    spawned.map_err(|error| TemplateError::Busy { what: error.to_string() })?;
    result.recv_timeout(DEADLINE).map_err(|error| match error {
        RecvTimeoutError::Timeout => {
            TemplateError::Exceeded { what: format!("exceeded the time limit of {DEADLINE:?}") }
        }
        RecvTimeoutError::Disconnected => invalid("cannot be rendered".into()),
    })
}

/// Runs `work` directly, because there are no threads.
#[cfg(target_family = "wasm")]
fn within_deadline<T>(_: Permit, work: impl FnOnce() -> T) -> Result<T, TemplateError> {
    Ok(work())
}

/// Semaphore for concurrent renders.
#[derive(Debug, Default)]
struct RenderPermits {
    running: Mutex<usize>,
    has_ended: Condvar,
}

/// RAII permit from [`RenderPermits`].
struct Permit(Arc<RenderPermits>);

impl Permit {
    fn acquire(permits: &Arc<RenderPermits>) -> Result<Self, TemplateError> {
        let waited = permits
            .has_ended
            .wait_timeout_while(locked(&permits.running), MAX_WAIT, |running| *running >= MAX_CONCURRENT);
        let (mut running, waited) = waited.unwrap_or_else(PoisonError::into_inner);
        if waited.timed_out() {
            return Err(TemplateError::Busy { what: "too many renders are running".into() });
        }
        *running += 1;
        Ok(Self(Arc::clone(permits)))
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        *locked(&self.0.running) -= 1;
        self.0.has_ended.notify_one();
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // The value is consistent at every point, so poisoning is harmless.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
