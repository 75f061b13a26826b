//! Clients.

use anyhow::Context;
use serde::{Deserialize, Serialize};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// The result of one exchange.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Answer {
    /// The client's address.
    pub local: SocketAddr,
    /// The client's address as seen by the server.
    pub seen_as: SocketAddr,
    /// The address that the answer came from.
    pub answered_by: SocketAddr,
}

/// The result of a stream.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StreamReport {
    /// Messages sent.
    pub sent: u64,
    /// Messages received back.
    pub received: u64,
    /// Longest time between two received messages, in milliseconds.
    pub longest_gap_ms: u64,
    /// The client's address as first seen by the server.
    pub seen_as: Option<SocketAddr>,
    /// What terminated the stream prematurely.
    pub error: Option<String>,
}

impl StreamReport {
    /// Messages not received back.
    #[must_use]
    pub fn lost(&self) -> u64 {
        self.sent.saturating_sub(self.received)
    }
}

/// The answer of an HTTP server.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HttpAnswer {
    /// The status code.
    pub status: u16,
    /// The body.
    pub body: String,
}

/// `GET path`, as HTTP/1.0, so that the answer ends with the connection.
///
/// # Errors
/// The connection fails or the answer is not HTTP.
pub fn ask_http(to: SocketAddr, path: &str, timeout: Duration) -> anyhow::Result<HttpAnswer> {
    let mut stream = TcpStream::connect_timeout(&to, timeout)?;
    stream.set_read_timeout(Some(timeout))?;
    write!(stream, "GET {path} HTTP/1.0\r\nhost: {to}\r\n\r\n")?;
    let mut text = String::new();
    stream.read_to_string(&mut text)?;
    let (head, body) = text.split_once("\r\n\r\n").context("no end of the head")?;
    let status = head.split(' ').nth(1).context("no status")?.parse()?;
    Ok(HttpAnswer { status, body: body.to_owned() })
}

fn any(port: u16) -> SocketAddr {
    SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), port)
}

/// One TCP connection, to ask for the client's address as seen by the server.
///
/// # Errors
/// The connection fails or the answer is not an address.
pub fn ask_tcp(to: SocketAddr, timeout: Duration) -> anyhow::Result<Answer> {
    let mut stream = TcpStream::connect_timeout(&to, timeout)?;
    stream.set_read_timeout(Some(timeout))?;
    stream.set_nodelay(true)?;
    let mut line = String::new();
    BufReader::new(stream.try_clone()?).read_line(&mut line)?;
    stream.write_all(b"thanks")?;
    Ok(Answer { local: stream.local_addr()?, seen_as: line.trim().parse()?, answered_by: stream.peer_addr()? })
}

/// One UDP datagram, to ask for the client's address as seen by the server. The answer may come from any address, which
/// is reported.
///
/// # Errors
/// No answer arrives, or it is not an address.
pub fn ask_udp(to: SocketAddr, from_port: u16, timeout: Duration) -> anyhow::Result<Answer> {
    let socket = UdpSocket::bind(any(from_port))?;
    socket.set_read_timeout(Some(timeout))?;
    socket.send_to(b"who am I", to)?;
    let mut buffer = [0_u8; 2_048];
    let (length, answered_by) = socket.recv_from(&mut buffer)?;
    let text = String::from_utf8_lossy(buffer.get(..length).unwrap_or_default()).into_owned();
    let seen_as = text.lines().next().unwrap_or_default().parse()?;
    Ok(Answer { local: socket.local_addr()?, seen_as, answered_by })
}

struct Tally {
    received: AtomicU64,
    longest_gap_ms: AtomicU64,
}

impl Tally {
    fn count(&self, last: &mut Instant) {
        let gap = u64::try_from(last.elapsed().as_millis()).unwrap_or(u64::MAX);
        *last = Instant::now();
        self.longest_gap_ms.fetch_max(gap, Ordering::Relaxed);
        self.received.fetch_add(1, Ordering::Relaxed);
    }
}

/// Sends 8-byte messages over one TCP connection until `stop` is set, and reads them back in order.
pub fn stream_tcp(to: SocketAddr, per_second: u32, stop: &AtomicBool) -> StreamReport {
    let mut report = StreamReport { sent: 0, received: 0, longest_gap_ms: 0, seen_as: None, error: None };
    if let Err(error) = stream_tcp_inner(to, per_second, stop, &mut report) {
        report.error = Some(error.to_string());
    }
    report
}

fn stream_tcp_inner(
    to: SocketAddr,
    per_second: u32,
    stop: &AtomicBool,
    report: &mut StreamReport,
) -> anyhow::Result<()> {
    let mut stream = TcpStream::connect_timeout(&to, Duration::from_secs(5))?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(Duration::from_secs(10)))?;
    let mut reader = BufReader::new(stream.try_clone()?);
    let mut line = String::new();
    reader.read_line(&mut line)?;
    report.seen_as = line.trim().parse().ok();
    let pause = Duration::from_secs(1) / per_second.max(1);
    let mut last = Instant::now();
    while !stop.load(Ordering::Relaxed) {
        let message = report.sent.to_be_bytes();
        stream.write_all(&message)?;
        report.sent += 1;
        let mut back = [0_u8; 8];
        reader.read_exact(&mut back)?;
        anyhow::ensure!(back == message, "message {} came back as {}", report.sent, u64::from_be_bytes(back));
        report.received += 1;
        report.longest_gap_ms =
            report.longest_gap_ms.max(u64::try_from(last.elapsed().as_millis()).unwrap_or(u64::MAX));
        last = Instant::now();
        thread::sleep(pause);
    }
    Ok(())
}

/// Sends numbered UDP datagrams at a steady rate until `stop` is set, and counts those received back, waiting one
/// second for the last ones.
///
/// # Errors
/// The socket cannot be created.
pub fn stream_udp(to: SocketAddr, per_second: u32, stop: &AtomicBool) -> anyhow::Result<StreamReport> {
    let socket = UdpSocket::bind(any(0))?;
    socket.connect(to)?;
    socket.set_read_timeout(Some(Duration::from_millis(200)))?;
    let tally = Arc::new(Tally { received: AtomicU64::new(0), longest_gap_ms: AtomicU64::new(0) });
    let done = Arc::new(AtomicBool::new(false));
    let receiver = {
        let (socket, tally, done) = (socket.try_clone()?, Arc::clone(&tally), Arc::clone(&done));
        thread::spawn(move || {
            let mut buffer = [0_u8; 2_048];
            let mut last = Instant::now();
            let mut seen_as = None;
            while !done.load(Ordering::Relaxed) {
                if let Ok(length) = socket.recv(&mut buffer) {
                    tally.count(&mut last);
                    if seen_as.is_none() {
                        let text = String::from_utf8_lossy(buffer.get(..length).unwrap_or_default()).into_owned();
                        seen_as = text.lines().next().and_then(|line| line.parse().ok());
                    }
                }
            }
            seen_as
        })
    };
    let pause = Duration::from_secs(1) / per_second.max(1);
    let start = Instant::now();
    let mut sent = 0_u64;
    let mut error = None;
    while !stop.load(Ordering::Relaxed) {
        match socket.send(&sent.to_be_bytes()) {
            Ok(_) => {}
            // An ICMP error for an earlier datagram: that one is lost, this one is still sent.
            Err(refused) if refused.kind() == std::io::ErrorKind::ConnectionRefused => {}
            Err(other) => {
                error = Some(other.to_string());
                break;
            }
        }
        sent += 1;
        // Sending times are fixed, independent of the duration of earlier sends.
        let due = pause * u32::try_from(sent).unwrap_or(u32::MAX);
        thread::sleep(due.saturating_sub(start.elapsed()));
    }
    thread::sleep(Duration::from_secs(1));
    done.store(true, Ordering::Relaxed);
    let seen_as = receiver.join().unwrap_or(None);
    Ok(StreamReport {
        sent,
        received: tally.received.load(Ordering::Relaxed),
        longest_gap_ms: tally.longest_gap_ms.load(Ordering::Relaxed),
        seen_as,
        error,
    })
}
