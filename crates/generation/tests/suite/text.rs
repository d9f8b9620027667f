//! Tests that streaming shows only whole characters and only the text before a stop string.

use candle_gpt2_generation::{GenerationConfig, StopReason, TextGenerator, TextStream};
use candle_gpt2_testing::fixture_path;
use candle_gpt2_weights::{Checkpoint, LoadOptions, Tokenizer, load_tokenizer};

fn tokenizer() -> Tokenizer {
    load_tokenizer(fixture_path("tiny-checkpoint")).unwrap()
}

/// Splits characters of two, three and four bytes into tokens of one byte each.
#[test]
fn streaming_never_emits_partial_characters() {
    let tokenizer = tokenizer();
    let text =
        "naïve 日本語 🤗🤗 — £5 and a tail that is long enough to move the window several times over 🤗 é";
    let ids = tokenizer.encode(text, false).unwrap().get_ids().to_vec();
    assert!(ids.len() > 60, "the text is longer than the window");
    let mut stream = TextStream::new(&tokenizer);
    let mut streamed = String::new();
    for id in ids {
        let piece = stream.push(id).unwrap();
        assert!(!piece.contains('\u{FFFD}'), "{piece:?}");
        streamed.push_str(&piece);
        assert!(text.starts_with(&streamed));
    }
    assert_eq!(stream.finish().unwrap(), "");
    assert_eq!(streamed, text);
}

/// Invalid bytes decode as in transformers, at any position in the window.
#[test]
fn streamed_text_equals_whole_decoding_for_any_ids() {
    let tokenizer = tokenizer();
    for seed in 0..40u32 {
        let ids: Vec<u32> =
            (0..120).map(|index| (index * 7919 + seed * 104_729 + index * index * 31) % 300).collect();
        let mut stream = TextStream::new(&tokenizer);
        let mut streamed: String = ids.iter().map(|id| stream.push(*id).unwrap()).collect();
        streamed.push_str(&stream.finish().unwrap());
        assert_eq!(streamed, tokenizer.decode(&ids, true).unwrap(), "seed {seed}");
    }
}

/// Streams `text` token by token, with stop strings; returns the pieces and whether it was stopped.
fn pieces(text: &str, stop_strings: &[&str]) -> (Vec<String>, bool) {
    let tokenizer = tokenizer();
    let stop_strings: Vec<String> = stop_strings.iter().map(ToString::to_string).collect();
    let mut stream = TextStream::new(&tokenizer).with_stop_strings(&stop_strings);
    let mut pieces = Vec::new();
    for id in tokenizer.encode(text, false).unwrap().get_ids() {
        pieces.push(stream.push(*id).unwrap());
    }
    let is_stopped = stream.is_stopped();
    pieces.push(stream.finish().unwrap());
    (pieces, is_stopped)
}

/// Stop strings may span tokens and are never shown in part; see karpathy/nanoGPT#196.
#[test]
fn stream_ends_before_the_first_stop_string() {
    let text = "One line.\nUser: what? 🤗 and more";
    for (stop_strings, expected) in [
        (vec!["\nUser:"], "One line."),
        (vec!["more", "User"], "One line.\n"),
        (vec!["and", "\u{1F917}"], "One line.\nUser: what? "),
        (vec!["e.\nU"], "One lin"),
        (vec!["O"], ""),
        (vec!["e"], "On"),
    ] {
        let (pieces, is_stopped) = pieces(text, &stop_strings);
        assert_eq!((pieces.concat().as_str(), is_stopped), (expected, true), "{stop_strings:?}");
        let mut shown = String::new();
        for piece in pieces {
            shown.push_str(&piece);
            assert!(expected.starts_with(&shown), "{stop_strings:?} showed {shown:?}");
        }
    }
}

#[test]
fn partial_stop_string_is_emitted_at_the_end() {
    let text = "One line.\nUse 🤗";
    for stop_strings in [vec!["\nUser:"], vec!["🤗🤗"], vec!["lines", "ne line.\n\n"], vec![""]] {
        let (pieces, is_stopped) = pieces(text, &stop_strings);
        assert_eq!((pieces.concat().as_str(), is_stopped), (text, false), "{stop_strings:?}");
    }
}

/// Compares with a search that starts over for each piece.
///
/// The strings share prefixes and contain parts of each other.
#[test]
fn incremental_stop_search_equals_full_search() {
    let tokenizer = tokenizer();
    let ids_of = |text: &str| tokenizer.encode(text, false).unwrap().get_ids().to_vec();
    let parts: Vec<u32> = ["a", "b", "é", "🤗"].iter().flat_map(|text| ids_of(text)).collect();
    let stops = ["aab", "abab", "éa", "ba\u{e9}\u{e9}", "aaaa", "🤗é", "b\u{fffd}"];
    let (mut stopped, mut state) = (0, 1u64);
    let mut next = |limit: usize| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        usize::try_from(state >> 33).unwrap() % limit
    };
    for case in 0..400 {
        let stop_strings: Vec<String> =
            (0..1 + case % 3).map(|_| stops[next(stops.len())].to_owned()).collect();
        let ids: Vec<u32> = (0..30).map(|_| parts[next(parts.len())]).collect();
        let mut plain = TextStream::new(&tokenizer);
        let mut stream = TextStream::new(&tokenizer).with_stop_strings(&stop_strings);
        let (mut pending, mut is_stopped) = (String::new(), false);
        for id in ids {
            pending.push_str(&plain.push(id).unwrap());
            let found = stop_strings.iter().filter_map(|stop| pending.find(stop.as_str())).min();
            let partial =
                |start: &usize| stop_strings.iter().any(|stop| stop.starts_with(&pending[*start..]));
            let partial =
                pending.char_indices().map(|(start, _)| start).find(partial).unwrap_or(pending.len());
            let rest = pending.split_off(found.unwrap_or(partial));
            let shown = std::mem::replace(&mut pending, rest);
            let expected = if is_stopped { "" } else { &shown };
            assert_eq!(stream.push(id).unwrap(), expected, "{stop_strings:?}");
            is_stopped |= found.is_some();
            assert_eq!(stream.is_stopped(), is_stopped);
            if is_stopped {
                pending.clear();
            }
        }
        let rest = if is_stopped { String::new() } else { pending + &plain.finish().unwrap() };
        let found = stop_strings.iter().filter_map(|stop| rest.find(stop.as_str())).min();
        assert_eq!(stream.finish().unwrap(), rest[..found.unwrap_or(rest.len())], "{stop_strings:?}");
        stopped += usize::from(is_stopped);
    }
    assert!((50..350).contains(&stopped), "{stopped}");
}

/// Uses substrings of the model's output, which span several tokens, as stop strings.
#[test]
fn generation_ends_at_a_stop_string() {
    let folder = fixture_path("tiny-checkpoint");
    let model = Checkpoint::open(folder).unwrap().load(&LoadOptions::default(), &|_| ()).unwrap();
    let tokenizer = tokenizer();
    let text = |stop_strings: Vec<String>| {
        let config = GenerationConfig { max_new_tokens: 30, stop_strings, ..GenerationConfig::default() };
        let mut pieces = TextGenerator::new(&model, &[289, 221, 299], &config, &tokenizer).unwrap();
        let text: String = pieces.by_ref().collect::<Result<_, _>>().unwrap();
        (text, pieces.stop_reason().unwrap(), pieces.ids().len())
    };
    let (whole, reason, tokens) = text(Vec::new());
    assert_eq!((reason, tokens), (StopReason::MaxNewTokens, 30));
    let starts: Vec<usize> = whole.char_indices().map(|(start, _)| start).collect();
    for first in 1..starts.len() - 4 {
        let stop = &whole[starts[first]..starts[first + 3]];
        let found = whole.find(stop).unwrap();
        let (shown, reason, tokens) = text(vec![stop.to_owned()]);
        assert_eq!((shown.as_str(), reason), (&whole[..found], StopReason::StopString), "{stop:?}");
        assert!(tokens <= 30);
    }
}
