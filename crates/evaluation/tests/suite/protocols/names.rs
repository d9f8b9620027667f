//! Names of protocols, and what stands beside them.

use std::collections::HashSet;

use candle_gpt2_evaluation::{EvaluationError, named, protocols};

fn error(name: &str) -> String {
    let error = named(name).unwrap_err();
    assert!(error.is_usage());
    error.to_string()
}

#[test]
fn a_name_is_a_task_and_a_protocol() {
    for protocol in protocols() {
        let (task, of_task) = protocol.name.split_once(':').unwrap();
        assert!(!task.is_empty() && !of_task.is_empty(), "{}", protocol.name);
        assert_eq!(protocol.task(), task);
    }
    let names: HashSet<&str> = protocols().iter().map(|protocol| protocol.name).collect();
    assert_eq!(names.len(), protocols().len());
    let all = "wikitext:lm-eval wikitext:hf-N wikitext:megatron wikitext:llama.cpp lambada:lm-eval \
        lambada:last-token lambada:megatron-strict lambada:stop-words hellaswag:lm-eval hellaswag:llm.c \
        hellaswag:llama.cpp piqa:lm-eval arc-easy:lm-eval arc-challenge:lm-eval openbookqa:lm-eval \
        sciq:lm-eval winogrande:lm-eval blimp:lm-eval text:bits";
    for name in all.split(' ') {
        assert!(names.contains(name), "{name}");
    }
}

#[test]
fn a_number_stands_at_the_end() {
    let found = |name| named(name).map(|(protocol, number)| (protocol.name, number)).ok();
    assert_eq!(found("wikitext:hf-512"), Some(("wikitext:hf-N", Some(512))));
    assert_eq!(found("wikitext:megatron"), Some(("wikitext:megatron", None)));
    assert_eq!(found("wikitext:megatron-64"), Some(("wikitext:megatron", Some(64))));
    assert_eq!(found("text:bits"), Some(("text:bits", None)));
    assert_eq!(found("text:bits-128"), Some(("text:bits", Some(128))));
    assert_eq!(found("lambada:lm-eval"), Some(("lambada:lm-eval", None)));
}

#[test]
fn a_number_that_is_none_is_refused() {
    let expected = |found: &str| {
        format!(
            "wikitext:hf-N: expected a number of tokens at the end of its name, as `wikitext:hf-512`, found `{found}`"
        )
    };
    for name in [
        "wikitext:hf",
        "wikitext:hf-",
        "wikitext:hf-N",
        "wikitext:hf-0",
        "wikitext:hf--5",
        "wikitext:hf-+5",
        "wikitext:hf-5 ",
        "wikitext:hf-99999999999999999999",
    ] {
        assert_eq!(error(name), expected(name));
    }
    assert!(error("text:bits-x").starts_with("text:bits: expected a number"));
    assert!(matches!(named("lambada:lm-eval-5"), Err(EvaluationError::UnknownProtocol { .. })));
}

#[test]
fn a_task_alone_has_a_default() {
    for (task, expected) in [
        ("lambada", "lambada:lm-eval"),
        ("hellaswag", "hellaswag:lm-eval"),
        ("wikitext", "wikitext:lm-eval"),
        ("text", "text:bits"),
        ("bpb", "text:bits"),
        ("bits-per-byte", "text:bits"),
    ] {
        assert_eq!(named(task).unwrap().0.name, expected, "{task}");
    }
}

#[test]
fn an_unknown_protocol_of_a_task_names_those_it_has() {
    assert_eq!(
        error("hellaswag:lmeval"),
        "there is no protocol `hellaswag:lmeval`; `hellaswag` has `hellaswag:lm-eval`, `hellaswag:llm.c`, `hellaswag:llama.cpp`"
    );
}

#[test]
fn the_nearest_names_are_told() {
    let told = error("winogrand:lm-eval");
    assert!(
        told.starts_with("there is no protocol `winogrand:lm-eval`; the nearest are `winogrande:lm-eval`, `"),
        "{told}"
    );
    assert!(error("lambda").contains("the nearest are `lambada:"), "{}", error("lambda"));
    for far in ["", "nosuch"] {
        assert!(
            error(far).ends_with("names are such as `wikitext:lm-eval` and `text:bits`"),
            "{}",
            error(far)
        );
    }
}

#[test]
fn published_figures_stand_where_they_belong() {
    for protocol in protocols() {
        for figure in protocol.published {
            assert!(figure.value > 0.0 && !figure.source.is_empty());
            if figure.exact {
                assert_eq!(named(figure.protocol).unwrap().0.name, protocol.name, "{figure:?}");
            } else {
                assert_eq!(figure.protocol, "not published", "{figure:?}");
            }
            if figure.metric.starts_with("acc") {
                assert!(figure.value < 1.0, "{figure:?}");
            }
        }
        for hash in protocol.dataset.sha256 {
            assert!(hash.len() == 64 && hash.bytes().all(|digit| matches!(digit, b'0'..=b'9' | b'a'..=b'f')));
        }
    }
}
