//! Answers to kubelet's probes.

use super::agent_api::Answers;
use crate::api::http::Probe;
use crate::api::types::Health;
use crate::kubernetes::lease::{self, LeaderRow};
use crate::tables::Reader;
use crate::tables::rows::Wait;
use std::time::Duration;

/// No operation of the lease owner takes longer, except on a hanging disk.
const ANSWER: Duration = Duration::from_secs(5);

impl Probe for Answers {
    /// A node that waits for the API server or for its pod CIDR is alive: a restart would not help.
    async fn live(&self) -> Health {
        let reason = match tokio::time::timeout(ANSWER, self.endpoints.view()).await {
            Ok(Ok(_)) => return healthy(),
            Ok(Err(error)) => error.to_string(),
            Err(_) => format!("the owner of the pod leases does not answer within {} s", ANSWER.as_secs()),
        };
        Health::new(vec![reason])
    }

    async fn ready(&self) -> Health {
        self.node.health()
    }
}

/// The operator's answers.
pub struct OperatorProbe {
    /// The election.
    pub leader: Reader<(), LeaderRow>,
    /// What is waited for.
    pub waits: Reader<String, Wait>,
}

impl Probe for OperatorProbe {
    /// A task that ends terminates the process, so an answering process is alive.
    async fn live(&self) -> Health {
        healthy()
    }

    /// Ready if it leads, or stands by for a known leader.
    async fn ready(&self) -> Health {
        let mut reasons = Vec::new();
        if self.leader.peek().rows.get(&()).is_none_or(|row| !row.leading && row.holder.is_none()) {
            reasons.push("no leader is known yet".to_owned());
        }
        if let Some(wait) = self.waits.peek().rows.get(lease::WAIT) {
            reasons.push(format!("{}: {}", lease::WAIT, wait.reason));
        }
        Health::new(reasons)
    }
}

fn healthy() -> Health {
    Health::new(Vec::new())
}
