use super::in_force::exclusions;
use super::*;
use ipnet::{IpNet, Ipv4Net};
use std::collections::BTreeSet;
use std::net::Ipv4Addr;
use std::time::Duration;

fn nets(list: &[&str]) -> BTreeSet<IpNet> {
    list.iter().map(|cidr| cidr.parse().unwrap()).collect()
}

fn v4(list: &[&str]) -> BTreeSet<Ipv4Net> {
    list.iter().map(|cidr| cidr.parse().unwrap()).collect()
}

fn file(text: &str) -> (ConfigFile, Vec<Warning>) {
    parse(text).unwrap().expect("a file that holds something")
}

fn found(text: &str, last_good: Option<&ConfigFile>) -> Outcome {
    decide_with(&Found::Content(text.to_owned()), last_good, false)
}

fn decide_with(found: &Found, last_good: Option<&ConfigFile>, ipv6: bool) -> Outcome {
    decide(Input { enabled: true, defaults: DefaultExclusions::Reserved, ipv6, found, last_good })
}

fn built_in() -> BTreeSet<Ipv4Net> {
    DefaultExclusions::Reserved.ranges().iter().copied().collect()
}

const YAML: &str = "\
nonMasqueradeCIDRs:
  - 10.32.0.0/14
  - 198.18.0.0/15
masqLinkLocal: true
resyncInterval: 7s
";

// case: masquerade CF1
#[test]
fn yaml_is_read_exactly() {
    let outcome = found(YAML, None);
    assert_eq!(outcome.exclusions.ipv4, v4(&["10.32.0.0/14", "198.18.0.0/15"]));
    assert!(!outcome.exclusions.link_local_ipv4 && outcome.exclusions.link_local_ipv6);
    assert_eq!(outcome.resync_interval, Duration::from_secs(7));
    assert_eq!((outcome.source, outcome.warnings, outcome.error), (ListSource::File, vec![], None));
}

// case: masquerade CF2
#[test]
fn json_is_read_like_yaml() {
    let json = r#"{"nonMasqueradeCIDRs":["10.32.0.0/14","198.18.0.0/15"],"masqLinkLocal":true,"resyncInterval":"7s"}"#;
    let escaped = json.replace("7s", "\\u0037s");
    let indented = json.replace(',', ",\n\t");
    for text in [json, &escaped, &indented] {
        assert_eq!(file(text), file(YAML), "{text}");
    }
}

// case: masquerade CF4
#[test]
fn file_without_list_keeps_the_other_defaults() {
    let outcome = found("resyncInterval: 90s\n", None);
    assert_eq!(outcome.exclusions.ipv4, built_in());
    assert!(outcome.exclusions.link_local_ipv4 && outcome.exclusions.link_local_ipv6);
    assert_eq!(outcome.resync_interval, Duration::from_secs(90));
    assert_eq!(outcome.warnings, [Warning::ListNotSet]);

    let outcome = found("masqLinkLocal: true\n", None);
    assert_eq!(outcome.exclusions.ipv4, built_in());
    assert!(!outcome.exclusions.link_local_ipv4);
    assert_eq!(outcome.warnings, [Warning::ListNotSet]);
}

// case: masquerade CF5
#[test]
fn no_file_and_an_empty_file_mean_the_built_in_list() {
    let empty =
        ["", "\n", "  \n\t\n", "# nothing\n  # yet\n", "---\n", "null\n"].map(|text| Found::Content(text.to_owned()));
    for found in [Found::Absent].iter().chain(&empty) {
        let outcome = decide_with(found, None, true);
        assert_eq!(outcome.exclusions.ipv4, built_in(), "{found:?}");
        assert_eq!(outcome.exclusions.ipv4.len(), 11);
        assert!(outcome.exclusions.link_local_ipv4 && outcome.exclusions.link_local_ipv6);
        assert_eq!((outcome.source.to_string().as_str(), outcome.error), ("built-in", None));
    }
    let input = Input {
        enabled: true,
        defaults: DefaultExclusions::Rfc1918,
        ipv6: false,
        found: &Found::Absent,
        last_good: None,
    };
    assert_eq!(decide(input).exclusions.ipv4, v4(&["10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16"]));
}

#[test]
fn feature_off_exempts_link_local_alone() {
    let found = Found::Content(YAML.to_owned());
    let outcome = decide(Input {
        enabled: false,
        defaults: DefaultExclusions::Reserved,
        ipv6: false,
        found: &found,
        last_good: None,
    });
    assert_eq!(outcome.source, ListSource::Off);
    assert_eq!(
        outcome.exclusions,
        Exclusions { link_local_ipv4: true, link_local_ipv6: true, ..Exclusions::default() }
    );
}

// case: masquerade CF7
#[test]
fn host_bits_are_masked_or_in_strict_refused() {
    let text = "nonMasqueradeCIDRs: [10.77.5.9/16, 10.77.0.0/16]\n";
    let (read, warnings) = file(text);
    assert_eq!(read.cidrs, Some(nets(&["10.77.0.0/16"])));
    let words = warnings.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n");
    assert!(words.contains("10.77.5.9/16") && words.contains("10.77.0.0/16"), "{words}");

    let before = file("nonMasqueradeCIDRs: [10.1.0.0/16]").0;
    let outcome = found(&format!("strict: true\n{text}"), Some(&before));
    assert_eq!(outcome.source, ListSource::LastGood);
    assert_eq!(outcome.exclusions.ipv4, v4(&["10.1.0.0/16"]));
    let words = outcome.error.expect("strict refuses host bits").to_string();
    assert!(words.contains("nonMasqueradeCIDRs[0]") && words.contains("10.77.5.9/16"), "{words}");
}

#[test]
fn bare_address_is_one_host_or_in_strict_refused() {
    let (read, warnings) = file("nonMasqueradeCIDRs: [10.1.1.1, 'fd00::1']\n");
    assert_eq!(read.cidrs, Some(nets(&["10.1.1.1/32", "fd00::1/128"])));
    assert!(matches!(
        warnings.as_slice(),
        [Warning::BareAddress { index: 0, .. }, Warning::BareAddress { index: 1, .. }]
    ));
    assert!(parse("strict: true\nnonMasqueradeCIDRs: [10.1.1.1]\n").is_err());
}

// case: masquerade CF8
#[test]
fn one_bad_entry_leaves_the_last_good_list() {
    let good = found("nonMasqueradeCIDRs: [10.9.0.0/16]\nmasqLinkLocal: true\n", None);
    let bad = "nonMasqueradeCIDRs: [10.1.0.0/16, banana, 10.2.0.0/16, '', ~, 10.0.0.0/33, 17, [1]]\n";
    let outcome = found(bad, good.last_good.as_ref());
    assert_eq!(outcome.exclusions, good.exclusions);
    assert_eq!(outcome.source, ListSource::LastGood);
    assert_eq!(outcome.last_good, good.last_good, "the next bad file goes back to the same list");
    let Some(FileError::Entries { entries }) = &outcome.error else { panic!("{:?}", outcome.error) };
    assert_eq!(entries.iter().map(|entry| entry.index).collect::<Vec<_>>(), [1, 3, 4, 5, 6, 7]);
    let words = outcome.error.as_ref().map(ToString::to_string).unwrap();
    assert!(words.contains("nonMasqueradeCIDRs[1] = \"banana\""), "{words}");

    let first_start = found(bad, None);
    assert_eq!(first_start.source, ListSource::BuiltIn);
    assert_eq!(first_start.exclusions.ipv4, built_in());
    assert!(first_start.exclusions.link_local_ipv4);
    assert!(first_start.error.is_some() && first_start.last_good.is_none());
}

#[test]
fn file_that_cannot_be_read_leaves_the_last_good_list() {
    let good = file(YAML).0;
    let outcome = decide_with(&Found::Unreadable("permission denied".to_owned()), Some(&good), false);
    assert_eq!((outcome.source, outcome.exclusions.ipv4.len()), (ListSource::LastGood, 2));
    assert!(outcome.error.unwrap().to_string().contains("permission denied"));
}

#[test]
fn wrong_shapes_are_refused_with_the_key() {
    let cases = [
        ("nonMasqueradeCIDRs: 10.0.0.0/8\n", "nonMasqueradeCIDRs"),
        ("nonMasqueradeCIDRs: {a: b}\n", "nonMasqueradeCIDRs"),
        ("masqLinkLocal: 1\n", "masqLinkLocal"),
        ("masqLinkLocal: perhaps\n", "masqLinkLocal"),
        ("masqLinkLocal: \"true\"\n", "masqLinkLocal"),
        ("masqLinkLocalIPv6: []\n", "masqLinkLocalIPv6"),
        ("resyncInterval: soon\n", "resyncInterval"),
        ("resyncInterval: 1.5\n", "resyncInterval"),
        ("cidrLimit: many\n", "cidrLimit"),
        ("cidrLimit: -1\n", "cidrLimit"),
        ("masqLinkLocal: true\nmasqLinkLocal: false\n", "masqLinkLocal"),
        ("masqLinkLocal: true\nMASQLINKLOCAL: false\n", "MASQLINKLOCAL"),
        (r#"{"masqLinkLocal": true, "masqLinkLocal": true}"#, "masqLinkLocal"),
        ("nonMasqueradeCIDRs:\n  - 10.0.0.0/8\n - 10.1.0.0/16\n", "neither YAML nor JSON"),
        ("nonMasqueradeCIDRs: [10.0.0.0/8", "neither YAML nor JSON"),
        ("- 10.0.0.0/8\n", "neither YAML nor JSON"),
        ("10.0.0.0/8\n", "neither YAML nor JSON"),
    ];
    for (text, named) in cases {
        let error = parse(text).expect_err(text).to_string();
        assert!(error.contains(named), "{text}: {error}");
    }
}

#[test]
fn ipv4_inside_ipv6_is_refused() {
    for entry in ["::ffff:10.0.0.0/104", "::ffff:10.1.1.1"] {
        let error = parse(&format!("nonMasqueradeCIDRs: ['{entry}']\n")).expect_err(entry).to_string();
        assert!(error.contains(entry) && error.contains("IPv4"), "{error}");
    }
}

#[test]
fn empty_list_masquerades_everything_but_link_local() {
    for text in ["nonMasqueradeCIDRs: []\n", "nonMasqueradeCIDRs:\n", "nonMasqueradeCIDRs: null\n"] {
        let outcome = found(text, None);
        assert_eq!(
            outcome.exclusions,
            Exclusions { link_local_ipv4: true, link_local_ipv6: true, ..Exclusions::default() }
        );
        assert_eq!((outcome.warnings, outcome.source), (vec![Warning::ListEmpty], ListSource::File));
    }
}

#[test]
fn null_keeps_the_default_of_every_other_key() {
    let (read, _) = file("masqLinkLocal:\nmasqLinkLocalIPv6: ~\nresyncInterval: null\ncidrLimit:\n");
    assert_eq!(read, ConfigFile::default());
}

#[test]
fn keys_and_words_of_the_other_agents_are_understood() {
    let (read, warnings) = file("NonMasqueradeCidrs: [10.1.0.0/16]\nmasqlinklocal: yes\nmasqLinkLocalIPv6: on\n");
    assert_eq!(read.cidrs, Some(nets(&["10.1.0.0/16"])));
    assert!(read.masq_link_local && read.masq_link_local_ipv6);
    assert_eq!(warnings, []);
}

// case: masquerade CF13
#[test]
fn file_that_goes_leaves_the_defaults_and_counts_again_when_it_comes_back() {
    let before = found(YAML, None);
    let gone = decide_with(&Found::Absent, before.last_good.as_ref(), false);
    assert_eq!((gone.source, &gone.exclusions.ipv4), (ListSource::BuiltIn, &built_in()));
    assert_eq!(gone.last_good, None, "a bad file after this goes back to the defaults");
    let back = found(YAML, gone.last_good.as_ref());
    assert_eq!(back, before);
}

// case: masquerade CF15
#[test]
fn ipv6_entry_counts_with_ipv6_alone() {
    let content = Found::Content("nonMasqueradeCIDRs: [10.1.0.0/16, 'fd00:1::/48']\n".to_owned());
    let off = decide_with(&content, None, false);
    assert_eq!((off.exclusions.ipv4.len(), off.exclusions.ipv6.len()), (1, 0));
    assert_eq!((off.source, off.warnings), (ListSource::File, vec![Warning::Ipv6Inert { entries: 1 }]));
    let on = decide_with(&content, None, true);
    assert_eq!(on.exclusions.ipv4, v4(&["10.1.0.0/16"]));
    assert_eq!(on.exclusions.ipv6, BTreeSet::from(["fd00:1::/48".parse().unwrap()]));
    assert_eq!(on.warnings, []);
}

// case: masquerade CF17
#[test]
fn list_that_does_not_fit_is_refused_as_a_whole() {
    let list = |count: u32| {
        let entry = |number: u32| format!("- {}/24\n", Ipv4Addr::from(0x0b00_0000 + (number << 8)));
        format!("nonMasqueradeCIDRs:\n{}", (0..count).map(entry).collect::<String>())
    };
    let before = file(YAML).0;
    let fits = found(&list(16_384), Some(&before));
    assert_eq!((fits.source, fits.exclusions.ipv4.len()), (ListSource::File, 16_384));
    let outcome = found(&list(16_385), Some(&before));
    assert_eq!(outcome.error, Some(FileError::TooMany { entries: 16_385 }));
    assert_eq!((outcome.source, outcome.exclusions.ipv4.len()), (ListSource::LastGood, 2));
}

#[test]
fn more_entries_than_the_files_own_limit_are_reported() {
    let list = |count: u8| (0..count).map(|number| format!("  - 10.{number}.0.0/16\n")).collect::<String>();
    let (read, warnings) = file(&format!("cidrLimit: 64\nnonMasqueradeCIDRs:\n{}", list(65)));
    assert_eq!(read.cidrs.unwrap().len(), 65);
    assert_eq!(warnings, [Warning::OverLimit { limit: 64, entries: 65 }]);
    assert_eq!(file(&format!("nonMasqueradeCIDRs:\n{}", list(65))).1, [], "without a limit of its own there is none");
}

// case: masquerade CF18
#[test]
fn misspelt_key_is_reported_with_the_right_one() {
    let outcome = found("nonMasqueradeCIDR: [10.1.0.0/16]\n", None);
    assert_eq!(outcome.exclusions.ipv4, built_in());
    let words = outcome.warnings.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n");
    assert!(words.contains("nonMasqueradeCIDR: did you mean nonMasqueradeCIDRs?"), "{words}");
}

// case: masquerade CF19
#[test]
fn several_files_are_united() {
    let one = file("nonMasqueradeCIDRs: [10.9.0.0/16, 10.8.0.0/16]\nmasqLinkLocalIPv6: true\nresyncInterval: 90s\n").0;
    let two = file("nonMasqueradeCIDRs: [10.8.0.0/16, 11.0.0.0/8]\nmasqLinkLocal: true\n").0;
    let merged = merge(&[one.clone(), two.clone()]);
    assert_eq!(merged.cidrs, Some(nets(&["10.8.0.0/16", "10.9.0.0/16", "11.0.0.0/8"])));
    assert!(merged.masq_link_local && merged.masq_link_local_ipv6);
    assert_eq!(merge(&[two, one]), merged, "the order of the files does not matter");
    assert_eq!(merge(&[file("masqLinkLocal: true\n").0]).cidrs, None, "no list in any file: the built-in one");
    assert_eq!(merge(&[]), ConfigFile::default());
}

// case: masquerade CF21
#[test]
fn everything_exempt_is_reported() {
    let outcome = found("nonMasqueradeCIDRs: [0.0.0.0/0]\n", None);
    assert_eq!(outcome.exclusions.ipv4, v4(&["0.0.0.0/0"]));
    let words = outcome.warnings.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n");
    assert!(words.contains("no traffic of this family is masqueraded"), "{words}");
    let removed = found("nonMasqueradeCIDRs: [10.0.0.0/8]\n", outcome.last_good.as_ref());
    assert_eq!((removed.exclusions.ipv4, removed.warnings), (v4(&["10.0.0.0/8"]), vec![]));
}

// case: masquerade CF22
#[test]
fn interval_is_never_shorter_than_a_second() {
    for text in ["0s", "-3s", "300ms", "0", "-3"] {
        let (read, warnings) = file(&format!("nonMasqueradeCIDRs: [10.0.0.0/8]\nresyncInterval: {text}\n"));
        assert_eq!(read.resync_interval, Duration::from_secs(1), "{text}");
        assert!(warnings.contains(&Warning::IntervalTooShort { text: text.to_owned() }), "{warnings:?}");
    }
    let (read, warnings) = file("nonMasqueradeCIDRs: [10.0.0.0/8]\nresyncInterval: 60\n");
    assert_eq!(read.resync_interval, Duration::from_secs(60));
    assert!(matches!(warnings.as_slice(), [Warning::Retyped { .. }]), "a number is reported: {warnings:?}");
    assert_eq!(file("resyncInterval: 1h2m3s\n").0.resync_interval, Duration::from_secs(3723));
}

#[test]
fn last_good_file_survives_the_disk() {
    let good = found(YAML, None).last_good.unwrap();
    let text = serde_json::to_string(&good).unwrap();
    assert_eq!(serde_json::from_str::<ConfigFile>(&text).unwrap(), good);
}

#[test]
fn link_local_in_the_list_stays_when_the_switch_is_on() {
    let outcome = found("nonMasqueradeCIDRs: [169.254.0.0/16]\nmasqLinkLocal: true\n", None);
    assert_eq!(outcome.exclusions.ipv4, v4(&["169.254.0.0/16"]));
    assert!(!outcome.exclusions.link_local_ipv4);
    let both = found("nonMasqueradeCIDRs: [169.254.0.0/16]\n", None);
    assert!(both.exclusions.link_local_ipv4 && both.exclusions.ipv4.len() == 1);
}

proptest::proptest! {
    /// The result always excludes something, and an invalid file never changes what is in force.
    #[test]
    fn any_text_is_taken_or_changes_nothing(text in "(nonMasqueradeCIDRs|masqLinkLocal|[a-z-]{0,6}):? ?[\\[\\]{}0-9a-f./:, \n\"'&*!|>-]{0,40}") {
        let good = file(YAML).0;
        let before = exclusions(&good, DefaultExclusions::Reserved, false).0;
        let outcome = found(&text, Some(&good));
        if outcome.error.is_some() {
            proptest::prop_assert_eq!(outcome.exclusions, before);
            proptest::prop_assert_eq!(outcome.last_good, Some(good));
        }
    }
}
