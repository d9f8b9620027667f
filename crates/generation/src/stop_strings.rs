//! Incremental search for stop strings in text that arrives in pieces.
//!
//! Each byte is examined once, regardless of the lengths of the text and of the strings.
//!
//! Source: Knuth, Morris, Pratt, "Fast Pattern Matching in Strings" (SIAM Journal on Computing 6,
//! 1977).

/// Text filter that ends the text before the first stop string.
#[derive(Debug, Clone)]
pub(crate) struct StopStrings {
    searches: Vec<Search>,
    /// Text that is held back because it may begin a stop string.
    held: String,
    is_found: bool,
}

impl StopStrings {
    /// Creates a search for these strings; empty strings are never found.
    pub(crate) fn new(strings: &[String]) -> Self {
        let searches = strings.iter().filter(|string| !string.is_empty()).map(|string| Search::new(string));
        Self { searches: searches.collect(), held: String::new(), is_found: false }
    }

    pub(crate) fn is_found(&self) -> bool {
        self.is_found
    }

    /// Adds a piece of text and returns the text that can now be shown.
    ///
    /// If the piece completes several strings, the one that begins first counts.
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

    /// Returns the remaining held-back text, which turned out not to begin a stop string.
    pub(crate) fn finish(self) -> String {
        if self.is_found { String::new() } else { self.held }
    }
}

/// Incremental search for a single string.
#[derive(Debug, Clone)]
struct Search {
    string: Vec<u8>,
    /// Border lengths of the Knuth-Morris-Pratt algorithm, in bytes.
    ///
    /// For each prefix of the string, indexed by its last byte: the longest shorter prefix that is also its
    /// suffix.
    borders: Vec<usize>,
    /// Number of bytes of the string that match the end of the text.
    matched: usize,
}

impl Search {
    fn new(string: &str) -> Self {
        let mut search = Self { string: string.into(), borders: vec![0], matched: 0 };
        // Searches for the string in itself, from its second byte onward.
        for byte in string.bytes().skip(1) {
            search.advance(byte);
            search.borders.push(search.matched);
        }
        Self { matched: 0, ..search }
    }

    /// Returns the start of a match that ends in `piece`; `offset` bytes precede the piece.
    ///
    /// A match of valid UTF-8 always begins and ends at character boundaries.
    fn start_in(&mut self, piece: &str, offset: usize) -> Option<usize> {
        let end = piece.bytes().position(|byte| self.advance(byte));
        end.map(|last| offset + last + 1 - self.string.len())
    }

    /// Advances the search by one byte; returns whether the text now ends with the string.
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
