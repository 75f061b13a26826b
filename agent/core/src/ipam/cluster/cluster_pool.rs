//! Cluster pool: one pod CIDR of each family for each node (`ipam` 2.2), all of the pool `default`.
//!
//! [`plan()`] is a pure function of the CiliumNodes, of the [`Ledger`] that the leader keeps between plans, and of the
//! records that outlive a leader. Claims are processed before allocations; a refused claim only changes the verdict on
//! its node; and no pod CIDR is allocated while any node lists it, rightly or not.

mod plan;
mod settings;

pub use plan::plan;
pub use settings::{BLOCK_QUARANTINE, ConfigError, ConfigWarning, FamilySettings, Settings};

use super::ledger::Ledger;
use super::records::RecordSet;
use super::{ClusterMode, Input, Plan, PoolName};
use crate::ipam::lease::DEFAULT_POOL;
use jiff::Timestamp;
use std::collections::BTreeSet;

impl ClusterMode for Settings {
    type Ledger = Ledger;

    fn pools(&self) -> BTreeSet<PoolName> {
        BTreeSet::from([DEFAULT_POOL.to_owned()])
    }

    fn take_over(&self, records: &RecordSet, now: Timestamp) -> Ledger {
        self.ledger(records, now)
    }

    fn plan(&self, input: &Input, ledger: Ledger, now: Timestamp) -> Plan<Ledger> {
        plan(input, ledger, now)
    }
}

#[cfg(test)]
mod tests;
