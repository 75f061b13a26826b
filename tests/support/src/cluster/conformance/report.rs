//! Parsing of ginkgo's output: lines during a run, a JSON report at the end. Pure.

use super::selection::NETWORK;
use anyhow::{Context, Result};
use regex::Regex;
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// The parts of ginkgo's report that are read.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Report {
    special_suite_failure_reasons: Option<Vec<String>>,
    spec_reports: Option<Vec<Spec>>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Spec {
    container_hierarchy_texts: Option<Vec<String>>,
    leaf_node_type: String,
    leaf_node_text: String,
    state: String,
    /// In nanoseconds.
    run_time: u64,
    failure: Option<Failure>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Failure {
    message: String,
}

impl Spec {
    fn name(&self) -> String {
        let texts = self.container_hierarchy_texts.iter().flatten().chain([&self.leaf_node_text]);
        texts.filter(|text| !text.is_empty()).map(String::as_str).collect::<Vec<_>>().join(" ")
    }

    /// The subject of its outermost container.
    fn group(&self) -> String {
        let outermost = self.container_hierarchy_texts.iter().flatten().next();
        outermost.map_or("", String::as_str).trim_start_matches(NETWORK).to_owned()
    }

    /// The first line of the failure, or the reason for skipping.
    fn message(&self) -> &str {
        self.failure.as_ref().and_then(|failure| failure.message.lines().next()).unwrap_or_default()
    }
}

/// How many specs there are and how many of them passed.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(super) struct Count {
    pub(super) specs: usize,
    pub(super) passed: usize,
}

/// Results of the selected specs.
#[derive(Debug, Default)]
pub(super) struct Outcome {
    pub(super) groups: BTreeMap<String, Count>,
    pub(super) passed: usize,
    /// Specs that did not pass, and why.
    pub(super) failed: Vec<(String, String)>,
    /// The slowest specs first.
    pub(super) times: Vec<(Duration, String)>,
}

impl Outcome {
    /// Evaluates a report. All selected specs must have passed: one that skips itself belongs in the list of excluded
    /// specs, with the reason.
    pub(super) fn new(report: &str, chosen: &BTreeSet<String>) -> Result<Self> {
        let suites: Vec<Report> = serde_json::from_str(report).context("ginkgo's report")?;
        let mut outcome = Self::default();
        let mut missing = chosen.clone();
        for suite in suites {
            let reasons = suite.special_suite_failure_reasons.unwrap_or_default();
            outcome.failed.extend(reasons.into_iter().map(|reason| ("the suite".to_owned(), reason)));
            for spec in suite.spec_reports.unwrap_or_default() {
                if spec.leaf_node_type != "It" {
                    if spec.state != "passed" && spec.state != "skipped" {
                        outcome
                            .failed
                            .push((format!("the suite's {}", spec.leaf_node_type), spec.message().to_owned()));
                    }
                    continue;
                }
                let name = spec.name();
                if missing.remove(&name) {
                    outcome.count(&spec, name);
                }
            }
        }
        outcome.failed.extend(missing.into_iter().map(|name| (name, "it was not run".to_owned())));
        outcome.times.sort_by(|one, other| other.cmp(one));
        Ok(outcome)
    }

    fn count(&mut self, spec: &Spec, name: String) {
        let count = self.groups.entry(spec.group()).or_default();
        count.specs += 1;
        self.times.push((Duration::from_nanos(spec.run_time), name.clone()));
        let message = spec.message();
        match spec.state.as_str() {
            "passed" => {
                count.passed += 1;
                self.passed += 1;
            }
            "skipped" => self.failed.push((name, format!("skipped itself: {message}; expected: a reason in the list"))),
            state => self.failed.push((name, format!("{state}: {message}"))),
        }
    }
}

/// Reports each completed spec from ginkgo's output.
#[derive(Debug)]
pub(super) struct Progress {
    header: Regex,
    all: usize,
    done: usize,
    /// Outcome and seconds of the spec whose name is on the next line.
    ended: Option<(String, String)>,
}

impl Progress {
    /// For a run of this many specs.
    pub(super) fn new(all: usize) -> Result<Self> {
        // `• [1.234 seconds]`, `• [FAILED] [1.234 seconds]`, `S [SKIPPED] [0.123 seconds]`
        let header = Regex::new(r"^[•S] (?:\[([A-Z]+)!?\] )?\[(\d+\.\d)\d* seconds\]$")?;
        Ok(Self { header, all, done: 0, ended: None })
    }

    /// Parses a line of output, and returns what to print.
    pub(super) fn read(&mut self, line: &str) -> Option<String> {
        if let Some((outcome, seconds)) = self.ended.take() {
            self.done += 1;
            // ginkgo marks the part that failed, and adds labels behind the name.
            let name = line.trim_start_matches(NETWORK).replace("[It] ", "");
            let name = name.split_once(" [sig-network").map_or(name.as_str(), |(name, _)| name);
            return Some(format!("{:>3}/{} {outcome:<7} {seconds:>6} s  {name}", self.done, self.all));
        }
        let captures = self.header.captures(line.trim_end())?;
        let outcome = captures.get(1).map_or_else(|| "passed".to_owned(), |word| word.as_str().to_lowercase());
        self.ended = Some((outcome, captures.get(2)?.as_str().to_owned()));
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn spec(group: &str, text: &str, state: &str, message: &str) -> serde_json::Value {
        let failure = (!message.is_empty()).then(|| json!({"Message": message}));
        json!({
            "ContainerHierarchyTexts": [format!("{NETWORK}{group}"), ""], "LeafNodeType": "It", "LeafNodeText": text,
            "State": state, "RunTime": 1_500_000_000_u64, "Failure": failure,
        })
    }

    fn judged(specs: &[serde_json::Value], chosen: &[&str]) -> Outcome {
        let report = json!([{"SpecialSuiteFailureReasons": null, "SpecReports": specs, "Unknown": 1}]);
        let chosen = chosen.iter().map(|name| format!("{NETWORK}{name}")).collect();
        Outcome::new(&report.to_string(), &chosen).unwrap()
    }

    #[test]
    fn chosen_specs_are_counted_by_group_and_others_are_not() {
        let specs = [
            spec("DNS", "should work", "passed", ""),
            spec("Services", "should be there", "passed", ""),
            spec("Services", "should move", "failed", "it stood\nstill"),
            spec("Ingress", "should be there", "skipped", ""),
        ];
        let outcome = judged(&specs, &["DNS should work", "Services should be there", "Services should move"]);
        assert_eq!(outcome.passed, 2);
        assert_eq!(outcome.failed, [(format!("{NETWORK}Services should move"), "failed: it stood".to_owned())]);
        let groups: Vec<_> = outcome.groups.into_iter().collect();
        let count = |specs, passed| Count { specs, passed };
        assert_eq!(groups, [("DNS".to_owned(), count(1, 1)), ("Services".to_owned(), count(2, 1))]);
        assert_eq!(outcome.times.len(), 3);
    }

    #[test]
    fn specs_that_are_not_run_or_skip_themselves_have_not_passed() {
        let specs = [spec("Topology", "should spread", "skipped", "needs zones")];
        let outcome = judged(&specs, &["Topology should spread", "DNS should work"]);
        assert_eq!(outcome.passed, 0);
        let why: Vec<&str> = outcome.failed.iter().map(|(_, why)| why.as_str()).collect();
        assert!(why[0].contains("skipped itself: needs zones") && why[1] == "it was not run", "{why:?}");
    }

    #[test]
    fn a_failure_of_the_suite_is_reported() {
        let before = json!({
            "ContainerHierarchyTexts": null, "LeafNodeType": "SynchronizedBeforeSuite", "LeafNodeText": "",
            "State": "failed", "RunTime": 1, "Failure": {"Message": "no node is Ready"},
        });
        let report = json!([{"SpecialSuiteFailureReasons": ["Interrupted"], "SpecReports": [before]}]);
        let outcome = Outcome::new(&report.to_string(), &BTreeSet::new()).unwrap();
        assert_eq!(outcome.failed.len(), 2, "{:?}", outcome.failed);
        assert!(outcome.failed.iter().any(|(_, why)| why == "no node is Ready"));
        assert!(Outcome::new("", &BTreeSet::new()).is_err());
    }

    #[test]
    fn each_spec_gets_a_line_when_it_ends() {
        let printed = "[SynchronizedBeforeSuite] PASSED [2.100 seconds]\n\
            [SynchronizedBeforeSuite] \n\
            ------------------------------\n\
            • [12.345 seconds]\n\
            [sig-network] DNS should work [Conformance] [sig-network, Conformance]\n\
            dns.go:54\n\
            • [FAILED] [3.000 seconds]\n\
            [sig-network] Services [It] should move [sig-network]\n\
            S [SKIPPED] [0.012 seconds]\n\
            [sig-network] Topology [BeforeEach] should spread\n\
            • [SLOW TEST] text\n";
        let mut progress = Progress::new(3).unwrap();
        let lines: Vec<String> = printed.lines().filter_map(|line| progress.read(line)).collect();
        assert_eq!(
            lines,
            [
                "  1/3 passed    12.3 s  DNS should work [Conformance]",
                "  2/3 failed     3.0 s  Services should move",
                "  3/3 skipped    0.0 s  Topology [BeforeEach] should spread",
            ]
        );
    }
}
