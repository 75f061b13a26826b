//! Names and capacities of the maps.
//!
//! The kernel keeps 15 characters of a name, and the names are global to `bpftool map show name`.

/// NAT authority: every translated flow by its outside end. Plain preallocated hash, so nothing is ever evicted.
pub const REV: &str = "cst_rev";
/// Cache from a flow as the pod sends it to its outside end. LRU: an entry that is lost is found again in [`REV`].
pub const FWD: &str = "cst_fwd";
/// Flows that were opened from outside towards a pod, by the answer that the pod sends. LRU.
pub const INBOUND: &str = "cst_inbound";
/// The pods of this node.
pub const ENDPOINTS: &str = "cst_endpoints";
/// The egress devices and the address that pods leave under.
pub const DEVICES: &str = "cst_devices";
/// Destinations that keep the pod's address, with the reason. Longest prefix wins.
pub const EXCLUDED: &str = "cst_excluded";
/// Node-wide settings, one slot.
pub const SETTINGS: &str = "cst_settings";
/// Bitmap of the ports that are never given to a pod.
pub const PORTS: &str = "cst_ports";
/// Which tries of the port walk were ever used, one slot.
pub const TRIES: &str = "cst_tries";
/// When each rare event was last logged, one slot.
pub const EVENTS: &str = "cst_events";
/// Packets by kind, per CPU; the index is a [`crate::counter::Counter`].
pub const COUNTERS: &str = "cst_counters";

/// All maps, in the order in which they are reported.
pub const ALL: [&str; 11] = [REV, FWD, INBOUND, ENDPOINTS, DEVICES, EXCLUDED, SETTINGS, PORTS, TRIES, EVENTS, COUNTERS];

/// Flows that can be translated at a time, unless the loader overrides it.
pub const REV_ENTRIES: usize = 262_144;
/// Flows that the cache holds, unless the loader overrides it.
pub const FWD_ENTRIES: usize = 262_144;
/// Flows opened from outside that are remembered, unless the loader overrides it.
pub const INBOUND_ENTRIES: usize = 65_536;
/// Pods per node.
pub const ENDPOINT_ENTRIES: usize = 4_096;
/// Egress devices per node.
pub const DEVICE_ENTRIES: usize = 256;
/// Excluded prefixes: 16,384 of the ip-masq-agent list, and room for the nodes of a large cluster.
pub const EXCLUDED_ENTRIES: usize = 65_536;
/// Kinds of packets that can be counted. More than [`crate::counter::Counter`] has, so that a build that counts more kinds uses the
/// map of the build before, and the other way round.
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
