//! Protocol names, their numeric parameters and their published results.

use std::collections::HashSet;

use candle_gpt2_evaluation::{EvaluationError, named, protocols};

fn error(name: &str) -> String {
    let error = named(name).unwrap_err();
    assert!(error.is_usage());
    error.to_string()
}

#[test]
fn name_consists_of_task_and_protocol() {
    for protocol in protocols() {
        let (task, suffix) = protocol.name.split_once(':').unwrap();
        assert!(!task.is_empty() && !suffix.is_empty(), "{}", protocol.name);
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
fn number_is_parsed_from_the_end_of_the_name() {
    let found = |name| named(name).map(|(protocol, number)| (protocol.name, number)).ok();
    assert_eq!(found("wikitext:hf-512"), Some(("wikitext:hf-N", Some(512))));
    assert_eq!(found("wikitext:megatron"), Some(("wikitext:megatron", None)));
    assert_eq!(found("wikitext:megatron-64"), Some(("wikitext:megatron", Some(64))));
    assert_eq!(found("text:bits"), Some(("text:bits", None)));
    assert_eq!(found("text:bits-128"), Some(("text:bits", Some(128))));
    assert_eq!(found("lambada:lm-eval"), Some(("lambada:lm-eval", None)));
}

#[test]
fn invalid_number_is_rejected() {
    let expected = |found: &str| {
        format!(
            "wikitext:hf-N: expected a number of tokens at the end of the name, such as `wikitext:hf-512`, found `{found}`"
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
fn task_name_selects_its_default_protocol() {
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
fn unknown_protocol_error_lists_the_available_ones() {
    assert_eq!(
        error("hellaswag:lmeval"),
        "unknown protocol `hellaswag:lmeval`; `hellaswag` has `hellaswag:lm-eval`, `hellaswag:llm.c`, `hellaswag:llama.cpp`"
    );
}

#[test]
fn unknown_name_error_suggests_similar_names() {
    let message = error("winogrand:lm-eval");
    assert!(
        message.starts_with("unknown protocol `winogrand:lm-eval`; similar names: `winogrande:lm-eval`, `"),
        "{message}"
    );
    assert!(error("lambda").contains("similar names: `lambada:"), "{}", error("lambda"));
    for far in ["", "nosuch"] {
        assert!(
            error(far).ends_with("expected a name such as `wikitext:lm-eval` or `text:bits`"),
            "{}",
            error(far)
        );
    }
}

#[test]
fn published_results_are_consistent() {
    for protocol in protocols() {
        for result in protocol.published {
            assert!(result.value > 0.0 && !result.source.is_empty());
            if result.exact {
                assert_eq!(named(result.protocol).unwrap().0.name, protocol.name, "{result:?}");
            } else {
                assert_eq!(result.protocol, "not published", "{result:?}");
            }
            if result.metric.starts_with("acc") {
                assert!(result.value < 1.0, "{result:?}");
            }
        }
        for hash in protocol.dataset.sha256 {
            assert!(hash.len() == 64 && hash.bytes().all(|digit| matches!(digit, b'0'..=b'9' | b'a'..=b'f')));
        }
    }
}
