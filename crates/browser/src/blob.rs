//! Files that the user chose in the browser, read in parts on demand.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::io;

use candle_gpt2_weights::ReadAt;
use js_sys::{Reflect, Uint8Array};
use wasm_bindgen::{JsCast, JsValue};
use web_sys::{Blob, FileReaderSync};

/// Number of bytes read at a time; the browser makes an additional copy of each piece.
const PIECE: usize = 16 << 20;

thread_local! {
    /// Open files, keyed by number.
    ///
    /// JavaScript objects cannot move between threads, so a [`BlobFile`] holds a number instead.
    static OPEN: RefCell<HashMap<u64, Blob>> = RefCell::default();
    static NEXT: Cell<u64> = const { Cell::new(0) };
}

/// Handle to a user's file, which stays open until the handle is dropped.
///
/// Only web workers can read the file.
#[derive(Debug)]
pub(crate) struct BlobFile {
    number: u64,
    bytes: u64,
}

impl BlobFile {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "file sizes are non-negative integers"
    )]
    pub(crate) fn new(blob: Blob) -> Self {
        let number = NEXT.replace(NEXT.get() + 1);
        let bytes = blob.size() as u64;
        OPEN.with_borrow_mut(|open| open.insert(number, blob));
        Self { number, bytes }
    }

    /// Reads the bytes from `start` to `end`.
    ///
    /// JavaScript numbers represent file offsets exactly.
    fn piece(&self, start: u64, end: u64) -> Result<Uint8Array, JsValue> {
        let has_reader = Reflect::has(&js_sys::global(), &"FileReaderSync".into()).unwrap_or(false);
        if !has_reader {
            let what = "only web workers can read files in parts; use add_bytes instead";
            return Err(js_sys::Error::new(what).into());
        }
        let blob = OPEN.with_borrow(|open| open.get(&self.number).cloned()).ok_or(JsValue::NULL)?;
        let slice = blob.slice_with_f64_and_f64(start as f64, end as f64)?;
        Ok(Uint8Array::new(FileReaderSync::new()?.read_as_array_buffer(&slice)?.as_ref()))
    }
}

impl ReadAt for BlobFile {
    fn len(&self) -> u64 {
        self.bytes
    }

    fn read_at(&self, start: u64, to: &mut [u8]) -> io::Result<()> {
        let mut at = start;
        for to in to.chunks_mut(PIECE) {
            let end = at + to.len() as u64;
            let piece = self.piece(at, end).map_err(unreadable)?;
            if piece.length() as usize != to.len() {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            piece.copy_to(to);
            at = end;
        }
        Ok(())
    }
}

impl Drop for BlobFile {
    fn drop(&mut self) {
        OPEN.with_borrow_mut(|open| open.remove(&self.number));
    }
}

/// Converts the browser's error, for example if the file changed after it was chosen.
fn unreadable(error: JsValue) -> io::Error {
    let message = error.dyn_ref::<js_sys::Error>().map(js_sys::Error::message);
    let message = message.map(String::from).filter(|message| !message.is_empty());
    io::Error::other(message.unwrap_or_else(|| "the browser cannot read the file".to_owned()))
}
