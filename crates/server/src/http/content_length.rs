//! Scanner for excessive `Content-Length` values.
//!
//! hyper reports an oversized or invalid head if it cannot represent the length.

/// Maximum number of buffered bytes per line; enough for the name, whitespace and a 20-digit `u64`.
const MAX_KEPT: usize = 64;
/// Maximum length that hyper accepts.
const MAX_LENGTH: u64 = u64::MAX - 2;

/// Scanner for `Content-Length` in a head that arrives in pieces.
#[derive(Debug, Default)]
pub(crate) struct ContentLength {
    line: Vec<u8>,
    is_head_complete: bool,
    is_excessive: bool,
}

impl ContentLength {
    /// Scans the next bytes of the head.
    pub(crate) fn read(&mut self, bytes: &[u8]) {
        for byte in bytes {
            if self.is_head_complete {
                return;
            }
            match byte {
                b'\n' => self.end_line(),
                byte if self.line.len() < MAX_KEPT => self.line.push(*byte),
                _ => {}
            }
        }
    }

    /// Whether the head announces a body larger than hyper can represent.
    pub(crate) fn is_excessive(&self) -> bool {
        self.is_excessive
    }

    fn end_line(&mut self) {
        let line = self.line.trim_ascii();
        self.is_head_complete = line.is_empty();
        let mut parts = line.splitn(2, |byte| *byte == b':');
        if let (Some(name), Some(value)) = (parts.next(), parts.next())
            && name.eq_ignore_ascii_case(b"content-length")
        {
            let digits = value.trim_ascii();
            let is_number = !digits.is_empty() && digits.iter().all(u8::is_ascii_digit);
            let length = str::from_utf8(digits).ok().and_then(|digits| digits.parse::<u64>().ok());
            self.is_excessive |= is_number && length.is_none_or(|length| length > MAX_LENGTH);
        }
        self.line.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_excessive(head: &str) -> bool {
        // Split into pieces of several sizes.
        let found = [1, 7, head.len()].map(|size| {
            let mut scanner = ContentLength::default();
            head.as_bytes().chunks(size).for_each(|piece| scanner.read(piece));
            scanner.is_excessive()
        });
        assert!(found.iter().all(|other| *other == found[0]), "{head:?}");
        found[0]
    }

    #[test]
    fn excessive_content_lengths_are_detected() {
        for length in
            ["18446744073709551614", "18446744073709551615", "18446744073709551616", &"9".repeat(500)]
        {
            assert!(
                is_excessive(&format!("POST / HTTP/1.1\r\ncontent-LENGTH:  {length} \r\n\r\n")),
                "{length}"
            );
        }
        for head in [
            "POST / HTTP/1.1\r\nContent-Length: 18446744073709551613\r\n\r\n",
            "POST / HTTP/1.1\r\nContent-Length: -18446744073709551615\r\n\r\n",
            "POST / HTTP/1.1\r\nX-Content-Length: 18446744073709551615\r\n\r\n",
            "POST / HTTP/1.1\r\n\r\nContent-Length: 18446744073709551615\r\n\r\n",
            "POST / HTTP/1.1\n\nContent-Length: 18446744073709551615\n\n",
        ] {
            assert!(!is_excessive(head), "{head:?}");
        }
    }
}
