//! Interruptible encoding of whole texts, which may take seconds.

use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::thread;
use std::time::Duration;

use candle_gpt2_engine::Vocabulary;

use crate::{EvaluationError, Setting};

/// Maximum size of text that is encoded without a separate thread, in bytes.
const SHORT: usize = 16 * 1024;
/// Interval between checks for an interruption.
const INTERVAL: Duration = Duration::from_millis(20);

/// Function that encodes text.
type Encode = fn(&Vocabulary, &str) -> Result<Vec<u32>, EvaluationError>;

/// Encodes text; an interruption takes effect even while a long text is being encoded.
///
/// A tokenizer encodes its input as a whole. A long text is therefore encoded on its own thread, and an
/// interruption does not wait for this thread.
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
        // The system is out of threads.
        return encode(setting.vocabulary, text);
    }
    loop {
        match receiver.recv_timeout(INTERVAL) {
            Ok(ids) => return ids,
            Err(RecvTimeoutError::Timeout) if setting.reporter.is_interrupted() => {
                return Err(EvaluationError::Interrupted);
            }
            Err(RecvTimeoutError::Timeout) => {}
            // The thread panicked. Encode on this thread, which repeats the panic where it is visible.
            Err(RecvTimeoutError::Disconnected) => return encode(setting.vocabulary, text),
        }
    }
}

/// Encodes text with the vocabulary's own rules.
pub(crate) fn encode_text(setting: &Setting<'_>, text: &str) -> Result<Vec<u32>, EvaluationError> {
    encode_long(setting, text, |vocabulary, text| Ok(vocabulary.encode(text)?))
}
