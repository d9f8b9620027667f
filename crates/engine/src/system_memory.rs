//! Total and free memory of the machine, a control group or a GPU.

use std::fs;
use std::path::{Path, PathBuf};

use candle_core::Device;

/// Memory that this process can use on the CPU, in bytes.
///
/// Each value is the machine's or the limit of the process's control groups, whichever is lower.
///
/// ```
/// // Only Linux reports it.
/// if let Some(memory) = candle_gpt2_engine::ProcessMemory::now() {
///     assert!(memory.available <= memory.total);
/// }
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProcessMemory {
    /// Total memory, used or free.
    pub total: usize,
    /// Free memory plus page cache that the system can reclaim.
    pub available: usize,
    /// Free swap space.
    pub swap: usize,
}

impl ProcessMemory {
    /// Reads the current values on Linux; returns `None` on other systems.
    pub fn now() -> Option<Self> {
        let read = |path: &Path| fs::read_to_string(path).ok();
        let machine = of_machine(&read(Path::new("/proc/meminfo"))?)?;
        let groups = groups_of(&read(Path::new("/proc/self/cgroup")).unwrap_or_default());
        Some(groups.iter().fold(machine, |memory, group| memory.within(group, &read)))
    }

    /// Applies the limits of one control group.
    fn within(self, group: &ControlGroup, read: &dyn Fn(&Path) -> Option<String>) -> Self {
        /// Threshold for "no limit", which cgroup v1 writes as a number near 2^63.
        const NO_LIMIT: usize = usize::MAX / 4;
        let ControlGroup { folder, files } = group;
        let number = |name: &str| {
            read(&folder.join(name))?.trim().parse::<usize>().ok().filter(|bytes| *bytes < NO_LIMIT)
        };
        let (Some(limit), Some(used)) = (number(files.limit), number(files.used)) else { return self };
        // Inactive page cache counts as used, but the system reclaims it when memory runs low.
        let stat = read(&folder.join("memory.stat")).unwrap_or_default();
        let cached = stat.lines().find_map(|line| line.strip_prefix(files.cached)?.trim().parse().ok());
        let left = limit.saturating_sub(used.saturating_sub(cached.unwrap_or(0)));
        let swap = match (number(files.swap_limit), number(files.swap_used)) {
            // In cgroup v1 both values count memory and swap together.
            (Some(both), Some(both_used)) if files.swap_counts_memory => {
                both.saturating_sub(limit).saturating_sub(both_used.saturating_sub(used))
            }
            (Some(limit), Some(used)) => limit.saturating_sub(used),
            _ => usize::MAX,
        };
        Self { total: self.total.min(limit), available: self.available.min(left), swap: self.swap.min(swap) }
    }
}

/// Free memory of a device, in bytes; `None` if it is unknown.
///
/// CPU memory is known on Linux. GPU memory is known if the NVIDIA driver reports it.
///
/// ```
/// use candle_core::Device;
///
/// if let Some(bytes) = candle_gpt2_engine::free_memory(&Device::Cpu) {
///     assert!(bytes > 1 << 20, "enough for this example");
/// }
/// ```
pub fn free_memory(device: &Device) -> Option<usize> {
    if device.is_cpu() {
        return ProcessMemory::now().map(|memory| memory.available);
    }
    #[cfg(feature = "cuda")]
    if let Ok(device) = device.as_cuda_device() {
        return device.cuda_stream().context().mem_get_info().ok().map(|(free, _)| free);
    }
    None
}

fn of_machine(meminfo: &str) -> Option<ProcessMemory> {
    let bytes = |name: &str| {
        let line = meminfo.lines().find_map(|line| line.strip_prefix(name))?;
        let kibibytes: usize = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
        kibibytes.checked_mul(1024)
    };
    Some(ProcessMemory {
        total: bytes("MemTotal:")?,
        available: bytes("MemAvailable:")?,
        swap: bytes("SwapFree:").unwrap_or(0),
    })
}

/// Control group that limits memory.
#[derive(Debug, PartialEq)]
struct ControlGroup {
    folder: PathBuf,
    files: &'static GroupFiles,
}

/// File names and keys for control groups in one of the two Linux cgroup versions.
#[derive(Debug, PartialEq)]
struct GroupFiles {
    root: &'static str,
    limit: &'static str,
    used: &'static str,
    /// Key for the reclaimable page cache in `memory.stat`.
    cached: &'static str,
    swap_limit: &'static str,
    swap_used: &'static str,
    swap_counts_memory: bool,
}

const VERSION_1: GroupFiles = GroupFiles {
    root: "/sys/fs/cgroup/memory",
    limit: "memory.limit_in_bytes",
    used: "memory.usage_in_bytes",
    cached: "total_inactive_file ",
    swap_limit: "memory.memsw.limit_in_bytes",
    swap_used: "memory.memsw.usage_in_bytes",
    swap_counts_memory: true,
};
const VERSION_2: GroupFiles = GroupFiles {
    root: "/sys/fs/cgroup",
    limit: "memory.max",
    used: "memory.current",
    cached: "inactive_file ",
    swap_limit: "memory.swap.max",
    swap_used: "memory.swap.current",
    swap_counts_memory: false,
};

/// Lists a process's control groups in `/proc/self/cgroup`, from the innermost up to the root.
///
/// In a container, the root is the container's control group.
fn groups_of(own: &str) -> Vec<ControlGroup> {
    let mut groups = Vec::new();
    for line in own.lines() {
        let mut parts = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (parts.next(), parts.next()) else { continue };
        let files = match controllers {
            "" => &VERSION_2,
            _ if controllers.split(',').any(|name| name == "memory") => &VERSION_1,
            _ => continue,
        };
        for inner in Path::new(path.trim_start_matches('/')).ancestors() {
            groups.push(ControlGroup { folder: Path::new(files.root).join(inner), files });
        }
    }
    groups
}

#[cfg(test)]
mod tests {
    use super::*;

    const MEMINFO: &str =
        "MemTotal:  4000 kB\nMemFree:  100 kB\nMemAvailable:   2000 kB\nSwapFree:  1000 kB\n";

    fn memory(total: usize, available: usize, swap: usize) -> ProcessMemory {
        ProcessMemory { total, available, swap }
    }

    fn within(files: &'static GroupFiles, written: &[(&str, &str)]) -> ProcessMemory {
        let group = ControlGroup { folder: "g".into(), files };
        let read = |path: &Path| {
            let name = path.strip_prefix("g").ok()?.to_str()?;
            written.iter().find(|(known, _)| *known == name).map(|(_, text)| (*text).to_owned())
        };
        memory(4000, 2000, 1000).within(&group, &read)
    }

    #[test]
    fn meminfo_yields_total_available_and_swap() {
        assert_eq!(of_machine(MEMINFO), Some(memory(4_096_000, 2_048_000, 1_024_000)));
        let without_swap = "MemTotal: 5 kB\nMemAvailable: 4 kB\n";
        assert_eq!(of_machine(without_swap), Some(memory(5120, 4096, 0)));
        assert_eq!(of_machine("MemTotal: 5 kB\n"), None);
    }

    #[test]
    fn cgroup_limit_minus_usage_caps_available_memory() {
        let stat = "anon 300\ninactive_anon 5\ninactive_file 600\nactive_file 7\n";
        let of = |limit: &str, used: &str, stat: &str| {
            within(&VERSION_2, &[("memory.max", limit), ("memory.current", used), ("memory.stat", stat)])
        };
        assert_eq!(of("1000\n", "950\n", stat), memory(1000, 650, 1000));
        assert_eq!(of("1000\n", "950\n", ""), memory(1000, 50, 1000));
        assert_eq!(of("max\n", "950\n", stat), memory(4000, 2000, 1000), "a group without a limit");
        assert_eq!(of("1000\n", "5000\n", stat), memory(1000, 0, 1000), "a group over its limit");
        assert_eq!(of("9000\n", "950\n", stat), memory(4000, 2000, 1000), "a group larger than the machine");
        assert_eq!(within(&VERSION_2, &[]), memory(4000, 2000, 1000), "a group without files");
    }

    #[test]
    fn cgroup_swap_limit_caps_swap() {
        let limits = [("memory.max", "1000"), ("memory.current", "400")];
        let swap = [("memory.swap.max", "300"), ("memory.swap.current", "100")];
        assert_eq!(within(&VERSION_2, &[limits, swap].concat()), memory(1000, 600, 200));
        let limits = [
            ("memory.limit_in_bytes", "1000"),
            ("memory.usage_in_bytes", "400"),
            ("memory.stat", "inactive_file 9\ntotal_inactive_file 50\n"),
        ];
        let both = [("memory.memsw.limit_in_bytes", "1300"), ("memory.memsw.usage_in_bytes", "500")];
        assert_eq!(within(&VERSION_1, &[&limits[..], &both].concat()), memory(1000, 650, 200));
        let no_limit = "9223372036854771712";
        let unlimited = [("memory.limit_in_bytes", no_limit), ("memory.usage_in_bytes", "400")];
        assert_eq!(within(&VERSION_1, &unlimited), memory(4000, 2000, 1000));
        let both = [("memory.memsw.limit_in_bytes", no_limit), ("memory.memsw.usage_in_bytes", "500")];
        assert_eq!(within(&VERSION_1, &[&limits[..], &both].concat()), memory(1000, 650, 1000));
    }

    #[test]
    fn cgroups_include_all_ancestors() {
        let folders = |own: &str| {
            let groups = groups_of(own).into_iter();
            groups.map(|group| group.folder.display().to_string()).collect::<Vec<_>>()
        };
        let slices = ["/sys/fs/cgroup/user.slice/job.scope", "/sys/fs/cgroup/user.slice", "/sys/fs/cgroup/"];
        assert_eq!(folders("0::/user.slice/job.scope\n"), slices);
        assert_eq!(folders("0::/\n"), ["/sys/fs/cgroup/"]);
        let version_1 = ["/sys/fs/cgroup/memory/a", "/sys/fs/cgroup/memory/", "/sys/fs/cgroup/"];
        assert_eq!(folders("5:cpu,cpuacct:/a\n4:memory:/a\n0::/\n"), version_1);
        assert!(folders("").is_empty());
    }
}
