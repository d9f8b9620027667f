//! Allowed tokens equal the result of byte-by-byte matching, in any order and from several threads.

use std::thread;

use candle_gpt2_arithmetic::RandomStream;
use candle_gpt2_generation::GenerationError;
use candle_gpt2_grammar::{Compiler, Grammar};

use crate::common::{allowed, cases, compiled, compiled_by, tiny, walk};

const ROWS: usize = 300;
const END: u32 = 0;

/// Returns the token for each byte.
fn byte_tokens() -> Vec<u32> {
    let vocabulary = tiny();
    let token = |byte: u8| (1..300).find(|id| vocabulary.token_bytes(*id) == [byte]);
    (0..=u8::MAX).map(|byte| token(byte).unwrap_or(u32::MAX)).collect()
}

#[test]
fn allowed_tokens_match_byte_by_byte_matching() {
    let (vocabulary, byte_tokens) = (tiny(), byte_tokens());
    let mut random = RandomStream::with_stream(7, 0);
    let mut multi_byte_tokens = 0;
    for case in cases() {
        // Two constraints from the same grammar, which share no state.
        let [constraint, bytewise] = [(); 2].map(|()| compiled(&vocabulary, &case.grammar, &[END]));
        for _ in 0..3 {
            let (ids, _) = walk(&*constraint, &[END], ROWS, 12, &mut random);
            let ids: Vec<u32> = ids.into_iter().filter(|id| *id != END).collect();
            let lengths = (0..=ids.len()).filter(|length| !constraint.is_complete(&ids[..*length]).unwrap());
            for length in lengths {
                let next = allowed(&*constraint, &ids[..length], ROWS);
                let bytes =
                    |ids: &[u32]| ids.iter().flat_map(|id| vocabulary.token_bytes(*id)).collect::<Vec<u8>>();
                let before: Vec<u32> =
                    bytes(&ids[..length]).into_iter().map(|byte| byte_tokens[usize::from(byte)]).collect();
                for id in 1..300 {
                    let mut prefix = before.clone();
                    let token_bytes = vocabulary.token_bytes(id);
                    let mut fits = |byte: &u8| {
                        let token = byte_tokens[usize::from(*byte)];
                        let fits = !bytewise.is_complete(&prefix).unwrap()
                            && allowed(&*bytewise, &prefix, ROWS).contains(&token);
                        prefix.push(token);
                        fits
                    };
                    let expected = token_bytes.iter().all(&mut fits);
                    multi_byte_tokens += usize::from(expected && token_bytes.len() > 1);
                    assert_eq!(
                        next.contains(&id),
                        expected,
                        "{}: {token_bytes:?} after {ids:?}, {length}",
                        case.name
                    );
                }
            }
        }
    }
    assert!(multi_byte_tokens > 100, "{multi_byte_tokens}");
}

#[test]
fn end_token_is_allowed_exactly_at_complete_texts() {
    let vocabulary = tiny();
    let mut random = RandomStream::with_stream(8, 0);
    let mut complete_texts = 0;
    for case in cases() {
        let constraint = compiled(&vocabulary, &case.grammar, &[END]);
        for _ in 0..20 {
            let (ids, _) = walk(&*constraint, &[END], ROWS, 40, &mut random);
            let ids: Vec<u32> = ids.into_iter().filter(|id| *id != END).collect();
            for length in 0..=ids.len() {
                let text: Vec<u8> = ids[..length].iter().flat_map(|id| vocabulary.token_bytes(*id)).collect();
                let is_whole = std::str::from_utf8(&text).is_ok_and(case.is_whole);
                let next = allowed(&*constraint, &ids[..length], ROWS);
                assert_eq!(next.contains(&END), is_whole, "{}: {}", case.name, text.escape_ascii());
                assert_eq!(constraint.is_complete(&ids[..length]).unwrap(), next == [END], "{}", case.name);
                complete_texts += usize::from(is_whole);
            }
        }
    }
    assert!(complete_texts > 100, "{complete_texts}");
}

#[test]
fn allowed_tokens_depend_only_on_the_prefix() {
    let compiler = Compiler::new(&tiny()).unwrap();
    for case in cases() {
        let shared = compiled_by(&compiler, &case.grammar, &[END]);
        thread::scope(|scope| {
            for seed in 0..4 {
                let (shared, compiler, case) = (&shared, &compiler, &case);
                scope.spawn(move || {
                    let mut random = RandomStream::with_stream(seed, 0);
                    // The sequences continue, fork, are dropped and are revisited.
                    for _ in 0..6 {
                        let fresh = compiled_by(compiler, &case.grammar, &[END]);
                        let (ids, _) = walk(&*fresh, &[END], ROWS, 30, &mut random);
                        let mut lengths: Vec<usize> = (0..ids.len()).collect();
                        lengths.sort_by_key(|length| length * 7 % 5);
                        for length in lengths {
                            let expected =
                                allowed(&*compiled_by(compiler, &case.grammar, &[END]), &ids[..length], ROWS);
                            assert_eq!(allowed(&**shared, &ids[..length], ROWS), expected, "{}", case.name);
                            let complete = fresh.is_complete(&ids[..length]).unwrap();
                            assert_eq!(
                                shared.is_complete(&ids[..length]).unwrap(),
                                complete,
                                "{}",
                                case.name
                            );
                        }
                    }
                });
            }
        });
    }
}

#[test]
fn nonconforming_tokens_are_reported() {
    let vocabulary = tiny();
    let constraint = compiled(&vocabulary, &Grammar::Regex("ab?".into()), &[END]);
    let [a, b] = [b"a", b"b"].map(|byte| byte_tokens()[usize::from(byte[0])]);
    let rejection = |ids: &[u32]| match constraint.allow(ids, &mut [false; ROWS]) {
        Err(GenerationError::Constraint { what }) => what,
        other => panic!("{other:?}"),
    };
    assert!(
        rejection(&[b]).starts_with(&format!(
            "regular expression: token {b} (token 1 of the completion) does not conform"
        ))
    );
    assert!(rejection(&[a, a]).contains(&format!("token {a} (token 2 of the completion)")));
    assert!(rejection(&[a, b, b]).contains("token 3 of the completion"));
    assert!(rejection(&[a, END]).contains("it has no text"));
    assert!(rejection(&[9_999]).contains("it has no text"));
    assert!(constraint.is_complete(&[a, END]).unwrap(), "a text that has ended is complete");
    assert!(constraint.is_complete(&[a, b]).unwrap());
    assert!(!constraint.is_complete(&[a]).unwrap());
    assert_eq!(allowed(&*constraint, &[a], ROWS), [END, b]);
    // Without end tokens, a text ends only where nothing more can follow.
    let without_end_tokens = compiled(&vocabulary, &Grammar::Regex("ab?".into()), &[]);
    assert_eq!(allowed(&*without_end_tokens, &[a], ROWS), [b]);
    assert!(without_end_tokens.is_complete(&[a, b]).unwrap());
}

#[test]
fn end_token_with_text_must_complete_the_match() {
    let vocabulary = tiny();
    let tokens = byte_tokens();
    let [a, dot] = [b'a', b'.'].map(|byte| tokens[usize::from(byte)]);
    let next = |pattern: &str, ids: &[u32]| {
        allowed(&*compiled(&vocabulary, &Grammar::Regex(pattern.into()), &[dot]), ids, ROWS)
    };
    assert_eq!(next("aa\\.", &[a]), [a], "the dot does not conform");
    assert_eq!(next("aa\\.", &[a, a]), [dot]);
    // The end token would end the text before the last byte of the match.
    assert_eq!(next("a\\.a", &[]), [a]);
    assert_eq!(next("a\\.?a", &[a]), [a]);
    assert_eq!(next("a(\\.a?)?", &[a]), [dot]);
}
