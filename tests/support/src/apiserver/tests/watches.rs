use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use cistern::clock::Clock;
use cistern::kubernetes::views;
use cistern::kubernetes::watch::{Selection, View, Which, run};
use cistern::tables::rows::{CiliumNodeRow, ObjectKey};
use cistern::tables::{Table, Waits};
use k8s_openapi::api::core::v1::ConfigMap;
use kube::core::PartialObjectMeta;
use kube::{Resource, ResourceExt as _};
use serde_json::{Value, json};
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

use crate::apiserver::{ApiServer, Options};

/// A watch that runs until the test ends, and its table.
fn watch<K, Row>(server: &ApiServer, selection: Selection, view: View<K, Row>) -> Arc<Table<ObjectKey, Row>>
where
    K: Resource<DynamicType = ()> + Clone + serde::de::DeserializeOwned + std::fmt::Debug + Send + 'static,
    Row: Clone + PartialEq + std::fmt::Debug + Send + Sync + 'static,
{
    let table = Arc::new(Table::new("watched"));
    let waits = Waits::new(Clock::following_runtime(jiff::Timestamp::UNIX_EPOCH));
    let client = server.client_as("watcher");
    tokio::spawn(run("watched", client, selection, Arc::clone(&table), view, waits, CancellationToken::new()));
    table
}

/// Labels and data of ConfigMaps.
fn contents() -> View<ConfigMap, (Option<String>, Option<String>)> {
    let text = |map: Option<&BTreeMap<String, String>>| map.and_then(|map| map.get("k")).cloned();
    View {
        read: Box::new(move |map| Ok((text(map.metadata.labels.as_ref()), text(map.data.as_ref())))),
        unreadable: Box::new(|kept, _, _| kept),
    }
}

fn config_map(namespace: &str, name: &str, label: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "ConfigMap",
        "metadata": {"namespace": namespace, "name": name, "labels": {"k": label}}, "data": {"k": "v"},
    })
}

fn key(namespace: &str, name: &str) -> ObjectKey {
    ObjectKey { namespace: namespace.to_owned(), name: name.to_owned() }
}

fn keys<Row>(table: &Table<ObjectKey, Row>) -> Vec<ObjectKey>
where
    Row: Clone + PartialEq,
{
    table.snapshot().rows.keys().cloned().collect()
}

#[tokio::test(start_paused = true)]
async fn namespaced_objects_are_rows_of_their_own_and_leave_with_their_selection() {
    let server = ApiServer::new(Options::default());
    for (namespace, name, label) in [("default", "a", "1"), ("kube-system", "a", "1"), ("default", "b", "2")] {
        server.create(&config_map(namespace, name, label)).unwrap();
    }
    let everywhere = watch(&server, Selection::from(Which::All).with_labels("k=1"), contents());
    let here = watch(&server, Selection::from(Which::All).in_namespace("default"), contents());
    let named = Selection::from(Which::Named("a".to_owned())).in_namespace("default");
    let named = watch(&server, named, contents());
    let fields = Selection::from(Which::All).with_fields("metadata.name=a").with_labels("k=1");
    let fields = watch(&server, fields, contents());
    sleep(Duration::from_secs(1)).await;
    assert_eq!(keys(&everywhere), [key("default", "a"), key("kube-system", "a")]);
    assert_eq!(keys(&here), [key("default", "a"), key("default", "b")]);
    assert_eq!(keys(&named), [key("default", "a")]);
    assert_eq!(keys(&fields), [key("default", "a"), key("kube-system", "a")]);

    server.patch("configmap", "default", "a", &json!({"metadata": {"labels": {"k": "2"}}})).unwrap();
    server.patch("configmap", "default", "b", &json!({"metadata": {"labels": {"k": "1"}}})).unwrap();
    server.delete("configmap", "kube-system", "a").unwrap();
    sleep(Duration::from_secs(1)).await;
    assert_eq!(keys(&everywhere), [key("default", "b")]);
    assert_eq!(keys(&here), [key("default", "a"), key("default", "b")]);
    assert_eq!(keys(&named), [key("default", "a")]);
    assert_eq!(keys(&fields), []);
}

/// Labels of ConfigMaps, and the kind that the server sent.
fn metadata() -> View<PartialObjectMeta<ConfigMap>, (String, String)> {
    View {
        read: Box::new(|object| {
            let label = object.labels().get("k").cloned().unwrap_or_default();
            Ok((label, object.types.as_ref().map(|types| types.kind.clone()).unwrap_or_default()))
        }),
        unreadable: Box::new(|kept, _, _| kept),
    }
}

#[tokio::test(start_paused = true)]
async fn a_watch_of_metadata_gets_nothing_else() {
    let server = ApiServer::new(Options::default());
    server.create(&config_map("default", "a", "1")).unwrap();
    let whole = watch(&server, Which::All.into(), contents());
    let table = watch(&server, Selection::from(Which::All).metadata_only(), metadata());
    sleep(Duration::from_secs(1)).await;
    // From the list, then from the watch.
    for label in ["1", "2"] {
        let expected = (Some(label.to_owned()), Some("v".to_owned()));
        assert_eq!(whole.snapshot().rows, BTreeMap::from([(key("default", "a"), expected)]));
        let expected = (label.to_owned(), "PartialObjectMetadata".to_owned());
        assert_eq!(table.snapshot().rows, BTreeMap::from([(key("default", "a"), expected)]));
        server.patch("configmap", "default", "a", &json!({"metadata": {"labels": {"k": "2"}}})).unwrap();
        sleep(Duration::from_secs(1)).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_selection_finds_out_that_its_server_went_back() {
    let server = ApiServer::new(Options::default());
    server.create(&config_map("default", "a", "1")).unwrap();
    let backup = server.snapshot().unwrap();
    server.create(&config_map("default", "b", "1")).unwrap();
    let selection = Selection::from(Which::All).in_namespace("default").with_labels("k=1").metadata_only();
    let table = watch(&server, selection, metadata());
    sleep(Duration::from_secs(1)).await;
    assert_eq!(keys(&table), [key("default", "a"), key("default", "b")]);
    server.restore_from(&backup).unwrap();
    sleep(Duration::from_secs(60)).await;
    assert_eq!(keys(&table), [key("default", "a")]);
}

#[tokio::test(start_paused = true)]
async fn an_agent_among_many_nodes_wakes_only_for_what_it_acts_on() {
    const NODES: usize = 300;
    let server = ApiServer::new(Options::default());
    for definition in cistern_crds::all() {
        server.create(&serde_json::to_value(definition).unwrap()).unwrap();
    }
    let object = |number: usize| {
        json!({
            "apiVersion": "cilium.io/v2", "kind": "CiliumNode", "metadata": {"name": format!("n{number}")},
            "spec": {"ipam": {"podCIDRs": [format!("10.{}.{}.0/24", number / 256, number % 256)]}},
        })
    };
    for number in 0..NODES {
        server.create(&object(number)).unwrap();
    }
    let table: Arc<Table<String, CiliumNodeRow>> = Arc::new(Table::new("cilium-nodes"));
    let waits = Waits::new(Clock::following_runtime(jiff::Timestamp::UNIX_EPOCH));
    let (client, view) = (server.client_as("agent"), views::cilium_nodes_for("n0"));
    let which = Which::AllOf("n0".to_owned());
    tokio::spawn(run("ciliumnodes", client, which, Arc::clone(&table), view, waits, CancellationToken::new()));
    let mut reader = table.reader();
    let before = reader.synced().await;
    assert_eq!(before.rows.len(), NODES);
    for number in 1..NODES {
        let annotation = json!({"metadata": {"annotations": {"somebody/else": "changed"}}});
        server.patch("ciliumnode", "", &format!("n{number}"), &annotation).unwrap();
    }
    sleep(Duration::from_secs(1)).await;
    assert_eq!(reader.snapshot().revision, before.revision, "nothing that this agent acts on has changed");
    server.patch("ciliumnode", "", "n7", &json!({"spec": {"ipam": {"podCIDRs": ["10.99.0.0/24"]}}})).unwrap();
    server.delete("ciliumnode", "", "n8").unwrap();
    sleep(Duration::from_secs(1)).await;
    let after = reader.snapshot();
    let changed: Vec<&str> = after.rows.changes_from(&before.rows).map(|change| change.key.as_str()).collect();
    assert_eq!(changed, ["n7", "n8"]);
}
