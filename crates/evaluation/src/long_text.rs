//! The tokens of a whole text, which may take seconds: the user may end that.

use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::thread;
use std::time::Duration;

use candle_gpt2_engine::Vocabulary;

use crate::{EvaluationError, Setting};

/// Bytes of a text that are encoded in a moment.
const SHORT: usize = 16 * 1024;
/// How often the user is asked.
const INTERVAL: Duration = Duration::from_millis(20);

/// What makes tokens of a text.
type Encode = fn(&Vocabulary, &str) -> Result<Vec<u32>, EvaluationError>;

/// The tokens of a text by `encode`. A tokenizer takes a text as a whole, so a long one has a thread of its own, which an
/// interruption does not wait for.
pub(crate) fn encode_long(
    setting: &Setting<'_>,
    text: &str,
    encode: Encode,
) -> Result<Vec<u32>, EvaluationError> {
    if text.len() <= SHORT {
        return encode(setting.vocabulary, text);
    }
    let (sender, receiver) = sync_channel(1);
    let (vocabulary, whole) = (setting.vocabulary.clone(), text.to_owned());
    let encoding = thread::Builder::new().spawn(move || sender.send(encode(&vocabulary, &whole)));
    if encoding.is_err() {
        // The system has no more threads.
        return encode(setting.vocabulary, text);
    }
    loop {
        match receiver.recv_timeout(INTERVAL) {
            Ok(ids) => return ids,
            Err(RecvTimeoutError::Timeout) if setting.reporter.is_interrupted() => {
                return Err(EvaluationError::Interrupted);
            }
            Err(RecvTimeoutError::Timeout) => {}
            // It panicked, and does so here too, where that is seen.
            Err(RecvTimeoutError::Disconnected) => return encode(setting.vocabulary, text),
        }
    }
}

/// The tokens of a text by the vocabulary's own rules.
pub(crate) fn encode_text(setting: &Setting<'_>, text: &str) -> Result<Vec<u32>, EvaluationError> {
    encode_long(setting, text, |vocabulary, text| Ok(vocabulary.encode(text)?))
}
