//! Reads sparse autoencoders and single transcoders from files, and the built-in model's transcoders.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use candle_core::Tensor;
use candle_gpt2::{Gpt2Config, Site};
use candle_gpt2_engine::{BUILT_IN, built_in_transcoders};
use candle_gpt2_interpret::{
    Dictionary, DictionaryConfig, DictionaryFormat, FileError, named_sites, openai_site,
};
use candle_gpt2_weights::{TensorFile, WeightsError, WrittenDType, replace_file, write_rounded_tensors};
use serde_json::{Value, json};

use crate::LookError;
use crate::error::invalid_option;
use crate::files::read_config;

/// File name of SAELens' tensors.
const WEIGHTS_FILE: &str = "sae_weights.safetensors";

/// Reads a sparse autoencoder or transcoder and checks that it fits the model.
///
/// The path is a SAELens folder, an OpenAI file or [`BUILT_IN`]. `site` is the hook point that the
/// dictionary was trained on, if its files do not state one. [`BUILT_IN`] selects the built-in model's
/// transcoder at `site`, or in the middle block by default.
///
/// ```
/// use candle_gpt2::Gpt2Config;
/// use candle_gpt2_look::read_dictionary;
///
/// let error = read_dictionary("no/such/folder".as_ref(), None, &Gpt2Config::gpt2()).err().ok_or("expected an error")?;
/// assert!(error.to_string().contains("no/such/folder"));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// If a file cannot be read, is not a dictionary, or does not fit the model.
pub fn read_dictionary(
    path: &Path,
    site: Option<&str>,
    model: &Gpt2Config,
) -> crate::error::Result<Dictionary> {
    let site = match site {
        Some(name) => {
            let sites = named_sites(name, model.n_layer)
                .map_err(|error| invalid_option(format!("`site`: {error}")))?;
            let [site] = sites[..] else {
                return Err(invalid_option(format!(
                    "`site` {name}: expected a single hook point, such as 8.resid_post"
                )));
            };
            Some(site)
        }
        None => None,
    };
    let dictionary = StoredDictionary::read(path, site)?.dictionary;
    let other_model = |error| LookError::File { path: path.to_owned(), error };
    dictionary.check_model(model).map_err(other_model)?;
    Ok(dictionary)
}

/// A dictionary with its tensors and configuration, named as in SAELens files.
///
/// ```
/// use std::collections::BTreeMap;
///
/// use candle_core::{DType, Device, Tensor};
/// use candle_gpt2_look::StoredDictionary;
///
/// let zeros = |shape: &[usize]| Tensor::zeros(shape, DType::F32, &Device::Cpu);
/// let tensors = BTreeMap::from([
///     ("W_enc".to_owned(), zeros(&[4, 8])?),
///     ("b_enc".to_owned(), zeros(&[8])?),
///     ("W_dec".to_owned(), zeros(&[8, 4])?),
///     ("b_dec".to_owned(), zeros(&[4])?),
/// ]);
/// let config = r#"{"architecture": "standard", "d_in": 4, "d_sae": 8, "hook_name": "blocks.1.hook_resid_pre"}"#;
/// let folder = tempfile::tempdir()?;
/// StoredDictionary::of_tensors(config, tensors)?.save(folder.path())?;
/// let read = StoredDictionary::read(folder.path(), None)?;
/// assert_eq!((read.config()["d_sae"].as_u64(), read.dictionary().latents()), (Some(8), 8));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
pub struct StoredDictionary {
    dictionary: Dictionary,
    config: Value,
    tensors: BTreeMap<String, Tensor>,
}

impl StoredDictionary {
    /// Creates a dictionary from tensors under SAELens' names and the text of a `cfg.json`.
    ///
    /// The configuration's keys about the model may be outside `metadata`.
    ///
    /// # Errors
    /// If a key or a tensor is missing, unsupported or does not fit the others.
    pub fn of_tensors(config: &str, tensors: BTreeMap<String, Tensor>) -> Result<Self, FileError> {
        let mut given: Value =
            serde_json::from_str(config).map_err(|error| FileError::NotJson { error: error.to_string() })?;
        // A file without `metadata` would be treated as SAELens 5 or older, which trained on processed
        // models.
        if let Some(given) = given.as_object_mut()
            && !given.contains_key("metadata")
        {
            given.insert("metadata".into(), json!({}));
        }
        let parsed = DictionaryConfig::from_json(&given.to_string())?;
        Self::new(parsed, given, tensors)
    }

    fn new(
        config: DictionaryConfig,
        given: Value,
        tensors: BTreeMap<String, Tensor>,
    ) -> Result<Self, FileError> {
        let dictionary = Dictionary::from_tensors(&tensors, &config)?;
        let tensors = match config.format {
            DictionaryFormat::SaeLens => tensors,
            // OpenAI's files have nothing folded into the weights.
            DictionaryFormat::OpenAi => ["W_enc", "b_enc", "W_dec", "b_dec"]
                .into_iter()
                .filter_map(|name| Some((name.to_owned(), dictionary.tensor(name)?.clone())))
                .collect(),
        };
        Ok(Self { config: in_layout(&dictionary, given), dictionary, tensors })
    }

    /// Reads a dictionary for any model, in the formats of [`read_dictionary`].
    ///
    /// # Errors
    /// If a file cannot be read or is not an autoencoder.
    pub fn read(path: &Path, site: Option<Site>) -> crate::error::Result<Self> {
        if path == Path::new(BUILT_IN) {
            return built_in_dictionary(site);
        }
        let of_file = |error: FileError| LookError::File { path: path.to_owned(), error };
        if path.is_dir() {
            let text = read_config(&path.join("cfg.json"))?;
            let tensors = TensorFile::read(&path.join(WEIGHTS_FILE))?.tensors;
            return Self::of_file(&text, tensors, site).map_err(of_file);
        }
        let file = TensorFile::read(path)?;
        let Some(site) = site.or_else(|| site_from_path(path)) else {
            return Err(invalid_option(format!(
                "{}: the file does not record the dictionary's hook point; pass `site`",
                path.display()
            )));
        };
        let config = DictionaryConfig::openai(&file.entries, site).map_err(of_file)?;
        Self::new(config, Value::Null, file.tensors).map_err(of_file)
    }

    fn of_file(text: &str, tensors: BTreeMap<String, Tensor>, site: Option<Site>) -> Result<Self, FileError> {
        let mut config = DictionaryConfig::from_json(text)?;
        let mut given: Value = serde_json::from_str(text.trim_start_matches('\u{feff}')).unwrap_or_default();
        if let Some(site) = site {
            config.site = site;
            let holder = match given["metadata"].get("hook_name").is_some() {
                true => &mut given["metadata"],
                false => &mut given,
            };
            holder["hook_name"] = site.to_string().into();
        }
        Self::new(config, given, tensors)
    }

    /// Returns the dictionary.
    pub fn dictionary(&self) -> &Dictionary {
        &self.dictionary
    }

    /// Returns the dictionary's tensors under SAELens' names.
    pub fn tensors(&self) -> &BTreeMap<String, Tensor> {
        &self.tensors
    }

    /// Returns all keys of the dictionary's `cfg.json`, in the layout of SAELens 6.
    pub fn config(&self) -> &Value {
        &self.config
    }

    /// Writes `cfg.json` and `sae_weights.safetensors` into a folder, replacing existing files.
    ///
    /// The folder is created if it is missing.
    ///
    /// # Errors
    /// If a file cannot be written.
    pub fn save(&self, folder: &Path) -> crate::error::Result<()> {
        fs::create_dir_all(folder).map_err(|error| WeightsError::Unwritable {
            path: folder.to_owned(),
            what: format!("cannot be written: {error}"),
        })?;
        replace_file(&folder.join(WEIGHTS_FILE), |partial| {
            Ok(write_rounded_tensors(partial, &self.tensors, WrittenDType::F32)?)
        })?;
        let text = format!("{:#}\n", self.config);
        Ok(replace_file(&folder.join("cfg.json"), |partial| Ok(fs::write(partial, text)?))?)
    }
}

/// Converts the keys of a `cfg.json` to the layout of SAELens 6.
///
/// A file in that layout keeps its keys, except that `dtype` is set to the saved tensors' dtype.
fn in_layout(dictionary: &Dictionary, given: Value) -> Value {
    let is_current = given["metadata"].get("sae_lens_version").is_some();
    let mut config = dictionary.config().to_json();
    let Value::Object(given) = given else { return config };
    if is_current {
        let mut given = Value::Object(given);
        given["dtype"] = config["dtype"].take();
        return given;
    }
    let metadata = given.get("metadata").and_then(Value::as_object).cloned().unwrap_or_default();
    let others = given.into_iter().filter(|(key, _)| key != "metadata");
    for (key, value) in metadata.into_iter().chain(others) {
        if config.get(&key).is_none() && config["metadata"].get(&key).is_none() {
            config["metadata"][key] = value;
        }
    }
    config
}

/// Parses the hook point from OpenAI's folder and file names: `resid_post_mlp_v5_32k/8.pt`.
fn site_from_path(path: &Path) -> Option<Site> {
    let layer = path.file_stem()?.to_str()?.rsplit(|c: char| !c.is_ascii_digit()).next()?.parse().ok()?;
    openai_site(path.parent()?.file_name()?.to_str()?, layer)
}

/// Returns the built-in model's transcoder at a hook point, or in the middle block by default.
fn built_in_dictionary(site: Option<Site>) -> crate::error::Result<StoredDictionary> {
    let mut dictionaries = stored_built_in()?;
    let site_of = |stored: &StoredDictionary| stored.dictionary.config().site;
    let index = match site {
        None => dictionaries.len() / 2,
        Some(site) => {
            let sites = || {
                let names = dictionaries.iter().map(|stored| site_of(stored).to_string());
                names.collect::<Vec<_>>().join(", ")
            };
            dictionaries.iter().position(|stored| site_of(stored) == site).ok_or_else(|| {
                invalid_option(format!(
                    "`site` {site}: {BUILT_IN} has no transcoder there; expected one of {}",
                    sites()
                ))
            })?
        }
    };
    Ok(dictionaries.swap_remove(index))
}

/// Returns the built-in model's transcoders, one for each block.
///
/// ```
/// let dictionaries = candle_gpt2_look::built_in_dictionaries()?;
/// assert_eq!(dictionaries[2].config().site.to_string(), "blocks.2.hook_resid_mid");
/// # Ok::<(), candle_gpt2_look::LookError>(())
/// ```
///
/// # Errors
/// If the program does not contain the built-in model.
pub fn built_in_dictionaries() -> crate::error::Result<Vec<Dictionary>> {
    Ok(stored_built_in()?.into_iter().map(|stored| stored.dictionary).collect())
}

fn stored_built_in() -> crate::error::Result<Vec<StoredDictionary>> {
    let files = built_in_transcoders();
    if files.is_empty() {
        return Err(invalid_option(format!(
            "{BUILT_IN}: this program was built without the built-in model and its transcoders"
        )));
    }
    files.iter().map(|(config, weights)| stored(BUILT_IN, config, *weights)).collect()
}

/// Creates a SAELens dictionary from its `cfg.json` and the bytes of its `sae_weights.safetensors`.
///
/// Error messages refer to the dictionary as `name`. [`built_in_dictionaries`] come from the same format.
///
/// # Errors
/// If either is damaged or unsupported.
pub fn dictionary_from_bytes(
    name: &str,
    config: &str,
    weights: impl Into<Cow<'static, [u8]>>,
) -> crate::error::Result<Dictionary> {
    Ok(stored(name, config, weights)?.dictionary)
}

fn stored(
    name: &str,
    config: &str,
    weights: impl Into<Cow<'static, [u8]>>,
) -> crate::error::Result<StoredDictionary> {
    let tensors = TensorFile::of_bytes(name, weights)?.tensors;
    StoredDictionary::of_file(config, tensors, None)
        .map_err(|error| LookError::File { path: name.into(), error })
}
