//! Files that accompany the weights of a checkpoint: the tokenizer, and the settings of tokens, generation and conversations.
//!
//! Conversions and trainings write them beside the new weights, byte for byte where the format allows it.

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

/// Special tokens by their names.
const SPECIAL_TOKENS_MAP: &str = "special_tokens_map.json";
/// Settings of the tokenizer beside its vocabulary.
const OF_TOKENIZER: [&str; 3] = [TOKENIZER_CONFIG, SPECIAL_TOKENS_MAP, ADDED_TOKENS];
/// Ids of added tokens.
const ADDED_TOKENS: &str = "added_tokens.json";
/// Files of the model beside its weights and `config.json`.
const OF_MODEL: [&str; 3] = [GENERATION_CONFIG, CHAT_TEMPLATE, CHAT_TEMPLATE_JSON];
/// The chat template of older processors.
const CHAT_TEMPLATE_JSON: &str = "chat_template.json";
/// Fields of `config.json` that change nothing of a language model, besides those of another head, `summary_…`.
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
/// Most unknown fields of `config.json` that are tried one by one.
const MAX_FIELDS: usize = 200;
/// Folder of further chat templates, which this program does not use.
const MORE_TEMPLATES: &str = "additional_chat_templates";
/// Keys of `config.json` that name a known one differently, or describe what is written anew.
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
/// Keys of `generation_config.json` that GGUF holds, or that do not change a completion.
const NOT_SETTINGS: [&str; 12] = [
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
/// Keys of `tokenizer_config.json` whose meaning GGUF holds, or that do not change tokens.
const HELD_OF_TOKENIZER_CONFIG: [&str; 10] = [
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

/// Tokenizer and settings of a checkpoint, which its conversions keep. [`Checkpoint::companions`] reads them.
///
/// ```
/// use candle_gpt2_weights::{Checkpoint, GivenFiles, OpenOptions};
///
/// let files = GivenFiles::new("stories")
///     .with_bytes("config.json", candle_gpt2_stories::CONFIG)
///     .with_bytes("tokenizer.json", candle_gpt2_stories::TOKENIZER)
///     .with_bytes("generation_config.json", br#"{"temperature": 0.7}"#.as_slice())
///     .with_bytes("model.safetensors", candle_gpt2_stories::WEIGHTS);
/// let checkpoint = Checkpoint::open_given(files, &OpenOptions::default(), &|_| ())?;
/// let companions = checkpoint.companions(None)?;
/// assert!(companions.names().any(|name| name == "generation_config.json"));
/// assert!(companions.tokenizer().is_some());
/// # Ok::<(), candle_gpt2_weights::WeightsError>(())
/// ```
#[derive(Debug, Clone, Default)]
pub struct Companions {
    tokenizer: Option<Tokenizer>,
    /// Files to write as they are, by name.
    files: Vec<(String, Vec<u8>)>,
    /// Fields of `config.json` that the configuration does not know.
    config: Vec<(String, Box<RawValue>)>,
    /// Chat templates with their names, the default one first.
    templates: Vec<(String, String)>,
    /// Metadata of a GGUF file that has no place in a folder.
    metadata: Metadata,
    /// Notes on settings of the source that are not kept.
    left_behind: Vec<String>,
}

impl From<Tokenizer> for Companions {
    fn from(tokenizer: Tokenizer) -> Self {
        Self { tokenizer: Some(tokenizer), ..Self::default() }
    }
}

impl Checkpoint {
    /// Tokenizer and settings beside the weights, or inside the file. A tokenizer at `tokenizer` replaces the checkpoint's own,
    /// together with the files beside it. Without any tokenizer the companions have none.
    ///
    /// # Errors
    /// If a file cannot be read or used.
    pub fn companions(&self, tokenizer: Option<&Path>) -> Result<Companions, WeightsError> {
        let mut found = Companions::default();
        match self.tokenizer(tokenizer) {
            Err(WeightsError::NoTokenizer { .. }) if tokenizer.is_none() => {}
            read => found.tokenizer = Some(read?),
        }
        found.config = self.unknown_fields();
        let folder = self.folder().to_owned();
        for name in OF_MODEL {
            found.add(&self.beside, &folder, name)?;
        }
        let is_inside = tokenizer.is_none() && self.source.tokenizer.is_some();
        match tokenizer {
            Some(path) => found.add_tokenizer(&Files::Disk, path)?,
            None if is_inside => found.add_tokenizer_config(&self.source.metadata, self.config()),
            None => found.add_tokenizer(&self.beside, &folder)?,
        }
        if let Some(tokenizer) = tokenizer {
            let is_left = |name: &&str| {
                self.beside.is_file(&folder.join(name)) && !found.files.iter().any(|(known, _)| known == name)
            };
            let left: Vec<&str> = OF_TOKENIZER.into_iter().filter(is_left).collect();
            if !left.is_empty() {
                found.left_behind.push(format!(
                    "{} of the checkpoint belong to its own tokenizer and are not written with {}",
                    left.join(", "),
                    tokenizer.display()
                ));
            }
        }
        if self.beside.is_folder(&folder.join(MORE_TEMPLATES)) {
            found.left_behind.push(format!("the chat templates in {MORE_TEMPLATES} are not written"));
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

    /// Fields of the `config.json` that the configuration does not know, as they are written.
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
    /// Names of the files besides `tokenizer.json` that may accompany weights.
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

    /// The tokenizer.
    pub fn tokenizer(&self) -> Option<&Tokenizer> {
        self.tokenizer.as_ref()
    }

    /// Names of the files that are written as they are.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.files.iter().map(|(name, _)| name.as_str())
    }

    /// The names and contents of a folder's files beside the weights.
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
            // A field of another head means something for the new one, such as `problem_type`.
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

    /// Notes on the settings that a folder does not hold.
    pub fn notes(&self) -> Vec<String> {
        let mut notes = self.left_behind.clone();
        if !self.metadata.is_empty() {
            let keys: Vec<&str> = self.metadata.iter().map(|(key, _)| key.as_str()).collect();
            notes.push(format!("a folder has no place for these keys of the GGUF file: {}", keys.join(", ")));
        }
        notes
    }

    /// Metadata for a GGUF file besides the model and the lists of tokens: special tokens, chat templates and what a GGUF source
    /// says beyond them; with notes on the settings that it does not hold.
    pub(crate) fn gguf_settings(
        &self,
        config: &Gpt2Config,
        (before, after): (Option<u32>, Option<u32>),
    ) -> Result<(Metadata, Vec<String>), String> {
        let generation = self.json(GENERATION_CONFIG)?;
        let tokenizer_config = self.json(TOKENIZER_CONFIG)?;
        let special_map = self.json(SPECIAL_TOKENS_MAP)?;
        let mut notes = self.left_behind.clone();

        let ids = |key: &str| token_ids(&generation[key]);
        let has_token = |id: &u32| config.has_token(*id);
        let ends = ids("eos_token_id").unwrap_or_else(|| config.eos_token_id.clone());
        let ends: Vec<u32> = ends.into_iter().filter(has_token).collect();
        let end = after.or(ends.first().copied());
        if let (Some(after), Some(end)) = (after, ends.first())
            && after != *end
        {
            return Err(format!(
                "GGUF cannot express its tokenizer: texts end with the token {after}, and generation with {end}; write a folder"
            ));
        }
        if let (Some(after), []) = (after, ends.as_slice()) {
            notes.push(format!(
                "the token {after}, which the tokenizer puts after texts, becomes the end token in GGUF"
            ));
        }
        if ends.len() > 1 {
            let others: Vec<String> = ends.iter().skip(1).map(u32::to_string).collect();
            notes.push(format!(
                "GGUF holds one end token: {} is written, {} not; texts of the copy do not end there",
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
            settings.push((gguf_keys::of_name(name), GgufValue::text(template)));
        }
        if !more.is_empty() {
            settings.push((gguf_keys::CHAT_TEMPLATES.to_owned(), GgufValue::Texts(more)));
        }
        let (configured, defaults) = (config.to_json(), Gpt2Config::gpt2().to_json());
        for key in gguf_keys::OF_CONFIG.into_iter().filter(|key| configured[*key] != defaults[*key]) {
            let number = configured[key].as_f64().map(GgufValue::f64);
            let value = number.or_else(|| configured[key].as_bool().map(GgufValue::bool));
            settings.extend(value.map(|value| (format!("{}{key}", gguf_keys::CONFIG_PREFIX), value)));
        }
        settings.extend(self.metadata.iter().cloned());

        let mut not_held = |file: &str, keys: Vec<&str>, what_to_do: &str| {
            if !keys.is_empty() {
                notes.push(format!(
                    "GGUF does not hold these fields of {file}: {}{what_to_do}",
                    keys.join(", ")
                ));
            }
        };
        let of = |value: &Value, known: &dyn Fn(&str) -> bool| -> Vec<String> {
            let fields = value.as_object().into_iter().flatten();
            let fields = fields.filter(|(key, value)| !value.is_null() && !known(key));
            fields.map(|(key, _)| key.clone()).collect()
        };
        let settings_left = of(&generation, &|key| NOT_SETTINGS.contains(&key));
        not_held(
            GENERATION_CONFIG,
            settings_left.iter().map(String::as_str).collect(),
            "; pass them as options",
        );
        let tokenizer_left = of(&tokenizer_config, &|key| {
            let is_special = SPECIAL_TOKENS.iter().any(|(_, name)| *name == key);
            is_special || [ADD_BOS.1, ADD_EOS.1].contains(&key) || HELD_OF_TOKENIZER_CONFIG.contains(&key)
        });
        not_held(TOKENIZER_CONFIG, tokenizer_left.iter().map(String::as_str).collect(), "");
        let config_left = self.config.iter().map(|(key, _)| key.as_str());
        let config_left: Vec<&str> =
            config_left.filter(|key| !WITHOUT_EFFECT.contains(key) && !key.starts_with("summary_")).collect();
        not_held("config.json", config_left, "");
        Ok((settings, notes))
    }

    /// The default chat template of the files.
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

    /// A file as JSON; null if there is none.
    fn json(&self, name: &str) -> Result<Value, String> {
        match self.files.iter().find(|(known, _)| known == name) {
            Some((_, bytes)) => {
                let bytes = strip_mark(bytes);
                serde_json::from_slice(bytes).map_err(|error| format!("{name}: not valid JSON: {error}"))
            }
            None => Ok(Value::Null),
        }
    }

    /// Adds a file of a folder, if it is there.
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

    /// Adds the files of the tokenizer at a path. A vocabulary and merges are written as a `tokenizer.json`, other files as they
    /// are.
    fn add_tokenizer(&mut self, files: &Files, path: &Path) -> Result<(), WeightsError> {
        let is_file = files.is_file(path);
        let folder = if is_file { files.folder_of(path).to_owned() } else { path.to_owned() };
        let file = if is_file { Some(path.to_owned()) } else { vocabulary_of(files, path)? };
        if let Some(file) = file {
            let name = file_name_of(files, &file)?;
            self.files.push((name.to_owned(), files.read_small(&file, MAX_TOKENIZER_BYTES)?));
        }
        OF_TOKENIZER.into_iter().try_for_each(|name| self.add(files, &folder, name))
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

/// Token ids of a field that holds one or a list of them.
fn token_ids(field: &Value) -> Option<Vec<u32>> {
    let id = |id: &Value| u32::try_from(id.as_u64()?).ok();
    match field {
        Value::Null => None,
        Value::Array(list) => Some(list.iter().filter_map(id).collect()),
        one => Some(id(one).into_iter().collect()),
    }
}

/// The fields of a JSON object in their order, values as they are written.
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
                // Readers of JSON take the last of several fields with one key.
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
