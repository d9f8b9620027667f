//! Words that are never generated, as tokens.

use candle_gpt2_weights::encode_piece;

use crate::{EngineError, Vocabulary};

/// The tokens of a word that is never written: those it has at the beginning of a text, and those it has after a space. Whether the
/// word is given with the space does not matter.
///
/// # Errors
/// When there is no tokenizer, it cannot encode the word, or it gives tokens that the model does not have.
///
/// # Source
/// vLLM's `bad_words` (`SamplingParams.update_from_tokenizer`), without its condition that both forms have as many tokens, by which
/// some words are banned at the beginning alone.
///
/// ```
/// use candle_gpt2_engine::{ModelOptions, Silent, banned_tokens};
///
/// let opened = ModelOptions::default().open(&Silent)?;
/// let vocabulary = opened.vocabulary();
/// let expected = [vocabulary.encode("king")?, vocabulary.encode(" king")?];
/// assert_eq!(banned_tokens(vocabulary, "king")?, expected);
/// assert_eq!(banned_tokens(vocabulary, " king")?, expected);
/// # Ok::<(), candle_gpt2_engine::EngineError>(())
/// ```
pub fn banned_tokens(vocabulary: &Vocabulary, word: &str) -> Result<Vec<Vec<u32>>, EngineError> {
    let tokenizer = vocabulary.required_tokenizer()?;
    let inner = word.trim_start();
    let written = match inner {
        // White space alone is itself.
        "" => vec![word.to_owned()],
        _ => vec![inner.to_owned(), format!(" {inner}")],
    };
    let mut forms = Vec::new();
    for written in written {
        let ids = vocabulary.own(encode_piece(tokenizer, &written)?)?;
        if !ids.is_empty() && !forms.contains(&ids) {
            forms.push(ids);
        }
    }
    Ok(forms)
}
