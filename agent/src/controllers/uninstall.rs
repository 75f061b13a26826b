//! Detects the request to uninstall on this node's CiliumNode.

use crate::tables::Reader;
use crate::tables::rows::CiliumNodeRow;
use cistern_core::uninstall::pending;

/// Returns the request when this node is asked to uninstall.
pub async fn requested(node: String, mut cilium_nodes: Reader<String, CiliumNodeRow>) -> String {
    loop {
        let snapshot = cilium_nodes.synced().await;
        if let Some(row) = snapshot.rows.get(&node)
            && let Some(request) = pending(row.uninstall.as_deref(), row.uninstalled.as_deref())
        {
            return request.to_owned();
        }
        cilium_nodes.changed().await;
    }
}
