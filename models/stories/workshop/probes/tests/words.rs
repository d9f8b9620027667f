//! Test for the stories' tokenizer: every word that prompts are built from is a single token.

use candle_gpt2_weights::{encode, train_tokenizer};
use story_generator::{Stories, lexicon, tokenizer_texts};

#[test]
fn every_world_word_is_one_token_with_its_space() {
    // A tenth of the tokenizer's training text. The repeated words determine the result.
    let story = "Once upon a time, there was a cat. It saw a bird.".to_owned();
    let texts = tokenizer_texts(1, 500_000, &mut Stories::new(1, [vec![story], Vec::new(), Vec::new()]));
    let tokenizer = train_tokenizer(texts.into_iter().map(Into::into), 4096).unwrap();
    let words = lexicon().world_words();
    assert!(words.len() > 600, "{}", words.len());
    for word in words {
        assert_eq!(encode(&tokenizer, &format!(" {word}")).unwrap().len(), 1, "{word}");
    }
}
