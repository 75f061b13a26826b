//! Keys and values of the maps.

use core::mem::{offset_of, size_of};

/// An IPv4 address in network order.
pub type Address = [u8; 4];

/// A TCP or UDP port, or an ICMP echo identifier, in network order.
pub type Port = [u8; 2];

/// `protocol`: ICMP.
pub const ICMP: u8 = 1;
/// `protocol`: TCP.
pub const TCP: u8 = 6;
/// `protocol`: UDP.
pub const UDP: u8 = 17;

/// A flow in its local form: key of the forward cache and of the inbound table.
///
/// An echo request has its identifier as `source_port` and 0 as `destination_port`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(C)]
pub struct FlowKey<const N: usize = 4> {
    /// The pod, or the host for its own flows.
    pub source: [u8; N],
    /// The remote endpoint.
    pub destination: [u8; N],
    /// Port at `source`.
    pub source_port: Port,
    /// Port at `destination`.
    pub destination_port: Port,
    /// [`TCP`], [`UDP`] or [`ICMP`].
    pub protocol: u8,
    /// Always zero.
    pub zero: [u8; 3],
}

/// The translated tuple: remote endpoint and post-NAT source. Key of the reverse map.
///
/// It is the tuple of a reply. An echo reply has 0 as `remote_port` and its identifier as `external_port`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(C)]
pub struct RevKey<const N: usize = 4> {
    /// The remote endpoint.
    pub remote: [u8; N],
    /// The translated source address of the flow.
    pub external: [u8; N],
    /// Port at `remote`.
    pub remote_port: Port,
    /// Port at `external`.
    pub external_port: Port,
    /// [`TCP`], [`UDP`] or [`ICMP`].
    pub protocol: u8,
    /// Always zero.
    pub zero: [u8; 3],
}

/// The owner of a translated tuple: value of the reverse map.
#[cfg(not(feature = "test-variant"))]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct RevValue<const N: usize = 4> {
    /// The pod, or the host for its own flows.
    pub origin: [u8; N],
    /// Port at `origin`.
    pub origin_port: Port,
    /// Packets seen from `origin`: bits of [`seen`]. Written by egress only.
    pub sent: u8,
    /// Packets seen from the remote end: bits of [`seen`]. Written by ingress only.
    pub received: u8,
    /// Time of the last packet, in seconds of the monotonic clock.
    pub last_seen: u32,
    /// Time of the first packet, in seconds of the monotonic clock.
    pub created: u32,
    /// The egress device of the flow.
    pub ifindex: u32,
    /// Kind of the owner: [`OWNER_POD`] or [`OWNER_HOST`].
    pub owner: u8,
    /// Room to grow; zero.
    pub spare: [u8; 3],
    /// [`EndpointValue::generation`] of the pod; 0 for the host, and if unknown.
    pub endpoint_generation: u32,
    /// [`SettingsValue::epoch`] at which the pod was last checked to be this endpoint; 0 before that. Written by
    /// ingress only.
    pub epoch: u32,
    /// Room to grow; zero.
    pub room: [u8; 12],
}

/// The variant with its fields in another order, and an additional one.
#[cfg(feature = "test-variant")]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
#[expect(missing_docs, reason = "the fields are those above")]
pub struct RevValue<const N: usize = 4> {
    pub created: u32,
    pub last_seen: u32,
    pub epoch: u32,
    pub endpoint_generation: u32,
    pub ifindex: u32,
    pub origin: [u8; N],
    pub origin_port: Port,
    pub owner: u8,
    pub sent: u8,
    pub received: u8,
    pub spare: [u8; 3],
    pub variant: u32,
    pub room: [u8; 8],
}

impl<const N: usize> RevValue<N> {
    /// The entry of a flow whose first packet left at `now`, by the device `ifindex`.
    #[inline(always)]
    #[must_use]
    pub const fn opened(flow: &FlowKey<N>, owner: u8, endpoint_generation: u32, ifindex: u32, now: u32) -> Self {
        Self {
            origin: flow.source,
            origin_port: flow.source_port,
            sent: seen::ANY,
            received: 0,
            last_seen: now,
            created: now,
            ifindex,
            owner,
            spare: [0; 3],
            endpoint_generation,
            epoch: 0,
            #[cfg(not(feature = "test-variant"))]
            room: [0; 12],
            #[cfg(feature = "test-variant")]
            room: [0; 8],
            #[cfg(feature = "test-variant")]
            variant: 0,
        }
    }
}

/// [`RevValue::owner`]: a pod's flow.
pub const OWNER_POD: u8 = 0;
/// [`RevValue::owner`]: a flow of the host. Origin and translated source are equal if it only reserves its port; they
/// differ if a pod's flow was first and the host's was translated.
pub const OWNER_HOST: u8 = 1;

/// Bits of [`RevValue::sent`], [`RevValue::received`] and the same fields of [`InboundValue`].
pub mod seen {
    /// Any packet.
    pub const ANY: u8 = 1;
    /// TCP FIN.
    pub const FIN: u8 = 2;
    /// TCP RST.
    pub const RST: u8 = 4;
}

/// Value of the forward cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct FwdValue<const N: usize = 4> {
    /// The translated source address of the flow.
    pub external: [u8; N],
    /// Port at `external`.
    pub external_port: Port,
    /// Room to grow; zero.
    pub spare: [u8; 2],
    /// When the reverse entry was last checked, in seconds of the monotonic clock. It is checked once per second, to
    /// update `last_seen` and to detect its deletion.
    pub checked: u32,
    /// [`SettingsValue::epoch`] at which `external` was last checked to be an address of this node, and the source to
    /// be the endpoint that opened the flow.
    pub epoch: u32,
    /// The device by which the pod's packets arrive, [`EndpointValue::ifindex`]. A packet that arrived by another one
    /// does not use this entry. 0: any device.
    pub device: u32,
    /// [`EndpointValue::generation`] of the pod; 0 for the host, and if unknown.
    pub endpoint_generation: u32,
    /// Room to grow; zero.
    pub room: [u8; 8],
}

/// A flow opened from outside: value of the inbound table, under the key of the pod's reply.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct InboundValue {
    /// Time of the last packet, in seconds of the monotonic clock.
    pub last_seen: u32,
    /// Time of the first packet, in seconds of the monotonic clock.
    pub created: u32,
    /// The device by which the flow arrived.
    pub ifindex: u32,
    /// Packets seen from the pod: bits of [`seen`].
    pub sent: u8,
    /// Packets seen from outside: bits of [`seen`].
    pub received: u8,
    /// Room to grow; zero.
    pub room: [u8; 10],
}

/// Key of the endpoint map.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(C)]
pub struct EndpointKey<const N: usize = 4> {
    /// The pod.
    pub address: [u8; N],
}

/// Value of the endpoint map.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct EndpointValue {
    /// The host side of the pod's interface: only packets that arrive by it count as the pod's. 0 if another plugin
    /// attached the pod: then any device counts.
    pub ifindex: u32,
    /// [`ENDPOINT_EXEMPT`] or 0.
    pub flags: u32,
    /// Distinguishes successive pods with this address; 0 if unknown, which equals any.
    pub generation: u32,
    /// Room to grow, for an identity of the pod among others; zero.
    pub room: [u8; 12],
}

/// [`EndpointValue::flags`]: traffic of this pod is never masqueraded.
pub const ENDPOINT_EXEMPT: u32 = 1;

/// Key of the device map.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(C)]
pub struct DeviceKey {
    /// The egress device.
    pub ifindex: u32,
}

/// Value of the device map.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct DeviceValue<const N: usize = 4> {
    /// The masquerade address; all zero if the device has none.
    pub address: [u8; N],
    /// Room to grow; zero.
    pub room: [u8; 12],
}

/// Data part of a key of the exclusion trie.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(C)]
pub struct ExcludedAddress<const N: usize = 4> {
    /// Network address, host bits zero.
    pub address: [u8; N],
}

/// Value of the exclusion trie.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct ExcludedValue {
    /// When the prefix was added, in seconds of the monotonic clock: for one TCP idle timeout, flows translated before
    /// are still searched. 0 if no flow can have been translated to it.
    pub since: u32,
    /// Why the destination is excluded: a number of [`reason`].
    pub reason: u8,
    /// Room to grow; zero.
    pub room: [u8; 11],
}

/// Numbers of [`ExcludedValue::reason`].
pub mod reason {
    /// An address of this node. The only reason that the programs distinguish.
    pub const OWN_NODE: u8 = 1;
    /// `InternalIP` of another node.
    pub const NODE_INTERNAL_IP: u8 = 2;
    /// The pod CIDR of a node.
    pub const POD_CIDR: u8 = 3;
    /// The native routing prefix.
    pub const NATIVE_ROUTING: u8 = 4;
    /// The ip-masq-agent list.
    pub const IP_MASQ_AGENT: u8 = 5;
    /// Link-local addresses.
    pub const LINK_LOCAL: u8 = 6;
    /// Multicast and limited broadcast.
    pub const MULTICAST: u8 = 7;
}

/// Node-wide settings.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct SettingsValue {
    /// Key of the hash that starts the port walk. Random per node, and persistent with the maps.
    pub hash_key: [u64; 2],
    /// Bits [`SETTING_MASQUERADE`], [`SETTING_IMMEDIATE`].
    pub flags: u32,
    /// How long after a change of policy an established TCP flow keeps its treatment, in seconds: the TCP idle timeout.
    pub window: u32,
    /// Time of the last policy change by which existing flows may newly be translated, in seconds of the monotonic
    /// clock.
    pub policy_changed: u32,
    /// Incremented after every change of the node's addresses and of its pods that may end flows, so that entries of
    /// flows are compared with both only then. Never 0.
    pub epoch: u32,
    /// First port that may be allocated.
    pub port_first: u16,
    /// Last port that may be allocated.
    pub port_last: u16,
    /// Role of the programs with these maps while others take over from them: a number of [`handover`].
    pub handover: u32,
    /// Always 0: see `opaque` of the programs.
    pub zero: u32,
    /// Room to grow; zero.
    pub room: [u8; 20],
}

/// [`SettingsValue::flags`]: masquerading is enabled.
pub const SETTING_MASQUERADE: u32 = 1;
/// [`SettingsValue::flags`]: the current policy applies to all packets, including those of established flows.
pub const SETTING_IMMEDIATE: u32 = 2;

/// Numbers of [`SettingsValue::handover`]: roles of programs during a takeover between two builds with different map
/// rows, when both are attached to a device. The module of the agent that drives it documents the order of events.
pub mod handover {
    /// No other programs are attached.
    pub const NONE: u32 = 0;
    /// Successor whose maps are being filled: passes all packets unchanged and uncounted.
    pub const WAITING: u32 = 1;
    /// Predecessor that only allocates even ports.
    pub const EVEN: u32 = 2;
    /// Successor that only allocates odd ports and records no flows opened from outside, as its predecessor does that.
    pub const ODD: u32 = 3;
    /// Predecessor that serves its existing flows; a packet that needs a new entry is passed unchanged to the
    /// successor.
    pub const CLOSED: u32 = 4;

    /// The port, or its neighbour of the other parity where only that may be allocated. So the walk tries as many ports during a
    /// takeover as at other times. Without a branch for each part, since the verifier follows every one in every try.
    #[inline(always)]
    #[must_use]
    pub const fn fitted(handover: u32, port: u16) -> u16 {
        // EVEN and ODD alone have the second bit.
        port ^ ((port as u32 ^ handover) & (handover >> 1 & 1)) as u16
    }

    /// Whether a port may be allocated by programs that allocate at all.
    #[inline(always)]
    #[must_use]
    pub const fn allocates(handover: u32, port: u16) -> bool {
        fitted(handover, port) == port
    }

    const _: () = {
        assert!(allocates(EVEN, 2) && !allocates(EVEN, 3) && allocates(ODD, 3) && !allocates(ODD, 2));
        assert!(fitted(EVEN, 3) == 2 && fitted(ODD, 2) == 3);
        assert!(allocates(NONE, 2) && allocates(NONE, 3) && allocates(WAITING, 2) && allocates(WAITING, 3));
    };
}

/// One word of the port bitmap.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct PortWord {
    /// Bit `n` of word `w` is set if port `64 w + n` is reserved.
    pub reserved: u64,
}

/// Which steps of the port walk have been used, so that a lookup does not probe further than any allocation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct TriesValue {
    /// 1 at the index of each step that has allocated a port; index 0 is the source port. One byte each, so that two
    /// CPUs cannot overwrite each other's update.
    pub used: [u8; crate::ports::TRIES],
    /// 1 if any step but the first has allocated a port.
    pub moved: u8,
    /// 1 if a step has allocated the neighbour of its port: see [`handover::fitted`].
    pub flipped: u8,
    /// Room to grow; zero.
    pub spare: [u8; 5],
}

/// When each event was last logged, in seconds of the monotonic clock, to limit it to one per second.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct EventsValue {
    /// No free port was found.
    pub no_port: u32,
    /// The reverse map is full.
    pub map_full: u32,
    /// The device has no address.
    pub no_device_address: u32,
    /// Room to grow; zero.
    pub room: [u8; 20],
}

/// One counter of one CPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct CounterValue {
    /// Packets counted.
    pub packets: u64,
}

/// The bit of `skb->mark` for "translated on an upper device": with a bridge, bond or VLAN the hook runs once per
/// layer. It never leaves the node.
pub const MARK_TRANSLATED: u32 = 0x0400_0000;

// Sizes are part of the contract with maps pinned by other versions. If the sum of field sizes equals the size of the
// struct, there is no padding, and no uninitialised byte.
const fn no_padding<const N: usize>() {
    assert!(size_of::<FlowKey<N>>() == 2 * N + 2 + 2 + 1 + 3);
    assert!(size_of::<RevKey<N>>() == 2 * N + 2 + 2 + 1 + 3);
    assert!(size_of::<RevValue<N>>() == N + 2 + 1 + 1 + 4 + 4 + 4 + 1 + 3 + 4 + 4 + 12);
    assert!(size_of::<FwdValue<N>>() == N + 2 + 2 + 4 + 4 + 4 + 4 + 8);
    assert!(size_of::<EndpointKey<N>>() == N && size_of::<ExcludedAddress<N>>() == N);
    assert!(size_of::<DeviceValue<N>>() == N + 12);
}

const _: () = {
    no_padding::<4>();
    no_padding::<16>();
    assert!(offset_of!(FlowKey, destination) == 4 && offset_of!(FlowKey, protocol) == 12);
    assert!(offset_of!(RevKey, external) == 4 && offset_of!(RevKey, external_port) == 10);
    assert!(size_of::<InboundValue>() == 4 + 4 + 4 + 1 + 1 + 10);
    assert!(size_of::<EndpointValue>() == 4 + 4 + 4 + 12);
    assert!(size_of::<DeviceKey>() == 4 && size_of::<ExcludedValue>() == 4 + 1 + 11);
    assert!(size_of::<SettingsValue>() == 16 + 4 + 4 + 4 + 4 + 2 + 2 + 4 + 24);
    assert!(offset_of!(SettingsValue, policy_changed) == 24 && offset_of!(SettingsValue, port_last) == 34);
    assert!(size_of::<PortWord>() == 8 && size_of::<TriesValue>() == crate::ports::TRIES + 1 + 6);
    assert!(size_of::<EventsValue>() == 12 + 20 && size_of::<CounterValue>() == 8);
};

impl<const N: usize> FlowKey<N> {
    /// The key of replies: with the endpoints exchanged.
    #[must_use]
    pub const fn answer(self) -> Self {
        Self {
            source: self.destination,
            destination: self.source,
            source_port: self.destination_port,
            destination_port: self.source_port,
            protocol: self.protocol,
            zero: [0; 3],
        }
    }

    /// The translated tuple of this flow with the given address and port.
    #[must_use]
    pub const fn outside(&self, external: [u8; N], external_port: Port) -> RevKey<N> {
        RevKey {
            remote: self.destination,
            external,
            remote_port: self.destination_port,
            external_port,
            protocol: self.protocol,
            zero: [0; 3],
        }
    }
}

impl<const N: usize> RevKey<N> {
    /// The flow of `origin` with this translated tuple.
    #[must_use]
    pub const fn flow(&self, origin: [u8; N], origin_port: Port) -> FlowKey<N> {
        FlowKey {
            source: origin,
            destination: self.remote,
            source_port: origin_port,
            destination_port: self.remote_port,
            protocol: self.protocol,
            zero: [0; 3],
        }
    }
}

/// Whether an entry of a flow and an endpoint are of the same pod, by their generations. 0 is unknown, and equals any.
#[inline(always)]
#[must_use]
pub const fn same_pod(entry: u32, endpoint: u32) -> bool {
    entry == endpoint || entry == 0 || endpoint == 0
}

#[cfg(feature = "user")]
mod pod {
    use super::{
        CounterValue, DeviceKey, DeviceValue, EndpointKey, EndpointValue, EventsValue, ExcludedAddress, ExcludedValue,
        FlowKey, FwdValue, InboundValue, PortWord, RevKey, RevValue, SettingsValue, TriesValue,
    };

    macro_rules! pod {
        ($($name:ident),+ $(,)?) => {
            // SAFETY: repr(C), integers and arrays of integers only, no padding (asserted above), every bit pattern valid.
            $(unsafe impl aya::Pod for $name {})+
        };
    }

    /// Rows with addresses of either family.
    macro_rules! pod_with_addresses {
        ($($name:ident),+ $(,)?) => {
            // SAFETY: as above; the assertions cover both lengths of an address.
            $(unsafe impl aya::Pod for $name<4> {}
            unsafe impl aya::Pod for $name<16> {})+
        };
    }

    pod!(
        CounterValue,
        DeviceKey,
        EndpointValue,
        EventsValue,
        ExcludedValue,
        InboundValue,
        PortWord,
        SettingsValue,
        TriesValue,
    );
    pod_with_addresses!(DeviceValue, EndpointKey, ExcludedAddress, FlowKey, FwdValue, RevKey, RevValue);
}
