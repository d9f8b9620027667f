#![doc = include_str!("../README.md")]
//!
//! Start with [`Server`]. [`Listening`] binds the address before the model is loaded. Events go to the
//! program's `tracing` subscriber, which must not block: some events come from the thread that serves all
//! connections. [`LogFormat`] writes them to standard error through a bounded queue.

mod analyses;
mod backend;
mod busy;
mod concurrency;
mod engine;
mod error;
mod fault;
mod health;
mod http;
mod log;
mod metrics;
mod options;
mod page;
mod signals;
mod threads;

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use candle_gpt2_api::ServedModel;
pub use candle_gpt2_api::{ApiOptions, ChatTemplateChoice, Limits};
pub use candle_gpt2_engine::SecretString;
use candle_gpt2_engine::{Classifier, LoadedModel};
use tokio::runtime::{Builder, Runtime};

use backend::{Backend, Labels};
use engine::{Engine, EngineOptions};
pub use error::ServerError;
pub use health::check_health;
use http::{Listener, Shared};
pub use log::LogFormat;
use metrics::Metrics;
pub use options::{ServerOptions, Timeouts};
use signals::{Signals, Stops};
use threads::THREADS;

/// Model to serve.
///
/// ```
/// use candle_gpt2_engine::{ModelOptions, Silent};
/// use candle_gpt2_server::Model;
///
/// let loaded = ModelOptions::default().open(&Silent)?.load(&Silent)?;
/// assert!(matches!(Model::from(loaded), Model::Texts(_)));
/// # Ok::<(), candle_gpt2_engine::EngineError>(())
/// ```
#[derive(Debug)]
pub enum Model {
    /// Language model, which generates text.
    Texts(Box<LoadedModel>),
    /// Text or token classifier. The server then has no web page.
    Labels(Box<Classifier>),
}

impl From<LoadedModel> for Model {
    fn from(model: LoadedModel) -> Self {
        Self::Texts(model.into())
    }
}

impl From<Classifier> for Model {
    fn from(classifier: Classifier) -> Self {
        Self::Labels(classifier.into())
    }
}

/// Listening server.
///
/// See [`Handle`] for an example.
pub struct Server {
    runtime: Runtime,
    listener: Listener,
    shared: Arc<Shared>,
    stops: Arc<Stops>,
}

/// Handle that stops a server from another thread. Clones stop the same server.
///
/// ```
/// use candle_gpt2_engine::{ModelOptions, Silent};
/// use candle_gpt2_server::{Server, ServerOptions};
///
/// let model = ModelOptions::default().open(&Silent)?.load(&Silent)?;
/// let server = Server::bind(model, ServerOptions { port: 0, ..ServerOptions::default() })?;
/// let handle = server.handle();
/// let serving = std::thread::spawn(move || server.run());
/// handle.stop();
/// assert!(serving.join().is_ok_and(|ended| ended.is_ok()));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
pub struct Handle {
    stops: Arc<Stops>,
}

impl Handle {
    /// Stops the server gracefully, as SIGTERM does.
    ///
    /// The server accepts no more connections. Running requests finish, or are cut off after
    /// [`Timeouts::drain`]. A second call stops the server immediately.
    pub fn stop(&self) {
        self.stops.send_modify(|stops| *stops += 1);
    }
}

/// Server address, bound before the model is loaded so that clients can connect and wait.
///
/// ```
/// use candle_gpt2_engine::{ModelOptions, Silent};
/// use candle_gpt2_server::{Listening, ServerOptions};
///
/// // Whether the port is free is known before the model is loaded.
/// let listening = Listening::new(ServerOptions { port: 0, ..ServerOptions::default() })?;
/// let server = listening.start(ModelOptions::default().open(&Silent)?.load(&Silent)?)?;
/// assert!(server.address().starts_with("http://127.0.0.1:"));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Listening {
    runtime: Runtime,
    listener: Listener,
    options: ServerOptions,
    stops: Arc<Stops>,
    signals: Option<Signals>,
}

impl Listening {
    /// Validates the options and starts listening.
    ///
    /// # Errors
    /// If an option is invalid or the server cannot listen on the address.
    pub fn new(options: ServerOptions) -> Result<Self, ServerError> {
        options.check()?;
        let mut builder = Builder::new_current_thread();
        let runtime =
            builder.enable_all().max_blocking_threads(THREADS).build().map_err(ServerError::System)?;
        let stops = Arc::new(Stops::new(0));
        let signals = options.signals.then(|| Signals::install(&stops)).transpose();
        let signals = signals.map_err(ServerError::System)?;
        let bind = || {
            let _within = runtime.enter();
            Listener::bind(&options)
        };
        let listener = match &signals {
            Some(signals) => signals.while_binding(options.unix_socket.clone(), bind),
            None => bind(),
        }?;
        Ok(Self { runtime, listener, options, stops, signals })
    }

    /// API settings that depend on the model.
    pub fn api(&mut self) -> &mut ApiOptions {
        &mut self.options.api
    }

    /// Starts the engine.
    ///
    /// # Errors
    /// If the model cannot be served: its KV cache does not fit into memory, or its defaults or chat template
    /// are unusable.
    pub fn start(self, model: impl Into<Model>) -> Result<Server, ServerError> {
        let Self { runtime, listener, mut options, stops, signals } = self;
        let (backend, served, metrics) = match model.into() {
            Model::Texts(model) => {
                options.check_for(model.config())?;
                let served = ServedModel::new(&model, api_options(&options))?;
                let metrics = Arc::new(Metrics::new(model.weight_type()));
                let engine = start_engine(*model, &options, Arc::clone(&metrics))?;
                (Backend::Texts(engine), served, metrics)
            }
            Model::Labels(classifier) => {
                options.page = false;
                let served = ServedModel::of_classifier(&classifier, api_options(&options));
                let metrics = Arc::new(Metrics::new(classifier.weight_type()));
                let (parallel, queue, longest) = (options.parallel, options.queue, options.timeouts.queue);
                let labels = Labels::new(*classifier, parallel, queue, longest);
                (Backend::Labels(labels), served, metrics)
            }
        };
        let shared = Arc::new(Shared::new(options, &listener, backend, served, metrics));
        if let Some(signals) = signals {
            signals.serve();
        }
        Ok(Server { runtime, listener, shared, stops })
    }
}

impl Server {
    /// Starts listening and starts the engine: [`Listening::new`] followed by [`Listening::start`].
    ///
    /// # Errors
    /// Same as [`Listening::new`] and [`Listening::start`].
    pub fn bind(model: impl Into<Model>, options: ServerOptions) -> Result<Self, ServerError> {
        Listening::new(options)?.start(model)
    }

    /// Address of the server: `http://127.0.0.1:8080`, or `unix:` and a path.
    pub fn address(&self) -> String {
        self.listener.address()
    }

    /// Handle that stops the server from another thread.
    pub fn handle(&self) -> Handle {
        Handle { stops: Arc::clone(&self.stops) }
    }

    /// Serves requests until a signal or a [`Handle`] stops the server.
    ///
    /// # Errors
    /// If the engine fails repeatedly, or calls did not finish in time and were cut off.
    pub fn run(self) -> Result<(), ServerError> {
        let ended = self.runtime.block_on(http::run(self.shared, self.listener, self.stops));
        // Does not wait for requests that request threads are still reading.
        self.runtime.shutdown_background();
        ended
    }
}

fn api_options(options: &ServerOptions) -> ApiOptions {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO);
    let mut api = ApiOptions { created: now.as_secs(), parallel: options.parallel, ..options.api.clone() };
    // A request with more prompts than the queue holds could never run, so it is invalid.
    api.limits.max_prompts = api.limits.max_prompts.min(options.queue);
    api
}

fn start_engine(
    model: LoadedModel,
    options: &ServerOptions,
    metrics: Arc<Metrics>,
) -> Result<Engine, ServerError> {
    let contexts = options.parallel.saturating_mul(model.config().n_positions);
    let engine_options = EngineOptions {
        parallel: options.parallel,
        queue: options.queue,
        kv_tokens: options.kv_tokens.unwrap_or(contexts),
        prefill_chunk: options.prefill_chunk,
        queue_timeout: options.timeouts.queue,
    };
    model.check_kv_room(options.parallel, engine_options.kv_tokens)?;
    Engine::start(model, engine_options, metrics).map_err(|error| ServerError::Engine(error.into()))
}
