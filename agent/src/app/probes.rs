//! Answers to kubelet's probes.

use super::agent_api::Answers;
use crate::api::http::Probe;
use crate::api::types::Health;
use crate::kubernetes::election::{self, LeaderRow};
use crate::tables::Reader;
use crate::tables::rows::Wait;

impl Probe for Answers {
    /// A node that waits for the API server, its pod CIDR or its disk is alive: a restart would not help. A task that ends
    /// terminates the process, so an answering process is alive.
    async fn live(&self) -> Health {
        healthy()
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
        if let Some(wait) = self.waits.peek().rows.get(election::WAIT) {
            reasons.push(format!("{}: {}", election::WAIT, wait.reason));
        }
        Health::new(reasons)
    }
}

fn healthy() -> Health {
    Health::new(Vec::new())
}
