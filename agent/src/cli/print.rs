//! Human-readable output.

use crate::api::types::{
    AddressExplanation, ExplainMasqueradeRequest, ExplainMasqueradeResponse, IpReport, NodeReply, Status, WaitReport,
};
use serde_json::Value;
use std::fmt::Write;

/// Left-aligned columns, as wide as their widest cell, separated by two spaces.
fn table(header: &[&str], rows: &[Vec<String>]) -> String {
    let mut widths: Vec<usize> = header.iter().map(|cell| cell.len()).collect();
    for row in rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let mut text = String::new();
    let mut line = |cells: &mut dyn Iterator<Item = &str>| {
        let mut row = String::new();
        for (cell, width) in cells.zip(&widths) {
            let _ = write!(row, "{cell:width$}  ");
        }
        text.push_str(row.trim_end());
        text.push('\n');
    };
    line(&mut header.iter().copied());
    for row in rows {
        line(&mut row.iter().map(String::as_str));
    }
    text
}

fn since_and_next(wait: &WaitReport) -> String {
    let next = wait.next_try.as_ref().map_or_else(|| "on change".to_owned(), |at| format!("next try {at}"));
    format!("since {}, {next}", wait.since)
}

fn or_dash<T: ToString>(value: Option<&T>) -> String {
    value.map_or_else(|| "-".to_owned(), ToString::to_string)
}

/// `cistern status`
pub(super) fn status(status: &Status) -> String {
    let mut text = String::new();
    let mut field = |name: &str, value: &str| {
        let _ = writeln!(text, "{name:<14} {value}");
    };
    field("Build:", &status.build);
    field("Node:", &status.node);
    field("Ready:", if status.health.ready { "yes" } else { "no" });
    for reason in &status.health.reasons {
        field("", reason);
    }
    field("IPAM:", &status.ipam_mode);
    field("Pod CIDR:", &or_dash(status.pod_cidr.as_ref()));
    field("Router:", &or_dash(status.router.as_ref()));
    let counts = status.addresses;
    field("Addresses:", &format!("{} of {} used, {} in quarantine", counts.used, counts.capacity, counts.quarantined));
    field("Masquerade:", &status.masquerade.mode);
    for device in &status.masquerade.devices {
        field(
            "",
            &format!(
                "{} (ifindex {}) as {}: {}",
                device.name,
                device.ifindex,
                or_dash(device.address.as_ref()),
                device.reason
            ),
        );
    }
    field("", &format!("native routing: {}", or_dash(status.masquerade.native_routing_cidr.as_ref())));
    field(
        "",
        &format!("excluded: {} prefixes; ip-masq: {}", status.masquerade.excluded, status.masquerade.ip_masq_source),
    );
    for problem in &status.masquerade.problems {
        field("", &format!("problem: {problem}"));
    }
    if let Some(leader) = &status.leader_election {
        let holder = leader.holder.as_deref().unwrap_or("none");
        field(
            "Operator:",
            &if leader.leading { format!("leader, as {}", leader.identity) } else { format!("leader is {holder}") },
        );
    }
    for (index, node) in status.nodes.iter().enumerate() {
        field(
            if index == 0 { "Nodes:" } else { "" },
            &format!("{} {} {}", node.name, or_dash(node.internal_ip.as_ref()), node.pod_cidrs.join(",")),
        );
    }
    for (index, wait) in status.waits.iter().enumerate() {
        field(
            if index == 0 { "Waiting:" } else { "" },
            &format!("{}: {} ({})", wait.name, wait.reason, since_and_next(wait)),
        );
    }
    for (index, finding) in status.findings.iter().enumerate() {
        field(
            if index == 0 { "Found:" } else { "" },
            &format!("{} {}: {} (since {})", finding.reason, finding.subject, finding.message, finding.since),
        );
    }
    for reconciler in status.reconcilers.iter().filter(|reconciler| !reconciler.failing.is_empty()) {
        for row in &reconciler.failing {
            let next = row.next_try.as_deref().unwrap_or("at the next full sync");
            field(
                "Failing:",
                &format!("{} {}: {} ({} tries, next {next})", reconciler.name, row.key, row.error, row.attempts),
            );
        }
    }
    text
}

/// `cistern ip list`
pub(super) fn addresses(rows: &[IpReport]) -> String {
    let cells: Vec<Vec<String>> = rows
        .iter()
        .map(|row| {
            vec![
                row.address.to_string(),
                row.state.clone(),
                row.owner.clone(),
                row.container_id.as_deref().map_or_else(|| "-".to_owned(), |id| id.chars().take(12).collect()),
                or_dash(row.ifname.as_ref()),
                or_dash(row.since.as_ref()),
                or_dash(row.until.as_ref()),
            ]
        })
        .collect();
    table(&["ADDRESS", "STATE", "OWNER", "CONTAINER", "INTERFACE", "SINCE", "UNTIL"], &cells)
}

/// Rows of any map, with these fields as columns.
pub(super) fn rows(value: &Value, columns: &[&str]) -> String {
    let rows: &[Value] = value.as_array().map_or(&[], Vec::as_slice);
    if rows.is_empty() {
        return "no entries\n".to_owned();
    }
    let header: Vec<String> = columns.iter().map(|column| column.to_uppercase().replace('_', "-")).collect();
    let cell = |row: &Value, column: &str| match row.get(column) {
        None | Some(Value::Null) => "-".to_owned(),
        Some(Value::String(text)) => text.clone(),
        Some(other) => other.to_string(),
    };
    let cells: Vec<Vec<String>> =
        rows.iter().map(|row| columns.iter().map(|column| cell(row, column)).collect()).collect();
    table(&header.iter().map(String::as_str).collect::<Vec<_>>(), &cells)
}

/// `cistern explain ip`
pub(super) fn address(answer: &AddressExplanation) -> String {
    let mut text = format!("{}: {}\n", answer.address, answer.state);
    let mut field = |name: &str, value: Option<String>| {
        if let Some(value) = value {
            let _ = writeln!(text, "  {name:<8} {value}");
        }
    };
    field("why:", Some(answer.why.clone()));
    field("pod:", answer.pod.clone());
    field("holder:", answer.holder.clone());
    field("node:", answer.node.clone());
    field("block:", answer.block.map(|block| block.to_string()));
    field("since:", answer.since.map(|time| time.to_string()));
    field("until:", answer.until.map(|time| time.to_string()));
    text
}

/// `cistern explain node`
pub(super) fn node(answer: &NodeReply) -> String {
    let explained = &answer.explanation;
    let mut text = format!("{}: {}\n", explained.node, explained.state);
    let mut field = |name: &str, value: &str| {
        let _ = writeln!(text, "  {name:<12} {value}");
    };
    field("why:", &explained.why);
    if answer.source != "api" {
        field("source:", "cached from the previous run: the API server has not been reached since startup");
    }
    for address in &answer.addresses {
        field("address:", &address.to_string());
    }
    if let Some(router) = answer.router {
        field("router:", &router.to_string());
    }
    if let Some(error) = &explained.operator_error {
        field("operator:", error);
    }
    for overlap in &explained.overlaps {
        field("overlap:", &format!("{} with {} of {}", overlap.block, overlap.other_block, overlap.other_node));
    }
    if let Some(own) = &answer.own {
        field("ready:", if own.health.ready { "yes" } else { "no" });
        for reason in &own.health.reasons {
            field("", reason);
        }
        let counts = own.addresses;
        let used = format!("{} of {} used, {} in quarantine", counts.used, counts.capacity, counts.quarantined);
        field("pod CIDR:", &format!("{} ({used})", or_dash(own.pod_cidr.as_ref())));
        for wait in &own.waits {
            field("waiting for:", &format!("{}: {} ({})", wait.name, wait.reason, since_and_next(wait)));
        }
    }
    text
}

/// `cistern explain masquerade`
pub(super) fn explanation(request: &ExplainMasqueradeRequest, answer: &ExplainMasqueradeResponse) -> String {
    let port = |port: Option<u16>| port.map_or_else(String::new, |port| format!(":{port}"));
    let mut text = format!(
        "{}{} -> {}{} ({}): {}\n",
        request.from,
        port(request.from_port),
        request.to,
        port(request.to_port),
        request.protocol,
        answer.verdict
    );
    let _ = writeln!(text, "  rule: {}", answer.rule);
    let _ = writeln!(text, "  why:  {}", answer.why);
    if let Some(address) = answer.leaves_as {
        let _ = writeln!(text, "  as:   {address} on {}", or_dash(answer.device.as_ref()));
    }
    text
}

#[cfg(test)]
mod tests {
    #[test]
    fn columns_are_as_wide_as_their_widest_cell() {
        let rows = serde_json::json!([
            {"prefix": "10.0.0.0/8", "reason": "ip-masq-agent"},
            {"prefix": "169.254.0.0/16", "reason": null},
        ]);
        assert_eq!(
            super::rows(&rows, &["prefix", "reason"]),
            "PREFIX          REASON\n10.0.0.0/8      ip-masq-agent\n169.254.0.0/16  -\n"
        );
        assert_eq!(super::rows(&serde_json::json!([]), &["prefix"]), "no entries\n");
    }
}
