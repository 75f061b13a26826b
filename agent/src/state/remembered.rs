//! State that a node needs to serve while the API server is unavailable, on disk (`architecture` section 4).

use super::{SetAside, StateDir};
use crate::tables::findings::{Findings, Found};
use crate::tables::rows::PeerRow;
use crate::tables::{Reader, Rows, Table, Waits};
use cistern_core::format::Version;
use cistern_core::ipam::lease::{Change, Record};
use cistern_core::ipam::supply::{Grant, GrantState};
use cistern_core::masquerade::ip_masq::ConfigFile;
use ipnet::{IpNet, Ipv4Net};
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;

/// The last inputs from the API server.
const NODE: &str = "node.json";
/// The last valid ip-masq-agent file.
const LAST_GOOD: &str = "ip-masq.json";

/// A file of a newer format that this build would misread is set aside unused; the API server lists its content again. Format 1
/// also held the pod CIDR, which is a lease record since format 2.
const FORMAT: u32 = 2;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Remembered {
    #[serde(flatten)]
    version: Version,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pool: Option<FormerPool>,
    peers: Rows<String, PeerRow>,
}

/// The pod CIDR in format 1.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct FormerPool {
    pod_cidr: Ipv4Net,
    #[serde(default)]
    leaving: bool,
    #[serde(default)]
    node_uid: Option<String>,
}

impl FormerPool {
    fn grant(&self) -> Grant {
        let state = if self.leaving { GrantState::Draining } else { GrantState::Active };
        Grant { state, node_uid: self.node_uid.clone(), ..Grant::new(IpNet::V4(self.pod_cidr)) }
    }
}

/// The last known state.
pub struct Seeded {
    /// The nodes of the cluster.
    pub peers: Arc<Table<String, PeerRow>>,
    /// A pod CIDR that could not be moved to the lease records, and so remains in `node.json`.
    former: Option<FormerPool>,
}

/// The last known nodes of the cluster. If there are any, their table counts as synced: the routes and exclusions derived from it
/// are those in the kernel.
///
/// The pod CIDR of a file of format 1 is added to `records` and written by `write`, unless they have one.
#[must_use]
pub fn tables(
    state: &StateDir,
    findings: &Findings,
    records: &mut Vec<Record>,
    write: &mut dyn FnMut(&Change) -> Result<(), String>,
) -> Seeded {
    let peers = Table::new("peers");
    let (remembered, set_aside) = state.read::<Remembered>(NODE, Some(FORMAT));
    findings.add(STATE, set_aside.as_ref().map(unreadable));
    let mut former = None;
    if let Some(remembered) = remembered {
        tracing::info!(nodes = remembered.peers.len(), "serving with the last known nodes");
        peers.publish(remembered.peers.to_map());
        let has_grant = records.iter().any(|record| matches!(record, Record::Grant(_)));
        former = remembered.pool.filter(|_| !has_grant);
    }
    if let Some(pool) = &former {
        let record = Record::Grant(pool.grant());
        let written = write(&Change::Put(record.clone()));
        records.push(record);
        match written {
            Ok(()) => former = None,
            Err(reason) => {
                tracing::warn!(
                    reason,
                    "the pod CIDR of node.json cannot be written to the lease records; the next start retries"
                );
            }
        }
    }
    Seeded { peers: Arc::new(peers), former }
}

/// Source of findings about state files.
pub const STATE: &str = "state";

/// The finding for a file that was set aside.
#[must_use]
pub fn unreadable(file: &SetAside) -> Found {
    Found { reason: "state-file-unreadable", subject: file.path.display().to_string(), message: file.to_string() }
}

/// The last valid ip-masq-agent list.
#[must_use]
pub fn last_good(state: &StateDir, findings: &Findings) -> Option<ConfigFile> {
    let (last_good, set_aside) = state.read::<Option<ConfigFile>>(LAST_GOOD, None);
    findings.add(STATE, set_aside.as_ref().map(unreadable));
    last_good.flatten()
}

/// Minimum interval of writes in a busy cluster.
const PAUSE: Duration = Duration::from_millis(500);

/// A pause is at least so many times as long as the write before it, since the whole file is written for each change of a node.
const PAUSE_PER_WRITE: u32 = 200;

/// Maximum interval of writes in a busy cluster: how old the nodes may be that a restart without API server begins with.
const LONGEST_PAUSE: Duration = Duration::from_secs(10);

/// Delay before a failed write is retried.
const DISK_RETRY: Duration = Duration::from_secs(5);

/// Name of the wait for a failing disk.
pub const WAIT: &str = "node state on disk";

/// Keeps the files equal to the tables until dropped. Failed writes are retried.
pub async fn run(
    state: StateDir,
    Seeded { peers, former }: Seeded,
    mut last_good: Reader<(), Option<ConfigFile>>,
    waits: Waits,
) {
    let mut peers = peers.reader();
    let mut written = None;
    let mut written_list = 0;
    loop {
        let mut refused = false;
        let began = Instant::now();
        let version = Version::new(FORMAT, FORMAT);
        let now = Remembered { version, pool: former.clone(), peers: peers.snapshot().rows.clone() };
        if written.as_ref() != Some(&now) && (now.pool.is_some() || !now.peers.is_empty()) {
            match state.write(NODE, &now) {
                Ok(()) => {
                    waits.end(WAIT);
                    written = Some(now);
                }
                Err(error) => {
                    refused = true;
                    tracing::error!(%error, "state for a restart without API server cannot be written");
                    let reason = format!("{error}; a restart without the API server would begin with older nodes");
                    waits.begin(WAIT, reason, Some(DISK_RETRY));
                }
            }
        }
        let list = last_good.snapshot();
        if let Some(value) = list.rows.get(&()).filter(|_| list.revision != written_list) {
            match state.write(LAST_GOOD, value) {
                Ok(()) => written_list = list.revision,
                Err(error) => {
                    refused = true;
                    tracing::error!(%error, "the last good ip-masq-agent list cannot be written");
                }
            }
        }
        tokio::time::sleep((began.elapsed() * PAUSE_PER_WRITE).clamp(PAUSE, LONGEST_PAUSE)).await;
        tokio::select! {
            biased;
            () = peers.changed() => {}
            () = last_good.changed() => {}
            () = tokio::time::sleep(DISK_RETRY), if refused => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::Clock;

    #[derive(Default)]
    struct Store {
        written: Vec<Change>,
        refuses: bool,
    }

    impl Store {
        fn write(&mut self, change: &Change) -> Result<(), String> {
            if self.refuses {
                return Err("no space".to_owned());
            }
            self.written.push(change.clone());
            Ok(())
        }
    }

    const FORMER: &str = r#"{"format":1,"pool":{"pod_cidr":"10.33.0.0/26","blocked":null,"leaving":false,"node_uid":"u1"},
        "peers":{"b":{"internal_ips":["192.168.7.2"],"router":null,"pod_cidrs":["10.33.0.64/26"]}}}"#;

    #[tokio::test(start_paused = true)]
    async fn the_pod_cidr_of_the_former_format_becomes_a_record_before_it_leaves_the_file() {
        let dir = tempfile::tempdir().unwrap();
        let state = StateDir::open(dir.path()).unwrap();
        let findings = Findings::new(Clock::system());
        std::fs::write(dir.path().join(NODE), FORMER).unwrap();
        let mut store = Store { refuses: true, ..Store::default() };
        let run = async |seeded: Seeded| {
            let last_good = Table::new("last-good");
            let run = run(state.clone(), seeded, last_good.reader(), Waits::new(Clock::system()));
            let _ = tokio::time::timeout(Duration::from_secs(2), run).await;
        };
        for refuses in [true, false] {
            store.refuses = refuses;
            let mut records = Vec::new();
            let seeded = tables(&state, &findings, &mut records, &mut |change| store.write(change));
            let [Record::Grant(grant)] = &records[..] else { panic!("{records:?}") };
            assert_eq!((grant.net.to_string().as_str(), grant.node_uid.as_deref()), ("10.33.0.0/26", Some("u1")));
            assert_eq!(seeded.peers.snapshot().rows.len(), 1);
            assert_eq!(store.written.len(), usize::from(!refuses));
            run(seeded).await;
            let text = std::fs::read_to_string(dir.path().join(NODE)).unwrap();
            assert_eq!(text.contains("10.33.0.0/26"), refuses, "{text}");
            assert!(text.contains("10.33.0.64/26"));
        }
        // An existing record has precedence.
        std::fs::write(dir.path().join(NODE), FORMER).unwrap();
        let mut records = vec![Record::Grant(Grant::new("10.44.0.0/26".parse().unwrap()))];
        drop(tables(&state, &findings, &mut records, &mut |change| store.write(change)));
        assert_eq!((records.len(), store.written.len()), (1, 1));
    }
}
