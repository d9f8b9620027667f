//! Limits on a `tokenizer.json`, enforced before the tokenizers library builds it.
//!
//! Otherwise a file of a few kilobytes could expand short text without bound. Each component gets an
//! upper bound on its growth, and a [`Growth`] combines them. The error names the field, the value, the
//! limit and a remedy. Inputs on which the library panics are rejected here too, because `catch_unwind` has
//! no effect in a browser.

use std::collections::HashMap;
use std::fmt::{self, Write};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::de::{IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::{Map, Value, json};
use tokenizers::Tokenizer;

use crate::charsmap::Charsmap;
use crate::library::without_panic;

/// Maximum growth of a text in normalizers, pre-tokenizers or decoders, in bytes per byte.
const MAX_GROWTH: f64 = 32.0;
/// Maximum number of ids that a post-processor adds to the text.
const MAX_ADDED_IDS: u64 = 16;
/// Maximum length of a vocabulary entry or added token, in characters.
const MAX_ENTRY_CHARS: usize = 1024;
/// Maximum `max_input_chars_per_word` for WordPiece; its running time is quadratic in this value.
const MAX_WORD_CHARS: u64 = 1024;
/// Maximum length of `unk_token` in bytes; the library copies it for each unknown character.
const MAX_UNKNOWN_BYTES: usize = 64;
/// Maximum size of a subword prefix or suffix in bytes; the library adds it to every character.
const MAX_AFFIX_BYTES: usize = 32;
/// Maximum number of components in a tokenizer, with sequences flattened.
const MAX_PARTS: usize = 64;
/// Maximum number of regular expressions in a tokenizer; each may compile to 10 MB.
const MAX_EXPRESSIONS: usize = 16;
/// Number of bytes of the file that an error message quotes.
const QUOTED_BYTES: usize = 40;
/// Components of a `tokenizer.json`, apart from its model and tokens.
const PARTS: [&str; 4] = ["normalizer", "pre_tokenizer", "post_processor", "decoder"];

/// Checked parts of a `tokenizer.json`.
#[derive(Deserialize)]
struct Outline {
    model: Option<Model>,
    #[serde(default)]
    normalizer: Value,
    #[serde(default)]
    pre_tokenizer: Value,
    #[serde(default)]
    post_processor: Value,
    #[serde(default)]
    decoder: Value,
    #[serde(default)]
    added_tokens: Option<Vec<Added>>,
}

#[derive(Deserialize)]
struct Added {
    #[serde(default)]
    content: String,
    #[serde(default)]
    lstrip: bool,
    #[serde(default)]
    rstrip: bool,
}

/// Model of any type. The library itself handles fields of the wrong type.
#[derive(Deserialize)]
struct Model {
    #[serde(default)]
    vocab: Vocabulary,
    #[serde(default)]
    merges: Merges,
    #[serde(default)]
    unk_token: Value,
    #[serde(default)]
    continuing_subword_prefix: Value,
    #[serde(default)]
    end_of_word_suffix: Value,
    #[serde(default)]
    max_input_chars_per_word: Value,
}

/// Checks a `tokenizer.json`.
pub(crate) fn check(json: &str) -> Result<(), String> {
    let outline: Outline = serde_json::from_str(json).map_err(|error| error.to_string())?;
    let Some(model) = &outline.model else {
        let hint = "found a vocabulary or another file; pass a tokenizer.json, or the folder with the vocabulary and merges";
        return Err(hint.into());
    };
    model.check()?;
    for (index, token) in outline.added_tokens.iter().flatten().enumerate() {
        let field = format!("added_tokens[{index}].content");
        check_entry(&field, &token.content)?;
        check_strips(&format!("added_tokens[{index}]"), token.lstrip || token.rstrip, &token.content)?;
    }
    let parts = [outline.normalizer, outline.pre_tokenizer, outline.post_processor, outline.decoder];
    let mut counts = Counts::default();
    for (field, part) in PARTS.iter().zip(&parts) {
        counts.add(field, part)?;
    }
    let [normalizer, pre_tokenizer, post_processor, decoder] = canonical(parts)?;
    Growth::new(MAX_GROWTH).normalize("normalizer", &normalizer)?;
    Growth::new(MAX_GROWTH).pre_tokenize("pre_tokenizer", &pre_tokenizer)?;
    check_post_processor(&post_processor)?;
    Growth::new(MAX_GROWTH).decode("decoder", &decoder)
}

/// Checks a vocabulary and merges that do not come from a `tokenizer.json`.
pub(crate) fn check_byte_pairs<'a>(
    vocabulary: impl Iterator<Item = (&'a str, u64)>,
    merges: &[(String, String)],
) -> Result<(), String> {
    let mut entries = Vocabulary::default();
    for (entry, id) in vocabulary {
        entries.add(entry, Some(id));
    }
    entries.check("vocabulary")?;
    entries.check_merges("merges", merges, "")
}

/// Checks a built tokenizer's added tokens, which may come from several files.
pub(crate) fn check_built(tokenizer: &Tokenizer) -> Result<(), String> {
    for (id, token) in tokenizer.get_added_tokens_decoder() {
        check_entry("added_tokens", &token.content)?;
        // The token's content after normalization.
        let normalized = tokenizer.id_to_token(id).unwrap_or_default();
        let strips = token.lstrip || token.rstrip;
        check_strips(&format!("added_tokens: the token with id {id}"), strips, &normalized)?;
    }
    Ok(())
}

/// Returns the maximum growth of a text in the normalizer and in the pre-tokenizer.
pub(crate) fn growth(tokenizer: &Tokenizer) -> Result<(f64, f64), String> {
    let value = |part: Result<Value, serde_json::Error>| part.map_err(|error| error.to_string());
    let normalizer = value(serde_json::to_value(tokenizer.get_normalizer()))?;
    let pre_tokenizer = value(serde_json::to_value(tokenizer.get_pre_tokenizer()))?;
    let growth = || Growth::new(f64::INFINITY);
    let (mut normalized, mut pre_tokenized) = (growth(), growth());
    normalized.normalize("normalizer", &normalizer)?;
    pre_tokenized.pre_tokenize("pre_tokenizer", &pre_tokenizer)?;
    Ok((normalized.total, pre_tokenized.total))
}

/// Formats an excerpt of the file for error messages.
fn quoted(text: &str) -> String {
    let start = text.get(..text.floor_char_boundary(QUOTED_BYTES)).unwrap_or_default();
    let rest = if start.len() < text.len() { "…" } else { "" };
    format!("{start:?}{rest}")
}

fn check_entry(field: &str, entry: &str) -> Result<(), String> {
    let chars = entry.chars().count();
    if chars <= MAX_ENTRY_CHARS {
        return Ok(());
    }
    let entry = quoted(entry);
    Err(format!("{field}: {entry} has {chars} characters, more than {MAX_ENTRY_CHARS}; remove this token"))
}

/// Rejects a whitespace token that strips surrounding whitespace.
///
/// The library would match the stripped spaces again as the next token.
fn check_strips(field: &str, strips: bool, content: &str) -> Result<(), String> {
    match strips && content.trim().is_empty() {
        false => Ok(()),
        true => Err(format!(
            "{field}: {} is whitespace and strips the whitespace around it; set lstrip and rstrip to false",
            quoted(content)
        )),
    }
}

fn check_bytes(field: &str, value: &Value, limit: usize) -> Result<(), String> {
    let text = value.as_str().unwrap_or_default();
    if text.len() <= limit {
        return Ok(());
    }
    Err(format!("{field}: {} has {} bytes, more than {limit}; shorten it", quoted(text), text.len()))
}

/// Number of components and number of regular expressions.
#[derive(Default)]
struct Counts {
    parts: usize,
    expressions: usize,
}

impl Counts {
    /// Counts a tokenizer component. The JSON parser limits its depth.
    fn add(&mut self, field: &str, part: &Value) -> Result<(), String> {
        match part {
            Value::Array(parts) => {
                for (index, part) in parts.iter().enumerate() {
                    self.add(&format!("{field}[{index}]"), part)?;
                }
            }
            Value::Object(part) => {
                let kind = part.get("type").and_then(Value::as_str);
                if kind == Some("Precompiled") || part.contains_key("precompiled_charsmap") {
                    charsmap(field, part.get("precompiled_charsmap").unwrap_or_default())?;
                }
                self.parts += usize::from(kind.is_some());
                self.expressions += usize::from(part.contains_key("Regex"));
                for (limit, found, what) in [
                    (MAX_PARTS, self.parts, "parts"),
                    (MAX_EXPRESSIONS, self.expressions, "regular expressions"),
                ] {
                    if found > limit {
                        return Err(format!("{field}: found more than {limit} {what}; use fewer"));
                    }
                }
                let lists = ["normalizers", "pretokenizers", "processors", "decoders", "pattern"];
                for key in lists {
                    if let Some(inner) = part.get(key) {
                        self.add(&format!("{field}.{key}"), inner)?;
                    }
                }
            }
            _ => (),
        }
        Ok(())
    }
}

/// Parses the map of a `Precompiled` normalizer; the library panics if it is corrupt.
fn charsmap(field: &str, encoded: &Value) -> Result<Charsmap, String> {
    let bytes = STANDARD.decode(encoded.as_str().unwrap_or_default());
    let bytes = bytes.map_err(|error| format!("{field}.precompiled_charsmap: not base64: {error}"))?;
    Charsmap::new(&bytes)
        .map_err(|error| format!("{field}.precompiled_charsmap {error}; download the file again"))
}

/// Rewrites components in canonical form; the library also accepts forms without `type`.
fn canonical(parts: [Value; 4]) -> Result<[Value; 4], String> {
    let mut json = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [],
        "model": {"type": "WordLevel", "vocab": {}, "unk_token": ""},
    });
    for (field, part) in PARTS.iter().zip(parts) {
        json[field] = part;
    }
    let built =
        without_panic(|| json.to_string().parse::<Tokenizer>())?.map_err(|error| error.to_string())?;
    let written = built.to_string(false).map_err(|error| error.to_string())?;
    let mut json: Value = serde_json::from_str(&written).map_err(|error| error.to_string())?;
    Ok(PARTS.map(|field| json[field].take()))
}

/// Returns the components of a sequence with their field names; `None` for a single component.
fn flattened<'v>(field: &str, part: &'v Value, list: &str) -> Option<Vec<(String, &'v Value)>> {
    let parts = part[list].as_array().filter(|_| part["type"] == "Sequence")?;
    Some(parts.iter().enumerate().map(|(index, part)| (format!("{field}.{list}[{index}]"), part)).collect())
}

/// Upper bounds on the text size, per byte of the original text.
struct Growth {
    total: f64,
    /// Occurrences of any single ASCII character.
    ascii: f64,
    /// Bytes taken by all occurrences of any single non-ASCII character.
    other: f64,
    /// Largest growth from a Unicode normal form since the last change of another kind.
    form: f64,
    limit: f64,
}

impl Growth {
    fn new(limit: f64) -> Self {
        Self { total: 1.0, ascii: 1.0, other: 1.0, form: 1.0, limit }
    }

    fn normalize(&mut self, field: &str, part: &Value) -> Result<(), String> {
        /// Growth factors from the longest decompositions, U+0390 and U+FDFA.
        const COMPOSED: f64 = 3.0;
        const COMPATIBLE: f64 = 11.0;
        /// Growth factor from spaces around CJK characters, two for each three-byte character.
        const SPACED: f64 = 5.0 / 3.0;
        if let Some(parts) = flattened(field, part, "normalizers") {
            return parts.iter().try_for_each(|(field, part)| self.normalize(field, part));
        }
        match part["type"].as_str().unwrap_or_default() {
            "NFC" | "NFD" => self.decompose(COMPOSED),
            "NFKC" | "NFKD" => self.decompose(COMPATIBLE),
            "Lowercase" => self.lowercase(),
            "BertNormalizer" => {
                if part["handle_chinese_chars"] == true {
                    self.multiply(SPACED);
                }
                let lowercase = part["lowercase"] == true;
                if part["strip_accents"].as_bool().unwrap_or(lowercase) {
                    self.decompose(COMPOSED);
                }
                if lowercase {
                    self.lowercase();
                }
                self.multiply(1.0);
            }
            "Prepend" => self.prepend(part["prepend"].as_str().unwrap_or_default().len()),
            "Replace" => self.replace(part),
            "ByteLevel" => self.escape(),
            "Nmt" => self.multiply(1.0),
            "Precompiled" => {
                let growth = charsmap(field, &part["precompiled_charsmap"])?.growth();
                self.ascii = growth.ascii * self.total;
                self.total *= growth.total;
                self.other = self.total;
                self.form = 1.0;
            }
            _ => (),
        }
        self.check(field, part)
    }

    fn pre_tokenize(&mut self, field: &str, part: &Value) -> Result<(), String> {
        if let Some(parts) = flattened(field, part, "pretokenizers") {
            return parts.iter().try_for_each(|(field, part)| self.pre_tokenize(field, part));
        }
        match part["type"].as_str().unwrap_or_default() {
            "ByteLevel" => {
                if part["add_prefix_space"] == true {
                    self.prepend(1);
                }
                self.escape();
            }
            "Metaspace" => {
                let replacement = part["replacement"].as_str().unwrap_or_default().len();
                self.insert(" ", replacement);
                if part["prepend_scheme"] != "never" {
                    self.prepend(replacement);
                }
            }
            "FixedLength" if part["length"] == 0 => {
                return Err(format!("{field}.length: found 0; set it to the length of a piece"));
            }
            _ => (),
        }
        self.check(field, part)
    }

    fn decode(&mut self, field: &str, part: &Value) -> Result<(), String> {
        /// Growth factor from replacement: an invalid byte, encoded as two bytes, becomes U+FFFD.
        const REPLACED: f64 = 1.5;
        if let Some(parts) = flattened(field, part, "decoders") {
            return parts.iter().try_for_each(|(field, part)| self.decode(field, part));
        }
        match part["type"].as_str().unwrap_or_default() {
            "ByteLevel" => self.multiply(REPLACED),
            // The decoder adds a space between two tokens.
            "WordPiece" => self.prepend(1),
            "BPEDecoder" => self.insert(part["suffix"].as_str().unwrap_or_default(), 1),
            "CTC" => self.insert(part["word_delimiter_token"].as_str().unwrap_or_default(), 1),
            "Replace" => self.replace(part),
            "Strip" if part["stop"].as_u64() != Some(0) => {
                return Err(format!(
                    "{field}.stop: found {}, which fails on tokens with fewer characters; set it to 0",
                    part["stop"]
                ));
            }
            _ => (),
        }
        self.check(field, part)
    }

    /// Applies a change that may produce any character.
    fn multiply(&mut self, factor: f64) {
        self.total *= factor;
        (self.ascii, self.other) = (self.total, self.total);
    }

    /// Applies a Unicode normal form. A decomposed text does not grow again.
    fn decompose(&mut self, factor: f64) {
        /// Maximum repetition of a character: U+2057 becomes four equal characters, U+2026 three.
        const EQUAL: f64 = 4.0;
        let is_first = self.total == 1.0;
        self.total *= (factor / self.form).max(1.0);
        self.form = self.form.max(factor);
        if is_first {
            self.other = EQUAL.min(self.total);
        } else {
            (self.ascii, self.other) = (self.total, self.total);
        }
    }

    fn lowercase(&mut self) {
        /// Growth factor from lowercasing: U+0130 and U+023A become three bytes long.
        const LONGER: f64 = 1.5;
        self.total *= LONGER;
        self.ascii = self.total.min(2.0 * self.ascii);
        self.other = self.total.min(2.0 * LONGER * self.other);
    }

    /// Writes each byte as a one- or two-byte character of GPT-2's alphabet.
    fn escape(&mut self) {
        self.multiply(2.0);
        self.form = 1.0;
    }

    /// Adds bytes to each part of the text between added tokens.
    fn prepend(&mut self, bytes: usize) {
        self.total += float(bytes);
        self.ascii += float(bytes);
        self.other += float(bytes);
        self.form = 1.0;
    }

    /// Replaces a literal text with another of `content` bytes.
    fn insert(&mut self, found: &str, content: usize) {
        if found.is_empty() {
            return self.insert_everywhere(content);
        }
        self.grow(self.matches(found), content.saturating_sub(found.len()));
    }

    /// Returns the maximum number of matches of a literal text.
    fn matches(&self, found: &str) -> f64 {
        let Some(first) = found.chars().next() else { return self.total + 1.0 };
        let equal = if first.is_ascii() { self.ascii } else { self.other };
        (equal / float(first.len_utf8())).min(self.total / float(found.len()))
    }

    /// Inserts `content` bytes before each byte and after the last one.
    fn insert_everywhere(&mut self, content: usize) {
        self.grow(self.total + 1.0, content);
    }

    fn grow(&mut self, matches: f64, bytes: usize) {
        self.total += matches * float(bytes);
        (self.ascii, self.other) = (self.total, self.total);
        self.form = 1.0;
    }

    fn replace(&mut self, part: &Value) {
        let content = part["content"].as_str().unwrap_or_default();
        let (matches, found) = match (part["pattern"]["String"].as_str(), part["pattern"]["Regex"].as_str()) {
            (Some(text), _) => (self.matches(text), text.len()),
            (None, regex) => match regex.map_or(0, shortest_match) {
                0 => (self.total + 1.0, 0),
                found => (self.total / float(found), found),
            },
        };
        // Existing occurrences of a character remain, and each match adds those in the content.
        let added = |is_of: fn(char) -> bool| {
            let mut bytes = HashMap::new();
            for one in content.chars().filter(|one| is_of(*one)) {
                *bytes.entry(one).or_insert(0) += one.len_utf8();
            }
            matches * float(bytes.into_values().max().unwrap_or(0))
        };
        self.total += matches * float(content.len().saturating_sub(found));
        self.ascii = self.total.min(self.ascii + added(|one| one.is_ascii()));
        self.other = self.total.min(self.other + added(|one| !one.is_ascii()));
        self.form = 1.0;
    }

    fn check(&self, field: &str, part: &Value) -> Result<(), String> {
        if self.total <= self.limit {
            return Ok(());
        }
        let (kind, total, limit) = (part["type"].as_str().unwrap_or_default(), self.total, self.limit);
        let mut message = format!("{field}: {kind} ");
        let content = part["content"].as_str().or_else(|| part["prepend"].as_str());
        if let Some(content) = content {
            // Writing to a string cannot fail.
            let _ = write!(message, "with {} ({} bytes) ", quoted(content), content.len());
        }
        Err(format!(
            "{message}can turn one byte of text into {total:.0} bytes, more than {limit:.0}; shorten or remove it"
        ))
    }
}

#[expect(clippy::cast_precision_loss, reason = "for upper bounds, which are compared with a small limit")]
fn float(bytes: usize) -> f64 {
    bytes as f64
}

/// Returns the minimum number of bytes an expression matches; 0 if the parser rejects its syntax.
fn shortest_match(expression: &str) -> usize {
    let parsed = regex_syntax::parse(expression).ok();
    parsed.and_then(|parsed| parsed.properties().minimum_len()).unwrap_or(0)
}

/// Limits the number of ids added to the text, and rejects repetition of the text.
fn check_post_processor(part: &Value) -> Result<(), String> {
    let name = "post_processor";
    let mut adding = None;
    let mut parts = vec![(name.to_owned(), part)];
    while let Some((field, part)) = parts.pop() {
        if let Some(inner) = flattened(&field, part, "processors") {
            parts.extend(inner);
            continue;
        }
        match part["type"].as_str().unwrap_or_default() {
            "TemplateProcessing" => {
                check_template(&field, part, "single", &["A"])?;
                check_template(&field, part, "pair", &["A", "B"])?;
            }
            "BertProcessing" | "RobertaProcessing" => {
                for end in ["sep", "cls"] {
                    check_entry(&format!("{field}.{end}"), part[end][0].as_str().unwrap_or_default())?;
                }
            }
            _ => continue,
        }
        if let Some(other) = adding.replace(field) {
            let field = adding.unwrap_or_default();
            return Err(format!(
                "{field}: {other} also adds tokens, but only one component may add tokens; remove one"
            ));
        }
    }
    Ok(())
}

fn check_template(field: &str, part: &Value, template: &str, sequences: &[&str]) -> Result<(), String> {
    let empty = Map::new();
    let special = part["special_tokens"].as_object().unwrap_or(&empty);
    let mut added = 0;
    let mut seen = Vec::new();
    for (index, piece) in part[template].as_array().into_iter().flatten().enumerate() {
        let path = format!("{field}.{template}[{index}]");
        if let Some(sequence) = piece["Sequence"]["id"].as_str() {
            if seen.contains(&sequence) {
                return Err(format!("{path}: sequence {sequence} is repeated; the text may occur only once"));
            }
            if !sequences.contains(&sequence) {
                return Err(format!(
                    "{path}: sequence {sequence} is not available in this template; use sequence A"
                ));
            }
            seen.push(sequence);
            continue;
        }
        let id = piece["SpecialToken"]["id"].as_str().unwrap_or_default();
        let Some(token) = special.get(id) else {
            return Err(format!("{path}: special_tokens has no {}; add it there", quoted(id)));
        };
        let (ids, tokens) = (&token["ids"], &token["tokens"]);
        let (ids, tokens) = (ids.as_array().map_or(0, Vec::len), tokens.as_array().map_or(0, Vec::len));
        if ids != tokens {
            let id = quoted(id);
            return Err(format!(
                "{field}.special_tokens: {id} has {ids} ids and {tokens} tokens; give each id one token"
            ));
        }
        for token in token["tokens"].as_array().into_iter().flatten() {
            check_entry(&format!("{field}.special_tokens"), token.as_str().unwrap_or_default())?;
        }
        added += ids as u64;
        if added > MAX_ADDED_IDS {
            return Err(format!(
                "{path}: the template adds {added} or more ids to a text, more than {MAX_ADDED_IDS}; remove special tokens"
            ));
        }
    }
    Ok(())
}

impl Model {
    fn check(&self) -> Result<(), String> {
        self.vocab.check("model.vocab")?;
        check_bytes("model.unk_token", &self.unk_token, MAX_UNKNOWN_BYTES)?;
        let prefix = &self.continuing_subword_prefix;
        check_bytes("model.continuing_subword_prefix", prefix, MAX_AFFIX_BYTES)?;
        check_bytes("model.end_of_word_suffix", &self.end_of_word_suffix, MAX_AFFIX_BYTES)?;
        let chars = &self.max_input_chars_per_word;
        if chars.is_number() && chars.as_u64().is_none_or(|chars| chars > MAX_WORD_CHARS) {
            return Err(format!(
                "model.max_input_chars_per_word: expected at most {MAX_WORD_CHARS}, found {chars}; lower it (BERT uses 100)"
            ));
        }
        self.vocab.check_merges("model.merges", &self.merges.0, prefix.as_str().unwrap_or_default())
    }
}

/// Lengths and ids of vocabulary entries, read from an object or a list of pairs.
#[derive(Default)]
struct Vocabulary {
    /// Length of the longest entry, in bytes.
    longest: usize,
    /// First entry that is too long.
    too_long: Option<String>,
    /// Entries by id.
    by_id: HashMap<u64, String>,
    /// First id shared by two entries, and those entries.
    shared: Option<(u64, String, String)>,
}

impl Vocabulary {
    fn add(&mut self, entry: &str, id: Option<u64>) {
        self.longest = self.longest.max(entry.len());
        if self.too_long.is_none() && entry.chars().nth(MAX_ENTRY_CHARS).is_some() {
            self.too_long = Some(entry.to_owned());
        }
        if let Some(id) = id {
            match self.by_id.get(&id) {
                None => drop(self.by_id.insert(id, entry.to_owned())),
                Some(other) if other == entry || self.shared.is_some() => {}
                Some(other) => self.shared = Some((id, other.clone(), entry.to_owned())),
            }
        }
    }

    fn check(&self, field: &str) -> Result<(), String> {
        self.too_long.as_ref().map_or(Ok(()), |entry| check_entry(field, entry))?;
        // One of the two entries could never be decoded.
        self.shared.as_ref().map_or(Ok(()), |(id, first, second)| {
            let (first, second) = (quoted(first), quoted(second));
            Err(format!("{field}: {first} and {second} share the id {id}; give each token its own id"))
        })
    }

    /// Rejects merges that would make the library panic.
    ///
    /// The library joins both tokens in a buffer that is only as long as the longest entry.
    fn check_merges(&self, field: &str, merges: &[(String, String)], prefix: &str) -> Result<(), String> {
        for (index, (first, second)) in merges.iter().enumerate() {
            let joined = second.strip_prefix(prefix).map(|second| first.len() + second.len());
            if joined.is_none_or(|length| length > self.longest) {
                let (first, second) = (quoted(first), quoted(second));
                return Err(format!(
                    "{field}[{index}]: {first} and {second} do not join into an entry of the vocabulary; remove this merge"
                ));
            }
        }
        Ok(())
    }
}

impl<'de> Deserialize<'de> for Vocabulary {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(Entries)
    }
}

/// Visitor that reads a vocabulary entry by entry.
struct Entries;

impl<'de> Visitor<'de> for Entries {
    type Value = Vocabulary;

    fn expecting(&self, formatter: &mut fmt::Formatter) -> fmt::Result {
        formatter.write_str("a vocabulary")
    }

    fn visit_unit<E>(self) -> Result<Vocabulary, E> {
        Ok(Vocabulary::default())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Vocabulary, A::Error> {
        let mut entries = Vocabulary::default();
        while let Some((entry, id)) = map.next_entry::<String, Value>()? {
            entries.add(&entry, id.as_u64());
        }
        Ok(entries)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Vocabulary, A::Error> {
        let mut entries = Vocabulary::default();
        while let Some((entry, _)) = seq.next_element::<(String, IgnoredAny)>()? {
            entries.add(&entry, None);
        }
        Ok(entries)
    }
}

/// Merges, each a pair of tokens or a string with a space between them.
#[derive(Default)]
struct Merges(Vec<(String, String)>);

impl<'de> Deserialize<'de> for Merges {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Merge {
            Pair(String, String),
            Line(String),
        }
        let merges: Option<Vec<Merge>> = Option::deserialize(deserializer)?;
        let pair = |merge| match merge {
            Merge::Pair(first, second) => Some((first, second)),
            // The library skips the version line.
            Merge::Line(line) if line.starts_with("#version") => None,
            Merge::Line(line) => line.split_once(' ').map(|(a, b)| (a.to_owned(), b.to_owned())),
        };
        Ok(Self(merges.into_iter().flatten().filter_map(pair).collect()))
    }
}
