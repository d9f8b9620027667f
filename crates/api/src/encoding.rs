//! How the numbers of an answer are written.

use crate::body::words;

words! {
    /// How a vector is written.
    Encoding { "float" => Float, "base64" => Base64 }
}
