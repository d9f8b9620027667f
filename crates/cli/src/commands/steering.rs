//! `gpt2 generate --steer`: a direction that is added to the residual stream of every text.

use std::sync::{Arc, Mutex};

use anyhow::Result;
use candle_gpt2_engine::{LoadedModel, Opened};
use candle_gpt2_look::{Reader, Steer, Towards};
use clap::Args;

use crate::progress::Terminal;

/// What is added, and where.
#[derive(Debug, Args)]
pub(crate) struct SteeringArguments {
    /// Add the difference of two texts' residual streams at the first positions: '" Love"-" Hate"', or '" Love"' for its difference from spaces; or a safetensors file with one tensor (n, width)
    #[arg(long, value_name = "TEXTS|FILE", requires = "layer", help_heading = "Steering")]
    pub(crate) steer: Option<String>,
    /// The layer before which it is added
    #[arg(long, value_name = "N", requires = "steer", help_heading = "Steering")]
    pub(crate) layer: Option<usize>,
    /// The factor that it is multiplied by
    #[arg(
        long,
        value_name = "X",
        requires = "steer",
        allow_negative_numbers = true,
        default_value_t = 1.0,
        help_heading = "Steering"
    )]
    pub(crate) scale: f64,
    /// Add its mean at every position, those of new tokens too
    #[arg(long, requires = "steer", help_heading = "Steering")]
    pub(crate) everywhere: bool,
}

/// Loads the model, steered if that is asked for.
pub(super) fn load(opened: Opened, arguments: &SteeringArguments) -> Result<LoadedModel> {
    let (Some(steer), Some(layer)) = (&arguments.steer, arguments.layer) else {
        return Ok(opened.load(&Terminal)?);
    };
    let towards = Towards::read(steer)?;
    let steer = Steer { towards, layer, scale: arguments.scale, everywhere: arguments.everywhere };
    let checked = steer.check(&Reader::new(opened.vocabulary(), false)?)?;
    let loaded = opened.load(&Terminal)?;
    let steering = checked.steering(&loaded, &Terminal)?;
    Ok(loaded.observed_by(Arc::new(Mutex::new(steering))))
}
