//! What kubelet is told about this process.

use super::agent_api::Answers;
use crate::api::http::Probe;
use crate::api::types::Health;
use crate::kubernetes::lease::{self, LeaderRow};
use crate::tables::Reader;
use crate::tables::rows::Wait;
use std::time::Duration;

/// The owner of the leases does no work that takes longer, but for a disk that hangs.
const ANSWER: Duration = Duration::from_secs(5);

impl Probe for Answers {
    /// A node that waits for the API server or for its pod CIDR is alive: a restart would only make it wait again.
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
    /// A part that ends takes the process with it, so one that answers is alive.
    async fn live(&self) -> Health {
        healthy()
    }

    /// Leading, or standing by for a leader that it sees.
    async fn ready(&self) -> Health {
        let mut reasons = Vec::new();
        if self.leader.peek().rows.get(&()).is_none_or(|row| !row.leading && row.holder.is_none()) {
            reasons.push("nobody is known to lead yet".to_owned());
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
