//! Applying the CRDs (`architecture` decision 15): Helm never upgrades its own.

use super::{KubernetesError, Leadership, OPERATOR, write};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::{Patch, PatchParams};
use kube::{Api, Client, ResourceExt};
use std::time::Duration;

/// Makes the API server know every kind that this build uses, in this build's version or a newer one.
///
/// # Errors
/// The first call that failed; those before it have their effect.
pub async fn apply(client: &Client, leadership: &Leadership) -> Result<(), KubernetesError> {
    let api: Api<CustomResourceDefinition> = Api::all(client.clone());
    for wanted in cistern_crds::all() {
        let name = wanted.name_any();
        let existing = write("get", KIND, &name, api.get_opt(&name)).await?;
        if let Some(existing) = existing.filter(cistern_crds::is_newer) {
            let version = cistern_crds::schema_version(&existing);
            tracing::info!(crd = name, version, "a newer CRD is installed and left alone");
            continue;
        }
        let params = PatchParams::apply(OPERATOR).force();
        leadership.write("apply", KIND, &name, api.patch(&name, &params, &Patch::Apply(wanted))).await?;
        established(&api, &name).await?;
    }
    Ok(())
}

const KIND: &str = "CustomResourceDefinition";

/// Waits until objects of the kind can be written: a few seconds at most on a healthy API server.
async fn established(api: &Api<CustomResourceDefinition>, name: &str) -> Result<(), KubernetesError> {
    const TRIES: u32 = 50;
    for _ in 0..TRIES {
        let now = write("get", KIND, name, api.get_opt(name)).await?;
        let conditions = now.and_then(|crd| crd.status).and_then(|status| status.conditions).unwrap_or_default();
        if conditions.iter().any(|condition| condition.type_ == "Established" && condition.status == "True") {
            return Ok(());
        }
        tokio::time::sleep(POLL).await;
    }
    Err(KubernetesError::Timeout { verb: "establish", kind: KIND, name: name.to_owned(), timeout: POLL * TRIES })
}

const POLL: Duration = Duration::from_millis(200);
