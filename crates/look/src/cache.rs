//! Activations from a run at chosen hook points, as tensors and as files.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::path::Path;

use candle_core::Tensor;
use candle_gpt2::{LogitsFor, Observer, Site, SiteKind};
use candle_gpt2_interpret::{Chain, Processing, Record, Run};
use candle_gpt2_pictures::Token;
use candle_gpt2_weights::{WeightsError, create_file, write_npz, write_tensors};
use serde::Deserialize;

use crate::error::{Result, invalid_option};
use crate::named::choice;
#[cfg(feature = "clap")]
use crate::named::choices;
use crate::{LookSubject, Numbers, Ranges, Reader, Text};

/// Token dimension of logits, `(B, T, V)`.
const TOKEN_DIM: usize = 1;
/// Identifier of the file format and its version.
const SCHEMA: &str = "gpt2.cache/1";

/// Options for recording the activations of a text.
///
/// ```
/// use candle_gpt2_engine::Silent;
/// use candle_gpt2_interpret::named_sites;
/// use candle_gpt2_look::{Activations, CacheFormat, Numbers, Reader, LookSubject, Text};
///
/// # let model = candle_gpt2_engine::ModelOptions::default().open(&Silent)?.load(&Silent)?;
/// # let reader = Reader::without_bos(model.vocabulary());
/// # let subject = LookSubject::new(&model, "built-in".into(), &reader);
/// let wanted = Activations {
///     text: Text::Ids(vec![5, 6, 7]),
///     sites: named_sites("resid_post", 6)?,
///     layers: Some("0-1".parse()?),
///     positions: None,
///     numbers: Numbers::Raw,
/// };
/// let cached = wanted.cached(&wanted.check(&reader)?, &subject)?;
/// assert_eq!(cached.tensors["blocks.1.hook_resid_post"].dims(), [1, 3, 256]);
/// # let folder = tempfile::tempdir()?;
/// # let folder = folder.path();
/// let bytes = cached.write(&folder.join("cache.safetensors"), CacheFormat::Safetensors)?;
/// assert!(bytes > 2 * 3 * 256 * 4);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[cfg_attr(feature = "clap", derive(clap::Args))]
pub struct Activations {
    /// Text to analyze.
    #[cfg_attr(feature = "clap", arg(skip))]
    pub text: Text,
    /// Hook points to record. Resolving their names requires a model.
    #[serde(skip)]
    #[cfg_attr(feature = "clap", arg(skip))]
    pub sites: Vec<Site>,
    /// Only these layers: 3, 0-5 or 0,4,8-11
    #[cfg_attr(feature = "clap", arg(long, value_name = "LAYERS"))]
    pub layers: Option<Ranges>,
    /// Only these tokens (query tokens for scores and patterns): 3, 0-5 or 0,4,8-11
    #[cfg_attr(feature = "clap", arg(long, value_name = "POSITIONS", allow_hyphen_values = true))]
    pub positions: Option<Ranges>,
    /// Activations as in the checkpoint, or as in TransformerLens' compatibility mode
    /// (layer norms folded, weights centered, value biases folded)
    #[serde(rename = "as", deserialize_with = "choice")]
    #[cfg_attr(feature = "clap", arg(long = "as", value_name = "NUMBERS", default_value = "raw", value_parser = choices::<Numbers>()))]
    pub numbers: Numbers,
}

/// Validated options for recording activations: tokens, hook points and positions.
///
/// Returned by [`Activations::check`].
#[derive(Debug)]
pub struct CheckedActivations {
    ids: Vec<u32>,
    sites: Vec<Site>,
    positions: Option<Vec<usize>>,
}

/// Recorded activations with their metadata.
///
/// Returned by [`Activations::cached`].
#[derive(Debug)]
pub struct Cached {
    /// Tensors by TransformerLens name.
    pub tensors: BTreeMap<String, Tensor>,
    /// Tokens of the text.
    pub tokens: Vec<Token>,
    /// Whether a BOS token was prepended to the text.
    pub bos: bool,
    metadata: HashMap<String, String>,
}

/// File format for activations.
///
/// ```
/// use candle_gpt2_look::CacheFormat;
///
/// assert!(matches!(CacheFormat::of("cache.npz".as_ref())?, CacheFormat::Npz));
/// assert!(CacheFormat::of("cache.txt".as_ref()).is_err());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CacheFormat {
    /// safetensors, with the recording options in the metadata.
    Safetensors,
    /// NumPy's archive of arrays.
    Npz,
}

impl CacheFormat {
    /// Returns the format selected by a file name's extension.
    ///
    /// # Errors
    /// If the extension selects neither format; the message names the option `out`.
    pub fn of(path: &Path) -> Result<Self> {
        match path.extension().and_then(|extension| extension.to_str()) {
            Some("safetensors") => Ok(Self::Safetensors),
            Some("npz") => Ok(Self::Npz),
            _ => Err(invalid_option(format!(
                "`out` {}: expected a file name ending in .safetensors or .npz",
                path.display()
            ))),
        }
    }
}

impl Activations {
    /// Validates the text and the options without the model's weights.
    ///
    /// # Errors
    /// If the text or an option does not fit the model.
    pub fn check(&self, reader: &Reader) -> Result<CheckedActivations> {
        let ids = reader.text(&self.text)?;
        let mut sites = self.sites.clone();
        if let Some(layers) = &self.layers {
            let layers = reader.layers(layers)?;
            sites.retain(|site| site.layer.is_none_or(|layer| layers.contains(&layer)));
            if sites.is_empty() {
                return Err(invalid_option("`layers`: no selected hook point is in these layers"));
            }
        }
        let positions =
            self.positions.as_ref().map(|positions| reader.numbers("positions", positions, ids.len()));
        Ok(CheckedActivations { ids, sites, positions: positions.transpose()? })
    }

    /// Runs the model and returns the activations at the hook points.
    ///
    /// The output head is computed only if logits are requested.
    ///
    /// # Errors
    /// If the model fails.
    pub fn cached(&self, checked: &CheckedActivations, subject: &LookSubject) -> Result<Cached> {
        let record = Run::new(subject.model(), &checked.ids)?.fill(self.record(checked))?;
        let mut tensors = BTreeMap::new();
        self.give(record, checked, subject, &mut |site, value| {
            tensors.insert(site.to_string(), value);
            Ok(())
        })?;
        Ok(Cached {
            tensors,
            tokens: subject.tokens(&checked.ids),
            bos: subject.has_bos(),
            metadata: self.metadata(checked, subject)?,
        })
    }

    /// Runs the model with an observer and passes each activation to `give`.
    ///
    /// The observer may change the computation. Activations are passed one by one in the order of the hook
    /// points, so that few are in memory twice.
    ///
    /// Returns the logits of every token, `(1, T, V)`.
    ///
    /// # Errors
    /// If the model, the observer or `give` fails.
    pub fn observed(
        &self,
        checked: &CheckedActivations,
        subject: &LookSubject,
        observer: &mut dyn Observer,
        give: &mut dyn FnMut(Site, Tensor) -> Result<()>,
    ) -> Result<Tensor> {
        let mut record = self.record(checked);
        let run = Run::new(subject.model(), &checked.ids)?;
        let logits = run.logits(LogitsFor::EveryToken, &mut Chain(vec![observer, &mut record]))?;
        self.give(record, checked, subject, give)?;
        Ok(logits)
    }

    /// Returns the final norm and the hook point that replaces it in TransformerLens' convention.
    ///
    /// TransformerLens reports the normalized residual stream instead of the norm's output.
    fn processed_norm(&self, checked: &CheckedActivations) -> Option<[Site; 2]> {
        let norms = [SiteKind::FinalNorm, SiteKind::LnFinalNormalized].map(Site::outside);
        (self.numbers == Numbers::TransformerLens && checked.sites.contains(&norms[0])).then_some(norms)
    }

    fn record(&self, checked: &CheckedActivations) -> Record {
        let also = self.processed_norm(checked).map(|[_, normalized]| normalized);
        let record = Record::new(checked.sites.iter().copied().chain(also));
        match &checked.positions {
            Some(positions) => record.at(positions.clone()),
            None => record,
        }
    }

    /// Passes the recorded activations to `give` one by one, in the chosen convention.
    fn give(
        &self,
        mut record: Record,
        checked: &CheckedActivations,
        subject: &LookSubject,
        give: &mut dyn FnMut(Site, Tensor) -> Result<()>,
    ) -> Result<()> {
        let is_processed = self.numbers == Numbers::TransformerLens;
        let processing = is_processed.then(|| Processing::new(subject.model())).transpose()?;
        let norms = self.processed_norm(checked);
        for site in &checked.sites {
            let value = match (&processing, norms) {
                (Some(_), Some([norm, normalized])) if *site == norm => record.get(normalized)?.clone(),
                (Some(processing), _) => processing.apply(*site, record.get(*site)?)?,
                (None, _) => record.get(*site)?.clone(),
            };
            let is_needed_again = norms.is_some_and(|[_, normalized]| *site == normalized);
            if !is_needed_again {
                record.values.remove(site);
            }
            // `Record` does not apply positions to logits.
            let value = match &checked.positions {
                Some(positions) if site.kind == SiteKind::Logits => {
                    let positions: Vec<i64> = positions.iter().map(|position| *position as i64).collect();
                    let count = positions.len();
                    value.index_select(&Tensor::from_vec(positions, count, value.device())?, TOKEN_DIM)?
                }
                _ => value,
            };
            give(*site, value.contiguous()?)?;
        }
        Ok(())
    }

    /// Metadata to store with the activations.
    fn metadata(
        &self,
        checked: &CheckedActivations,
        subject: &LookSubject,
    ) -> Result<HashMap<String, String>> {
        let CheckedActivations { ids, sites, positions } = checked;
        let texts: Vec<String> = ids.iter().map(|id| subject.printable(*id)).collect();
        let names: Vec<String> = sites.iter().map(Site::to_string).collect();
        let json = |value: serde_json::Value| value.to_string();
        let entries = [
            ("schema", SCHEMA.to_owned()),
            ("program", format!("gpt2 {}", env!("CARGO_PKG_VERSION"))),
            ("model", subject.name().to_owned()),
            ("tokens", json(ids.as_slice().into())),
            ("token_strings", json(texts.into())),
            ("bos", subject.has_bos().to_string()),
            ("sites", json(names.into())),
            ("positions", json(positions.clone().into())),
            ("processing", if self.numbers == Numbers::Raw { "raw" } else { "transformer_lens" }.to_owned()),
        ];
        Ok(entries.into_iter().map(|(name, value)| (name.to_owned(), value)).collect())
    }
}

impl Cached {
    /// Identifier of the file format and its version.
    pub fn schema(&self) -> &'static str {
        SCHEMA
    }

    /// Writes a new file atomically and returns its size in bytes.
    ///
    /// # Errors
    /// If the path already exists, a tensor cannot be read or the file cannot be written.
    pub fn write(&self, path: &Path, format: CacheFormat) -> Result<u64> {
        create_file(path, |partial| {
            match format {
                CacheFormat::Npz => write_npz(partial, &self.tensors)?,
                CacheFormat::Safetensors => write_tensors(partial, &self.tensors, self.metadata.clone())?,
            }
            Ok(())
        })?;
        let size = File::open(path).and_then(|file| file.metadata());
        let unreadable = |error| WeightsError::Read { path: path.to_owned(), error };
        Ok(size.map_err(unreadable)?.len())
    }
}
