//! Which tokens are allowed: against what single bytes say, in any order, from many threads.

use std::thread;

use candle_gpt2_arithmetic::RandomStream;
use candle_gpt2_generation::GenerationError;
use candle_gpt2_grammar::{Compiler, Grammar};

use crate::common::{allowed, cases, compiled, compiled_by, tiny, walk};

const ROWS: usize = 300;
const END: u32 = 0;

/// The token of each byte.
fn byte_tokens() -> Vec<u32> {
    let vocabulary = tiny();
    let token = |byte: u8| (1..300).find(|id| vocabulary.token_bytes(*id) == [byte]);
    (0..=u8::MAX).map(|byte| token(byte).unwrap_or(u32::MAX)).collect()
}

#[test]
fn a_token_is_allowed_where_its_bytes_are_one_by_one() {
    let (vocabulary, byte_tokens) = (tiny(), byte_tokens());
    let mut random = RandomStream::with_stream(7, 0);
    let mut of_many_bytes = 0;
    for case in cases() {
        // Another constraint of the same grammar, so that nothing is shared.
        let [constraint, bytewise] = [(); 2].map(|()| compiled(&vocabulary, &case.grammar, &[END]));
        for _ in 0..3 {
            let (ids, _) = walk(&*constraint, &[END], ROWS, 12, &mut random);
            let ids: Vec<u32> = ids.into_iter().filter(|id| *id != END).collect();
            let places = (0..=ids.len()).filter(|length| !constraint.is_complete(&ids[..*length]).unwrap());
            for length in places {
                let next = allowed(&*constraint, &ids[..length], ROWS);
                let bytes =
                    |ids: &[u32]| ids.iter().flat_map(|id| vocabulary.token_bytes(*id)).collect::<Vec<u8>>();
                let before: Vec<u32> =
                    bytes(&ids[..length]).into_iter().map(|byte| byte_tokens[usize::from(byte)]).collect();
                for id in 1..300 {
                    let mut so_far = before.clone();
                    let written = vocabulary.token_bytes(id);
                    let mut fits = |byte: &u8| {
                        let token = byte_tokens[usize::from(*byte)];
                        let fits = !bytewise.is_complete(&so_far).unwrap()
                            && allowed(&*bytewise, &so_far, ROWS).contains(&token);
                        so_far.push(token);
                        fits
                    };
                    let expected = written.iter().all(&mut fits);
                    of_many_bytes += usize::from(expected && written.len() > 1);
                    assert_eq!(
                        next.contains(&id),
                        expected,
                        "{}: {written:?} after {ids:?}, {length}",
                        case.name
                    );
                }
            }
        }
    }
    assert!(of_many_bytes > 100, "{of_many_bytes}");
}

#[test]
fn ends_stand_exactly_where_the_text_may_end() {
    let vocabulary = tiny();
    let mut random = RandomStream::with_stream(8, 0);
    let mut whole = 0;
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
                whole += usize::from(is_whole);
            }
        }
    }
    assert!(whole > 100, "{whole}");
}

#[test]
fn what_is_allowed_depends_on_the_tokens_alone() {
    let compiler = Compiler::new(&tiny()).unwrap();
    for case in cases() {
        let shared = compiled_by(&compiler, &case.grammar, &[END]);
        thread::scope(|scope| {
            for seed in 0..4 {
                let (shared, compiler, case) = (&shared, &compiler, &case);
                scope.spawn(move || {
                    let mut random = RandomStream::with_stream(seed, 0);
                    // Texts that go on, fork, are dropped and come again.
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
fn tokens_that_do_not_conform_are_named() {
    let vocabulary = tiny();
    let constraint = compiled(&vocabulary, &Grammar::Regex("ab?".into()), &[END]);
    let [a, b] = [b"a", b"b"].map(|byte| byte_tokens()[usize::from(byte[0])]);
    let refused = |ids: &[u32]| match constraint.allow(ids, &mut [false; ROWS]) {
        Err(GenerationError::Constraint { what }) => what,
        other => panic!("{other:?}"),
    };
    assert!(
        refused(&[b])
            .starts_with(&format!("regular expression: token {b}, number 1 of the text, does not conform"))
    );
    assert!(refused(&[a, a]).contains(&format!("token {a}, number 2")));
    assert!(refused(&[a, b, b]).contains("number 3"));
    assert!(refused(&[a, END]).contains("writes nothing"));
    assert!(refused(&[9_999]).contains("writes nothing"));
    assert!(constraint.is_complete(&[a, END]).unwrap(), "a text that has ended is complete");
    assert!(constraint.is_complete(&[a, b]).unwrap());
    assert!(!constraint.is_complete(&[a]).unwrap());
    assert_eq!(allowed(&*constraint, &[a], ROWS), [END, b]);
    // Without end tokens a text ends where nothing can follow, and nowhere else.
    let endless = compiled(&vocabulary, &Grammar::Regex("ab?".into()), &[]);
    assert_eq!(allowed(&*endless, &[a], ROWS), [b]);
    assert!(endless.is_complete(&[a, b]).unwrap());
}

#[test]
fn an_end_token_that_writes_something_ends_a_text_that_conforms_with_it() {
    let vocabulary = tiny();
    let tokens = byte_tokens();
    let [a, dot] = [b'a', b'.'].map(|byte| tokens[usize::from(byte)]);
    let next = |pattern: &str, ids: &[u32]| {
        allowed(&*compiled(&vocabulary, &Grammar::Regex(pattern.into()), &[dot]), ids, ROWS)
    };
    assert_eq!(next("aa\\.", &[a]), [a], "the dot does not conform");
    assert_eq!(next("aa\\.", &[a, a]), [dot]);
    // Inside a text it would end it.
    assert_eq!(next("a\\.a", &[]), [a]);
    assert_eq!(next("a\\.?a", &[a]), [a]);
    assert_eq!(next("a(\\.a?)?", &[a]), [dot]);
}
