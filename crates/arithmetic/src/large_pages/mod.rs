//! Large-page memory for packed weights, keys and values, if the system supports it.
//!
//! With pages of 4 KiB, a sequential read needs a new address translation every hundred nanoseconds, and the
//! first access to each page costs a page fault. Pages of 2 MiB make both rare.
//!
//! In a small model, few matrices fill a large page on their own, so `LargeBox`es share memory regions. The
//! `madvise` calls for large pages cover only the boxes, so the rest of a region takes up no memory. On
//! systems other than Linux, and after [`ask`]`(false)`, boxes use the allocator's memory.

#[cfg(all(target_os = "linux", target_pointer_width = "64", not(miri)))]
mod region;

use std::mem::MaybeUninit;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicBool, Ordering};

/// Minimum size, in bytes, of zeroed memory that bypasses the allocator.
#[cfg(all(target_os = "linux", target_pointer_width = "64", not(miri)))]
const LONG: usize = 8 << 20;

static IS_ASKED: AtomicBool = AtomicBool::new(true);

/// Enables or disables large pages for newly allocated weights, keys and values.
///
/// Large pages are enabled by default.
///
/// ```
/// use candle_gpt2_arithmetic::large_pages;
///
/// large_pages::ask(false);
/// assert!(!large_pages::is_asked());
/// ```
pub fn ask(is_asked: bool) {
    IS_ASKED.store(is_asked, Ordering::Relaxed);
}

/// Whether new memory requests large pages; see [`ask`].
pub fn is_asked() -> bool {
    IS_ASKED.load(Ordering::Relaxed)
}

/// Boxed slice, stored in large pages if they are available.
pub(crate) struct LargeBox<T: Copy>(Home<T>);

enum Home<T: Copy> {
    Allocated(Box<[T]>),
    #[cfg(all(target_os = "linux", target_pointer_width = "64", not(miri)))]
    Mapped(region::Piece<T>),
}

impl<T: Copy> Default for LargeBox<T> {
    fn default() -> Self {
        Self(Home::Allocated(Box::default()))
    }
}

impl<T: Copy> LargeBox<T> {
    /// Allocates uninitialized memory for `len` values.
    pub(crate) fn new_uninit(len: usize) -> LargeBox<MaybeUninit<T>> {
        #[cfg(all(target_os = "linux", target_pointer_width = "64", not(miri)))]
        if is_asked()
            && let Some(piece) = region::Piece::new(len)
        {
            return LargeBox(Home::Mapped(piece));
        }
        LargeBox(Home::Allocated(Box::new_uninit_slice(len)))
    }

    /// Allocates `len` zeros, which take up no physical memory until they are overwritten.
    ///
    /// Returns `None` if there is not enough memory. Short slices come from the allocator: caches are created
    /// often, and memory fresh from the system costs a page fault per page.
    #[cfg_attr(
        all(target_os = "linux", target_pointer_width = "64", not(miri)),
        expect(unsafe_code, reason = "new memory from the system is zeroed")
    )]
    pub(crate) fn zeros(len: usize) -> Option<Self>
    where
        T: ZeroBits + Default,
    {
        #[cfg(all(target_os = "linux", target_pointer_width = "64", not(miri)))]
        if is_asked()
            && size_of::<T>().saturating_mul(len) >= LONG
            && let Some(piece) = region::Piece::new(len)
        {
            // SAFETY: zero bits are values of this type.
            return Some(Self(Home::Mapped(unsafe { piece.assume_init() })));
        }
        // A failed vector allocation would abort the process, so this first checks whether it can succeed.
        Vec::<T>::new().try_reserve_exact(len).ok()?;
        Some(Self(Home::Allocated(vec![T::default(); len].into())))
    }
}

impl<T: Copy> LargeBox<MaybeUninit<T>> {
    /// Marks the values as initialized.
    ///
    /// # Safety
    /// The caller must have written all values.
    #[expect(unsafe_code, reason = "only the caller knows what was written")]
    pub(crate) unsafe fn assume_init(self) -> LargeBox<T> {
        LargeBox(match self.0 {
            // SAFETY: the caller has written all values.
            Home::Allocated(values) => Home::Allocated(unsafe { values.assume_init() }),
            #[cfg(all(target_os = "linux", target_pointer_width = "64", not(miri)))]
            // SAFETY: the caller has written all values.
            Home::Mapped(piece) => Home::Mapped(unsafe { piece.assume_init() }),
        })
    }
}

impl<T: Copy> Deref for LargeBox<T> {
    type Target = [T];

    #[inline]
    fn deref(&self) -> &[T] {
        match &self.0 {
            Home::Allocated(values) => values,
            #[cfg(all(target_os = "linux", target_pointer_width = "64", not(miri)))]
            Home::Mapped(piece) => piece.values(),
        }
    }
}

impl<T: Copy> DerefMut for LargeBox<T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut [T] {
        match &mut self.0 {
            Home::Allocated(values) => values,
            #[cfg(all(target_os = "linux", target_pointer_width = "64", not(miri)))]
            Home::Mapped(piece) => piece.values_mut(),
        }
    }
}

/// Number type whose zero is all zero bits.
///
/// # Safety
/// All-zero memory must be a valid value equal to the default.
#[expect(unsafe_code, reason = "zeroed memory is reinterpreted as numbers")]
pub(crate) unsafe trait ZeroBits: Copy {}

#[expect(unsafe_code, reason = "as above")]
// SAFETY: zero bits are the value 0.
unsafe impl ZeroBits for f32 {}
#[expect(unsafe_code, reason = "as above")]
// SAFETY: zero bits are the value 0.
unsafe impl ZeroBits for u16 {}
#[expect(unsafe_code, reason = "as above")]
// SAFETY: zero bits are the value 0.
unsafe impl ZeroBits for u8 {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn boxes_are_zeroed_and_do_not_overlap() {
        // Keeps uncleared boxes in the same region as the zeroed boxes.
        let between: Vec<_> = (0..3).map(|_| LargeBox::<u8>::new_uninit(300_000)).collect();
        for _ in 0..3 {
            let mut boxes = Vec::new();
            for (index, len) in
                [3, 5 << 20, 0, 9 << 20, (4 << 20) + 1, 90_000, 40 << 20].into_iter().enumerate()
            {
                let mut values = LargeBox::<u16>::zeros(len).unwrap();
                assert!(values.len() == len && values.iter().all(|value| *value == 0));
                let number = u16::try_from(index).unwrap() + 1;
                // Writes only part of the longest box, so that the rest takes up no memory.
                values.iter_mut().take(2 << 20).for_each(|value| *value = number);
                boxes.push((number, values));
                if index == 3 {
                    boxes.swap_remove(1);
                }
            }
            for (number, values) in &boxes {
                assert!(values.iter().take(2 << 20).all(|value| value == number), "box {number}");
            }
        }
        drop(between);
        assert!(
            LargeBox::<f32>::zeros(usize::MAX / 4).is_none(),
            "an allocation larger than the memory must fail"
        );
    }

    #[test]
    fn written_values_are_read_back() {
        let mut uninit = LargeBox::<[u32; 16]>::new_uninit(50_000);
        for (index, value) in uninit.iter_mut().enumerate() {
            value.write([u32::try_from(index).unwrap(); 16]);
        }
        #[expect(unsafe_code, reason = "the function that is tested")]
        // SAFETY: the loop above wrote all values.
        let values = unsafe { uninit.assume_init() };
        assert!(
            values.iter().enumerate().all(|(index, value)| *value == [u32::try_from(index).unwrap(); 16])
        );
    }
}
