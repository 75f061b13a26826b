//! Requests to an API server from this process. `kubectl` needs up to half a second of CPU time before its request, and
//! waits poll often: on two processors they would keep the cluster busy.

use anyhow::{Context, Result};
use cistern::netlink::namespace::Namespace;
use kube::api::{ListParams, Request};
use serde_json::Value;
use std::path::Path;
use std::time::Duration;

/// Timeout of a request.
const ANSWERS_WITHIN: Duration = Duration::from_secs(10);

/// The text at a path such as `/readyz`, as a kubeconfig's user. `network` is the network namespace of the server, if
/// it is not ours.
pub(super) fn text(kubeconfig: &Path, network: Option<&Namespace>, path: &str) -> Result<String> {
    let request = http::Request::get(path).body(Vec::new())?;
    send(kubeconfig, network, request).with_context(|| format!("GET {path}"))
}

/// The objects of a collection, given by its path such as `/api/v1/nodes`.
pub(super) fn list(
    kubeconfig: &Path,
    network: Option<&Namespace>,
    path: &str,
    params: &ListParams,
) -> Result<Vec<Value>> {
    let answer = send(kubeconfig, network, Request::new(path).list(params)?);
    let mut list: Value = serde_json::from_str(&answer.with_context(|| format!("list {path}"))?)?;
    let items = list.get_mut("items").map(Value::take).with_context(|| format!("{path} is no collection"))?;
    Ok(serde_json::from_value(items)?)
}

fn send(kubeconfig: &Path, network: Option<&Namespace>, request: http::Request<Vec<u8>>) -> Result<String> {
    let ask = || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        runtime.block_on(async {
            let kubeconfig = kube::config::Kubeconfig::read_from(kubeconfig)?;
            let mut config = kube::Config::from_custom_kubeconfig(kubeconfig, &Default::default()).await?;
            // Waits retry themselves.
            config.default_retry = false;
            let client = kube::Client::try_from(config)?;
            Ok(tokio::time::timeout(ANSWERS_WITHIN, client.request_text(request)).await??)
        })
    };
    match network {
        Some(network) => network.run(ask)?,
        None => ask(),
    }
}
