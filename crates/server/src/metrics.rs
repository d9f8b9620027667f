//! The server's metrics, as Prometheus reads them. Labels never come from requests.

use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::{Registry, Unit};

use crate::log::dropped_lines;

/// Upper bounds in seconds.
const BUCKETS: [f64; 15] =
    [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0];

/// The numbers of one server.
#[derive(Debug)]
pub(crate) struct Metrics {
    registry: Registry,
    requests: Family<Answered, Counter>,
    rejected: Family<Rejected, Counter>,
    request_seconds: Histogram,
    pub(crate) requests_running: Gauge,
    pub(crate) requests_waiting: Gauge,
    pub(crate) cancelled: Counter,
    pub(crate) prompt_tokens: Counter,
    pub(crate) cached_tokens: Counter,
    pub(crate) generated_tokens: Counter,
    pub(crate) time_to_first_token: Histogram,
    pub(crate) inter_token: Histogram,
    pub(crate) queue: Histogram,
    pub(crate) batch_rows: Gauge,
    pub(crate) kv_tokens: Gauge,
    pub(crate) kv_tokens_kept: Gauge,
    pub(crate) kv_tokens_limit: Gauge,
    pub(crate) engine_steps: Counter,
    pub(crate) engine_panics: Counter,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Answered {
    route: &'static str,
    code: u16,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Rejected {
    reason: &'static str,
}

impl Metrics {
    /// Nothing counted, for a server of weights in `dtype`.
    pub(crate) fn new(dtype: &'static str) -> Self {
        let mut registry = Registry::with_prefix("gpt2");
        let mut register = Register { registry: &mut registry };
        let metrics = Self {
            requests: register.add("requests", "Requests that were answered"),
            rejected: register.add("rejected", "Requests that were refused, by reason"),
            request_seconds: register.seconds("request", "From a request to the end of its answer"),
            requests_running: register.add("requests_running", "Requests with a text that is being made"),
            requests_waiting: register.add("requests_waiting", "Requests that have not begun"),
            cancelled: register.add("cancelled", "Requests whose client left before the end"),
            prompt_tokens: register.add("prompt_tokens", "Tokens of prompts"),
            cached_tokens: register.add("cached_tokens", "Tokens of prompts that were computed before"),
            generated_tokens: register.add("generated_tokens", "Tokens of texts"),
            time_to_first_token: register.seconds("time_to_first_token", "From a request to its first token"),
            inter_token: register.seconds("inter_token", "From a token of a text to its next one"),
            queue: register.seconds("queue", "From a request to the end of its prompt"),
            batch_rows: register.add("batch_rows", "Texts that are being made"),
            kv_tokens: register
                .add("kv_tokens", "Tokens that have room for keys and values, of texts being made"),
            kv_tokens_kept: register.add(
                "kv_tokens_kept",
                "Tokens of ended texts whose keys and values are kept until the room is needed",
            ),
            kv_tokens_limit: register.add("kv_tokens_limit", "Tokens that there is room for"),
            engine_steps: register.add("engine_steps", "Steps of the engine"),
            engine_panics: register.add("engine_panics", "Steps that failed from within"),
            registry: Registry::default(),
        };
        let build = [("version", env!("CARGO_PKG_VERSION")), ("dtype", dtype)];
        registry.register("build", "The program", Info::new(build.to_vec()));
        let dropped =
            "Lines of the log that were not written: standard error was not read in time, or is gone";
        registry.register("log_lines_dropped", dropped, dropped_lines());
        Self { registry, ..metrics }
    }

    /// Counts an answer. `route` is the server's name of a route, not what was asked for.
    pub(crate) fn count_request(&self, route: &'static str, code: u16, time: Duration) {
        self.requests.get_or_create(&Answered { route, code }).inc();
        self.request_seconds.observe(time.as_secs_f64());
    }

    /// Counts a refusal for one of the server's own reasons, such as `queue_full`.
    pub(crate) fn reject(&self, reason: &'static str) {
        self.rejected.get_or_create(&Rejected { reason }).inc();
    }

    /// All numbers in the text format of Prometheus and `OpenMetrics`.
    pub(crate) fn text(&self) -> String {
        let mut text = String::new();
        // Writing to a string does not fail.
        encode(&mut text, &self.registry).map_or_else(|_| String::new(), |()| text)
    }
}

struct Register<'a> {
    registry: &'a mut Registry,
}

impl Register<'_> {
    fn add<M: prometheus_client::registry::Metric + Default + Clone>(&mut self, name: &str, help: &str) -> M {
        let metric = M::default();
        self.registry.register(name, help, metric.clone());
        metric
    }

    fn seconds(&mut self, name: &str, help: &str) -> Histogram {
        let histogram = Histogram::new(BUCKETS);
        self.registry.register_with_unit(name, help, Unit::Seconds, histogram.clone());
        histogram
    }
}
