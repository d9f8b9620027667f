//! Counts tokens, pages, words, bytes and windows in the published texts without a model.
//!
//! The texts and the tokenizer are in the folders `texts` and `tokenizer` next to the folder that
//! `GPT2_CHECKPOINTS` names. Other programs produced the expected counts.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use candle_gpt2_engine::{Silent, Vocabulary};
use candle_gpt2_evaluation::{Choice, Data, Item, Prepared, Setting, Work, named};
use candle_gpt2_testing::{CheckpointFolder, checkpoints, skipped};
use candle_gpt2_weights::{Checkpoint, load_tokenizer};
use serde_json::json;

/// Published texts, with the vocabulary and context of the published models.
struct Texts {
    folder: PathBuf,
    vocabulary: Vocabulary,
}

/// Opens the folder of texts with GPT-2's tokenizer, if both exist.
fn texts() -> Option<&'static Texts> {
    static TEXTS: OnceLock<Option<Texts>> = OnceLock::new();
    TEXTS.get_or_init(open).as_ref()
}

fn open() -> Option<Texts> {
    let checkpoints = checkpoints()?;
    let sibling = |name: &str| checkpoints.parent().unwrap_or(Path::new("..")).join(name);
    let [folder, tokenizer] = ["texts", "tokenizer"].map(sibling);
    if let Some(missing) = [&folder, &tokenizer].into_iter().find(|folder| !folder.is_dir()) {
        skipped(&format!(
            "the published texts and GPT-2's tokenizer, because the folder {} is missing",
            missing.display()
        ));
        return None;
    }
    // The weights do not fit this configuration, but are never read.
    let shape = json!({ "vocab_size": 50257, "n_positions": 1024, "n_ctx": 1024, "bos_token_id": 50256, "eos_token_id": 50256 });
    let checkpoint = CheckpointFolder::tiny().with_config(shape);
    let opened = Checkpoint::open(checkpoint.path()).unwrap();
    let vocabulary = Vocabulary::new(&opened, Some(load_tokenizer(&tokenizer).unwrap()));
    Some(Texts { folder, vocabulary })
}

impl Texts {
    fn path(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    fn prepared(&self, protocol: &str, file: &str) -> Prepared {
        let data = Data::read(&self.path(file)).unwrap();
        let (protocol, number) = named(protocol).unwrap();
        assert_eq!(protocol.dataset.sha256.contains(&data.sha256()), file != HELLASWAG, "{file}");
        let number = number.or(protocol.parameter.and_then(|parameter| parameter.default)).unwrap_or(0);
        let setting = Setting { parameter: number, ..Setting::new(&self.vocabulary, &Silent) };
        let prepared = (protocol.prepare)(&data, &setting).unwrap();
        assert_eq!((prepared.truncated_count, prepared.damaged.as_ref()), (0, None));
        prepared
    }

    fn ids(&self, text: &str) -> Vec<u32> {
        self.vocabulary.encode(text).unwrap()
    }
}

const WIKITEXT: &str = "wiki.test.raw";
const LAMBADA: &str = "lambada_openai.jsonl";
const HELLASWAG: &str = "hellaswag_val_olmes1000.jsonl";

fn choices(item: &Item) -> &[Choice] {
    match &item.work {
        Work::Score { choices, .. } => choices,
        Work::Write { .. } => &[],
    }
}

/// Returns the only choice of each item.
fn only(prepared: &Prepared) -> impl Iterator<Item = &Choice> {
    prepared.items.iter().map(|item| {
        let [choice] = choices(item) else { panic!("item {} has several choices", item.index) };
        choice
    })
}

fn scored(choice: &Choice) -> usize {
    choice.sequences.iter().map(|sequence| sequence.ids.len() - sequence.first).sum()
}

/// Number of scored tokens, and number of all tokens in the sequences.
fn scored_and_total(prepared: &Prepared) -> [usize; 2] {
    let total = |choice: &Choice| choice.sequences.iter().map(|sequence| sequence.ids.len()).sum::<usize>();
    [only(prepared).map(scored).sum(), only(prepared).map(total).sum()]
}

#[test]
fn wikitext_token_count_matches() {
    let Some(texts) = texts() else { return };
    let text = std::fs::read_to_string(texts.path(WIKITEXT)).unwrap();
    assert_eq!((text.len(), text.lines().count(), texts.ids(&text).len()), (1_290_590, 4_358, 286_221));
}

#[test]
fn wikitext_has_62_pages() {
    let Some(texts) = texts() else { return };
    let prepared = texts.prepared("wikitext:lm-eval", WIKITEXT);
    assert_eq!(prepared.items.len(), 62);
    let sum = |count: fn(&Choice) -> usize| only(&prepared).map(count).sum::<usize>();
    assert_eq!(sum(|page| page.words.unwrap()), 241_335);
    assert_eq!(sum(|page| page.bytes), 1_290_527);
    assert_eq!(sum(scored), 272_031);
    assert_eq!(only(&prepared).map(scored).max(), Some(15_296));
    assert_eq!(sum(|page| page.sequences.len()), 297);
}

#[test]
fn wikitext_hf_windows_match_the_script() {
    let Some(texts) = texts() else { return };
    let windows = |protocol: &str| {
        let prepared = texts.prepared(protocol, WIKITEXT);
        (prepared.items.len(), scored_and_total(&prepared))
    };
    // In adjacent windows, the first token of each window is unscored. In overlapping windows, only the
    // text's first token is unscored.
    assert_eq!(windows("wikitext:hf-1024"), (281, [287_644 - 281, 287_644]));
    assert_eq!(windows("wikitext:hf-512"), (561, [287_643, 574_364]));
    let (count, [scored, total]) = windows("wikitext:hf-32");
    assert_eq!((count, scored), (8_958, 287_643));
    assert_eq!(total / 10_000, 917);
}

#[test]
fn megatron_tokens_per_word_match() {
    let Some(texts) = texts() else { return };
    let prepared = texts.prepared("wikitext:megatron", WIKITEXT);
    let totals = prepared.totals;
    assert_eq!((totals.words, totals.tokens), (245_570, 272_045));
    let ratio = (totals.tokens - 1) as f64 / (totals.words - 1) as f64;
    assert!((ratio - 1.10781).abs() < 5e-6, "{ratio}");
    assert_eq!(only(&prepared).map(scored).sum::<usize>(), 272_044);
}

#[test]
fn llama_cpp_scores_the_second_half_of_each_chunk() {
    let Some(texts) = texts() else { return };
    let prepared = texts.prepared("wikitext:llama.cpp", WIKITEXT);
    assert_eq!((prepared.items.len(), only(&prepared).map(scored).sum::<usize>()), (559, 142_545));
    let data = Data::read(&texts.path(WIKITEXT)).unwrap();
    let setting = Setting { context: Some(1024), ..Setting::new(&texts.vocabulary, &Silent) };
    let longer = (named("wikitext:llama.cpp").unwrap().0.prepare)(&data, &setting).unwrap();
    assert_eq!((longer.items.len(), only(&longer).map(scored).sum::<usize>()), (279, 142_569));
}

#[test]
fn text_bits_scores_every_token() {
    let Some(texts) = texts() else { return };
    let data = Data::read(&texts.path(WIKITEXT)).unwrap();
    let setting = Setting::new(&texts.vocabulary, &Silent);
    let prepared = (named("text:bits").unwrap().0.prepare)(&data, &setting).unwrap();
    assert_eq!(only(&prepared).map(scored).sum::<usize>(), 286_221);
    assert_eq!(only(&prepared).map(|window| window.bytes).sum::<usize>(), 1_290_590);
    let text = std::fs::read_to_string(texts.path(WIKITEXT)).unwrap();
    assert_eq!(only(&prepared).map(|window| window.characters).sum::<usize>(), text.chars().count());
    assert_eq!(prepared.totals.tokens, 286_221);
}

#[test]
fn lambada_last_word_token_counts_match() {
    let Some(texts) = texts() else { return };
    let prepared = texts.prepared("lambada:lm-eval", LAMBADA);
    assert_eq!(prepared.items.len(), 5_153);
    let with = |tokens: usize| only(&prepared).filter(|word| scored(word) == tokens).count();
    assert_eq!([1, 2, 3, 4, 5, 6, 7, 8, 9, 10].map(with), [4_010, 913, 205, 17, 4, 0, 0, 3, 0, 1]);
    let [_, total] = scored_and_total(&prepared);
    let longest = only(&prepared).map(|word| word.sequences[0].ids.len()).max();
    assert_eq!((total, longest), (430_230, Some(224)));
}

/// Checks that encoding the word separately changes almost no items.
///
/// The whitespace between a context and its word belongs to the word.
#[test]
fn lambada_words_encode_the_same_alone_and_in_context() {
    let Some(texts) = texts() else { return };
    let lm_eval = texts.prepared("lambada:lm-eval", LAMBADA);
    let strict = texts.prepared("lambada:megatron-strict", LAMBADA);
    let whole = texts.prepared("lambada:last-token", LAMBADA);
    let differ = only(&lm_eval).zip(only(&strict)).filter(|(a, b)| a.sequences != b.sequences).count();
    assert_eq!(differ, 7);
    for (word, whole) in only(&lm_eval).zip(only(&whole)) {
        assert_eq!(word.sequences[0].ids, whole.sequences[0].ids);
        assert_eq!(whole.sequences[0].first, whole.sequences[0].ids.len() - 1);
    }
}

#[test]
fn stop_words_are_suppressed_in_generated_words() {
    let Some(texts) = texts() else { return };
    let prepared = texts.prepared("lambada:stop-words", LAMBADA);
    let suppressed: Vec<String> = prepared
        .suppressed_tokens
        .iter()
        .map(|id| String::from_utf8(texts.vocabulary.token_bytes(*id)).unwrap())
        .collect();
    for token in [" the", "the", " himself", "s", " don"] {
        assert!(suppressed.iter().any(|known| known == token), "{token:?}");
    }
    for token in [" The", " word", "The"] {
        assert!(!suppressed.iter().any(|known| known == token), "{token:?}");
    }
    assert!(
        prepared
            .items
            .iter()
            .all(|item| matches!(&item.work, Work::Write { tokens: 6, word, .. } if !word.is_empty()))
    );
}

#[test]
fn hellaswag_contexts_and_endings_share_no_tokens() {
    let Some(texts) = texts() else { return };
    let prepared = texts.prepared("hellaswag:lm-eval", HELLASWAG);
    assert_eq!(prepared.items.len(), 1_000);
    let sequences = || prepared.items.iter().flat_map(choices).map(|choice| &choice.sequences[0]);
    assert_eq!(sequences().map(|sequence| sequence.ids.len()).max(), Some(135));
    // First, count the context with each choice; then, count it only once per item.
    assert_eq!(sequences().map(|sequence| sequence.ids.len()).sum::<usize>(), 323_111);
    let contexts: usize = prepared.items.iter().map(|item| item.context_tokens).sum();
    let endings: usize = sequences().map(|sequence| sequence.ids.len() - sequence.first).sum();
    assert_eq!(contexts + endings, 171_236);
    let llama_cpp = texts.prepared("hellaswag:llama.cpp", HELLASWAG);
    let later = |(a, b): &(&Item, &Item)| a.context_tokens > b.context_tokens;
    let later = llama_cpp.items.iter().zip(&prepared.items).filter(later).count();
    assert!(later > 0, "some endings share their first tokens");
}
