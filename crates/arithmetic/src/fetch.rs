//! Software prefetching.
//!
//! A compute-heavy loop does not issue loads early enough to saturate the memory bandwidth. The hardware
//! prefetcher stops at the end of each page.

/// Prefetch distance in bytes: one page, beyond the reach of the hardware prefetcher.
pub(crate) const AHEAD: usize = 4096;
/// Total prefetch distance, in bytes, over all weight panels that a loop reads in parallel.
///
/// It is longer than [`AHEAD`] because weights are rarely in a cache.
const PANELS_AHEAD: usize = 4 * AHEAD;
/// Size of a cache line in bytes.
const LINE: usize = 64;
/// Whether the target has a prefetch instruction.
pub(crate) const FETCHES: bool = cfg!(any(target_arch = "x86_64", target_arch = "aarch64"));

/// Prefetch plan for a loop that reads several panels in parallel.
///
/// After these panels, the loop reads the next group of panels in memory, of the same size. The plan is empty
/// for panels that are already in a cache.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PrefetchPlan(Option<Walk>);

#[derive(Debug, Clone, Copy)]
struct Walk {
    /// Prefetch distance within each panel, in bytes.
    ahead: usize,
    /// Number of bytes left in each panel after the current position.
    left: usize,
    /// Bytes from the end of a panel to the start of its successor.
    between: usize,
}

impl PrefetchPlan {
    /// Empty plan, for panels that are already in a cache.
    pub(crate) const NOTHING: Self = Self(None);

    /// Returns the plan for `panels` panels of `bytes` bytes each, read in parallel.
    #[inline(always)]
    pub(crate) fn of_panels(panels: usize, bytes: usize) -> Self {
        Self(Some(Walk { ahead: PANELS_AHEAD / panels, left: bytes, between: (panels - 1) * bytes }))
    }

    /// Returns the plan for a position `bytes` bytes further into each panel.
    #[inline(always)]
    pub(crate) fn after(self, bytes: usize) -> Self {
        match self.0 {
            Some(walk) => Self(Some(Walk { left: walk.left - bytes, ..walk })),
            None => self,
        }
    }

    /// Prefetches ahead of `values`, located `bytes` bytes past the current position in a panel.
    #[inline(always)]
    pub(crate) fn fetch<T>(self, values: &[T], bytes: usize) {
        if let Some(walk) = self.0 {
            fetch(values, walk.distance(bytes));
        }
    }
}

impl Walk {
    /// Prefetch distance for the data `bytes` bytes past the current position.
    #[inline(always)]
    fn distance(self, bytes: usize) -> usize {
        self.ahead + if bytes + self.ahead < self.left { 0 } else { self.between }
    }
}

/// Prefetches the memory `distance` bytes past the start of `values`.
///
/// Addresses outside the program's memory have no effect.
#[inline(always)]
pub(crate) fn fetch<T>(values: &[T], distance: usize) {
    let start = values.as_ptr().cast::<i8>().wrapping_add(distance);
    for line in 0..size_of_val(values).div_ceil(LINE) {
        let address = start.wrapping_add(line * LINE);
        #[cfg(target_arch = "x86_64")]
        #[expect(unsafe_code, reason = "prefetching is a processor instruction")]
        // SAFETY: every x86-64 processor has the instruction. It reads and writes
        // no value and faults at no address.
        unsafe {
            use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
            _mm_prefetch::<_MM_HINT_T0>(address);
        }
        #[cfg(target_arch = "aarch64")]
        #[expect(unsafe_code, reason = "prefetching is a processor instruction")]
        // SAFETY: every AArch64 processor has the instruction. It reads and writes
        // no value and faults at no address.
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
    fn prefetch_distance_matches_later_reads() {
        const BYTES: usize = 3 * PANELS_AHEAD;
        for panels in [1, 2, 4] {
            // Offsets of the lines that the loop reads: the first panel, then its successor.
            let read: Vec<usize> = [0, panels * BYTES]
                .into_iter()
                .flat_map(|panel| (0..BYTES).step_by(LINE).map(move |line| panel + line))
                .collect();
            for slice in [0, PANELS_AHEAD, 2 * PANELS_AHEAD + LINE] {
                let walk = PrefetchPlan::of_panels(panels, BYTES).after(slice).0.unwrap();
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
