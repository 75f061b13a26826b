//! Validation of values against each other and against what Cistern implements.

use super::value::Value as _;
use super::{Command, IpamMode, Settings, SettingsError, Warning};
use crate::ip::overlaps;
use ipnet::{IpNet, Ipv4Net};
use std::time::Duration;

/// Minimum IPv4 MTU that every host must accept (RFC 791).
const LEAST_MTU: u16 = 576;

/// A shorter timeout would expire connections that only send keep-alives (tcp_keepalive_time is 7200 s).
const LEAST_TCP_IDLE_TIMEOUT: Duration = Duration::from_secs(7260);

/// Sizes that Cilium accepts for its NAT map.
const NAT_MAP_SIZES: std::ops::RangeInclusive<u32> = 1 << 10..=1 << 24;

/// Validates the settings as a whole. Values with one obvious interpretation are corrected with a warning, others
/// rejected.
pub(super) fn validate(
    settings: &mut Settings,
    command: Command,
    warnings: &mut Vec<Warning>,
    errors: &mut Vec<SettingsError>,
) {
    let mut check = Check { warnings, errors };
    check.families(settings);
    check.names(settings);
    check.node_cidrs(settings);
    check.addresses(settings);
    check.masquerade(settings);
    if command == Command::Operator || settings.leader_election {
        if settings.ipam == IpamMode::ClusterPool {
            check.pool(settings);
        }
        check.election(settings);
    }
}

struct Check<'a> {
    warnings: &'a mut Vec<Warning>,
    errors: &'a mut Vec<SettingsError>,
}

impl Check<'_> {
    fn refuse(&mut self, settings: &Settings, key: &str, reason: impl Into<String>) {
        let value = settings
            .rendered()
            .into_iter()
            .find_map(|(name, value)| (name == key).then_some(value))
            .unwrap_or_default();
        self.errors.push(SettingsError {
            key: key.to_owned(),
            value,
            source: settings.source(key),
            reason: reason.into(),
        });
    }

    fn warn(&mut self, settings: &Settings, key: &str, text: impl AsRef<str>) {
        let message = format!("{key} ({}): {}", settings.source(key), text.as_ref());
        self.warnings.push(Warning { keys: vec![key.to_owned()], message });
    }

    fn families(&mut self, settings: &Settings) {
        if !settings.enable_ipv4 {
            self.refuse(settings, "enable-ipv4", "expected `true`: IPv4 is the only family implemented");
        }
        if settings.enable_ipv6 {
            self.refuse(
                settings,
                "enable-ipv6",
                "expected `false`: IPv6 is not implemented; pods would start without an IPv6 address",
            );
        }
    }

    fn names(&mut self, settings: &Settings) {
        if !is_subdomain(&settings.node_name) {
            self.refuse(
                settings,
                "node-name",
                "expected the name of a Node: lower case letters, digits, `-` and `.`, at most 253 of them",
            );
        }
        if !is_label(&settings.namespace) {
            self.refuse(
                settings,
                "k8s-namespace",
                "expected the name of a namespace: lower case letters, digits and `-`, at most 63 of them",
            );
        }
        if !settings.log_options.ignored.is_empty() {
            let options = settings.log_options.ignored.join(", ");
            self.warn(settings, "log-opt", format!("{options}: ignored; logs are written to standard error"));
        }
    }

    fn node_cidrs(&mut self, settings: &Settings) {
        let required = [
            ("k8s-require-ipv4-pod-cidr", settings.require_ipv4_pod_cidr),
            ("k8s-require-ipv6-pod-cidr", settings.require_ipv6_pod_cidr),
        ];
        if settings.ipam == IpamMode::Kubernetes {
            return;
        }
        for (key, _) in required.into_iter().filter(|(_, on)| *on) {
            let mode = settings.ipam.name();
            self.warn(
                settings,
                key,
                format!("no effect with ipam={mode}: Nodes' pod CIDRs are used with ipam=kubernetes only"),
            );
        }
    }

    fn addresses(&mut self, settings: &mut Settings) {
        if let Some(mtu) = settings.mtu.filter(|mtu| *mtu < LEAST_MTU) {
            self.refuse(settings, "mtu", format!("{mtu} is too small: expected 0 or at least {LEAST_MTU} bytes"));
        }
        if let Some(address) = settings.local_router_ipv4
            && (address.is_unspecified() || address.is_loopback() || address.is_multicast() || address.is_broadcast())
        {
            self.refuse(settings, "local-router-ipv4", "expected a unicast host address");
        }
        let native = settings.ipv4_native_routing_cidr;
        settings.ipv4_native_routing_cidr = native.map(|cidr| self.masked(settings, "ipv4-native-routing-cidr", cidr));
        let services = settings.service_cidrs.clone();
        settings.service_cidrs = services.into_iter().map(|cidr| self.masked(settings, "service-cidr", cidr)).collect();
        let pool = settings.cluster_pool_ipv4.clone();
        settings.cluster_pool_ipv4 =
            pool.into_iter().map(|cidr| self.masked(settings, "cluster-pool-ipv4-cidr", cidr)).collect();
    }

    /// The CIDR without host bits.
    fn masked(&mut self, settings: &Settings, key: &str, cidr: Ipv4Net) -> Ipv4Net {
        if cidr.addr() != cidr.network() {
            self.warn(settings, key, format!("{cidr} has host bits set and is read as {}", cidr.trunc()));
        }
        cidr.trunc()
    }

    fn masquerade(&mut self, settings: &mut Settings) {
        if settings.enable_ipv4_masquerade && !settings.enable_bpf_masquerade {
            self.warn(
                settings,
                "enable-bpf-masquerade",
                "ignored: Cistern masquerades in eBPF only and installs no iptables rules",
            );
        }
        if settings.ip_masq_agent_config_path.file_name().is_none() {
            self.refuse(settings, "ip-masq-agent-config-path", "expected the path of a file");
        }
        if !NAT_MAP_SIZES.contains(&settings.bpf_nat_global_max) {
            let (least, most) = (NAT_MAP_SIZES.start(), NAT_MAP_SIZES.end());
            self.refuse(settings, "bpf-nat-global-max", format!("expected a number from {least} to {most}"));
        }
        if settings.tcp_idle_timeout < LEAST_TCP_IDLE_TIMEOUT {
            let text = format!(
                "{} would expire connections that only send keep-alives; {} is in force",
                settings.tcp_idle_timeout.render(),
                LEAST_TCP_IDLE_TIMEOUT.render()
            );
            self.warn(settings, "bpf-ct-timeout-regular-tcp", text);
            settings.tcp_idle_timeout = LEAST_TCP_IDLE_TIMEOUT;
        }
        let (ports, node_ports) = (settings.masquerade_port_range, settings.node_port_range);
        if node_ports.first <= ports.first && ports.last <= node_ports.last {
            self.refuse(
                settings,
                "masquerade-port-range",
                format!("expected at least one port outside node-port-range ({})", node_ports.render()),
            );
        }
        if let Some(device) = &settings.derive_masq_ip_addr_from_device
            && (device.len() > 15 || device.contains('/') || device.contains(char::is_whitespace))
        {
            self.refuse(settings, "derive-masq-ip-addr-from-device", "expected the name of one device");
        }
    }

    /// The pool must be non-empty, disjoint from itself and from the Services, and hold at least one pod CIDR per
    /// element.
    fn pool(&mut self, settings: &Settings) {
        if settings.enable_ipv4 {
            let (warnings, errors) = match settings.cluster_pool() {
                Ok((_, warnings)) => (warnings, Vec::new()),
                Err(errors) => (Vec::new(), errors),
            };
            for warning in warnings {
                self.warn(settings, warning.setting(), warning.to_string());
            }
            for error in errors {
                self.refuse(settings, error.setting(), error.to_string());
            }
        }
        for cidr in &settings.cluster_pool_ipv4 {
            let pods = IpNet::V4(*cidr);
            for service in settings.service_cidrs.iter().filter(|service| overlaps(&IpNet::V4(**service), &pods)) {
                let reason =
                    format!("{cidr} overlaps {service} of service-cidr: a pod could be allocated a Service's address");
                self.refuse(settings, "cluster-pool-ipv4-cidr", reason);
            }
        }
    }

    fn election(&mut self, settings: &Settings) {
        let (lease, renew, retry) = (settings.lease_duration, settings.renew_deadline, settings.retry_period);
        if lease < Duration::from_secs(1) {
            self.refuse(
                settings,
                "leader-election-lease-duration",
                "expected at least 1s: leaseDurationSeconds of a Lease is in whole seconds",
            );
        }
        if renew >= lease {
            let reason = format!(
                "expected less than leader-election-lease-duration ({}): the previous leader must stop before the next one starts",
                lease.render()
            );
            self.refuse(settings, "leader-election-renew-deadline", reason);
        }
        if retry.is_zero() || retry >= renew {
            let reason =
                format!("expected more than 0s and less than leader-election-renew-deadline ({})", renew.render());
            self.refuse(settings, "leader-election-retry-period", reason);
        }
    }
}

/// A label of RFC 1123, as Kubernetes validates it.
fn is_label(text: &str) -> bool {
    text.len() <= 63 && is_name(text)
}

/// A subdomain of RFC 1123, as Kubernetes validates object names: the total length is limited, that of its labels is
/// not.
fn is_subdomain(text: &str) -> bool {
    text.len() <= 253 && text.split('.').all(is_name)
}

fn is_name(text: &str) -> bool {
    let inner = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    !text.is_empty() && text.bytes().all(inner) && !text.starts_with('-') && !text.ends_with('-')
}
