//! Dictionary configuration: SAELens' `cfg.json`, or the metadata in OpenAI's files.
//!
//! Sources: SAELens (decoderesearch/SAELens, `sae_lens/saes/sae.py` at 2ad7a45, and for older files
//! `handle_pre_6_0_config` in `sae_lens/loading/pretrained_sae_loaders.py` at 10537c1); OpenAI
//! (openai/sparse_autoencoder, `sparse_autoencoder/paths.py` at 764586a).

use std::collections::BTreeMap;

use candle_gpt2::{Site, SiteKind};
use serde_json::{Value, json};

use crate::{FileError, named_site};

/// Upper bound on the widths and numbers of latents in a configuration.
const MAX_SIZE: u64 = 1 << 32;
/// SAELens architectures that explain a different hook point than the one they read.
const TRANSCODERS: [&str; 4] =
    ["transcoder", "skip_transcoder", "jumprelu_transcoder", "jumprelu_skip_transcoder"];

/// Activation function of the latents. Part of a [`DictionaryConfig`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LatentActivation {
    /// ReLU.
    Relu,
    /// ReLU of the `k` largest pre-activations; ties go to the lower index.
    TopK {
        /// Number of latents to keep.
        k: usize,
    },
    /// ReLU, but zero for pre-activations that do not exceed the latent's threshold.
    JumpRelu,
    /// ReLU of a magnitude where a gate is positive; gate and magnitude share the encoder weights.
    Gated,
}

/// Naming convention for the tensors. Part of a [`DictionaryConfig`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DictionaryFormat {
    /// `W_enc` `(C, F)`, `b_enc`, `W_dec` `(F, C)`, `b_dec`, `threshold`.
    SaeLens,
    /// `encoder.weight` `(F, C)`, `latent_bias`, `decoder.weight` `(C, F)`, `pre_bias`.
    OpenAi,
}

/// Variant of the activations that a dictionary was trained on. Part of a [`DictionaryConfig`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ActivationVariant {
    /// Activations of the unmodified checkpoint.
    Checkpoint,
    /// Activations after TransformerLens' processing, see [`Processing`](crate::Processing).
    TransformerLens,
}

/// Hook point that a transcoder explains. Part of a [`DictionaryConfig`].
///
/// It differs from the hook point that the transcoder reads.
///
/// ```
/// use candle_gpt2_interpret::{DictionaryConfig, named_site};
///
/// let config = DictionaryConfig::from_json(
///     r#"{"architecture": "skip_transcoder", "d_in": 768, "d_sae": 24576, "d_out": 768,
///         "metadata": {"hook_name": "blocks.8.ln2.hook_normalized", "hook_name_out": "blocks.8.hook_mlp_out"}}"#,
/// )?;
/// let output = config.output.ok_or("not a transcoder")?;
/// assert_eq!((output.site, output.skips), (named_site("mlp_out8")?, true));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TranscoderOutput {
    /// The hook point (`hook_name_out`).
    pub site: Site,
    /// Output width `C_out` (`d_out`); `None` to use the tensors' width.
    pub d_out: Option<usize>,
    /// Whether a skip matrix (`W_skip`) bypasses the latents.
    pub skips: bool,
}

/// Configuration of a dictionary.
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
    /// Hook point that the dictionary reads and, unless it is a transcoder, explains.
    pub site: Site,
    /// Hook point that a transcoder explains.
    pub output: Option<TranscoderOutput>,
    /// Naming convention for the tensors.
    pub format: DictionaryFormat,
    /// Input width `C` (`d_in`); `None` to use the tensors' width.
    pub d_in: Option<usize>,
    /// Number of latents `F` (`d_sae`); `None` to use the tensors' size.
    pub d_sae: Option<usize>,
    /// Activation function of the latents.
    pub activation: LatentActivation,
    /// Whether the decoder bias is subtracted from the input (`apply_b_dec_to_input`).
    pub subtracts_bias: bool,
    /// Whether the input is normalized (`normalize_activations` is `layer_norm`).
    pub normalizes_input: bool,
    /// Whether latents are scaled by the norms of their directions (`rescale_acts_by_decoder_norm`).
    pub scales_by_direction: bool,
    /// Whether training sequences started with `<|endoftext|>` (`prepend_bos`); `None` if unknown.
    pub prepends_bos: Option<bool>,
    /// Variant of the activations that the dictionary was trained on.
    pub trained_on: ActivationVariant,
    /// Reason for the value of `trained_on`.
    pub trained_on_because: &'static str,
}

impl DictionaryConfig {
    /// Parses SAELens' `cfg.json` of any version.
    ///
    /// A key that changes the result is either applied or rejected.
    ///
    /// # Errors
    /// If the text is not JSON, if a key is missing, or if a value is unsupported.
    pub fn from_json(text: &str) -> Result<Self, FileError> {
        let not_json = |error: String| FileError::NotJson { error };
        let value: Value = serde_json::from_str(text.trim_start_matches('\u{feff}'))
            .map_err(|error| not_json(error.to_string()))?;
        if !value.is_object() {
            return Err(not_json("the top-level value is not an object".into()));
        }
        let keys = ConfigKeys(&value);
        keys.reject_unsupported()?;
        let (key, hook) =
            keys.text(&["hook_name", "hook_point", "act_name"])?.ok_or_else(|| FileError::Key {
                key: "hook_name".into(),
                expected: "the model's hook point, such as \"blocks.8.hook_resid_pre\"".into(),
                found: "nothing".into(),
            })?;
        let site = named_site(hook).map_err(|error| FileError::Hook { key, error })?;
        let (trained_on, trained_on_because) = keys.trained_on(site.kind);
        let output = keys.output()?;
        Ok(Self {
            site,
            output,
            format: DictionaryFormat::SaeLens,
            d_in: Some(keys.size(&["d_in", "act_size"])?),
            d_sae: Some(keys.size(&["d_sae", "dict_size"])?),
            activation: keys.activation()?,
            subtracts_bias: keys.flag("apply_b_dec_to_input")?.unwrap_or(output.is_none()),
            normalizes_input: keys.normalizes_input()?,
            scales_by_direction: keys.flag("rescale_acts_by_decoder_norm")?.unwrap_or(false),
            prepends_bos: Some(keys.flag("prepend_bos")?.unwrap_or(true)),
            trained_on,
            trained_on_because,
        })
    }

    /// Creates the configuration of an OpenAI file from its metadata.
    ///
    /// The metadata includes `activation` and `activation_state_dict.k`. The folder name determines the hook
    /// point, see [`openai_site`].
    ///
    /// # Errors
    /// If the activation is unsupported.
    pub fn openai(entries: &BTreeMap<String, String>, site: Site) -> Result<Self, FileError> {
        let entry = |key: &str| entries.get(key).map(String::as_str);
        let unsupported = |key: &str, found: &str| FileError::Key {
            key: key.into(),
            expected: "ReLU, or TopK followed by ReLU".into(),
            found: found.into(),
        };
        let activation = match entry("activation") {
            // The earliest files have no `activation` entry.
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
                        expected: "the number of latents to keep, a positive integer".into(),
                        found: entry(key).unwrap_or("nothing").into(),
                    })?,
                }
            }
            Some(other) => return Err(unsupported("activation", other)),
        };
        Ok(Self {
            site,
            output: None,
            format: DictionaryFormat::OpenAi,
            d_in: None,
            d_sae: None,
            activation,
            subtracts_bias: true,
            // OpenAI's loader distinguishes file versions by the activation function.
            normalizes_input: matches!(activation, LatentActivation::TopK { .. }),
            scales_by_direction: false,
            prepends_bos: None,
            trained_on: ActivationVariant::Checkpoint,
            trained_on_because: "OpenAI's dictionaries are for models with uncentered weights",
        })
    }

    /// Returns SAELens' name of the architecture.
    ///
    /// The names are `standard`, `topk`, `jumprelu` and `gated`, or names such as `jumprelu_skip_transcoder`
    /// for transcoders.
    pub fn architecture(&self) -> String {
        let activation = match self.activation {
            LatentActivation::Relu => None,
            LatentActivation::TopK { .. } => Some("topk"),
            LatentActivation::JumpRelu => Some("jumprelu"),
            LatentActivation::Gated => Some("gated"),
        };
        let Some(output) = &self.output else { return activation.unwrap_or("standard").into() };
        let parts = [activation, output.skips.then_some("skip"), Some("transcoder")];
        parts.into_iter().flatten().collect::<Vec<_>>().join("_")
    }

    /// Returns the `cfg.json` of SAELens 6 for f32 tensors with SAELens' names.
    ///
    /// ```
    /// use candle_gpt2_interpret::DictionaryConfig;
    ///
    /// let text = r#"{"architecture": "topk", "k": 3, "d_in": 4, "d_sae": 8, "hook_name": "blocks.1.hook_resid_pre"}"#;
    /// let config = DictionaryConfig::from_json(text)?;
    /// let written = config.to_json();
    /// assert_eq!(written["metadata"]["hook_name"], "blocks.1.hook_resid_pre");
    /// assert_eq!(DictionaryConfig::from_json(&written.to_string())?.activation, config.activation);
    /// # Ok::<(), candle_gpt2_interpret::FileError>(())
    /// ```
    pub fn to_json(&self) -> Value {
        let processing = match self.trained_on {
            ActivationVariant::Checkpoint => json!({}),
            ActivationVariant::TransformerLens => json!({ processing_option(self.site.kind): true }),
        };
        let mut config = json!({
            "architecture": self.architecture(),
            "d_in": self.d_in,
            "d_sae": self.d_sae,
            "dtype": "float32",
            "device": "cpu",
            "apply_b_dec_to_input": self.subtracts_bias,
            "normalize_activations": if self.normalizes_input { "layer_norm" } else { "none" },
            "reshape_activations": if self.site.kind == SiteKind::Z { "hook_z" } else { "none" },
            "metadata": {
                "sae_lens_version": "6.0.0",
                "hook_name": self.site.to_string(),
                "prepend_bos": self.prepends_bos.unwrap_or(true),
                "model_from_pretrained_kwargs": processing,
            },
        });
        if let LatentActivation::TopK { k } = self.activation {
            config["k"] = k.into();
        }
        if self.scales_by_direction {
            config["rescale_acts_by_decoder_norm"] = true.into();
        }
        if let Some(output) = &self.output {
            config["d_out"] = output.d_out.into();
            config["metadata"]["hook_name_out"] = output.site.to_string().into();
        }
        config
    }

    /// Whether the mean over the width must be subtracted from the activation, as in TransformerLens.
    pub fn needs_centering(&self) -> bool {
        self.trained_on == ActivationVariant::TransformerLens && self.site.kind.is_residual()
    }
}

/// Returns the hook point of an OpenAI dictionary from its folder name and layer.
///
/// `resid_post_mlp_v5_32k` is an example of a folder name. Returns `None` for an unknown folder name.
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

/// Keys of a `cfg.json`; since SAELens 6, keys about the model are nested in `metadata`.
pub(crate) struct ConfigKeys<'a>(pub(crate) &'a Value);

impl ConfigKeys<'_> {
    /// Returns the first of these keys with a non-null value, together with the value.
    pub(crate) fn find(&self, names: &[&str]) -> Option<(String, &Value)> {
        names.iter().find_map(|name| {
            let places = [self.0.get(name), self.0.get("metadata").and_then(|metadata| metadata.get(name))];
            let value = places.into_iter().flatten().find(|value| !value.is_null())?;
            Some(((*name).to_owned(), value))
        })
    }

    pub(crate) fn text(&self, names: &[&str]) -> Result<Option<(String, &str)>, FileError> {
        let Some((key, value)) = self.find(names) else { return Ok(None) };
        match value.as_str() {
            Some(text) => Ok(Some((key, text))),
            None => Err(unexpected(key, "a string", value)),
        }
    }

    fn flag(&self, name: &str) -> Result<Option<bool>, FileError> {
        let Some((key, value)) = self.find(&[name]) else { return Ok(None) };
        value.as_bool().map(Some).ok_or_else(|| unexpected(key, "true or false", value))
    }

    pub(crate) fn size(&self, names: &[&str]) -> Result<usize, FileError> {
        let expected = "a positive integer";
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
            ("standard" | "topk" | "transcoder" | "skip_transcoder", "topk") | ("topk", "") => {
                let arguments = self.find(&["activation_fn_kwargs"]).map_or(&Value::Null, |(_, found)| found);
                let holder = if self.find(&["k"]).is_some() { self.0 } else { arguments };
                let k = ConfigKeys(holder).size(&["k"])?;
                Ok(LatentActivation::TopK { k })
            }
            ("standard" | "transcoder" | "skip_transcoder", "relu" | "") => Ok(LatentActivation::Relu),
            ("jumprelu" | "jumprelu_transcoder" | "jumprelu_skip_transcoder", "relu" | "") => {
                Ok(LatentActivation::JumpRelu)
            }
            ("gated", "relu" | "") => Ok(LatentActivation::Gated),
            ("standard" | "topk" | "jumprelu" | "gated", other) => {
                Err(unexpected(function_key, "\"relu\" or \"topk\"", &other.into()))
            }
            (other, _) if TRANSCODERS.contains(&other) => {
                Err(unexpected(function_key, "\"relu\" or \"topk\"", &function.into()))
            }
            (other, _) => {
                let expected = "\"standard\", \"topk\", \"gated\", \"jumprelu\" (also for SAEs that SAELens \
                                trained as \"batchtopk\"), \"transcoder\" or \"skip_transcoder\", the last \
                                two optionally prefixed with \"jumprelu_\"";
                Err(unexpected(architecture_key, expected, &other.into()))
            }
        }
    }

    /// Returns the hook point that a transcoder explains.
    fn output(&self) -> Result<Option<TranscoderOutput>, FileError> {
        let architecture = self.text(&["architecture"])?.map_or("standard", |(_, architecture)| architecture);
        if !TRANSCODERS.contains(&architecture) {
            return match self.find(&["hook_name_out", "d_out"]) {
                Some((key, value)) => {
                    let expected = "no value (only a transcoder `architecture` has a separate output)";
                    Err(unexpected(key, expected, value))
                }
                None => Ok(None),
            };
        }
        let place = "the hook point that the transcoder reconstructs, such as \"blocks.8.hook_mlp_out\"";
        let (key, hook) =
            self.text(&["hook_name_out"])?.ok_or_else(|| unexpected("hook_name_out", place, &Value::Null))?;
        if self.flag("apply_b_dec_to_input")? == Some(true) {
            let expected = "false (a transcoder adds its decoder bias to the output)";
            return Err(unexpected("apply_b_dec_to_input", expected, &true.into()));
        }
        Ok(Some(TranscoderOutput {
            site: named_site(hook).map_err(|error| FileError::Hook { key, error })?,
            d_out: self.find(&["d_out"]).map(|_| self.size(&["d_out"])).transpose()?,
            skips: architecture.ends_with("skip_transcoder"),
        }))
    }

    fn normalizes_input(&self) -> Result<bool, FileError> {
        let Some((key, value)) = self.find(&["normalize_activations"]) else { return Ok(false) };
        match value {
            Value::Bool(false) => Ok(false),
            Value::String(name) if name == "none" => Ok(false),
            Value::String(name) if name == "layer_norm" => Ok(true),
            other => {
                let expected = "\"none\" or \"layer_norm\" (for other values, let SAELens fold the input \
                                scale into the weights with `fold_activation_norm_scaling_factor` and save \
                                again)";
                Err(unexpected(key, expected, other))
            }
        }
    }

    fn reject_unsupported(&self) -> Result<(), FileError> {
        if let Some((key, value)) = self.find(&["hook_head_index", "hook_point_head_index"]) {
            return Err(unexpected(key, "no value (dictionaries of a single head are unsupported)", value));
        }
        Ok(())
    }

    /// Determines which activations a dictionary was trained on, and the reason for this conclusion.
    ///
    /// SAELens originally trained on TransformerLens' default models, which are processed. Later versions
    /// request unprocessed models and record the request in the file.
    fn trained_on(&self, kind: SiteKind) -> (ActivationVariant, &'static str) {
        let option = processing_option(kind);
        match self.find(&["model_from_pretrained_kwargs"]) {
            Some((_, options)) if options.get(option) == Some(&Value::Bool(true)) => (
                ActivationVariant::TransformerLens,
                "`model_from_pretrained_kwargs` requests TransformerLens' processing",
            ),
            Some(_) => (
                ActivationVariant::Checkpoint,
                "`model_from_pretrained_kwargs` does not request TransformerLens' processing",
            ),
            None if self.0.get("metadata").is_some() => {
                (ActivationVariant::Checkpoint, "SAELens 6 and later use unprocessed models by default")
            }
            None => (
                ActivationVariant::TransformerLens,
                "without `model_from_pretrained_kwargs`, SAELens before version 6 trained on \
                 TransformerLens' processed models",
            ),
        }
    }
}

/// TransformerLens processing option that affects a hook point.
fn processing_option(kind: SiteKind) -> &'static str {
    match kind {
        SiteKind::V | SiteKind::Z | SiteKind::Result => "fold_value_biases",
        _ => "center_writing_weights",
    }
}

pub(crate) fn unexpected(key: impl Into<String>, expected: &str, found: &Value) -> FileError {
    let found =
        if found.is_null() { "nothing".to_owned() } else { found.to_string().chars().take(80).collect() };
    FileError::Key { key: key.into(), expected: expected.into(), found }
}
