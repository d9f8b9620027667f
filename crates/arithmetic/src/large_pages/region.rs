//! Regions of memory that boxes share, on Linux.

#![expect(unsafe_code, reason = "memory is mapped and given back by calls of the system")]

use std::mem::MaybeUninit;
use std::ptr::{NonNull, null_mut};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

/// The large page of x86-64 and, with pages of 4 KiB, of AArch64. With others the system declines, and nothing is lost.
const LARGE_PAGE: usize = 2 << 20;
/// Boxes of fewer bytes are left to the allocator.
const SMALLEST: usize = 128 << 10;
/// Addresses of a region. Those that no box has take no memory.
const REGION: usize = 256 << 20;

/// The region that the next piece is taken from, and how much of it is taken.
static CURRENT: Mutex<Option<(Arc<Region>, usize)>> = Mutex::new(None);

/// Mapped memory from a multiple of [`LARGE_PAGE`] on. Pieces of it belong to one owner each.
struct Region {
    start: NonNull<u8>,
    bytes: usize,
    /// Whether memory could not be given back (a process may lock its memory), so that what is free may hold old values.
    is_used_up: AtomicBool,
}

/// The small page of this system. Pieces begin at multiples of it, so that whole pages are given back.
fn page() -> usize {
    static PAGE: OnceLock<usize> = OnceLock::new();
    *PAGE.get_or_init(|| {
        // SAFETY: the call reads a constant of the system.
        usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(64 << 10)
    })
}

// SAFETY: the region hands out addresses; what is behind them belongs to pieces.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

impl Region {
    /// One with room for so many bytes at least; `None` if the system has none.
    fn new(bytes: usize) -> Option<Arc<Self>> {
        let bytes = bytes.max(REGION).checked_next_multiple_of(LARGE_PAGE)?;
        let mapped = bytes.checked_add(LARGE_PAGE)?;
        let (access, kind) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: new memory at an address that the system chooses.
        let address = unsafe { libc::mmap(null_mut(), mapped, access, kind, -1, 0) };
        let address =
            NonNull::new(address).filter(|address| address.as_ptr() != libc::MAP_FAILED)?.cast::<u8>();
        let before = address.align_offset(LARGE_PAGE);
        let unmap = |from: usize, bytes: usize| {
            if bytes > 0 {
                // SAFETY: an unused part of what was just mapped.
                unsafe { libc::munmap(address.add(from).as_ptr().cast(), bytes) };
            }
        };
        unmap(0, before);
        unmap(before + bytes, LARGE_PAGE - before);
        // SAFETY: less than a large page after the beginning of what is longer by one.
        let start = unsafe { address.add(before) };
        Some(Arc::new(Self { start, bytes, is_used_up: AtomicBool::new(false) }))
    }

    /// Gives advice on some bytes, which begin at a multiple of a page, and returns whether it was taken.
    fn advise(&self, from: usize, bytes: usize, advice: libc::c_int) -> bool {
        // SAFETY: the bytes are in the region, and no advice given changes what a piece holds.
        unsafe { libc::madvise(self.start.add(from).as_ptr().cast(), bytes, advice) == 0 }
    }

    /// Asks for large pages that end within a piece: all of each is taken now.
    fn ask_for_large_pages(&self, from: usize, to: usize) {
        /// Linux 6.1.
        const MADV_COLLAPSE: libc::c_int = 25;
        let (first, end) = (from / LARGE_PAGE * LARGE_PAGE, to / LARGE_PAGE * LARGE_PAGE);
        // If the system declines, small pages do.
        if first < end && self.advise(first, end - first, libc::MADV_HUGEPAGE) && first < from {
            // Small pages hold its beginning already.
            self.advise(first, LARGE_PAGE, MADV_COLLAPSE);
        }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: no piece is left, or it would hold the region.
        let _ = unsafe { libc::munmap(self.start.as_ptr().cast(), self.bytes) };
    }
}

/// Values in a part of a region.
pub(super) struct Piece<T: Copy> {
    region: Arc<Region>,
    from: usize,
    len: usize,
    start: NonNull<T>,
}

// SAFETY: a piece owns its values, as a box does.
unsafe impl<T: Copy + Send> Send for Piece<T> {}
// SAFETY: as above.
unsafe impl<T: Copy + Sync> Sync for Piece<T> {}

impl<T: Copy> Piece<MaybeUninit<T>> {
    /// Room for so many values, which begins as zero bits; `None` if it is better taken from the allocator.
    pub(super) fn new(len: usize) -> Option<Self> {
        let bytes = len.checked_mul(size_of::<T>())?;
        if bytes < SMALLEST || align_of::<T>() > page() {
            return None;
        }
        let taken = bytes.checked_next_multiple_of(page())?;
        // After a fork the lock may be held by a thread that does not exist here, so it is never waited for.
        let (region, from) = match CURRENT.try_lock() {
            Ok(mut current) => {
                // This is its only owner: no piece is left.
                if let Some((region, used)) = &mut *current
                    && Arc::strong_count(region) == 1
                {
                    *used = 0;
                }
                match &mut *current {
                    Some((region, used))
                        if region.bytes - *used >= taken && !region.is_used_up.load(Ordering::Relaxed) =>
                    {
                        let from = *used;
                        *used += taken;
                        (region.clone(), from)
                    }
                    _ => {
                        let region = Region::new(taken)?;
                        *current = Some((region.clone(), taken));
                        (region, 0)
                    }
                }
            }
            Err(_) => (Region::new(taken)?, 0),
        };
        region.ask_for_large_pages(from, from + taken);
        // SAFETY: the region has so many bytes.
        let start = unsafe { region.start.add(from) }.cast();
        Some(Self { region, from, len, start })
    }
}

impl<T: Copy> Piece<MaybeUninit<T>> {
    /// # Safety
    /// All values were written, or zero bits are values: memory comes from the system as zeros, and as such again after it was given back.
    pub(super) unsafe fn assume_init(self) -> Piece<T> {
        let piece = std::mem::ManuallyDrop::new(self);
        // SAFETY: the other one is not dropped, so this is the only owner of the region's count.
        let region = unsafe { std::ptr::read(&raw const piece.region) };
        Piece { region, from: piece.from, len: piece.len, start: piece.start.cast() }
    }
}

impl<T: Copy> Piece<T> {
    #[inline]
    pub(super) fn values(&self) -> &[T] {
        // SAFETY: so many values are there, and belong to this piece.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }

    #[inline]
    pub(super) fn values_mut(&mut self) -> &mut [T] {
        // SAFETY: as above.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

impl<T: Copy> Drop for Piece<T> {
    fn drop(&mut self) {
        let taken = (self.len * size_of::<T>()).next_multiple_of(page());
        // Its memory goes back to the system now, whatever else is in the region, and comes as zeros again.
        if !self.region.advise(self.from, taken, libc::MADV_DONTNEED) {
            self.region.is_used_up.store(true, Ordering::Relaxed);
        }
        if let Ok(mut current) = CURRENT.try_lock()
            && let Some((region, used)) = &mut *current
            && Arc::ptr_eq(region, &self.region)
            && *used == self.from + taken
        {
            *used = self.from;
        }
    }
}
