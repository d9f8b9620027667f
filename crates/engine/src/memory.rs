//! The memory that is free on a machine, and whether the keys and values of a request fit into it.

use std::fs;

use candle_core::{DType, Device};
use gpt2::Gpt2Config;
use gpt2_kernels::free_memory;

use crate::EngineError;

/// Checks that the keys and values of `rows` texts of up to `tokens` tokens each fit into the memory that is free, where the
/// system says how much that is.
pub(crate) fn check_room(
    (rows, tokens): (usize, usize),
    config: &Gpt2Config,
    kv_dtype: DType,
    device: &Device,
) -> Result<(), EngineError> {
    let available = if device.is_cpu() { available_memory() } else { free_memory(device) };
    match available {
        Some(available) => check_room_in(available, (rows, tokens), config, kv_dtype),
        None => Ok(()),
    }
}

fn check_room_in(
    available: usize,
    (rows, tokens): (usize, usize),
    config: &Gpt2Config,
    kv_dtype: DType,
) -> Result<(), EngineError> {
    let tokens = tokens.min(config.n_positions);
    let of_token = config.kv_bytes_per_token(kv_dtype.size_in_bytes());
    let needed = rows.saturating_mul(tokens).saturating_mul(of_token);
    if needed > available {
        return Err(EngineError::NoRoom { rows, tokens, needed, available });
    }
    Ok(())
}

/// Bytes of memory that this process may still take, where the system says so (Linux): what is free or can be freed, of the
/// machine or of the control group that the process is in, whichever is less.
pub fn available_memory() -> Option<usize> {
    let machine = of_machine(&fs::read_to_string("/proc/meminfo").ok()?)?;
    let read = |name: &str| fs::read_to_string(format!("/sys/fs/cgroup/{name}")).ok();
    let group = || of_group(&read("memory.max")?, &read("memory.current")?, &read("memory.stat")?);
    Some(group().map_or(machine, |group| group.min(machine)))
}

fn of_machine(meminfo: &str) -> Option<usize> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kibibytes: usize = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kibibytes.checked_mul(1024)
}

/// What a control group leaves: its limit without what is in use. Files that were read and are not in use any more count as
/// used there, and are given up when memory is wanted.
fn of_group(max: &str, current: &str, stat: &str) -> Option<usize> {
    let number = |text: &str| text.trim().parse::<usize>().ok();
    let cached = stat.lines().find_map(|line| number(line.strip_prefix("inactive_file ")?));
    let used = number(current)?.saturating_sub(cached.unwrap_or(0));
    Some(number(max)?.saturating_sub(used))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn free_memory_is_what_the_system_says_without_cached_files() {
        let meminfo = "MemTotal:  24000000 kB\nMemFree:  100 kB\nMemAvailable:   2000 kB\n";
        assert_eq!(of_machine(meminfo), Some(2_048_000));
        assert_eq!(of_machine("MemTotal: 5 kB\n"), None);
        let stat = "anon 300\ninactive_anon 5\ninactive_file 600\nactive_file 7\n";
        assert_eq!(of_group("1000\n", "950\n", stat), Some(650));
        assert_eq!(of_group("1000\n", "950\n", ""), Some(50));
        assert_eq!(of_group("max\n", "950\n", stat), None, "a group without a limit");
    }

    /// 2 · 12 · 768 values of 4 bytes for each token of the 124M model.
    #[test]
    fn texts_that_do_not_fit_are_refused_with_the_numbers() {
        let config = Gpt2Config::gpt2();
        let needed = 4096 * 1024 * 2 * 12 * 768 * 4;
        let check = |available, tokens, dtype| check_room_in(available, (4096, tokens), &config, dtype);
        assert!(check(needed, 5000, DType::F32).is_ok(), "no text is longer than the context");
        let refusal = check(needed - 1, 5000, DType::F32).unwrap_err();
        assert!(refusal.is_usage());
        let told = "4096 texts at once of up to 1024 tokens take 294912.0 MiB for their keys and values";
        assert!(refusal.to_string().starts_with(told), "{refusal}");
        assert!(check(needed / 2, 1024, DType::F16).is_ok() && check(needed / 2, 512, DType::F32).is_ok());
        assert!(check_room_in(0, (usize::MAX, usize::MAX), &config, DType::F32).is_err(), "no overflow");
    }
}
