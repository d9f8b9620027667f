//! LAMBADA: predicting the last word of a passage.

use std::collections::HashSet;

use candle_gpt2_engine::Vocabulary;

use super::few_shot::Examples;
use super::lm_eval::{self, Pair};
use super::shared::{
    DEFAULTS, GPT_NEO, PreparedItem, paper, prepare_records, published, scored, unsplit_sequence,
};
use crate::detokenize::strip;
use crate::metric::{Ratio, texts};
use crate::protocol::Dataset;
use crate::{
    Choice, Data, DataError, EvaluationError, ExampleSource, Item, ItemResult, Metric, Prepared, Protocol,
    Published, Record, Setting, Size, Work, basic_tokenizer, detokenize,
};

const DATASET: Dataset = Dataset {
    name: "LAMBADA, test, OpenAI's variant",
    hub: Some("EleutherAI/lambada_openai/data/lambada_test.jsonl"),
    // The file on the Hub, and the file in llm-foundry, which splits each passage into two fields.
    sha256: &[
        "4aa8d02cd17c719165fc8a7887fddd641f43fcafa4b1c806ca8abc31fabdb226",
        "411bfbe5b9054346b6a19299c0242670adbefb9162efd958593cbc0290b8c9dc",
    ],
    license: "MIT",
};

const ISSUE_2159: &str = "EleutherAI/lm-evaluation-harness#2159";

/// Protocol that scores all tokens of the last word and reports the perplexity per word.
pub(super) const LM_EVAL: Protocol = Protocol {
    name: "lambada:lm-eval",
    about: "the last word: whether each of its tokens is the most probable, and the perplexity per word",
    source: "lm-evaluation-harness 0.4.13, task lambada_openai",
    dataset: DATASET,
    published: &[
        published(Size::Small, "acc", 0.3256, "lambada:lm-eval", ISSUE_2159),
        published(Size::Small, "perplexity", 40.0554, "lambada:lm-eval", ISSUE_2159),
        published(Size::Xl, "acc", 0.5121, "lambada:lm-eval", GPT_NEO),
        published(Size::Xl, "perplexity", 10.634, "lambada:lm-eval", GPT_NEO),
        ACC[0],
        ACC[1],
        ACC[2],
        ACC[3],
        paper(Size::Small, "perplexity", 35.13),
        paper(Size::Medium, "perplexity", 15.60),
        paper(Size::Large, "perplexity", 10.87),
        paper(Size::Xl, "perplexity", 8.63),
    ],
    parameter: None,
    few_shot: Some(ExampleSource::Items),
    prepare: prepare_last_words,
    measure: |_, results| measure_words(results),
};

/// Protocol that scores only the last token, which is often just the end of a word.
pub(super) const LAST_TOKEN: Protocol = Protocol {
    name: "lambada:last-token",
    about: "the last token, which may be only the end of a word: whether it is the most probable",
    source: "cybertronai/bflm, eval_lambada.py",
    dataset: DATASET,
    published: &[
        published(
            Size::Small,
            "acc",
            0.4667,
            "lambada:last-token",
            "cybertronai/bflm; huggingface/transformers#13761",
        ),
        ACC[0],
        ACC[1],
        ACC[2],
        ACC[3],
    ],
    prepare: |data, setting| prepare_with(data, setting, last_token),
    measure: |_, results| all_greedy(results).into_iter().collect(),
    ..DEFAULTS
};

/// Protocol that scores the last whitespace-delimited word, encoded separately from its context.
pub(super) const MEGATRON_STRICT: Protocol = Protocol {
    name: "lambada:megatron-strict",
    about: "the last word as delimited by whitespace, after a stripped context: whether each of its tokens is the most probable",
    source: "NVIDIA/Megatron-LM core_r0.9.0, tasks/zeroshot_gpt, --strict-lambada",
    dataset: DATASET,
    published: &ACC,
    prepare: |data, setting| prepare_with(data, setting, white_space_word),
    measure: |_, results| all_greedy(results).into_iter().collect(),
    ..DEFAULTS
};

/// Protocol that generates the last word greedily without stop words, as the paper describes.
pub(super) const STOP_WORDS: Protocol = Protocol {
    name: "lambada:stop-words",
    about: "the last word, generated greedily in up to 6 tokens, none of which is a stop word",
    source: "cybertronai/bflm, eval_lambada_slow.py",
    dataset: DATASET,
    published: &[
        published(Size::Small, "acc", 0.4198, "lambada:stop-words", "cybertronai/bflm"),
        ACC[0],
        ACC[1],
        ACC[2],
        ACC[3],
    ],
    prepare: |data, setting| {
        let prepared = prepare_with(data, setting, written_word)?;
        Ok(Prepared { suppressed_tokens: stop_tokens(setting.vocabulary), ..prepared })
    },
    measure: |_, results| {
        let is_right =
            |result: &ItemResult| result.words.as_ref().is_some_and(|[right, written]| right == written);
        Metric::share("acc", results.iter().map(is_right)).into_iter().collect()
    },
    ..DEFAULTS
};

/// Accuracies from the paper, which used an unpublished stop-word filter.
const ACC: [Published; 4] = [
    paper(Size::Small, "acc", 0.4599),
    paper(Size::Medium, "acc", 0.5548),
    paper(Size::Large, "acc", 0.6012),
    paper(Size::Xl, "acc", 0.6324),
];

/// Function that builds an item from a passage.
type Make = fn(&Vocabulary, usize, &Record, &str) -> Result<PreparedItem, EvaluationError>;

fn prepare_with(data: &Data, setting: &Setting<'_>, make: Make) -> Result<Prepared, EvaluationError> {
    prepare_records(data, setting, data.records(), |index, record| {
        make(setting.vocabulary, index, record, &passage(record)?)
    })
}

/// Returns the passage: `text`, or `context` and `continuation` joined by a space.
fn passage(record: &Record) -> Result<String, DataError> {
    match last_field(record) {
        "text" => record.filled("text").map(str::to_owned),
        continuation => Ok(format!("{} {}", record.text("context")?, record.filled(continuation)?)),
    }
}

/// Returns the field that contains the last word.
fn last_field(record: &Record) -> &'static str {
    if record.has("continuation") && !record.has("text") { "continuation" } else { "text" }
}

/// Splits text into the part before the last word, and the word.
fn parts(text: &str) -> (&str, &str) {
    text.rsplit_once(' ').unwrap_or(("", text))
}

fn prepare_last_words(data: &Data, setting: &Setting<'_>) -> Result<Prepared, EvaluationError> {
    let mut examples = Examples::of_protocol(data, setting)?;
    // Two spaces: the harness adds its delimiter to the space that is already before the word.
    let example = |record: &Record| {
        let text = passage(record)?;
        let (context, word) = parts(&text);
        Ok::<_, EvaluationError>(format!("{context}  {word}\n\n"))
    };
    prepare_records(data, setting, data.records(), |index, record| {
        let text = passage(record)?;
        let (context, word) = parts(&text);
        let before = examples.as_mut().map(|examples| examples.before(record, example)).transpose()?;
        let context = format!("{}{context}", before.unwrap_or_default());
        // If the text ends in a space, the word is empty and the space itself is scored.
        let continuation = format!(" {word}");
        let field = last_field(record);
        let pair = Pair { field, context: &context, continuation: &continuation, measured: word };
        lm_eval::item(setting.vocabulary, index, record, &[pair], Some(0))
    })
}

/// Computes `acc`, and the `perplexity` of the scored tokens per item.
pub(super) fn measure_words(results: &[ItemResult]) -> Vec<Metric> {
    let perplexity = Ratio::of(texts(results).map(|word| (-word.logprob, 1)));
    let perplexity = perplexity.map(|nats| Metric::perplexity("perplexity", &nats));
    perplexity.into_iter().chain(all_greedy(results)).collect()
}

fn last_token(
    vocabulary: &Vocabulary,
    index: usize,
    record: &Record,
    text: &str,
) -> Result<PreparedItem, EvaluationError> {
    let ids = vocabulary.encode(strip(text))?;
    let last = ids.last().map(|id| vocabulary.token_bytes(*id)).unwrap_or_default();
    let first = ids.len().saturating_sub(1);
    let sequence = unsplit_sequence(vocabulary, record, last_field(record), ids, first)?;
    let choice = Choice::of(sequence, &String::from_utf8_lossy(&last));
    Ok(scored(index, record, vec![choice], Some(0)).into())
}

fn white_space_word(
    vocabulary: &Vocabulary,
    index: usize,
    record: &Record,
    text: &str,
) -> Result<PreparedItem, EvaluationError> {
    let word = text.split(detokenize::is_space).rfind(|word| !word.is_empty()).unwrap_or_default();
    if word.is_empty() {
        return Err(record.field_error(last_field(record), "expected a word, found none").into());
    }
    let before = text.rfind(word).map_or("", |start| &text[..start]);
    let mut ids = vocabulary.encode(strip(before))?;
    let first = ids.len();
    ids.extend(vocabulary.encode(&format!(" {word}"))?);
    let sequence = unsplit_sequence(vocabulary, record, last_field(record), ids, first)?;
    Ok(scored(index, record, vec![Choice::of(sequence, word)], Some(0)).into())
}

/// Number of tokens to generate for a word.
const WORD_TOKENS: usize = 6;

/// Builds an item whose expected word is the last one that [`basic_tokenizer`] finds.
///
/// The prompt is the passage without its last N characters, where N is the length of that word.
fn written_word(
    vocabulary: &Vocabulary,
    index: usize,
    record: &Record,
    text: &str,
) -> Result<PreparedItem, EvaluationError> {
    let text = strip(text);
    let Some(word) = basic_tokenizer::words(text).pop() else {
        return Err(record.field_error(last_field(record), "expected a word, found none").into());
    };
    let cut = text.char_indices().rev().nth(word.chars().count() - 1).map_or(0, |(start, _)| start);
    let prompt = vocabulary.encode(strip(&text[..cut]))?;
    let n_positions = vocabulary.config().n_positions;
    if prompt.is_empty() || prompt.len() + WORD_TOKENS > n_positions {
        let what = format!(
            "expected 1 to {} tokens before the last word (the model's context minus {WORD_TOKENS}), found {}",
            n_positions.saturating_sub(WORD_TOKENS),
            prompt.len()
        );
        return Err(record.field_error(last_field(record), &what).into());
    }
    let context_tokens = prompt.len();
    let work = Work::Write { prompt, tokens: WORD_TOKENS, word };
    Ok(Item { index, id: record.id(), group: None, context_tokens, work }.into())
}

/// Accuracy: the fraction of texts in which every scored token is the most probable one.
fn all_greedy(results: &[ItemResult]) -> Option<Metric> {
    Metric::share("acc", texts(results).map(|word| word.is_greedy))
}

/// Returns the tokens that form a complete stop word in lower case.
fn stop_tokens(vocabulary: &Vocabulary) -> Vec<u32> {
    let stop_words: HashSet<&str> = STOP_WORDS_OF_NLTK.split_whitespace().collect();
    let is_stop_word = |id: &u32| {
        std::str::from_utf8(&vocabulary.token_bytes(*id)).is_ok_and(|text| stop_words.contains(strip(text)))
    };
    (0..).take_while(|id| vocabulary.config().has_token(*id)).filter(is_stop_word).collect()
}

/// The 127 English stop words from older NLTK versions.
const STOP_WORDS_OF_NLTK: &str = "\
    i me my myself we our ours ourselves you your yours yourself yourselves he him his himself she her hers herself it its \
    itself they them their theirs themselves what which who whom this that these those am is are was were be been being have \
    has had having do does did doing a an the and but if or because as until while of at by for with about against between \
    into through during before after above below to from up down in out on off over under again further then once here there \
    when where why how all any both each few more most other some such no nor not only own same so than too very s t can \
    will just don should now";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stop_word_list_has_127_unique_words() {
        let words: HashSet<&str> = STOP_WORDS_OF_NLTK.split_whitespace().collect();
        assert_eq!((words.len(), STOP_WORDS_OF_NLTK.split_whitespace().count()), (127, 127));
    }
}
