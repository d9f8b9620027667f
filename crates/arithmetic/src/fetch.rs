//! Asking for memory before it is needed.
//!
//! A walk through memory that computes more than it reads does not look far enough ahead to keep memory busy, and the processor's
//! own guesses end with each page.

/// How far ahead of a walk to fetch: a page, further than the processor's guesses go.
pub(crate) const AHEAD: usize = 4096;
/// The same for panels of weights, all those side by side together: they hardly ever come from the caches.
const PANELS_AHEAD: usize = 4 * AHEAD;
/// Bytes of a cache line.
const LINE: usize = 64;
/// Whether there is an instruction that fetches.
pub(crate) const FETCHES: bool = cfg!(any(target_arch = "x86_64", target_arch = "aarch64"));

/// What a walk fetches that reads some panels side by side, and after them as many that follow in memory: nothing, or what it reads
/// later.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Ahead(Option<Walk>);

#[derive(Debug, Clone, Copy)]
struct Walk {
    /// How far ahead it fetches in each panel.
    ahead: usize,
    /// Bytes of each panel from here on.
    left: usize,
    /// Bytes from the end of a panel to the one that takes its place.
    between: usize,
}

impl Ahead {
    /// Of a walk over panels that are in the caches.
    pub(crate) const NOTHING: Self = Self(None);

    /// Of a walk over `panels` panels side by side, of so many bytes each.
    #[inline(always)]
    pub(crate) fn of_panels(panels: usize, bytes: usize) -> Self {
        Self(Some(Walk { ahead: PANELS_AHEAD / panels, left: bytes, between: (panels - 1) * bytes }))
    }

    /// The same from so many bytes of each panel on.
    #[inline(always)]
    pub(crate) fn after(self, bytes: usize) -> Self {
        match self.0 {
            Some(walk) => Self(Some(Walk { left: walk.left - bytes, ..walk })),
            None => self,
        }
    }

    /// Fetches for `values`, which lie so many bytes from here in one of the panels.
    #[inline(always)]
    pub(crate) fn fetch<T>(self, values: &[T], bytes: usize) {
        if let Some(walk) = self.0 {
            fetch(values, walk.distance(bytes));
        }
    }
}

impl Walk {
    /// From what lies so many bytes from here to what is read `ahead` bytes later.
    #[inline(always)]
    fn distance(self, bytes: usize) -> usize {
        self.ahead + if bytes + self.ahead < self.left { 0 } else { self.between }
    }
}

/// Fetches what lies `distance` bytes after `values`. Nothing happens if that is no memory of the program.
#[inline(always)]
pub(crate) fn fetch<T>(values: &[T], distance: usize) {
    let start = values.as_ptr().cast::<i8>().wrapping_add(distance);
    for line in 0..size_of_val(values).div_ceil(LINE) {
        let address = start.wrapping_add(line * LINE);
        #[cfg(target_arch = "x86_64")]
        #[expect(unsafe_code, reason = "fetching is an instruction of the processor")]
        // SAFETY: every x86-64 processor has the instruction, which reads and writes no value and fails at no address.
        unsafe {
            use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
            _mm_prefetch::<_MM_HINT_T0>(address);
        }
        #[cfg(target_arch = "aarch64")]
        #[expect(unsafe_code, reason = "fetching is an instruction of the processor")]
        // SAFETY: every AArch64 processor has the instruction, which reads and writes no value and fails at no address.
        unsafe {
            std::arch::asm!("prfm pldl1keep, [{}]", in(reg) address, options(nostack, preserves_flags, readonly));
        }
        #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
        let _ = address;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_walk_fetches_what_it_reads_later() {
        const BYTES: usize = 3 * PANELS_AHEAD;
        for panels in [1, 2, 4] {
            // Where each line lies that the walk reads of the first panel, and then of the one that takes its place.
            let read: Vec<usize> = [0, panels * BYTES]
                .into_iter()
                .flat_map(|panel| (0..BYTES).step_by(LINE).map(move |line| panel + line))
                .collect();
            for slice in [0, PANELS_AHEAD, 2 * PANELS_AHEAD + LINE] {
                let walk = Ahead::of_panels(panels, BYTES).after(slice).0.unwrap();
                for bytes in (0..BYTES - slice).step_by(LINE) {
                    let later = read[(slice + bytes + PANELS_AHEAD / panels) / LINE];
                    assert_eq!(
                        slice + bytes + walk.distance(bytes),
                        later,
                        "{panels} panels, {slice} and {bytes}"
                    );
                }
            }
        }
    }
}
