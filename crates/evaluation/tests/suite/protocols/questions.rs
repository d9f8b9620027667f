//! Questions and choices: the scored texts and the correct choice.

use candle_gpt2_evaluation::{Data, Item, Prepared};

use super::{Model, N_POSITIONS, choices, data, gold, only_sequence, owned};

/// Returns the shared context followed by each ending.
fn continuations(context: &str, endings: &[&str]) -> Vec<(String, String)> {
    endings.iter().map(|ending| (context.to_owned(), (*ending).to_owned())).collect()
}

fn lengths(item: &Item) -> Vec<(usize, usize)> {
    choices(item).iter().map(|choice| (choice.characters, choice.bytes)).collect()
}

#[test]
fn piqa_scores_both_solutions_after_the_goal() {
    let model = Model::built_in();
    for label in ["1", "\"1\""] {
        let line = format!(
            r#"{{"goal": "Kill the king", "sol1": "with a knife", "sol2": "wïth love", "label": {label}}}"#
        );
        let item = model.item("piqa:lm-eval", &line);
        let expected = continuations("Question: Kill the king\nAnswer:", &[" with a knife", " wïth love"]);
        assert_eq!((model.pieces(&item), gold(&item)), (expected, Some(1)));
        // The space before a choice does not count toward its length.
        assert_eq!(lengths(&item), [(12, 12), (9, 10)]);
    }
}

#[test]
fn arc_accepts_both_schemas_and_label_types() {
    let model = Model::built_in();
    let hub = r#"{"id": "M_7", "question": "Who is dead?", "choices": {"text": ["the king", "a lord", "none"], "label": ["A", "B", "C"]}, "answerKey": "B"}"#;
    let upstream = r#"{"id": "M_7", "question": {"stem": "Who is dead?", "choices": [{"text": "the king", "label": "1"}, {"text": "a lord", "label": "2"}, {"text": "none", "label": "3"}]}, "answerKey": " 2"}"#;
    for protocol in ["arc-easy:lm-eval", "arc-challenge:lm-eval"] {
        let item = model.item(protocol, hub);
        let expected = continuations("Question: Who is dead?\nAnswer:", &[" the king", " a lord", " none"]);
        assert_eq!((model.pieces(&item), gold(&item)), (expected, Some(1)));
        assert_eq!(item.id.as_deref(), Some("M_7"));
        assert_eq!(item, model.item(protocol, upstream));
        // Labels and the answer may be numbers or strings.
        let numbers = hub.replace(r#"["A", "B", "C"]"#, "[1, 2, 3]");
        assert_eq!(item, model.item(protocol, &numbers.replace(r#""B"}"#, "2}")));
        assert_eq!(item, model.item(protocol, &numbers.replace(r#""B"}"#, r#""2"}"#)));
    }
}

#[test]
fn openbookqa_choices_continue_the_stem() {
    let model = Model::built_in();
    let hub = r#"{"id": "8-343", "question_stem": "The king is", "choices": {"text": ["dead", "alive"], "label": ["A", "B"]}, "answerKey": "A"}"#;
    let upstream = r#"{"id": "8-343", "question": {"stem": "The king is", "choices": [{"text": "dead", "label": "A"}, {"text": "alive", "label": "B"}]}, "answerKey": "A"}"#;
    let item = model.item("openbookqa:lm-eval", hub);
    assert_eq!(
        (model.pieces(&item), gold(&item)),
        (continuations("The king is", &[" dead", " alive"]), Some(0))
    );
    assert_eq!(item, model.item("openbookqa:lm-eval", upstream));
}

#[test]
fn sciq_puts_the_correct_answer_last() {
    let model = Model::built_in();
    let line = r#"{"question": "Who is dead?", "distractor1": "a", "distractor2": "b", "distractor3": "c", "correct_answer": "the king", "support": " \n The king is dead. "}"#;
    let item = model.item("sciq:lm-eval", line);
    let context = "The king is dead. \nQuestion: Who is dead?\nAnswer:";
    assert_eq!(
        (model.pieces(&item), gold(&item)),
        (continuations(context, &[" a", " b", " c", " the king"]), Some(3))
    );
    let without = model.item("sciq:lm-eval", &line.replace(r" \n The king is dead. ", ""));
    assert_eq!(model.pieces(&without)[0].0, "\nQuestion: Who is dead?\nAnswer:");
}

#[test]
fn winogrande_scores_the_text_after_each_option() {
    let model = Model::built_in();
    let json = r#"{"sentence": "He told the lord of the king, for _ was, alas, dead_ .", "option1": "the king", "option2": "him", "answer": "2"}"#;
    let item = model.item("winogrande:lm-eval", json);
    let [king, him] = ["the king", "him"].map(|name| format!("He told the lord of the king, for {name}"));
    assert_eq!(model.pieces(&item), owned(&[(&king, " was, alas, dead_ ."), (&him, " was, alas, dead_ .")]));
    assert_eq!((gold(&item), item.context_tokens), (Some(1), model.ids(&king).len()));
    assert_eq!(lengths(&item), [(king.len(), king.len()), (him.len(), him.len())]);
    let quoted = r#""He told the lord of the king, for _ was, alas, dead_ .""#;
    for csv in [
        format!("index,sentence,option1,option2,answer\n7,{quoted},the king,him,2\n"),
        format!("sentence,choice1,choice2,answer,index\n{quoted},the king,him,2,7\n"),
        format!("7,{quoted},the king,him,2\n"),
    ] {
        let prepared = model.prepare("winogrande:lm-eval", "items.csv", &csv);
        let expected = Item { id: Some("7".into()), ..item.clone() };
        assert_eq!(prepared.items, [expected], "{csv}");
    }
}

#[test]
fn blimp_scores_whole_sentences_grouped_by_paradigm() {
    let model = Model::built_in();
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
    write("islands.jsonl", "{\"sentence_good\": \"He is dead.\", \"sentence_bad\": \"Is dead he.\"}\n");
    write(
        "verbs.jsonl",
        "{\"sentence_good\": \"a b\", \"sentence_bad\": \"b a\", \"UID\": \"irregular\", \"pairID\": \"0\"}\n",
    );
    let prepared = model.try_prepare("blimp:lm-eval", None, &Data::read(folder.path()).unwrap()).unwrap();
    let [first, second] = prepared.items.as_slice() else { panic!("{prepared:?}") };
    let expected = continuations("<|endoftext|>", &[" He is dead.", " Is dead he."]);
    assert_eq!((model.pieces(first), gold(first), first.context_tokens), (expected, Some(0), 1));
    assert_eq!((first.group.as_deref(), second.group.as_deref()), (Some("islands"), Some("irregular")));
    assert_eq!((second.index, second.id.as_deref()), (1, Some("0")));
}

const HELLASWAG: &str = r#"{"ind": 24, "activity_label": "Making tea", "ctx_a": "[header] How to [title] Boil  water.", "ctx_b": "the KING", "ctx": "[header] How to [title] Boil  water. the KING", "endings": ["drinks [step] it.", "is dead.", "drinks alone ", "is   late."], "label": LABEL}"#;

#[test]
fn lm_eval_cleans_hellaswag_texts() {
    let model = Model::built_in();
    for label in ["2", "\"2\""] {
        let item = model.item("hellaswag:lm-eval", &HELLASWAG.replace("LABEL", label));
        // `preprocess` replaces double spaces in a single pass, so three spaces become two.
        let context = "Making tea:  How to. Boil water. The king";
        let context = context.replace("tea:  How", "tea: How");
        let expected = continuations(&context, &[" drinks it.", " is dead.", " drinks alone", " is  late."]);
        assert_eq!((model.pieces(&item), gold(&item), item.id.as_deref()), (expected, Some(2), Some("24")));
        assert_eq!(lengths(&item)[2], (12, 12));
    }
}

#[test]
fn preprocessed_hellaswag_is_unchanged() {
    let model = Model::built_in();
    for right in [r#""gold": 1"#, r#""label": "1""#] {
        let line = format!(r#"{{"query": "The  king [x]", "choices": ["is dead", "lives "], {right}}}"#);
        let item = model.item("hellaswag:lm-eval", &line);
        assert_eq!(
            (model.pieces(&item), gold(&item)),
            (continuations("The  king [x]", &[" is dead", " lives "]), Some(1))
        );
    }
}

#[test]
fn empty_ctx_b_leaves_no_extra_space() {
    let model = Model::built_in();
    let line = HELLASWAG.replace("\"ctx_b\": \"the KING\"", "\"ctx_b\": \"\"").replace("LABEL", "0");
    let item = model.item("hellaswag:lm-eval", &line);
    // `preprocess` strips the space before the empty `ctx_b`.
    assert_eq!(
        model.pieces(&item)[1],
        ("Making tea: How to. Boil water.".to_owned(), " is dead.".to_owned())
    );
}

#[test]
fn llm_c_keeps_raw_texts_and_encodes_endings_separately() {
    let model = Model::built_in();
    let item = model.item("hellaswag:llm.c", &HELLASWAG.replace("LABEL", "3"));
    let context = "[header] How to [title] Boil  water. the KING";
    let expected =
        continuations(context, &[" drinks [step] it.", " is dead.", " drinks alone ", " is   late."]);
    assert_eq!((model.pieces(&item), gold(&item)), (expected, Some(3)));
    let separate = [model.ids(context), model.ids(" is   late.")].concat();
    assert_eq!(only_sequence(&choices(&item)[3]).ids, separate);
}

#[test]
fn llama_cpp_scores_from_the_first_differing_token() {
    let model = Model::built_in();
    let line =
        r#"{"query": "The king", "choices": ["is dead", "is late", "is so dead", "is alone"], "gold": 0}"#;
    let prepared = model.prepare("hellaswag:llama.cpp", "items.jsonl", line);
    let item = &prepared.items[0];
    let pieces = model.pieces(item);
    assert!(pieces.iter().all(|(before, _)| before.starts_with("The king is")), "{pieces:?}");
    let firsts: Vec<usize> = choices(item).iter().map(|choice| only_sequence(choice).first).collect();
    let encoded: Vec<Vec<u32>> = ["is dead", "is late", "is so dead", "is alone"]
        .map(|ending| model.ids(&format!("The king {ending}")))
        .to_vec();
    let differs = |index: &usize| encoded.iter().any(|ids| ids[*index] != encoded[0][*index]);
    let first = (0..).find(differs).unwrap();
    assert_eq!(firsts, [first; 4]);
    for (choice, ids) in choices(item).iter().zip(&encoded) {
        assert_eq!(&only_sequence(choice).ids, ids);
    }
    let six_lines = "The king\n0\nis dead\nis late\nis so dead\nis alone\n";
    assert_eq!(model.prepare("hellaswag:llama.cpp", "items.txt", &six_lines.repeat(2)).items[0], *item);
    assert_eq!(model.prepare("hellaswag:llama.cpp", "items.txt", &six_lines.repeat(2)).items.len(), 2);
}

/// llama.cpp encodes special token names as plain text, and lm-evaluation-harness as the tokens.
#[test]
fn llama_cpp_encodes_special_token_names_as_text() {
    let model = Model::built_in();
    let line = r#"{"query": "The king <|endoftext|>", "choices": ["a", "b", "c", "d"], "gold": 0}"#;
    let ids = |protocol| only_sequence(&choices(&model.item(protocol, line))[0]).ids.clone();
    assert!(ids("hellaswag:lm-eval").contains(&0));
    assert!(!ids("hellaswag:llama.cpp").contains(&0));
    assert_eq!(model.text(&ids("hellaswag:llama.cpp")), "The king <|endoftext|> a");
}

/// Three items; only the context of the middle one is too long.
fn with_a_long_context(words: usize) -> String {
    let line = |goal: &str| {
        format!(
            "{{\"goal\": \"{goal}\", \"sol1\": \"a\", \"sol2\": \"with love and honour\", \"label\": 0}}\n"
        )
    };
    [line("so"), line(&" ball".repeat(words)), line("so")].concat()
}

#[test]
fn long_item_is_truncated_at_the_start_and_counted() {
    let model = Model::built_in();
    let prepared: Prepared = model.prepare("piqa:lm-eval", "items.jsonl", &with_a_long_context(600));
    assert_eq!((prepared.items.len(), prepared.truncated_count), (3, 1));
    let whole = model.ids(&format!("Question: {}\nAnswer: with love and honour", " ball".repeat(600)));
    let choice = only_sequence(&choices(&prepared.items[1])[1]);
    // One token more than the context holds, because the last token is scored but not read.
    assert_eq!(choice.ids, whole[whole.len() - N_POSITIONS - 1..]);
    assert_eq!(model.text(&choice.ids[choice.first..]), " with love and honour");
    assert_eq!(prepared.items[1].context_tokens, only_sequence(&choices(&prepared.items[1])[0]).first);
}

#[test]
fn item_that_just_fits_is_not_truncated() {
    let model = Model::built_in();
    let tokens = |words: usize| {
        model.ids(&format!("Question: {}\nAnswer: with love and honour", " ball".repeat(words))).len()
    };
    let longest = (0..).take_while(|words| tokens(*words) <= N_POSITIONS + 1).last().unwrap();
    for (words, cut) in [(longest, 0), (longest + 1, 1)] {
        let prepared = model.prepare("piqa:lm-eval", "items.jsonl", &with_a_long_context(words));
        assert_eq!(prepared.truncated_count, cut);
        let ids = &only_sequence(&choices(&prepared.items[1])[1]).ids;
        assert_eq!(ids.len(), tokens(words).min(N_POSITIONS + 1));
    }
}

#[test]
fn other_protocols_stop_at_an_item_beyond_the_context() {
    let model = Model::built_in();
    let long = " ball".repeat(600);
    let passages = format!("{{\"text\": \"a b\"}}\n{{\"text\": \"{long} dead\"}}\n");
    let endings = |ctx: &str| {
        let endings = r#""endings": ["a", "b", "c", "d"], "label": 0, "activity_label": "x", "ctx_a": "#;
        format!("{{{endings}\"{ctx}\", \"ctx_b\": \"\", \"ctx\": \"{ctx}\"}}\n")
    };
    let endings = endings("so") + &endings(&long);
    for (protocol, text) in [
        ("lambada:last-token", &passages),
        ("lambada:megatron-strict", &passages),
        ("lambada:stop-words", &passages),
        ("hellaswag:llm.c", &endings),
        ("hellaswag:llama.cpp", &endings),
    ] {
        let prepared = model.try_prepare(protocol, None, &data("items.jsonl", text)).unwrap();
        let error = prepared.damaged.unwrap();
        assert_eq!(
            (prepared.items.len(), error.line, error.file.as_str()),
            (1, 2, "items.jsonl"),
            "{protocol}"
        );
        assert!(
            error.what.starts_with("field `")
                && error.what.contains("the model's context")
                && error.what.contains("60"),
            "{protocol}: {error}"
        );
    }
}
