//! What a request says about generating, and the rules by which it goes before what the files of a checkpoint say.

use gpt2_generation::{EarlyStopping, GenerationConfig, GenerationError, LongPrompt, SearchMode, WhenFull};
use gpt2_weights::encode_piece;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::{Defaults, EngineError, Spelling, Vocabulary};

/// Defines the options that are fields of a [`GenerationConfig`].
macro_rules! generation_options {
    ($($field:ident: $kind:ty,)*) => {
        /// What a request says about generating; what it does not say is the model's default. An option of the name of a field of
        /// [`GenerationConfig`] means what that means.
        ///
        /// ```
        /// use gpt2_engine::{GenerationOptions, ModelOptions, Silent, Spelling};
        ///
        /// let opened = ModelOptions::default().open(&Silent)?;
        /// let mut options = GenerationOptions { max_new_tokens: Some(20), ..GenerationOptions::default() };
        /// options.set("temperature", 0.7.into())?; // as from a body in JSON
        /// let config = options.config(opened.defaults()?, Spelling::Keywords)?;
        /// assert_eq!((config.max_new_tokens, config.temperature, config.top_k), (20, 0.7, 50));
        /// options.num_beams = Some(4);
        /// let told = options.check(Spelling::Keywords).err().ok_or("it is allowed")?.to_string();
        /// assert!(told.starts_with("temperature is for drawing at random"));
        /// # Ok::<(), Box<dyn std::error::Error>>(())
        /// ```
        #[derive(Debug, Clone, Default, PartialEq)]
        pub struct GenerationOptions {
            $(
                #[doc = concat!("See [`GenerationConfig::", stringify!($field), "`].")]
                pub $field: Option<$kind>,
            )*
            /// Added to the logit of a sequence's last token where the others stand before it, beside what the defaults add.
            pub sequence_bias: Vec<(Vec<u32>, f64)>,
            /// Texts that are never written, neither at the beginning of a text nor after a space.
            pub bad_words: Vec<String>,
            /// Of a prompt longer than the context keep as many tokens at its end.
            pub keep_last: Option<usize>,
            /// Also keep as many tokens at the beginning: of a long prompt, and where the window slides.
            pub keep_head: Option<usize>,
            /// Go on with the last half of a full context.
            pub slide: bool,
            /// Whether the model has an assistant. It then looks tokens up in the text only where these options say so.
            pub has_assistant: bool,
        }

        impl GenerationOptions {
            /// Names of the options that are fields of [`GenerationConfig`].
            pub const FIELDS: &[&str] = &[$(stringify!($field),)*];

            /// Sets one of [`GenerationOptions::FIELDS`] by its name; of a list that has one thing also that thing.
            ///
            /// # Errors
            /// When it is none of them, or the value is of another type.
            pub fn set(&mut self, field: &str, value: Value) -> Result<(), GenerationError> {
                let set = match field {
                    $(stringify!($field) => read(value).map(|value| self.$field = Some(value)),)*
                    _ => return Err(GenerationError::Option { what: format!("there is no option `{field}`") }),
                };
                set.map_err(|error| GenerationError::Option { what: format!("`{field}`: {error}") })
            }

            fn put_fields(&self, config: &mut GenerationConfig) {
                $(
                    if let Some(value) = &self.$field {
                        config.$field = value.clone().into();
                    }
                )*
            }
        }
    };
}

generation_options! {
    max_new_tokens: usize,
    max_length: usize,
    min_new_tokens: usize,
    max_time: f64,
    eos_token_id: Vec<u32>,
    stop_strings: Vec<String>,
    do_sample: bool,
    temperature: f64,
    top_k: usize,
    top_p: f64,
    min_p: f64,
    typical_p: f64,
    epsilon_cutoff: f64,
    eta_cutoff: f64,
    seed: u64,
    repetition_penalty: f64,
    presence_penalty: f64,
    frequency_penalty: f64,
    no_repeat_ngram_size: usize,
    bad_words_ids: Vec<Vec<u32>>,
    suppress_tokens: Vec<u32>,
    begin_suppress_tokens: Vec<u32>,
    forced_bos_token_id: u32,
    renormalize_logits: bool,
    num_beams: usize,
    num_beam_groups: usize,
    diversity_penalty: f64,
    pad_token_id: u32,
    length_penalty: f64,
    early_stopping: EarlyStopping,
    num_return_sequences: usize,
    penalty_alpha: f64,
    num_assistant_tokens: usize,
    prompt_lookup_num_tokens: usize,
}

fn read<T: DeserializeOwned>(value: Value) -> serde_json::Result<T> {
    let list = (!value.is_array()).then(|| Value::Array(vec![value.clone()]));
    serde_json::from_value(value)
        .or_else(|error| list.and_then(|list| serde_json::from_value(list).ok()).ok_or(error))
}

impl GenerationOptions {
    /// Checks what can be checked before a checkpoint is opened.
    ///
    /// # Errors
    /// When an option is out of its range, or two contradict each other.
    pub fn check(&self, spelling: Spelling) -> Result<(), GenerationError> {
        let of = |option: &str| spelling.of(option);
        let conflict = |what: String| Err(GenerationError::Conflict { what });
        // At a command line an option that changes nothing is a mistake; in a program it may be one that is always given.
        let is_strict = spelling == Spelling::Flags;
        let is_greedy = is_strict && self.do_sample == Some(false);
        let greedy = if is_strict { "--greedy, " } else { "" };
        if is_strict && self.top_k == Some(0) {
            let expected = "at least 1 (the size of the vocabulary keeps every token)".into();
            return Err(GenerationError::OptionOutOfRange { option: "top_k", expected, found: "0".into() });
        }
        let (searches, beams, alpha) = (self.asks_for_a_search(), of("num_beams"), of("penalty_alpha"));
        let searches_twice =
            self.num_beams.is_some_and(|beams| beams > 1) && self.penalty_alpha.is_some_and(|x| x > 0.0);
        if searches_twice || searches && is_greedy {
            return conflict(format!(
                "{greedy}{beams} and {alpha} cannot be used with each other; give one of them"
            ));
        }
        if let Some(option) = self.drawing_option()
            && (is_greedy || searches && (is_strict || self.do_sample.is_none()))
        {
            return conflict(format!(
                "{} is for drawing at random and cannot be used with {greedy}{beams} or {alpha}",
                of(option)
            ));
        }
        if self.has_assistant && searches {
            return conflict(format!(
                "{} drafts texts that are made token by token, and cannot be used with {beams} or {alpha}",
                of("assistant_model")
            ));
        }
        if self.bad_words.iter().any(String::is_empty) {
            let what = format!("{}: expected a text, found an empty one", bad_words(spelling));
            return Err(GenerationError::Option { what });
        }
        if self.keep_head.is_some() && self.keep_last.is_none() && !self.slide {
            return conflict(format!(
                "{} keeps tokens where others go; give {} or {} too",
                of("keep_head"),
                of("keep_last"),
                of("slide")
            ));
        }
        // Tokens and combinations are looked at later, with what the checkpoint says.
        let drawing = GenerationConfig { do_sample: true, ..GenerationConfig::default() };
        self.applied_to(drawing).check_ranges()
    }

    /// The configuration of a request: the defaults, changed by these options, [completed](Defaults::complete) and checked.
    ///
    /// # Errors
    /// Those of [`GenerationOptions::check`], and when an option does not fit the model or what its files say.
    pub fn config(&self, defaults: &Defaults, spelling: Spelling) -> Result<GenerationConfig, EngineError> {
        self.check(spelling)?;
        let mut config = self.applied_to(defaults.config().clone());
        self.ban_words(&mut config, defaults.vocabulary(), spelling)?;
        if let Some(option) = self.option_of_beams()
            && config.search_mode() != SearchMode::Beams
        {
            let what =
                format!("{} is of beam search; give {}", spelling.of(option), spelling.of("num_beams"));
            return Err(GenerationError::Conflict { what }.into());
        }
        defaults.complete(config)
    }

    fn ban_words(
        &self,
        config: &mut GenerationConfig,
        vocabulary: &Vocabulary,
        spelling: Spelling,
    ) -> Result<(), EngineError> {
        for word in &self.bad_words {
            let Some(tokenizer) = vocabulary.tokenizer() else {
                let option = bad_words(spelling);
                let what = format!("{option} {word:?}: there is no tokenizer to make tokens of it");
                return Err(GenerationError::Option { what }.into());
            };
            config.bad_words_ids.push(encode_piece(tokenizer, word)?);
            // Inside a text a word has a space before it, and is another token then.
            if !word.starts_with(char::is_whitespace) {
                config.bad_words_ids.push(encode_piece(tokenizer, &format!(" {word}"))?);
            }
        }
        Ok(())
    }

    /// The configuration with what is given put in its place.
    fn applied_to(&self, mut config: GenerationConfig) -> GenerationConfig {
        // One of the ways to choose tokens takes the place of what the file asks for.
        let (draws, searches) = (self.drawing_option().is_some(), self.asks_for_a_search());
        if draws || searches || self.do_sample.is_some() {
            (config.num_beams, config.num_beam_groups, config.diversity_penalty) = (1, 1, 0.0);
            (config.penalty_alpha, config.do_sample) = (0.0, draws);
            if searches {
                config.prompt_lookup_num_tokens = None;
            } else if !self.do_sample.unwrap_or(draws) {
                config.num_return_sequences = 1;
            }
        }
        if self.has_assistant {
            config.prompt_lookup_num_tokens = None;
        }
        self.put_fields(&mut config);
        // A number of new tokens goes before a number of all tokens, and a number of all before the default of the other.
        match (self.max_new_tokens, self.max_length) {
            (Some(_), _) => config.max_length = None,
            (None, Some(_)) => config.max_new_tokens = usize::MAX,
            (None, None) => {}
        }
        config.prompt_lookup_num_tokens = config.prompt_lookup_num_tokens.filter(|tokens| *tokens > 0);
        config.sequence_bias.extend_from_slice(&self.sequence_bias);
        let head = self.keep_head.unwrap_or(0);
        if let Some(last) = self.keep_last {
            config.long_prompt = LongPrompt::Keep { head, last };
        }
        if self.slide {
            config.when_full = WhenFull::Slide { head };
        }
        config
    }

    /// Whether an option asks for beams or contrastive search.
    fn asks_for_a_search(&self) -> bool {
        self.num_beams.is_some_and(|beams| beams != 1) || self.is_contrastive()
    }

    fn is_contrastive(&self) -> bool {
        self.penalty_alpha.is_some_and(|alpha| alpha != 0.0)
    }

    /// The first option that only a random draw knows. Contrastive search chooses among the top k too.
    fn drawing_option(&self) -> Option<&'static str> {
        first_given([
            ("temperature", self.temperature.is_some()),
            ("top_k", self.top_k.is_some() && !self.is_contrastive()),
            ("top_p", self.top_p.is_some()),
            ("min_p", self.min_p.is_some()),
            ("typical_p", self.typical_p.is_some()),
            ("epsilon_cutoff", self.epsilon_cutoff.is_some()),
            ("eta_cutoff", self.eta_cutoff.is_some()),
            ("seed", self.seed.is_some()),
        ])
    }

    /// The first option that only beam search knows.
    fn option_of_beams(&self) -> Option<&'static str> {
        first_given([
            ("num_beam_groups", self.num_beam_groups.is_some()),
            ("diversity_penalty", self.diversity_penalty.is_some()),
            ("length_penalty", self.length_penalty.is_some()),
            ("early_stopping", self.early_stopping.is_some()),
        ])
    }
}

fn first_given<const N: usize>(options: [(&'static str, bool); N]) -> Option<&'static str> {
    options.into_iter().find(|(_, is_given)| *is_given).map(|(option, _)| option)
}

/// At a command line each word is given by itself.
fn bad_words(spelling: Spelling) -> String {
    spelling.of(if spelling == Spelling::Flags { "bad_word" } else { "bad_words" })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn options(fields: &Value) -> GenerationOptions {
        let mut options = GenerationOptions::default();
        for (field, value) in fields.as_object().into_iter().flatten() {
            options.set(field, value.clone()).unwrap();
        }
        options
    }

    fn applied(fields: &Value, to: GenerationConfig) -> GenerationConfig {
        options(fields).applied_to(to)
    }

    #[test]
    fn every_field_of_a_configuration_is_an_option() {
        let config = serde_json::to_value(GenerationConfig::default()).unwrap();
        let fields = config.as_object().unwrap().keys().map(String::as_str);
        let missing: Vec<&str> = fields.filter(|field| !GenerationOptions::FIELDS.contains(field)).collect();
        assert_eq!(missing, ["sequence_bias"], "which has numbers that JSON has not");
    }

    #[test]
    fn a_way_to_choose_takes_the_place_of_that_of_the_files() {
        let beams = || GenerationConfig {
            num_beams: 4,
            num_beam_groups: 2,
            diversity_penalty: 0.5,
            num_return_sequences: 3,
            max_length: Some(9),
            prompt_lookup_num_tokens: Some(5),
            ..GenerationConfig::default()
        };
        let changed = applied(&json!({"seed": 7}), beams());
        let one = GenerationConfig { num_beams: 1, num_beam_groups: 1, diversity_penalty: 0.0, ..beams() };
        assert_eq!(changed, GenerationConfig { seed: 7, do_sample: true, ..one.clone() });
        let greedy = applied(&json!({"do_sample": false}), beams());
        assert_eq!(greedy, GenerationConfig { num_return_sequences: 1, ..one.clone() });
        let searched = applied(&json!({"num_beams": 2}), beams());
        assert_eq!(
            searched,
            GenerationConfig { num_beams: 2, prompt_lookup_num_tokens: None, ..one.clone() }
        );
        let contrastive = applied(&json!({"penalty_alpha": 0.6, "top_k": 4}), beams());
        let alone = GenerationConfig { penalty_alpha: 0.6, top_k: 4, prompt_lookup_num_tokens: None, ..one };
        assert_eq!(contrastive, alone);
        let kept = applied(&json!({"max_new_tokens": 3, "max_length": 5}), beams());
        assert_eq!(kept, GenerationConfig { max_new_tokens: 3, max_length: None, ..beams() });
        let length = applied(&json!({"max_length": 5}), beams());
        assert_eq!(length, GenerationConfig { max_new_tokens: usize::MAX, max_length: Some(5), ..beams() });
        let assisted = GenerationOptions { has_assistant: true, ..GenerationOptions::default() };
        assert_eq!(assisted.applied_to(beams()).prompt_lookup_num_tokens, None);
        assert_eq!(applied(&json!({"prompt_lookup_num_tokens": 0}), beams()).prompt_lookup_num_tokens, None);
    }

    #[test]
    fn one_thing_may_stand_for_a_list_of_it() {
        let read = options(&json!({"eos_token_id": 3, "stop_strings": "a", "early_stopping": "never"}));
        assert_eq!((read.eos_token_id, read.stop_strings), (Some(vec![3]), Some(vec!["a".into()])));
        assert_eq!(read.early_stopping, Some(EarlyStopping::Never));
        let mut options = GenerationOptions::default();
        let told = options.set("temperature", json!("hot")).unwrap_err().to_string();
        assert!(told.starts_with("`temperature`: invalid type: string"), "{told}");
        assert!(options.set("seed", json!(-1)).is_err() && options.set("heat", json!(1)).is_err());
    }

    #[test]
    fn contradictions_are_told_in_the_words_of_the_face() {
        let told = |fields: Value, spelling| options(&fields).check(spelling).err().map(|e| e.to_string());
        let cases = [
            (
                json!({"num_beams": 3, "top_p": 0.5}),
                "top_p is for drawing at random",
                "--top-p is for drawing",
            ),
            (
                json!({"num_beams": 3, "penalty_alpha": 0.5}),
                "num_beams and penalty_alpha cannot",
                "--greedy, --num-beams and --penalty-alpha cannot",
            ),
            (json!({"temperature": 0.0}), "temperature: expected at least", "temperature: expected at least"),
        ];
        for (fields, keywords, flags) in cases {
            for (spelling, expected) in [(Spelling::Keywords, keywords), (Spelling::Flags, flags)] {
                let told = told(fields.clone(), spelling).unwrap();
                assert!(told.starts_with(expected), "{told}");
            }
        }
        for harmless in [json!({"do_sample": false, "temperature": 0.5}), json!({"top_k": 0})] {
            assert_eq!(told(harmless.clone(), Spelling::Keywords), None);
            assert!(told(harmless, Spelling::Flags).is_some());
        }
        let empty = GenerationOptions { bad_words: vec![String::new()], ..GenerationOptions::default() };
        assert!(empty.check(Spelling::Flags).unwrap_err().to_string().starts_with("--bad-word: "));
        let head = GenerationOptions { keep_head: Some(3), ..GenerationOptions::default() };
        let told = head.check(Spelling::Keywords).unwrap_err().to_string();
        assert_eq!(told, "keep_head keeps tokens where others go; give keep_last or slide too");
    }
}
