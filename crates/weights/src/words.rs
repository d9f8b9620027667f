//! The words that GPT-2's tokenizer cuts a text into before it joins bytes to tokens: no token spans two of them.
//!
//! The words are the matches, one after the other, of OpenAI's expression
//! `'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+` (`encoder.py`), which match every text whole. Here
//! it is written out: an engine of expressions takes most of a tokenizer's time.

use regex_syntax::hir::{Class as ParsedClass, HirKind};

/// What the expression tells apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
enum Class {
    /// `[^\s\p{L}\p{N}]`
    Other,
    /// `\p{L}`
    Letter,
    /// `\p{N}`
    Number,
    /// `\s`
    Space,
}

/// The classes by the numbers that they are kept as.
const CLASSES: [Class; 4] = [Class::Other, Class::Letter, Class::Number, Class::Space];
/// Characters whose classes are kept in one byte.
const PER_BYTE: usize = 4;
/// Numbers of characters: U+0000 to U+10FFFF.
const CHARACTERS: usize = 0x11_0000;
const CONTRACTIONS: [&[u8]; 7] = [b"'s", b"'t", b"'re", b"'ve", b"'m", b"'ll", b"'d"];

/// Cuts texts into words.
pub(crate) struct Words {
    ascii: [Class; 128],
    /// Two bits for each character.
    all: Vec<u8>,
}

impl Words {
    /// The classes come from the tables of the library that the tokenizer's own expression is compiled with. `None` if it
    /// has no such tables.
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

    /// The class of the character at a place before the end, and where it ends.
    #[inline]
    fn at(&self, text: &str, place: usize) -> (Class, usize) {
        match self.ascii.get(usize::from(text.as_bytes()[place])) {
            Some(class) => (*class, place + 1),
            None => {
                let character = text.get(place..).and_then(|rest| rest.chars().next()).unwrap_or_default();
                (self.class(character), place + character.len_utf8())
            }
        }
    }

    /// Where the characters of a class that begin at a place end.
    #[inline]
    fn run(&self, class: Class, text: &str, mut place: usize) -> usize {
        while place < text.len() {
            let (found, end) = self.at(text, place);
            if found != class {
                break;
            }
            place = end;
        }
        place
    }

    /// Where the word that begins at a place before the end ends.
    #[inline]
    pub(crate) fn end(&self, text: &str, place: usize) -> usize {
        let bytes = text.as_bytes();
        if bytes[place] == b'\'' {
            let rest = &bytes[place..];
            if let Some(contraction) = CONTRACTIONS.iter().find(|contraction| rest.starts_with(contraction)) {
                return place + contraction.len();
            }
        }
        let (mut class, mut end) = self.at(text, place);
        if bytes[place] == b' ' && end < text.len() {
            let (after, after_end) = self.at(text, end);
            if after != Class::Space {
                (class, end) = (after, after_end);
            }
        }
        if class == Class::Space { self.end_of_spaces(text, place) } else { self.run(class, text, end) }
    }

    /// Spaces before a character that is none leave the last of them to the next word.
    fn end_of_spaces(&self, text: &str, place: usize) -> usize {
        let (mut last, mut end) = (place, place);
        while end < text.len() {
            let (class, next) = self.at(text, end);
            if class != Class::Space {
                return if last == place { end } else { last };
            }
            (last, end) = (end, next);
        }
        end
    }

    /// The first place from `from` on, in bytes that may be no text at all, where a text may be cut: whatever is before and after it, a
    /// word ends there and no other reading of what follows is possible. That is before a space or a line break with an ASCII letter or
    /// digit after it, or, for scripts without spaces, before punctuation outside ASCII that follows a letter or a number.
    pub(crate) fn cut(&self, bytes: &[u8], from: usize) -> Option<usize> {
        let is_cut = |place: usize| match bytes[place] {
            b' ' | b'\n' => bytes.get(place + 1).is_some_and(u8::is_ascii_alphanumeric),
            0xc0.. => {
                let after = character(&bytes[place..]);
                let before = (1..=4.min(place)).find(|length| bytes[place - length] & 0xc0 != 0x80);
                let before = before.and_then(|length| character(&bytes[place - length..place]));
                after.is_some_and(|after| self.class(after) == Class::Other)
                    && before
                        .is_some_and(|before| matches!(self.class(before), Class::Letter | Class::Number))
            }
            _ => false,
        };
        (from.max(1)..bytes.len()).find(|place| is_cut(*place))
    }
}

/// The character that bytes begin with.
fn character(bytes: &[u8]) -> Option<char> {
    let bytes = &bytes[..bytes.len().min(4)];
    let valid = match str::from_utf8(bytes) {
        Ok(text) => text,
        Err(error) => str::from_utf8(&bytes[..error.valid_up_to()]).ok()?,
    };
    valid.chars().next()
}
