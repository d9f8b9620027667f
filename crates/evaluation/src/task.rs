//! One protocol in a run, with its data and the results of an interrupted run.

use std::path::Path;
use std::time::Instant;

use candle_gpt2_engine::{LoadedModel, Reporter, Unit, device_name};

use crate::asked::{Kind, RequestedProtocol};
use crate::{
    BaseReport, Comparison, Data, DataError, DatasetReport, EvaluationError, ItemLog, ItemResult, Kl,
    KlWindow, LogHead, Metric, MetricReport, ModelFacts, Prepared, Protocol, Report, Setting, Shots, Size,
    logged_results,
};

/// The evaluated model, and the base model for `kl`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ModelPair<T> {
    pub(crate) model: T,
    pub(crate) base: Option<T>,
}

/// Data with its origin.
pub(crate) struct Source<'a> {
    pub(crate) data: &'a Data,
    /// Path as the caller supplied it.
    pub(crate) path: String,
    /// Commit of the dataset on the Hub.
    pub(crate) revision: Option<String>,
}

/// A protocol whose data has been read and checked.
#[derive(Debug)]
pub(crate) struct Task {
    head: LogHead,
    /// Model name as the caller supplied it.
    model: String,
    base: Option<BaseReport>,
    asked: RequestedProtocol,
    /// Data section of the report, before any items are evaluated.
    dataset: DatasetReport,
    num_fewshot: usize,
    /// Path of the log to compare with, the summary of its run, and the logged results.
    against: Option<(String, String, Vec<ItemResult>)>,
    workload: Workload,
}

/// Questions of a task, with the results of an interrupted run.
#[derive(Debug)]
enum Workload {
    Items { prepared: Prepared, done: Vec<ItemResult> },
    Windows { kl: Kl, done: Vec<KlWindow> },
}

/// Results of a task.
struct TaskResult {
    metrics: Vec<Metric>,
    items: usize,
    /// Results of the items; empty for `kl`.
    results: Vec<ItemResult>,
    tokens_read: u64,
    tokens_scored: usize,
    seconds: f64,
}

impl Task {
    /// Prepares the data for the model.
    pub(crate) fn prepare(
        name: &str,
        asked: &RequestedProtocol,
        source: Source<'_>,
        setting: &Setting<'_>,
        sides: ModelPair<&ModelFacts<'_>>,
    ) -> Result<Self, EvaluationError> {
        let mut run = sides.model.run.clone();
        if let Some(context) = setting.context {
            run.push_str(&format!(", context {context}"));
        }
        if let Some(Shots { count, seed, .. }) = setting.shots {
            run.push_str(&format!(", {count} examples by seed {seed}"));
        }
        let items = |prepared| (Workload::Items { prepared, done: Vec::new() }, None);
        let (workload, base) = match (&asked.kind, sides.base) {
            (Kind::Protocol, _) => items((asked.protocol.prepare)(source.data, setting)?),
            (Kind::Task(task), _) => items(task.prepare(source.data, setting)?),
            (Kind::Kl, Some(base)) => {
                let kl = Kl::prepare(source.data, setting)?;
                kl.check_base(base.vocabulary, setting.vocabulary)?;
                run.push_str(&format!(", compared with {} in {}", base.name, base.weight_type));
                let base = BaseReport { model: base.name.clone(), dtype: base.weight_type };
                (Workload::Windows { kl, done: Vec::new() }, Some(base))
            }
            (Kind::Kl, None) => return Err(EvaluationError::NoBase),
        };
        let Source { data, path, revision } = source;
        let of_hub = revision.as_ref().map(|_| path.as_str());
        let published = &asked.protocol.dataset;
        let dataset = DatasetReport {
            name: published.name,
            known: published.is_published(of_hub, data.sha256()),
            path,
            revision,
            sha256: data.sha256().to_owned(),
            items: 0,
            limit: setting.limit,
        };
        Ok(Self {
            head: LogHead { protocol: asked.name(name), run },
            model: sides.model.name.clone(),
            base,
            asked: asked.clone(),
            dataset,
            num_fewshot: setting.shots.map_or(0, |shots| shots.count),
            against: None,
            workload,
        })
    }

    /// Sets up the comparison with the log of another run, if the task has items.
    pub(crate) fn compare_with(&mut self, path: &Path) -> Result<(), EvaluationError> {
        if let Workload::Items { prepared, .. } = &self.workload {
            let (run, results) = logged_results(path, &self.head.protocol, prepared)?;
            self.against = Some((path.display().to_string(), run, results));
        }
        Ok(())
    }

    /// Adds notes on the data, and rejects data that cannot be evaluated.
    ///
    /// Damaged data is accepted only if a log can keep the results of the items before the damage.
    pub(crate) fn check(&self, has_log: bool, notes: &mut Vec<String>) -> Result<(), EvaluationError> {
        let name = &self.head.protocol;
        let (cut, own) = self.workload.notes();
        if cut > 0 {
            notes.push(format!(
                "{name}: {cut} items are longer than the context and are truncated at the beginning"
            ));
        }
        notes.extend(own.iter().map(|note| format!("{name}: {note}")));
        match (self.workload.items(), self.workload.damaged()) {
            ((items, _), Some(error)) if items > 0 && has_log => {
                notes.push(format!(
                    "{name}: {error}; the {items} items before this entry are evaluated and logged"
                ));
                Ok(())
            }
            (_, Some(error)) => Err(error.clone().into()),
            ((0, _), None) => {
                let what = format!("the data contains no items for `{name}`");
                Err(EvaluationError::Unusable { file: self.dataset.path.clone(), what })
            }
            _ => Ok(()),
        }
    }

    /// Takes the results of an interrupted run from the log.
    pub(crate) fn take_done(
        &mut self,
        log: &mut ItemLog,
        notes: &mut Vec<String>,
    ) -> Result<(), EvaluationError> {
        match &mut self.workload {
            Workload::Items { prepared, done, .. } => *done = log.results(&self.head, prepared)?,
            Workload::Windows { kl, done } => {
                *done = log.take(&self.head, |index, window: &KlWindow| kl.check_result(index, window))?;
            }
        }
        if let (items, done @ 1..) = self.workload.items() {
            notes.push(format!("{}: {done} of {items} items are in the log", self.head.protocol));
        }
        Ok(())
    }

    /// Evaluates the remaining items and reports the metrics; returns an error if data is damaged.
    pub(crate) fn evaluate(
        self,
        models: ModelPair<&LoadedModel>,
        log: Option<&mut ItemLog>,
        reporter: &dyn Reporter,
    ) -> Result<Report, EvaluationError> {
        let Self { head, model: name, base, asked, dataset, num_fewshot, against, workload } = self;
        let (cut, notes) = workload.notes();
        let notes = notes.to_vec();
        let measured = workload.measure(&asked, models, &head, log, reporter)?;
        let model = models.model.model();
        let size = Size::of(model.config());
        let Protocol { published, source, .. } = asked.protocol;
        let report = |metric: &Metric| MetricReport::new(metric, &head.protocol, published, size);
        let metrics = measured.metrics.iter().map(report).collect();
        let against = against.map(|(path, run, there)| Comparison::new(path, run, &measured.results, &there));
        Ok(Report {
            model: name,
            dtype: models.model.weight_type(),
            kv_dtype: model.kv_dtype().name(),
            device: device_name(model.device()),
            base,
            protocol: head.protocol,
            protocol_source: source,
            num_fewshot,
            dataset: DatasetReport { items: measured.items, ..dataset },
            metrics,
            against,
            cut,
            notes,
            tokens_read: measured.tokens_read,
            tokens_scored: measured.tokens_scored as u64,
            seconds: measured.seconds,
            version: Report::VERSION,
        })
    }
}

impl Workload {
    /// Number of items, and number of completed items.
    fn items(&self) -> (usize, usize) {
        match self {
            Self::Items { prepared, done, .. } => (prepared.items.len(), done.len()),
            Self::Windows { kl, done } => (kl.windows(), done.len()),
        }
    }

    fn damaged(&self) -> Option<&DataError> {
        match self {
            Self::Items { prepared, .. } => prepared.damaged.as_ref(),
            Self::Windows { .. } => None,
        }
    }

    /// Number of truncated items, and notes on the data.
    fn notes(&self) -> (usize, &[String]) {
        match self {
            Self::Items { prepared, .. } => (prepared.truncated_count, &prepared.notes),
            Self::Windows { kl, .. } => (0, kl.notes()),
        }
    }

    /// Runs the models, appends their results to the log, and computes the metrics.
    fn measure(
        self,
        asked: &RequestedProtocol,
        models: ModelPair<&LoadedModel>,
        head: &LogHead,
        log: Option<&mut ItemLog>,
        reporter: &dyn Reporter,
    ) -> Result<TaskResult, EvaluationError> {
        let done = self.items().1;
        let tokens_read = match &self {
            Self::Items { prepared, .. } => prepared.tokens_to_read(done),
            Self::Windows { kl, .. } => kl.tokens_to_read(done),
        };
        let bar = reporter.start(&head.protocol, tokens_read, Unit::Items("tokens"));
        let mut sink = ResultSink { head, log, reporter };
        let start = Instant::now();
        let seconds = || start.elapsed().as_secs_f64();
        // An interruption can surface as a computation error of another kind.
        let unless_interrupted = |error| match reporter.is_interrupted() {
            true => EvaluationError::Interrupted,
            false => error,
        };
        match self {
            Self::Items { prepared, done: results } => {
                let mut keep = |result: &ItemResult| sink.add(result);
                let results = prepared.evaluate(models.model, results, &*bar, &mut keep);
                let (results, seconds) = (results.map_err(unless_interrupted)?, seconds());
                if let Some(error) = prepared.damaged {
                    return Err(error.into());
                }
                let choices = results[done..].iter().flat_map(|result| &result.choices);
                let tokens_scored = choices.map(|choice| choice.tokens).sum();
                let metrics = asked.measure(&prepared.totals, &results);
                let items = results.len();
                Ok(TaskResult { metrics, items, results, tokens_read, tokens_scored, seconds })
            }
            Self::Windows { kl, done: windows } => {
                let base = models.base.ok_or(EvaluationError::NoBase)?;
                let mut keep = |window: &KlWindow| sink.add(window);
                let windows = kl.evaluate(base, models.model, windows, &*bar, &mut keep);
                let (windows, seconds) = (windows.map_err(unless_interrupted)?, seconds());
                let tokens_scored = windows[done..].iter().map(|window| window.tokens.len()).sum();
                let metrics = Kl::measure(&windows);
                let (items, results) = (windows.len(), Vec::new());
                Ok(TaskResult { metrics, items, results, tokens_read, tokens_scored, seconds })
            }
        }
    }
}

/// Destination of each result.
struct ResultSink<'a> {
    head: &'a LogHead,
    log: Option<&'a mut ItemLog>,
    reporter: &'a dyn Reporter,
}

impl ResultSink<'_> {
    /// Appends a result to the log, if there is one, and then checks for an interruption.
    fn add(&mut self, result: &impl serde::Serialize) -> Result<(), EvaluationError> {
        if let Some(log) = &mut self.log {
            log.append(self.head, result)?;
        }
        match self.reporter.is_interrupted() {
            true => Err(EvaluationError::Interrupted),
            false => Ok(()),
        }
    }
}
