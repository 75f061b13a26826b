//! Tests of settings as a whole: layers, rejections, warnings, and the ConfigMaps of real clusters.

use super::*;
use std::fmt::Write as _;

fn map(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
    pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
}

fn directory(pairs: &[(&str, &str)]) -> Layers {
    let directory = Directory { path: "/etc/cistern/config".to_owned(), files: map(pairs) };
    Layers { directory: Some(directory), hostname: "node-a".to_owned(), ..Layers::default() }
}

fn load(layers: &Layers) -> Result<(Settings, Vec<Warning>), SettingsErrors> {
    Settings::load(layers, Command::Operator)
}

fn accepted(pairs: &[(&str, &str)]) -> Settings {
    load(&directory(pairs)).unwrap_or_else(|errors| panic!("{pairs:?}: {errors}")).0
}

fn warned(pairs: &[(&str, &str)]) -> String {
    let (_, warnings) = load(&directory(pairs)).unwrap_or_else(|errors| panic!("{pairs:?}: {errors}"));
    warnings.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")
}

fn refused(pairs: &[(&str, &str)]) -> String {
    load(&directory(pairs)).err().unwrap_or_else(|| panic!("{pairs:?} was accepted")).to_string()
}

#[test]
fn nothing_set_means_the_defaults() {
    let layers = Layers { hostname: "Node-A".to_owned(), ..Layers::default() };
    let (settings, warnings) = Settings::load(&layers, Command::Agent).unwrap();
    assert_eq!(warnings, []);
    assert_eq!((settings.node_name.as_str(), settings.source("node-name")), ("node-a", Source::Hostname));
    let defaults =
        Settings { node_name: settings.node_name.clone(), sources: settings.sources.clone(), ..Settings::default() };
    assert_eq!(settings, defaults);
    assert_eq!(settings.source("mtu"), Source::Default);
    assert_eq!(settings.pin_root(), PathBuf::from("/sys/fs/bpf/cistern"));
}

#[test]
fn later_layers_win_and_values_know_their_source() {
    let mut layers = directory(&[("mtu", "1400\n"), ("debug", "true"), ("devices", "eth0"), ("k8s-namespace", "one")]);
    layers.environment = map(&[
        ("CILIUM_DEBUG", "false"),
        ("CILIUM_DEVICES", "eth1"),
        ("CISTERN_DEVICES", "eth2"),
        ("CISTERN_K8S_NAMESPACE", "two"),
        ("K8S_NODE_NAME", "worker-7"),
    ]);
    layers.flags = map(&[("k8s-namespace", "three")]);
    let (settings, _) = load(&layers).unwrap();
    assert_eq!(
        (settings.mtu, settings.source("mtu")),
        (Some(1400), Source::File("/etc/cistern/config/mtu".to_owned()))
    );
    assert_eq!((settings.debug, settings.source("debug")), (false, Source::Environment("CILIUM_DEBUG".to_owned())));
    assert!(settings.devices.selects("eth2", false) && !settings.devices.selects("eth1", true));
    assert_eq!((settings.namespace.as_str(), settings.source("k8s-namespace")), ("three", Source::Flag));
    assert_eq!(settings.node_name, "worker-7");
    let row = settings.in_force().into_iter().find(|row| row.key == "mtu").unwrap();
    assert_eq!((row.value.as_str(), row.source), ("1400", settings.source("mtu")));
}

#[test]
fn value_that_lost_is_not_judged() {
    let mut layers = directory(&[("mtu", "banana"), ("routing-mode", "tunnel")]);
    layers.environment = map(&[("CISTERN_ROUTING_MODE", "native")]);
    layers.flags = map(&[("mtu", "1500")]);
    assert_eq!(load(&layers).unwrap().0.mtu, Some(1500));
}

#[test]
fn foreign_environment_never_refuses() {
    let mut layers = directory(&[]);
    layers.environment = map(&[
        ("CISTERN_SERVICE_HOST", "10.96.0.7"),
        ("CISTERN_PORT", "tcp://10.96.0.7:80"),
        ("CILIUM_AGENT_PORT_9962_TCP", "tcp://10.96.0.8:9962"),
        ("CISTERN_DEBUGG", "true"),
        ("MTU", "banana"),
        ("PATH", "/bin"),
    ]);
    let (settings, warnings) = load(&layers).unwrap();
    assert_eq!((settings.mtu, settings.debug, warnings), (None, false, vec![]));
}

#[test]
fn all_errors_are_reported_at_once_with_key_value_source_and_expectation() {
    let mut layers = directory(&[("mtu", "banana"), ("routing-mode", "tunnel")]);
    layers.environment = map(&[("CISTERN_IPAM", "azure")]);
    layers.flags = map(&[("debugg", "true"), ("node-port-range", "40000,30000")]);
    let errors = load(&layers).unwrap_err();
    let text = errors.to_string();
    assert_eq!(errors.0.len(), 5, "{text}");
    assert_eq!(text.lines().count(), 6, "{text}");
    for part in [
        "5 settings are wrong; nothing was started or changed:",
        "mtu = \"banana\" (file /etc/cistern/config/mtu): expected a whole number",
        "debugg = \"true\" (flag): neither Cistern nor Cilium knows this key; did you mean debug?",
        "routing-mode = \"tunnel\" (file /etc/cistern/config/routing-mode): expected `native`",
        "auto-direct-node-routes=true",
        "ipam = \"azure\" (environment variable CISTERN_IPAM): expected `cluster-pool`",
        "node-port-range = \"40000,30000\" (flag): expected the first and the last port",
    ] {
        assert!(text.contains(part), "{part:?} is not in\n{text}");
    }
}

#[test]
fn unknown_key_of_the_config_directory_has_no_effect_and_is_reported() {
    let pairs = [("debugg", "true"), ("frobnicate-the-widgets", "yes"), ("mtu", "1400")];
    let (settings, warnings) = load(&directory(&pairs)).unwrap();
    assert_eq!((settings.debug, settings.mtu), (false, Some(1400)));
    let unknown: Vec<_> = settings.unknown().iter().collect();
    let [(first, misspelt), (second, foreign)] = unknown[..] else { panic!("{unknown:?}") };
    assert_eq!((first.as_str(), second.as_str()), ("debugg", "frobnicate-the-widgets"));
    assert!(
        misspelt.contains("config/debugg) has no effect") && misspelt.ends_with("did you mean debug?"),
        "{misspelt}"
    );
    assert!(foreign.contains("neither Cistern nor Cilium knows") && !foreign.contains("did you mean"), "{foreign}");
    let warned: Vec<_> = warnings.iter().map(ToString::to_string).collect();
    assert_eq!(warned, [misspelt.as_str(), foreign.as_str()]);
}

#[test]
fn unknown_key_is_refused_as_a_flag_and_with_strict_config() {
    let mut layers = directory(&[]);
    layers.flags = map(&[("debugg", "true")]);
    assert!(load(&layers).unwrap_err().to_string().contains("debugg = \"true\" (flag)"));
    let text = refused(&[("debugg", "true"), ("strict-config", "true")]);
    assert!(text.contains("(file /etc/cistern/config/debugg): neither Cistern nor Cilium knows this key"), "{text}");
    let mut layers = directory(&[("debugg", "true")]);
    layers.flags = map(&[("strict-config", "true")]);
    assert!(load(&layers).is_err(), "strict, whichever layer says so");
}

#[test]
fn values_are_read_as_cilium_reads_them() {
    for (text, value) in [("1", true), ("T", true), ("TRUE", true), ("0", false), ("False", false), (" true\n", true)] {
        assert_eq!(accepted(&[("enable-ip-masq-agent", text)]).enable_ip_masq_agent, value);
    }
    let list = accepted(&[("cluster-pool-ipv4-cidr", "10.1.0.0/16 10.2.0.0/16,10.3.0.0/16")]).cluster_pool_ipv4;
    assert_eq!(list, ["10.1.0.0/16", "10.2.0.0/16", "10.3.0.0/16"].map(|cidr| cidr.parse().unwrap()));
    let ports = PortRange { first: 30000, last: 32767 };
    for text in ["30000,32767", "30000-32767", "[30000,32767]"] {
        assert_eq!(accepted(&[("node-port-range", text)]).node_port_range, ports);
    }
    for (text, seconds) in [("15s", 15), ("1m30s", 90), ("2h13m20s", 8000), ("0h20m0s", 1200)] {
        let settings = accepted(&[("leader-election-lease-duration", text)]);
        assert_eq!(settings.lease_duration, Duration::from_secs(seconds));
    }
    assert_eq!(accepted(&[("mtu", "0")]).mtu, None);
    assert_eq!(accepted(&[("ipv4-native-routing-cidr", "")]).ipv4_native_routing_cidr, None);
    assert_eq!(
        accepted(&[("k8s-api-server-urls", "https://10.0.0.1:6443")]).api_server.unwrap().as_str(),
        "https://10.0.0.1:6443"
    );
    for (text, address) in
        [("localhost:9962", "127.0.0.1:9962"), (":9962", "0.0.0.0:9962"), ("[::1]:9962", "[::1]:9962")]
    {
        let settings = accepted(&[("prometheus-serve-addr", text)]);
        assert_eq!(settings.metrics_address.map(|address| address.0), Some(address.parse().unwrap()));
    }
    assert_eq!(accepted(&[("operator-api-serve-addr", "")]).operator_api_address, None);
    for text in ["level=debug,format=json", r#"{"level":"debug","format":"json-ts"}"#] {
        let options = accepted(&[("log-opt", text)]).log_options;
        assert_eq!((options.level, options.format), (LogLevel::Debug, LogFormat::Json));
    }
    assert_eq!(accepted(&[("debug", "true"), ("log-opt", "level=error")]).log_level(), LogLevel::Debug);
}

#[test]
fn values_that_cannot_be_read_are_refused() {
    for (key, value) in [
        ("debug", "yes"),
        ("debug", ""),
        ("enable-ipv4-masquerade", "2"),
        ("mtu", "-1"),
        ("mtu", "70000"),
        ("mtu", "575"),
        ("cluster-pool-ipv4-cidr", "10.0.0.0"),
        ("cluster-pool-ipv4-cidr", "fd00::/104"),
        ("cluster-pool-ipv4-mask-size", "twenty"),
        ("ipv4-native-routing-cidr", "10.0.0.0/33"),
        ("local-router-ipv4", "fe80::1"),
        ("local-router-ipv4", "127.0.0.1"),
        ("node-port-range", "30000"),
        ("node-port-range", "0,100"),
        ("devices", "eth0/1"),
        ("devices", "averyveryverylongname"),
        ("devices", "!"),
        ("socket-path", "cistern.sock"),
        ("k8s-kubeconfig-path", "config"),
        ("k8s-api-server-urls", "10.0.0.1:6443"),
        ("k8s-api-server-urls", "https://10.0.0.1:6443 https://10.0.0.2:6443"),
        ("k8s-namespace", "Kube_System"),
        ("node-name", "Node_A"),
        ("leader-election-retry-period", "-2s"),
        ("leader-election-retry-period", "2"),
        ("ip-masq-default-exclusions", "cilium"),
        ("masquerade-flow-policy", "sometimes"),
        ("log-opt", "level=loud"),
        ("log-opt", "{"),
        ("agent-health-port", "http"),
        ("prometheus-serve-addr", "9962"),
        ("prometheus-serve-addr", "metrics.example:9962"),
        ("prometheus-serve-addr", "0.0.0.0:0"),
        ("bpf-nat-global-max", "100"),
        ("enable-ipv4", "false"),
        ("enable-ipv6", "true"),
        ("masquerade-port-range", "30000,32767"),
    ] {
        let text = refused(&[(key, value)]);
        assert!(text.contains(&format!("{key} = ")) && text.contains("expected"), "{text}");
        assert_eq!(text.lines().count(), 2, "one error for one mistake: {text}");
    }
}

#[test]
fn pool_is_checked_where_the_operator_runs() {
    for (pairs, part) in [
        (vec![("cluster-pool-ipv4-cidr", "")], "expected at least one CIDR"),
        (vec![("cluster-pool-ipv4-cidr", "10.0.0.0/16,10.0.128.0/17")], "10.0.0.0/16 and 10.0.128.0/17 overlap"),
        (vec![("cluster-pool-ipv4-cidr", "10.0.0.0/16,10.0.0.0/16")], "overlap"),
        (vec![("cluster-pool-ipv4-cidr", "10.0.0.0/25")], "/24 is larger than 10.0.0.0/25"),
        (vec![("cluster-pool-ipv4-mask-size", "31")], "expected 30 or less"),
        (vec![("cluster-pool-ipv4-mask-size", "0")], "/0 is larger than 10.0.0.0/8"),
        (vec![("service-cidr", "10.96.0.0/12")], "10.0.0.0/8 overlaps 10.96.0.0/12 of service-cidr"),
    ] {
        let text = refused(&pairs);
        assert!(text.contains(part), "{part:?} is not in\n{text}");
        let agent = Settings::load(&directory(&pairs), Command::Agent);
        assert!(agent.is_ok(), "an agent without operator duties does not read it: {agent:?}");
        let mut with_operator = directory(&pairs);
        with_operator.flags = map(&[("leader-election", "true")]);
        assert!(Settings::load(&with_operator, Command::Agent).is_err());
    }
    assert!(warned(&[("cluster-pool-ipv4-mask-size", "30")]).contains("/30 has one address for pods"));
    let text = warned(&[("cluster-pool-ipv4-cidr", "10.1.2.3/16")]);
    assert!(text.contains("10.1.2.3/16") && text.contains("10.1.0.0/16"), "{text}");
}

#[test]
fn election_times_fit_together() {
    for (key, value) in [
        ("leader-election-lease-duration", "10s"),
        ("leader-election-renew-deadline", "15s"),
        ("leader-election-retry-period", "10s"),
        ("leader-election-retry-period", "0s"),
    ] {
        assert!(refused(&[(key, value)]).contains("leader-election-"));
    }
    assert!(Settings::load(&directory(&[("leader-election-retry-period", "10s")]), Command::Agent).is_ok());
}

#[test]
fn values_with_one_reading_are_put_right() {
    let pairs = [("bpf-ct-timeout-regular-tcp", "1h"), ("ipv4-native-routing-cidr", "10.1.2.3/8")];
    let settings = accepted(&pairs);
    assert_eq!(settings.tcp_idle_timeout, Duration::from_secs(7260));
    assert_eq!(settings.ipv4_native_routing_cidr, Some("10.0.0.0/8".parse().unwrap()));
    let text = warned(&pairs);
    assert!(text.contains("bpf-ct-timeout-regular-tcp") && text.contains("1h") && text.contains("2h1m"), "{text}");
    assert!(text.contains("10.1.2.3/8"), "{text}");
    assert!(warned(&[("enable-bpf-masquerade", "false")]).contains("eBPF only"));
}

#[test]
fn old_names_work_while_the_new_one_is_not_set() {
    let pairs =
        [("native-routing-cidr", "10.0.0.0/8"), ("masquerade", "false"), ("k8s-api-server", "http://10.0.0.1:8080")];
    let settings = accepted(&pairs);
    assert_eq!(settings.ipv4_native_routing_cidr, Some("10.0.0.0/8".parse().unwrap()));
    assert!(!settings.enable_ipv4_masquerade);
    assert_eq!(settings.api_server.as_ref().map(ApiServerUrl::as_str), Some("http://10.0.0.1:8080"));
    assert!(warned(&pairs).contains("is the old name of ipv4-native-routing-cidr"));

    let both = [("masquerade", "false"), ("enable-ipv4-masquerade", "true")];
    assert!(accepted(&both).enable_ipv4_masquerade);
    assert!(warned(&both).contains("masquerade (file /etc/cistern/config/masquerade) is ignored"));

    let mut layers = directory(&[("enable-ipv4-masquerade", "true")]);
    layers.flags = map(&[("masquerade", "false")]);
    assert!(!load(&layers).unwrap().0.enable_ipv4_masquerade, "a later layer wins under the old name, too");
}

#[test]
fn devices_are_chosen_by_the_first_pattern_that_matches() {
    let of = |text: &str| accepted(&[("devices", text)]).devices;
    let automatic = of("");
    assert!(automatic.is_automatic() && automatic.selects("eth0", true) && !automatic.selects("eth0", false));
    let named = of("eth0 ens+");
    assert!(named.selects("eth0", false) && named.selects("ens3", false) && !named.selects("eth1", true));
    let without = of("!eth1");
    assert!(without.is_automatic() && without.selects("eth0", true) && !without.selects("eth1", true));
    let ordered = of("!eth0,eth+");
    assert!(!ordered.selects("eth0", true) && ordered.selects("eth1", false) && !ordered.selects("wlan0", true));
    assert!(of("+").selects("anything", false));
}

fn sample(text: &str) -> Layers {
    let pair = |line: &str| line.split_once('=').map(|(key, value)| (key.trim().to_owned(), value.trim().to_owned()));
    let files = text.lines().filter(|line| !line.starts_with('#')).filter_map(pair).collect();
    let directory = Directory { path: "/etc/cistern/config".to_owned(), files };
    Layers { directory: Some(directory), hostname: "node-a".to_owned(), ..Layers::default() }
}

const CILIUM_1_20: &str = include_str!("samples/cilium-1.20.txt");
const CILIUM_1_13: &str = include_str!("samples/cilium-1.13.txt");

#[test]
fn config_maps_of_real_clusters_start() {
    let (settings, warnings) = load(&sample(CILIUM_1_20)).unwrap_or_else(|errors| panic!("{errors}"));
    assert_eq!(settings.cluster_pool_ipv4.len(), 2);
    assert!(settings.auto_direct_node_routes && settings.enable_ip_masq_agent);
    let text = warnings.iter().map(ToString::to_string).collect::<Vec<_>>();
    assert!((1..=16).contains(&text.len()), "each part in one line:\n{}", text.join("\n"));
    let all = text.join("\n");
    for part in ["hubble-", "network policies are not implemented", "LoadBalancer Services get no addresses"] {
        assert!(all.contains(part), "{part:?} is not in\n{all}");
    }
    let mut keys: Vec<_> = warnings.iter().flat_map(|warning| &warning.keys).collect();
    let count = keys.len();
    keys.sort();
    keys.dedup();
    assert_eq!(keys.len(), count, "each key is reported once");

    let (settings, _) = load(&sample(CILIUM_1_13)).unwrap_or_else(|errors| panic!("{errors}"));
    assert_eq!(settings.ipv4_native_routing_cidr, Some("10.0.0.0/8".parse().unwrap()));
}

#[test]
fn config_maps_with_tunnels_are_refused_with_the_way_out() {
    for (text, key, value) in [(CILIUM_1_20, "routing-mode", "tunnel"), (CILIUM_1_13, "tunnel", "vxlan")] {
        let mut layers = sample(text);
        layers.directory.as_mut().unwrap().files.insert(key.to_owned(), value.to_owned());
        let text = load(&layers).unwrap_err().to_string();
        assert_eq!(text.lines().count(), 2, "{text}");
        assert!(
            text.contains(&format!("{key} = \"{value}\"")) && text.contains("auto-direct-node-routes=true"),
            "{text}"
        );
    }
}

#[test]
fn values_that_would_send_traffic_another_way_are_refused() {
    for (key, value) in [
        ("kube-proxy-replacement", "true"),
        ("kube-proxy-replacement", "strict"),
        ("enable-wireguard", "true"),
        ("enable-ipsec", "true"),
        ("enable-egress-gateway", "true"),
        ("enable-policy", "always"),
        ("enable-host-firewall", "true"),
        ("cni-chaining-mode", "aws-cni"),
        ("egress-masquerade-interfaces", "eth0"),
        ("enable-bgp-control-plane", "true"),
        ("enable-l2-announcements", "true"),
        ("ipv4-range", "10.1.0.0/24"),
    ] {
        let text = refused(&[(key, value)]);
        assert!(text.contains(&format!("{key} = \"{value}\"")) && text.contains("expected"), "{text}");
    }
}

#[test]
fn keys_that_disable_something_are_not_reported() {
    for (key, value) in [
        ("enable-hubble", "false"),
        ("enable-wireguard", "false"),
        ("kube-proxy-replacement", "false"),
        ("kube-proxy-replacement", "disabled"),
        ("bpf-lb-acceleration", "disabled"),
        ("routing-mode", "native"),
        ("tunnel", "disabled"),
        ("cni-chaining-mode", "portmap"),
        ("ipv4-range", "auto"),
        ("hubble-metrics", ""),
        ("cluster-id", "0"),
    ] {
        assert_eq!(warned(&[(key, value)]), "", "{key}={value}");
    }
    let text = warned(&[("enable-hubble", "true"), ("hubble-listen-address", ":4244"), ("cluster-name", "blue")]);
    assert_eq!(text.lines().count(), 2, "{text}");
    assert!(text.contains("Hubble have no effect: enable-hubble, hubble-listen-address"), "{text}");
}

/// Keys that older charts and the ConfigMaps of kubespray, kops and Gardener still set, with the values that they set.
#[test]
fn retired_keys_start() {
    let pairs = [
        ("blacklist-conflicting-routes", "false"),
        ("ct-global-max-entries-tcp", "524288"),
        ("device", "undefined"),
        ("disable-ipv4", "false"),
        ("hubble-flow-buffer-size", "4095"),
        ("install-iptables-rules", "true"),
        ("legacy-host-allows-world", "false"),
        ("tofqdns-enable-poller", "true"),
        ("update-ec2-apdater-limit-via-api", "true"),
        ("wait-bpf-mount", "true"),
    ];
    let text = warned(&pairs);
    for (part, key) in [
        ("Hubble", "hubble-flow-buffer-size"),
        ("the L7 and DNS proxies", "tofqdns-enable-poller"),
        ("other parts", "wait-bpf-mount"),
    ] {
        assert!(text.contains(&format!("keys for {part} have no effect: {key}")), "{part} is not in\n{text}");
    }
    assert!(!text.contains("device") && !text.contains("blacklist"), "what is off is not reported:\n{text}");
}

#[test]
fn retired_key_names_its_successor() {
    for (key, value, successor) in [
        ("device", "eth0", "set devices"),
        ("blacklist-conflicting-routes", "true", "always detected"),
        ("ct-global-max-entries-tcp", "524288", "bpf-nat-global-max"),
        ("install-iptables-rules", "true", "enable-ipv4-masquerade"),
    ] {
        let text = warned(&[(key, value)]);
        assert!(text.contains(&format!("{key}={value}")) && text.contains(successor), "{text}");
    }
    assert!(refused(&[("disable-ipv4", "true")]).contains("enable-ipv4"));
    assert!(accepted(&[("device", "eth0")]).devices.is_automatic(), "another meaning than devices");
}

#[test]
fn lists_of_keys_are_in_order_and_disjoint() {
    let foreign: Vec<_> = cilium::names().collect();
    assert!(foreign.is_sorted() && foreign.len() > 500, "{} keys", foreign.len());
    for key in KEYS {
        assert!(!foreign.contains(&key.name), "{} is implemented", key.name);
    }
    for (key, _, reason) in cilium::refusals() {
        assert!(foreign.contains(&key), "{key} is no key of Cilium");
        assert!(!reason.is_empty());
    }
}

#[test]
fn rendered_values_are_accepted_again() {
    let (settings, _) = load(&sample(CILIUM_1_20)).unwrap();
    for settings in [settings, Settings { node_name: "node-a".to_owned(), ..Settings::default() }] {
        let mut again = Settings::default();
        for (key, value) in settings.rendered() {
            again.set(key, &value).unwrap_or_else(|expected| panic!("{key} = {value:?}: expected {expected}"));
        }
        assert_eq!(Settings { sources: settings.sources.clone(), ..again }, settings);
    }
}

#[test]
fn committed_table_is_the_generated_one() {
    let committed = include_str!("../../settings.md");
    assert_eq!(committed, markdown(), "run `cargo xtask gen`");
    let mut missing = String::new();
    for key in KEYS.iter().filter(|key| !committed.contains(&format!("| `{}` |", key.name))) {
        let _ = writeln!(missing, "{}", key.name);
    }
    assert_eq!(missing, "");
}
