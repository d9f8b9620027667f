//! Large pages: the system's setting, and their use by this process.

use std::fs;

use candle_gpt2_arithmetic::large_pages;

/// Large-page usage of this process.
///
/// A process requests large pages only for KV caches and for weights, such as a
/// [`PackedMatrix`](candle_gpt2_arithmetic::PackedMatrix).
///
/// ```standalone_crate
/// use candle_gpt2_arithmetic::{PackedMatrix, Strided, NumberType};
/// use candle_gpt2_engine::LargePages;
///
/// // Twenty matrices, each smaller than a large page.
/// let weight = Strided { values: &[0.5], strides: (0, 0), shape: (768, 768) };
/// let packed = (0..20).map(|_| PackedMatrix::from_values(weight, NumberType::F16));
/// let matrices = packed.collect::<Result<Vec<_>, _>>()?;
/// let bytes: usize = matrices.iter().map(PackedMatrix::bytes).sum();
/// let pages = LargePages::now();
/// if let (Some(requested), Some(large), Some(_)) = (pages.asked_bytes, pages.bytes, &pages.system) {
///     assert!(large <= requested && requested <= bytes as u64, "only the matrices request large pages");
///     assert!(requested + (2 << 20) >= bytes as u64, "all but a partial page requests them");
/// }
/// # Ok::<(), candle_gpt2_arithmetic::PackError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LargePages {
    /// System-wide mode; `None` if it is unknown, as on systems other than Linux.
    ///
    /// `always` uses large pages for all memory, `madvise` only for memory that a process marks, and `never`
    /// for none.
    pub system: Option<String>,
    /// Whether this process requests large pages.
    pub is_asked: bool,
    /// Resident memory for which large pages were requested, in bytes.
    pub asked_bytes: Option<u64>,
    /// Portion of `asked_bytes` in large pages.
    pub bytes: Option<u64>,
}

impl LargePages {
    /// Reads the current state (Linux).
    pub fn now() -> Self {
        let read = |path| fs::read_to_string(path).ok();
        let counted = read("/proc/self/smaps").map(|smaps| large_page_bytes(&smaps));
        Self {
            system: read("/sys/kernel/mm/transparent_hugepage/enabled").as_deref().and_then(chosen),
            is_asked: large_pages::is_asked(),
            asked_bytes: counted.map(|(asked, _)| asked),
            bytes: counted.map(|(_, bytes)| bytes),
        }
    }
}

/// Returns the word in brackets.
fn chosen(words: &str) -> Option<String> {
    let (_, rest) = words.split_once('[')?;
    rest.split_once(']').map(|(word, _)| word.to_owned())
}

/// Sums resident bytes and large-page bytes over the mappings that request large pages (`hg`).
fn large_page_bytes(smaps: &str) -> (u64, u64) {
    let (mut all, mut of_mapping) = ((0, 0), (0, 0));
    for line in smaps.lines() {
        let bytes = |name: &str| {
            let kibibytes: u64 = line.strip_prefix(name)?.trim().strip_suffix("kB")?.trim().parse().ok()?;
            Some(kibibytes * 1024)
        };
        if let Some(flags) = line.strip_prefix("VmFlags:") {
            // `VmFlags` is the last line of each mapping.
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
    fn sysfs_setting_and_smaps_are_parsed() {
        assert_eq!(chosen("always [madvise] never\n").as_deref(), Some("madvise"));
        assert_eq!(chosen("something else"), None);
        let mapping = |rss: u64, huge: u64, flags: &str| {
            format!(
                "7f00-7fff rw-p 00000000 00:00 0 \nSize: 9999 kB\nRss: {rss} kB\nAnonHugePages: {huge} kB\nVmFlags: {flags}\n"
            )
        };
        let smaps =
            mapping(4096, 2048, "rd wr mr hg") + &mapping(512, 0, "rd wr mr") + &mapping(2048, 2048, "hg rd");
        assert_eq!(large_page_bytes(&smaps), (6 << 20, 4 << 20));
    }
}
