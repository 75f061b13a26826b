//! The server over HTTP, and a kubeconfig for it.

use std::future::Future;
use std::io;
use std::net::SocketAddr;

use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use tokio::net::TcpListener;
use tokio::task::JoinSet;

use super::{ApiServer, read_body};

/// Serves HTTP/1.1 without TLS on `listener` until `shutdown` completes; open connections are then closed, as when a
/// process terminates. Over HTTP a client's name is the first word of its `User-Agent`.
///
/// # Errors
/// The listener fails.
pub async fn serve(server: ApiServer, listener: TcpListener, shutdown: impl Future<Output = ()>) -> io::Result<()> {
    let mut connections = JoinSet::new();
    let mut shutdown = std::pin::pin!(shutdown);
    loop {
        let (stream, _) = tokio::select! {
            () = &mut shutdown => return Ok(()),
            accepted = listener.accept() => accepted?,
            Some(_) = connections.join_next() => continue,
        };
        let server = server.clone();
        connections.spawn(async move {
            let service = service_fn(|request: http::Request<hyper::body::Incoming>| {
                let server = server.clone();
                async move {
                    let (parts, body) = request.into_parts();
                    let body = read_body(body).await?;
                    server.answer(None, &parts, &body).await
                }
            });
            // A client's disconnect, or a fault that resets the connection, is not an error of the server.
            let _ = http1::Builder::new().serve_connection(TokioIo::new(stream), service).await;
        });
    }
}

/// A kubeconfig for the server at `address`, with one context.
pub fn kubeconfig(address: SocketAddr) -> String {
    format!(
        "apiVersion: v1\n\
         kind: Config\n\
         clusters:\n\
         - name: cistern-test\n\
        \x20 cluster:\n\
        \x20   server: http://{address}\n\
         users:\n\
         - name: anyone\n\
        \x20 user: {{}}\n\
         contexts:\n\
         - name: cistern-test\n\
        \x20 context:\n\
        \x20   cluster: cistern-test\n\
        \x20   user: anyone\n\
         current-context: cistern-test\n"
    )
}
