//! The search for stop strings in a text that comes in pieces: each byte is looked at once, however long the text and the
//! strings are.
//!
//! Source: Knuth, Morris, Pratt, "Fast Pattern Matching in Strings" (SIAM Journal on Computing 6, 1977).

/// A text up to the first of some strings.
#[derive(Debug, Clone)]
pub(crate) struct StopStrings {
    searches: Vec<Search>,
    /// The end of the text that one of the strings begins with; it is not shown yet.
    held: String,
    is_found: bool,
}

impl StopStrings {
    /// A search for these; empty ones are never found.
    pub(crate) fn new(strings: &[String]) -> Self {
        let searches = strings.iter().filter(|string| !string.is_empty()).map(|string| Search::new(string));
        Self { searches: searches.collect(), held: String::new(), is_found: false }
    }

    pub(crate) fn is_found(&self) -> bool {
        self.is_found
    }

    /// What can be shown once the text has gained `piece`. Of several strings in it the one that begins first counts.
    pub(crate) fn push(&mut self, piece: &str) -> String {
        if self.is_found {
            return String::new();
        }
        let held_before = self.held.len();
        self.held.push_str(piece);
        let ends = self.searches.iter_mut().filter_map(|search| search.start_in(piece, held_before));
        let start = ends.min();
        self.is_found = start.is_some();
        let begun = self.searches.iter().map(|search| search.matched).max().unwrap_or(0);
        let shown = start.unwrap_or(self.held.len() - begun);
        let rest = self.held.split_off(shown);
        std::mem::replace(&mut self.held, rest)
    }

    /// What only began like one of the strings, once the text has ended.
    pub(crate) fn finish(self) -> String {
        if self.is_found { String::new() } else { self.held }
    }
}

/// The search for one string.
#[derive(Debug, Clone)]
struct Search {
    string: Vec<u8>,
    /// For each beginning of the string, by its last byte: the longest shorter beginning that it ends with, in bytes.
    borders: Vec<usize>,
    /// Bytes of the string that the text ends with.
    matched: usize,
}

impl Search {
    fn new(string: &str) -> Self {
        let mut search = Self { string: string.into(), borders: vec![0], matched: 0 };
        // The string is searched for in itself, from its second byte on.
        for byte in string.bytes().skip(1) {
            search.advance(byte);
            search.borders.push(search.matched);
        }
        Self { matched: 0, ..search }
    }

    /// Where the string begins that ends in `piece`, which comes after `offset` bytes; whole characters match whole ones.
    fn start_in(&mut self, piece: &str, offset: usize) -> Option<usize> {
        let end = piece.bytes().position(|byte| self.advance(byte));
        end.map(|last| offset + last + 1 - self.string.len())
    }

    /// Takes the next byte of the text; true if the string ends with it.
    fn advance(&mut self, byte: u8) -> bool {
        while self.matched > 0 && self.string.get(self.matched) != Some(&byte) {
            self.matched = self.borders[self.matched - 1];
        }
        if self.string[self.matched] == byte {
            self.matched += 1;
        }
        self.matched == self.string.len()
    }
}
