//! Kernel prerequisites of the agent. Setting them up requires privileges that the agent itself does not have.

use super::{InstallError, failed};
use nix::mount::{MsFlags, mount};
use nix::sys::statfs::{FsType, statfs};
use std::fs;
use std::path::Path;

/// `BPF_FS_MAGIC` of `linux/magic.h`.
const BPF_FS_MAGIC: i64 = 0xcafe_4a11;

/// Sysctls that pods depend on, with their values: the node forwards their packets.
const SYSCTLS: [(&str, &str); 1] = [("net/ipv4/ip_forward", "1")];

/// Mounts bpffs unless it is mounted. Returns whether it was mounted by this call.
///
/// # Errors
/// An error from the kernel.
pub fn mount_bpffs(path: &Path) -> Result<bool, InstallError> {
    fs::create_dir_all(path).map_err(failed("create", path))?;
    let kind = statfs(path).map_err(|errno| failed("look at", path)(errno.into()))?.filesystem_type();
    if kind == FsType(BPF_FS_MAGIC) {
        return Ok(false);
    }
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
    mount(Some("bpffs"), path, Some("bpf"), flags, Some("mode=0700"))
        .map_err(|errno| failed("mount bpffs on", path)(errno.into()))?;
    Ok(true)
}

/// Sets the sysctls that have another value, below `root` (`/proc/sys`). Returns the names of those changed.
///
/// # Errors
/// An error from the kernel.
pub fn set_sysctls(root: &Path) -> Result<Vec<&'static str>, InstallError> {
    let mut changed = Vec::new();
    for (name, value) in SYSCTLS {
        let path = root.join(name);
        let now = fs::read_to_string(&path).map_err(failed("read", &path))?;
        if now.trim() != value {
            fs::write(&path, value).map_err(failed("write", &path))?;
            changed.push(name);
        }
    }
    Ok(changed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_already_set_are_not_written() {
        let root = tempfile::tempdir().unwrap();
        let file = root.path().join("net/ipv4/ip_forward");
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(&file, "0\n").unwrap();
        assert_eq!(set_sysctls(root.path()).unwrap(), ["net/ipv4/ip_forward"]);
        assert_eq!(set_sysctls(root.path()).unwrap(), [""; 0]);
        assert!(set_sysctls(&root.path().join("none")).unwrap_err().to_string().contains("ip_forward"));
    }
}
