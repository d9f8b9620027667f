//! What each layer would predict if it were the last: the logit lens, and the tuned lens.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use candle_gpt2::Gpt2Config;
use candle_gpt2_engine::Reporter;
use candle_gpt2_interpret::{FileError, LensCell, LensOptions, LensValue, TunedLens, lens_label, logit_lens};
use candle_gpt2_pictures::{Report, Scale};
use candle_gpt2_weights::TensorFile;

use crate::error::{Result, wrong};
use crate::files::read_bytes;
use crate::{Details, Found, LensDetails, Look, LookError, Reader, Subject, Text, TokenChoice};

/// The residual stream before each block, and after the last, through the final norm and the output head.
///
/// ```
/// use candle_gpt2_engine::Silent;
/// use candle_gpt2_look::{Details, Lens, Look, Reader, Subject, Text};
///
/// # let model = candle_gpt2_engine::ModelOptions::default().open(&Silent)?.load(&Silent)?;
/// # let reader = Reader::without_bos(model.vocabulary());
/// # let subject = Subject::new(&model, "built-in".into(), &reader);
/// let lens = Lens { watch: vec![" night".into()], ..Lens::new(Text::Words("Good night, good".into())) };
/// let found = lens.at(&subject, &Silent)?;
/// let Details::Lens(details) = found.details else { panic!("a lens has cells") };
/// assert_eq!((details.layers.len(), details.watch.len()), (5, 1));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
pub struct Lens {
    /// The text.
    pub text: Text,
    /// The value of a cell (`show`); rank and watched probability are those of the first watched token.
    pub show: LensValue,
    /// How many of the most probable tokens of each cell are in the details (`top`).
    pub top: usize,
    /// Tokens whose rank and probability are wanted too (`watch`).
    pub watch: Vec<TokenChoice>,
    /// A tuned lens (`tuned`): its file, `params.pt` or safetensors, or folder.
    pub tuned: Option<PathBuf>,
}

impl Lens {
    /// Of a text, with the probability of the most probable token in each cell and five tokens in the details.
    pub fn new(text: Text) -> Self {
        Self { text, show: LensValue::Probability, top: 5, watch: Vec::new(), tuned: None }
    }
}

/// What a lens needs to look.
///
/// Given by [`Lens`]'s `check`.
#[derive(Debug)]
pub struct CheckedLens {
    ids: Vec<u32>,
    watch: Vec<u32>,
    tuned: Option<TunedLens>,
}

/// Reads a tuned lens, and checks that it is one for such a model.
fn tuned(path: &Path, model: &Gpt2Config) -> Result<TunedLens> {
    let of_file = |path: &Path| {
        let path = path.to_owned();
        |error: FileError| LookError::File { path, error }
    };
    let config = path.join("config.json");
    if config.is_file() {
        let text = String::from_utf8_lossy(&read_bytes(&config)?).into_owned();
        TunedLens::check_config(&text, model.n_layer, model.n_embd).map_err(of_file(&config))?;
    }
    let path = if path.is_dir() { path.join("params.pt") } else { path.to_owned() };
    let tensors = TensorFile::read(&path)?.tensors;
    TunedLens::from_tensors(&tensors, model.n_layer, model.n_embd).map_err(of_file(&path))
}

impl Look for Lens {
    type Checked = CheckedLens;

    fn check(&self, reader: &Reader) -> Result<CheckedLens> {
        if self.watch.is_empty() && matches!(self.show, LensValue::Rank | LensValue::WatchedProbability) {
            return Err(wrong("`show` rank and watched-probability are of a token: `watch` TEXT"));
        }
        let watch = self.watch.iter().map(|token| reader.token("watch", token)).collect::<Result<_>>()?;
        let ids = reader.text(&self.text)?;
        let tuned = self.tuned.as_ref().map(|path| tuned(path, reader.config())).transpose()?;
        Ok(CheckedLens { ids, watch, tuned })
    }

    fn look(&self, checked: CheckedLens, subject: &Subject, _: &dyn Reporter) -> Result<Found> {
        let CheckedLens { ids, watch, tuned } = checked;
        let tuned = tuned.map(|lens| lens.to_device(subject.loaded().device())).transpose()?;
        let options = LensOptions { top: self.top.max(1), watch };
        let layers = logit_lens(&subject.run(&ids)?, &options, &|layer, x| match &tuned {
            Some(lens) => lens.translate(layer, &x),
            None => Ok(x),
        })?;
        let cells: Vec<&LensCell> = layers.iter().flat_map(|layer| &layer.cells).collect();
        let what = if tuned.is_some() { "tuned lens" } else { "logit lens" };
        let report = Self::report(what, self.show, &cells, &ids, subject.name(), subject.reader());
        let vocabulary = Arc::clone(subject.vocabulary());
        let details = LensDetails { show: self.show, layers, watch: options.watch, vocabulary };
        Ok(Found { report, details: Details::Lens(details) })
    }
}

impl Lens {
    /// The report on the cells of all layers, each with those of every token; `model` is what the user calls it.
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
            |cell: &&LensCell| cell.top.first().map_or(String::new(), |(id, _)| reader.shown(*id));
        let n_layer = reader.config().n_layer;
        reader.report("lens", format!("{what}: {}", show.title()), model, ids).with_lens(
            (0..=n_layer).map(|layer| lens_label(layer, n_layer)).collect(),
            cells.iter().map(|cell| show.of(cell)).collect(),
            cells.iter().map(most_probable).collect(),
            scale,
        )
    }
}
