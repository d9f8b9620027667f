//! Looking inside GPT-2: what is computed at each place of a model, what changes when something else is put there, and which part
//! of a model a prediction is due to.
//!
//! Names are TransformerLens' (see [`Site`](gpt2::Site)); numbers are those of the checkpoint as it is. TransformerLens folds layer
//! norms, centres what is written to the residual stream and moves biases of values before it shows a model; [`Processing`] leads
//! from ours to those.

mod dictionary;
mod error;
mod gradients;
mod heads;
mod lens;
mod observers;
mod patching;
mod processing;
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
pub use lens::{LensCell, LensLayer, LensOptions, lens_logits, logit_lens};
pub use observers::{Ablate, Add, Chain, Edit, Place, Record, Replace};
pub use patching::{Ablation, By, Grid, Head, Patching, Receiver, ablated, ablation_grid, replaced_grid};
pub use processing::{Processing, centred};
pub use residual::{
    Attribution, Direction, Stack, Unit, accumulated_residuals, attribute, decomposed_residual, head_results,
};
pub use run::{Measure, Metric, Run};
pub use steering::Steering;
pub use tuned_lens::TunedLens;
