//! Dictionaries of features (sparse autoencoders): activations as sparse sums of directions.
//!
//! With `W_enc (C, F)` and `W_dec (F, C)`: `latents = act((x − b_dec) · W_enc + b_enc)` and
//! `x̂ = latents · W_dec + b_dec`. The activation `act` is ReLU, TopK with ReLU, JumpReLU with a threshold
//! per latent, or a gated ReLU. If the input is normalized, `x` is first replaced by
//! `(x − mean) / (deviation + 1e-5)`, and `x̂` by `x̂ · deviation + mean` at the end. The deviation is the
//! unbiased standard deviation.
//!
//! A transcoder explains a different activation than the one it reads: `ŷ = latents · W_dec + b_dec`, plus
//! `x · W_skipᵀ` if it has a skip connection.
//!
//! Sources: SAELens (decoderesearch/SAELens, `sae_lens/saes/sae.py` at 2ad7a45, `topk_sae.py`,
//! `jumprelu_sae.py`, `gated_sae.py` at 03548e4, `transcoder.py` at 49e55e4); OpenAI
//! (openai/sparse_autoencoder, `sparse_autoencoder/model.py` at 764586a). Callers read the files and pass
//! their tensors.

use std::collections::BTreeMap;

use candle_core::{D, DType, Device, Tensor, bail};
use candle_gpt2::{Gpt2Config, Site, SiteKind};

use crate::encoder::Encoder;
use crate::file_tensors::{Shape, last_axis, tensor};
use crate::{
    ActivationVariant, DictionaryConfig, DictionaryFormat, FileError, Processing, SiteError,
    TranscoderOutput, site_width,
};

/// Epsilon added to the standard deviation of inputs; hard-coded in SAELens and in OpenAI's code.
const DEVIATION_EPSILON: f64 = 1e-5;
/// Lower bound of a direction's norm before division, as in SAELens.
const LEAST_NORM: f32 = 1e-8;
/// A dictionary of features: `F` directions of width `C`, with an encoder and a decoder.
///
/// ```
/// use std::collections::BTreeMap;
///
/// use candle_core::{DType, Device, Tensor};
/// use candle_gpt2_interpret::{Dictionary, DictionaryConfig};
///
/// // Two features of inputs of width 2: how far right and how far up the input points.
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
    pub(crate) encoder: Encoder,
    /// Decoder, `(F, C)`; `(F, C_out)` for a transcoder.
    pub(crate) decoder: Tensor,
    /// Decoder bias, `(C)`; `(C_out)` for a transcoder.
    pub(crate) decoder_bias: Tensor,
    /// `W_skip` transposed, `(C, C_out)`, for a transcoder with a skip connection.
    pub(crate) skip: Option<Tensor>,
}

/// Reconstruction quality of a dictionary, from [`Dictionary::explained`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ReconstructionQuality {
    /// Mean number of nonzero latents per token.
    pub mean_l0: f64,
    /// Explained variance, `1 − Σ‖x − x̂‖² / Σ‖x − mean x‖²`; `None` if all rows are equal.
    ///
    /// Activations of the first token have a far larger norm than all others and dominate this value if they
    /// are included.
    pub variance_explained: Option<f64>,
    /// Mean squared error over the elements of `x − x̂`.
    pub mse: f64,
}

impl Dictionary {
    /// Creates a dictionary from tensors on one device, converted to f32.
    ///
    /// # Errors
    /// If a tensor is missing, or if its shape does not match the configuration and the other tensors.
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
        let output = config.output.as_ref();
        let output_width = match output {
            Some(output) => output.d_out.map_or_else(|| last_axis(tensors, names[2]), Ok)?,
            None => width,
        };
        let encoder = matrix(names[0], width, latents)?;
        let skip = match output {
            Some(output) if output.skips => Some(tensor(tensors, "W_skip", &[output_width, width])?.t()?),
            _ => None,
        };
        let sized = |output: &TranscoderOutput| TranscoderOutput { d_out: Some(output_width), ..*output };
        let mut dictionary = Self {
            encoder: Encoder::from_tensors(tensors, encoder, names[1], "threshold", config.activation)?,
            decoder: matrix(names[2], latents, output_width)?,
            decoder_bias: tensor(tensors, names[3], &[output_width])?,
            skip,
            config: DictionaryConfig {
                d_in: Some(width),
                d_sae: Some(latents),
                output: output.map(sized),
                ..config.clone()
            },
        };
        for name in ["scaling_factor", "finetuning_scaling_factor"] {
            refuse_scales(tensors, name)?;
        }
        if config.scales_by_direction {
            dictionary.fold_lengths()?;
        }
        Ok(dictionary)
    }

    /// Returns the configuration, including the sizes from the tensors.
    pub fn config(&self) -> &DictionaryConfig {
        &self.config
    }

    /// Input width, `C`.
    pub fn width(&self) -> usize {
        self.encoder.width()
    }

    /// Output width: `C_out` for a transcoder, otherwise `C`.
    pub fn output_width(&self) -> usize {
        self.decoder_bias.elem_count()
    }

    /// Number of latents, `F`.
    pub fn latents(&self) -> usize {
        self.encoder.latents()
    }

    /// Returns the hook point that the dictionary reconstructs; for a transcoder, its output.
    pub fn explained_site(&self) -> Site {
        self.config.output.as_ref().map_or(self.config.site, |output| output.site)
    }

    /// Copies the dictionary to a device.
    ///
    /// # Errors
    /// If allocation on the device fails.
    pub fn to_device(&self, device: &Device) -> candle_core::Result<Self> {
        let moved = |tensor: &Tensor| tensor.to_device(device);
        Ok(Self {
            config: self.config.clone(),
            encoder: self.encoder.mapped(moved)?,
            decoder: moved(&self.decoder)?,
            decoder_bias: moved(&self.decoder_bias)?,
            skip: self.skip.as_ref().map(moved).transpose()?,
        })
    }

    /// Checks that a model has the dictionary's hook points, with matching widths.
    ///
    /// # Errors
    /// If a hook point is missing or has a different width.
    pub fn check_model(&self, model: &Gpt2Config) -> Result<(), FileError> {
        check_width(self.config.site, "hook_name", self.width(), model)?;
        match &self.config.output {
            Some(output) => check_width(output.site, "hook_name_out", self.output_width(), model),
            None => Ok(()),
        }
    }

    /// Converts an activation of the model to the encoder's input, `(…, C)`.
    ///
    /// Heads are concatenated. If the dictionary was trained with TransformerLens' processing, that
    /// processing is applied.
    ///
    /// # Errors
    /// If the shape does not match the hook point.
    pub fn input(&self, value: &Tensor, processing: &Processing) -> candle_core::Result<Tensor> {
        self.as_trained(self.config.site, value, processing)
    }

    /// Converts an activation at [`Self::explained_site`] to the target, `(…, C_out)`.
    ///
    /// The conversion is the same as in [`Self::input`].
    ///
    /// # Errors
    /// If the shape does not match the hook point.
    pub fn target(&self, value: &Tensor, processing: &Processing) -> candle_core::Result<Tensor> {
        self.as_trained(self.explained_site(), value, processing)
    }

    fn as_trained(&self, site: Site, value: &Tensor, processing: &Processing) -> candle_core::Result<Tensor> {
        let value = match self.config.trained_on {
            ActivationVariant::Checkpoint => value.clone(),
            ActivationVariant::TransformerLens => processing.apply(site, value)?,
        };
        match site.kind {
            SiteKind::Q | SiteKind::K | SiteKind::V | SiteKind::Z => value.flatten_from(D::Minus2),
            _ => Ok(value),
        }
    }

    /// Encodes inputs into latents.
    ///
    /// # Shapes
    /// `x` is `(…, C)`; returns `(…, F)` in f32.
    ///
    /// # Errors
    /// If the last axis is not `C`, or if `x` is on a different device.
    pub fn encode(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        self.activate(&self.pre_activations(x)?)
    }

    /// Computes the pre-activations of the latents.
    ///
    /// # Shapes
    /// `x` is `(…, C)`; returns `(…, F)` in f32.
    ///
    /// # Errors
    /// See [`Self::encode`].
    pub fn pre_activations(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let mut input = self.rows(x, self.width())?; // (N, C)
        if self.config.normalizes_input {
            let (mean, deviation) = statistics(&input)?;
            input = input.broadcast_sub(&mean)?.broadcast_div(&(deviation + DEVIATION_EPSILON)?)?;
        }
        if self.config.subtracts_bias {
            input = input.broadcast_sub(&self.decoder_bias)?;
        }
        self.encoder.pre_activations(&input)?.reshape(with_last(x, self.latents()))
    }

    /// Computes the latents from the result of [`Self::pre_activations`].
    ///
    /// # Shapes
    /// `before` is `(…, F)`; returns the same shape in f32.
    ///
    /// # Errors
    /// If the last axis is not `F`, or if `before` is on a different device.
    pub fn activate(&self, before: &Tensor) -> candle_core::Result<Tensor> {
        let rows = self.rows(before, self.latents())?; // (N, F)
        self.encoder.activate(&rows)?.reshape(before.dims())
    }

    /// Decodes latents into a reconstruction.
    ///
    /// `input` is the input that was encoded. If inputs are normalized, its mean and deviation are restored.
    /// A skip connection also reads the input.
    ///
    /// # Shapes
    /// `latents` is `(…, F)` and `input` `(…, C)`; returns `(…, C)` in f32, or `(…, C_out)` for a transcoder.
    ///
    /// # Errors
    /// If a shape is wrong, or if a tensor is on a different device.
    pub fn decode(&self, latents: &Tensor, input: &Tensor) -> candle_core::Result<Tensor> {
        let rows = self.rows(latents, self.latents())?; // (N, F)
        let input_rows = self.rows(input, self.width())?; // (N, C)
        let mut output = rows.matmul(&self.decoder)?.broadcast_add(&self.decoder_bias)?; // (N, C)
        if self.config.normalizes_input && self.config.output.is_none() {
            let (mean, deviation) = statistics(&input_rows)?;
            output = output.broadcast_mul(&deviation)?.broadcast_add(&mean)?;
        }
        if let Some(skip) = &self.skip {
            output = (output + input_rows.matmul(skip)?)?;
        }
        output.reshape(with_last(latents, self.output_width()))
    }

    /// Encodes and decodes inputs, `(…, C)`; returns `(…, C_out)` for a transcoder.
    ///
    /// # Errors
    /// See [`Self::encode`].
    pub fn reconstruct(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        self.decode(&self.encode(x)?, x)
    }

    /// Returns a tensor by its SAELens name, or `None` if it does not exist.
    ///
    /// The names are `W_enc` `(C, F)`, `b_enc` `(F)`, `W_dec` `(F, C)`, `b_dec` `(C)` and `threshold` `(F)`.
    /// These are the tensors used in computation: norms of directions and gates are folded into the encoder.
    pub fn tensor(&self, name: &str) -> Option<&Tensor> {
        match name {
            "W_enc" => Some(self.encoder.weight()),
            "b_enc" => Some(self.encoder.bias()),
            "W_dec" => Some(&self.decoder),
            "b_dec" => Some(&self.decoder_bias),
            "threshold" => self.encoder.threshold(),
            _ => None,
        }
    }

    /// Returns the direction that one unit of a latent adds to the reconstruction, `(C)`.
    ///
    /// If the input is normalized, the direction is in the normalized space.
    ///
    /// # Errors
    /// If `latent` is out of range.
    pub fn direction(&self, latent: usize) -> candle_core::Result<Tensor> {
        if latent >= self.latents() {
            bail!(
                "latent {latent} is out of range; the dictionary has {} latents, counted from 0",
                self.latents()
            );
        }
        self.decoder.get(latent)?.contiguous()
    }

    /// Measures the reconstruction quality on activations, `(…, C)`.
    ///
    /// # Errors
    /// See [`Self::encode`].
    pub fn explained(&self, x: &Tensor) -> candle_core::Result<ReconstructionQuality> {
        self.explained_target(x, x)
    }

    /// Measures the reconstruction of `target` `(…, C_out)` from `x` `(…, C)` for the same tokens.
    ///
    /// Use this method for transcoders.
    ///
    /// # Errors
    /// See [`Self::encode`].
    pub fn explained_target(
        &self,
        x: &Tensor,
        target: &Tensor,
    ) -> candle_core::Result<ReconstructionQuality> {
        let latents = self.encode(x)?;
        let in_doubles = |rows: Tensor| rows.to_device(&Device::Cpu)?.to_dtype(DType::F64);
        let active = latents.ne(0f32)?.to_dtype(DType::F32)?.sum(D::Minus1)?.flatten_all()?; // (N)
        let values = in_doubles(self.rows(target, self.output_width())?)?;
        let output = in_doubles(self.rows(&self.decode(&latents, x)?, self.output_width())?)?;
        let sum_of_squares = |rows: Tensor| rows.sqr()?.sum_all()?.to_scalar::<f64>();
        let error = sum_of_squares((&values - output)?)?;
        let variance = sum_of_squares(values.broadcast_sub(&values.mean_keepdim(0)?)?)?;
        Ok(ReconstructionQuality {
            mean_l0: in_doubles(active)?.mean_all()?.to_scalar()?,
            variance_explained: (variance > 0.0).then(|| 1.0 - error / variance),
            mse: error / values.elem_count() as f64,
        })
    }

    /// Checks the last axis and reshapes to rows in f32.
    fn rows(&self, values: &Tensor, expected: usize) -> candle_core::Result<Tensor> {
        match values.dims().last() {
            Some(last) if *last == expected => values.reshape(((), expected))?.to_dtype(DType::F32),
            _ => bail!(
                "the dictionary for {} expects inputs of width {} or {} latents, found shape {:?}",
                self.config.site,
                self.width(),
                self.latents(),
                values.dims()
            ),
        }
    }

    /// Normalizes every direction to unit length and scales the encoder by the original length.
    ///
    /// The latents then include the length, and the reconstruction is unchanged.
    fn fold_lengths(&mut self) -> Result<(), FileError> {
        let lengths = self.decoder.sqr()?.sum_keepdim(1)?.sqrt()?.maximum(LEAST_NORM)?; // (F, 1)
        self.decoder = self.decoder.broadcast_div(&lengths)?;
        self.encoder = self.encoder.scaled(&lengths.flatten_all()?)?;
        Ok(())
    }
}

/// Mean and unbiased standard deviation of each row, `(N, 1)`.
fn statistics(rows: &Tensor) -> candle_core::Result<(Tensor, Tensor)> {
    Ok((rows.mean_keepdim(D::Minus1)?, rows.var_keepdim(D::Minus1)?.sqrt()?))
}

/// Returns the shape of `values` with a different last axis.
fn with_last(values: &Tensor, last: usize) -> Vec<usize> {
    let (_, others) = values.dims().split_last().unwrap_or((&last, &[]));
    [others, &[last]].concat()
}

/// Checks that a model's hook point has width `found`; `key` names the configuration key in errors.
fn check_width(site: Site, key: &str, found: usize, model: &Gpt2Config) -> Result<(), FileError> {
    if let Some(layer) = site.layer.filter(|layer| *layer >= model.n_layer) {
        let n_layer = model.n_layer;
        return Err(FileError::Hook {
            key: key.into(),
            error: SiteError::NoSuchBlock { name: site.to_string(), layer, n_layer },
        });
    }
    let expected = site_width(site, model).ok_or(FileError::NotExplained { site })?;
    if found == expected { Ok(()) } else { Err(FileError::OtherModel { site, expected, found }) }
}

/// Returns the width and the number of latents from the configuration, or else from the encoder.
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
    // The unbiased standard deviation of a single value is undefined.
    if sizes.0 < 2 || sizes.1 < 1 {
        return Err(FileError::Shape {
            name: encoder.into(),
            expected: axes.into(),
            found: Shape(found.dims()).to_string(),
        });
    }
    Ok((config.d_in.unwrap_or(sizes.0), config.d_sae.unwrap_or(sizes.1)))
}

/// Rejects per-latent scales from fine-tuning in old SAELens files, unless all of them are 1.
fn refuse_scales(tensors: &BTreeMap<String, Tensor>, name: &str) -> Result<(), FileError> {
    let Some(scales) = tensors.get(name) else { return Ok(()) };
    let scales = scales.flatten_all()?.to_dtype(DType::F32)?.to_vec1::<f32>()?;
    match scales.iter().find(|scale| **scale != 1.0) {
        None => Ok(()),
        Some(scale) => Err(FileError::Key {
            key: name.into(),
            expected: "1 everywhere (multiply the rows of `W_dec` by this tensor and remove it)".into(),
            found: scale.to_string(),
        }),
    }
}
