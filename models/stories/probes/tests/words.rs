//! The tokenizer of the stories: what a prompt is written from is one token each.

use candle_gpt2_weights::{encode, train_tokenizer};
use story_generator::{lexicon, tokenizer_texts};

#[test]
fn every_word_of_the_world_is_one_token_with_its_space() {
    // A tenth of the text that the tokenizer is trained from: the words that it repeats decide.
    let texts = tokenizer_texts(1, 500_000).unwrap();
    let tokenizer = train_tokenizer(texts.into_iter().map(Into::into), 2048).unwrap();
    let words = lexicon().world_words();
    assert!(words.len() > 600, "{}", words.len());
    for word in words {
        assert_eq!(encode(&tokenizer, &format!(" {word}")).unwrap().len(), 1, "{word}");
    }
}
