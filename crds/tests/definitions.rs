//! The definitions as the API server and other clients see them.

use cistern_crds::{
    CiliumNode, CiliumNodeSpec, CiliumNodeStatus, IpamSpec, NodeAddress, ReleaseState, SCHEMA_VERSION,
    SCHEMA_VERSION_LABEL, all, is_newer, schema_version, yaml,
};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use serde_json::{Value, json};

const SAMPLES: [(&str, &str); 2] = [
    ("cilium-azure.json", include_str!("../samples/cilium-azure.json")),
    ("cilium-cluster-pool.json", include_str!("../samples/cilium-cluster-pool.json")),
];

fn node(text: &str) -> Result<CiliumNode, serde_json::Error> {
    serde_json::from_str(text)
}

#[test]
fn committed_yaml_is_the_generated_one() {
    let committed = [("ciliumnodes.yaml".to_owned(), include_str!("../ciliumnodes.yaml").to_owned())];
    assert!(yaml().unwrap() == committed, "run `cargo run -p cistern-crds --example gen`");
    for (definition, (_, text)) in all().iter().zip(committed) {
        let read: CustomResourceDefinition = serde_saphyr::from_str(&text).unwrap();
        assert_eq!(&read, definition, "the file says what is applied");
    }
}

#[test]
fn objects_of_other_writers_pass_through_unchanged() {
    for (name, text) in SAMPLES {
        let before: Value = serde_json::from_str(text).unwrap();
        let after = serde_json::to_value(node(text).unwrap()).unwrap();
        assert_eq!(after, before, "{name}");
    }
}

#[test]
fn fields_are_read_under_their_names() {
    let [(_, azure), (_, pool)] = SAMPLES;
    let pool = node(pool).unwrap();
    assert_eq!(pool.spec.ipam.pod_cidrs, ["10.244.1.0/24", "fd00:244:1::/120"]);
    let pools = pool.spec.ipam.pools.unwrap();
    assert_eq!(pools.requested[1].needed.ipv6_addrs, Some(16));
    assert_eq!((pools.allocated[0].allow_first_ip, pools.allocated[0].allow_last_ip), (Some(true), Some(false)));
    let error = pool.status.unwrap().ipam.operator_status.unwrap().error;
    assert_eq!(error.as_deref(), Some("allocator full"));

    let azure = node(azure).unwrap();
    assert_eq!(azure.spec.ipam.pool["10.240.0.18"].owner.as_deref(), Some("default/db-0"));
    assert_eq!(azure.spec.ipam.max_above_watermark, Some(2));
    assert_eq!(azure.spec.boot_id.as_deref(), Some("7a1d6a8f-3c84-4f6b-b7a1-6d7e9f1c2b3a"));
    let status = azure.status.unwrap();
    assert_eq!(status.ipam.release_ips["10.240.0.20"], ReleaseState::ReadyForRelease);
    assert_eq!(status.ipam.release_ips["10.240.0.23"], ReleaseState::Other("a-later-word".to_owned()));
    let interface = &status.azure.unwrap().interfaces[0];
    assert_eq!(interface.addresses[1].state.as_deref(), Some("updating"));
    assert_eq!(interface.gateway_ip.as_deref(), Some("10.240.0.1"));
    assert_eq!(interface.subnet.as_ref().unwrap().cidr.as_deref(), Some("10.240.0.0/16"));
}

/// An apply owns every field in it, so an empty field must be omitted.
#[test]
fn unset_fields_are_omitted() {
    let mut node = CiliumNode::new("node-a", CiliumNodeSpec::default());
    node.status = Some(CiliumNodeStatus::default());
    let written = serde_json::to_value(&node).unwrap();
    assert_eq!(written["spec"], json!({}));
    assert_eq!(written["status"], json!({}));

    let address = NodeAddress { kind: "InternalIP".to_owned(), ip: "10.0.0.1".to_owned(), ..NodeAddress::default() };
    let ipam = IpamSpec { pod_cidrs: vec!["10.1.0.0/24".to_owned()], ..IpamSpec::default() };
    let spec = CiliumNodeSpec { addresses: vec![address], ipam, ..CiliumNodeSpec::default() };
    let expected =
        json!({ "addresses": [{ "type": "InternalIP", "ip": "10.0.0.1" }], "ipam": { "podCIDRs": ["10.1.0.0/24"] } });
    assert_eq!(serde_json::to_value(spec).unwrap(), expected);
}

#[test]
fn definition_matches_cilium_s() {
    let definitions = all();
    let [definition] = definitions else { panic!("{} definitions", definitions.len()) };
    assert_eq!(definition.metadata.name.as_deref(), Some("ciliumnodes.cilium.io"));
    let spec = &definition.spec;
    assert_eq!((spec.group.as_str(), spec.scope.as_str()), ("cilium.io", "Cluster"));
    let names = &spec.names;
    assert_eq!(
        (names.kind.as_str(), names.plural.as_str(), names.singular.as_deref()),
        ("CiliumNode", "ciliumnodes", Some("ciliumnode"))
    );
    assert_eq!(names.short_names.as_deref(), Some(&["cn".to_owned(), "ciliumn".to_owned()][..]));
    let [version] = spec.versions.as_slice() else { panic!("{} versions", spec.versions.len()) };
    assert_eq!((version.name.as_str(), version.served, version.storage), ("v2", true, true));
    assert!(version.subresources.as_ref().is_some_and(|subresources| subresources.status.is_some()));
    let columns = version.additional_printer_columns.as_ref().unwrap();
    let columns: Vec<_> = columns.iter().map(|column| column.name.as_str()).collect();
    assert_eq!(columns, ["CiliumInternalIP", "InternalIP", "PodCIDRs", "Error", "Age"]);
}

/// Requirements on a structural schema (Kubernetes' CustomResourceDefinition documentation), and that nothing is
/// pruned.
#[test]
fn schema_is_structural_and_keeps_unknown_fields() {
    fn walk(path: &str, schema: &Value, fields: &mut usize) {
        assert!(schema["type"].is_string(), "{path} has no type");
        assert!(schema.get("$ref").is_none() && schema.get("anyOf").is_none(), "{path}");
        let (properties, additional) = (schema.get("properties"), schema.get("additionalProperties"));
        assert!(properties.is_none() || additional.is_none(), "{path} has both properties and additionalProperties");
        if let Some(properties) = properties.and_then(Value::as_object) {
            // The top level is the API server's own.
            assert!(
                path.is_empty() || schema["x-kubernetes-preserve-unknown-fields"] == json!(true),
                "{path} is pruned"
            );
            for (name, property) in properties {
                *fields += 1;
                assert!(property["description"].is_string(), "{path}.{name} is not described");
                walk(&format!("{path}.{name}"), property, fields);
            }
        }
        for inner in ["items", "additionalProperties"] {
            if let Some(inner_schema) = schema.get(inner) {
                walk(&format!("{path}[]"), inner_schema, fields);
            }
        }
    }
    for definition in all() {
        let version = &definition.spec.versions[0];
        let schema =
            serde_json::to_value(version.schema.as_ref().unwrap().open_api_v3_schema.as_ref().unwrap()).unwrap();
        let mut fields = 0;
        walk("", &schema, &mut fields);
        assert!(fields > 40, "{fields} fields");
        let ipam = &schema["properties"]["spec"]["properties"]["ipam"]["properties"];
        assert_eq!(ipam["podCIDRs"]["items"], json!({ "type": "string", "format": "cidr" }));
        assert_eq!(ipam["pre-allocate"]["minimum"], json!(0.0));
        let words = &schema["properties"]["status"]["properties"]["ipam"]["properties"]["release-ips"]["additionalProperties"]
            ["enum"];
        assert_eq!(words, &json!(["marked-for-release", "ready-for-release", "do-not-release", "released"]));
    }
}

#[test]
fn newer_definition_is_distinguished_from_ours_and_cilium_s() {
    for definition in all() {
        assert_eq!((schema_version(definition), is_newer(definition)), (SCHEMA_VERSION, false));
        let labelled = |key: &str, value: &str| {
            let mut found = definition.clone();
            found.metadata.labels = Some([(key.to_owned(), value.to_owned())].into());
            found
        };
        assert!(is_newer(&labelled(SCHEMA_VERSION_LABEL, &(SCHEMA_VERSION + 1).to_string())));
        assert_eq!(schema_version(&labelled("io.cilium.k8s.crd.schema.version", "1.32.5")), 0);
        assert!(!is_newer(&labelled(SCHEMA_VERSION_LABEL, "banana")));
    }
}
