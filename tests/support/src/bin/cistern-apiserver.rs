//! The small API server as a process, for the demo and for `kubectl`.

use std::net::SocketAddr;
use std::path::PathBuf;

use anyhow::{Context as _, Result};
use cistern_tests::apiserver::{ApiServer, Options, kubeconfig, parse_manifest, serve};
use clap::Parser;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};

/// Serves a small Kubernetes API without TLS and authorization, until SIGTERM or SIGINT. For tests only.
#[derive(Parser)]
#[command(name = "cistern-apiserver")]
struct Arguments {
    /// Address to listen on; port 0 selects a free one
    #[arg(long, default_value = "127.0.0.1:0")]
    listen: SocketAddr,
    /// Path at which to write a kubeconfig once the server listens
    #[arg(long)]
    kubeconfig: Option<PathBuf>,
    /// YAML file with initial objects; may be given several times
    #[arg(long)]
    objects: Vec<PathBuf>,
}

#[tokio::main]
async fn main() -> Result<()> {
    let Arguments { listen, kubeconfig: kubeconfig_path, objects } = Arguments::parse();
    let server = ApiServer::new(Options { epoch: jiff::Timestamp::now(), ..Options::default() });
    for path in objects {
        let text = std::fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))?;
        for object in parse_manifest(&text).with_context(|| format!("in {}", path.display()))? {
            server.create(&object).with_context(|| format!("creating an object of {}: {object}", path.display()))?;
        }
    }
    let listener = TcpListener::bind(listen).await.with_context(|| format!("listening on {listen}"))?;
    let address = listener.local_addr().context("reading the listening address")?;
    if let Some(path) = kubeconfig_path {
        // Renamed into place, so that a process waiting for the file reads all of it.
        let partial = path.with_extension("partial");
        std::fs::write(&partial, kubeconfig(address))
            .and_then(|()| std::fs::rename(&partial, &path))
            .with_context(|| format!("writing {}", path.display()))?;
    }
    let mut terminate = signal(SignalKind::terminate()).context("listening for SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("listening for SIGINT")?;
    println!("listening on http://{address}");
    serve(server, listener, async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
    })
    .await
    .context("serving")
}
