//! Dictionaries of features (sparse autoencoders): what is seen at a place of a model as a sum of few directions out of many.
//!
//! With `W_enc (C, F)` and `W_dec (F, C)`: `latents = act((x − b_dec) · W_enc + b_enc)` and `x̂ = latents · W_dec + b_dec`, where `act`
//! is ReLU, ReLU of the `k` largest, or ReLU above a threshold of each latent. Where the input is normalized, `x` is first made
//! `(x − mean) / (deviation + 1e-5)`, and `x̂` is `x̂ · deviation + mean` in the end; the deviation is the unbiased one.
//!
//! Sources: SAELens (decoderesearch/SAELens, `sae_lens/saes/sae.py` at 2ad7a45, `topk_sae.py`, `jumprelu_sae.py`, and for older files
//! `handle_pre_6_0_config` in `sae_lens/loading/pretrained_sae_loaders.py` at 10537c1); OpenAI (openai/sparse_autoencoder,
//! `sparse_autoencoder/model.py` and `paths.py` at 764586a). Files are read elsewhere: here come their tensors and texts.

use std::collections::BTreeMap;
use std::fmt::{Display, Formatter};

use candle_core::{D, DType, Device, Tensor, bail};
use candle_gpt2::{Gpt2Config, Site, SiteKind};
use serde_json::Value;

use crate::{Processing, SiteError, named_site, site_width};

/// Added to the deviation of an input that is normalized; both sources have it in their code, not in their files.
const DEVIATION_EPSILON: f64 = 1e-5;
/// Least norm that a latent's direction is divided by, SAELens' own.
const LEAST_NORM: f32 = 1e-8;
/// Largest sizes that a configuration may name.
const MAX_SIZE: u64 = 1 << 32;

/// What makes a latent of a number. Part of a [`DictionaryConfig`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LatentActivation {
    /// The number itself where it is positive.
    Relu,
    /// The same of the `k` largest alone; of equals the first.
    TopK {
        /// How many.
        k: usize,
    },
    /// The number itself where it is positive and above the threshold of its latent.
    JumpRelu,
}

/// Whose names the tensors have. Part of a [`DictionaryConfig`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DictionaryFormat {
    /// `W_enc` `(C, F)`, `b_enc`, `W_dec` `(F, C)`, `b_dec`, `threshold`.
    SaeLens,
    /// `encoder.weight` `(F, C)`, `latent_bias`, `decoder.weight` `(C, F)`, `pre_bias`.
    OpenAi,
}

/// Whose values of a place a dictionary was trained on. Part of a [`DictionaryConfig`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TrainedOn {
    /// Those of the checkpoint as it is.
    Checkpoint,
    /// Those that TransformerLens makes of them, see [`Processing`].
    TransformerLens,
}

/// What is known of a dictionary besides its tensors.
///
/// ```
/// use candle_gpt2_interpret::{DictionaryConfig, LatentActivation, named_site};
///
/// let config = DictionaryConfig::from_json(
///     r#"{"hook_name": "blocks.8.hook_resid_pre", "architecture": "standard", "d_in": 768, "d_sae": 24576,
///         "activation_fn": "relu", "apply_b_dec_to_input": true}"#,
/// )?;
/// assert_eq!(config.activation, LatentActivation::Relu);
/// assert_eq!(config.site, named_site("resid_pre8")?);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DictionaryConfig {
    /// The place that it explains.
    pub site: Site,
    /// Names of its tensors.
    pub format: DictionaryFormat,
    /// Width of its input, `C` (`d_in`); that of the tensors if not known.
    pub d_in: Option<usize>,
    /// Number of latents, `F` (`d_sae`); that of the tensors if not known.
    pub d_sae: Option<usize>,
    /// What makes the latents.
    pub activation: LatentActivation,
    /// Whether the output's bias is subtracted from the input (`apply_b_dec_to_input`).
    pub subtracts_bias: bool,
    /// Whether the input is normalized (`normalize_activations` is `layer_norm`).
    pub normalizes_input: bool,
    /// Whether latents count by the length of their directions (`rescale_acts_by_decoder_norm`).
    pub scales_by_direction: bool,
    /// Whether the texts of its training started with `<|endoftext|>` (`prepend_bos`), where it is known.
    pub prepends_bos: Option<bool>,
    /// Whose values it was trained on.
    pub trained_on: TrainedOn,
    /// What says so.
    pub trained_on_because: &'static str,
}

impl DictionaryConfig {
    /// Reads the text of SAELens' `cfg.json`, of any version. A key that changes the numbers is honoured or refused.
    ///
    /// # Errors
    /// When it is not JSON, lacks a key, or asks for what is not supported.
    pub fn from_json(text: &str) -> Result<Self, FileError> {
        let not_json = |error: String| FileError::NotJson { error };
        let value: Value = serde_json::from_str(text.trim_start_matches('\u{feff}'))
            .map_err(|error| not_json(error.to_string()))?;
        if !value.is_object() {
            return Err(not_json("its outermost value is no object".into()));
        }
        let keys = Keys(&value);
        keys.refuse_what_is_not_supported()?;
        let (key, hook) =
            keys.text(&["hook_name", "hook_point", "act_name"])?.ok_or_else(|| FileError::Key {
                key: "hook_name".into(),
                expected: "the place of the model, such as \"blocks.8.hook_resid_pre\"".into(),
                found: "nothing".into(),
            })?;
        let site = named_site(hook).map_err(|error| FileError::Hook { key, error })?;
        let (trained_on, trained_on_because) = keys.trained_on(site.kind);
        Ok(Self {
            site,
            format: DictionaryFormat::SaeLens,
            d_in: Some(keys.size(&["d_in", "act_size"])?),
            d_sae: Some(keys.size(&["d_sae", "dict_size"])?),
            activation: keys.activation()?,
            subtracts_bias: keys.flag("apply_b_dec_to_input")?.unwrap_or(true),
            normalizes_input: keys.normalizes_input()?,
            scales_by_direction: keys.flag("rescale_acts_by_decoder_norm")?.unwrap_or(false),
            prepends_bos: Some(keys.flag("prepend_bos")?.unwrap_or(true)),
            trained_on,
            trained_on_because,
        })
    }

    /// The configuration of one of OpenAI's files, by the texts and numbers that stand beside its tensors (`activation`,
    /// `activation_state_dict.k`). Which place it explains stands in the name of its folder, see [`openai_site`].
    ///
    /// # Errors
    /// When the activation is not supported.
    pub fn openai(entries: &BTreeMap<String, String>, site: Site) -> Result<Self, FileError> {
        let entry = |key: &str| entries.get(key).map(String::as_str);
        let unsupported = |key: &str, found: &str| FileError::Key {
            key: key.into(),
            expected: "ReLU, or TopK with ReLU after it".into(),
            found: found.into(),
        };
        let activation = match entry("activation") {
            // Files of the first versions say nothing.
            None | Some("ReLU") => LatentActivation::Relu,
            Some("TopK") => {
                if let Some(after) = entry("activation_state_dict.postact_fn").filter(|name| *name != "ReLU")
                {
                    return Err(unsupported("activation_state_dict.postact_fn", after));
                }
                let key = "activation_state_dict.k";
                let k = entry(key).and_then(|k| k.parse().ok()).filter(|k| *k > 0);
                LatentActivation::TopK {
                    k: k.ok_or_else(|| FileError::Key {
                        key: key.into(),
                        expected: "how many latents are kept, a whole number from 1".into(),
                        found: entry(key).unwrap_or("nothing").into(),
                    })?,
                }
            }
            Some(other) => return Err(unsupported("activation", other)),
        };
        Ok(Self {
            site,
            format: DictionaryFormat::OpenAi,
            d_in: None,
            d_sae: None,
            activation,
            subtracts_bias: true,
            // OpenAI's own reader tells the versions apart by it.
            normalizes_input: matches!(activation, LatentActivation::TopK { .. }),
            scales_by_direction: false,
            prepends_bos: None,
            trained_on: TrainedOn::Checkpoint,
            trained_on_because: "OpenAI uses its dictionaries with weights that are not centred",
        })
    }

    /// Whether what the model has at the place is to be made less its mean over the width, as TransformerLens shows it.
    pub fn needs_centring(&self) -> bool {
        self.trained_on == TrainedOn::TransformerLens && self.site.kind.is_residual()
    }
}

/// The place that a dictionary of OpenAI explains, by the folder that it comes from (`resid_post_mlp_v5_32k`) and its layer; `None`
/// for a name that is none of theirs.
///
/// ```
/// use candle_gpt2_interpret::{named_site, openai_site};
///
/// assert_eq!(openai_site("resid_post_mlp_v5_32k", 7), named_site("resid_post7").ok());
/// assert_eq!(openai_site("another_folder", 7), None);
/// ```
pub fn openai_site(folder: &str, layer: usize) -> Option<Site> {
    let location = folder.split_once("_v").map_or(folder, |(location, _)| location);
    let kind = match location {
        "mlp_post_act" => SiteKind::MlpPost,
        "resid_delta_attn" => SiteKind::AttnOut,
        "resid_post_attn" => SiteKind::ResidMid,
        "resid_delta_mlp" => SiteKind::MlpOut,
        "resid_post_mlp" => SiteKind::ResidPost,
        _ => return None,
    };
    Some(Site::in_block(layer, kind))
}

/// The keys of a `cfg.json`; since SAELens 6 those about the model stand below `metadata`.
struct Keys<'a>(&'a Value);

impl Keys<'_> {
    /// The value under the first of these names that has one, with that name.
    fn find(&self, names: &[&str]) -> Option<(String, &Value)> {
        names.iter().find_map(|name| {
            let places = [self.0.get(name), self.0.get("metadata").and_then(|metadata| metadata.get(name))];
            let value = places.into_iter().flatten().find(|value| !value.is_null())?;
            Some(((*name).to_owned(), value))
        })
    }

    fn text(&self, names: &[&str]) -> Result<Option<(String, &str)>, FileError> {
        let Some((key, value)) = self.find(names) else { return Ok(None) };
        match value.as_str() {
            Some(text) => Ok(Some((key, text))),
            None => Err(unexpected(key, "a text", value)),
        }
    }

    fn flag(&self, name: &str) -> Result<Option<bool>, FileError> {
        let Some((key, value)) = self.find(&[name]) else { return Ok(None) };
        value.as_bool().map(Some).ok_or_else(|| unexpected(key, "true or false", value))
    }

    fn size(&self, names: &[&str]) -> Result<usize, FileError> {
        let expected = "a whole number from 1";
        let missing = || unexpected(names.join("` or `"), expected, &Value::Null);
        let (key, value) = self.find(names).ok_or_else(missing)?;
        let size = value.as_u64().filter(|size| (1..=MAX_SIZE).contains(size));
        size.and_then(|size| usize::try_from(size).ok()).ok_or_else(|| unexpected(key, expected, value))
    }

    fn activation(&self) -> Result<LatentActivation, FileError> {
        let (architecture_key, architecture) =
            self.text(&["architecture"])?.unwrap_or(("architecture".into(), "standard"));
        let (function_key, function) =
            self.text(&["activation_fn", "activation_fn_str"])?.unwrap_or(("activation_fn".into(), ""));
        match (architecture, function) {
            ("standard" | "topk", "topk") | ("topk", "") => {
                let arguments = self.find(&["activation_fn_kwargs"]).map_or(&Value::Null, |(_, found)| found);
                let holder = if self.find(&["k"]).is_some() { self.0 } else { arguments };
                let k = Keys(holder).size(&["k"])?;
                Ok(LatentActivation::TopK { k })
            }
            ("standard", "relu" | "") => Ok(LatentActivation::Relu),
            ("jumprelu", "relu" | "") => Ok(LatentActivation::JumpRelu),
            ("standard" | "topk" | "jumprelu", other) => {
                Err(unexpected(function_key, "\"relu\" or \"topk\"", &other.into()))
            }
            (other, _) => {
                let expected = "\"standard\", \"topk\" or \"jumprelu\" (SAELens saves what it trained as \"batchtopk\" as the last)";
                Err(unexpected(architecture_key, expected, &other.into()))
            }
        }
    }

    fn normalizes_input(&self) -> Result<bool, FileError> {
        let Some((key, value)) = self.find(&["normalize_activations"]) else { return Ok(false) };
        match value {
            Value::Bool(false) => Ok(false),
            Value::String(name) if name == "none" => Ok(false),
            Value::String(name) if name == "layer_norm" => Ok(true),
            other => {
                let expected = "\"none\" or \"layer_norm\"; have SAELens fold the scale of the input into the weights \
                                (`fold_activation_norm_scaling_factor`) and save them again";
                Err(unexpected(key, expected, other))
            }
        }
    }

    fn refuse_what_is_not_supported(&self) -> Result<(), FileError> {
        for (names, expected) in [
            (
                &["hook_head_index", "hook_point_head_index"][..],
                "none: dictionaries of a single head are not supported",
            ),
            (
                &["hook_name_out", "d_out"],
                "none: transcoders, whose output is at another place, are not supported",
            ),
        ] {
            if let Some((key, value)) = self.find(names) {
                return Err(unexpected(key, expected, value));
            }
        }
        Ok(())
    }

    /// SAELens once trained on the models that TransformerLens makes by default. Later it asked for them as they are, and since
    /// then keeps in its files what was asked for.
    fn trained_on(&self, kind: SiteKind) -> (TrainedOn, &'static str) {
        let option = match kind {
            SiteKind::V | SiteKind::Z | SiteKind::Result => "fold_value_biases",
            _ => "center_writing_weights",
        };
        match self.find(&["model_from_pretrained_kwargs"]) {
            Some((_, options)) if options.get(option) == Some(&Value::Bool(true)) => (
                TrainedOn::TransformerLens,
                "`model_from_pretrained_kwargs` asks for TransformerLens' processing",
            ),
            Some(_) => (
                TrainedOn::Checkpoint,
                "`model_from_pretrained_kwargs` does not ask for TransformerLens' processing",
            ),
            None if self.0.get("metadata").is_some() => {
                (TrainedOn::Checkpoint, "since SAELens 6 models are not processed unless the file says so")
            }
            None => (
                TrainedOn::TransformerLens,
                "there is no `model_from_pretrained_kwargs`: SAELens then trained on TransformerLens' processed models",
            ),
        }
    }
}

fn unexpected(key: impl Into<String>, expected: &str, found: &Value) -> FileError {
    let found =
        if found.is_null() { "nothing".to_owned() } else { found.to_string().chars().take(80).collect() };
    FileError::Key { key: key.into(), expected: expected.into(), found }
}

/// A dictionary of features: `F` directions of width `C`, and how many of each a value has.
///
/// ```
/// use std::collections::BTreeMap;
///
/// use candle_core::{DType, Device, Tensor};
/// use candle_gpt2_interpret::{Dictionary, DictionaryConfig};
///
/// // Two features of values of width 2: how far they go to the right, and how far up.
/// let tensor = |values: &[f32]| Tensor::new(values, &Device::Cpu);
/// let eye = Tensor::eye(2, DType::F32, &Device::Cpu)?;
/// let tensors = BTreeMap::from([
///     ("W_enc".to_owned(), eye.clone()),
///     ("b_enc".to_owned(), tensor(&[-1., 0.])?),
///     ("W_dec".to_owned(), eye),
///     ("b_dec".to_owned(), tensor(&[0., 0.])?),
/// ]);
/// let config = DictionaryConfig::from_json(
///     r#"{"hook_name": "blocks.1.hook_resid_pre", "architecture": "standard", "d_in": 2, "d_sae": 2,
///         "activation_fn": "relu", "apply_b_dec_to_input": true}"#,
/// )?;
/// let dictionary = Dictionary::from_tensors(&tensors, &config)?;
/// assert_eq!(dictionary.encode(&tensor(&[3., -5.])?)?.to_vec1::<f32>()?, [2., 0.]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
#[doc(alias("SAE", "sparse autoencoder"))]
pub struct Dictionary {
    config: DictionaryConfig,
    /// `(C, F)`.
    encoder: Tensor,
    /// `(F)`.
    encoder_bias: Tensor,
    /// `(F, C)`.
    decoder: Tensor,
    /// `(C)`.
    decoder_bias: Tensor,
    /// Of [`LatentActivation::JumpRelu`], `(F)`.
    threshold: Option<Tensor>,
}

/// How well a dictionary explains some values. [`Dictionary::explained`] tells it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Explained {
    /// Number of latents that are not zero, mean over the values.
    pub mean_l0: f64,
    /// `1 − Σ‖x − x̂‖² / Σ‖x − mean x‖²`; `None` where the values do not differ. The first token's, which are many times longer than
    /// others, decide it alone where they are among them.
    pub variance_explained: Option<f64>,
    /// Mean of the squares of the elements of `x − x̂`.
    pub mse: f64,
}

impl Dictionary {
    /// A dictionary of tensors in f32, all on one device.
    ///
    /// # Errors
    /// When one is missing or has another shape than the configuration and the others tell.
    pub fn from_tensors(
        tensors: &BTreeMap<String, Tensor>,
        config: &DictionaryConfig,
    ) -> Result<Self, FileError> {
        let is_turned = config.format == DictionaryFormat::OpenAi;
        let names = match config.format {
            DictionaryFormat::SaeLens => ["W_enc", "b_enc", "W_dec", "b_dec"],
            DictionaryFormat::OpenAi => ["encoder.weight", "latent_bias", "decoder.weight", "pre_bias"],
        };
        let (width, latents) = sizes(tensors, names[0], config)?;
        let matrix = |name: &str, rows: usize, columns: usize| {
            if is_turned {
                Ok(tensor(tensors, name, &[columns, rows])?.t()?)
            } else {
                tensor(tensors, name, &[rows, columns])
            }
        };
        let mut dictionary = Self {
            encoder: matrix(names[0], width, latents)?,
            encoder_bias: tensor(tensors, names[1], &[latents])?,
            decoder: matrix(names[2], latents, width)?,
            decoder_bias: tensor(tensors, names[3], &[width])?,
            threshold: None,
            config: DictionaryConfig { d_in: Some(width), d_sae: Some(latents), ..config.clone() },
        };
        match config.activation {
            LatentActivation::TopK { k } if k == 0 || k > latents => {
                return Err(FileError::Key {
                    key: "k".into(),
                    expected: format!("from 1 to the number of latents, {latents}"),
                    found: k.to_string(),
                });
            }
            // Training keeps its logarithm in files of its own.
            LatentActivation::JumpRelu if tensors.contains_key("log_threshold") => {
                dictionary.threshold = Some(tensor(tensors, "log_threshold", &[latents])?.exp()?);
            }
            LatentActivation::JumpRelu => {
                dictionary.threshold = Some(tensor(tensors, "threshold", &[latents])?);
            }
            _ => (),
        }
        for name in ["scaling_factor", "finetuning_scaling_factor"] {
            refuse_scales(tensors, name)?;
        }
        if config.scales_by_direction {
            dictionary.fold_lengths()?;
        }
        Ok(dictionary)
    }

    /// What is known of it, with the sizes of its tensors.
    pub fn config(&self) -> &DictionaryConfig {
        &self.config
    }

    /// Width of a value, `C`.
    pub fn width(&self) -> usize {
        self.decoder_bias.elem_count()
    }

    /// Number of latents, `F`.
    pub fn latents(&self) -> usize {
        self.encoder_bias.elem_count()
    }

    /// The same on another device.
    ///
    /// # Errors
    /// When the device has no memory for it.
    pub fn to_device(&self, device: &Device) -> candle_core::Result<Self> {
        Ok(Self {
            config: self.config.clone(),
            encoder: self.encoder.to_device(device)?,
            encoder_bias: self.encoder_bias.to_device(device)?,
            decoder: self.decoder.to_device(device)?,
            decoder_bias: self.decoder_bias.to_device(device)?,
            threshold: self.threshold.as_ref().map(|threshold| threshold.to_device(device)).transpose()?,
        })
    }

    /// Checks that a model has the place, with values of this width.
    ///
    /// # Errors
    /// When it has not.
    pub fn check_model(&self, model: &Gpt2Config) -> Result<(), FileError> {
        let site = self.config.site;
        if let Some(layer) = site.layer.filter(|layer| *layer >= model.n_layer) {
            let n_layer = model.n_layer;
            return Err(FileError::Hook {
                key: "hook_name".into(),
                error: SiteError::NoSuchBlock { name: site.to_string(), layer, n_layer },
            });
        }
        let expected = site_width(site, model).ok_or(FileError::NotExplained { site })?;
        if self.width() != expected {
            return Err(FileError::OtherModel { site, expected, found: self.width() });
        }
        Ok(())
    }

    /// What to encode, `(…, C)`, of what the model has at the place: with heads side by side, and with TransformerLens' processing
    /// of this model where the dictionary was trained on it.
    ///
    /// # Errors
    /// When the shape is not the site's.
    pub fn input(&self, value: &Tensor, processing: &Processing) -> candle_core::Result<Tensor> {
        let value = match self.config.trained_on {
            TrainedOn::Checkpoint => value.clone(),
            TrainedOn::TransformerLens => processing.apply(self.config.site, value)?,
        };
        match self.config.site.kind {
            SiteKind::Q | SiteKind::K | SiteKind::V | SiteKind::Z => value.flatten_from(D::Minus2),
            _ => Ok(value),
        }
    }

    /// The latents of values.
    ///
    /// # Shapes
    /// `x (…, C)`, result `(…, F)` in f32.
    ///
    /// # Errors
    /// When the last axis is not `C`, or the values are on another device.
    pub fn encode(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        self.activate(&self.pre_activations(x)?)
    }

    /// The latents of values before their activation.
    ///
    /// # Shapes
    /// `x (…, C)`, result `(…, F)` in f32.
    ///
    /// # Errors
    /// Those of [`Self::encode`].
    pub fn pre_activations(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let mut input = self.rows(x, self.width())?; // (N, C)
        if self.config.normalizes_input {
            let (mean, deviation) = statistics(&input)?;
            input = input.broadcast_sub(&mean)?.broadcast_div(&(deviation + DEVIATION_EPSILON)?)?;
        }
        if self.config.subtracts_bias {
            input = input.broadcast_sub(&self.decoder_bias)?;
        }
        let before = input.matmul(&self.encoder)?.broadcast_add(&self.encoder_bias)?; // (N, F)
        before.reshape(with_last(x, self.latents()))
    }

    /// The latents of what [`Self::pre_activations`] gives.
    ///
    /// # Shapes
    /// `before (…, F)`, result the same in f32.
    ///
    /// # Errors
    /// When the last axis is not `F`, or the values are on another device.
    pub fn activate(&self, before: &Tensor) -> candle_core::Result<Tensor> {
        let rows = self.rows(before, self.latents())?; // (N, F)
        let latents = match (self.config.activation, &self.threshold) {
            (LatentActivation::TopK { k }, _) => (rows.relu()? * mask_of_largest(&rows, k)?)?,
            (_, Some(threshold)) => (rows.relu()? * rows.broadcast_gt(threshold)?.to_dtype(DType::F32)?)?,
            _ => rows.relu()?,
        };
        latents.reshape(before.dims())
    }

    /// The values that latents stand for. `input` is what was encoded: its mean and deviation return where the input is normalized.
    ///
    /// # Shapes
    /// `latents (…, F)`, `input (…, C)`, result `(…, C)` in f32.
    ///
    /// # Errors
    /// When the shapes are others, or the values are on another device.
    pub fn decode(&self, latents: &Tensor, input: &Tensor) -> candle_core::Result<Tensor> {
        let rows = self.rows(latents, self.latents())?; // (N, F)
        let input_rows = self.rows(input, self.width())?; // (N, C)
        let mut output = rows.matmul(&self.decoder)?.broadcast_add(&self.decoder_bias)?; // (N, C)
        if self.config.normalizes_input {
            let (mean, deviation) = statistics(&input_rows)?;
            output = output.broadcast_mul(&deviation)?.broadcast_add(&mean)?;
        }
        output.reshape(with_last(latents, self.width()))
    }

    /// What the latents of values stand for, `(…, C)`.
    ///
    /// # Errors
    /// Those of [`Self::encode`].
    pub fn reconstruct(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        self.decode(&self.encode(x)?, x)
    }

    /// What one latent adds to a value for each unit of it, `(C)`; to a normalized one where the input is normalized.
    ///
    /// # Errors
    /// When there is no such latent.
    pub fn direction(&self, latent: usize) -> candle_core::Result<Tensor> {
        if latent >= self.latents() {
            bail!("there is no latent {latent}; the dictionary's {} are counted from 0", self.latents());
        }
        self.decoder.get(latent)?.contiguous()
    }

    /// How well it explains values, `(…, C)`.
    ///
    /// # Errors
    /// Those of [`Self::encode`].
    pub fn explained(&self, x: &Tensor) -> candle_core::Result<Explained> {
        let latents = self.encode(x)?;
        let in_doubles = |rows: Tensor| rows.to_device(&Device::Cpu)?.to_dtype(DType::F64);
        let active = latents.ne(0f32)?.to_dtype(DType::F32)?.sum(D::Minus1)?.flatten_all()?; // (N)
        let values = in_doubles(self.rows(x, self.width())?)?;
        let output = in_doubles(self.rows(&self.decode(&latents, x)?, self.width())?)?;
        let sum_of_squares = |rows: Tensor| rows.sqr()?.sum_all()?.to_scalar::<f64>();
        let error = sum_of_squares((&values - output)?)?;
        let variance = sum_of_squares(values.broadcast_sub(&values.mean_keepdim(0)?)?)?;
        Ok(Explained {
            mean_l0: in_doubles(active)?.mean_all()?.to_scalar()?,
            variance_explained: (variance > 0.0).then(|| 1.0 - error / variance),
            mse: error / values.elem_count() as f64,
        })
    }

    /// Values as rows in f32, their last axis checked.
    fn rows(&self, values: &Tensor, expected: usize) -> candle_core::Result<Tensor> {
        match values.dims().last() {
            Some(last) if *last == expected => values.reshape(((), expected))?.to_dtype(DType::F32),
            _ => bail!(
                "the dictionary of {} takes values of width {} and {} latents; found {:?}",
                self.config.site,
                self.width(),
                self.latents(),
                values.dims()
            ),
        }
    }

    /// Makes every direction of length 1 and what it is read with as much longer: the latents are then counted by it, and the sum
    /// stays the same.
    fn fold_lengths(&mut self) -> Result<(), FileError> {
        let lengths = self.decoder.sqr()?.sum_keepdim(1)?.sqrt()?.maximum(LEAST_NORM)?; // (F, 1)
        self.decoder = self.decoder.broadcast_div(&lengths)?;
        let lengths = lengths.flatten_all()?; // (F)
        self.encoder = self.encoder.broadcast_mul(&lengths)?;
        self.encoder_bias = (&self.encoder_bias * &lengths)?;
        Ok(())
    }
}

/// Mean and unbiased standard deviation of each row, `(N, 1)`.
fn statistics(rows: &Tensor) -> candle_core::Result<(Tensor, Tensor)> {
    Ok((rows.mean_keepdim(D::Minus1)?, rows.var_keepdim(D::Minus1)?.sqrt()?))
}

/// The shape of `values` with another last axis.
fn with_last(values: &Tensor, last: usize) -> Vec<usize> {
    let (_, others) = values.dims().split_last().unwrap_or((&last, &[]));
    [others, &[last]].concat()
}

/// One where a number is among the `k` largest of its row, zero elsewhere; `(N, F)`.
fn mask_of_largest(rows: &Tensor, k: usize) -> candle_core::Result<Tensor> {
    let (count, width) = rows.dims2()?;
    let mut mask = vec![0f32; count * width];
    for (row, mask) in rows.detach().to_vec2::<f32>()?.iter().zip(mask.chunks_mut(width)) {
        let mut order: Vec<usize> = (0..width).collect();
        if k < width {
            order.select_nth_unstable_by(k, |a, b| row[*b].total_cmp(&row[*a]).then(a.cmp(b)));
        }
        order.iter().take(k).for_each(|index| mask[*index] = 1.0);
    }
    Tensor::from_vec(mask, (count, width), rows.device())
}

/// Width and number of latents, by the configuration, else by the encoder.
fn sizes(
    tensors: &BTreeMap<String, Tensor>,
    encoder: &str,
    config: &DictionaryConfig,
) -> Result<(usize, usize), FileError> {
    let is_turned = config.format == DictionaryFormat::OpenAi;
    let axes = if is_turned { "(latents, width)" } else { "(width, latents)" };
    let found = tensors.get(encoder).ok_or_else(|| FileError::missing(tensors, encoder, axes))?;
    let sizes = match (found.dims(), is_turned) {
        ([width, latents], false) | ([latents, width], true) => (*width, *latents),
        _ => (0, 0),
    };
    // The unbiased deviation of one number is none.
    if sizes.0 < 2 || sizes.1 < 1 {
        return Err(FileError::Shape {
            name: encoder.into(),
            expected: axes.into(),
            found: Shape(found.dims()).to_string(),
        });
    }
    Ok((config.d_in.unwrap_or(sizes.0), config.d_sae.unwrap_or(sizes.1)))
}

/// SAELens once wrote a factor of each latent from fine-tuning; only ones are left out without a change.
fn refuse_scales(tensors: &BTreeMap<String, Tensor>, name: &str) -> Result<(), FileError> {
    let Some(scales) = tensors.get(name) else { return Ok(()) };
    let scales = scales.flatten_all()?.to_dtype(DType::F32)?.to_vec1::<f32>()?;
    match scales.iter().find(|scale| **scale != 1.0) {
        None => Ok(()),
        Some(scale) => Err(FileError::Key {
            key: name.into(),
            expected: "ones; multiply the rows of `W_dec` with it and leave it out".into(),
            found: scale.to_string(),
        }),
    }
}

/// A tensor of this shape, in f32.
pub(crate) fn tensor(
    tensors: &BTreeMap<String, Tensor>,
    name: &str,
    shape: &[usize],
) -> Result<Tensor, FileError> {
    let found =
        tensors.get(name).ok_or_else(|| FileError::missing(tensors, name, &Shape(shape).to_string()))?;
    if found.dims() != shape {
        let [expected, found] = [shape, found.dims()].map(|shape| Shape(shape).to_string());
        return Err(FileError::Shape { name: name.into(), expected, found });
    }
    Ok(found.to_dtype(DType::F32)?)
}

/// Prints a shape as `(24, 72)`.
pub(crate) struct Shape<'a>(pub(crate) &'a [usize]);

impl Display for Shape<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        let sizes: Vec<String> = self.0.iter().map(usize::to_string).collect();
        write!(f, "({})", sizes.join(", "))
    }
}

/// Why the file of a dictionary, of a tuned lens or of a control vector cannot be used.
/// [`Dictionary::from_tensors`] and [`DictionaryConfig::from_json`] return it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FileError {
    /// The configuration is something else.
    #[error(
        "the configuration is no JSON that can be used: {error}; give the file that came with the tensors"
    )]
    NotJson {
        /// What is wrong with it.
        error: String,
    },
    /// The configuration asks for what is not supported, or lacks something.
    #[error("`{key}`: expected {expected}; found {found}")]
    Key {
        /// The key.
        key: String,
        /// What it can be.
        expected: String,
        /// What it is.
        found: String,
    },
    /// The place is not there.
    #[error("`{key}`: {error}")]
    Hook {
        /// The key.
        key: String,
        /// What is wrong with its value.
        error: SiteError,
    },
    /// A tensor is not there.
    #[error("tensor `{name}` is missing: expected {expected}; the file has {present}")]
    Missing {
        /// Its name.
        name: String,
        /// Its shape.
        expected: String,
        /// The names that are there.
        present: String,
    },
    /// A tensor has another shape.
    #[error("tensor `{name}`: expected {expected}, found {found}; the file is of other sizes")]
    Shape {
        /// Its name.
        name: String,
        /// The shape that the others and the configuration ask for.
        expected: String,
        /// The shape that it has.
        found: String,
    },
    /// The dictionary is of a model of another width.
    #[error(
        "the dictionary takes values of width {found}, and the model has {expected} at {site}; use the model that it was made for"
    )]
    OtherModel {
        /// The place.
        site: Site,
        /// Width of the model's values.
        expected: usize,
        /// Width of the dictionary's.
        found: usize,
    },
    /// The place has no values of one width.
    #[error(
        "{site} is not a hook point that an SAE can be trained on; \
         residual streams, outputs, MLPs and heads are"
    )]
    NotExplained {
        /// The place.
        site: Site,
    },
    /// A tensor could not be computed with.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
}

impl FileError {
    pub(crate) fn missing(tensors: &BTreeMap<String, Tensor>, name: &str, expected: &str) -> Self {
        /// Names in one message.
        const MOST_NAMES: usize = 8;
        let mut names: Vec<&str> = tensors.keys().take(MOST_NAMES).map(String::as_str).collect();
        names.extend((tensors.len() > MOST_NAMES).then_some("…"));
        let present = if names.is_empty() { "no tensors".to_owned() } else { names.join(", ") };
        Self::Missing { name: name.into(), expected: expected.into(), present }
    }
}
