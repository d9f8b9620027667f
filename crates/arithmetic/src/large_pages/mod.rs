//! Memory in large pages, if the system has them: for packed weights, keys and values.
//!
//! Reading memory in order, a processor comes to a new page of 4 KiB every hundred nanoseconds and has to look up where it is, and
//! a page that is touched for the first time costs a fault. With pages of 2 MiB both are rare.
//!
//! Few matrices of a small model fill a large page alone. So `LargeBox`es lie side by side in regions, and Linux is asked for
//! large pages (`madvise`) behind what they fill: they take no memory that no box has. On other systems, and after
//! [`ask`]`(false)`, a box is memory of the allocator.

#[cfg(all(target_os = "linux", target_pointer_width = "64", not(miri)))]
mod region;

use std::mem::MaybeUninit;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicBool, Ordering};

/// Bytes of zeros that are long.
#[cfg(all(target_os = "linux", target_pointer_width = "64", not(miri)))]
const LONG: usize = 8 << 20;

static IS_ASKED: AtomicBool = AtomicBool::new(true);

/// Whether memory for weights, keys and values asks for large pages from here on. Until the first call it does.
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

/// Whether new memory asks for large pages, see [`ask`].
pub fn is_asked() -> bool {
    IS_ASKED.load(Ordering::Relaxed)
}

/// Values side by side, in large pages if there are any.
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
    /// Room for values that have to be written.
    pub(crate) fn new_uninit(len: usize) -> LargeBox<MaybeUninit<T>> {
        #[cfg(all(target_os = "linux", target_pointer_width = "64", not(miri)))]
        if is_asked()
            && let Some(piece) = region::Piece::new(len)
        {
            return LargeBox(Home::Mapped(piece));
        }
        LargeBox(Home::Allocated(Box::new_uninit_slice(len)))
    }

    /// Zeros, which take no memory until something is written over them; `None` if there is no room for them. What is short is
    /// left to the allocator: caches come and go, and memory of the system costs a fault for each page.
    #[cfg_attr(
        all(target_os = "linux", target_pointer_width = "64", not(miri)),
        expect(unsafe_code, reason = "new memory of the system is zeros")
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
        // Where the allocation of a vector fails, the process ends; this asks first.
        Vec::<T>::new().try_reserve_exact(len).ok()?;
        Some(Self(Home::Allocated(vec![T::default(); len].into())))
    }
}

impl<T: Copy> LargeBox<MaybeUninit<T>> {
    /// The values, once they are there.
    ///
    /// # Safety
    /// All of them were written.
    #[expect(unsafe_code, reason = "only the caller knows what was written")]
    pub(crate) unsafe fn assume_init(self) -> LargeBox<T> {
        LargeBox(match self.0 {
            // SAFETY: the caller's.
            Home::Allocated(values) => Home::Allocated(unsafe { values.assume_init() }),
            #[cfg(all(target_os = "linux", target_pointer_width = "64", not(miri)))]
            // SAFETY: the caller's.
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

/// A number whose zero is zero bits.
///
/// # Safety
/// Memory of zeros is a valid value, which equals the default.
#[expect(unsafe_code, reason = "memory that comes as zeros is taken for numbers")]
pub(crate) unsafe trait ZeroBits: Copy {}

#[expect(unsafe_code, reason = "as above")]
// SAFETY: the bits of 0.
unsafe impl ZeroBits for f32 {}
#[expect(unsafe_code, reason = "as above")]
// SAFETY: the bits of 0.
unsafe impl ZeroBits for u16 {}
#[expect(unsafe_code, reason = "as above")]
// SAFETY: the bits of 0.
unsafe impl ZeroBits for u8 {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn boxes_do_not_overlap_and_begin_as_zeros_again_and_again() {
        // Between the zeros, what is not cleared.
        let between: Vec<_> = (0..3).map(|_| LargeBox::<u8>::new_uninit(300_000)).collect();
        for _ in 0..3 {
            let mut boxes = Vec::new();
            for (index, len) in
                [3, 5 << 20, 0, 9 << 20, (4 << 20) + 1, 90_000, 40 << 20].into_iter().enumerate()
            {
                let mut values = LargeBox::<u16>::zeros(len).unwrap();
                assert!(values.len() == len && values.iter().all(|value| *value == 0));
                let number = u16::try_from(index).unwrap() + 1;
                // Of the longest one, a part: the rest takes no memory.
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
        assert!(LargeBox::<f32>::zeros(usize::MAX / 4).is_none(), "more than there is");
    }

    #[test]
    fn what_is_written_is_there() {
        let mut room = LargeBox::<[u32; 16]>::new_uninit(50_000);
        for (index, value) in room.iter_mut().enumerate() {
            value.write([u32::try_from(index).unwrap(); 16]);
        }
        #[expect(unsafe_code, reason = "the function that is tested")]
        // SAFETY: all were written.
        let values = unsafe { room.assume_init() };
        assert!(
            values.iter().enumerate().all(|(index, value)| *value == [u32::try_from(index).unwrap(); 16])
        );
    }
}
