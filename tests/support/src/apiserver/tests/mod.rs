//! The server against its two kinds of clients: `kube` in process, and `kubectl` over HTTP. And the project's watches, which
//! need a server.

mod in_process;
mod kubectl;
mod watches;
