//! Evaluation from options to reports; all data is checked before any model runs.

use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::vec;

use candle_gpt2_engine::{LoadedModel, ModelOptions, Reporter, WeightDType, dataset_file};

use crate::asked::{Kind, RequestedProtocol};
use crate::options::usage_error;
use crate::protocols::shared::wrong_setting;
use crate::task::{ModelPair, Source, Task};
use crate::{
    Data, DataError, EvaluationError, EvaluationOptions, ItemLog, ModelFacts, Report, Setting, Shots,
};

/// Default seed of lm-evaluation-harness for sampling few-shot examples.
const FEWSHOT_SEED: u64 = 1234;

/// Validated options, before any data is opened.
///
/// Returned by [`EvaluationOptions::check`].
#[derive(Debug)]
pub struct Plan {
    pub(crate) options: EvaluationOptions,
    pub(crate) asked: Vec<RequestedProtocol>,
}

/// Data that has been read and checked, ready for a model.
///
/// [`Plan::prepare`] creates it from [`EvaluationOptions`].
#[derive(Debug)]
pub struct Evaluation {
    tasks: Vec<Task>,
    log: Option<ItemLog>,
    notes: Vec<String>,
}

/// Iterator over the reports of an evaluation; each report is returned as soon as it is complete.
///
/// Returned by [`Evaluation::run`]; see [`Report`] for an example.
pub struct Reports<'a> {
    tasks: vec::IntoIter<Task>,
    log: Option<ItemLog>,
    models: ModelPair<&'a LoadedModel>,
    reporter: &'a dyn Reporter,
    /// First data error so far, reported after the last report.
    damage: Option<DataError>,
}

impl EvaluationOptions {
    /// Validates everything that can be validated before any data is opened.
    ///
    /// # Errors
    /// Fails if a protocol is unknown or options conflict.
    pub fn check(self) -> Result<Plan, EvaluationError> {
        let named = |name: &String| RequestedProtocol::named(name, self.worker.as_ref());
        let asked = self.protocols.iter().map(named).collect::<Result<Vec<_>, _>>()?;
        self.check_protocols(&asked)?;
        self.check_base(&asked)?;
        if self.limit == Some(0) {
            return Err(wrong_setting("`limit`", "at least 1", "0"));
        }
        if self.resume && self.items.is_none() {
            return usage_error("`resume` needs `items`, the log of the interrupted run".into());
        }
        let count = asked.len();
        for (option, files) in [("data", &self.data), ("fewshot_data", &self.fewshot_data)] {
            let files = files.len();
            if files > 1 && files != count {
                return usage_error(format!(
                    "`{option}`: expected one path for all protocols, or one for each of the {count} protocols, found {files}"
                ));
            }
        }
        self.check_examples(&asked)?;
        Ok(Plan { options: self, asked })
    }
}

impl Plan {
    /// Whether the plan includes `kl`, which needs a second model.
    pub fn compares(&self) -> bool {
        self.asked.iter().any(RequestedProtocol::compares)
    }

    /// Returns the base model for `kl`, if the plan includes `kl`.
    ///
    /// This is the model that `base` names, or else the evaluated model, in f32 unless `base_dtype` is set.
    pub fn base_of(&self, model: &ModelOptions) -> Option<ModelOptions> {
        let dtype = Some(self.options.base_dtype.unwrap_or(WeightDType::F32));
        let same = ModelOptions { dtype, kv_dtype: None, assistant_model: None, ..model.clone() };
        let base = match &self.options.base {
            Some(base) => ModelOptions { model: base.clone(), adapter: Vec::new(), n_head: None, ..same },
            None => same,
        };
        self.compares().then_some(base)
    }

    /// Reads and checks all data and opens the log.
    ///
    /// All invalid input is rejected before any weights are read. `base` is the base model for `kl`.
    ///
    /// # Errors
    /// Fails if data is unavailable, unreadable, unusable or damaged, or does not fit a model. Also fails
    /// if the log belongs to another run.
    pub fn prepare(
        &self,
        model: &ModelFacts<'_>,
        base: Option<&ModelFacts<'_>>,
        reporter: &dyn Reporter,
    ) -> Result<Evaluation, EvaluationError> {
        let options = &self.options;
        let mut read: Vec<(PathBuf, Rc<Data>)> = Vec::new();
        let (mut tasks, mut notes) = (Vec::with_capacity(self.asked.len()), Vec::new());
        for (index, asked) in self.asked.iter().enumerate() {
            let mut data_at = |path: &Path| -> Result<(Rc<Data>, Option<String>), EvaluationError> {
                let file = dataset_file(path, &options.hub, reporter)?;
                let data = match read.iter().find(|(known, _)| *known == file.path) {
                    Some((_, data)) => Rc::clone(data),
                    None => Rc::new(Data::read(&file.path)?),
                };
                read.push((file.path, Rc::clone(&data)));
                Ok((data, file.revision))
            };
            let (path, (data, revision)) = match (options.data_of(index), &asked.kind) {
                (Some(path), _) => (path.to_owned(), data_at(path)?),
                (None, Kind::Task(task)) => {
                    let data = Rc::new(Data::read_all(task.data_files()?)?);
                    (data.path().to_owned(), (data, None))
                }
                (None, _) => {
                    let path = self.published_data(index, asked)?;
                    let data = data_at(&path)?;
                    (path, data)
                }
            };
            let (count, note) = asked.shots(options.num_fewshot);
            notes.extend(note.map(|note| format!("{}: {note}", options.protocols[index])));
            let example_data = match (options.fewshot_data_of(index), &asked.kind) {
                _ if count == 0 => None,
                (Some(path), _) => Some(data_at(path)?.0),
                (None, Kind::Task(task)) if options.data_of(index).is_none() => {
                    task.few_shot_files().map(Data::read_all).transpose()?.map(Rc::new)
                }
                (None, _) => None,
            };
            let seed = options.fewshot_seed.unwrap_or(FEWSHOT_SEED);
            let shots = asked.protocol.few_shot.filter(|_| count > 0);
            let shots = shots.map(|source| Shots { count, seed, data: example_data.as_deref(), source });
            let setting = Setting {
                vocabulary: model.vocabulary,
                parameter: asked.parameter(),
                context: options.context,
                limit: options.limit,
                shots,
                reporter,
            };
            let name = &options.protocols[index];
            let source = Source { data: &data, path: path.display().to_string(), revision };
            let mut task = Task::prepare(name, asked, source, &setting, ModelPair { model, base })?;
            if let Some(against) = &options.against {
                task.compare_with(against)?;
            }
            task.check(options.items.is_some(), &mut notes)?;
            if reporter.is_interrupted() {
                return Err(EvaluationError::Interrupted);
            }
            tasks.push(task);
        }
        let mut log = options.items.as_ref().map(|path| ItemLog::open(path, options.resume)).transpose()?;
        if let Some(log) = &mut log {
            tasks.iter_mut().try_for_each(|task| task.take_done(log, &mut notes))?;
            log.check_all_taken()?;
        }
        Ok(Evaluation { tasks, log, notes })
    }

    /// Returns the path of the published data on the Hub.
    fn published_data(&self, index: usize, asked: &RequestedProtocol) -> Result<PathBuf, EvaluationError> {
        let name = &self.options.protocols[index];
        let Some(hub) = asked.protocol.dataset.hub else {
            let data = asked.protocol.dataset.name;
            return usage_error(format!(
                "`{name}` has no single data file on the Hub; specify its data ({data}) with `data`"
            ));
        };
        if Path::new(hub).extension().is_some_and(|end| end == "parquet") && !cfg!(feature = "parquet") {
            return usage_error(format!(
                "`{name}`: the published data on the Hub, {hub}, is in Parquet, and this program was built without the \
                 feature `parquet`; specify the data in another format with `data`: JSONL, CSV or plain text"
            ));
        }
        Ok(hub.into())
    }
}

impl Evaluation {
    /// Returns notes on the data and on results that are already in the log.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// Evaluates one protocol after another; `base` is the base model for `kl`.
    ///
    /// A protocol's data error is returned after the reports of all other protocols. Any other error ends
    /// the run.
    pub fn run<'a>(
        self,
        model: &'a LoadedModel,
        base: Option<&'a LoadedModel>,
        reporter: &'a dyn Reporter,
    ) -> Reports<'a> {
        let models = ModelPair { model, base };
        Reports { tasks: self.tasks.into_iter(), log: self.log, models, reporter, damage: None }
    }
}

impl Iterator for Reports<'_> {
    type Item = Result<Report, EvaluationError>;

    fn next(&mut self) -> Option<Self::Item> {
        while let Some(task) = self.tasks.next() {
            match task.evaluate(self.models, self.log.as_mut(), self.reporter) {
                Ok(report) => return Some(Ok(report)),
                Err(EvaluationError::Data(error)) => _ = self.damage.get_or_insert(error),
                Err(error) => {
                    self.tasks = vec::IntoIter::default();
                    self.damage = None;
                    return Some(Err(error));
                }
            }
        }
        self.damage.take().map(|error| Err(error.into()))
    }
}
