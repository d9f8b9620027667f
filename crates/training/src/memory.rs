//! How much memory a training takes and how much there is, so that one that cannot fit is refused before the work.

use std::fs;
use std::path::Path;

use gpt2::{Gpt2Config, ParameterCounts};

use crate::Hyperparameters;

/// Bytes that a training takes at most, estimated: weights, gradients and both running means in f32; what the forward pass
/// keeps for the backward pass, of each block its input alone where it `recomputes`; the logits that exist at once.
pub fn estimated_bytes(config: &Gpt2Config, numbers: &Hyperparameters, recomputes: bool) -> u64 {
    /// Weight, gradient, mean, mean of squares.
    const COPIES: u64 = 4;
    /// Values that a block keeps of each token, in widths: norms 2, queries, keys and values 3, attention 1, its projection
    /// and that of the MLP before and behind dropout 4, the masks 1, residual stream 2; the MLP's inner values are counted by
    /// themselves.
    const KEPT_WIDTHS: u64 = 13;
    /// Inner values of the MLP: before the activation and behind it.
    const KEPT_INNER: u64 = 2;
    /// Logits of a chunk.
    const LOGITS: u64 = 1 << 24;
    const F32_BYTES: u64 = 4;
    let tokens = (numbers.batch_size as u64).saturating_mul(numbers.context as u64);
    let (width, inner, blocks) = (config.n_embd as u64, config.inner_width() as u64, config.n_layer as u64);
    let block = KEPT_WIDTHS * width + KEPT_INNER * inner;
    // The backward pass holds one block's gradients besides, or a block that is computed again.
    let kept = if recomputes { blocks * width + 2 * block } else { (blocks + 1) * block };
    let parameters = ParameterCounts::new(config).unique as u64;
    // From the second batch of a step on, the head's gradient is made beside the sum.
    let head = if numbers.accumulate > 1 { (config.vocab_size * config.n_embd) as u64 } else { 0 };
    let values =
        (COPIES * parameters + head).saturating_add(tokens.saturating_mul(kept)).saturating_add(LOGITS);
    values.saturating_mul(F32_BYTES)
}

/// Bytes of memory that this process may still take, where the system tells (Linux): what is free, and in a control group
/// with a limit what the group may still take.
pub fn available_bytes() -> Option<u64> {
    available_in(Path::new("/proc/meminfo"), Path::new("/sys/fs/cgroup"))
}

fn available_in(meminfo: &Path, group: &Path) -> Option<u64> {
    let text = fs::read_to_string(meminfo).ok()?;
    let kibibytes: u64 = value_of(&text, "MemAvailable:")?.strip_suffix("kB")?.trim().parse().ok()?;
    let free = kibibytes.saturating_mul(1024);
    Some(left_in_group(group).map_or(free, |left| left.min(free)))
}

/// Bytes that the control group (version 2) in the folder `group` may still take; `None` where it has no limit. Files that were
/// read and not used since (`inactive_file`) count as used there, and give way when memory is needed.
fn left_in_group(group: &Path) -> Option<u64> {
    let read = |name: &str| fs::read_to_string(group.join(name)).ok();
    let number = |name: &str| read(name)?.trim().parse::<u64>().ok();
    let (limit, used) = (number("memory.max")?, number("memory.current")?);
    let inactive = read("memory.stat").and_then(|stat| value_of(&stat, "inactive_file")?.parse().ok());
    Some(limit.saturating_sub(used.saturating_sub(inactive.unwrap_or(0))))
}

/// What follows `name` in the line that starts with it.
fn value_of<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    text.lines().find_map(|line| line.strip_prefix(name)).map(str::trim)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A machine with 8 GiB free, and a control group with these files.
    fn available(files: &[(&str, &str)]) -> Option<u64> {
        let folder = tempfile::tempdir().unwrap();
        let meminfo = folder.path().join("meminfo");
        fs::write(&meminfo, "MemTotal:       16777216 kB\nMemAvailable:    8388608 kB\n").unwrap();
        for (name, text) in files {
            fs::write(folder.path().join(name), text).unwrap();
        }
        available_in(&meminfo, folder.path())
    }

    const GIB: u64 = 1 << 30;

    /// 6 GiB used under a limit of 7, of which 4 are files that were read, such as the data that is trained on.
    #[test]
    fn files_that_were_read_are_no_memory_in_use() {
        let (limit, used) = ((7 * GIB).to_string(), (6 * GIB).to_string());
        let stat = format!("anon {GIB}\nfile {}\ninactive_file {}\nactive_file {GIB}\n", 5 * GIB, 4 * GIB);
        let files = [("memory.max", &*limit), ("memory.current", &*used), ("memory.stat", &*stat)];
        assert_eq!(available(&files), Some(5 * GIB));
        assert_eq!(available(&files[..2]), Some(GIB), "without statistics everything counts as used");
    }

    #[test]
    fn without_a_limit_the_machine_decides() {
        assert_eq!(available(&[]), Some(8 * GIB));
        assert_eq!(available(&[("memory.max", "max\n"), ("memory.current", "1000\n")]), Some(8 * GIB));
        let wide = (64 * GIB).to_string();
        assert_eq!(available(&[("memory.max", &wide), ("memory.current", "0\n")]), Some(8 * GIB));
    }

    #[test]
    fn a_group_over_its_limit_has_nothing_left() {
        let files =
            [("memory.max", "1000\n"), ("memory.current", "5000\n"), ("memory.stat", "inactive_file 9\n")];
        assert_eq!(available(&files), Some(0));
        assert_eq!(available_in(Path::new("nowhere"), Path::new("nowhere")), None);
    }
}
