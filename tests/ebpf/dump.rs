//! Output of `bpftool map dump`, and the layout that it shows.

use crate::isolated::{isolated, run};
use crate::kernel::Kernel;
use cistern_core::masquerade::cases::{self, Machine, NODE, POD_A, WEB};
use cistern_core::masquerade::decide::{Content, Direction, Packet, TcpFlags};
use cistern_core::masquerade::plan::ExcludedReason;
use cistern_ebpf_common::abi::{
    CounterValue, DeviceKey, DeviceValue, EndpointKey, EndpointValue, EventsValue, ExcludedAddress, ExcludedValue,
    FlowKey, FwdValue, InboundValue, PortWord, RevKey, RevValue, SettingsValue, TriesValue,
};
use cistern_ebpf_common::map;
use serde_json::Value;
use std::mem::offset_of;
use std::net::SocketAddrV4;

/// A kernel with a row in each map.
fn filled(bpffs: &std::path::Path) -> Kernel {
    let mut kernel = Kernel::new(&bpffs.join("cistern"));
    let (pod, node) = (SocketAddrV4::new(POD_A, 41_000), SocketAddrV4::new(NODE, 50_000));
    let web = SocketAddrV4::new(WEB, 443);
    for source in [pod, node] {
        let device = cases::device(*source.ip());
        kernel.send(
            Direction::Egress,
            &Packet { content: Content::Tcp(TcpFlags::SYN), source, destination: web, device },
        );
    }
    let source = SocketAddrV4::new(WEB, 39_000);
    let inbound = Packet { content: Content::Udp, source, destination: pod, device: 0 };
    kernel.send(Direction::Ingress, &inbound);
    kernel
}

fn dump(kernel: &Kernel, name: &str) -> Vec<Value> {
    let path = kernel.datapath.pins().map(name);
    let text = run(&format!("bpftool --json map dump pinned {}", path.display()));
    serde_json::from_str::<Value>(&text).unwrap().as_array().unwrap().clone()
}

#[test]
fn every_map_is_dumped_with_the_names_of_its_fields() {
    isolated(|bpffs| {
        let kernel = filled(bpffs);
        for (name, key_fields, value_fields) in [
            (
                map::REV,
                &["remote", "external", "remote_port", "external_port", "protocol"][..],
                &[
                    "origin",
                    "origin_port",
                    "sent",
                    "received",
                    "last_seen",
                    "created",
                    "ifindex",
                    "owner",
                    "endpoint_generation",
                    "epoch",
                ][..],
            ),
            (
                map::FWD,
                &["source", "destination", "source_port", "destination_port", "protocol"],
                &["external", "external_port", "checked", "epoch", "device", "endpoint_generation"],
            ),
            (
                map::INBOUND,
                &["source", "destination", "source_port", "destination_port", "protocol"],
                &["last_seen", "created", "ifindex", "sent", "received"],
            ),
            (map::ENDPOINTS, &["address"], &["ifindex", "flags", "generation"]),
            (map::DEVICES, &["ifindex"], &["address"]),
            (map::EXCLUDED, &["prefix_len", "data"], &["since", "reason"]),
            (map::SETTINGS, &[], &["hash_key", "flags", "window", "policy_changed", "port_first", "port_last"]),
            (map::PORTS, &[], &["reserved"]),
            (map::TRIES, &[], &["used"]),
            (map::EVENTS, &[], &["no_port", "map_full", "no_device_address"]),
            (map::COUNTERS, &[], &["packets"]),
        ] {
            let rows = dump(&kernel, name);
            assert!(!rows.is_empty(), "{name} is empty");
            for row in rows {
                let row = &row["formatted"];
                for field in key_fields {
                    assert!(row["key"].get(field).is_some(), "{name}: no {field} in {row}");
                }
                // A per-CPU map has a list of values.
                let value = row.get("value").or_else(|| row["values"].get(0)?.get("value")).unwrap_or(&Value::Null);
                for field in value_fields {
                    assert!(value.get(field).is_some(), "{name}: no {field} in {row}");
                }
            }
        }
        assert_eq!(map::ALL.len(), 11, "a new map belongs into this test");
    });
}

#[test]
fn addresses_and_ports_read_as_on_the_wire() {
    isolated(|bpffs| {
        let kernel = filled(bpffs);
        let pod = dump(&kernel, map::REV)
            .into_iter()
            .map(|row| row["formatted"].clone())
            .find(|row| row["value"]["origin"] == serde_json::json!([10, 61, 4, 11]))
            .expect("the pod's flow");
        assert_eq!(pod["key"]["remote"], serde_json::json!([45, 33, 7, 80]));
        assert_eq!(pod["key"]["remote_port"], serde_json::json!([1, 187]));
        assert_eq!(pod["key"]["external"], serde_json::json!([172, 29, 8, 20]));
    });
}

// case: masquerade NM21
#[test]
fn a_prefix_is_its_length_and_then_its_address() {
    isolated(|bpffs| {
        let mut kernel = Kernel::new(&bpffs.join("cistern"));
        // Host bits are masked on insertion.
        kernel.exclude("10.9.9.9/8".parse().unwrap(), ExcludedReason::IpMasqAgent);
        let keys: Vec<Value> = dump(&kernel, map::EXCLUDED).into_iter().map(|row| row["key"].clone()).collect();
        let expected = serde_json::json!(["0x08", "0x00", "0x00", "0x00", "0x0a", "0x00", "0x00", "0x00"]);
        assert!(keys.contains(&expected), "{keys:?}");
    });
}

// case: masquerade NM20
#[test]
fn layouts_are_those_of_user_space_and_every_byte_is_set() {
    isolated(|bpffs| {
        let kernel = filled(bpffs);
        macro_rules! layout {
            ($type:ty: $($field:ident),+) => {
                (size_of::<$type>(), vec![$((stringify!($field), offset_of!($type, $field))),+])
            };
        }
        for (name, part, (size, fields)) in [
            (map::REV, "key", layout!(RevKey: remote, external, remote_port, external_port, protocol, zero)),
            (
                map::REV,
                "value",
                layout!(RevValue: origin, origin_port, sent, received, last_seen, created, ifindex, owner, spare, endpoint_generation, epoch, room),
            ),
            (map::FWD, "key", layout!(FlowKey: source, destination, source_port, destination_port, protocol, zero)),
            (
                map::FWD,
                "value",
                layout!(FwdValue: external, external_port, spare, checked, epoch, device, endpoint_generation, room),
            ),
            (map::INBOUND, "value", layout!(InboundValue: last_seen, created, ifindex, sent, received, room)),
            (map::ENDPOINTS, "key", layout!(EndpointKey: address)),
            (map::ENDPOINTS, "value", layout!(EndpointValue: ifindex, flags, generation, room)),
            (map::DEVICES, "key", layout!(DeviceKey: ifindex)),
            (map::DEVICES, "value", layout!(DeviceValue: address, room)),
            (map::EXCLUDED, "value", layout!(ExcludedValue: since, reason, room)),
            (
                map::SETTINGS,
                "value",
                layout!(SettingsValue: hash_key, flags, window, policy_changed, epoch, port_first, port_last, handover, zero, room),
            ),
            (map::PORTS, "value", layout!(PortWord: reserved)),
            (map::TRIES, "value", layout!(TriesValue: used, moved, flipped, spare)),
            (map::EVENTS, "value", layout!(EventsValue: no_port, map_full, no_device_address, room)),
            (map::COUNTERS, "value", layout!(CounterValue: packets)),
        ] {
            let path = kernel.datapath.pins().map(name);
            let text = run(&format!("bpftool --json btf dump map pinned {} {part}", path.display()));
            let types: Value = serde_json::from_str(&text).unwrap();
            let kind = &types["types"][0];
            assert_eq!(kind["size"], size, "{name} {part}: {kind}");
            let members: Vec<(String, u64)> = kind["members"]
                .as_array()
                .unwrap()
                .iter()
                .map(|member| {
                    (member["name"].as_str().unwrap().to_owned(), member["bits_offset"].as_u64().unwrap() / 8)
                })
                .collect();
            let fields: Vec<(String, u64)> =
                fields.into_iter().map(|(name, offset)| (name.to_owned(), offset as u64)).collect();
            assert_eq!(members, fields, "{name} {part}");
        }
        assert_eq!(size_of::<ExcludedAddress<4>>(), 4);

        // The programs build keys on their stack: unused bytes must be zero, or a flow would have many keys.
        for name in [map::REV, map::FWD, map::INBOUND] {
            for row in dump(&kernel, name) {
                for byte in 13..16 {
                    assert_eq!(row["key"][byte], "0x00", "{name}: {row}");
                }
            }
        }
    });
}
