//! Transcoders of all layers: what every MLP adds, as a sum of few directions out of many.
//!
//! With `x_l` what is read in layer `l` and `a_l = act(x_l · W_enc_l + b_enc_l)`: in a set of one for each layer
//! `ŷ_l = a_l · W_dec_l + b_dec_l`; in a cross-layer transcoder features write to their own layer and to all after it,
//! `ŷ_k = Σ_{l ≤ k} a_l · W_dec_{l→k} + b_dec_k`. A skip connection adds `x_l · W_skip`.
//!
//! Files are those of SAELens, a folder for each layer (see [`Dictionary`]), and of circuit-tracer: `layer_{l}.safetensors`, or
//! `W_enc_{l}.safetensors` and `W_dec_{l}.safetensors`, with a `config.yaml` beside them. They are read elsewhere: here come their
//! tensors and texts. Source: decoderesearch/circuit-tracer, `circuit_tracer/transcoder/single_layer_transcoder.py` at 9813971 and
//! `cross_layer_transcoder.py` at 05774bb, which turns the matrix of the skip connection in the first alone.

use std::collections::BTreeMap;

use candle_core::{DType, Device, Tensor};
use candle_gpt2::{Gpt2Config, Gpt2LMHeadModel, Site, SiteKind};
use serde_json::Value;

use crate::dictionary_config::{Keys, unexpected};
use crate::encoder::Encoder;
use crate::file_tensors::{Shape, tensor};
use crate::{Dictionary, FileError, LatentActivation, named_site};

/// What transcoders read, in each layer. Part of [`Transcoders`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TranscoderInput {
    /// The residual stream between attention and MLP (`hook_resid_mid`).
    ResidMid,
    /// The same after the second norm without its weight and bias (`ln2.hook_normalized`).
    Ln2Normalized,
    /// The same after the whole norm: the input of the MLP (`mlp.hook_in`; in the files of circuit-tracer, which runs on unprocessed
    /// models of TransformerLens 2, also `ln2.hook_normalized`).
    MlpIn,
}

impl TranscoderInput {
    /// TransformerLens' name, below `blocks.N.`.
    pub fn hook(self) -> &'static str {
        match self {
            Self::ResidMid => SiteKind::ResidMid.hook(),
            Self::Ln2Normalized => SiteKind::Ln2Normalized.hook(),
            Self::MlpIn => "mlp.hook_in",
        }
    }

    /// What is read at places of this kind, if transcoders read there.
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

    /// What a hook of every block names.
    fn of_hook(hook: &str) -> Option<Self> {
        match named_site(&format!("blocks.0.{hook}")) {
            Ok(site) => Self::of_kind(site.kind),
            Err(_) => (hook == Self::MlpIn.hook()).then_some(Self::MlpIn),
        }
    }
}

/// The configuration of circuit-tracer's transcoders.
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
    /// Whether features write to later layers too (`model_kind` is `cross_layer_transcoder`).
    pub is_cross_layer: bool,
    /// What they read (`feature_input_hook`).
    pub input: TranscoderInput,
    /// How many latents are kept (`k`), if that is what makes them; else a threshold among the tensors does, or ReLU.
    pub k: Option<usize>,
}

impl TranscodersConfig {
    /// Reads `config.json`, or a `config.yaml` that was turned into JSON.
    ///
    /// # Errors
    /// When it is no JSON, lacks a key, or asks for what is not supported.
    pub fn from_json(text: &str) -> Result<Self, FileError> {
        let value: Value =
            serde_json::from_str(text).map_err(|error| FileError::NotJson { error: error.to_string() })?;
        let keys = Keys(&value);
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
            // Its models are those of TransformerLens 2 as they are, where this hook is behind the weight and the bias.
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

    /// What makes the latents of a layer, by its threshold.
    fn activation(&self, tensors: &BTreeMap<String, Tensor>, threshold: &str) -> LatentActivation {
        match self.k {
            Some(k) => LatentActivation::TopK { k },
            None if tensors.contains_key(threshold) => LatentActivation::JumpRelu,
            None => LatentActivation::Relu,
        }
    }
}

/// The transcoder of one layer.
///
/// See [`Transcoders`] for an example.
#[derive(Debug, Clone)]
pub struct TranscoderLayer {
    pub(crate) encoder: Encoder,
    /// What features write to this layer, and of a cross-layer transcoder to each one after it; `(F, C)` each.
    pub(crate) decoders: Vec<Tensor>,
    /// `(C)`.
    pub(crate) decoder_bias: Tensor,
    /// `(C, C)`, of `x · skip`.
    pub(crate) skip: Option<Tensor>,
}

impl TranscoderLayer {
    /// Of the tensors of `layer_{l}.safetensors`.
    ///
    /// # Errors
    /// When one is missing or damaged, or has another shape than the others tell.
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

    /// Of the tensors of `W_enc_{l}.safetensors` and `W_dec_{l}.safetensors` together, for one of `n_layer` layers.
    ///
    /// # Errors
    /// Those of [`Self::per_layer`].
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

    /// Directions that features write to the residual stream, summed over all layers, `(N, C)`.
    ///
    /// # Errors
    /// If there is no such feature.
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

/// Transcoders of every layer of a model.
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
    /// Of layers that read the same, the first to the last.
    ///
    /// # Errors
    /// When there are none, or one has another width, or writes to other layers than the others.
    pub fn new(input: TranscoderInput, layers: Vec<TranscoderLayer>) -> Result<Self, FileError> {
        let Some(first) = layers.first() else {
            return Err(FileError::OtherDepth { expected: 1, found: 0 });
        };
        let (width, is_cross_layer) = (first.encoder.width(), first.decoders.len() > 1);
        for (layer, one) in layers.iter().enumerate() {
            let targets = if is_cross_layer { layers.len() - layer } else { 1 };
            let expected = format!("values of width {width} and decoders for {targets} layers");
            let found = (one.encoder.width(), one.decoders.len());
            if found != (width, targets) || one.decoder_bias.dims() != [width] {
                let found = format!("width {} and {} decoders", found.0, found.1);
                return Err(FileError::Layer { layer, expected, found });
            }
        }
        Ok(Self { input, layers })
    }

    /// Of SAELens' transcoders, one for each layer in any order.
    ///
    /// # Errors
    /// When one is no transcoder from the input of an MLP to its output, or a layer has none or two.
    pub fn of_dictionaries(dictionaries: Vec<Dictionary>) -> Result<Self, FileError> {
        let n_layer = dictionaries.len();
        let mut layers = BTreeMap::new();
        for dictionary in dictionaries {
            let (layer, input) = transcoded(&dictionary)?;
            let encoder = match dictionary.config().needs_centring() {
                true => dictionary.encoder.of_centred()?,
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
                expected: format!("a transcoder of {}", reads(input)),
                found,
            });
        }
        Self::new(
            input.unwrap_or(TranscoderInput::ResidMid),
            layers.into_values().map(|(_, one)| one).collect(),
        )
    }

    /// The MLPs of a model as they are: features are the `k` neurons of each layer that read the most at a token, which are taken to
    /// have ReLU for their activation function. What other neurons and another function add is the error.
    ///
    /// # Errors
    /// When there is no memory for the weights of the MLPs in f32.
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

    /// What they read.
    pub fn input(&self) -> TranscoderInput {
        self.input
    }

    /// The transcoder of each layer.
    pub fn layers(&self) -> &[TranscoderLayer] {
        &self.layers
    }

    /// Width of the values, `C`.
    pub fn width(&self) -> usize {
        self.layers[0].encoder.width()
    }

    /// Whether features write to later layers too.
    pub fn is_cross_layer(&self) -> bool {
        self.layers[0].decoders.len() > 1
    }

    /// Checks that a model has as many layers, with values of this width.
    ///
    /// # Errors
    /// When it has not.
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

    /// The same in another type and on another device.
    ///
    /// # Errors
    /// When the device has no memory for them.
    pub fn cast(&self, dtype: DType, device: &Device) -> candle_core::Result<Self> {
        let change = |tensor: &Tensor| tensor.to_device(device)?.to_dtype(dtype);
        let layers = self.layers.iter().map(|layer| layer.mapped(&change));
        Ok(Self { input: self.input, layers: layers.collect::<candle_core::Result<_>>()? })
    }
}

/// The layer of a transcoder of SAELens, and what it reads there.
fn transcoded(dictionary: &Dictionary) -> Result<(usize, TranscoderInput), FileError> {
    let config = dictionary.config();
    let expected = "a transcoder: the architecture \"transcoder\", \"skip_transcoder\" or one of these with \"jumprelu_\"";
    let output =
        config.output.ok_or_else(|| unexpected("architecture", expected, &"an autoencoder".into()))?;
    if config.normalizes_input {
        let expected =
            "\"none\": a graph is of what each layer reads as it is, not of what is normalized once more";
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

/// Number of latents and width, by an encoder `(F, C)`.
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
