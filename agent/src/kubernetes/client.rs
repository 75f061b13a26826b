//! Connecting to the API server.

use super::KubernetesError;
pub use kube::Client;
use kube::Config;
use std::path::Path;
use std::time::Duration;

/// A client made from a kubeconfig, or, when `kubeconfig` is none, from the pod's service account, else
/// from `KUBECONFIG` or `~/.kube/config`.
/// No call is made: the API server may be down.
///
/// # Errors
/// [`KubernetesError::Config`] when there is no usable configuration.
pub async fn connect(kubeconfig: Option<&Path>, api_server: Option<&str>) -> Result<Client, KubernetesError> {
    let (path, config) = match kubeconfig {
        Some(file) => {
            let path = file.display().to_string();
            let error = |reason: String| KubernetesError::Config { path: path.clone(), reason };
            let read = kube::config::Kubeconfig::read_from(file).map_err(|e| error(e.to_string()))?;
            let config = Config::from_custom_kubeconfig(read, &kube::config::KubeConfigOptions::default())
                .await
                .map_err(|e| error(e.to_string()))?;
            (path, config)
        }
        None => {
            let path = "service account or KUBECONFIG".to_owned();
            let config = match Config::incluster() {
                Ok(config) => config,
                Err(outside) => Config::from_kubeconfig(&kube::config::KubeConfigOptions::default())
                    .await
                    .map_err(|e| KubernetesError::Config { path: path.clone(), reason: format!("{outside}; {e}") })?,
            };
            (path, config)
        }
    };
    let error = |reason: String| KubernetesError::Config { path: path.clone(), reason };
    let mut config = config;
    if let Some(server) = api_server {
        config.cluster_url = server.parse().map_err(|e| error(format!("API server {server:?}: {e}")))?;
    }
    config.connect_timeout = Some(Duration::from_secs(5));
    // Callers retry, and publish what they wait for; retries in the client would be invisible.
    config.default_retry = false;
    Client::try_from(config).map_err(|e| error(e.to_string()))
}
