//! Splices a dictionary into a run: its reconstruction replaces the original activation.
//!
//! With the error term, the reconstruction error is added back as a constant, as in SAELens. The model's
//! output is then unchanged, and gradients flow only through the latents.

use candle_core::{Result, Tensor, Var, bail};
use candle_gpt2::{Gpt2LMHeadModel, Observer, Site};

use crate::{ActivationVariant, Dictionary, Processing};

/// Replaces an activation with a dictionary's reconstruction of it.
///
/// A transcoder reads one hook point and writes another.
///
/// ```
/// use candle_gpt2_interpret::{Run, Splice};
/// # use std::collections::BTreeMap;
/// # use candle_core::{DType, Device, Tensor};
/// # use candle_gpt2::{Gpt2Config, Gpt2LMHeadModel, LogitsFor};
/// # use candle_gpt2_interpret::{Dictionary, DictionaryConfig};
/// # let sizes = Gpt2Config { vocab_size: 11, n_positions: 8, n_embd: 6, n_layer: 2, n_head: 3, ..Gpt2Config::gpt2() };
/// # let model = Gpt2LMHeadModel::load(&sizes, candle_nn::VarBuilder::zeros(DType::F32, &Device::Cpu))?;
/// # let zeros = |shape: &[usize]| Tensor::zeros(shape, DType::F32, &Device::Cpu);
/// # let tensors = [("W_enc", &[6, 9][..]), ("b_enc", &[9]), ("W_dec", &[9, 6]), ("b_dec", &[6])];
/// # let tensors = tensors.map(|(name, shape)| zeros(shape).map(|tensor| (name.to_owned(), tensor)));
/// # let tensors: BTreeMap<_, _> = tensors.into_iter().collect::<Result<_, _>>()?;
/// # let config = r#"{"hook_name": "blocks.1.hook_resid_pre", "architecture": "standard", "d_in": 6, "d_sae": 9}"#;
/// # let dictionary = Dictionary::from_tensors(&tensors, &DictionaryConfig::from_json(config)?)?;
///
/// let mut splice = Splice::new(&model, &dictionary)?.with_error();
/// Run::new(&model, &[1, 2, 3, 4])?.logits(LogitsFor::LastToken, &mut splice)?;
/// assert_eq!(splice.latents.ok_or("the splice was not reached")?.dims(), [1, 4, 9]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Splice<'a> {
    dictionary: &'a Dictionary,
    processing: Processing,
    has_error: bool,
    /// Input that a transcoder read in this pass.
    input: Option<Tensor>,
    /// Zero-initialized variables that are added to the latents and to the error.
    probes: Option<[Var; 2]>,
    /// Latents of the last pass, `(B, T, F)`.
    pub latents: Option<Tensor>,
    /// Reconstruction error of the last pass, `(B, T, C)`.
    pub error: Option<Tensor>,
}

impl<'a> Splice<'a> {
    /// Creates a splice of a dictionary into this model, without the error term.
    ///
    /// # Errors
    /// If a block's weights cannot be allocated in f32.
    pub fn new(model: &Gpt2LMHeadModel, dictionary: &'a Dictionary) -> Result<Self> {
        let processing = Processing::new(model)?;
        Ok(Self {
            dictionary,
            processing,
            has_error: false,
            input: None,
            probes: None,
            latents: None,
            error: None,
        })
    }

    /// Adds the reconstruction error back.
    pub fn with_error(self) -> Self {
        Self { has_error: true, ..self }
    }

    /// Returns the hook point that the splice writes.
    pub fn site(&self) -> Site {
        self.dictionary.explained_site()
    }

    /// Whether the reconstruction error is added back.
    pub fn has_error(&self) -> bool {
        self.has_error
    }

    /// Adds zero-initialized variables to the latents and the error of later passes.
    ///
    /// Returns `None` if no earlier pass has determined their shapes.
    pub(crate) fn probe(&mut self) -> Result<Option<[Var; 2]>> {
        let (Some(latents), Some(error)) = (&self.latents, &self.error) else { return Ok(None) };
        let probes = [Var::from_tensor(&latents.zeros_like()?)?, Var::from_tensor(&error.zeros_like()?)?];
        self.probes = Some(probes.clone());
        Ok(Some(probes))
    }
}

impl Observer for Splice<'_> {
    fn wants(&self, site: Site) -> bool {
        site == self.dictionary.config().site || site == self.site()
    }

    fn observe(&mut self, site: Site, value: Tensor) -> Result<Tensor> {
        let Self { dictionary, processing, .. } = self;
        let reads = dictionary.config().site;
        if site == reads {
            self.input = Some(dictionary.input(&value, processing)?);
        }
        if site != dictionary.explained_site() {
            return Ok(value);
        }
        let Some(input) = self.input.take() else {
            bail!("{site}: the pass must reach the transcoder's input, {reads}, first");
        };
        let target = dictionary.target(&value, processing)?;
        let latents = dictionary.encode(&input)?;
        let mut output = dictionary.decode(&latents, &input)?;
        let mut error = (&target - &output)?.detach();
        (self.latents, self.error) = (Some(latents.detach()), Some(error.clone()));
        if let Some([of_latents, of_error]) = &self.probes {
            output = dictionary.decode(&(latents + of_latents.as_tensor())?, &input)?;
            error = (error + of_error.as_tensor())?;
        }
        if self.has_error {
            output = (output + error)?;
        }
        let output = match dictionary.config().trained_on {
            ActivationVariant::Checkpoint => output.reshape(value.shape())?,
            // Adds only the change to the original value, because the dictionary does not reconstruct the
            // part that TransformerLens' processing removes.
            ActivationVariant::TransformerLens => {
                let change = (output - target)?.reshape(value.shape())?;
                (value.to_dtype(change.dtype())? + change)?
            }
        };
        output.to_dtype(value.dtype())
    }
}
