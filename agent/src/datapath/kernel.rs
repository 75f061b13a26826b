//! System calls that aya does not provide: rows of maps whose types this build does not know, batch lookups in hash
//! maps, the device of a tcx link, and detaching a link. Layouts are those of `linux/bpf.h`.
#![expect(unsafe_code, reason = "raw system calls, each with its reason")]

use aya::maps::MapType;
use std::ffi::CString;
use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

const BPF_MAP_CREATE: libc::c_int = 0;
const BPF_MAP_LOOKUP_ELEM: libc::c_int = 1;
const BPF_MAP_UPDATE_ELEM: libc::c_int = 2;
const BPF_MAP_GET_NEXT_KEY: libc::c_int = 4;
const BPF_OBJ_PIN: libc::c_int = 6;
const BPF_OBJ_GET: libc::c_int = 7;
const BPF_OBJ_GET_INFO_BY_FD: libc::c_int = 15;
const BPF_MAP_LOOKUP_BATCH: libc::c_int = 24;
const BPF_LINK_DETACH: libc::c_int = 34;

/// `errno` of an update of a link whose device no longer exists.
pub(super) const ENOLINK: i32 = libc::ENOLINK;

/// Seconds of the monotonic clock, as in the programs' time stamps.
pub(super) fn monotonic_seconds() -> u32 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the pointer is to a timespec that lives through the call.
    let failed = unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC_COARSE, &raw mut time) } != 0;
    // The clock exists on every Linux; 0 would make all entries young, so that nothing is deleted.
    if failed { 0 } else { u32::try_from(time.tv_sec).unwrap_or(u32::MAX) }
}

/// The kernel's information about a tcx link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct TcxLink {
    /// ID of its program.
    pub(super) program_id: u32,
    /// Its device; 0 if that no longer exists.
    pub(super) ifindex: u32,
}

/// Queries a pinned tcx link.
pub(super) fn tcx_link(path: &Path) -> io::Result<TcxLink> {
    /// `struct bpf_link_info` up to the two fields of `tcx`; the kernel fills at most the given length.
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

/// Detaches the program of a pinned link synchronously. The pin remains.
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

/// Opens a pinned object.
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
    // SAFETY: the kernel has just created this descriptor for us, and nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Position of an iteration over a map; opaque.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Cursor(u32);

/// Reads up to `keys.len()` entries of a hash map from `cursor`, initially `None`. Returns their number and the next
/// position, `None` at the end. Buckets are read whole, so an entry that exists throughout is returned exactly once,
/// whatever is inserted or deleted meanwhile; if a bucket does not fit, the kernel returns `ENOSPC`.
pub(super) fn lookup_batch<K: aya::Pod, V: aya::Pod>(
    map: BorrowedFd<'_>,
    cursor: Option<Cursor>,
    keys: &mut [K],
    values: &mut [V],
) -> io::Result<(usize, Option<Cursor>)> {
    let count = u32::try_from(keys.len().min(values.len())).unwrap_or(u32::MAX);
    // SAFETY: the buffers hold `count` keys and values of the map's own types, which are plain data.
    unsafe { lookup_rows(map, cursor, keys.as_mut_ptr().cast(), values.as_mut_ptr().cast(), count) }
}

/// [`lookup_batch`] for rows of unknown types.
///
/// # Safety
/// The buffers must have room for `count` keys and values of the map.
unsafe fn lookup_rows(
    map: BorrowedFd<'_>,
    cursor: Option<Cursor>,
    keys: *mut u8,
    values: *mut u8,
    count: u32,
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
    let from = cursor.map(|Cursor(bucket)| bucket);
    let mut to = 0_u32;
    let mut attr = BatchAttr {
        input: from.as_ref().map_or(0, |bucket| std::ptr::from_ref(bucket).addr() as u64),
        output: (&raw mut to).addr() as u64,
        keys: keys.addr() as u64,
        values: values.addr() as u64,
        count,
        map: map.as_raw_fd().cast_unsigned(),
        element_flags: 0,
        flags: 0,
    };
    // SAFETY: the caller guarantees the buffers, which like the two positions outlive the call.
    match unsafe { bpf(BPF_MAP_LOOKUP_BATCH, &mut attr) } {
        Ok(_) => Ok((attr.count as usize, Some(Cursor(to)))),
        // The end of the map; entries read so far are returned.
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok((attr.count as usize, None)),
        Err(error) => Err(error),
    }
}

/// `BPF_ANY`: insert or replace.
pub(super) const ANY: u64 = 0;
/// `BPF_NOEXIST`: insert only.
pub(super) const NO_EXIST: u64 = 1;
/// `BPF_EXIST`: replace only.
pub(super) const EXIST: u64 = 2;

/// A map with untyped rows, created by another build.
#[derive(Debug)]
pub(super) struct RawMap {
    fd: OwnedFd,
    /// `enum bpf_map_type`
    pub(super) kind: u32,
    pub(super) key_size: usize,
    pub(super) value_size: usize,
    pub(super) capacity: u32,
    pub(super) flags: u32,
    /// Size of a value in system calls: for per-CPU maps that of all values.
    bytes: usize,
}

/// The members of `union bpf_attr` for one row.
#[repr(C)]
struct RowAttr {
    map: u32,
    padding: u32,
    key: u64,
    /// `next_key` of a walk.
    value: u64,
    flags: u64,
}

impl RawMap {
    /// Opens a pinned map.
    pub(super) fn open(path: &Path) -> io::Result<Self> {
        Self::from_fd(object(path)?)
    }

    fn from_fd(fd: OwnedFd) -> io::Result<Self> {
        /// `struct bpf_map_info` up to `map_flags`; the kernel fills at most the given length.
        #[repr(C)]
        #[derive(Default)]
        struct MapInfo {
            kind: u32,
            id: u32,
            key_size: u32,
            value_size: u32,
            capacity: u32,
            flags: u32,
        }
        /// The member `info` of `union bpf_attr`.
        #[repr(C)]
        struct InfoAttr {
            fd: u32,
            length: u32,
            info: u64,
        }
        let mut info = MapInfo::default();
        let mut attr = InfoAttr {
            fd: fd.as_raw_fd().cast_unsigned(),
            length: size_of::<MapInfo>() as u32,
            info: (&raw mut info).addr() as u64,
        };
        // SAFETY: `info` is as long as said and outlives the call; every bit pattern is a value of its fields.
        unsafe { bpf(BPF_OBJ_GET_INFO_BY_FD, &mut attr)? };
        let value_size = info.value_size as usize;
        let bytes = if info.kind == MapType::PerCpuArray as u32 {
            let cpus = aya::util::nr_cpus().map_err(|(_, error)| error)?;
            value_size.next_multiple_of(8) * cpus
        } else {
            value_size
        };
        Ok(Self {
            fd,
            kind: info.kind,
            key_size: info.key_size as usize,
            value_size,
            capacity: info.capacity,
            flags: info.flags,
            bytes,
        })
    }

    fn attr(&self, key: u64, value: u64, flags: u64) -> RowAttr {
        RowAttr { map: self.fd.as_raw_fd().cast_unsigned(), padding: 0, key, value, flags }
    }

    fn checked(actual: usize, expected: usize) -> io::Result<()> {
        if actual == expected { Ok(()) } else { Err(io::ErrorKind::InvalidInput.into()) }
    }

    /// The value under a key.
    pub(super) fn lookup(&self, key: &[u8]) -> io::Result<Option<Vec<u8>>> {
        Self::checked(key.len(), self.key_size)?;
        let mut value = vec![0_u8; self.bytes];
        let mut attr = self.attr(key.as_ptr().addr() as u64, value.as_mut_ptr().addr() as u64, 0);
        // SAFETY: the buffers are as long as the map's key and value, and outlive the call.
        match unsafe { bpf(BPF_MAP_LOOKUP_ELEM, &mut attr) } {
            Ok(_) => Ok(Some(value)),
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Writes a row; returns false if `flags` forbid it.
    pub(super) fn update(&self, key: &[u8], value: &[u8], flags: u64) -> io::Result<bool> {
        Self::checked(key.len(), self.key_size)?;
        Self::checked(value.len(), self.bytes)?;
        let mut attr = self.attr(key.as_ptr().addr() as u64, value.as_ptr().addr() as u64, flags);
        // SAFETY: as above; the kernel only reads them.
        match unsafe { bpf(BPF_MAP_UPDATE_ELEM, &mut attr) } {
            Ok(_) => Ok(true),
            Err(error) if matches!(error.raw_os_error(), Some(libc::EEXIST | libc::ENOENT)) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// The key after this one, or the first.
    fn next_key(&self, key: Option<&[u8]>) -> io::Result<Option<Vec<u8>>> {
        let mut next = vec![0_u8; self.key_size];
        let from = key.map_or(0, |key| key.as_ptr().addr() as u64);
        let mut attr = self.attr(from, next.as_mut_ptr().addr() as u64, 0);
        // SAFETY: as above.
        match unsafe { bpf(BPF_MAP_GET_NEXT_KEY, &mut attr) } {
            Ok(_) => Ok(Some(next)),
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Visits all rows. In a hash map, rows inserted or deleted meanwhile may or may not be visited; all others are
    /// visited once.
    pub(super) fn visit(&self, mut row: impl FnMut(&[u8], &[u8]) -> io::Result<()>) -> io::Result<()> {
        if [MapType::Hash as u32, MapType::LruHash as u32].contains(&self.kind) {
            return self.visit_hash(row);
        }
        let mut at = self.next_key(None)?;
        while let Some(key) = at {
            if let Some(value) = self.lookup(&key)? {
                row(&key, &value)?;
            }
            at = self.next_key(Some(&key))?;
        }
        Ok(())
    }

    fn visit_hash(&self, mut row: impl FnMut(&[u8], &[u8]) -> io::Result<()>) -> io::Result<()> {
        let (mut count, mut cursor) = (4_096_usize, None);
        loop {
            let (mut keys, mut values) = (vec![0_u8; count * self.key_size], vec![0_u8; count * self.bytes]);
            // SAFETY: the buffers hold `count` keys and values of the map's sizes.
            let read =
                unsafe { lookup_rows(self.fd.as_fd(), cursor, keys.as_mut_ptr(), values.as_mut_ptr(), count as u32) };
            match read {
                Ok((found, next)) => {
                    let rows = keys.chunks_exact(self.key_size).zip(values.chunks_exact(self.bytes));
                    for (key, value) in rows.take(found) {
                        row(key, value)?;
                    }
                    if next.is_none() {
                        return Ok(());
                    }
                    cursor = next;
                }
                // A bucket exceeds the buffer.
                Err(error) if error.raw_os_error() == Some(libc::ENOSPC) => count *= 2,
                Err(error) => return Err(error),
            }
        }
    }
}

/// Creates an array with one value, and pins it.
pub(super) fn create_array(name: &str, value_size: u32, path: &Path) -> io::Result<RawMap> {
    /// The members of `union bpf_attr` for a new map, up to its name.
    #[repr(C)]
    struct CreateAttr {
        kind: u32,
        key_size: u32,
        value_size: u32,
        capacity: u32,
        flags: u32,
        inner_map_fd: u32,
        numa_node: u32,
        name: [u8; 16],
    }
    /// The member of `union bpf_attr` for pins.
    #[repr(C)]
    struct PinAttr {
        path: u64,
        fd: u32,
        flags: u32,
    }
    let mut attr = CreateAttr {
        kind: MapType::Array as u32,
        key_size: 4,
        value_size,
        capacity: 1,
        flags: 0,
        inner_map_fd: 0,
        numa_node: 0,
        name: [0; 16],
    };
    for (to, from) in attr.name.iter_mut().take(15).zip(name.bytes()) {
        *to = from;
    }
    // SAFETY: it points to nothing.
    let fd = unsafe { bpf(BPF_MAP_CREATE, &mut attr)? };
    // SAFETY: the kernel has just created this descriptor for us, and nothing else owns it.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    let pin = CString::new(path.as_os_str().as_bytes())?;
    let mut attr = PinAttr { path: pin.as_ptr().addr() as u64, fd: fd.as_raw_fd().cast_unsigned(), flags: 0 };
    // SAFETY: the path is NUL-terminated and outlives the call.
    unsafe { bpf(BPF_OBJ_PIN, &mut attr)? };
    RawMap::from_fd(fd)
}

/// Returns when every run of a kernel program that had begun before has ended: what programs read from maps is from now on what
/// user space wrote before. `MEMBARRIER_CMD_GLOBAL` waits for a grace period of RCU, inside of which programs run.
pub(super) fn wait_for_programs() {
    const MEMBARRIER_CMD_GLOBAL: libc::c_int = 1;
    // SAFETY: the call takes two numbers.
    let result = unsafe { libc::syscall(libc::SYS_membarrier, MEMBARRIER_CMD_GLOBAL, 0) };
    if result != 0 {
        // Not available on CPUs without a clock tick (`nohz_full`). A program takes microseconds.
        std::thread::sleep(std::time::Duration::from_millis(100));
    }
}

/// The system call itself.
///
/// # Safety
/// `attr` must be the member of `union bpf_attr` for `command`, and what it points to must outlive the call.
unsafe fn bpf<A>(command: libc::c_int, attr: &mut A) -> io::Result<RawFd> {
    // SAFETY: the caller vouches for the contents; the length is that of the structure.
    let result = unsafe { libc::syscall(libc::SYS_bpf, command, std::ptr::from_mut(attr), size_of::<A>()) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(RawFd::try_from(result).unwrap_or_default()) }
}
