//! LoRA adapters for a model, as users specify them.

use std::convert::Infallible;
use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use candle_gpt2_weights::Adapter;
use serde::de::Error;
use serde::{Deserialize, Deserializer};

use crate::{EngineError, HubOptions, Reporter, hub};

/// Model name that selects the base model of the first adapter.
///
/// To use a folder of this name, write `./adapter-base`.
///
/// ```
/// use candle_gpt2_engine::{ADAPTER_BASE, AdapterChoice, ModelOptions};
///
/// let adapter = vec![AdapterChoice::new("adapted/adapter")];
/// let options = ModelOptions { model: ADAPTER_BASE.into(), adapter, ..ModelOptions::default() };
/// assert_eq!(options.display_name(), "adapted/adapter");
/// ```
pub const ADAPTER_BASE: &str = "adapter-base";

/// An adapter and its weight, written as `DIR` or `DIR=WEIGHT`.
///
/// ```
/// use candle_gpt2_engine::AdapterChoice;
///
/// let half: AdapterChoice = "owner/poems=0.5".parse()?;
/// assert_eq!((half.path.to_str(), half.weight), (Some("owner/poems"), 0.5));
/// let whole: AdapterChoice = "adapted/adapter".parse()?;
/// assert_eq!(whole.weight, 1.0);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct AdapterChoice {
    /// Folder of the adapter, or its name on the Hub.
    pub path: PathBuf,
    /// Scale of the adapter's contribution; 1 applies it as trained.
    pub weight: f64,
}

impl AdapterChoice {
    /// Creates an adapter choice with weight 1.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into(), weight: 1.0 }
    }

    /// Opens the adapter, and downloads it from the Hub if necessary.
    pub(crate) fn open(&self, hub: &HubOptions, reporter: &dyn Reporter) -> Result<Adapter, EngineError> {
        Ok(Adapter::open(hub::adapter_path(&self.path, hub, reporter)?)?)
    }
}

impl FromStr for AdapterChoice {
    type Err = Infallible;

    fn from_str(text: &str) -> Result<Self, Infallible> {
        let weighted = text.rsplit_once('=').filter(|_| !Path::new(text).exists());
        let weighted = weighted.and_then(|(path, weight)| Some((path, weight.trim().parse().ok()?)));
        Ok(match weighted {
            Some((path, weight)) => Self { path: path.into(), weight },
            None => Self::new(text),
        })
    }
}

impl fmt::Display for AdapterChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.path.display())?;
        #[expect(clippy::float_cmp, reason = "only the default is exact")]
        if self.weight != 1.0 {
            write!(f, "={}", self.weight)?;
        }
        Ok(())
    }
}

/// Deserializes one or more adapters from strings.
pub(crate) fn deserialize_adapters<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Vec<AdapterChoice>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Texts {
        One(String),
        Several(Vec<String>),
    }
    let texts = match Option::<Texts>::deserialize(deserializer)? {
        None => Vec::new(),
        Some(Texts::One(text)) => vec![text],
        Some(Texts::Several(texts)) => texts,
    };
    texts.iter().map(|text| text.parse().map_err(D::Error::custom)).collect()
}

#[cfg(test)]
mod tests {
    use std::fs;

    use candle_gpt2_testing::temporary_folder;

    use super::*;

    #[test]
    fn adapter_weight_follows_the_last_equals_sign() {
        for (text, path, weight) in [
            ("a", "a", 1.0),
            ("a=0.5", "a", 0.5),
            ("a=-2", "a", -2.0),
            ("a=b=1e-1", "a=b", 0.1),
            ("a=b", "a=b", 1.0),
            ("a=", "a=", 1.0),
            ("owner/name@main=2", "owner/name@main", 2.0),
        ] {
            let adapter: AdapterChoice = text.parse().unwrap();
            assert_eq!((adapter.path.to_str(), adapter.weight), (Some(path), weight), "{text}");
        }
        let folder = temporary_folder();
        let path = folder.path().join("x=3");
        fs::create_dir(&path).unwrap();
        let adapter: AdapterChoice = path.to_str().unwrap().parse().unwrap();
        assert_eq!((adapter.path, adapter.weight), (path, 1.0), "a folder of that name");
    }
}
