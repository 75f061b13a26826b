//! Packet counters by kind.

/// Index into the counter map. New kinds are added at the end: agents of other versions read the indices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u32)]
pub enum Counter {
    /// Egress: source rewritten to the node's address.
    Translated = 0,
    /// Ingress: destination rewritten back to the pod.
    Reversed = 1,
    /// An entry was created for a new flow.
    FlowCreated = 2,
    /// A flow was found in the reverse map after a cache miss.
    CacheRefilled = 3,
    /// Passed: destination excluded.
    Excluded = 4,
    /// Passed: reply of a flow that was opened from outside.
    InboundReply = 5,
    /// A flow opened from outside was recorded.
    InboundCreated = 6,
    /// Passed: the pod is never masqueraded.
    PodExempt = 7,
    /// Passed: the source is neither a pod of this node nor its address.
    ForeignSource = 8,
    /// Passed: the host's own flow.
    HostFlow = 9,
    /// The host's own flow was translated, because a pod flow held its port.
    HostTranslated = 10,
    /// Passed: it may belong to a flow that was opened before the policy changed.
    PolicyWindow = 11,
    /// Passed: FIN, RST or SYN+ACK without an entry, which never creates a flow.
    NeverOpens = 12,
    /// Passed: already translated on an upper device.
    AlreadyTranslated = 13,
    /// An entry was deleted, because its address is no longer on this node.
    StaleAddress = 14,
    /// Passed: masquerading is disabled.
    Disabled = 15,
    /// Passed unchanged: fragment.
    Fragment = 16,
    /// Passed unchanged: ICMP error.
    IcmpError = 17,
    /// Passed unchanged: echo reply of a pod or the host.
    EchoReply = 18,
    /// Passed unchanged: ICMP of any other type.
    IcmpOther = 19,
    /// Passed unchanged: protocol other than TCP, UDP and ICMP.
    ProtocolOther = 20,
    /// Passed unchanged: IPv6.
    Ipv6 = 21,
    /// Passed unchanged: VLAN tag; the VLAN device's own program processes the packet.
    Vlan = 22,
    /// Passed unchanged: shorter than its headers say.
    Malformed = 23,
    /// Passed: the device has no masquerade address.
    NoDeviceAddress = 24,
    /// Dropped: all tried ports are in use.
    NoPort = 25,
    /// Dropped: the reverse map is full.
    MapFull = 26,
    /// Dropped: the packet could not be rewritten completely.
    RewriteFailed = 27,
    /// Passed: the source is a pod of this node, but the packet arrived by another device than the pod's.
    OtherDevice = 28,
    /// Dropped: a reply of a flow whose pod has ended.
    PodEnded = 29,
    /// Counted by the additional program of the variant.
    #[cfg(feature = "test-variant")]
    Variant = 30,
}

/// The number of kinds.
const KINDS: usize = if cfg!(feature = "test-variant") { 31 } else { 30 };

impl Counter {
    /// All kinds, by index.
    pub const ALL: [Self; KINDS] = [
        Self::Translated,
        Self::Reversed,
        Self::FlowCreated,
        Self::CacheRefilled,
        Self::Excluded,
        Self::InboundReply,
        Self::InboundCreated,
        Self::PodExempt,
        Self::ForeignSource,
        Self::HostFlow,
        Self::HostTranslated,
        Self::PolicyWindow,
        Self::NeverOpens,
        Self::AlreadyTranslated,
        Self::StaleAddress,
        Self::Disabled,
        Self::Fragment,
        Self::IcmpError,
        Self::EchoReply,
        Self::IcmpOther,
        Self::ProtocolOther,
        Self::Ipv6,
        Self::Vlan,
        Self::Malformed,
        Self::NoDeviceAddress,
        Self::NoPort,
        Self::MapFull,
        Self::RewriteFailed,
        Self::OtherDevice,
        Self::PodEnded,
        #[cfg(feature = "test-variant")]
        Self::Variant,
    ];

    /// Name of the kind in metrics, JSON and tables.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Translated => "translated",
            Self::Reversed => "reversed",
            Self::FlowCreated => "flow-created",
            Self::CacheRefilled => "cache-refilled",
            Self::Excluded => "excluded",
            Self::InboundReply => "inbound-reply",
            Self::InboundCreated => "inbound-created",
            Self::PodExempt => "pod-exempt",
            Self::ForeignSource => "foreign-source",
            Self::HostFlow => "host-flow",
            Self::HostTranslated => "host-translated",
            Self::PolicyWindow => "policy-window",
            Self::NeverOpens => "never-opens",
            Self::AlreadyTranslated => "already-translated",
            Self::StaleAddress => "stale-address",
            Self::Disabled => "disabled",
            Self::Fragment => "fragment",
            Self::IcmpError => "icmp-error",
            Self::EchoReply => "echo-reply",
            Self::IcmpOther => "icmp-other",
            Self::ProtocolOther => "protocol-other",
            Self::Ipv6 => "ipv6",
            Self::Vlan => "vlan",
            Self::Malformed => "malformed",
            Self::NoDeviceAddress => "no-device-address",
            Self::NoPort => "no-port",
            Self::MapFull => "map-full",
            Self::RewriteFailed => "rewrite-failed",
            Self::OtherDevice => "other-device",
            Self::PodEnded => "pod-ended",
            #[cfg(feature = "test-variant")]
            Self::Variant => "variant",
        }
    }

    /// Whether the packet was dropped.
    #[must_use]
    pub const fn is_drop(self) -> bool {
        matches!(self, Self::NoPort | Self::MapFull | Self::RewriteFailed | Self::PodEnded)
    }
}

const _: () = {
    assert!(Counter::ALL.len() <= crate::map::COUNTER_ENTRIES, "each kind has its index in the map");
    let mut index = 0;
    while index < Counter::ALL.len() {
        assert!(Counter::ALL[index] as usize == index, "the list is by index");
        index += 1;
    }
};
