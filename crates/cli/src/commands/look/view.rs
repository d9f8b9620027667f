//! What every `gpt2 look` command takes, and how each shows what it found: as a table, JSON, a page or a picture.

use std::path::PathBuf;

use anyhow::{Context, Result};
use candle_gpt2_engine::{HubOptions, LoadedModel};
use candle_gpt2_interpret::Measure;
use candle_gpt2_look::{
    Found, Heads, Look, MetricOptions, Named, Ranges, Reader, Subject, Text, TokenChoice,
};
use candle_gpt2_pictures::{PictureError, Width, page, svg, table};
use candle_gpt2_weights::expect_free;
use clap::Args;
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};

use crate::exit::UsageError;
use crate::input::InputArguments;
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
    /// Write a page: one file that works without a network
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
    /// Shows what was found everywhere it is asked for.
    fn show(&self, found: &Found) -> Result<()> {
        let report = &found.report;
        report.check().context("internal error, please report it")?;
        // What cannot be drawn leaves no page behind.
        let width = if self.columns == 1 { Width::OneColumn } else { Width::TwoColumns };
        let picture = self.svg.as_ref().map(|path| Ok((path, svg(report, width)?)));
        let picture = picture.transpose().map_err(|error: PictureError| UsageError(error.to_string()))?;
        if let Some(path) = &self.html {
            output::write_file(path, &page(report))?;
        }
        if let Some((path, picture)) = picture {
            output::write_file(path, &picture)?;
        }
        if self.json {
            return output::write_json(found);
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

impl LookArguments {
    /// Opens the model, reads what `asked` makes of the arguments, looks, and shows what was found.
    pub(crate) fn run<L: Look>(
        &self,
        hub: &HubOptions,
        asked: impl FnOnce(&Reader) -> Result<L>,
    ) -> Result<()> {
        let files = [&self.view.html, &self.view.svg];
        files.into_iter().flatten().try_for_each(|file| expect_free(file))?;
        let (loaded, reader, (look, checked)) = self.opening.open(hub, |reader| {
            let look = asked(reader)?;
            let checked = look.check(reader)?;
            Ok((look, checked))
        })?;
        let found = look.look(checked, &self.opening.subject(&loaded, &reader), &Terminal)?;
        self.view.show(&found)
    }
}

impl OpeningArguments {
    /// Opens the model, lets `check` read and check what is asked with its tokens, and only then loads the weights.
    pub(crate) fn open<T>(
        &self,
        hub: &HubOptions,
        check: impl FnOnce(&Reader) -> Result<T>,
    ) -> Result<(LoadedModel, Reader, T)> {
        let opened = self.model.open(hub)?;
        let reader = Reader::new(opened.vocabulary(), self.bos)?;
        let checked = check(&reader)?;
        Ok((opened.load(&Terminal)?, reader, checked))
    }

    /// The model as it is looked into.
    pub(crate) fn subject<'a>(&self, loaded: &'a LoadedModel, reader: &'a Reader) -> Subject<'a> {
        Subject::new(loaded, self.model.model.display().to_string(), reader)
    }
}

/// The tokens of the input.
pub(crate) fn text(input: &InputArguments, reader: &Reader) -> Result<Text> {
    Ok(Text::Ids(input.tokenized(reader.vocabulary())?.ids))
}

/// Numbers as `3`, `0-5` or `0,4,8-11`.
pub(crate) fn ranges(option: &str, text: Option<&String>) -> Result<Option<Ranges>> {
    let read = text.map(|text| text.parse()).transpose();
    read.map_err(|error| UsageError(format!("{option}: {error}")).into())
}

/// Heads as `9.9,10.7`.
pub(crate) fn heads(text: Option<&String>) -> Result<Option<Heads>> {
    Ok(text.map(|text| text.parse()).transpose()?)
}

/// A text of one token, or `#ID`.
pub(crate) fn token(text: Option<&String>) -> Option<TokenChoice> {
    text.map(|text| text.as_str().into())
}

/// Reads one of the names that a choice has.
pub(crate) fn named<T: Named>() -> impl TypedValueParser<Value = T> {
    let names = T::NAMES.iter().map(|known| PossibleValue::new(known.name).help(known.meaning));
    PossibleValuesParser::new(names).try_map(|name| T::of_name(&name).ok_or("there is no such choice"))
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
    #[arg(long, value_name = "MEASURE", default_value = "logit", value_parser = named::<Measure>())]
    pub(crate) measure: Measure,
}

impl MetricArguments {
    /// The same for the library.
    pub(crate) fn options(&self) -> MetricOptions {
        MetricOptions {
            answer: token(self.answer.as_ref()),
            against: token(self.against.as_ref()),
            position: self.position,
            measure: self.measure,
        }
    }
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
