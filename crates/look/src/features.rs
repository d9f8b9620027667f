//! Which features of a sparse autoencoder are active, token by token.

use std::path::{Path, PathBuf};

use candle_gpt2::{Gpt2Config, Site, SiteKind};
use candle_gpt2_engine::Reporter;
use candle_gpt2_interpret::{Dictionary, DictionaryConfig, FileError, Processing, named_sites, openai_site};
use candle_gpt2_pictures::{Axis, Scale};
use candle_gpt2_weights::TensorFile;
use serde::Deserialize;
use serde_json::json;

use crate::error::{Result, wrong};
use crate::files::read_text;
use crate::{Found, Look, LookError, LookSubject, Reader, Text};

/// The features of a dictionary that are most active in a text.
///
/// ```
/// use candle_gpt2_engine::Silent;
/// use candle_gpt2_look::{Features, Look, Reader, LookSubject, Text};
///
/// # let model = candle_gpt2_engine::ModelOptions::default().open(&Silent)?.load(&Silent)?;
/// # let reader = Reader::without_bos(model.vocabulary());
/// # let subject = LookSubject::new(&model, "built-in".into(), &reader);
/// let text = Text::Words("One day, Mia was".into());
/// let features = Features { text, sae: "no/such/folder".into(), site: None, top: 10 };
/// let error = features.at(&subject, &Silent).err().ok_or("it is there")?;
/// assert!(error.to_string().contains("no/such/folder"));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "clap", derive(clap::Args))]
pub struct Features {
    /// The text.
    #[cfg_attr(feature = "clap", arg(skip))]
    pub text: Text,
    /// The sparse autoencoder or transcoder: a folder with cfg.json and sae_weights.safetensors, or a .pt file
    #[cfg_attr(feature = "clap", arg(long, value_name = "PATH"))]
    pub sae: PathBuf,
    /// Hook point that it was trained on, if its file does not say
    #[cfg_attr(feature = "clap", arg(long, value_name = "SITE"))]
    pub site: Option<String>,
    /// Number of features to show: those that are most active anywhere in the text
    #[serde(default = "usual_top")]
    #[cfg_attr(feature = "clap", arg(long, value_name = "N", default_value_t = usual_top()))]
    pub top: usize,
}

fn usual_top() -> usize {
    20
}

impl Features {
    /// Reads the autoencoder, and checks that it is one for such a model.
    fn open(&self, reader: &Reader) -> Result<Dictionary> {
        read_dictionary(&self.sae, self.site.as_deref(), reader.config())
    }
}

/// Reads a sparse autoencoder, a folder of SAELens or a file of OpenAI's, and checks that it is one for such a model. `site` is the
/// hook point that it was trained on, if its files do not tell.
///
/// ```
/// use candle_gpt2::Gpt2Config;
/// use candle_gpt2_look::read_dictionary;
///
/// let error = read_dictionary("no/such/folder".as_ref(), None, &Gpt2Config::gpt2()).err().ok_or("it is there")?;
/// assert!(error.to_string().contains("no/such/folder"));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// When a file cannot be read, is no autoencoder, or is one for another model.
pub fn read_dictionary(path: &Path, site: Option<&str>, model: &Gpt2Config) -> Result<Dictionary> {
    let site = match site {
        Some(name) => {
            let sites =
                named_sites(name, model.n_layer).map_err(|error| wrong(format!("`site`: {error}")))?;
            let [site] = sites[..] else {
                return Err(wrong(format!("`site` {name}: expected one place, such as 8.resid_post")));
            };
            Some(site)
        }
        None => None,
    };
    let of_file = |error: FileError| LookError::File { path: path.to_owned(), error };
    let (file, mut config) = if path.is_dir() {
        let text = read_text(&path.join("cfg.json"))?;
        let weights = path.join("sae_weights.safetensors");
        (TensorFile::read(&weights)?, DictionaryConfig::from_json(&text).map_err(of_file)?)
    } else {
        let file = TensorFile::read(path)?;
        let Some(site) = site.or_else(|| of_folder(path)) else {
            return Err(wrong(format!(
                "{}: the file does not say what it was trained on; `site` does",
                path.display()
            )));
        };
        let config = DictionaryConfig::openai(&file.entries, site).map_err(of_file)?;
        (file, config)
    };
    if let Some(site) = site {
        config.site = site;
    }
    let dictionary = Dictionary::from_tensors(&file.tensors, &config).map_err(of_file)?;
    dictionary.check_model(model).map_err(of_file)?;
    Ok(dictionary)
}

/// The place that OpenAI's folder and file names tell: `resid_post_mlp_v5_32k/8.pt`.
fn of_folder(path: &Path) -> Option<Site> {
    let layer = path.file_stem()?.to_str()?.rsplit(|c: char| !c.is_ascii_digit()).next()?.parse().ok()?;
    openai_site(path.parent()?.file_name()?.to_str()?, layer)
}

impl Look for Features {
    /// The tokens, and the dictionary.
    type Checked = (Vec<u32>, Dictionary);

    fn check(&self, reader: &Reader) -> Result<Self::Checked> {
        Ok((reader.text(&self.text)?, self.open(reader)?))
    }

    fn look(
        &self,
        (ids, dictionary): Self::Checked,
        subject: &LookSubject,
        _: &dyn Reporter,
    ) -> Result<Found> {
        let model = subject.model();
        let dictionary = dictionary.to_device(model.device())?;
        let site = dictionary.config().site;
        let explained_site = dictionary.explained_site();
        let record = subject.run(&ids)?.record([site, explained_site])?;
        let processing = Processing::new(model)?;
        let input = dictionary.input(record.get(site)?, &processing)?;
        let target = dictionary.target(record.get(explained_site)?, &processing)?;
        let latents = dictionary.encode(&input)?.flatten_to(1)?; // (T, F)
        let explained = dictionary.explained_target(&input, &target)?;
        let rows = latents.to_vec2::<f32>()?;
        let largest: Vec<f32> = latents.max(0)?.to_vec1()?;
        let mut order: Vec<usize> = (0..largest.len()).filter(|feature| largest[*feature] > 0.0).collect();
        order.sort_by(|a, b| largest[*b].total_cmp(&largest[*a]).then(a.cmp(b)));
        let active = order.len();
        order.truncate(self.top.max(1));
        let mut report = subject.report("features", format!("features of {site}"), &ids);
        report.axes = vec![
            Axis::new("feature", order.iter().map(usize::to_string)),
            Axis::tokens("token", &report.tokens),
        ];
        report.values = order.iter().flat_map(|feature| rows.iter().map(|row| Some(row[*feature]))).collect();
        report.scale = Scale::Amount;
        report.notes.push(format!(
            "{active} of {} features are active; {:.1} at a token on average",
            dictionary.latents(),
            explained.mean_l0
        ));
        if let Some(share) = explained.variance_explained {
            let of = match explained_site == site {
                true => String::new(),
                false => format!(" of {explained_site}"),
            };
            report.notes.push(format!("they explain {share:.3} of the variance{of}"));
        }
        if dictionary.config().prepends_bos == Some(true) && !subject.has_bos() {
            report.notes.push(
                "warning: it was trained with a token in front of each text (bos), and none is here".into(),
            );
        }
        if site.kind != SiteKind::Z && dictionary.config().needs_centring() {
            report.notes.push("the mean of the residual stream is subtracted, as in training".into());
        }
        let values = json!({
            "mean_l0": explained.mean_l0, "variance_explained": explained.variance_explained, "mse": explained.mse,
        });
        Ok(Found::new(report, json!({ "site": site.to_string(), "explained": values })))
    }
}
