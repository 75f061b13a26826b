//! Commands that query a running agent and print its answer, human-readable or as JSON.

mod print;

use crate::api::client::{Client, ClientError};
use crate::api::types::{
    AddressExplanation, ExplainMasqueradeRequest, ExplainMasqueradeResponse, IpReport, NodeReply, SOCKET_PATH, Status,
};
use clap::{Args, Subcommand, ValueEnum};
use std::io::Write;
use std::net::{IpAddr, Ipv4Addr};
use std::path::PathBuf;
use std::time::Duration;

/// Common arguments.
#[derive(Debug, Clone, Args)]
pub struct Ask {
    /// Socket of the agent
    #[arg(long, env = "CISTERN_SOCKET_PATH", default_value = SOCKET_PATH, value_name = "PATH")]
    pub socket_path: PathBuf,
    /// `text` is human-readable, `json` machine-readable
    #[arg(short, long, value_enum, default_value_t = Output::Text)]
    pub output: Output,
}

/// Output format.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Output {
    /// Aligned columns.
    Text,
    /// The agent's answer, unchanged.
    Json,
}

/// `cistern ip`
#[derive(Debug, Clone, Subcommand)]
pub enum IpCommand {
    /// Addresses of this node that are not free: owner, time of allocation, and end of quarantine
    List,
}

/// `cistern bpf`
#[derive(Debug, Clone, Subcommand)]
pub enum BpfCommand {
    /// Destinations to which pod traffic is not masqueraded, each with the reason
    Ipmasq {
        /// Subcommand
        #[command(subcommand)]
        command: ListCommand,
    },
    /// Masqueraded flows: pod, remote, external port, protocol, state, age, idle time, device
    Snat {
        /// Subcommand
        #[command(subcommand)]
        command: ListCommand,
    },
    /// Pods of this node, as in the kernel programs' endpoint map
    Endpoint {
        /// Subcommand
        #[command(subcommand)]
        command: ListCommand,
    },
    /// Counters of the kernel programs: packets translated, passed and dropped, by reason
    Counters {
        /// Subcommand
        #[command(subcommand)]
        command: ListCommand,
    },
}

/// The subcommand of a map.
#[derive(Debug, Clone, Copy, Subcommand)]
pub enum ListCommand {
    /// List the rows
    List,
}

/// `cistern explain`
#[derive(Debug, Clone, Subcommand)]
pub enum ExplainCommand {
    /// Allocation of an address: owner, time and pod CIDR; otherwise why it is not free, or which node or pod has it
    Ip {
        /// The address
        #[arg(value_name = "IP")]
        address: IpAddr,
    },
    /// What a node is waiting for, since when, and when it retries; the source of its pod CIDRs; its CiliumNode
    Node {
        /// Name of the node; default: the node of the queried agent
        #[arg(value_name = "NAME", value_parser = node_name)]
        name: Option<String>,
    },
    /// Treatment of a packet from a pod: masqueraded or not, by which rule, and why
    Masquerade {
        /// Address of the pod, with or without `:PORT`
        #[arg(long, value_name = "IP[:PORT]")]
        from: Endpoint,
        /// Destination, with or without `:PORT`
        #[arg(long, value_name = "IP[:PORT]")]
        to: Endpoint,
        /// `tcp`, `udp` or `icmp`
        #[arg(long, default_value = "tcp", value_parser = ["tcp", "udp", "icmp"])]
        protocol: String,
    },
}

/// Accepts the characters of Node names, because the name becomes part of a URL path.
fn node_name(text: &str) -> Result<String, String> {
    let allowed = |letter: char| letter.is_ascii_lowercase() || letter.is_ascii_digit() || "-.".contains(letter);
    if !text.is_empty() && text.chars().all(allowed) {
        Ok(text.to_owned())
    } else {
        Err("expected the name of a Node: lower case letters, digits, `-` and `.`".to_owned())
    }
}

/// An IPv4 address with an optional port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Endpoint {
    ip: Ipv4Addr,
    port: Option<u16>,
}

impl std::str::FromStr for Endpoint {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (ip, port) = match text.rsplit_once(':') {
            Some((ip, port)) => {
                (ip, Some(port.parse().map_err(|_| format!("port {port:?}: expected a number from 0 to 65535"))?))
            }
            None => (text, None),
        };
        let ip = ip.parse().map_err(|_| format!("{ip:?}: expected an IPv4 address such as 10.244.1.5"))?;
        Ok(Self { ip, port })
    }
}

/// A command could not be carried out.
#[derive(Debug, thiserror::Error)]
pub enum CliError {
    /// The agent did not answer, or refused.
    #[error(transparent)]
    Client(#[from] ClientError),
    /// Printing failed.
    #[error("print: {0}")]
    Print(#[from] std::io::Error),
    /// The answer cannot be printed as JSON.
    #[error("print: {0}")]
    Json(#[from] serde_json::Error),
}

/// Long enough for a busy agent, short enough for an interactive command.
const TIMEOUT: Duration = Duration::from_secs(10);

impl Ask {
    fn client(&self) -> Client {
        Client::new(self.socket_path.clone(), TIMEOUT)
    }

    fn show<T: serde::Serialize>(
        &self,
        out: &mut impl Write,
        answer: &T,
        text: impl FnOnce(&T) -> String,
    ) -> Result<(), CliError> {
        match self.output {
            Output::Json => writeln!(out, "{}", serde_json::to_string_pretty(answer)?)?,
            Output::Text => out.write_all(text(answer).as_bytes())?,
        }
        Ok(())
    }
}

/// `cistern status`. Returns whether the node is ready, for the exit code.
///
/// # Errors
/// See [`CliError`].
pub fn status(ask: &Ask, out: &mut impl Write) -> Result<bool, CliError> {
    let status: Status = ask.client().get("/v1/status")?;
    ask.show(out, &status, print::status)?;
    Ok(status.health.ready)
}

/// `cistern ip …`
///
/// # Errors
/// See [`CliError`].
pub fn ip(ask: &Ask, command: &IpCommand, out: &mut impl Write) -> Result<(), CliError> {
    match command {
        IpCommand::List => {
            let rows: Vec<IpReport> = ask.client().get("/v1/ip")?;
            ask.show(out, &rows, |rows| print::addresses(rows))
        }
    }
}

/// `cistern bpf …`
///
/// # Errors
/// See [`CliError`].
pub fn bpf(ask: &Ask, command: &BpfCommand, out: &mut impl Write) -> Result<(), CliError> {
    let (name, columns): (&str, &[&str]) = match command {
        BpfCommand::Ipmasq { .. } => ("ipmasq", &["prefix", "reason"]),
        BpfCommand::Snat { .. } => (
            "snat",
            &["protocol", "origin", "external", "remote", "owner", "state", "age_seconds", "idle_seconds", "device"],
        ),
        BpfCommand::Endpoint { .. } => ("endpoint", &["address", "device", "ifindex", "masquerade"]),
        BpfCommand::Counters { .. } => ("counters", &["counter", "packets"]),
    };
    let rows: serde_json::Value = ask.client().get(&format!("/v1/bpf/{name}"))?;
    ask.show(out, &rows, |rows| print::rows(rows, columns))
}

/// `cistern explain …`
///
/// # Errors
/// See [`CliError`].
pub fn explain(ask: &Ask, command: &ExplainCommand, out: &mut impl Write) -> Result<(), CliError> {
    match command {
        ExplainCommand::Ip { address } => {
            let answer: AddressExplanation = ask.client().get(&format!("/v1/explain/ip/{address}"))?;
            ask.show(out, &answer, print::address)
        }
        ExplainCommand::Node { name } => {
            let path = name.as_ref().map(|name| format!("/{name}")).unwrap_or_default();
            let answer: NodeReply = ask.client().get(&format!("/v1/explain/node{path}"))?;
            ask.show(out, &answer, print::node)
        }
        ExplainCommand::Masquerade { from, to, protocol } => {
            let request = ExplainMasqueradeRequest {
                from: from.ip,
                from_port: from.port,
                to: to.ip,
                to_port: to.port,
                protocol: protocol.clone(),
            };
            let answer: ExplainMasqueradeResponse = ask.client().post("/v1/explain/masquerade", &request)?;
            ask.show(out, &answer, |answer| print::explanation(&request, answer))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_endpoint_is_an_address_with_or_without_port() {
        assert_eq!("10.244.1.5".parse(), Ok(Endpoint { ip: Ipv4Addr::new(10, 244, 1, 5), port: None }));
        assert_eq!("1.1.1.1:443".parse(), Ok(Endpoint { ip: Ipv4Addr::new(1, 1, 1, 1), port: Some(443) }));
        assert!("1.1.1.1:https".parse::<Endpoint>().unwrap_err().contains("https"));
        assert!("one.one".parse::<Endpoint>().unwrap_err().contains("one.one"));
    }
}
