//! Implementations of candle's `Module` for the layers.

use candle_core::{Result, Tensor};
use candle_nn::Module;

use super::{LayerNorm, Linear};
use crate::training::Activation;

impl Module for Linear {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.forward(x)
    }
}

impl Module for LayerNorm {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.forward(x)
    }
}

impl Module for Activation {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        (*self).forward(x)
    }
}
