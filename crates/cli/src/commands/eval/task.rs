//! One protocol of a call: its data, what of them is done, and what becomes of the rest.

use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Instant;

use anyhow::{Context, Result};
use gpt2_engine::{HubOptions, LoadedModel, ModelOptions, Opened, Reporter, Unit, dataset_file, device_name};
use gpt2_evaluation::{
    BaseReport, Comparison, Data, DataError, DatasetReport, EvaluationError, ItemLog, ItemResult, Kl,
    KlWindow, LogHead, Metric, MetricReport, Prepared, Protocol, Report, Setting, Size, logged_results,
    named,
};

use super::EvalArguments;
use crate::exit::UsageError;
use crate::progress::Terminal;

/// The data of `kl`.
const ANY_TEXT: &str = "any text in UTF-8";

/// What is asked for by a name.
pub(super) enum Asked {
    /// A protocol, with the number at the end of its name.
    Protocol(&'static Protocol, Option<usize>),
    /// Two models side by side.
    Kl,
}

impl Asked {
    pub(super) fn named(name: &str) -> Result<Self, EvaluationError> {
        if name == Kl::NAME {
            return Ok(Self::Kl);
        }
        named(name).map(|(protocol, number)| Self::Protocol(protocol, number))
    }

    /// Whether the length of its windows is the caller's to choose.
    pub(super) fn takes_context(&self) -> bool {
        match self {
            Self::Protocol(protocol, _) => protocol.name == "wikitext:llama.cpp",
            Self::Kl => true,
        }
    }
}

/// The model that `kl` compares with, before and after its weights are read.
pub(super) struct Base<M = Opened> {
    pub(super) name: String,
    pub(super) model: M,
}

impl Base {
    pub(super) fn open(options: &ModelOptions) -> Result<Self> {
        Ok(Self { name: options.model.display().to_string(), model: options.open(&Terminal)? })
    }

    pub(super) fn load(self) -> Result<Base<LoadedModel>> {
        Ok(Base { name: self.name, model: self.model.load(&Terminal)? })
    }
}

/// What every protocol of a call is measured with.
pub(super) struct Run<'a> {
    pub(super) name: &'a str,
    pub(super) model: &'a LoadedModel,
    pub(super) base: Option<&'a Base<LoadedModel>>,
}

/// A protocol whose data are read and checked.
pub(super) struct Task {
    head: LogHead,
    /// The data as the caller named them, and the commit of the hub that they are from.
    path: String,
    revision: Option<String>,
    sha256: String,
    limit: Option<usize>,
    /// The log that the items are compared with, what it depends on, and what it says of them.
    against: Option<(String, String, Vec<ItemResult>)>,
    work: Work,
}

/// What a task asks of models, with the results of an interrupted run.
enum Work {
    Items { protocol: &'static Protocol, prepared: Prepared, done: Vec<ItemResult> },
    Windows { kl: Kl, done: Vec<KlWindow> },
}

/// What came of a task.
struct Measured {
    metrics: Vec<Metric>,
    items: usize,
    /// Of protocols that have items.
    results: Vec<ItemResult>,
    tokens_read: u64,
    tokens_scored: usize,
    seconds: f64,
}

/// Reads and checks the data of all that is asked for.
pub(super) fn prepare(
    arguments: &EvalArguments,
    asked: Vec<Asked>,
    hub: &HubOptions,
    opened: &Opened,
    base: Option<&Base>,
) -> Result<Vec<Task>> {
    let mut read: Vec<(PathBuf, Rc<Data>)> = Vec::new();
    let mut tasks = Vec::with_capacity(asked.len());
    for (index, asked) in asked.into_iter().enumerate() {
        let name = &arguments.protocols[index];
        let given = arguments.data.get(index).or(arguments.data.first()).cloned();
        let path = given.map_or_else(|| published_data(name, &asked), Ok)?;
        let file = dataset_file(&path, hub, &Terminal)?;
        let data = match read.iter().find(|(known, _)| *known == file.path) {
            Some((_, data)) => Rc::clone(data),
            None => Rc::new(Data::read(&file.path)?),
        };
        read.push((file.path, Rc::clone(&data)));
        let number = match &asked {
            Asked::Protocol(protocol, number) => {
                number.or(protocol.parameter.and_then(|parameter| parameter.default))
            }
            Asked::Kl => None,
        };
        let setting = Setting {
            vocabulary: opened.vocabulary(),
            parameter: number.unwrap_or(0),
            context: arguments.context,
            limit: arguments.limit,
        };
        let work = Work::prepare(asked, &data, &setting, base)?;
        let mut run = arguments.run_name(opened);
        if let (Work::Windows { .. }, Some(base)) = (&work, base) {
            run = format!("{run}, beside {} in {}", base.name, base.model.weight_type());
        }
        let against =
            arguments.against.as_deref().map(|path| work.results_of(path, name)).transpose()?.flatten();
        let task = Task {
            head: LogHead { protocol: name.clone(), run },
            path: path.display().to_string(),
            revision: file.revision,
            sha256: data.sha256().to_owned(),
            limit: arguments.limit,
            against,
            work,
        };
        task.check(arguments.items.is_some())?;
        tasks.push(task);
    }
    Ok(tasks)
}

/// The name of the published data on the hub.
fn published_data(name: &str, asked: &Asked) -> Result<PathBuf, UsageError> {
    let (data, hub) = match asked {
        Asked::Protocol(protocol, _) => (protocol.dataset.name, protocol.dataset.hub),
        Asked::Kl => (ANY_TEXT, None),
    };
    let Some(hub) = hub else {
        let message =
            format!("`{name}` measures {data}, which no one file of the hub is: give it with --data");
        return Err(UsageError(message));
    };
    if Path::new(hub).extension().is_some_and(|end| end == "parquet") && !cfg!(feature = "parquet") {
        return Err(UsageError(format!(
            "`{name}`: the published data on the hub, {hub}, are Parquet, which this program was built without (the feature \
             `parquet`); give them in another form with --data: JSONL, CSV, or a text as it is"
        )));
    }
    Ok(hub.into())
}

impl Work {
    fn prepare(
        asked: Asked,
        data: &Data,
        setting: &Setting<'_>,
        base: Option<&Base>,
    ) -> Result<Self, EvaluationError> {
        match asked {
            Asked::Protocol(protocol, _) => {
                let prepared = (protocol.prepare)(data, setting)?;
                Ok(Self::Items { protocol, prepared, done: Vec::new() })
            }
            Asked::Kl => {
                let kl = Kl::prepare(data, setting)?;
                base.map_or(Ok(()), |base| kl.check_base(base.model.vocabulary(), setting.vocabulary))?;
                Ok(Self::Windows { kl, done: Vec::new() })
            }
        }
    }

    /// What the log of another run says of the items.
    fn results_of(
        &self,
        path: &Path,
        name: &str,
    ) -> Result<Option<(String, String, Vec<ItemResult>)>, EvaluationError> {
        let Self::Items { prepared, .. } = self else { return Ok(None) };
        let (run, results) = logged_results(path, name, prepared)?;
        Ok(Some((path.display().to_string(), run, results)))
    }

    /// How many items it has, and how many of them are done.
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

    /// Items that lost their beginning, and what else is worth knowing.
    fn notes(&self) -> (usize, &[String]) {
        match self {
            Self::Items { prepared, .. } => (prepared.cut, &prepared.notes),
            Self::Windows { kl, .. } => (0, kl.notes()),
        }
    }
}

impl Task {
    /// Tells what is worth knowing of the data, and refuses what cannot be measured: damaged data where nothing would be left of
    /// the items before.
    fn check(&self, has_log: bool) -> Result<(), EvaluationError> {
        let name = &self.head.protocol;
        let (cut, notes) = self.work.notes();
        if cut > 0 {
            Terminal
                .note(&format!("{name}: {cut} items are longer than the context and lose their beginning"));
        }
        notes.iter().for_each(|note| Terminal.note(&format!("{name}: {note}")));
        match (self.work.items(), self.work.damaged()) {
            ((items, _), Some(error)) if items > 0 && has_log => {
                Terminal
                    .note(&format!("{name}: {error}; the {items} items before it are measured for the log"));
                Ok(())
            }
            (_, Some(error)) => Err(error.clone().into()),
            ((0, _), None) => {
                let what = format!("it holds no items of `{name}`");
                Err(EvaluationError::Unusable { file: self.path.clone(), what })
            }
            _ => Ok(()),
        }
    }

    /// Takes over what an interrupted run left in the log.
    pub(super) fn take_done(&mut self, log: &mut ItemLog) -> Result<(), EvaluationError> {
        match &mut self.work {
            Work::Items { prepared, done, .. } => *done = log.results(&self.head, prepared)?,
            Work::Windows { kl, done } => {
                *done = log.take(&self.head, |index, window: &KlWindow| kl.check_result(index, window))?;
            }
        }
        if let (items, done @ 1..) = self.work.items() {
            Terminal.note(&format!("{}: {done} of {items} items are in the log", self.head.protocol));
        }
        Ok(())
    }

    /// Asks the models what is not done, and tells the figures; where the data are damaged, that instead.
    pub(super) fn evaluate(
        self,
        run: &Run<'_>,
        log: Option<&mut ItemLog>,
    ) -> Result<Result<Report, DataError>> {
        let Self { head, path, revision, sha256, limit, against, work } = self;
        let notes = work.notes();
        let (cut, notes) = (notes.0, notes.1.to_vec());
        let (protocol, published, base) = match &work {
            Work::Items { protocol, .. } => (Some(*protocol), protocol.published, None),
            Work::Windows { .. } => (None, &[][..], run.base),
        };
        let measured = match work.measure(run, &head, log)? {
            Ok(measured) => measured,
            Err(error) => return Ok(Err(error)),
        };
        let model = run.model.model();
        let size = Size::of(model.config());
        let told = |metric: &Metric| MetricReport::new(metric, &head.protocol, published, size);
        let metrics = measured.metrics.iter().map(told).collect();
        let of_hub = revision.as_ref().map(|_| path.as_str());
        let known = protocol.and_then(|protocol| protocol.dataset.knows(of_hub, &sha256));
        let dataset = DatasetReport {
            name: protocol.map_or(ANY_TEXT, |protocol| protocol.dataset.name),
            path,
            revision,
            known,
            sha256,
            items: measured.items,
            limit,
        };
        let against = against.map(|(path, run, there)| Comparison::new(path, run, &measured.results, &there));
        Ok(Ok(Report {
            model: run.name.to_owned(),
            dtype: run.model.weight_type(),
            kv_dtype: model.kv_dtype().name(),
            device: device_name(model.device()),
            base: base.map(|base| BaseReport { model: base.name.clone(), dtype: base.model.weight_type() }),
            protocol: head.protocol,
            protocol_source: protocol.map_or(Kl::SOURCE, |protocol| protocol.source),
            dataset,
            metrics,
            against,
            cut,
            notes,
            tokens_read: measured.tokens_read,
            tokens_scored: measured.tokens_scored as u64,
            seconds: measured.seconds,
            version: Report::VERSION,
        }))
    }
}

impl Work {
    /// Asks the models, adds what they say to the log, and counts.
    fn measure(
        self,
        run: &Run<'_>,
        head: &LogHead,
        mut log: Option<&mut ItemLog>,
    ) -> Result<Result<Measured, DataError>> {
        let bar = |tokens| Terminal.start(&head.protocol, tokens, Unit::Items("tokens"));
        match self {
            Self::Items { protocol, prepared, done, .. } => {
                let (known, tokens_read) = (done.len(), prepared.tokens_to_read(done.len()));
                let bar = bar(tokens_read);
                let mut keep =
                    |result: &ItemResult| log.as_mut().map_or(Ok(()), |log| log.append(head, result));
                let start = Instant::now();
                let results = prepared.evaluate(run.model, done, &*bar, &mut keep)?;
                let seconds = start.elapsed().as_secs_f64();
                if let Some(error) = prepared.damaged {
                    return Ok(Err(error));
                }
                let choices = results[known..].iter().flat_map(|result| &result.choices);
                let tokens_scored = choices.map(|choice| choice.tokens).sum();
                let metrics = (protocol.measure)(&prepared.totals, &results);
                let items = results.len();
                Ok(Ok(Measured { metrics, items, results, tokens_read, tokens_scored, seconds }))
            }
            Self::Windows { kl, done } => {
                let base = run.base.context("two models side by side need a second one")?;
                let (known, tokens_read) = (done.len(), kl.tokens_to_read(done.len()));
                let bar = bar(tokens_read);
                let mut keep =
                    |window: &KlWindow| log.as_mut().map_or(Ok(()), |log| log.append(head, window));
                let start = Instant::now();
                let windows = kl.evaluate(&base.model, run.model, done, &*bar, &mut keep)?;
                let seconds = start.elapsed().as_secs_f64();
                let tokens_scored = windows[known..].iter().map(|window| window.tokens.len()).sum();
                let metrics = Kl::measure(&windows);
                let (items, results) = (windows.len(), Vec::new());
                Ok(Ok(Measured { metrics, items, results, tokens_read, tokens_scored, seconds }))
            }
        }
    }
}
