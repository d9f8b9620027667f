//! Which option of the program helps against an error of the libraries, whose messages name none.

use gpt2_training::TrainingError;
use gpt2_weights::WeightsError;

/// What to call the program with, where the error has such a way out.
pub(crate) fn of(error: &anyhow::Error) -> Option<&'static str> {
    let training = error.downcast_ref::<TrainingError>();
    let weights = match training {
        Some(TrainingError::Weights(error)) => Some(error),
        _ => error.downcast_ref::<WeightsError>(),
    };
    match (training, weights) {
        (_, Some(WeightsError::NoTokenizer { .. })) => {
            Some("name one with --tokenizer FILE, or give token ids (--ids)")
        }
        (Some(TrainingError::TooFewTokens { .. }), _) => Some("give a shorter --context"),
        (Some(TrainingError::Vocabulary { .. }), _) => Some("name the model's own with --tokenizer"),
        (Some(TrainingError::NotFinite { .. }), _) => Some("lower --lr, or clip with --grad-clip"),
        (Some(TrainingError::OtherState { .. }), _) => Some("give the same options, or another --out"),
        _ => None,
    }
}
