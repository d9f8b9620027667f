//! What every `gpt2 look` command takes, and how each shows what it found: as a table, JSON, a page or a picture.

use std::path::PathBuf;

use anyhow::{Context, Result};
use candle_gpt2_engine::{HubOptions, LoadedModel};
use candle_gpt2_look::{ComparedTexts, Found, Look, LookSubject, Reader, Text};
use candle_gpt2_pictures::{PictureError, Width, table};
use candle_gpt2_weights::expect_free;
use clap::Args;

use crate::exit::UsageError;
use crate::input::{Ids, InputArguments};
use crate::model_arguments::ModelArguments;
use crate::output;
use crate::progress::Terminal;

/// A look: its texts, the model, how the result is shown, and the look's own options.
#[derive(Debug, Args)]
pub(crate) struct LookArguments<I: Args, L: Args> {
    #[command(flatten)]
    input: I,
    #[command(flatten)]
    opening: OpeningArguments,
    #[command(flatten)]
    view: ViewArguments,
    #[command(flatten)]
    look: L,
}

/// The model and the token in front.
#[derive(Debug, Args)]
pub(crate) struct OpeningArguments {
    #[command(flatten)]
    pub(crate) model: ModelArguments,
    /// Prepend the configuration's bos_token_id (<|endoftext|>), as TransformerLens does by default
    #[arg(long, overrides_with = "no_bos")]
    pub(crate) bos: bool,
    /// Use the text as it is, as transformers does [default]
    #[arg(long)]
    pub(crate) no_bos: bool,
}

/// How the result is shown.
#[derive(Debug, Args)]
pub(crate) struct ViewArguments {
    /// Print one JSON object: schema, tokens (index, id, text), bos, axes (name, labels), values in the order of the axes (the last one fastest; null if there is none), metric before and after
    #[arg(long)]
    pub(crate) json: bool,
    /// Write an HTML page: one file that works offline
    #[arg(long, value_name = "FILE")]
    pub(crate) html: Option<PathBuf>,
    /// Write an SVG figure for a paper
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
        let picture = self.svg.as_ref().map(|path| Ok((path, found.svg(width)?)));
        let picture = picture.transpose().map_err(|error: PictureError| UsageError(error.to_string()))?;
        if let Some(path) = &self.html {
            output::write_file(path, &found.page())?;
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

impl<I: Input + Args, L: Look + Clone + Args> LookArguments<I, L> {
    /// Opens the model, reads the texts, which `put` hands to the look, looks, and shows what was found.
    pub(crate) fn run(&self, hub: &HubOptions, put: impl FnOnce(&mut L, I::Texts)) -> Result<()> {
        let files = [&self.view.html, &self.view.svg];
        files.into_iter().flatten().try_for_each(|file| expect_free(file))?;
        let mut look = self.look.clone();
        let (loaded, reader, checked) = self.opening.open(hub, |reader| {
            put(&mut look, self.input.texts(reader)?);
            Ok(look.check(reader)?)
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
    pub(crate) fn subject<'a>(&self, loaded: &'a LoadedModel, reader: &'a Reader) -> LookSubject<'a> {
        LookSubject::new(loaded, self.model.options.display_name(), reader)
    }
}

/// Where a look's texts come from.
pub(crate) trait Input {
    /// The texts of the look.
    type Texts;

    /// Reads the texts.
    fn texts(&self, reader: &Reader) -> Result<Self::Texts>;
}

impl Input for InputArguments {
    type Texts = Text;

    fn texts(&self, reader: &Reader) -> Result<Text> {
        Ok(Text::Ids(self.tokenized(reader.vocabulary())?.ids))
    }
}

/// A text that may be missing: standard input is not read.
#[derive(Debug, Args)]
pub(crate) struct OptionalInput {
    #[command(flatten)]
    input: InputArguments,
}

impl Input for OptionalInput {
    type Texts = Option<Text>;

    fn texts(&self, reader: &Reader) -> Result<Option<Text>> {
        self.input.is_given().then(|| self.input.texts(reader)).transpose()
    }
}

/// No text: the look names its file itself.
#[derive(Debug, Args)]
pub(crate) struct NoInput {}

impl Input for NoInput {
    type Texts = ();

    fn texts(&self, _: &Reader) -> Result<()> {
        Ok(())
    }
}

/// Two texts of as many tokens.
#[derive(Debug, Args)]
pub(crate) struct TextsArguments {
    /// Clean text, for which the answer is right
    #[arg(long, value_name = "TEXT", conflicts_with = "clean_ids")]
    clean: Option<String>,
    /// Its token ids
    #[arg(long, value_name = "ID,ID,…")]
    clean_ids: Option<Ids>,
    /// Corrupted text, with the same number of tokens, for which the answer is wrong
    #[arg(long, value_name = "TEXT", conflicts_with = "corrupt_ids")]
    corrupt: Option<String>,
    /// Its token ids
    #[arg(long, value_name = "ID,ID,…")]
    corrupt_ids: Option<Ids>,
}

impl Input for TextsArguments {
    type Texts = ComparedTexts;

    fn texts(&self, _: &Reader) -> Result<ComparedTexts> {
        let clean = text_or_ids("clean", self.clean.as_ref(), self.clean_ids.as_ref())?;
        let corrupt = text_or_ids("corrupt", self.corrupt.as_ref(), self.corrupt_ids.as_ref())?;
        Ok(ComparedTexts { clean, corrupt })
    }
}

/// A text, or tokens.
fn text_or_ids(name: &str, text: Option<&String>, ids: Option<&Ids>) -> Result<Text> {
    match (text, ids) {
        (Some(text), _) => Ok(Text::Words(text.clone())),
        (None, Some(Ids(ids))) => Ok(Text::Ids(ids.clone())),
        (None, None) => Err(UsageError(format!("--{name} TEXT or --{name}-ids ID,ID,… is missing")).into()),
    }
}
