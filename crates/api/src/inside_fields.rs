//! Unvalidated request fields `activations` and `steering`.

use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Value, json};

use crate::ApiError;
use crate::body::{Body, Count, Described, List, Text, TextOrList, fields, number, parse_raw, words};
use crate::encoding::Encoding;

/// Maximum number of hook point names in a request; each may match a hook point in every block.
pub(crate) const MAX_SITES: usize = 256;
/// Maximum length of a hook point or dictionary name, in bytes.
pub(crate) const MAX_SITE_BYTES: usize = 100;
/// Maximum number of positions in a request and of numbers in a vector, above any model's size.
pub(crate) const MAX_POSITIONS: usize = 1 << 20;
pub(crate) const MAX_VECTOR: usize = 1 << 20;
/// Maximum number of edits in a request.
pub(crate) const MAX_STEERING: usize = 256;

fields! {
    /// Fields for activations and steering, shared by both completion routes.
    InsideFields {
        /// Activations to return with each choice, as `activations` and `activations_info`; a stream sends
        /// them in the last chunk. Needs a server with --activations.
        activations: Option<ActivationFields>,
        /// Edits to activations, applied in this order at every token of prompt and completion. Needs a
        /// server with --activations. A steered request does not share the KV cache with other requests.
        steering: List<SteeringFields, MAX_STEERING>,
    }
}

fields! {
    /// Activations to return.
    ActivationFields {
        /// TransformerLens names of hook points, such as `blocks.6.hook_resid_post` or `pattern3`; `*`
        /// matches any characters, and a name without a layer means every block.
        @required sites: List<Text<MAX_SITE_BYTES>, MAX_SITES>,
        /// `last` (the default), `all`, or a list of positions counted from the first token of `of`.
        positions: Option<TextOrList<NamedPositions, Index, MAX_POSITIONS>>,
        /// Tokens whose activations are returned: the prompt's (the default), the completion's, or both. The
        /// model does not read the last token of a completion, so that token has no activations.
        of: Option<SequencePart>,
        /// Value encoding: `base64` (little-endian f32 values, the default) or `float` (a list of numbers).
        encoding_format: Option<Encoding>,
    }
}

fields! {
    /// Steering edit: a vector at a hook point, or an SAE feature from a dictionary loaded at startup.
    SteeringFields {
        /// TransformerLens name of the hook point, such as `blocks.6.hook_resid_pre`.
        site: Option<Text<MAX_SITE_BYTES>>,
        /// Vector as large as one token's activation: a list of numbers, or base64 of little-endian f32.
        vector: Option<TextOrList<String, Real, MAX_VECTOR>>,
        /// The name of a dictionary, instead of `site` and `vector`.
        dictionary: Option<Text<MAX_SITE_BYTES>>,
        /// Index of a feature in the dictionary; the vector is its decoder direction.
        feature: Option<Index>,
        /// Strength of the edit; the default is 1, and 0 leaves the model unchanged.
        scale: Option<Real>,
        /// `add`, the default, adds scale × vector; `project_out` subtracts scale × the projection onto the
        /// vector; `replace` sets x + scale × (vector − x).
        mode: Option<Mode>,
    }
}

words! {
    /// Named positions.
    NamedPositions { "last" => Last, "all" => All }
}

words! {
    /// Part of a sequence.
    SequencePart { "prompt" => Prompt, "completion" => Completion, "both" => Both }
}

words! {
    /// Operation that applies a steering vector.
    Mode { "add" => Add, "project_out" => ProjectOut, "replace" => Replace }
}

/// Index, counted from 0.
pub(crate) type Index = Count<0, MAX_POSITIONS>;

/// Finite number.
#[derive(Debug, Clone, Copy, Serialize)]
pub(crate) struct Real(pub(crate) f64);

impl<'de> Deserialize<'de> for Real {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        parse_raw(deserializer, "a number", number).map(Self)
    }
}

impl Described for Real {
    const PLURAL: &'static str = "numbers";

    fn schema() -> Value {
        json!({ "type": "number" })
    }
}

/// Unvalidated activations and steering fields in a request.
#[derive(Debug, Clone, Default)]
pub(crate) struct InsideOptions {
    pub(crate) activations: Option<ActivationFields>,
    pub(crate) steering: Vec<SteeringFields>,
}

impl InsideOptions {
    pub(crate) fn read(body: &Body<'_>) -> Result<Self, ApiError> {
        let InsideFields { activations, steering: List(steering) } = body.read()?;
        Ok(Self { activations, steering })
    }

    /// Whether the request uses activations or steering.
    pub(crate) fn is_used(&self) -> bool {
        self.activations.is_some() || !self.steering.is_empty()
    }
}
