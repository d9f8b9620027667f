//! Transcoders for all layers: every MLP output as a sparse sum of feature directions.
//!
//! Let `x_l` be the input in layer `l` and `a_l = act(x_l · W_enc_l + b_enc_l)`. With one transcoder per
//! layer, `ŷ_l = a_l · W_dec_l + b_dec_l`. In a cross-layer transcoder, features write to their own layer and
//! all later ones: `ŷ_k = Σ_{l ≤ k} a_l · W_dec_{l→k} + b_dec_k`. A skip connection adds `x_l · W_skip`.
//!
//! Files are in SAELens' format, a folder for each layer (see [`Dictionary`]), or in circuit-tracer's. The
//! latter are `layer_{l}.safetensors`, or `W_enc_{l}.safetensors` and `W_dec_{l}.safetensors`, next to a
//! `config.yaml`. Callers read the files and pass their tensors and configuration. Source:
//! decoderesearch/circuit-tracer, `circuit_tracer/transcoder/single_layer_transcoder.py` at 9813971 and
//! `cross_layer_transcoder.py` at 05774bb. Only the former transposes the skip matrix.

use std::collections::BTreeMap;

use candle_core::{DType, Device, Tensor};
use candle_gpt2::{Gpt2Config, Gpt2LMHeadModel, Site, SiteKind};
use serde_json::Value;

use crate::dictionary_config::{ConfigKeys, unexpected};
use crate::encoder::Encoder;
use crate::file_tensors::{Shape, tensor};
use crate::{Dictionary, FileError, LatentActivation, named_site};

/// Input of the transcoders in each layer. Part of [`Transcoders`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TranscoderInput {
    /// The residual stream between attention and MLP (`hook_resid_mid`).
    ResidMid,
    /// The residual stream after the second norm, without its weight and bias (`ln2.hook_normalized`).
    Ln2Normalized,
    /// The residual stream after the full second norm: the MLP input (`mlp.hook_in`).
    ///
    /// In circuit-tracer's files, `ln2.hook_normalized` also names this input, because circuit-tracer runs on
    /// unprocessed TransformerLens 2 models.
    MlpIn,
}

impl TranscoderInput {
    /// Returns TransformerLens' name, relative to `blocks.N.`.
    pub fn hook(self) -> &'static str {
        match self {
            Self::ResidMid => SiteKind::ResidMid.hook(),
            Self::Ln2Normalized => SiteKind::Ln2Normalized.hook(),
            Self::MlpIn => "mlp.hook_in",
        }
    }

    /// Returns the input at hook points of this kind, if transcoders can read there.
    ///
    /// ```
    /// use candle_gpt2::SiteKind;
    /// use candle_gpt2_interpret::TranscoderInput;
    ///
    /// assert_eq!(TranscoderInput::of_kind(SiteKind::ResidMid), Some(TranscoderInput::ResidMid));
    /// assert_eq!(TranscoderInput::of_kind(SiteKind::ResidPre), None);
    /// ```
    pub fn of_kind(kind: SiteKind) -> Option<Self> {
        [Self::ResidMid, Self::Ln2Normalized].into_iter().find(|input| input.hook() == kind.hook())
    }

    /// Parses a hook name that is relative to a block.
    fn of_hook(hook: &str) -> Option<Self> {
        match named_site(&format!("blocks.0.{hook}")) {
            Ok(site) => Self::of_kind(site.kind),
            Err(_) => (hook == Self::MlpIn.hook()).then_some(Self::MlpIn),
        }
    }
}

/// Configuration of circuit-tracer's transcoders.
///
/// ```
/// use candle_gpt2_interpret::{TranscoderInput, TranscodersConfig};
///
/// let config = TranscodersConfig::from_json(
///     r#"{"model_kind": "transcoder_set", "feature_input_hook": "mlp.hook_in", "feature_output_hook": "hook_mlp_out"}"#,
/// )?;
/// assert_eq!((config.is_cross_layer, config.input), (false, TranscoderInput::MlpIn));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TranscodersConfig {
    /// Whether features also write to later layers (`model_kind` is `cross_layer_transcoder`).
    pub is_cross_layer: bool,
    /// Input of the transcoders (`feature_input_hook`).
    pub input: TranscoderInput,
    /// Number of latents to keep (`k`) for TopK.
    ///
    /// If `None`, the activation is JumpReLU if the tensors contain a threshold, and ReLU otherwise.
    pub k: Option<usize>,
}

impl TranscodersConfig {
    /// Parses `config.json`, or a `config.yaml` converted to JSON.
    ///
    /// # Errors
    /// If the text is not JSON, if a key is missing, or if a value is unsupported.
    pub fn from_json(text: &str) -> Result<Self, FileError> {
        let value: Value =
            serde_json::from_str(text).map_err(|error| FileError::NotJson { error: error.to_string() })?;
        let keys = ConfigKeys(&value);
        let kinds = "\"transcoder_set\" or \"cross_layer_transcoder\"";
        let is_cross_layer = match keys.text(&["model_kind"])? {
            Some((_, "transcoder_set")) => false,
            Some((_, "cross_layer_transcoder")) => true,
            Some((key, other)) => return Err(unexpected(key, kinds, &other.into())),
            None => return Err(unexpected("model_kind", kinds, &Value::Null)),
        };
        let hook = |key: &str, usual: SiteKind, expected: &str| match keys.text(&[key])? {
            Some((_, hook)) => Ok(hook),
            None if is_cross_layer => Ok(usual.hook()),
            None => Err(unexpected(key, expected, &Value::Null)),
        };
        let expected = "\"hook_resid_mid\", \"ln2.hook_normalized\" or \"mlp.hook_in\"";
        let read = hook("feature_input_hook", SiteKind::ResidMid, expected)?;
        let input = match TranscoderInput::of_hook(read) {
            // circuit-tracer uses unprocessed TransformerLens 2 models, where this hook follows the weight
            // and bias.
            Some(TranscoderInput::Ln2Normalized) => TranscoderInput::MlpIn,
            Some(input) => input,
            None => return Err(unexpected("feature_input_hook", expected, &read.into())),
        };
        let expected = "\"hook_mlp_out\"";
        let written = hook("feature_output_hook", SiteKind::MlpOut, expected)?;
        let site = named_site(&format!("blocks.0.{written}"));
        if site.ok() != Some(Site::in_block(0, SiteKind::MlpOut)) {
            return Err(unexpected("feature_output_hook", expected, &written.into()));
        }
        let k = match keys.text(&["activation", "activation_function"])? {
            None | Some((_, "relu" | "jump_relu" | "jumprelu")) => None,
            Some((_, "topk")) => Some(keys.size(&["k"])?),
            Some((key, other)) => {
                return Err(unexpected(key, "\"relu\", \"jump_relu\" or \"topk\"", &other.into()));
            }
        };
        Ok(Self { is_cross_layer, input, k })
    }

    /// Returns the activation function of a layer, given the name of its threshold tensor.
    fn activation(&self, tensors: &BTreeMap<String, Tensor>, threshold: &str) -> LatentActivation {
        match self.k {
            Some(k) => LatentActivation::TopK { k },
            None if tensors.contains_key(threshold) => LatentActivation::JumpRelu,
            None => LatentActivation::Relu,
        }
    }
}

/// Transcoder of one layer.
///
/// See [`Transcoders`] for an example.
#[derive(Debug, Clone)]
pub struct TranscoderLayer {
    pub(crate) encoder: Encoder,
    /// Decoders `(F, C)` for this layer and, in a cross-layer transcoder, for each later one.
    pub(crate) decoders: Vec<Tensor>,
    /// Decoder bias, `(C)`.
    pub(crate) decoder_bias: Tensor,
    /// Skip matrix `(C, C)`, applied as `x · skip`.
    pub(crate) skip: Option<Tensor>,
}

impl TranscoderLayer {
    /// Creates a layer from the tensors of `layer_{l}.safetensors`.
    ///
    /// # Errors
    /// If a tensor is missing or damaged, or if its shape does not match the others.
    pub fn per_layer(
        tensors: &BTreeMap<String, Tensor>,
        config: &TranscodersConfig,
    ) -> Result<Self, FileError> {
        let (latents, width) = sizes(tensors, "W_enc")?;
        let threshold = "activation_function.threshold";
        let weight = tensor(tensors, "W_enc", &[latents, width])?.t()?.contiguous()?;
        let activation = config.activation(tensors, threshold);
        let skip = tensors.contains_key("W_skip").then(|| tensor(tensors, "W_skip", &[width, width]));
        Ok(Self {
            encoder: Encoder::from_tensors(tensors, weight, "b_enc", threshold, activation)?,
            decoders: vec![tensor(tensors, "W_dec", &[latents, width])?],
            decoder_bias: tensor(tensors, "b_dec", &[width])?,
            skip: skip.transpose()?.map(|skip| skip.t()?.contiguous()).transpose()?,
        })
    }

    /// Creates one of `n_layer` layers from the tensors of its two cross-layer files.
    ///
    /// The files are `W_enc_{l}.safetensors` and `W_dec_{l}.safetensors`.
    ///
    /// # Errors
    /// See [`Self::per_layer`].
    pub fn cross_layer(
        tensors: &BTreeMap<String, Tensor>,
        config: &TranscodersConfig,
        layer: usize,
        n_layer: usize,
    ) -> Result<Self, FileError> {
        let name = |name: &str| format!("{name}_{layer}");
        let (latents, width) = sizes(tensors, &name("W_enc"))?;
        let weight = tensor(tensors, &name("W_enc"), &[latents, width])?.t()?.contiguous()?;
        let activation = config.activation(tensors, &name("threshold"));
        let (bias, threshold) = (name("b_enc"), name("threshold"));
        let targets = n_layer.saturating_sub(layer);
        let decoder = tensor(tensors, &name("W_dec"), &[latents, targets, width])?;
        let decoders = (0..targets).map(|target| decoder.narrow(1, target, 1)?.squeeze(1)?.contiguous());
        let skip = tensors.contains_key(&name("W_skip"));
        Ok(Self {
            encoder: Encoder::from_tensors(tensors, weight, &bias, &threshold, activation)?,
            decoders: decoders.collect::<candle_core::Result<_>>()?,
            decoder_bias: tensor(tensors, &name("b_dec"), &[width])?,
            skip: skip.then(|| tensor(tensors, &name("W_skip"), &[width, width])).transpose()?,
        })
    }

    /// Number of latents, `F`.
    pub fn latents(&self) -> usize {
        self.encoder.latents()
    }

    /// Returns the directions that features write to the residual stream, summed over all layers, `(N, C)`.
    ///
    /// # Errors
    /// If a feature index is out of range.
    pub fn directions(&self, features: &[usize]) -> candle_core::Result<Tensor> {
        let numbers: Vec<i64> = features.iter().map(|feature| *feature as i64).collect();
        let numbers = Tensor::from_vec(numbers, features.len(), self.decoder_bias.device())?;
        let mut sum = self.decoders[0].index_select(&numbers, 0)?;
        for decoder in &self.decoders[1..] {
            sum = (sum + decoder.index_select(&numbers, 0)?)?;
        }
        Ok(sum)
    }

    fn mapped(&self, change: &impl Fn(&Tensor) -> candle_core::Result<Tensor>) -> candle_core::Result<Self> {
        Ok(Self {
            encoder: self.encoder.mapped(change)?,
            decoders: self.decoders.iter().map(change).collect::<candle_core::Result<_>>()?,
            decoder_bias: change(&self.decoder_bias)?,
            skip: self.skip.as_ref().map(change).transpose()?,
        })
    }
}

/// Transcoders for every layer of a model.
///
/// ```
/// use std::collections::BTreeMap;
///
/// use candle_core::{DType, Device, Tensor};
/// use candle_gpt2_interpret::{TranscoderLayer, Transcoders, TranscodersConfig};
///
/// let config = TranscodersConfig::from_json(
///     r#"{"model_kind": "transcoder_set", "feature_input_hook": "hook_resid_mid", "feature_output_hook": "hook_mlp_out"}"#,
/// )?;
/// let zeros = |shape: &[usize]| Tensor::zeros(shape, DType::F32, &Device::Cpu);
/// let tensors = BTreeMap::from([
///     ("W_enc".to_owned(), zeros(&[5, 3])?), // five features of values of width 3
///     ("b_enc".to_owned(), zeros(&[5])?),
///     ("W_dec".to_owned(), zeros(&[5, 3])?),
///     ("b_dec".to_owned(), zeros(&[3])?),
/// ]);
/// let layer = TranscoderLayer::per_layer(&tensors, &config)?;
/// let transcoders = Transcoders::new(config.input, vec![layer.clone(), layer])?;
/// assert_eq!((transcoders.layers().len(), transcoders.width()), (2, 3));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
pub struct Transcoders {
    input: TranscoderInput,
    layers: Vec<TranscoderLayer>,
}

impl Transcoders {
    /// Combines layers with the same input, in order.
    ///
    /// # Errors
    /// If `layers` is empty, or if a layer differs in width or in the number of layers that it should write
    /// to.
    pub fn new(input: TranscoderInput, layers: Vec<TranscoderLayer>) -> Result<Self, FileError> {
        let Some(first) = layers.first() else {
            return Err(FileError::OtherDepth { expected: 1, found: 0 });
        };
        let (width, is_cross_layer) = (first.encoder.width(), first.decoders.len() > 1);
        for (layer, one) in layers.iter().enumerate() {
            let targets = if is_cross_layer { layers.len() - layer } else { 1 };
            let expected = format!("width {width} and {targets} decoders");
            let found = (one.encoder.width(), one.decoders.len());
            if found != (width, targets) || one.decoder_bias.dims() != [width] {
                let found = format!("width {} and {} decoders", found.0, found.1);
                return Err(FileError::Layer { layer, expected, found });
            }
        }
        Ok(Self { input, layers })
    }

    /// Combines SAELens transcoders, one for each layer in any order.
    ///
    /// # Errors
    /// If a dictionary does not map an MLP's input to its output, or if a layer does not have exactly one.
    pub fn of_dictionaries(dictionaries: Vec<Dictionary>) -> Result<Self, FileError> {
        let n_layer = dictionaries.len();
        let mut layers = BTreeMap::new();
        for dictionary in dictionaries {
            let (layer, input) = transcoded(&dictionary)?;
            let encoder = match dictionary.config().needs_centering() {
                true => dictionary.encoder.of_centered()?,
                false => dictionary.encoder,
            };
            let (decoder_bias, skip) = (dictionary.decoder_bias, dictionary.skip);
            let one = TranscoderLayer { encoder, decoders: vec![dictionary.decoder], decoder_bias, skip };
            if layers.insert(layer, (input, one)).is_some() {
                let (expected, found) = ("one transcoder".to_owned(), "two".to_owned());
                return Err(FileError::Layer { layer, expected, found });
            }
        }
        let input = layers.values().next().map(|(input, _)| *input);
        let lacking = (0..n_layer).find(|layer| layers.get(layer).map(|(input, _)| *input) != input);
        if let Some(layer) = lacking {
            let reads =
                |input: Option<TranscoderInput>| input.map_or("none", TranscoderInput::hook).to_owned();
            let found = reads(layers.get(&layer).map(|(input, _)| *input));
            return Err(FileError::Layer {
                layer,
                expected: format!("a transcoder that reads {}", reads(input)),
                found,
            });
        }
        Self::new(
            input.unwrap_or(TranscoderInput::ResidMid),
            layers.into_values().map(|(_, one)| one).collect(),
        )
    }

    /// Treats MLP neurons as features: in each layer, the `k` neurons with the largest input at a token.
    ///
    /// The neurons are assumed to have ReLU activations. The contribution of the other neurons and the
    /// deviation from ReLU count as error.
    ///
    /// # Errors
    /// If the MLP weights cannot be allocated in f32.
    pub fn of_neurons(model: &Gpt2LMHeadModel, k: usize) -> candle_core::Result<Self> {
        let layers = model.transformer().blocks().iter().map(|block| {
            let [expand, contract] = [block.mlp().expand(), block.mlp().contract()];
            let [read, written] = [expand, contract]
                .map(|layer| layer.weight().to_tensor()?.to_dtype(DType::F32)?.t()?.contiguous());
            let [read_bias, written_bias] = [expand, contract].map(|layer| match layer.bias() {
                Some(bias) => bias.to_dtype(DType::F32),
                None => Tensor::zeros(layer.out_features(), DType::F32, model.device()),
            });
            Ok(TranscoderLayer {
                encoder: Encoder::top_k(read?, read_bias?, k.clamp(1, expand.out_features())),
                decoders: vec![written?],
                decoder_bias: written_bias?,
                skip: None,
            })
        });
        Ok(Self { input: TranscoderInput::MlpIn, layers: layers.collect::<candle_core::Result<_>>()? })
    }

    /// Returns the input that the transcoders read.
    pub fn input(&self) -> TranscoderInput {
        self.input
    }

    /// Returns the transcoder of each layer.
    pub fn layers(&self) -> &[TranscoderLayer] {
        &self.layers
    }

    /// Width of the activations, `C`.
    pub fn width(&self) -> usize {
        self.layers[0].encoder.width()
    }

    /// Whether features also write to later layers.
    pub fn is_cross_layer(&self) -> bool {
        self.layers[0].decoders.len() > 1
    }

    /// Checks that a model has the same number of layers and the same hidden size.
    ///
    /// # Errors
    /// If either differs.
    pub fn check_model(&self, model: &Gpt2Config) -> Result<(), FileError> {
        let (expected, found) = (model.n_layer, self.layers.len());
        if found != expected {
            return Err(FileError::OtherDepth { expected, found });
        }
        let (expected, found) = (model.n_embd, self.width());
        if found != expected {
            let site = Site::in_block(0, SiteKind::MlpOut);
            return Err(FileError::OtherModel { site, expected, found });
        }
        Ok(())
    }

    /// Converts the transcoders to another dtype and device.
    ///
    /// # Errors
    /// If allocation on the device fails.
    pub fn cast(&self, dtype: DType, device: &Device) -> candle_core::Result<Self> {
        let change = |tensor: &Tensor| tensor.to_device(device)?.to_dtype(dtype);
        let layers = self.layers.iter().map(|layer| layer.mapped(&change));
        Ok(Self { input: self.input, layers: layers.collect::<candle_core::Result<_>>()? })
    }
}

/// Returns the layer and the input of a SAELens transcoder.
fn transcoded(dictionary: &Dictionary) -> Result<(usize, TranscoderInput), FileError> {
    let config = dictionary.config();
    let expected = "\"transcoder\" or \"skip_transcoder\", optionally prefixed with \"jumprelu_\"";
    let output =
        config.output.ok_or_else(|| unexpected("architecture", expected, &"an autoencoder".into()))?;
    if config.normalizes_input {
        let expected = "\"none\" (graphs do not support further normalization of the input)";
        return Err(unexpected("normalize_activations", expected, &"layer_norm".into()));
    }
    let expected = "\"hook_resid_mid\" or \"ln2.hook_normalized\" of a block";
    let found = config.site.to_string();
    let input = TranscoderInput::of_kind(config.site.kind).zip(config.site.layer);
    let (input, layer) = input.ok_or_else(|| unexpected("hook_name", expected, &found.into()))?;
    let expected = Site::in_block(layer, SiteKind::MlpOut);
    if output.site != expected {
        let found = output.site.to_string();
        return Err(unexpected("hook_name_out", &format!("\"{expected}\""), &found.into()));
    }
    Ok((layer, input))
}

/// Returns the number of latents and the width of an encoder `(F, C)`.
fn sizes(tensors: &BTreeMap<String, Tensor>, name: &str) -> Result<(usize, usize), FileError> {
    let axes = "(latents, width)";
    let found = tensors.get(name).ok_or_else(|| FileError::missing(tensors, name, axes))?;
    match *found.dims() {
        [latents, width] if latents > 0 && width > 0 => Ok((latents, width)),
        ref dims => {
            let found = Shape(dims).to_string();
            Err(FileError::Shape { name: name.into(), expected: axes.into(), found })
        }
    }
}
