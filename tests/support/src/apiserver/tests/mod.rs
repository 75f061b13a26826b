//! The server with its two kinds of clients: `kube` in process, and `kubectl` over HTTP. Also the project's watches,
//! which require a server.

mod in_process;
mod kubectl;
mod watches;
