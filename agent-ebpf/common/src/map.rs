//! Names and capacities of the maps.
//!
//! The kernel truncates names to 15 characters, and `bpftool map show name` searches all maps of the machine.

/// NAT authority: every translated flow by its translated tuple. Plain preallocated hash, so nothing is ever evicted.
pub const REV: &str = "cst_rev";
/// Cache from a flow's local form to its translated tuple. LRU: an evicted entry is found again in `cst_rev`.
pub const FWD: &str = "cst_fwd";
/// Flows opened from outside to a pod, by the tuple of the pod's replies. LRU.
pub const INBOUND: &str = "cst_inbound";
/// The pods of this node.
pub const ENDPOINTS: &str = "cst_endpoints";
/// The egress devices and their masquerade addresses.
pub const DEVICES: &str = "cst_devices";
/// Destinations excluded from masquerading, with the reason. Longest prefix wins.
pub const EXCLUDED: &str = "cst_excluded";
/// Node-wide settings, one slot.
pub const SETTINGS: &str = "cst_settings";
/// Bitmap of the ports reserved against use by pods.
pub const PORTS: &str = "cst_ports";
/// Which steps of the port walk have been used, one slot.
pub const TRIES: &str = "cst_tries";
/// When each event was last logged, one slot.
pub const EVENTS: &str = "cst_events";
/// Packets by kind, per CPU; the index is a counter of `common/src/counter.rs`.
pub const COUNTERS: &str = "cst_counters";

/// All maps, in the order in which they are reported.
pub const ALL: [&str; 11] = [REV, FWD, INBOUND, ENDPOINTS, DEVICES, EXCLUDED, SETTINGS, PORTS, TRIES, EVENTS, COUNTERS];

/// Maximum number of translated flows, unless the loader overrides it.
pub const REV_ENTRIES: usize = 262_144;
/// Capacity of the cache, unless the loader overrides it.
pub const FWD_ENTRIES: usize = 262_144;
/// Maximum number of flows opened from outside, unless the loader overrides it.
pub const INBOUND_ENTRIES: usize = 65_536;
/// Pods per node.
pub const ENDPOINT_ENTRIES: usize = 4_096;
/// Egress devices per node.
pub const DEVICE_ENTRIES: usize = 256;
/// Excluded prefixes: 16,384 of the ip-masq-agent list, and room for the nodes of a large cluster.
pub const EXCLUDED_ENTRIES: usize = 65_536;
/// Capacity for counters. More than [`crate::counter::Counter`] has, so that builds with more counters can share the
/// map, in both directions.
pub const COUNTER_ENTRIES: usize = 128;
/// Words of the port bitmap: 65,536 ports, 64 in each word.
pub const PORT_WORDS: usize = 1_024;

const _: () = {
    let mut index = 0;
    while index < ALL.len() {
        assert!(ALL[index].len() <= 15, "the kernel cuts map names after 15 characters");
        index += 1;
    }
};
