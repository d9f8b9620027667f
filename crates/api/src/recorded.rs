//! Activations recorded while the model prefills and decodes.

use std::sync::{Arc, Mutex, PoisonError};

use candle_core::DType;
use candle_gpt2::{Gpt2Config, Site, SiteKind};
use candle_gpt2_generation::TextObserver;
use candle_gpt2_interpret::{Inspection, token_shape};

use crate::ApiError;
use crate::encoding::Encoding;

/// Shared inspection of one sequence.
pub(crate) type Inspected = Arc<Mutex<Inspection>>;

/// Returns the observers to register with the scheduler, one per inspection.
pub(crate) fn observers(inspections: &[Inspected]) -> Vec<TextObserver> {
    inspections.iter().map(|inspection| TextObserver::new(inspection.clone())).collect()
}

/// Hook points to return, and the encoding of their values.
#[derive(Debug)]
pub(crate) struct ShownSites {
    pub(crate) sites: Vec<Site>,
    pub(crate) config: Gpt2Config,
    pub(crate) encoding: Encoding,
}

/// Activations of one sequence.
#[derive(Debug)]
pub(crate) struct SequenceActivations {
    /// Token positions in the sequence, counted from 0.
    pub(crate) positions: Vec<usize>,
    pub(crate) values: Vec<SiteActivations>,
}

/// Activations at one hook point.
#[derive(Debug)]
pub(crate) struct SiteActivations {
    pub(crate) site: Site,
    pub(crate) shape: Vec<usize>,
    pub(crate) numbers: Vec<f32>,
}

impl SequenceActivations {
    /// Collects the recorded activations of a finished sequence.
    pub(crate) fn collect(inspected: &Inspected, shown: &ShownSites) -> Result<Self, ApiError> {
        let inspection = inspected.lock().unwrap_or_else(PoisonError::into_inner);
        let (positions, record) = (inspection.positions().to_vec(), inspection.record()?);
        let keys = positions.last().map_or(0, |last| last + 1);
        let at_site = |site: &Site| {
            let mut shape = token_shape(&shown.config, site.kind, keys);
            // The batch dimension is omitted.
            shape.insert(site.kind.token_axis() - 1, positions.len());
            let numbers = match record.values.get(site) {
                Some(value) => value.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?,
                None => Vec::new(),
            };
            Ok(SiteActivations { site: *site, shape, numbers })
        };
        let values = shown.sites.iter().map(at_site).collect::<Result<_, ApiError>>()?;
        Ok(Self { positions, values })
    }

    /// Finds the first non-finite value, with its hook point and token position.
    ///
    /// Attention scores masked to minus infinity are skipped.
    pub(crate) fn overflow(&self) -> Option<(Site, usize, f32)> {
        self.values.iter().find_map(|SiteActivations { site, shape, numbers }| {
            let token_axis = site.kind.token_axis() - 1;
            let stride: usize = shape.iter().skip(token_axis + 1).product();
            let token = |index: usize| self.positions[index / stride % self.positions.len()];
            let is_hidden = |index: usize| site.kind == SiteKind::AttnScores && index % stride > token(index);
            let index =
                (0..numbers.len()).find(|index| !numbers[*index].is_finite() && !is_hidden(*index))?;
            Some((*site, token(index), numbers[index]))
        })
    }
}
