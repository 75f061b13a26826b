//! Test counts, parsed from the output of `cargo test`.

use std::collections::BTreeMap;
use std::fmt;

/// The result of the stages so far.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Totals {
    passed: usize,
    failed: usize,
    skipped: usize,
    /// Lines with the names of what failed or was skipped.
    named: Vec<String>,
    /// Duration in seconds of each test of the stage.
    times: BTreeMap<String, f64>,
}

impl Totals {
    /// Parses one line of `cargo test`'s output.
    pub(super) fn read(&mut self, stage: &str, line: &str) {
        if let Some(summary) = line.strip_prefix("test result: ") {
            self.passed += count(summary, "passed");
            self.failed += count(summary, "failed");
            self.skipped += count(summary, "ignored");
        } else if let Some((name, seconds)) = line.strip_prefix("time: ").and_then(|rest| rest.rsplit_once(' ')) {
            if let Ok(seconds) = seconds.parse() {
                self.times.insert(name.to_owned(), seconds);
            }
        } else if let Some((name, outcome)) = outcome(line) {
            let (outcome, seconds) = reported_time(outcome);
            if let Some(seconds) = seconds {
                self.times.insert(name.to_owned(), seconds);
            }
            match outcome.split(',').next() {
                Some("FAILED") => self.named.push(format!("FAILED   {stage}: {name}")),
                Some("ignored") => self.named.push(format!("skipped  {stage}: {name} ({outcome})")),
                _ => {}
            }
        }
    }

    /// The durations of the tests since the last call.
    pub(super) fn take_times(&mut self) -> BTreeMap<String, f64> {
        std::mem::take(&mut self.times)
    }

    /// Counts a failure without a failed test.
    pub(super) fn fail(&mut self, stage: &str, what: &str) {
        self.failed += 1;
        let first_line = what.lines().next().unwrap_or_default();
        self.named.push(format!("FAILED   {stage}: {first_line}"));
    }

    /// Counts a test that cannot be run.
    pub(super) fn skip(&mut self, stage: &str, test: &str, reason: &str) {
        self.skipped += 1;
        self.named.push(format!("skipped  {stage}: {test} (needs {reason})"));
    }

    /// The number of failures.
    pub(super) fn failures(&self) -> usize {
        self.failed
    }

    /// Whether nothing failed and something ran.
    pub(super) fn is_good(&self) -> bool {
        self.failed == 0
    }
}

impl fmt::Display for Totals {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        for line in &self.named {
            writeln!(out, "{line}")?;
        }
        writeln!(out, "{} passed, {} failed, {} skipped", self.passed, self.failed, self.skipped)
    }
}

/// The number before `word` in `ok. 3 passed; 0 failed; 1 ignored; 0 measured; 2 filtered out`.
fn count(summary: &str, word: &str) -> usize {
    let mut words = summary.split([' ', ';']).filter(|word| !word.is_empty());
    let mut before = words.next().unwrap_or_default();
    for next in words {
        if next == word {
            return before.parse().unwrap_or(0);
        }
        before = next;
    }
    0
}

/// Name and outcome in `test name ... outcome`. Output of the test may stand between the two.
fn outcome(line: &str) -> Option<(&str, &str)> {
    let (name, outcome) = line.strip_prefix("test ")?.split_once(" ... ")?;
    // Some harnesses align the outcomes.
    Some((name.trim_end(), outcome))
}

/// The duration after an outcome: `ok <0.012s>`, as the standard harness prints it with `--report-time`.
fn reported_time(outcome: &str) -> (&str, Option<f64>) {
    let split = || {
        let (outcome, time) = outcome.strip_suffix("s>")?.rsplit_once(" <")?;
        Some((outcome, time.parse().ok()?))
    };
    split().map_or((outcome, None), |(outcome, seconds)| (outcome, Some(seconds)))
}

/// The names printed by `--list`.
#[derive(Debug, Default)]
pub(super) struct Listing {
    tests: Vec<String>,
}

impl Listing {
    /// Parses one line.
    pub(super) fn read(&mut self, line: &str) {
        if let Some(name) = line.strip_suffix(": test") {
            self.tests.push(name.to_owned());
        }
    }

    /// The tests, in the order listed.
    pub(super) fn tests(&self) -> &[String] {
        &self.tests
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_of_several_runs_add_up() {
        let mut totals = Totals::default();
        for line in [
            "running 4 tests",
            "test ip::carves ... ok",
            "test ip::overlaps    ... FAILED",
            "test ip::slow ... ignored, takes an hour",
            "test src/lib.rs - f (line 3) ... ok",
            "test result: FAILED. 2 passed; 1 failed; 1 ignored; 0 measured; 7 filtered out; finished in 0.01s",
            "test result: ok. 40 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.01s",
        ] {
            totals.read("unit", line);
        }
        let printed = totals.to_string();
        assert_eq!(
            printed.lines().collect::<Vec<_>>(),
            [
                "FAILED   unit: ip::overlaps",
                "skipped  unit: ip::slow (ignored, takes an hour)",
                "42 passed, 1 failed, 1 skipped",
            ]
        );
        assert!(!totals.is_good());
    }

    #[test]
    fn times_of_both_harnesses_are_read() {
        let mut totals = Totals::default();
        for line in [
            "test ip::carves ... ok <0.012s>",
            "test ip::overlaps ... FAILED <1.500s>",
            "time: ipam/fresh-node.txtar 2.250",
            "time: out of joint",
        ] {
            totals.read("unit", line);
        }
        let times = totals.take_times();
        let expected = [("ip::carves", 0.012), ("ip::overlaps", 1.5), ("ipam/fresh-node.txtar", 2.25)];
        assert_eq!(times, expected.map(|(name, seconds)| (name.to_owned(), seconds)).into());
        assert_eq!(totals.to_string(), "FAILED   unit: ip::overlaps\n0 passed, 0 failed, 0 skipped\n");
        assert!(totals.take_times().is_empty());
    }

    #[test]
    fn a_stage_that_fails_without_a_test_counts_as_one_failure() {
        let mut totals = Totals::default();
        totals.fail("build", "could not compile\nmore text");
        assert_eq!(totals.to_string(), "FAILED   build: could not compile\n0 passed, 1 failed, 0 skipped\n");
        assert!(!totals.is_good());
    }

    #[test]
    fn tests_that_cannot_run_are_named() {
        let mut listing = Listing::default();
        for line in ["add_and_del: test", "check: test", "bench_add: benchmark", "", "2 tests, 1 benchmark"] {
            listing.read(line);
        }
        let mut totals = Totals::default();
        for test in listing.tests() {
            totals.skip("netns", test, "root, CAP_BPF");
        }
        assert_eq!(
            totals.to_string(),
            "skipped  netns: add_and_del (needs root, CAP_BPF)\nskipped  netns: check (needs root, CAP_BPF)\n\
             0 passed, 0 failed, 2 skipped\n"
        );
        assert!(totals.is_good());
    }

    #[test]
    fn output_of_a_test_is_not_parsed_as_counts() {
        let mut totals = Totals::default();
        totals.read("unit", "the summary said: test result: ok. 3 passed; 0 failed");
        totals.read("unit", "test of strength passed");
        assert_eq!(totals, Totals::default());
    }
}
