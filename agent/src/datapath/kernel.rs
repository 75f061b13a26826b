//! The system calls that aya does not offer: reading many entries of a hash map at once, asking a tcx link for its device,
//! and detaching it. Layouts are those of `linux/bpf.h`.
#![expect(unsafe_code, reason = "raw system calls, each with its reason")]

use std::ffi::CString;
use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

const BPF_OBJ_GET: libc::c_int = 7;
const BPF_OBJ_GET_INFO_BY_FD: libc::c_int = 15;
const BPF_MAP_LOOKUP_BATCH: libc::c_int = 24;
const BPF_LINK_DETACH: libc::c_int = 34;

/// `errno` of an update of a link whose device has gone.
pub(super) const ENOLINK: i32 = libc::ENOLINK;

/// Seconds of the monotonic clock, which the programs stamp entries with.
pub(super) fn monotonic_seconds() -> u32 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the pointer is to a timespec that lives through the call.
    let failed = unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC_COARSE, &raw mut time) } != 0;
    // The clock exists on every Linux; 0 would make every entry young, which deletes nothing.
    if failed { 0 } else { u32::try_from(time.tv_sec).unwrap_or(u32::MAX) }
}

/// What the kernel says of a tcx link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct TcxLink {
    /// The program that it runs.
    pub(super) program_id: u32,
    /// Its device; 0 when that has gone.
    pub(super) ifindex: u32,
}

/// Asks a pinned tcx link.
pub(super) fn tcx_link(path: &Path) -> io::Result<TcxLink> {
    /// `struct bpf_link_info` up to the two fields of `tcx`; the kernel fills no more than it is given.
    #[repr(C)]
    #[derive(Default)]
    struct LinkInfo {
        kind: u32,
        id: u32,
        program_id: u32,
        padding: u32,
        ifindex: u32,
        attach_type: u32,
    }
    /// The member `info` of `union bpf_attr`.
    #[repr(C)]
    struct InfoAttr {
        fd: u32,
        length: u32,
        info: u64,
    }
    let link = object(path)?;
    let mut info = LinkInfo::default();
    let mut attr = InfoAttr {
        fd: link.as_raw_fd().cast_unsigned(),
        length: size_of::<LinkInfo>() as u32,
        info: (&raw mut info).addr() as u64,
    };
    // SAFETY: `info` is as long as said and outlives the call; every bit pattern is a value of its fields.
    unsafe { bpf(BPF_OBJ_GET_INFO_BY_FD, &mut attr)? };
    Ok(TcxLink { program_id: info.program_id, ifindex: info.ifindex })
}

/// Takes the program of a pinned link off its device before this returns. The pin stays.
pub(super) fn detach_link(path: &Path) -> io::Result<()> {
    /// The member `link_detach` of `union bpf_attr`.
    #[repr(C)]
    struct DetachAttr {
        link_fd: u32,
    }
    let link = object(path)?;
    let mut attr = DetachAttr { link_fd: link.as_raw_fd().cast_unsigned() };
    // SAFETY: it points to nothing.
    unsafe { bpf(BPF_LINK_DETACH, &mut attr) }.map(drop)
}

/// Opens what is pinned at `path`.
fn object(path: &Path) -> io::Result<OwnedFd> {
    /// The member of `union bpf_attr` for objects by path.
    #[repr(C)]
    struct ObjectAttr {
        path: u64,
        fd: u32,
        flags: u32,
    }
    let path = CString::new(path.as_os_str().as_bytes())?;
    let mut attr = ObjectAttr { path: path.as_ptr().addr() as u64, fd: 0, flags: 0 };
    // SAFETY: the path is NUL-terminated and outlives the call.
    let fd = unsafe { bpf(BPF_OBJ_GET, &mut attr)? };
    // SAFETY: the kernel has just made this descriptor for us, and nobody else knows it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Where a walk over a map stands; opaque to us.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Cursor(u32);

/// Reads up to `keys.len()` entries of a hash map from where `cursor` stands, which is `None` at the start. Returns how
/// many were read and where to go on, which is `None` at the end. Buckets are read whole, so an entry that stays is
/// seen exactly once whatever comes and goes meanwhile; when a bucket does not fit, the kernel says `ENOSPC`.
pub(super) fn lookup_batch<K: aya::Pod, V: aya::Pod>(
    map: BorrowedFd<'_>,
    cursor: Option<Cursor>,
    keys: &mut [K],
    values: &mut [V],
) -> io::Result<(usize, Option<Cursor>)> {
    /// The member `batch` of `union bpf_attr`.
    #[repr(C)]
    struct BatchAttr {
        input: u64,
        output: u64,
        keys: u64,
        values: u64,
        count: u32,
        map: u32,
        element_flags: u64,
        flags: u64,
    }
    let count = u32::try_from(keys.len().min(values.len())).unwrap_or(u32::MAX);
    let from = cursor.map(|Cursor(bucket)| bucket);
    let mut to = 0_u32;
    let mut attr = BatchAttr {
        input: from.as_ref().map_or(0, |bucket| std::ptr::from_ref(bucket).addr() as u64),
        output: (&raw mut to).addr() as u64,
        keys: keys.as_mut_ptr().addr() as u64,
        values: values.as_mut_ptr().addr() as u64,
        count,
        map: map.as_raw_fd().cast_unsigned(),
        element_flags: 0,
        flags: 0,
    };
    // SAFETY: the buffers hold `count` keys and values of the map's own types, which are plain data, and like the two
    // positions they outlive the call.
    match unsafe { bpf(BPF_MAP_LOOKUP_BATCH, &mut attr) } {
        Ok(_) => Ok((attr.count as usize, Some(Cursor(to)))),
        // The walk is over; what was read on the way is there.
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok((attr.count as usize, None)),
        Err(error) => Err(error),
    }
}

/// The system call itself.
///
/// # Safety
/// `attr` is the member of `union bpf_attr` that `command` takes, and what it points to lives through the call.
unsafe fn bpf<A>(command: libc::c_int, attr: &mut A) -> io::Result<RawFd> {
    // SAFETY: the caller vouches for the contents; the length is that of the structure.
    let result = unsafe { libc::syscall(libc::SYS_bpf, command, std::ptr::from_mut(attr), size_of::<A>()) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(RawFd::try_from(result).unwrap_or_default()) }
}
