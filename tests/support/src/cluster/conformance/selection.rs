//! Selection of the suite's specs. Pure.

use anyhow::{Context, Result, ensure};
use regex::Regex;
use serde::Deserialize;
use std::collections::BTreeSet;

/// Prefix of the names of Kubernetes' network specs.
pub(super) const NETWORK: &str = "[sig-network] ";

/// A pattern of excluded specs.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct LeftOut {
    /// A regular expression, matched anywhere in a spec's name.
    pattern: String,
    /// Why they are excluded.
    reason: String,
    /// The only Kubernetes version whose suite has them, such as `1.34`; absent for all versions.
    release: Option<String>,
}

/// A reason and the number of specs excluded by it.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Reason {
    pub(super) text: String,
    pub(super) specs: usize,
}

/// The selection.
#[derive(Debug)]
pub(super) struct Selection {
    /// Names of the specs to run.
    pub(super) chosen: BTreeSet<String>,
    /// Reasons for exclusion, in the list's order.
    pub(super) left_out: Vec<Reason>,
}

impl Selection {
    /// Selects the specs that no pattern of `list` (YAML) for this version matches. Each pattern must exclude a spec
    /// that no earlier one does, so that the list has no stale patterns.
    pub(super) fn new(specs: BTreeSet<String>, list: &str, release: &str) -> Result<Self> {
        let list: Vec<LeftOut> = serde_saphyr::from_str(list)?;
        let mut chosen = specs;
        let mut left_out = Vec::new();
        for LeftOut { pattern, reason, release: only } in list {
            ensure!(!reason.trim().is_empty(), "pattern {pattern:?}: the reason is missing");
            if only.is_some_and(|only| only != release) {
                continue;
            }
            let expression = Regex::new(&pattern).with_context(|| format!("pattern {pattern:?}"))?;
            let before = chosen.len();
            chosen.retain(|name| !expression.is_match(name));
            let specs = before - chosen.len();
            ensure!(specs > 0, "pattern {pattern:?} leaves out no spec of the suite, or those before it do: remove it");
            left_out.push(Reason { text: reason, specs });
        }
        Ok(Self { chosen, left_out })
    }

    /// Keeps only the selected specs that match.
    pub(super) fn focus(&mut self, focus: &Regex) -> Result<()> {
        self.chosen.retain(|name| focus.is_match(name));
        ensure!(!self.chosen.is_empty(), "no spec that is run matches {:?}", focus.as_str());
        Ok(())
    }

    /// The number of excluded specs.
    pub(super) fn left_out(&self) -> usize {
        self.left_out.iter().map(|reason| reason.specs).sum()
    }

    /// A regular expression that matches exactly the selected specs. All names have the same prefix, so none is a
    /// suffix of another.
    pub(super) fn expression(&self) -> String {
        let names: Vec<String> = self.chosen.iter().map(|name| regex::escape(name)).collect();
        format!("(?:{})$", names.join("|"))
    }
}

/// The network specs in the output of `e2e.test --list-tests`: lines of a source position and a name.
pub(super) fn specs(list: &str) -> BTreeSet<String> {
    let names = list.lines().filter_map(|line| line.split_once(": ").map(|(_, name)| name));
    names.filter(|name| name.starts_with(NETWORK)).map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::binaries::Binaries;

    const LIST: &str = "The following spec names can be used with 'ginkgo run --focus/skip':\n    \
        ../dns.go:54: [sig-network] DNS should provide DNS: for the cluster [Conformance]\n    \
        ../service.go:7: [sig-network] Services should be there (always) [Slow]\n    \
        ../service.go:9: [sig-network] Services should move [Disruptive]\n    \
        ../pods.go:7: [sig-node] Pods should be there\n\n";

    fn names(selection: &Selection) -> Vec<&str> {
        selection.chosen.iter().map(|name| name.trim_start_matches(NETWORK)).collect()
    }

    #[test]
    fn the_network_groups_specs_are_found_in_the_list() {
        let specs = specs(LIST);
        assert_eq!(specs.len(), 3);
        assert!(specs.contains("[sig-network] DNS should provide DNS: for the cluster [Conformance]"), "{specs:?}");
    }

    #[test]
    fn what_a_pattern_matches_is_left_out_and_counted_once() {
        let list = "- {pattern: '\\[Disruptive\\]', reason: stops nodes}\n- {pattern: Services, reason: no Services}\n";
        let selection = Selection::new(specs(LIST), list, "1.36").unwrap();
        assert_eq!(names(&selection), ["DNS should provide DNS: for the cluster [Conformance]"]);
        let reason = |text: &str, specs| Reason { text: text.to_owned(), specs };
        assert_eq!(selection.left_out, [reason("stops nodes", 1), reason("no Services", 1)]);
        assert_eq!(selection.left_out(), 2);
    }

    #[test]
    fn a_pattern_that_leaves_out_nothing_is_refused() {
        let refused = |list: &str| format!("{:#}", Selection::new(specs(LIST), list, "1.36").unwrap_err());
        let stale = refused("- {pattern: Ingress, reason: not claimed}");
        assert!(stale.contains("\"Ingress\"") && stale.contains("remove it"), "{stale}");
        let covered = refused("- {pattern: Services, reason: a}\n- {pattern: Disruptive, reason: b}");
        assert!(covered.contains("\"Disruptive\""), "{covered}");
        assert!(refused("- {pattern: Services, reason: ' '}").contains("reason"));
        assert!(refused("- {pattern: '(', reason: a}").contains("\"(\""));
        refused("- {pattern: Services}");
    }

    #[test]
    fn a_pattern_for_another_version_is_ignored() {
        let list = "- {pattern: Services, reason: not ready, release: '1.34'}";
        assert_eq!(Selection::new(specs(LIST), list, "1.36").unwrap().left_out(), 0);
        assert_eq!(Selection::new(specs(LIST), list, "1.34").unwrap().left_out(), 2);
    }

    #[test]
    fn the_expression_matches_the_chosen_ones_and_no_others() {
        let mut selection = Selection::new(specs(LIST), "[]", "1.36").unwrap();
        selection.focus(&Regex::new("DNS|always").unwrap()).unwrap();
        let expression = Regex::new(&selection.expression()).unwrap();
        let matched =
            specs(LIST).into_iter().filter(|name| expression.is_match(&format!("Kubernetes e2e suite {name}")));
        assert_eq!(matched.collect::<BTreeSet<_>>(), selection.chosen);
        assert_eq!(selection.chosen.len(), 2);
        let nothing = selection.focus(&Regex::new("Ingress").unwrap()).unwrap_err().to_string();
        assert!(nothing.contains("Ingress"), "{nothing}");
    }

    #[test]
    fn the_list_in_the_tree_can_be_read() {
        let list: Vec<LeftOut> = serde_saphyr::from_str(include_str!("../../../../conformance/left-out.yaml")).unwrap();
        assert!(!list.is_empty());
        for LeftOut { pattern, reason, release } in list {
            assert!(Regex::new(&pattern).is_ok() && !reason.trim().is_empty(), "{pattern}");
            assert!(release.is_none_or(|release| Binaries::new(&release).is_ok()), "{pattern}");
            // These must be selected.
            for name in
                ["Networking Granular Checks: Pods should function for intra-pod communication: http", "NoSNAT Should"]
            {
                assert!(!Regex::new(&pattern).unwrap().is_match(&format!("{NETWORK}{name}")), "{pattern}");
            }
        }
    }
}
