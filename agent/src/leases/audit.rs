//! Compares the leases with the namespaces and devices of the node, once a minute.

use super::task::Task;
use crate::tables::findings::Found;
use cistern_core::ipam::audit::{self, Seen};
use cistern_core::ipam::lease::{Attachment, Outcome};
use jiff::Timestamp;

impl Task {
    /// Audits the leases against namespaces and devices, if it is due and the devices are known.
    pub(super) fn audit(&mut self) {
        let now = self.parts.clock.now();
        if now < self.next_audit || !self.parts.network.peek().synced {
            return;
        }
        self.next_audit = now.checked_add(audit::EVERY).unwrap_or(Timestamp::MAX);
        let host = &self.parts.host;
        let (namespace, host_side) = (|path: &str| host.namespace(path), |of: &Attachment| host.host_side(of));
        let seen = Seen { links: &self.links, namespace: &namespace, host_side: &host_side };
        let audited = self.audit.look(self.leases.pods(), &seen, now);
        self.parts.findings.replace(
            "audit",
            audited.findings.iter().map(|finding| Found {
                reason: finding.reason(),
                subject: finding.subject(),
                message: finding.to_string(),
            }),
        );
        let Outcome { answer, changes } = self.leases.end_lost(&audited.lost, now);
        for lease in answer {
            tracing::warn!(attachment = %lease.attachment, "lease ended by the audit: its pod no longer exists and no DEL arrived");
        }
        self.owed.extend(changes);
        // What a namespace that exists is connected by may be a pod's whose records and routes are lost.
        for link in audited.left_over.into_iter().filter(|link| !self.parts.host.is_in_use(link)).collect::<Vec<_>>() {
            match self.parts.host.remove_device(&link) {
                Ok(()) => tracing::warn!(device = link, "device removed by the audit: it has no lease and no route"),
                Err(reason) => tracing::warn!(device = link, reason, "device not removed; retrying at the next audit"),
            }
        }
        self.flush();
        self.publish();
    }
}
