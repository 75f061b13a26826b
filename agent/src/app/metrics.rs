//! Gauges and kernel counters of this process, gathered for each scrape.

use super::node_status::NodeStatus;
use crate::kubernetes::election::LeaderRow;
use crate::leases::View;
use crate::reconciler::TargetStatus;
use crate::tables::Reader;
use crate::tables::rows::Wait;
use crate::telemetry::metrics::{
    BUILD_INFO, LEADER, LEASES, PACKETS, POD_CIDR_ADDRESSES, READY, Sample, TARGET_ROWS, TARGET_SYNCED, WAIT_SECONDS,
};
use cistern_core::ipam::lease::RowState;
use cistern_core::ipam::supply::PoolUsage;
use jiff::Timestamp;

/// States with a sample even for a count of zero, so that alerting rules find them.
const LEASE_STATES: [RowState; 5] =
    [RowState::Provisional, RowState::Confirmed, RowState::Owner, RowState::Quarantined, RowState::Reserved];

/// All samples of an agent. `packets` are the counters of the kernel programs.
#[must_use]
pub fn agent(node: &NodeStatus, view: &View, packets: &[(String, u64)], now: Timestamp) -> Vec<Sample> {
    let mut samples = shared(&node.waits, &node.targets, now);
    samples.push(READY.sample([], f64::from(u8::from(node.health().ready))));
    for state in LEASE_STATES {
        let count = view.rows.iter().filter(|row| row.state == state).count();
        samples.push(LEASES.sample([&state.to_string()], as_float(count as u64)));
    }
    for PoolUsage { net, usage, .. } in &view.usage {
        let Some(cidr) = net.map(|net| net.to_string()) else { continue };
        for (state, count) in [("used", usage.used), ("quarantined", usage.quarantined), ("free", usage.free())] {
            samples.push(POD_CIDR_ADDRESSES.sample([&cidr, state], as_float(count)));
        }
    }
    if node.identity.is_some() {
        samples.push(leader(&node.leader));
    }
    samples.extend(packets.iter().map(|(counter, count)| PACKETS.sample([counter], as_float(*count))));
    samples
}

/// All samples of an operator.
#[must_use]
pub fn operator(
    waits: &Reader<String, Wait>,
    targets: &Reader<String, TargetStatus>,
    election: &Reader<(), LeaderRow>,
    now: Timestamp,
) -> Vec<Sample> {
    let mut samples = shared(waits, targets, now);
    samples.push(leader(election));
    samples
}

fn shared(waits: &Reader<String, Wait>, targets: &Reader<String, TargetStatus>, now: Timestamp) -> Vec<Sample> {
    let mut samples = vec![BUILD_INFO.sample([super::build_info::short()], 1.0)];
    for (name, wait) in &waits.peek().rows {
        samples.push(WAIT_SECONDS.sample([name], now.duration_since(wait.since).as_secs_f64().max(0.0)));
    }
    for (name, status) in &targets.peek().rows {
        samples.push(TARGET_ROWS.sample([name, "done"], as_float(status.done as u64)));
        samples.push(TARGET_ROWS.sample([name, "failing"], as_float(status.failing.len() as u64)));
        samples.push(TARGET_SYNCED.sample([name], f64::from(u8::from(status.complete))));
    }
    samples
}

fn leader(election: &Reader<(), LeaderRow>) -> Sample {
    let leading = election.peek().rows.get(&()).is_some_and(|row| row.leading);
    LEADER.sample([], f64::from(u8::from(leading)))
}

/// Prometheus uses floating point: exact up to 2^53.
#[expect(clippy::cast_precision_loss, reason = "a count that large is no longer counted by ones")]
fn as_float(count: u64) -> f64 {
    count as f64
}
