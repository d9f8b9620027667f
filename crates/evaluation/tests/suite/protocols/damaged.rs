//! Invalid entries: each error names its file, line and field, and the items before it are kept.

use candle_gpt2_evaluation::EvaluationError;

use super::{Model, data};

/// Valid entries, each followed by mistakes: protocol, replaced text, replacement, expected error.
const MISTAKES: &str = r#"{"text": "the king is dead"}
lambada:lm-eval | "text": "the king is dead" | "body": 1 | field `text`: missing; available fields: `body`
lambada:lm-eval | "the king is dead" | [] | field `text`: expected a string, found []
lambada:lm-eval | the king is dead |  | field `text`: expected a non-empty string
lambada:lm-eval | the king is dead | \n a | field `text`: expected a token before the scored text, found none
lambada:lm-eval | "text" | "continuation" | field `context`: missing; available fields: `continuation`
lambada:megatron-strict | the king is dead | \u0020\n | field `text`: expected a word, found none
lambada:megatron-strict | the king is dead | dead | field `text`: expected a token before the scored text, found none
lambada:last-token | the king is dead | a | field `text`: expected a token before the scored text, found none
lambada:stop-words | the king is dead | \u0020 | field `text`: expected a word, found none
lambada:stop-words | the king is dead | dead | field `text`: expected 1 to 506 tokens before the last word (the model's context minus 6), found 0
{"goal": "g", "sol1": "a", "sol2": "b", "label": 1}
piqa:lm-eval | "label": 1 | "label": 2 | field `label`: expected a number from 0 to 1, found 2
piqa:lm-eval | "label": 1 | "label": -1 | field `label`: expected a number from 0 to 1, found -1
piqa:lm-eval | "b" | "" | field `sol2`: expected a non-empty string
piqa:lm-eval | "goal" | "aim" | field `goal`: missing; available fields: `aim`, `label`, `sol1`, `sol2`
{"question": "q", "choices": {"text": ["a", "b"], "label": ["A", "B"]}, "answerKey": "A"}
arc-easy:lm-eval | "answerKey": "A" | "answerKey": "E" | field `answerKey`: expected one of A, B, found "E"
arc-easy:lm-eval | ["A", "B"] | ["A"] | field `choices.label`: expected 2 labels, one for each text, found 1
arc-challenge:lm-eval | ["a", "b"] | ["a", ""] | field `choices.text[1]`: expected a non-empty string
arc-challenge:lm-eval | {"text": ["a", "b"], "label": ["A", "B"]} | 7 | field `choices`: expected a list of objects, found 7
{"question_stem": "q", "choices": {"text": ["a", "b"], "label": ["A", "B"]}, "answerKey": "A"}
openbookqa:lm-eval | "q" | "" | field `question_stem`: expected a non-empty string
openbookqa:lm-eval | "question_stem": "q" | "question": {"stem": 1} | field `question.stem`: expected a string, found 1
{"support": "", "question": "q", "distractor1": "a", "distractor2": "b", "distractor3": "c", "correct_answer": "d"}
sciq:lm-eval | "distractor2" | "distractor4" | field `distractor2`: missing; available fields: `correct_answer`, `distractor1`, `distractor3`, `distractor4`, `question`, `support`
sciq:lm-eval | "d" | "" | field `correct_answer`: expected a non-empty string
{"sentence": "a _ b", "option1": "x", "option2": "y", "answer": "1"}
winogrande:lm-eval | a _ b | a b | field `sentence`: expected text with a gap, found no `_`
winogrande:lm-eval | "1" | "0" | field `answer`: expected a number from 1 to 2, found "0"
winogrande:lm-eval | "1" | "" | field `answer`: expected a number from 1 to 2, found ""
winogrande:lm-eval | "x" | "" | field `option1`: expected a non-empty string
{"sentence_good": "a", "sentence_bad": "b"}
blimp:lm-eval | "b" | "" | field `sentence_bad`: expected a non-empty string
{"activity_label": "l", "ctx_a": "a", "ctx_b": "b", "ctx": "a b", "endings": ["w", "x", "y", "z"], "label": 3}
hellaswag:lm-eval | "label": 3 | "label": 4 | field `label`: expected a number from 0 to 3, found 4
hellaswag:lm-eval | "label": 3 | "label": "" | field `label`: expected a number from 0 to 3, found ""
hellaswag:lm-eval | , "z"] | ] | field `endings`: expected 4 texts, found 3
hellaswag:llm.c | "y" | "" | field `endings[2]`: expected a non-empty string
hellaswag:llm.c | "ctx": "a b" | "ctx": "" | field `ctx`: expected a non-empty string
{"query": "q", "choices": ["a", "b", "c", "d"], "gold": 3}
hellaswag:lm-eval | "gold": 3 | "gold": 9 | field `gold`: expected a number from 0 to 3, found 9
hellaswag:lm-eval | ["a", "b", "c", "d"] | [] | field `choices`: expected at least two choices, found 0
hellaswag:llama.cpp | ["a", "b", "c", "d"] | ["a", "a b", "a c", "a d"] | field `choices[0]`: expected a token that differs from the other endings, found none
{"activity_label": "l", "ctx_a": "a", "ctx_b": "b", "ctx": "a b", "endings": ["w", "x", "y", "z"], "label": 3}
hellaswag:lm-eval | "z"] | "z" | expected a JSON object, found invalid JSON: expected `,` or `]` at column"#;

#[test]
fn every_mistake_is_reported_with_its_location() {
    let model = Model::built_in();
    let mut good = "";
    for line in MISTAKES.lines() {
        let [protocol, from, to, expected] = line.split(" | ").collect::<Vec<_>>()[..] else {
            good = line;
            continue;
        };
        let bad = good.replacen(from, to, 1);
        assert_ne!(good, bad, "{protocol}: {from}");
        let text = format!("{good}\n\n{bad}\n{good}\n");
        let prepared = model.try_prepare(protocol, None, &data("a/items.jsonl", &text)).unwrap();
        let error = prepared.damaged.unwrap_or_else(|| panic!("{protocol} accepts {bad}"));
        assert_eq!(prepared.items.len(), 1, "{protocol}");
        assert_eq!((error.file.as_str(), error.line), ("a/items.jsonl", 3), "{protocol}");
        assert!(error.what.starts_with(expected), "{protocol}: expected {expected}, found {}", error.what);
        // With a limit that excludes the entry, its mistake is not reported.
        let fewer = model.try_prepare(protocol, Some(1), &data("a/items.jsonl", &text)).unwrap();
        assert_eq!((fewer.damaged, fewer.items), (None, prepared.items));
    }
}

#[test]
fn choice_longer_than_the_context_is_rejected() {
    let model = Model::built_in();
    let long = format!(r#"{{"goal": "g", "sol1": "a", "sol2": "{}", "label": 1}}"#, "ball ".repeat(600));
    let error =
        model.try_prepare("piqa:lm-eval", None, &data("items.jsonl", &long)).unwrap().damaged.unwrap();
    assert_eq!(error.what, "field `sol2`: expected at most 512 tokens (the model's context), found 601");
}

#[test]
fn damaged_six_line_items_are_reported() {
    let model = Model::built_in();
    let whole = "The king\n3\na\nb\nc\nd\n";
    let errors = [
        (format!("{whole}The king\n1\na"), 7, "expected 6 lines for an item, found 3"),
        (format!("{whole}The king"), 7, "expected 6 lines for an item, found 1"),
        (
            whole.repeat(2).replacen('3', "4", 1),
            1,
            "field `gold`: expected a number from 0 to 3, found \"4\"",
        ),
        (format!("{whole}The king\n1\na\n\nc\nd\n"), 7, "field `choices[1]`: expected a non-empty string"),
    ];
    for (text, line, expected) in errors {
        let prepared = model.try_prepare("hellaswag:llama.cpp", None, &data("items.txt", &text)).unwrap();
        let error = prepared.damaged.unwrap();
        assert_eq!((error.file.as_str(), error.line, error.what.as_str()), ("items.txt", line, expected));
        assert_eq!(prepared.items.len(), line / 6);
    }
}

#[test]
fn empty_data_is_rejected() {
    let model = Model::built_in();
    for protocol in
        ["lambada:lm-eval", "piqa:lm-eval", "hellaswag:llama.cpp", "blimp:lm-eval", "winogrande:lm-eval"]
    {
        let error = model.try_prepare(protocol, None, &data("items.jsonl", "\n \n")).unwrap_err();
        assert!(matches!(error, EvaluationError::Unusable { .. }), "{protocol}: {error}");
        assert_eq!(error.to_string(), "items.jsonl: expected at least one entry, found none");
    }
    for protocol in
        ["wikitext:lm-eval", "wikitext:hf-8", "wikitext:megatron", "wikitext:llama.cpp", "text:bits"]
    {
        let error = model.try_prepare(protocol, None, &data("items.txt", "")).unwrap_err();
        assert_eq!(error.to_string(), "items.txt: expected text, found an empty file", "{protocol}");
        let error = model
            .try_prepare(protocol, None, &data("items.txt", "a\n\u{a0}\n"))
            .map(|prepared| prepared.items.len());
        assert_eq!(error.is_ok(), protocol != "wikitext:llama.cpp", "{protocol}: {error:?}");
    }
}

#[test]
fn damaged_text_rows_are_reported() {
    let model = Model::built_in();
    for protocol in ["wikitext:lm-eval", "wikitext:hf-8", "wikitext:megatron", "wikitext:llama.cpp"] {
        let rows = "{\"text\": \" = A = \\n\"}\n{\"text\": 3}\n";
        let error = model.try_prepare(protocol, None, &data("rows.jsonl", rows)).unwrap_err();
        assert_eq!(
            error.to_string(),
            "rows.jsonl: line 2: field `text`: expected a string, found 3",
            "{protocol}"
        );
        assert!(!error.is_usage());
    }
    let pages = "{\"page\": \"a b\"}\n{\"page\": \"\"}\n";
    let prepared = model.try_prepare("wikitext:lm-eval", None, &data("pages.jsonl", pages)).unwrap();
    assert_eq!(prepared.items.len(), 1);
    assert_eq!(
        prepared.damaged.unwrap().to_string(),
        "pages.jsonl: line 2: field `page`: expected a non-empty string"
    );
}

#[test]
fn limit_of_zero_items_is_rejected() {
    let model = Model::built_in();
    let error = model.try_prepare("lambada:lm-eval", Some(0), &data("items.jsonl", "{}")).unwrap_err();
    assert_eq!(
        (error.is_usage(), error.to_string().as_str()),
        (true, "`limit`: expected at least 1 item, found 0")
    );
}
