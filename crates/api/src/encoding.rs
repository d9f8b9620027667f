//! Vector encoding in responses.

use base64::{display::Base64Display, engine::general_purpose::STANDARD};
use serde::{Serialize, Serializer};

use crate::body::words;

words! {
    /// Vector encoding.
    Encoding { "float" => Float, "base64" => Base64 }
}

/// Vector to serialize, and its encoding.
pub(crate) struct Numbers<'a> {
    pub(crate) numbers: &'a [f32],
    pub(crate) encoding: Encoding,
}

impl Serialize for Numbers<'_> {
    /// Serializes a list, or base64 of the little-endian f32 bytes.
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self.encoding {
            Encoding::Float => self.numbers.serialize(serializer),
            Encoding::Base64 => {
                let bytes: Vec<u8> = self.numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
                serializer.collect_str(&Base64Display::new(&bytes, &STANDARD))
            }
        }
    }
}
