//! Dictionaries of features (sparse autoencoders): what is seen at a place of a model as a sum of few directions out of many.
//!
//! With `W_enc (C, F)` and `W_dec (F, C)`: `latents = act((x − b_dec) · W_enc + b_enc)` and `x̂ = latents · W_dec + b_dec`, where `act`
//! is ReLU, ReLU of the `k` largest, ReLU above a threshold of each latent, or ReLU behind a gate. Where the input is normalized, `x`
//! is first made `(x − mean) / (deviation + 1e-5)`, and `x̂` is `x̂ · deviation + mean` in the end; the deviation is the unbiased one.
//!
//! A transcoder explains another place by what it reads: `ŷ = latents · W_dec + b_dec`, with a skip connection `+ x · W_skipᵀ`.
//!
//! Sources: SAELens (decoderesearch/SAELens, `sae_lens/saes/sae.py` at 2ad7a45, `topk_sae.py`, `jumprelu_sae.py`, `gated_sae.py` at
//! 03548e4, `transcoder.py` at 49e55e4); OpenAI (openai/sparse_autoencoder, `sparse_autoencoder/model.py` at 764586a). Files are read
//! elsewhere: here come their tensors.

use std::collections::BTreeMap;

use candle_core::{D, DType, Device, Tensor, Var, bail};
use candle_gpt2::{Before, Gpt2Config, Site, SiteKind, gradients};

use crate::encoder::Encoder;
use crate::file_tensors::{Shape, last_axis, tensor};
use crate::{
    DictionaryConfig, DictionaryFormat, FileError, Processing, SiteError, TrainedOn, TranscoderOutput,
    site_width,
};

/// Added to the deviation of an input that is normalized; both sources have it in their code, not in their files.
const DEVIATION_EPSILON: f64 = 1e-5;
/// Least norm that a latent's direction is divided by, SAELens' own.
const LEAST_NORM: f32 = 1e-8;
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
    pub(crate) encoder: Encoder,
    /// `(F, C)`; of a transcoder `(F, C_out)`.
    pub(crate) decoder: Tensor,
    /// `(C)`; of a transcoder `(C_out)`.
    pub(crate) decoder_bias: Tensor,
    /// Of a transcoder with a skip connection, `(C, C_out)`: `W_skip` transposed.
    pub(crate) skip: Option<Tensor>,
}

/// A differentiable function of a dictionary. [`Dictionary::vjp`] takes one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DictionaryFunction {
    /// [`Dictionary::pre_activations`] of values.
    PreActivations,
    /// [`Dictionary::activate`] of latents before their activation.
    Activate,
    /// [`Dictionary::decode`] of latents and the encoded values.
    Decode,
}

/// How well a dictionary explains some values. [`Dictionary::explained`] tells it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Explained {
    /// Number of latents that are not zero, mean over the values.
    pub mean_l0: f64,
    /// `1 − Σ‖x − x̂‖² / Σ‖x − mean x‖²`; `None` if the values do not differ. The first token's, which are many times longer than
    /// others, decide it alone if they are among them.
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

    /// What is known of it, with the sizes of its tensors.
    pub fn config(&self) -> &DictionaryConfig {
        &self.config
    }

    /// Width of a value that it reads, `C`.
    pub fn width(&self) -> usize {
        self.encoder.width()
    }

    /// Width of a value that it explains: of a transcoder `C_out`, else `C`.
    pub fn output_width(&self) -> usize {
        self.decoder_bias.elem_count()
    }

    /// Number of latents, `F`.
    pub fn latents(&self) -> usize {
        self.encoder.latents()
    }

    /// The place that it explains: of a transcoder that of its output.
    pub fn explained_site(&self) -> Site {
        self.config.output.as_ref().map_or(self.config.site, |output| output.site)
    }

    /// The same on another device.
    ///
    /// # Errors
    /// When the device has no memory for it.
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

    /// Checks that a model has the place, with values of this width, and the place of a transcoder's output.
    ///
    /// # Errors
    /// When it has not.
    pub fn check_model(&self, model: &Gpt2Config) -> Result<(), FileError> {
        check_width(self.config.site, "hook_name", self.width(), model)?;
        match &self.config.output {
            Some(output) => check_width(output.site, "hook_name_out", self.output_width(), model),
            None => Ok(()),
        }
    }

    /// What to encode, `(…, C)`, of what the model has at the place: with heads side by side, and with TransformerLens' processing
    /// of this model if the dictionary was trained on it.
    ///
    /// # Errors
    /// When the shape is not the site's.
    pub fn input(&self, value: &Tensor, processing: &Processing) -> candle_core::Result<Tensor> {
        self.as_trained(self.config.site, value, processing)
    }

    /// What a transcoder is to give, `(…, C_out)`, of what the model has at [`Self::explained_site`]; as [`Self::input`].
    ///
    /// # Errors
    /// When the shape is not the site's.
    pub fn target(&self, value: &Tensor, processing: &Processing) -> candle_core::Result<Tensor> {
        self.as_trained(self.explained_site(), value, processing)
    }

    fn as_trained(&self, site: Site, value: &Tensor, processing: &Processing) -> candle_core::Result<Tensor> {
        let value = match self.config.trained_on {
            TrainedOn::Checkpoint => value.clone(),
            TrainedOn::TransformerLens => processing.apply(site, value)?,
        };
        match site.kind {
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
        self.encoder.pre_activations(&input)?.reshape(with_last(x, self.latents()))
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
        self.encoder.activate(&rows)?.reshape(before.dims())
    }

    /// The values that latents stand for. `input` is what was encoded: its mean and deviation return if the input is normalized,
    /// and a skip connection reads it.
    ///
    /// # Shapes
    /// `latents (…, F)`, `input (…, C)`, result `(…, C)` in f32, of a transcoder `(…, C_out)`.
    ///
    /// # Errors
    /// When the shapes are others, or the values are on another device.
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

    /// Vector-Jacobian product: the gradients at the inputs of a function, from the gradient at its result.
    ///
    /// # Errors
    /// If the number of inputs or a shape is wrong, and those of the function.
    pub fn vjp(
        &self,
        function: DictionaryFunction,
        inputs: &[Tensor],
        gradient: &Tensor,
    ) -> candle_core::Result<Vec<Tensor>> {
        let variables = inputs.iter().map(Var::from_tensor).collect::<candle_core::Result<Vec<_>>>()?;
        let variables: Vec<&Tensor> = variables.iter().map(Var::as_tensor).collect();
        let (_, found) = gradients(&variables, Before::Nothing, 1.0, || {
            let result = match (function, variables.as_slice()) {
                (DictionaryFunction::PreActivations, [x]) => self.pre_activations(x),
                (DictionaryFunction::Activate, [before]) => self.activate(before),
                (DictionaryFunction::Decode, [latents, input]) => self.decode(latents, input),
                (_, inputs) => bail!("{function:?} does not take {} inputs", inputs.len()),
            };
            (result? * gradient)?.sum_all()
        })?;
        let of_input =
            |(found, input): (Option<Tensor>, &Tensor)| found.map_or_else(|| input.zeros_like(), Ok);
        found.into_iter().zip(inputs).map(of_input).collect()
    }

    /// What the latents of values stand for, `(…, C)`, of a transcoder `(…, C_out)`.
    ///
    /// # Errors
    /// Those of [`Self::encode`].
    pub fn reconstruct(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        self.decode(&self.encode(x)?, x)
    }

    /// One of its tensors by SAELens' name: `W_enc` `(C, F)`, `b_enc` `(F)`, `W_dec` `(F, C)`, `b_dec` `(C)` or `threshold` `(F)`, as
    /// they are computed with: lengths of directions and gates are folded into the encoder. `None` if it has no such tensor.
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

    /// What one latent adds to a value for each unit of it, `(C)`; to a normalized one if the input is normalized.
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
        self.explained_target(x, x)
    }

    /// How well it explains values by others: of a transcoder `target`, `(…, C_out)`, by `x`, `(…, C)`, of the same tokens.
    ///
    /// # Errors
    /// Those of [`Self::encode`].
    pub fn explained_target(&self, x: &Tensor, target: &Tensor) -> candle_core::Result<Explained> {
        let latents = self.encode(x)?;
        let in_doubles = |rows: Tensor| rows.to_device(&Device::Cpu)?.to_dtype(DType::F64);
        let active = latents.ne(0f32)?.to_dtype(DType::F32)?.sum(D::Minus1)?.flatten_all()?; // (N)
        let values = in_doubles(self.rows(target, self.output_width())?)?;
        let output = in_doubles(self.rows(&self.decode(&latents, x)?, self.output_width())?)?;
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
        self.encoder = self.encoder.scaled(&lengths.flatten_all()?)?;
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

/// Whether a model has a place with values of this width; `key` named the place.
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
