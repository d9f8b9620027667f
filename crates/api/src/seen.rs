//! Activations of the model while it reads and writes a text.

use std::sync::{Arc, Mutex, PoisonError};

use candle_core::DType;
use candle_gpt2::{Gpt2Config, Site, SiteKind};
use candle_gpt2_generation::TextObserver;
use candle_gpt2_interpret::{Inspection, token_shape};

use crate::ApiError;
use crate::encoding::Encoding;

/// A text whose inside is looked at.
pub(crate) type Inspected = Arc<Mutex<Inspection>>;

/// The observers that the scheduler gets.
pub(crate) fn observers(inspections: &[Inspected]) -> Vec<TextObserver> {
    inspections.iter().map(|inspection| TextObserver::new(inspection.clone())).collect()
}

/// The places that are shown, and how their numbers are written.
#[derive(Debug)]
pub(crate) struct ShownSites {
    pub(crate) sites: Vec<Site>,
    pub(crate) config: Gpt2Config,
    pub(crate) encoding: Encoding,
}

/// What was seen of a text.
#[derive(Debug)]
pub(crate) struct Seen {
    /// The tokens, counted from 0 in the text.
    pub(crate) positions: Vec<usize>,
    pub(crate) values: Vec<SeenAt>,
}

/// What was seen at one place.
#[derive(Debug)]
pub(crate) struct SeenAt {
    pub(crate) site: Site,
    pub(crate) shape: Vec<usize>,
    pub(crate) numbers: Vec<f32>,
}

impl Seen {
    /// What an inspection has of a text that has ended.
    pub(crate) fn of(inspected: &Inspected, shown: &ShownSites) -> Result<Self, ApiError> {
        let inspection = inspected.lock().unwrap_or_else(PoisonError::into_inner);
        let (positions, record) = (inspection.positions().to_vec(), inspection.record()?);
        let keys = positions.last().map_or(0, |last| last + 1);
        let seen_at = |site: &Site| {
            let mut shape = token_shape(&shown.config, site.kind, keys);
            // There is no axis of rows.
            shape.insert(site.kind.token_axis() - 1, positions.len());
            let numbers = match record.values.get(site) {
                Some(value) => value.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?,
                None => Vec::new(),
            };
            Ok(SeenAt { site: *site, shape, numbers })
        };
        let values = shown.sites.iter().map(seen_at).collect::<Result<_, ApiError>>()?;
        Ok(Self { positions, values })
    }

    /// The first number that is not finite, with its site and its token. The mask's minus infinity, in scores of keys behind their query,
    /// is none of them.
    pub(crate) fn overflow(&self) -> Option<(Site, usize, f32)> {
        self.values.iter().find_map(|SeenAt { site, shape, numbers }| {
            let token_axis = site.kind.token_axis() - 1;
            let behind: usize = shape.iter().skip(token_axis + 1).product();
            let token = |place: usize| self.positions[place / behind % self.positions.len()];
            let is_hidden = |place: usize| site.kind == SiteKind::AttnScores && place % behind > token(place);
            let place =
                (0..numbers.len()).find(|place| !numbers[*place].is_finite() && !is_hidden(*place))?;
            Some((*site, token(place), numbers[place]))
        })
    }
}
