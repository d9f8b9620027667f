//! The fields `activations` and `steering` of a request, as they are written.

use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Value, json};

use crate::ApiError;
use crate::body::{Body, Count, Described, List, Text, TextOrList, fields, number, words, written};
use crate::encoding::Encoding;

/// Most names of hook points in a request; each may name one in every block.
pub(crate) const MAX_SITES: usize = 256;
/// Longest name of a place or a dictionary.
pub(crate) const MAX_SITE_BYTES: usize = 100;
/// Most positions of a request, and most numbers of a vector: more than any model has.
pub(crate) const MAX_POSITIONS: usize = 1 << 20;
pub(crate) const MAX_VECTOR: usize = 1 << 20;
/// Most changes of a request.
pub(crate) const MAX_STEERING: usize = 256;

fields! {
    /// What both routes of completions have of it.
    InsideFields {
        /// Activations to return with each choice, as `activations` and `activations_info`; in a stream with its last chunk. Needs a
        /// server with --activations.
        activations: Option<ActivationFields>,
        /// Changes to activations, made at every token of prompt and completion, in this order. Needs a server with --activations. A
        /// steered request shares no computed prompt with others.
        steering: List<SteeringFields, MAX_STEERING>,
    }
}

fields! {
    /// The activations to return.
    ActivationFields {
        /// Hook points by TransformerLens' names, such as `blocks.6.hook_resid_post` or `pattern3`; `*` matches any characters, and a name
        /// without its layer means every block.
        @required sites: List<Text<MAX_SITE_BYTES>, MAX_SITES>,
        /// `last`, which is the default, `all`, or a list of positions counted from the first token of `of`.
        positions: Option<TextOrList<Which, Place, MAX_POSITIONS>>,
        /// Whether to return the activations of the prompt's tokens, which is the default, the completion's, or both. The model does not read the last token of a
        /// completion, so it has none.
        of: Option<Of>,
        /// `base64` of little-endian f32, which is the default, or `float`, a list of numbers.
        encoding_format: Option<Encoding>,
    }
}

fields! {
    /// A change: a vector at a hook point, or an SAE feature of a dictionary that the server was started with.
    SteeringFields {
        /// The hook point, by TransformerLens' name, such as `blocks.6.hook_resid_pre`.
        site: Option<Text<MAX_SITE_BYTES>>,
        /// As many numbers as the hook point has for each token: a list, or base64 of little-endian f32.
        vector: Option<TextOrList<String, Real, MAX_VECTOR>>,
        /// The name of a dictionary, instead of `site` and `vector`.
        dictionary: Option<Text<MAX_SITE_BYTES>>,
        /// Index of the dictionary's feature, whose decoder direction is the vector.
        feature: Option<Place>,
        /// Strength of the change: 1 by default; 0 leaves the model as it is.
        scale: Option<Real>,
        /// `add`, the default, adds scale × vector; `project_out` subtracts scale × the projection onto the vector; `replace` sets x + scale × (vector − x).
        mode: Option<Mode>,
    }
}

words! {
    /// Positions that have a word.
    Which { "last" => Last, "all" => All }
}

words! {
    /// The part of a text.
    Of { "prompt" => Prompt, "completion" => Completion, "both" => Both }
}

words! {
    /// What becomes of a vector.
    Mode { "add" => Add, "project_out" => ProjectOut, "replace" => Replace }
}

/// A number counted from 0.
pub(crate) type Place = Count<0, MAX_POSITIONS>;

/// A finite number.
#[derive(Debug, Clone, Copy, Serialize)]
pub(crate) struct Real(pub(crate) f64);

impl<'de> Deserialize<'de> for Real {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        written(deserializer, "a number", number).map(Self)
    }
}

impl Described for Real {
    const PLURAL: &'static str = "numbers";

    fn schema() -> Value {
        json!({ "type": "number" })
    }
}

/// What a request asks of the inside, as it is written.
#[derive(Debug, Clone, Default)]
pub(crate) struct Asked {
    pub(crate) activations: Option<ActivationFields>,
    pub(crate) steering: Vec<SteeringFields>,
}

impl Asked {
    pub(crate) fn read(body: &Body<'_>) -> Result<Self, ApiError> {
        let InsideFields { activations, steering: List(steering) } = body.read()?;
        Ok(Self { activations, steering })
    }

    /// Whether anything is asked.
    pub(crate) fn is_something(&self) -> bool {
        self.activations.is_some() || !self.steering.is_empty()
    }
}
