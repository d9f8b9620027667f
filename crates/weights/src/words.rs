//! Splits text into words before byte pair encoding. No token spans two words.
//!
//! The words are the consecutive matches of OpenAI's regular expression
//! `'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+` (`encoder.py`), which covers
//! every text completely. The expression is implemented by hand, because a regex engine takes most of a
//! tokenizer's time.

use regex_syntax::hir::{Class as ParsedClass, HirKind};

/// Character classes in the splitting expression.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
enum Class {
    /// Any other character: `[^\s\p{L}\p{N}]`.
    Other,
    /// Letters: `\p{L}`.
    Letter,
    /// Numbers: `\p{N}`.
    Number,
    /// Whitespace: `\s`.
    Space,
}

/// Classes, indexed by numeric value.
const CLASSES: [Class; 4] = [Class::Other, Class::Letter, Class::Number, Class::Space];
/// Number of character classes packed into a byte.
const PER_BYTE: usize = 4;
/// Number of code points: U+0000 to U+10FFFF.
const CHARACTERS: usize = 0x11_0000;
const CONTRACTIONS: [&[u8]; 7] = [b"'s", b"'t", b"'re", b"'ve", b"'m", b"'ll", b"'d"];

/// Word splitter.
pub(crate) struct Words {
    ascii: [Class; 128],
    /// Class of each character, in two bits.
    all: Vec<u8>,
}

impl Words {
    /// Builds the classes from the Unicode tables of the regex library used by the tokenizer itself.
    ///
    /// `None` if the library lacks these tables.
    pub(crate) fn new() -> Option<Self> {
        let mut words = Self { ascii: [Class::Other; 128], all: vec![0; CHARACTERS / PER_BYTE] };
        for (expression, class) in
            [(r"\p{L}", Class::Letter), (r"\p{N}", Class::Number), (r"\s", Class::Space)]
        {
            let parsed = regex_syntax::parse(expression).ok()?;
            let HirKind::Class(ParsedClass::Unicode(parsed)) = parsed.kind() else { return None };
            for range in parsed.ranges() {
                for number in range.start()..=range.end() {
                    words.set(number, class);
                }
            }
        }
        Some(words)
    }

    fn set(&mut self, character: char, class: Class) {
        let number = character as usize;
        self.all[number / PER_BYTE] |= (class as u8) << (2 * (number % PER_BYTE));
        if let Some(ascii) = self.ascii.get_mut(number) {
            *ascii = class;
        }
    }

    fn class(&self, character: char) -> Class {
        let number = character as usize;
        CLASSES[usize::from(self.all[number / PER_BYTE] >> (2 * (number % PER_BYTE)) & 3)]
    }

    /// Returns the class and end of the character at `offset`; `offset` must be inside the text.
    #[inline]
    fn at(&self, text: &str, offset: usize) -> (Class, usize) {
        match self.ascii.get(usize::from(text.as_bytes()[offset])) {
            Some(class) => (*class, offset + 1),
            None => {
                let character = text.get(offset..).and_then(|rest| rest.chars().next()).unwrap_or_default();
                (self.class(character), offset + character.len_utf8())
            }
        }
    }

    /// Returns the end of the run of `class` characters that starts at `offset`.
    #[inline]
    fn run(&self, class: Class, text: &str, mut offset: usize) -> usize {
        while offset < text.len() {
            let (found, end) = self.at(text, offset);
            if found != class {
                break;
            }
            offset = end;
        }
        offset
    }

    /// Returns the end of the word that starts at `offset`; `offset` must be inside the text.
    #[inline]
    pub(crate) fn end(&self, text: &str, offset: usize) -> usize {
        let bytes = text.as_bytes();
        if bytes[offset] == b'\'' {
            let rest = &bytes[offset..];
            if let Some(contraction) = CONTRACTIONS.iter().find(|contraction| rest.starts_with(contraction)) {
                return offset + contraction.len();
            }
        }
        let (mut class, mut end) = self.at(text, offset);
        if bytes[offset] == b' ' && end < text.len() {
            let (after, after_end) = self.at(text, end);
            if after != Class::Space {
                (class, end) = (after, after_end);
            }
        }
        if class == Class::Space { self.end_of_spaces(text, offset) } else { self.run(class, text, end) }
    }

    /// Returns the end of a run of spaces. Before a non-space, the last space belongs to the next word.
    fn end_of_spaces(&self, text: &str, offset: usize) -> usize {
        let (mut last, mut end) = (offset, offset);
        while end < text.len() {
            let (class, next) = self.at(text, end);
            if class != Class::Space {
                return if last == offset { end } else { last };
            }
            (last, end) = (end, next);
        }
        end
    }

    /// Finds the first position at or after `from` where the text can be split safely.
    ///
    /// A word ends there regardless of the context, and the bytes that follow can only be split in one way.
    /// `bytes` need not be valid UTF-8. Such a position is before a space or line break that is followed by
    /// an ASCII letter or digit. For scripts without spaces, it is before non-ASCII punctuation that
    /// follows a letter or number.
    pub(crate) fn cut(&self, bytes: &[u8], from: usize) -> Option<usize> {
        let is_cut = |offset: usize| match bytes[offset] {
            b' ' | b'\n' => bytes.get(offset + 1).is_some_and(u8::is_ascii_alphanumeric),
            0xc0.. => {
                let after = character(&bytes[offset..]);
                let before = (1..=4.min(offset)).find(|length| bytes[offset - length] & 0xc0 != 0x80);
                let before = before.and_then(|length| character(&bytes[offset - length..offset]));
                after.is_some_and(|after| self.class(after) == Class::Other)
                    && before
                        .is_some_and(|before| matches!(self.class(before), Class::Letter | Class::Number))
            }
            _ => false,
        };
        (from.max(1)..bytes.len()).find(|offset| is_cut(*offset))
    }
}

/// Returns the first character of a byte string, if it is valid.
fn character(bytes: &[u8]) -> Option<char> {
    let bytes = &bytes[..bytes.len().min(4)];
    let valid = match str::from_utf8(bytes) {
        Ok(text) => text,
        Err(error) => str::from_utf8(&bytes[..error.valid_up_to()]).ok()?,
    };
    valid.chars().next()
}
