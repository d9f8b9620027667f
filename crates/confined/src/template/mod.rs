//! Jinja templates of checkpoints and of evaluation tasks: untrusted programs that turn a conversation or an entry into text.
//!
//! With a worker they are parsed and rendered in child processes. Without one, a thread of this process does it: nesting is
//! bounded before the parser runs, steps and output are bounded, and the caller waits no longer than a deadline.

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

/// Limits of one answer in a worker, and of parsing the templates that are known from the start.
const LIMITS: Limits =
    Limits { cpu: Duration::from_secs(2), memory_bytes: 256 << 20, wall: Duration::from_secs(10) };
/// CPU time of all renders of a task together, beyond [`FREE_TIME`] for each.
const TASK_TIME: Duration = Duration::from_secs(3);
/// CPU time of a render that counts toward no sum. Usual templates take less than a tenth of it.
const FREE_TIME: Duration = Duration::from_millis(2);
/// Renders of a task in one process. What a template leaks goes with the process.
const RENDERS_PER_PROCESS: usize = 256;
/// Conversations that are rendered at the same time. Each may take all of its memory.
const MOST_AT_ONCE: usize = 4;
/// Longest wait for one of them to end.
const LONGEST_WAIT: Duration = Duration::from_secs(5);
/// Deadline of a render on a thread of this process.
#[cfg(not(target_family = "wasm"))]
const DEADLINE: Duration = Duration::from_secs(5);
/// Stack of that thread: what a template nests in values is not bounded there.
#[cfg(not(target_family = "wasm"))]
const STACK_BYTES: usize = 64 << 20;

/// Stack in a worker: an honest template needs a fraction of a megabyte.
const WORKER_STACK_BYTES: usize = 8 << 20;

/// The templates that a worker renders.
///
/// ```
/// // In a program's `main`, before it starts a thread:
/// if std::env::args().nth(1).as_deref() == Some("confined") {
///     candle_gpt2_confined::run_worker(&[candle_gpt2_confined::TEMPLATES])?;
/// }
/// # Ok::<(), std::io::Error>(())
/// ```
pub const TEMPLATES: Service = Service { name: "templates", stack_bytes: WORKER_STACK_BYTES, prepare };

/// Failure of a template.
///
/// [`Templates::render`] returns it; see there for an example.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum TemplateError {
    /// The template is wrong, or does not fit what it is rendered with.
    #[error("{what}")]
    Wrong {
        /// What is wrong.
        what: String,
    },
    /// It exceeds a limit.
    #[error("{what}")]
    Exceeded {
        /// The limit.
        what: String,
    },
    /// Others are being rendered, or the system has no process for it. A retry may succeed.
    #[error("templates cannot be rendered: {what}; retry")]
    Busy {
        /// What is missing.
        what: String,
    },
}

/// Templates of one source: those of a checkpoint or of a task.
///
/// ```
/// use candle_gpt2_confined::{Style, TemplateError, Templates};
///
/// let templates = Templates::new(Style::Chat, &["Hello, {{ name }}!"], None)?;
/// let context = serde_json::json!({ "name": "Mia" });
/// assert_eq!(templates.render("Hello, {{ name }}!", &context)?, "Hello, Mia!");
/// assert!(matches!(templates.render("{{ name.x.y }}", &context), Err(TemplateError::Wrong { .. })));
/// # Ok::<(), TemplateError>(())
/// ```
#[derive(Debug)]
pub struct Templates {
    style: Style,
    place: Place,
}

/// Where templates are rendered.
#[derive(Debug)]
enum Place {
    Here { engine: Arc<Mutex<Engine>>, turns: Arc<Turns> },
    Worker { worker: Box<Worker>, turns: Arc<Turns>, task: Mutex<TaskProcess> },
}

/// The process that renders a task's entries, and what all of them have taken.
#[derive(Debug, Default)]
struct TaskProcess {
    session: Option<Session>,
    /// Its renders.
    renders: usize,
    /// CPU time of all renders beyond [`FREE_TIME`] each.
    spent: Duration,
}

/// Source of the program: the templates that are parsed beforehand.
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

/// What became of a question.
#[derive(Debug, Serialize, Deserialize)]
enum Rendered {
    Text(String),
    List(Option<Vec<String>>),
    Wrong(String),
}

/// Prepares the program of [`TEMPLATES`].
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
            Ok(OwnedQuestion::List { text }) => Rendered::List(self.list(&text)),
            Err(error) => Rendered::Wrong(error.to_string()),
        };
        serde_json::to_vec(&answer).unwrap_or_default()
    }
}

impl Engine {
    fn answer_render(&mut self, template: &str, context: Value) -> Rendered {
        let rendered = self.add(template.to_owned()).and_then(|()| self.render(template, context));
        rendered.map_or_else(Rendered::Wrong, Rendered::Text)
    }
}

impl Templates {
    /// Templates of this style, which `program` parses and renders in child processes; without it this process does. Those of
    /// `sources` are parsed beforehand, so that they are checked, and rendered sooner.
    ///
    /// # Errors
    /// If one of `sources` is wrong or takes too much to parse, or no process can be started.
    pub fn new(
        style: Style,
        sources: &[&str],
        program: Option<&WorkerProgram>,
    ) -> Result<Self, TemplateError> {
        let turns = Arc::<Turns>::default();
        let templates = sources.iter().map(|source| (*source).to_owned());
        let Some(program) = program else {
            let mut engine = Engine::new(style).map_err(wrong)?;
            let templates: Vec<String> = templates.collect();
            let parse = move || {
                let parsed = templates.iter().try_for_each(|template| {
                    nesting::check(template)?;
                    engine.add(template.clone())
                });
                parsed.map(|()| engine)
            };
            let engine = within_deadline(Turn::take(&turns)?, parse)?.map_err(wrong)?;
            return Ok(Self { style, place: Place::Here { engine: Arc::new(Mutex::new(engine)), turns } });
        };
        let source = Source { style, templates: templates.collect() };
        let source = serde_json::to_vec(&source).map_err(|error| wrong(error.to_string()))?;
        let is_parsed_now = !sources.is_empty();
        let worker = Worker::new(program.clone(), TEMPLATES.name, LIMITS, move || Ok(source.clone()));
        let worker = Box::new(worker);
        if is_parsed_now {
            worker.session().map_err(TemplateError::of_worker)?;
        }
        Ok(Self { style, place: Place::Worker { worker, turns, task: Mutex::default() } })
    }

    /// Renders a template.
    ///
    /// # Errors
    /// If the template is wrong, does not fit the context or exceeds a limit, or others are being rendered that take long.
    pub fn render(&self, template: &str, context: &impl Serialize) -> Result<String, TemplateError> {
        let rendered = match &self.place {
            Place::Here { engine, turns } => {
                let (template, context) = (template.to_owned(), Value::from(Serde(context)));
                self.here(engine, turns, move |engine| match nesting::check(&template) {
                    Ok(()) => engine.answer_render(&template, context),
                    Err(what) => Rendered::Wrong(what),
                })?
            }
            Place::Worker { .. } => self.ask(&Question::Render { template, context })?,
        };
        match rendered {
            Rendered::Text(text) => Ok(text),
            Rendered::Wrong(what) => Err(wrong(what)),
            Rendered::List(_) => Err(wrong("a list instead of text".into())),
        }
    }

    /// The texts of a list that `text` writes as Python does, such as `['yes', 'no']`; `None` if it is no such list.
    ///
    /// # Errors
    /// If it exceeds a limit, or others are being read that take long.
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
        let listed = match &self.place {
            Place::Here { engine, turns } => {
                let text = text.to_owned();
                self.here(engine, turns, move |engine| {
                    Rendered::List(nesting::check_expression(&text).ok().and_then(|()| engine.list(&text)))
                })?
            }
            Place::Worker { .. } => self.ask(&Question::List::<()> { text })?,
        };
        Ok(match listed {
            Rendered::List(list) => list,
            Rendered::Text(_) | Rendered::Wrong(_) => None,
        })
    }

    /// Runs work on a thread of this process.
    fn here(
        &self,
        engine: &Arc<Mutex<Engine>>,
        turns: &Arc<Turns>,
        work: impl FnOnce(&mut Engine) -> Rendered + Send + 'static,
    ) -> Result<Rendered, TemplateError> {
        let engine = Arc::clone(engine);
        let turn = Turn::take(turns)?;
        within_deadline(turn, move || {
            // A copy for each render: one that does not end blocks no other.
            let mut own = locked(&engine).clone();
            work(&mut own)
        })
    }

    /// Asks the worker, in a process of its own for a conversation, or in one for many entries of a task.
    fn ask<C: Serialize>(&self, question: &Question<'_, C>) -> Result<Rendered, TemplateError> {
        let Place::Worker { worker, turns, task } = &self.place else {
            return Err(TemplateError::Busy { what: "there is no worker".into() });
        };
        let question = serde_json::to_vec(question).map_err(|error| wrong(error.to_string()))?;
        let answer = match self.style {
            Style::Chat => {
                let _turn = Turn::take(turns)?;
                let (_, answer) =
                    worker.begin(&question, &LIMITS, false).map_err(TemplateError::of_worker)?;
                answer.bytes
            }
            Style::Task => locked(task).ask(worker, &question)?,
        };
        serde_json::from_slice(&answer).map_err(|error| wrong(error.to_string()))
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
            // What earlier renders have left in the process does not count against this one.
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
        let kept = self.session.take().filter(|_| self.renders < RENDERS_PER_PROCESS);
        let mut session = match kept {
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
    format!("the templates take more than {TASK_TIME:?} of CPU time in all")
}

impl TemplateError {
    fn of_worker(error: WorkerError) -> Self {
        match error {
            WorkerError::Refused { what } => Self::Wrong { what },
            WorkerError::Unavailable { what } => Self::Busy { what },
            error => Self::Exceeded { what: error.to_string() },
        }
    }
}

fn wrong(what: String) -> TemplateError {
    TemplateError::Wrong { what }
}

/// Runs work on a thread, which is left to itself after the deadline and keeps its turn.
#[cfg(not(target_family = "wasm"))]
fn within_deadline<T: Send + 'static>(
    turn: Turn,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, TemplateError> {
    use std::sync::mpsc::{RecvTimeoutError, sync_channel};

    let (sender, result) = sync_channel(1);
    let work = move || {
        let done = work();
        drop(turn);
        // The caller may have gone.
        _ = sender.send(done);
    };
    let spawned = std::thread::Builder::new().stack_size(STACK_BYTES).spawn(work);
    spawned.map_err(|error| TemplateError::Busy { what: error.to_string() })?;
    result.recv_timeout(DEADLINE).map_err(|error| match error {
        RecvTimeoutError::Timeout => {
            TemplateError::Exceeded { what: format!("it takes longer than {DEADLINE:?}") }
        }
        RecvTimeoutError::Disconnected => wrong("it cannot be rendered".into()),
    })
}

/// Runs work: there are no threads.
#[cfg(target_family = "wasm")]
fn within_deadline<T>(_: Turn, work: impl FnOnce() -> T) -> Result<T, TemplateError> {
    Ok(work())
}

/// Concurrent renders.
#[derive(Debug, Default)]
struct Turns {
    running: Mutex<usize>,
    has_ended: Condvar,
}

/// RAII guard of one of them.
struct Turn(Arc<Turns>);

impl Turn {
    fn take(turns: &Arc<Turns>) -> Result<Self, TemplateError> {
        let waited = turns
            .has_ended
            .wait_timeout_while(locked(&turns.running), LONGEST_WAIT, |running| *running >= MOST_AT_ONCE);
        let (mut running, waited) = waited.unwrap_or_else(PoisonError::into_inner);
        if waited.timed_out() {
            return Err(TemplateError::Busy { what: "others take long".into() });
        }
        *running += 1;
        Ok(Self(Arc::clone(turns)))
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        *locked(&self.0.running) -= 1;
        self.0.has_ended.notify_one();
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Each value is whole at any moment.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
