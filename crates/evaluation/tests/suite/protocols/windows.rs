//! Texts in windows: every token is scored once, in the same window as in the published script.

use std::ops::Range;

use candle_gpt2_engine::Silent;
use candle_gpt2_evaluation::{Data, Prepared, Setting, named};
use candle_gpt2_generation::Sequence;

use super::{Model, N_POSITIONS, choices, data, only_sequence};

/// Two invented articles, the first one much longer than the context.
fn articles() -> String {
    let sentence =
        " The king 's ship @-@ yard ( in Dover ) had 1 @,@ 200 men ; \" they sang \" , he said . \n";
    let long = sentence.repeat(30);
    format!(
        " \n = The Yard = \n \n{long} \n = = Its men = = \n \n{long} = = = Names = = = \n \n{sentence} \n = Dover = \n \n{sentence}{sentence} \n"
    )
}

/// A text of exactly `tokens` tokens, at most 1,500.
fn text_of(model: &Model, tokens: usize) -> String {
    let ids = model.ids(&" door ball sun".repeat(500));
    let text = model.text(&ids[..tokens]);
    assert_eq!(model.ids(&text).len(), tokens);
    text
}

fn sequences(prepared: &Prepared) -> Vec<&Sequence> {
    prepared.items.iter().flat_map(choices).flat_map(|choice| &choice.sequences).collect()
}

/// Checks that the sequences are these windows of `ids`, each preceded by the optional `prefix`.
///
/// A window is a pair: the range of tokens that are read, and the range of tokens that are scored.
#[track_caller]
fn scored(
    ids: &[u32],
    windows: &[(Range<usize>, Range<usize>)],
    sequences: &[&Sequence],
    prefix: Option<u32>,
) {
    let found: Vec<Sequence> = sequences.iter().map(|sequence| (*sequence).clone()).collect();
    let expected = |(read, scored): &(Range<usize>, Range<usize>)| {
        let before: Vec<u32> = prefix.into_iter().collect();
        Sequence {
            ids: [before.as_slice(), &ids[read.clone()]].concat(),
            first: scored.start - read.start + before.len(),
        }
    };
    assert!(windows.iter().all(|(read, scored)| read.end == scored.end));
    assert_eq!(found, windows.iter().map(expected).collect::<Vec<_>>());
}

/// Checks that the windows score each position of a range once and in order.
#[track_caller]
fn assert_partition(windows: &[(Range<usize>, Range<usize>)], whole: Range<usize>) {
    assert!(windows.iter().flat_map(|(_, scored)| scored.clone()).eq(whole));
}

/// Reimplements `get_rolling_token_windows` with one token of context.
///
/// The function's target ranges are adjacent, and its last window has as many tokens as the others.
#[test]
fn lm_eval_last_window_is_full() {
    let model = Model::built_in();
    for tokens in [1, 511, 512, 513, 1024, 1025, 1400] {
        let text = text_of(&model, tokens);
        let prepared = model.prepare("wikitext:lm-eval", "a.txt", &text);
        let found = sequences(&prepared);
        let ids = model.ids(&text);
        assert_eq!(found[0].ids, [&[0], &ids[..tokens.min(N_POSITIONS)]].concat());
        assert_eq!(found[0].first, 1);
        let later: Vec<_> = (N_POSITIONS..tokens)
            .step_by(N_POSITIONS)
            .map(|begin| {
                let end = tokens.min(begin + N_POSITIONS);
                (end - N_POSITIONS - 1..end, begin..end)
            })
            .collect();
        scored(&ids, &later, &found[1..], None);
        assert_partition(&later, N_POSITIONS.min(tokens)..tokens);
        assert!(found[1..].iter().all(|sequence| sequence.ids.len() == N_POSITIONS + 1));
    }
}

#[test]
fn pages_are_detokenized_but_count_original_bytes() {
    let model = Model::built_in();
    let prepared = model.prepare("wikitext:lm-eval", "wiki.test.raw", &articles());
    let [yard, dover] = prepared.items.as_slice() else { panic!("{} pages", prepared.items.len()) };
    let dover_page = articles().split_once(" = Dover").map(|(_, rest)| format!(" = Dover{rest}")).unwrap();
    let choice = &choices(dover)[0];
    let sentence = "The king's ship-yard (in Dover) had 1,200 men; \"they sang\", he said. ";
    let expected = format!(" = Dover =\n\n{sentence}\n{sentence}\n\n").replace(". \n", ".\n");
    let sequence = only_sequence(choice);
    assert_eq!(model.text(&sequence.ids[1..]), expected);
    assert_eq!((choice.bytes, choice.characters), (dover_page.len(), dover_page.chars().count()));
    // The empty parts before and after the page's outer whitespace count as words.
    assert_eq!(choice.words, Some(dover_page.split_whitespace().count() + 2));
    let yard_bytes = articles().len() - dover_page.len() - " \n".len() - "\n".len();
    assert_eq!(choices(yard)[0].bytes, yard_bytes);
    assert!(choices(yard)[0].sequences.len() > 2);
    assert_eq!((yard.context_tokens, dover.context_tokens), (1, 1));
}

#[test]
fn hub_rows_and_pages_equal_the_raw_file() {
    let model = Model::built_in();
    let text = articles();
    let json = |field: &str, value: &str| serde_json::json!({ field: value }).to_string() + "\n";
    let rows: String =
        text.split_inclusive('\n').map(|line| json("text", if line == " \n" { "" } else { line })).collect();
    for protocol in ["wikitext:lm-eval", "wikitext:hf-100", "wikitext:megatron", "wikitext:llama.cpp"] {
        let from_file = model.prepare(protocol, "wiki.test.raw", &text);
        let from_rows = model.prepare(protocol, "rows.jsonl", &rows);
        assert_eq!((from_rows.items, from_rows.totals), (from_file.items, from_file.totals), "{protocol}");
    }
    let (first, second) = text.split_once("\n = Dover").unwrap();
    let pages =
        json("page", first.strip_prefix(" \n").unwrap()) + &json("page", &format!(" = Dover{second}"));
    let from_pages = model.prepare("wikitext:lm-eval", "pages.jsonl", &pages);
    assert_eq!(from_pages.items, model.prepare("wikitext:lm-eval", "wiki.test.raw", &text).items);
}

/// Reimplements the loop in transformers' documentation: windows with their target counts.
fn hf_script(seq_len: usize, stride: usize) -> Vec<(Range<usize>, usize)> {
    let mut windows = Vec::new();
    let mut prev_end_loc = 0;
    for begin_loc in (0..seq_len).step_by(stride) {
        let end_loc = seq_len.min(begin_loc + N_POSITIONS);
        windows.push((begin_loc..end_loc, end_loc - prev_end_loc));
        prev_end_loc = end_loc;
        if end_loc == seq_len {
            break;
        }
    }
    windows
}

#[test]
fn hf_windows_match_the_script() {
    let model = Model::built_in();
    for tokens in [2, 512, 513, 1024, 1025, 1400] {
        for stride in [1, 100, 511, 512] {
            let text = text_of(&model, tokens);
            let prepared = model.prepare(&format!("wikitext:hf-{stride}"), "a.txt", &text);
            // The label at the first position of a window is unscored. A window without other labels is
            // dropped.
            let windows: Vec<_> = hf_script(tokens, stride)
                .into_iter()
                .map(|(read, targets)| (read.clone(), (read.end - targets).max(read.start + 1)..read.end))
                .filter(|(_, scored)| !scored.is_empty())
                .collect();
            scored(&model.ids(&text), &windows, &sequences(&prepared), None);
            let all: usize = windows.iter().map(|(_, scored)| scored.len()).sum();
            let bytes: usize = prepared.items.iter().map(|item| choices(item)[0].bytes).sum();
            if stride < N_POSITIONS {
                assert_partition(&windows, 1..tokens);
                assert_eq!((all, bytes), (tokens - 1, text.len() - model.text(&model.ids(&text)[..1]).len()));
            }
            assert_eq!(prepared.totals.tokens, windows.last().unwrap().0.end);
        }
    }
}

#[test]
fn hf_joins_rows_with_two_line_breaks() {
    let model = Model::built_in();
    let prepared = model.prepare("wikitext:hf-512", "a.txt", " \n = A = \n \u{a0}\n x\n");
    assert_eq!(model.text(&only_sequence(&choices(&prepared.items[0])[0]).ids), "\n\n = A = \n\n\n\n\n x\n");
}

/// Reimplements Megatron's `_LMDataset`.
///
/// Every window has at most as many targets as the context has positions. The first window scores all of
/// its targets, and each later window only its last `stride` targets, or fewer at the end of the text.
#[test]
fn megatron_windows_match_its_dataset() {
    let model = Model::built_in();
    for tokens in [2, 512, 513, 514, 1025, 1400] {
        for stride in [1, 32, 100, 512] {
            let text = text_of(&model, tokens);
            let name = format!("wikitext:megatron-{stride}");
            let prepared = model.prepare(&name, "a.txt", &text);
            let targets = tokens - 1;
            let sequences_of_dataset = targets.saturating_sub(stride).div_ceil(stride) + 1;
            let windows: Vec<_> = (0..sequences_of_dataset)
                .map(|index| {
                    let begin = index * stride;
                    let end = tokens.min(begin + N_POSITIONS + 1);
                    let masked = if index == 0 || stride == N_POSITIONS { 0 } else { N_POSITIONS - stride };
                    (begin..end, begin + 1 + masked..end)
                })
                .filter(|(_, scored)| !scored.is_empty())
                .collect();
            scored(&model.ids(&text), &windows, &sequences(&prepared), None);
            assert_partition(&windows, 1..tokens);
            assert_eq!(prepared.totals.tokens, tokens);
        }
    }
    let default = model.prepare("wikitext:megatron", "a.txt", &articles());
    assert_eq!(default.items, model.prepare("wikitext:megatron-32", "a.txt", &articles()).items);
    assert_eq!(default.totals.words, articles().trim().split(' ').count());
}

fn llama_cpp(model: &Model, context: Option<usize>, text: &str) -> Result<Prepared, String> {
    let setting = Setting { context, ..Setting::new(model.vocabulary(), &Silent) };
    let protocol = named("wikitext:llama.cpp").unwrap().0;
    (protocol.prepare)(&data("a.txt", text), &setting).map_err(|error| error.to_string())
}

#[test]
fn llama_cpp_scores_the_second_half_of_each_chunk() {
    let model = Model::built_in();
    let text = text_of(&model, 1400);
    for context in [3, 10, 11, 100, 512] {
        let prepared = llama_cpp(&model, Some(context), &format!("{text}\n")).unwrap();
        let chunks = 1400 / context;
        // Each chunk has `n_ctx - 1 - n_ctx / 2` targets, predicted by the last rows of logits except the
        // final one.
        let per_chunk = context - 1 - context / 2;
        let windows: Vec<_> = (1..=chunks)
            .map(|chunk| {
                (chunk * context - context..chunk * context, chunk * context - per_chunk..chunk * context)
            })
            .collect();
        scored(&model.ids(&text), &windows, &sequences(&prepared), None);
        assert!(prepared.notes.is_empty());
    }
    let prepared = llama_cpp(&model, None, &text).unwrap();
    assert_eq!(prepared.items, llama_cpp(&model, Some(512), &text).unwrap().items);
    assert!(prepared.notes.is_empty(), "llama.cpp's windows have 512 tokens too");
    let shorter = llama_cpp(&Model::tiny(), None, &text).unwrap();
    assert_eq!(shorter.notes, ["windows have 48 tokens (the model's context) instead of llama.cpp's 512"]);
}

#[test]
fn llama_cpp_needs_two_chunks_of_at_least_three_tokens() {
    let model = Model::built_in();
    assert!(llama_cpp(&model, Some(100), &text_of(&model, 200)).is_ok());
    assert_eq!(
        llama_cpp(&model, Some(100), &text_of(&model, 199)).unwrap_err(),
        "a.txt: expected at least 200 tokens, twice the context of 100, found 199; a shorter --context needs fewer"
    );
    for context in [0, 2, 513] {
        assert_eq!(
            llama_cpp(&model, Some(context), &text_of(&model, 600)).unwrap_err(),
            format!("`context`: expected from 3 to 512 tokens (the model's context), found {context}")
        );
    }
}

#[test]
fn text_bits_scores_every_token_after_bos() {
    let model = Model::built_in();
    for tokens in [1, 511, 512, 513, 767, 768, 769, 1400] {
        for (name, stride) in
            [("text:bits", 256), ("text:bits-1", 1), ("text:bits-100", 100), ("text:bits-512", 512)]
        {
            let text = text_of(&model, tokens);
            let prepared = model.prepare(name, "a.txt", &text);
            let mut windows = vec![];
            let mut counted = 0;
            for begin in (0..tokens).step_by(stride) {
                let end = tokens.min(begin + N_POSITIONS);
                if counted < end {
                    windows.push((begin..end, counted..end));
                }
                counted = end;
            }
            scored(&model.ids(&text), &windows, &sequences(&prepared), Some(0));
            assert_partition(&windows, 0..tokens);
            let sum = |count: fn(&candle_gpt2_evaluation::Choice) -> usize| -> usize {
                prepared.items.iter().map(|item| count(&choices(item)[0])).sum()
            };
            assert_eq!(
                (sum(|window| window.bytes), sum(|window| window.characters)),
                (text.len(), text.len())
            );
            assert_eq!((prepared.totals.tokens, prepared.totals.words), (tokens, text.split(' ').count()));
        }
    }
}

#[test]
fn characters_are_counted_once_across_windows() {
    let model = Model::built_in();
    let text = "Zoë “said” 🦀🦀 ".repeat(40);
    for name in ["text:bits-512", "text:bits-7"] {
        let prepared = model.prepare(name, "a.txt", &text);
        let characters: usize = prepared.items.iter().map(|item| choices(item)[0].characters).sum();
        assert_eq!(characters, text.chars().count());
    }
}

#[test]
fn limit_keeps_the_first_windows_and_their_totals() {
    let model = Model::built_in();
    let text = text_of(&model, 1400);
    let first = |protocol: &str| {
        let all = model.prepare(protocol, "a.txt", &text);
        let two = model.try_prepare(protocol, Some(2), &data("a.txt", &text)).unwrap();
        assert_eq!(two.items, all.items[..2], "{protocol}");
        two.totals
    };
    let bits = first("text:bits");
    assert_eq!(bits.tokens, 768);
    assert_eq!(bits.words, model.text(&model.ids(&text)[..768]).split(' ').count());
    assert_eq!(first("wikitext:hf-100").tokens, 612);
    assert_eq!(first("wikitext:megatron").tokens, 1400);
    first("wikitext:llama.cpp");
}

#[test]
fn stride_beyond_the_context_is_rejected() {
    let model = Model::built_in();
    for name in ["wikitext:hf-513", "wikitext:megatron-513", "text:bits-513"] {
        let error = model.try_prepare(name, None, &data("a.txt", "a b")).unwrap_err();
        assert!(error.is_usage());
        assert_eq!(
            error.to_string(),
            "the number at the end of the protocol's name: expected from 1 to 512 tokens (the model's context), found 513"
        );
    }
}

#[test]
fn folder_with_several_files_is_not_a_text() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["a.jsonl", "b.jsonl"] {
        std::fs::write(folder.path().join(name), "{\"text\": \"a\"}").unwrap();
    }
    let data = Data::read(folder.path()).unwrap();
    let error = data.text().unwrap_err().to_string();
    assert!(error.ends_with("expected a single text file, found a folder with several files"), "{error}");
}

#[test]
fn text_records_are_scored_independently() {
    let model = Model::built_in();
    let prepared = |name: &str, contents: &str| model.try_prepare("text:bits", None, &data(name, contents));
    let texts = ["The king is dead.", "One day a cat ran."];
    let lines: String = texts.map(|text| format!("{}\n", serde_json::json!({ "text": text }))).concat();
    let together = prepared("texts.jsonl", &lines).unwrap();
    let alone = texts.map(|text| prepared("text.txt", text).unwrap());
    assert_eq!(together.items.len(), 2);
    assert_eq!(together.totals.tokens, alone.iter().map(|text| text.totals.tokens).sum::<usize>());
    for (item, alone) in together.items.iter().zip(&alone) {
        assert_eq!(item.work, alone.items[0].work);
    }
    assert_eq!(together.notes, [""; 0]);
    let error = prepared("texts.jsonl", "{\"story\": \"x\"}\n").unwrap_err().to_string();
    assert!(error.contains("texts.jsonl") && error.contains("text"), "{error}");
}
