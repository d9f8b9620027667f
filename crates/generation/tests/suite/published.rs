//! Acceptance tests for real checkpoints with published completions.
//!
//! They cover penalties, beams, banned and allowed words, batches and contrastive search. Greedy
//! completions, logits and losses are in the table of `gpt2 verify --published`.
//!
//! The tests run for `gpt2` and `gpt2-large` if these folders exist in the folder that `GPT2_PUBLISHED`
//! names. Otherwise, they report that they are skipped. The sources are the test suites of transformers
//! and rust-bert.

use std::ops::ControlFlow;
use std::path::PathBuf;

use candle_gpt2::Gpt2LMHeadModel;
use candle_gpt2_generation::{
    AllowedTokens, BatchGenerator, GenerationConfig, LogitsProcessor, Request, TextGenerator, TokenGenerator,
    beam_search, contrastive_search, score_continuations,
};
use candle_gpt2_testing::skipped;
use candle_gpt2_weights::{Checkpoint, LoadOptions, Tokenizer, encode};

/// Environment variable that names the folder with the published checkpoints.
const PUBLISHED_VARIABLE: &str = "GPT2_PUBLISHED";
/// Tolerance for scores, which are published with four digits.
const SCORE: f64 = 1e-4;

struct Published {
    model: Gpt2LMHeadModel,
    tokenizer: Tokenizer,
}

/// Loads the model if its folder exists.
fn published(name: &str) -> Option<Published> {
    let folder = std::env::var_os(PUBLISHED_VARIABLE).map(|folder| PathBuf::from(folder).join(name));
    let Some(folder) = folder.filter(|folder| folder.is_dir()) else {
        skipped(&format!("{PUBLISHED_VARIABLE} does not name a folder with {name}"));
        return None;
    };
    let checkpoint = Checkpoint::open(folder).unwrap();
    let tokenizer = checkpoint.tokenizer(None).unwrap();
    Some(Published { model: checkpoint.load(&LoadOptions::default(), &|_| ()).unwrap(), tokenizer })
}

impl Published {
    /// Returns a greedy configuration with this maximum total length of prompt and completion.
    fn up_to(&self, max_length: usize) -> GenerationConfig {
        let eos_token_id = self.model.config().eos_token_id.clone();
        let max_length = Some(max_length);
        GenerationConfig {
            max_length,
            max_new_tokens: usize::MAX,
            eos_token_id,
            ..GenerationConfig::default()
        }
    }

    fn new_tokens(&self, max_new_tokens: usize) -> GenerationConfig {
        GenerationConfig { max_new_tokens, ..self.up_to(usize::MAX) }
    }

    fn ids(&self, text: &str) -> Vec<u32> {
        encode(&self.tokenizer, text).unwrap()
    }

    /// Returns the text after the prompt.
    fn text(&self, prompt: &str, config: &GenerationConfig) -> String {
        let pieces = TextGenerator::new(&self.model, &self.ids(prompt), config, &self.tokenizer).unwrap();
        pieces.collect::<Result<_, _>>().unwrap()
    }

    fn decoded(&self, ids: &[u32]) -> String {
        self.tokenizer.decode(ids, true).unwrap()
    }

    fn generated(
        &self,
        prompt: &str,
        config: &GenerationConfig,
        processors: Vec<LogitsProcessor>,
    ) -> Vec<u32> {
        let request = Request { processors, ..Request::new(self.ids(prompt), config.clone()) };
        TokenGenerator::<&Tokenizer>::of_request(&self.model, request, None)
            .unwrap()
            .collect::<Result<_, _>>()
            .unwrap()
    }

    fn mean_logprob(&self, prompt: &str, continuation: Vec<u32>) -> f64 {
        let scored = score_continuations(&self.model, &self.ids(prompt), &[continuation], &|| ());
        scored.unwrap()[0].mean()
    }
}

#[test]
fn gpt2_repetition_penalty() {
    let Some(gpt2) = published("gpt2") else { return };
    let config = GenerationConfig { repetition_penalty: 1.1, ..gpt2.up_to(40) };
    let expected = " was found in a field near the town of Keflavik, about 30 miles (48 kilometers) south-east of \
                    Moscow.\n\n\n";
    assert_eq!(gpt2.text("The cat", &config), expected);
}

/// Batches two prompts of different lengths, without the padding that the source needs.
#[test]
fn gpt2_batch_of_two() {
    let Some(gpt2) = published("gpt2") else { return };
    let prompts = ["Hello, my dog is a little", "Today, I"].map(|prompt| gpt2.ids(prompt));
    let mut texts = [String::new(), String::new()];
    // The source counts seven tokens for both prompts, because it pads the shorter prompt to this length.
    let config = gpt2.new_tokens(13);
    for token in
        BatchGenerator::new(&gpt2.model, Request::each(&prompts, &config), 2, Some(&gpt2.tokenizer)).unwrap()
    {
        let token = token.unwrap();
        texts[token.prompt].push_str(&token.text);
    }
    assert_eq!(texts[0], " bit of a mess. I'm not sure if he's going");
    assert!(texts[1].starts_with("'m going to be doing a lot of research on this. I"), "{}", texts[1]);
    // The published lines come from an f16 model and are 20 tokens long.
    let config = gpt2.new_tokens(20);
    let kolkata = ", who was born in the city of Kolkata, was a member of the Kolkata";
    assert!(gpt2.text("hi", &config).starts_with(kolkata));
    let sorry = ". I'm sorry. I'm sorry. I'm sorry. I'm sorry. I'm sorry";
    assert_eq!(gpt2.text("Hello this is a very long sentence", &config), sorry);
}

#[test]
fn gpt2_beams() {
    let Some(gpt2) = published("gpt2") else { return };
    let config = GenerationConfig { num_beams: 5, num_return_sequences: 3, ..gpt2.up_to(20) };
    let found =
        beam_search(&gpt2.model, &gpt2.ids("The dog"), &config, &[], None, &|| ControlFlow::Continue(()))
            .unwrap();
    let texts: Vec<String> = found.iter().map(|text| gpt2.decoded(&text.ids)).collect();
    let home = " was found in the backyard of a home in the";
    let expected = [
        "6200 block of South Main Street.",
        "6500 block of South Main Street.",
        "6200 block of South Main Street,",
    ];
    assert_eq!(texts, expected.map(|end| format!("{home} {end}")));
}

#[test]
fn gpt2_diverse_beams() {
    let Some(gpt2) = published("gpt2") else { return };
    let config = GenerationConfig {
        num_beams: 6,
        num_beam_groups: 3,
        diversity_penalty: 5.5,
        num_return_sequences: 3,
        min_new_tokens: 5,
        ..gpt2.up_to(20)
    };
    let processors = LogitsProcessor::of_config(&config);
    for (prompt, expected) in [
        (
            "It was a nice and",
            [
                " peaceful evening for me,\" he said.\n\n\"It was a good",
                " peaceful evening for me,\" he said.\n\n\"It was a nice",
                " warm day, and I'm glad I did.\n\n\"I'm",
            ],
        ),
        (
            "Language models can generate",
            [
                " more complex models, but they are not the only way to do so.",
                " more complex models, but they are not the only way to do this.",
                " a lot of data, but they're not the only way to do it",
            ],
        ),
    ] {
        let found = beam_search(&gpt2.model, &gpt2.ids(prompt), &config, &processors, None, &|| {
            ControlFlow::Continue(())
        })
        .unwrap();
        // The source pads the shorter prompt, which makes that prompt's completions one token shorter.
        for (text, expected) in found.iter().zip(expected) {
            let text = gpt2.decoded(&text.ids);
            assert!(
                text.starts_with(expected) || expected.starts_with(&text),
                "{text:?}, expected {expected:?}"
            );
        }
    }
}

#[test]
fn gpt2_bad_words() {
    let Some(gpt2) = published("gpt2") else { return };
    let prompt = "Hello, my name is";
    let free = gpt2.generated(prompt, &gpt2.up_to(36), Vec::new());
    assert_eq!(
        gpt2.decoded(&free),
        " John. I'm a writer, and I'm writing a book. I've been writing for a long time. I was born in New York City,"
    );
    assert!((gpt2.mean_logprob(prompt, free) + 1.3316).abs() < SCORE);
    let bad_words_ids = [" honeybees", " a writer"].map(|word| gpt2.ids(word)).to_vec();
    let found = gpt2.generated(prompt, &GenerationConfig { bad_words_ids, ..gpt2.up_to(36) }, Vec::new());
    let text = gpt2.decoded(&found);
    assert!(text.starts_with(" John. I'm a student at the University of California, Berkeley."), "{text}");
    assert!((gpt2.mean_logprob(prompt, found) + 1.2307).abs() < SCORE);
}

#[test]
fn gpt2_allowed_tokens() {
    let Some(gpt2) = published("gpt2") else { return };
    /// Tokens that end the paragraph; only the end-of-text token is allowed after them.
    const LINE_BREAKS: [u32; 2] = [198, 628];
    let one_paragraph = || {
        LogitsProcessor::AllowedTokens(AllowedTokens::new(|history| {
            let has_ended = history.ids.iter().any(|id| LINE_BREAKS.contains(id));
            if has_ended { vec![50256] } else { (0..50255).collect() }
        }))
    };
    for (prompt, expected) in [
        (
            "Rust is a",
            " very simple and powerful library for building and running web applications. It is a simple, fast, and \
             lightweight library that can be used to build web applications in a number of different ways.\n",
        ),
        (
            "There was a ",
            "urn in the room, and I was sitting on it. I was like, 'What the hell is going on?' And he said, 'Well, \
             I'm not sure. I'm just going to go back to my room and get some coffee.' And",
        ),
    ] {
        let found = gpt2.generated(prompt, &gpt2.up_to(56), vec![one_paragraph()]);
        assert_eq!(gpt2.decoded(&found), expected, "{prompt:?}");
    }
}

#[test]
fn gpt2_large_contrastive_search() {
    let Some(large) = published("gpt2-large") else { return };
    let prompt = "DeepMind Technologies is a British artificial intelligence subsidiary of Alphabet Inc. and research \
                  laboratory founded in 2010. DeepMind was acquired by Google in 2014. The company is based";
    let config = GenerationConfig { penalty_alpha: 0.6, top_k: 4, ..large.up_to(256) };
    let (ids, _) = contrastive_search(&large.model, &large.ids(prompt), &config, &[], None, &|| {
        ControlFlow::Continue(())
    })
    .unwrap();
    let expected = " in London, United Kingdom\n\nGoogle has a lot of data on its users and uses it to improve its \
                    products, such as Google Now, which helps users find the information they're looking for on the \
                    web. But the company is not the only one to collect data on its users. Facebook, for example, has \
                    its own facial recognition technology, as well as a database of millions of photos that it uses \
                    to personalize its News Feed.\n\nFacebook's use of data is a hot topic in the tech industry, with \
                    privacy advocates concerned about the company's ability to keep users' information private. In a \
                    blog post last year, Facebook CEO Mark Zuckerberg said his company would \"do our best to be \
                    transparent about our data use and how we use it.\"\n\n\"We have made it clear that we do not \
                    sell or share your data with third parties,\" Zuckerberg wrote. \"If you have questions or \
                    concerns, please reach out to us at privacy@facebook.com.\"\n\nGoogle declined to comment on the \
                    privacy implications of its use of data, but said in a statement to The Associated Press that";
    assert_eq!(large.decoded(&ids), expected);
}
