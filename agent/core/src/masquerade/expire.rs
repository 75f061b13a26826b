//! Expiry of NAT entries (`masquerade` 3.5, decision 10).
//!
//! The kernel records for each entry the time of its last packet and what was seen from either end. Here the state and
//! its lifetime are derived; the collector in the datapath only iterates and deletes.

use serde::{Deserialize, Serialize};
use std::net::SocketAddrV4;

/// Transport protocol of a flow with ports or an echo identifier.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Protocol {
    /// TCP
    Tcp,
    /// UDP
    Udp,
    /// ICMP echo
    Icmp,
}

/// Packets seen from one end of a flow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Seen {
    /// Any packet.
    pub any: bool,
    /// TCP FIN.
    pub fin: bool,
    /// TCP RST.
    pub rst: bool,
}

/// State of a flow. The order is that of eviction when the map is nearly full.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FlowState {
    /// TCP: reset by one end.
    Reset,
    /// TCP: both ends have sent FIN.
    Closing,
    /// TCP: packets from one end only.
    Opening,
    /// UDP: packets from one end only.
    Unreplied,
    /// ICMP echo.
    Echo,
    /// UDP: packets from both ends.
    Replied,
    /// TCP: packets from both ends, and FIN from at most one.
    Established,
}

impl FlowState {
    /// The state derived from packets of the local and of the remote end.
    #[must_use]
    pub fn of(protocol: Protocol, sent: Seen, received: Seen) -> Self {
        match protocol {
            Protocol::Icmp => Self::Echo,
            Protocol::Udp if sent.any && received.any => Self::Replied,
            Protocol::Udp => Self::Unreplied,
            Protocol::Tcp if sent.rst || received.rst => Self::Reset,
            Protocol::Tcp if sent.fin && received.fin => Self::Closing,
            Protocol::Tcp if sent.any && received.any => Self::Established,
            Protocol::Tcp => Self::Opening,
        }
    }
}

/// Owner of an entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FlowOwner {
    /// A pod of this node.
    Pod,
    /// The host itself: its port is reserved against use by a pod, or it was translated because a pod has it.
    Host,
}

/// A NAT entry for display. Echoes have their identifier as port.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct FlowRecord {
    /// Transport protocol.
    pub protocol: Protocol,
    /// The pod's endpoint.
    pub origin: SocketAddrV4,
    /// The remote endpoint.
    pub remote: SocketAddrV4,
    /// The translated source, as seen by the remote end.
    pub external: SocketAddrV4,
    /// The owner.
    pub owner: FlowOwner,
    /// The state.
    pub state: FlowState,
    /// Seconds since its first packet.
    pub age_seconds: u32,
    /// Seconds since its last packet.
    pub idle_seconds: u32,
    /// `ifindex` of its egress device.
    pub ifindex: u32,
}

/// A flow opened from outside to a pod, for display.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct InboundRecord {
    /// Transport protocol.
    pub protocol: Protocol,
    /// The pod's endpoint.
    pub pod: SocketAddrV4,
    /// The remote endpoint.
    pub remote: SocketAddrV4,
    /// The state.
    pub state: FlowState,
    /// Seconds since its first packet.
    pub age_seconds: u32,
    /// Seconds since its last packet.
    pub idle_seconds: u32,
    /// `ifindex` of the device that it arrived by.
    pub ifindex: u32,
}

/// Default idle timeout of established TCP connections in seconds: 6 h.
pub const TCP_IDLE_DEFAULT: u32 = 21_600;
/// Minimum of that setting: Linux sends the first keep-alive after 7,200 s, which must arrive in time.
pub const TCP_IDLE_MINIMUM: u32 = 7_260;

/// Above this fill level of the map, in percent, lifetimes are reduced.
pub const PRESSURE_PERCENT: u64 = 90;

/// Whether the map is so full that [`lifetime`] is reduced.
#[must_use]
pub fn under_pressure(entries: u64, capacity: u64) -> bool {
    entries.saturating_mul(100) > capacity.saturating_mul(PRESSURE_PERCENT)
}

/// Idle timeout in seconds of a flow in this state.
///
/// Under pressure, reset and closing flows expire at once, half-open connections and unreplied UDP after 5 s, replied
/// UDP and echoes after 30 s and 10 s. Established TCP connections keep their timeout.
#[must_use]
pub fn lifetime(state: FlowState, tcp_idle: u32, pressure: bool) -> u32 {
    match (state, pressure) {
        (FlowState::Established, _) => tcp_idle.max(TCP_IDLE_MINIMUM),
        (FlowState::Reset, false) => 10,
        (FlowState::Closing | FlowState::Opening, false) => 60,
        (FlowState::Unreplied | FlowState::Echo, false) => 30,
        (FlowState::Replied, false) => 180,
        (FlowState::Reset | FlowState::Closing, true) => 1,
        (FlowState::Opening | FlowState::Unreplied, true) => 5,
        (FlowState::Echo, true) => 10,
        (FlowState::Replied, true) => 30,
    }
}

/// Whether a flow last seen at `last_seen` has expired at `now`, both in seconds of one clock. A time in the future
/// counts as now: the kernel may have written it after `now` was read.
#[must_use]
pub fn expired(state: FlowState, last_seen: u32, now: u32, tcp_idle: u32, pressure: bool) -> bool {
    now.saturating_sub(last_seen) >= lifetime(state, tcp_idle, pressure)
}

#[cfg(test)]
mod tests {
    use super::*;

    const NONE: Seen = Seen { any: false, fin: false, rst: false };
    const ANY: Seen = Seen { any: true, fin: false, rst: false };
    const FIN: Seen = Seen { any: true, fin: true, rst: false };
    const RST: Seen = Seen { any: true, fin: false, rst: true };

    #[test]
    fn states_follow_from_what_was_seen() {
        for (protocol, sent, received, state) in [
            (Protocol::Tcp, ANY, NONE, FlowState::Opening),
            (Protocol::Tcp, ANY, ANY, FlowState::Established),
            (Protocol::Tcp, FIN, ANY, FlowState::Established),
            (Protocol::Tcp, FIN, FIN, FlowState::Closing),
            (Protocol::Tcp, RST, ANY, FlowState::Reset),
            (Protocol::Tcp, ANY, RST, FlowState::Reset),
            (Protocol::Tcp, FIN, RST, FlowState::Reset),
            (Protocol::Udp, ANY, NONE, FlowState::Unreplied),
            (Protocol::Udp, ANY, ANY, FlowState::Replied),
            (Protocol::Icmp, ANY, ANY, FlowState::Echo),
        ] {
            assert_eq!(FlowState::of(protocol, sent, received), state, "{protocol:?} {sent:?} {received:?}");
        }
    }

    // The constants; the eBPF tests cover their use by the collector.
    #[test]
    fn lifetimes_are_those_of_the_specification() {
        let tcp_idle = TCP_IDLE_DEFAULT;
        for (state, seconds) in [
            (FlowState::Reset, 10),
            (FlowState::Closing, 60),
            (FlowState::Opening, 60),
            (FlowState::Unreplied, 30),
            (FlowState::Replied, 180),
            (FlowState::Echo, 30),
            (FlowState::Established, tcp_idle),
        ] {
            assert!(!expired(state, 1_000, 1_000 + seconds - 1, tcp_idle, false), "{state:?}");
            assert!(expired(state, 1_000, 1_000 + seconds, tcp_idle, false), "{state:?}");
        }
    }

    #[test]
    fn an_established_connection_outlives_the_first_keep_alive_whatever_is_set() {
        for tcp_idle in [0, 60, 7_200] {
            for pressure in [false, true] {
                assert!(!expired(FlowState::Established, 0, 7_200, tcp_idle, pressure));
            }
        }
    }

    #[test]
    fn pressure_shortens_every_life_but_that_of_established_connections() {
        for state in [
            FlowState::Reset,
            FlowState::Closing,
            FlowState::Opening,
            FlowState::Unreplied,
            FlowState::Echo,
            FlowState::Replied,
        ] {
            assert!(lifetime(state, TCP_IDLE_DEFAULT, true) < lifetime(state, TCP_IDLE_DEFAULT, false), "{state:?}");
        }
        assert!(!under_pressure(90, 100));
        assert!(under_pressure(91, 100));
        assert!(!under_pressure(0, 0));
    }

    #[test]
    fn a_packet_that_came_after_the_clock_was_read_keeps_its_flow() {
        assert!(!expired(FlowState::Reset, 1_001, 1_000, TCP_IDLE_DEFAULT, false));
    }
}
