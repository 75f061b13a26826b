//! Blocking client of the agent API: HTTP/1.1 over the unix socket, one connection for several calls, no async runtime.
//!
//! All calls of the API are idempotent, so a call on a kept connection that the agent has closed meanwhile is repeated
//! once on a new one.

use super::types::{ApiError, Health};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// A working agent answers within this time.
pub const TIMEOUT: Duration = Duration::from_secs(30);

/// Maximum size of an answer: more than a dump of the largest kernel map.
const LARGEST_ANSWER: usize = 256 << 20;

/// Maximum size of an answer's head.
const LARGEST_HEAD: usize = 16 << 10;
const HEADERS: usize = 32;

/// A failed call.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The socket has no listener. Nothing was sent.
    #[error("the agent cannot be reached at {}: {source}", socket.display())]
    Unreachable {
        /// The socket.
        socket: PathBuf,
        /// The I/O error: no such file, connection refused.
        source: io::Error,
    },
    /// The connection broke, or timed out. The call may or may not have been executed.
    #[error("{call}: no answer from the agent: {source}")]
    Broken {
        /// Method and path.
        call: String,
        /// The I/O error.
        source: io::Error,
    },
    /// The answer is not valid.
    #[error("{call}: the answer cannot be read: {reason}")]
    Malformed {
        /// Method and path.
        call: String,
        /// The reason.
        reason: String,
    },
    /// The agent rejected the call, and did not execute it.
    #[error("{call}: {} ({}, HTTP status {status})", error.message, error.reason)]
    Refused {
        /// Method and path.
        call: String,
        /// HTTP status.
        status: u16,
        /// The agent's error.
        error: ApiError,
    },
}

impl ClientError {
    /// Whether the same call may succeed later without a change of configuration.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::Unreachable { .. } | Self::Broken { .. } => true,
            Self::Malformed { .. } => false,
            Self::Refused { error, .. } => error.retryable,
        }
    }

    /// Whether the call may have been executed although it has no result.
    #[must_use]
    pub fn may_have_happened(&self) -> bool {
        matches!(self, Self::Broken { .. } | Self::Malformed { .. })
    }
}

/// A connection to the agent, opened by the first call and kept for further ones.
#[derive(Debug)]
pub struct Client {
    socket: PathBuf,
    timeout: Duration,
    connection: Option<UnixStream>,
}

/// An answer.
struct Answer {
    status: u16,
    body: Vec<u8>,
    /// The agent keeps the connection open.
    keep: bool,
}

/// Why an exchange failed.
enum Failure {
    /// The server closed the connection before the first byte of an answer.
    Closed(io::Error),
    Broken(io::Error),
    Malformed(String),
}

impl Client {
    /// A client for the agent at `socket`, with `timeout` for each read and write. Connects at the first call.
    #[must_use]
    pub fn new(socket: impl Into<PathBuf>, timeout: Duration) -> Self {
        Self { socket: socket.into(), timeout, connection: None }
    }

    /// The agent's socket.
    #[must_use]
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Connects, unless connected, to find out whether an agent is running.
    ///
    /// # Errors
    /// [`ClientError::Unreachable`]
    pub fn connect(&mut self) -> Result<(), ClientError> {
        if self.connection.is_none() {
            self.connection = Some(self.open()?);
        }
        Ok(())
    }

    /// `GET path`
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn get<R: DeserializeOwned>(&mut self, path: &str) -> Result<R, ClientError> {
        self.call("GET", path, &())
    }

    /// `POST path` with a JSON body.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn post<Q: Serialize, R: DeserializeOwned>(&mut self, path: &str, request: &Q) -> Result<R, ClientError> {
        self.call("POST", path, request)
    }

    /// `GET /v1/healthz`, whose answer with status 503 has a body, too.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn health(&mut self) -> Result<Health, ClientError> {
        let call = "GET /v1/healthz";
        let answer = self.exchange(call, &head("GET", "/v1/healthz", None))?;
        match answer.status {
            200 | 503 => parse(call, &answer.body),
            _ => Err(refusal(call, &answer)),
        }
    }

    /// One call. A request that serialises to `null` is sent without a body.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn call<Q: Serialize, R: DeserializeOwned>(
        &mut self,
        method: &str,
        path: &str,
        request: &Q,
    ) -> Result<R, ClientError> {
        let call = format!("{method} {path}");
        let body = serde_json::to_vec(request)
            .map_err(|error| ClientError::Malformed { call: call.clone(), reason: format!("the request: {error}") })?;
        let message = if body == b"null" {
            head(method, path, None)
        } else {
            let mut message = head(method, path, Some(body.len()));
            message.extend_from_slice(&body);
            message
        };
        let answer = self.exchange(&call, &message)?;
        if (200..300).contains(&answer.status) { parse(&call, &answer.body) } else { Err(refusal(&call, &answer)) }
    }

    fn open(&self) -> Result<UnixStream, ClientError> {
        let unreachable = |source| ClientError::Unreachable { socket: self.socket.clone(), source };
        let stream = UnixStream::connect(&self.socket).map_err(unreachable)?;
        stream.set_read_timeout(Some(self.timeout)).map_err(unreachable)?;
        stream.set_write_timeout(Some(self.timeout)).map_err(unreachable)?;
        Ok(stream)
    }

    fn exchange(&mut self, call: &str, message: &[u8]) -> Result<Answer, ClientError> {
        let mut kept = self.connection.take();
        loop {
            let was_kept = kept.is_some();
            let mut stream = match kept.take() {
                Some(stream) => stream,
                None => self.open()?,
            };
            match exchange(&mut stream, message) {
                Ok(answer) => {
                    self.connection = answer.keep.then_some(stream);
                    return Ok(answer);
                }
                Err(Failure::Closed(_)) if was_kept => {}
                Err(Failure::Closed(source) | Failure::Broken(source)) => {
                    return Err(ClientError::Broken { call: call.to_owned(), source });
                }
                Err(Failure::Malformed(reason)) => {
                    return Err(ClientError::Malformed { call: call.to_owned(), reason });
                }
            }
        }
    }
}

fn head(method: &str, path: &str, length: Option<usize>) -> Vec<u8> {
    let content = length
        .map(|length| format!("content-type: application/json\r\ncontent-length: {length}\r\n"))
        .unwrap_or_default();
    format!("{method} {path} HTTP/1.1\r\nhost: localhost\r\n{content}\r\n").into_bytes()
}

fn parse<R: DeserializeOwned>(call: &str, body: &[u8]) -> Result<R, ClientError> {
    let body: &[u8] = if body.is_empty() { b"null" } else { body };
    serde_json::from_slice(body)
        .map_err(|error| ClientError::Malformed { call: call.to_owned(), reason: error.to_string() })
}

fn refusal(call: &str, answer: &Answer) -> ClientError {
    match serde_json::from_slice(&answer.body) {
        Ok(error) => ClientError::Refused { call: call.to_owned(), status: answer.status, error },
        Err(_) => ClientError::Malformed {
            call: call.to_owned(),
            reason: format!(
                "HTTP status {} with a body that is no API error: {:?}",
                answer.status,
                String::from_utf8_lossy(answer.body.get(..200).unwrap_or(&answer.body))
            ),
        },
    }
}

fn exchange(stream: &mut UnixStream, message: &[u8]) -> Result<Answer, Failure> {
    stream.write_all(message).map_err(|error| match error.kind() {
        io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => Failure::Closed(error),
        _ => Failure::Broken(error),
    })?;
    let mut bytes = Vec::with_capacity(1_024);
    let (head, head_length) = loop {
        let before = bytes.len();
        if read_some(stream, &mut bytes)? == 0 {
            let error = io::Error::from(io::ErrorKind::UnexpectedEof);
            return Err(if before == 0 { Failure::Closed(error) } else { Failure::Broken(error) });
        }
        if let Some(found) = parse_head(&bytes)? {
            break found;
        }
        if bytes.len() > LARGEST_HEAD {
            return Err(Failure::Malformed(format!("its head has more than {LARGEST_HEAD} bytes")));
        }
    };
    let mut body = bytes.split_off(head_length);
    if head.length > LARGEST_ANSWER {
        return Err(Failure::Malformed(format!("it has {} bytes; at most {LARGEST_ANSWER} are read", head.length)));
    }
    while body.len() < head.length {
        if read_some(stream, &mut body)? == 0 {
            return Err(Failure::Broken(io::ErrorKind::UnexpectedEof.into()));
        }
    }
    if body.len() > head.length {
        return Err(Failure::Malformed("it is longer than its content-length".into()));
    }
    Ok(Answer { status: head.status, body, keep: head.keep })
}

fn read_some(stream: &mut UnixStream, bytes: &mut Vec<u8>) -> Result<usize, Failure> {
    let mut chunk = [0_u8; 16 << 10];
    loop {
        match stream.read(&mut chunk) {
            Ok(count) => {
                bytes.extend_from_slice(chunk.get(..count).unwrap_or_default());
                return Ok(count);
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset && bytes.is_empty() => {
                return Err(Failure::Closed(error));
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                return Err(Failure::Broken(io::Error::new(io::ErrorKind::TimedOut, "it took too long")));
            }
            Err(error) => return Err(Failure::Broken(error)),
        }
    }
}

struct Head {
    status: u16,
    length: usize,
    keep: bool,
}

/// The head and its length in bytes; `None` while it is incomplete.
fn parse_head(bytes: &[u8]) -> Result<Option<(Head, usize)>, Failure> {
    let mut headers = [httparse::EMPTY_HEADER; HEADERS];
    let mut response = httparse::Response::new(&mut headers);
    let length = match response.parse(bytes) {
        Ok(httparse::Status::Complete(length)) => length,
        Ok(httparse::Status::Partial) => return Ok(None),
        Err(error) => return Err(Failure::Malformed(format!("no HTTP: {error}"))),
    };
    let mut head = Head { status: response.code.unwrap_or_default(), length: 0, keep: response.version == Some(1) };
    for header in response.headers.iter() {
        let value = String::from_utf8_lossy(header.value);
        if header.name.eq_ignore_ascii_case("content-length") {
            head.length = value
                .trim()
                .parse()
                .map_err(|_| Failure::Malformed(format!("content-length: {value:?} is no number")))?;
        } else if header.name.eq_ignore_ascii_case("transfer-encoding") {
            return Err(Failure::Malformed(format!("transfer-encoding: {value:?}; the agent sends whole bodies")));
        } else if header.name.eq_ignore_ascii_case("connection") && value.trim().eq_ignore_ascii_case("close") {
            head.keep = false;
        }
    }
    Ok(Some((head, length)))
}

#[cfg(test)]
mod tests {
    use super::super::types::{DelRequest, DelResponse};
    use super::*;
    use std::os::unix::net::UnixListener;
    use std::thread::JoinHandle;

    /// Serves connections sequentially. Each is a list of answers, one per request; then it is closed. Returns the
    /// number of requests.
    fn serve(connections: Vec<Vec<String>>) -> (tempfile::TempDir, PathBuf, JoinHandle<usize>) {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("agent.sock");
        let listener = UnixListener::bind(&path).unwrap();
        let thread = std::thread::spawn(move || {
            let mut requests = 0;
            for answers in connections {
                let (mut stream, _) = listener.accept().unwrap();
                for answer in answers {
                    let mut bytes = Vec::new();
                    while !complete(&bytes) {
                        let mut chunk = [0; 512];
                        let count = stream.read(&mut chunk).unwrap();
                        assert!(count > 0, "the client went away");
                        bytes.extend_from_slice(&chunk[..count]);
                    }
                    requests += 1;
                    // In two parts, to test an incomplete head.
                    let (first, second) = answer.split_at(answer.len() / 3);
                    stream.write_all(first.as_bytes()).unwrap();
                    stream.flush().unwrap();
                    stream.write_all(second.as_bytes()).unwrap();
                }
            }
            requests
        });
        (directory, path, thread)
    }

    fn complete(bytes: &[u8]) -> bool {
        let mut headers = [httparse::EMPTY_HEADER; 8];
        let mut request = httparse::Request::new(&mut headers);
        let Ok(httparse::Status::Complete(head)) = request.parse(bytes) else { return false };
        let length = request
            .headers
            .iter()
            .find(|header| header.name == "content-length")
            .map_or(0, |header| std::str::from_utf8(header.value).unwrap().parse().unwrap());
        bytes.len() >= head + length
    }

    fn answer(status: &str, body: &str) -> String {
        format!("HTTP/1.1 {status}\r\ncontent-length: {}\r\n\r\n{body}", body.len())
    }

    fn del(client: &mut Client) -> Result<DelResponse, ClientError> {
        client.post("/v1/cni/del", &DelRequest { container_id: "c".into(), ifname: "eth0".into(), began: None })
    }

    #[test]
    fn an_answer_without_a_body_is_an_answer() {
        let (_directory, path, server) = serve(vec![vec![answer("204 No Content", "")]]);
        let request = DelRequest { container_id: "c".into(), ifname: "eth0".into(), began: None };
        Client::new(path, TIMEOUT).post::<_, serde::de::IgnoredAny>("/v1/cni/del", &request).unwrap();
        assert_eq!(server.join().unwrap(), 1);
    }

    #[test]
    fn calls_share_a_connection_and_a_closed_one_is_replaced() {
        let ok = answer("200 OK", r#"{"released":"10.244.1.5"}"#);
        // The agent closed the first connection after two answers.
        let (_directory, path, server) = serve(vec![vec![ok.clone(), ok.clone()], vec![ok]]);
        let mut client = Client::new(path, TIMEOUT);
        for _ in 0..2 {
            assert_eq!(del(&mut client).unwrap().released, Some("10.244.1.5".parse().unwrap()));
        }
        std::thread::sleep(Duration::from_millis(20));
        del(&mut client).unwrap();
        assert_eq!(server.join().unwrap(), 3);
    }

    #[test]
    fn a_refusal_carries_the_agents_words() {
        let body = r#"{"reason":"pool-exhausted","message":"no address left in 10.244.1.0/24","retryable":true}"#;
        let (_directory, path, _server) = serve(vec![vec![answer("503 Service Unavailable", body)]]);
        let error = del(&mut Client::new(path, TIMEOUT)).unwrap_err();
        assert!(error.is_retryable() && !error.may_have_happened());
        assert_eq!(
            error.to_string(),
            "POST /v1/cni/del: no address left in 10.244.1.0/24 (pool-exhausted, HTTP status 503)"
        );
    }

    #[test]
    fn an_absent_agent_is_distinguished_from_a_missing_answer() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("agent.sock");
        assert!(matches!(del(&mut Client::new(&path, TIMEOUT)).unwrap_err(), ClientError::Unreachable { .. }));
        // The remains of a killed agent.
        drop(UnixListener::bind(&path).unwrap());
        let error = del(&mut Client::new(&path, TIMEOUT)).unwrap_err();
        assert!(matches!(error, ClientError::Unreachable { .. }) && error.is_retryable());

        let _listener = UnixListener::bind(directory.path().join("stuck.sock")).unwrap();
        let mut client = Client::new(directory.path().join("stuck.sock"), Duration::from_millis(50));
        let error = del(&mut client).unwrap_err();
        assert!(matches!(error, ClientError::Broken { .. }) && error.may_have_happened(), "{error}");
    }

    #[test]
    fn invalid_answers_are_reported() {
        for (bytes, expected) in [
            ("SSH-2.0-OpenSSH_9.2\r\n\r\n".to_owned(), "no HTTP"),
            (answer("200 OK", "{"), "EOF while parsing"),
            (answer("502 Bad Gateway", "<html>"), "HTTP status 502 with a body that is no API error"),
            ("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n".to_owned(), "transfer-encoding"),
            ("HTTP/1.1 200 OK\r\ncontent-length: many\r\n\r\n".to_owned(), "content-length"),
            ("HTTP/1.1 200 OK\r\ncontent-length: 99999999999\r\n\r\n".to_owned(), "99999999999 bytes"),
        ] {
            let (_directory, path, _server) = serve(vec![vec![bytes]]);
            let error = del(&mut Client::new(path, TIMEOUT)).unwrap_err();
            assert!(matches!(error, ClientError::Malformed { .. }), "{error}");
            assert!(error.to_string().contains(expected), "{error}");
        }
    }

    #[test]
    fn an_unhealthy_agent_reports_the_reason() {
        let body = r#"{"ready":false,"reasons":["waiting for podCIDRs"]}"#;
        let (_directory, path, _server) = serve(vec![vec![answer("503 Service Unavailable", body)]]);
        assert_eq!(Client::new(path, TIMEOUT).health().unwrap().reasons, ["waiting for podCIDRs"]);
    }
}
