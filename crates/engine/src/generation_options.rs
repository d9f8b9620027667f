//! What a request says about generating, and the rules by which it goes before what the files of a checkpoint say.

use std::borrow::Cow;

use candle_gpt2_generation::{
    EarlyStopping, GenerationConfig, GenerationError, LongPrompt, MIN_TEMPERATURE, SearchMode, WhenFull,
};
use candle_gpt2_weights::encode_piece;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::{Defaults, EngineError, Spelling, Vocabulary};

/// Defines the options that are fields of a [`GenerationConfig`].
macro_rules! generation_options {
    ($($field:ident: $kind:ty,)*) => {
        /// What a request says about generating; what it does not say is the model's default. An option of the name of a field of
        /// [`GenerationConfig`] means what that means, but for a `temperature` of 0: it means greedy, see [`samples_at`].
        ///
        /// ```
        /// use candle_gpt2_engine::{GenerationOptions, ModelOptions, Silent, Spelling};
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
            /// Words that are never written, neither at the beginning of a text nor after a space: see [`banned_tokens`].
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

/// Whether texts are sampled at this temperature. At 0, and at what is too small to divide a logit by, they are greedy: the most
/// probable token is taken.
///
/// ```
/// use candle_gpt2_engine::samples_at;
///
/// assert!(samples_at(0.01) && !samples_at(0.0) && !samples_at(1e-40));
/// ```
pub fn samples_at(temperature: f64) -> bool {
    temperature >= MIN_TEMPERATURE
}

/// The tokens of a word that is never written: those it has at the beginning of a text, and those it has after a space. Whether the
/// word is given with the space does not matter.
///
/// # Errors
/// When there is no tokenizer, it cannot encode the word, or it gives tokens that the model does not have.
///
/// # Source
/// vLLM's `bad_words` (`SamplingParams.update_from_tokenizer`), without its condition that both forms have as many tokens, by which
/// some words are banned at the beginning alone.
///
/// ```
/// use candle_gpt2_engine::{ModelOptions, Silent, banned_tokens};
///
/// let opened = ModelOptions::default().open(&Silent)?;
/// let vocabulary = opened.vocabulary();
/// let expected = [vocabulary.encode("king")?, vocabulary.encode(" king")?];
/// assert_eq!(banned_tokens(vocabulary, "king")?, expected);
/// assert_eq!(banned_tokens(vocabulary, " king")?, expected);
/// # Ok::<(), candle_gpt2_engine::EngineError>(())
/// ```
pub fn banned_tokens(vocabulary: &Vocabulary, word: &str) -> Result<Vec<Vec<u32>>, EngineError> {
    let tokenizer = vocabulary.required_tokenizer()?;
    let inner = word.trim_start();
    let written = match inner {
        // White space alone is itself.
        "" => vec![word.to_owned()],
        _ => vec![inner.to_owned(), format!(" {inner}")],
    };
    let mut forms = Vec::new();
    for written in written {
        let ids = vocabulary.own(encode_piece(tokenizer, &written)?)?;
        if !ids.is_empty() && !forms.contains(&ids) {
            forms.push(ids);
        }
    }
    Ok(forms)
}

impl GenerationOptions {
    /// Checks what can be checked before a checkpoint is opened.
    ///
    /// # Errors
    /// When an option is out of its range, or two contradict each other.
    pub fn check(&self, spelling: Spelling) -> Result<(), GenerationError> {
        let is_temperature = |temperature: f64| (0.0..=f64::from(f32::MAX)).contains(&temperature);
        if let Some(temperature) = self.temperature.filter(|temperature| !is_temperature(*temperature))
            && (spelling == Spelling::Flags || self.do_sample != Some(false))
        {
            return Err(GenerationError::OptionOutOfRange {
                option: "temperature",
                expected: "at least 0, where 0 is greedy, and finite in f32".into(),
                found: temperature.to_string(),
            });
        }
        self.settled().check_settled(spelling)
    }

    /// Whether a temperature of 0 asks for the most probable tokens.
    fn is_greedy(&self) -> bool {
        self.temperature.is_some_and(|temperature| (0.0..).contains(&temperature) && !samples_at(temperature))
    }

    /// The same options with a temperature of 0 said by `do_sample`, and without what it leaves nothing to do for.
    fn settled(&self) -> Cow<'_, Self> {
        if !self.is_greedy() {
            return Cow::Borrowed(self);
        }
        Cow::Owned(Self {
            // A search takes no samples anyway.
            do_sample: (!self.asks_for_a_search()).then_some(false),
            temperature: None,
            top_k: self.top_k.filter(|_| self.is_contrastive()),
            top_p: None,
            min_p: None,
            typical_p: None,
            epsilon_cutoff: None,
            eta_cutoff: None,
            seed: None,
            ..self.clone()
        })
    }

    /// What a user should know about these options, nothing of which is an error.
    pub fn notes(&self, spelling: Spelling) -> Vec<String> {
        if !self.is_greedy() {
            return Vec::new();
        }
        let idle: Vec<String> = [("do_sample", self.do_sample == Some(true))]
            .into_iter()
            .chain(self.drawing_options())
            .filter(|(option, is_given)| *is_given && *option != "temperature")
            .map(|(option, _)| spelling.of(option))
            .collect();
        let zero = match spelling {
            Spelling::Flags => "--temperature 0",
            Spelling::Keywords => "temperature=0",
        };
        match idle.as_slice() {
            [] => Vec::new(),
            [option] => vec![format!("{zero} is greedy: {option} has no effect")],
            options => vec![format!("{zero} is greedy: {} have no effect", options.join(", "))],
        }
    }

    fn check_settled(&self, spelling: Spelling) -> Result<(), GenerationError> {
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
        let mut config = self.settled().applied_to(defaults.config().clone());
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
            if vocabulary.tokenizer().is_none() {
                let option = bad_words(spelling);
                let what = format!("{option} {word:?}: there is no tokenizer to make tokens of it");
                return Err(GenerationError::Option { what }.into());
            }
            config.bad_words_ids.extend(banned_tokens(vocabulary, word)?);
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

    /// The first option that only sampling knows.
    fn drawing_option(&self) -> Option<&'static str> {
        first_given(self.drawing_options())
    }

    /// The options that only sampling knows, and whether they are given. Contrastive search chooses among the top k too.
    fn drawing_options(&self) -> [(&'static str, bool); 8] {
        [
            ("temperature", self.temperature.is_some()),
            ("top_k", self.top_k.is_some() && !self.is_contrastive()),
            ("top_p", self.top_p.is_some()),
            ("min_p", self.min_p.is_some()),
            ("typical_p", self.typical_p.is_some()),
            ("epsilon_cutoff", self.epsilon_cutoff.is_some()),
            ("eta_cutoff", self.eta_cutoff.is_some()),
            ("seed", self.seed.is_some()),
        ]
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

    /// As `--greedy` and `do_sample=False`, with any of the options of sampling.
    #[test]
    fn a_temperature_of_0_is_greedy() {
        let settled = |fields: &Value, to: GenerationConfig| {
            let options = options(fields);
            options.check(Spelling::Flags).unwrap();
            options.check(Spelling::Keywords).unwrap();
            options.settled().applied_to(to)
        };
        let files =
            || GenerationConfig { do_sample: true, num_beams: 3, top_k: 7, ..GenerationConfig::default() };
        let greedy = applied(&json!({"do_sample": false}), files());
        assert!(!greedy.do_sample);
        for fields in [
            json!({"temperature": 0.0}),
            json!({"temperature": 1e-40}),
            json!({"temperature": 0, "do_sample": true}),
            json!({"temperature": 0, "do_sample": false}),
            json!({"temperature": 0, "top_k": 4, "top_p": 0.5, "min_p": 0.1, "seed": 7, "eta_cutoff": 0.1}),
        ] {
            assert_eq!(settled(&fields, files()), greedy, "{fields}");
        }
        let beams = settled(&json!({"temperature": 0, "num_beams": 4}), files());
        assert_eq!(beams, applied(&json!({"num_beams": 4}), files()));
        let contrastive = settled(&json!({"temperature": 0, "penalty_alpha": 0.6, "top_k": 4}), files());
        assert_eq!(contrastive, applied(&json!({"penalty_alpha": 0.6, "top_k": 4}), files()));
        // A temperature that is large enough samples.
        assert!(settled(&json!({"temperature": 1e-6}), files()).do_sample);
    }

    #[test]
    fn what_a_temperature_of_0_leaves_without_effect_is_noted() {
        let notes = |fields: Value, spelling| options(&fields).notes(spelling);
        let fields = json!({"temperature": 0.0, "top_k": 4, "seed": 7});
        let expected = "--temperature 0 is greedy: --top-k, --seed have no effect";
        assert_eq!(notes(fields, Spelling::Flags), [expected]);
        let fields = json!({"temperature": 0.0, "do_sample": true});
        let expected = "temperature=0 is greedy: do_sample has no effect";
        assert_eq!(notes(fields, Spelling::Keywords), [expected]);
        for silent in [json!({"temperature": 0.0}), json!({"temperature": 0.5, "top_k": 4}), json!({})] {
            assert_eq!(notes(silent, Spelling::Flags), Vec::<String>::new());
        }
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
            (
                json!({"temperature": -0.5}),
                "temperature: expected at least 0,",
                "temperature: expected at least 0,",
            ),
            (
                json!({"temperature": 1e39}),
                "temperature: expected at least 0,",
                "temperature: expected at least 0,",
            ),
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
