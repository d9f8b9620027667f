//! LAMBADA: position of the last word.

use candle_gpt2_evaluation::{Item, Work};

use super::{Model, choices, gold, only_sequence, owned};

fn line(text: &str) -> String {
    serde_json::json!({ "text": text }).to_string()
}

#[test]
fn lm_eval_splits_at_the_last_space() {
    let model = Model::built_in();
    let cases = [
        ("My lord, the king is dead", ("My lord, the king is", " dead")),
        // A line break does not end a word. Whitespace at the end of a context is scored with the word.
        ("the king\nis dead", ("the king\nis", " dead")),
        ("the king is\ndead", ("the king", " is\ndead")),
        ("the king is  dead", ("the king is", "  dead")),
        ("the king is\n dead", ("the king is", "\n dead")),
        ("“the king” is dead!”", ("“the king” is", " dead!”")),
        // Nothing follows the last space, so the space is scored.
        ("the king is dead ", ("the king is dead", " ")),
    ];
    for (text, expected) in cases {
        let item = model.item("lambada:lm-eval", &line(text));
        assert_eq!(model.pieces(&item), owned(&[expected]), "{text:?}");
        assert_eq!((gold(&item), item.context_tokens), (Some(0), model.ids(expected.0).len()));
    }
}

#[test]
fn one_word_passage_follows_the_bos_token() {
    let model = Model::built_in();
    let item = model.item("lambada:lm-eval", &line("dead"));
    let sequence = only_sequence(&choices(&item)[0]);
    assert_eq!((sequence.ids[0], sequence.first), (0, 1));
    assert_eq!(sequence.ids[1..], model.ids(" dead"));
}

#[test]
fn word_tokens_start_at_the_context_length() {
    let model = Model::built_in();
    // The context's own token count decides which tokens of the whole text are scored.
    let item = model.item("lambada:lm-eval", &line("a b c\u{a0} d"));
    let context = model.ids("a b c");
    let whole = model.ids("a b c\u{a0} d");
    let sequence = only_sequence(&choices(&item)[0]);
    assert_eq!(sequence.ids, [context.as_slice(), &whole[context.len()..]].concat());
    assert_eq!(sequence.first, context.len());
}

#[test]
fn whole_and_split_passages_are_equivalent() {
    let model = Model::built_in();
    let text = line("My lord, the king is dead");
    let parts = r#"{"context": "My lord, the king is", "continuation": "dead"}"#;
    for protocol in ["lambada:lm-eval", "lambada:last-token", "lambada:megatron-strict", "lambada:stop-words"]
    {
        assert_eq!(model.item(protocol, &text), model.item(protocol, parts), "{protocol}");
    }
}

#[test]
fn last_token_may_be_part_of_a_word() {
    let model = Model::built_in();
    let item = model.item("lambada:last-token", &line(" \u{1f}the king is murderously\n"));
    let ids = model.ids("the king is murderously");
    let choice = &choices(&item)[0];
    let sequence = only_sequence(choice);
    assert_eq!((&sequence.ids, sequence.first), (&ids, ids.len() - 1));
    assert_eq!(choice.bytes, model.text(&ids[ids.len() - 1..]).len());
    assert!(choice.bytes < "murderously".len(), "the word is several tokens");
}

#[test]
fn megatron_splits_at_whitespace_and_strips_the_context() {
    let model = Model::built_in();
    let cases = [
        ("the king is\ndead", ("the king is", " dead")),
        ("\tthe king  is \u{a0} dead \n", ("the king  is", " dead")),
        // The context ends before the last occurrence of the word.
        ("so is his", ("so is", " his")),
    ];
    for (text, expected) in cases {
        let item = model.item("lambada:megatron-strict", &line(text));
        assert_eq!(model.pieces(&item), owned(&[expected]), "{text:?}");
    }
}

#[test]
fn expected_word_is_the_last_bert_token() {
    let model = Model::built_in();
    let cases = [
        (" the king is Dead ", "the king is", "dead"),
        ("the king is mother-in-law", "the king is mother-in-", "law"),
        ("he said \"yes.\"", "he said \"yes.", "\""),
        ("the king saw Zoë", "the king saw", "zoe"),
    ];
    for (text, prompt, word) in cases {
        let item = model.item("lambada:stop-words", &line(text));
        let expected = Work::Write { prompt: model.ids(prompt), tokens: 6, word: word.to_owned() };
        let context_tokens = model.ids(prompt).len();
        assert_eq!(item, Item { index: 0, id: None, group: None, context_tokens, work: expected });
    }
}

#[test]
fn stop_word_tokens_are_suppressed() {
    let model = Model::built_in();
    let prepared = model.prepare("lambada:stop-words", "items.jsonl", &line("the king is dead"));
    let suppressed: Vec<String> = prepared.suppressed_tokens.iter().map(|id| model.text(&[*id])).collect();
    let has = |token: &str| suppressed.iter().any(|known| known == token);
    assert!(has(" the") && has("he") && has("s") && has(" his"), "{suppressed:?}");
    assert!(!has(" ball") && !has(" The") && !has("."), "{suppressed:?}");
    let other = model.prepare("lambada:lm-eval", "items.jsonl", &line("the king is dead"));
    assert!(other.suppressed_tokens.is_empty());
}
