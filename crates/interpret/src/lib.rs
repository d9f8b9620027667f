//! Looking inside GPT-2: what is computed at each place of a model, what changes when something else is put there, and which part
//! of a model a prediction is due to.
//!
//! Names are TransformerLens' (see [`Site`](gpt2::Site)); numbers are those of the checkpoint as it is. TransformerLens folds layer
//! norms, centres what is written to the residual stream and moves biases of values before it shows a model; [`Processing`] leads
//! from ours to those.
//!
//! ```
//! use candle_core::{DType, Device};
//! use candle_nn::VarBuilder;
//! use gpt2::{Gpt2Config, Gpt2LMHead, LogitsFor, Site};
//! use gpt2_interpret::{Ablate, Place, Run};
//!
//! let config = Gpt2Config::from_json(
//!     r#"{"model_type": "gpt2", "vocab_size": 11, "n_positions": 8, "n_embd": 6, "n_layer": 2, "n_head": 3}"#,
//! )?;
//! let model = Gpt2LMHead::load(&config, &VarBuilder::zeros(DType::F32, &Device::Cpu))?;
//! let run = Run::new(&model, &[1, 2, 3])?;
//!
//! // Record: a model of zeros attends evenly to what each token sees.
//! let record = run.record(Site::matching("pattern", config.n_layer)?)?;
//! let last = record.get("blocks.1.attn.hook_pattern".parse()?)?.get(0)?.get(2)?.get(2)?;
//! assert!(last.to_vec1::<f32>()?.iter().all(|weight| (weight - 1.0 / 3.0).abs() < 1e-6));
//!
//! // Change: without the second head of the first block. An edit tells whether it changed anything; zeros were zeros.
//! let mut edit = Ablate::zero("z0".parse()?)?.at(Place::head(1));
//! let logits = run.logits(LogitsFor::LastToken, &mut edit)?;
//! assert_eq!((logits.dims(), edit.has_changed), (&[1, 1, 11][..], false));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod dictionary;
mod error;
mod gradients;
mod heads;
mod lens;
mod observers;
mod patching;
mod patterns;
mod processing;
mod recording;
mod residual;
mod run;
mod steering;
mod tuned_lens;

pub use dictionary::{
    Dictionary, DictionaryConfig, DictionaryFormat, Explained, FileError, LatentActivation, TrainedOn,
    openai_site,
};
pub use error::InterpretError;
pub use gradients::{Saliency, TokenWeights, estimated_grid, site_gradients, token_weights};
pub use heads::{Excluded, HeadScores, Likeness, OfHeads, Sought, detect_heads, head_scores, random_rows};
pub use lens::{
    LensCell, LensLayer, LensOptions, LensValue, lens_cells, lens_label, lens_logits, lens_logits_at,
    lens_logprobs, logit_lens,
};
pub use observers::{Ablate, Add, Chain, Edit, Place, Record, Replace};
pub use patching::{Ablation, By, Grid, Head, Patching, Receiver, ablated, ablation_grid, replaced_grid};
pub use patterns::Patterns;
pub use processing::{Processing, centred};
pub use recording::Recording;
pub use residual::{
    Attribution, Direction, Stack, Unit, accumulated_residuals, attribute, decomposed_residual, head_results,
};
pub use run::{Measure, Metric, Run, residual_sites};
pub use steering::Steering;
pub use tuned_lens::TunedLens;
