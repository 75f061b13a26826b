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

/// A flow as its local end sends it: key of the forward cache and of the inbound table.
///
/// An echo request has its identifier as `source_port` and 0 as `destination_port`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(C)]
pub struct FlowKey {
    /// The pod, or the host for its own flows.
    pub source: Address,
    /// The remote end.
    pub destination: Address,
    /// Port at `source`.
    pub source_port: Port,
    /// Port at `destination`.
    pub destination_port: Port,
    /// [`TCP`], [`UDP`] or [`ICMP`].
    pub protocol: u8,
    /// Always zero.
    pub zero: [u8; 3],
}

/// The outside end of a translated flow: key of the reverse map.
///
/// It is what an answer carries. An echo reply has 0 as `remote_port` and its identifier as `external_port`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(C)]
pub struct RevKey {
    /// The remote end.
    pub remote: Address,
    /// The node's address that the flow leaves under.
    pub external: Address,
    /// Port at `remote`.
    pub remote_port: Port,
    /// Port at `external`.
    pub external_port: Port,
    /// [`TCP`], [`UDP`] or [`ICMP`].
    pub protocol: u8,
    /// Always zero.
    pub zero: [u8; 3],
}

/// Who owns an outside end: value of the reverse map.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct RevValue {
    /// The pod, or the host for its own flows.
    pub origin: Address,
    /// Port at `origin`.
    pub origin_port: Port,
    /// What was seen from `origin`: bits of [`seen`]. Written by egress only.
    pub sent: u8,
    /// What was seen from the remote end: bits of [`seen`]. Written by ingress only.
    pub received: u8,
    /// Time of the last packet, in seconds of the monotonic clock.
    pub last_seen: u32,
    /// Time of the first packet, in seconds of the monotonic clock.
    pub created: u32,
    /// The device that the flow left by.
    pub ifindex: u32,
    /// Whose flow it is: [`OWNER_POD`] or [`OWNER_HOST`].
    pub owner: u8,
    /// Always zero.
    pub zero: [u8; 3],
}

/// [`RevValue::owner`]: a pod's flow.
pub const OWNER_POD: u8 = 0;
/// [`RevValue::owner`]: a flow of the host. Origin and outside end are equal where the host came first and only holds
/// its port; they differ where a pod flow came first and the host's was moved.
pub const OWNER_HOST: u8 = 1;

/// Bits of [`RevValue::sent`], [`RevValue::received`] and their like in [`InboundValue`].
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
pub struct FwdValue {
    /// The node's address that the flow leaves under.
    pub external: Address,
    /// Port at `external`.
    pub external_port: Port,
    /// Always zero.
    pub zero: [u8; 2],
    /// When the reverse entry was last looked at, in seconds of the monotonic clock. It is looked at once in a second:
    /// to keep `last_seen`, and to notice that it has gone.
    pub checked: u32,
    /// [`SettingsValue::generation`] at which `external` was last seen to be an address of this node.
    pub generation: u32,
}

/// A flow that was opened from outside: value of the inbound table, under the key of the pod's answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct InboundValue {
    /// Time of the last packet, in seconds of the monotonic clock.
    pub last_seen: u32,
    /// Time of the first packet, in seconds of the monotonic clock.
    pub created: u32,
    /// The device that the flow came by.
    pub ifindex: u32,
    /// What was seen from the pod: bits of [`seen`].
    pub sent: u8,
    /// What was seen from outside: bits of [`seen`].
    pub received: u8,
    /// Always zero.
    pub zero: [u8; 2],
}

/// Key of the endpoint map.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(C)]
pub struct EndpointKey {
    /// The pod.
    pub address: Address,
}

/// Value of the endpoint map.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct EndpointValue {
    /// The host side of the pod's interface.
    pub ifindex: u32,
    /// [`ENDPOINT_EXEMPT`] or 0.
    pub flags: u32,
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
pub struct DeviceValue {
    /// The address that pods leave under; 0.0.0.0 where the device has none.
    pub address: Address,
}

/// Data part of a key of the exclusion trie.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(C)]
pub struct ExcludedAddress {
    /// Network address, host bits zero.
    pub address: Address,
}

/// Value of the exclusion trie.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct ExcludedValue {
    /// When the prefix was added, in seconds of the monotonic clock: until one TCP idle timeout has passed, a flow that
    /// was translated before is still looked for. 0 when no flow could have been translated to it.
    pub since: u32,
    /// Why the destination is excluded; the numbers are those of the agent's own enumeration.
    pub reason: u8,
    /// Always zero.
    pub zero: [u8; 3],
}

/// [`ExcludedValue::reason`]: an address of this node. The only reason that the programs themselves tell apart.
pub const REASON_OWN_NODE: u8 = 1;

/// Node-wide settings.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct SettingsValue {
    /// Key of the hash that starts the port walk. Random per node, and kept as long as the maps.
    pub hash_key: [u64; 2],
    /// Bits [`SETTING_MASQUERADE`], [`SETTING_IMMEDIATE`].
    pub flags: u32,
    /// How long after a change of policy an open TCP flow keeps what it had, in seconds: the TCP idle timeout.
    pub window: u32,
    /// When the policy last changed so that flows may be translated that were not, in seconds of the monotonic clock.
    pub policy_changed: u32,
    /// Raised after every change of the node's addresses, so that cached flows look at theirs again, and need not
    /// otherwise.
    pub generation: u32,
    /// First port that may be given.
    pub port_first: u16,
    /// Last port that may be given.
    pub port_last: u16,
    /// Always zero.
    pub zero: u32,
}

/// [`SettingsValue::flags`]: masquerading is on.
pub const SETTING_MASQUERADE: u32 = 1;
/// [`SettingsValue::flags`]: every packet follows the present policy, open flow or not.
pub const SETTING_IMMEDIATE: u32 = 2;

/// One word of the port bitmap.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct PortWord {
    /// Bit `n` of word `w` is set when port `64 w + n` is never given.
    pub reserved: u64,
}

/// Which tries of the port walk were ever used, so that a look-up does not probe further than any allocation went.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct TriesValue {
    /// 1 at the index of each try that ever gave a port; index 0 is the kept source port. One byte each, since two
    /// CPUs then cannot undo each other's write.
    pub used: [u8; crate::ports::TRIES],
    /// 1 when any try but the first ever gave a port.
    pub moved: u8,
    /// Always zero.
    pub zero: [u8; 6],
}

/// When each rare event was last logged, in seconds of the monotonic clock: at most one line in a second.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct EventsValue {
    /// No free port was found.
    pub no_port: u32,
    /// The reverse map is full.
    pub map_full: u32,
    /// The device has no address.
    pub no_device_address: u32,
}

/// One counter of one CPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct CounterValue {
    /// Packets counted.
    pub packets: u64,
}

/// The bit of `skb->mark` that says "translated on an upper device": a bridge, bond or VLAN runs the hook once for each
/// layer. It never leaves the node.
pub const MARK_TRANSLATED: u32 = 0x0400_0000;

// Sizes are part of the contract with maps that an agent of another version pinned. A sum of field sizes that equals
// the size of the whole proves that there is no padding, hence no uninitialised byte.
const _: () = {
    assert!(size_of::<FlowKey>() == 4 + 4 + 2 + 2 + 1 + 3);
    assert!(offset_of!(FlowKey, destination) == 4 && offset_of!(FlowKey, protocol) == 12);
    assert!(size_of::<RevKey>() == 4 + 4 + 2 + 2 + 1 + 3);
    assert!(offset_of!(RevKey, external) == 4 && offset_of!(RevKey, external_port) == 10);
    assert!(size_of::<RevValue>() == 4 + 2 + 1 + 1 + 4 + 4 + 4 + 1 + 3);
    assert!(offset_of!(RevValue, sent) == 6 && offset_of!(RevValue, last_seen) == 8);
    assert!(size_of::<FwdValue>() == 4 + 2 + 2 + 4 + 4);
    assert!(size_of::<InboundValue>() == 4 + 4 + 4 + 1 + 1 + 2);
    assert!(size_of::<EndpointKey>() == 4 && size_of::<EndpointValue>() == 8);
    assert!(size_of::<DeviceKey>() == 4 && size_of::<DeviceValue>() == 4);
    assert!(size_of::<ExcludedAddress>() == 4 && size_of::<ExcludedValue>() == 4 + 1 + 3);
    assert!(size_of::<SettingsValue>() == 16 + 4 + 4 + 4 + 4 + 2 + 2 + 4);
    assert!(offset_of!(SettingsValue, policy_changed) == 24 && offset_of!(SettingsValue, port_last) == 34);
    assert!(size_of::<PortWord>() == 8 && size_of::<TriesValue>() == crate::ports::TRIES + 1 + 6);
    assert!(size_of::<EventsValue>() == 12 && size_of::<CounterValue>() == 8);
};

impl FlowKey {
    /// The key whose packets answer `self`: ends exchanged.
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

    /// The outside end of this flow under the given address and port.
    #[must_use]
    pub const fn outside(&self, external: Address, external_port: Port) -> RevKey {
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

impl RevKey {
    /// The flow of `origin` that leaves under this outside end.
    #[must_use]
    pub const fn flow(&self, origin: Address, origin_port: Port) -> FlowKey {
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

    pod!(
        CounterValue,
        DeviceKey,
        DeviceValue,
        EndpointKey,
        EndpointValue,
        EventsValue,
        ExcludedAddress,
        ExcludedValue,
        FlowKey,
        FwdValue,
        InboundValue,
        PortWord,
        RevKey,
        RevValue,
        SettingsValue,
        TriesValue,
    );
}
