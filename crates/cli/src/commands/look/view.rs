//! Arguments for all `gpt2 look` commands, and their output: a table, JSON, a page or a figure.

use std::path::PathBuf;

use anyhow::{Context, Result};
use candle_gpt2_engine::{HubOptions, LoadedModel};
use candle_gpt2_look::{Analysis, ComparedTexts, Look, LookSubject, Reader, Text};
use candle_gpt2_pictures::{PictureError, Width, table};
use candle_gpt2_weights::expect_free;
use clap::Args;

use crate::exit::UsageError;
use crate::input::{Ids, InputArguments};
use crate::model_arguments::ModelArguments;
use crate::output;
use crate::progress::Terminal;

/// Arguments for a view: texts, model, output, and the view's own options.
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

/// Model and BOS token.
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

/// Output formats of a view.
#[derive(Debug, Args)]
pub(crate) struct ViewArguments {
    /// Print one JSON object: schema, tokens (index, id, text), bos, axes (name, labels), values in the
    /// order of the axes (the last one fastest; null if there is none), metric before and after
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
    /// Writes the result in every requested format.
    fn show(&self, found: &Analysis) -> Result<()> {
        let report = &found.report;
        report.check().context("internal error, please report it")?;
        // Draw the figure first, so that a failure leaves no page behind.
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
    /// Opens the model, reads the texts, computes the view and shows the result.
    ///
    /// `put` stores the texts in the view.
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
    /// Opens the model, runs `check` with its tokenizer, and only then loads the weights.
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

    /// Returns the loaded model as the subject of a view.
    pub(crate) fn subject<'a>(&self, loaded: &'a LoadedModel, reader: &'a Reader) -> LookSubject<'a> {
        LookSubject::new(loaded, self.model.options.display_name(), reader)
    }
}

/// Source of a view's texts.
pub(crate) trait Input {
    /// Texts in the form that the view expects.
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

/// Optional text; standard input is not read.
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

/// No text, for a view with its own file option.
#[derive(Debug, Args)]
pub(crate) struct NoInput {}

impl Input for NoInput {
    type Texts = ();

    fn texts(&self, _: &Reader) -> Result<()> {
        Ok(())
    }
}

/// Two texts with the same number of tokens.
#[derive(Debug, Args)]
pub(crate) struct TextsArguments {
    /// Clean text, for which the answer is right
    #[arg(long, value_name = "TEXT", conflicts_with = "clean_ids")]
    clean: Option<String>,
    /// Token ids of the clean text
    #[arg(long, value_name = "ID,ID,…")]
    clean_ids: Option<Ids>,
    /// Corrupted text, with the same number of tokens, for which the answer is wrong
    #[arg(long, value_name = "TEXT", conflicts_with = "corrupt_ids")]
    corrupt: Option<String>,
    /// Token ids of the corrupted text
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

/// Returns the text or the token ids.
fn text_or_ids(name: &str, text: Option<&String>, ids: Option<&Ids>) -> Result<Text> {
    match (text, ids) {
        (Some(text), _) => Ok(Text::Words(text.clone())),
        (None, Some(Ids(ids))) => Ok(Text::Ids(ids.clone())),
        (None, None) => Err(UsageError(format!("missing --{name} TEXT or --{name}-ids ID,ID,…")).into()),
    }
}
