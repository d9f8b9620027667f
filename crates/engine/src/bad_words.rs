//! Token sequences for words that must not be generated.

use candle_gpt2_weights::encode_piece;

use crate::{EngineError, Vocabulary};

/// Returns the token sequences to ban for a word, both at the start of a text and after a space.
///
/// A leading space in `word` makes no difference.
///
/// # Errors
/// If there is no tokenizer, it cannot encode the word, or the model lacks one of the tokens.
///
/// # Source
/// vLLM's `bad_words` (`SamplingParams.update_from_tokenizer`). vLLM bans the form after a space only if both
/// forms have the same number of tokens. This function always bans both.
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
        // White space alone has only one form.
        "" => vec![word.to_owned()],
        _ => vec![inner.to_owned(), format!(" {inner}")],
    };
    let mut forms = Vec::new();
    for written in written {
        let ids = vocabulary.check_ids(encode_piece(tokenizer, &written)?)?;
        if !ids.is_empty() && !forms.contains(&ids) {
            forms.push(ids);
        }
    }
    Ok(forms)
}
