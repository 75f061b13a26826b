//! Servers and clients for tests and the demo; see `cistern_tests::probe`.

use cistern_tests::probe;
use clap::{Parser, Subcommand};
use std::io::Read;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

#[derive(Parser)]
#[command(about = "Servers and clients that report what they observe")]
struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Serves TCP and UDP echo that reports to each peer its address
    Serve { address: SocketAddr },
    /// Opens one TCP connection; prints the result as JSON
    AskTcp { to: SocketAddr },
    /// Sends one HTTP request; prints status and body as JSON
    AskHttp { to: SocketAddr, path: String },
    /// Sends one UDP datagram; prints the result as JSON
    AskUdp {
        to: SocketAddr,
        #[arg(long, default_value_t = 0)]
        from_port: u16,
    },
    /// Streams over one TCP connection until standard input ends; prints the report as JSON
    StreamTcp {
        to: SocketAddr,
        #[arg(long, default_value_t = 200)]
        per_second: u32,
    },
    /// Sends datagrams until standard input ends; prints the report as JSON
    StreamUdp {
        to: SocketAddr,
        #[arg(long, default_value_t = 1000)]
        per_second: u32,
    },
}

const TIMEOUT: Duration = Duration::from_secs(3);

fn main() -> anyhow::Result<()> {
    let text = match Args::parse().command {
        Command::Serve { address } => return probe::serve(address),
        Command::AskTcp { to } => serde_json::to_string(&probe::ask_tcp(to, TIMEOUT)?)?,
        Command::AskHttp { to, path } => serde_json::to_string(&probe::ask_http(to, &path, TIMEOUT)?)?,
        Command::AskUdp { to, from_port } => serde_json::to_string(&probe::ask_udp(to, from_port, TIMEOUT)?)?,
        Command::StreamTcp { to, per_second } => {
            serde_json::to_string(&probe::stream_tcp(to, per_second, &until_input_ends()))?
        }
        Command::StreamUdp { to, per_second } => {
            serde_json::to_string(&probe::stream_udp(to, per_second, &until_input_ends())?)?
        }
    };
    println!("{text}");
    Ok(())
}

/// Set when the parent closes this process's standard input, or dies.
fn until_input_ends() -> Arc<AtomicBool> {
    let stop = Arc::new(AtomicBool::new(false));
    let flag = Arc::clone(&stop);
    std::thread::spawn(move || {
        let mut rest = Vec::new();
        let _ = std::io::stdin().read_to_end(&mut rest);
        flag.store(true, Ordering::Relaxed);
    });
    stop
}
