//! The server against its two kinds of clients: `kube` in process, and `kubectl` over HTTP.

mod in_process;
mod kubectl;
