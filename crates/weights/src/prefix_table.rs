//! Table of byte strings, searched for prefixes of a string.

use std::ops::Range;

use crate::library_encoder::Budget;

/// Sorted byte strings with their ids.
#[derive(Debug, Default)]
pub(crate) struct PrefixTable {
    entries: Vec<(Vec<u8>, u32)>,
    /// Ranges of the entries that start with each byte.
    by_first: Vec<Range<usize>>,
}

impl PrefixTable {
    /// Builds the table. Empty strings are dropped.
    pub(crate) fn new(mut entries: Vec<(Vec<u8>, u32)>) -> Self {
        entries.retain(|(text, _)| !text.is_empty());
        entries.sort_unstable();
        let start = |first: usize| entries.partition_point(|(text, _)| usize::from(text[0]) < first);
        let by_first = (0..256).map(|first| start(first)..start(first + 1)).collect();
        Self { entries, by_first }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Returns the entries that are prefixes of a string, shortest first, as lengths and ids.
    pub(crate) fn prefixes<'a>(&'a self, text: &'a [u8]) -> Prefixes<'a> {
        let range = text
            .first()
            .map_or(0..0, |first| self.by_first.get(usize::from(*first)).cloned().unwrap_or(0..0));
        Prefixes { entries: &self.entries, text, range, length: 1 }
    }

    /// Returns the length and id of the longest entry that is a prefix of a string.
    ///
    /// # Errors
    /// If the search exceeds the budget.
    pub(crate) fn longest(&self, text: &[u8], budget: &mut Budget) -> Result<Option<(usize, u32)>, String> {
        if self.is_empty() {
            return Ok(None);
        }
        let mut prefixes = self.prefixes(text);
        let found = prefixes.by_ref().last();
        prefixes.spend(budget)?;
        Ok(found)
    }
}

/// Iterator returned by [`PrefixTable::prefixes`].
pub(crate) struct Prefixes<'a> {
    entries: &'a [(Vec<u8>, u32)],
    text: &'a [u8],
    /// Remaining entries that share their first `length` bytes with the text.
    range: Range<usize>,
    length: usize,
}

impl Prefixes<'_> {
    /// Charges the cost of the search to the budget.
    ///
    /// # Errors
    /// If the budget is exceeded.
    pub(crate) fn spend(&self, budget: &mut Budget) -> Result<(), String> {
        /// Cost of a search step, in hashed bytes.
        const STEP_COST: usize = 16;
        budget.spend(STEP_COST * self.length)
    }
}

impl Iterator for Prefixes<'_> {
    type Item = (usize, u32);

    fn next(&mut self) -> Option<(usize, u32)> {
        while !self.range.is_empty() {
            // In sorted order, an entry without further bytes comes first.
            let (entry, id) = &self.entries[self.range.start];
            if entry.len() == self.length {
                self.range.start += 1;
                return Some((self.length, *id));
            }
            let Some(byte) = self.text.get(self.length) else {
                self.range = 0..0;
                return None;
            };
            let entries = &self.entries[self.range.clone()];
            let start = entries.partition_point(|(entry, _)| entry[self.length] < *byte);
            let count = entries[start..].partition_point(|(entry, _)| entry[self.length] == *byte);
            self.range = self.range.start + start..self.range.start + start + count;
            self.length += 1;
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prefixes_are_sorted_by_length() {
        let entries = ["b", "", "abc", "a", "ab", "abd", "abcde"].into_iter().zip(0..);
        let table = PrefixTable::new(entries.map(|(text, id)| (text.into(), id)).collect());
        assert_eq!(table.prefixes(b"abcd").collect::<Vec<_>>(), [(1, 3), (2, 4), (3, 2)]);
        let longest =
            |table: &PrefixTable, text: &str| table.longest(text.as_bytes(), &mut Budget::new(0)).unwrap();
        assert_eq!(longest(&table, "abcdef"), Some((5, 6)));
        assert_eq!(longest(&table, "ba"), Some((1, 0)));
        assert_eq!(longest(&table, "c"), None);
        assert_eq!(longest(&table, ""), None);
        assert_eq!(longest(&PrefixTable::default(), "a"), None);
    }
}
