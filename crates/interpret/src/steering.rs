//! Activation steering: adds a direction to the residual stream during generation.
//!
//! Source: "Steering Language Models With Activation Engineering" (arXiv:2308.10248). The method takes the
//! difference between two prompts' residual streams before a block, scales the difference and adds it at the
//! first positions of the sequence.

use candle_core::{DType, Tensor};
use candle_gpt2::{Gpt2LMHeadModel, Observer, Site, SiteKind};

use crate::error::Result;
use crate::widths::sum_dtype;
use crate::{InterpretError, Run};

/// Adds vectors to the input of a block, at every position or only at a sequence's first positions.
///
/// The first positions belong to the pass that starts a sequence. This pass prefills the prompt, or its
/// window after the context slides.
///
/// ```
/// use candle_gpt2::LogitsFor;
/// use candle_gpt2_interpret::{Run, Steering};
/// # use candle_core::{DType, Device, Tensor};
/// # use candle_gpt2::{Gpt2Config, Gpt2LMHeadModel};
/// # let sizes = Gpt2Config { vocab_size: 11, n_positions: 8, n_embd: 6, n_layer: 2, n_head: 3, ..Gpt2Config::gpt2() };
/// # let model = Gpt2LMHeadModel::load(&sizes, candle_nn::VarBuilder::zeros(DType::F32, &Device::Cpu))?;
///
/// let mut steering = Steering::new(&model, 1, Tensor::ones((2, 6), DType::F32, &Device::Cpu)?)?.everywhere()?;
/// assert!(!steering.is_zero()?);
/// let logits = Run::new(&model, &[1, 2, 3, 4])?.logits(LogitsFor::LastToken, &mut steering)?;
/// assert_eq!(logits.dims(), [1, 1, 11]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
pub struct Steering {
    site: Site,
    /// Vectors to add, `(n, C)`.
    vectors: Tensor,
    is_everywhere: bool,
    past_lengths: Vec<usize>,
}

impl Steering {
    /// Creates steering that adds row `i` of `vectors` at position `i` of each sequence.
    ///
    /// # Shapes
    /// `vectors` `(n, C)`.
    ///
    /// # Errors
    /// If `layer` is out of range, or if `vectors` does not match the model's hidden size.
    pub fn new(model: &Gpt2LMHeadModel, layer: usize, vectors: Tensor) -> Result<Self> {
        let config = model.config();
        if layer >= config.n_layer {
            return Err(InterpretError::Layer { layer, n_layer: config.n_layer });
        }
        if vectors.dims().len() != 2 || vectors.dim(1)? != config.n_embd || vectors.dim(0)? == 0 {
            return Err(InterpretError::Mismatch(format!(
                "steering vectors: expected shape (n, {}), found {:?}",
                config.n_embd,
                vectors.dims()
            )));
        }
        let site = Site::in_block(layer, SiteKind::ResidPre);
        Ok(Self { site, vectors, is_everywhere: false, past_lengths: Vec::new() })
    }

    /// Steers with `scale` times the difference between two prompts of equal length.
    ///
    /// # Errors
    /// If a prompt does not fit the model, or if the model fails.
    pub fn between(
        model: &Gpt2LMHeadModel,
        layer: usize,
        [towards, away]: [&[u32]; 2],
        scale: f64,
    ) -> Result<Self> {
        if towards.len() != away.len() {
            return Err(InterpretError::Lengths { clean: towards.len(), corrupted: away.len() });
        }
        let site = Site::in_block(layer, SiteKind::ResidPre);
        if layer >= model.config().n_layer {
            return Err(InterpretError::Layer { layer, n_layer: model.config().n_layer });
        }
        let of = |ids: &[u32]| -> Result<Tensor> {
            let record = Run::new(model, ids)?.record([site])?;
            Ok(record.get(site)?.squeeze(0)?)
        };
        Self::new(model, layer, ((of(towards)? - of(away)?)? * scale)?)
    }

    /// Returns the vectors: `(n, C)`, one for each of the first positions, or `(1, C)` for every position.
    pub fn vectors(&self) -> &Tensor {
        &self.vectors
    }

    /// Whether all vectors are zero.
    ///
    /// # Errors
    /// If the device fails.
    pub fn is_zero(&self) -> Result<bool> {
        let largest = self.vectors.to_dtype(DType::F32)?.abs()?.max_all()?.to_scalar::<f32>()?;
        Ok(largest == 0.0)
    }

    /// Applies the mean of the vectors at every position.
    ///
    /// # Errors
    /// If allocation on the device fails.
    pub fn everywhere(self) -> Result<Self> {
        Ok(Self { vectors: self.vectors.mean_keepdim(0)?, is_everywhere: true, ..self })
    }
}

impl Observer for Steering {
    fn wants(&self, site: Site) -> bool {
        site == self.site
    }

    fn begin(&mut self, past_lengths: &[usize], _: usize) {
        self.past_lengths = past_lengths.to_vec();
    }

    fn observe(&mut self, _: Site, value: Tensor) -> candle_core::Result<Tensor> {
        let vectors = self.vectors.to_dtype(value.dtype())?.to_device(value.device())?;
        if self.is_everywhere {
            return value.broadcast_add(&vectors);
        }
        let (rows, tokens, width) = value.dims3()?;
        let count = vectors.dim(0)?;
        if self.past_lengths.iter().all(|past| *past > 0) {
            return Ok(value);
        }
        // Row `count` is the zero vector for all other positions.
        let nothing = Tensor::zeros((1, width), value.dtype(), value.device())?;
        let table = Tensor::cat(&[&vectors, &nothing], 0)?;
        let place = |row: usize, token: usize| {
            // Rows with past tokens are not steered, because their new tokens are not the prompt's first
            // tokens.
            let has_begun = self.past_lengths.get(row).is_some_and(|past| *past > 0);
            if has_begun { count as i64 } else { token.min(count) as i64 }
        };
        let places: Vec<i64> =
            (0..rows).flat_map(|row| (0..tokens).map(move |token| place(row, token))).collect();
        let places = Tensor::from_vec(places, rows * tokens, value.device())?;
        let added = table.index_select(&places, 0)?.reshape((rows, tokens, width))?;
        let dtype = sum_dtype(value.dtype());
        value.to_dtype(dtype)?.add(&added.to_dtype(dtype)?)?.to_dtype(value.dtype())
    }
}
