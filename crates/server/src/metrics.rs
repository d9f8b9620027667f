//! Server metrics in Prometheus format. Labels never contain text from requests.

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

/// Upper bounds of the histogram buckets, in seconds.
const BUCKETS: [f64; 15] =
    [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0];

/// Metrics for one server.
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
    /// Creates zeroed metrics for a server whose weights are in `dtype`.
    pub(crate) fn new(dtype: &'static str) -> Self {
        let mut registry = Registry::with_prefix("gpt2");
        let mut register = Register { registry: &mut registry };
        let metrics = Self {
            requests: register.add("requests", "Requests answered, by route and status code"),
            rejected: register.add("rejected", "Requests rejected by the server, by reason"),
            request_seconds: register.seconds("request", "Time from a request to the end of its response"),
            requests_running: register.add("requests_running", "Requests being processed"),
            requests_waiting: register.add("requests_waiting", "Requests waiting in the queue"),
            cancelled: register.add("cancelled", "Requests whose client disconnected early"),
            prompt_tokens: register.add("prompt_tokens", "Prompt tokens"),
            cached_tokens: register.add("cached_tokens", "Prompt tokens reused from the KV cache"),
            generated_tokens: register.add("generated_tokens", "Generated tokens"),
            time_to_first_token: register
                .seconds("time_to_first_token", "Time from a request to its first token"),
            inter_token: register.seconds("inter_token", "Time between two tokens of a completion"),
            queue: register.seconds("queue", "Time from a request to the end of its prefill"),
            batch_rows: register.add("batch_rows", "Sequences in the batch"),
            kv_tokens: register.add("kv_tokens", "KV cache tokens reserved for running sequences"),
            kv_tokens_kept: register.add(
                "kv_tokens_kept",
                "KV cache tokens of finished sequences, kept until the memory is needed",
            ),
            kv_tokens_limit: register.add("kv_tokens_limit", "Capacity of the KV cache in tokens"),
            engine_steps: register.add("engine_steps", "Engine steps"),
            engine_panics: register.add("engine_panics", "Panics in the engine"),
            registry: Registry::default(),
        };
        let build = [("version", env!("CARGO_PKG_VERSION")), ("dtype", dtype)];
        registry.register("build", "Program version and weight dtype", Info::new(build.to_vec()));
        let dropped = "Log lines dropped because standard error was not read in time or is closed";
        registry.register("log_lines_dropped", dropped, dropped_lines());
        Self { registry, ..metrics }
    }

    /// Counts a response; `route` is the server's name for the route, not the requested path.
    pub(crate) fn count_request(&self, route: &'static str, code: u16, time: Duration) {
        self.requests.get_or_create(&Answered { route, code }).inc();
        self.request_seconds.observe(time.as_secs_f64());
    }

    /// Counts a rejection by the server, with a reason such as `queue_full`.
    pub(crate) fn reject(&self, reason: &'static str) {
        self.rejected.get_or_create(&Rejected { reason }).inc();
    }

    /// Formats all metrics as Prometheus and `OpenMetrics` text.
    pub(crate) fn text(&self) -> String {
        let mut text = String::new();
        // Writing to a string cannot fail.
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
