//! WikiText-2 test articles: one text, split and normalized in four ways.
//!
//! The paper's results are per word of the original text, and comparable only with other results per
//! word.
//!
//! The data is `wiki.test.raw`, or the Hub's rows, which are its lines. A whitespace-only line is an
//! empty row on the Hub.

use std::borrow::Cow;

use candle_gpt2_generation::Sequence;
use serde_json::{Map, Value};

use super::llama_cpp::{encode_file, first_scored, window_length};
use super::lm_eval;
use super::shared::{DEFAULTS, PreparedItem, limit, paper, prepare_records, published, scored, unusable};
use super::text::{Window, stride, windows_as_items};
use crate::detokenize::{self, count_words, strip};
use crate::long_text::encode_text;
use crate::metric::{Ratio, texts};
use crate::protocol::{Dataset, Parameter};
use crate::{
    Choice, Data, EvaluationError, ItemResult, Metric, Prepared, Protocol, Record, Records, Setting, Size,
    StderrKind, Totals,
};

/// SHA-256 of `wiki.test.raw`.
const RAW: &[&str] = &["173c87a53759e0201f33e0ccf978e510c2042d7f2cb78229d9a50d79b9e7dd08"];
const LICENSE: &str = "CC BY-SA 3.0 and GFDL";
const ROWS: Dataset = Dataset {
    name: "WikiText-2 raw, test",
    hub: Some("Salesforce/wikitext/wikitext-2-raw-v1/test-00000-of-00001.parquet"),
    sha256: RAW,
    license: LICENSE,
};

/// Perplexity of each detokenized page, per word and byte of the original pages.
pub(super) const LM_EVAL: Protocol = Protocol {
    name: "wikitext:lm-eval",
    about: "separate pages, detokenized: perplexity per word and byte of the original pages, bits per byte",
    source: "lm-evaluation-harness 0.4.13, task wikitext",
    dataset: Dataset {
        name: "WikiText-2 raw, test, by pages",
        hub: Some("EleutherAI/wikitext_document_level/wikitext-2-raw-v1/wikitext-2-raw-v1-test.parquet"),
        sha256: RAW,
        license: LICENSE,
    },
    published: &[
        published(Size::Small, "word_perplexity", 37.3698, "wikitext:lm-eval", ML_BY_HAND),
        published(Size::Small, "byte_perplexity", 1.9682, "wikitext:lm-eval", ML_BY_HAND),
        published(Size::Small, "bits_per_byte", 0.9769, "wikitext:lm-eval", ML_BY_HAND),
        paper(Size::Small, "word_perplexity", 29.41),
        paper(Size::Medium, "word_perplexity", 22.76),
        paper(Size::Large, "word_perplexity", 19.93),
        paper(Size::Xl, "word_perplexity", 18.34),
    ],
    prepare: prepare_pages,
    measure: measure_pages,
    ..DEFAULTS
};

/// Perplexity per token of the whole text, in windows of one context each, `N` tokens apart.
pub(super) const HF: Protocol = Protocol {
    name: "wikitext:hf-N",
    about: "the whole text in windows N tokens apart: perplexity per token, as in transformers' documentation",
    source: "transformers, docs/source/en/perplexity.md since 2024-10",
    dataset: ROWS,
    published: &[
        published(
            Size::Small,
            "perplexity",
            29.94,
            "wikitext:hf-1024",
            "huggingface/transformers#13761, N 1024",
        ),
        published(
            Size::Large,
            "perplexity",
            19.44,
            "wikitext:hf-1024",
            "transformers, perplexity.md, N 1024",
        ),
        published(
            Size::Large,
            "perplexity",
            16.4443,
            "wikitext:hf-512",
            "transformers, perplexity.md, N 512",
        ),
    ],
    parameter: Some(Parameter { default: None, about: "distance in tokens between the starts of windows" }),
    few_shot: None,
    prepare: prepare_hf,
    measure: measure_hf,
};

/// Perplexity of the detokenized text in windows, per token and per word of the original text.
pub(super) const MEGATRON: Protocol = Protocol {
    name: "wikitext:megatron",
    about: "the whole text, detokenized, in windows N tokens apart: perplexity adjusted to words",
    source: "NVIDIA/Megatron-LM core_r0.9.0, tasks/zeroshot_gpt, --overlapping-eval N",
    dataset: ROWS,
    published: &[
        paper(Size::Small, "adjusted_perplexity", 29.41),
        paper(Size::Medium, "adjusted_perplexity", 22.76),
        paper(Size::Large, "adjusted_perplexity", 19.93),
        paper(Size::Xl, "adjusted_perplexity", 18.34),
    ],
    parameter: Some(Parameter {
        default: Some(32),
        about: "distance in tokens between the starts of windows",
    }),
    few_shot: None,
    prepare: prepare_megatron,
    measure: measure_megatron,
};

/// Perplexity per token of the text in adjacent windows; only their second halves are scored.
pub(super) const LLAMA_CPP: Protocol = Protocol {
    name: "wikitext:llama.cpp",
    about: "adjacent windows of --context tokens (512), whose second half is scored: perplexity per token",
    source: "llama.cpp, tools/perplexity/perplexity.cpp, perplexity",
    dataset: ROWS,
    prepare: prepare_llama_cpp,
    measure: |_, results| {
        Ratio::of_tokens(results).map(|nats| Metric::perplexity("perplexity", &nats)).into_iter().collect()
    },
    ..DEFAULTS
};

const ML_BY_HAND: &str = "workofart/ml-by-hand; huggingface/transformers#13761";

fn prepare_pages(data: &Data, setting: &Setting<'_>) -> Result<Prepared, EvaluationError> {
    let has_pages = data.has_records()
        && data.records().next().is_some_and(|first| first.is_ok_and(|first| first.has("page")));
    let records = if has_pages { data.records() } else { pages(data)? };
    prepare_records(data, setting, records, |index, record| page(setting, index, record))
}

/// Splits the text into pages at first-level headings; each page has its first line number.
///
/// # Source
/// `wikitext_document_level.py` on the Hub, EleutherAI/wikitext_document_level.
fn pages(data: &Data) -> Result<Records<'static>, EvaluationError> {
    let text = raw_text(data)?;
    let mut pages: Vec<(usize, Vec<&str>)> = vec![(1, Vec::new())];
    for (index, line) in text.split('\n').enumerate() {
        if is_title(line) {
            pages.push((index + 1, Vec::new()));
        }
        if let Some((_, page)) = pages.last_mut() {
            page.push(line);
        }
    }
    let path = data.path().to_owned();
    let pages = pages.into_iter().map(|(line, lines)| (line, lines.join("\n")));
    let written: Vec<_> = pages.filter(|(_, page)| !strip(page).is_empty()).collect();
    Ok(Box::new(written.into_iter().map(move |(line, page)| {
        Ok(Record::new(path.clone(), line, Map::from_iter([("page".to_owned(), Value::from(page))])))
    })))
}

/// Whether a line is a first-level heading.
fn is_title(line: &str) -> bool {
    let line = line.replace("= = =", "===").replace("= =", "==");
    let line = strip(&line);
    line.starts_with("= ") && line.ends_with(" =")
}

fn page(setting: &Setting<'_>, index: usize, record: &Record) -> Result<PreparedItem, EvaluationError> {
    let page = record.filled("page")?;
    rolling(setting, index, record, (&detokenize::wikitext(page), page), "page")
}

/// Builds an item for the whole text, in windows that score all of its tokens.
///
/// `measured` is the text whose length normalizes the score, and `field` is its data field.
pub(super) fn rolling(
    setting: &Setting<'_>,
    index: usize,
    record: &Record,
    (text, measured): (&str, &str),
    field: &str,
) -> Result<PreparedItem, EvaluationError> {
    let ids = setting.vocabulary.encode(text)?;
    if ids.is_empty() {
        return Err(record.field_error(field, "expected text, found no tokens").into());
    }
    let prefix = lm_eval::prefix_token(setting.vocabulary)?;
    let sequences = rolling_windows(&ids, prefix, setting.vocabulary.config().n_positions);
    let words = Some(count_words(measured));
    let choice = Choice { sequences, characters: measured.chars().count(), bytes: measured.len(), words };
    Ok(scored(index, record, vec![choice], None).into())
}

/// Splits tokens into windows that each score `n_positions` tokens, after one token of context.
///
/// The last window has the same length and scores the remaining tokens.
fn rolling_windows(ids: &[u32], prefix: u32, n_positions: usize) -> Vec<Sequence> {
    let window = |begin: usize| {
        let end = ids.len().min(begin + n_positions);
        let known = end.saturating_sub(n_positions + 1);
        match begin {
            0 => Sequence { ids: [&[prefix], &ids[..end]].concat(), first: 1 },
            _ => Sequence { ids: ids[known..end].to_vec(), first: begin - known },
        }
    };
    (0..ids.len()).step_by(n_positions).map(window).collect()
}

pub(super) fn measure_pages(_: &Totals, results: &[ItemResult]) -> Vec<Metric> {
    let words = Ratio::of_texts(results, |page| page.words.unwrap_or(0));
    let bytes = Ratio::of_texts(results, |page| page.bytes);
    let figures = [
        words.map(|nats| Metric::perplexity("word_perplexity", &nats)),
        bytes.map(|nats| Metric::perplexity("byte_perplexity", &nats)),
        bytes.map(|nats| Metric::bits("bits_per_byte", &nats)),
    ];
    figures.into_iter().flatten().collect()
}

fn prepare_hf(data: &Data, setting: &Setting<'_>) -> Result<Prepared, EvaluationError> {
    let n_positions = setting.vocabulary.config().n_positions;
    let stride = stride(setting.parameter, n_positions)?;
    let ids = encode_text(setting, &rows(data)?.join("\n\n"))?;
    let end_of = |index: usize| ids.len().min(index * stride + n_positions);
    let window = |index: usize| {
        let begin = index * stride;
        let end = end_of(index);
        let new = index.checked_sub(1).map_or(0, end_of);
        // The first token of a window has no context, so it is not scored even if it is new.
        let scored = new.max(begin + 1)..end;
        let sequence = || Sequence { ids: ids[begin..end].to_vec(), first: scored.start - begin };
        (new < end)
            .then(|| (scored.start < end).then(|| Window { sequence: sequence(), scored: scored.clone() }))
    };
    let windows: Vec<Window> = (0..).map_while(window).flatten().take(limit(setting)?).collect();
    let tokens = windows.last().map_or(0, |window| window.scored.end);
    some_windows(data, setting, &ids, windows, Totals { tokens, words: 0 })
}

/// Computes the script's `perplexity`, and `token_perplexity`, the mean over all scored tokens.
///
/// The script weights each window by its number of labels minus one. In overlapping windows, the first
/// token is not a label, so this weight is one too low.
fn measure_hf(totals: &Totals, results: &[ItemResult]) -> Vec<Metric> {
    let scored: usize = texts(results).map(|window| window.tokens).sum();
    // In adjacent windows, each window's first token is a label, but is not scored. In overlapping windows,
    // this applies only to the text's first token.
    let is_side_by_side = totals.tokens > scored + 1;
    let weighted = texts(results).enumerate().map(|(index, window)| {
        let weight = window.tokens - usize::from(index > 0 && !is_side_by_side && window.tokens > 0);
        (-window.logprob / window.tokens.max(1) as f64 * weight as f64, weight)
    });
    let figures = [
        Ratio::of(weighted).map(|nats| Metric::perplexity("perplexity", &nats)),
        Ratio::of_texts(results, |window| window.tokens)
            .map(|nats| Metric::perplexity("token_perplexity", &nats)),
    ];
    figures.into_iter().flatten().collect()
}

fn prepare_megatron(data: &Data, setting: &Setting<'_>) -> Result<Prepared, EvaluationError> {
    let n_positions = setting.vocabulary.config().n_positions;
    let stride = stride(setting.parameter, n_positions)?;
    let text = raw_text(data)?;
    let ids = encode_text(setting, &detokenize::wikitext(&text))?;
    let window = |index: usize| {
        let begin = index * stride;
        let end = ids.len().min(begin + n_positions + 1);
        let scored = if index == 0 { 1 } else { begin + n_positions - stride + 1 };
        let sequence = || Sequence { ids: ids[begin..end].to_vec(), first: scored - begin };
        (scored < end).then(|| Window { sequence: sequence(), scored: scored..end })
    };
    let windows: Vec<Window> = (0..).map_while(window).take(limit(setting)?).collect();
    // Python's `text.strip().split(" ")`: splits at every space, and at no other whitespace.
    let words = strip(&text).split(' ').count();
    some_windows(data, setting, &ids, windows, Totals { tokens: ids.len(), words })
}

/// Megatron-LM caps perplexities at `exp(20)`.
const LARGEST_EXPONENT: f64 = 20.0;

fn measure_megatron(totals: &Totals, results: &[ItemResult]) -> Vec<Metric> {
    let Some(nats) = Ratio::of_texts(results, |window| window.tokens) else { return Vec::new() };
    let capped = |name, nats: Ratio| match nats.value > LARGEST_EXPONENT {
        true => Metric {
            stderr: None,
            stderr_kind: StderrKind::None,
            ..Metric::perplexity(name, &Ratio { value: LARGEST_EXPONENT, ..nats })
        },
        false => Metric::perplexity(name, &nats),
    };
    let perplexity = capped("perplexity", nats);
    // Exclude the first token and the first word, which have no context.
    let [tokens, words] = [totals.tokens, totals.words].map(|count| count.saturating_sub(1) as f64);
    if words == 0.0 {
        return vec![perplexity];
    }
    let scale = tokens / words;
    let per_word =
        Ratio { value: nats.value * scale, stderr: nats.stderr.map(|stderr| stderr * scale), ..nats };
    vec![perplexity, capped("adjusted_perplexity", per_word)]
}

fn prepare_llama_cpp(data: &Data, setting: &Setting<'_>) -> Result<Prepared, EvaluationError> {
    let (context, note) = window_length(setting)?;
    let ids = encode_file(setting, &raw_text(data)?)?;
    if ids.len() < 2 * context {
        let what = format!(
            "expected at least {} tokens, twice the context of {context}, found {}; a shorter --context needs fewer",
            2 * context,
            ids.len()
        );
        return Err(unusable(data, what));
    }
    // The model does not read a window's last token, which is only scored.
    let first = first_scored(context);
    let window = |(index, ids): (usize, &[u32])| {
        let begin = index * context;
        Window { sequence: Sequence { ids: ids.to_vec(), first }, scored: begin + first..begin + context }
    };
    let windows: Vec<_> = ids.chunks_exact(context).enumerate().map(window).take(limit(setting)?).collect();
    let mut prepared = some_windows(data, setting, &ids, windows, Totals { tokens: ids.len(), words: 0 })?;
    prepared.notes.extend(note);
    Ok(prepared)
}

fn some_windows(
    data: &Data,
    setting: &Setting<'_>,
    ids: &[u32],
    windows: Vec<Window>,
    totals: Totals,
) -> Result<Prepared, EvaluationError> {
    if windows.is_empty() {
        return Err(unusable(data, format!("expected text of at least 2 tokens, found {}", ids.len())));
    }
    let items = windows_as_items(setting.vocabulary, ids, windows);
    Ok(Prepared { items, totals, ..Prepared::default() })
}

/// Returns the text of the file, or the concatenated rows from the Hub.
fn raw_text(data: &Data) -> Result<Cow<'_, str>, EvaluationError> {
    if !data.has_records() {
        return Ok(Cow::Borrowed(data.text()?));
    }
    let line = |row: String| if row.is_empty() { " \n".to_owned() } else { row };
    let lines: Vec<String> = rows_of_records(data)?.into_iter().map(line).collect();
    Ok(Cow::Owned(lines.concat()))
}

/// Returns rows as on the Hub: lines with their line breaks, or empty for whitespace-only lines.
fn rows(data: &Data) -> Result<Vec<String>, EvaluationError> {
    if data.has_records() {
        return rows_of_records(data);
    }
    let row = |line: &str| if strip(line).is_empty() { String::new() } else { line.to_owned() };
    Ok(data.text()?.split_inclusive('\n').map(row).collect())
}

fn rows_of_records(data: &Data) -> Result<Vec<String>, EvaluationError> {
    let rows: Vec<String> =
        data.records().map(|row| row?.text("text").map(str::to_owned)).collect::<Result<_, _>>()?;
    if rows.is_empty() {
        Err(unusable(data, "expected rows with a field `text`, found none"))
    } else {
        Ok(rows)
    }
}
