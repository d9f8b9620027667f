//! `gpt2 generate --steer` and `--control-vector`: adds directions to the residual stream.
//!
//! The directions apply to every sequence.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use anyhow::Result;
use candle_gpt2::Gpt2Config;
use candle_gpt2_engine::{LoadedModel, Opened};
use candle_gpt2_interpret::ControlVector;
use candle_gpt2_look::{Reader, Steer, SteeringSource, read_control_vector};
use clap::Args;
use serde_json::{Value, json};

use crate::exit::UsageError;
use crate::progress::Terminal;

/// Options for steering vectors and control vectors.
#[derive(Debug, Args)]
pub(crate) struct SteeringArguments {
    /// Add the difference between two texts' residual streams at the first positions: '" Love"-" Hate"', or
    /// '" Love"' for the difference from spaces; or a vector from a safetensors file with one tensor (n,
    /// width)
    #[arg(long, value_name = "TEXTS|FILE", requires = "layer", help_heading = "Steering")]
    pub(crate) steer: Option<String>,
    /// Layer whose input the steering vector is added to
    #[arg(long, value_name = "N", requires = "steer", help_heading = "Steering")]
    pub(crate) layer: Option<usize>,
    /// Factor that the steering vector is multiplied by
    #[arg(
        long,
        value_name = "X",
        requires = "steer",
        allow_negative_numbers = true,
        default_value_t = 1.0,
        help_heading = "Steering"
    )]
    pub(crate) scale: f64,
    /// Add the mean of the steering vector at every position, including those of new tokens
    #[arg(long, requires = "steer", help_heading = "Steering")]
    pub(crate) everywhere: bool,
    /// Add a llama.cpp control vector (a GGUF file) to the block outputs; repeat to add several
    #[arg(long, value_name = "FILE", conflicts_with = "steer", help_heading = "Steering")]
    pub(crate) control_vector: Vec<PathBuf>,
    /// Add a control vector multiplied by a factor
    #[arg(
        long,
        value_names = ["FILE", "X"],
        num_args = 2,
        allow_negative_numbers = true,
        conflicts_with = "steer",
        help_heading = "Steering"
    )]
    pub(crate) control_vector_scaled: Vec<String>,
    /// First and last blocks whose outputs receive the control vectors
    #[arg(long, value_names = ["FIRST", "LAST"], num_args = 2, help_heading = "Steering")]
    pub(crate) control_vector_layer_range: Option<Vec<usize>>,
}

impl SteeringArguments {
    /// Returns the settings that determine the steering.
    pub(super) fn settings(&self) -> Value {
        let Self { steer, layer, scale, everywhere, .. } = self;
        let Self { control_vector, control_vector_scaled, control_vector_layer_range, .. } = self;
        json!({
            "steer": steer.as_ref().map(|steer| json!([steer, layer, scale, everywhere])),
            "control_vectors": [json!(control_vector), json!(control_vector_scaled), json!(control_vector_layer_range)],
        })
    }

    /// Returns the sum of all control vectors, if there are any.
    fn control_vector(&self, model: &Gpt2Config) -> Result<Option<ControlVector>> {
        let layers = match self.control_vector_layer_range.as_deref() {
            Some([first, last]) if first > last => {
                let message = format!(
                    "--control-vector-layer-range: expected FIRST to be at most LAST, found {first} {last}"
                );
                return Err(UsageError(message).into());
            }
            Some([first, last]) => *first..=*last,
            _ => 0..=usize::MAX,
        };
        let mut files: Vec<(&Path, f64)> = self.control_vector.iter().map(|file| (&**file, 1.0)).collect();
        for pair in self.control_vector_scaled.chunks_exact(2) {
            let scale = pair[1].parse().ok().filter(|scale: &f64| scale.is_finite());
            let scale = scale.ok_or_else(|| {
                UsageError(format!(
                    "--control-vector-scaled: expected a file and a finite number, found {}",
                    pair[1]
                ))
            })?;
            files.push((pair[0].as_ref(), scale));
        }
        if files.is_empty() && self.control_vector_layer_range.is_some() {
            return Err(UsageError("--control-vector-layer-range needs --control-vector".to_owned()).into());
        }
        let mut sum: Option<ControlVector> = None;
        for (file, scale) in files {
            let vector = read_control_vector(file, model)?.scaled(scale, layers.clone())?;
            sum = Some(match sum {
                Some(sum) => sum.with(&vector)?,
                None => vector,
            });
        }
        Ok(sum)
    }
}

/// Loads the model, with steering if requested.
pub(super) fn load(opened: Opened, arguments: &SteeringArguments) -> Result<LoadedModel> {
    if let Some(vector) = arguments.control_vector(opened.config())? {
        return Ok(opened.load(&Terminal)?.observed_by(Arc::new(Mutex::new(vector))));
    }
    let (Some(steer), Some(layer)) = (&arguments.steer, arguments.layer) else {
        return Ok(opened.load(&Terminal)?);
    };
    let towards = SteeringSource::read(steer)?;
    let steer = Steer { towards, layer, scale: arguments.scale, everywhere: arguments.everywhere };
    let checked = steer.check(&Reader::new(opened.vocabulary(), false)?)?;
    let loaded = opened.load(&Terminal)?;
    let steering = checked.steering(&loaded, &Terminal)?;
    Ok(loaded.observed_by(Arc::new(Mutex::new(steering))))
}
