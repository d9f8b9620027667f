//! `adapter_config.json` of a LoRA adapter: its settings and the modules and ranks they select.
//!
//! Source: `LoraConfig`, `check_target_module_exists` and `get_pattern_key` of PEFT 0.21. Unlisted settings
//! that could affect the results are rejected by name.

use regex::{Regex, RegexBuilder};
use serde_json::{Map, Value};

/// Settings that do not affect the results of a trained adapter.
const NEUTRAL: [&str; 17] = [
    "auto_mapping",
    "base_model_name_or_path",
    "corda_config",
    "eva_config",
    // The layer itself determines whether it is a `Conv1D`.
    "fan_in_fan_out",
    "inference_mode",
    "init_lora_weights",
    "loftq_config",
    "lora_dropout",
    "lora_ga_config",
    "megatron_core",
    "peft_type",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
    "task_type",
];
/// Settings that [`AdapterConfig::new`] reads.
const KNOWN: [&str; 14] = [
    "alpha_pattern",
    "bias",
    "ensure_weight_tying",
    "exclude_modules",
    "layers_pattern",
    "layers_to_transform",
    "lora_alpha",
    "lora_bias",
    "modules_to_save",
    "r",
    "rank_pattern",
    "target_modules",
    "use_dora",
    "use_rslora",
];
/// `init_lora_weights` values that leave the base weights unchanged; others modify them.
const NEUTRAL_INITS: [&str; 3] = ["gaussian", "eva", "orthogonal"];
/// Maximum rank. The tensor shapes are checked against the rank separately.
const MAX_RANK: u64 = 1 << 20;
/// Maximum number of names or patterns in one setting.
const MAX_PATTERNS: usize = 4096;
/// Maximum memory of a compiled pattern, in bytes.
const MAX_PATTERN_BYTES: usize = 1 << 20;

/// Settings that determine an adapter's changes to a model.
#[derive(Debug, Clone)]
pub(super) struct AdapterConfig {
    /// `base_model_name_or_path`.
    pub(super) base_model: Option<String>,
    /// `revision` of the base model on the Hub.
    pub(super) base_revision: Option<String>,
    rank: usize,
    alpha: f64,
    ranks: Vec<(Regex, usize)>,
    alphas: Vec<(Regex, f64)>,
    is_rank_stabilized: bool,
    /// Whether `B` has a bias.
    pub(super) has_bias: bool,
    /// Whether an adapter for the output head also applies to the embedding.
    pub(super) ties_head: bool,
    targets: Modules,
    excluded: Modules,
    layers: Option<Vec<u64>>,
    layer_patterns: Vec<Regex>,
    saved: Vec<Regex>,
}

/// Selection of modules by name.
#[derive(Debug, Clone)]
enum Modules {
    /// Full module names, or suffixes after a dot.
    Named(Vec<String>),
    /// Pattern that must match the full module name.
    Matching(Regex),
    /// Every linear layer except the output head.
    AllLinear,
}

impl AdapterConfig {
    /// Parses the settings. The error names the invalid setting and suggests a fix.
    pub(super) fn new(json: &[u8]) -> Result<Self, String> {
        let json = json.strip_prefix(b"\xef\xbb\xbf").unwrap_or(json);
        let settings = serde_json::from_slice::<Value>(json)
            .map_err(|error| format!("not valid JSON: {error} (numbers must be finite)"))?;
        let Value::Object(settings) = settings else {
            return Err("expected a JSON object".into());
        };
        check_type(&settings)?;
        let settings = Settings(settings);
        settings.check_unsupported()?;
        let rank = settings.size("r")?.ok_or("`r` is missing; expected the rank of the adapter")?;
        let alpha =
            settings.number("lora_alpha")?.ok_or("`lora_alpha` is missing; expected a finite number")?;
        let targets = settings.modules("target_modules")?;
        let targets = targets
            .ok_or("`target_modules` is missing; expected names, a regular expression or all-linear")?;
        if !["none", "all", "lora_only"].contains(&settings.text("bias")?.unwrap_or("none")) {
            return Err(settings.wrong("bias", "none, all or lora_only"));
        }
        let patterns = settings.list("layers_pattern")?.unwrap_or_default();
        // The first number in a module name is its block index.
        let in_layers = |pattern: &str| format!(r"^(?:|.*?\.){pattern}\.(?P<index>\d+)\.");
        let layer_patterns = match patterns.is_empty() {
            true => vec![settings.pattern("layers_pattern", r"^.*?\.[^.]*\.(?P<index>\d+)\.")?],
            false => settings.patterns("layers_pattern", &patterns, in_layers)?,
        };
        let saved = settings.list("modules_to_save")?.unwrap_or_default();
        let saved =
            settings.patterns("modules_to_save", &saved, |name| format!(r"(?:^|^.*\.)(?:{name})(?:$|\.)"))?;
        Ok(Self {
            base_model: settings.name("base_model_name_or_path")?,
            base_revision: settings.name("revision")?,
            rank,
            alpha,
            ranks: settings.by_pattern("rank_pattern", rank_of, "a rank of at least 1")?,
            alphas: settings.by_pattern("alpha_pattern", Value::as_f64, "a finite number")?,
            is_rank_stabilized: settings.flag("use_rslora")?,
            has_bias: settings.flag("lora_bias")?,
            ties_head: settings.flag("ensure_weight_tying")?,
            targets,
            excluded: settings.modules("exclude_modules")?.unwrap_or(Modules::Named(Vec::new())),
            layers: settings.layers()?,
            layer_patterns,
            saved,
        })
    }

    /// Returns the rank of a module's adapter.
    pub(super) fn rank(&self, module: &str) -> usize {
        first_match(&self.ranks, module).unwrap_or(self.rank)
    }

    /// Returns the scaling factor of a module's low-rank product.
    pub(super) fn scale(&self, module: &str) -> f64 {
        let rank = self.rank(module) as f64;
        let alpha = first_match(&self.alphas, module).unwrap_or(self.alpha);
        alpha / if self.is_rank_stabilized { rank.sqrt() } else { rank }
    }

    /// Whether a module is saved in full instead of as a low-rank product.
    pub(super) fn is_saved(&self, module: &str) -> bool {
        self.saved.iter().any(|pattern| pattern.is_match(module))
    }

    /// Whether a module has an adapter. `is_linear` is false for embeddings and the output head.
    pub(super) fn is_target(&self, module: &str, is_linear: bool) -> bool {
        if self.excluded.contain(module, is_linear) || self.is_saved(module) {
            return false;
        }
        let is_listed = matches!(self.targets, Modules::Named(_));
        self.targets.contain(module, is_linear) && (!is_listed || self.is_in_layers(module))
    }

    /// Whether the module is in one of the `layers_to_transform`; true if that setting is missing.
    fn is_in_layers(&self, module: &str) -> bool {
        let Some(layers) = &self.layers else { return true };
        // A module that is selected by its full name may be in any layer.
        if matches!(&self.targets, Modules::Named(names) if names.iter().any(|name| name == module)) {
            return true;
        }
        let captured = self.layer_patterns.iter().find_map(|pattern| pattern.captures(module));
        let index = captured.and_then(|found| found.name("index")?.as_str().parse::<u64>().ok());
        index.is_some_and(|index| layers.contains(&index))
    }
}

impl Modules {
    fn contain(&self, module: &str, is_linear: bool) -> bool {
        match self {
            Self::Named(names) => names.iter().any(|name| {
                module
                    .strip_suffix(name.as_str())
                    .is_some_and(|before| before.is_empty() || before.ends_with('.'))
            }),
            Self::Matching(pattern) => pattern.is_match(module),
            Self::AllLinear => is_linear,
        }
    }
}

/// Returns the value of the first pattern that matches the end of a module's name.
fn first_match<T: Copy>(patterns: &[(Regex, T)], module: &str) -> Option<T> {
    patterns.iter().find(|(pattern, _)| pattern.is_match(module)).map(|(_, value)| *value)
}

fn rank_of(value: &Value) -> Option<usize> {
    value.as_u64().filter(|rank| (1..=MAX_RANK).contains(rank)).and_then(|rank| usize::try_from(rank).ok())
}

/// Rejects every adapter type except LoRA.
fn check_type(settings: &Map<String, Value>) -> Result<(), String> {
    match settings.get("peft_type") {
        Some(Value::String(name)) if name == "LORA" => Ok(()),
        Some(other) => Err(format!(
            "`peft_type` is {}; only LORA adapters are supported: merge the adapter with PEFT's `merge_and_unload()`, and use the merged model",
            shown(other)
        )),
        None => Err("`peft_type` is missing; expected the adapter_config.json of a PEFT adapter".into()),
    }
}

/// Formats a value for error messages.
fn shown(value: &Value) -> String {
    candle_gpt2::excerpt(&value.to_string()).into_owned()
}

/// Settings by name.
struct Settings(Map<String, Value>);

impl Settings {
    /// Returns the value of a setting, unless it is null.
    fn get(&self, name: &str) -> Option<&Value> {
        self.0.get(name).filter(|value| !value.is_null())
    }

    fn wrong(&self, name: &str, expected: &str) -> String {
        let found = self.get(name).map_or_else(|| "null".into(), shown);
        format!("`{name}` is {found}; expected {expected}")
    }

    /// Rejects settings that affect the results in an unsupported way.
    fn check_unsupported(&self) -> Result<(), String> {
        const REMEDY: &str = "merge the adapter with PEFT's `merge_and_unload()`, and use the merged model";
        if self.flag("use_dora")? {
            return Err(format!("`use_dora`: DoRA adapters are not supported; {REMEDY}"));
        }
        match self.get("init_lora_weights") {
            None | Some(Value::Bool(_)) => {}
            Some(Value::String(init)) if NEUTRAL_INITS.contains(&init.as_str()) => {}
            Some(other) => {
                return Err(format!(
                    "`init_lora_weights` is {}, which changes the base weights; convert the adapter with PEFT's \
                     `save_pretrained(…, path_initial_model_for_weight_conversion=…)`",
                    shown(other)
                ));
            }
        }
        let is_empty = |value: &Value| match value {
            Value::Null | Value::Bool(false) => true,
            Value::Array(items) => items.is_empty(),
            Value::Object(items) => items.is_empty(),
            Value::String(text) => text.is_empty(),
            Value::Bool(true) | Value::Number(_) => false,
        };
        let is_known = |name: &str| NEUTRAL.contains(&name) || KNOWN.contains(&name);
        match self.0.iter().find(|(name, value)| !is_known(name) && !is_empty(value)) {
            Some((name, value)) => Err(format!(
                "`{}` is set to {}, but this setting is unsupported and may change the results; {REMEDY}",
                candle_gpt2::excerpt(name),
                shown(value)
            )),
            None => Ok(()),
        }
    }

    fn flag(&self, name: &str) -> Result<bool, String> {
        match self.get(name) {
            None => Ok(false),
            Some(value) => value.as_bool().ok_or_else(|| self.wrong(name, "true or false")),
        }
    }

    fn size(&self, name: &str) -> Result<Option<usize>, String> {
        let read = |value| rank_of(value).ok_or_else(|| self.wrong(name, "a whole number of at least 1"));
        self.get(name).map(read).transpose()
    }

    fn number(&self, name: &str) -> Result<Option<f64>, String> {
        let read = |value: &Value| value.as_f64().filter(|number| number.is_finite());
        self.get(name).map(|value| read(value).ok_or_else(|| self.wrong(name, "a finite number"))).transpose()
    }

    fn text(&self, name: &str) -> Result<Option<&str>, String> {
        let read = |value| Value::as_str(value).ok_or_else(|| self.wrong(name, "a string"));
        self.get(name).map(read).transpose()
    }

    /// Reads a single string or a list of strings.
    fn list(&self, name: &str) -> Result<Option<Vec<&str>>, String> {
        let Some(value) = self.get(name) else { return Ok(None) };
        let texts: Option<Vec<&str>> = match value {
            Value::String(text) => Some(vec![text]),
            Value::Array(items) => items.iter().map(Value::as_str).collect(),
            _ => None,
        };
        let texts = texts.filter(|texts| texts.len() <= MAX_PATTERNS);
        texts.map(Some).ok_or_else(|| self.wrong(name, &format!("a list of at most {MAX_PATTERNS} names")))
    }

    fn modules(&self, name: &str) -> Result<Option<Modules>, String> {
        match self.get(name) {
            Some(Value::String(text)) if text.eq_ignore_ascii_case("all-linear") => {
                Ok(Some(Modules::AllLinear))
            }
            Some(Value::String(pattern)) => {
                Ok(Some(Modules::Matching(self.pattern(name, &format!("^(?:{pattern})$"))?)))
            }
            _ => Ok(self
                .list(name)?
                .map(|names| Modules::Named(names.into_iter().map(str::to_owned).collect()))),
        }
    }

    fn pattern(&self, name: &str, pattern: &str) -> Result<Regex, String> {
        let built = RegexBuilder::new(pattern).size_limit(MAX_PATTERN_BYTES).build();
        built.map_err(|_| self.wrong(name, "a regular expression without look-around or backreferences"))
    }

    fn patterns(
        &self,
        name: &str,
        texts: &[&str],
        pattern: impl Fn(&str) -> String,
    ) -> Result<Vec<Regex>, String> {
        texts.iter().map(|text| self.pattern(name, &pattern(text))).collect()
    }

    /// Reads values keyed by module-name patterns, in file order. Patterns match at the end of a name.
    fn by_pattern<T>(
        &self,
        name: &str,
        read: impl Fn(&Value) -> Option<T>,
        expected: &str,
    ) -> Result<Vec<(Regex, T)>, String> {
        let wrong = || self.wrong(name, &format!("at most {MAX_PATTERNS} names, each with {expected}"));
        let Some(value) = self.get(name) else { return Ok(Vec::new()) };
        let entries = value.as_object().filter(|entries| entries.len() <= MAX_PATTERNS).ok_or_else(wrong)?;
        let entry = |(pattern, value): (&String, &Value)| {
            let value = read(value).ok_or_else(wrong)?;
            Ok((self.pattern(name, &format!(r"^(?:.*\.)?(?:{pattern})$"))?, value))
        };
        entries.iter().map(entry).collect()
    }

    /// Reads `layers_to_transform`, either one index or several.
    fn layers(&self) -> Result<Option<Vec<u64>>, String> {
        let name = "layers_to_transform";
        let layers = match self.get(name) {
            None => return Ok(None),
            Some(Value::Array(items)) => items.iter().map(Value::as_u64).collect(),
            Some(value) => value.as_u64().map(|layer| vec![layer]),
        };
        let layers: Vec<u64> = layers.ok_or_else(|| self.wrong(name, "block indices"))?;
        Ok(Some(layers).filter(|layers| !layers.is_empty()))
    }

    /// Reads a string that is not blank.
    fn name(&self, name: &str) -> Result<Option<String>, String> {
        Ok(self.text(name)?.filter(|text| !text.trim().is_empty()).map(str::to_owned))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn config(changes: &Value) -> Result<AdapterConfig, String> {
        let mut settings =
            json!({"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["c_attn"]});
        for (name, value) in changes.as_object().into_iter().flatten() {
            settings[name] = value.clone();
        }
        AdapterConfig::new(settings.to_string().as_bytes())
    }

    #[test]
    fn target_modules_match_peft() {
        const MODULES: [&str; 6] = [
            "transformer.h.0.attn.c_attn",
            "transformer.h.0.attn.c_proj",
            "transformer.h.1.attn.c_attn",
            "transformer.h.11.mlp.c_proj",
            "transformer.wte",
            "lm_head",
        ];
        for (changes, expected) in [
            (json!({}), vec![0, 2]),
            (json!({"target_modules": ["c_proj", "wte"]}), vec![1, 3, 4]),
            (json!({"target_modules": ["attn"]}), vec![]),
            (json!({"target_modules": "all-linear"}), vec![0, 1, 2, 3]),
            (json!({"target_modules": "ALL-LINEAR", "exclude_modules": "lm_.*|.*proj"}), vec![0, 2]),
            (json!({"target_modules": r".*\.1\d*\..*"}), vec![2, 3]),
            (json!({"target_modules": "c_attn"}), vec![]),
            (json!({"layers_to_transform": [1, 11], "target_modules": ["c_attn", "c_proj"]}), vec![2, 3]),
            (json!({"layers_to_transform": 0, "layers_pattern": "h"}), vec![0]),
            (json!({"layers_to_transform": 0, "layers_pattern": ["blocks"]}), vec![]),
            (json!({"layers_to_transform": []}), vec![0, 2]),
            (json!({"modules_to_save": ["h.1"]}), vec![0]),
        ] {
            let config = config(&changes).unwrap();
            let is_linear = |module: &str| module.starts_with("transformer.h.");
            let found: Vec<usize> = (0..MODULES.len())
                .filter(|index| config.is_target(MODULES[*index], is_linear(MODULES[*index])))
                .collect();
            assert_eq!(found, expected, "{changes}");
        }
    }

    #[test]
    fn first_matching_pattern_sets_rank_and_scale() {
        let patterns = json!({
            "rank_pattern": {"h.0.attn.c_attn": 2, "c_attn": 16},
            "alpha_pattern": {r"h\.[01]\.attn\.c_attn": 3, "attn": 100},
        });
        let config = config(&patterns).unwrap();
        for (module, rank, scale) in [
            ("transformer.h.0.attn.c_attn", 2, 1.5),
            ("transformer.h.1.attn.c_attn", 16, 3.0 / 16.0),
            ("transformer.h.2.attn.c_attn", 16, 0.5),
            ("transformer.h.0.mlp.c_fc", 4, 2.0),
        ] {
            assert_eq!((config.rank(module), config.scale(module)), (rank, scale), "{module}");
        }
        let stabilized = self::config(&json!({"use_rslora": true})).unwrap();
        assert!((stabilized.scale("transformer.h.0.mlp.c_fc") - 4.0).abs() < f64::EPSILON);
    }

    #[test]
    fn unsupported_settings_are_rejected_by_name() {
        for (changes, expected) in [
            (json!({"peft_type": "IA3"}), "`peft_type` is \"IA3\""),
            (json!({"peft_type": "LOHA"}), "merge_and_unload"),
            (json!({"use_dora": true}), "DoRA"),
            (json!({"use_dora": 1}), "`use_dora` is 1; expected true or false"),
            (json!({"trainable_token_indices": [1]}), "`trainable_token_indices` is set to [1]"),
            (json!({"layer_replication": [[0, 1]]}), "`layer_replication`"),
            (json!({"invented_setting": 2}), "`invented_setting` is set to 2"),
            (json!({"init_lora_weights": "pissa_niter_4"}), "path_initial_model_for_weight_conversion"),
            (json!({"r": 0}), "`r` is 0; expected a whole number of at least 1"),
            (json!({"r": -1}), "`r` is -1"),
            (json!({"r": 2.5}), "`r` is 2.5"),
            (json!({"r": null}), "`r` is missing"),
            (json!({"lora_alpha": "NaN"}), "`lora_alpha` is \"NaN\"; expected a finite number"),
            (json!({"rank_pattern": {"c_attn": 0}}), "a rank of at least 1"),
            (json!({"alpha_pattern": {"c_attn": null}}), "a finite number"),
            (json!({"bias": "some"}), "`bias` is \"some\"; expected none, all or lora_only"),
            (json!({"target_modules": null}), "`target_modules` is missing"),
            (json!({"target_modules": "(?=c)c_attn"}), "without look-around"),
            (json!({"target_modules": [1]}), "`target_modules` is [1]"),
            (json!({"layers_to_transform": ["a"]}), "`layers_to_transform`"),
            (json!({"base_model_name_or_path": 7}), "`base_model_name_or_path` is 7; expected a string"),
        ] {
            let error = config(&changes).unwrap_err();
            assert!(error.contains(expected), "{changes}: {error}");
        }
        for text in ["{\"peft_type\": \"LORA\", \"lora_alpha\": NaN}", "[]", "", "{}"] {
            assert!(AdapterConfig::new(text.as_bytes()).is_err(), "{text}");
        }
        assert!(config(&json!({"lora_dropout": 0.1, "megatron_config": null, "loftq_config": {}})).is_ok());
    }
}
