//! What the system does about large pages, and how many of them this process has.

use std::fs;

use candle_gpt2_arithmetic::large_pages;

/// Large pages of this process: those behind the memory that asks for them, weights (as of a [`PackedMatrix`](candle_gpt2_arithmetic::PackedMatrix)), keys and
/// values.
///
/// ```standalone_crate
/// use candle_gpt2_arithmetic::{PackedMatrix, Strided, WeightFormat};
/// use candle_gpt2_engine::LargePages;
///
/// // Twenty matrices, each of which is less than a large page.
/// let weight = Strided { values: &[0.5], strides: (0, 0), shape: (768, 768) };
/// let packed = (0..20).map(|_| PackedMatrix::from_values(weight, WeightFormat::F16));
/// let matrices = packed.collect::<Result<Vec<_>, _>>()?;
/// let bytes: usize = matrices.iter().map(PackedMatrix::bytes).sum();
/// let pages = LargePages::now();
/// if let (Some(asked), Some(held), Some(_)) = (pages.asked_bytes, pages.bytes, &pages.system) {
///     assert!(held <= asked && asked <= bytes as u64, "they take no memory but their own");
///     assert!(asked + (2 << 20) >= bytes as u64, "all but the beginning of the last page asks");
/// }
/// # Ok::<(), candle_gpt2_arithmetic::PackError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LargePages {
    /// Which memory the system gives them to: `always` to all, `madvise` to memory that asks, `never` to none; `None` if it is not
    /// known (other systems than Linux).
    pub system: Option<String>,
    /// Whether this process asks.
    pub is_asked: bool,
    /// Bytes in use that ask for them,
    pub asked_bytes: Option<u64>,
    /// and those of them that have them.
    pub bytes: Option<u64>,
}

impl LargePages {
    /// What the system says now (Linux).
    pub fn now() -> Self {
        let read = |path| fs::read_to_string(path).ok();
        let held = read("/proc/self/smaps").map(|smaps| held(&smaps));
        Self {
            system: read("/sys/kernel/mm/transparent_hugepage/enabled").as_deref().and_then(chosen),
            is_asked: large_pages::is_asked(),
            asked_bytes: held.map(|(asked, _)| asked),
            bytes: held.map(|(_, bytes)| bytes),
        }
    }
}

/// The word in brackets.
fn chosen(words: &str) -> Option<String> {
    let (_, rest) = words.split_once('[')?;
    rest.split_once(']').map(|(word, _)| word.to_owned())
}

/// Bytes in memory of the mappings that ask for large pages (`hg`), and those in large pages.
fn held(smaps: &str) -> (u64, u64) {
    let (mut all, mut of_mapping) = ((0, 0), (0, 0));
    for line in smaps.lines() {
        let bytes = |name: &str| {
            let kibibytes: u64 = line.strip_prefix(name)?.trim().strip_suffix("kB")?.trim().parse().ok()?;
            Some(kibibytes * 1024)
        };
        if let Some(flags) = line.strip_prefix("VmFlags:") {
            // The last line of a mapping.
            if flags.split_whitespace().any(|flag| flag == "hg") {
                all = (all.0 + of_mapping.0, all.1 + of_mapping.1);
            }
            of_mapping = (0, 0);
        } else if let Some(bytes) = bytes("Rss:") {
            of_mapping.0 = bytes;
        } else if let Some(bytes) = bytes("AnonHugePages:") {
            of_mapping.1 = bytes;
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_system_says_is_read() {
        assert_eq!(chosen("always [madvise] never\n").as_deref(), Some("madvise"));
        assert_eq!(chosen("something else"), None);
        let mapping = |rss: u64, huge: u64, flags: &str| {
            format!(
                "7f00-7fff rw-p 00000000 00:00 0 \nSize: 9999 kB\nRss: {rss} kB\nAnonHugePages: {huge} kB\nVmFlags: {flags}\n"
            )
        };
        let smaps =
            mapping(4096, 2048, "rd wr mr hg") + &mapping(512, 0, "rd wr mr") + &mapping(2048, 2048, "hg rd");
        assert_eq!(held(&smaps), (6 << 20, 4 << 20));
    }
}
