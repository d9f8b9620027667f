//! Vocabularies from various tokenizers.

use candle_gpt2_arithmetic::RandomStream;
use candle_gpt2_engine::Vocabulary;
use candle_gpt2_grammar::{Compiler, Grammar, GrammarError};
use candle_gpt2_testing::{CheckpointFolder, tokenizer_json};
use candle_gpt2_weights::{Checkpoint, Tokenizer};
use serde_json::{Value, json};

use crate::common::{allowed, cases, compiled, vocabulary, walk};

fn tokenizer(decoder: &Value, tokens: &[&str], added: &[&str]) -> Tokenizer {
    tokenizer_json(decoder, tokens, added).parse().unwrap()
}

fn byte_level(tokens: &[&str], added: &[&str]) -> Tokenizer {
    let decoder =
        json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true });
    tokenizer(&decoder, tokens, added)
}

#[test]
fn model_without_tokenizer_is_rejected() {
    let checkpoint = Checkpoint::open(CheckpointFolder::tiny().path()).unwrap();
    let result = Compiler::new(&Vocabulary::new(&checkpoint, None));
    assert_eq!(result.err(), Some(GrammarError::NoTokenizer));
}

#[test]
fn tokens_with_equal_text_are_allowed_together() {
    // `Ġa` and the added token ` a` decode to the same two bytes.
    let tokenizer = byte_level(&["<s>", "a", "Ġa", "Ġ", "b"], &[" a", "<other>"]);
    assert_eq!(tokenizer.decode(&[2, 5], true).unwrap(), " a a");
    let vocabulary = vocabulary(tokenizer, 10);
    let constraint = compiled(&vocabulary, &Grammar::Regex("a( a)*".into()), &[0]);
    assert_eq!(allowed(&*constraint, &[], 10), [1]);
    for ids in [&[1][..], &[1, 2], &[1, 5], &[1, 5, 2, 5, 3, 1]] {
        assert_eq!(allowed(&*constraint, ids, 10), [0, 2, 3, 5], "{ids:?}");
    }
    assert_eq!(allowed(&*constraint, &[1, 3], 10), [1]);
}

#[test]
fn special_like_and_padding_tokens_are_never_allowed() {
    let vocabulary = vocabulary(byte_level(&["<s>", "a", "<", ">", "s"], &["<other>"]), 64);
    let constraint = compiled(&vocabulary, &Grammar::Regex("(?s).*".into()), &[0]);
    assert_eq!(allowed(&*constraint, &[], 64), [0, 1, 2, 3, 4]);
    // An end token in the padding adds nothing to the text.
    let constraint = compiled(&vocabulary, &Grammar::Regex("(?s).*".into()), &[63]);
    assert_eq!(allowed(&*constraint, &[1], 64), [1, 2, 3, 4, 63]);
}

#[test]
fn bytes_without_a_token_are_dead_ends() {
    let vocabulary = vocabulary(byte_level(&["<s>", "a", "b", "é"], &[]), 4);
    let compiler = Compiler::new(&vocabulary).unwrap();
    let error = compiler.compile(&Grammar::Regex("c".into()), &[0]).unwrap_err().to_string();
    assert_eq!(error, "regular expression: no token in the vocabulary can come next");
    // This grammar has a dead end inside the text.
    let constraint = compiled(&vocabulary, &Grammar::Regex("ab?c".into()), &[0]);
    let error = constraint.allow(&[1, 2], &mut [false; 4]).unwrap_err().to_string();
    assert_eq!(error, "regular expression after 2 tokens: no token in the vocabulary can come next");
    // Only one alternative is a dead end, so the other remains allowed.
    let constraint = compiled(&vocabulary, &Grammar::Regex("a(c|b)".into()), &[0]);
    assert_eq!(allowed(&*constraint, &[1], 4), [2]);
    // Continuing would need a byte that no token has, so the text ends after the first token.
    let constraint = compiled(&vocabulary, &Grammar::Regex("a(c|d)?".into()), &[]);
    assert!(constraint.is_complete(&[1]).unwrap());
}

/// Samples texts with a tokenizer whose words begin with spaces and checks every decoded text.
#[test]
fn metaspace_texts_conform_after_decoding() {
    let decoders = [
        json!({ "type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true }),
        json!({ "type": "Sequence", "decoders": [
            { "type": "Replace", "pattern": { "String": "▁" }, "content": " " }, { "type": "Fuse" },
            { "type": "Strip", "content": " ", "start": 1, "stop": 0 },
        ] }),
    ];
    let letters: Vec<String> = (' '..='~').map(String::from).collect();
    let mut tokens: Vec<&str> =
        vec!["</s>", "▁", "▁May", "▁June", "▁19", "▁a", "ab", ",▁x", "▁\"", "é", "▁語"];
    tokens.extend(letters.iter().map(String::as_str));
    for decoder in decoders {
        let vocabulary = vocabulary(tokenizer(&decoder, &tokens, &[]), tokens.len());
        let mut random = RandomStream::with_stream(3, 0);
        let mut finished = 0;
        for case in cases() {
            let constraint = compiled(&vocabulary, &case.grammar, &[0]);
            for _ in 0..20 {
                let (ids, has_ended) = walk(&*constraint, &[0], tokens.len(), 60, &mut random);
                let text = vocabulary.tokenizer().unwrap().decode(&ids, true).unwrap();
                assert!((case.is_prefix)(&text), "{}: {text:?}", case.name);
                assert!(!has_ended || (case.is_whole)(&text), "{}: {text:?}", case.name);
                finished += usize::from(has_ended);
            }
        }
        assert!(finished > 60, "{finished}");
    }
}

#[test]
fn context_dependent_decoders_are_rejected() {
    let word_piece = json!({ "type": "WordPiece", "prefix": "##", "cleanup": true });
    for decoder in [word_piece, json!(null)] {
        let vocabulary = vocabulary(tokenizer(&decoder, &["[S]", "a", "##b"], &[]), 3);
        let error = Compiler::new(&vocabulary).unwrap().compile(&Grammar::JsonObject, &[0]).unwrap_err();
        assert!(error.to_string().contains("depends on the tokens around it"), "{error}");
    }
}
