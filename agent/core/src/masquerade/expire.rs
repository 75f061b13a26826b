//! When a NAT entry has had its time (`masquerade` 3.5, decision 10).
//!
//! The kernel keeps, for each entry, the time of its last packet and what was seen from either end. What that means is
//! decided here; the collector in the datapath only walks and deletes.

use serde::{Deserialize, Serialize};
use std::net::SocketAddrV4;

/// Transport protocol of a flow that has ports, or an echo identifier instead.
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

/// What was seen from one end of a flow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Seen {
    /// Any packet.
    pub any: bool,
    /// TCP FIN.
    pub fin: bool,
    /// TCP RST.
    pub rst: bool,
}

/// Where a flow is in its life. The order is that in which flows are given up when the map is nearly full.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FlowState {
    /// TCP: one end reset it.
    Reset,
    /// TCP: both ends are done.
    Closing,
    /// TCP: only one end has spoken.
    Opening,
    /// UDP: only one end has spoken.
    Unreplied,
    /// ICMP echo.
    Echo,
    /// UDP: both ends have spoken.
    Replied,
    /// TCP: both ends have spoken, and at most one is done.
    Established,
}

impl FlowState {
    /// The state that follows from what was seen of the flow's own end and of the remote end.
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

/// Whose flow an entry holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FlowOwner {
    /// A pod of this node.
    Pod,
    /// The host itself: its port is held so that no pod is given it, or it was moved because a pod has it.
    Host,
}

/// A NAT entry as people and programs read it. Echoes have their identifier where others have a port.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct FlowRecord {
    /// Transport protocol.
    pub protocol: Protocol,
    /// The pod's end.
    pub origin: SocketAddrV4,
    /// The end outside.
    pub remote: SocketAddrV4,
    /// The node's end, as the remote end sees it.
    pub external: SocketAddrV4,
    /// Whose flow it is.
    pub owner: FlowOwner,
    /// Where it is in its life.
    pub state: FlowState,
    /// Seconds since its first packet.
    pub age_seconds: u32,
    /// Seconds since its last packet.
    pub idle_seconds: u32,
    /// `ifindex` of the device that it leaves by.
    pub ifindex: u32,
}

/// A flow that was opened from outside towards a pod, as people and programs read it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct InboundRecord {
    /// Transport protocol.
    pub protocol: Protocol,
    /// The pod's end.
    pub pod: SocketAddrV4,
    /// The end outside.
    pub remote: SocketAddrV4,
    /// Where it is in its life.
    pub state: FlowState,
    /// Seconds since its first packet.
    pub age_seconds: u32,
    /// Seconds since its last packet.
    pub idle_seconds: u32,
    /// `ifindex` of the device that it came by.
    pub ifindex: u32,
}

/// Idle seconds after which a TCP connection that both ends speak on is given up by default: 6 h.
pub const TCP_IDLE_DEFAULT: u32 = 21_600;
/// Least value of that setting: Linux sends its first keep-alive after 7,200 s, and it has to arrive in time.
pub const TCP_IDLE_MINIMUM: u32 = 7_260;

/// Above this share of the map in use, in percent, flows that hold a port to little purpose are given up sooner.
pub const PRESSURE_PERCENT: u64 = 90;

/// Whether the map is so full that [`lifetime`] is cut.
#[must_use]
pub fn under_pressure(entries: u64, capacity: u64) -> bool {
    entries.saturating_mul(100) > capacity.saturating_mul(PRESSURE_PERCENT)
}

/// Idle seconds that a flow in this state is kept.
///
/// Under pressure resets and closings go at once, half-open connections and unanswered UDP after 5 s, answered UDP and
/// echoes after 30 s and 10 s. An established TCP connection never goes before its time.
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

/// Whether a flow that was last seen at `last_seen` is to be given up at `now`, both in seconds of one clock. A time in
/// the future counts as now: the kernel may have written it after `now` was read.
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

    // The times themselves; that the collector acts on them is shown in the eBPF tests.
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
