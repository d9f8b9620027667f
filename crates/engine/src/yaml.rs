//! Limits on untrusted YAML, checked before a parser reads it.
//!
//! libyaml compares each token with all open brackets, and clears whole buffers after each blank. Therefore,
//! 100 kB of brackets or spaces can occupy it for a minute. [`check_yaml`] finds tokens in the same way, but
//! without their values, and stops at the first violation.
//!
//! # Source
//! libyaml 0.2.5, `scanner.c`: indentation, simple keys and the ends of scalars.

use std::iter::repeat_n;

use thiserror::Error;

/// Maximum nesting depth of brackets and indentation together.
const MAX_DEPTH: usize = 64;
/// Maximum length of a run of spaces, tabs and line breaks.
const MAX_BLANKS: usize = 4096;
/// Maximum distance from a key to its colon, in bytes.
const MAX_KEY_BYTES: usize = 1024;

/// Violated limit, returned by [`check_yaml`].
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum YamlError {
    /// Too many open brackets and indented blocks.
    #[error("line {line}: YAML nested deeper than {MAX_DEPTH} levels")]
    Depth {
        /// Line number, starting at 1.
        line: usize,
    },
    /// A long run of spaces and line breaks.
    #[error("line {line}: more than {MAX_BLANKS} spaces and line breaks in a row")]
    Blanks {
        /// Line number, starting at 1.
        line: usize,
    },
    /// A tag such as `!function`.
    #[error("line {line}: `{tag}`: tags are not supported")]
    Tag {
        /// Line number, starting at 1.
        line: usize,
        /// The tag, shortened.
        tag: String,
    },
    /// A directive such as `%TAG`.
    #[error("line {line}: directives such as %TAG are not supported; remove the line")]
    Directive {
        /// Line number, starting at 1.
        line: usize,
    },
}

/// Rejects YAML that libyaml could not parse in linear time, and any tags and directives.
///
/// Returns the depth of the deepest node. Invalid YAML is not rejected: it is checked up to its syntax error.
///
/// ```
/// use candle_gpt2_engine::check_yaml;
///
/// assert_eq!(check_yaml("choices: [no, yes] # [")?, 2);
/// let error = check_yaml(&"[".repeat(100_000)).unwrap_err();
/// assert_eq!(error.to_string(), "line 1: YAML nested deeper than 64 levels");
/// # Ok::<(), candle_gpt2_engine::YamlError>(())
/// ```
///
/// # Errors
/// A [`YamlError`] with the line number.
pub fn check_yaml(text: &str) -> Result<usize, YamlError> {
    let mut scanner = Scanner::new(text);
    while let Progress::Token = scanner.token()? {}
    Ok(scanner.deepest)
}

/// State after a token.
enum Progress {
    Token,
    /// End of the text, or a syntax error, which the parser will report.
    End,
}

/// Start of a possible block key without `?`.
struct SimpleKey {
    line: usize,
    index: usize,
    column: isize,
}

struct Scanner {
    /// Text followed by the end marker `\0` that libyaml appends.
    characters: Vec<char>,
    at: usize,
    line: usize,
    column: isize,
    /// Number of bytes before `at`.
    index: usize,
    /// Number of spaces, tabs and line breaks directly before `at`.
    blanks: usize,
    flow_level: usize,
    /// Columns of the open blocks, starting with -1.
    indents: Vec<isize>,
    simple_key: Option<SimpleKey>,
    simple_key_allowed: bool,
    deepest: usize,
}

fn is_break(character: char) -> bool {
    matches!(character, '\r' | '\n' | '\u{85}' | '\u{2028}' | '\u{2029}')
}

fn is_blank(character: char) -> bool {
    matches!(character, ' ' | '\t')
}

/// Whether a character is a blank, a line break or the end.
fn is_blank_or_end(character: char) -> bool {
    is_blank(character) || is_break(character) || character == '\0'
}

impl Scanner {
    fn new(text: &str) -> Self {
        let text = text.strip_prefix('\u{feff}').unwrap_or(text);
        Self {
            // Enough end markers for the longest lookahead.
            characters: text.chars().chain(repeat_n('\0', 4)).collect(),
            at: 0,
            line: 0,
            column: 0,
            index: 0,
            blanks: 0,
            flow_level: 0,
            indents: vec![-1],
            simple_key: None,
            simple_key_allowed: true,
            deepest: 0,
        }
    }

    fn peek(&self, ahead: usize) -> char {
        self.characters.get(self.at + ahead).copied().unwrap_or('\0')
    }

    fn is_at_end(&self) -> bool {
        self.peek(0) == '\0'
    }

    /// Skips a character other than the end; a line break ends the line.
    fn skip(&mut self) -> Result<(), YamlError> {
        let character = self.peek(0);
        if is_blank(character) || is_break(character) {
            self.blanks += 1;
            if self.blanks > MAX_BLANKS {
                return Err(YamlError::Blanks { line: self.line + 1 });
            }
        } else {
            self.blanks = 0;
        }
        let is_first_of_pair = character == '\r' && self.peek(1) == '\n';
        self.at += 1;
        self.index += character.len_utf8();
        if is_break(character) && !is_first_of_pair {
            (self.line, self.column) = (self.line + 1, 0);
        } else if !is_break(character) {
            self.column += 1;
        }
        if is_first_of_pair { self.skip() } else { Ok(()) }
    }

    fn skip_while(&mut self, is_skipped: impl Fn(char) -> bool) -> Result<(), YamlError> {
        while !self.is_at_end() && is_skipped(self.peek(0)) {
            self.skip()?;
        }
        Ok(())
    }

    fn indent(&self) -> isize {
        self.indents.last().copied().unwrap_or(-1)
    }

    /// Whether the line begins with a document marker, `---` or `...`.
    fn is_at_marker(&self) -> bool {
        let first = self.peek(0);
        self.column == 0
            && matches!(first, '-' | '.')
            && self.peek(1) == first
            && self.peek(2) == first
            && is_blank_or_end(self.peek(3))
    }

    fn check_depth(&mut self) -> Result<(), YamlError> {
        self.deepest = self.deepest.max(self.indents.len() - 1 + self.flow_level);
        match self.deepest > MAX_DEPTH {
            true => Err(YamlError::Depth { line: self.line + 1 }),
            false => Ok(()),
        }
    }

    /// Opens a block at a column unless it is already open.
    fn roll_indent(&mut self, column: isize) -> Result<(), YamlError> {
        if self.flow_level == 0 && self.indent() < column {
            self.indents.push(column);
            self.check_depth()?;
        }
        Ok(())
    }

    /// Closes the blocks with deeper indentation.
    fn unroll_indent(&mut self, column: isize) {
        while self.flow_level == 0 && self.indents.len() > 1 && self.indent() > column {
            self.indents.pop();
        }
    }

    fn save_simple_key(&mut self) {
        if self.simple_key_allowed && self.flow_level == 0 {
            self.simple_key = Some(SimpleKey { line: self.line, index: self.index, column: self.column });
        }
    }

    fn remove_simple_key(&mut self) {
        if self.flow_level == 0 {
            self.simple_key = None;
        }
    }

    fn skip_to_token(&mut self) -> Result<(), YamlError> {
        loop {
            if self.column == 0 && self.peek(0) == '\u{feff}' {
                self.skip()?;
            }
            let are_tabs_skipped = self.flow_level > 0 || !self.simple_key_allowed;
            self.skip_while(|character| character == ' ' || are_tabs_skipped && character == '\t')?;
            if self.peek(0) == '#' {
                self.skip_while(|character| !is_break(character))?;
            }
            if !is_break(self.peek(0)) {
                return Ok(());
            }
            self.skip()?;
            self.simple_key_allowed |= self.flow_level == 0;
        }
    }

    /// Skips a token.
    fn token(&mut self) -> Result<Progress, YamlError> {
        self.skip_to_token()?;
        let is_stale =
            |key: &SimpleKey| key.line < self.line || key.index.saturating_add(MAX_KEY_BYTES) < self.index;
        if self.simple_key.as_ref().is_some_and(is_stale) {
            self.simple_key = None;
        }
        self.unroll_indent(self.column);
        let (first, next) = (self.peek(0), self.peek(1));
        let is_in_flow = self.flow_level > 0;
        match first {
            '\0' => return Ok(Progress::End),
            '%' if self.column == 0 => return Err(YamlError::Directive { line: self.line + 1 }),
            _ if self.is_at_marker() => {
                self.unroll_indent(-1);
                self.remove_simple_key();
                self.simple_key_allowed = false;
                for _ in 0..3 {
                    self.skip()?;
                }
            }
            '[' | '{' => {
                self.save_simple_key();
                self.flow_level += 1;
                self.check_depth()?;
                self.simple_key_allowed = true;
                self.skip()?;
            }
            ']' | '}' => {
                self.remove_simple_key();
                self.flow_level = self.flow_level.saturating_sub(1);
                self.simple_key_allowed = false;
                self.skip()?;
            }
            ',' => {
                self.remove_simple_key();
                self.simple_key_allowed = true;
                self.skip()?;
            }
            '-' if is_blank_or_end(next) => {
                if !is_in_flow && !self.simple_key_allowed {
                    return Ok(Progress::End);
                }
                self.roll_indent(self.column)?;
                self.remove_simple_key();
                self.simple_key_allowed = true;
                self.skip()?;
            }
            '?' | ':' if is_in_flow || is_blank_or_end(next) => {
                let key = self.simple_key.take_if(|_| first == ':' && !is_in_flow);
                if key.is_none() && !is_in_flow && !self.simple_key_allowed {
                    return Ok(Progress::End);
                }
                self.simple_key_allowed = key.is_none() && !is_in_flow;
                self.roll_indent(key.map_or(self.column, |key| key.column))?;
                self.remove_simple_key();
                self.skip()?;
            }
            '*' | '&' => {
                self.save_simple_key();
                self.simple_key_allowed = false;
                self.skip()?;
                self.skip_while(|character| character.is_ascii_alphanumeric() || "_-".contains(character))?;
            }
            '!' => {
                /// Maximum length of a tag in a message, in characters.
                const SHOWN: usize = 40;
                let rest = &self.characters[self.at..];
                let tag = rest.iter().take_while(|character| !is_blank_or_end(**character)).take(SHOWN);
                return Err(YamlError::Tag { line: self.line + 1, tag: tag.collect() });
            }
            '|' | '>' if !is_in_flow => {
                self.remove_simple_key();
                self.simple_key_allowed = true;
                return self.block_scalar();
            }
            '\'' | '"' => {
                self.save_simple_key();
                self.simple_key_allowed = false;
                return self.quoted(first);
            }
            '-' => return self.plain(),
            '?' | ':' if !is_in_flow => return self.plain(),
            '?' | ':' | '#' | '|' | '>' | '%' | '@' | '`' => return Ok(Progress::End),
            _ if is_blank_or_end(first) => return Ok(Progress::End),
            _ => return self.plain(),
        }
        Ok(Progress::Token)
    }

    fn quoted(&mut self, quote: char) -> Result<Progress, YamlError> {
        self.skip()?;
        loop {
            if self.is_at_marker() || self.is_at_end() {
                return Ok(Progress::End);
            }
            let (character, next) = (self.peek(0), self.peek(1));
            let is_escape = match quote {
                '"' => character == '\\',
                _ => character == quote && next == quote,
            };
            self.skip()?;
            if is_escape {
                if self.is_at_end() {
                    return Ok(Progress::End);
                }
                self.skip()?;
            } else if character == quote {
                return Ok(Progress::Token);
            }
        }
    }

    fn plain(&mut self) -> Result<Progress, YamlError> {
        self.save_simple_key();
        self.simple_key_allowed = false;
        let (indent, is_in_flow) = (self.indent() + 1, self.flow_level > 0);
        let mut is_after_break = false;
        loop {
            if self.is_at_marker() || self.peek(0) == '#' {
                break;
            }
            while !is_blank_or_end(self.peek(0)) {
                let (character, next) = (self.peek(0), self.peek(1));
                if is_in_flow && character == ':' && ",?[]{}".contains(next) {
                    return Ok(Progress::End);
                }
                if character == ':' && is_blank_or_end(next) || is_in_flow && ",[]{}".contains(character) {
                    break;
                }
                is_after_break = false;
                self.skip()?;
            }
            if self.is_at_end() || !is_blank_or_end(self.peek(0)) {
                break;
            }
            while is_blank(self.peek(0)) || is_break(self.peek(0)) {
                if is_after_break && self.column < indent && self.peek(0) == '\t' {
                    return Ok(Progress::End);
                }
                is_after_break |= is_break(self.peek(0));
                self.skip()?;
            }
            if !is_in_flow && self.column < indent {
                break;
            }
        }
        self.simple_key_allowed |= is_after_break;
        Ok(Progress::Token)
    }

    fn block_scalar(&mut self) -> Result<Progress, YamlError> {
        self.skip()?;
        let mut increment = None;
        // Chomping and indentation indicators, in either order.
        for _ in 0..2 {
            match self.peek(0) {
                '+' | '-' => self.skip()?,
                digit @ '1'..='9' if increment.is_none() => {
                    increment = digit.to_digit(10);
                    self.skip()?;
                }
                _ => {}
            }
        }
        self.skip_while(is_blank)?;
        if self.peek(0) == '#' {
            self.skip_while(|character| !is_break(character))?;
        }
        if !is_break(self.peek(0)) {
            return Ok(Progress::End);
        }
        self.skip()?;
        let increment = increment.and_then(|increment| isize::try_from(increment).ok());
        let mut indent = increment.map(|increment| self.indent().max(0) + increment);
        loop {
            let mut widest = 0;
            loop {
                while self.peek(0) == ' ' && indent.is_none_or(|indent| self.column < indent) {
                    self.skip()?;
                }
                widest = widest.max(self.column);
                if self.peek(0) == '\t' && indent.is_none_or(|indent| self.column < indent) {
                    return Ok(Progress::End);
                }
                if !is_break(self.peek(0)) {
                    break;
                }
                self.skip()?;
            }
            let indent = *indent.get_or_insert(widest.max(self.indent() + 1).max(1));
            if self.column != indent || self.is_at_end() {
                return Ok(Progress::Token);
            }
            self.skip_while(|character| !is_break(character))?;
            if !self.is_at_end() {
                self.skip()?;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn brackets_inside_scalars_and_comments_do_not_count() {
        let brackets = "[{".repeat(500);
        for text in [
            format!("a: '{brackets}'"),
            format!("a: 'it''s {brackets}'"),
            format!("a: \"\\\" {brackets}\""),
            format!("a: it's {brackets}\nb: c"),
            format!("a: text\n  'continued {brackets}\nb: c"),
            format!("a: |-\n  {brackets}\n\n   'x {brackets}\nb: c"),
            format!("a:\n- >2\n    {brackets}\n- b"),
            format!("a: b # {brackets}\n# {brackets}\nc: d"),
            format!("? {brackets}").replace("? ", "? x"),
        ] {
            assert!(check_yaml(&text).is_ok_and(|depth| depth <= 3), "{text:.40}");
        }
    }

    #[test]
    fn deep_nesting_is_rejected() {
        let steps: String = (0..100).map(|depth| format!("{}a:\n", " ".repeat(depth))).collect();
        let steps_of_lists: String = (0..100).map(|depth| format!("{}-\n", " ".repeat(depth))).collect();
        let open = "[".repeat(100);
        let openings = [
            "x: ".to_owned() + &open,
            "{a: ".repeat(100),
            "- ".repeat(100),
            "? ".repeat(100),
            "[\n".repeat(100),
            "[? ".repeat(100),
            steps,
            steps_of_lists,
        ];
        let hidden = [
            "'' : ",
            "a: \"x\"\nb: ",
            "a: |\n x\nb: ",
            "a: |2\n  '\nb: ",
            "a: '\n  '\nb: ",
            "a: it's\nb: ",
            "a: &x ",
            "a: ['\n]', ",
            "a: \"\\\\\" \nb: ",
            "a: >-\n\n  '\n\nb: ",
            "---\na: ",
            "a: b\n...\n---\n",
            "a: x\n 'y\nb: ",
            "a: [x 'y, ",
            "\u{feff}a: ",
            "a: b\r\nc: ",
            "a: b\rc: ",
            "a: b\u{2028}c: ",
            "a:\n- |\n  '\n- ",
            "- |1\n  '\n- ",
            "a: \"\\\n  '\" \nb: ",
        ];
        let after = hidden.map(|before| format!("{before}{open}"));
        for text in openings.iter().chain(&after) {
            assert!(matches!(check_yaml(text), Err(YamlError::Depth { .. })), "{text:.60}");
        }
    }

    #[test]
    fn long_runs_of_blanks_are_rejected() {
        let blanks = " ".repeat(5000);
        for text in [format!("a: '{blanks}'"), format!("a: |\n{}", "\n".repeat(5000)), blanks] {
            assert_eq!(check_yaml(&text).map_err(|error| error.to_string().contains("in a row")), Err(true));
        }
        assert!(check_yaml(&"a: b # x\n".repeat(5000)).is_ok());
    }

    #[test]
    fn tags_and_directives_are_rejected() {
        let found = |text: &str| check_yaml(text).unwrap_err().to_string();
        assert_eq!(found("a: b\nc: !function x.y"), "line 2: `!function`: tags are not supported");
        assert_eq!(found("%TAG ! x"), "line 1: directives such as %TAG are not supported; remove the line");
        assert!(check_yaml("a: b!c %d\nd: '!e'").is_ok());
    }
}
