//! How much memory is free.

use std::fs;

use candle_core::Device;

/// Bytes of memory that this process may still take on a device: of the CPU where the system says so (Linux), of an NVIDIA GPU
/// where the driver does; `None` elsewhere.
///
/// ```
/// use candle_core::Device;
///
/// if let Some(bytes) = gpt2_kernels::free_memory(&Device::Cpu) {
///     assert!(bytes > 1 << 20, "enough for this example");
/// }
/// ```
pub fn free_memory(device: &Device) -> Option<usize> {
    if device.is_cpu() {
        return of_process();
    }
    #[cfg(feature = "cuda")]
    if let Ok(device) = device.as_cuda_device() {
        return device.cuda_stream().context().mem_get_info().ok().map(|(free, _)| free);
    }
    None
}

/// What is free or can be freed, of the machine or of the control group that the process is in, whichever is less (Linux).
fn of_process() -> Option<usize> {
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
        assert_eq!(of_group("1000\n", "5000\n", stat), Some(0), "a group over its limit");
    }
}
