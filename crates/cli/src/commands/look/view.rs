//! What every `gpt2 look` command takes, and how each shows what it found: as a table, JSON, a page or a picture.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::{Args, ValueEnum};
use gpt2_engine::{HubOptions, LoadedModel, Vocabulary};
use gpt2_interpret::{Head, Measure, Metric, Run};
use gpt2_pictures::{Axis, PictureError, Report, Token, Width, page, shown, svg, table};
use gpt2_weights::replace_file;
use serde::Serialize;
use serde_json::Value;

use crate::exit::UsageError;
use crate::input::{Ids, InputArguments};
use crate::model_arguments::ModelArguments;
use crate::output;
use crate::progress::Terminal;

/// The model, the token in front, and how the result is shown.
#[derive(Debug, Args)]
pub(crate) struct LookArguments {
    #[command(flatten)]
    pub(crate) opening: OpeningArguments,
    #[command(flatten)]
    pub(crate) view: ViewArguments,
}

/// The model and the token in front.
#[derive(Debug, Args)]
pub(crate) struct OpeningArguments {
    #[command(flatten)]
    pub(crate) model: ModelArguments,
    /// Put the configuration's bos_token_id (<|endoftext|>) in front, as TransformerLens does by default
    #[arg(long, overrides_with = "no_bos")]
    pub(crate) bos: bool,
    /// Read the text as it is, as transformers does [default]
    #[arg(long)]
    pub(crate) no_bos: bool,
}

/// How the result is shown.
#[derive(Debug, Args)]
pub(crate) struct ViewArguments {
    /// Print one JSON object: schema, tokens (index, id, text), bos, axes (name, labels), values in the order of the axes (the last one fastest; null where there is none), metric before and after
    #[arg(long)]
    pub(crate) json: bool,
    /// Write a page: one file, which asks for nothing from anywhere
    #[arg(long, value_name = "FILE")]
    pub(crate) html: Option<PathBuf>,
    /// Write a picture for a paper
    #[arg(long, value_name = "FILE")]
    pub(crate) svg: Option<PathBuf>,
    /// Width of the picture: one column (3.3 inches) or two (6.8 inches)
    #[arg(long, value_name = "N", default_value = "2", value_parser = clap::value_parser!(u8).range(1..=2))]
    pub(crate) columns: u8,
}

impl ViewArguments {
    /// Shows a report everywhere it is asked for. `details` join the JSON.
    pub(crate) fn show(&self, report: &Report, details: Value) -> Result<()> {
        report.check().context("internal error, please report it")?;
        // What cannot be drawn leaves no page behind.
        let width = if self.columns == 1 { Width::OneColumn } else { Width::TwoColumns };
        let picture = self.svg.as_ref().map(|path| Ok((path, svg(report, width)?)));
        let picture = picture.transpose().map_err(|error: PictureError| UsageError(error.to_string()))?;
        if let Some(path) = &self.html {
            write_file(path, &page(report))?;
        }
        if let Some((path, picture)) = picture {
            write_file(path, &picture)?;
        }
        if self.json {
            #[derive(Serialize)]
            struct Whole<'a> {
                #[serde(flatten)]
                report: &'a Report,
                #[serde(flatten)]
                details: Value,
            }
            return output::write_json(&Whole { report, details });
        }
        for path in [&self.html, &self.svg].into_iter().flatten() {
            output::write_line(&format!("written: {}", path.display()))?;
        }
        if self.html.is_none() && self.svg.is_none() {
            output::write_text(&table(report))?;
        }
        Ok(())
    }
}

fn write_file(path: &Path, text: &str) -> Result<()> {
    replace_file(path, |partial| {
        std::fs::write(partial, text).with_context(|| path.display().to_string()).map_err(Failed)
    })
    .map_err(|Failed(error)| error)
}

/// An error on the way to a file.
pub(crate) struct Failed(pub(crate) anyhow::Error);

impl From<gpt2_weights::WeightsError> for Failed {
    fn from(error: gpt2_weights::WeightsError) -> Self {
        Self(error.into())
    }
}

/// A model in memory that is looked into.
pub(crate) struct Looked {
    pub(crate) loaded: LoadedModel,
    pub(crate) name: String,
    pub(crate) has_bos: bool,
}

impl LookArguments {
    /// As [`OpeningArguments::open`].
    pub(crate) fn open<T>(
        &self,
        hub: &HubOptions,
        texts: impl FnOnce(&Reader) -> Result<T>,
    ) -> Result<(Looked, T)> {
        self.opening.open(hub, texts)
    }
}

impl OpeningArguments {
    /// Opens the model, reads the texts that `texts` makes of its tokens, checks them, and only then loads the weights.
    pub(crate) fn open<T>(
        &self,
        hub: &HubOptions,
        texts: impl FnOnce(&Reader) -> Result<T>,
    ) -> Result<(Looked, T)> {
        let opened = self.model.open(hub)?;
        let config = opened.config();
        let bos = match (self.bos, config.start_token()) {
            (true, None) => {
                return Err(UsageError(
                    "--bos: this model's configuration names no bos_token_id that its vocabulary has".into(),
                )
                .into());
            }
            (true, id) => id,
            (false, _) => None,
        };
        let reader = Reader {
            vocabulary: opened.vocabulary(),
            bos,
            n_positions: config.n_positions,
            vocab_size: config.vocab_size,
            n_layer: config.n_layer,
            n_head: config.n_head,
        };
        let texts = texts(&reader)?;
        let loaded = opened.load(&Terminal)?;
        Ok((Looked { loaded, name: self.model.model.display().to_string(), has_bos: bos.is_some() }, texts))
    }
}

/// What texts, tokens and heads are checked against before any weight is loaded.
pub(crate) struct Reader<'a> {
    pub(crate) vocabulary: &'a Vocabulary,
    bos: Option<u32>,
    pub(crate) n_positions: usize,
    vocab_size: usize,
    pub(crate) n_layer: usize,
    pub(crate) n_head: usize,
}

impl Reader<'_> {
    /// The tokens of the input, after the token in front.
    pub(crate) fn input(&self, input: &InputArguments) -> Result<Vec<u32>> {
        self.checked(input.tokenized(self.vocabulary)?.ids)
    }

    /// The tokens of a text.
    pub(crate) fn text(&self, text: &str) -> Result<Vec<u32>> {
        self.checked(self.vocabulary.encode(text)?)
    }

    /// The tokens of a text, or these tokens.
    pub(crate) fn text_or_ids(
        &self,
        name: &str,
        text: Option<&String>,
        ids: Option<&Ids>,
    ) -> Result<Vec<u32>> {
        match (text, ids) {
            (Some(text), _) => self.text(text),
            (None, Some(Ids(ids))) => self.checked(ids.clone()),
            (None, None) => {
                Err(UsageError(format!("--{name} TEXT or --{name}-ids ID,ID,… is missing")).into())
            }
        }
    }

    fn checked(&self, ids: Vec<u32>) -> Result<Vec<u32>> {
        let ids: Vec<u32> = self.bos.into_iter().chain(ids).collect();
        if ids.is_empty() {
            return Err(UsageError("the text is empty; give at least one token, or --bos".into()).into());
        }
        if ids.len() > self.n_positions {
            let (tokens, n_positions) = (ids.len(), self.n_positions);
            return Err(UsageError(format!(
                "the text has {tokens} tokens; this model takes at most {n_positions}"
            ))
            .into());
        }
        if let Some(id) = ids.iter().find(|id| **id as usize >= self.vocab_size) {
            return Err(
                UsageError(format!("token {id} is outside the vocabulary of {}", self.vocab_size)).into()
            );
        }
        Ok(ids)
    }

    /// The one token that a text is, or `#ID`.
    pub(crate) fn token(&self, option: &str, text: &str) -> Result<u32> {
        let ids = match text.strip_prefix('#').map(str::parse) {
            Some(Ok(id)) => vec![id],
            _ => self.vocabulary.encode(text)?,
        };
        let [id] = ids[..] else {
            let tokens: Vec<String> =
                ids.iter().map(|id| format!("{:?}", shown(&self.vocabulary.token_bytes(*id)))).collect();
            let message = format!(
                "{option} {text:?} has {} tokens ({}); give one token, most words with the space before them, or #ID",
                ids.len(),
                tokens.join(" ")
            );
            return Err(UsageError(message).into());
        };
        if id as usize >= self.vocab_size {
            return Err(UsageError(format!(
                "{option}: token {id} is outside the vocabulary of {}",
                self.vocab_size
            ))
            .into());
        }
        Ok(id)
    }

    /// The position that an option names in a text of so many tokens; negative ones count from the end.
    pub(crate) fn position(&self, option: &str, position: i64, tokens: usize) -> Result<usize> {
        let place = if position < 0 { position + tokens as i64 } else { position };
        let place = usize::try_from(place).ok().filter(|place| *place < tokens);
        let message = || {
            format!(
                "{option} {position}: the text has {tokens} tokens, counted from 0, or from -1 at its end"
            )
        };
        Ok(place.ok_or_else(|| UsageError(message()))?)
    }

    /// Heads as `9.9,10.7`, each once.
    pub(crate) fn heads(&self, text: &str) -> Result<Vec<Head>> {
        let head = |part: &str| -> Result<Head> {
            let numbers = part.trim().split_once('.').map(|(layer, head)| (layer.parse(), head.parse()));
            let Some((Ok(layer), Ok(head))) = numbers else {
                return Err(UsageError(format!("`{part}` is no head; write LAYER.HEAD, such as 9.6")).into());
            };
            let head = Head { layer, head };
            head.check(self.n_layer, self.n_head).map_err(|error| UsageError(error.to_string()))?;
            Ok(head)
        };
        let mut heads = Vec::new();
        for part in text.split(',') {
            let head = head(part)?;
            if !heads.contains(&head) {
                heads.push(head);
            }
        }
        Ok(heads)
    }

    /// Layers as `3`, `0-5` or `0,4,8-11`.
    pub(crate) fn layers(&self, text: &str) -> Result<Vec<usize>> {
        numbers(text, self.n_layer).map_err(|error| UsageError(format!("--layers: {error}")).into())
    }
}

/// Numbers below `count` as `3`, `0-5` or `0,4,8-11`, in their order.
pub(crate) fn numbers(text: &str, count: usize) -> std::result::Result<Vec<usize>, String> {
    let mut found = Vec::new();
    for part in text.split(',').map(str::trim) {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (Ok(first), Ok(last)) = (first.parse::<usize>(), last.parse::<usize>()) else {
            return Err(format!("`{part}` is no number and no range such as 0-5"));
        };
        if first > last || last >= count {
            return Err(format!("{part} is not among 0 to {}", count.saturating_sub(1)));
        }
        found.extend(first..=last);
    }
    found.sort_unstable();
    found.dedup();
    Ok(found)
}

/// Whose numbers are wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Numbers {
    /// As the checkpoint has them
    Raw,
    /// As TransformerLens' compatibility mode shows them
    TransformerLens,
}

/// What a prediction is summed up in.
#[derive(Debug, Args)]
pub(crate) struct MetricArguments {
    /// The token whose prediction is looked at: a text of one token, or #ID [default: the most probable one]
    #[arg(long, value_name = "TEXT")]
    pub(crate) answer: Option<String>,
    /// The token that it is compared with
    #[arg(long, value_name = "TEXT", requires = "answer")]
    pub(crate) against: Option<String>,
    /// After which token it is predicted: counted from 0, or from -1 at the end
    #[arg(long, value_name = "N", default_value = "-1", allow_negative_numbers = true)]
    pub(crate) position: i64,
    /// The number that is looked at; with --against the difference of two
    #[arg(long, value_name = "MEASURE", default_value = "logit")]
    pub(crate) measure: MeasureName,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum MeasureName {
    /// The logit
    Logit,
    /// The natural logarithm of the probability
    LogProbability,
    /// The probability
    Probability,
}

/// A text, and what is asked of its prediction.
#[derive(Debug, Args)]
pub(crate) struct AskedArguments {
    #[command(flatten)]
    pub(crate) input: InputArguments,
    #[command(flatten)]
    pub(crate) look: LookArguments,
    #[command(flatten)]
    pub(crate) metric: MetricArguments,
}

impl AskedArguments {
    /// The model, the tokens, the metric, and what `more` reads besides, all checked before the weights are loaded.
    pub(crate) fn open<T>(
        &self,
        hub: &HubOptions,
        more: impl FnOnce(&Reader, &[u32]) -> Result<T>,
    ) -> Result<(Looked, Vec<u32>, Asked, T)> {
        let (looked, (ids, asked, more)) = self.look.open(hub, |reader| {
            let ids = reader.input(&self.input)?;
            let asked = self.metric.read(reader, ids.len())?;
            let more = more(reader, &ids)?;
            Ok((ids, asked, more))
        })?;
        Ok((looked, ids, asked, more))
    }
}

/// A metric whose answer may still be the model's to say.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Asked {
    answer: Option<u32>,
    against: Option<u32>,
    position: usize,
    measure: Measure,
}

impl MetricArguments {
    pub(crate) fn read(&self, reader: &Reader, tokens: usize) -> Result<Asked> {
        let token = |option: &str, text: &Option<String>| {
            text.as_ref().map(|text| reader.token(option, text)).transpose()
        };
        Ok(Asked {
            answer: token("--answer", &self.answer)?,
            against: token("--against", &self.against)?,
            position: reader.position("--position", self.position, tokens)?,
            measure: match self.measure {
                MeasureName::Logit => Measure::Logit,
                MeasureName::LogProbability => Measure::LogProbability,
                MeasureName::Probability => Measure::Probability,
            },
        })
    }
}

impl Asked {
    /// The metric, with the most probable token where no answer was given.
    pub(crate) fn metric(&self, run: &Run) -> Result<Metric> {
        let Self { answer, against, position, measure } = *self;
        let answer = match answer {
            Some(answer) => answer,
            None => {
                let logits_for = gpt2::LogitsFor::Tokens { first: position, count: 1 };
                let logits = run.logits(logits_for, &mut gpt2_interpret::Chain(Vec::new()))?;
                logits.flatten_all()?.argmax(0)?.to_scalar::<u32>()?
            }
        };
        Ok(Metric { answer, against, position, measure })
    }
}

impl Looked {
    pub(crate) fn vocabulary(&self) -> &Vocabulary {
        self.loaded.vocabulary()
    }

    pub(crate) fn run<'a>(&'a self, ids: &'a [u32]) -> Result<Run<'a>> {
        Run::new(self.loaded.model(), ids).map_err(|error| UsageError(error.to_string()).into())
    }

    /// A token as it is shown.
    pub(crate) fn shown(&self, id: u32) -> String {
        shown(&self.vocabulary().token_bytes(id))
    }

    pub(crate) fn tokens(&self, ids: &[u32]) -> Vec<Token> {
        let token = |(index, id): (usize, &u32)| Token::new(index, *id, &self.vocabulary().token_bytes(*id));
        ids.iter().enumerate().map(token).collect()
    }

    /// A report without its values.
    pub(crate) fn report(&self, what: &str, title: String, ids: &[u32]) -> Report {
        Report::new(what, title, self.name.clone(), self.tokens(ids), self.has_bos)
    }

    /// What a metric is, in words.
    pub(crate) fn metric_name(&self, metric: &Metric) -> String {
        let measure = match metric.measure {
            Measure::Logit => "logit",
            Measure::LogProbability => "log probability",
            Measure::Probability => "probability",
        };
        let of = |id: u32| format!("{measure} of {:?}", self.shown(id));
        let name = match metric.against {
            Some(against) => format!("{} less {}", of(metric.answer), of(against)),
            None => of(metric.answer),
        };
        format!("{name} after token {}", metric.position)
    }

    /// What stands in front of every text, for looks whose tables list no tokens.
    pub(crate) fn in_front(&self) -> &'static str {
        if self.has_bos { "<|endoftext|>" } else { "nothing" }
    }

    /// The axis of all heads of a layer.
    pub(crate) fn head_axis(&self) -> Axis {
        Axis::numbers("head", 0..self.loaded.config().n_head)
    }

    /// The axis of all layers.
    pub(crate) fn layer_axis(&self) -> Axis {
        Axis::numbers("layer", 0..self.loaded.config().n_layer)
    }
}
