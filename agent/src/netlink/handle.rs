//! The netlink socket: requests, acknowledgements and dumps.

use super::NetlinkError;
use netlink_packet_core::{
    ErrorMessage, NLM_F_ACK, NLM_F_DUMP, NLM_F_DUMP_INTR, NLM_F_REQUEST, NetlinkBuffer, NetlinkHeader, NetlinkMessage,
    NetlinkPayload, NlasIterator,
};
use netlink_packet_route::RouteNetlinkMessage;
use netlink_sys::{Socket, SocketAddr, protocols::NETLINK_ROUTE};
use nix::errno::Errno;
use nix::sys::socket::{setsockopt, sockopt::ReceiveTimeout};
use nix::sys::time::{TimeVal, TimeValLike};
use std::io;
use std::num::NonZeroI32;

/// The kernel answers during `send`, so this only expires if another process holds the rtnl lock for very long.
const TIMEOUT_SECONDS: i64 = 30;

/// The kernel fills at most 32 KiB of a dump into one message; a single link with many virtual functions may be larger.
const RECEIVE_BUFFER: usize = 128 << 10;

/// Maximum number of attempts for dumps that the kernel marks as interrupted.
const DUMP_TRIES: usize = 5;

/// Text of the kernel in an extended acknowledgement (`NLMSGERR_ATTR_MSG`, kernel documentation `netlink/intro`).
const NLMSGERR_ATTR_MSG: u16 = 1;

/// Length of `struct nlmsghdr`, which an error message carries before its attributes.
const HEADER_LENGTH: usize = 16;

/// A change requested from the kernel.
#[derive(Debug, Clone)]
pub struct Request {
    message: RouteNetlinkMessage,
    flags: u16,
    what: String,
}

impl Request {
    /// `flags` are the `NLM_F_*` in addition to `REQUEST` and `ACK`; `what` completes "cannot …" in errors.
    pub(super) fn new(message: RouteNetlinkMessage, flags: u16, what: String) -> Self {
        Self { message, flags, what }
    }
}

/// A socket to the rtnetlink of one network namespace: that of the calling thread at [`Handle::open`].
pub struct Handle {
    socket: Socket,
    /// Sequence number of the last message sent.
    sequence: u32,
    buffer: Vec<u8>,
}

impl std::fmt::Debug for Handle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Handle").field("sequence", &self.sequence).finish_non_exhaustive()
    }
}

fn socket_error(action: &'static str) -> impl FnOnce(io::Error) -> NetlinkError {
    move |source| NetlinkError::Socket { action, source }
}

impl Handle {
    /// Opens a socket in the network namespace of the calling thread.
    ///
    /// # Errors
    /// [`NetlinkError::Socket`] with the step that failed.
    pub fn open() -> Result<Self, NetlinkError> {
        let socket = Socket::new(NETLINK_ROUTE).map_err(socket_error("socket"))?;
        // Connected to port 0, the socket only receives messages of the kernel.
        socket.connect(&SocketAddr::new(0, 0)).map_err(socket_error("connect to the kernel"))?;
        // Without strict checking the kernel ignores unknown attributes and filters of dumps.
        socket.set_netlink_get_strict_chk(true).map_err(socket_error("NETLINK_GET_STRICT_CHK"))?;
        socket.set_ext_ack(true).map_err(socket_error("NETLINK_EXT_ACK"))?;
        // Errors need not include the request.
        socket.set_cap_ack(true).map_err(socket_error("NETLINK_CAP_ACK"))?;
        setsockopt(&socket, ReceiveTimeout, &TimeVal::seconds(TIMEOUT_SECONDS))
            .map_err(|errno| NetlinkError::Socket { action: "SO_RCVTIMEO", source: errno.into() })?;
        Ok(Self { socket, sequence: 0, buffer: Vec::with_capacity(RECEIVE_BUFFER) })
    }

    /// Sends the requests in one message. The kernel executes them in order and continues after an error.
    ///
    /// # Errors
    /// The first error; [`Handle::apply_each`] returns all.
    pub fn apply(&mut self, requests: &[Request]) -> Result<(), NetlinkError> {
        self.apply_each(requests)?.into_iter().collect()
    }

    /// As [`Handle::apply`], with the result of each request in order.
    ///
    /// # Errors
    /// The socket failed; then no result is known.
    pub fn apply_each(&mut self, requests: &[Request]) -> Result<Vec<Result<(), NetlinkError>>, NetlinkError> {
        let first = self.sequence.wrapping_add(1);
        let mut bytes = Vec::new();
        for request in requests {
            self.append(&mut bytes, request.message.clone(), NLM_F_ACK | request.flags);
        }
        if requests.is_empty() {
            return Ok(Vec::new());
        }
        self.socket.send(&bytes, 0).map_err(socket_error("send"))?;
        let mut outcomes: Vec<Option<Result<(), NetlinkError>>> = requests.iter().map(|_| None).collect();
        while outcomes.iter().any(Option::is_none) {
            for message in self.receive("acknowledgement", first)? {
                let NetlinkPayload::Error(error) = &message.payload else { continue };
                let position = message.header.sequence_number.wrapping_sub(first) as usize;
                let (Some(slot), Some(request)) = (outcomes.get_mut(position), requests.get(position)) else {
                    continue;
                };
                *slot = Some(match error.code {
                    None => Ok(()),
                    Some(code) => Err(refusal(&request.what, code, error)),
                });
            }
        }
        Ok(outcomes.into_iter().flatten().collect())
    }

    /// Applies a request that creates something. Returns false if it existed.
    ///
    /// # Errors
    /// Any other error.
    pub fn add(&mut self, request: &Request) -> Result<bool, NetlinkError> {
        match self.apply(std::slice::from_ref(request)) {
            Ok(()) => Ok(true),
            Err(error) if error.is_exists() => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Applies a request that deletes something. Returns false if it did not exist.
    ///
    /// # Errors
    /// Any other error.
    pub fn remove(&mut self, request: &Request) -> Result<bool, NetlinkError> {
        match self.apply(std::slice::from_ref(request)) {
            Ok(()) => Ok(true),
            Err(error) if error.is_missing() => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Requests one object; `None` if it does not exist.
    pub(super) fn get<T>(
        &mut self,
        message: RouteNetlinkMessage,
        what: &str,
        mut pick: impl FnMut(RouteNetlinkMessage) -> Option<T>,
    ) -> Result<Option<T>, NetlinkError> {
        let mut bytes = Vec::new();
        self.append(&mut bytes, message, 0);
        self.socket.send(&bytes, 0).map_err(socket_error("send"))?;
        loop {
            for message in self.receive(what, self.sequence)? {
                match message.payload {
                    NetlinkPayload::InnerMessage(inner) => {
                        return match pick(inner) {
                            Some(found) => Ok(Some(found)),
                            None => Err(NetlinkError::Answer {
                                what: what.to_owned(),
                                reason: "it describes something else".into(),
                            }),
                        };
                    }
                    NetlinkPayload::Error(error) => {
                        let Some(code) = error.code else { continue };
                        let refused = refusal(what, code, &error);
                        return if refused.is_missing() { Ok(None) } else { Err(refused) };
                    }
                    _ => {}
                }
            }
        }
    }

    /// Requests all objects of a kind; those for which `pick` returns `None` are skipped. A dump interrupted by a
    /// change is repeated, because it may be incomplete.
    pub(super) fn dump<T>(
        &mut self,
        message: &RouteNetlinkMessage,
        what: &str,
        mut pick: impl FnMut(RouteNetlinkMessage) -> Vec<T>,
    ) -> Result<Vec<T>, NetlinkError> {
        for _ in 0..DUMP_TRIES {
            let mut bytes = Vec::new();
            self.append(&mut bytes, message.clone(), NLM_F_DUMP);
            self.socket.send(&bytes, 0).map_err(socket_error("send"))?;
            let mut found = Vec::new();
            if self.read_dump(what, &mut |inner| found.extend(pick(inner)))? {
                return Ok(found);
            }
        }
        Err(NetlinkError::Answer {
            what: what.to_owned(),
            reason: format!("{DUMP_TRIES} lists in a row were interrupted by changes"),
        })
    }

    /// Returns whether the list is consistent.
    fn read_dump(&mut self, what: &str, take: &mut dyn FnMut(RouteNetlinkMessage)) -> Result<bool, NetlinkError> {
        let mut consistent = true;
        loop {
            for message in self.receive(what, self.sequence)? {
                consistent &= message.header.flags & NLM_F_DUMP_INTR == 0;
                match message.payload {
                    NetlinkPayload::InnerMessage(inner) => take(inner),
                    NetlinkPayload::Done(done) => match NonZeroI32::new(done.code) {
                        None => return Ok(consistent),
                        Some(code) => {
                            let mut error = ErrorMessage::default();
                            error.code = Some(code);
                            return Err(refusal(what, code, &error));
                        }
                    },
                    NetlinkPayload::Error(error) => {
                        if let Some(code) = error.code {
                            return Err(refusal(what, code, &error));
                        }
                    }
                    NetlinkPayload::Overrun(_) => consistent = false,
                    _ => {}
                }
            }
        }
    }

    fn append(&mut self, bytes: &mut Vec<u8>, message: RouteNetlinkMessage, flags: u16) {
        self.sequence = self.sequence.wrapping_add(1);
        let mut header = NetlinkHeader::default();
        header.flags = NLM_F_REQUEST | flags;
        header.sequence_number = self.sequence;
        let mut message = NetlinkMessage::new(header, NetlinkPayload::from(message));
        message.finalize();
        let start = bytes.len();
        // Each message begins at a multiple of four bytes (`NLMSG_ALIGN`).
        bytes.resize(start + message.buffer_len().next_multiple_of(4), 0);
        if let Some(room) = bytes.get_mut(start..start + message.buffer_len()) {
            message.serialize(room);
        }
    }

    /// The messages of a datagram that answer requests since `first`. Answers to an earlier failed call are skipped by
    /// their sequence numbers.
    fn receive(&mut self, what: &str, first: u32) -> Result<Vec<NetlinkMessage<RouteNetlinkMessage>>, NetlinkError> {
        self.buffer.clear();
        let length = loop {
            match self.socket.recv(&mut self.buffer, libc::MSG_TRUNC) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(NetlinkError::Socket { action: "receive", source: error }),
                Ok(length) => break length,
            }
        };
        if length > self.buffer.len() {
            self.buffer.reserve(length);
            return Err(NetlinkError::Answer {
                what: what.to_owned(),
                reason: format!("it has {length} bytes, more than there was room for; there is room now"),
            });
        }
        let unusable = |reason: String| NetlinkError::Answer { what: what.to_owned(), reason };
        let mut messages = Vec::new();
        let mut rest = self.buffer.as_slice();
        while !rest.is_empty() {
            let header = NetlinkBuffer::new_checked(rest).map_err(|error| unusable(error.to_string()))?;
            let length = header.length() as usize;
            let sequence = header.sequence_number();
            let one = rest.get(..length).unwrap_or(rest);
            rest = rest.get(length.next_multiple_of(4)..).unwrap_or_default();
            if sequence.wrapping_sub(first).cast_signed() < 0 {
                continue;
            }
            if self.sequence.wrapping_sub(sequence).cast_signed() < 0 {
                return Err(unusable(format!("sequence number {sequence} was not sent")));
            }
            match NetlinkMessage::deserialize(one) {
                Ok(message) => messages.push(message),
                // An object that cannot be decoded must not hide all others.
                Err(error) => {
                    tracing::warn!(kind = what, %error, "an object in the kernel's answer cannot be decoded and is skipped");
                }
            }
        }
        Ok(messages)
    }
}

fn refusal(what: &str, code: NonZeroI32, error: &ErrorMessage) -> NetlinkError {
    NetlinkError::Refused {
        what: what.to_owned(),
        errno: Errno::from_raw(code.get().abs()),
        message: extended_acknowledgement(&error.header),
    }
}

/// The kernel's message, from the attributes after the header of the rejected request.
fn extended_acknowledgement(bytes: &[u8]) -> Option<String> {
    NlasIterator::new(bytes.get(HEADER_LENGTH..)?)
        .flatten()
        .find(|attribute| attribute.kind() == NLMSGERR_ATTR_MSG)
        .map(|attribute| String::from_utf8_lossy(attribute.value()).trim_end_matches('\0').to_owned())
}
