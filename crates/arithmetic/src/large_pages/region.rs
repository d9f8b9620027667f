//! Memory regions shared by boxes, on Linux.

#![expect(unsafe_code, reason = "memory is mapped and unmapped with system calls")]

use std::mem::MaybeUninit;
use std::ptr::{NonNull, null_mut};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

/// Size of a large page on x86-64, and on AArch64 with 4 KiB pages.
///
/// With other page sizes, the system rejects the request, which is harmless.
const LARGE_PAGE: usize = 2 << 20;
/// Minimum size in bytes; smaller boxes come from the allocator.
const SMALLEST: usize = 128 << 10;
/// Size of a region's address space in bytes.
///
/// Addresses outside the boxes take up no memory.
const REGION: usize = 256 << 20;

/// Region that provides the next piece, and the number of its bytes already in use.
static CURRENT: Mutex<Option<(Arc<Region>, usize)>> = Mutex::new(None);

/// Mapped memory that starts at a multiple of [`LARGE_PAGE`].
///
/// Each of its pieces has one owner.
struct Region {
    start: NonNull<u8>,
    bytes: usize,
    /// Set if the system refused to take back memory; unused memory may then hold old values.
    ///
    /// This happens if the process locks its memory.
    is_used_up: AtomicBool,
}

/// Returns the size of this system's small pages.
///
/// Pieces begin at page boundaries, so that whole pages can be returned to the system.
fn page() -> usize {
    static PAGE: OnceLock<usize> = OnceLock::new();
    *PAGE.get_or_init(|| {
        // SAFETY: the call only reads a system constant.
        usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(64 << 10)
    })
}

// SAFETY: the region only hands out addresses. The memory behind them belongs to the pieces.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

impl Region {
    /// Maps a region of at least `bytes` bytes, or returns `None` if the system is out of memory.
    fn new(bytes: usize) -> Option<Arc<Self>> {
        let bytes = bytes.max(REGION).checked_next_multiple_of(LARGE_PAGE)?;
        let mapped = bytes.checked_add(LARGE_PAGE)?;
        let (access, kind) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: this maps new memory at an address that the system chooses.
        let address = unsafe { libc::mmap(null_mut(), mapped, access, kind, -1, 0) };
        let address =
            NonNull::new(address).filter(|address| address.as_ptr() != libc::MAP_FAILED)?.cast::<u8>();
        let before = address.align_offset(LARGE_PAGE);
        let unmap = |from: usize, bytes: usize| {
            if bytes > 0 {
                // SAFETY: the range is an unused part of the new mapping.
                unsafe { libc::munmap(address.add(from).as_ptr().cast(), bytes) };
            }
        };
        unmap(0, before);
        unmap(before + bytes, LARGE_PAGE - before);
        // SAFETY: `before` is less than a large page, and the mapping is a large page longer than the region.
        let start = unsafe { address.add(before) };
        Some(Arc::new(Self { start, bytes, is_used_up: AtomicBool::new(false) }))
    }

    /// Calls `madvise` on a page-aligned range and returns whether it succeeded.
    fn advise(&self, from: usize, bytes: usize, advice: libc::c_int) -> bool {
        // SAFETY: the range is inside the region, and no advice used here changes the contents of a piece.
        unsafe { libc::madvise(self.start.add(from).as_ptr().cast(), bytes, advice) == 0 }
    }

    /// Requests large pages for all pages that end between `from` and `to`.
    ///
    /// Pieces now cover each of these pages completely.
    fn ask_for_large_pages(&self, from: usize, to: usize) {
        /// Advice value available since Linux 6.1.
        const MADV_COLLAPSE: libc::c_int = 25;
        let (first, end) = (from / LARGE_PAGE * LARGE_PAGE, to / LARGE_PAGE * LARGE_PAGE);
        // If the system declines, small pages work too.
        if first < end && self.advise(first, end - first, libc::MADV_HUGEPAGE) && first < from {
            // Small pages already hold the start of the first large page.
            self.advise(first, LARGE_PAGE, MADV_COLLAPSE);
        }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: every piece holds a reference to the region, so no pieces remain when it is dropped.
        let _ = unsafe { libc::munmap(self.start.as_ptr().cast(), self.bytes) };
    }
}

/// Values that occupy part of a region.
pub(super) struct Piece<T: Copy> {
    region: Arc<Region>,
    from: usize,
    len: usize,
    start: NonNull<T>,
}

// SAFETY: a piece owns its values, like a box.
unsafe impl<T: Copy + Send> Send for Piece<T> {}
// SAFETY: as above.
unsafe impl<T: Copy + Sync> Sync for Piece<T> {}

impl<T: Copy> Piece<MaybeUninit<T>> {
    /// Allocates zeroed memory for `len` values from a region.
    ///
    /// Returns `None` if the memory should come from the allocator.
    pub(super) fn new(len: usize) -> Option<Self> {
        let bytes = len.checked_mul(size_of::<T>())?;
        if bytes < SMALLEST || align_of::<T>() > page() {
            return None;
        }
        let taken = bytes.checked_next_multiple_of(page())?;
        // After a fork, the lock may be held by a thread that does not exist in this process, so this
        // code never blocks on the lock.
        let (region, from) = match CURRENT.try_lock() {
            Ok(mut current) => {
                // `CURRENT` is the only owner of the region, so no piece is left.
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
        // SAFETY: the region has at least `from + taken` bytes.
        let start = unsafe { region.start.add(from) }.cast();
        Some(Self { region, from, len, start })
    }
}

impl<T: Copy> Piece<MaybeUninit<T>> {
    /// Marks the values as initialized.
    ///
    /// # Safety
    /// All values must have been written, or zero bits must be a valid value. Memory fresh from the system is
    /// zeroed, and so is memory that was returned to the system.
    pub(super) unsafe fn assume_init(self) -> Piece<T> {
        let piece = std::mem::ManuallyDrop::new(self);
        // SAFETY: the original is not dropped, so this is the only owner of the region's reference count.
        let region = unsafe { std::ptr::read(&raw const piece.region) };
        Piece { region, from: piece.from, len: piece.len, start: piece.start.cast() }
    }
}

impl<T: Copy> Piece<T> {
    #[inline]
    pub(super) fn values(&self) -> &[T] {
        // SAFETY: the memory holds `len` values, which belong to this piece.
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
        // Returns the memory to the system now, even if other pieces keep
        // the region alive. It then reads as zeros.
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
