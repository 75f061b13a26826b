//! Values against each other, and against what Cistern can do.

use super::value::Value as _;
use super::{Command, IpamMode, Settings, SettingsError, Warning};
use ipnet::Ipv4Net;
use std::time::Duration;

/// The longest prefix of a node's block: at /30 two addresses are left for pods, and one of them is the router's
/// (`ipam` decision 12).
const LONGEST_BLOCK: u8 = 30;

/// The least IPv4 MTU that hosts have to take (RFC 791).
const LEAST_MTU: u16 = 576;

/// Below this a connection that only its keep-alives hold open would lose its entry (`masquerade` decision 10).
const LEAST_TCP_IDLE_TIMEOUT: Duration = Duration::from_secs(7260);

/// The sizes that Cilium takes for its NAT map.
const NAT_MAP_SIZES: std::ops::RangeInclusive<u32> = 1 << 10..=1 << 24;

/// Checks the settings as a whole. Values with one obvious reading are put right and told of, all others refused.
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
            self.refuse(settings, "enable-ipv4", "expected `true`: without IPv4 there is nothing that Cistern does");
        }
        if settings.enable_ipv6 {
            self.refuse(
                settings,
                "enable-ipv6",
                "expected `false`: IPv6 is not implemented, and pods would be left without the addresses they count on",
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
            self.warn(settings, "log-opt", format!("{options}: no meaning here; logs go to standard error"));
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
                format!("no effect with ipam={mode}: pod CIDRs of Nodes count with ipam=kubernetes"),
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
            self.refuse(settings, "local-router-ipv4", "expected an address that a host can have");
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
            self.warn(settings, key, format!("{cidr} has bits beyond its prefix and is read as {}", cidr.trunc()));
        }
        cidr.trunc()
    }

    fn masquerade(&mut self, settings: &mut Settings) {
        if settings.enable_ipv4_masquerade && !settings.enable_bpf_masquerade {
            self.warn(
                settings,
                "enable-bpf-masquerade",
                "Cistern masquerades in eBPF alone, and does so; no iptables rules are made",
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
                "{} is too short for connections that only their keep-alives hold open; {} is in force",
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
                format!("expected ports beyond node-port-range ({}): none is left", node_ports.render()),
            );
        }
        if let Some(device) = &settings.derive_masq_ip_addr_from_device
            && (device.len() > 15 || device.contains('/') || device.contains(char::is_whitespace))
        {
            self.refuse(settings, "derive-masq-ip-addr-from-device", "expected the name of one device");
        }
    }

    /// `ipam` 2.2.1 and decision 12.
    fn pool(&mut self, settings: &Settings) {
        let (key, mask) = ("cluster-pool-ipv4-cidr", settings.cluster_pool_ipv4_mask_size);
        if mask > LONGEST_BLOCK || mask == 0 {
            self.refuse(
                settings,
                "cluster-pool-ipv4-mask-size",
                format!("expected a prefix length from 1 to {LONGEST_BLOCK}: a longer one leaves no address for pods"),
            );
        } else if mask == LONGEST_BLOCK {
            self.warn(
                settings,
                "cluster-pool-ipv4-mask-size",
                "a /30 leaves one address for pods; 29 or less serves better",
            );
        }
        if settings.cluster_pool_ipv4.is_empty() {
            self.refuse(settings, key, "expected at least one CIDR: the operator has no addresses to give without one");
        }
        for (index, cidr) in settings.cluster_pool_ipv4.iter().enumerate() {
            if cidr.prefix_len() > mask {
                self.refuse(
                    settings,
                    key,
                    format!("{cidr} is smaller than one node's block, a /{mask} (cluster-pool-ipv4-mask-size)"),
                );
            }
            for other in settings.cluster_pool_ipv4.iter().skip(index + 1).filter(|other| overlaps(**other, *cidr)) {
                self.refuse(settings, key, format!("{cidr} and {other} overlap: expected CIDRs that share no address"));
            }
            for service in settings.service_cidrs.iter().filter(|service| overlaps(**service, *cidr)) {
                self.refuse(
                    settings,
                    key,
                    format!("{cidr} overlaps {service} of service-cidr: a pod could get a Service's address"),
                );
            }
        }
    }

    fn election(&mut self, settings: &Settings) {
        let (lease, renew, retry) = (settings.lease_duration, settings.renew_deadline, settings.retry_period);
        if lease < Duration::from_secs(1) {
            self.refuse(
                settings,
                "leader-election-lease-duration",
                "expected at least 1s: a Lease counts in whole seconds",
            );
        }
        if renew >= lease {
            let reason = format!(
                "expected less than leader-election-lease-duration ({}): an old leader must have stopped before the next one starts",
                lease.render()
            );
            self.refuse(settings, "leader-election-renew-deadline", reason);
        }
        if retry.is_zero() || retry >= renew {
            let reason =
                format!("expected more than nothing and less than leader-election-renew-deadline ({})", renew.render());
            self.refuse(settings, "leader-election-retry-period", reason);
        }
    }
}

fn overlaps(one: Ipv4Net, other: Ipv4Net) -> bool {
    one.contains(&other) || other.contains(&one)
}

/// A label of RFC 1123, as Kubernetes takes it.
fn is_label(text: &str) -> bool {
    text.len() <= 63 && is_name(text)
}

/// A subdomain of RFC 1123, as Kubernetes takes it for names of objects: the whole is bounded, its labels are not.
fn is_subdomain(text: &str) -> bool {
    text.len() <= 253 && text.split('.').all(is_name)
}

fn is_name(text: &str) -> bool {
    let inner = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    !text.is_empty() && text.bytes().all(inner) && !text.starts_with('-') && !text.ends_with('-')
}
