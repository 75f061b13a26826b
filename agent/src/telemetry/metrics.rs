//! Metrics for Prometheus.
//!
//! [`METRICS`] declares them once, for serving and for the table in `agent/observing.md`. Gauges are gathered for each
//! scrape ([`Metric::sample`]); counters and histograms are global to the process.

use prometheus_client::encoding::prometheus_text;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;
use std::sync::LazyLock;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

pub use prometheus_text::CONTENT_TYPE;

/// Type of a metric.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A current value.
    Gauge,
    /// Increases from the start of the counting process.
    Counter,
    /// A distribution of durations, in buckets.
    Histogram,
}

/// The declaration of a metric.
#[derive(Debug, PartialEq, Eq)]
pub struct Metric {
    /// The served name.
    pub name: &'static str,
    /// The type.
    pub kind: Kind,
    /// Names of its labels.
    pub labels: &'static [&'static str],
    /// Description, without full stop.
    pub help: &'static str,
}

/// A gathered value of a metric.
#[derive(Debug, Clone, PartialEq)]
pub struct Sample {
    metric: &'static Metric,
    labels: Labels,
    value: f64,
}

type Labels = Vec<(&'static str, String)>;

impl Metric {
    /// A value with these labels, in the order of the declaration.
    #[must_use]
    pub fn sample<const N: usize>(&'static self, labels: [&str; N], value: f64) -> Sample {
        Sample { metric: self, labels: self.labelled(labels), value }
    }

    fn labelled<const N: usize>(&'static self, values: [&str; N]) -> Labels {
        debug_assert_eq!(self.labels.len(), N, "{}", self.name);
        self.labels.iter().copied().zip(values.map(str::to_owned)).collect()
    }
}

macro_rules! metrics {
    ($($name:ident $kind:ident $text:literal [$($label:literal),*] $help:literal;)+) => {
        $(#[doc = $help]
        pub const $name: &Metric =
            &Metric { name: $text, kind: Kind::$kind, labels: &[$($label),*], help: $help };)+

        /// Every metric.
        pub const METRICS: &[&Metric] = &[$($name),+];
    };
}

metrics! {
    BUILD_INFO Gauge "cistern_build_info" ["version"]
        "Always 1; the version of the process";
    READY Gauge "cistern_ready" []
        "1 while pods can be served, as in `cistern status`";
    LEASES Gauge "cistern_leases" ["state"]
        "Addresses of this node that are not free: `provisional`, `confirmed`, `owner`, `quarantined`, `reserved`";
    POD_CIDR_ADDRESSES Gauge "cistern_pod_cidr_addresses" ["cidr", "state"]
        "Addresses of a pod CIDR available to pods: `used`, `quarantined`, `free`";
    WAIT_SECONDS Gauge "cistern_wait_seconds" ["wait"]
        "Duration of a current wait; no sample if there is none";
    TARGET_ROWS Gauge "cistern_target_rows" ["target", "state"]
        "Rows of a reconciled target: `done`, `failing`";
    TARGET_SYNCED Gauge "cistern_target_synced" ["target"]
        "1 after the first full pass of a target";
    LEADER Gauge "cistern_leader" []
        "1 while this process is the operators' leader; no sample if it does not take part in the election";
    PACKETS Counter "cistern_datapath_packets_total" ["counter"]
        "Packets by counter of the kernel programs; not reset by restarts of the agent";
    CNI_REQUESTS Histogram "cistern_cni_request_duration_seconds" ["verb", "result"]
        "Calls of the CNI plugin: `add`, `confirm`, `del`, `check`, `gc`; `ok` or the reason of the error";
    CNI_ADD Histogram "cistern_cni_add_duration_seconds" []
        "Duration of ADD, from the start of the plugin to the confirmation";
    KUBERNETES_CALLS Counter "cistern_kubernetes_calls_total" ["verb", "kind", "result"]
        "Calls of the API server, except watches: `ok`, the HTTP status, `timeout`, `not-leader` or `unreachable`";
    EVENTS Counter "cistern_events_total" ["reason", "result"]
        "Kubernetes events: `written`, `failed` (retried) or `dropped`";
}

/// From a millisecond to what a runtime does not wait for any more.
const BUCKETS: [f64; 12] = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 30.0];

type Histograms = Family<Labels, Histogram, fn() -> Histogram>;

fn histogram() -> Histogram {
    Histogram::new(BUCKETS)
}

/// What is counted as it happens.
struct Counted {
    cni_requests: Histograms,
    cni_add: Histograms,
    kubernetes_calls: Family<Labels, Counter>,
    events: Family<Labels, Counter>,
}

/// A process has one agent, one operator, or both.
static COUNTED: LazyLock<Counted> = LazyLock::new(|| Counted {
    cni_requests: Family::new_with_constructor(histogram),
    cni_add: Family::new_with_constructor(histogram),
    kubernetes_calls: Family::default(),
    events: Family::default(),
});

/// A call of the plugin was answered.
pub fn cni_request(verb: &str, result: &str, took: Duration) {
    COUNTED.cni_requests.get_or_create(&CNI_REQUESTS.labelled([verb, result])).observe(took.as_secs_f64());
}

/// An ADD has ended well.
pub fn cni_add(took: Duration) {
    COUNTED.cni_add.get_or_create(&CNI_ADD.labelled([])).observe(took.as_secs_f64());
}

/// The API server was called.
pub fn kubernetes_call(verb: &str, kind: &str, result: &str) {
    COUNTED.kubernetes_calls.get_or_create(&KUBERNETES_CALLS.labelled([verb, kind, result])).inc();
}

/// An event was written, or not.
pub fn event(reason: &str, result: &str) {
    COUNTED.events.get_or_create(&EVENTS.labelled([reason, result])).inc();
}

/// All metrics in the text format of Prometheus ([`CONTENT_TYPE`]), gathered and counted.
#[must_use]
pub fn render(gathered: &[Sample]) -> String {
    let mut registry = Registry::default();
    for metric in METRICS {
        let samples = gathered.iter().filter(|sample| sample.metric == *metric);
        // The encoder appends the suffix and the full stop.
        let (name, help) = (metric.name.trim_end_matches("_total"), metric.help);
        match metric.kind {
            Kind::Gauge => {
                let family = Family::<Labels, Gauge<f64, AtomicU64>>::default();
                for sample in samples {
                    family.get_or_create(&sample.labels).set(sample.value);
                }
                registry.register(name, help, family);
            }
            Kind::Counter if *metric == KUBERNETES_CALLS => {
                registry.register(name, help, COUNTED.kubernetes_calls.clone());
            }
            Kind::Counter if *metric == EVENTS => registry.register(name, help, COUNTED.events.clone()),
            Kind::Counter => {
                let family = Family::<Labels, Counter<f64, AtomicU64>>::default();
                for sample in samples {
                    family.get_or_create(&sample.labels).inc_by(sample.value);
                }
                registry.register(name, help, family);
            }
            Kind::Histogram if *metric == CNI_ADD => registry.register(name, help, COUNTED.cni_add.clone()),
            Kind::Histogram => registry.register(name, help, COUNTED.cni_requests.clone()),
        }
    }
    let mut text = String::new();
    // Writing to a string cannot fail.
    let _ = prometheus_text::encode(&mut text, &registry);
    text
}

/// The table of metrics for the documentation.
#[must_use]
pub fn markdown() -> String {
    let mut text = HEAD.to_owned();
    for metric in METRICS {
        let labels = metric.labels.iter().map(|label| format!("`{label}`")).collect::<Vec<_>>().join(", ");
        let kind = match metric.kind {
            Kind::Gauge => "gauge",
            Kind::Counter => "counter",
            Kind::Histogram => "histogram",
        };
        text.push_str(&format!("| `{}` | {kind} | {labels} | {} |\n", metric.name, metric.help));
    }
    text
}

const HEAD: &str = "\
## Metrics

Served for Prometheus at `/metrics` of `prometheus-serve-addr` (agent) and `operator-prometheus-serve-addr` (operator); both are
off unless they are set. Text format 0.0.4. Times are in seconds. Labels take a bounded number of values: no pod, no address, no
container. `cistern_wait_seconds` above 300 and a `cistern_ready` of 0 are worth an alert.

| metric | kind | labels | meaning |
|---|---|---|---|
";

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn names_follow_the_conventions() {
        let names: BTreeSet<&str> = METRICS.iter().map(|metric| metric.name).collect();
        assert_eq!(names.len(), METRICS.len());
        for metric in METRICS {
            assert!(metric.name.starts_with("cistern_"), "{}", metric.name);
            assert_eq!(metric.kind == Kind::Counter, metric.name.ends_with("_total"), "{}", metric.name);
            assert_eq!(metric.kind == Kind::Histogram, metric.name.ends_with("_duration_seconds"), "{}", metric.name);
            assert!(!metric.help.ends_with('.'), "the encoder adds it: {}", metric.name);
        }
    }

    #[test]
    fn what_was_gathered_and_what_was_counted_is_served() {
        cni_request("add", "ok", Duration::from_millis(3));
        kubernetes_call("create", "Test", "409");
        let text = render(&[
            LEASES.sample(["confirmed"], 7.0),
            PACKETS.sample(["masqueraded"], 12.0),
            WAIT_SECONDS.sample(["a \"quoted\" name"], 1.5),
        ]);
        for line in [
            "# TYPE cistern_leases gauge",
            "cistern_leases{state=\"confirmed\"} 7.0",
            "# TYPE cistern_datapath_packets_total counter",
            "cistern_datapath_packets_total{counter=\"masqueraded\"} 12.0",
            "cistern_wait_seconds{wait=\"a \\\"quoted\\\" name\"} 1.5",
            "cistern_cni_request_duration_seconds_bucket{verb=\"add\",result=\"ok\",le=\"0.005\"} 1",
            "cistern_kubernetes_calls_total{verb=\"create\",kind=\"Test\",result=\"409\"} 1",
        ] {
            assert!(text.contains(line), "{line:?} is not in\n{text}");
        }
    }
}
