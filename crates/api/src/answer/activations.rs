//! Activation entries in responses: `activations` and `activations_info`.

use std::collections::{BTreeMap, HashMap};

use candle_core::{Device, Tensor};
use candle_gpt2_weights::tensor_bytes;
use serde::Serialize;
use serde::ser::{SerializeMap, Serializer};

use super::Answer;
use super::text::{PromptAnswer, TextAnswer};
use super::write::{List, Usage, json};
use crate::ApiError;
use crate::encoding::{Encoding, Numbers};
use crate::pieces::{Pieces, name};
use crate::recorded::{SequenceActivations, ShownSites, SiteActivations};

impl SequenceActivations {
    /// Adds `activations` and `activations_info` to a choice.
    pub(super) fn write<M: SerializeMap>(
        &self,
        map: &mut M,
        shown: &ShownSites,
        (prompt, text): (&PromptAnswer, &TextAnswer),
        pieces: &Pieces,
    ) -> Result<(), M::Error> {
        let encoding = shown.encoding;
        let entries = || self.values.iter().map(|site| Entry { site, positions: &self.positions, encoding });
        map.serialize_entry("activations", &List(entries))?;
        map.serialize_entry("activations_info", &Info::of(shown, prompt, text, pieces))
    }
}

struct Entry<'a> {
    site: &'a SiteActivations,
    positions: &'a [usize],
    encoding: Encoding,
}

impl Serialize for Entry<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let SiteActivations { site, shape, numbers } = self.site;
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry("site", &site.to_string())?;
        map.serialize_entry("shape", shape)?;
        map.serialize_entry("positions", self.positions)?;
        map.serialize_entry("dtype", "float32")?;
        map.serialize_entry("data", &Numbers { numbers, encoding: self.encoding })?;
        map.end()
    }
}

/// Metadata for the activations.
#[derive(Serialize)]
struct Info {
    /// Whether the sequence begins with the BOS token.
    bos: bool,
    /// Weight preprocessing; always `none`.
    processing: &'static str,
    tokens: Vec<String>,
    token_ids: Vec<u32>,
}

impl Info {
    fn of(shown: &ShownSites, prompt: &PromptAnswer, text: &TextAnswer, pieces: &Pieces) -> Self {
        let token_ids = [&prompt.ids[..], &text.ids].concat();
        let start = shown.config.start_token();
        Self {
            bos: start.is_some() && token_ids.first().copied() == start,
            processing: "none",
            tokens: token_ids.iter().map(|id| name(pieces.bytes(*id))).collect(),
            token_ids,
        }
    }
}

/// Response of `/v1/activations` for one prompt.
struct PromptActivations<'a> {
    index: usize,
    answer: &'a Answer,
    prompt: &'a PromptAnswer,
    text: &'a TextAnswer,
}

impl Serialize for PromptActivations<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry("object", "activations")?;
        map.serialize_entry("index", &self.index)?;
        if let (Some(activations), Some(shown)) = (&self.text.activations, &self.answer.options.shown) {
            activations.write(&mut map, shown, (self.prompt, self.text), &self.answer.pieces)?;
        }
        map.end()
    }
}

impl Answer {
    fn prompt_activations(&self) -> impl Iterator<Item = PromptActivations<'_>> {
        self.prompts.iter().enumerate().filter_map(|(index, prompt)| {
            prompt.texts.first().map(|text| PromptActivations { index, answer: self, prompt, text })
        })
    }

    /// Response of `/v1/activations`.
    pub(super) fn activations(&self) -> String {
        #[derive(Serialize)]
        struct Response<'a, D> {
            object: &'static str,
            data: D,
            model: &'a str,
            usage: Usage,
        }
        let data = List(|| self.prompt_activations());
        json(&Response { object: "list", data, model: &self.head.model, usage: self.usage() })
    }

    /// Response of `/v1/activations` as a safetensors file.
    ///
    /// The tensors are named after their hook points. With several prompts, the prompt's index and a dot
    /// precede each name. The metadata contains each prompt's `positions` and `activations_info` as JSON,
    /// with the same prefix, and any `warnings`.
    ///
    /// # Errors
    /// If memory runs out.
    pub fn into_safetensors(mut self) -> Result<Vec<u8>, ApiError> {
        let (mut tensors, mut metadata) = (BTreeMap::new(), HashMap::new());
        let Some(shown) = &self.options.shown else {
            return Err(ApiError::failed("no activations were requested"));
        };
        let is_single = self.prompts.len() == 1;
        for (index, prompt) in self.prompts.iter_mut().enumerate() {
            let activations = prompt.texts.first_mut().and_then(|text| text.activations.take());
            let (Some(SequenceActivations { positions, values }), Some(text)) =
                (activations, prompt.texts.first())
            else {
                continue;
            };
            let before = if is_single { String::new() } else { format!("{index}.") };
            for SiteActivations { site, shape, numbers } in values {
                tensors.insert(format!("{before}{site}"), Tensor::from_vec(numbers, shape, &Device::Cpu)?);
            }
            metadata.insert(format!("{before}positions"), json(&positions));
            let info = Info::of(shown, prompt, text, &self.pieces);
            metadata.insert(format!("{before}activations_info"), json(&info));
        }
        metadata.insert("model".into(), self.head.model.clone());
        if !self.warnings.is_empty() {
            metadata.insert("warnings".into(), json(&self.warnings.iter().collect::<Vec<_>>()));
        }
        tensor_bytes(&tensors, metadata).map_err(ApiError::failed)
    }
}
