use super::*;
use std::time::Duration;

fn net(text: &str) -> IpNet {
    text.parse().unwrap()
}

fn data(entries: &[(&str, &str)]) -> Data {
    entries.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
}

const QUARANTINED: &str =
    r#"{"cidr":"10.33.0.64/26","node":"b","since":"2026-01-01T00:00:00Z","until":"2026-01-01T00:10:00Z"}"#;

/// What the release before writes.
fn first_format() -> Data {
    data(&[
        ("blocks.json", r#"{"a":["10.33.0.0/26","fd33::/124"]}"#),
        ("pools.json", r#"[{"cidr":"10.33.0.0/24","mask_size":26}]"#),
        ("quarantine.json", &format!("[{QUARANTINED}]")),
        ("refused.json", r#"["uid-c"]"#),
    ])
}

/// What the release before reads of an object: four keys, and their values in the form that it knows.
fn read_by_the_release_before(data: &Data) -> Result<Records, serde_json::Error> {
    fn key<T: Default + DeserializeOwned>(data: &Data, key: &str) -> Result<T, serde_json::Error> {
        data.get(key).map_or_else(|| Ok(T::default()), |text| serde_json::from_str(text))
    }
    Ok(Records {
        quarantine: key(data, QUARANTINE_KEY)?,
        pools: key(data, POOLS_KEY)?,
        refused: key(data, REFUSED_KEY)?,
        blocks: key(data, BLOCKS_KEY)?,
    })
}

/// What an object holds after a merge patch of `data`.
fn patched(mut object: Data, patch: Data) -> Data {
    object.extend(patch);
    object
}

#[test]
fn operators_of_this_release_and_of_the_one_before_lead_in_turn() {
    let records = Records::from_data(&first_format()).unwrap();
    assert_eq!(records, read_by_the_release_before(&first_format()).unwrap());
    assert_eq!(records.blocks["a"], [net("10.33.0.0/26"), net("fd33::/124")]);
    // This one writes, the one before reads.
    let written = patched(first_format(), records.to_data(&first_format()).unwrap());
    assert_eq!(read_by_the_release_before(&written).unwrap(), records);
    assert_eq!(written[VERSION_KEY], r#"{"format":2,"oldest_reader":1}"#);
    // The one before writes its four keys, this one reads.
    let back = patched(written, data(&[("blocks.json", r#"{"d":["10.33.0.128/26"]}"#), ("quarantine.json", "[]")]));
    let read = Records::from_data(&back).unwrap();
    assert_eq!((read.blocks.len(), read.quarantine.len(), read.pools.len()), (1, 0, 1));
}

#[test]
fn what_a_newer_build_added_is_kept() {
    let extra = QUARANTINED.replace('}', r#","reason":"drained"}"#);
    let other = r#"{"kind":"Reservation","prefix":"10.33.0.192/28"}"#;
    let seen = data(&[
        ("version.json", r#"{"format":9,"oldest_reader":2,"by":"newer"}"#),
        ("blocks.json", r#"{"a":["10.33.0.0/26"]}"#),
        ("leases.json", r#"{"of":"another kind"}"#),
        ("quarantine.json", &format!("[{other},{extra}]")),
        ("pools.json", r#"[{"cidr":"10.33.0.0/24","mask_size":26,"zone":"a"}]"#),
    ]);
    let mut records = Records::from_data(&seen).unwrap();
    assert_eq!((records.quarantine.len(), records.pools.len()), (1, 1));
    records.blocks.insert("c".to_owned(), vec![net("10.33.0.128/26")]);
    let written = records.to_data(&seen).unwrap();
    assert!(!written.contains_key("leases.json"), "not written, hence left alone");
    let same = |key: &str| {
        let parse = |text: &str| -> BTreeSet<String> {
            let values: Vec<Value> = serde_json::from_str(text).unwrap();
            values.iter().map(ToString::to_string).collect()
        };
        assert_eq!(parse(&written[key]), parse(&seen[key]));
    };
    same("quarantine.json");
    same("pools.json");
    // What has ended takes its fields along.
    records.quarantine.clear();
    let quarantine = records.to_data(&seen).unwrap()["quarantine.json"].clone();
    assert!(quarantine.contains("Reservation") && !quarantine.contains("drained"), "{quarantine}");
}

#[test]
fn records_that_cannot_be_read_name_the_key() {
    let error = |key: &str, value: &str| Records::from_data(&data(&[(key, value)])).unwrap_err().to_string();
    assert!(error("pools.json", "[{]").contains("pools.json"));
    assert!(error("quarantine.json", r#"[{"cidr":"10.33.0.64/26"}]"#).contains("quarantine.json"));
    assert!(error("quarantine.json", r#"{"groups":7}"#).contains("quarantine.json"));
    let newer = error("version.json", r#"{"format":9,"oldest_reader":9}"#);
    assert!(newer.contains("format 9") && newer.contains("version.json"), "{newer}");
    assert_eq!(Records::from_data(&BTreeMap::new()).unwrap(), Records::default());
}

#[test]
fn many_quarantined_pod_cidrs_are_grouped_and_stop_the_release_before() {
    let count: u32 = 10_000;
    let since: Timestamp = "2026-01-01T00:00:00Z".parse().unwrap();
    let record = |index: u32| {
        let cidr = IpNet::new(std::net::Ipv4Addr::from(0x0a00_0000 + index * 256).into(), 24).unwrap();
        let since = since + Duration::from_secs(u64::from(index % 600));
        let until = since + Duration::from_secs(600);
        QuarantineRecord { cidr, node: format!("{:-<40}{:06}", "node", index / 2), since, until }
    };
    let records = Records { quarantine: (0..count).map(record).collect(), ..Records::default() };
    let extra =
        r#"{"cidr":"10.0.0.0/24","node":"n","since":"2026-01-01T00:00:00Z","until":"2026-01-01T00:10:00Z","x":1}"#;
    let seen = data(&[("quarantine.json", &format!(r#"[{{"kind":"Reservation"}},{extra}]"#))]);
    let written = records.to_data(&seen).unwrap();
    assert!(written.values().map(String::len).sum::<usize>() < READABLE_BY_ALL);
    assert_eq!(written[VERSION_KEY], r#"{"format":2,"oldest_reader":2}"#);
    assert!(written[QUARANTINE_KEY].contains("Reservation") && written[QUARANTINE_KEY].contains(r#""x":1"#));
    assert_eq!(Records::from_data(&written).unwrap(), records);
    assert!(read_by_the_release_before(&written).is_err());
    // Fewer of them are written as before.
    let few = Records { quarantine: records.quarantine[..10].to_vec(), ..Records::default() };
    let written = few.to_data(&written).unwrap();
    assert_eq!(written[VERSION_KEY], r#"{"format":2,"oldest_reader":1}"#);
    assert!(written[QUARANTINE_KEY].contains("Reservation") && written[QUARANTINE_KEY].contains(r#""x":1"#));
}

#[test]
fn the_object_of_each_of_three_pools_holds_five_thousand_dual_stack_nodes() {
    for pool in 0_u32..3 {
        let net = |index: u32| {
            let ipv4 = IpNet::new(std::net::Ipv4Addr::from(0x0a00_0000 + (pool << 22) + index * 64).into(), 26);
            let ipv6 = format!("fd12:3456:789a:{pool:x}:ffff:ffff:{index:x}:0/112").parse();
            vec![ipv4.unwrap(), ipv6.unwrap()]
        };
        let blocks = (0_u32..5000).map(|index| (format!("{:-<55}{index:08}", "node"), net(index))).collect();
        let records = Records { blocks, ..Records::default() };
        let room: usize = records.blocks.iter().map(|(name, nets)| room_of(name, nets)).sum();
        let written = records.to_data(&Data::new()).unwrap();
        let size = written.values().map(String::len).sum::<usize>();
        assert!(size <= room + 100 && room < FULL, "{size} {room}");
        assert_eq!(read_by_the_release_before(&written).unwrap(), records);
    }
}

#[test]
fn records_that_do_not_fit_are_not_written() {
    let blocks = (0..5000).map(|index| (format!("{index:-<253}"), vec![net("10.0.0.0/24")])).collect();
    let error = Records { blocks, ..Records::default() }.to_data(&Data::new()).unwrap_err();
    assert!(matches!(error, RecordsError::TooLarge { size } if size > LIMIT), "{error}");
}
