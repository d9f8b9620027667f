//! Companion files of a checkpoint: the tokenizer and the settings for tokens, generation and chat.
//!
//! Conversion and training write them next to the new weights, byte for byte where the format allows it.

use std::collections::HashSet;
use std::path::Path;

use candle_gpt2::Gpt2Config;
use serde::de::{MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::value::RawValue;
use serde_json::{Map, Value, json};

use crate::chat_template::{CHAT_TEMPLATE, templates_in};
use crate::config_file::GENERATION_CONFIG;
use crate::files::Files;
use crate::gguf_header::{Metadata, Value as GgufValue};
use crate::gguf_keys::{self, ADD_BOS, ADD_EOS, SPECIAL_TOKENS};
use crate::tokenizer::{
    MAX_TOKENIZER_BYTES, MODELS, TOKENIZER, TOKENIZER_CONFIG, VOCABULARY, content, file_name_of, strip_mark,
    vocabulary_of,
};
use crate::{Checkpoint, Tokenizer, WeightsError, mistaken_file};

/// File that maps special-token roles to tokens.
const SPECIAL_TOKENS_MAP: &str = "special_tokens_map.json";
/// Tokenizer settings files that accompany a vocabulary.
const TOKENIZER_FILES: [&str; 3] = [TOKENIZER_CONFIG, SPECIAL_TOKENS_MAP, ADDED_TOKENS];
/// File with the ids of added tokens.
const ADDED_TOKENS: &str = "added_tokens.json";
/// Model files other than the weights and `config.json`.
const MODEL_FILES: [&str; 3] = [GENERATION_CONFIG, CHAT_TEMPLATE, CHAT_TEMPLATE_JSON];
/// Chat template file that older processors use.
const CHAT_TEMPLATE_JSON: &str = "chat_template.json";
/// Fields of `config.json` that do not affect a language model.
///
/// The `summary_…` fields of other heads do not either.
const WITHOUT_EFFECT: [&str; 8] = [
    "transformers_version",
    "use_cache",
    "add_cross_attention",
    "pad_token_id",
    "gradient_checkpointing",
    "output_past",
    "_name_or_path",
    "architectures",
];
/// Maximum number of unknown `config.json` fields that are tested one by one.
const MAX_FIELDS: usize = 200;
/// Folder for additional chat templates, a feature that is not supported.
const MORE_TEMPLATES: &str = "additional_chat_templates";
/// Keys of `config.json` that are aliases of known keys, or are regenerated.
const REPLACED: [&str; 8] = [
    "num_attention_heads",
    "hidden_size",
    "num_hidden_layers",
    "max_position_embeddings",
    "num_labels",
    "_num_labels",
    "dtype",
    "torch_dtype",
];
/// Keys of `generation_config.json` that GGUF stores, or that do not affect completions.
const COVERED_GENERATION_KEYS: [&str; 12] = [
    "output_attentions",
    "output_hidden_states",
    "output_scores",
    "output_logits",
    "return_dict_in_generate",
    "use_cache",
    "eos_token_id",
    "bos_token_id",
    "pad_token_id",
    "transformers_version",
    "_from_model_config",
    "_commit_hash",
];
/// Keys of `tokenizer_config.json` whose meaning GGUF stores, or that do not affect tokens.
const COVERED_TOKENIZER_KEYS: [&str; 10] = [
    "model_max_length",
    "add_prefix_space",
    "added_tokens_decoder",
    "chat_template",
    "tokenizer_class",
    "errors",
    "clean_up_tokenization_spaces",
    "name_or_path",
    "special_tokens_map_file",
    "tokenizer_file",
];

/// Tokenizer and settings of a checkpoint, preserved by conversions.
///
/// Returned by [`Checkpoint::companions`].
///
/// ```
/// use candle_gpt2_weights::{Checkpoint, GivenFiles, OpenOptions};
///
/// let files = GivenFiles::of_bytes("stories", candle_gpt2_stories::FILES);
/// let checkpoint = Checkpoint::open_given(files, &OpenOptions::default(), &|_| ())?;
/// let companions = checkpoint.companions(None)?;
/// assert!(companions.names().any(|name| name == "generation_config.json"));
/// assert!(companions.tokenizer().is_some());
/// # Ok::<(), candle_gpt2_weights::WeightsError>(())
/// ```
#[derive(Debug, Clone, Default)]
pub struct Companions {
    tokenizer: Option<Tokenizer>,
    /// Files to write unchanged, by name.
    files: Vec<(String, Vec<u8>)>,
    /// Unrecognized fields of `config.json`.
    config: Vec<(String, Box<RawValue>)>,
    /// Chat templates by name, the default one first.
    templates: Vec<(String, String)>,
    /// GGUF metadata that a folder cannot store.
    metadata: Metadata,
    /// Notes on source settings that are not preserved.
    dropped_settings: Vec<String>,
}

impl From<Tokenizer> for Companions {
    fn from(tokenizer: Tokenizer) -> Self {
        Self { tokenizer: Some(tokenizer), ..Self::default() }
    }
}

impl Checkpoint {
    /// Reads the tokenizer and settings next to the weights or inside the weights file.
    ///
    /// A tokenizer at the path `tokenizer` replaces the checkpoint's own, together with the files next to
    /// it. If no tokenizer exists, the companions have none.
    ///
    /// # Errors
    /// If a file is unreadable or unusable.
    pub fn companions(&self, tokenizer: Option<&Path>) -> Result<Companions, WeightsError> {
        let mut found = Companions::default();
        match self.tokenizer(tokenizer) {
            Err(WeightsError::NoTokenizer { .. }) if tokenizer.is_none() => {}
            read => found.tokenizer = Some(read?),
        }
        found.config = self.unknown_fields();
        let folder = self.folder().to_owned();
        for name in MODEL_FILES {
            found.add(&self.siblings, &folder, name)?;
        }
        let is_inside = tokenizer.is_none() && self.source.tokenizer.is_some();
        match tokenizer {
            Some(path) => found.add_tokenizer(&Files::Disk, path)?,
            None if is_inside => found.add_tokenizer_config(&self.source.metadata, self.config()),
            None => found.add_tokenizer(&self.siblings, &folder)?,
        }
        if let Some(tokenizer) = tokenizer {
            let is_left = |name: &&str| {
                self.siblings.is_file(&folder.join(name))
                    && !found.files.iter().any(|(known, _)| known == name)
            };
            let left: Vec<&str> = TOKENIZER_FILES.into_iter().filter(is_left).collect();
            if !left.is_empty() {
                found.dropped_settings.push(format!(
                    "the checkpoint's {} are for its own tokenizer and are not written with {}",
                    left.join(", "),
                    tokenizer.display()
                ));
            }
        }
        if self.siblings.is_folder(&folder.join(MORE_TEMPLATES)) {
            found.dropped_settings.push(format!("the chat templates in {MORE_TEMPLATES} are not written"));
        }
        found.templates = self.chat_templates()?;
        let written = found.written_template();
        let own =
            found.templates.iter().find(|(name, _)| name == gguf_keys::DEFAULT).map(|(_, template)| template);
        if let Some(template) = own.filter(|own| written.as_ref() != Some(*own)) {
            let template = template.clone().into_bytes();
            found.files.retain(|(name, _)| name != CHAT_TEMPLATE);
            found.files.push((CHAT_TEMPLATE.to_owned(), template));
        }
        found.metadata = gguf_keys::unknown(&self.source.metadata).cloned().collect();
        Ok(found)
    }

    /// Returns the unrecognized fields of `config.json` as raw JSON.
    fn unknown_fields(&self) -> Vec<(String, Box<RawValue>)> {
        let Some(text) = &self.config_text else { return Vec::new() };
        let known = self.config().to_json();
        let fields =
            serde_json::from_str::<Fields>(text.trim_start_matches('\u{feff}')).map(|fields| fields.0);
        let mut fields = fields.unwrap_or_default();
        fields.retain(|(key, _)| known.get(key).is_none() && !REPLACED.contains(&key.as_str()));
        fields
    }
}

impl Companions {
    /// Names of files other than `tokenizer.json` that may accompany weights.
    pub const FILES: [&str; 9] = [
        GENERATION_CONFIG,
        CHAT_TEMPLATE,
        CHAT_TEMPLATE_JSON,
        TOKENIZER_CONFIG,
        SPECIAL_TOKENS_MAP,
        ADDED_TOKENS,
        VOCABULARY,
        MODELS[0],
        MODELS[1],
    ];

    /// Returns the tokenizer.
    pub fn tokenizer(&self) -> Option<&Tokenizer> {
        self.tokenizer.as_ref()
    }

    /// Returns the names of the files that are written unchanged.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.files.iter().map(|(name, _)| name.as_str())
    }

    /// Returns the names and contents of the companion files to write to a folder.
    pub(crate) fn folder_files(
        &self,
        config: &Gpt2Config,
        dtype: &str,
    ) -> Result<Vec<(&str, Vec<u8>)>, WeightsError> {
        let failed = |error: serde_json::Error| candle_core::Error::wrap(error);
        let mut files: Vec<(&str, Vec<u8>)> =
            self.files.iter().map(|(name, bytes)| (name.as_str(), bytes.clone())).collect();
        if let Some(tokenizer) = &self.tokenizer
            && !self.names().any(|name| name == TOKENIZER || name == VOCABULARY || MODELS.contains(&name))
        {
            let json =
                tokenizer.to_string(true).map_err(|error| candle_core::Error::Msg(error.to_string()))?;
            files.push((TOKENIZER, json.into_bytes()));
        }
        let mut known = config.to_json();
        known["dtype"] = dtype.into();
        let mut fields: Vec<(String, Box<RawValue>)> = Vec::new();
        for (key, value) in known.as_object().into_iter().flatten() {
            fields.push((key.clone(), serde_json::value::to_raw_value(value).map_err(failed)?));
        }
        let written =
            |fields: &[(String, Box<RawValue>)]| serde_json::to_string_pretty(&Fields(fields.to_vec()));
        let is_same = |text: &str| Gpt2Config::from_json(text).is_ok_and(|read| read == *config);
        let unknown: Vec<_> =
            self.config.iter().filter(|(key, _)| known.get(key).is_none()).cloned().collect();
        let all: Vec<_> = fields.iter().chain(&unknown).cloned().collect();
        let mut text = written(&all).map_err(failed)?;
        if !is_same(&text) {
            // A field for another head may also affect the new one, for example `problem_type`.
            for field in unknown.into_iter().take(MAX_FIELDS) {
                fields.push(field);
                if !is_same(&written(&fields).map_err(failed)?) {
                    fields.pop();
                }
            }
            text = written(&fields).map_err(failed)?;
        }
        files.push(("config.json", (text + "\n").into_bytes()));
        Ok(files)
    }

    /// Returns notes on the settings that a folder cannot store.
    pub fn notes(&self) -> Vec<String> {
        let mut notes = self.dropped_settings.clone();
        if !self.metadata.is_empty() {
            let keys: Vec<&str> = self.metadata.iter().map(|(key, _)| key.as_str()).collect();
            notes.push(format!("a folder cannot store these keys of the GGUF file: {}", keys.join(", ")));
        }
        notes
    }

    /// Returns GGUF metadata other than the model and token lists, and notes on lost settings.
    ///
    /// It covers special tokens, chat templates and the extra keys of a GGUF source.
    pub(crate) fn gguf_settings(
        &self,
        config: &Gpt2Config,
        (before, after): (Option<u32>, Option<u32>),
    ) -> Result<(Metadata, Vec<String>), String> {
        let generation = self.json(GENERATION_CONFIG)?;
        let tokenizer_config = self.json(TOKENIZER_CONFIG)?;
        let special_map = self.json(SPECIAL_TOKENS_MAP)?;
        let mut notes = self.dropped_settings.clone();

        let ids = |key: &str| token_ids(&generation[key]);
        let has_token = |id: &u32| config.has_token(*id);
        let ends = ids("eos_token_id").unwrap_or_else(|| config.eos_token_id.clone());
        let ends: Vec<u32> = ends.into_iter().filter(has_token).collect();
        let end = after.or(ends.first().copied());
        if let (Some(after), Some(end)) = (after, ends.first())
            && after != *end
        {
            return Err(format!(
                "GGUF cannot express the tokenizer: texts end with token {after}, but generation ends with token {end}; write a folder"
            ));
        }
        if let (Some(after), []) = (after, ends.as_slice()) {
            notes.push(format!(
                "token {after}, which the tokenizer appends to texts, becomes the end token in GGUF"
            ));
        }
        if ends.len() > 1 {
            let others: Vec<String> = ends.iter().skip(1).map(u32::to_string).collect();
            notes.push(format!(
                "GGUF stores only one end token: {} is written, {} dropped; generation does not stop at the others",
                ends[0],
                others.join(", ")
            ));
        }
        let named = |name: &str| {
            let token = content(&special_map[name]).or_else(|| content(&tokenizer_config[name]))?;
            self.tokenizer.as_ref()?.token_to_id(&token).filter(has_token)
        };
        let mut settings = Metadata::new();
        for (key, name) in SPECIAL_TOKENS {
            let id = match name {
                "bos_token" => before.or(config.start_token()),
                "eos_token" => end,
                "pad_token" => {
                    let pad = ids("pad_token_id").and_then(|ids| ids.first().copied());
                    pad.or(config.pad_token_id).filter(has_token).or_else(|| named(name))
                }
                name => named(name),
            };
            settings.extend(id.map(|id| (key.to_owned(), GgufValue::u32(id))));
        }
        settings.push((ADD_BOS.0.to_owned(), GgufValue::bool(before.is_some())));
        if after.is_some() {
            settings.push((ADD_EOS.0.to_owned(), GgufValue::bool(true)));
        }
        let more: Vec<String> = self
            .templates
            .iter()
            .map(|(name, _)| name.clone())
            .filter(|name| name != gguf_keys::DEFAULT)
            .collect();
        for (name, template) in &self.templates {
            settings.push((gguf_keys::chat_template_key(name), GgufValue::text(template)));
        }
        if !more.is_empty() {
            settings.push((gguf_keys::CHAT_TEMPLATES.to_owned(), GgufValue::Texts(more)));
        }
        let (configured, defaults) = (config.to_json(), Gpt2Config::gpt2().to_json());
        for key in gguf_keys::CONFIG_KEYS.into_iter().filter(|key| configured[*key] != defaults[*key]) {
            let number = configured[key].as_f64().map(GgufValue::f64);
            let value = number.or_else(|| configured[key].as_bool().map(GgufValue::bool));
            settings.extend(value.map(|value| (format!("{}{key}", gguf_keys::CONFIG_PREFIX), value)));
        }
        settings.extend(self.metadata.iter().cloned());

        let mut note_dropped = |file: &str, keys: Vec<&str>, what_to_do: &str| {
            if !keys.is_empty() {
                notes.push(format!(
                    "GGUF does not store these fields of {file}: {}{what_to_do}",
                    keys.join(", ")
                ));
            }
        };
        let of = |value: &Value, known: &dyn Fn(&str) -> bool| -> Vec<String> {
            let fields = value.as_object().into_iter().flatten();
            let fields = fields.filter(|(key, value)| !value.is_null() && !known(key));
            fields.map(|(key, _)| key.clone()).collect()
        };
        let settings_left = of(&generation, &|key| COVERED_GENERATION_KEYS.contains(&key));
        note_dropped(
            GENERATION_CONFIG,
            settings_left.iter().map(String::as_str).collect(),
            "; pass them as options",
        );
        let tokenizer_left = of(&tokenizer_config, &|key| {
            let is_special = SPECIAL_TOKENS.iter().any(|(_, name)| *name == key);
            is_special || [ADD_BOS.1, ADD_EOS.1].contains(&key) || COVERED_TOKENIZER_KEYS.contains(&key)
        });
        note_dropped(TOKENIZER_CONFIG, tokenizer_left.iter().map(String::as_str).collect(), "");
        let config_left = self.config.iter().map(|(key, _)| key.as_str());
        let config_left: Vec<&str> =
            config_left.filter(|key| !WITHOUT_EFFECT.contains(key) && !key.starts_with("summary_")).collect();
        note_dropped("config.json", config_left, "");
        Ok((settings, notes))
    }

    /// Returns the default chat template from the companion files.
    fn written_template(&self) -> Option<String> {
        let file = self.files.iter().find(|(name, _)| name == CHAT_TEMPLATE);
        let of_file = || Some(String::from_utf8_lossy(&file?.1).into_owned());
        let config = self.json(TOKENIZER_CONFIG).unwrap_or_default();
        of_file().or_else(|| {
            templates_in(&config["chat_template"])
                .into_iter()
                .find(|(name, _)| name == gguf_keys::DEFAULT)
                .map(|(_, template)| template)
        })
    }

    /// Parses a file as JSON; null if the file is missing.
    fn json(&self, name: &str) -> Result<Value, String> {
        match self.files.iter().find(|(known, _)| known == name) {
            Some((_, bytes)) => {
                let bytes = strip_mark(bytes);
                serde_json::from_slice(bytes).map_err(|error| format!("{name}: not valid JSON: {error}"))
            }
            None => Ok(Value::Null),
        }
    }

    /// Adds a file from a folder, if it exists.
    fn add(&mut self, files: &Files, folder: &Path, name: &str) -> Result<(), WeightsError> {
        let path = folder.join(name);
        if files.is_file(&path) {
            let bytes = files.read_small(&path, MAX_TOKENIZER_BYTES)?;
            if let Some(what) = mistaken_file::pointer(&bytes, "file") {
                return Err(WeightsError::NotWeights { path, what });
            }
            self.files.push((name.to_owned(), bytes));
        }
        Ok(())
    }

    /// Adds the tokenizer files at a path.
    ///
    /// A vocabulary with merges becomes `tokenizer.json`; other files are written unchanged.
    fn add_tokenizer(&mut self, files: &Files, path: &Path) -> Result<(), WeightsError> {
        let is_file = files.is_file(path);
        let folder = if is_file { files.folder_of(path).to_owned() } else { path.to_owned() };
        let file = if is_file { Some(path.to_owned()) } else { vocabulary_of(files, path)? };
        if let Some(file) = file {
            let name = file_name_of(files, &file)?;
            self.files.push((name.to_owned(), files.read_small(&file, MAX_TOKENIZER_BYTES)?));
        }
        TOKENIZER_FILES.into_iter().try_for_each(|name| self.add(files, &folder, name))
    }

    /// Adds a `tokenizer_config.json` with the special tokens of a GGUF file.
    fn add_tokenizer_config(&mut self, metadata: &[(String, GgufValue)], config: &Gpt2Config) {
        let Some(tokenizer) = &self.tokenizer else { return };
        let mut fields = Map::new();
        for (key, name) in SPECIAL_TOKENS {
            let id = gguf_keys::get(metadata, key).and_then(GgufValue::as_u64);
            let token = id.and_then(|id| tokenizer.id_to_token(u32::try_from(id).ok()?));
            fields.extend(token.map(|token| (name.to_owned(), token.into())));
        }
        for (key, name) in [ADD_BOS, ADD_EOS] {
            let flag = gguf_keys::get(metadata, key).and_then(GgufValue::as_bool);
            fields.extend(flag.map(|flag| (name.to_owned(), flag.into())));
        }
        let templates = gguf_keys::chat_templates(metadata);
        if templates.len() > 1 {
            let named = templates.iter().map(|(name, template)| json!({"name": name, "template": template}));
            fields.insert("chat_template".into(), named.collect());
        }
        if fields.is_empty() {
            return;
        }
        fields.insert("model_max_length".into(), config.n_positions.into());
        fields.insert("tokenizer_class".into(), "PreTrainedTokenizerFast".into());
        let text = format!("{:#}\n", Value::Object(fields));
        self.files.push((TOKENIZER_CONFIG.to_owned(), text.into_bytes()));
    }
}

/// Returns the token ids of a field that contains one id or a list.
fn token_ids(field: &Value) -> Option<Vec<u32>> {
    let id = |id: &Value| u32::try_from(id.as_u64()?).ok();
    match field {
        Value::Null => None,
        Value::Array(list) => Some(list.iter().filter_map(id).collect()),
        one => Some(id(one).into_iter().collect()),
    }
}

/// Fields of a JSON object in order, with their raw values.
struct Fields(Vec<(String, Box<RawValue>)>);

impl Serialize for Fields {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(key, value)| (key, value)))
    }
}

impl<'de> Deserialize<'de> for Fields {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries;
        impl<'de> Visitor<'de> for Entries {
            type Value = Fields;

            fn expecting(&self, formatter: &mut std::fmt::Formatter) -> std::fmt::Result {
                formatter.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Fields, A::Error> {
                let mut fields: Vec<(String, Box<RawValue>)> = Vec::new();
                while let Some(field) = map.next_entry()? {
                    fields.push(field);
                }
                // If a key repeats, JSON readers use its last value.
                let mut seen = HashSet::new();
                let mut is_last: Vec<bool> =
                    fields.iter().rev().map(|(key, _)| seen.insert(key.clone())).collect();
                is_last.reverse();
                let mut is_last = is_last.into_iter();
                fields.retain(|_| is_last.next().unwrap_or(false));
                Ok(Fields(fields))
            }
        }
        deserializer.deserialize_map(Entries)
    }
}
