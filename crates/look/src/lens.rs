//! Logit lens and tuned lens: what each layer would predict if it were the last.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use candle_gpt2::Gpt2Config;
use candle_gpt2_engine::Reporter;
use candle_gpt2_interpret::{FileError, LensCell, LensOptions, LensValue, TunedLens, lens_label, logit_lens};
use candle_gpt2_pictures::{Report, Scale};
use candle_gpt2_weights::TensorFile;
use serde::Deserialize;

use crate::error::{Result, invalid_option};
use crate::files::read_config;
use crate::named::choice;
#[cfg(feature = "clap")]
use crate::named::choices;
use crate::{Analysis, Details, LensDetails, Look, LookError, LookSubject, Reader, Text, TokenChoice};

/// Maximum number of tokens listed for a cell.
const MOST_TOKENS: usize = 1000;

/// Applies the final norm and the output head to the residual stream at every layer.
///
/// The layers are the residual stream before each block, and after the last one.
///
/// ```
/// use candle_gpt2_engine::Silent;
/// use candle_gpt2_look::{Details, Lens, Look, Reader, LookSubject, Text};
///
/// # let model = candle_gpt2_engine::ModelOptions::default().open(&Silent)?.load(&Silent)?;
/// # let reader = Reader::without_bos(model.vocabulary());
/// # let subject = LookSubject::new(&model, "built-in".into(), &reader);
/// let lens = Lens { watch: vec![" night".into()], ..Lens::new(Text::Words("Good night, good".into())) };
/// let found = lens.at(&subject, &Silent)?;
/// let Details::Lens(details) = found.details else { panic!("a lens has cells") };
/// assert_eq!((details.layers.len(), details.watch.len()), (8, 1));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[cfg_attr(feature = "clap", derive(clap::Args))]
pub struct Lens {
    /// Text to analyze.
    #[cfg_attr(feature = "clap", arg(skip))]
    pub text: Text,
    /// Number of most probable tokens to list for each cell in the JSON
    #[cfg_attr(feature = "clap", arg(long, value_name = "N", default_value_t = Lens::default().top))]
    pub top: usize,
    /// Also report the rank and probability of this token (repeatable)
    #[cfg_attr(feature = "clap", arg(long, value_name = "TEXT"))]
    pub watch: Vec<TokenChoice>,
    /// Value to show in each cell; rank and watched-probability refer to the first --watch
    #[serde(deserialize_with = "choice")]
    #[cfg_attr(feature = "clap", arg(long, value_name = "VALUE", default_value = "probability", value_parser = choices::<LensValue>()))]
    pub show: LensValue,
    /// A tuned lens: its file (params.pt or safetensors) or folder
    #[cfg_attr(feature = "clap", arg(long, value_name = "PATH"))]
    pub tuned: Option<PathBuf>,
}

impl Default for Lens {
    fn default() -> Self {
        Self { text: Text::default(), top: 5, watch: Vec::new(), show: LensValue::Probability, tuned: None }
    }
}

impl Lens {
    /// Creates options with the most probable token in each cell and five tokens in the details.
    pub fn new(text: Text) -> Self {
        Self { text, ..Self::default() }
    }
}

/// Validated options of a lens.
///
/// Returned by [`Lens`]'s `check`.
#[derive(Debug)]
pub struct CheckedLens {
    ids: Vec<u32>,
    watch: Vec<u32>,
    tuned: Option<TunedLens>,
}

/// Reads a tuned lens and checks that it fits the model.
fn tuned(path: &Path, model: &Gpt2Config) -> Result<TunedLens> {
    let of_file = |path: &Path| {
        let path = path.to_owned();
        |error: FileError| LookError::File { path, error }
    };
    let config = path.join("config.json");
    if config.is_file() {
        let text = read_config(&config)?;
        TunedLens::check_config(&text, model.n_layer, model.n_embd).map_err(of_file(&config))?;
    }
    let path = if path.is_dir() { path.join("params.pt") } else { path.to_owned() };
    let tensors = TensorFile::read(&path)?.tensors;
    TunedLens::from_tensors(&tensors, model.n_layer, model.n_embd).map_err(of_file(&path))
}

impl Look for Lens {
    type Checked = CheckedLens;

    fn check(&self, reader: &Reader) -> Result<CheckedLens> {
        if !(1..=MOST_TOKENS).contains(&self.top) {
            return Err(invalid_option(format!(
                "`top`: expected a number from 1 to {MOST_TOKENS}, found {}",
                self.top
            )));
        }
        if self.watch.is_empty() && self.show.is_watched() {
            return Err(invalid_option(
                "`show` rank and watched-probability need a token; pass `watch` TEXT",
            ));
        }
        let watch = self.watch.iter().map(|token| reader.token("watch", token)).collect::<Result<_>>()?;
        let ids = reader.text(&self.text)?;
        let tuned = self.tuned.as_ref().map(|path| tuned(path, reader.config())).transpose()?;
        Ok(CheckedLens { ids, watch, tuned })
    }

    fn look(&self, checked: CheckedLens, subject: &LookSubject, _: &dyn Reporter) -> Result<Analysis> {
        let CheckedLens { ids, watch, tuned } = checked;
        let tuned = tuned.map(|lens| lens.to_device(subject.loaded().device())).transpose()?;
        let options = LensOptions { top: self.top, watch };
        let layers = logit_lens(&subject.run(&ids)?, &options, &|layer, x| match &tuned {
            Some(lens) => lens.translate(layer, &x),
            None => Ok(x),
        })?;
        let cells: Vec<&LensCell> = layers.iter().flat_map(|layer| &layer.cells).collect();
        let mut what = if tuned.is_some() { "tuned lens" } else { "logit lens" }.to_owned();
        if let Some(token) = options.watch.first().filter(|_| self.show.is_watched()) {
            what += &format!(" of {:?}", subject.printable(*token));
        }
        let report = Self::report(&what, self.show, &cells, &ids, subject.name(), subject.reader());
        let vocabulary = Arc::clone(subject.vocabulary());
        let details = LensDetails { show: self.show, layers, watch: options.watch, vocabulary };
        Ok(Analysis { report, details: Details::Lens(details), graph: None, features: Vec::new() })
    }
}

impl Lens {
    /// Creates a report on the cells of all layers, ordered by layer and then by token.
    ///
    /// `model` is the model's display name.
    pub fn report(
        what: &str,
        show: LensValue,
        cells: &[&LensCell],
        ids: &[u32],
        model: &str,
        reader: &Reader,
    ) -> Report {
        let scale = match show {
            LensValue::Probability | LensValue::WatchedProbability => Scale::Share,
            LensValue::Next => Scale::Signed,
            _ => Scale::Amount,
        };
        let most_probable =
            |cell: &&LensCell| cell.top.first().map_or(String::new(), |(id, _)| reader.printable(*id));
        // A watched token's values would be misleading next to the text of the most probable token.
        let texts = match show.is_watched() {
            true => Vec::new(),
            false => cells.iter().map(most_probable).collect(),
        };
        let n_layer = reader.config().n_layer;
        reader.report("lens", format!("{what}: {}", show.title()), model, ids).with_lens(
            (0..=n_layer).map(|layer| lens_label(layer, n_layer)).collect(),
            cells.iter().map(|cell| show.of(cell)).collect(),
            texts,
            scale,
        )
    }
}
