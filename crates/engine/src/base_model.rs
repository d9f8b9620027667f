//! Base model named by an adapter, and display name of a model with adapters.

use std::path::{Path, PathBuf};

use crate::{ADAPTER_BASE, EngineError, ModelOptions, Reporter};

impl ModelOptions {
    /// Resolves [`ADAPTER_BASE`] to the base model that the first adapter names.
    ///
    /// Other options are returned unchanged.
    ///
    /// # Errors
    /// If there is no adapter, the adapter cannot be read, or it names no base model.
    pub fn with_base_model(&self, reporter: &dyn Reporter) -> Result<Self, EngineError> {
        if self.model != Path::new(ADAPTER_BASE) {
            return Ok(self.clone());
        }
        let Some(first) = self.adapter.first() else {
            let what = format!(
                "{ADAPTER_BASE}: requires an adapter, which names the base model; specify an adapter, or another model"
            );
            return Err(EngineError::Options { what });
        };
        let adapter = first.open(&self.hub, reporter)?;
        let Some(base) = adapter.base_model() else {
            let what = format!(
                "{}: adapter_config.json does not name a base model (`base_model_name_or_path`); specify it with `model`",
                first.path.display()
            );
            return Err(EngineError::Options { what });
        };
        if base == ADAPTER_BASE {
            let what = format!(
                "{}: adapter_config.json names {base} as the base model; specify the base model with `model`",
                first.path.display()
            );
            return Err(EngineError::Options { what });
        }
        let mut model = PathBuf::from(base);
        if let Some(revision) = adapter.base_revision().filter(|_| !base.contains('@') && !model.exists()) {
            model.as_mut_os_string().push(format!("@{revision}"));
        }
        Ok(Self { model, ..self.clone() })
    }

    /// Name of the model and its adapters, for reports.
    pub fn display_name(&self) -> String {
        let mut parts = vec![self.model.display().to_string()];
        parts.retain(|model| model != ADAPTER_BASE);
        parts.extend(self.adapter.iter().map(ToString::to_string));
        parts.join(" + ")
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use candle_gpt2_testing::{fixture_path, temporary_folder};

    use super::*;
    use crate::{AdapterChoice, Silent};

    #[test]
    fn base_model_comes_from_the_adapter_config() {
        let folder = temporary_folder();
        let plain = fixture_path("adapters/plain");
        let settings = fs::read_to_string(plain.join("adapter_config.json")).unwrap();
        // The tensors are read only when the adapter is applied.
        fs::write(folder.path().join("adapter_model.safetensors"), "not tensors").unwrap();
        let options = ModelOptions {
            model: ADAPTER_BASE.into(),
            adapter: vec![AdapterChoice::new(folder.path())],
            ..ModelOptions::default()
        };
        let base = |name: &str, revision: &str| {
            let settings = settings.replace("\"tiny-checkpoint\"", name);
            let settings = settings.replace("\"revision\": null", &format!("\"revision\": {revision}"));
            fs::write(folder.path().join("adapter_config.json"), settings).unwrap();
            options.with_base_model(&Silent).map(|options| options.model.display().to_string())
        };
        assert_eq!(base("\"owner/base\"", "null").unwrap(), "owner/base");
        assert_eq!(base("\"owner/base\"", "\"v2\"").unwrap(), "owner/base@v2");
        for (name, expected) in [
            ("null", "does not name a base model"),
            ("\"\"", "does not name a base model"),
            ("\"adapter-base\"", "names adapter-base as the base model"),
        ] {
            let error = base(name, "null").unwrap_err();
            assert!(error.is_usage() && error.to_string().contains(expected), "{error}");
        }
        let alone = ModelOptions { adapter: Vec::new(), ..options.clone() };
        assert!(alone.open(&Silent).unwrap_err().is_usage());
        let named = ModelOptions { model: "gpt2".into(), ..options.clone() };
        assert_eq!(named.with_base_model(&Silent).unwrap().model.to_str(), Some("gpt2"));
    }
}
